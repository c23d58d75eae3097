"""What the recipe `forecast` trains and reads back: rows, the ridge, the loss with gaps, the blend, and their reader.

All models learn the same standardised answers: what the best simple rule of each target misses (`Scale`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap import trees
from hotlap.core.errors import DataError, first_few, shown
from hotlap.data.windows import Windows
from hotlap.recipes.answers import outputs_of
from hotlap.recipes.boosted_trees import Mixture
from hotlap.recipes.lag_features import MOST_ROWS, Lags, filled, shifted, times_of
from hotlap.recipes.networks import AttentiveLstm
from hotlap.recipes.recipe import Asked, Numbers, Reader, Say
from hotlap.recipes.tables import Table, read_table
from hotlap.store.weights import MODEL, build_with_weights, load_weights
from hotlap.trees import TreeModel

CLIP = 8.0
"""Standardised features are cut off here: one outlier must not carry a linear model away."""
ALPHAS = tuple(10.0**power for power in range(-3, 6))
"""Penalties of the ridge, in rows."""
FILL_ROUNDS, FILL_ALPHA = 4, 100.0
"""How often missing targets are filled in with the ridge's own answers, and its penalty meanwhile."""
PARTS = 20
"""The blend's shares are multiples of one part."""
BLEND, RULE = "blend", "simple rule"
"""The blend, and its part that answers what the best simple rule of each target says."""
TREES = ("xgboost", "lightgbm")
NUMBERS = ("number", "whole number")
NAMED = 3
"""Columns that a line names before it counts the rest."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """A stretch of the rows of a table, with features and what simple rules say."""

    features: Numbers
    """float32, all rows of the table × features; nan where a value is missing."""
    rules: Numbers
    """What each rule says of each target: rules × all rows × targets; nan where it says nothing."""
    begin: int
    end: int

    def __len__(self) -> int:
        return self.end - self.begin

    @property
    def own(self) -> slice:
        """These rows of the table."""
        return slice(self.begin, self.end)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is read of a table, and what is made of it: in training and in each later answer alike."""

    time: str
    is_dated: bool
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    """The names of the answers."""
    own: tuple[tuple[int, int], ...]
    """Of each target that is an input some rows later: which input, and how many rows; empty for other targets."""
    season: int
    length: int
    lags: Lags

    @property
    def history(self) -> int:
        """Rows before a row that its answer needs."""
        back = [self.back(step) for _, step in self.own]
        return max(self.lags.history, self.lags.fill + max([self.length - 1, *back]))

    def back(self, step: int) -> int:
        """How many rows ago the season was where it will be so many rows later."""
        return self.season * math.ceil(step / self.season) - step if self.season else 0

    def values(self, table: Table) -> Numbers:
        """The inputs as rows × columns; nan where a value is missing or infinite."""
        return np.stack([numbers_of(table, name) for name in self.inputs], axis=1)

    def rows(self, values: Numbers, times: Numbers, begin: int, end: int) -> Rows:
        """The features of rows, and what simple rules say for them."""
        values = filled(values, self.lags.fill)
        features = self.lags.features(values, times, self.is_dated)
        rules = [self.moved(values, lambda step: 0)] if self.own else []
        if self.own and any(self.back(step) for _, step in self.own):
            rules.append(self.moved(values, self.back))
        shape = (0, len(values), len(self.targets))
        return Rows(features=features, rules=np.stack(rules) if rules else np.zeros(shape), begin=begin, end=end)

    def moved(self, values: Numbers, by: Callable[[int], int]) -> Numbers:
        """Of each target its input, so many rows before as `by` makes of its step: rows × targets."""
        found = np.empty((len(values), len(self.own)))
        for step in {step for _, step in self.own}:
            places = [at for at, (_, its) in enumerate(self.own) if its == step]
            found[:, places] = shifted(values[:, [self.own[at][0] for at in places]], by(step))
        return found

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "time": self.time,
            "is_dated": self.is_dated,
            "inputs": list(self.inputs),
            "targets": list(self.targets),
            "own": [list(pair) for pair in self.own],
            "season": self.season,
            "length": self.length,
            "lags": self.lags.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Setup:
        """The value that `to_dict` wrote; ValueError where it is none."""
        plain = {name: state[name] for name in ("time", "is_dated", "season", "length")}
        own = tuple((int(column), int(step)) for column, step in state["own"])
        if not all(0 <= column < len(state["inputs"]) and 1 <= step <= MOST_ROWS for column, step in own):
            raise ValueError(f"own={shown(state['own'])}")
        lags = Lags.from_dict(state["lags"])
        if not all(type(plain[name]) is int and 0 <= plain[name] <= MOST_ROWS for name in ("season", "length")):
            raise ValueError(f"season={shown(plain['season'])}, length={shown(plain['length'])}")
        return cls(**plain, own=own, inputs=tuple(state["inputs"]), targets=tuple(state["targets"]), lags=lags)


