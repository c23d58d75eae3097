"""Feeds: ways to make the batches of a script's loader from index batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hotlap.core.errors import MachineError
from hotlap.core.plan import Feed
from hotlap.core.torch_private import foreach_copy_, set_version_counter
from hotlap.core.units import MIB
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.feeds import AHEAD, BUFFER_SETS, DeviceCopier, PendingCopy, PinnedBuffers, WorkerStart, within_cores
from hotlap.data.sources import Columns, Selection, Source, tensors_in
from hotlap.engine.capture.recording import current_stream
from hotlap.script.feed.device_copies import Serve
from hotlap.script.feed.index_batches import IndexBatch, IndexBlock, IndexStream

Iterate = Callable[[DataLoader[Any]], Iterator[Any]]
"""torch's own way to begin an epoch of a loader."""


def version_of(own: Feed) -> int:
    """The version counter of a loader's batches: torch writes once to each batch from a worker.

    Copies in pinned memory begin at zero again.
    """
    return int(own.workers > 0 and not own.pinned)


def set_versions(tensors: Sequence[Tensor], version: int) -> None:
    """Set version counters to those of the script's own batches; inference tensors have none."""
    counting = tuple(tensor for tensor in tensors if not tensor.is_inference())
    with suppress(MachineError, TypeError):  # older versions of torch cannot set them
        set_version_counter(counting, (version,) * len(counting))


class LoaderClone:
    """A loader that makes batches of given index batches as the script's does, with persistent workers of its own."""

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
            elif feed.workers:  # the user's collate function may write to its batches
                self._collate = _VersionedCollate(loader.collate_fn)
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
            # A separate generator: torch draws a seed at each start, which must not move the script's generator.
            generator=torch.Generator().manual_seed(0),
            **settings,
        )

    def batches(self, indices: Iterator[Any]) -> Iterator[Batch]:
        """The batches at these indices; reads nothing and starts no worker before the first is asked for."""
        return _LazyBatches(self, indices)

    def begin(self, indices: Iterator[Any]) -> Iterator[Batch]:
        """The batches at these indices; drops those of an earlier call."""
        self._requests.indices = indices
        with self._start.without_collector():
            return self._iterate(self._loader)

    def as_own(self, batch: Batch) -> Batch:
        """The batch with the version counters of the script's own."""
        if isinstance(self._collate, _VersionedCollate):
            return self._collate.counted(batch)
        if self._version is not None:
            set_versions(tensors_in(batch), self._version)
        return batch

    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _VersionedCollate:
    """A collate function for workers that also sends version counters, which tensors lose between processes."""

    def __init__(self, collate: Callable[[Any], Batch]) -> None:
        self._collate = collate

    def __call__(self, samples: Any) -> tuple[Batch, list[int | None]]:
        """The batch, and the version counters of its tensors; none for containers that `tensors_in` cannot read."""
        batch, versions = self._collate(samples), []
        with suppress(Exception):  # a class of the user may raise
            versions = [None if tensor.is_inference() else tensor._version for tensor in tensors_in(batch)]
        return batch, versions

    @staticmethod
    def counted(sent: tuple[Batch, list[int | None]]) -> Batch:
        """The batch with its version counters restored."""
        batch, versions = sent
        with suppress(Exception):
            for tensor, version in zip(tensors_in(batch), versions, strict=True):
                if version is not None:
                    set_versions([tensor], version)
        return batch


class _Requests:
    """The indices that a loader reads; replaceable, because persistent workers keep their loader."""

    def __init__(self) -> None:
        self.indices: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.indices


class _LazyBatches:
    """The batches of a loader, which starts when the first is asked for."""

    def __init__(self, loader: LoaderClone, indices: Iterator[Any]) -> None:
        self._loader, self._indices = loader, indices
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = self._loader.begin(self._indices)
        return self._loader.as_own(next(self._batches))


