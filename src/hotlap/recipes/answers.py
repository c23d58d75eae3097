"""A finished run: its model read back, its answers for a file or for values in memory, and the files of answers."""

from __future__ import annotations

import csv
import io
import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, HotlapError, StoreError, shown
from hotlap.core.units import MIB
from hotlap.engine.rig import Rig
from hotlap.machine.device import choose_device
from hotlap.recipes import recipe_named
from hotlap.recipes.checks import NUMBERS
from hotlap.recipes.options import OPTIONS, recipe_in, run_of
from hotlap.recipes.parquet_files import SUFFIXES as PARQUET
from hotlap.recipes.parquet_files import pyarrow_for, write_parquet
from hotlap.recipes.recipe import Asked, Numbers, Reader, Say
from hotlap.recipes.scores import Report, Threshold, judge_for, report_lines
from hotlap.recipes.tables import Table, arrow_columns, plain_cells
from hotlap.store.files import read_text, write_bytes, write_text

STATE, MODEL = "recipe.json", "model.safetensors"
"""In the folder of a run: all that predictions need beside the weights, and the weights."""
MOST_STATE_BYTES = 64 * MIB
FORMAT = 1
"""Of the state file; hotlap refuses one of a newer hotlap."""
WHOLE = {
    "batch_size": 10_000_000,
    "depth": 256,
    "length": 10_000,
    "most": 65_536,
    "outputs": 1_000_000,
    "seconds": 400 * 86_400,
    "size": 4096,
    "tta": 10,
    "width": 4096,
}
"""Whole numbers, and the most that each may be; the least is 1. Options have the same bounds."""
LISTS = {
    "beaten_by": 10,
    "classes": 1_000_000,
    "columns": 20,
    "features": 10_000,
    "inputs": 1_000_000,
    "members": 10,
    "targets": 1_000_000,
}
"""Lists of words, and how long each may be."""
SHARES = ("crop", "dropout")
AMOUNTS = ("mean", "spread", "widest")
WORDS = ("fit", "model", "path", "recipe", "root", "target", "time")
FLAGS = ("has_header", "header", "in_logs", "is_dated", "mirrors")
FRAMES, LONGEST_FRAME = 20, 400 * 86_400
CONFIG = "config"
"""Of a model of transformers: looked at where that is made."""


def state_problem(state: Mapping[str, Any]) -> str | None:
    """What is wrong with the numbers and words of a run's state; None where nothing is."""
    return next(_problems(state), None)


