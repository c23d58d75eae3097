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
from hotlap.data.order import HostRandomness, mix, seed_host


class Source:
    """Samples by index. This one fetches them one by one from anything indexable."""

    def __init__(self, samples: Any, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        self._samples = samples
        self._collate = collate or default_collate
        self._random = False

    def __len__(self) -> int:
        return len(self._samples)

    def why_not_gather(self) -> str | None:
        """Why whole batches cannot be indexed out of this source, or None where they can."""
        return f"{type(self._samples).__name__} gives samples one by one; gathering needs tensors or arrays"

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole."""
        raise DataError(str(self.why_not_gather()))

    def fetch(self, indices: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples at `indices` as a batch, fetched one by one.

        Randomness inside the dataset is seeded by sample and epoch, so that it is the same in any
        process and any batch. Seeding costs microseconds a sample; a dataset that draws nothing is
        spared it: the generators are compared before and after, and only where one has moved is
        the batch fetched again, seeded, and seeding kept on from there.
        """
        before = HostRandomness()
        try:
            if not self._random:
                batch = self._collate(self._read(indices))
                if before.same_as(HostRandomness()):
                    return batch
                self._random = True
            samples = []
            for index in indices:
                seed_host(mix(seed, epoch, index))
                samples += self._read([index])
            seed_host(mix(seed, epoch, *indices))  # for a collate function that draws
            return self._collate(samples)
        finally:
            before.restore()

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
        self._device = next(iter(self.tensors.values())).device
        super().__init__(self)

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def why_not_gather(self) -> str | None:
        """None, unless the user makes the batches."""
        return "the job has a collate function of its own" if self._own_collate else None

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` as a batch, indexed as a whole."""
        indices = indices.to(self._device)
        return self._packed({key: tensor.index_select(0, indices) for key, tensor in self.tensors.items()})

    def fetch(self, indices: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples at `indices`, one by one, as a DataLoader does; tensors draw no randomness."""
        samples = [self._packed({key: tensor[i] for key, tensor in self.tensors.items()}) for i in indices]
        if self._own_collate:
            return self._own_collate(samples)
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
        self._rows = torch.as_tensor(rows, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._rows)

    def why_not_gather(self) -> str | None:
        """What the source beneath says."""
        return self._inner.why_not_gather()

    def gather(self, indices: Tensor) -> Batch:
        """The samples at `indices` of the selection."""
        return self._inner.gather(self._rows.index_select(0, indices))

    def fetch(self, indices: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples at `indices` of the selection, one by one."""
        return self._inner.fetch([int(self._rows[i]) for i in indices], seed, epoch)


def as_source(data: Any, collate: Callable[[list[Any]], Batch] | None = None) -> Source:
    """The source for data in any form a job may have, but a DataLoader."""
    if is_columns(data):
        return Columns(data, collate)
    if type(data) is TensorDataset:
        return Columns(data.tensors, collate)
    if type(data) is Subset:
        return Selection(as_source(data.dataset, collate), data.indices)
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
