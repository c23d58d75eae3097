"""Files of bars: as tables, in which files that are one for each symbol have a column of symbols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hotlap.core.errors import DataError
from hotlap.recipes.bar_columns import Numbers, by_meaning, place_in, times_in
from hotlap.recipes.bars import Bars, bars_from
from hotlap.recipes.kinds import Column, in_words
from hotlap.recipes.tables import SUFFIXES, Table

SYMBOL = "symbol"
"""The column that is made of the names of files."""
MOST = 0.5
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
    except DataError:  # it is raised where the bars are read, behind all that was understood of the table
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
    return bool((shared > MOST * np.array([count for _, count in files])).any())


def _symbol(name: str) -> str:
    return next((name[: -len(suffix)] for suffix in SUFFIXES if name.lower().endswith(suffix)), name)


def _values_in(table: Table) -> dict[str, Any]:
    return {name: _values(column) for name, column in table.columns.items()}


def _values(column: Column) -> Any:
    return column.values if column.kind in ("number", "whole number", "date") else np.asarray(column.texts())
