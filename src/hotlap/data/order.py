"""The order in which a training sees samples, and the random generators. The order never depends on the plan."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property
from itertools import islice, pairwise
from threading import Thread
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError
from hotlap.core.object_memory import Changes, ObjectMemory


def mix(*numbers: int) -> int:
    """A well-mixed 63-bit seed from several numbers (the finaliser of SplitMix64, folded)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class HostGenerator(Protocol):
    """One of the host's global generators."""

    name: str
    """Its name for users."""

    def state(self) -> Any:
        """A copy of its state."""

    def restore(self, state: Any) -> None:
        """Restore its state."""

    def seed(self, number: int) -> None:
        """Seed it with `number`."""

    def moved(self, before: Any, after: Any) -> bool:
        """Whether something was drawn in between; compares a few words only, since hotlap asks for every batch."""


class _Python:
    name = "Python's random"

    def state(self) -> Any:
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate(state)

    def seed(self, number: int) -> None:
        random.seed(number)

    def moved(self, before: Any, after: Any) -> bool:
        # A draw moves the position, which is the last word; a full round changes the first word.
        return bool(before[1][-1] != after[1][-1] or before[1][0] != after[1][0] or before[2] != after[2])


class _Numpy:
    name = "numpy.random"

    def state(self) -> Any:
        return np.random.get_state(legacy=False)

    def restore(self, state: Any) -> None:
        np.random.set_state(state)

    def seed(self, number: int) -> None:
        np.random.seed(number & 0xFFFFFFFF)

    def moved(self, before: Any, after: Any) -> bool:
        a, b = before["state"], after["state"]
        if before["bit_generator"] != "MT19937" or after["bit_generator"] != "MT19937":
            return repr(before) != repr(after)
        return bool(a["pos"] != b["pos"] or a["key"][0] != b["key"][0] or before["has_gauss"] != after["has_gauss"])


class _Torch:
    name = "torch's generator"

    def state(self) -> Any:
        return torch.default_generator.get_state()

    def restore(self, state: Any) -> None:
        torch.default_generator.set_state(state)

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)

    def moved(self, before: Any, after: Any) -> bool:
        return not torch.equal(before, after)


HOST_GENERATORS: tuple[HostGenerator, ...] = (_Python(), _Numpy(), _Torch())


class HostRandomness:
    """The states of Python's, numpy's and torch's generators on the host."""

    __slots__ = ("numpy", "python", "torch")

    def __init__(self) -> None:
        self.python, self.numpy, self.torch = (generator.state() for generator in HOST_GENERATORS)

    def restore(self) -> None:
        """Set the generators back to these states."""
        for generator, state in zip(HOST_GENERATORS, (self.python, self.numpy, self.torch), strict=True):
            generator.restore(state)

    def same_as(self, other: HostRandomness) -> bool:
        """Whether no generator has moved from one to the other."""
        mine, theirs = (self.python, self.numpy, self.torch), (other.python, other.numpy, other.torch)
        return not any(g.moved(a, b) for g, a, b in zip(HOST_GENERATORS, mine, theirs, strict=True))


