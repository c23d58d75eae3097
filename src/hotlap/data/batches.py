"""Batches are tensors in tuples, lists and dicts; these functions reach into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotlap.core.errors import DataError
from hotlap.data.order import even_cuts

Batch = Any
"""A tensor, or a tuple, list or mapping of batches; other values pass unchanged."""


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed, in the same containers."""
    if isinstance(batch, Tensor):
        return change(batch)
    if isinstance(batch, PackedSequence):
        # Its batch sizes always stay on the host.
        rest = (None if part is None else change(part) for part in (batch.sorted_indices, batch.unsorted_indices))
        return PackedSequence(change(batch.data), batch.batch_sizes, *rest)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(part, change) for part in batch))
    if type(batch) in (tuple, list):
        return type(batch)(map_tensors(part, change) for part in batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(part, change) for key, part in batch.items()}
        return changed if type(batch) is dict else _rebuilt(batch, changed)
    return batch


def _rebuilt(batch: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    try:
        return type(batch)(changed)  # type: ignore[call-arg]
    except TypeError:
        return changed


def to_device(batch: Batch, device: torch.device, *, non_blocking: bool = False) -> Batch:
    """The batch on `device`, without a copy if it is there already."""
    if type(batch) is tuple:  # the usual case, without the closure and type checks in each step
        return tuple(
            part.to(device, non_blocking=non_blocking)
            if isinstance(part, Tensor)
            else to_device(part, device, non_blocking=non_blocking)
            for part in batch
        )
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def count_samples(batch: Batch) -> int | None:
    """Samples in the batch: the first dimension of its first tensor that has one; None if no tensor has."""
    if isinstance(batch, (Tensor, np.ndarray)):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    for part in parts:
        if isinstance(part, (Tensor, np.ndarray, Mapping, tuple, list)):
            found = count_samples(part)
            if found is not None:
                return found
    return None


def cut(batch: Batch, largest: int) -> tuple[list[Batch], list[int]]:
    """The batch in even pieces of at most `largest` samples, and their sizes.

    hotlap cuts tensors and lists with one entry a sample. Values of another length, such as class weights, go whole
    into every piece.
    """
    total = count_samples(batch)
    if total is None:
        raise DataError(
            f"a batch of {type(batch).__name__} has no tensor whose first dimension counts samples, "
            "so it cannot be cut into micro-batches; leave micro_batch out of the plan"
        )
    if total <= largest:
        return [batch], [total]
    bounds = list(pairwise(even_cuts(total, largest)))
    return [_rows(batch, total, a, b) for a, b in bounds], [b - a for a, b in bounds]


def _rows(batch: Batch, total: int, start: int, end: int) -> Batch:
    if isinstance(batch, (Tensor, np.ndarray)):
        return batch[start:end] if batch.ndim and len(batch) == total else batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_rows(part, total, start, end) for part in batch))
    if type(batch) is tuple:
        return tuple(_rows(part, total, start, end) for part in batch)
    if type(batch) is list:
        # A list with one entry a sample, unless it holds the tensors of the batch.
        if len(batch) == total and not any(
            isinstance(part, Tensor) and part.ndim and len(part) == total for part in batch
        ):
            return batch[start:end]
        return [_rows(part, total, start, end) for part in batch]
    if isinstance(batch, Mapping):
        changed = {key: _rows(part, total, start, end) for key, part in batch.items()}
        return changed if type(batch) is dict else _rebuilt(batch, changed)
    return batch
