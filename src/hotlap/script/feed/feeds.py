"""Feeds: ways to make the batches of a script's loader from index batches, and the samples they hold."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hotlap.core.errors import DataError, MachineError
from hotlap.core.plan import Feed
from hotlap.core.torch_private import foreach_copy_, set_version_counter
from hotlap.core.units import MIB
from hotlap.data.background_fetch import BackgroundFetch, processes_for, shared_s
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.feeds import AHEAD, BUFFER_SETS, DeviceCopier, PendingCopy, PinnedBuffers, WorkerStart, within_cores
from hotlap.data.resident import CPU, SENT_A_SECOND, bytes_needed, hold_on_device, packed, time_to_hold, why_not_held
from hotlap.data.sources import Columns, Selection, Source, tensors_in
from hotlap.engine.capture.recording import current_stream
from hotlap.machine.cuda import usable_bytes
from hotlap.script.feed.device_copies import CopyReceiver
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
        """End the workers."""
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


def _taker(indices: Iterator[Any]) -> Callable[[], IndexBatch]:
    """A function that returns one `IndexBatch` after the other."""
    return indices.take if isinstance(indices, IndexStream) else map(IndexBatch, indices).__next__


class GatheredFeed:
    """Batches gathered from columns on the host."""

    def __init__(self, column_batches: ColumnBatches, indices: Iterator[Any]) -> None:
        self._column_batches, self._take = column_batches, _taker(indices)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self._column_batches.batch(self._take())


class ResidentFeed:
    """Batches gathered from columns on the host, and on the GPU too once the script sends them there."""

    def __init__(
        self,
        column_batches: ColumnBatches,
        indices: Iterator[Any],
        *,
        on_device: Source,
        device: torch.device,
        device_copies: CopyReceiver,
        is_same: Callable[[], bool],
    ) -> None:
        """`on_device` gathers the same samples on the GPU, as long as `is_same()`."""
        self._column_batches, self._take, self._copies = (
            column_batches,
            _taker(indices),
            DeviceGather(on_device, device),
        )
        self._device_copies, self._is_same = device_copies, is_same

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        index_batch = self._take()
        batch, tensors = self._column_batches.parted(index_batch)  # also checks that all indices are within bounds
        if self._is_same():
            self._device_copies.serve(zip(tensors, self._copies.of(index_batch, len(tensors)), strict=True))
        return batch


class StreamedFeed:
    """Batches gathered from columns on the host and copied to the GPU ahead, on a separate stream."""

    def __init__(
        self,
        column_batches: ColumnBatches,
        indices: Iterator[Any],
        *,
        copier: DeviceCopier,
        device_copies: CopyReceiver,
        pinned: bool,
        stages: bool,
    ) -> None:
        """Without `stages`, batches are in pinned memory themselves; else they are copied there (`pinned`)."""
        self._column_batches, self._take, self._copier, self._device_copies = (
            column_batches,
            _taker(indices),
            copier,
            device_copies,
        )
        self._stages = deque(PinnedBuffers(pinned=pinned) for _ in range(BUFFER_SETS if stages else 0))
        self._coming: deque[tuple[IndexBatch, Batch, list[PendingCopy]]] = deque()

    def __iter__(self) -> Self:
        return self

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
        self._device_copies.serve(zip(tensors, flights, strict=True))
        return batch

    def close(self) -> None:
        """Drop pending batches."""
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
        self._source, self._device, self._is_cuda = source, device, device.type == "cuda"
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
        stream = current_stream(self._device) if self._is_cuda else None
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
        if self._stream is not None:
            here = current_stream(tensor.device)
            if here != self._stream:
                here.wait_stream(self._stream)
                tensor.record_stream(here)
        return tensor


class PendingTensor:
    """One tensor of a pending batch."""

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: _PendingBatch, number: int) -> None:
        self._batch, self._number = batch, number

    def on_device(self) -> Tensor:
        """The tensor on the GPU."""
        return self._batch.part(self._number)

    def discard(self) -> None:
        """Nothing to release."""


# --- held samples ------------------------------------------------------------------------


class HeldSamples:
    """The samples of a source, held for the feeds that gather."""

    def __init__(self, source: Source, device: torch.device, own: Feed) -> None:
        """`own` is the feed of the script's loader, whose batches the others must match."""
        self._source, self._device, self._own = source, device, own
        self.column_batches: ColumnBatches | None = None
        """Makes batches on the host."""
        self.on_device: Source | None = None
        """Gathers the same samples on the GPU."""
        self.kept_samples: KeptSamples | None = None
        """Collects passing samples, so that fewer have to be fetched."""
        self._columns: Source | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._most_processes: int | None = None

    def why_not(self, feed: Feed) -> str | None:
        """Why the samples cannot be held for a feed; None if they can."""
        # Memory for kept samples is already allocated.
        if self.column_batches is None and (self.kept_samples is None or self.kept_samples.missing == 1):
            reason = why_not_held(self._source, CPU, reserve_bytes=0)
            if reason is not None:
                return reason
        if feed.kind == "resident" and self.on_device is None:
            return why_not_held(self._source, self._device, reserve_bytes=_reserve_bytes(self._device))
        return None

    def seconds(self, kind: str) -> float:
        """Estimated seconds of `hold` for a kind of feed."""
        source = self._columns or self._source
        if kind == "resident" and self.on_device is not None:
            return 0.0
        if not source.computes:
            return self._time_to_hold(source, self._device) if kind == "resident" else 0.0
        missing = self.kept_samples.missing if self.kept_samples is not None else 1.0
        fetched_s = missing * shared_s(self._alone_s, self._processes)
        return fetched_s + (bytes_needed(source) / SENT_A_SECOND if kind == "resident" else 0.0)

    def learn(self, epochs_left: float = math.inf) -> KeptSamples | None:
        """Collect samples: in the background if cores are free, else as they pass.

        None if less of the training is left than pays for either.
        """
        if self.kept_samples is None:
            in_background = self._processes > 0 and self._processes * epochs_left > MORE_THAN
            if not in_background and epochs_left <= MORE_THAN:
                return None
            self.kept_samples = KeptSamples(self._source)
            if in_background:
                self.kept_samples.fetch(self._processes, self._alone_s)
        return self.kept_samples

    @property
    def _alone_s(self) -> float:
        """Seconds that this process takes to fetch all samples."""
        return self._time_to_hold(self._source, CPU)

    @property
    def _processes(self) -> int:
        """How many processes fetch samples in the background, or may."""
        if self.kept_samples is not None and not self.kept_samples.is_fetched:
            return 0
        if self._most_processes is None:
            self._most_processes = processes_for(self._device, self._alone_s, self._own.workers)
        return self._most_processes

    def hold(self, feed: Feed) -> None:
        """Hold the samples for a feed. Raises DataError if they do not form columns."""
        # The script may be in any mode, and the samples outlive it.
        with torch.inference_mode(False), torch.no_grad():
            if self.column_batches is None:
                like = default_collate(self._source.for_probing().read([0]))
                self._columns = self._source
                if self._source.computes:
                    self._columns = self._as_columns()
                self.column_batches = ColumnBatches(self._columns, like, self._own)
            if feed.kind == "resident" and self.on_device is None:
                assert self._columns is not None
                self._tensors = _tensors_of(self._columns)
                self._versions = [tensor._version for tensor in self._tensors]
                self.on_device = packed(hold_on_device(self._columns, self._device), images_last=False)

    def _as_columns(self) -> Source:
        kept_samples = self.learn() if self._processes else self.kept_samples
        if kept_samples is not None and (kept_samples.missing < 1 or kept_samples.is_fetched):
            columns, self.kept_samples = kept_samples.columns(), None
            return columns
        return Columns(tuple(hold_on_device(self._source, CPU).tensors.values()))

    def is_same(self) -> bool:
        """Whether the samples on the GPU equal those on the host: a script may write to its own tensors."""
        return self.on_device is not None and [tensor._version for tensor in self._tensors] == self._versions

    def tidy(self, feeds: tuple[Feed, ...]) -> None:
        """Release what none of these feeds needs."""
        if not any(feed.kind == "resident" for feed in feeds):
            self.on_device, self._tensors = None, []
        if all(feed.kind == "loader" for feed in feeds):
            self._columns = self.column_batches = self.kept_samples = None

    def _time_to_hold(self, source: Source, device: torch.device) -> float:
        name = f"time to hold on {device}"
        if name not in source.findings:
            source.findings[name] = time_to_hold(source, device)
        return float(source.findings[name])


