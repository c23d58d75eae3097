"""Tables as files have them: CSV and Parquet, read into columns whose kinds are recognised and shown."""

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
from hotlap.recipes.kinds import Cells, Column, Kind, UnfitError, check_kinds, in_words, recognised
from hotlap.recipes.parquet_files import ParquetFile
from hotlap.recipes.picture_files import SUFFIXES as PICTURES
from hotlap.recipes.picture_files import folder_columns, is_picture, undecoded_in

__all__ = ["Column", "Kind", "Table", "arrow_columns", "columns_told", "named_columns", "plain_cells", "read_table"]

SUFFIXES = csv_files.SUFFIXES + parquet_files.SUFFIXES
FILE = "file"
"""The column that says from which file of a folder a row is."""
MOST_TOLD = 200
"""Columns that are shown, of which most tables have fewer."""
LONGEST_NAME = 40
"""Characters of a name that a line shows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Columns of equal length, by name."""

    path: Path
    columns: dict[str, Column]
    notes: tuple[str, ...] = ()
    """What was out of the ordinary when it was read, one line each."""
    has_header: bool = True
    """Whether its file names the columns."""
    files: tuple[tuple[str, int], ...] = ()
    """The files it was read from, one below the other: their names, and how many rows each has."""

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise DataError(f"{self.path} has no column {name!r}{did_you_mean(name, self.columns)}")
        return self.columns[name]

    def rows(self, indices: Any) -> Table:
        """The table at these rows, in this order."""
        columns = {name: column.rows(indices) for name, column in self.columns.items()}
        return replace(self, columns=columns, files=())

    @property
    def kinds(self) -> dict[str, Kind]:
        """The kind of each column: give it to `read_table` for a file that is to be read as this one was."""
        return {name: column.kind for name, column in self.columns.items()}


def read_table(
    path: Path | str,
    *,
    header: bool | None = None,
    kinds: Mapping[str, Kind] | None = None,
    with_file: bool = False,
) -> Table:
    """The table in a CSV or Parquet file, or in all such files of a folder, one below the other in order of name.

    Of a folder of pictures it lists the files: their `path`, and their `class` where there is a folder for each.

    `header` says whether the first row holds names; by itself it does unless all of it are numbers, or one of them is
    a number that comes again below it. `kinds` says
    what columns are, where they are not to be recognised. `with_file` adds a column with the name of each row's file.
    Raises DataError in one line with file, line and value where something is wrong.
    """
    try:
        return _read_table(Path(path), header, kinds, with_file=with_file)
    except MemoryError:
        raise DataError(f"{path} needs more memory than there is; split it, or leave columns out") from None


def _read_table(path: Path, header: bool | None, kinds: Mapping[str, Kind] | None, *, with_file: bool) -> Table:
    try:
        found = folder_columns(path) if path.is_dir() and not _tables_in(path) else None
        files = _files(path) if found is None else []
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; check the name and its rights") from None
    if found is not None:
        cells, said = found
        check_kinds(kinds or {}, cells, path)
        return Table(
            path=path, columns={name: in_words(name, words) for name, words in cells.items()}, notes=tuple(said)
        )
    has_header = True
    if _is_parquet(files[0]):
        typed = [ParquetFile(file) for file in files]
        _check(path, typed, kinds)
        columns = {name: _typed_column(name, typed, (kinds or {}).get(name)) for name in typed[0].names}
        counts, notes = [len(file) for file in typed], [note for file in typed for note in file.notes]
    else:
        written = [TextFile(file, header) for file in files]
        _check(path, written, kinds)
        columns = {name: _written_column(name, written, (kinds or {}).get(name)) for name in written[0].names}
        counts, notes = [len(file) for file in written], [note for file in written for note in file.notes]
        has_header = written[0].has_names
    if with_file:
        if FILE in columns:
            raise DataError(f"{path} has a column {FILE!r} of its own; read it without with_file")
        words = [file.name for file, count in zip(files, counts, strict=True) for _ in range(count)]
        columns[FILE] = recognised(FILE, words, "category")
    sizes = tuple((file.name, count) for file, count in zip(files, counts, strict=True))
    return Table(path=path, columns=columns, notes=tuple(notes), has_header=has_header, files=sizes)


