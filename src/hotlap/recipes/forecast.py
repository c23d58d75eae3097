"""The recipe `forecast`: a wide table ordered in time → many targets, by ridge, LSTM, boosted trees and their blend.

Each model learns on stretches that walk forward; its answers for the next stretch (out of fold) decide penalties,
epochs, rounds and the blend. Then it learns on all rows before those held out, which judge it once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError, JobError, MachineError, did_you_mean, first_few, install, shown
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.fitting.run import FinishedRun, Run
from hotlap.recipes import forecast_models
from hotlap.recipes.boosted_trees import missing_line, settings_of, train_trees
from hotlap.recipes.forecast_models import (
    BLEND,
    NAMED,
    NUMBERS,
    RULE,
    TREES,
    ForecastReader,
    KnownError,
    Ridge,
    Scale,
    Setup,
    Split,
    best_alphas,
    blend_weights,
    mixed,
    numbers_of,
    telling_features,
    with_known,
)
from hotlap.recipes.lag_features import MOST_ROWS, Lags, gap_line, shifted, time_column, times_of
from hotlap.recipes.options import Options, below_one, is_file, option, outside
from hotlap.recipes.profiles import network_s, trees_s
from hotlap.recipes.recipe import Numbers, OwnCandidate, Prepared, Trained, Trainer
from hotlap.recipes.tables import Table, read_table
from hotlap.recipes.tabular import TabularRecipe, refuse, refuse_pictures
from hotlap.store.cache import Cache, key_of
from hotlap.store.weights import MODEL, load_weights
from hotlap.trees import TreeJob, TreeRun

Fit = Callable[[Split, Path, float, int | None], tuple[FinishedRun, Numbers]]
"""Trains a part in a folder and a share of the time, for so many rounds or epochs; the run and its answers."""

PARAMETERS = {
    "xgboost": {"max_depth": 3, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 0.5, "min_child_weight": 5},
    "lightgbm": {
        "max_depth": 3, "num_leaves": 8, "learning_rate": 0.05, "bagging_fraction": 0.8, "bagging_freq": 1,
        "feature_fraction": 0.5, "min_data_in_leaf": 5,
    },
}  # fmt: skip
"""Of boosted trees, by their libraries."""
TREE_PATIENCE = 10
"""Rounds without improvement after which the trees of a target stop."""
MODELS = ("ridge", *TREES, "lstm")
LEAST = 20
"""Least rows that a fold trains on."""


@dataclass(frozen=True, kw_only=True)
class ForecastOptions(Options):
    """The options of the recipe."""

    target: str = option("", "one column to forecast; --targets names several")
    targets: tuple[str, ...] = option((), "columns to forecast: names, patterns as target_*, or a file with the times")
    time: str = option("", "the column that orders the rows; the default is the only one of dates")
    ahead: tuple[str, ...] = option((), "how many rows later targets are: 24, 1-24 or 1,6; 0: a row holds its own")
    gap: int = option(0, "rows left out before those held out; at least as many as are looked ahead")
    season: int = option(0, "rows in a season, such as 24 for hours; 0: none", most=MOST_ROWS // 2)
    lags: tuple[str, ...] = option(("1", "2", "3"), "rows before, whose values are features; the season is added")
    windows: tuple[str, ...] = option(("5", "20"), "rows of rolling means and deviations; the season is added")
    fill: int = option(5, "rows for which a missing value is the last one known", most=MOST_ROWS)
    length: int = option(20, "rows in a window of the LSTM", most=MOST_ROWS)
    width: int = option(64, "width of the LSTM", most=4096)
    rounds: int = option(100, "most rounds of boosted trees for each target", most=100_000)
    tree_features: int = option(100, "features that trees see: those that correlate most with the targets")
    models: tuple[str, ...] = option(MODELS, "which to train and blend")
    folds: int = option(3, "walk forward: times to train on what came before and answer what comes next", most=100)
    group: str = option("", "not for a forecast, of which the last part is held out")
    valid: str = option("", "not for a forecast, of which the last part is held out")

    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"models": ("ridge", "lightgbm"), "rounds": 50, "folds": 2},
        "best": {"rounds": 300, "folds": 5, "patience": 6},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = below_one(self, "length", "width", "folds", "rounds", "tree_features")
        wrong += outside(self, gap=(0, MOST_ROWS), season=(0, MOST_ROWS // 2), fill=(0, MOST_ROWS))
        for name in ("group", "valid", "onnx"):
            if value := getattr(self, name):
                wrong.append(f"{name}={shown(value)} is not for a forecast; leave it out")
        for name, least in (("lags", 1), ("windows", 2)):
            for word in getattr(self, name):
                if not word.isdecimal() or not least <= int(word) <= MOST_ROWS:
                    wrong.append(f"{name}={shown(word)} must be whole numbers from {least} to {MOST_ROWS:,}")
        for word in self.ahead:
            if not steps_of(word):
                wrong.append(f"ahead={shown(word)} must be a number of rows, as 24, or a range of them, as 1-24")
        if 0 in self.steps and len(self.steps) > 1:
            wrong.append(
                f"ahead={','.join(self.ahead)} has 0, which means that rows hold their own targets, and others"
            )
        wrong += [
            f"no model is called {shown(name)}{did_you_mean(name, MODELS)}"
            for name in self.models
            if name not in MODELS
        ]
        if not self.models:
            wrong.append(f"models is empty; name some of {', '.join(MODELS)}")
        if wrong:
            raise JobError(wrong)

    @property
    def steps(self) -> tuple[int, ...]:
        """How many rows later targets are, rising."""
        return tuple(sorted({step for word in self.ahead for step in steps_of(word)}))

    @property
    def chosen(self) -> Lags:
        """The features to make."""
        season = [self.season] if self.season > 1 else []
        lags, windows = (sorted({*map(int, words), *season}) for words in (self.lags, self.windows))
        return Lags(lags=tuple(lags), windows=tuple(windows), fill=self.fill)


def steps_of(word: str) -> range:
    """The rows of `24` or `1-24`; empty where it is neither."""
    first, dash, last = word.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) > MOST_ROWS:
        return range(0)
    return range(int(first), int(last or first) + 1)


class ForecastRecipe(TabularRecipe):
    """Many targets of a wide table."""

    name = "forecast"
    summary = "many targets of a wide table ordered in time: ridge, LSTM, boosted trees, and their blend"
    expects = "a column of times, rising, and columns of numbers; --targets and --ahead say what to forecast"
    options_type = ForecastOptions

    options: ForecastOptions

    def look(self) -> None:
        """Read the table, find times, inputs and targets, and show what is missing."""
        options = self.options
        self.table = read_table(Path(options.data))
        refuse_pictures(self.table)
        self.say(f"data      {options.data}: {len(self.table):,} rows × {len(self.table.columns):,} columns")
        for note in self.table.notes:
            self.say(f"          note: {note}")
        self.time = time_column(self.table, options.time)
        self.times = times_of(self.table, self.time)
        ends = self.table[self.time].rows(np.array([0, -1])).texts()
        self.say(f"time      {self.time}, from {ends[0]} to {ends[1]}")
        if gaps := gap_line(self.table, self.time, self.times):
            self.say(f"          {gaps}")
        wanted, known = self._wanted()
        self.setup = self._setup(wanted, known)
        self.values = self.setup.values(self.table)
        for line in _missing_lines(self.setup.inputs, self.values, options.fill):
            self.say(line)
        self.y = self.setup.moved(self.values, lambda step: -step) if self.setup.own else self._aligned(wanted, known)

    def _wanted(self) -> tuple[list[str], Table]:
        """The columns to forecast, and the table that holds them."""
        options = self.options
        words = [*options.targets, *([options.target] if options.target else [])]
        if not words:
            raise DataError(f"say which columns of {options.data} to forecast: --targets NAMES, PATTERN or FILE")
        if len(words) == 1 and words[0] not in self.table and is_file(words[0]):
            other = read_table(Path(words[0]))
            if self.time not in other:
                raise DataError(f"{words[0]} has no column {self.time!r}, which says which row a target is of; add it")
            return [name for name in other.columns if name != self.time], other
        found: dict[str, None] = {}
        for word in words:
            names = [word] if word in self.table else [name for name in self.table.columns if fnmatchcase(name, word)]
            if not names:
                near = did_you_mean(word, self.table.columns)
                raise DataError(f"--targets {shown(word)} matches no column of {options.data}, and is no file{near}")
            found |= dict.fromkeys(names)
        found.pop(self.time, None)
        return list(found), self.table

    def _setup(self, wanted: list[str], known: Table) -> Setup:
        """Inputs, and targets by name; refused where a target holds no numbers."""
        options, is_apart = self.options, known is not self.table
        if not options.steps and not is_apart:
            raise DataError(
                f"say with --ahead how many rows later {first_few(wanted)} are to be forecast; "
                "0: each row holds its own targets, which are then no features"
            )
        steps = options.steps or (0,)
        wrong = []
        for name in wanted:
            kind = known[name].kind
            if kind == "empty":
                wrong.append(f"the target {name!r} has no values; leave it out")
            elif kind not in NUMBERS:
                wrong.append(f"the target {name!r} is {kind} in {known.path}; name columns of numbers")
        refuse(wrong[:NAMED] + ([f"and {len(wrong) - NAMED:,} more such targets"] if len(wrong) > NAMED else []))
        is_own = not is_apart and steps != (0,)
        rest = [name for name in self.table.columns if name != self.time and (is_own or name not in wanted)]
        inputs = [name for name in rest if self.table[name].kind in NUMBERS]
        if unread := [name for name in rest if name not in inputs]:
            self.say(f"note      not read, since they hold no numbers: {first_few(unread)}")
        if not inputs:
            raise DataError(f"{options.data} has no columns of numbers to forecast from, beside {self.time}")
        names = [f"{name}+{step}" if len(steps) > 1 else name for step in steps for name in wanted]
        what = f"{', '.join(options.ahead)} rows ahead" if steps != (0,) else "each of its own row"
        self.say(f"targets   {len(names):,}: {first_few(wanted)}, {what}; from {len(inputs):,} columns")
        return Setup(
            time=self.time,
            is_dated=self.table[self.time].kind == "date",
            inputs=tuple(inputs),
            targets=tuple(names),
            own=tuple((inputs.index(name), step) for step in steps for name in wanted) if is_own else (),
            season=options.season,
            length=options.length,
            lags=options.chosen,
        )

    def _aligned(self, wanted: list[str], known: Table) -> Numbers:
        """The targets of a file of their own, or those that each row holds itself: rows × targets."""
        values = np.stack([numbers_of(known, name) for name in wanted], axis=1)
        if known is not self.table:
            theirs = times_of(known, self.time)
            places = np.searchsorted(theirs, self.times).clip(0, len(theirs) - 1)
            is_there = theirs[places] == self.times
            if not is_there.any():
                raise DataError(f"no time of {known.path} is a time of {self.options.data}; give targets of its rows")
            values = np.where(is_there[:, None], values[places], np.nan)
        return np.concatenate([shifted(values, -step) for step in self.options.steps or (0,)], axis=1)

    # the splits

    def split(self) -> None:
        """Hold out the last rows, behind a gap, and lay out the folds before them."""
        options, setup = self.options, self.setup
        known = np.flatnonzero(np.isfinite(self.y).any(1))
        begin, end = max(setup.history, int(known[0]) if len(known) else 0), int(known[-1]) + 1 if len(known) else 0
        gap = max(options.gap, *(options.steps or (0,)), 0)
        cut = begin + round((end - begin) * (1 - options.valid_share))
        last = cut - gap
        part = (last - begin) // (options.folds + 1)
        if part < LEAST + gap or end - cut < 2:
            train = (LEAST + gap + 1) * (options.folds + 1) + gap
            needed = setup.history + math.ceil(train / (1 - options.valid_share))
            raise DataError(
                f"{options.data} has {len(self.table):,} rows, and about {needed:,} are needed: {setup.history:,} "
                f"before the first answer, and {options.folds} folds with a gap of {gap:,}; give more rows, or fewer "
                "--folds"
            )
        rows = setup.rows(self.values, self.times, begin, end)
        self._refuse_unknown(begin, last)
        count = rows.features.shape[1]
        self.say(f"features  {count:,} of each row, which look back over {setup.history:,} rows and never ahead")
        edges = [last - part * at for at in range(options.folds, -1, -1)]
        self.parts = [Split.of(rows, self.y, (begin, start - gap), (start, stop)) for start, stop in pairwise(edges)]
        self.whole = Split.of(rows, self.y, (begin, last), (cut, end))
        what = f"{last - begin:,} rows to train on, in {options.folds + 1} stretches; {end - cut:,} later ones held out"
        self.say(f"split     {what}, behind a gap of {gap:,}")

    def _refuse_unknown(self, begin: int, end: int) -> None:
        """Refuse targets of which nothing is known in the rows to train on."""
        unknown = np.flatnonzero(~np.isfinite(self.y[begin:end]).any(0))
        names = [self.setup.targets[at] for at in unknown]
        if names:
            raise DataError(f"nothing is known of {first_few(names)} in the rows to train on; leave such targets out")

    @cached_property
    def missed(self) -> dict[str, Numbers]:
        """Out-of-fold errors of what was trained so far, rows × targets, beginning with the simple rule."""
        return {RULE: np.concatenate([self._errors(part, np.zeros(1)) for part in self.parts])}

    def _errors(self, part: Split, standardised: Numbers) -> Numbers:
        """Errors in the units of the targets; nan where the truth is unknown."""
        found: Numbers = (standardised - part.scale.targets(part.held, self.y)) * part.scale.target_deviation
        return found

    # the models

    def prepared(self) -> Prepared:
        """All models train themselves; the blend comes last."""
        rows, last = self.whole.held, len(self.times) - self.setup.history
        self.reader = ForecastReader(
            self.setup,
            self.whole.scale,
            self.options.width,
            self.values[last:],
            self.times[last:],
            widest=float(np.diff(self.times).max()),
        )
        self.standardised: dict[str, Numbers] = {}
        self.kept: dict[str, dict[str, Tensor]] = {}
        trained = {"ridge": self.train_ridge, "lstm": self.train_lstm}
        trained |= {name: partial(self.train_trees, name) for name in TREES}
        expected = {name: partial(self._expected_s, name) for name in ("lstm", *TREES)}
        own = [
            OwnCandidate(name=name, train=trained[name], expected_s=expected.get(name)) for name in self._installed()
        ]
        return Prepared(
            reader=self.reader,
            candidates=(),
            own=[*own, OwnCandidate(name=BLEND, train=self.train_blend, is_quick=True)],
            target_name="",
            held_out=rows,
            target=self.y[rows.own],
            shown=lambda at: f"the row of {self.table[self.time].rows(np.array([rows.begin + at])).texts()[0]}",
            baselines=self.baselines,
            advice="give more rows, or other --lags, --windows and --season",
        )

    def trained(
        self,
        name: str,
        outside: Sequence[Numbers],
        held: Numbers,
        *,
        weights: dict[str, Tensor],
        **more: Any,
    ) -> Trained:
        """A model with its standardised answers, out of fold and for the held-out rows, kept for the blend."""
        self.missed[name] = np.concatenate(
            [self._errors(part, answered) for part, answered in zip(self.parts, outside, strict=True)]
        )
        self.standardised[name], self.kept[name] = held, weights
        return Trained(
            weights={**self.reader.tensors(), **weights},
            answers=self.whole.scale.answers(self.whole.held, held),
            **more,
        )

    def train_ridge(self, trainer: Trainer) -> Trained:
        """Of each target the penalty that was best out of fold, then the ridge of all rows; kept in the cache."""
        began = time.perf_counter()
        cache, was_made = Cache(), False
        bounds = [
            (part.train.begin, part.train.end, part.held.begin, part.held.end) for part in (*self.parts, self.whole)
        ]
        rows = self.whole.train
        key = key_of("ridge", rows.features, rows.rules, self.y, bounds, forecast_models)

        def make() -> tuple[dict[str, Numbers], Any]:
            nonlocal was_made
            was_made = True
            outside, missed = [], []
            for part in self.parts:
                x, held = (part.scale.inputs(rows).numpy() for rows in (part.train, part.held))
                outside.append(Ridge(x, part.scale.targets(part.train, self.y)).answers(held))
                missed.append(np.stack([self._errors(part, answered) for answered in outside[-1]]))
            alphas = best_alphas(np.concatenate(missed, axis=1))
            places = np.searchsorted(forecast_models.ALPHAS, alphas)
            ridge = Ridge(self.whole.scale.inputs(rows).numpy(), self.whole.scale.targets(rows, self.y))
            found = {
                f"fold{at}": np.take_along_axis(answered, places[None, None], 0)[0]
                for at, answered in enumerate(outside)
            }
            return {**found, "ridge": ridge.weights(alphas)}, time.perf_counter() - began

        if not trainer.reuse:
            cache.drop("ridge", key)
        tensors, took_s = cache.get_or_make("ridge", key, make)
        weights = torch.as_tensor(tensors["ridge"])
        outside = [np.asarray(tensors[f"fold{at}"]) for at in range(len(self.parts))]
        held = self.reader.standardised("ridge", weights, self.whole.held, 1, "cpu")
        return self.trained(
            "ridge", outside, held, weights={"ridge": weights}, train_s=float(took_s), was_kept=not was_made
        )

    def _installed(self) -> list[str]:
        """The models that the options name, without those whose library is missing."""
        names = list(dict.fromkeys(self.options.models))
        lacking = {name: line for name in names if name in TREES and (line := missing_line(name)) is not None}
        for line in lacking.values():
            self.say(line)
        if list(lacking) == names:
            raise MachineError(
                f"{' and '.join(lacking)} is not installed: {install('[trees]')}, or name other --models"
            )
        return [name for name in names if name not in lacking]

    def train_in_folds(self, name: str, trainer: Trainer, fit: Fit, words: str, **more: Any) -> Trained:
        """Train on each fold, then on all rows for as long as was best in the folds, by the median."""
        folder, unit = trainer.folder / "folds", words.partition("s,")[0]
        found = [
            fit(part, folder / f"{name} {number}", self._share(number), None)
            for number, part in enumerate(self.parts, 1)
        ]
        best = np.concatenate([np.ravel(run.best[unit]) for run, _ in found])
        length = max(1, round(float(np.median(best))))
        self.say(f"{name:<9} {length} {words} in {len(found)} folds")
        found.append(fit(self.whole, trainer.folder / "models" / name, 1.0, length))
        runs, answers = zip(*found, strict=True)
        return self.trained(
            name,
            answers[:-1],
            answers[-1],
            train_s=sum(run.train_s for run in runs),
            was_kept=all("cache" in run.stopped for run in runs),
            **more,
        )

    def train_trees(self, name: str, trainer: Trainer) -> Trained:
        """Trees for each target; on all rows as many rounds as were best out of fold, by the median over targets."""

        def fit(part: Split, out: Path, share: float, rounds: int | None) -> tuple[TreeRun, Numbers]:
            places = self.tree_places(part)
            run = train_trees(self.tree_job(name, part, places, rounds), out, trainer, self.options, share=share)
            if rounds is None:
                how = "trained before, which saved" if "cache" in run.stopped else "in"
                self.say(f"{name:<9} fold {out.name.split()[1]} of {len(self.parts)} {how} {show_seconds(run.train_s)}")
            return run, run.predict(part.held.features[part.held.own][:, places])

        weights = {f"{name}.features": torch.from_numpy(self.tree_places(self.whole))}
        words = "rounds, as was best for half of the targets"
        return self.train_in_folds(name, trainer, fit, words, weights=weights)

    def tree_places(self, part: Split) -> Numbers:
        """The numbers of the features that the trees of a part see."""
        z = part.scale.targets(part.train, self.y)
        return telling_features(part.scale.inputs(part.train).numpy(), z, self.options.tree_features)

    def tree_job(self, name: str, part: Split, places: Numbers, rounds: int | None) -> TreeJob:
        """The trees of a part, of so many rounds; a target that is unknown counts as its simple rule.

        Without `rounds`, each target stops at its best round on what is held out there.
        """
        options = self.options
        (x, z), held = (
            (rows.features[rows.own][:, places], np.nan_to_num(part.scale.targets(rows, self.y)))
            for rows in (part.train, part.held)
        )
        settings = settings_of(options, name, PARAMETERS[name])
        if rounds is not None:
            return TreeJob(x, z, rounds=rounds, **settings)
        return TreeJob(x, z, valid=held, rounds=options.rounds, patience=TREE_PATIENCE, **settings)

    def _expected_s(self, name: str) -> float:
        """What the trainings of a model take at most, on all folds and then on all rows."""
        if name == "lstm":
            whole_s = network_s(self.lstm_job(self.whole))
        else:
            whole_s = trees_s(self.tree_job(name, self.whole, self.tree_places(self.whole), self.options.rounds))
        sizes = [len(part.train) for part in (*self.parts, self.whole)]
        return whole_s * sum(sizes) / sizes[-1]

    def _share(self, number: int) -> float:
        """The share of a fold, from 1 on, in the rows that this one and all later trainings learn from."""
        sizes = [len(part.train) for part in (*self.parts, self.whole)][number - 1 :]
        return sizes[0] / sum(sizes)

    def train_lstm(self, trainer: Trainer) -> Trained:
        """One LSTM for all targets: the epochs that were best out of fold, then as many on all rows."""
        options, history = self.options, list[dict[str, Any]]()

        def fit(part: Split, out: Path, share: float, epochs: int | None) -> tuple[Run, Numbers]:
            job = self.lstm_job(part)
            if epochs is not None:
                job = replace(job, epochs=epochs, patience=None)
            run = trainer.fit(job, out, quiet=epochs is None, share=share)
            history[:] = run.history
            reader = ForecastReader(self.setup, part.scale, options.width)
            size, device = options.judged_at_once, options.device
            return run, reader.standardised("lstm", run.model, part.held, size, device)

        return self.train_in_folds("lstm", trainer, fit, "epochs, as was best", weights={}, history=history)

    def lstm_job(self, part: Split) -> Job:
        """The training on a part, judged on what is held out there."""
        torch.manual_seed(self.options.seed)
        reader = ForecastReader(self.setup, part.scale, self.options.width)
        before = self.setup.length - 1
        data, held = (
            reader.windows(rows, with_known(part.scale.targets(rows, self.y), before))
            for rows in (part.train, part.held)
        )
        return self.adamw_job(
            reader.model("lstm"), data, held, lr=0.002, epochs=10, loss=KnownError(), metrics=(), monitor="loss"
        )

    def train_blend(self, trainer: Trainer) -> Trained:
        """The shares of models and simple rule with the least out-of-fold error, of each target."""
        began, rows = time.perf_counter(), self.whole.held
        names = (*self.standardised, RULE)
        shares = blend_weights([self.missed[name] for name in names])
        each = dict(zip(names, shares, strict=True))
        self.missed[BLEND] = mixed(self.missed, each)
        self.reader.members = names
        means = ", ".join(f"{name} {share:.2f}" for name, share in zip(names, shares.mean(1), strict=True))
        errors = {name: _relative(missed, self.missed[RULE]) for name, missed in self.missed.items()}
        figures = ", ".join(f"{name} {error:.3f}" for name, error in errors.items() if name != RULE)
        self.say(f"blend     mean shares over {shares.shape[1]:,} targets: {means}")
        self.say(f"          out-of-fold RMSE as a share of the simple rule's: {figures}")
        held = mixed({**self.standardised, RULE: np.zeros(1)}, each)
        by_target = {
            target: dict(zip(names, column, strict=True))
            for target, column in zip(self.setup.targets, shares.T.tolist(), strict=True)
        }
        weights = {name: tensor for kept in self.kept.values() for name, tensor in kept.items()}
        return Trained(
            weights={**self.reader.tensors(), **weights, BLEND: torch.from_numpy(shares.copy())},
            answers=self.whole.scale.answers(rows, held),
            train_s=time.perf_counter() - began,
            about={"out_of_fold": errors, "shares": by_target},
        )

    def baselines(self) -> Mapping[str, Numbers]:
        """The mean, the last value that is known, and the value one season before the target's time."""
        rows, setup, scale = self.whole.held, self.setup, self.whole.scale
        rules = {"the mean": np.tile(scale.level, (len(rows), 1))}
        known = [*rows.rules]
        if not setup.own:
            # What a target was is known only behind the gap.
            late = max(1, self.options.gap)
            known = [shifted(self.y, late), *([shifted(self.y, late + setup.back(late))] if setup.season else [])]
        for name, values in zip(("the last value", f"the value {setup.season} rows before"), known, strict=False):
            said = values[rows.own]
            rules[name] = np.where(np.isfinite(said), said, scale.level)
        return rules

    @classmethod
    def revive(cls, state: Mapping[str, Any], folder: Path) -> ForecastReader:
        """The reader of a finished run, with the scale and the last rows of the training."""
        stored, setup = load_weights(folder / MODEL), Setup.from_dict(state["setup"])
        scale = Scale.from_tensors(stored)
        values, times = stored["tail.values"].numpy(), stored["tail.times"].numpy()
        count = len(setup.lags.names(setup.inputs, setup.is_dated))
        if scale.mean.shape != (count,) or scale.level.shape != (len(setup.targets),):
            raise ValueError(f"the scale is of {len(scale.mean)} features and {len(scale.level)} targets")
        if values.shape != (len(times), len(setup.inputs)):
            raise ValueError(f"the last rows have the shape {values.shape}")
        return ForecastReader(
            setup, scale, state["width"], values, times, widest=state["widest"], members=state["members"]
        )


def _missing_lines(names: Sequence[str], values: Numbers, fill: int) -> list[str]:
    """How much is missing in the inputs, and where most."""
    missing = ~np.isfinite(values)
    if not missing.any():
        return []
    shares = missing.mean(0)
    worst = [f"{names[at]} ({shares[at]:.1%})" for at in np.argsort(-shares, kind="stable")[:NAMED] if shares[at]]
    columns = int((shares > 0).sum())
    what = f"{missing.mean():.2%} of the values, in {columns:,} of {len(names):,} columns; most in {', '.join(worst)}"
    return [f"missing   {what}; the last one known counts for {fill} rows"]


def _relative(missed: Numbers, rule: Numbers) -> float:
    """The mean over the targets of one RMSE as a share of another."""
    ours, theirs = (np.sqrt(np.nansum(errors**2, axis=0)) for errors in (missed, rule))
    return float(np.mean(ours[theirs > 0] / theirs[theirs > 0])) if (theirs > 0).any() else 1.0


RECIPE = ForecastRecipe
