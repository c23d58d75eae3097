"""Tables as files have them: CSV and Parquet, read into columns whose types hotlap recognises and shows."""

from __future__ import annotations

import io
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, did_you_mean, shown
from hotlap.core.terminal import clean
from hotlap.core.units import show_bytes
from hotlap.machine.limits import read_memory
from hotlap.recipes import csv_files
from hotlap.recipes.csv_files import TextFile, listed_names
from hotlap.recipes.kinds import Cells, Column, Kind, UnfitError, check_kinds, infer_column, to_seconds, word_column
from hotlap.recipes.picture_files import SUFFIXES as PICTURES
from hotlap.recipes.picture_files import folder_columns, is_picture, undecoded_in
from hotlap.store.files import write_bytes

PARQUET = (".parquet", ".pq")
MEMORY_A_VALUE = 16
"""Least bytes for a value while it is read: once as the file has it, once as numpy has it."""


def libraries(file: Path) -> tuple[Any, Any]:
    """The libraries that read and write Parquet files; DataError where they are missing."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{file} needs pyarrow: pip install hotlap[recipes]") from None


def _read(file: Path) -> Any:
    """The table in a file, texts encoded as a dictionary; DataError where it cannot be read or does not fit in memory.

    A file of some kilobytes can say that a value comes a billion times: it is asked how many there are before it is
    read, and texts that come again are kept once.
    """
    arrow, parquet = libraries(file)
    most = read_memory().free_bytes // 2
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise DataError(f"cannot read {file}: it is not a regular file")
        schema = parquet.read_schema(file)
        # By their paths as the file has them, which for single values are their names.
        texts = [one.name for one in schema if _is_text(arrow.types, one.type)]
        opened = parquet.ParquetFile(file, read_dictionary=texts)
        about = opened.metadata
        groups = [about.row_group(number) for number in range(about.num_row_groups)]
        values = sum(group.column(place).num_values for group in groups for place in range(group.num_columns))
        need = max(values, about.num_rows * about.num_columns) * MEMORY_A_VALUE
        if need > most:
            raise DataError(
                f"{file} has {about.num_rows:,} rows and {values:,} values, which need {show_bytes(need)} of memory; "
                f"at most {show_bytes(most)} are used; split it"
            )
        table = opened.read()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {str(error).splitlines()[0]}") from None
    size = sum(_text_bytes(table.column(place)) for place in range(table.num_columns))
    if size > most:
        raise DataError(
            f"{file} holds texts of {show_bytes(size)} in all; at most {show_bytes(most)} are read; split it"
        )
    return table


def _is_text(types: Any, kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _text_bytes(column: Any) -> int:
    """The total length of the texts of a column, repeats included."""
    arrow, total = import_module("pyarrow"), 0
    if not arrow.types.is_dictionary(column.type) or not _is_text(arrow.types, column.type.value_type):
        return 0
    for chunk in column.chunks:
        lengths = np.array([len(word or "") for word in chunk.dictionary.to_pylist()], np.int64)
        used = np.asarray(chunk.indices.drop_null())
        total += int(lengths[used].sum()) if len(lengths) else 0
    return total


class ParquetFile:
    """A Parquet file. Raises DataError in one line where it cannot be read, or where pyarrow is missing."""

    def __init__(self, file: Path) -> None:
        self.file = file
        table = _read(file)
        twice = sorted(name for name, count in Counter(table.column_names).items() if count > 1)
        if twice:
            count = table.column_names.count(twice[0])
            raise DataError(f"{file} has the column {twice[0]!r} {count} times; give each a name of its own")
        self._columns: dict[str, Column] = {}
        self._count: int = table.num_rows
        strange = []
        for name in table.column_names:
            column = _from_arrow(name, table.column(name).combine_chunks())
            if column is None:
                strange.append(f"column {name!r} of {file.name} holds {table.field(name).type}, which is not read")
            else:
                self._columns[name] = column
        self.names = tuple(self._columns)
        self.notes = tuple(strange)

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Column:
        """A column by its type in the file."""
        return self._columns[name]


def _from_arrow(name: str, array: Any) -> Column | None:
    """A column of the type that Parquet gives it; None where its cells are not single values."""
    types = import_module("pyarrow").types
    kind, absent = array.type, np.asarray(array.is_null())
    missing = absent if absent.any() else None
    if types.is_dictionary(kind) and _is_text(types, kind.value_type) and not absent.all():
        words = [word or "" for word in array.dictionary.to_pylist()]
        return word_column(name, ["" if at is None else words[at] for at in array.indices.to_pylist()])
    if types.is_dictionary(kind):
        return _from_arrow(name, array.dictionary_decode())
    if missing is not None and absent.all():
        return Column(name=name, kind="empty", values=np.full(len(array), np.nan), missing=missing)
    if types.is_boolean(kind):
        values = np.asarray(array.fill_null(False))
        return Column(name=name, kind="flag", values=values, categories=("false", "true"), missing=missing)
    if kind == "uint64" and int(np.asarray(array.fill_null(0)).max(initial=0)) >= 2**63:
        # As in a CSV file: what 64 bits do not hold with a sign is the name of something, and no amount.
        return word_column(name, ["" if value is None else str(value) for value in array.to_pylist()])
    if types.is_integer(kind):
        values = np.asarray(array.fill_null(0)).astype(np.int64)
        return Column(name=name, kind="whole number", values=values, missing=missing)
    if types.is_floating(kind) or types.is_decimal(kind):
        values = np.asarray(array.cast("float64").fill_null(float("nan")))
        absent = np.isnan(values)
        return Column(name=name, kind="number", values=values, missing=absent if absent.any() else None)
    if types.is_date(kind) or types.is_timestamp(kind):
        return Column(name=name, kind="date", values=to_seconds(np.asarray(array)), missing=missing)
    if types.is_string(kind) or types.is_large_string(kind):
        return word_column(name, [word or "" for word in array.to_pylist()])
    return None


def as_they_are(files: Sequence[Path]) -> dict[str, Any]:
    """The columns that all files share, concatenated with their types; empty where the types differ."""
    arrow, parquet = libraries(files[0])
    tables = [_read(file) for file in files]
    known = [set(table.column_names) for table in tables]
    names = [name for name in tables[0].column_names if all(name in others for others in known)]
    try:
        tables = [table.cast(parquet.read_schema(file)) for table, file in zip(tables, files, strict=True)]
        whole = arrow.concat_tables([table.select(names) for table in tables])
    except arrow.ArrowException:
        return {}
    return {name: whole.column(name) for name in whole.column_names}


def exact_texts(column: Any) -> list[str] | None:
    """The exact texts of a column of decimals, which floats would round; None for other types."""
    if import_module("pyarrow").types.is_decimal(column.type):
        return ["" if value is None else str(value) for value in column.to_pylist()]
    return None


def write_parquet(
    path: Path,
    columns: Sequence[Column],
    more: Mapping[str, Sequence[Any]],
    given: Mapping[str, Any] | None = None,
) -> None:
    """Write columns by their kinds, and `more` behind them, in which None is a missing value.

    Those that are `given` are written as they are, with those among them that are none of the others.
    """
    arrow, parquet = libraries(path)
    given = given or {}
    made = {column.name: given.get(column.name, _to_arrow(arrow, column)) for column in columns}
    made |= {name: column for name, column in given.items() if name not in made and name not in more}
    made |= {name: arrow.array(values) for name, values in more.items()}
    content = io.BytesIO()
    parquet.write_table(arrow.table(made), content)
    write_bytes(path, content.getvalue())


def _to_arrow(arrow: Any, column: Column) -> Any:
    if column.kind in ("category", "text"):
        return arrow.array([text or None for text in column.texts()], arrow.string())
    return arrow.array(column.values, mask=~column.present)


def joined(columns: list[Column]) -> Column:
    """The columns of several files concatenated; where their kinds differ, recognised anew from their texts."""
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


__all__ = ["Column", "Kind", "Table", "arrow_columns", "column_lines", "named_columns", "plain_cells", "read_table"]

SUFFIXES = csv_files.SUFFIXES + PARQUET
FILE = "file"
"""The column with the file that each row comes from."""
MOST_SHOWN = 200
"""Columns that hotlap shows; most tables have fewer."""
LONGEST_NAME = 40
"""Characters of a name that a line shows."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """Columns of equal length, by name."""

    path: Path
    columns: dict[str, Column]
    notes: tuple[str, ...] = ()
    """What was unusual in the file, one line each."""
    has_header: bool = True
    """Whether the file has a header."""
    files: tuple[tuple[str, int], ...] = ()
    """The files that hotlap concatenated: their names, and how many rows each has."""

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
        """The kind of each column: pass it to `read_table` to read another file in the same way."""
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
            path=path, columns={name: word_column(name, words) for name, words in cells.items()}, notes=tuple(said)
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
        columns[FILE] = infer_column(FILE, words, "category")
    sizes = tuple((file.name, count) for file, count in zip(files, counts, strict=True))
    return Table(path=path, columns=columns, notes=tuple(notes), has_header=has_header, files=sizes)


def table_in_memory(data: Any, columns: Sequence[str], kind: Kind | None = None) -> Table:
    """Values in memory as a table: a mapping of columns, a DataFrame, a list of mappings, or a list of plain values.

    A plain value is that of the only one of `columns`; of several, a row is a sequence of as many. None is missing.
    `columns` are of the `kind`, if it is given. Raises DataError in one line.
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
    kinds = dict.fromkeys(columns, kind)
    found = {name: infer_column(name, words, kinds.get(name)) for name, words in cells.items()}
    return Table(path=Path("memory"), columns=found)


