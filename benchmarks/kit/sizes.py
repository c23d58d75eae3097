"""Batch sizes, and the account of memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import hotlap
from benchmarks.kit.plain import why_not
from benchmarks.kit.rows import Options, Row
from benchmarks.kit.trainings import as_t4, jobs
from hotlap import Job
from hotlap.core.units import show_bytes, show_rate
from hotlap.kit.batch import BatchFound
from hotlap.kit.bench import JobTrials, opened

LEAST_SPEED, MOST_OFF = 0.97, 0.05
MOST_GUESSED = 0.25
"""How far what was predicted to bring memory down may be off what was measured."""


def batch_rows(options: Options) -> Iterator[Row]:
    """The largest and the fastest batch, each against what it should be."""
    for name, job in jobs(options).items():
        with as_t4(options.device):
            found = hotlap.batch(job, seconds=5 if options.quick else 180)
            print(f"\n{name}\n{found.summary()}\n")
            yield from largest_rows(name, found, options)
            yield fastest_row(name, found, job, options)


def largest_rows(name: str, found: BatchFound, options: Options) -> Iterator[Row]:
    """The largest against a plain loop."""
    assert found.largest is not None, "nothing trains"
    size = found.largest.size
    full = why_not(name, size, options)
    yield Row(part="batch", what=f"{name}: {size:,} trains", seen=full or "yes", kept=full is None)
    if found.searched.found_largest:
        full = why_not(name, size + 1, options)
        yield Row(part="batch", what=f"{name}: {size + 1:,} does not", seen=full or "it trains", kept=full is not None)
    elif options.device != "cpu":
        yield Row(part="batch", what=f"{name}: the largest is proven", seen=found.searched.ended, kept=False)


def fastest_row(name: str, found: BatchFound, job: Job, options: Options) -> Row:
    """The fastest against a sweep."""
    fast, largest = found.fastest, found.largest
    assert fast is not None, "no batch keeps the reserve"
    assert largest is not None, "nothing trains"
    sizes = sorted({fast.size, *sweep_sizes(largest.size, 6 if options.quick else 28)})
    with opened(job) as bench:
        trials = [JobTrials(bench).of_size(size, timed=True) for size in sizes]
    speeds = {
        one.size: one.samples_per_s or 0.0
        for one in trials
        if one.size == fast.size or (one.trains and one.taken_bytes <= found.allowed_bytes)
    }
    best = max(speeds, key=lambda size: speeds[size])
    part = speeds[fast.size] / speeds[best]
    told = f"{fast.size:,} has {part:.1%} of {best:,} ({show_rate(speeds[best])} samples/s"
    told += f"; {len(speeds)} of {len(sizes)} sizes keep the reserve)"
    return Row(part="batch", what=f"{name}: the fastest", seen=told, kept=part >= LEAST_SPEED or options.quick)


def sweep_sizes(most: int, count: int) -> list[int]:
    """Sizes from 1 up, evenly on a logarithmic scale."""
    return sorted({int(size) for size in np.geomspace(2, max(2, most), count).round()})


def memory_rows(options: Options) -> Iterator[Row]:
    """The account against the allocator."""
    for name, job in jobs(options).items():
        found = hotlap.memory(job)
        print(f"\n{name}\n{found.summary()}\n")
        off = abs(found.peak_bytes - found.counted_bytes) / found.peak_bytes
        told = f"{show_bytes(found.counted_bytes)} of {show_bytes(found.peak_bytes)}: {off:.1%} off"
        yield Row(part="memory", what=f"{name}: the account", seen=told, kept=off <= MOST_OFF)
        for one in found.savings:
            if one.peak_bytes is not None:
                seen = f"{show_bytes(one.predicted_bytes)} predicted, {show_bytes(one.peak_bytes)} measured"
                near = abs(one.predicted_bytes - one.peak_bytes) <= MOST_GUESSED * one.peak_bytes
                yield Row(part="memory", what=f"{name}: {one.what}", seen=seen, kept=near)
