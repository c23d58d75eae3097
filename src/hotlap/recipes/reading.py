"""Reading a recipe's data: shown before anything is trained, and refused with all that is wrong."""

from __future__ import annotations

from pathlib import Path

from hotlap.core.errors import DataError, listed
from hotlap.recipes.recipe import Say
from hotlap.recipes.tables import Table, columns_told, read_table


def shown_table(path: str, say: Say, *, header: bool | None = None) -> Table:
    """The table in a file or folder, with what was understood of its columns shown."""
    table = read_table(Path(path), header=header)
    say(f"data      {path}: {len(table):,} rows")
    for line in columns_told(table):
        say(f"          {line}")
    return table


def refuse(wrong: list[str]) -> None:
    """Raise DataError with these mistakes, if there are any."""
    if wrong:
        raise DataError(listed("the data have", "mistake", wrong))
