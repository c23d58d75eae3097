"""What a trained model answers: scores of all samples, and a file of predictions."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, StoreError
from hotlap.engine.rig import Rig
from hotlap.recipes.recipe import Numbers
from hotlap.recipes.tables import Table, read_table
from hotlap.store.files import write_bytes, write_text


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
    """From which probability on a rare class of two is answered."""

    rare: int
    least: float


def chosen(scores: Numbers, threshold: Threshold | None) -> Numbers:
    """The class of each row of scores: the likeliest; of two, the rare one from its threshold on."""
    if threshold is not None:
        return np.where(scores[:, threshold.rare] >= threshold.least, threshold.rare, 1 - threshold.rare)
    likeliest: Numbers = scores.argmax(1)
    return likeliest


def refuse_written(path: Path) -> None:
    """Refuse a file of answers that is there already, or whose folder is not: before anything is answered."""
    if path.exists():
        raise StoreError(f"{path} is there already; name another file with --out")
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent} to write {path.name} into; make it, or name another")


def write_answers(
    path: Path,
    data: Path,
    table: Table,
    rows: Numbers,
    answers: Mapping[str, Sequence[Any]],
    *,
    keep: Sequence[str] = (),
) -> None:
    """Write the columns of a file (or those to `keep`) and the answers behind them, every row in its order.

    `table` is what was read from it. Rows that were not answered have nothing there. A file that is there already is
    refused.
    """
    refuse_written(path)
    twice = [name for name in keep if name in answers]
    if twice:
        raise DataError(f"keep names {twice[0]!r}, which is what the answers are called; leave it out, or rename it")
    names = list(keep) or [name for name in table.columns if name not in answers]
    # Read once more, as text: numbers and dates are to be as they were written.
    plain = read_table(data, header=table.has_header, kinds={name: "text" for name in names if table[name]})
    texts = [plain[name].texts() for name in names]
    blank = [""] * len(table)
    columns = []
    for values in answers.values():
        column = list(blank)
        for row, value in zip(rows.tolist(), values, strict=True):
            column[row] = f"{value:.6g}" if isinstance(value, float) else str(value)
        columns.append(column)
    lines = _Lines()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*names, *answers])
    writer.writerows(zip(*texts, *columns, strict=True))
    write_text(path, "".join(lines))


def write_vectors(path: Path, vectors: Tensor) -> None:
    """Write a row of numbers for each sample as a file of numpy's."""
    made = io.BytesIO()
    np.save(made, vectors.float().numpy(), allow_pickle=False)
    write_bytes(path, made.getvalue())


class _Lines(list[str]):
    """A file to csv's writer."""

    def write(self, line: str) -> None:
        self.append(line)
