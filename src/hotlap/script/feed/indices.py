"""The index batches of one epoch of a loader, read from its sampler when torch would have read them."""

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
from hotlap.script.streams import current_stream

BLOCK = 32
"""Index batches that are read together at most, where that leaves no trace."""
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
"""Samplers that draw from the process's generators as their first index is read and never after."""


def why_not_early(batch_sampler: Any) -> str | None:
    """Why index batches must not be read before torch would read them, or None where that leaves no trace."""
    sampler = _sampler_in(batch_sampler)
    kind = type(sampler)
    if kind not in _KNOWN:
        return f"{kind.__name__} may draw as it is read, so it cannot be read ahead"
    if kind is RandomSampler and generator_of(batch_sampler) is not None and not _is_drawn_at_first(sampler):
        return "RandomSampler draws from the script's generator as it is read, so it cannot be read ahead"
    return None


def _is_drawn_at_first(sampler: RandomSampler) -> bool:
    """Whether all that the sampler gives is drawn with its first index. It draws once more at its end, for nothing."""
    return not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def generator_of(batch_sampler: Any) -> torch.Generator | None:
    """The generator that was given to the sampler, where there is one: the script may look at it."""
    found = getattr(_sampler_in(batch_sampler), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _sampler_in(batch_sampler: Any) -> Any:
    return batch_sampler.sampler if type(batch_sampler) is BatchSampler else batch_sampler


class Indices:
    """What is left of an epoch, for whatever feed makes batches of it, so that one goes on where another ended.

    Samplers draw from generators, so each index batch is read when torch would: as its batch is made or, with
    workers, as the batch `ahead` places before it has been given out. A feed may take one earlier; the generator of
    `batch_sampler` is then put back until that moment has come.
    """

    def __init__(
        self,
        sampler: Iterator[Any] | Order | Rest,
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
        """Batches that have been given out, or have failed."""
        self.is_shut = False
        """Whether nothing is handed out, so that what is under way comes to its end."""
        self._reads = given + under_way
        self._ended = False
        self._ready: deque[Places] = deque()
        self._taken: deque[Places | None] = deque([None] * under_way)
        self._drawn: deque[tuple[int, Tensor, Tensor]] = deque()
        """Index batches that were read early and drew, with the generator's states before and after."""

    @property
    def under_way(self) -> int:
        """Index batches that a feed has taken and whose batches have not been given out."""
        return len(self._taken)

    @property
    def coming(self) -> Places | None:
        """The places of the next batch in the data; None for a batch whose index batch torch read before."""
        return self._taken[0] if self._taken else None

    @property
    def are_over(self) -> bool:
        """Whether the epoch has no more."""
        return self._ended and not self._ready and not self._taken

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.take().index

    def take(self) -> Places:
        """The next index batch as places in the data; raises StopIteration where there is none."""
        if not self._ready and not self.is_shut:
            self._read()
        if not self._ready or self.is_shut:
            raise StopIteration
        places = self._ready.popleft()
        self._taken.append(places)
        return places

    def begin(self) -> None:
        """Told that the next batch is asked for. What is raised is the sampler's own."""
        self._catch_up(self.given + max(1, self._ahead))

    def give(self) -> None:
        """Told that the next batch has been made, or has failed. What is raised is the sampler's own."""
        if self._taken:
            self._taken.popleft()
        self.given += 1
        self._catch_up(self.given + self._ahead)

    def put_back(self) -> None:
        """Hand out again what was taken and not given."""
        self._ready.extendleft(places for places in reversed(self._taken) if places is not None)
        self._taken.clear()

    def reopen(self) -> None:
        """Hand out again, to another feed; the one before has given all that it took."""
        self._taken.clear()
        self.is_shut = False

    def _catch_up(self, due: int) -> None:
        """Leave everything as torch has left it when it has read so many."""
        while self._drawn and self._drawn[0][0] < due:
            self._advance(*self._drawn.popleft()[1:])
        while self._reads < due and not self._ended:
            self._read()

    def _read(self) -> None:
        if self._ended:
            return
        number, generator, sampler = self._reads, self._generator, self._sampler
        is_drawn = isinstance(sampler, (Order, Rest)) and not sampler.draws
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
        if isinstance(self._sampler, (Order, Rest)):
            flat, sizes = self._sampler.read(BLOCK)
            block = Block(flat, sizes)
            self._ready.extend(Places(None, block, number) for number in range(len(sizes)))
            self._ended = not sizes
            self._reads += max(1, len(sizes))
            return
        try:
            self._ready.append(Places(next(self._sampler)))
        except StopIteration:
            self._ended = True
        self._reads += 1

    def _advance(self, before: Tensor, after: Tensor) -> None:
        """Leave the generator as the sampler leaves it; where the script has drawn from it since, by drawing now."""
        assert self._generator is not None  # only its states are kept
        if torch.equal(self._generator.get_state(), before):
            self._generator.set_state(after)
        else:  # torch draws a whole order at the end, whatever was drawn in between, and uses none of it
            torch.randperm(len(self._given_to.data_source), generator=self._generator, device="cpu")


# --- orders of torch's own samplers ----------------------------------------------------------------------
#
# The index batches of torch's own samplers, drawn as torch draws them, but many at a time and as tensors.


DRAWN_TOGETHER = 32
"""Places that torch's RandomSampler draws at a time where it puts each back."""
COUNTED_TOGETHER = 65536
"""Places in order that are written down at a time: data that is read in order may be longer than memory."""

_AS_IMPORTED = (SequentialSampler.__iter__, RandomSampler.__iter__)
"""How torch's samplers go about it; a script may put something else in their place."""


class Order:
    """What `iter(batch_sampler)` gives, without a step of Python for every sample.

    Whatever anybody can see is drawn at the moments at which torch draws it: from the process's generator as the first
    index batch is read, from one of the script's as its numbers are needed.
    """

    def __init__(self, batch_sampler: BatchSampler) -> None:
        self._size, self._drops_last = batch_sampler.batch_size, batch_sampler.drop_last
        sampler: Any = batch_sampler.sampler
        self._is_private = getattr(sampler, "generator", None) is None
        self._pieces = _pieces(sampler)
        self._left = torch.empty(0, dtype=torch.int64, device="cpu")

    @property
    def draws(self) -> bool:
        """Whether reading the next index batch may draw from a generator of the script's."""
        return not self._is_private and len(self._left) < self._size

    def read(self, most: int) -> tuple[Tensor, list[int]]:
        """The next index batches, at most so many, one after the other, and the size of each; none at the end."""
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


class Rest:
    """What is left of torch's own iterator over a sampler that draws nothing more that anybody can see."""

    draws = False

    def __init__(self, begun: Any) -> None:
        self._begun: Iterator[list[int]] = begun

    def read(self, most: int) -> tuple[Tensor, list[int]]:
        """The next index batches, at most so many, one after the other, and the size of each; none at the end."""
        found = list(islice(self._begun, most))
        sizes = [len(index) for index in found]
        return torch.from_numpy(np.fromiter(chain.from_iterable(found), np.int64, sum(sizes))), sizes


def order_of(batch_sampler: Any, begun: Any) -> Order | Rest | None:
    """What reads many index batches at a time in place of `begun`, an iterator of the batch sampler; None if nothing.

    Only torch's own samplers are known to leave no trace of it: those that build upon them may do anything.
    """
    if type(batch_sampler) is not BatchSampler or not isgenerator(begun):
        return None
    sampler: Any = batch_sampler.sampler
    is_torchs = begun.gi_code is BatchSampler.__iter__.__code__
    if not is_torchs or type(sampler) not in (SequentialSampler, RandomSampler):
        return None
    if getgeneratorstate(begun) == GEN_CREATED and type(sampler).__iter__ in _AS_IMPORTED and draws_as_torch():
        return Order(batch_sampler)
    # Without a generator of the script's, a seed is drawn from the process's at first, and all else from a private one.
    return Rest(begun) if getattr(sampler, "generator", None) is None else None


@cache
def draws_as_torch() -> bool:
    """Whether this torch draws as is known here, seen in a few short orders."""
    before = torch.get_rng_state()
    try:
        return all(
            _seen(Order, *settings) == _seen(iter, *settings)
            for settings in ((False, None, False), (False, 24, True), (True, 70, False), (True, 70, True))
        )
    except Exception:  # of a torch whose samplers are others
        return False
    finally:
        torch.set_rng_state(before)


def _seen(begin: Any, replacement: bool, count: int | None, by_generator: bool) -> list[Any]:
    """The index batches of an order and the generators after each of them."""
    torch.default_generator.manual_seed(1)
    generator = torch.Generator().manual_seed(2) if by_generator else None
    sampler = RandomSampler(range(9), replacement, count, generator)
    begun, seen = begin(BatchSampler(sampler, 4, drop_last=False)), []
    while True:
        index = begun.read(1)[0].tolist() if isinstance(begun, Order) else next(begun, [])
        generators = [torch.default_generator, *([] if generator is None else [generator])]
        seen.append((index, [one.get_state().numpy().tobytes() for one in generators]))
        if not index:
            return seen


def _pieces(sampler: Any) -> Iterator[Tensor]:
    """The places that a sampler gives, in as many pieces as it draws them in, each drawn as it is asked for."""
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
    if rest or sampler.generator is not None:  # of an order of which nothing is used, only the draw can be seen
        yield torch.randperm(length, generator=generator)[:rest]


# --- places ----------------------------------------------------------------------------------------------
#
# The places of samples in the data, as the index batches of a loader name them: on the host and on the device.


class Places:
    """One index batch, as the sampler gave it and as places in the data."""

    __slots__ = ("_host", "_index", "block", "number")

    def __init__(self, index: Any, block: Block | None = None, number: int = 0) -> None:
        self._index = index
        self.block, self.number = block, number
        """Those that it was read with, where there are any, and its number among them; `index` is then of no use."""
        self._host: Tensor | None = None

    @property
    def index(self) -> Any:
        """As the sampler gives it."""
        return self._index if self.block is None else self.block.host[self.number].tolist()

    @property
    def host(self) -> Tensor:
        """The places as a tensor; raises DataError where the index batch is not one of whole numbers."""
        if self.block is not None:
            return self.block.host[self.number]
        if self._host is None:
            self._host = positions_of(self._index)
        return self._host

    def through(self, rows: Tensor) -> Tensor:
        """The places in the data that a selection of these rows has at these places."""
        return rows.index_select(0, self.host) if self.block is None else self.block.through(rows)[self.number]

    def there(self, device: torch.device, count: int = 1) -> Tensor:
        """The same on a device, for work that is launched from here on; of some that follow each other, end to end."""
        if self.block is None:
            return sent(self.host, device)
        return self.block.there(device, self.number, self.number + count)


class Block:
    """Some index batches that were read together, and so go to a device in one copy."""

    __slots__ = ("_ends", "_flat", "_host", "_stream", "_there", "_through", "sizes")

    def __init__(self, flat: Tensor, sizes: list[int]) -> None:
        """`flat` has their places end to end, so many of each."""
        self._flat, self.sizes = flat, sizes
        self._ends = [0, *accumulate(sizes)]
        self._host: Sequence[Tensor] | None = None
        self._through: tuple[Tensor, Sequence[Tensor]] | None = None
        self._there: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def host(self) -> Sequence[Tensor]:
        """The places of each."""
        if self._host is None:
            self._host = self._flat.unsafe_split_with_sizes(self.sizes)
        return self._host

    def through(self, rows: Tensor) -> Sequence[Tensor]:
        """The places of each in the data that these rows were selected from."""
        if self._through is None or self._through[0] is not rows:
            self._through = rows, rows.index_select(0, self._flat).unsafe_split_with_sizes(self.sizes)
        return self._through[1]

    def there(self, device: torch.device, start: int, end: int) -> Tensor:
        """The places of some of them on a device, end to end, for work that is launched from here on."""
        here = current_stream(device) if device.type == "cuda" else None
        if self._there is None:
            self._there, self._stream = sent(self._flat, device), here
        elif here is not None and self._stream is not None and here != self._stream:
            here.wait_stream(self._stream)
            self._there.record_stream(here)
        return self._there[self._ends[start] : self._ends[end]]


def positions_of(index: Any) -> Tensor:
    """An index batch as a tensor; raises DataError where it is not one of whole numbers."""
    found = np.array(index)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"{kind_of(index)} is no list of whole numbers, so no samples can be gathered by it")
    return torch.from_numpy(found.astype(np.int64, copy=False))


def sent(positions: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without a wait of the host."""
    if device.type != "cuda":
        return positions
    # From pageable memory the copy would wait for all that was launched before.
    return torch.empty_like(positions, device=device).copy_(positions.pin_memory(), non_blocking=True)
