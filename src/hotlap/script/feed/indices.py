"""The index batches of one epoch of a loader, read from its sampler when torch would have read them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Self

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

from hotlap.script.feed.orders import Order, Rest
from hotlap.script.feed.places import Block, Places

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