def plain_cells(path: Path, table: Table) -> dict[str, Cells | Sequence[str]]:
    """The cells of a table's columns exactly as the file writes them."""
    exact: dict[str, Cells | Sequence[str]] = {}
    if not _lists_pictures(path):
        files = _files(path)
        if _is_parquet(files[0]):
            found = {name: exact_texts(one) for name, one in as_they_are(files).items()}
            exact = {name: texts for name, texts in found.items() if texts is not None}
        else:
            written = [TextFile(file, table.has_header) for file in files]
            exact = {name: Cells.concatenated([file.cells(name) for file in written]) for name in written[0].names}
    return {name: column.texts() for name, column in table.columns.items() if name not in exact} | exact


def arrow_columns(path: Path) -> dict[str, Any]:
    """All columns of Parquet files with their own types, also those that a table cannot hold; empty for other files."""
    if _lists_pictures(path):
        return {}
    files = _files(path)
    return as_they_are(files) if _is_parquet(files[0]) else {}


def _lists_pictures(path: Path) -> bool:
    """Whether the table lists the pictures of a folder, so that there is no file of cells."""
    return is_picture(path) or (path.is_dir() and not _tables_in(path))


def column_lines(table: Table) -> list[str]:
    """Each column as hotlap understands it, a line each: name, kind, share missing, an example; then notes."""
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
    return file.name.lower().endswith(PARQUET)


def _check(path: Path, files: Sequence[TextFile] | Sequence[ParquetFile], kinds: Mapping[str, Kind] | None) -> None:
    """Refuse files with different columns (in any order) or without rows, and kinds for columns that are missing."""
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


def _typed_column(name: str, files: Sequence[ParquetFile], wanted: Kind | None) -> Column:
    column = joined([file.column(name) for file in files])
    if wanted in (None, "empty", column.kind):
        return column
    try:
        return infer_column(name, column.texts(), wanted)
    except UnfitError as error:
        raise DataError(f"{files[0].file}: {shown(error.word)} in column {name!r} is no {wanted}") from None


def _written_column(name: str, files: Sequence[TextFile], wanted: Kind | None) -> Column:
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
