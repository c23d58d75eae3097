"""The index batches of one epoch of a loader, read from its sampler at the moments at which torch reads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from inspect import GEN_CREATED, getgeneratorstate, isgenerator
from itertools import accumulate, chain, islice
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from hotlap.core.errors import DataError, kind_of
from hotlap.engine.capture.recording import current_stream

BLOCK = 32
"""Most index batches to read at once, where nothing can notice."""
_KNOWN = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    list,
    tuple,
    range,
)
"""Samplers that draw from the process's generators only when their first index is read."""


_RESEEDED = {("accelerate.data_loader", "SeedableRandomSampler")}
"""RandomSamplers by module and name that seed their own generator as an epoch begins, so that nothing else draws from
it. At its end this one counts the epoch, which its loader sets again as the next one begins."""


def why_not_early(batch_sampler: Any) -> str | None:
    """Why hotlap must not read index batches earlier than torch does; None if nothing can notice."""
    sampler = _sampler_in(batch_sampler)
    kind = type(sampler)
    is_reseeded = (kind.__module__, kind.__name__) in _RESEEDED and isinstance(sampler, RandomSampler)
    if kind not in _KNOWN and not is_reseeded:
        return f"{kind.__name__} may draw as it is read, so it cannot be read ahead"
    if (
        isinstance(sampler, RandomSampler)
        and generator_of(batch_sampler) is not None
        and not _is_drawn_at_first(sampler)
    ):
        return "RandomSampler draws from the script's generator as it is read, so it cannot be read ahead"
    return None


