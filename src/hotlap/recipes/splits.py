"""Which rows are trained on and which are held out, so that nothing of these is known from those."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hotlap.core.errors import DataError, shown
from hotlap.core.job_checks import is_whole

Rows = np.ndarray[Any, Any]


class Split(NamedTuple):
    """Rows by their numbers, as int64: those to train on, and those to judge by."""

    train: Rows
    valid: Rows


def by_time(times: Any, share: float, *, symbols: Any = None, gap: int = 0) -> Split:
    """The last `share` of the rows is held out, and `gap` rows before them are left out.

    With `symbols`, that of each symbol by itself. Rows of one time stay together, and are held out where the cut
    would part them. For rows that are in order already, give their numbers as times. A gap as long as a window
    keeps windows that end in validation rows from reaching into training rows.
    """
    _check_share(share)
    _check_whole("gap", gap, least=0)
    train, valid = [], []
    for rows, order in _courses(times, symbols):
        count = len(rows)
        cut = _cut(order, count - round(share * count))
        train.append(rows[: max(0, cut - gap)])
        valid.append(rows[cut:])
    return _filled(Split(np.concatenate(train), np.concatenate(valid)), f"share={share}, gap={gap}")


def walk_forward(times: Any, folds: int, gap: int = 0, *, symbols: Any = None) -> list[Split]:
    """So many splits in which more and more of the past is trained on and what comes next is held out.

    The rows are cut into `folds + 1` stretches of equal length; each but the first is held out once, after all
    before it, of which the last `gap` rows are left out. Symbols and rows of one time are treated as in `by_time`.
    """
    _check_whole("folds", folds, least=1)
    _check_whole("gap", gap, least=0)
    courses = list(_courses(times, symbols))
    found = []
    for fold in range(1, folds + 1):
        train, valid = [], []
        for rows, order in courses:
            start, end = (_cut(order, len(rows) * part // (folds + 1)) for part in (fold, fold + 1))
            train.append(rows[: max(0, start - gap)])
            valid.append(rows[start:end])
        split = Split(np.concatenate(train), np.concatenate(valid))
        found.append(_filled(split, f"fold {fold} of folds={folds}, gap={gap}"))
    return found


def by_group(groups: Any, share: float, seed: int = 0) -> Split:
    """About `share` of the rows is held out, by whole groups: no group is on both sides."""
    _check_share(share)
    codes, counts = _codes("groups", groups)
    if len(counts) < 2:
        raise DataError(f"there is {len(counts)} group in {len(codes)} rows; a split by group needs at least 2")
    wanted, held = share * len(codes), 0
    chosen: list[int] = []
    for group in np.random.default_rng(seed).permutation(len(counts)).tolist():
        # A group is taken where that comes nearer to the share; one of them in any case, and never all.
        nearer = abs(held + counts[group] - wanted) < abs(held - wanted)
        if nearer and len(chosen) < len(counts) - 1:
            chosen.append(group)
            held += int(counts[group])
    if not chosen:
        chosen = [int(counts.argmin())]
    is_valid = np.isin(codes, chosen)
    return Split(np.flatnonzero(~is_valid), np.flatnonzero(is_valid))


def stratified(target: Any, share: float, seed: int = 0) -> Split:
    """`share` of the rows of each class is held out, to within one row.

    A class of two or more rows is on both sides; a row that is alone in its class is trained on.
    """
    _check_share(share)
    codes, counts = _codes("the target", target)
    wanted = share * counts
    held = np.floor(wanted).astype(np.int64)
    # What rounding down left over goes to the classes that it took most from.
    left = round(share * len(codes)) - int(held.sum())
    held[np.argsort(held - wanted, kind="stable")[:left]] += 1
    held = np.clip(held, np.minimum(1, counts - 1), counts - 1)
    # Rows in a random order, class after class; of each class the first ones.
    mixed = np.random.default_rng(seed).permutation(len(codes))
    mixed = mixed[np.argsort(codes[mixed], kind="stable")]
    place = np.arange(len(codes)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_valid = np.zeros(len(codes), bool)
    is_valid[mixed[place < np.repeat(held, counts)]] = True
    return _filled(Split(np.flatnonzero(~is_valid), np.flatnonzero(is_valid)), f"share={share}")


def stratified_by_group(target: Any, groups: Any, share: float, seed: int = 0) -> Split:
    """About `share` of the rows of each class is held out, by whole groups: no group is on both sides.

    A group is of the class of its first row. A class of two or more groups is on both sides; a group that is alone in
    its class, or larger than the share where there are others, is trained on.
    """
    _check_share(share)
    labels, _ = _codes("the target", target)
    codes, sizes = _codes("groups", groups)
    classes = labels[np.unique(codes, return_index=True)[1]]
    draw, held = np.random.default_rng(seed), list[Rows]()
    for label in np.unique(classes):
        mine = draw.permutation(np.flatnonzero(classes == label))
        rows = int(sizes[mine].sum())
        room = min(max(1, round(share * rows)), rows - 1)
        small = mine[sizes[mine] <= room]
        fits = small[np.cumsum(sizes[small]) <= room]
        if not len(fits) and len(mine) > 1:
            fits = mine[[sizes[mine].argmin()]]
        held.append(fits)
    is_valid = np.isin(codes, np.concatenate(held))
    return _filled(Split(np.flatnonzero(~is_valid), np.flatnonzero(is_valid)), f"share={share}")


def _courses(times: Any, symbols: Any) -> list[tuple[Rows, Rows]]:
    """The rows of each symbol in order of time, and their times."""
    times = _column("times", times)
    wrong = times != times  # nan and NaT are not even equal to themselves
    if wrong.any():
        raise DataError(f"row {int(wrong.argmax()) + 1} has no time, the first of {int(wrong.sum()):,}; fill it in")
    if symbols is None:
        codes, counts = np.zeros(len(times), np.int64), np.array([len(times)])
    else:
        codes, counts = _codes("symbols", symbols)
        if len(codes) != len(times):
            raise DataError(f"there are {len(codes):,} symbols and {len(times):,} times; give one each for a row")
    rows = np.lexsort((times, codes))
    return [(part, times[part]) for part in np.split(rows, np.cumsum(counts)[:-1])]


def _cut(order: Rows, at: int) -> int:
    """The first row of the time that row `at` has."""
    return at if at >= len(order) else int(np.searchsorted(order, order[at], side="left"))


def _codes(name: str, values: Any) -> tuple[Rows, Rows]:
    """Values as numbers from 0 on, and how many there are of each."""
    _, codes, counts = np.unique(_column(name, values), return_inverse=True, return_counts=True)
    return codes, counts


def _column(name: str, values: Any) -> Rows:
    found = np.asarray(values)
    if found.ndim != 1 or not len(found):
        raise DataError(f"the shape of {name} is {found.shape}; give one value for each row")
    return found


def _check_share(share: float) -> None:
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise DataError(f"share={shown(share)} must be between 0 and 1: the part of the rows that is held out")


def _check_whole(name: str, value: int, *, least: int) -> None:
    if not is_whole(value) or value < least:
        raise DataError(f"{name}={shown(value)} must be a whole number of at least {least}")


def _filled(split: Split, asked: str) -> Split:
    if not len(split.train) or not len(split.valid):
        raise DataError(
            f"with {asked}, {len(split.train):,} rows are left to train on and {len(split.valid):,} to judge by; "
            "give more rows, or change it"
        )
    return split
