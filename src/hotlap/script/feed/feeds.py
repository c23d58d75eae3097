"""Ways to make the batches of somebody's loader out of index batches, each of them an iterator over batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hotlap.core.plan import Feed
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.columns import Selection, tensors_in
from hotlap.data.feeds import WorkerStart, within_cores
from hotlap.data.samples import Source
from hotlap.data.stream import AHEAD, STAGES, Flight, Lane, Stage
from hotlap.script.feed.copies import Copies
from hotlap.script.feed.indices import Indices
from hotlap.script.feed.places import Places
from hotlap.script.feed.sending import Receives

Iterate = Callable[[DataLoader[Any]], Iterator[Any]]
"""torch's own way to begin an epoch of a loader."""


def version_of(own: Feed) -> int:
    """Where the version counters of a loader's batches stand: torch writes once to what comes from a worker.

    A copy in page-locked memory begins at zero again.
    """
    return int(own.workers > 0 and not own.pinned)


def set_versions(tensors: Sequence[Tensor], version: int) -> None:
    """Have version counters stand where those of the script's own batches do; of inference tensors there are none."""
    counting = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with suppress(AttributeError, TypeError):  # an older torch cannot set them
        torch._C._autograd._unsafe_set_version_counter(counting, (version,) * len(counting))


class LikeLoader:
    """A loader that makes batches as the script's does, of index batches that it is handed; its workers stay."""

    def __init__(self, loader: DataLoader[Any], feed: Feed, iterate: Iterate) -> None:
        self._iterate, self._start = iterate, WorkerStart(loader.worker_init_fn)
        self._requests = _Requests()
        feed = within_cores(feed, loader.num_workers)
        is_pinned = loader.pin_memory and torch.accelerator.is_available()
        self._version: int | None = None
        self._collate = loader.collate_fn
        if not is_pinned and bool(feed.workers) != bool(loader.num_workers):
            if loader.collate_fn is default_collate:
                self._version = int(loader.num_workers > 0)
            elif feed.workers:  # a collate function of the user's own may write to its batches
                self._collate = _Counting(loader.collate_fn)
        settings: dict[str, Any] = {}
        if feed.workers:
            settings = {
                "num_workers": feed.workers,
                "prefetch_factor": feed.prefetch,
                "persistent_workers": True,
                "worker_init_fn": self._start,
                "timeout": loader.timeout,
                "multiprocessing_context": loader.multiprocessing_context,
            }
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._requests,
            collate_fn=self._collate,
            pin_memory=is_pinned,
            # A generator of its own: a seed is drawn at each start, and must not move the script's.
            generator=torch.Generator().manual_seed(0),
            **settings,
        )

    def batches(self, indices: Iterator[Any]) -> Iterator[Batch]:
        """The batches at these indices; nothing is read, and no worker started, before the first is asked for."""
        return _Begun(self, indices)

    def begin(self, indices: Iterator[Any]) -> Iterator[Batch]:
        """The batches at these indices; those of an earlier beginning are given up."""
        self._requests.indices = indices
        with self._start.in_peace():
            return self._iterate(self._loader)

    def as_own(self, batch: Batch) -> Batch:
        """A batch that counts as many writes as the script's own."""
        if isinstance(self._collate, _Counting):
            return self._collate.counted(batch)
        if self._version is not None:
            set_versions(tensors_in(batch), self._version)
        return batch

    def close(self) -> None:
        """End the workers."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _Counting:
    """A collate function for workers that sends the version counters along: a tensor loses its own on the way."""

    def __init__(self, collate: Callable[[Any], Batch]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Batch, list[int | None]]:
        """The batch, and the counters of its tensors; none of what holds them in a way of its own."""
        batch, versions = self._collate(samples), []
        with suppress(Exception):  # of a class of the user's
            versions = [None if tensor.is_inference() else tensor._version for tensor in tensors_in(batch)]
        return batch, versions

    @staticmethod
    def counted(sent: tuple[Batch, list[int | None]]) -> Batch:
        """The batch as it was before it was sent."""
        batch, versions = sent
        with suppress(Exception):
            for tensor, version in zip(tensors_in(batch), versions, strict=True):
                if version is not None:
                    set_versions([tensor], version)
        return batch


class _Requests:
    """What a loader is asked for; persistent workers keep their loader, so it has to change."""

    def __init__(self) -> None:
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _Begun:
    """The batches of a loader, begun when the first is asked for."""

    def __init__(self, loader: LikeLoader, indices: Iterator[Any]) -> None:
        self._loader, self._indices = loader, indices
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._loader.begin(self._indices)
        return self._loader.as_own(next(self._batches))


class Columned:
    """Batches as a loader's default_collate makes them, indexed as a whole out of columns."""

    def __init__(self, source: Source, like: Batch, own: Feed) -> None:
        """`source` gathers tensors or tuples of them; `like` is a batch of the loader's, for its containers."""
        self._rows: Tensor | None = None
        while type(source) is Selection:  # whose rows are looked up for many batches at once
            self._rows = source.rows if self._rows is None else source.rows.index_select(0, self._rows)
            source = source.inner
        self._source, self._like = source, like
        self._room, self._version = _pinned_room if own.pinned else None, version_of(own)
        self._is_list = type(like) is list and all(isinstance(part, Tensor) for part in like)

    def batch(self, places: Places) -> Batch:
        """The samples at these places as the loader would give them."""
        return self.parted(places)[0]

    def parted(self, places: Places) -> tuple[Batch, Sequence[Tensor]]:
        """The samples at these places as the loader would give them, and the tensors in it."""
        positions = places.host if self._rows is None else places.through(self._rows)
        found = self._source.gather(positions, self._room)
        tensors: tuple[Tensor, ...] = found if type(found) is tuple else (found,)
        if self._room is not None or self._version:  # else they are new, and were never written to
            set_versions(tensors, self._version)
        if self._is_list:
            return list(tensors), tensors
        parts = iter(tensors)
        return map_tensors(self._like, lambda _: next(parts)), tensors


