"""What a dataset's own Python transforms cost, each by itself: found where datasets keep them, and timed in turn."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from hotlap.core.units import show_seconds
from hotlap.engine.snapshot import Randomness

LOOKED_AT, MOST_S = 64, 1.0
"""Samples that are read, and the time after which no other is."""
WARM = 2
"""Samples before any is timed: the first may open files."""
ELSE = "all else"
_NAMES = ("transform", "augment", "preprocess")
"""Words in the names of attributes that hold transforms."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a transform takes for each sample."""

    name: str
    sample_s: float

    def __str__(self) -> str:
        return f"{self.name} {show_seconds(self.sample_s)}"


class _Timed:
    """A transform that is timed, and else what it was."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self._transform = transform
        self.name = getattr(transform, "__name__", None) or type(transform).__name__
        self.spent_s, self.calls = 0.0, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        begun = time.perf_counter()
        try:
            return self._transform(*args, **kwargs)
        finally:
            self.spent_s += time.perf_counter() - begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transform, name)


def costs_of(dataset: Any) -> tuple[Cost, ...]:
    """What each transform of a dataset takes for a sample in this process, and all else; none where there are none.

    A copy of the dataset is read; randomness is left as it was. What a dataset does in other ways is part of all else.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or hasattr(type(dataset), "__del__"):
        return ()
    kept, timed = Randomness(torch.device("cpu")), list[_Timed]()
    try:
        other = _with_clocks(dataset, timed)
        if not timed:
            return ()
        count, spent_s = _read(other, timed)
    except Exception:  # somebody's classes, asked to be copied; the training itself does without this
        return ()
    finally:
        kept.restore()
    costs = [Cost(name=one.name, sample_s=one.spent_s / count) for one in timed if one.calls]
    rest_s = spent_s / count - sum(one.sample_s for one in costs)
    return (*costs, Cost(name=ELSE, sample_s=max(0.0, rest_s)))


def _read(dataset: Any, timed: list[_Timed]) -> tuple[int, float]:
    """How many samples were read, and how long that took."""
    length = len(dataset)
    for at in range(min(WARM, length)):
        dataset[at]
    for one in timed:
        one.spent_s = 0.0
    begun, count = time.perf_counter(), 0
    while count < LOOKED_AT and (not count or time.perf_counter() - begun < MOST_S):
        dataset[(count * max(1, length // LOOKED_AT)) % length]
        count += 1
    return count, time.perf_counter() - begun


def _with_clocks(dataset: Any, timed: list[_Timed]) -> Any:
    """A copy of a dataset whose transforms are timed, and of those datasets that it is made of."""
    other = copy.copy(dataset)
    for name, value in list(getattr(dataset, "__dict__", {}).items()):
        if name == "dataset":
            setattr(other, name, _with_clocks(value, timed))
        elif name == "datasets":
            setattr(other, name, [_with_clocks(one, timed) for one in value])
        elif _is_transform(name):
            setattr(other, name, _clocked(value, timed))
    return other


def _clocked(transform: Any, timed: list[_Timed]) -> Any:
    """A transform that is timed; where it is made of others, these are, one by one."""
    if isinstance(transform, (list, tuple)):
        return type(transform)(_clocked(one, timed) for one in transform)
    inside = {} if isinstance(transform, nn.Module) else getattr(transform, "__dict__", {})
    others = {name: value for name, value in inside.items() if _is_transform(name) and not isinstance(value, str)}
    if others:
        made_of = copy.copy(transform)
        for name, value in others.items():
            setattr(made_of, name, _clocked(value, timed))
        return made_of
    if not callable(transform):
        return transform
    timed.append(_Timed(transform))
    return timed[-1]


def _is_transform(name: str) -> bool:
    return any(word in name for word in _NAMES)
