"""Rows of tensors in the host's memory, gathered by few threads that do not wait for each other.

torch's own spin until the last of them is done, on all cores: one that a core is taken from holds up the others.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from hotlap.core.units import MIB
from hotlap.data.samples import Room, taken

MOST_BY_ONE = 4 * MIB
"""Bytes up to which this thread gathers alone: on an H200's host 16 of torch's took 18 µs for 300 KB in the middle, but
129 on average, where numpy took 13."""
HANDS = 4
"""Threads that share what is more; 0 leaves all to torch. In a training on an H200 torch's 16 took 2.2 ms for 9 MB in
the middle, 2.8 on average and 189 at worst, these 2.0, 1.7 and 3.6 (`python -m benchmarks.gathering`)."""
GRAIN = 32768
"""Numbers up to which torch gathers in one thread itself (`at::internal::GRAIN_SIZE`)."""
_NUMPYS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
"""Kinds of number that numpy has too."""


class HostRows:
    """Gathers rows of one tensor; what comes is the same either way, to the bit and in how it lies."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._shape, self._dtype = tensor, tuple(tensor.shape[1:]), tensor.dtype
        self._by_numpy = _rows_by_numpy(tensor)

    def at(self, indices: Tensor, room: Room | None) -> Tensor:
        """The rows at `indices`, in new memory or in what `room` gives."""
        count = indices.numel()
        if count not in self._by_numpy or not _are_within(indices, len(self._tensor)):
            return taken(self._tensor, indices, room)
        shape = (count, *self._shape)
        there = torch.empty(shape, dtype=self._dtype, device="cpu") if room is None else room(shape, self._dtype)
        # "clip" spares numpy a copy in between. Asked for anew: a script may have its tensor lie elsewhere by now.
        source, places, target = self._tensor.numpy(), indices.numpy(), there.numpy()

        def take(start: int, end: int) -> None:
            source.take(places[start:end], 0, target[start:end], "clip")

        _shared(take, count, target.nbytes)
        return there


def _shared(work: Callable[[int, int], None], count: int, size: int) -> None:
    """Have so many rows of so many bytes in all gathered, by this thread and others where that pays."""
    hands = min(HANDS, torch.get_num_threads(), count) if size > MOST_BY_ONE else 1
    parts = deque(pairwise(count * number // hands for number in range(hands + 1)))

    def share() -> None:
        while parts:
            try:
                part = parts.popleft()
            except IndexError:  # another was faster
                return
            work(*part)

    others: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # no thread is to be had, at the end of the process for one: this one does it all
            others.extend(_hands(os.getpid()).submit(share) for _ in range(hands - 1))
        share()
    finally:
        parts.clear()
        wait(others)  # whatever broke: nobody writes there any more
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _hands(process: int) -> ThreadPoolExecutor:
    """Threads of this process: one that was forked off has none of those of its parent."""
    return ThreadPoolExecutor(HANDS, thread_name_prefix="hotlap-gather")


def _are_within(indices: Tensor, length: int) -> bool:
    """Whether these are plain places in so many rows; where not, torch has its own to say of them."""
    if indices.dtype is not torch.int64 or indices.ndim != 1 or indices.device.type != "cpu":
        return False
    # What is below zero is beyond all as a number without a sign.
    return bool(indices.numpy().view(np.uint64).max() < length)


def _rows_by_numpy(tensor: Tensor) -> range:
    """How many rows are gathered by numpy; none of a tensor that it does not read as it lies."""
    is_plain = (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in _NUMPYS
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and tensor.numel() > 0
    )
    if not is_plain or not HANDS:
        return range(0)
    return range(GRAIN // tensor[:1].numel() + 1, sys.maxsize)
