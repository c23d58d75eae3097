"""The resident feed: whether a device can hold all data, bringing the data there, and gathering batches out of it."""

from __future__ import annotations

import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.errors import DataError, TrainingError, first_line, kind_of
from hotlap.core.turns import turn
from hotlap.core.units import MIB, show_bytes
from hotlap.data.background_fetch import BackgroundFetch, processes_for, shared_s
from hotlap.data.bad_samples import LeftOut
from hotlap.data.batches import Batch, count_samples, map_tensors
from hotlap.data.order import Epoch
from hotlap.data.pure.proof import GRADIENTS, why_not_fixed
from hotlap.data.sources import Allocate, Columns, HoldingCost, Selection, Source, StackedColumns, tensors_in
from hotlap.machine.cuda import free_for_torch
from hotlap.machine.limits import read_memory


class EpochOrder:
    """The indices of an epoch on the device; the next epoch overwrites them."""

    def __init__(self, device: torch.device) -> None:
        self.indices = torch.empty(0, dtype=torch.int64, device=device)
        self.number = 0
        """Number of writes so far."""

    def write(self, indices: Tensor) -> None:
        """Send an epoch's order to the device, after work that still reads the last one."""
        if len(self.indices) < len(indices):
            self.indices = torch.empty(len(indices), dtype=torch.int64, device=self.indices.device)
        # From pageable memory the copy would wait for all earlier work.
        here = indices.pin_memory() if self.indices.is_cuda else indices
        self.indices[: len(indices)].copy_(here, non_blocking=True)
        self.number += 1


@dataclass(frozen=True, slots=True)
class PendingRows:
    """A batch that is not gathered yet: `count` samples of held columns, from `start` on in the epoch's order."""

    columns: Columns
    of: EpochOrder
    number: int
    start: int
    count: int

    @property
    def order(self) -> Tensor:
        """The indices of the epoch. Raises TrainingError after the epoch, when they belong to another one."""
        if self.number != self.of.number:
            raise TrainingError(
                "a window cannot be used after its epoch: windows of a resident feed refer to places in the current "
                "epoch, so step with each window as it comes, or use kind='gather'"
            )
        return self.of.indices

    def gathered(self) -> Batch:
        """The samples as a batch, on the device."""
        return self.columns.gather(self.order[self.start : self.start + self.count])

    def widest(self) -> PendingRows:
        """The same samples at the width of the widest batch."""
        return self if self.columns is self.columns.widest else replace(self, columns=self.columns.widest)

    def shifted(self, by: int) -> PendingRows:
        """The same number of samples, `by` places later in the order."""
        return replace(self, start=self.start + by)


def gathered(batch: Batch) -> Batch:
    """The batch, gathered if it is not yet."""
    return batch.gathered() if isinstance(batch, PendingRows) else batch


