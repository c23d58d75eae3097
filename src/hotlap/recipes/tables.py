"""Tables: CSV and Parquet files, folders of them, or values in memory, as columns whose kinds hotlap infers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, did_you_mean, shown
from hotlap.core.terminal import clean
from hotlap.recipes import csv_files, parquet_files
from hotlap.recipes.csv_files import TextFile, listed_names
from hotlap.recipes.kinds import Cells, Column, Kind, UnfitError, check_kinds, infer_column, word_column
from hotlap.recipes.parquet_files import ParquetFile, arrow_columns_of, decimal_texts
from hotlap.recipes.picture_files import SUFFIXES as PICTURES
from hotlap.recipes.picture_files import folder_columns, is_picture, undecoded_in

SUFFIXES = csv_files.SUFFIXES + parquet_files.SUFFIXES
MOST_SHOWN = 200
"""Columns that hotlap lists; most tables have fewer."""
LONGEST_NAME = 40
"""Characters of a column's name in that list."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Columns of equal length, by name."""

    path: Path
    columns: dict[str, Column]
    notes: tuple[str, ...] = ()
    """What was unusual in the file, one line each."""
    has_header: bool = True
    """Whether the first row of the file holds names."""
    files: tuple[tuple[str, int], ...] = ()
    """The concatenated files: their names, and how many rows each has."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r}{did_you_mean(name, self.columns)}")
        return self.columns[name]

    def rows(self, indices: Any) -> Table:
        """The table of these rows (indices, a mask or a slice)."""
        columns = {name: column.rows(indices) for name, column in self.columns.items()}
        return replace(self, columns=columns, files=())

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each column: pass it to `read_table` to read another file in the same way."""
        return {name: column.kind for name, column in self.columns.items()}