def _pinned_room(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


def _takes(indices: Iterator[Any]) -> Callable[[], Places]:
    """What gives one index batch after the other as places in the data."""
    return indices.take if isinstance(indices, Indices) else map(Places, indices).__next__


class Gathered:
    """Batches indexed out of columns on the host."""

    def __init__(self, columned: Columned, indices: Iterator[Any]) -> None:
        self._columned, self._take = columned, _takes(indices)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._columned.batch(self._take())


class Resident:
    """Batches indexed out of columns on the host, and on the device too as soon as the script sends them there."""

    def __init__(
        self,
        columned: Columned,
        indices: Iterator[Any],
        *,
        there: Source,
        device: torch.device,
        sending: Receives,
        is_same: Callable[[], bool],
    ) -> None:
        """`there` gathers the same samples on the device, as long as `is_same` says so."""
        self._columned, self._take, self._copies = columned, _takes(indices), Copies(there, device)
        self._sending, self._is_same = sending, is_same

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        places = self._take()
        batch, tensors = self._columned.parted(places)  # which also sees to it that no place is out of bounds
        if self._is_same():
            self._sending.serve(zip(tensors, self._copies.of(places, len(tensors)), strict=True))
        return batch


class Streamed:
    """Batches indexed out of columns on the host and copied to the device ahead, on a stream of their own."""

    def __init__(
        self, columned: Columned, indices: Iterator[Any], *, lane: Lane, sending: Receives, pinned: bool, stages: bool
    ) -> None:
        """Without `stages`, batches lie in page-locked memory themselves; else they are copied there (`pinned`)."""
        self._columned, self._take, self._lane, self._sending = columned, _takes(indices), lane, sending
        self._stages = deque(Stage(pinned=pinned) for _ in range(STAGES if stages else 0))
        self._coming: deque[tuple[Places, Batch, list[Flight]]] = deque()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        while len(self._coming) <= AHEAD:
            try:
                places = self._take()
            except StopIteration:
                break
            self._coming.append((places, *self._sent(self._columned.batch(places))))
        if not self._coming:
            raise StopIteration
        places, batch, flights = self._coming.popleft()
        tensors = tensors_in(batch)
        if any(tensor.is_inference() != torch.is_inference_mode_enabled() for tensor in tensors):
            # It was made while the script was in the other mode.
            _give_up(flights)
            return self._columned.batch(places)
        self._sending.serve(zip(tensors, flights, strict=True))
        return batch

    def close(self) -> None:
        """Give up what is under way."""
        for _, _, flights in self._coming:
            _give_up(flights)
        self._coming.clear()

    def _sent(self, batch: Batch) -> tuple[Batch, list[Flight]]:
        tensors = tensors_in(batch)
        if not self._stages:
            return batch, [self._lane.send(tensor) for tensor in tensors]
        stage = self._stages[0]
        self._stages.rotate(-1)
        stage.clear()
        # Memory that is used again must not be the script's inference mode's.
        with torch.inference_mode(False):
            flights = [self._lane.send(stage.room(tuple(t.shape), t.dtype).copy_(t)) for t in tensors]
        if flights:
            stage.sent(flights[-1])  # one stream copies them all, in this order
        return batch, flights


def _give_up(flights: list[Flight]) -> None:
    for flight in flights:
        flight.abandoned()