class ResidentFeeding:
    """Batches gathered on the device from columns held there."""

    tickets = False

    def __init__(self, columns: Columns, device: torch.device, left_out: Sequence[LeftOut] = ()) -> None:
        """`left_out` are samples that the columns lack."""
        self.columns = columns
        self._order = EpochOrder(device)
        self._left_out = torch.tensor([one.place for one in left_out], dtype=torch.int64) if left_out else None
        self._thinned: tuple[Epoch, Epoch] | None = None
        self._epoch: Tensor | None = None

    def held_of(self, epoch: Epoch) -> Epoch:
        """The epoch without samples that the columns lack."""
        if self._left_out is None:
            return epoch
        if self._thinned is None or self._thinned[0] is not epoch:
            self._thinned = epoch, epoch.without(self._left_out)
        return self._thinned[1]

    def begin(self, indices: Tensor) -> None:
        """Begin an epoch, or continue the current one."""
        if indices is not self._epoch:
            self._order.write(indices)
            self._epoch = indices

    @property
    def varies(self) -> bool:
        """Whether batches with the same number of samples may differ in shape."""
        return type(self.columns).at_width_of is not Columns.at_width_of

    def at_width_of(self, start: int, end: int) -> Columns:
        """The columns that gather this piece of the current epoch."""
        assert self._epoch is not None, "begin an epoch first"
        return self.columns.at_width_of(self._epoch[start:end])

    def rows(self, start: int, count: int) -> PendingRows:
        """A piece of the current epoch."""
        return PendingRows(self.at_width_of(start, start + count), self._order, self._order.number, start, count)

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices, gathered on the device."""
        parts = list(indices)
        if not parts:
            return
        self.begin(torch.cat(parts))
        start = 0
        for part in parts:
            yield self.rows(start, len(part)).gathered()
            start += len(part)

    def close(self) -> None:
        """Nothing to release: the columns go with the feed."""


class Packed(Columns):
    """Columns on a GPU in the form that gathers fastest; batches are the same.

    A gather kernel moves one element per thread, so rows are stored as elements of 8 bytes: uint8 images need an eighth
    of the threads. With `images_last`, images and their batches have the channels_last layout.
    """

    def __init__(self, columns: Columns, *, images_last: bool) -> None:
        self._packings: list[_Packing] = []
        self._whole: list[Tensor] = []
        """Columns that are packed as they lie: as long as they are here, other trainings can find them."""

        def pack(tensor: Tensor, rows: Tensor | None) -> Tensor:
            recipe = _Packing.of(tensor, images_last=images_last)
            self._packings.append(recipe)
            if not recipe.turned:
                self._whole.append(tensor)
            return recipe.packed(tensor)

        self._packed_columns = columns.sent(pack)
        super().__init__(tuple(self._packed_columns.tensors.values()))

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The samples at `indices`, with the shape and numbers they were given in."""
        found = self._packed_columns.gather(indices)
        if type(found) is tuple and type(self._packed_columns) is Columns:
            return tuple(packing.unpacked(part) for packing, part in zip(self._packings, found, strict=True))
        packings = iter(self._packings)
        return map_tensors(found, lambda tensor: next(packings).unpacked(tensor))


@dataclass(frozen=True, slots=True)
class _Packing:
    """How to pack a column and unpack a batch of it; only turned images need a copy."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of a row in memory."""
    turned: bool
    wide: bool

    @classmethod
    def of(cls, tensor: Tensor, *, images_last: bool) -> _Packing:
        turned = images_last and tensor.ndim in (4, 5)
        shape = tuple(tensor.shape[1:])
        if turned:
            shape = (*shape[1:], shape[0])
        row_bytes = tensor[:1].numel() * tensor.element_size()
        aligned = row_bytes % 8 == 0 and (turned or tensor.storage_offset() * tensor.element_size() % 8 == 0)
        wide = row_bytes >= 64 and aligned and tensor.element_size() < 8
        return cls(tensor.dtype, shape, turned, wide and (turned or tensor.is_contiguous()))

    def packed(self, tensor: Tensor) -> Tensor:
        if self.turned:
            tensor = tensor.movedim(1, -1).contiguous()
        return tensor.flatten(1).view(torch.int64) if self.wide else tensor

    def unpacked(self, batch: Tensor) -> Tensor:
        if self.wide:
            batch = batch.view(self.dtype).view(-1, *self.shape)
        return batch.movedim(-1, 1) if self.turned else batch


def packed(columns: Columns, *, images_last: bool) -> Columns:
    """The columns packed if they are plain tensors on a GPU; turns images only if memory is free for it."""
    if not columns.packs or columns.on_host:
        return columns
    images = [tensor for tensor in columns.tensors.values() if tensor.ndim in (4, 5)]
    needed = sum(image.numel() * image.element_size() for image in images)
    if images_last and images:
        images_last = 2 * needed < free_for_torch(images[0].device)
    return Packed(columns, images_last=images_last)


def narrowed(batch: Batch, start: int, count: int) -> Batch:
    """Some rows of a gathered batch, without a copy."""
    return map_tensors(batch, lambda tensor: tensor.narrow(0, start, count))


def sample_bytes(batch: Batch) -> int:
    """Bytes of one sample in a batch."""
    total = 0

    def add(tensor: Tensor) -> Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    map_tensors(batch, add)
    return total // max(1, count_samples(batch) or 1)


