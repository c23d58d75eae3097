"""Sources give samples by index: one by one from any dataset, or as a whole where tensors hold them."""

from __future__ import annotations

import copy
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.data_checks import named_columns
from hotlap.core.errors import DataError
from hotlap.core.units import MIB
from hotlap.core.warning_filters import filtered
from hotlap.data.bad_samples import LeftOut, Thinned, why_left_out
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.order import HOST_GENERATORS, HostGenerator, mix

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns memory of a shape and dtype for one tensor of a batch; the order of calls is the same for every batch."""

PlaceRows = Callable[[Tensor, Tensor | None], Tensor]
"""Moves some rows of a tensor (None: all) to another place."""


class Source:
    """Samples by index. This one fetches them one by one from anything indexable."""

    computes: bool = True
    """Whether code computes the samples; False where they are rows of tensors."""
    on_host: bool = True
    """Whether gathered batches are in host memory."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        self.samples = samples
        self.own_collate = collate
        """The user's collate function, or None."""
        self.given: Any = samples
        """The data as the user gave it, which may change."""
        self.in_workers = False
        """Whether the user's loader fetches samples in worker processes, where they cannot touch devices."""
        self.reopen: Callable[[], Source] | None = None
        """Makes a new source of the current data; None for a source without such data."""
        self.findings: dict[str, Any] = {}
        """Results of probing the samples, by name, so that hotlap probes once."""
        self.skips_bad = False
        """Whether samples that raise are left out of their batches."""
        self._collate = collate or default_collate
        self._drawn: list[HostGenerator] | None = None
        """The generators that samples drew from so far; None before the first batch."""

    def __getstate__(self) -> dict[str, Any]:
        """The state for other processes, without this process's findings."""
        return {**vars(self), "findings": {}}

    def __len__(self) -> int:
        return len(self.samples)

    def why_not_gather(self) -> str | None:
        """Why hotlap cannot index whole batches out of this source; None if it can."""
        return f"{type(self.samples).__name__} gives samples one by one; gathering needs tensors or arrays"

    def never_holds(self, value: int) -> bool:
        """Whether hotlap knows that no integer in the samples is `value`."""
        return False

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole, in new memory or in memory from `allocate`."""
        raise DataError(str(self.why_not_gather()))

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets (see Epoch) as a batch.

        hotlap seeds randomness inside the dataset by ticket and epoch, so that it is the same in any process and any
        batch, and leaves the training's generators untouched. Seeding costs microseconds a sample, and most datasets
        draw nothing. So hotlap seeds and checks all generators in the first batch, and later only those that moved. If
        another one moves later, hotlap fetches that batch again. A dataset with `__getitems__` gets whole batches
        as long as it draws nothing; hotlap repeats the batch in which it first draws, sample by sample. If the source
        `skips_bad`, a batch without some of its samples is `Thinned`.
        """
        before = [generator.state() for generator in HOST_GENERATORS]
        seeded: Sequence[HostGenerator] = HOST_GENERATORS
        try:
            if self._drawn is None:
                self._drawn = []
                return self._first(tickets, seed, epoch)
            while True:
                seeded = self._drawn
                batch = self._attempt(tickets, seed, epoch)
                moved = [g for g, was in zip(HOST_GENERATORS, before, strict=True) if g.moved(was, g.state())]
                surprises = [generator for generator in moved if generator not in self._drawn]
                if not surprises:
                    return batch
                self._drawn += surprises
        finally:
            for generator, was in zip(HOST_GENERATORS, before, strict=True):
                if generator in seeded or generator in (self._drawn or ()):
                    generator.restore(was)

    def _first(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The first batch, in which hotlap finds the generators that samples draw from."""
        length, samples, left_out = len(self), None, list[LeftOut]()
        if self._answers_many:
            with self._noting(mix(seed, epoch, *tickets)):
                samples, left_out = self.read_good([ticket % length for ticket in tickets])
        if samples is None or self._drawn:
            samples, left_out = [], []
            for place, ticket in enumerate(tickets):
                with self._noting(mix(seed, epoch, ticket)):
                    self._add(samples, left_out, place, ticket % length)
        with self._noting(mix(seed, epoch, *tickets)):
            return self._batch_of(samples, left_out)

    @property
    def _answers_many(self) -> bool:
        return hasattr(self.samples, "__getitems__")

    @contextmanager
    def _noting(self, number: int) -> Iterator[None]:
        """Inside, all generators are seeded with `number`; notes those that move."""
        for generator in HOST_GENERATORS:
            generator.seed(number)
        before = [generator.state() for generator in HOST_GENERATORS]
        yield
        assert self._drawn is not None
        for generator, was in zip(HOST_GENERATORS, before, strict=True):
            if generator not in self._drawn and generator.moved(was, generator.state()):
                self._drawn.append(generator)

    def _attempt(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        length = len(self)
        if not self._drawn:
            return self._batch_of(*self.read_good([ticket % length for ticket in tickets]))
        samples, left_out = list[Any](), list[LeftOut]()
        for place, ticket in enumerate(tickets):
            self._seed(mix(seed, epoch, ticket))
            self._add(samples, left_out, place, ticket % length)
        self._seed(mix(seed, epoch, *tickets))  # for a collate function that draws
        return self._batch_of(samples, left_out)

    def _add(self, samples: list[Any], left_out: list[LeftOut], place: int, index: int) -> None:
        """Read one sample into `samples`, or, if it raises and may be skipped, into `left_out`."""
        try:
            samples += self.read([index])
        except Exception as error:
            if not self.skips_bad:
                raise
            left_out.append(LeftOut(place, index, why_left_out(error)))

    def _batch_of(self, samples: list[Any], left_out: list[LeftOut]) -> Batch:
        if not left_out:
            return self._collate(samples)
        return Thinned(self._collate(samples) if samples else None, left_out)

    def read_good(self, indices: Sequence[int]) -> tuple[list[Any], list[LeftOut]]:
        """The samples at these indices, and those that raised, if the source `skips_bad`; else as `read`."""
        if not self.skips_bad:
            return self.read(indices), []
        if self._answers_many:
            with suppress(Exception):  # each sample shows below whether it raises
                return self.read(indices), []
        samples, left_out = list[Any](), list[LeftOut]()
        for place, index in enumerate(indices):
            self._add(samples, left_out, place, index)
        return samples, left_out

    def _seed(self, number: int) -> None:
        for generator in self._drawn or ():
            generator.seed(number)

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices, with one call where the dataset has `__getitems__`."""
        if not self._answers_many:
            last = None
            try:
                return [self.samples[last := index] for index in indices]
            except Exception as error:
                error.add_note(f"hotlap: while fetching sample {last} of {type(self.samples).__name__}")
                raise
        try:
            found = list(self.samples.__getitems__(list(indices)))
        except Exception as error:
            error.add_note(f"hotlap: while fetching {self._culprit(indices)} of {type(self.samples).__name__}")
            raise
        if len(found) != len(indices):
            raise DataError(
                f"{type(self.samples).__name__}.__getitems__ gave {len(found)} samples for {len(indices)} indices"
            )
        return found

    def _culprit(self, indices: Sequence[int]) -> str:
        """Which of these samples raises by itself, in words."""
        for index in indices:
            try:
                self.samples.__getitems__([index])
            except Exception:
                return f"sample {index}"
        return f"samples {', '.join(map(str, indices))}"

    def for_probing(self) -> Source:
        """The same samples from a shallow copy of the dataset, for probing in the training process.

        Otherwise a dataset that opens a file on first use would share the handle with all workers. A dataset with a
        `__del__` is not copied: when the copy goes, it would close what both hold.
        """
        kind = type(self.samples)
        samples = self.samples
        if hasattr(samples, "__dict__") and not hasattr(kind, "__del__"):
            with suppress(Exception):  # a user's class may raise anything when it is copied
                samples = copy.copy(samples)
        found = _ProbedSource(samples, self.own_collate)
        found.skips_bad = self.skips_bad
        return found


class _ProbedSource(Source):
    """Samples for probing: a dataset that seeds torch does not seed the devices."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices; `torch.manual_seed` leaves the devices alone."""
        seed_devices, torch.cuda.manual_seed_all = torch.cuda.manual_seed_all, _seed_nothing
        try:
            return super().read(indices)
        finally:
            torch.cuda.manual_seed_all = seed_devices


def _seed_nothing(seed: int) -> None: ...


def select_rows(tensor: Tensor, indices: Tensor, allocate: Allocate | None) -> Tensor:
    """The rows of a tensor at `indices`: on a GPU one kernel, without a wait."""
    if allocate is None:
        return tensor.index_select(0, indices)
    return torch.index_select(tensor, 0, indices, out=allocate((len(indices), *tensor.shape[1:]), tensor.dtype))


@dataclass(frozen=True, kw_only=True)
class HoldingCost:
    """The cost of moving columns to their device."""

    seconds: float
    bytes: int
    """New memory; 0 if they were there already."""


class Columns(Source):
    """Tensors that share their first dimension, out of which hotlap indexes whole batches."""

    computes = False
    packs = True
    """Whether a batch consists of unchanged rows of its tensors."""
    widths: tuple[int, ...] = ()
    """Widths of batches, if samples differ in size."""
    left_out: Sequence[LeftOut] = ()
    """Samples that raised while hotlap fetched them; their rows hold zeros."""
    holding_cost: HoldingCost | None = None
    """The cost of holding them (see `resident.hold_on_device`); None for columns as the user gave them."""

    def __init__(self, columns: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        # Without itself as its samples: a cycle would keep GPU memory until garbage collection.
        super().__init__(None, collate)
        self.given = columns
        self.tensors = {key: as_tensor(column) for key, column in named_columns(columns).items()}
        self._shape = "dict" if isinstance(columns, Mapping) else "tuple" if isinstance(columns, tuple) else ""
        self._in_order = list(self.tensors.values())
        self._device = self._in_order[0].device
        self.on_host = self._device.type == "cpu"
        self._rows = [HostRows(tensor) for tensor in self._in_order] if self.on_host else []

    def __len__(self) -> int:
        return len(self._in_order[0])

    def __getitem__(self, index: int) -> Batch:
        return self._packed({key: tensor[index] for key, tensor in self.tensors.items()})

    def why_not_gather(self) -> str | None:
        """None, unless the job has a collate function."""
        return "the job has its own collate function" if self.own_collate else None

    def never_holds(self, value: int) -> bool:
        """Whether no integer column with one number a sample holds `value`."""
        return not self.own_collate and not any(holds(column, value) for column in self._in_order)

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole."""
        if self.on_host:
            found = [rows.at(indices, allocate) for rows in self._rows]
        else:
            indices = indices.to(self._device)
            found = [select_rows(tensor, indices, allocate) for tensor in self._in_order]
        return tuple(found) if self._shape == "tuple" else self._packed(dict(zip(self.tensors, found, strict=True)))

    def at_width_of(self, indices: Tensor) -> Columns:
        """The columns whose batches have the width of these samples; itself, unless samples differ in size.

        The indices are on the host.
        """
        return self

    @property
    def widest(self) -> Columns:
        """The columns with the widest batches; itself, unless samples differ in size."""
        return self

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets, one by one, as a DataLoader does; tensors draw no random numbers."""
        if self.own_collate:
            return super().fetch(tickets, seed, epoch)
        length = len(self)
        samples = [self[ticket % length] for ticket in tickets]
        batch = default_collate(samples)
        return tuple(batch) if self._shape == "tuple" else batch

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices."""
        return [self[index] for index in indices]

    def for_probing(self) -> Source:
        """Itself, since reading tensors leaves no trace."""
        return self

    def sent(self, place: PlaceRows, rows: Tensor | None = None) -> Columns:
        """These rows (None: all) as such columns, each tensor moved by `place`."""
        return Columns(self._packed({key: place(tensor, rows) for key, tensor in self.tensors.items()}))

    def _packed(self, parts: dict[Any, Tensor]) -> Batch:
        if self._shape == "dict":
            return parts
        return tuple(parts.values()) if self._shape == "tuple" else parts[""]


class StackedColumns(Columns):
    """Columns in the nested containers of default_collate."""

    def __init__(self, whole: Batch) -> None:
        super().__init__(tuple(tensors_in(whole)))
        self._whole = whole

    def __getitem__(self, index: int) -> Batch:
        return map_tensors(self._whole, lambda tensor: tensor[index])

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole."""
        if not self.on_host:
            indices = indices.to(self._device)
        return map_tensors(self._whole, lambda tensor: select_rows(tensor, indices, allocate))

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets."""
        length = len(self)
        return self.gather(torch.tensor([ticket % length for ticket in tickets]))

    def sent(self, place: PlaceRows, rows: Tensor | None = None) -> Columns:
        """These rows (None: all) as such columns, each tensor moved by `place`."""
        return StackedColumns(map_tensors(self._whole, lambda tensor: place(tensor, rows)))


class Selection(Source):
    """Some rows of another source, as in torch's Subset."""

    def __init__(self, inner: Source, rows: Sequence[int] | Tensor) -> None:
        super().__init__(inner.samples)
        self.own_collate, self.computes, self.on_host = inner.own_collate, inner.computes, inner.on_host
        self.skips_bad = inner.skips_bad
        self.inner = inner
        # By numpy, in this thread: waking others takes longer.
        chosen = torch.as_tensor(rows, dtype=torch.int64, device="cpu").numpy().copy()
        below = chosen < 0
        if below.any():
            chosen[below] += len(inner)
        self.rows = torch.from_numpy(chosen)
        """The chosen rows as non-negative indices, on the host."""

    def __len__(self) -> int:
        return len(self.rows)

    def why_not_gather(self) -> str | None:
        """The answer of the inner source."""
        return self.inner.why_not_gather()

    def never_holds(self, value: int) -> bool:
        """The answer of the inner source."""
        return self.inner.never_holds(value)

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The samples at `indices` of the selection; the indices are on the host."""
        return self.inner.gather(self.rows.index_select(0, indices), allocate)

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets of the selection, one by one."""
        mine, inner = len(self), len(self.inner)
        return self.inner.fetch([int(self.rows[t % mine]) + t // mine * inner for t in tickets], seed, epoch)

    def read(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these indices of the selection."""
        return self.inner.read([int(self.rows[index]) for index in indices])

    def read_good(self, indices: Sequence[int]) -> tuple[list[Any], list[LeftOut]]:
        """The samples at these indices of the selection, and those of the inner source that raised."""
        return self.inner.read_good([int(self.rows[index]) for index in indices])

    def for_probing(self) -> Source:
        """The same rows of the inner source, for probing."""
        return Selection(self.inner.for_probing(), self.rows)


def tensors_in(batch: Batch) -> list[Tensor]:
    """All tensors of a batch, in the order in which `map_tensors` meets them."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, note)
    return found


def as_tensor(column: Tensor | np.ndarray[Any, Any]) -> Tensor:
    """The column as a tensor, without a copy if torch can read its memory."""
    if isinstance(column, Tensor):
        return column.detach()
    if not column.dtype.isnative or any(stride < 0 for stride in column.strides):
        column = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("="))
    # Read-only arrays (memory maps) are fine: batches are copies.
    with filtered(message="The given NumPy array is not writ"):
        return torch.from_numpy(column)


def holds(column: Tensor, value: int) -> bool:
    """Whether an integer column with one number a sample holds `value`; False for other columns."""
    is_classes = column.ndim == 1 and not column.is_floating_point() and not column.is_complex()
    return is_classes and bool((column == value).any())


# --- Rows of tensors in host memory, gathered by a few threads that do not wait for each other -----------
#
# torch's threads spin on all cores until the last is done: one that loses its core holds up the others.


SINGLE_THREAD_BYTES = 4 * MIB
"""Bytes up to which this thread gathers alone. On the host of an H200, 16 torch threads took 18 µs (median) and 129 µs
(mean) for 300 KB; numpy took 13 µs."""
GATHER_THREADS = 4
"""Threads for larger batches; 0 leaves all to torch. For 9 MB in a training on an H200, 16 torch threads took 2.2 ms
(median), 2.8 (mean) and 189 (worst), these 2.0, 1.7 and 3.6 (`python -m benchmarks.gathering`)."""
TORCH_GRAIN = 32768
"""Elements up to which torch itself uses one thread (`at::internal::GRAIN_SIZE`)."""
_NUMPYS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
"""Dtypes that numpy has too."""


class HostRows:
    """Gathers rows of one tensor, by numpy or torch; the result is the same bit for bit and in memory order."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._shape, self._dtype = tensor, tuple(tensor.shape[1:]), tensor.dtype
        self._by_numpy = _rows_by_numpy(tensor)

    def at(self, indices: Tensor, allocate: Allocate | None) -> Tensor:
        """The rows at `indices`, in new memory or in memory from `allocate`."""
        count = indices.numel()
        if count not in self._by_numpy or not _are_within(indices, len(self._tensor)):
            return select_rows(self._tensor, indices, allocate)
        shape = (count, *self._shape)
        there = (
            torch.empty(shape, dtype=self._dtype, device="cpu") if allocate is None else allocate(shape, self._dtype)
        )
        # "clip" spares numpy a temporary copy. `numpy()` anew each time: a script may have moved its tensor's memory.
        source, places, target = self._tensor.numpy(), indices.numpy(), there.numpy()

        def take(start: int, end: int) -> None:
            source.take(places[start:end], 0, target[start:end], "clip")

        _shared(take, count, target.nbytes)
        return there


def _shared(work: Callable[[int, int], None], count: int, size: int) -> None:
    """Gather `count` rows of `size` bytes in all, by this thread, and by others if that pays."""
    threads = min(GATHER_THREADS, torch.get_num_threads(), count) if size > SINGLE_THREAD_BYTES else 1
    parts = deque(pairwise(count * number // threads for number in range(threads + 1)))

    def share() -> None:
        while parts:
            try:
                part = parts.popleft()
            except IndexError:  # another thread was faster
                return
            work(*part)

    others: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # no threads, as at the end of the process: this one does everything
            others.extend(_gather_threads(os.getpid()).submit(share) for _ in range(threads - 1))
        share()
    finally:
        parts.clear()
        wait(others)  # after an error too: no thread writes there any more
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _gather_threads(process: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child has none of its parent's."""
    return ThreadPoolExecutor(GATHER_THREADS, thread_name_prefix="hotlap-gather")


def _are_within(indices: Tensor, length: int) -> bool:
    """Whether these are valid non-negative indices; otherwise torch handles them or raises its own error."""
    if indices.dtype is not torch.int64 or indices.ndim != 1 or indices.device.type != "cpu":
        return False
    # As unsigned numbers, negative indices are larger than any length.
    return bool(indices.numpy().view(np.uint64).max() < length)


def _rows_by_numpy(tensor: Tensor) -> range:
    """The numbers of rows that numpy gathers; empty for a tensor whose memory numpy cannot read."""
    is_plain = (
        type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in _NUMPYS
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_neg()
        and tensor.numel() > 0
    )
    if not is_plain or not GATHER_THREADS:
        return range(0)
    return range(TORCH_GRAIN // tensor[:1].numel() + 1, sys.maxsize)