def seed_host(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators on the host."""
    for generator in HOST_GENERATORS:
        generator.seed(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of the host and of the GPU in use."""
    seed_host(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed(seed)


@contextmanager
def host_seeded(seed: int) -> Iterator[None]:
    """Seed the host's generators inside `with`, and restore them afterwards."""
    before = HostRandomness()
    seed_host(seed)
    try:
        yield
    finally:
        before.restore()


AHEAD_FROM = 20_000
"""With at least so many samples, hotlap draws the order of an epoch ahead: that saves tenths of a millisecond."""


def even_cuts(total: int, largest: int) -> list[int]:
    """Where to cut `total` samples into as few even pieces of at most `largest` as possible.

    Even, since a batch norm cannot compute the variance of a remainder of one sample.
    """
    pieces = -(-total // largest)
    return [total * k // pieces for k in range(pieces + 1)]


class Epoch:
    """The samples of one epoch in order, cut into batches; `accumulate` batches are a window."""

    def __init__(self, indices: Tensor, batch_ends: Sequence[int], accumulate: int, length: int) -> None:
        self.indices = indices
        """All samples of the epoch in order."""
        self.accumulate, self.length = accumulate, length
        self.ends = batch_ends
        """The end of each batch in `indices`."""
        self._cut: dict[bool, Sequence[Tensor]] = {}
        self._whole: tuple[Epoch, Tensor] | None = None
        """Where it is the part of one rank: all of the epoch, and where in it the samples of this part are."""

    def __len__(self) -> int:
        """Windows, and so updates, in the epoch."""
        return -(-len(self.ends) // self.accumulate)

    def pieces(self, window: int, micro_batch: int | None, *, tickets: bool = False) -> list[Tensor]:
        """The indices of a window, cut into micro-batches; None cuts it into the user's batches.

        A ticket is index + (earlier occurrences × length): it distinguishes repeated samples, so that their
        augmentation differs.
        """
        source = self._tickets if tickets else self.indices
        if self._whole is not None:  # of a short batch a rank may get nothing
            return [source[a:b] for a, b in pairwise(self.bounds(window, micro_batch)) if b > a]
        if self.accumulate == 1 and micro_batch is None:
            # The usual case, in every step: cutting once per epoch takes a fraction of the time of slicing.
            if tickets not in self._cut:
                sizes = [end - start for start, end in pairwise((0, *self.ends))]
                self._cut[tickets] = torch.split_with_sizes(source[: self.ends[-1]], sizes)
            return [self._cut[tickets][window]]
        return [source[a:b] for a, b in pairwise(self.bounds(window, micro_batch))]

    def bounds(self, window: int, micro_batch: int | None) -> list[int]:
        """Where the pieces of a window begin in the epoch's order, and where the last one ends."""
        first = window * self.accumulate
        last = min(first + self.accumulate, len(self.ends))
        start = self.ends[first - 1] if first else 0
        if micro_batch is None:
            return [start, *self.ends[first:last]]
        if start == self.ends[last - 1]:
            return [start]
        return [start + cut for cut in even_cuts(self.ends[last - 1] - start, micro_batch)]

    def are_alike(self, window: int, count: int, micro_batch: int | None) -> bool:
        """Whether `count` windows from this one on exist and have pieces of the same sizes."""
        if window + count > len(self):
            return False
        mine = _steps(self.bounds(window, micro_batch))
        return all(_steps(self.bounds(other, micro_batch)) == mine for other in range(window + 1, window + count))

    def without(self, left_out: Tensor) -> Epoch:
        """The same batches without the samples at these indices; some may be empty."""
        kept = torch.isin(self.indices, left_out, invert=True)
        counts = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])
        ends = [int(counts[end]) for end in self.ends]
        return Epoch(self.indices[kept], ends, self.accumulate, self.length)

    def part(self, rank: int, ranks: int) -> Epoch:
        """What one of several ranks takes of each batch: the batch cut evenly, in the same order."""
        ends = torch.tensor([0, *self.ends])
        starts, sizes = ends[:-1], ends.diff()
        first, last = (-(-sizes * one // ranks) for one in (rank, rank + 1))
        counts = last - first
        own_ends = counts.cumsum(0)
        rows = torch.arange(int(own_ends[-1])) + (starts + first - own_ends + counts).repeat_interleave(counts)
        made = Epoch(self.indices[rows], own_ends.tolist(), self.accumulate, self.length)
        made._whole = (self, rows)
        return made

    def samples_of_all(self, window: int) -> int:
        """Samples of a window over all ranks; 0 where nothing is shared."""
        if self._whole is None:
            return 0
        bounds = self._whole[0].bounds(window, None)
        return bounds[-1] - bounds[0]

    @cached_property
    def _tickets(self) -> Tensor:
        if self._whole is not None:
            whole, rows = self._whole
            return whole._tickets[rows]
        # Sorting takes longer than drawing the order; only feeds that fetch single samples need it.
        return _tickets(self.indices, self.length)


class Order:
    """The order of each epoch, from the seed and the number of the epoch."""

    needs_no_user_code = True
    """Whether drawing it runs no code of the user."""

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
        self._last: tuple[int, Epoch] | None = None
        self._coming: tuple[int, Future[Epoch]] | None = None

    def epoch(self, epoch: int) -> Epoch:
        """The order of one epoch; a repeated call draws nothing anew."""
        if self._last is None or self._last[0] != epoch:
            coming, self._coming = self._coming, None
            made = coming[1].result() if coming is not None and coming[0] == epoch else self._made(epoch)
            self._last = (epoch, made)
        return self._last[1]

    def draw_ahead(self, epoch: int) -> None:
        """Draw the order of an epoch in a thread, so that the epoch need not wait for it."""
        # A user's sampler draws from global generators, so it stays in the training's thread. A short order takes less
        # time than starting a thread.
        if self.needs_no_user_code and self._length > AHEAD_FROM and (self._coming is None or self._coming[0] != epoch):
            future: Future[Epoch] = Future()

            def draw() -> None:
                try:
                    future.set_result(self._made(epoch))
                except BaseException as error:
                    future.set_exception(error)

            Thread(target=draw, name="hotlap-order", daemon=True).start()
            self._coming = (epoch, future)

    def sampler_state(self) -> Any:
        """The state of a user's sampler before it drew the current epoch, in a form for files."""
        return None

    def restore_sampler(self, saved: Any) -> None:
        """Restore the state from `sampler_state`; None, from an earlier version, changes nothing."""

    def _made(self, epoch: int) -> Epoch:
        indices = self._indices(epoch)
        length = len(indices)
        if self._drop_last:
            length -= length % self._batch_size
        if not length:
            raise DataError(
                f"an epoch has no batch: {len(indices)} samples, batch size {self._batch_size}, "
                "and drop_last leaves out the last, shorter one; use a smaller batch or keep the last one"
            )
        ends = [*range(self._batch_size, length, self._batch_size), length]
        return Epoch(indices, ends, self._accumulate, self._length)

    def _indices(self, epoch: int) -> Tensor:
        if not self._shuffled:
            return torch.arange(self._length, device="cpu")
        generator = torch.Generator("cpu").manual_seed(mix(self._seed, epoch))
        return torch.randperm(self._length, generator=generator, device="cpu")


class GivenOrder(Order):
    """The order of one epoch at a time, as another process has drawn it."""

    needs_no_user_code = False

    def __init__(self) -> None:
        self._epochs: dict[int, Epoch] = {}

    def give(self, number: int, epoch: Epoch) -> None:
        """Take in an epoch, and forget those before."""
        self._epochs = {number: epoch}

    def epoch(self, epoch: int) -> Epoch:
        """The epoch that was given last."""
        return self._epochs[epoch]

    def draw_ahead(self, epoch: int) -> None:
        """Nothing to draw."""


class _SamplerOrder(Order):
    """The order of a user's sampler, seeded anew for every epoch."""

    needs_no_user_code = False

    def __init__(self, sampler: Iterable[Any], length: int, **settings: Any) -> None:
        super().__init__(length, shuffled=False, **settings)
        self._sampler = sampler
        # Its counters and generators move with every epoch; a resume has to restore them.
        self._first, self._changes = ObjectMemory({"sampler": sampler}), Changes({"sampler": sampler})
        self._saved: list[Any] = []

    def sampler_state(self) -> Any:
        """The state of the sampler before it drew the current epoch."""
        return self._saved

    def restore_sampler(self, saved: Any) -> None:
        """Restore the state from `sampler_state`. Raises KeyError or ValueError if it does not fit."""
        if saved is not None:
            self._first.restore()
            self._changes.put_back(saved)
            self._last = None

    def _asked(self, epoch: int) -> list[Any]:
        # Copied, since the sampler changes its state.
        self._saved = copy.deepcopy([[list(path), form] for path, form in self._changes.found()[0]])
        return _drawn(self._sampler, self._seed, epoch)


class SampledOrder(_SamplerOrder):
    """The order of a user's sampler."""

    def _indices(self, epoch: int) -> Tensor:
        return _as_indices(self._asked(epoch), self._length)


class BatchedOrder(_SamplerOrder):
    """The batches of a user's batch sampler."""

    def __init__(self, batch_sampler: Iterable[Sequence[int]], length: int, *, seed: int, accumulate: int) -> None:
        super().__init__(batch_sampler, length, batch_size=1, seed=seed, accumulate=accumulate)

    def _made(self, epoch: int) -> Epoch:
        batches = [list(batch) for batch in self._asked(epoch)]
        ends = np.cumsum([len(batch) for batch in batches if batch]).tolist()
        if not ends:
            raise DataError("the batch sampler gave no batch")
        flat = _as_indices([index for batch in batches for index in batch], self._length)
        return Epoch(flat, ends, self._accumulate, self._length)


def _steps(bounds: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(bounds)]


def _drawn(sampler: Iterable[Any], seed: int, epoch: int) -> list[Any]:
    """Everything that a sampler yields for an epoch; afterwards all generators are as before."""
    generators: list[tuple[torch.Generator, Tensor]] = []
    inner: Any = sampler
    while inner is not None:
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)
        own = getattr(inner, "generator", None)
        if isinstance(own, torch.Generator):
            generators.append((own, own.get_state()))
            own.manual_seed(mix(seed, epoch))
        inner = getattr(inner, "sampler", None)
    try:
        with host_seeded(mix(seed, epoch)):
            # An endless sampler counts up to its `len`.
            drawn = list(islice(sampler, len(sampler)) if isinstance(sampler, Sized) else sampler)
    finally:
        for own, state in generators:
            own.set_state(state)
    if not drawn:
        raise DataError("the sampler gave no sample")
    return drawn


def _as_indices(drawn: list[Any], length: int) -> Tensor:
    """Non-negative indices; raises DataError for values that are no index or lie outside of the data."""
    try:
        indices = torch.tensor([int(index) for index in drawn], dtype=torch.int64)
    except (TypeError, ValueError):
        kind = type(drawn[0]).__name__
        raise DataError(
            f"the sampler gave a {kind}, not an index; batches belong in a DataLoader's batch_sampler"
        ) from None
    wrong = (indices >= length) | (indices < -length)
    if wrong.any():
        raise DataError(f"the sampler gave index {int(indices[wrong][0])}, and there are {length} samples")
    return torch.where(indices < 0, indices + length, indices)


def _tickets(indices: Tensor, length: int) -> Tensor:
    """Each index plus `length` for each earlier occurrence."""
    count = len(indices)
    if count <= length and len(torch.unique(indices)) == count:
        return indices
    by_index = indices.argsort(stable=True)
    ordered = indices[by_index]
    first = torch.searchsorted(ordered, ordered)
    before = torch.empty_like(indices)
    before[by_index] = torch.arange(count) - first
    return indices + before * length
