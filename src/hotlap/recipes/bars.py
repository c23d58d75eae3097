"""Bars of prices: found in named columns, checked, made longer, and joined once they are complete."""

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
from hotlap.recipes.kinds import Column, in_words
from hotlap.recipes.tables import SUFFIXES, Table

Numbers = np.ndarray[Any, Any]
Place = Callable[[int], str]
"""Names a row, given its number from 0, in a message."""

PRICES = ("open", "high", "low", "close")
NAMES = {
    "time": ("datetime", "timestamp", "opentime", "unix", "time", "date"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "c", "adjclose", "price"),
    "volume": ("volume", "vol", "v", "tickvolume", "tickvol"),
    "symbol": ("symbol", "ticker", "pair"),
}
"""Usual names of columns, without case, spaces and signs; the first one that exists counts."""
SYMBOLS_TOO = ("instrument", "asset", "coin", "stock", "code", "isin", "name")
"""Names of columns that hold symbols only if their words repeat."""
UNITS = ((1e11, 1), (1e14, 10**3), (1e17, 10**6), (np.inf, 10**9))
"""Times below each number are counted in so many parts of a second."""


def place_in(files: Sequence[tuple[str, int]]) -> Place:
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


def by_meaning(columns: Mapping[str, Any]) -> dict[str, Numbers]:
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
    if "symbol" not in found:
        too = [name for name in SYMBOLS_TOO if name in given and _come_again(given[name])]
        if too:
            found["symbol"] = given[too[0]]
    if not any(meaning in found for meaning in ("time", *PRICES)):
        raise DataError(
            f"no column is called as those of bars are: there are {shown([str(name) for name in columns])}; "
            f"name them, in the first row of a file, such as time,{','.join(PRICES)},volume"
        )
    missing = [
        f"there is no column for {meaning}: name one {' or '.join(map(repr, NAMES[meaning]))}; "
        f"there are {shown([str(name) for name in columns])}"
        for meaning in ("time", *PRICES)
        if meaning not in found
    ]
    refuse(missing)
    lengths = {meaning: column.shape for meaning, column in found.items()}
    if len(set(lengths.values())) > 1 or found["open"].ndim != 1 or not len(found["open"]):
        raise DataError(f"columns must be of one length, and not empty; they have the shapes {shown(lengths, 200)}")
    if "date" in given and re.fullmatch(r"\d\d:\d\d(:\d\d)?", str(found["time"][0])):
        days = given["date"]
        if days.dtype.kind == "M":  # as a table has read them: with an hour, which is midnight
            days = days.astype("datetime64[D]")
        found["time"] = np.array([f"{day} {hour}" for day, hour in zip(days, found["time"], strict=True)])
    return found


def _come_again(column: Numbers) -> bool:
    """Whether these are words, most of which come again."""
    if column.dtype.kind not in "OUS" or column.ndim != 1:
        return False
    words = np.unique(column.astype(str))
    return 2 * len(words) <= len(column) and any(words)


def numbers_in(name: str, column: Numbers, place: Place, wrong: list[str]) -> Numbers:
    """The column as numbers, NaN where missing; mistakes are appended to `wrong`."""
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError):
        pass
    numbers = np.full(len(column), np.nan)
    for row, value in enumerate(column.tolist()):
        try:
            numbers[row] = np.nan if value in ("", None) else float(value)
        except (TypeError, ValueError):
            wrong.append(f"{place(row)}: {name} is {shown(value)}, which is no number; mend it, or leave the row out")
            break
    return numbers