def numbers_of(table: Table, name: str) -> Numbers:
    """A column of numbers as float64; nan where a value is missing or infinite."""
    column = table[name]
    values = column.values.astype(np.float64)
    values[~column.present | np.isinf(values)] = np.nan
    return values


@dataclass(frozen=True, kw_only=True, eq=False)
class Scale:
    """How features and targets are standardised, by the rows that are trained on."""

    mean: Numbers
    deviation: Numbers
    level: Numbers
    """The mean of each target."""
    rule: Numbers
    """The rule that each target begins from; -1 for its mean. hotlap takes the one with the least squared error."""
    target_mean: Numbers
    target_deviation: Numbers
    """Of what the rule misses."""

    @classmethod
    def fit(cls, rows: Rows, y: Numbers) -> Scale:
        """The scale of these rows; `y` are the targets of all rows of the table."""
        x = rows.features[rows.own].astype(np.float64)
        level, spread = _moments(y[rows.own])
        missed = np.stack([spread**2, *(_mean_square(y[rows.own] - rule[rows.own]) for rule in rows.rules)])
        rule = missed.argmin(0) - 1
        mean, deviation = _moments(x)
        begun = cls(mean=mean, deviation=deviation, level=level, rule=rule, target_mean=level, target_deviation=level)
        target_mean, target_deviation = _moments(y[rows.own] - begun.base(rows))
        return cls(
            mean=mean,
            deviation=deviation,
            level=level,
            rule=rule,
            target_mean=target_mean,
            target_deviation=target_deviation,
        )

    def inputs(self, rows: Rows, before: int = 0) -> Tensor:
        """The standardised features of these rows, and of so many `before` them; 0 where a value is missing."""
        x = (rows.features[rows.begin - before : rows.end] - self.mean) / self.deviation
        return torch.from_numpy(np.nan_to_num(x.clip(-CLIP, CLIP)).astype(np.float32))

    def base(self, rows: Rows) -> Numbers:
        """What the rule of each target says; the target's mean where it says nothing."""
        found = np.tile(self.level, (len(rows), 1))
        for number, rule in enumerate(rows.rules):
            said = rule[rows.own]
            found = np.where((self.rule == number) & np.isfinite(said), said, found)
        return found

    def targets(self, rows: Rows, y: Numbers) -> Numbers:
        """The standardised targets of these rows, nan where unknown."""
        found: Numbers = (y[rows.own] - self.base(rows) - self.target_mean) / self.target_deviation
        return found

    def answers(self, rows: Rows, standardised: Numbers) -> Numbers:
        """The answers, in the units of the targets."""
        found: Numbers = self.base(rows) + self.target_mean + self.target_deviation * standardised
        return found

    def tensors(self) -> dict[str, Tensor]:
        """As a file of weights holds it."""
        return {f"scale.{field.name}": torch.from_numpy(getattr(self, field.name)) for field in fields(self)}

    @classmethod
    def from_tensors(cls, stored: Mapping[str, Tensor]) -> Scale:
        """The scale that `tensors` gave."""
        return cls(**{field.name: stored[f"scale.{field.name}"].numpy() for field in fields(cls)})


