"""Parquet files, by pyarrow: read into columns by their types, and written with answers."""

from __future__ import annotations

import io
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.core.errors import DataError, first_line, install
from hotlap.core.units import show_bytes
from hotlap.machine.limits import read_memory
from hotlap.recipes.kinds import Column, to_seconds, word_column
from hotlap.store.files import write_bytes

SUFFIXES = (".parquet", ".pq")
BYTES_PER_VALUE = 16
"""Bytes that reading a value takes at least: once as Arrow has it, once as numpy has it."""


def pyarrow_for(file: Path) -> tuple[Any, Any]:
    """pyarrow and pyarrow.parquet, to read or write this file; DataError where they are missing."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(f"{file} needs pyarrow: {install('[recipes]')}") from None


def _read(file: Path) -> Any:
    """The Arrow table in a file, texts dictionary-encoded; DataError where it is broken or does not fit in memory.

    A file of some kilobytes can hold a value a billion times. So its metadata are checked before it is read, and
    repeated texts are kept once.
    """
    arrow, parquet = pyarrow_for(file)
    most = read_memory().free_bytes // 2
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise DataError(f"cannot read {file}: it is not a regular file")
        schema = parquet.read_schema(file)
        texts = [one.name for one in schema if _is_text(arrow.types, one.type)]
        opened = parquet.ParquetFile(file, read_dictionary=texts)
        metadata = opened.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        values = sum(group.column(place).num_values for group in groups for place in range(group.num_columns))
        needed = max(values, metadata.num_rows * metadata.num_columns) * BYTES_PER_VALUE
        if needed > most:
            raise DataError(
                f"{file} has {metadata.num_rows:,} rows and {values:,} values, which need {show_bytes(needed)} of "
                f"memory; at most {show_bytes(most)} are used; split it"
            )
        table = opened.read()
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {first_line(error)}") from None
    size = sum(_text_bytes(table.column(place)) for place in range(table.num_columns))
    if size > most:
        raise DataError(
            f"{file} holds texts of {show_bytes(size)} in all; at most {show_bytes(most)} are read; split it"
        )
    return table


def _is_text(types: Any, arrow_type: Any) -> bool:
    return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type))


def _text_bytes(column: Any) -> int:
    """The total length of the texts of a dictionary-encoded column, repeats included."""
    arrow, total = import_module("pyarrow"), 0
    if not arrow.types.is_dictionary(column.type) or not _is_text(arrow.types, column.type.value_type):
        return 0
    for chunk in column.chunks:
        lengths = np.array([len(word or "") for word in chunk.dictionary.to_pylist()], np.int64)
        used = np.asarray(chunk.indices.drop_null())
        total += int(lengths[used].sum()) if len(lengths) else 0
    return total


class ParquetFile:
    """The columns of a Parquet file; DataError in one line where it cannot be read, or where pyarrow is missing."""

    def __init__(self, file: Path) -> None:
        self.file = file
        table = _read(file)
        twice = sorted(name for name, count in Counter(table.column_names).items() if count > 1)
        if twice:
            count = table.column_names.count(twice[0])
            raise DataError(f"{file} has the column {twice[0]!r} {count} times; give each a name of its own")
        self._columns: dict[str, Column] = {}
        self._count: int = table.num_rows
        notes = []
        for name in table.column_names:
            column = _from_arrow(name, table.column(name).combine_chunks())
            if column is None:
                notes.append(f"column {name!r} of {file.name} holds {table.field(name).type}, which is not read")
            else:
                self._columns[name] = column
        self.names = tuple(self._columns)
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return self._count

    def column(self, name: str) -> Column:
        """A column, with the kind of its type in the file."""
        return self._columns[name]


def _from_arrow(name: str, array: Any) -> Column | None:
    """A column of the kind that its Arrow type implies; None where its values are lists, structs or the like."""
    types = import_module("pyarrow").types
    arrow_type, absent = array.type, np.asarray(array.is_null())
    missing = absent if absent.any() else None
    if types.is_dictionary(arrow_type) and _is_text(types, arrow_type.value_type) and not absent.all():
        words = [word or "" for word in array.dictionary.to_pylist()]
        return word_column(name, ["" if at is None else words[at] for at in array.indices.to_pylist()])
    if types.is_dictionary(arrow_type):
        return _from_arrow(name, array.dictionary_decode())
    if missing is not None and absent.all():
        return Column(name=name, kind="empty", values=np.full(len(array), np.nan), missing=missing)
    if types.is_boolean(arrow_type):
        values = np.asarray(array.fill_null(False))
        return Column(name=name, kind="flag", values=values, categories=("false", "true"), missing=missing)
    if arrow_type == "uint64" and int(np.asarray(array.fill_null(0)).max(initial=0)) >= 2**63:
        # As in a CSV file, numbers that int64 does not hold are identifiers.
        return word_column(name, ["" if value is None else str(value) for value in array.to_pylist()])
    if types.is_integer(arrow_type):
        values = np.asarray(array.fill_null(0)).astype(np.int64)
        return Column(name=name, kind="whole number", values=values, missing=missing)
    if types.is_floating(arrow_type) or types.is_decimal(arrow_type):
        values = np.asarray(array.cast("float64").fill_null(float("nan")))
        absent = np.isnan(values)
        return Column(name=name, kind="number", values=values, missing=absent if absent.any() else None)
    if types.is_date(arrow_type) or types.is_timestamp(arrow_type):
        return Column(name=name, kind="date", values=to_seconds(np.asarray(array)), missing=missing)
    if _is_text(types, arrow_type):
        return word_column(name, [word or "" for word in array.to_pylist()])
    return None


def arrow_columns_of(files: Sequence[Path]) -> dict[str, Any]:
    """The Arrow columns that all files share, concatenated; empty where their types differ."""
    arrow, parquet = pyarrow_for(files[0])
    tables = [_read(file) for file in files]
    known = [set(table.column_names) for table in tables]
    names = [name for name in tables[0].column_names if all(name in others for others in known)]
    try:
        tables = [table.cast(parquet.read_schema(file)) for table, file in zip(tables, files, strict=True)]
        whole = arrow.concat_tables([table.select(names) for table in tables])
    except arrow.ArrowException:
        return {}
    return {name: whole.column(name) for name in whole.column_names}


def decimal_texts(column: Any) -> list[str] | None:
    """The exact texts of an Arrow column of decimals, which floats would round; None for other types."""
    if import_module("pyarrow").types.is_decimal(column.type):
        return ["" if value is None else str(value) for value in column.to_pylist()]
    return None


def write_parquet(
    path: Path,
    columns: Sequence[Column],
    answers: Mapping[str, Sequence[Any]],
    arrow_columns: Mapping[str, Any],
) -> None:
    """Write a table's columns, then other Arrow columns, then the answers, in which None is a missing value.

    A column that is among the `arrow_columns` too is written with its Arrow type.
    """
    arrow, parquet = pyarrow_for(path)
    written = {column.name: arrow_columns.get(column.name, _to_arrow(arrow, column)) for column in columns}
    others = {name: column for name, column in arrow_columns.items() if name not in written and name not in answers}
    written |= others | {name: arrow.array(values) for name, values in answers.items()}
    content = io.BytesIO()
    parquet.write_table(arrow.table(written), content)
    write_bytes(path, content.getvalue())


def _to_arrow(arrow: Any, column: Column) -> Any:
    if column.kind in ("category", "text"):
        return arrow.array([text or None for text in column.texts()], arrow.string())
    return arrow.array(column.values, mask=~column.present)
