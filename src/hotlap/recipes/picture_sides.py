"""Which pictures are trained on and which are held out, and what simple rules make of them: for the recipe `image`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hotlap.core.errors import DataError, shown
from hotlap.data.pictures import Pictures
from hotlap.recipes import checks, splits
from hotlap.recipes.options import Options
from hotlap.recipes.picture_reader import PictureReader
from hotlap.recipes.reading import refuse, shown_table
from hotlap.recipes.recipe import Numbers, Say
from hotlap.recipes.tables import Table

SOME = 16
"""Pictures that something is tried on."""
THUMBNAIL = 8
"""Pixels along a side, for the rule that looks at little."""
LOOKED_AT = 512
"""Pictures at a time, for that rule."""
STRATA = 10
"""Parts of equal number, by their target, of which each gives its share of what is held out."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """What is trained on, or held out."""

    pictures: Pictures
    rows: Numbers
    """Which of the pictures."""
    target: Numbers
    """The class, or the number, of each of these."""
    names: Sequence[str]
    """The path of each of these."""

    def some(self, count: int = SOME) -> Tensor:
        """A few of the pictures."""
        return self.pictures.pixels[torch.from_numpy(self.rows[:count])]

    def data(self, reader: PictureReader) -> Subset[tuple[Tensor, ...]]:
        """Pictures with what a network is to answer."""
        if reader.classes:
            whole = np.full(len(self.pictures), -1, np.int64)
            whole[self.rows] = self.target
        else:
            whole = np.zeros((len(self.pictures), 1), np.float32)
            whole[self.rows, 0] = (self.target - reader.mean) / reader.spread
        return Subset(TensorDataset(self.pictures.pixels, torch.from_numpy(whole)), self.rows.tolist())


def sides(options: Options, reader: PictureReader, table: Table, target: str, say: Say) -> tuple[Side, Side]:
    """What is trained on and what is held out: a file or folder of its own, whole groups, a share of each class."""
    # What is wrong with either is said before minutes are spent on pictures.
    other = _judged_by(options, reader, target, say) if options.valid else None
    groups = _groups(table, options.group) if options.group else None
    pictures = reader.pictures(table, say)
    whole = pictures.whole
    kept = table.rows(whole)
    refuse(_few_left(kept, target, reader.classes))
    answers, names = _answers(kept, target, reader.classes), kept[reader.path].texts()

    def side(rows: Numbers) -> Side:
        return Side(pictures=pictures, rows=whole[rows], target=answers[rows], names=[names[at] for at in rows])

    if other is not None:
        found = reader.pictures(other, say)
        judged = other.rows(found.whole)
        held = Side(
            pictures=found,
            rows=found.whole,
            target=_answers(judged, target, reader.classes),
            names=judged[reader.path_in(judged)].texts(),
        )
        return side(np.arange(len(whole))), held
    digests = [pictures.digests[row] for row in whole]
    split = _split(options, None if groups is None else groups[whole], answers, reader.classes, digests, say)
    say(f"split     {len(split.train):,} pictures to train on, {len(split.valid):,} held out")
    return side(split.train), side(split.valid)


def _judged_by(options: Options, reader: PictureReader, target: str, say: Say) -> Table:
    """The file or folder to judge by; refused where it has no paths, or targets unlike those trained on."""
    table = shown_table(options.valid, say, header=reader.header)
    if reader.classes:
        theirs = set(checks.classes_of(table[target])[0]) - set(reader.classes)
        refuse(
            [
                f"{options.valid} has the class {shown(name)}, which {options.data} has not; leave its rows out"
                for name in sorted(theirs)
            ]
        )
    refuse(checks.target_problems(table[target]))
    if not reader.classes and table[target].kind not in checks.NUMBERS:
        raise DataError(f"the target {target!r} is {table[target].kind} in {options.valid}; give numbers there too")
    reader.path_in(table)
    return table


def _groups(table: Table, name: str) -> Numbers:
    group = table[name]
    if group.missing is not None:
        raise DataError(f"group={group.name} is missing in {int(group.missing.sum()):,} rows; fill it in")
    return np.asarray(group.texts())


def _split(
    options: Options,
    groups: Numbers | None,
    answers: Numbers,
    classes: Sequence[str],
    digests: Sequence[str],
    say: Say,
) -> splits.Split:
    # Numbers by strata, so that large and small ones are on both sides.
    strata = answers if classes else np.argsort(np.argsort(answers)) * STRATA // len(answers)
    copies = len(digests) - len(set(digests))
    if groups is not None:
        split = splits.by_group(groups, options.valid_share, options.seed)
    elif copies:
        are = "pictures are copies" if copies > 1 else "picture is a copy"
        say(f"copies    {copies:,} {are} of one before, byte for byte: all copies of a picture are on one side")
        split = splits.stratified_by_group(strata, np.asarray(digests), options.valid_share, options.seed)
    else:
        split = splits.stratified(strata, options.valid_share, options.seed)
    for number in np.setdiff1d(answers[split.valid], answers[split.train]) if classes else ():
        say(f"warning   all rows of {shown(classes[number])} are held out by their groups: it is never trained on")
    return split


def _few_left(table: Table, target: str, classes: Sequence[str]) -> list[str]:
    left = set(table[target].texts())
    lost = [name for name in classes if name not in left]
    if lost and len(left) < 2:
        return [f"but for broken files there is only the class {shown(next(iter(left)))}; mend the files of the others"]
    return [f"no file of the class {shown(name)} is a picture; mend them, or leave the class out" for name in lost]


def _answers(table: Table, target: str, classes: Sequence[str]) -> Numbers:
    if not classes:
        numbers: Numbers = table[target].values.astype(np.float64)
        return numbers
    places = {name: number for number, name in enumerate(classes)}
    return np.asarray([places[text] for text in table[target].texts()], dtype=np.int64)


def warn_of_copies(train: Side, held: Side, say: Say) -> None:
    """Pictures that are on both sides, byte for byte, make a score too good."""
    seen = {train.pictures.digests[row] for row in train.rows}
    copies = [at for at, row in enumerate(held.rows) if held.pictures.digests[row] in seen]
    if copies:
        which = f"as {held.names[copies[0]]}"
        say(
            f"warning   {len(copies):,} of {len(held.rows):,} pictures held out are trained on too, {which}; "
            "leave copies out, or keep them on one side with --group"
        )


def rules(train: Side, held: Side, classes: int) -> dict[str, Numbers]:
    """What the most frequent class, or the mean, would score; and thumbnails compared with the mean of each class."""
    if not classes:
        return {"the mean": np.full(len(held.target), train.target.mean())}
    mine, theirs = (_thumbnails(side) for side in (train, held))
    sums = np.zeros((classes, mine.shape[1]))
    np.add.at(sums, train.target, mine)
    counts = np.bincount(train.target, minlength=classes)[:, None]
    means = sums / np.maximum(counts, 1)
    far = (means**2).sum(1) - 2 * theirs @ means.T
    far[:, counts[:, 0] == 0] = np.inf
    return {
        "most frequent class": np.full(len(held.target), counts.argmax()),
        "nearest mean thumbnail": far.argmin(1),
    }


def _thumbnails(side: Side) -> Numbers:
    # Of large pictures some lines are looked at, which are enough for so little.
    step = max(1, side.pictures.pixels.shape[-1] // (4 * THUMBNAIL))
    pixels = side.pictures.pixels[:, :, ::step, ::step]
    parts = [
        F.adaptive_avg_pool2d(pixels[torch.from_numpy(side.rows[at : at + LOOKED_AT])].float(), THUMBNAIL).flatten(1)
        for at in range(0, len(side.rows), LOOKED_AT)
    ]
    return torch.cat(parts).double().numpy()
