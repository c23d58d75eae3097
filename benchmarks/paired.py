"""Side-by-side timing: laps of A and B in turn (A B B A), one synchronisation a lap, a ratio per pair."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

# Two-sided 95 % points of Student's t for 1, 2, 3 … degrees of freedom.
T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How long B takes as a multiple of A, over pairs of laps."""

    ratio: float
    low: float
    high: float
    a_step_s: float
    b_step_s: float
    pairs: int


def compare(
    a: Iterator[object], b: Iterator[object], *, device: torch.device, lap_s: float = 0.4, pairs: int = 16
) -> Comparison:
    """Time steps of two trainings in turn; each `next` makes one step."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def lap(steps: Iterator[object], count: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(count):
            next(steps)
        wait()
        return (time.perf_counter() - start) / count

    for steps in (a, b):  # warm up
        lap(steps, 20)
    count = max(5, round(lap_s / lap(a, 20)))
    laps: list[tuple[float, float]] = []
    for number in range(pairs):
        if number % 2 == 0:
            first = lap(a, count)
            laps.append((first, lap(b, count)))
        else:
            first = lap(b, count)
            laps.append((lap(a, count), first))
    logs = [math.log(b_s / a_s) for a_s, b_s in laps]
    mean = statistics.fmean(logs)
    half = T95[min(len(logs) - 2, len(T95) - 1)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Comparison(
        ratio=math.exp(mean),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        a_step_s=statistics.median(a_s for a_s, _ in laps),
        b_step_s=statistics.median(b_s for _, b_s in laps),
        pairs=len(laps),
    )
