"""Which columns of a table a recipe of texts reads, and what is odd about those that it does not."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hotlap.core.errors import DataError, shown
from hotlap.recipes import checks
from hotlap.recipes.kinds import Column
from hotlap.recipes.recipe import Say
from hotlap.recipes.tables import Table, named_columns

TARGETS = ("label", "target", "class", "category", "sentiment", "y")
"""Names of a column to predict, as people have them."""
NEARLY = 0.95
"""Of the values of a column of ids at least this share are single words, and as many different ones."""
_SPACE = re.compile(r"\s")


def target_of(table: Table, named: str) -> str:
    """The column to predict: the one named, or the only one that is called as such columns are."""
    if named:
        return table[named].name
    found = [name for name in table.columns if name.lower() in TARGETS]
    if len(found) != 1:
        raise DataError(
            f"which column of {table.path} is to be predicted? Say --target; there are {named_columns(table)}"
        )
    return found[0]


def columns_of(table: Table, named: Sequence[str], used: Sequence[str], say: Say) -> list[str]:
    """The columns of text: those named, or all that are not used otherwise; ids beside them are left out, and said."""
    if named:
        return [table[name].name for name in named]
    found = [name for name, column in table.columns.items() if column.kind == "text" and name not in used]
    ids = [name for name in found if _holds_ids(table[name])]
    read = [name for name in found if name not in ids] or found
    for name in ids if read != found else ():
        say(
            f"note      {name} is not read: its values, as {_first(table[name])}, are nearly all different and single "
            "words, as ids are; name it with --text if it is text"
        )
    if not 1 <= len(read) <= 2:
        raise DataError(f"which column of {table.path} holds the text? Say --text; there are {named_columns(table)}")
    others = [name for name, column in table.columns.items() if column.kind == "category" and name not in used]
    if read == ids and others:
        say(
            f"warning   the values of {' and '.join(read)}, as {_first(table[read[0]])}, look like ids; "
            f"if the text is in {' or '.join(others)}, name that with --text"
        )
    return read


def target_problems(table: Table, target: str) -> list[str]:
    """Why a column cannot be learned as classes, one line each."""
    column = table[target]
    found = checks.target_problems(column)
    different = len(set(column.texts()))
    if not found and 2 * different > len(table):
        found.append(
            f"the target {target!r} has {different:,} different values in {len(table):,} rows, "
            f"as {shown(column.texts()[0])}; name a column of classes, each with several rows"
        )
    return found


def _holds_ids(column: Column) -> bool:
    """Whether nearly all values are single words, and different: hashes, addresses, names of files, numbers.

    Of plain letters: whole sentences of Chinese or Thai have no spaces either.
    """
    texts = [text for text in column.texts() if text]
    if len(set(texts)) < NEARLY * len(texts):
        return False
    return sum(text.isascii() and not _SPACE.search(text) for text in texts) >= NEARLY * len(texts)


def _first(column: Column) -> str:
    return shown(next(text for text in column.texts() if text))