def read_table(
    path: Path | str,
    *,
    header: bool | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> Table:
    """The table in a CSV or Parquet file, or in all such files of a folder, concatenated in the order of their names.

    A folder of pictures gives a table of their `path`, and of their `class` where each class has a folder.

    `header` says whether the first row of a CSV file holds names. Without it, a row of numbers does not, nor does a row
    with a number that its column repeats. `kinds` are the kinds of columns that are not to be inferred. Raises
    DataError in one line, with file, line and value.
    """
    try:
        return _read_table(Path(path), header, kinds or {})
    except MemoryError:
        raise DataError(f"{path} needs more memory than there is; split it, or leave columns out") from None


def _read_table(path: Path, header: bool | None, kinds: Mapping[str, Kind]) -> Table:
    try:
        pictures = folder_columns(path) if path.is_dir() and not _tables_in(path) else None
        paths = _table_files(path) if pictures is None else []
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the name and its rights") from None
    if pictures is not None:
        cells, notes = pictures
        check_kinds(kinds, cells, path)
        return Table(
            path=path, columns={name: word_column(name, words) for name, words in cells.items()}, notes=tuple(notes)
        )
    files: Sequence[ParquetFile] | Sequence[TextFile]
    has_header = True
    if _is_parquet(paths[0]):
        files = [ParquetFile(file) for file in paths]
        _check_columns(path, files, kinds)
        columns = {name: _parquet_column(name, files, kinds.get(name)) for name in files[0].names}
    else:
        files = [TextFile(file, header) for file in paths]
        _check_columns(path, files, kinds)
        columns = {name: _csv_column(name, files, kinds.get(name)) for name in files[0].names}
        has_header = files[0].has_names
    return Table(
        path=path,
        columns=columns,
        notes=tuple(note for file in files for note in file.notes),
        has_header=has_header,
        files=tuple((file.file.name, len(file)) for file in files),
    )


def table_in_memory(data: Any, columns: Sequence[str], kinds: Mapping[str, Kind] | None = None) -> Table:
    """Values in memory as a table: a DataFrame, a mapping of columns, or a list of rows. None is a missing value.

    A row is a mapping, or a sequence of the values of `columns`, or where that is a single column its value. `kinds`
    are those of columns that are not to be inferred. Raises DataError in one line.
    """
    if hasattr(data, "columns") and hasattr(data, "to_dict"):
        data = data.to_dict("list")
    if not isinstance(data, Mapping):
        if isinstance(data, (str, bytes)) or not hasattr(data, "__iter__"):
            raise DataError(f"{shown(data)} is no rows; give a list, or a mapping of columns")
        rows = list(data)
        if rows and not all(isinstance(row, Mapping) for row in rows):
            try:
                rows = [dict(zip(columns, (row,) if len(columns) == 1 else row, strict=True)) for row in rows]
            except (TypeError, ValueError):
                need = " and ".join(columns) or "as many columns as a file has"
                raise DataError(f"a row such as {shown(rows[0])} must be a mapping, or hold {need}") from None
        data = {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}
    sizes = {str(name): len(values) for name, values in data.items()}
    if len(set(sizes.values())) != 1 or not max(sizes.values()):
        raise DataError(f"the columns have {shown(sizes)} values; give as many of each, and at least one")
    cells = {str(name): ["" if value is None else str(value) for value in values] for name, values in data.items()}
    found = {}
    for name, words in cells.items():
        wanted = (kinds or {}).get(name)
        try:
            found[name] = infer_column(name, words, wanted)
        except UnfitError as error:
            raise DataError(f"{shown(error.word)} in column {name!r} is no {wanted}") from None
    return Table(path=Path("memory"), columns=found)


def plain_cells(path: Path, table: Table) -> dict[str, Cells | Sequence[str]]:
    """The cells of a table's columns exactly as the file writes them."""
    exact: dict[str, Cells | Sequence[str]] = {}
    if not _lists_pictures(path):
        paths = _table_files(path)
        if _is_parquet(paths[0]):
            decimals = {name: decimal_texts(column) for name, column in arrow_columns_of(paths).items()}
            exact = {name: texts for name, texts in decimals.items() if texts is not None}
        else:
            files = [TextFile(file, table.has_header) for file in paths]
            exact = {name: Cells.concatenated([file.cells(name) for file in files]) for name in files[0].names}
    return {name: column.texts() for name, column in table.columns.items() if name not in exact} | exact


def arrow_columns(path: Path) -> dict[str, Any]:
    """The Arrow columns of Parquet files, also those that a table cannot hold; empty for other files."""
    if _lists_pictures(path):
        return {}
    paths = _table_files(path)
    return arrow_columns_of(paths) if _is_parquet(paths[0]) else {}


def _lists_pictures(path: Path) -> bool:
    """Whether the table lists pictures, so that no file holds its cells."""
    return is_picture(path) or (path.is_dir() and not _tables_in(path))


def column_lines(table: Table) -> list[str]:
    """A line for each column, with its name, kind, share of missing values and an example; then notes."""
    cells = [_described(column) for column in islice(table.columns.values(), MOST_SHOWN)]
    widths = [max(map(len, part)) for part in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = [f"and {len(table.columns) - MOST_SHOWN:,} more columns"] if len(table.columns) > MOST_SHOWN else []
    return [*lines, *more, *(f"note: {note}" for note in table.notes[:MOST_SHOWN])]


def named_columns(table: Table) -> str:
    """The columns with their kinds, for a message that asks for one."""
    named = [f"{name} ({column.kind})" for name, column in islice(table.columns.items(), MOST_SHOWN)]
    return ", ".join([*named, *(["…"] if len(table.columns) > MOST_SHOWN else [])])


def _described(column: Column) -> tuple[str, str, str, str]:
    kind: str = column.kind
    if column.kind == "category":
        kind = f"category of {len(column.categories)}"
    elif column.kind == "number":
        infinite = int(np.isinf(column.values).sum())
        kind = f"number, {infinite} infinite" if infinite else "number"
    absent = 0.0 if column.missing is None else float(column.missing.mean())
    share = f"{max(100 * absent, 0.1):.1f} % missing" if 0 < absent < 1 else "all missing" if absent else ""
    found = np.flatnonzero(column.present)[:1]
    example = column.rows(found).texts()[0] if len(found) else ""
    if column.kind in ("category", "text"):
        example = shown(example, 50)
    return _plain(column.name), kind, share, f"e.g. {example}" if len(found) else ""


# --- files ---------------------------------------------------------------------------------------------


def _table_files(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            beside = [one.name for one in _tables_in(path.parent)] if path.parent.is_dir() else []
            hint = did_you_mean(path.name, beside) if beside else "; check the name and the folder"
            raise DataError(f"{path} does not exist{hint if len(hint) < 200 else ''}")
        return [path]
    found = _tables_in(path)
    if not found:
        if name := undecoded_in(path):
            raise DataError(f"the folder {path} has no JPEG and no PNG files, but such as {name}; save them as PNG")
        raise DataError(
            f"the folder {path} has no tables and no pictures; put files of {', '.join(SUFFIXES)}, "
            f"or of {', '.join(PICTURES)}, in it"
        )
    if len({_is_parquet(file) for file in found}) > 1:
        raise DataError(f"the folder {path} has both CSV and Parquet files, as {found[0].name}; keep one sort of them")
    return found


def _tables_in(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.lower().endswith(SUFFIXES) and not file.name.startswith(".") and file.is_file()
    )


def _is_parquet(file: Path) -> bool:
    return file.name.lower().endswith(parquet_files.SUFFIXES)


def _check_columns(path: Path, files: Sequence[TextFile] | Sequence[ParquetFile], kinds: Mapping[str, Kind]) -> None:
    """Refuse files with different columns (in any order) or without rows, and kinds for columns that are missing."""
    first = files[0]
    wanted = set(first.names)
    for file in files[1:]:
        has = set(file.names)
        lacks = [name for name in first.names if name not in has]
        adds = [name for name in file.names if name not in wanted]
        if lacks or adds:
            differences = [
                f"{verb} {listed_names(names)}" for verb, names in (("lacks", lacks), ("adds", adds)) if names
            ]
            raise DataError(
                f"{file.file} {' and '.join(differences)}, unlike {first.file.name}; give all the same columns"
            )
    if not any(map(len, files)):
        raise DataError(f"{path} has a header ({listed_names(first.names)}) and no rows; give it at least one")
    check_kinds(kinds, first.names, path)


def _parquet_column(name: str, files: Sequence[ParquetFile], wanted: Kind | None) -> Column:
    column = _concatenated([file.column(name) for file in files])
    if wanted in (None, "empty", column.kind):
        return column
    try:
        return infer_column(name, column.texts(), wanted)
    except UnfitError as error:
        raise DataError(f"{files[0].file}: {shown(error.word)} in column {name!r} is no {wanted}") from None


def _concatenated(columns: list[Column]) -> Column:
    """The columns of several files concatenated; where their kinds differ, inferred anew from their texts."""
    first = columns[0]
    if len(columns) == 1:
        return first
    if {column.kind for column in columns} == {first.kind} and first.kind not in ("category", "text", "date"):
        missing = ~np.concatenate([column.present for column in columns])
        values = np.concatenate([column.values for column in columns])
        return Column(
            name=first.name,
            kind=first.kind,
            values=values,
            categories=first.categories,
            missing=missing if missing.any() else None,
        )
    return infer_column(first.name, [text for column in columns for text in column.texts()])


def _csv_column(name: str, files: Sequence[TextFile], wanted: Kind | None) -> Column:
    try:
        return infer_column(name, Cells.concatenated([file.cells(name) for file in files]), wanted)
    except UnfitError as error:
        for file in files:
            row = next((row for row, cell in enumerate(file.cells(name)) if cell.strip() == error.word), None)
            if row is not None:
                line = f"{file.file} line {file.line_of(row)}"
                raise DataError(f"{line}: {shown(error.word)} in column {name!r} is no {wanted}") from None
        raise


def _plain(text: str) -> str:
    words = clean(text)
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 2]} …"
