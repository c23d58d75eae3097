"""Side-by-side timing: laps of A and B in turn (A B B A), one synchronisation a lap, a ratio per pair."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """How long B takes as a multiple of A: the median over pairs of laps, and its 95 % interval."""

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
    ratios = sorted(b_s / a_s for a_s, b_s in laps)
    low, high = median_interval(len(ratios))
    return Comparison(
        ratio=statistics.median(ratios),
        low=ratios[low],
        high=ratios[high],
        a_step_s=statistics.median(a_s for a_s, _ in laps),
        b_step_s=statistics.median(b_s for _, b_s in laps),
        pairs=len(laps),
    )


def median_interval(count: int) -> tuple[int, int]:
    """Which of so many sorted values hold their true median between them in 95 % of cases.

    By counting alone (each value is above or below the median with even odds), so that a lap during which the
    machine did something else moves nothing.
    """
    chance, rank = 0.0, 0
    while rank < count // 2:
        chance += math.comb(count, rank) / 2**count
        if chance > 0.025:
            break
        rank += 1
    return max(0, rank - 1), min(count - 1, count - rank)
