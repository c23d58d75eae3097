"""In which order samples are seen. It depends on seed and epoch alone, never on the plan."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError


def mix(*numbers: int) -> int:
    """A well-spread 63-bit seed out of several numbers (the finaliser of SplitMix64, folded)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class HostRandomness:
    """The states of Python's, numpy's and torch's generators on the host."""

    __slots__ = ("numpy", "python", "torch")

    def __init__(self) -> None:
        self.python = random.getstate()
        self.numpy = np.random.get_state(legacy=False)
        self.torch = torch.default_generator.get_state()

    def restore(self) -> None:
        """Set the generators back to these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.default_generator.set_state(self.torch)

    def same_as(self, other: HostRandomness) -> bool:
        """Whether no generator has moved from one to the other."""
        mine, theirs = self.numpy["state"], other.numpy["state"]
        return (
            torch.equal(self.torch, other.torch)
            and self.python == other.python
            and mine["pos"] == theirs["pos"]
            and self.numpy["has_gauss"] == other.numpy["has_gauss"]
            and np.array_equal(mine["key"], theirs["key"])
        )


def seed_host(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators on the host."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """Seed the host's generators inside, and leave them as they were."""
    before = HostRandomness()
    seed_host(seed)
    try:
        yield
    finally:
        before.restore()


def even_cuts(total: int, largest: int) -> list[int]:
    """Where to cut `total` samples into as few pieces of at most `largest` as it takes, evenly.

    Evenly, since a piece of one sample left over has no variance for a batch norm to compute.
    """
    pieces = -(-total // largest)
    return [total * k // pieces for k in range(pieces + 1)]


class Epoch:
    """The samples of one epoch in their order, cut into batches; `accumulate` batches make a window."""

    def __init__(self, indices: Tensor, batch_ends: Sequence[int], accumulate: int) -> None:
        self._indices = indices
        self._ends = batch_ends
        self._accumulate = accumulate

    def __len__(self) -> int:
        """Windows, that is updates, in the epoch."""
        return -(-len(self._ends) // self._accumulate)

    def pieces(self, window: int, micro_batch: int | None) -> list[Tensor]:
        """The indices of a window, cut into micro-batches; None cuts as the user's batches are."""
        first = window * self._accumulate
        last = min(first + self._accumulate, len(self._ends))
        start = self._ends[first - 1] if first else 0
        if micro_batch is None:
            bounds = [start, *self._ends[first:last]]
        else:
            bounds = [start + cut for cut in even_cuts(self._ends[last - 1] - start, micro_batch)]
        return [self._indices[a:b] for a, b in pairwise(bounds)]


class Order:
    """The order of an epoch from seed and epoch number."""

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        shuffled: bool,
        seed: int = 0,
        accumulate: int = 1,
        drop_last: bool = False,
    ) -> None:
        self._length = length
        self._batch_size = batch_size
        self._shuffled = shuffled
        self._seed = seed
        self._accumulate = accumulate
        self._drop_last = drop_last

    def epoch(self, epoch: int) -> Epoch:
        """The order of one epoch."""
        indices = self._indices(epoch)
        length = len(indices)
        if self._drop_last:
            length -= length % self._batch_size
        if not length:
            raise DataError(
                f"an epoch has no batch: {len(indices)} samples, batch size {self._batch_size}, "
                "and the last, shorter batch is left out; use a smaller batch or keep the last one"
            )
        ends = [*range(self._batch_size, length, self._batch_size), length]
        return Epoch(indices, ends, self._accumulate)

    def _indices(self, epoch: int) -> Tensor:
        if not self._shuffled:
            return torch.arange(self._length)
        generator = torch.Generator().manual_seed(mix(self._seed, epoch))
        return torch.randperm(self._length, generator=generator)


class SampledOrder(Order):
    """The order that the user's own sampler gives, seeded anew for every epoch."""

    def __init__(self, sampler: Iterable[int], length: int, **settings: Any) -> None:
        super().__init__(length, shuffled=False, **settings)
        self._sampler = sampler

    def _indices(self, epoch: int) -> Tensor:
        return torch.tensor([int(i) for i in _drawn(self._sampler, self._seed, epoch)], dtype=torch.int64)


class BatchedOrder(Order):
    """The batches that the user's own batch sampler gives, seeded anew for every epoch."""

    def __init__(self, batch_sampler: Iterable[Sequence[int]], length: int, *, seed: int, accumulate: int) -> None:
        super().__init__(length, batch_size=1, shuffled=False, seed=seed, accumulate=accumulate)
        self._batch_sampler = batch_sampler

    def epoch(self, epoch: int) -> Epoch:
        """The order of one epoch."""
        batches = [[int(i) for i in batch] for batch in _drawn(self._batch_sampler, self._seed, epoch)]
        if not any(batches):
            raise DataError("the batch sampler gave no batch")
        ends: list[int] = []
        for batch in batches:
            if batch:
                ends.append((ends[-1] if ends else 0) + len(batch))
        flat = torch.tensor([i for batch in batches for i in batch], dtype=torch.int64)
        return Epoch(flat, ends, self._accumulate)


def _drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """All that a sampler gives for an epoch, whatever generator it draws from."""
    inner: Any = sampler
    while inner is not None:
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)
        if isinstance(getattr(inner, "generator", None), torch.Generator):
            inner.generator.manual_seed(mix(seed, epoch))
        inner = getattr(inner, "sampler", None)
    with host_seeded(mix(seed, epoch)):
        drawn = list(sampler)
    if not drawn:
        raise DataError("the sampler gave no sample")
    return drawn
