"""A Source gives samples by index: gathered as a whole where it holds tensors, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.data import Subset, TensorDataset

from hotlap.core.data_checks import is_columns
from hotlap.data.batches import Batch
from hotlap.data.columns import Columns as Columns
from hotlap.data.columns import Selection as Selection
from hotlap.data.samples import Source as Source
from hotlap.data.windows import WindowColumns, Windows


def as_source(data: Any, collate: Callable[[list[Any]], Batch] | None = None, *, loaded: bool = False) -> Source:
    """The source for data in any form a job may have, or for what is in a DataLoader (`loaded`)."""
    # To a DataLoader a tuple or dict is a sequence of samples like any other.
    if is_columns(data) and not (loaded and isinstance(data, (tuple, Mapping))):
        return Columns(data, collate)
    # Of these classes themselves: one that builds upon them may give other samples.
    if type(data) is TensorDataset:
        return Columns(data.tensors, collate)
    if type(data) is Windows:
        return WindowColumns(data, collate)
    if type(data) is Subset:
        return Selection(as_source(data.dataset, collate, loaded=True), data.indices)
    return Source(data, collate)
