"""The longest samples of a dataset: a batch size that fits them fits every batch of an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Sampler

from hotlap.data.dataset import as_source
from hotlap.data.sequences import lengths_in
from hotlap.data.sources import Source
from hotlap.engine.snapshot import Randomness

LOOKED_AT = 256
"""Samples that are fetched to find the longest, where nobody knows their lengths and fetching may take long."""


@dataclass(frozen=True, kw_only=True)
class Longest:
    """All samples of a dataset, from the longest on, and how many of them were looked at."""

    order: np.ndarray[Any, Any]
    looked_at: int
    varies: bool
    """Whether those that were looked at differ in length."""

    @property
    def words(self) -> str:
        """What batches were made of, in a line."""
        count = len(self.order)
        if self.looked_at == count:
            return (
                f"batches hold the longest of all {count:,} samples" if self.varies else "all samples are of one size"
            )
        looked = f"{self.looked_at:,} samples that were looked at, of {count:,}"
        return f"batches hold the longest of {looked}" if self.varies else f"{looked}, are of one size"


def longest_first(source: Source) -> Longest:
    """All samples, from the longest on. Where lengths are not known and samples come out of code, some are fetched."""
    count = len(source)
    lengths: Any = lengths_in(source)
    looked = np.arange(count)
    if lengths is None and source.why_not_gather() is not None:
        # To read a list costs nothing.
        if not isinstance(source.samples, (list, tuple)):
            looked = np.unique(np.linspace(0, count - 1, min(count, LOOKED_AT)).astype(np.int64))
        lengths = np.zeros(count, dtype=np.int64)
        lengths[looked] = [size_of(sample) for sample in _read(source, looked)]
    if lengths is None or len(np.unique(lengths[looked])) < 2:
        return Longest(order=np.arange(count), looked_at=len(looked), varies=False)
    return Longest(order=np.argsort(-np.asarray(lengths), kind="stable"), looked_at=len(looked), varies=True)


def longest_in(dataset: Any) -> Longest | None:
    """The longest samples of what a DataLoader reads; None where it has no samples by number."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        return None
    return longest_first(as_source(dataset, loaded=True))


class LongestFirst(Sampler[int]):
    """As many samples as there are, of which every batch of `size` has the longest."""

    def __init__(self, order: np.ndarray[Any, Any], size: int) -> None:
        self._longest, self._count = order[:size].tolist(), len(order)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return (self._longest[at % len(self._longest)] for at in range(self._count))


def size_of(sample: Any) -> int:
    """How much a sample holds: numbers of tensors and lists, letters of texts, pixels of pictures."""
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
    shape = getattr(sample, "size", None)  # Pillow's pictures have width and height
    return int(np.prod(shape)) if isinstance(shape, tuple) and all(isinstance(one, int) for one in shape) else 1


def _read(source: Source, indices: np.ndarray[Any, Any]) -> list[Any]:
    kept = Randomness(torch.device("cpu"))
    try:
        return source.for_probing().read(indices.tolist())
    finally:
        kept.restore()
