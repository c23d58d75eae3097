"""What all recipes on tables share: `TabularRecipe`, reading, and splits into training and held-out rows."""

from __future__ import annotations

import dataclasses
import math
import shlex
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hotlap.core.errors import DataError, StoreError, listed, shown
from hotlap.core.job import Job
from hotlap.core.units import show_bytes
from hotlap.machine.cuda import free_for_torch
from hotlap.machine.device import choose_device
from hotlap.machine.limits import read_memory
from hotlap.recipes import checks
from hotlap.recipes.onnx_files import NAME, OnnxExport, write_onnx
from hotlap.recipes.options import Options
from hotlap.recipes.recipe import Candidate, Fold, Numbers, Prepared, Reader, Say
from hotlap.recipes.scores import class_weights
from hotlap.recipes.tables import Table, column_lines, named_columns, read_table
from hotlap.store.weights import bytes_of

TRAINED = 4
"""Times the weights that a training holds at least: weights, gradients, and the two moments of AdamW."""
STRATA = 10
"""Parts of equal number, by their target, of which each gives its share of the rows to hold out."""
HEADERS = {"auto": None, "yes": True, "no": False}
"""Whether the first row holds names, as an option says it."""
PROGRESS_S = 5.0
"""Seconds between two lines of progress."""


def shown_table(path: str, say: Say, *, header: bool | None = None, needs_names: bool = False) -> Table:
    """The table in a file or folder; its columns are shown as hotlap understands them.

    Where it has no header, `--header` is named, unless that is no option, as where columns are known by their names.
    """
    table = read_table(Path(path), header=header)
    say(f"data      {path}: {len(table):,} rows")
    for line in column_lines(table):
        say(f"          {line}")
    if not table.has_header and header is None and not needs_names:
        say("          note: say --header yes if its first row holds names")
    return table


def refuse_pictures(table: Table) -> None:
    """Raise DataError for a folder of pictures, which only the recipe `image` reads."""
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
    """A callback for progress, which shows these words every few seconds until the end."""
    began = last = time.perf_counter()

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.perf_counter()
        if now - last >= PROGRESS_S and done < total:
            last = now
            say(f"{words.format(done=done, total=total)}, {done / (now - began):,.0f} a second")

    return progress


# --- the recipe ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Side:
    """The rows that hotlap trains on, or those that it holds out."""

    whole: Table
    """The table of their file."""
    rows: Numbers
    """Which of its rows these are, from 0."""
    target: Numbers
    """The number of the class, or the number, of each row."""

    @cached_property
    def table(self) -> Table:
        """These rows alone."""
        return self.whole if len(self.rows) == len(self.whole) else self.whole.rows(self.rows)