class ColumnBatches:
    """Makes batches like a loader's default_collate, by indexing whole columns."""

    def __init__(self, source: Source, like: Batch, own: Feed) -> None:
        """`source` gathers tensors or tuples of them; `like` is a batch of the loader, for its containers."""
        self._rows: Tensor | None = None
        while type(source) is Selection:  # its rows are looked up for many batches at once
            self._rows = source.rows if self._rows is None else source.rows.index_select(0, self._rows)
            source = source.inner
        self._source, self._like = source, like
        self._allocate, self._version = _pinned if own.pinned else None, version_of(own)
        self._is_list = type(like) is list and all(isinstance(part, Tensor) for part in like)

    def batch(self, index_batch: IndexBatch) -> Batch:
        """The batch as the loader would make it."""
        return self.parted(index_batch)[0]

    def parted(self, index_batch: IndexBatch) -> tuple[Batch, Sequence[Tensor]]:
        """The batch as the loader would make it, and the tensors in it."""
        positions = index_batch.host if self._rows is None else index_batch.through(self._rows)
        found = self._source.gather(positions, self._allocate)
        tensors: tuple[Tensor, ...] = found if type(found) is tuple else (found,)
        if self._allocate is not None or self._version:  # else they are new, with no writes
            set_versions(tensors, self._version)
        if self._is_list:
            return list(tensors), tensors
        parts = iter(tensors)
        return map_tensors(self._like, lambda _: next(parts)), tensors


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)


class GatheredFeed:
    """Batches gathered from columns on the host."""

    def __init__(self, column_batches: ColumnBatches, indices: Iterator[Any]) -> None:
        self._column_batches = column_batches
        self._take = indices.take if isinstance(indices, IndexStream) else map(IndexBatch, indices).__next__

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._column_batches.batch(self._take())


class ResidentFeed(GatheredFeed):
    """Batches gathered from columns on the host, and on the GPU too once the script sends them there."""

    def __init__(
        self,
        column_batches: ColumnBatches,
        indices: Iterator[Any],
        *,
        on_device: Source,
        device: torch.device,
        serve: Serve,
        is_same: Callable[[], bool],
    ) -> None:
        """`on_device` gathers the same samples on the GPU, as long as `is_same()`."""
        super().__init__(column_batches, indices)
        self._copies, self._serve, self._is_same = DeviceGather(on_device, device), serve, is_same

    def __next__(self) -> Batch:
        index_batch = self._take()
        batch, tensors = self._column_batches.parted(index_batch)  # also checks that all indices are within bounds
        if self._is_same():
            self._serve(zip(tensors, self._copies.of(index_batch, len(tensors)), strict=True))
        return batch


class StreamedFeed(GatheredFeed):
    """Batches gathered from columns on the host and copied to the GPU ahead, on a separate stream."""

    def __init__(
        self,
        column_batches: ColumnBatches,
        indices: Iterator[Any],
        *,
        copier: DeviceCopier,
        serve: Serve,
        pinned: bool,
        stages: bool,
    ) -> None:
        """Without `stages`, batches are in pinned memory themselves; else they are copied there (`pinned`)."""
        super().__init__(column_batches, indices)
        self._copier, self._serve = copier, serve
        self._stages = deque(PinnedBuffers(pinned=pinned) for _ in range(BUFFER_SETS if stages else 0))
        self._coming: deque[tuple[IndexBatch, Batch, list[PendingCopy]]] = deque()

    def __next__(self) -> Batch:
        while len(self._coming) <= AHEAD:
            try:
                index_batch = self._take()
            except StopIteration:
                break
            self._coming.append((index_batch, *self._sent(self._column_batches.batch(index_batch))))
        if not self._coming:
            raise StopIteration
        index_batch, batch, flights = self._coming.popleft()
        tensors = tensors_in(batch)
        if any(tensor.is_inference() != torch.is_inference_mode_enabled() for tensor in tensors):
            # The script was in the other mode when this batch was made.
            _give_up(flights)
            return self._column_batches.batch(index_batch)
        self._serve(zip(tensors, flights, strict=True))
        return batch

    def close(self) -> None:
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
        # Memory that is reused must not be created in the script's inference mode.
        with torch.inference_mode(False):
            flights = [self._copier.send(stage.allocate(tuple(t.shape), t.dtype).copy_(t)) for t in tensors]
        if flights:
            stage.sent(flights[-1])  # one stream copies all of them, in this order
        return batch, flights


def _give_up(flights: list[PendingCopy]) -> None:
    for flight in flights:
        flight.discard()


# --- gathering on the GPU ----------------------------------------------------------------
#
# Copies of a script's batches are gathered on the GPU, several batches at a time, once the script asks for the first.


