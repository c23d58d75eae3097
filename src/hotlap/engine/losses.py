"""Losses of torch's own that wait for the device without need, made so that they do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.nn.functional as F
from torch import Tensor

_OWN = F.cross_entropy
_IS_TORCHS = getattr(getattr(_OWN, "__code__", None), "co_filename", None) == F.__file__
"""Libraries put losses of theirs in the place of torch's, and may have come first."""
_P = ParamSpec("_P")
_T = TypeVar("_T")


@functools.wraps(_OWN)
def cross_entropy(
    input: Tensor,  # noqa: A002 - as torch calls it
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """torch's own, but with weights of classes and smoothed labels it does not look for targets that are ignored.

    For their mean torch picks the weights of those that count, and waits until it is known how many these are. Here
    the others weigh nothing. The numbers are the same, bit by bit where no target is ignored, else to rounding.
    """
    waits = (
        weight is not None
        and label_smoothing > 0
        and reduction == "mean"
        and size_average is None
        and reduce is None
        and not target.is_floating_point()
    )
    if not waits:
        return _OWN(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)
    assert weight is not None
    of_classes = 0 if input.ndim == 1 else 1
    logs = F.log_softmax(input, of_classes)
    plain = F.nll_loss(logs, target, weight, ignore_index=ignore_index)
    ignored = target == ignore_index
    spread = [1] * input.ndim
    spread[of_classes] = weight.shape[0]
    smooth = -(logs * weight.view(spread)).sum(of_classes)
    counted = weight.gather(0, target.masked_fill(ignored, 0).flatten()).masked_fill(ignored.flatten(), 0)
    smooth = smooth.masked_fill(ignored, 0).sum() / counted.sum()
    return (1 - label_smoothing) * plain + smooth * (label_smoothing / input.shape[of_classes])


def standing_in(own: Callable[..., Any]) -> Callable[..., Any]:
    """What is called in the place of a loss of torch's own; somebody else's stays what it is."""
    return cross_entropy if own is _OWN and _IS_TORCHS else own


def without_waiting(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Work in which torch's losses do not wait, called by whatever name: by a layer, or by a function of the user's."""

    @functools.wraps(work)
    def waiting_for_nothing(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        own: Any = F.cross_entropy
        F.cross_entropy = standing_in(own)
        try:
            return work(*args, **kwargs)
        finally:
            F.cross_entropy = own

    return waiting_for_nothing
