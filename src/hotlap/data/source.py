"""A Source gives samples by index: gathered as a whole where it holds tensors, else one by one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hotlap.core.data_checks import is_columns
from hotlap.data.batches import Batch
from hotlap.data.columns import Columns as Columns
from hotlap.data.columns import Selection as Selection
from hotlap.data.samples import Source as Source
from hotlap.data.sequences import SequenceColumns, Sequences
from hotlap.data.windows import WindowColumns, Windows

_known_rows: WeakKeyDictionary[Subset[Any], tuple[list[int], Tensor]] = WeakKeyDictionary()
"""The rows of subsets, and the lists they were made of: a long list takes milliseconds to become a tensor, and whoever
looks again at the beginning of each epoch finds it the same."""


def as_source(data: Any, collate: Callable[[list[Any]], Batch] | None = None, *, loaded: bool = False) -> Source:
    """The source for data in any form a job may have, or for what is in a DataLoader (`loaded`)."""
    source = _source_of(data, collate, loaded=loaded)
    source.given, source.again = data, functools.partial(as_source, data, collate, loaded=loaded)
    return source


def _source_of(data: Any, collate: Callable[[list[Any]], Batch] | None, *, loaded: bool) -> Source:
    if (loaded or type(data) is TensorDataset) and _needs_gradients(data):
        return Source(data, collate)  # whose batches are part of a graph
    # To a DataLoader a tuple or dict is a sequence of samples like any other.
    if is_columns(data) and not (loaded and isinstance(data, (tuple, Mapping))):
        return Columns(data, collate)
    # Of these classes themselves: one that builds upon them may give other samples.
    if type(data) is TensorDataset:
        return Columns(data.tensors, collate)
    if type(data) is Windows:
        return WindowColumns(data, collate)
    if type(data) is Sequences:
        return SequenceColumns(data, collate)
    if type(data) is Subset:
        return Selection(as_source(data.dataset, collate, loaded=True), _rows_of(data))
    return Source(data, collate)


def _needs_gradients(data: Any) -> bool:
    tensors = data.tensors if type(data) is TensorDataset else (data,)
    return any(isinstance(one, Tensor) and one.requires_grad for one in tensors)


def _rows_of(subset: Subset[Any]) -> Sequence[int] | Tensor:
    indices: Any = subset.indices
    if type(indices) is not list:
        return indices  # type: ignore[no-any-return]
    known = _known_rows.get(subset)
    if known is None or known[0] != indices:
        known = _known_rows[subset] = (indices.copy(), torch.tensor(indices, dtype=torch.int64, device="cpu"))
    return known[1]