GATHERED_TOGETHER = 2 * MIB
"""Most bytes of batches to gather at a time. A launch costs the host as much for one small batch as for many."""


class DeviceGather:
    """Gathers batches on the GPU, together with those that follow, since a script sends one after the other.

    Each has its own memory, as if gathered alone: a script may keep it, save it or write to it.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device = source, device
        # If samples differ in size, a batch is as wide as its widest sample.
        self._goes_ahead = isinstance(source, Columns) and type(source).at_width_of is Columns.at_width_of
        self._sample_bytes = 0
        self._block: IndexBlock | None = None
        self._ready: dict[int, list[Tensor | None]] = {}
        self._made_for: tuple[torch.cuda.Stream | None, bool] = None, False

    def of(self, index_batch: IndexBatch, count: int) -> list[PendingTensor]:
        """The copies of a batch's tensors; gathers nothing before the first is asked for."""
        batch = _PendingBatch(self, index_batch)
        return [PendingTensor(batch, number) for number in range(count)]

    def gathered(self, index_batch: IndexBatch) -> tuple[list[Tensor | None], torch.cuda.Stream | None]:
        """The tensors of a batch, and the stream that gathers them: the current one."""
        stream = current_stream(self._device)
        block, made_for = index_batch.block, (stream, torch.is_inference_mode_enabled())
        found = self._ready.pop(index_batch.number, None) if block is not None and block is self._block else None
        if found is not None and made_for == self._made_for:
            return found, stream
        count = 1 if found is not None else self._how_many(index_batch)
        if count == 1:
            return self._alone(index_batch), stream
        self._ready, self._block, self._made_for = self._together(index_batch, count), block, made_for
        return self._ready.pop(index_batch.number), stream

    def _how_many(self, index_batch: IndexBatch) -> int:
        """How many batches to gather from this one on; the very first batch shows how large they are."""
        block = index_batch.block
        if block is None or not self._goes_ahead or not self._sample_bytes:
            return 1
        fit = GATHERED_TOGETHER // (self._sample_bytes * block.sizes[index_batch.number])
        return max(1, min(fit, len(block.sizes) - index_batch.number))

    def _alone(self, index_batch: IndexBatch) -> list[Tensor | None]:
        found = self._source.gather(index_batch.on_device(self._device))
        tensors: list[Tensor | None] = list(found) if type(found) is tuple else [found]
        if not self._sample_bytes:
            self._sample_bytes = sum(t.nbytes for t in tensors if t is not None) // max(1, len(index_batch.host))
        return tensors

    def _together(self, index_batch: IndexBatch, count: int) -> dict[int, list[Tensor | None]]:
        first, block = index_batch.number, index_batch.block
        assert block is not None  # else nothing follows
        found = self._source.gather(index_batch.on_device(self._device, count))
        sizes = block.sizes[first : first + count]
        columns = [_apart(whole, sizes) for whole in (found if type(found) is tuple else (found,))]
        return {first + at: [column[at] for column in columns] for at in range(count)}


def _apart(whole: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows of a tensor as tensors of the given sizes, in their own memory; one launch for many on a GPU."""
    parts = whole.unsafe_split_with_sizes(sizes)
    own = [torch.empty_like(part) for part in parts]
    foreach_copy_(own, parts)
    return own


class _PendingBatch:
    """A batch that is gathered on the GPU when its first tensor is asked for."""

    __slots__ = ("_copies", "_index_batch", "_stream", "_tensors")

    def __init__(self, copies: DeviceGather, index_batch: IndexBatch) -> None:
        self._copies, self._index_batch = copies, index_batch
        self._tensors: list[Tensor | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def part(self, number: int) -> Tensor:
        """One of its tensors, ready for work launched from here on; called once."""
        if self._tensors is None:
            self._tensors, self._stream = self._copies.gathered(self._index_batch)
        tensor, self._tensors[number] = self._tensors[number], None
        assert tensor is not None
        here = current_stream(tensor.device)
        if here is not None and self._stream is not None and here != self._stream:
            here.wait_stream(self._stream)
            tensor.record_stream(here)
        return tensor


class PendingTensor:
    """One tensor of a pending batch."""

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: _PendingBatch, number: int) -> None:
        self._batch, self._number = batch, number

    def on_device(self) -> Tensor:
        return self._batch.part(self._number)

    def discard(self) -> None:
        """Nothing to release."""