class TabularRecipe:
    """A recipe on a table with a column to predict: a subclass overrides what differs, every other hook works as it is.

    hotlap makes one for each training and calls the hooks in this order: `read`, `target_of`, `columns_of`, `problems`,
    `warnings`, `usable`, `keys`, `reader_of`, `data_of`, `models`, and after these `job` for each model. A subclass
    needs `reader_of`, `data_of` and `job`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    expects: ClassVar[str]
    """Which columns it needs, in a line."""
    options_type: ClassVar[type[Options]]
    targets: ClassVar[tuple[str, ...]] = ("label", "target", "class", "category", "y")
    """Usual names of a column to predict."""
    unit: ClassVar[str] = "rows"
    """What messages call the samples."""
    cure: ClassVar[str] = "name a column of classes, each with several rows"
    """What to do where the target has too many different values."""
    holder: ClassVar[str] = ""
    """What the columns hold, for a message: the pictures of a column of paths."""
    source: ClassVar[str] = "columns"
    """The option that names the columns to predict from."""

    options: Any
    table: Table
    target: str
    columns: list[str]
    """The columns to predict from."""
    classes: tuple[str, ...]
    """The classes; empty where the target is a number."""
    train: Side
    held: Side
    reader: Any

    def __init__(self, options: Options, say: Say) -> None:
        self.options, self.say = options, say

    @classmethod
    def prepare(cls, options: Options, say: Say) -> Prepared:
        """Read the data, split it and give the models to train."""
        recipe = cls(options, say)
        recipe.look()
        recipe.split()
        return recipe.prepared()

    @classmethod
    def to_dict(cls) -> dict[str, str]:
        """What the recipe is, as JSON."""
        return {"name": cls.name, "summary": cls.summary, "expects": cls.expects}

    @classmethod
    def revive(cls, state: Mapping[str, Any], folder: Path) -> Reader:
        """A reader from its state and the folder of its run."""
        raise NotImplementedError

    # hooks: the table

    def read(self, path: str) -> Table:
        """The table in a file or folder, shown to the user."""
        table = shown_table(path, self.say, header=self.header)
        refuse_pictures(table)
        return table

    def target_of(self, table: Table) -> str:
        """The column to predict: the named one, or the only one with a usual name."""
        if self.options.target:
            return table[self.options.target].name
        found = [name for name in table.columns if name.lower() in self.targets]
        if len(found) != 1:
            raise DataError(
                f"which column of {table.path} is to be predicted? Say --target; there are {named_columns(table)}"
            )
        return found[0]

    def columns_of(self, table: Table) -> list[str]:
        """The columns to predict from: all others."""
        return [name for name in table.columns if name not in (self.target, self.options.group)]

    def is_number(self) -> bool:
        """Whether the target is a number and no class."""
        return False

    def problems(self) -> list[str]:
        """Why nothing can be learned from the table, a line each."""
        column = self.table[self.target]
        found, different = checks.target_problems(column), len(set(column.texts()))
        if not found and not self.is_number() and 2 * different > len(self.table):
            found.append(
                f"the target {self.target!r} has {different:,} different values in {len(self.table):,} rows, "
                f"as {shown(column.texts()[0])}; {self.cure}"
            )
        return found

    def warnings(self) -> list[str]:
        """What may be wrong with the table, a line each."""
        return checks.target_warnings(self.table[self.target]) if self.classes else []

    def looked(self) -> None:
        """Called once the table is understood: for more notes, and to refuse what would fail after minutes."""

    def check_valid(self, table: Table) -> None:
        """Refuse a file to judge by that does not fit the training; its classes are known."""

    def usable(self, table: Table) -> Numbers:
        """The rows that hotlap can use: all."""
        return np.arange(len(table))

    def keys(self, table: Table, rows: Numbers) -> Sequence[Hashable]:
        """What makes these rows copies of each other, for each of them; None where a row is no copy of any."""
        return [None] * len(rows)

    def copies_of(self, keys: Sequence[Hashable]) -> Numbers:
        """The number of the group of copies of each row, in the order in which they come."""
        seen: dict[Hashable, int] = {}
        return np.asarray([at if key is None else seen.setdefault(key, at) for at, key in enumerate(keys)])

    # hooks: the models

    def reader_of(self) -> Reader:
        """What turns a table into a model's inputs, and its outputs into answers."""
        raise NotImplementedError

    def data_of(self, side: Side) -> Any:
        """A side in a form that a Job takes, with the targets."""
        raise NotImplementedError

    def models(self) -> Sequence[str]:
        """The names of the models to train; hotlap keeps the best."""
        return [self.name]

    def job(self, name: str, data: Any, held: Any) -> Job:
        """The training of a model of this name; `adamw_job` fills in what the options say."""
        raise NotImplementedError

    def space(self) -> dict[str, Any]:
        """What `--trials` may vary: options that `job` reads, and no reader."""
        return {"lr": (1e-4, 1e-2, "log"), "weight_decay": (1e-4, 0.3, "log"), "warm_up": (0.0, 0.2)}

    def use(self, values: Mapping[str, Any]) -> None:
        """Have the jobs that are made from now on use these values in place of the options."""
        self.options = dataclasses.replace(self.options, **values)

    def baselines(self) -> Mapping[str, Numbers]:
        """What trivial baselines answer for the held-out rows: the most frequent class, or the mean."""
        target, count = self.train.target, len(self.held.target)
        if self.classes:
            return {"most frequent class": np.full(count, np.bincount(target).argmax())}
        return {"the mean": np.full(count, target.mean())}

    def folds(self, name: str) -> Sequence[Fold]:
        """More splits of the data to judge the best model by: none."""
        return ()

    def example_of(self, at: int) -> str:
        """A held-out sample in a few words, for a list of mistakes."""
        return f"row {self.held.rows[at] + 1:,} of {self.held.whole.path}"

    def onnx_export(self, held: Any, name: str, model: nn.Module) -> OnnxExport:
        """The best model as an ONNX file holds it, for `--onnx`."""
        raise NotImplementedError

    def advice(self) -> str:
        """What would probably help where a trivial baseline wins; empty where nothing is known."""
        return ""

    # the parts of `prepare`

    def look(self) -> None:
        """Read the table, find out what is to be predicted from what, and refuse what cannot be learned."""
        self.table = self.read(self.options.data)
        self.target = self.target_of(self.table)
        self.columns = self.columns_of(self.table)
        for name, named in ((self.source, self.columns), ("group", [self.options.group])):
            if self.target in named:
                raise DataError(f"{name} names {self.target}, which is the target; name another column")
        refuse(self.problems())
        column = self.table[self.target]
        self.classes = () if self.is_number() else checks.classes_of(column)[0]
        for line in self.warnings():
            self.say(f"warning   {line}")
        what = f"{len(self.classes)} classes" if self.classes else "a number"
        self.say(f"task      {self.target} ({what}) from {self.holder}{' and '.join(self.columns)}")
        self.looked()

    def split(self) -> None:
        """Part the rows that are trained on from those that are held out.

        Held out are the rows of `--valid`, whole groups, or the same share of each class. Copies of a row are on one
        side where the split is free to have them so.
        """
        options, other = self.options, self._valid_table() if self.options.valid else None
        groups = _groups_of(self.table, options.group) if options.group else None
        rows = self.usable(self.table)
        target = self._answers(self.table, rows)
        if other is not None:
            self.train, theirs = Side(whole=self.table, rows=rows, target=target), self.usable(other)
            self.held = Side(whole=other, rows=theirs, target=self._answers(other, theirs))
            self._warn_of_copies(f"leave them out of {options.valid}")
            return
        alike = self.copies_of(self.keys(self.table, rows))
        copies = len(alike) - len(np.unique(alike))
        # Numbers by strata, so that large and small ones are on both sides.
        strata = target if self.classes else np.argsort(np.argsort(target)) * STRATA // len(target)
        if groups is not None:
            parts = by_group(groups[rows], options.valid_share, options.seed)
        elif copies:
            self.say(f"copies    {copies:,} {self.unit} are copies of one before: all copies are on one side")
            parts = stratified_by_group(strata, alike, options.valid_share, options.seed)
        else:
            parts = stratified(strata, options.valid_share, options.seed)
        self.train, self.held = (Side(whole=self.table, rows=rows[part], target=target[part]) for part in parts)
        for number in np.setdiff1d(self.held.target, self.train.target) if self.classes else ():
            name = shown(self.classes[number])
            self.say(f"warning   all rows of {name} are held out by their groups: it is never trained on")
        if groups is not None:
            self._warn_of_copies(f"give copies the same {options.group}, or leave them out")
        counts = f"{len(self.train.rows):,} {self.unit} to train on, {len(self.held.rows):,} held out"
        self.say(f"split     {counts}")

    def prepared(self) -> Prepared:
        """All that a training needs."""
        self.reader = self.reader_of()
        data, held = self.data_of(self.train), self.data_of(self.held)
        return Prepared(
            reader=self.reader,
            candidates=[Candidate(name=one, job=partial(self.job, one, data, held)) for one in self.models()],
            target_name=self.target,
            held_out=held,
            target=self.held.target,
            shown=self.example_of,
            baselines=self.baselines,
            space=self.space(),
            use=self.use,
            folds=self.folds,
            finish=partial(self._write_onnx, held) if self.options.onnx else None,
            advice=self.advice(),
        )

    # for subclasses

    @property
    def header(self) -> bool | None:
        """Whether the first row holds names; None where hotlap finds out."""
        return HEADERS[getattr(self.options, "header", "auto")]

    def class_weights(self, target: Numbers | None = None) -> Tensor | None:
        """The weight of each class in the loss, or None without `--balance`."""
        if not self.options.balance or not self.classes:
            return None
        weights = class_weights(self.train.target if target is None else target, len(self.classes))
        return torch.from_numpy(weights).float()

    def adamw_job(self, model: nn.Module, data: Any, held: Any, *, lr: float, epochs: int, **settings: Any) -> Job:
        """A Job with AdamW, a warm-up and a cosine, as the options say; `lr` and `epochs` count where they do not."""
        options = self.options
        usual = {"metrics": ["accuracy", "macro_f1"], "monitor": "macro_f1", "clip": 1.0}
        return Job(
            model=model,
            data=data,
            valid=held,
            optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr or lr, weight_decay=options.weight_decay),
            schedule=warm_up_and_cosine(options.warm_up),
            batch_size=options.batch_size,
            epochs=options.epochs_of(epochs),
            patience=options.patience,
            seed=options.seed,
            device=options.device,
            **{**usual, **settings},
        )

    def _write_onnx(self, held: Any, name: str, model: nn.Module, folder: Path, say: Say) -> None:
        path = folder / NAME
        gap = write_onnx(self.onnx_export(held, name, model), path)
        say(f"onnx      {path}: its answers are the model's to {gap:.1g}")

    def _answers(self, table: Table, rows: Numbers) -> Numbers:
        column = table[self.target].rows(rows)
        if not self.classes:
            return np.asarray(column.values, dtype=np.float64)
        places = {name: number for number, name in enumerate(self.classes)}
        return np.fromiter(map(places.__getitem__, column.texts()), np.int64, len(column))

    def _valid_table(self) -> Table:
        """The file to judge by; refused where its targets are unlike those trained on."""
        table = self.read(self.options.valid)
        column = table[self.target]
        if self.classes:
            unknown = sorted(set(checks.classes_of(column)[0]) - set(self.classes))
            data, valid = self.options.data, self.options.valid
            refuse([f"{valid} has the class {shown(one)}, which {data} has not; leave its rows out" for one in unknown])
        refuse(checks.target_problems(column, to_learn=False))
        if not self.classes and column.kind not in checks.NUMBERS:
            raise DataError(
                f"the target {self.target!r} is {column.kind} in {self.options.valid}; give numbers there too"
            )
        self.check_valid(table)
        return table

    def _warn_of_copies(self, cure: str) -> None:
        """Rows that are on both sides make a score too good."""
        mine, theirs = (self.keys(side.whole, side.rows) for side in (self.train, self.held))
        seen = set(mine) - {None}
        copies = [at for at, key in enumerate(theirs) if key in seen]
        if copies:
            count = f"{len(copies):,} of {len(theirs):,} {self.unit} held out are trained on too"
            self.say(f"warning   {count}, as {self.example_of(copies[0])}; {cure}")


# --- splits ----------------------------------------------------------------------------------------------


def _groups_of(table: Table, name: str) -> Numbers:
    group = table[name]
    if group.missing is not None:
        raise DataError(f"group={group.name} is missing in {int(group.missing.sum()):,} rows; fill it in")
    return np.asarray(group.texts())


class Split(NamedTuple):
    """Rows by their numbers, as int64: those to train on, and those to judge by."""

    train: Numbers
    valid: Numbers


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
    draw, held = np.random.default_rng(seed), list[Numbers]()
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


def _codes(name: str, values: Any) -> tuple[Numbers, Numbers]:
    """Values as codes from 0 on, and how many there are of each."""
    column = np.asarray(values)
    if column.ndim != 1 or not len(column):
        raise DataError(f"the shape of {name} is {column.shape}; give one value for each row")
    _, codes, counts = np.unique(column, return_inverse=True, return_counts=True)
    return codes, counts


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
