"""Reading a recipe's table, splitting its rows, and what else recipes on tables share."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hotlap.core.errors import DataError, StoreError, listed, shown
from hotlap.core.units import show_bytes
from hotlap.machine.cuda import free_for_torch
from hotlap.machine.device import choose_device
from hotlap.machine.limits import read_memory
from hotlap.recipes.recipe import Say
from hotlap.recipes.tables import Table, columns_told, read_table
from hotlap.store.weights import bytes_of

TRAINED = 4
"""Times the weights that a training holds at least: weights, gradients, and the two moments of AdamW."""
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


def refuse_too_large(make: Callable[[], nn.Module], source: str, device: str, cure: str) -> None:
    """Refuse a model whose training cannot fit beside the free memory, before its tensors are made.

    Activations are not counted. Raises DataError.
    """
    try:
        weights = bytes_of(make)
    except StoreError:  # some models of libraries cannot be sized without their tensors: making one decides
        return
    where = choose_device(device)
    rooms = [(TRAINED * weights, read_memory().free_bytes, "memory")]
    if where.type == "cuda":  # the model is made on the host, then moved
        rooms = [(weights, rooms[0][1], "memory"), (TRAINED * weights, free_for_torch(where), "GPU memory")]
    for needed, free, kind in rooms:
        if needed > free:
            raise DataError(
                f"{source} has {show_bytes(weights)} of weights, so its training takes at least {show_bytes(needed)} "
                f"of {kind}, and {show_bytes(free)} is free; {cure}"
            )


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


Rows = np.ndarray[Any, Any]


class Split(NamedTuple):
    """Rows by their numbers, as int64: those to train on, and those to judge by."""

    train: Rows
    valid: Rows


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


def _filled(split: Split, asked: str) -> Split:
    if not len(split.train) or not len(split.valid):
        raise DataError(
            f"with {asked}, {len(split.train):,} rows are left to train on and {len(split.valid):,} to judge by; "
            "give more rows, or change it"
        )
    return split


def warm_up_and_cosine(share: float) -> Callable[[Optimizer, int], LambdaLR]:
    """For `Job(schedule=…)`: up in this share of the updates, then down along a cosine."""

    def made(optimizer: Optimizer, updates: int) -> LambdaLR:
        up = max(1, round(share * updates))

        def at(update: int) -> float:
            if update < up:
                return (update + 1) / up
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - up) / max(1, updates - up))))

        return LambdaLR(optimizer, at)

    return made