def times_in(column: Numbers, place: Place, wrong: list[str]) -> Numbers:
    """The column as seconds since 1970; mistakes are appended to `wrong`."""
    if column.dtype.kind == "M":
        column = column.astype("datetime64[s]")
        missing = np.isnat(column)
        times: Numbers = column.astype(np.int64)
    else:
        try:
            numbers = column if column.dtype.kind in "iu" else column.astype(np.float64)
        except (TypeError, ValueError):
            return _read_times(column, place, wrong)
        missing = ~np.isfinite(numbers)
        if not missing.any():
            if ((numbers >= 1900_01_01) & (numbers <= 2100_12_31)).all():  # days written as 20240131
                return _read_times(numbers.astype(np.int64).astype(str), place, wrong)
            largest = np.abs(numbers).max()
            return np.asarray(numbers // next(unit for bound, unit in UNITS if largest < bound), dtype=np.int64)
        times = np.zeros(len(column), np.int64)
    if missing.any():
        wrong.append(f"{place(int(missing.argmax()))}: its time is missing; mend it, or leave the row out")
    return times


def _read_times(column: Numbers, place: Place, wrong: list[str]) -> Numbers:
    times = np.zeros(len(column), np.int64)
    for row, value in enumerate(column.tolist()):
        text = str(value).strip()
        try:
            moment = datetime.fromisoformat(text[:10].replace(".", "-").replace("/", "-") + text[10:])
        except ValueError:
            wrong.append(f"{place(row)}: its time is {shown(value)}; write it as 2024-01-31 15:45")
            break
        times[row] = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return times


def refuse(wrong: list[str]) -> None:
    """Raise DataError with these mistakes, if there are any."""
    if wrong:
        raise DataError(listed("the bars have", "mistake", wrong))


log = logger(__name__)

LEAST, MOST = 1e-15, 1e15
"""Between these a price is one; their ratios fit into 32 bits."""
ENOUGH = 50
"""Bars that show how long a bar is: the gap between a few may be a weekend."""
MONTH = 28 * 86400
"""Seconds of the shortest one."""
MONDAY = 4 * 86400
"""A Monday of 1970, from which longer bars are counted: days begin at midnight UTC, weeks on Mondays."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars:
    """The bars of one symbol in order; DataError where prices or times are impossible."""

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
    """The most common gap between bars, which is their length; 0 for a single bar."""
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


SYMBOL = "symbol"
"""The column that is made of the names of files."""
MOST_SHARED = 0.5
"""Files of one symbol may share a bar where one ends and the next begins; two symbols share more of their times."""


def bars_in(table: Table, *, few: int | None = None) -> list[Bars]:
    """The bars of a table by symbol, with all mistakes at once in a DataError; a few are taken to be `few` s long."""
    return bars_from(_values_in(table), few=few, files=table.files)


def with_symbols(table: Table, *, at_once: bool = False) -> Table:
    """The table with a column of symbols, by the names of its files, where it has none and its files share times.

    Files whose times do not come again in others may be parts of one symbol, and stay one; `at_once` does not ask.
    """
    try:
        found = by_meaning(_values_in(table))
    except DataError:  # it is raised again where the bars are read, once the table is shown
        return table
    if SYMBOL in found or not table.files or not (at_once or _share_times(found["time"], table.files)):
        return table
    names = [_symbol(name) for name, _ in table.files]
    words = [symbol for symbol, (_, count) in zip(names, table.files, strict=True) for _ in range(count)]
    many = f"its {len(names):,} files are" if len(names) > 1 else "its file is"
    note = f"there is no column of symbols: {many} taken to be of one each, called as the file is, such as {names[0]}"
    columns = {**table.columns, SYMBOL: in_words(SYMBOL, words)}
    return replace(table, columns=columns, notes=(*table.notes, note))


def is_called_as_files(table: Table) -> bool:
    """Whether the symbols of a table are the names of its files."""
    return SYMBOL in table and set(table[SYMBOL].texts()) == {_symbol(name) for name, _ in table.files}


def _share_times(column: Numbers, files: Sequence[tuple[str, int]]) -> bool:
    """Whether most times of a file come again in others."""
    wrong: list[str] = []
    times = times_in(column, place_in(files), wrong)
    if wrong or len(files) < 2:
        return False
    of_file = np.repeat(np.arange(len(files)), [count for _, count in files])
    codes = np.unique(times, return_inverse=True)[1]
    in_files = np.bincount(np.unique(codes * len(files) + of_file) // len(files))
    shared = np.bincount(of_file, weights=in_files[codes] > 1, minlength=len(files))
    return bool((shared > MOST_SHARED * np.array([count for _, count in files])).any())


def _symbol(name: str) -> str:
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


def _values_in(table: Table) -> dict[str, Any]:
    return {name: _values(column) for name, column in table.columns.items()}


def _values(column: Column) -> Any:
    return column.values if column.kind in ("number", "whole number", "date") else np.asarray(column.texts())


SECONDS = 900
START = MONDAY + 2608 * 7 * 86400
"""Monday, 30 December 2019."""
SPREAD = 0.0006
"""Of returns from bar to bar."""
LOOKBACK = 12
"""Bars over which the trend is taken that the signal follows."""
MOST_SIGNAL = 0.5
"""Above it, trends feed themselves for so long that prices leave all bounds."""


def simulated_bars(rows: int, symbols: int = 1, seed: int = 0, signal: float = 0.1) -> list[Bars]:
    """So many bars of 15 minutes of each symbol, from Monday to Friday; the same for the same seed.

    `signal` is the correlation of the return from one bar to the next with the sign of the return over the 12 bars
    before: nothing else can be learned. With 0 the direction of prices is pure chance. Returns have
    fat tails and a spread of 0.0006, so that over 4 bars some nine in ten stay within a threshold of 0.002.
    """
    wrong = [
        f"{name}={shown(value)} must be a whole number of at least {least}"
        for name, value, least in (("rows", rows, 1), ("symbols", symbols, 1), ("seed", seed, 0))
        if not is_whole(value) or value < least
    ]
    if isinstance(signal, bool) or not isinstance(signal, (int, float)) or not 0 <= signal <= MOST_SIGNAL:
        wrong.append(f"signal={shown(signal)} must be a number from 0 to {MOST_SIGNAL}")
    if wrong:
        raise DataError("; ".join(wrong))
    return [_one(rows, f"SIM{at + 1}", np.random.default_rng([seed, at]), signal) for at in range(symbols)]


def _one(rows: int, symbol: str, chance: np.random.Generator, signal: float) -> Bars:
    places = np.arange(rows)
    a_week = 5 * 86400 // SECONDS
    times = START + places // a_week * 7 * 86400 + places % a_week * SECONDS
    shocks = chance.standard_t(5, rows) * np.sqrt(3 / 5)  # of spread 1
    logs = _walk(SPREAD * signal, SPREAD * np.sqrt(1 - signal**2) * shocks)
    closes = 100 * np.exp(logs)
    opens = np.append(100.0, closes[:-1])
    above, below = np.exp(SPREAD / 2 * chance.exponential(size=(2, rows)))
    busy = 1.5 + np.sin(2 * np.pi * (times % 86400) / 86400 - np.pi / 2)
    return Bars(
        times=times,
        open=opens,
        high=np.maximum(opens, closes) * above,
        low=np.minimum(opens, closes) / below,
        close=closes,
        volume=np.round(1000 * busy * chance.lognormal(sigma=0.5, size=rows)),
        seconds=SECONDS,
        symbol=symbol,
    )


def _walk(push: float, shocks: Numbers) -> Numbers:
    """A random walk that is pushed, at each step, the way it went over the last steps."""
    at = [0.0]
    for shock in shocks.tolist():
        then = at[-1 - LOOKBACK] if len(at) > LOOKBACK else 0.0
        towards = push if at[-1] > then else -push if at[-1] < then else 0.0
        at.append(at[-1] + towards + shock)
    return np.array(at[1:])
