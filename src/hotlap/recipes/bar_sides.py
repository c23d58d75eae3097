"""Which windows of bars are trained on and which are held out: for the recipe `temporal`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hotlap.core.errors import DataError
from hotlap.data.windows import Windows
from hotlap.recipes.bar_options import TemporalOptions
from hotlap.recipes.bars import Bars
from hotlap.recipes.indicators import Features, Standard, direction
from hotlap.recipes.recipe import Numbers, Say

CLASSES = ("down", "flat", "up")
LEAST = 50
"""Windows that each side of a split needs, for anything to be said."""
OWN_BARS, FRAME_BARS = 50, 20
"""That features look back over: of the bars themselves, and of the longest frame."""
TOLD = 3
"""Symbols that a line names before it counts the rest."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One symbol's part of a split: features and labels, row by row, of windows that end in it."""

    values: Numbers
    labels: Numbers
    naive: Numbers
    """For each window what it did over the last bars, as many as are looked ahead."""
    times: Numbers
    """For each window when its last bar begins, in seconds since 1970."""
    symbol: str


def refuse_few(
    options: TemporalOptions,
    path: str,
    what: str,
    known: Sequence[tuple[Bars, Features]],
    sides: Sequence[Side | None],
    frames: Sequence[int],
    say: Say | None,
) -> None:
    """Refuse too few windows, with how many bars make enough of them; symbols that give none are said."""
    count = sum(len(side.naive) for side in sides if side is not None)
    warm_up = _warm_up(known, frames)
    if count < LEAST:
        lost = max(warm_up + options.length - 1, options.volatility)
        shorter = ", or name shorter --frames" if frames and warm_up > max(OWN_BARS, options.volatility) else ""
        raise DataError(
            f"{path} has {count} windows {what}, and {LEAST} are needed: the first {lost:,} bars of each symbol have "
            f"too little before them; give {_bars_for(options, warm_up, LEAST):,} bars of a symbol{shorter}"
        )
    short = [one for (one, _), side in zip(known, sides, strict=True) if side is None]
    if short and say is not None:
        told = ", ".join(f"{one.symbol or 'one without a name'} with {len(one):,}" for one in short[:TOLD])
        more = f" and {len(short) - TOLD:,} more" if len(short) > TOLD else ""
        needed = f"a window {what} needs {_bars_for(options, warm_up, 1):,} of a symbol"
        say(f"warning   left out: bars of {told}{more}: {needed}")


def _warm_up(known: Sequence[tuple[Bars, Features]], frames: Sequence[int]) -> int:
    """The first bar of a symbol with all features: as these have it, or, where none has, as the features need it."""
    firsts = [its.first for one, its in known if its.first < len(one)]
    seconds = max((one for one, _ in known), key=len).seconds
    return max(firsts) if firsts else max(OWN_BARS, FRAME_BARS * max(frames, default=0) // seconds)


def _bars_for(options: TemporalOptions, warm_up: int, windows: int) -> int:
    """How many bars of one symbol give so many windows to train on, and as many to hold out."""
    begin = warm_up + options.length - 1
    unlabelled = max(0, options.volatility - begin)
    if options.valid:
        return begin + unlabelled + windows + options.ahead
    train = (windows + options.ahead + unlabelled) / (1 - options.valid_share)
    held = windows / options.valid_share
    # One more, since the cut between them is rounded.
    return begin + math.ceil(max(train, held)) + 1 + options.ahead


def refuse_overlaps(trained: Sequence[Bars], held: Sequence[Bars], options: TemporalOptions) -> None:
    """Bars of a symbol that are trained on and held out make a score too good."""
    own = {one.symbol: one for one in trained}
    for one in held:
        if one.symbol not in own:
            continue
        theirs = own[one.symbol]
        # The first bar trained on that has not ended when one begins: does it begin before that one ends?
        next_one = np.searchsorted(theirs.ends, one.times, side="right")
        both = np.append(theirs.times, np.iinfo(np.int64).max)[next_one] < one.ends
        if both.any():
            of = f" of {one.symbol}" if one.symbol else ""
            first, last = one.times[both][[0, -1]].astype("datetime64[s]")
            raise DataError(
                f"{int(both.sum()):,} bars{of} in {options.valid}, from {first} to {last}, are of times that "
                f"{options.data} has too, and trains on; leave them out of one of the two, or, where they are of "
                "another symbol, name it in a column"
            )


def cut_of(options: TemporalOptions, bars: Bars, known: Features) -> int:
    """The first bar of a symbol that is held out."""
    first = known.first + options.length - 1
    return first + round((len(bars) - options.ahead - first) * (1 - options.valid_share))


def side_of(options: TemporalOptions, bars: Bars, known: Features, begin: int, end: int) -> Side | None:
    """The windows of one symbol whose last bar lies between two rows, and has a label."""
    over = options.volatility or None
    labels = direction(bars, options.ahead, options.threshold, volatility_over=over)
    is_known = np.flatnonzero(labels >= 0)
    if not len(is_known):
        return None
    first = max(known.first + options.length - 1, begin, int(is_known[0]))
    last = min(end, int(is_known[-1]) + 1)
    if last <= first:
        return None
    before = labels[np.maximum(np.arange(first, last) - options.ahead, 0)]
    rows = slice(first - options.length + 1, last)
    return Side(
        values=known.values[rows],
        labels=labels[rows],
        naive=np.where(before >= 0, before, 1),
        times=bars.times[first:last],
        symbol=bars.symbol,
    )


def windows_of(sides: Sequence[Side], standard: Standard, length: int) -> Windows:
    return Windows([standard(side.values) for side in sides], length, target=[side.labels for side in sides])


def labels_of(sides: Sequence[Side], length: int) -> Numbers:
    return np.concatenate([side.labels[length - 1 :] for side in sides])


def shown_window(sides: Sequence[Side], at: int) -> str:
    """A window of all sides together by its last bar, with its symbol where there are several."""
    ends = np.cumsum([len(side.times) for side in sides])
    place = int(np.searchsorted(ends, at, side="right"))
    side = sides[place]
    of = f" of {side.symbol}" if len(sides) > 1 else ""
    return f"the window up to the bar of {side.times[at - ends[place]].astype('datetime64[s]')}{of}"
