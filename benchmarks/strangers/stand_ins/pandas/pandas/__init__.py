"""A stand-in for the little of `pandas` that reads a table of series by the hour."""

from __future__ import annotations

import csv
import datetime
from pathlib import Path
from typing import Any

import numpy as np

__version__ = "2.3.3"


class DatetimeIndex:
    """Moments, and their parts as arrays."""

    def __init__(self, moments: list[datetime.datetime]) -> None:
        self.values = moments

    def __getattr__(self, name: str) -> Any:
        parts = {"dayofweek": lambda at: at.weekday(), "dayofyear": lambda at: at.timetuple().tm_yday}
        return np.array([parts.get(name, lambda at: getattr(at, name))(at) for at in self.values])


class DataFrame:
    """Columns by name; rows by slices."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.__dict__["_columns"] = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    @property
    def values(self) -> np.ndarray:
        return np.stack([np.asarray(column) for column in self._columns.values()], axis=1)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            return DataFrame({name: column[key] for name, column in self._columns.items()})
        if isinstance(key, str):
            return self._columns[key]
        return DataFrame({name: self._columns[name] for name in key})

    def __setitem__(self, name: str, column: Any) -> None:
        self._columns[name] = column

    def __getattr__(self, name: str) -> Any:
        if name not in self._columns:
            raise AttributeError(name)
        return self._columns[name]


Series = DataFrame


def read_csv(file: str, **_: Any) -> DataFrame:
    """Numbers in all columns but `date`."""
    with Path(file).open(newline="") as lines:
        head, *rows = csv.reader(lines)
    columns = dict(zip(head, zip(*rows, strict=True), strict=True))
    return DataFrame(
        {name: list(cells) if name == "date" else np.array(cells, float) for name, cells in columns.items()}
    )


def to_datetime(cells: Any) -> Any:
    """Moments of text; moments stay."""
    if isinstance(cells, DatetimeIndex):
        return cells
    return DatetimeIndex(
        [at if isinstance(at, datetime.datetime) else datetime.datetime.fromisoformat(at) for at in cells]
    )