Progress = Callable[[int, int], None]
"""A function of samples held and samples in all; for tensors hotlap calls it once, at the end."""

CPU = torch.device("cpu")
CHUNK_BYTES = 64 * MIB
"""Bytes moved at a time, so that the host needs no second copy of all data."""
CHUNK_SAMPLES = 1024
PROBED, TIMED = 8, 4
"""Samples that hotlap measures and times, spread over the dataset, if fetching leaves no trace."""
TIMES, TIMED_S = 3, 0.01
"""Repetitions of the timing, fewer if they take longer than this, in seconds."""


def why_not_held(source: Source, device: torch.device, *, reserve_bytes: int) -> str | None:
    """Why `device` cannot hold all samples beside `reserve_bytes` of other memory; None if it can.

    The code of the dataset must show that samples never change (see `why_not_fixed`). A few samples tell the size of
    computed ones; hotlap does not fetch them all. On the host hotlap uses at most half of the free memory.
    """
    reason = _why_not_columns(source)
    if reason:
        return reason
    needed, free = bytes_needed(source, _numbered(device)), _free_bytes(_numbered(device))
    if needed and needed + reserve_bytes > free:
        beside = f" beside {show_bytes(reserve_bytes)} for the training" if reserve_bytes else ""
        half = ", half of the free memory" if device.type == "cpu" else " free"
        return f"the data needs {show_bytes(needed)} on {device}{beside}, which has {show_bytes(free)}{half}"
    return None


def hold_on_device(source: Source, device: torch.device, progress: Progress | None = None) -> Columns:
    """All samples as columns on `device`, in the containers in which a feed gives batches, with their `holding_cost`.

    Tensors go there unchanged, or stay if they are there already; windows go as their series. hotlap fetches computed
    samples once, in several processes where the training leaves cores free. Raises DataError if the samples cannot be
    columns.
    """
    reason = _why_not_columns(source)
    if reason:
        raise DataError(reason)
    start, device = time.perf_counter(), _numbered(device)
    with _for_all_streams(device):
        if source.computes:
            columns, size = _fetched(source, device, progress), bytes_needed(source, device)
        else:
            columns, size = _sent(source, device)
            if progress is not None:
                progress(len(source), len(source))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    if turn.get() is not None and device.type == "cuda":
        for tensor in columns.tensors.values():
            tensor.record_stream(torch.cuda.current_stream(device))
    columns.holding_cost = HoldingCost(seconds=time.perf_counter() - start, bytes=size)
    return columns


@contextmanager
def _for_all_streams(device: torch.device) -> Iterator[None]:
    """Inside, a training that takes turns with others works on the stream that all share, so they share memory too."""
    if turn.get() is None or device.type != "cuda":
        yield
        return
    shared = torch.cuda.default_stream(device)
    shared.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(shared):
        yield


_held: list[weakref.ref[Tensor]] = []
"""Columns on a device that trainings of this process hold while they take turns."""


def held_once(column: Tensor) -> Tensor:
    """The column, or the same one if another training of this process holds it: then this copy can go."""
    if turn.get() is None:
        return column
    _held[:] = [held for held in _held if held() is not None]
    for held in _held:
        other = held()
        if other is not None and _are_the_same(other, column):
            return other
    _held.append(weakref.ref(column))
    return column


