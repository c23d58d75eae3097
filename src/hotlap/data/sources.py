"""Sources give samples by index: one by one from any dataset, or as a whole where tensors hold them."""

from __future__ import annotations

import copy
import os
import sys
import warnings
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
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.order import HOST_GENERATORS, HostGenerator, mix

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Gives memory of a shape and dtype for one tensor of a batch; asked for them always in the same order."""

PlaceRows = Callable[[Tensor, Tensor | None], Tensor]
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
        self.reopen: Callable[[], Source] | None = None
        """Makes the source of the data as it is by then; None where it stands by itself."""
        self.findings: dict[str, Any] = {}
        """What was found out of the samples, kept so that it is found out once."""
        self._collate = collate or default_collate
        self._drawn: list[HostGenerator] | None = None
        """The generators that samples were seen to draw from; None before the first batch."""

    def __getstate__(self) -> dict[str, Any]:
        """For other processes, without what was found out in this one."""
        return {**vars(self), "findings": {}}

    def __len__(self) -> int:
        return len(self.samples)

    def why_not_gather(self) -> str | None:
        """Why whole batches cannot be indexed out of this source, or None where they can."""
        return f"{type(self.samples).__name__} gives samples one by one; gathering needs tensors or arrays"

    def never_holds(self, value: int) -> bool:
        """Whether it is known that no whole number in the samples is `value`; no, where nobody looked."""
        return False

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole: into new memory, or into what `allocate` gives."""
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

    def for_probing(self) -> Source:
        """The same samples out of a copy of the dataset, to look at them in the training process.

        A dataset that opens a file when it is first asked would else hand it on to workers, which read from one
        handle all at once. What it holds is not copied. One with a `__del__` is asked itself: a copy that goes
        would close what both hold.
        """
        kind = type(self.samples)
        if not hasattr(self.samples, "__dict__") or hasattr(kind, "__del__"):
            return _ProbedSource(self.samples, self.own_collate)
        try:
            return _ProbedSource(copy.copy(self.samples), self.own_collate)
        except Exception:  # whatever a user's class makes of being copied
            return _ProbedSource(self.samples, self.own_collate)


class _ProbedSource(Source):
    """Samples that are looked at beside the training: a dataset that seeds torch does not seed the devices."""

    def read(self, indices: Sequence[int]) -> list[Any]:
        """As the samples' own, which `torch.manual_seed` would leave a trace of."""
        seed_devices, torch.cuda.manual_seed_all = torch.cuda.manual_seed_all, _seed_nothing
        try:
            return super().read(indices)
        finally:
            torch.cuda.manual_seed_all = seed_devices


def _seed_nothing(seed: int) -> None: ...


def select_rows(tensor: Tensor, indices: Tensor, allocate: Allocate | None) -> Tensor:
    """The rows of a tensor at `indices`: one kernel on a GPU, and no wait."""
    if allocate is None:
        return tensor.index_select(0, indices)
    return torch.index_select(tensor, 0, indices, out=allocate((len(indices), *tensor.shape[1:]), tensor.dtype))


@dataclass(frozen=True, kw_only=True)
class HoldingCost:
    """What it took to bring columns where they are."""

    seconds: float
    bytes: int
    """New memory; 0 where they were there already."""


