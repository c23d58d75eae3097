"""Checks of a table before the training: targets that cannot be learned, columns that give them away.

What ends in `problems`, and `leaks`, makes a training senseless; what ends in `warnings`, and `suspects`, may be right
and should be looked at. Each line says what was seen and what to do. Rows are counted from 1, below the header.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

import numpy as np

from hotlap.core.errors import first_few, shown
from hotlap.recipes.kinds import Column, Values, sorted_words
from hotlap.recipes.tables import Table

NOTHING = "NA, none, null or -"
"""Some of the words that mean a missing value."""

LEAST = 2
"""Rows of a class: one to train on, and one to judge by."""
MOST_CLASSES = 20
"""Most different whole numbers that count as classes; more are amounts."""
LISTED = 5
"""Rows or names that a line shows before it counts the rest."""
CHANCE = 1e-6
"""A pattern that chance brings about more often than this, over all columns, is no sign of a leak."""
ALIKE = ({"number", "whole number"}, {"flag", "category", "text"}, {"date"})
"""Kinds that one column may have in two files: a small file shows fewer of its values."""
NUMBERS = ("number", "whole number", "date")
"""Kinds that have an order."""


def classes_of(column: Column) -> tuple[tuple[str, ...], Values]:
    """The classes of a column in order, and the number of each row's class as int64; -1 where nothing is."""
    if column.kind in ("category", "flag"):
        labels = column.values.astype(np.int64)
        labels[~column.present] = -1
        return column.categories, labels
    texts = column.texts()
    classes = sorted_words(set(texts).difference([""]))
    numbers = {"": -1, **{name: number for number, name in enumerate(classes)}}
    return classes, np.fromiter(map(numbers.__getitem__, texts), np.int64, len(texts))


def target_problems(column: Column, *, to_learn: bool = True) -> list[str]:
    """Why a column cannot be learned, or only judged by, one line each."""
    what, rows = f"the target {column.name!r}", len(column)
    if column.kind == "empty":
        return [f"{what} has no values but such as {NOTHING}; name another column, or its classes otherwise"]
    if column.kind == "date":
        return [f"{what} holds dates, as {_example(column)}; name a column of classes or of numbers"]
    found = []
    if column.missing is not None:
        where = _rows(np.flatnonzero(column.missing))
        count = int(column.missing.sum())
        found.append(
            f"{what} is missing in {count:,} of {rows:,} rows ({where}), empty or a word such as {NOTHING}; fill it "
            "in, take these rows out, or give a class that is called so another name"
        )
    infinite = np.flatnonzero(np.isinf(column.values)) if column.kind == "number" else np.zeros(0, np.int64)
    if len(infinite):
        found.append(f"{what} is infinite in {len(infinite):,} of {rows:,} rows ({_rows(infinite)}); correct them")
    seen = column.rows(column.present)
    different = len(set(seen.texts()))
    if column.kind == "text" and 2 * different > len(seen) > LEAST:
        found.append(
            f"{what} has {different:,} different texts in {len(seen):,} rows, as {_example(column)}; "
            "name a column of classes or of numbers"
        )
    if different == 1 and to_learn:
        found.append(f"{what} is {_example(column)} in all rows; there is nothing to learn")
    return found


def target_warnings(column: Column) -> list[str]:
    """Classes with too few rows to split, and pairs that may be one class in two spellings: a line each."""
    return [*_single_rows(column), *_spellings(column)]


def _single_rows(column: Column) -> list[str]:
    if not _holds_classes(column):
        return []
    classes, labels = classes_of(column)
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    few = [repr(name) for name, count in zip(classes, counts, strict=True) if 0 < count < LEAST]
    if not few:
        return []
    which = (
        f"class {few[0]} of {column.name!r} has" if len(few) == 1 else f"{len(few):,} classes of {column.name!r} have"
    )
    names = "" if len(few) == 1 else f" ({first_few(few, LISTED)})"
    return [f"{which} a single row{names}, which is trained on and never judged; add rows or join classes"]


def _spellings(column: Column) -> list[str]:
    if column.kind not in ("category", "text"):
        return []
    seen: dict[str, str] = {}
    pairs = []
    for name in classes_of(column)[0]:
        first = seen.setdefault(" ".join(name.casefold().split()), name)
        if first != name:
            pairs.append(f"{first!r} and {name!r}")  # with all their spaces
    if not pairs:
        return []
    more = f", and so in {len(pairs) - 1:,} other pair{'s'[: len(pairs) > 2]}" if len(pairs) > 1 else ""
    which = f"classes {pairs[0]} of {column.name!r} differ in capitals or spaces only{more}"
    return [f"{which}; write them alike if they are one class"]


def leaks(table: Table, target: str, *, but: Collection[str] = ()) -> list[str]:
    """Columns that repeat the target: equal to it, or its classes under other names."""
    return [f"{line}; leave it out" for line, is_sure in _telltales(table, target, but) if is_sure]


def unread_leaks(table: Table, target: str, *, but: Collection[str] = ()) -> list[str]:
    """The same for columns that the recipe does not read."""
    return [f"{line}; it is not read" for line, is_sure in _telltales(table, target, but) if is_sure]


def suspects(table: Table, target: str, *, but: Collection[str] = ()) -> list[str]:
    """Columns that determine the target in every row, more often than chance allows."""
    cure = "leave it out if it is not known before the target is"
    return [f"{line}; {cure}" for line, is_sure in _telltales(table, target, but) if not is_sure]