def _are_the_same(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors hold the same bytes."""
    if (one.device, one.dtype, one.shape) != (other.device, other.dtype, other.shape):
        return False
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


SENT_A_SECOND = 4e9
"""Approximate bytes a second to a device from memory that is not pinned: 3.9e9 to 8e9 on hosts of an H200."""


def time_to_hold(source: Source, device: torch.device) -> float:
    """About how many seconds `hold_on_device` takes; a few samples tell how long fetching computed ones takes.

    Returns 0 for samples that cannot be held, and fetches none of them.
    """
    if _why_not_columns(source) is not None:
        return 0.0
    seconds = bytes_needed(source, _numbered(device)) / SENT_A_SECOND
    if source.computes:
        alone_s = _alone_s(source)
        seconds += shared_s(alone_s, processes_for(device, alone_s))
    return seconds


def _alone_s(source: Source) -> float:
    """About how many seconds this process takes to fetch and stack all samples."""
    return _sample_s(source.for_probing(), _measured(source).kinds) * len(source)


def _sample_s(source: Source, kinds: _Kinds) -> float:
    """Approximate seconds to fetch and stack a sample: the median of a few tries, since the machine may be busy."""
    chosen, found = evenly_spread(len(source), TIMES * TIMED), list[float]()
    for first in range(TIMES):
        few, start = chosen[first::TIMES], time.perf_counter()
        if not few or sum(found) > TIMED_S:
            break
        _stacked(source.read_good(few)[0], kinds)
        found.append((time.perf_counter() - start) / len(few))
    return statistics.median_low(found)


def evenly_spread(length: int, most: int = PROBED) -> list[int]:
    """At most `most` indices, evenly spread from the first to the last."""
    count = min(length, most)
    return [k * (length - 1) // max(1, count - 1) for k in range(count)]


# --- tensors --------------------------------------------------------------------------------------


def _sent(source: Source, device: torch.device, *, pretend: bool = False) -> tuple[Columns, int]:
    """The inner columns of a source on the device, and the bytes this takes; `pretend` only counts them."""
    rows: Tensor | None = None
    while isinstance(source, Selection):
        rows = source.rows if rows is None else source.rows.index_select(0, rows)
        source = source.inner
    assert isinstance(source, Columns)  # every source that computes nothing is one
    size = 0

    def place(tensor: Tensor, chosen: Tensor | None) -> Tensor:
        nonlocal size
        if chosen is None and tensor.device == device:
            return tensor
        count = len(tensor) if chosen is None else len(chosen)
        size += count * _row_bytes(tensor)
        if pretend:
            return tensor if chosen is None else tensor[:1].expand(count, *tensor.shape[1:])
        return _brought(tensor, chosen, count, device)

    return source.sent(place, rows), size


def _brought(tensor: Tensor, chosen: Tensor | None, count: int, device: torch.device) -> Tensor:
    there = torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
    step = max(1, CHUNK_BYTES // max(1, _row_bytes(tensor)))
    starts = range(0, count, step)
    if len(starts) > 1 and device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        _send(tensor.detach(), chosen, there, starts)
    else:
        for start in starts:
            there[start : start + step].copy_(_rows(tensor, chosen, start, start + step))
    return held_once(there)


def _send(tensor: Tensor, chosen: Tensor | None, there: Tensor, starts: range) -> None:
    """Copy rows to a GPU through pinned memory: while one chunk is in transit, all cores read the next."""
    try:
        shape = (starts.step, *tensor.shape[1:])
        buffers = [torch.empty(shape, dtype=tensor.dtype, device="cpu", pin_memory=True) for _ in range(2)]
    except RuntimeError:  # no pinned memory is available
        buffers = []
    sent: list[torch.cuda.Event] = []
    for number, start in enumerate(starts):
        end = min(start + starts.step, len(there))
        if not buffers:
            there[start:end].copy_(_rows(tensor, chosen, start, end))
            continue
        if number >= len(buffers):
            sent[number - len(buffers)].synchronize()
        buffer = buffers[number % len(buffers)][: end - start]
        if chosen is None:
            buffer.copy_(tensor[start:end])
        else:
            torch.index_select(tensor, 0, chosen[start:end], out=buffer)
        there[start:end].copy_(buffer, non_blocking=True)
        sent.append(torch.cuda.current_stream(there.device).record_event())


def _rows(tensor: Tensor, chosen: Tensor | None, start: int, end: int) -> Tensor:
    return tensor[start:end] if chosen is None else tensor.index_select(0, chosen[start:end].to(tensor.device))


def _row_bytes(tensor: Tensor) -> int:
    return tensor[:1].numel() * tensor.element_size()


# --- computed samples ------------------------------------------------------------------------------


def _fetched(source: Source, device: torch.device, progress: Progress | None) -> Columns:
    """All samples, fetched once and stacked into memory on the device."""
    columns = _fetched_by_processes(source, device, progress)
    if columns is not None:
        return columns
    total, name, measured = len(source), type(source.samples).__name__, _measured(source)
    whole = map_tensors(measured.one, lambda t: torch.empty((total, *t.shape[1:]), dtype=t.dtype, device=device))
    targets, left_out = tensors_in(whole), list[LeftOut]()
    step = min(CHUNK_SAMPLES, max(1, CHUNK_BYTES // max(1, measured.bytes)))
    source = source.for_probing()
    for start in range(0, total, step):
        end = min(total, start + step)
        samples, bad = source.read_good(range(start, end))
        rows, odd = _stacked(samples, measured.kinds) if samples else (None, None)
        if odd is not None:
            number, kinds = odd
            raise DataError(f"{name} cannot be held: {_unlike(0, measured.kinds, start + number, kinds)}")
        left_out += [one._replace(place=start + one.place) for one in bad]
        if bad:
            _place_good(targets, tensors_in(rows), start, end, [one.place for one in bad])
        else:
            for target, part in zip(targets, tensors_in(rows), strict=True):
                target[start:end].copy_(part)
        if progress is not None:
            progress(end, total)
    columns = StackedColumns(map_tensors(whole, held_once))
    columns.left_out = left_out
    return columns


def _place_good(targets: list[Tensor], parts: list[Tensor], start: int, end: int, bad: list[int]) -> None:
    """Write the rows that there are, and zeros for those at these places."""
    good = torch.tensor(sorted({*range(end - start)} - {*bad}), dtype=torch.int64)
    for target in targets:
        target[start:end].zero_()
    for target, part in zip(targets, parts, strict=bool(parts)):
        target[start:end].index_copy_(0, good.to(target.device), part.to(target.device))


def _fetched_by_processes(source: Source, device: torch.device, progress: Progress | None) -> Columns | None:
    """All samples, fetched by processes on the host and sent to the device; None if that cannot be or fails."""
    if processes_for(device, math.inf) < 2:
        return None
    alone_s = _alone_s(source)
    processes = processes_for(device, alone_s)
    if processes < 2 or why_not_held(source, CPU, reserve_bytes=0) is not None:
        return None
    one, kinds, read = _measured(source).one, _measured(source).kinds, source.for_probing().read

    def fetch(positions: Sequence[int]) -> list[Tensor]:
        rows, odd = _stacked(read(positions), kinds)
        if odd is not None:
            raise DataError("the samples differ")  # the caller fetches them itself, and says how
        return tensors_in(rows)

    try:
        found = BackgroundFetch(fetch, tensors_in(one), len(source), processes=processes, expected_s=alone_s)
    except OSError:  # no memory, or no more processes
        return None
    if not found.wait(progress):
        return None
    sent = [_brought(column, None, len(column), device) for column in found.columns][::-1]
    if progress is not None:
        progress(len(source), len(source))
    return StackedColumns(map_tensors(one, lambda _: sent.pop()))


def _stacked(samples: list[Any], wanted: _Kinds) -> tuple[Batch, tuple[int, _Kinds] | None]:
    """The samples as a batch; else the number of the first of another kind, and that kind."""
    for number, sample in enumerate(samples):
        kinds = tuple(_kinds_in(sample))
        if kinds != wanted:
            return None, (number, kinds)
    return default_collate(samples), None


def _why_not_columns(source: Source) -> str | None:
    """Why the samples cannot be columns on any device; None if they can."""
    if source.own_collate is not None:
        return "the job has its own collate function, so a batch may not be a stack of samples"
    reason = why_not_fixed(source)
    if reason is not None:
        return reason
    return _measured(source).why_not if source.computes else None


def bytes_needed(source: Source, device: torch.device = CPU) -> int:
    """Bytes that all samples need on a device, without what is there already."""
    return _measured(source).bytes * len(source) if source.computes else _sent(source, device, pretend=True)[1]


@dataclass(frozen=True)
class _Measured:
    """What a few samples show about all samples."""

    why_not: str | None = None
    kinds: _Kinds = ()
    one: Batch = None
    """The first sample as a batch."""

    @property
    def bytes(self) -> int:
        """Bytes of a sample."""
        return sum(_row_bytes(tensor) for tensor in tensors_in(self.one))


def _measured(source: Source) -> _Measured:
    """The measurement of a few samples, made once per source."""
    if "measured" not in source.findings:
        source.findings["measured"] = _measure(source)
    measured: _Measured = source.findings["measured"]
    return measured


def _measure(source: Source) -> _Measured:
    name, indices = type(source.samples).__name__, evenly_spread(len(source))
    try:
        samples, bad = source.for_probing().read_good(indices)
        indices = [index for place, index in enumerate(indices) if place not in {one.place for one in bad}]
        batch = default_collate(samples[:1])
    except Exception as error:  # the user's code may raise anything
        where = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
        return _Measured(f"samples of {name} cannot be stacked: {first_line(error)}{where}")
    wanted = tuple(_kinds_in(samples[0]))
    for index, sample in zip(indices, samples, strict=True):
        kinds = tuple(_kinds_in(sample))
        if kinds != wanted:
            return _Measured(f"samples of {name} cannot be stacked: {_unlike(0, wanted, index, kinds)}")
    if any(tensor.requires_grad for tensor in tensors_in(batch)):
        return _Measured(GRADIENTS)
    foreign = _foreign(batch) or (None if tensors_in(batch) else "no tensor")
    return _Measured(f"samples of {name} hold {foreign}, which cannot be a column" if foreign else None, wanted, batch)


_Kinds = tuple[Any, ...]
"""What must be the same in all samples to stack them: containers, dtypes and shapes, in order."""


def outline(sample: Any) -> tuple[str, ...]:
    """What must be the same in all samples to stack them, in words."""
    return tuple(map(_in_words, _kinds_in(sample)))


def _kinds_in(sample: Any) -> Iterator[Any]:
    if isinstance(sample, (Tensor, np.ndarray)):
        yield sample.dtype, tuple(sample.shape)
    elif isinstance(sample, np.generic):
        yield sample.dtype
    elif isinstance(sample, Mapping):
        yield type(sample), *sample
        for part in sample.values():
            yield from _kinds_in(part)
    else:
        parts = isinstance(sample, (tuple, list))
        yield (type(sample), len(sample)) if parts else type(sample)
        for part in sample if parts else ():
            yield from _kinds_in(part)


def _in_words(kind: Any) -> str:
    if isinstance(kind, type):
        return kind.__name__
    if not isinstance(kind, tuple):
        return str(kind)
    head, *names = kind
    if isinstance(head, type):
        return f"{head.__name__} of {', '.join(map(str, names))}"
    return f"{str(head).removeprefix('torch.')} {names[0]}"


def _unlike(index: int, wanted: _Kinds, other: int, seen: _Kinds) -> str:
    pairs = zip([*map(_in_words, wanted), "nothing"], [*map(_in_words, seen), "nothing"], strict=False)
    mine, theirs = next((a, b) for a, b in pairs if a != b)
    return f"{mine} at index {index}, {theirs} at index {other}"


def _foreign(batch: Batch) -> str | None:
    """The first value in a collated batch that is neither a tensor nor a container of a batch."""
    if isinstance(batch, Tensor):
        return None
    if isinstance(batch, Mapping):
        parts = list(batch.values())
    elif type(batch) in (tuple, list) or (isinstance(batch, tuple) and hasattr(batch, "_fields")):
        parts = list(batch)
    else:
        return kind_of(batch)
    return next((found for part in parts if (found := _foreign(part))), None)


# --- memory ----------------------------------------------------------------------------------------


def _free_bytes(device: torch.device) -> int:
    """Bytes that may be used: all free memory of a GPU, half of the host's."""
    if device.type == "cpu":
        return read_memory().free_bytes // 2
    return free_for_torch(device)


def _numbered(device: torch.device) -> torch.device:
    """The device with its index, as tensors have it."""
    return torch.empty(0, device=device).device
