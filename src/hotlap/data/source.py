"""A Source gives samples by index: gathered as a whole where it holds tensors, else one by one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from hotlap.core.errors import DataError
from hotlap.core.job import is_columns, named_columns
from hotlap.data.batches import Batch
from hotlap.data.randomness import HOST, Generator, mix


class Source:
    """Samples by index. This one fetches them one by one from anything indexable."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        self._samples = samples
        self._collate = collate or default_collate
        self._drawn: list[Generator] = []

    def __len__(self) -> int:
        return len(self._samples)

    def why_not_gather(self) -> str | None:
        """Why whole batches cannot be indexed out of this source, or None where they can."""
        return f"{type(self._samples).__name__} gives samples one by one; gathering needs tensors or arrays"

    def never_holds(self, value: int) -> bool:
        """Whether it is known that no whole number in the samples is `value`; no, where nobody looked."""
        return False

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole."""
        raise DataError(str(self.why_not_gather()))

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets (see Epoch) as a batch, fetched one by one.

        Randomness inside the dataset is seeded by ticket and epoch, so that it is the same in any process
        and any batch, and leaves the training's untouched. Seeding costs microseconds a sample, and most
        datasets draw nothing: the generators are looked at before and after, and only where one has moved
        is the batch fetched again, with that one seeded from there on.
        """
        before = [generator.state() for generator in HOST]
        try:
            while True:
                batch = self._attempt(tickets, seed, epoch)
                moved = [g for g, was in zip(HOST, before, strict=True) if g.moved(was, g.state())]
                surprises = [generator for generator in moved if generator not in self._drawn]
                if not surprises:
                    return batch
                self._drawn += surprises
        finally:
            for generator, was in zip(HOST, before, strict=True):
                if generator in self._drawn:
                    generator.restore(was)

    def _attempt(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        length = len(self)
        if not self._drawn:
            return self._collate(self._read([ticket % length for ticket in tickets]))
        samples = []
        for ticket in tickets:
            self._seed(mix(seed, epoch, ticket))
            samples += self._read([ticket % length])
        self._seed(mix(seed, epoch, *tickets))  # for a collate function that draws
        return self._collate(samples)

    def _seed(self, number: int) -> None:
        for generator in self._drawn:
            generator.seed(number)

    def _read(self, indices: Sequence[int]) -> list[Any]:
        if hasattr(self._samples, "__getitems__"):
            return list(self._samples.__getitems__(list(indices)))
        return [self._samples[index] for index in indices]


class Columns(Source):
    """Tensors that share their first dimension: batches are indexed out of them as a whole."""

    def __init__(self, columns: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        self.tensors = {key: _as_tensor(column) for key, column in named_columns(columns).items()}
        self._shape = "dict" if isinstance(columns, Mapping) else "tuple" if isinstance(columns, tuple) else ""
        self._own_collate = collate
        self._in_order = list(self.tensors.values())
        self._device = self._in_order[0].device
        self._on_host = self._device.type == "cpu"
        super().__init__(self, collate)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, index: int) -> Batch:
        return self._packed({key: tensor[index] for key, tensor in self.tensors.items()})

    def why_not_gather(self) -> str | None:
        """None, unless the user makes the batches."""
        return "the job has a collate function of its own" if self._own_collate else None

    def never_holds(self, value: int) -> bool:
        """Whether no column of whole numbers, of at most one number a sample, holds `value`."""
        if self._own_collate:
            return False
        classes = [t for t in self.tensors.values() if t.ndim == 1 and not t.is_floating_point() and not t.is_complex()]
        return not any(bool((column == value).any()) for column in classes)

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole."""
        if not self._on_host:
            indices = indices.to(self._device)
        if self._shape == "tuple":
            return tuple(tensor.index_select(0, indices) for tensor in self._in_order)
        return self._packed({key: tensor.index_select(0, indices) for key, tensor in self.tensors.items()})

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets, one by one, as a DataLoader does; tensors draw no randomness."""
        if self._own_collate:
            return super().fetch(tickets, seed, epoch)
        length = len(self)
        samples = [self[ticket % length] for ticket in tickets]
        batch = default_collate(samples)
        return tuple(batch) if self._shape == "tuple" else batch

    def _packed(self, parts: dict[Any, Tensor]) -> Batch:
        if self._shape == "dict":
            return parts
        return tuple(parts.values()) if self._shape == "tuple" else parts[""]


class Selection(Source):
    """Some rows of another source, as torch's Subset gives them."""

    def __init__(self, inner: Source, rows: Sequence[int]) -> None:
        super().__init__(self)
        self._inner = inner
        given = torch.as_tensor(rows, dtype=torch.int64)
        self._rows = torch.where(given < 0, given + len(inner), given)

    def __len__(self) -> int:
        return len(self._rows)

    def why_not_gather(self) -> str | None:
        """What the source beneath says."""
        return self._inner.why_not_gather()

    def never_holds(self, value: int) -> bool:
        """What the source beneath says."""
        return self._inner.never_holds(value)

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` of the selection."""
        return self._inner.gather(self._rows.index_select(0, indices))

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets of the selection, one by one."""
        mine, inner = len(self), len(self._inner)
        return self._inner.fetch([int(self._rows[t % mine]) + t // mine * inner for t in tickets], seed, epoch)


def as_source(data: Any, collate: Callable[[list[Any]], Batch] | None = None, *, loaded: bool = False) -> Source:
    """The source for data in any form a job may have, or for what is in a DataLoader (`loaded`)."""
    # To a DataLoader a tuple or dict is a sequence of samples like any other.
    if is_columns(data) and not (loaded and isinstance(data, (tuple, Mapping))):
        return Columns(data, collate)
    if type(data) is TensorDataset:
        return Columns(data.tensors, collate)
    if type(data) is Subset:
        return Selection(as_source(data.dataset, collate, loaded=True), data.indices)
    return Source(data, collate)


def _as_tensor(column: Tensor | np.ndarray[Any, Any]) -> Tensor:
    if isinstance(column, Tensor):
        return column.detach()
    if not column.dtype.isnative or any(stride < 0 for stride in column.strides):
        column = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Read-only arrays (memory maps) are fine: batches are copies, and nobody writes to the source.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(column)