def mismatch_problems(train: Table, test: Table, target: str) -> list[str]:
    """Why a model of one table cannot answer for another: columns it lacks, or that are of another kind."""
    lacks = first_few([repr(name) for name in train.columns if name != target and name not in test], LISTED)
    found = [f"{test.path} lacks {lacks}, which {train.path} has; add what is missing"] if lacks else []
    for name, column in train.columns.items():
        if name == target or name not in test:
            continue
        kind, other = column.kind, test[name].kind
        if "empty" not in (kind, other) and not any({kind, other} <= group for group in ALIKE):
            found.append(
                f"column {name!r} is {kind} in {train.path} (as {_example(column)}) and {other} in {test.path} "
                f"(as {_example(test[name])}); make them the same"
            )
    return found


# --- leaks ---------------------------------------------------------------------------------------------


def _telltales(table: Table, target: str, but: Collection[str]) -> Iterator[tuple[str, bool]]:
    """A line for each column that gives the target away, and whether that is sure."""
    goal = table[target]
    others = [column for name, column in table.columns.items() if name != target and name not in but]
    # A logarithm: a pattern must be this much rarer than chance.
    least = math.log(max(1, len(others)) / CHANCE)
    for column in others:
        both = goal.present & column.present
        if "empty" not in (goal.kind, column.kind) and both.any():
            found = _telltale(column.rows(both), goal.rows(both), least)
            if found:
                why, is_sure = found
                yield f"column {column.name!r} {why}", is_sure


def _telltale(column: Column, goal: Column, least: float) -> tuple[str, bool] | None:
    """How a column gives the target away, where chance would not have it so; both have values in all rows."""
    given, wanted = _codes(column), _codes(goal)
    values, classes = int(given.max()) + 1, int(wanted.max()) + 1
    if classes == 1:
        return None
    orders = _log_orders(np.bincount(wanted))
    pairs = len(np.unique(given * classes + wanted))
    if orders > least and _are_equal(column, goal):
        return f"is equal to the target {goal.name!r}", True
    if pairs == values == classes and orders - math.lgamma(classes + 1) > least:
        return f"is the target {goal.name!r} under other names ({_renamed(column, goal)})", True
    if pairs == values and orders - values * math.log(classes) > least:
        return f"alone tells the target {goal.name!r} in every row: each of its {values:,} values has one answer", False
    if column.kind not in NUMBERS:
        return None
    if goal.kind in NUMBERS and not _holds_classes(goal):
        if orders - math.log(2) > least and _moves_with(column, goal, given, wanted):
            return f"has a correlation of one with the target {goal.name!r}", False
        return None
    for label in range(classes):
        inside = wanted == label
        if _log_orders(np.array([inside.sum(), (~inside).sum()])) - math.log(2) > least and _are_parted(given, inside):
            name = shown(goal.rows(np.flatnonzero(inside)[:1]).texts()[0])
            return f"alone parts class {name} of the target {goal.name!r} from all others (AUC of one)", False
    return None


def _log_orders(counts: Values) -> float:
    """The logarithm of how many orders rows of which so many are alike can have."""
    return math.lgamma(int(counts.sum()) + 1) - sum(math.lgamma(int(count) + 1) for count in counts)


def _are_equal(column: Column, goal: Column) -> bool:
    if {column.kind, goal.kind} == {"number", "whole number"}:
        return bool(np.array_equal(column.values.astype(np.float64), goal.values.astype(np.float64)))
    return column.texts() == goal.texts()


def _moves_with(column: Column, goal: Column, given: Values, wanted: Values) -> bool:
    """Whether one rises, or falls, wherever the other does: in a straight line, or in any other."""
    if np.array_equal(given, wanted) or np.array_equal(given.max() - given, wanted):
        return True
    x, y = (_centred(one.values.astype(np.float64)) for one in (column, goal))
    if not np.isfinite(x).all() or not np.isfinite(y).all():
        return False
    size = math.sqrt(float(x @ x) * float(y @ y))
    return size > 0 and abs(float(x @ y)) / size > 1 - 1e-9


def _centred(values: Values) -> Values:
    """Around zero, and small enough that no product of them overflows; nan where one is infinite."""
    most = float(np.abs(values).max())
    if not 0 < most < math.inf:
        return np.full(len(values), 0.0 if most == 0 else math.nan)
    centred: Values = values / most - (values / most).mean()
    return centred


def _are_parted(given: Values, inside: Values) -> bool:
    ours, theirs = given[inside], given[~inside]
    return bool(ours.min() > theirs.max() or ours.max() < theirs.min())


def _codes(column: Column) -> Values:
    """Each value as a number from 0 on; of numbers, in their order."""
    values = column.values
    if column.kind == "text":
        numbers = {word: number for number, word in enumerate(dict.fromkeys(values.tolist()))}
        return np.fromiter(map(numbers.__getitem__, values.tolist()), np.int64, len(values))
    codes: Values = np.unique(values, return_inverse=True)[1]
    return codes


def _renamed(column: Column, goal: Column) -> str:
    pairs = list(dict.fromkeys(zip(column.texts(), goal.texts(), strict=True)))
    return first_few([f"{shown(name, 20)} is {shown(other, 20)}" for name, other in pairs[: LISTED + 1]], 2)


# --- words ---------------------------------------------------------------------------------------------


def _holds_classes(column: Column) -> bool:
    if column.kind == "whole number":
        return len(np.unique(column.values[column.present])) <= MOST_CLASSES
    return column.kind in ("flag", "category")


def _example(column: Column) -> str:
    found = np.flatnonzero(column.present)[:1]
    return shown(column.rows(found).texts()[0]) if len(found) else "nothing"


def _rows(rows: Values) -> str:
    return ("row " if len(rows) == 1 else "rows ") + first_few([f"{row + 1:,}" for row in rows.tolist()], LISTED)
