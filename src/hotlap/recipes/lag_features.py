"""Features of a wide table ordered in time: lags and rolling figures of each column, and the place in the calendar.

No feature looks ahead. Sums add numbers in an order that depends on the window alone: a feature stays the same to the
last bit, whatever comes after its row, and wherever the table begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, shown
from hotlap.recipes.recipe import Numbers
from hotlap.recipes.tables import Table, named_columns

TIMES = ("date", "time", "datetime", "timestamp", "date_id", "ds", "day", "id", "index", "step", "period")
"""Usual names of a column that orders rows in time."""
ORDERED = ("date", "whole number", "number")
"""Kinds of columns that can order rows."""
MOST_ROWS = 10_000
"""Most rows that a lag or a window may reach back."""
PERIODS_S = {"hour": 86_400.0, "weekday": 7 * 86_400.0, "season": 365.2425 * 86_400}
"""Cycles of the calendar, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Lags:
    """Which features hotlap makes of each column, in rows."""

    lags: tuple[int, ...]
    windows: tuple[int, ...]
    """Rows over which means and standard deviations are taken."""
    fill: int
    """A missing value is the last one known, for so many rows."""

    def __post_init__(self) -> None:
        whole = [*self.lags, *self.windows, self.fill]
        if any(type(one) is not int or not 0 <= one <= MOST_ROWS for one in whole):
            raise ValueError(f"lags, windows and fill must be whole numbers from 0 to {MOST_ROWS:,}: {shown(whole)}")
        if 0 in self.lags or any(window < 2 for window in self.windows):
            raise ValueError(f"lags must be at least 1 and windows at least 2: {shown(whole)}")

    @property
    def history(self) -> int:
        """Rows before a row that its features read."""
        return self.fill + max([0, *self.lags, *(window - 1 for window in self.windows)])

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Lags:
        """The value that `to_dict` wrote; ValueError where it is none."""
        return cls(lags=tuple(state["lags"]), windows=tuple(state["windows"]), fill=state["fill"])

    def names(self, columns: Sequence[str], is_dated: bool) -> list[str]:
        """The names of the features, in the order of `features`."""
        cycles = [f"{wave} of {name}" for name in PERIODS_S for wave in ("sine", "cosine")] if is_dated else []
        found = [*columns, *cycles, *(f"{column}, {lag} before" for lag in self.lags for column in columns)]
        for window in self.windows:
            found += [f"{what} of {column} over {window}" for what in ("mean", "deviation") for column in columns]
        return found

    def features(self, values: Numbers, times: Numbers, is_dated: bool) -> Numbers:
        """float32, rows × features, nan where a value is missing; the first `history` rows know too little."""
        parts = [values, *([calendar(times)] if is_dated else []), *(shifted(values, lag) for lag in self.lags)]
        for window in self.windows:
            parts += rolling(values, window)
        return np.concatenate(parts, axis=1, dtype=np.float32, casting="same_kind")


def filled(values: Numbers, most: int) -> Numbers:
    """Missing values as the last known one of their column, for at most `most` rows."""
    rows = np.arange(len(values))[:, None]
    last = np.maximum.accumulate(np.where(np.isfinite(values), rows, -most - 1), axis=0)
    found: Numbers = np.take_along_axis(values, np.maximum(last, 0), axis=0)
    return np.where(rows - last <= most, found, np.nan)


def shifted(values: Numbers, rows: int) -> Numbers:
    """The values of so many rows before each row, or after it where `rows` is negative; nan where there is none."""
    found = np.full(values.shape, np.nan)
    if abs(rows) < len(values):
        found[max(rows, 0) : len(values) + min(rows, 0)] = values[max(-rows, 0) : len(values) - max(rows, 0)]
    return found


def rolling(values: Numbers, window: int) -> list[Numbers]:
    """The mean and the standard deviation of what is known of the last `window` rows, the row itself among them."""
    padded = np.concatenate([np.full((window - 1, values.shape[1]), np.nan), values])
    views = [padded[at : at + len(values)] for at in range(window)]
    count = np.zeros(values.shape)
    total, square = count.copy(), count.copy()
    for view in views:
        known = np.isfinite(view)
        count += known
        total += np.where(known, view, 0.0)
    mean = np.divide(total, count, out=np.full(values.shape, np.nan), where=count > 0)
    for view in views:
        off = view - mean
        square += np.where(np.isfinite(off), off, 0.0) ** 2
    deviation = np.sqrt(np.divide(square, count, out=np.full(values.shape, np.nan), where=count > 0))
    return [mean, deviation]


def calendar(times: Numbers) -> Numbers:
    """Sine and cosine of the place in the day, the week and the year, of times in seconds since 1970."""
    angles = [2 * np.pi * times / period for period in PERIODS_S.values()]
    return np.stack([wave(angle) for angle in angles for wave in (np.sin, np.cos)], axis=1)


# --- order in time -------------------------------------------------------------------------------------


def time_column(table: Table, named: str) -> str:
    """The column that orders the rows: the named one, the only one of dates, or one with a usual name."""
    if named:
        return table[named].name
    dates = [name for name, column in table.columns.items() if column.kind == "date"]
    usual = [name for name in table.columns if name.lower() in TIMES and table[name].kind in ORDERED]
    found = dates if len(dates) == 1 else usual
    if len(found) != 1:
        raise DataError(
            f"which column of {table.path} orders its rows in time? Say --time; there are {named_columns(table)}"
        )
    return found[0]


def times_of(table: Table, name: str) -> Numbers:
    """The time of each row, rising: seconds since 1970 of dates, else numbers. DataError where rows are not in order.

    Rows are counted from 1, below the header.
    """
    column = table[name]
    if column.kind not in ORDERED:
        raise DataError(f"the time {name!r} is {column.kind} in {table.path}; name a column of dates or numbers")
    if column.missing is not None:
        row = int(column.missing.argmax()) + 1
        raise DataError(f"the time {name!r} of {table.path} is missing in row {row:,}; fill it in, or take the row out")
    values = column.values
    if column.kind == "date":
        values = values.astype("datetime64[us]").astype(np.int64) / 1e6
    times = values.astype(np.float64)
    steps = np.diff(times)
    if (steps <= 0).any():
        at = int((steps <= 0).argmax())
        before, here = column.rows(np.array([at, at + 1])).texts()
        if steps[at] == 0:
            raise DataError(
                f"{table.path} has the time {here} in rows {at + 1:,} and {at + 2:,}; give one row for each time"
            )
        raise DataError(
            f"{table.path} is not in order of {name!r}: {here} in row {at + 2:,} comes behind {before}; sort the file"
        )
    return times


def gap_line(table: Table, name: str, times: Numbers) -> str | None:
    """Where time steps are longer than usual, in a line; None where all are alike."""
    steps = np.diff(times)
    if not len(steps):
        return None
    usual = float(np.median(steps))
    gaps = np.flatnonzero(steps > 1.5 * usual)
    if not len(gaps):
        return None
    worst = int(gaps[steps[gaps].argmax()])
    after = table[name].rows(np.array([worst])).texts()[0]
    return (
        f"{len(gaps):,} of {len(steps):,} steps in time are longer than usual, the longest {steps[worst] / usual:,.3g} "
        f"times, after {after}; rows next to each other count as one step apart"
    )