def _tensors_of(source: Source) -> list[Tensor]:
    """The tensors that samples are gathered from."""
    while isinstance(source, Selection):
        source = source.inner
    return list(source.tensors.values()) if isinstance(source, Columns) else []


def _reserve_bytes(device: torch.device) -> int:
    """Bytes to leave free beside resident data: the most that steps took so far, and a tenth of the GPU."""
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return taken + usable_bytes(device) // 10 + 64 * MIB


# --- kept samples ------------------------------------------------------------------------
#
# On a machine with free cores, forked processes fetch all samples in the background. Otherwise hotlap keeps samples as
# they pass in the batches of the script's own loader, so that none is fetched twice.


MOST_SHARE, SLACK_S = 0.05, 0.05
"""Share of the time by which keeping samples may delay the script, and seconds in addition.

It lasts about one epoch out of three or more: a twentieth of that epoch is less than 2 % of the run.
"""
MORE_THAN = 2
"""Epochs that must be left for passing samples to be worth keeping; with processes, in the time of all of them."""
_Numbers = np.ndarray[Any, np.dtype[np.int64]]
CHUNK = 1024
"""Samples to fetch at a time, of those that did not pass."""


class KeptSamples:
    """The samples of a dataset, in the order in which they pass, or fetched in the background in the dataset's order.

    The first write to memory costs more than the copy itself. In dataset order, a few shuffled batches would touch all
    of it at once. numpy makes the copies: torch would split each small copy over threads, which wait for each other for
    milliseconds while workers keep the cores busy.
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`source` always gives the same samples, and its batches are plain stacks of them."""
        self._source, self._clock, self._work_clock = source, clock, work_clock
        self._kept_columns: list[Tensor] = []
        self._rows = np.full(len(source), -1, np.int64)
        """The row of each sample of the dataset; -1: it has not passed."""
        self._kept = 0
        self._began, self._delay_s, self._last_s = clock(), 0.0, 0.0
        self._is_over = False
        self._background: BackgroundFetch | None = None

    @property
    def missing(self) -> float:
        """The share of samples that are not here."""
        if self._background is not None and not self._background.has_failed:
            return self._background.missing
        return 1 - self._kept / max(1, len(self._rows))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is kept: all samples are there, or keeping them costs too much or fails."""
        return self._is_over or (self._background is not None and self._background.is_done)

    @property
    def is_fetched(self) -> bool:
        """Whether processes fetch the samples in the background, or have done so."""
        return self._background is not None and (self._background.is_done or not self._background.has_failed)

    def fetch(self, processes: int, expected_s: float) -> None:
        """Have processes fetch all samples; where they fail, samples are kept as they pass."""
        source = self._source.for_probing()

        def batch(positions: Sequence[int]) -> Batch:
            return default_collate(source.read(positions))

        with suppress(Exception), torch.inference_mode(False), torch.no_grad():  # no memory, or no more processes
            like = tensors_in(batch([0]))
            self._background = BackgroundFetch(
                lambda positions: tensors_in(batch(positions)),
                like,
                len(self._source),
                processes=processes,
                expected_s=expected_s,
            )

    def note(self, index_batch: IndexBatch | None, batch: Batch, waited_s: float = 0.0) -> None:
        """Keep the samples of a batch of the script's own loader; `index_batch` is None if their indices are unknown.

        `waited_s` is how long the script waited for workers to bring the batch. Work on the batch before shortened that
        wait, so it delayed the script by less.
        """
        if self._is_over or self.is_fetched:
            return
        self._delay_s -= min(waited_s, self._last_s)
        self._last_s = 0.0
        if index_batch is None:
            return
        began = self._work_clock()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._keep(index_batch.host.numpy(), tensors_in(batch))
        except Exception:  # another shape, an unknown kind of index batch, or no memory
            self._give_up()
            return
        self._last_s = self._work_clock() - began
        self._delay_s += self._last_s
        if self._delay_s > SLACK_S + MOST_SHARE * (self._clock() - self._began):
            self._give_up()

    def columns(self) -> Source:
        """All samples; fetches those that did not pass. Raises DataError if they differ in form from the others."""
        if self._background is not None and self._background.wait():
            return Columns(tuple(self._background.columns))
        absent = np.flatnonzero(self._rows < 0)
        for start in range(0, len(absent), CHUNK):
            some = absent[start : start + CHUNK]
            self._keep(some, self._fetched(some))
        return Selection(Columns(tuple(self._kept_columns)), torch.from_numpy(self._rows))

    def _fetched(self, positions: _Numbers) -> list[Tensor]:
        return tensors_in(default_collate(self._source.for_probing().read(positions.tolist())))

    def _keep(self, positions: _Numbers, tensors: list[Tensor]) -> None:
        total, size = len(self._rows), len(positions)
        if not self._kept_columns:
            self._kept_columns = [torch.empty((total, *t.shape[1:]), dtype=t.dtype, device="cpu") for t in tensors]
        pairs = list(zip(self._kept_columns, tensors, strict=False))
        alike = all(t.dtype == column.dtype and t.shape == (size, *column.shape[1:]) for column, t in pairs)
        if not alike or len(tensors) != len(self._kept_columns):
            name = type(self._source.samples).__name__
            raise DataError(f"{name} cannot be held: its samples differ in shape or dtype")
        if (positions < 0).any():
            raise DataError(f"an index batch has {positions.min()}; indices must not be negative")
        new = self._new(positions)
        end = self._kept + len(new)
        for column, tensor in pairs:
            rows = _as_bytes(tensor)
            _as_bytes(column)[self._kept : end] = rows if len(new) == size else rows[new]
        self._kept, self._is_over = end, end == total

    def _new(self, positions: _Numbers) -> _Numbers:
        """Which samples of a batch have not passed yet, each once; they get the next rows."""
        new = np.flatnonzero(self._rows[positions] < 0)
        for _ in range(2):
            chosen, rows = positions[new], np.arange(self._kept, self._kept + len(new))
            self._rows[chosen] = rows
            is_last = self._rows[chosen] == rows
            if is_last.all():
                break
            new = new[is_last]  # sampling with replacement may draw a sample twice in a batch
        return new

    def _give_up(self) -> None:
        self._kept_columns, self._kept, self._is_over = [], 0, True
        self._rows.fill(-1)


def _as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The rows of a tensor as rows of bytes; no copy if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().reshape(len(tensor), -1)