def _problems(state: Any) -> Iterator[str]:
    for name, value in state.items():
        if name == CONFIG:
            continue
        if name in WHOLE:
            is_none = value is None and name == "seconds"  # which runs of an earlier hotlap do not say
            if not is_none and (type(value) is not int or not 1 <= value <= WHOLE[name]):
                yield f"{name}={shown(value)} must be a whole number from 1 to {WHOLE[name]:,}"
        elif name in LISTS:
            if not _are_words(value) or len(value) > LISTS[name]:
                yield f"{name}={shown(value)} must be a list of at most {LISTS[name]:,} words"
        elif name in SHARES:
            if not _is_number(value) or not 0 <= value <= 1:
                yield f"{name}={shown(value)} must be a number from 0 to 1"
        elif name == "frames":
            wrong = not isinstance(value, list) or len(value) > FRAMES
            if wrong or any(type(one) is not int or not 1 <= one <= LONGEST_FRAME for one in value):
                yield f"{name}={shown(value)} must be at most {FRAMES} numbers of seconds"
        elif name in AMOUNTS:
            if not all(map(_is_number, value if isinstance(value, list) else [value])):
                yield f"{name}={shown(value)} must be a number, or a list of them"
        elif name in WORDS:
            if not isinstance(value, str):
                yield f"{name}={shown(value)} must be a word"
        elif name in FLAGS:
            if value is not None and not isinstance(value, bool):
                yield f"{name}={shown(value)} must be true or false"
        elif isinstance(value, dict):
            yield from _problems(value)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    """A finite number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)


TABLES = ("", ".csv", ".tsv", ".txt", *PARQUET)
"""How the name of a file of answers may end."""
VECTORS = (".npy",)


def revived(folder: Path) -> tuple[dict[str, Any], Reader, Any]:
    """The state, the reader and the model of a finished run."""
    path = folder / STATE
    if not folder.is_dir():
        raise StoreError(f"{folder} does not exist; name the folder of a run")
    if not path.is_file() and (whole := run_of(folder)) not in (None, folder):
        raise StoreError(f"{folder} is a single model of the run {whole}; name the run: {whole}")
    if not path.is_file() and (folder / OPTIONS).is_file():
        command = shlex.join(command_of(folder))
        raise StoreError(f"{folder} was interrupted before it had a model; go on with: {command}")
    if not path.is_file():
        raise StoreError(f"{folder} is no run of a recipe: there is no {STATE} in it")
    try:
        state = json.loads(read_text(path, MOST_STATE_BYTES))
        version = state["format"]
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"{path} is damaged; train again") from None
    if version != FORMAT:
        found = shown(version)
        raise StoreError(f"{path} has format {found}, and this hotlap reads {FORMAT}; update hotlap or train again")
    try:
        problem = state_problem(state)
        if problem is not None:
            raise StoreError(f"{path} is damaged: {problem}; train again")
        reader = recipe_named(state["recipe"]).revive(state["reader"], folder)
        model = reader.load(state["model"], folder)
        if not isinstance(state["target"], str):
            raise TypeError(f"target={shown(state['target'])}")
        state["batch_size"]  # is needed later
        threshold = _threshold_in(state)
        if threshold is not None and not 0 <= threshold.rare < len(reader.classes):
            raise ValueError(f"threshold={shown(state['threshold'])}")
    except MemoryError:
        raise StoreError(f"{path} asks for a model that needs more memory than there is; train again") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, HotlapError):
            raise
        raise StoreError(f"{path} is damaged: {shown(error)}; train again") from None
    return state, reader, model


def _threshold_in(state: dict[str, Any]) -> Threshold | None:
    """The threshold of a run's state; TypeError or ValueError where it is none."""
    if state["threshold"] is None:
        return None
    rare, least = state["threshold"]
    return Threshold(int(rare), float(least))


def command_of(folder: Path) -> list[str]:
    """The command that begins a recipe's run again, or goes on with it."""
    options = folder / OPTIONS
    return ["hotlap", "train", recipe_in(options) or "", "--options", str(options), "--out", str(folder)]


class Model:
    """The model of a finished run, in memory; `hotlap.load` makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._state, self.reader, self.network = revived(folder)
        self.threshold = _threshold_in(self._state)
        self.target: str = self._state["target"]
        self.batch_size: int = self._state["batch_size"]
        self.recipe: str = self._state["recipe"]

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes, in the order of the model's outputs; empty where it answers numbers."""
        return self.reader.classes

    @property
    def beaten_by(self) -> str:
        """The trivial baselines that no model of the run beat, in words; empty where there is none."""
        return " and ".join(self._state.get("beaten_by", ()))

    def predict(self, data: Any, *, probabilities: bool = False, device: str = "auto") -> list[Any]:
        """The class, or the number, of each row, or a mapping of many targets; None for a row that has no answer.

        `data` is a list of texts, of paths of pictures or of mappings, a mapping of columns, or a DataFrame. With
        `probabilities` each answer is a mapping from class to probability. Raises DataError where a column is missing.
        """
        table = self.reader.rows_of(data)
        asked = self.reader.asked(table, lambda line: None)
        answers = self.answers_to(asked, device)
        judge, found = judge_for(self.reader), [None] * len(table)
        if self.reader.targets:
            values: list[Any] = [dict(zip(self.reader.targets, row, strict=True)) for row in answers.tolist()]
        elif probabilities and self.classes:
            values = [dict(zip(self.classes, row, strict=True)) for row in answers.tolist()]
        else:
            values = judge.written(self.target, answers, self.threshold, all_of_it=False)[self.target]
        for row, value in zip(asked.rows.tolist(), values, strict=True):
            found[row] = value
        return found

    def answers_to(self, asked: Asked, device: str) -> Numbers:
        """Probabilities of classes, or numbers: one for each row, or a row of them."""
        return answers_of(self.reader, self.network, asked.data, batch_size=self.batch_size, device=device)

    def scores(self, table: Table, rows: Numbers, answers: Numbers) -> Report | None:
        """How good answers for these rows of a table are; None where it does not have the target."""
        if self.reader.targets:
            truth = self.reader.truth(table, rows)
            return None if truth is None else judge_for(self.reader).new_report(truth, answers, None)
        if self.target not in table:
            return None
        column = table[self.target].rows(rows)
        if self.classes:
            places = {name: number for number, name in enumerate(self.classes)}
            target = np.fromiter((places.get(text, -1) for text in column.texts()), np.int64, len(column))
            known = target >= 0
        elif column.kind in NUMBERS:
            target = np.asarray(column.values, dtype=np.float64)
            known = column.present & np.isfinite(target)
        else:
            return None
        if not known.any():
            return None
        return judge_for(self.reader).new_report(target[known], answers[known], self.threshold)