class Columns(Source):
    """Tensors that share their first dimension: batches are indexed out of them as a whole."""

    computes = False
    packs = True
    """Whether a batch is made of rows of its tensors as they are."""
    widths: tuple[int, ...] = ()
    """Of batches, where samples differ in size."""
    holding_cost: HoldingCost | None = None
    """What it took to hold them (see `resident.hold_on_device`); None for columns as the user gave them."""

    def __init__(self, columns: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        # Without itself as its samples: a cycle would keep a GPU's memory until somebody collects it.
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
        """None, unless the user makes the batches."""
        return "the job has a collate function of its own" if self.own_collate else None

    def never_holds(self, value: int) -> bool:
        """Whether no column of whole numbers, of at most one number a sample, holds `value`."""
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
        """The columns that gather these samples wherever their indices are: itself, but where samples differ in size.

        The indices are on the host.
        """
        return self

    @property
    def widest(self) -> Columns:
        """The columns whose batches are as wide as any: itself, but where samples differ in size."""
        return self

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets, one by one, as a DataLoader does; tensors draw no randomness."""
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
        """Itself: reading tensors leaves no trace."""
        return self

    def sent(self, place: PlaceRows, rows: Tensor | None = None) -> Columns:
        """Such columns of these rows (None: all), with every tensor where `place` puts it."""
        return Columns(self._packed({key: place(tensor, rows) for key, tensor in self.tensors.items()}))

    def _packed(self, parts: dict[Any, Tensor]) -> Batch:
        if self._shape == "dict":
            return parts
        return tuple(parts.values()) if self._shape == "tuple" else parts[""]


class StackedColumns(Columns):
    """Columns in the containers that default_collate gives, however nested."""

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
        """Such columns of these rows (None: all), with every tensor where `place` puts it."""
        return StackedColumns(map_tensors(self._whole, lambda tensor: place(tensor, rows)))


class Selection(Source):
    """Some rows of another source, as torch's Subset gives them."""

    def __init__(self, inner: Source, rows: Sequence[int] | Tensor) -> None:
        super().__init__(inner.samples)
        self.own_collate, self.computes, self.on_host = inner.own_collate, inner.computes, inner.on_host
        self.inner = inner
        # By numpy, in this thread: to wake others for it takes longer.
        chosen = torch.as_tensor(rows, dtype=torch.int64, device="cpu").numpy().copy()
        below = chosen < 0
        if below.any():
            chosen[below] += len(inner)
        self.rows = torch.from_numpy(chosen)
        """The chosen rows, counted from the start; on the host."""

    def __len__(self) -> int:
        return len(self.rows)

    def why_not_gather(self) -> str | None:
        """What the source beneath says."""
        return self.inner.why_not_gather()

    def never_holds(self, value: int) -> bool:
        """What the source beneath says."""
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

    def for_probing(self) -> Source:
        """The same rows of the source beneath, aside."""
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
    """The column as a tensor, without a copy where torch can read it as it lies."""
    if isinstance(column, Tensor):
        return column.detach()
    if not column.dtype.isnative or any(stride < 0 for stride in column.strides):
        column = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Read-only arrays (memory maps) are fine: batches are copies, and nobody writes to the source.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(column)


def holds(column: Tensor, value: int) -> bool:
    """Whether a column of whole numbers, one a sample, holds `value`; others are not looked at."""
    is_classes = column.ndim == 1 and not column.is_floating_point() and not column.is_complex()
    return is_classes and bool((column == value).any())


# --- Rows of tensors in the host's memory, gathered by few threads that do not wait for each other -------
#
# torch's own spin until the last of them is done, on all cores: one that a core is taken from holds up the others.


SINGLE_THREAD_BYTES = 4 * MIB
"""Bytes up to which this thread gathers alone: on an H200's host 16 of torch's took 18 µs for 300 KB in the middle, but
129 on average, where numpy took 13."""
GATHER_THREADS = 4
"""Threads that share what is more; 0 leaves all to torch. In a training on an H200 torch's 16 took 2.2 ms for 9 MB in
the middle, 2.8 on average and 189 at worst, these 2.0, 1.7 and 3.6 (`python -m benchmarks.gathering`)."""
TORCH_GRAIN = 32768
"""Numbers up to which torch gathers in one thread itself (`at::internal::GRAIN_SIZE`)."""
_NUMPYS = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.float32, torch.float64,
}  # fmt: skip
"""Kinds of number that numpy has too."""


class HostRows:
    """Gathers rows of one tensor; what comes is the same either way, to the bit and in how it lies."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._shape, self._dtype = tensor, tuple(tensor.shape[1:]), tensor.dtype
        self._by_numpy = _rows_by_numpy(tensor)

    def at(self, indices: Tensor, allocate: Allocate | None) -> Tensor:
        """The rows at `indices`, in new memory or in what `allocate` gives."""
        count = indices.numel()
        if count not in self._by_numpy or not _are_within(indices, len(self._tensor)):
            return select_rows(self._tensor, indices, allocate)
        shape = (count, *self._shape)
        there = (
            torch.empty(shape, dtype=self._dtype, device="cpu") if allocate is None else allocate(shape, self._dtype)
        )
        # "clip" spares numpy a copy in between. Asked for anew: a script may have its tensor lie elsewhere by now.
        source, places, target = self._tensor.numpy(), indices.numpy(), there.numpy()

        def take(start: int, end: int) -> None:
            source.take(places[start:end], 0, target[start:end], "clip")

        _shared(take, count, target.nbytes)
        return there


def _shared(work: Callable[[int, int], None], count: int, size: int) -> None:
    """Have so many rows of so many bytes in all gathered, by this thread and others where that pays."""
    threads = min(GATHER_THREADS, torch.get_num_threads(), count) if size > SINGLE_THREAD_BYTES else 1
    parts = deque(pairwise(count * number // threads for number in range(threads + 1)))

    def share() -> None:
        while parts:
            try:
                part = parts.popleft()
            except IndexError:  # another was faster
                return
            work(*part)

    others: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # no thread is to be had, at the end of the process for one: this one does it all
            others.extend(_gather_threads(os.getpid()).submit(share) for _ in range(threads - 1))
        share()
    finally:
        parts.clear()
        wait(others)  # whatever broke: nobody writes there any more
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _gather_threads(process: int) -> ThreadPoolExecutor:
    """Threads of this process: one that was forked off has none of those of its parent."""
    return ThreadPoolExecutor(GATHER_THREADS, thread_name_prefix="hotlap-gather")


def _are_within(indices: Tensor, length: int) -> bool:
    """Whether these are plain places in so many rows; where not, torch has its own to say of them."""
    if indices.dtype is not torch.int64 or indices.ndim != 1 or indices.device.type != "cpu":
        return False
    # What is below zero is beyond all as a number without a sign.
    return bool(indices.numpy().view(np.uint64).max() < length)


def _rows_by_numpy(tensor: Tensor) -> range:
    """How many rows are gathered by numpy; none of a tensor that it does not read as it lies."""
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
