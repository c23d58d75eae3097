"""Batches are tensors in tuples, lists and dicts; these functions reach into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hotlap.core.errors import DataError
from hotlap.data.order import even_cuts

Batch = Any
"""A tensor, or a tuple, list or mapping of batches; what is no tensor is passed on as it is."""


def map_tensors(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with every tensor changed, in the same containers."""
    if isinstance(batch, Tensor):
        return change(batch)
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
    """The batch on `device`; a batch that is there already is returned without a copy."""
    if type(batch) is tuple:  # the usual case, spared the closure and the type checks of each step
        return tuple(
            part.to(device, non_blocking=non_blocking)
            if isinstance(part, Tensor)
            else to_device(part, device, non_blocking=non_blocking)
            for part in batch
        )
    return map_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def first_tensor(batch: Batch) -> Tensor | None:
    """The first tensor found in the batch, depth first."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_tensors(batch, keep)
    return found[0] if found else None


def count_samples(batch: Batch) -> int:
    """Samples in the batch: the first dimension of its first tensor."""
    tensor = first_tensor(batch)
    if tensor is None or tensor.ndim == 0:
        raise DataError(f"cannot count the samples of a batch of {type(batch).__name__} without tensors")
    return len(tensor)


def cut(batch: Batch, largest: int) -> tuple[list[Batch], list[int]]:
    """The batch in even pieces of at most `largest` samples, and their sizes."""
    total = count_samples(batch)
    if total <= largest:
        return [batch], [total]
    bounds = list(pairwise(even_cuts(total, largest)))
    pieces = [map_tensors(batch, partial(_rows, start=start, end=end)) for start, end in bounds]
    return pieces, [end - start for start, end in bounds]


def _rows(tensor: Tensor, start: int, end: int) -> Tensor:
    return tensor[start:end]