def _moments(values: Numbers) -> tuple[Numbers, Numbers]:
    """The mean and the standard deviation of what is known in each column; 1 in place of a deviation of 0."""
    known = np.isfinite(values)
    count = np.maximum(1, known.sum(0))
    mean = np.where(known, values, 0.0).sum(0) / count
    deviation = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(0) / count)
    return mean, np.where(deviation > 1e-12 * np.maximum(1.0, np.abs(mean)), deviation, 1.0)


def _mean_square(values: Numbers) -> Numbers:
    """Of what is known in each column; infinite where nothing is."""
    known = np.isfinite(values)
    total = (np.where(known, values, 0.0) ** 2).sum(0)
    found: Numbers = np.divide(total, known.sum(0), out=np.full(values.shape[1], np.inf), where=known.any(0))
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Rows to train on, and later ones to answer."""

    train: Rows
    held: Rows
    scale: Scale

    @classmethod
    def of(cls, rows: Rows, y: Numbers, train: tuple[int, int], held: tuple[int, int]) -> Split:
        """The split of these rows, with the scale of those to train on."""
        ours, theirs = (replace(rows, begin=begin, end=end) for begin, end in (train, held))
        return cls(train=ours, held=theirs, scale=Scale.fit(ours, y))


# --- the ridge -----------------------------------------------------------------------------------------


class Ridge:
    """Linear models with a penalty on their weights, for all targets and penalties by one decomposition.

    Missing targets count as what the model itself answers for them.
    """

    def __init__(self, x: Numbers, z: Numbers) -> None:
        """`x` are standardised float32 rows × features, `z` standardised rows × targets."""
        is_wide = x.shape[1] > len(x)
        values, basis = np.linalg.eigh((x @ x.T if is_wide else x.T @ x).astype(np.float64))
        basis = basis.astype(np.float32)
        self._values = np.maximum(values, 0.0)[:, None]
        self._left = x.T @ basis if is_wide else basis
        right = basis.T if is_wide else (x @ basis).T
        self.rows = len(x)
        known = np.isfinite(z)
        full = np.where(known, z, 0.0)
        if not known.all():
            inside = x @ self._left
            for _ in range(FILL_ROUNDS):
                self._seen = right @ full
                full = np.where(known, z, inside @ self._inner(FILL_ALPHA))
        self._seen = right @ full

    def _inner(self, alpha: float) -> Numbers:
        """The weights in the basis of the decomposition."""
        found: Numbers = self._seen / (self._values + alpha * self.rows)
        return found

    def weights(self, alphas: Numbers) -> Numbers:
        """float32, features × targets; each target has its own penalty."""
        found: Numbers = self._left @ (self._seen / (self._values + alphas * self.rows))
        return found.astype(np.float32)

    def answers(self, x: Numbers) -> Numbers:
        """What the models of all `ALPHAS` answer: penalties × rows × targets."""
        inside = x @ self._left
        found: Numbers = np.stack([inside @ self._inner(alpha) for alpha in ALPHAS])
        return found


def best_alphas(missed: Numbers) -> Numbers:
    """The penalty of each target with the least squared error; `missed` are errors, penalties × rows × targets."""
    found: Numbers = np.asarray(ALPHAS)[np.stack([_mean_square(errors) for errors in missed]).argmin(0)]
    return found


# --- the network ---------------------------------------------------------------------------------------


class KnownError(nn.Module):
    """The mean squared error over the targets that are known."""

    def forward(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Sum and count; `target` holds the values, and 1 where a value is known, else 0."""
        values, known = target.unbind(1)
        return ((output - values) ** 2 * known).sum(), known.sum().long()


def with_known(z: Numbers, before: int) -> Tensor:
    """Targets as `KnownError` takes them, behind so many rows that have none."""
    known = np.isfinite(z)
    found = np.stack([np.where(known, z, 0.0), known], axis=1).astype(np.float32)
    return torch.from_numpy(np.concatenate([np.zeros((before, *found.shape[1:]), np.float32), found]))


# --- trees ---------------------------------------------------------------------------------------------


