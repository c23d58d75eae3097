"""Whether another feed brings the same samples in the same order, bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotlap.data.batches import Batch, to_device
from hotlap.data.resident import gathered
from hotlap.engine.step import Window

NEXT, SPREAD, LAST = 3, 3, 2
"""Windows that are looked at: the next ones, some of the rest of the epoch, the last ones. A sample that is another in
one of them is seen, and a feed that ends early; one that errs only in windows between them is not."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Brought(Protocol):
    """Windows by their numbers."""

    def __contains__(self, number: int) -> bool:
        """Whether it is there."""

    def __getitem__(self, number: int) -> Window:
        """The window."""


def chosen_windows(first: int, length: int) -> list[int]:
    """Which windows of an epoch to look at, from a place in it."""
    last = max(0, length - LAST)
    between = [first + NEXT + (last - first - NEXT) * n // SPREAD for n in range(SPREAD)]
    wanted = {*range(first, first + NEXT), *between, *range(last, length)}
    return sorted(number for number in wanted if 0 <= number < length)


def why_other_samples(truth: Brought, seen: Brought, numbers: Sequence[int], device: torch.device) -> str | None:
    """What the windows of these numbers, as a feed brings them, have other than the user's own; None where nothing."""
    for number in numbers:
        if number not in seen:
            return f"the feed ends before window {number} of the epoch"
        reason = _why_other(truth[number], seen[number], device)
        if reason is not None:
            return f"the feed brings other samples: in window {number} of the epoch {reason}"
    return None


def _why_other(truth: Window, seen: Window, device: torch.device) -> str | None:
    if truth.sizes != seen.sizes or len(truth.pieces) != len(seen.pieces):
        return f"there are {seen.sizes} samples, not {truth.sizes}"
    for mine, theirs in zip(truth.pieces, seen.pieces, strict=True):
        reason = why_unlike(to_device(gathered(mine), device), to_device(gathered(theirs), device), "the batch")
        if reason is not None:
            return reason
    return None


def why_unlike(mine: Batch, theirs: Batch, where: str) -> str | None:
    """What a batch, `where` in words, has other than the user's own (`mine`), to the bit; None where nothing."""
    if isinstance(mine, Tensor):
        return _tensors_differ(mine, theirs, where)
    if type(mine) is not type(theirs):
        return f"{where} is a {type(theirs).__name__}, not a {type(mine).__name__}"
    if isinstance(mine, Mapping):
        if list(mine) != list(theirs):
            return f"{where} has other names"
        return _first(why_unlike(mine[name], theirs[name], f"part {name!r}") for name in mine)
    if isinstance(mine, PackedSequence):
        return _first(why_unlike(a, b, where) for a, b in zip(mine, theirs, strict=True))
    if isinstance(mine, (tuple, list)):
        if len(mine) != len(theirs):
            return f"{where} has {len(theirs)} parts, not {len(mine)}"
        return _first(why_unlike(a, b, f"part {n}") for n, (a, b) in enumerate(zip(mine, theirs, strict=True)))
    return None if _is_equal(mine, theirs) else f"{where} holds another {type(mine).__name__}"


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _is_equal(mine: Any, theirs: Any) -> bool:
    if not any("__eq__" in vars(kind) for kind in type(mine).__mro__[:-1]):
        return True  # a thing of the user's own, of which each process has another
    try:
        return bool(mine == theirs)
    except Exception:  # whatever a user's class, or an array, makes of being compared
        return repr(mine) == repr(theirs)


def _tensors_differ(mine: Tensor, theirs: Any, where: str) -> str | None:
    if not isinstance(theirs, Tensor):
        return f"{where} is a {type(theirs).__name__}, not a tensor"
    if (mine.shape, mine.dtype, mine.layout) != (theirs.shape, theirs.dtype, theirs.layout):
        return f"{where} is {_kind(theirs)}, not {_kind(mine)}"
    other = _bits(mine) != _bits(theirs)
    if not other.any():
        return None
    if not other.ndim:
        return f"{where} differs"
    rows = int(other.reshape(len(other), -1).any(1).sum())
    return f"{rows} of {len(other)} rows of {where} differ"


def _bits(tensor: Tensor) -> Tensor:
    """As whole numbers: what is not a number is not equal to itself, and -0 is equal to 0."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
