"""What a trained model answers: scores of all samples, and a file of predictions."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import StoreError, shown
from hotlap.engine.rig import Rig
from hotlap.recipes import parquet_files
from hotlap.recipes.recipe import Numbers
from hotlap.recipes.tables import Table, arrow_columns, plain_cells
from hotlap.store.files import write_bytes, write_text

TABLES = ("", ".csv", ".tsv", ".txt", *parquet_files.SUFFIXES)
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


class Threshold(NamedTuple):
    """From which probability on a rare class is answered."""

    rare: int
    least: float


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
    if path.suffix.lower() in parquet_files.SUFFIXES:
        parquet_files.libraries(path)


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
    if path.suffix.lower() in parquet_files.SUFFIXES:
        given = arrow_columns(data)
        if len(names) < len(table.columns):  # else with those that a table cannot hold
            given = {name: column for name, column in given.items() if name in names}
        parquet_files.write_parquet(path, [table[name] for name in names], columns, given)
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