def _is_drawn_at_first(sampler: RandomSampler) -> bool:
    """Whether the first index draws everything. The sampler draws once more at its end, and does not use it."""
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def generator_of(batch_sampler: Any) -> torch.Generator | None:
    """The sampler's own generator, if it has one; the script may look at it."""
    found = getattr(_sampler_in(batch_sampler), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _sampler_in(batch_sampler: Any) -> Any:
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


class IndexStream:
    """The remaining index batches of an epoch, shared by all feeds, so that one continues where another stopped.

    Samplers draw from generators, so hotlap reads an index batch when torch does: when its batch is made or, with
    workers, when the batch `ahead` places before it has been given out. A feed may take one earlier; the generator of
    `batch_sampler` is then reset until that moment.
    """

    def __init__(
        self,
        sampler: Iterator[Any] | SamplerOrder | BegunOrder,
        *,
        ahead: int = 0,
        batch_sampler: Any = None,
        given: int = 0,
        under_way: int = 0,
    ) -> None:
        """`given` batches have been given out already, and `under_way` more have been read."""
        self._sampler, self._ahead = sampler, ahead
        self._given_to, self._generator = _sampler_in(batch_sampler), generator_of(batch_sampler)
        self.given = given
        """Batches given out or failed."""
        self.is_shut = False
        """Whether it hands out nothing, so that pending batches can finish."""
        self._reads = given + under_way
        self._ended = False
        self._ready: deque[IndexBatch] = deque()
        self._taken: deque[IndexBatch | None] = deque([None] * under_way)
        self._drawn: deque[tuple[int, Tensor, Tensor]] = deque()
        """Index batches read early whose reading drew, with the generator's states before and after."""

    @property
    def under_way(self) -> int:
        """Index batches taken by a feed whose batches have not been given out."""
        return len(self._taken)

    @property
    def coming(self) -> IndexBatch | None:
        """The indices of the next batch; None if torch has read them before."""
        return self._taken[0] if self._taken else None

    @property
    def are_over(self) -> bool:
        return self._ended and not self._ready and not self._taken

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.take().index

    def take(self) -> IndexBatch:
        """The next index batch. Raises StopIteration at the end."""
        if not self._ready and not self.is_shut:
            self._read()
        if not self._ready or self.is_shut:
            raise StopIteration
        index_batch = self._ready.popleft()
        self._taken.append(index_batch)
        return index_batch

    def begin(self) -> None:
        """The next batch is about to be made. Raises what the sampler raises."""
        self._catch_up(self.given + max(1, self._ahead))

    def give(self) -> None:
        """The next batch has been made or has failed. Raises what the sampler raises."""
        if self._taken:
            self._taken.popleft()
        self.given += 1
        self._catch_up(self.given + self._ahead)

    def put_back(self) -> None:
        """Hand out again what was taken and not given out."""
        self._ready.extendleft(one for one in reversed(self._taken) if one is not None)
        self._taken.clear()

    def reopen(self) -> None:
        """Hand out again, to another feed; the one before has given out everything it took."""
        self._taken.clear()
        self.is_shut = False

    def _catch_up(self, due: int) -> None:
        """Leave sampler and generator as torch leaves them after reading so many index batches."""
        while self._drawn and self._drawn[0][0] < due:
            self._advance(*self._drawn.popleft()[1:])
        while self._reads < due and not self._ended:
            self._read()

    def _read(self) -> None:
        if self._ended:
            return
        number, generator, sampler = self._reads, self._generator, self._sampler
        is_drawn = isinstance(sampler, (SamplerOrder, BegunOrder)) and not sampler.draws
        if generator is None or is_drawn or number < self.given + max(1, self._ahead):
            self._read_on()
            return
        now = generator.get_state()
        if self._drawn:
            generator.set_state(self._drawn[-1][2])
        before = generator.get_state()
        try:
            self._read_on()
        finally:
            after = generator.get_state()
            generator.set_state(now)
        if not torch.equal(before, after):
            self._drawn.append((number, before, after))

    def _read_on(self) -> None:
        if isinstance(self._sampler, (SamplerOrder, BegunOrder)):
            flat, sizes = self._sampler.read(BLOCK)
            block = IndexBlock(flat, sizes)
            self._ready.extend(IndexBatch(None, block, number) for number in range(len(sizes)))
            self._ended = not sizes
            self._reads += max(1, len(sizes))
            return
        try:
            self._ready.append(IndexBatch(next(self._sampler)))
        except StopIteration:
            self._ended = True
        self._reads += 1

    def _advance(self, before: Tensor, after: Tensor) -> None:
        """Leave the generator as the sampler does; if the script has drawn from it since, draw now."""
        assert self._generator is not None  # only its states are stored
        if torch.equal(self._generator.get_state(), before):
            self._generator.set_state(after)
        else:  # at the end torch draws a whole order and does not use it, so any draw of that size will do
            torch.randperm(len(self._given_to.data_source), generator=self._generator, device="cpu")


# --- orders of torch's own samplers ------------------------------------------------------
#
# The index batches of torch's own samplers, drawn as torch draws them, but many at a time and as tensors.


DRAWN_TOGETHER = 32
"""Indices that torch's RandomSampler draws at a time with replacement."""
COUNTED_TOGETHER = 65536
"""Consecutive indices to create at a time: data that is read in order may be longer than memory."""

_AS_IMPORTED = (SequentialSampler.__iter__, RandomSampler.__iter__)
"""The samplers' own iteration, as imported; a script may replace it."""


class SamplerOrder:
    """The index batches of `iter(batch_sampler)`, without Python code for every sample.

    Every visible draw happens when torch makes it: from the process's generator when the first index batch is read,
    from the script's own when its numbers are needed.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._size, self._drops_last = batch_sampler.batch_size, batch_sampler.drop_last
        sampler: Any = batch_sampler.sampler
        self._is_private = getattr(sampler, "generator", None) is None
        self._pieces = _pieces(sampler)
        self._left = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def draws(self) -> bool:
        """Whether reading the next index batch may draw from a generator of the script."""
        return not self._is_private and len(self._left) < self._size

    def read(self, most: int) -> tuple[Tensor, list[int]]:
        """At most `most` next index batches, concatenated, and the size of each; empty at the end."""
        size = self._size
        self._draw(size * most if self._is_private else size)
        count, rest = divmod(len(self._left), size)
        sizes = [size] * min(count, most)
        is_all = count < most if self._is_private else not count
        if is_all and rest and not self._drops_last:
            sizes.append(rest)
        taken, self._left = self._left[: sum(sizes)], self._left[sum(sizes) :]
        return taken, sizes

    def _draw(self, needed: int) -> None:
        have, found = len(self._left), [self._left]
        while have < needed:
            piece = next(self._pieces, None)
            if piece is None:
                break
            found.append(piece)
            have += len(piece)
        self._left = torch.cat(found) if len(found) > 1 else self._left


class BegunOrder:
    """The rest of torch's own iterator over a sampler that makes no more visible draws."""

    draws = False

    def __init__(self, begun: Any) -> None:
        self._begun: Iterator[list[int]] = begun

    def read(self, most: int) -> tuple[Tensor, list[int]]:
        """At most `most` next index batches, concatenated, and the size of each; empty at the end."""
        found = list(islice(self._begun, most))
        sizes = [len(index) for index in found]
        return torch.from_numpy(np.fromiter(chain.from_iterable(found), np.int64, sum(sizes))), sizes


def order_of(batch_sampler: Any, begun: Any) -> SamplerOrder | BegunOrder | None:
    """A reader of many index batches at a time, in place of the batch sampler's iterator `begun`; None if there is
    none.

    Only torch's own samplers are known to allow this; subclasses may do anything.
    """
    if type(batch_sampler) is not BatchSampler or not isgenerator(begun):
        return None
    sampler: Any = batch_sampler.sampler
    is_torchs = begun.gi_code is BatchSampler.__iter__.__code__
    if not is_torchs or type(sampler) not in (SequentialSampler, RandomSampler):
        return None
    if getgeneratorstate(begun) == GEN_CREATED and type(sampler).__iter__ in _AS_IMPORTED and draws_as_torch():
        return SamplerOrder(batch_sampler)
    # Without a generator of the script, only a seed comes from the process's generator, and the rest from a private
    # one.
    return BegunOrder(begun) if getattr(sampler, "generator", None) is None else None


@cache
def draws_as_torch() -> bool:
    """Whether this version of torch draws as expected here, tested in a few short orders."""
    before = torch.get_rng_state()
    try:
        return all(
            _seen(SamplerOrder, *settings) == _seen(iter, *settings)
            for settings in ((False, None, False), (False, 24, True), (True, 70, False), (True, 70, True))
        )
    except Exception:  # a version of torch with other samplers
        return False
    finally:
        torch.set_rng_state(before)


def _seen(begin: Any, replacement: bool, count: int | None, by_generator: bool) -> list[Any]:
    """The index batches of an order, and the generators after each of them."""
    torch.default_generator.manual_seed(1)
    generator = torch.Generator().manual_seed(2) if by_generator else None
    sampler = RandomSampler(range(9), replacement, count, generator)
    begun, seen = begin(BatchSampler(sampler, 4, drop_last=False)), []
    while True:
        index = begun.read(1)[0].tolist() if isinstance(begun, SamplerOrder) else next(begun, [])
        generators = [torch.default_generator, *([] if generator is None else [generator])]
        seen.append((index, [one.get_state().numpy().tobytes() for one in generators]))
        if not index:
            return seen


def _pieces(sampler: Any) -> Iterator[Tensor]:
    """The indices of a sampler, in the pieces in which it draws them, each drawn when asked for."""
    length = len(sampler.data_source)
    if type(sampler) is SequentialSampler:
        for start in range(0, length, COUNTED_TOGETHER):
            yield torch.arange(start, min(length, start + COUNTED_TOGETHER), device="cpu")
        return
    generator = sampler.generator
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    whole, rest = divmod(sampler.num_samples, DRAWN_TOGETHER if sampler.replacement else length)
    if sampler.replacement:
        for count in (*[DRAWN_TOGETHER] * whole, rest):
            yield torch.randint(length, (count,), generator=generator)
        return
    for _ in range(whole):
        yield torch.randperm(length, generator=generator)
    if rest or sampler.generator is not None:  # torch draws this order without using it
        yield torch.randperm(length, generator=generator)[:rest]


# --- index batches -----------------------------------------------------------------------
#
# The sample indices of one batch, or of several read together, on the host and on a GPU.


class IndexBatch:
    """One index batch, as the sampler gave it and as indices of samples."""

    __slots__ = ("_host", "_index", "block", "number")

    def __init__(self, index: Any, block: IndexBlock | None = None, number: int = 0) -> None:
        self._index = index
        self.block, self.number = block, number
        """The block it was read with, if any, and its number in it; `_index` is then unused."""
        self._host: Tensor | None = None

    @property
    def index(self) -> Any:
        """The index batch as the sampler gives it."""
        return self._index if self.block is None else self.block.host[self.number].tolist()

    @property
    def host(self) -> Tensor:
        """The indices as a tensor. Raises DataError if they are not integers."""
        if self.block is not None:
            return self.block.host[self.number]
        if self._host is None:
            self._host = positions_of(self._index)
        return self._host

    def through(self, rows: Tensor) -> Tensor:
        """The indices in the data behind a selection of these rows."""
        return rows.index_select(0, self.host) if self.block is None else self.block.through(rows)[self.number]

    def on_device(self, device: torch.device, count: int = 1) -> Tensor:
        """The indices on a device, ready for work launched from here on; with `count`, of several batches."""
        if self.block is None:
            return sent(self.host, device)
        return self.block.on_device(device, self.number, self.number + count)


class IndexBlock:
    """Several index batches that were read together, and so go to a GPU in one copy."""

    __slots__ = ("_ends", "_flat", "_host", "_stream", "_there", "_through", "sizes")

    def __init__(self, flat: Tensor, sizes: list[int]) -> None:
        """`flat` holds their indices, concatenated; `sizes` the number of each."""
        self._flat, self.sizes = flat, sizes
        self._ends = [0, *accumulate(sizes)]
        self._host: Sequence[Tensor] | None = None
        self._through: tuple[Tensor, Sequence[Tensor]] | None = None
        self._there: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def host(self) -> Sequence[Tensor]:
        """The indices of each."""
        if self._host is None:
            self._host = self._flat.unsafe_split_with_sizes(self.sizes)
        return self._host

    def through(self, rows: Tensor) -> Sequence[Tensor]:
        """The indices of each in the data that these rows were selected from."""
        if self._through is None or self._through[0] is not rows:
            self._through = rows, rows.index_select(0, self._flat).unsafe_split_with_sizes(self.sizes)
        return self._through[1]

    def on_device(self, device: torch.device, start: int, end: int) -> Tensor:
        """The indices of some of them on a device, concatenated, ready for work launched from here on."""
        here = current_stream(device)
        if self._there is None:
            self._there, self._stream = sent(self._flat, device), here
        elif here is not None and self._stream is not None and here != self._stream:
            here.wait_stream(self._stream)
            self._there.record_stream(here)
        return self._there[self._ends[start] : self._ends[end]]


def positions_of(index: Any) -> Tensor:
    """An index batch as a tensor. Raises DataError if it does not hold integers."""
    found = np.array(index)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"{kind_of(index)} is no list of integers, so hotlap cannot gather samples by it")
    return torch.from_numpy(found.astype(np.int64, copy=False))


def sent(positions: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without making the host wait."""
    if device.type != "cuda":
        return positions
    # From pageable memory, the copy would wait for all earlier work.
    return torch.empty_like(positions, device=device).copy_(positions.pin_memory(), non_blocking=True)
