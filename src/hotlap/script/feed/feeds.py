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
from hotlap.core.units import MIB
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.feeds import AHEAD, BUFFER_SETS, DeviceCopier, PendingCopy, PinnedBuffers, WorkerStart, within_cores
from hotlap.data.sources import Columns, Selection, Source, tensors_in
from hotlap.script.feed.indices import Block, Indices, Places
from hotlap.script.feed.sending import Receives
from hotlap.script.streams import current_stream

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
        with self._start.without_collector():
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
        self,
        columned: Columned,
        indices: Iterator[Any],
        *,
        copier: DeviceCopier,
        sending: Receives,
        pinned: bool,
        stages: bool,
    ) -> None:
        """Without `stages`, batches lie in page-locked memory themselves; else they are copied there (`pinned`)."""
        self._columned, self._take, self._copier, self._sending = columned, _takes(indices), copier, sending
        self._stages = deque(PinnedBuffers(pinned=pinned) for _ in range(BUFFER_SETS if stages else 0))
        self._coming: deque[tuple[Places, Batch, list[PendingCopy]]] = deque()

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

    def _sent(self, batch: Batch) -> tuple[Batch, list[PendingCopy]]:
        tensors = tensors_in(batch)
        if not self._stages:
            return batch, [self._copier.send(tensor) for tensor in tensors]
        stage = self._stages[0]
        self._stages.rotate(-1)
        stage.clear()
        # Memory that is used again must not be the script's inference mode's.
        with torch.inference_mode(False):
            flights = [self._copier.send(stage.room(tuple(t.shape), t.dtype).copy_(t)) for t in tensors]
        if flights:
            stage.sent(flights[-1])  # one stream copies them all, in this order
        return batch, flights


def _give_up(flights: list[PendingCopy]) -> None:
    for flight in flights:
        flight.discard()


# --- copies ahead ----------------------------------------------------------------------------------------
#
# Copies of a script's batches on the device: gathered there, some batches at a time, once the first is asked for.


GATHERED_TOGETHER = 2 * MIB
"""Bytes of batches that are gathered together at most. A launch takes the host as long for one small batch as for
many."""


class Copies:
    """Gathers batches on the device, and with a batch those that follow it, since a script sends one after the other.

    Each has memory of its own, as if it had been gathered alone: a script may keep it, save it or write to it.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device, self._is_cuda = source, device, device.type == "cuda"
        # Where samples differ in size, a batch is as wide as the widest in it.
        self._goes_ahead = isinstance(source, Columns) and type(source).at_width_of is Columns.at_width_of
        self._sample_bytes = 0
        self._block: Block | None = None
        self._ready: dict[int, list[Tensor | None]] = {}
        self._made_for: tuple[torch.cuda.Stream | None, bool] = None, False

    def of(self, places: Places, count: int) -> list[Part]:
        """The copies of the tensors of a batch, so many; nothing is gathered before the first is asked for."""
        batch = _Gatherable(self, places)
        return [Part(batch, number) for number in range(count)]

    def gathered(self, places: Places) -> tuple[list[Tensor | None], torch.cuda.Stream | None]:
        """The tensors of a batch, and the stream that gathers them: the current one."""
        stream = current_stream(self._device) if self._is_cuda else None
        block, made_for = places.block, (stream, torch.is_inference_mode_enabled())
        found = self._ready.pop(places.number, None) if block is not None and block is self._block else None
        if found is not None and made_for == self._made_for:
            return found, stream
        count = 1 if found is not None else self._how_many(places)
        if count == 1:
            return self._alone(places), stream
        self._ready, self._block, self._made_for = self._together(places, count), block, made_for
        return self._ready.pop(places.number), stream

    def _how_many(self, places: Places) -> int:
        """How many batches to gather from these places on; the first batch of all tells how large they are."""
        block = places.block
        if block is None or not self._goes_ahead or not self._sample_bytes:
            return 1
        fit = GATHERED_TOGETHER // (self._sample_bytes * block.sizes[places.number])
        return max(1, min(fit, len(block.sizes) - places.number))

    def _alone(self, places: Places) -> list[Tensor | None]:
        found = self._source.gather(places.there(self._device))
        tensors: list[Tensor | None] = list(found) if type(found) is tuple else [found]
        if not self._sample_bytes:
            self._sample_bytes = sum(t.nbytes for t in tensors if t is not None) // max(1, len(places.host))
        return tensors

    def _together(self, places: Places, count: int) -> dict[int, list[Tensor | None]]:
        first, block = places.number, places.block
        assert block is not None  # or there is nothing that follows
        found = self._source.gather(places.there(self._device, count))
        sizes = block.sizes[first : first + count]
        columns = [_apart(whole, sizes) for whole in (found if type(found) is tuple else (found,))]
        return {first + at: [column[at] for column in columns] for at in range(count)}


def _apart(whole: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows of a tensor as tensors of so many rows each, in memory of their own; on a GPU by one launch for many."""
    parts = whole.unsafe_split_with_sizes(sizes)
    own = [torch.empty_like(part) for part in parts]
    torch._foreach_copy_(own, parts)
    return own


class _Gatherable:
    """A batch that is gathered on the device when the first part of it is asked for."""

    __slots__ = ("_copies", "_places", "_stream", "_tensors")

    def __init__(self, copies: Copies, places: Places) -> None:
        self._copies, self._places = copies, places
        self._tensors: list[Tensor | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def part(self, number: int) -> Tensor:
        """One tensor of it, for work that is launched from here on; asked for once."""
        if self._tensors is None:
            self._tensors, self._stream = self._copies.gathered(self._places)
        tensor, self._tensors[number] = self._tensors[number], None
        assert tensor is not None
        if self._stream is not None:
            here = current_stream(tensor.device)
            if here != self._stream:
                here.wait_stream(self._stream)
                tensor.record_stream(here)
        return tensor


class Part:
    """One tensor of a batch that is still to be gathered."""

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: _Gatherable, number: int) -> None:
        self._batch, self._number = batch, number

    def on_device(self) -> Tensor:
        """The tensor on the device."""
        return self._batch.part(self._number)

    def discard(self) -> None:
        """Nothing was done for it."""
