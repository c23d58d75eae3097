"""What a recipe makes of its data (`Prepared`), and the base of what reads tables for its models (`Reader`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from hotlap.core.job import Job
from hotlap.core.terminal import Say as Say
from hotlap.fitting.deadline import TimeLimit
from hotlap.fitting.run import Run
from hotlap.recipes.tables import Table, table_in_memory
from hotlap.store.weights import MODEL, build_with_weights

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

    A subclass needs `table`, `state`, `asked`, and `model`. If the answers are no outputs of one network, it overrides
    `load` and `answers` in place of `model`.
    """

    classes: tuple[str, ...] = ()
    """The answers, in the order of the model's outputs; empty where the answer is a number."""
    targets: tuple[str, ...] = ()
    """The columns of the answers where each row has many numbers; empty where it has one answer."""
    by_share: bool = False
    """Whether a number is judged by its error as a share of its size, as a price is."""
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

    def load(self, name: str, folder: Path) -> Any:
        """The model of this name with the weights in the folder of a finished run."""
        return build_with_weights(partial(self.model, name), folder / MODEL).eval()

    def answers(self, model: Any, data: Any, *, batch_size: int, device: str) -> Numbers | None:
        """What a model that is no single network answers; None if the outputs of `forward` are the answers."""
        return None

    def truth(self, table: Table, rows: Numbers) -> Numbers | None:
        """The true value of each of many targets in these rows, nan where unknown; None where the table has none."""
        return None

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
class Trainer:
    """What hotlap gives a model that trains itself: how to train a network, and how the user wants it."""

    fit: Callable[..., Run]
    """`fit(job, folder, quiet=False, share=1.0)`: a network under the options of the run, in this share of the time."""
    folder: Path
    """The run's folder: `models/NAME` and `folds/NAME N` in it hold trainings."""
    reuse: bool
    """Whether models that were trained before are read from the cache."""
    progress: bool
    say: Say
    before: Mapping[str, Trained] = field(default_factory=dict)
    """The models that were trained before it, by name."""
    limit: TimeLimit | None = None
    """When the model has to be trained and have answered; None without `--finish-in`. `fit` keeps to it."""
    left_out: list[str] = field(default_factory=list)
    """Takes a line for each thing that was not done for want of time."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that trained itself, and its answers for the held-out rows."""

    weights: dict[str, Tensor]
    """What `Reader.load` reads back from the run's folder, beside files in `models/NAME`."""
    answers: Numbers
    train_s: float
    was_kept: bool = False
    history: list[dict[str, Any]] = field(default_factory=list)
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the report of the run says of it beside its scores, as JSON."""


@dataclass(frozen=True, kw_only=True)
class OwnCandidate:
    """A model that trains itself: no single network, or several."""

    name: str
    train: Callable[[Trainer], Trained]
    is_quick: bool = False
    """Whether it takes hardly any time: a deadline never leaves it out."""
    comes_first: bool = False
    """Whether it is trained before the networks, which then have the time that it leaves."""
    expected_s: Callable[[], float] | None = None
    """What its training takes at most, by a small part of it; None where that is hardly any time."""


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
    """The networks to train, one job each."""
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
    space: Mapping[str, Any] = field(default_factory=dict)
    """What the trials of the networks may vary: options of the recipe, as `hotlap.search` takes them."""
    use: Callable[[Mapping[str, Any]], None] = lambda values: None
    """Has all jobs made from now on use these values of `space`."""
    own: Sequence[OwnCandidate] = ()
    """Models that train themselves, after the networks."""
    folds: Callable[[str], Sequence[Fold]] = lambda name: ()
    """Other splits for a model of this name."""
    finish: Callable[[str, nn.Module, Path, Say], None] | None = None
    """What is done with the name and the trained weights of the best model, and the folder of the run."""
    advice: str = ""
    """What would probably help where a trivial baseline wins."""
