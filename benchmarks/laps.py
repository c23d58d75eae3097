"""Laps of whole steps between two waits for the device, and two trainings that take turns in them."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from benchmarks.paired import median_interval

SHORTEST_LAP_S = 0.05


@dataclass(frozen=True)
class Lap:
    """Whole steps between two waits for the device."""

    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class Laps:
    """A training in laps of a fixed number of `next`s, warmed up: clocks, autotuning and captures are behind it."""

    def __init__(
        self, steps: Iterator[int], device: torch.device, *, lap_s: float, warm_s: float, rounds: int = 1
    ) -> None:
        self._steps = steps
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._count = rounds
        next(steps)  # starts workers, captures
        begun = time.perf_counter()
        recent: deque[float] = deque(maxlen=3)
        while True:
            # Laps grow until they are long enough; together they are the warm-up. Lengths go by the fastest of
            # three: one slow lap, from whatever else the machine did, would leave all others too short.
            recent.append(self.lap().seconds / self._count)
            wanted = math.ceil(lap_s / min(recent) / rounds) * rounds
            if len(recent) < 3 or wanted > self._count:
                self._count = max(self._count, min(wanted, 8 * self._count))
            elif time.perf_counter() - begun >= warm_s:
                return

    def lap(self) -> Lap:
        """One lap."""
        self._wait()
        begun, samples = time.perf_counter(), 0
        for _ in range(self._count):
            samples += next(self._steps)
        self._wait()
        return Lap(samples, time.perf_counter() - begun)


@dataclass
class Column:
    """What one training did, or why it did nothing."""

    laps: list[Lap] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    @property
    def rate(self) -> float:
        """Samples a second: the median lap."""
        return statistics.median(lap.rate for lap in self.laps)

    def __str__(self) -> str:
        return f"{self.rate:,.0f}" if self.laps else self.note


@dataclass(frozen=True)
class Ratio:
    """How fast one column is as a multiple of another, by pairs of laps."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def in_turn(rival: Laps, mine: Laps, pairs: int) -> tuple[list[Lap], list[Lap], Ratio]:
    """Laps A B B A of both, and how fast the second is as a multiple of the first."""
    theirs, ours = [], []
    for number in range(pairs):
        if number % 2 == 0:
            theirs.append(rival.lap())
            ours.append(mine.lap())
        else:
            ours.append(mine.lap())
            theirs.append(rival.lap())
    ratios = sorted(b.rate / a.rate for a, b in zip(theirs, ours, strict=True))
    low, high = median_interval(pairs)
    return theirs, ours, Ratio(statistics.median(ratios), ratios[low], ratios[high], pairs)