def telling_features(x: Numbers, z: Numbers, most: int) -> Numbers:
    """The numbers of the features that correlate most with the targets, by the mean of the squares."""
    if x.shape[1] <= most:
        return np.arange(x.shape[1])
    known = np.isfinite(z)
    tied = x.T @ np.where(known, z, 0.0).astype(np.float32)
    size = np.sqrt((x.astype(np.float64) ** 2).sum(0))[:, None]
    strength = np.square(np.divide(tied, size, out=np.zeros(tied.shape), where=size > 0)).mean(1)
    return np.sort(np.argsort(-strength, kind="stable")[:most])


# --- the blend -----------------------------------------------------------------------------------------


def blend_weights(errors: Sequence[Numbers]) -> Numbers:
    """Models × targets: of each target, the shares of the models whose mix has the least squared error.

    Shares are multiples of one twentieth, sum to 1, and may be all of one model: the mix is never worse than its best
    part. `errors` are of each model, rows × targets; what is nan does not count.
    """
    shares = np.asarray(list(_shares(len(errors), PARTS))) / PARTS
    each = np.stack([np.nan_to_num(missed) for missed in errors])
    together = np.einsum("mnt,knt->mkt", each, each, optimize=True).reshape(len(errors) ** 2, -1)
    pairs = (shares[:, :, None] * shares[:, None, :]).reshape(len(shares), -1)
    found: Numbers = shares[(pairs @ together).argmin(0)].T
    return found


def _shares(models: int, parts: int) -> list[tuple[int, ...]]:
    """All ways to give whole parts to models."""
    found = []
    for bars in combinations(range(parts + models - 1), models - 1):
        ends = (-1, *bars, parts + models - 1)
        found.append(tuple(ends[at + 1] - ends[at] - 1 for at in range(models)))
    return found


def mixed(answers: Mapping[str, Numbers], weights: Mapping[str, Any]) -> Numbers:
    """The sum of standardised answers of models, each by its shares of the targets."""
    return sum((weights[name] * answered for name, answered in answers.items()), np.zeros(()))


# --- the reader ----------------------------------------------------------------------------------------


