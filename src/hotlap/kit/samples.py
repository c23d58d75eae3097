"""A dataset's samples: the longest of them, and the time that its own transforms take.

A batch size that fits the longest samples fits every batch of an epoch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Sampler

from hotlap.core.units import show_seconds
from hotlap.data.dataset import as_source
from hotlap.data.sequences import lengths_in
from hotlap.data.sources import Source
from hotlap.engine.snapshot import Randomness

LENGTHS_READ = 256
"""Samples to fetch for the longest, if their lengths are unknown and fetching may be slow."""


@dataclass(frozen=True, kw_only=True)
class Longest:
    """All samples of a dataset, the longest first, and how many of them hotlap has read."""

    order: np.ndarray[Any, Any]
    looked_at: int
    varies: bool
    """Whether the read samples differ in length."""

    @property
    def words(self) -> str:
        """The samples of the batches, in a line."""
        count = len(self.order)
        if self.looked_at == count:
            return (
                f"batches hold the longest of all {count:,} samples" if self.varies else "all samples are of one size"
            )
        return (
            f"batches hold the longest of the {self.looked_at:,} samples that hotlap read, of {count:,}"
            if self.varies
            else f"the {self.looked_at:,} samples that hotlap read, of {count:,}, are of one size"
        )


def longest_first(source: Source) -> Longest:
    """All samples, the longest first. If lengths are unknown and code makes the samples, some are fetched."""
    count = len(source)
    lengths: Any = lengths_in(source)
    looked = np.arange(count)
    if lengths is None and source.why_not_gather() is not None:
        # A list costs nothing to read.
        if not isinstance(source.samples, (list, tuple)):
            looked = np.unique(np.linspace(0, count - 1, min(count, LENGTHS_READ)).astype(np.int64))
        lengths = np.zeros(count, dtype=np.int64)
        lengths[looked] = [size_of(sample) for sample in _fetched(source, looked)]
    if lengths is None or len(np.unique(lengths[looked])) < 2:
        return Longest(order=np.arange(count), looked_at=len(looked), varies=False)
    return Longest(order=np.argsort(-np.asarray(lengths), kind="stable"), looked_at=len(looked), varies=True)


def longest_in(dataset: Any) -> Longest | None:
    """The longest samples of a DataLoader's dataset; None if it has no samples by index."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    return longest_first(as_source(dataset, loaded=True))


class LongestSampler(Sampler[int]):
    """As many samples as the dataset has, with the longest in every batch of `size`."""

    def __init__(self, order: np.ndarray[Any, Any], size: int) -> None:
        self._longest, self._count = order[:size].tolist(), len(order)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (self._longest[at % len(self._longest)] for at in range(self._count))


def size_of(sample: Any) -> int:
    """The size of a sample: values of tensors and lists, letters of texts, pixels of pictures."""
    match sample:
        case Tensor():
            return sample.numel()
        case np.ndarray():
            return sample.size
        case str() | bytes():
            return len(sample)
        case Mapping():
            return sum(size_of(part) for part in sample.values())
        case list() | tuple():
            return sum(size_of(part) for part in sample)
    shape = getattr(sample, "size", None)  # width and height of Pillow's pictures
    return int(np.prod(shape)) if isinstance(shape, tuple) and all(isinstance(one, int) for one in shape) else 1


def _fetched(source: Source, indices: np.ndarray[Any, Any]) -> list[Any]:
    kept = Randomness(torch.device("cpu"))
    try:
        return source.for_probing().read(indices.tolist())
    finally:
        kept.restore()


# --- the time of a dataset's own transforms ------------------------------------------------------------------


TIMED, MOST_S = 64, 1.0
"""Most samples to read, and the seconds after which no more are read."""
WARM = 2
"""Samples before timing: the first may open files."""
ELSE = "all else"
_NAMES = ("transform", "augment", "preprocess")
"""Parts of the names of attributes that hold transforms."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The time of a transform for a sample."""

    name: str
    sample_s: float

    def __str__(self) -> str:
        return f"{self.name} {show_seconds(self.sample_s)}"


class _Timed:
    """A timed transform, otherwise the original."""

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
    """The time of each transform of a dataset for a sample in this process, and of the rest; empty without transforms.

    Reads a copy of the dataset, and restores randomness. The rest is all other work of the dataset.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or hasattr(type(dataset), "__del__"):
        return ()
    kept, timed = Randomness(torch.device("cpu")), list[_Timed]()
    try:
        other = _with_clocks(dataset, timed)
        if not timed:
            return ()
        count, spent_s = _timed_read(other, timed)
    except Exception:  # not every class can be copied; the training itself does not need this
        return ()
    finally:
        kept.restore()
    costs = [Cost(name=one.name, sample_s=one.spent_s / count) for one in timed if one.calls]
    rest_s = spent_s / count - sum(cost.sample_s for cost in costs)
    return (*costs, Cost(name=ELSE, sample_s=max(0.0, rest_s)))


def _timed_read(dataset: Any, timed: list[_Timed]) -> tuple[int, float]:
    """The number of read samples, and the seconds for them."""
    length = len(dataset)
    for at in range(min(WARM, length)):
        dataset[at]
    for one in timed:
        one.spent_s = 0.0
    begun, count = time.perf_counter(), 0
    while count < TIMED and (not count or time.perf_counter() - begun < MOST_S):
        dataset[(count * max(1, length // TIMED)) % length]
        count += 1
    return count, time.perf_counter() - begun


def _with_clocks(dataset: Any, timed: list[_Timed]) -> Any:
    """A copy of a dataset with timed transforms, and of the datasets inside."""
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
    """A timed transform; of one that holds others, these are timed."""
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
