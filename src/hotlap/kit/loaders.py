"""The loaders of somebody's script: made with other arguments than its own, and told of."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from contextlib import suppress
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hotlap.kit.lengths import LongestFirst, longest_in
from hotlap.kit.looks import Seen


def maker_of(dataset: Any) -> Hashable:
    """What makes the loader that is being made: the lines at work, and what it is made for.

    One that is made anew for each epoch has the same each time, in every process that runs the script.
    """
    lines = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        lines.append((frame.f_code.co_filename, frame.f_lineno, frame.f_lasti))  # a line may make several
        frame = frame.f_back
    samples = None
    with suppress(Exception):  # of somebody's class, or for want of a length
        samples = len(dataset)
    return tuple(lines), type(dataset), samples


def with_change(given: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A loader's arguments with some in their place; those that go with workers alone leave with them."""
    given = {**given, **given.pop("kwargs", {}), **change}
    if not given.get("num_workers"):
        for name in ("prefetch_factor", "persistent_workers", "timeout", "multiprocessing_context"):
            given.pop(name, None)
    return given


def with_longest(given: dict[str, Any]) -> dict[str, Any]:
    """A loader's arguments with the longest samples in every batch."""
    longest = longest_in(given["dataset"])
    if longest is None:
        return given
    return {**given, "sampler": LongestFirst(longest.order, given.get("batch_size", 1)), "shuffle": False}


def tell_of(loaders: Mapping[int, DataLoader[Any]], number: int, seen: Seen) -> None:
    """Tell how the loader of this number is set, and whether its batch size can be."""
    loader = loaders[number]
    seen.workers, seen.pinned = loader.num_workers, bool(loader.pin_memory)
    seen.loader, seen.batch_size = number, loader.batch_size
    seen.iterates = isinstance(loader.dataset, IterableDataset)
    try:
        seen.samples = len(loader.dataset)  # type: ignore[arg-type]
    except TypeError:
        seen.samples = None
    if loader.batch_size is None:
        sampler = loader.batch_sampler
        # Accelerate, for one, makes a loader of the batches of another.
        first = next((n for n, one in loaders.items() if one.batch_sampler is sampler and n < number), None)
        if first is not None and type(sampler) is BatchSampler:
            seen.loader, seen.batch_size = first, sampler.batch_size
        else:
            seen.why_fixed = f"a {type(sampler).__name__} makes its batches"


def tell_lengths(loader: DataLoader[Any], seen: Seen) -> None:
    """Tell whether its batches can be made of the longest samples. A sampler of the script's own is left to it."""
    if type(loader.sampler) not in (RandomSampler, SequentialSampler, LongestFirst):
        return
    try:
        longest = longest_in(loader.dataset)
    except Exception as error:  # somebody's dataset, asked for samples that the script may never ask for
        why = type(error).__name__
        seen.longest = f"batches are those that came first: the lengths of samples cannot be read ({why})"
        return
    if longest is not None:
        seen.longest, seen.varies = longest.words, longest.varies
