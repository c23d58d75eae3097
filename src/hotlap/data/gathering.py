"""Rows of tensors in the host's memory, gathered as fast as one thread can where others would not pay."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotlap.core.units import MIB
from hotlap.data.samples import Room, taken

MOST_BY_NUMPY = 4 * MIB
"""Bytes up to which numpy gathers, in this thread; 0 leaves all to torch. torch's threads are slow to wake where other
processes have the cores: on an H200's host 16 of them took 18 µs for 300 KB in the middle, but 129 on average, where
numpy took 13."""
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
        self._tensor.numpy().take(indices.numpy(), 0, there.numpy(), "clip")
        return there


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
    if not is_plain:
        return range(0)
    numbers = tensor[:1].numel()
    return range(GRAIN // numbers + 1, MOST_BY_NUMPY // (numbers * tensor.element_size()) + 1)
