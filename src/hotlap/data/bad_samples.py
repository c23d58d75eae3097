"""Samples that raise: where a job allows it, hotlap leaves them out of their batches, and lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from hotlap.core.errors import DataError, first_line


class LeftOut(NamedTuple):
    """A sample that raised."""

    place: int
    """Its place among the samples that were asked for."""
    sample: int
    """Its index in the dataset that raised."""
    why: str
    """The error, in one line."""


class Thinned(NamedTuple):
    """A batch without the samples that raised."""

    batch: Any
    """None if all samples raised."""
    left_out: list[LeftOut]


def why_left_out(error: Exception) -> str:
    """The error of a sample in one line. Raises it anew if it does not come from the sample."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        raise error
    return f"{type(error).__name__}: {first_line(error)}"


class BadSamples:
    """The samples that one training has left out, and how many more it may."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.found: dict[tuple[str, int], str] = {}
        """Data (`data` or `valid`) and index of each sample, with its error."""
        self.tell: Callable[[str], None] = lambda line: None
        """Called once for each sample."""

    def note(self, data: str, left_out: Iterable[LeftOut]) -> None:
        """Take in samples that were left out. Raises DataError if they are too many."""
        for _, index, why in left_out:
            if (data, index) in self.found:
                continue
            if len(self.found) >= self._most:
                before = ", ".join(f"{index}" if of == data else f"{index} of {of}" for of, index in self.found)
                raise DataError(
                    f"sample {index} of {data} raises {why}; {self._most:,} samples were left out before ({before}), "
                    f"and skip_bad_samples={self._most} allows no more: mend the data, or allow more"
                )
            self.found[data, index] = why
            self.tell(f"sample {index} of {data} is left out: {why} ({len(self.found)} of at most {self._most:,})")

    def thin(self, pieces: list[Any], sizes: list[int]) -> tuple[list[Any], list[int]]:
        """The pieces of a training window with their true sizes, without samples that raised. None is empty."""
        kept: list[tuple[Any, int]] = []
        for piece, size in zip(pieces, sizes, strict=True):
            if isinstance(piece, Thinned):
                self.note("data", piece.left_out)
                piece, size = piece.batch, size - len(piece.left_out)
            if size:
                kept.append((piece, size))
        return [piece for piece, _ in kept], [size for _, size in kept]
