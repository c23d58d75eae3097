"""Samples by index, fetched one by one from anything indexable, the same in every process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.errors import DataError
from hotlap.data.batches import Batch
from hotlap.data.randomness import HOST, Generator, mix

Room = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Gives memory of a shape and dtype for one tensor of a batch; asked for them always in the same order."""

Place = Callable[[Tensor, Tensor | None], Tensor]
"""Puts some rows of a tensor (None: all of them) where they are wanted."""


class Source:
    """Samples by index. This one fetches them one by one from anything indexable."""

    computes: bool = True
    """Whether samples come out of code that may do anything, not out of tensors that are there."""
    on_host: bool = True
    """Whether gathered batches are in the host's memory."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        self.samples = samples
        self.own_collate = collate
        """The user's function that makes a batch of samples, where there is one."""
        self.given: Any = samples
        """The data as the user gave it, which may change."""
        self.in_workers = False
        """Whether the user's own loader fetches samples in processes of their own: devices notice nothing of it."""
        self.again: Callable[[], Source] | None = None
        """Makes the source of the data as it is by then; None where it stands by itself."""
        self.probed: dict[str, Any] = {}
        """What was found out of the samples, kept so that it is found out once."""
        self._collate = collate or default_collate
        self._drawn: list[Generator] | None = None
        """The generators that samples were seen to draw from; None before the first batch."""

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, without what was found out in this one."""
        return {**vars(self), "probed": {}}

    def __len__(self) -> int:
        return len(self.samples)

    def why_not_gather(self) -> str | None:
        """Why whole batches cannot be indexed out of this source, or None where they can."""
        return f"{type(self.samples).__name__} gives samples one by one; gathering needs tensors or arrays"

    def never_holds(self, value: int) -> bool:
        """Whether it is known that no whole number in the samples is `value`; no, where nobody looked."""
        return False

    def gather(self, indices: Tensor, room: Room | None = None) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole: into new memory, or into what `room` gives."""
        raise DataError(str(self.why_not_gather()))

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets (see Epoch) as a batch.

        Randomness inside the dataset is seeded by ticket and epoch, so that it is the same in any process
        and any batch, and leaves the training's untouched. Seeding costs microseconds a sample, and most
        datasets draw nothing: in the first batch all generators are seeded, and looked at behind every sample;
        after it only those that had moved. Where another one moves later, that batch is fetched again.
        A dataset that answers many indices at once is asked for whole batches as long as it draws nothing, from the
        first on; the batch in which it first draws is fetched again, sample by sample.
        """
        before = [generator.state() for generator in HOST]
        seeded: Sequence[Generator] = HOST
        try:
            if self._drawn is None:
                self._drawn = []
                return self._first(tickets, seed, epoch)
            while True:
                seeded = self._drawn
                batch = self._attempt(tickets, seed, epoch)
                moved = [g for g, was in zip(HOST, before, strict=True) if g.moved(was, g.state())]
                surprises = [generator for generator in moved if generator not in self._drawn]
                if not surprises:
                    return batch
                self._drawn += surprises
        finally:
            for generator, was in zip(HOST, before, strict=True):
                if generator in seeded or generator in (self._drawn or ()):
                    generator.restore(was)

    def _first(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The first batch: what its samples draw from is found out."""
        length, samples = len(self), None
        if self._answers_many:
            with self._noting(mix(seed, epoch, *tickets)):
                samples = self.read([ticket % length for ticket in tickets])
        if samples is None or self._drawn:
            samples = []
            for ticket in tickets:
                with self._noting(mix(seed, epoch, ticket)):
                    samples += self.read([ticket % length])
        with self._noting(mix(seed, epoch, *tickets)):
            return self._collate(samples)

    @property
    def _answers_many(self) -> bool:
        return hasattr(self.samples, "__getitems__")

    @contextmanager
    def _noting(self, number: int) -> Iterator[None]:
        """Inside, all generators are seeded by a number; those that move are noted."""
        for generator in HOST:
            generator.seed(number)
        before = [generator.state() for generator in HOST]
        yield
        assert self._drawn is not None
        for generator, was in zip(HOST, before, strict=True):
            if generator not in self._drawn and generator.moved(was, generator.state()):
                self._drawn.append(generator)

    def _attempt(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        length = len(self)
        if not self._drawn:
            return self._collate(self.read([ticket % length for ticket in tickets]))
        samples = []
        for ticket in tickets:
            self._seed(mix(seed, epoch, ticket))
            samples += self.read([ticket % length])
        self._seed(mix(seed, epoch, *tickets))  # for a collate function that draws
        return self._collate(samples)

    def _seed(self, number: int) -> None:
        for generator in self._drawn or ():
            generator.seed(number)

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices as they are, asked for together where the dataset answers that."""
        if not self._answers_many:
            return [self.samples[index] for index in indices]
        found = list(self.samples.__getitems__(list(indices)))
        if len(found) != len(indices):
            raise DataError(
                f"{type(self.samples).__name__}.__getitems__ was asked for {len(indices)} samples and gave {len(found)}"
            )
        return found

    def aside(self) -> Source:
        """The same samples out of a copy of the dataset, to look at them in the training process.

        A dataset that opens a file when it is first asked would else hand it on to workers, which read from one
        handle all at once. What it holds is not copied. One with a `__del__` is asked itself: a copy that goes
        would close what both hold.
        """
        kind = type(self.samples)
        if not hasattr(self.samples, "__dict__") or hasattr(kind, "__del__"):
            return _Aside(self.samples, self.own_collate)
        try:
            return _Aside(copy.copy(self.samples), self.own_collate)
        except Exception:  # whatever a user's class makes of being copied
            return _Aside(self.samples, self.own_collate)


class _Aside(Source):
    """Samples that are looked at beside the training: a dataset that seeds torch does not seed the devices."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        """As the samples' own, which `torch.manual_seed` would leave a trace of."""
        seed_devices, torch.cuda.manual_seed_all = torch.cuda.manual_seed_all, _seed_nothing
        try:
            return super().read(indices)
        finally:
            torch.cuda.manual_seed_all = seed_devices


def _seed_nothing(seed: int) -> None: ...


def taken(tensor: Tensor, indices: Tensor, room: Room | None) -> Tensor:
    """The rows of a tensor at `indices`: one kernel on a GPU, and no wait."""
    if room is None:
        return tensor.index_select(0, indices)
    return torch.index_select(tensor, 0, indices, out=room((len(indices), *tensor.shape[1:]), tensor.dtype))