def plain_cells(path: Path, table: Table) -> dict[str, Cells | Sequence[str]]:
    """The cells of a table's columns as the file writes them, not as they were understood."""
    exact: dict[str, Cells | Sequence[str]] = {}
    if not _lists_pictures(path):
        files = _files(path)
        if _is_parquet(files[0]):
            found = {name: parquet_files.exact_texts(one) for name, one in parquet_files.as_they_are(files).items()}
            exact = {name: texts for name, texts in found.items() if texts is not None}
        else:
            written = [TextFile(file, table.has_header) for file in files]
            exact = {name: Cells.below([file.cells(name) for file in written]) for name in written[0].names}
    return {name: column.texts() for name, column in table.columns.items() if name not in exact} | exact


def arrow_columns(path: Path) -> dict[str, Any]:
    """The columns of Parquet files as they are, those that a table cannot hold among them; of other files none."""
    if _lists_pictures(path):
        return {}
    files = _files(path)
    return parquet_files.as_they_are(files) if _is_parquet(files[0]) else {}


def _lists_pictures(path: Path) -> bool:
    """Whether what was read there are the names of pictures, which no file writes down."""
    return is_picture(path) or (path.is_dir() and not _tables_in(path))


def columns_told(table: Table) -> list[str]:
    """What was understood of each column, one line each: name, kind, how much is missing, an example; then notes."""
    cells = [_told(column) for column in islice(table.columns.values(), MOST_TOLD)]
    widths = [max(map(len, part)) for part in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    more = [f"and {len(table.columns) - MOST_TOLD:,} more columns"] if len(table.columns) > MOST_TOLD else []
    return [*lines, *more, *(f"note: {note}" for note in table.notes[:MOST_TOLD])]


def named_columns(table: Table) -> str:
    """The names of columns with their kinds, for a question about them."""
    named = [f"{name} ({column.kind})" for name, column in islice(table.columns.items(), MOST_TOLD)]
    return ", ".join([*named, *(["…"] if len(table.columns) > MOST_TOLD else [])])


def _told(column: Column) -> tuple[str, str, str, str]:
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


def _files(path: Path) -> list[Path]:
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


def _check(path: Path, files: Sequence[TextFile] | Sequence[ParquetFile], kinds: Mapping[str, Kind] | None) -> None:
    """Refuse files that do not have the same columns (in whichever order), or have no rows, and kinds of no column."""
    first = files[0]
    wanted = set(first.names)
    for file in files[1:]:
        has = set(file.names)
        lacks = [name for name in first.names if name not in has]
        more = [name for name in file.names if name not in wanted]
        if lacks or more:
            said = [
                *([f"lacks {listed_names(lacks)}"] if lacks else []),
                *([f"adds {listed_names(more)}"] if more else []),
            ]
            raise DataError(f"{file.file} {' and '.join(said)}, unlike {first.file.name}; give all the same columns")
    if not any(map(len, files)):
        raise DataError(f"{path} has a header ({listed_names(first.names)}) and no rows; give it at least one")
    check_kinds(kinds or {}, first.names, path)


def _typed_column(name: str, files: Sequence[ParquetFile], told: Kind | None) -> Column:
    column = parquet_files.joined([file.column(name) for file in files])
    if told in (None, "empty", column.kind):
        return column
    try:
        return recognised(name, column.texts(), told)
    except UnfitError as error:
        raise DataError(f"{files[0].file}: {shown(error.word)} in column {name!r} is no {told}") from None


def _written_column(name: str, files: Sequence[TextFile], told: Kind | None) -> Column:
    try:
        return recognised(name, Cells.below([file.cells(name) for file in files]), told)
    except UnfitError as error:
        for file in files:
            row = next((row for row, cell in enumerate(file.cells(name)) if cell.strip() == error.word), None)
            if row is not None:
                line = f"{file.file} line {file.line_of(row)}"
                raise DataError(f"{line}: {shown(error.word)} in column {name!r} is no {told}") from None
        raise


def _plain(text: str) -> str:
    words = clean(text)
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 2]} …"
