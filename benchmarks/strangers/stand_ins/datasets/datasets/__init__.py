"""A stand-in for `datasets` without a network: rows in memory, read from local CSV or JSON files."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from datasets import utils as utils

__version__ = "4.0.0"
ROWS_AT_ONCE = 1000


class Value:
    """What a column holds."""

    def __init__(self, dtype: str, names: list[str] | None = None) -> None:
        self.dtype, self.names = dtype, names


class Dataset:
    """Rows by number, columns by name."""

    builder_name = "csv"
    """As of local files, which model cards leave out."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), []))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._columns[key]
        if isinstance(key, slice):
            return {name: column[key] for name, column in self._columns.items()}
        return {name: column[key] for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[n] for n in range(len(self)))

    @property
    def column_names(self) -> list[str]:
        return list(self._columns)

    @property
    def features(self) -> dict[str, Value]:
        kinds = {int: "int64", float: "float64", str: "string"}
        found = {}
        for name, column in self._columns.items():
            names = [str(one) for one in sorted({*column})] if name == "label" else None
            found[name] = Value(kinds.get(type(column[0]), "list"), names)
        return found

    @property
    def format(self) -> dict[str, Any]:
        return {"type": None, "format_kwargs": {}, "columns": self.column_names}

    def set_format(self, type: str | None = None, columns: Any = None, **_: Any) -> None:  # noqa: A002
        """Rows stay plain Python values: collators turn them into tensors."""

    def map(
        self, function: Callable[[Any], Any], batched: bool = False, remove_columns: Iterable[str] = (), **_: Any
    ) -> Dataset:
        made: dict[str, list[Any]] = {}
        for begin in range(0, len(self), ROWS_AT_ONCE if batched else 1):
            if batched:
                new = dict(function(self[begin : begin + ROWS_AT_ONCE]))
            else:
                new = {name: [value] for name, value in function(self[begin]).items()}
            for name, values in new.items():
                made.setdefault(name, []).extend(values)
        kept = {name: column for name, column in self._columns.items() if name not in {*remove_columns}}
        return Dataset(kept | made)

    def rename_column(self, old: str, new: str) -> Dataset:
        return Dataset({new if name == old else name: column for name, column in self._columns.items()})

    def remove_columns(self, names: str | list[str]) -> Dataset:
        gone = {names} if isinstance(names, str) else {*names}
        return Dataset({name: column for name, column in self._columns.items() if name not in gone})

    def select(self, rows: Iterable[int]) -> Dataset:
        picked = [*rows]
        return Dataset({name: [column[n] for n in picked] for name, column in self._columns.items()})

    def unique(self, name: str) -> list[Any]:
        return list(dict.fromkeys(self._columns[name]))


class DatasetDict(dict[str, Dataset]):
    """Parts of a data set by name."""

    @property
    def column_names(self) -> dict[str, list[str]]:
        return {name: part.column_names for name, part in self.items()}

    def map(self, *args: Any, **kwargs: Any) -> DatasetDict:
        return DatasetDict({name: part.map(*args, **kwargs) for name, part in self.items()})

    def rename_column(self, old: str, new: str) -> DatasetDict:
        return DatasetDict({name: part.rename_column(old, new) for name, part in self.items()})

    def remove_columns(self, names: str | list[str]) -> DatasetDict:
        return DatasetDict({name: part.remove_columns(names) for name, part in self.items()})


class IterableDataset:
    """Never made here; others ask whether they have one."""


def load_dataset(path: str, name: str | None = None, data_files: Any = None, **_: Any) -> DatasetDict:
    """Read `data_files` (CSV or JSON), or the file NAME-CONFIG.json of the working directory."""
    if data_files is None:
        parts = json.loads(Path(f"{path.rpartition('/')[2]}-{name}.json").read_text())
        return DatasetDict({part: _from_rows(rows) for part, rows in parts.items()})
    return DatasetDict({part: _from_rows(_read(Path(file))) for part, file in data_files.items()})


def _read(file: Path) -> list[dict[str, Any]]:
    if file.suffix == ".json":
        rows: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
        return rows
    with file.open(newline="") as lines:
        return [
            {name: int(value) if value.isdecimal() else value for name, value in row.items()}
            for row in csv.DictReader(lines)
        ]


def _from_rows(rows: list[dict[str, Any]]) -> Dataset:
    return Dataset({name: [row[name] for row in rows] for name in rows[0]})
