"""What a recipe is, and all recipes by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from hotlap.core.errors import UsageError, did_you_mean, shown
from hotlap.core.job import Job
from hotlap.recipes.options import Options
from hotlap.recipes.tables import Table

Say = Callable[[str], None]
"""Shows a line to the user."""
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


class Reader(Protocol):
    """Knows how a table becomes what a trained model takes, and how its outputs become answers."""

    classes: tuple[str, ...]
    """The answers, in the order of the model's outputs; none where a number is answered."""

    def table(self, data: Path) -> Table:
        """A file or folder, read as that which was trained on; one that lacks a column is refused with DataError."""

    def state(self) -> dict[str, Any]:
        """All that it needs to be made again, as JSON."""

    def keep_files(self, folder: Path) -> None:
        """Write what is no JSON, such as a tokenizer."""

    def model(self, name: str) -> nn.Module:
        """A model of this name with its first weights."""

    def asked(self, table: Table, say: Say) -> Asked:
        """The rows of a table that can be answered."""

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """The model's outputs, a row of scores for each sample, or its number."""

    @property
    def embedded(self) -> Callable[[nn.Module, Any], Tensor] | None:
        """Gives a vector for each sample, where the model has one of use."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A model to be trained; the job is made when its turn comes, so that no two are in memory at once."""

    name: str
    job: Callable[[], Job]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """One more split of the same data, on which the best model is trained and judged once more."""

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A ready system."""

    name: str
    summary: str
    expects: str
    """Which columns, in a line."""
    options: type[Options]
    prepare: Callable[[Any, Say], Prepared]
    revive: Callable[[Mapping[str, Any], Path], Reader]
    """A reader from its state, and the folder with its files."""

    def told(self) -> dict[str, str]:
        """What it is, as JSON."""
        return {"name": self.name, "summary": self.summary, "expects": self.expects}


NAMES = ("image", "temporal", "text")


def recipe_named(name: str) -> Recipe:
    """The recipe of this name."""
    if name not in NAMES:
        raise UsageError(f"no recipe is called {shown(name)}{did_you_mean(name, NAMES)}")
    found: Recipe = import_module(f"hotlap.recipes.{name}").RECIPE
    return found
