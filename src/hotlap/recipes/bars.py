"""Bars of prices: read from named columns, made longer, and joined so that none is seen before it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, shown
from hotlap.core.job_checks import is_whole
from hotlap.core.terminal import logger
from hotlap.recipes.bar_columns import PRICES, Numbers, Place, by_meaning, numbers_in, place_in, refuse, times_in

log = logger(__name__)

LEAST, MOST = 1e-15, 1e15
"""Between these a price is one; their ratios fit into 32 bits."""
ENOUGH = 50
"""Bars by which it is known how long they are: what lies between a few may be a weekend."""
MONTH = 28 * 86400
"""Seconds of the shortest one."""
MONDAY = 4 * 86400
"""A Monday of 1970, from which longer bars are counted: days begin at midnight UTC, weeks on Mondays."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """The bars of one symbol, one behind the other; DataError where they are not what they should be."""

    times: Numbers
    """int64: when each bar begins, in seconds since 1970, UTC; rising by at least `seconds`."""
    open: Numbers
    high: Numbers
    low: Numbers
    close: Numbers
    volume: Numbers
    seconds: int
    """How long a bar is."""
    symbol: str = ""
    rows: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    """Which row of its table each bar is; in longer bars, the row of the first bar in it. Counted from 0."""
    unfinished: bool = False
    """Whether the last bar is made of bars that end before it does."""

    def __post_init__(self) -> None:
        rows = self.rows if len(self.rows) else np.arange(len(self.times))
        for name, values in (("rows", rows), ("times", self.times)):
            object.__setattr__(self, name, np.asarray(values, dtype=np.int64))
        for name in (*PRICES, "volume"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), dtype=np.float64))
        shapes = {name: getattr(self, name).shape for name in ("times", "rows", *PRICES, "volume")}
        if set(shapes.values()) != {(len(self.times),)}:
            raise DataError(f"the columns of bars differ in length: {shown(shapes, 200)}; give one number each per bar")
        columns = {name: getattr(self, name) for name in (*PRICES, "volume")}
        refuse(_problems(self.times, columns, self.seconds, self.symbol, self.rows, place_in(())))

    def __len__(self) -> int:
        return len(self.times)

    @property
    def ends(self) -> Numbers:
        """When each bar is complete."""
        ends: Numbers = self.times + self.seconds
        return ends


def bars_from(
    columns: Mapping[str, Any],
    *,
    seconds: int | None = None,
    few: int | None = None,
    files: Sequence[tuple[str, int]] = (),
) -> list[Bars]:
    """Bars of each symbol, in the order in which symbols come, out of named columns as a CSV has them.

    Names may be written as people write them; columns that are not known are left alone. Times say when a bar begins:
    as text in ISO form, as datetime64, or as numbers since 1970; without an offset they are UTC. `seconds` is how long
    a bar is, by default what lies between most bars of a symbol, and where these are few, `few`, by default what lies
    between most bars of the longest symbol. `files` are the names of those that the columns come
    from, and how many rows each has. Raises DataError with all mistakes at once.
    """
    found = by_meaning(columns)
    symbols = found.get("symbol", np.full(len(found["open"]), ""))
    wrong: list[str] = []
    place = place_in(files)
    times = times_in(found["time"], place, wrong)
    if "volume" not in found:
        log.warning("there is no column for volume: it is taken to be 0 everywhere")
        found["volume"] = np.zeros(len(times))
    numbers = {name: numbers_in(name, found[name], place, wrong) for name in (*PRICES, "volume")}
    refuse(wrong)
    names, firsts, codes = np.unique(symbols.astype(str), return_index=True, return_inverse=True)
    by_symbol = np.lexsort((times, codes))
    parts = np.split(by_symbol, np.flatnonzero(np.diff(codes[by_symbol])) + 1)
    usual = few or _usual_gap(times[max(parts, key=len)])
    mixed, made = [], []
    for at in np.argsort(firsts):
        rows, symbol = parts[at], str(names[at])
        if (np.diff(rows) < 0).any():
            mixed.append(symbol)
        chosen = {name: values[rows] for name, values in numbers.items()}
        length = seconds if seconds is not None else _usual_gap(times[rows]) if len(rows) >= ENOUGH else usual
        problems = _two_lengths(times[rows], symbol, rows, files)
        problems = problems or _problems(times[rows], chosen, length, symbol, rows, place)
        wrong += problems
        if not problems:
            made.append(Bars(times=times[rows], **chosen, seconds=length, symbol=symbol, rows=rows))
    refuse(wrong)
    if mixed:
        log.warning("rows that were out of order are sorted by time%s", f": {', '.join(mixed)}" if any(mixed) else "")
    return made


def resampled(bars: Bars, seconds: int) -> Bars:
    """Longer bars made of these, by the calendar in UTC: from the full hour, from midnight, weeks from Monday.

    A bar that has less in it, since some are missing, is one all the same; whether the last one may still grow says
    `unfinished`.
    """
    if not is_whole(seconds) or seconds < bars.seconds or seconds % bars.seconds:
        raise DataError(f"bars of {shown(seconds)} s cannot be made of bars of {bars.seconds} s; give a multiple of it")
    begins = (bars.times - MONDAY) // seconds * seconds + MONDAY
    first = np.flatnonzero(np.diff(begins, prepend=begins[:1] - 1))
    last = np.append(first[1:], len(bars)) - 1
    return Bars(
        times=begins[first],
        open=bars.open[first],
        high=np.maximum.reduceat(bars.high, first),
        low=np.minimum.reduceat(bars.low, first),
        close=bars.close[last],
        volume=np.add.reduceat(bars.volume, first),
        seconds=int(seconds),
        symbol=bars.symbol,
        rows=bars.rows[first],
        unfinished=bool(bars.ends[-1] < begins[-1] + seconds),
    )


def joined(base: Bars, higher: Bars) -> Numbers:
    """For each base bar the last of the higher bars that is complete when the base bar is; -1 where there is none yet.

    The hour from 10:00 is complete at 11:00: the quarter from 10:45 sees it, the one from 10:30 does not.
    """
    complete = higher.ends[: len(higher) - higher.unfinished]
    places: Numbers = np.searchsorted(complete, base.ends, side="right") - 1
    return places


def frame_name(seconds: int) -> str:
    """The length of bars as traders write it: m15, h1, h4, d1."""
    for letter, unit in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds % unit == 0:
            return f"{letter}{seconds // unit}"
    return f"s{seconds}"


def _usual_gap(times: Numbers) -> int:
    """What lies between most bars, which is how long one is; 0 where there is none to tell by."""
    gaps, counts = np.unique(np.diff(times), return_counts=True)
    return int(gaps[counts.argmax()]) if len(gaps) else 0


def _two_lengths(times: Numbers, symbol: str, rows: Numbers, files: Sequence[tuple[str, int]]) -> list[str]:
    """A line where files have bars of a symbol in two lengths, as m15 and h1."""
    if len(files) < 2:
        return []
    of_file = np.searchsorted(np.cumsum([count for _, count in files]), rows, side="right")
    found = []
    for at in np.unique(of_file):
        own = times[of_file == at]
        if len(own) >= ENOUGH and _usual_gap(own):
            found.append((_usual_gap(own), int(np.diff(own).min()), files[at][0]))
    if not found:
        return []
    # Of bars that are traded seldom most gaps may be long, and hardly all of them.
    (usual, _, one), (_, least, other) = min(found), max(found, key=lambda of: of[1])
    if least <= usual:
        return []
    of = f"{symbol}: " if symbol else ""
    return [f"{of}{one} has bars of {frame_name(usual)}, and {other} of {frame_name(least)}; give those of one length"]


def _problems(
    times: Numbers, columns: Mapping[str, Numbers], seconds: int, symbol: str, rows: Numbers, place: Place
) -> list[str]:
    """What is wrong with the bars of a symbol: a line for each kind of mistake, with the first row that has it."""
    of = f"{symbol}, " if symbol else ""
    if not len(times):
        return [f"{of}there are no bars"]
    found = []

    def add(bad: Numbers, words: str, *shows: Numbers) -> None:
        if bad.any():
            at, more = int(bad.argmax()), int(bad.sum()) - 1
            rest = f" (and {more:,} more like it)" if more else ""
            said = words.format(*(values[at] for values in shows), before=place(int(rows[at - 1])))
            found.append(f"{of}{place(int(rows[at]))}: {said}{rest}")

    gaps = np.diff(times)
    doubled = np.append(False, gaps == 0)
    cure = "keep one of them"
    if not symbol:
        cure = f"where rows are of several symbols, name these in a column called symbol, else {cure}"
    add(doubled, f"its time {{}} is that of {{before}} too; {cure}", times.astype("datetime64[s]"))
    if not is_whole(seconds) or seconds < 1:
        if not doubled.any():
            found.append(f"{of}bars of {shown(seconds)} s: a single bar does not say how long it is; give more of them")
    else:
        within = np.append(False, (gaps != 0) & (gaps < seconds))
        cure = (
            "months differ in length: give bars of weeks or days"
            if seconds >= MONTH
            else "leave it out where few are so, else give bars of one length"
        )
        words = f"it begins {{}} s after {{before}}, and bars are {seconds} s long; {cure}"
        add(within, words, np.append(0, gaps))
    for name in PRICES:
        values = columns[name]
        add(np.isnan(values), f"{name} is missing; mend it, or leave the row out")
        add(values < LEAST, f"{name} is {{}}; a price must be above zero", values)
        add(values > MOST, f"{name} is {{}}, which is no price", values)
    add(columns["high"] < columns["low"], "high {} is below low {}", columns["high"], columns["low"])
    volume = columns["volume"]
    add(~(np.isfinite(volume) & (volume >= 0)), "volume is {}; give a number of at least 0", volume)
    return found