class ForecastReader(Reader):
    """Rows of a table as the models take them: behind the last rows of the training where they follow these."""

    def __init__(
        self,
        setup: Setup,
        scale: Scale,
        width: int,
        values: Numbers | None = None,
        times: Numbers | None = None,
        *,
        widest: float = 0.0,
        members: Sequence[str] = (),
    ) -> None:
        self.setup, self.scale, self.width, self.targets = setup, scale, width, setup.targets
        self._values = np.zeros((0, len(setup.inputs))) if values is None else values
        self._times = np.zeros(0) if times is None else times
        """The last rows that were known in training."""
        self._widest = widest
        """The longest step in time there."""
        self.members = tuple(members)
        """What the blend is of, in the order of its shares."""

    def table(self, data: Path) -> Table:
        """A file with the times and all columns that were trained on."""
        table = read_table(data)
        lacking = [name for name in (self.setup.time, *self.setup.inputs) if name not in table]
        if lacking:
            raise DataError(f"{data} lacks {first_few(lacking)}, which the model reads; add what is missing")
        return table

    def state(self) -> dict[str, Any]:
        """All that makes the reader again, beside its tensors."""
        return {
            "setup": self.setup.to_dict(), "width": self.width, "widest": self._widest, "members": list(self.members)
        }  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The scale and the last rows."""
        last = {"tail.values": self._values, "tail.times": self._times}
        return {**self.scale.tensors(), **{name: torch.from_numpy(values.copy()) for name, values in last.items()}}

    def asked(self, table: Table, say: Say) -> Asked:
        """The rows that have enough before them, in the table or at the end of the training; a line counts others."""
        setup = self.setup
        times = times_of(table, setup.time)
        wrong = [name for name in setup.inputs if table[name].kind not in (*NUMBERS, "empty")]
        if wrong:
            raise DataError(f"{first_few(wrong)} in {table.path} must be numbers, as in training; correct them")
        if (table[setup.time].kind == "date") != setup.is_dated:
            raise DataError(f"the time {setup.time!r} of {table.path} is {table[setup.time].kind}, unlike in training")
        before = int((self._times < times[0]).sum())
        if before and times[0] - self._times[before - 1] > self._widest:
            before = 0
        values = np.concatenate([self._values[:before], setup.values(table)])
        begin = max(before, setup.history)
        if begin >= len(values):
            raise DataError(
                f"{table.path} has {len(table):,} rows that do not follow those trained on, and an answer needs the "
                f"{setup.history:,} rows before it; put these in front"
            )
        if begin > before:
            say(
                f"rows      {begin - before:,} of {len(table):,} have too little before them for an answer; put the "
                f"{setup.history:,} rows before the first one in front of them"
            )
        rows = setup.rows(values, np.concatenate([self._times[:before], times]), begin, len(values))
        return Asked(data=rows, rows=np.arange(begin - before, len(table)))

    def model(self, name: str) -> nn.Module:
        """The LSTM with random weights."""
        count = len(self.setup.inputs) + (6 if self.setup.is_dated else 0)
        return AttentiveLstm(count, len(self.targets), width=self.width)

    def windows(self, rows: Rows, target: Tensor | None = None) -> Windows:
        """Windows of the inputs that end in these rows; `target` is of the rows and those that the first one needs."""
        before = self.setup.length - 1
        count = len(self.setup.inputs) + (6 if self.setup.is_dated else 0)
        return Windows(self.scale.inputs(rows, before)[:, :count].contiguous(), self.setup.length, target=target)

    def load(self, name: str, folder: Path) -> Mixture:
        """The models of the blend that have a share of any target, or a model alone."""
        stored = load_weights(folder / MODEL)
        names = self.members if name == BLEND else (name,)
        shares = dict(zip(names, stored[BLEND].numpy(), strict=True)) if name == BLEND else {name: np.ones(1)}
        used = [part for part in names if part != RULE and shares[part].any()]
        parts = {part: self._part(part, folder, stored) for part in used}
        return Mixture(parts=parts, shares={part: shares[part] for part in used})

    def _part(self, name: str, folder: Path, stored: Mapping[str, Tensor]) -> Any:
        if name == "ridge":
            return stored["ridge"]
        if name in TREES:
            return Trees(model=trees.load(folder / "models" / name), places=stored[f"{name}.features"].numpy())
        if name != "lstm":
            raise ValueError(f"members={shown(self.members)}")
        return build_with_weights(lambda: self.model(name), folder / "models" / name / MODEL).eval()

    def standardised(self, name: str, part: Any, rows: Rows, batch_size: int, device: str) -> Numbers:
        """What one model answers, in deviations of what the simple rule misses."""
        if name == "ridge":
            found: Numbers = self.scale.inputs(rows).numpy() @ part.numpy()
            return found
        if isinstance(part, Trees):
            return np.asarray(part.model.predict(rows.features[rows.own][:, part.places]))
        windows = self.windows(rows)
        return np.asarray(outputs_of(self.forward, part, windows, batch_size=batch_size, device=device).numpy())

    def answers(self, model: Mixture, data: Rows, *, batch_size: int, device: str) -> Numbers:
        """The answers of a model or of the blend, in the units of the targets."""
        each = {name: self.standardised(name, part, data, batch_size, device) for name, part in model.parts.items()}
        return self.scale.answers(data, mixed(each, model.shares))

    def truth(self, table: Table, rows: Numbers) -> Numbers | None:
        """The inputs so many rows later, or the columns of a table that has all targets."""
        if self.setup.own:
            found = self.setup.moved(self.setup.values(table), lambda step: -step)[rows]
        elif all(name in table and table[name].kind in NUMBERS for name in self.targets):
            found = np.stack([numbers_of(table, name)[rows] for name in self.targets], axis=1)
        else:
            return None
        return found if np.isfinite(found).any() else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trees:
    """Boosted trees, and the numbers of the features that they see."""

    model: TreeModel
    places: Numbers
