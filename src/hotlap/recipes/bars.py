"""Bars of prices: read from named columns, made longer, and joined so that none is seen before it is complete."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, listed, shown
from hotlap.core.job_checks import is_whole

log = logging.getLogger(__name__)

Numbers = np.ndarray[Any, Any]

PRICES = ("open", "high", "low", "close")
LEAST, MOST = 1e-15, 1e15
"""Between these a price is one; their ratios fit into 32 bits."""
MONDAY = 4 * 86400
"""A Monday of 1970, from which longer bars are counted: days begin at midnight UTC, weeks on Mondays."""
NAMES = {
    "time": ("datetime", "timestamp", "opentime", "unix", "time", "date"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "c", "adjclose", "price"),
    "volume": ("volume", "vol", "v", "tickvolume", "tickvol"),
    "symbol": ("symbol", "ticker", "pair"),
}
"""What columns are called, without case, spaces and signs; of several that are there, the first one counts."""
UNITS = ((1e11, 1), (1e14, 10**3), (1e17, 10**6), (np.inf, 10**9))
"""Times below each number are counted in so many parts of a second."""


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
        _refuse(_problems(self.times, columns, self.seconds, self.symbol, self.rows))

    def __len__(self) -> int:
        return len(self.times)

    @property
    def ends(self) -> Numbers:
        """When each bar is complete."""
        ends: Numbers = self.times + self.seconds
        return ends


def bars_from(columns: Mapping[str, Any], *, seconds: int | None = None) -> list[Bars]:
    """Bars of each symbol, in the order in which symbols come, out of named columns as a CSV has them.

    Names may be written as people write them; columns that are not known are left alone. Times say when a bar begins:
    as text in ISO form, as datetime64, or as numbers since 1970; without an offset they are UTC. `seconds` is how long
    a bar is, by default what lies between most bars of a symbol. Raises DataError with all mistakes at once.
    """
    found = _by_meaning(columns)
    symbols = found.get("symbol", np.full(len(found["open"]), ""))
    wrong: list[str] = []
    times = _times(found["time"], wrong)
    if "volume" not in found:
        log.warning("there is no column for volume: it is taken to be 0 everywhere")
        found["volume"] = np.zeros(len(times))
    numbers = {name: _numbers(name, found[name], wrong) for name in (*PRICES, "volume")}
    _refuse(wrong)
    names, firsts, codes = np.unique(symbols.astype(str), return_index=True, return_inverse=True)
    by_symbol = np.lexsort((times, codes))
    parts = np.split(by_symbol, np.flatnonzero(np.diff(codes[by_symbol])) + 1)
    mixed, made = [], []
    for at in np.argsort(firsts):
        rows, symbol = parts[at], str(names[at])
        if (np.diff(rows) < 0).any():
            mixed.append(symbol)
        chosen = {name: values[rows] for name, values in numbers.items()}
        length = _usual_gap(times[rows]) if seconds is None else seconds
        problems = _problems(times[rows], chosen, length, symbol, rows)
        wrong += problems
        if not problems:
            made.append(Bars(times=times[rows], **chosen, seconds=length, symbol=symbol, rows=rows))
    _refuse(wrong)
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


def _by_meaning(columns: Mapping[str, Any]) -> dict[str, Numbers]:
    """The columns that are known, by what they mean."""
    given: dict[str, Numbers] = {}
    for name, values in dict(columns).items():
        plain = re.sub("[^a-z]", "", str(name).lower())
        if plain in given and any(plain in known for known in NAMES.values()):
            raise DataError(f"two columns are called {plain!r}; leave one of them out")
        given[plain] = np.asarray(values)
    found: dict[str, Numbers] = {}
    for meaning, known in NAMES.items():
        there = [name for name in known if name in given]
        # MetaTrader writes <VOL> as 0 everywhere where it counts ticks alone, in <TICKVOL>.
        if meaning == "volume" and len(there) > 1 and not np.any(given[there[0]] != 0):
            there = there[1:]
        if there:
            found[meaning] = given[there[0]]
    missing = [
        f"there is no column for {meaning}: name one {' or '.join(map(repr, NAMES[meaning]))}; "
        f"there are {shown([str(name) for name in columns])}"
        for meaning in ("time", *PRICES)
        if meaning not in found
    ]
    _refuse(missing)
    lengths = {meaning: column.shape for meaning, column in found.items()}
    if len(set(lengths.values())) > 1 or found["open"].ndim != 1 or not len(found["open"]):
        raise DataError(f"columns must be of one length, and not empty; they have the shapes {shown(lengths, 200)}")
    if "date" in given and re.fullmatch(r"\d\d:\d\d(:\d\d)?", str(found["time"][0])):
        days = given["date"]
        if days.dtype.kind == "M":  # as a table has read them: with an hour, which is midnight
            days = days.astype("datetime64[D]")
        found["time"] = np.array([f"{day} {hour}" for day, hour in zip(days, found["time"], strict=True)])
    return found


def _numbers(name: str, column: Numbers, wrong: list[str]) -> Numbers:
    """The column as numbers, with NaN for what is missing."""
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        pass
    numbers = np.full(len(column), np.nan)
    for row, value in enumerate(column.tolist()):
        try:
            numbers[row] = np.nan if value in ("", None) else float(value)
        except (TypeError, ValueError):
            wrong.append(f"row {row + 1}: {name} is {shown(value)}, which is no number; mend it, or leave the row out")
            break
    return numbers


def _times(column: Numbers, wrong: list[str]) -> Numbers:
    """The column as seconds since 1970."""
    if column.dtype.kind == "M":
        column = column.astype("datetime64[s]")
        missing = np.isnat(column)
        times: Numbers = column.astype(np.int64)
    else:
        try:
            numbers = column if column.dtype.kind in "iu" else column.astype(np.float64)
        except (TypeError, ValueError):
            return _read_times(column, wrong)
        missing = ~np.isfinite(numbers)
        if not missing.any():
            if ((numbers >= 1900_01_01) & (numbers <= 2100_12_31)).all():  # days written as 20240131
                return _read_times(numbers.astype(np.int64).astype(str), wrong)
            largest = np.abs(numbers).max()
            return np.asarray(numbers // next(unit for bound, unit in UNITS if largest < bound), dtype=np.int64)
        times = np.zeros(len(column), np.int64)
    if missing.any():
        wrong.append(f"row {missing.argmax() + 1}: its time is missing; mend it, or leave the row out")
    return times


def _read_times(column: Numbers, wrong: list[str]) -> Numbers:
    times = np.zeros(len(column), np.int64)
    for row, value in enumerate(column.tolist()):
        text = str(value).strip()
        try:
            moment = datetime.fromisoformat(text[:10].replace(".", "-").replace("/", "-") + text[10:])
        except ValueError:
            wrong.append(f"row {row + 1}: its time is {shown(value)}; write it as 2024-01-31 15:45")
            break
        times[row] = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return times


def _usual_gap(times: Numbers) -> int:
    """What lies between most bars, which is how long one is; 0 where there is none to tell by."""
    gaps, counts = np.unique(np.diff(times), return_counts=True)
    return int(gaps[counts.argmax()]) if len(gaps) else 0


def _problems(times: Numbers, columns: Mapping[str, Numbers], seconds: int, symbol: str, rows: Numbers) -> list[str]:
    """What is wrong with the bars of a symbol: a line for each kind of mistake, with the first row that has it.

    Rows are told as people count them: from 1, below the header.
    """
    of = f"{symbol}, " if symbol else ""
    if not len(times):
        return [f"{of}there are no bars"]
    found = []

    def add(bad: Numbers, words: str, *shows: Numbers) -> None:
        if bad.any():
            at, more = int(bad.argmax()), int(bad.sum()) - 1
            rest = f" (and {more:,} more like it)" if more else ""
            found.append(f"{of}row {rows[at] + 1}: {words.format(*(values[at] for values in shows))}{rest}")

    before, gaps = np.roll(rows, 1) + 1, np.diff(times)
    doubled = np.append(False, gaps == 0)
    add(doubled, "its time {} is that of row {} too; keep one of them", times.astype("datetime64[s]"), before)
    if not is_whole(seconds) or seconds < 1:
        if not doubled.any():
            found.append(f"{of}bars of {shown(seconds)} s: say with seconds= how long a bar is")
    else:
        within = np.append(False, (gaps != 0) & (gaps < seconds))
        words = (
            f"it begins {{}} s after row {{}}, and bars are {seconds} s long; mend it, or give the length as seconds="
        )
        add(within, words, np.append(0, gaps), before)
    for name in PRICES:
        values = columns[name]
        add(np.isnan(values), f"{name} is missing; mend it, or leave the row out")
        add(values < LEAST, f"{name} is {{}}; a price must be above zero", values)
        add(values > MOST, f"{name} is {{}}, which is no price", values)
    add(columns["high"] < columns["low"], "high {} is below low {}", columns["high"], columns["low"])
    volume = columns["volume"]
    add(~(np.isfinite(volume) & (volume >= 0)), "volume is {}; give a number of at least 0", volume)
    return found


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise DataError(listed("the bars have", "mistake", wrong))
