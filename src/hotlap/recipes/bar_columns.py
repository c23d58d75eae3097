"""Columns of bars as files have them: found by what people call them, read as times and numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, listed, shown

Numbers = np.ndarray[Any, Any]
Place = Callable[[int], str]
"""How a row is told, which is counted from 0."""

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
"""What columns are called, without case, spaces and signs; of several that are there, the first one counts."""
SYMBOLS_TOO = ("instrument", "asset", "coin", "stock", "code", "isin", "name")
"""What symbols are called where nothing says so more clearly: columns of words that come again."""
UNITS = ((1e11, 1), (1e14, 10**3), (1e17, 10**6), (np.inf, 10**9))
"""Times below each number are counted in so many parts of a second."""


def place_in(files: Sequence[tuple[str, int]]) -> Place:
    """Tells rows as people count them, from 1 below the header; with their file where these are several.

    `files` are the names of files and how many rows each has.
    """
    ends = np.cumsum([count for _, count in files])

    def told(row: int) -> str:
        if len(files) < 2:
            return f"row {row + 1}"
        at = int(np.searchsorted(ends, row, side="right"))
        name, count = files[at]
        return f"{name} row {row + 1 - (int(ends[at]) - count)}"

    return told


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
    """The column as numbers, with NaN for what is missing; mistakes are added to those that are wrong."""
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
    """The column as seconds since 1970; mistakes are added to those that are wrong."""
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
