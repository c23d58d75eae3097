"""Parquet files, whose columns say what they are. They are read and written by pyarrow, imported when one is."""

from __future__ import annotations

import io
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError
from hotlap.core.units import show_bytes
from hotlap.machine.limits import read_memory
from hotlap.recipes.kinds import Column, in_seconds, in_words, recognised
from hotlap.store.files import write_bytes

SUFFIXES = (".parquet", ".pq")
MEMORY_A_VALUE = 16
"""Bytes that a value takes while it is read, at least: in the file's own form, and in numpy's."""


def libraries(file: Path) -> tuple[Any, Any]:
    """What reads and writes Parquet files; DataError where it is missing."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{file} needs pyarrow; install it: pip install pyarrow") from None


def _read(file: Path) -> Any:
    """The table in a file, texts as numbers of different ones; DataError where it is none, or more than memory holds.

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
    """How long the texts of a column are in all, those that come again counted each time."""
    arrow, total = import_module("pyarrow"), 0
    if not arrow.types.is_dictionary(column.type) or not _is_text(arrow.types, column.type.value_type):
        return 0
    for chunk in column.chunks:
        lengths = np.array([len(word or "") for word in chunk.dictionary.to_pylist()], np.int64)
        used = np.asarray(chunk.indices.drop_null())
        total += int(lengths[used].sum()) if len(lengths) else 0
    return total


class ParquetFile:
    """A Parquet file. Raises DataError in one line where it is none, or where pyarrow is missing."""

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
        """A column by its own type."""
        return self._columns[name]


def _from_arrow(name: str, array: Any) -> Column | None:
    """A column of the kind that Parquet says; None for one that is no list of single values."""
    types = import_module("pyarrow").types
    kind, absent = array.type, np.asarray(array.is_null())
    missing = absent if absent.any() else None
    if types.is_dictionary(kind) and _is_text(types, kind.value_type) and not absent.all():
        words = [word or "" for word in array.dictionary.to_pylist()]
        return in_words(name, ["" if at is None else words[at] for at in array.indices.to_pylist()])
    if types.is_dictionary(kind):
        return _from_arrow(name, array.dictionary_decode())
    if missing is not None and absent.all():
        return Column(name=name, kind="empty", values=np.full(len(array), np.nan), missing=missing)
    if types.is_boolean(kind):
        values = np.asarray(array.fill_null(False))
        return Column(name=name, kind="flag", values=values, categories=("false", "true"), missing=missing)
    if kind == "uint64" and int(np.asarray(array.fill_null(0)).max(initial=0)) >= 2**63:
        # As in a CSV file: what 64 bits do not hold with a sign is the name of something, and no amount.
        return in_words(name, ["" if value is None else str(value) for value in array.to_pylist()])
    if types.is_integer(kind):
        values = np.asarray(array.fill_null(0)).astype(np.int64)
        return Column(name=name, kind="whole number", values=values, missing=missing)
    if types.is_floating(kind) or types.is_decimal(kind):
        values = np.asarray(array.cast("float64").fill_null(float("nan")))
        absent = np.isnan(values)
        return Column(name=name, kind="number", values=values, missing=absent if absent.any() else None)
    if types.is_date(kind) or types.is_timestamp(kind):
        return Column(name=name, kind="date", values=in_seconds(np.asarray(array)), missing=missing)
    if types.is_string(kind) or types.is_large_string(kind):
        return in_words(name, [word or "" for word in array.to_pylist()])
    return None


def as_they_are(files: Sequence[Path]) -> dict[str, Any]:
    """The columns that all files have, one below the other, of the types that they have; none where these differ."""
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
    """The cells of a column whose type holds more than numbers do, as it writes them; None for all others."""
    if import_module("pyarrow").types.is_decimal(column.type):
        return ["" if value is None else str(value) for value in column.to_pylist()]
    return None


def write_parquet(
    path: Path,
    columns: Sequence[Column],
    more: Mapping[str, Sequence[Any]],
    given: Mapping[str, Any] | None = None,
) -> None:
    """Write columns by their kinds, and more of them behind, in which None is nothing.

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
    """The columns of several files below each other: of their kind, or of what their texts are."""
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
    return recognised(first.name, [text for column in columns for text in column.texts()])
