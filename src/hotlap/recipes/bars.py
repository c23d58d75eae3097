"""Bars of prices (OHLCV): read from named columns, checked, resampled to longer bars, and simulated."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, listed, shown
from hotlap.core.job_checks import is_whole
from hotlap.core.terminal import logger
from hotlap.recipes.kinds import Column, word_column
from hotlap.recipes.tables import SUFFIXES, Table

log = logger(__name__)

Numbers = np.ndarray[Any, Any]
RowName = Callable[[int], str]
"""Names a row, counted from 0, for a message."""

PRICES = ("open", "high", "low", "close")
SYMBOL = "symbol"
KNOWN_NAMES = {
    "time": ("datetime", "timestamp", "opentime", "unix", "time", "date"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "c", "adjclose", "price"),
    "volume": ("volume", "vol", "v", "tickvolume", "tickvol"),
    SYMBOL: ("symbol", "ticker", "pair"),
}
"""Usual names of columns, compared by their letters without case; the first one that exists counts."""
SYMBOL_IF_REPEATED = ("instrument", "asset", "coin", "stock", "code", "isin", "name")
"""Names of columns that hold symbols only if their words repeat."""
EPOCH_UNITS = ((1e11, 1), (1e14, 10**3), (1e17, 10**6), (np.inf, 10**9))
"""Times below each number are in this many parts of a second: seconds, ms, µs or ns since 1970."""
FRAME_UNITS = {"d": 86400, "h": 3600, "m": 60}
"""Seconds in the units of a frame such as h4."""
LOWEST_PRICE, HIGHEST_PRICE = 1e-15, 1e15
"""Ratios of prices within these bounds fit into 32 bits."""
ENOUGH_BARS = 50
"""Bars that show the length of a bar: the gap between a few may be a weekend."""
SHORTEST_MONTH = 28 * 86400
FIRST_MONDAY = 4 * 86400
"""The first Monday after 1970 began, in UTC. Longer bars are counted from it: weeks begin on Mondays."""
MOST_SHARED_TIMES = 0.5
"""Files of one symbol may overlap by a bar; files of two symbols share more of their times than this."""


# --- bars ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """The bars of one symbol in order of time; DataError where prices or times are impossible."""

    times: Numbers
    """int64: when each bar begins, in seconds since 1970, UTC; at least `seconds` apart."""
    open: Numbers
    high: Numbers
    low: Numbers
    close: Numbers
    volume: Numbers
    seconds: int
    """The length of a bar."""
    symbol: str = ""
    rows: Numbers = field(default_factory=lambda: np.empty(0, np.int64))
    """The row of the table that each bar comes from, from 0; of a longer bar, the row of its first bar."""
    unfinished: bool = False
    """Whether the last bar is resampled from bars that end before it does."""

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
        _raise_mistakes(_mistakes(self.times, columns, self.seconds, self.symbol, self.rows, _row_name(())))

    def __len__(self) -> int:
        return len(self.times)

    @property
    def ends(self) -> Numbers:
        """When each bar is complete."""
        ends: Numbers = self.times + self.seconds
        return ends


def resampled(bars: Bars, seconds: int) -> Bars:
    """Longer bars that begin by the calendar in UTC: on the full hour, at midnight, weeks on Monday.

    Gaps are allowed: a longer bar holds the bars that there are. `unfinished` says whether the last one may still grow.
    """
    if not is_whole(seconds) or seconds < bars.seconds or seconds % bars.seconds:
        raise DataError(f"bars of {shown(seconds)} s cannot be made of bars of {bars.seconds} s; give a multiple of it")
    begins = (bars.times - FIRST_MONDAY) // seconds * seconds + FIRST_MONDAY
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


def last_complete(bars: Bars, longer: Bars) -> Numbers:
    """For each bar, the index of the last longer bar that is complete when the bar is; -1 where there is none yet.

    The hour from 10:00 is complete at 11:00: the quarter from 10:45 sees it, the one from 10:30 does not.
    """
    complete = longer.ends[: len(longer) - longer.unfinished]
    places: Numbers = np.searchsorted(complete, bars.ends, side="right") - 1
    return places


def frame_name(seconds: int) -> str:
    """The length of bars as traders write it: m15, h1, h4, d1."""
    for letter, unit in FRAME_UNITS.items():
        if seconds % unit == 0:
            return f"{letter}{seconds // unit}"
    return f"s{seconds}"


# --- from columns to bars ------------------------------------------------------------------------------


def bars_from(
    columns: Mapping[str, Any],
    *,
    default_seconds: int | None = None,
    files: Sequence[tuple[str, int]] = (),
) -> list[Bars]:
    """The bars of each symbol, in the order in which symbols appear, from the columns of a file.

    Columns are found by their usual names, and unknown ones are ignored. A time is the beginning of a bar: text in
    ISO form, datetime64, or a number since 1970; without an offset it is UTC.

    The length of a symbol's bars is the most common gap between them. A symbol with fewer than 50 bars has
    `default_seconds`, or the length of the longest symbol's bars. `files` are the names of the files that the columns
    come from, and how many rows each has. Raises DataError with all mistakes at once.
    """
    known = known_columns(columns)
    symbols = known.get(SYMBOL, np.full(len(known["open"]), ""))
    mistakes: list[str] = []
    row_name = _row_name(files)
    times = _parse_times(known["time"], row_name, mistakes)
    if "volume" not in known:
        log.warning("there is no column for volume: it is taken to be 0 everywhere")
        known["volume"] = np.zeros(len(times))
    numbers = {name: _parse_numbers(name, known[name], row_name, mistakes) for name in (*PRICES, "volume")}
    _raise_mistakes(mistakes)
    names, firsts, codes = np.unique(symbols.astype(str), return_index=True, return_inverse=True)
    by_symbol = np.lexsort((times, codes))
    parts = np.split(by_symbol, np.flatnonzero(np.diff(codes[by_symbol])) + 1)
    default = default_seconds or _most_common_gap(times[max(parts, key=len)])
    unsorted, found = [], []
    for at in np.argsort(firsts):
        rows, symbol = parts[at], str(names[at])
        if (np.diff(rows) < 0).any():
            unsorted.append(symbol)
        own = {name: values[rows] for name, values in numbers.items()}
        seconds = _most_common_gap(times[rows]) if len(rows) >= ENOUGH_BARS else default
        its_mistakes = _two_lengths(times[rows], symbol, rows, files)
        its_mistakes = its_mistakes or _mistakes(times[rows], own, seconds, symbol, rows, row_name)
        mistakes += its_mistakes
        if not its_mistakes:
            found.append(Bars(times=times[rows], **own, seconds=seconds, symbol=symbol, rows=rows))
    _raise_mistakes(mistakes)
    if unsorted:
        names_of = f": {', '.join(unsorted)}" if any(unsorted) else ""
        log.warning("rows that were out of order are sorted by time%s", names_of)
    return found


def known_columns(columns: Mapping[str, Any]) -> dict[str, Numbers]:
    """The columns with usual names, under time, open, high, low, close, volume and symbol."""
    given: dict[str, Numbers] = {}
    for name, values in columns.items():
        letters = re.sub("[^a-z]", "", str(name).lower())
        if letters in given and any(letters in usual for usual in KNOWN_NAMES.values()):
            raise DataError(f"two columns are called {letters!r}; leave one of them out")
        given[letters] = np.asarray(values)
    found: dict[str, Numbers] = {}
    for meaning, usual in KNOWN_NAMES.items():
        there = [name for name in usual if name in given]
        # MetaTrader counts ticks in <TICKVOL>, and then writes 0 into every row of <VOL>.
        if meaning == "volume" and len(there) > 1 and not np.any(given[there[0]] != 0):
            there = there[1:]
        if there:
            found[meaning] = given[there[0]]
    if SYMBOL not in found:
        there = [name for name in SYMBOL_IF_REPEATED if name in given and _holds_repeated_words(given[name])]
        if there:
            found[SYMBOL] = given[there[0]]
    if not any(meaning in found for meaning in ("time", *PRICES)):
        raise DataError(
            f"no column is called as those of bars are: there are {shown([str(name) for name in columns])}; "
            f"name them, in the first row of a file, such as time,{','.join(PRICES)},volume"
        )
    _raise_mistakes(
        [
            f"there is no column for {meaning}: name one {' or '.join(map(repr, KNOWN_NAMES[meaning]))}; "
            f"there are {shown([str(name) for name in columns])}"
            for meaning in ("time", *PRICES)
            if meaning not in found
        ]
    )
    shapes = {meaning: column.shape for meaning, column in found.items()}
    if len(set(shapes.values())) > 1 or found["open"].ndim != 1 or not len(found["open"]):
        raise DataError(f"columns must be of one length, and not empty; they have the shapes {shown(shapes, 200)}")
    if "date" in given and re.fullmatch(r"\d\d:\d\d(:\d\d)?", str(found["time"][0])):
        days = given["date"]
        if days.dtype.kind == "M":  # a table has read days as midnights
            days = days.astype("datetime64[D]")
        found["time"] = np.array([f"{day} {hour}" for day, hour in zip(days, found["time"], strict=True)])
    return found


def _holds_repeated_words(column: Numbers) -> bool:
    """Whether a column holds words, each of them twice on average."""
    if column.dtype.kind not in "OUS" or column.ndim != 1:
        return False
    words = np.unique(column.astype(str))
    return 2 * len(words) <= len(column) and any(words)


def _parse_numbers(name: str, column: Numbers, row_name: RowName, mistakes: list[str]) -> Numbers:
    """The column as float64, NaN where a value is missing; a mistake is appended to `mistakes`."""
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        pass
    numbers = np.full(len(column), np.nan)
    for row, value in enumerate(column.tolist()):
        try:
            numbers[row] = np.nan if value in ("", None) else float(value)
        except (TypeError, ValueError):
            cure = "mend it, or leave the row out"
            mistakes.append(f"{row_name(row)}: {name} is {shown(value)}, which is no number; {cure}")
            break
    return numbers


def _parse_times(column: Numbers, row_name: RowName, mistakes: list[str]) -> Numbers:
    """The column as seconds since 1970; a mistake is appended to `mistakes`."""
    if column.dtype.kind == "M":
        column = column.astype("datetime64[s]")
        missing = np.isnat(column)
        times: Numbers = column.astype(np.int64)
    else:
        try:
            numbers = column if column.dtype.kind in "iu" else column.astype(np.float64)
        except (TypeError, ValueError):
            return _parse_time_texts(column, row_name, mistakes)
        missing = ~np.isfinite(numbers)
        if not missing.any():
            if ((numbers >= 1900_01_01) & (numbers <= 2100_12_31)).all():  # days written as 20240131
                return _parse_time_texts(numbers.astype(np.int64).astype(str), row_name, mistakes)
            largest = np.abs(numbers).max()
            per_second = next(parts for bound, parts in EPOCH_UNITS if largest < bound)
            return np.asarray(numbers // per_second, dtype=np.int64)
        times = np.zeros(len(column), np.int64)
    if missing.any():
        mistakes.append(f"{row_name(int(missing.argmax()))}: its time is missing; mend it, or leave the row out")
    return times


def _parse_time_texts(column: Numbers, row_name: RowName, mistakes: list[str]) -> Numbers:
    times = np.zeros(len(column), np.int64)
    for row, value in enumerate(column.tolist()):
        text = str(value).strip()
        try:
            moment = datetime.fromisoformat(text[:10].replace(".", "-").replace("/", "-") + text[10:])
        except ValueError:
            mistakes.append(f"{row_name(row)}: its time is {shown(value)}; write it as 2024-01-31 15:45")
            break
        times[row] = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return times


def _most_common_gap(times: Numbers) -> int:
    """Seconds of the most common gap between bars; 0 for a single bar."""
    gaps, counts = np.unique(np.diff(times), return_counts=True)
    return int(gaps[counts.argmax()]) if len(gaps) else 0


# --- mistakes ------------------------------------------------------------------------------------------


def _raise_mistakes(mistakes: list[str]) -> None:
    """Raise DataError with these mistakes, if there are any."""
    if mistakes:
        raise DataError(listed("the bars have", "mistake", mistakes))


def _row_name(files: Sequence[tuple[str, int]]) -> RowName:
    """Names rows as people count them, from 1 below the header; with their file where there are several.

    `files` are the names of files and how many rows each has.
    """
    ends = np.cumsum([count for _, count in files])

    def name(row: int) -> str:
        if len(files) < 2:
            return f"row {row + 1}"
        at = int(np.searchsorted(ends, row, side="right"))
        file, count = files[at]
        return f"{file} row {row + 1 - (int(ends[at]) - count)}"

    return name


def _two_lengths(times: Numbers, symbol: str, rows: Numbers, files: Sequence[tuple[str, int]]) -> list[str]:
    """A mistake where one file has bars of a symbol in one length, and another in a longer one, as m15 and h1."""
    if len(files) < 2:
        return []
    file_of_row = np.searchsorted(np.cumsum([count for _, count in files]), rows, side="right")
    found = []
    for at in np.unique(file_of_row):
        own = times[file_of_row == at]
        if len(own) >= ENOUGH_BARS and _most_common_gap(own):
            found.append((_most_common_gap(own), int(np.diff(own).min()), files[at][0]))
    if not found:
        return []
    # The shortest gap decides: of bars that are rarely traded, most gaps may be long, but hardly all of them.
    (usual, _, one), (_, shortest, other) = min(found), max(found, key=lambda of: of[1])
    if shortest <= usual:
        return []
    of = f"{symbol}: " if symbol else ""
    lengths = f"{one} has bars of {frame_name(usual)}, and {other} of {frame_name(shortest)}"
    return [f"{of}{lengths}; give those of one length"]


def _mistakes(
    times: Numbers, columns: Mapping[str, Numbers], seconds: int, symbol: str, rows: Numbers, row_name: RowName
) -> list[str]:
    """What is wrong with the bars of a symbol: a line for each kind of mistake, with the first row that has it."""
    of = f"{symbol}, " if symbol else ""
    if not len(times):
        return [f"{of}there are no bars"]
    found = []

    def add(bad: Numbers, words: str, *seen: Numbers) -> None:
        if bad.any():
            at, more = int(bad.argmax()), int(bad.sum()) - 1
            rest = f" (and {more:,} more like it)" if more else ""
            words = words.format(*(values[at] for values in seen), before=row_name(int(rows[at - 1])))
            found.append(f"{of}{row_name(int(rows[at]))}: {words}{rest}")

    gaps = np.diff(times)
    repeated = np.append(False, gaps == 0)
    cure = "keep one of them"
    if not symbol:
        cure = f"where rows are of several symbols, name these in a column called symbol, else {cure}"
    add(repeated, f"its time {{}} is that of {{before}} too; {cure}", times.astype("datetime64[s]"))
    if not is_whole(seconds) or seconds < 1:
        if not repeated.any():
            found.append(f"{of}bars of {shown(seconds)} s: a single bar does not say how long it is; give more of them")
    else:
        too_close = np.append(False, (gaps != 0) & (gaps < seconds))
        cure = (
            "months differ in length: give bars of weeks or days"
            if seconds >= SHORTEST_MONTH
            else "leave it out where few are so, else give bars of one length"
        )
        words = f"it begins {{}} s after {{before}}, and bars are {seconds} s long; {cure}"
        add(too_close, words, np.append(0, gaps))
    for name in PRICES:
        values = columns[name]
        add(np.isnan(values), f"{name} is missing; mend it, or leave the row out")
        add(values < LOWEST_PRICE, f"{name} is {{}}; a price must be above zero", values)
        add(values > HIGHEST_PRICE, f"{name} is {{}}, which is no price", values)
    add(columns["high"] < columns["low"], "high {} is below low {}", columns["high"], columns["low"])
    volume = columns["volume"]
    add(~(np.isfinite(volume) & (volume >= 0)), "volume is {}; give a number of at least 0", volume)
    return found


# --- from tables to bars -------------------------------------------------------------------------------


def bars_of(table: Table, *, default_seconds: int | None = None) -> list[Bars]:
    """The bars of a table by symbol, as `bars_from` gives them."""
    return bars_from(_arrays(table), default_seconds=default_seconds, files=table.files)


def with_symbols(table: Table, *, always: bool = False) -> Table:
    """The table with a column of symbols, named after its files, where it has none and its files share times.

    Files that share few times may be parts of one symbol, and stay one, unless `always` is set.
    """
    try:
        known = known_columns(_arrays(table))
    except DataError:  # it is raised again where the bars are read, once the table is shown
        return table
    if SYMBOL in known or not table.files or not (always or _share_times(known["time"], table.files)):
        return table
    symbols = [_without_suffix(name) for name, _ in table.files]
    words = [symbol for symbol, (_, count) in zip(symbols, table.files, strict=True) for _ in range(count)]
    many = f"its {len(symbols):,} files are" if len(symbols) > 1 else "its file is"
    note = f"there is no column of symbols: {many} taken to be of one each, called as the file is, such as {symbols[0]}"
    columns = {**table.columns, SYMBOL: word_column(SYMBOL, words)}
    return replace(table, columns=columns, notes=(*table.notes, note))


def has_symbols_of_files(table: Table) -> bool:
    """Whether the symbols of a table are the names of its files."""
    return SYMBOL in table and set(table[SYMBOL].texts()) == {_without_suffix(name) for name, _ in table.files}


def _share_times(column: Numbers, files: Sequence[tuple[str, int]]) -> bool:
    """Whether most times of one of the files are in another file too."""
    mistakes: list[str] = []
    times = _parse_times(column, _row_name(files), mistakes)
    if mistakes or len(files) < 2:
        return False
    sizes = [count for _, count in files]
    file_of_row = np.repeat(np.arange(len(files)), sizes)
    codes = np.unique(times, return_inverse=True)[1]
    files_with_time = np.bincount(np.unique(codes * len(files) + file_of_row) // len(files))
    shared = np.bincount(file_of_row, weights=files_with_time[codes] > 1, minlength=len(files))
    return bool((shared > MOST_SHARED_TIMES * np.array(sizes)).any())


def _without_suffix(name: str) -> str:
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


def _arrays(table: Table) -> dict[str, Any]:
    return {name: _array(column) for name, column in table.columns.items()}


def _array(column: Column) -> Any:
    return column.values if column.kind in ("number", "whole number", "date") else np.asarray(column.texts())
