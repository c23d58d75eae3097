"""What a trained model answers: scores of all samples, and a file of predictions."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import StoreError, shown
from hotlap.engine.rig import Rig
from hotlap.recipes.recipe import Numbers, Reader
from hotlap.recipes.scores import judge_of
from hotlap.recipes.tables import PARQUET, Table, arrow_columns, libraries, plain_cells, write_parquet
from hotlap.store.files import write_bytes, write_text

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
LISTS = {"classes": 1_000_000, "columns": 2, "features": 10_000}
"""Lists of words, and how long each may be."""
SHARES = ("crop", "dropout")
AMOUNTS = ("mean", "spread")
WORDS = ("fit", "model", "path", "recipe", "root", "target")
FLAGS = ("has_header", "header", "mirrors")
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


def answers_of(reader: Reader, model: nn.Module, data: Any, *, batch_size: int, device: str) -> Numbers:
    """What a model answers for each sample of `data`, in its order: probabilities of classes, or numbers."""
    found = outputs_of(reader.forward, model, data, batch_size=batch_size, device=device)
    return judge_of(reader.classes).answers(found)


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
        libraries(path)


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
    """What is to be said of rows without one, in a line; empty where there is none."""

    @property
    def line(self) -> str:
        """How many, in a few words."""
        count = f"{self.rows:,}" if self.rows == self.of else f"{self.rows:,} of {self.of:,}"
        return f"{count} row{'s'[: self.of != 1]} answered"


def answered(table: Table, names: Sequence[str], rows: Numbers) -> Answered:
    """What is told of a file of which these rows were answered; the first of the others is shown by its first cell."""
    empty = np.setdiff1d(np.arange(len(table)), rows)
    said = ""
    if len(empty):
        cell = shown(table[names[0]].rows(empty[:1]).texts()[0])
        said = (
            f"{len(empty):,} of {len(table):,} rows have no answer: their cells are empty, the first in row "
            f"{empty[0] + 1:,} below the header, where {names[0]} is {cell}; fill them in before you hand the file in"
        )
    return Answered(rows=len(rows), of=len(table), missing=said)


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
    lines = _Lines()
    writer = csv.writer(lines, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", lineterminator="\n")
    writer.writerow([*names, *columns])
    texts = [plain[name] for name in names]
    writer.writerows(zip(*texts, *(map(_written, column) for column in columns.values()), strict=True))
    write_text(path, "".join(lines))


def _written(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def write_vectors(path: Path, vectors: Tensor) -> None:
    """Write a row of numbers for each sample as a file of numpy's."""
    made = io.BytesIO()
    np.save(made, vectors.float().numpy(), allow_pickle=False)
    write_bytes(path, made.getvalue())


class _Lines(list[str]):
    """A file to csv's writer."""

    def write(self, line: str) -> None:
        self.append(line)
