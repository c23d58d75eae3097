"""What a recipe makes of its data (`Prepared`), and the base of what reads tables for its models (`Reader`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hotlap.core.job import Job
from hotlap.core.terminal import Say as Say
from hotlap.recipes.tables import Table, table_in_memory

Numbers = np.ndarray[Any, Any]


def only_warnings(say: Say) -> Say:
    """Shows, of all lines, those that are warnings."""
    return lambda line: say(line) if line.startswith("warning") else None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Rows of a table as a model takes them."""

    data: Any
    """In any form that `Rig.predict` takes."""
    rows: Numbers
    """Which rows of the table they are; some may have too little before them."""


class Reader:
    """Turns a table into a trained model's inputs, and its outputs into answers.

    A subclass needs `table`, `state`, `model` and `asked`.
    """

    classes: tuple[str, ...] = ()
    """The answers, in the order of the model's outputs; empty where the answer is a number."""
    columns: tuple[str, ...] = ()
    """The columns that it reads, where a list of plain values may stand for them."""

    def table(self, data: Path) -> Table:
        """A file or folder, read as in training; DataError where a column is missing."""
        raise NotImplementedError

    def rows_of(self, data: Any) -> Table:
        """Values in memory as a table: a mapping of columns, a DataFrame, or a list of mappings or of `columns`."""
        return table_in_memory(data, self.columns)

    def state(self) -> dict[str, Any]:
        """All that makes the reader again, as JSON."""
        raise NotImplementedError

    def keep_files(self, folder: Path) -> None:
        """Write files beside the JSON, such as a tokenizer: none."""

    def model(self, name: str) -> nn.Module:
        """A model of this name with random weights."""
        raise NotImplementedError

    def asked(self, table: Table, say: Say) -> Asked:
        """The rows of a table that the model can answer."""
        raise NotImplementedError

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The model's outputs: a row of scores for each sample, or its number."""
        outputs: Tensor = model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        return outputs

    @property
    def embedded(self) -> Callable[[nn.Module, Any], Tensor] | None:
        """Gives a vector for each sample, if the model has useful ones."""
        return None


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to train; its job is built when its turn comes, so that only one is in memory."""

    name: str
    job: Callable[[], Job]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Another split of the same data, on which the best model is trained and judged again."""

    name: str
    job: Callable[[], Job]
    held_out: Any
    target: Numbers


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a recipe has made of its data."""

    reader: Reader
    candidates: Sequence[Candidate]
    target_name: str
    """How the answers are called."""
    held_out: Any
    """Data to judge by, in any form that `Rig.predict` takes."""
    target: Numbers
    """The true class, or number, of each of its samples."""
    shown: Callable[[int], str]
    """A sample of it in a few words, for a list of mistakes."""
    baselines: Callable[[], Mapping[str, Numbers]]
    """What simple rules answer for its samples, by name, the simplest, as the most frequent class, first. Asked for
    once, when all is trained."""
    folds: Callable[[str], Sequence[Fold]] = lambda name: ()
    """Other splits for a model of this name."""
    finish: Callable[[str, nn.Module, Path, Say], None] | None = None
    """What is done with the name and the trained weights of the best model, and the folder of the run."""
    advice: str = ""
    """What would probably help where a trivial baseline wins."""
