"""Reading a recipe's data: shown before anything is trained, and refused with all that is wrong."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from hotlap.core.errors import DataError, listed
from hotlap.recipes.recipe import Say
from hotlap.recipes.tables import Table, columns_told, read_table

HEADERS = {"auto": None, "yes": True, "no": False}
"""Whether the first row holds names, as an option says it."""
TOLD_S = 5.0
"""How often it is said that something goes on."""


def shown_table(path: str, say: Say, *, header: bool | None = None, needs_names: bool = False) -> Table:
    """The table in a file or folder, with what was understood of its columns shown.

    Where it has no header, `--header` is named, unless that is no option, as where columns are known by their names.
    """
    table = read_table(Path(path), header=header)
    say(f"data      {path}: {len(table):,} rows")
    for line in columns_told(table):
        say(f"          {line}")
    if not table.has_header and header is None and not needs_names:
        say("          note: say --header yes if its first row holds names")
    return table


def refuse_pictures(table: Table) -> None:
    """Raise DataError for a folder of pictures, of which only the recipe `image` makes anything."""
    if table.path.is_dir() and not table.files:
        command = shlex.join(["hotlap", "train", "image", "--data", str(table.path)])
        raise DataError(f"{table.path} is a folder of pictures; train on it with: {command}")


def refuse(wrong: list[str]) -> None:
    """Raise DataError with these mistakes, if there are any."""
    if wrong:
        raise DataError(listed("the data have", "mistake", wrong))


def now_and_then(say: Say, words: str) -> Callable[[int, int], None]:
    """Told how much of something is done, says so in these words every few seconds until all of it is."""
    began = last = time.perf_counter()

    def told(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= TOLD_S and done < total:
            last = now
            say(f"{words.format(done=done, total=total)}, {done / (now - began):,.0f} a second")

    return told