def answer(
    folder: Path, data: Path, out: Path, *, say: Say, device: str = "auto", keep: tuple[str, ...] = (),
    probabilities: bool = False, embeddings: Path | None = None, was_shown: bool = False,
) -> Answered:  # fmt: skip
    """Write what the model of a run answers for each row of a file, and score it where the file has the target.

    Where a file for them is named, the `embeddings` of the rows too. What is read is shown unless it `was_shown`.
    """
    check_name(out, "out", TABLES)
    if embeddings is not None:
        check_name(embeddings, "embeddings", VECTORS)
    choose_device(device)
    model = Model(folder)
    if embeddings is not None and model.reader.embedded is None:
        raise DataError(f"the recipe {model.recipe} has no embeddings; the recipe text has")
    table = model.reader.table(data)
    if not was_shown:
        for note in table.notes:
            say(f"note      {note}")
        if model.beaten_by:
            say(f"warning   on the rows held out in training, {model.beaten_by} did at least as well as this model")
    if probabilities and not model.classes:
        say("note      the answers are numbers, which have no probabilities")
    names = kept_names(table, keep)
    asked = model.reader.asked(table, (lambda line: None) if was_shown else say)
    answers = model.answers_to(asked, device)
    judge, name = judge_for(model.reader), model.target
    while any(column in names for column in judge.written(name, answers[:0], None, all_of_it=probabilities)):
        name = f"predicted_{name}"
    if name != model.target:
        first, own = (
            next(iter(judge.written(one, answers[:0], None, all_of_it=False))) for one in (name, model.target)
        )
        say(f"answers   are in {first!r}, since {data} has its own column for {own!r}")
    columns = judge.written(name, answers, model.threshold, all_of_it=probabilities)
    write_answers(out, data, table, names, asked.rows, columns)
    if embeddings is not None and model.reader.embedded is not None:
        batch, forward = model.batch_size, model.reader.embedded
        write_vectors(embeddings, outputs_of(forward, model.network, asked.data, batch_size=batch, device=device))
    report = model.scores(table, asked.rows, answers)
    if report is not None:
        what = model.target or "target"
        say(f"scores    {report['rows']:,} of {len(table):,} rows of {data} have a {what} that the model knows")
        for line in report_lines(report):
            say(f"          {line}")
    found = answered(table, names, asked.rows, report)
    if found.missing:
        say(f"warning   {found.missing}")
    return found


def outputs_of(
    forward: Callable[[nn.Module, Any], Tensor], model: nn.Module, data: Any, *, batch_size: int, device: str
) -> Tensor:
    """What a function of the model and a batch gives for each sample of `data`, in its order; on the host."""
    rig = Rig(
        model,
        # Nothing is trained: a Rig asks for an optimizer all the same.
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        nn.CrossEntropyLoss(),
        forward=lambda own, batch: (forward(own, batch), None),
        device=device,
    )
    try:
        found: Tensor = rig.predict(data, batch_size=batch_size)
    finally:
        rig.close()
    return found


def answers_of(reader: Reader, model: Any, data: Any, *, batch_size: int, device: str) -> Numbers:
    """What a model answers for each sample of `data`, in its order: probabilities of classes, or numbers."""
    own = reader.answers(model, data, batch_size=batch_size, device=device)
    if own is not None:
        return own
    found = outputs_of(reader.forward, model, data, batch_size=batch_size, device=device)
    return judge_for(reader).answers(found)


def check_name(path: Path, option: str, suffixes: Sequence[str]) -> None:
    """Refuse a file that is there already, whose folder is not, or whose name says that it is something else.

    That is for before anything is answered. A Parquet file needs pyarrow, too.
    """
    if path.suffix.lower() not in suffixes:
        known = ", ".join(filter(None, suffixes))
        raise StoreError(f"{path} is no file that can be written; give --{option} a name that ends in {known}")
    if path.exists():
        raise StoreError(f"{path} is there already; name another file with --{option}")
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent} to write {path.name} into; make it, or name another")
    if path.suffix.lower() in PARQUET:
        pyarrow_for(path)


def kept_names(table: Table, keep: Sequence[str]) -> list[str]:
    """The columns to be written beside the answers: all, or those that are named, one by one or with commas."""
    words = [name for word in keep for name in ([word] if word in table else word.split(","))]
    return list(dict.fromkeys(table[word.strip()].name for word in words)) or list(table.columns)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """How many rows of a file have an answer, and where one is missing."""

    rows: int
    of: int
    missing: str
    """A line about rows without an answer; empty where there are none."""
    report: Report | None = None
    """How good the answers are, where the file has the target."""

    @property
    def line(self) -> str:
        """How many, in a few words."""
        count = f"{self.rows:,}" if self.rows == self.of else f"{self.rows:,} of {self.of:,}"
        return f"{count} row{'s'[: self.of != 1]} answered"


def answered(table: Table, names: Sequence[str], rows: Numbers, report: Report | None = None) -> Answered:
    """How many rows of a file have answers; the first row without one is named by its first cell."""
    empty = np.setdiff1d(np.arange(len(table)), rows)
    missing = ""
    if len(empty):
        cell = shown(table[names[0]].rows(empty[:1]).texts()[0])
        missing = (
            f"{len(empty):,} of {len(table):,} rows have no answer: their cells are empty, the first in row "
            f"{empty[0] + 1:,} below the header, where {names[0]} is {cell}; fill them in before you hand the file in"
        )
    return Answered(rows=len(rows), of=len(table), missing=missing, report=report)


def write_answers(
    path: Path, data: Path, table: Table, names: Sequence[str], rows: Numbers, answers: Mapping[str, Sequence[Any]]
) -> None:
    """Write these columns of a file and the answers behind them, every row in its order: as CSV, or as Parquet.

    `table` is what was read from the file. Rows that were not answered have nothing there.
    """
    columns = {}
    for name, values in answers.items():
        columns[name] = cells = [None] * len(table)
        for row, value in zip(rows.tolist(), values, strict=True):
            cells[row] = value
    if path.suffix.lower() in PARQUET:
        given = arrow_columns(data)
        if len(names) < len(table.columns):  # else with those that a table cannot hold
            given = {name: column for name, column in given.items() if name in names}
        write_parquet(path, [table[name] for name in names], columns, given)
        return
    # Read once more: all cells are to be as they were written.
    plain = plain_cells(data, table)
    lines = io.StringIO(newline="")
    writer = csv.writer(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
    writer.writerow([*names, *columns])
    texts = [plain[name] for name in names]
    writer.writerows(zip(*texts, *(map(_written, column) for column in columns.values()), strict=True))
    write_text(path, lines.getvalue())


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_vectors(path: Path, vectors: Tensor) -> None:
    """Write a row of numbers for each sample as a file of numpy's."""
    made = io.BytesIO()
    np.save(made, vectors.float().numpy(), allow_pickle=False)
    write_bytes(path, made.getvalue())
