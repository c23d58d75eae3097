"""The sections that only recipes and searches have: scores beside simple rules, mistakes, trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotlap.core.units import show_seconds
from hotlap.plots.axes import Line
from hotlap.plots.bars import Bar, bars_picture, diagonal_picture
from hotlap.plots.trainings import drawn_confusion, lines_picture
from hotlap.report.document import Block, Cell, Chart, Figure, Table, Text, count, score, seconds, share
from hotlap.report.reading import RunFiles, listing, mapping, number, words

SCORES = {
    "accuracy": "accuracy",
    "macro_f1": "macro-F1",
    "weighted_f1": "weighted F1",
    "roc_auc": "ROC AUC",
    "log_loss": "log loss",
    "smape": "SMAPE %",
    "mae": "MAE",
    "rmse": "RMSE",
    "rmsle": "RMSLE",
    "scaled_rmse": "RMSE/deviation",
    "rank": "rank correlation",
    "rank_score": "its mean/deviation",
}
"""The scores of a recipe, in the words of its tables."""
LOWER = ("log_loss", "smape", "mae", "rmse", "rmsle", "scaled_rmse")
"""Scores of which less is better."""
MOST_CLASSES, MOST_PAIRS, MOST_POINTS, MOST_TRIALS, MOST_TARGETS = 30, 50, 400, 500, 200


@dataclass(frozen=True)
class Judged:
    """What the models of a recipe are judged by."""

    name: str
    higher: bool

    @property
    def words(self) -> str:
        """As tables have it."""
        return SCORES.get(self.name, self.name)

    def best(self, reports: Mapping[str, Any]) -> tuple[str, float] | None:
        """The best of these reports, and its score."""
        known = [
            (name, found) for name in reports if (found := number(mapping(reports[name]).get(self.name))) is not None
        ]
        return (max if self.higher else min)(known, key=lambda one: one[1]) if known else None


def judged(scores: Mapping[str, Any], recipe: object = None) -> Judged | None:
    """What the scores of a recipe's run are judged by."""
    models = mapping(scores.get("models"))
    first = mapping(next(iter(models.values()), None))
    said = mapping(scores.get("judged_by"))
    if isinstance(said.get("name"), str) and said["name"] in first:
        return Judged(said["name"], said.get("higher") is True)
    # An earlier hotlap wrote no such line.
    order = ("macro_f1", "smape", "scaled_rmse", "rmse") if recipe == "price" else ("macro_f1", "scaled_rmse", "rmse")
    name = next((name for name in order if number(first.get(name)) is not None), None)
    return None if name is None else Judged(name, name not in LOWER)


# --- scores --------------------------------------------------------------------------------------------


def scores(run: RunFiles) -> list[Block]:
    """The models beside simple rules, and the folds."""
    by = judged(run.scores, run.options.get("recipe"))
    models, rules = mapping(run.scores.get("models")), mapping(run.scores.get("baselines"))
    if by is None or not models:
        return []
    best = words(run.scores.get("best"))
    names = [name for name in SCORES if any(name in mapping(said) for said in (*models.values(), *rules.values()))]
    order = sorted(
        [(name, mapping(said), True) for name, said in models.items()]
        + [(name, mapping(said), False) for name, said in rules.items()],
        key=lambda one: _rank(number(one[1].get(by.name)), by),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, said, is_model in order:
        trained = number(said.get("train_s"))
        took = seconds(trained) if is_model else Figure(None, "a simple rule")
        if said.get("from_cache") is True:
            took = Figure(0.0, f"from the cache, saved {show_seconds(trained or 0.0)}")
        rows.append((words(name), *(score(number(said.get(one))) for one in names), took))
    table = Table(
        title="Scores on the rows held out",
        head=("", *(SCORES[name] for name in names), "training"),
        rows=rows,
        marked=tuple(at for at, (name, _, is_model) in enumerate(order) if is_model and words(name) == best),
    )
    bars = [
        Bar(name=words(name), value=found, words=f"{found:.4g}", colour=0 if is_model else None)
        for name, said, is_model in order
        if (found := number(said.get(by.name))) is not None
    ]
    blocks: list[Block] = []
    if bars:
        held = number(mapping(models.get(best)).get("rows"))
        better = "more is better" if by.higher else "less is better"
        note = f"{by.words} on {held:,.0f} rows held out, {better}" if held else f"{by.words}, {better}"
        title = f"{by.words} beside simple rules"
        chart = Chart(
            title=title, picture=bars_picture(title, bars), table=table, note=f"{note}. Hatched: simple rules"
        )
        blocks.append(chart)
    blocks += _classes(mapping(models.get(best)))
    blocks += _folds(run, by)
    return blocks or [table]


def _rank(found: float | None, by: Judged) -> float:
    """The place of a score, the best first."""
    return 1e300 if found is None else -found if by.higher else found


def _classes(best: Mapping[str, Any]) -> list[Block]:
    """Precision, recall and F1 of each class."""
    each = {words(name): mapping(said) for name, said in list(mapping(best.get("classes")).items())[:MOST_TARGETS]}
    if not each:
        return []
    rows: list[tuple[Cell, ...]] = [
        (
            name,
            *(score(number(said.get(one))) for one in ("precision", "recall", "f1")),
            count(number(said.get("support"))),
        )
        for name, said in each.items()
    ]
    return [Table(title="Classes of the best model", head=("class", "precision", "recall", "F1", "rows"), rows=rows)]


def _folds(run: RunFiles, by: Judged) -> list[Block]:
    folds = {words(name): mapping(said) for name, said in mapping(run.scores.get("folds")).items()}
    known = [(name, found) for name, said in folds.items() if (found := number(said.get(by.name))) is not None]
    if not known:
        return []
    values = [found for _, found in known]
    spread = f"from {min(values):.4g} to {max(values):.4g}, {sum(values) / len(values):.4g} on average"
    table = Table(title="Folds", head=("fold", by.words), rows=[(name, score(found)) for name, found in known])
    return [Text(f"Over {len(known)} folds {by.words} is {spread}."), table]


# --- mistakes ------------------------------------------------------------------------------------------


def mistakes(run: RunFiles) -> list[Block]:
    """The confusion of classes or the errors of numbers, and the worst mistakes."""
    blocks: list[Block] = []
    best = mapping(mapping(run.scores.get("models")).get(words(run.scores.get("best"))))
    classes = [words(name) for name in mapping(best.get("classes"))]
    table = _square(best.get("confusion"), len(classes))
    if table is not None and classes:
        blocks.append(_confusion(table, classes))
    blocks += _errors(mapping(run.scores.get("answered")))
    blocks += _targets(best)
    return blocks + _worst(listing(run.scores.get("worst")))


def _confusion(table: Any, classes: Sequence[str]) -> Block:
    """A picture with its counts; of many classes the pairs that are confused most."""
    if len(classes) > MOST_CLASSES:
        wrong = table - np.diag(table.diagonal())
        order = np.argsort(-wrong, axis=None, kind="stable")[:MOST_PAIRS]
        pairs = [(int(at) // len(classes), int(at) % len(classes)) for at in order]
        worst = [(classes[a], classes[b], count(float(wrong[a, b]))) for a, b in pairs if wrong[a, b]]
        return Table(title="What is confused most", head=("true class", "answered", "rows"), rows=worst)
    rows: list[tuple[Cell, ...]] = [
        (name, *(count(float(value)) for value in row)) for name, row in zip(classes, table.tolist(), strict=True)
    ]
    shown = Table(title="Confusion of classes", head=("true class", *classes), rows=rows)
    return Chart(title="Confusion of classes", picture=drawn_confusion(table, classes), table=shown)


def _square(value: object, side: int) -> Any:
    """A table of counts as a file has it; None where it is none."""
    rows = listing(value)
    flat = [number(one) for row in rows for one in listing(row)]
    if (
        not side
        or len(rows) != side
        or len(flat) != side * side
        or any(one is None or not 0 <= one < 1e12 for one in flat)
    ):
        return None
    return np.array(flat, dtype=np.float64).reshape(side, side)


def _errors(answered: Mapping[str, Any]) -> list[Block]:
    """True numbers beside answers."""
    pairs = [
        (true, own)
        for one, other in zip(listing(answered.get("true")), listing(answered.get("answered")), strict=False)
        if (true := number(one)) is not None and (own := number(other)) is not None
    ][:MOST_POINTS]
    if len(pairs) < 2:
        return []
    of = number(answered.get("of")) or len(pairs)
    table = Table(
        title="True numbers and answers",
        head=("true", "answered", "off by"),
        rows=[(score(true), score(own), score(own - true)) for true, own in pairs],
    )
    picture = diagonal_picture("True numbers and answers", pairs, "true", "answered")
    note = f"{len(pairs):,} of {of:,.0f} held-out answers; on the line an answer is right"
    return [Chart(title="True numbers and answers", picture=picture, table=table, note=note)]


def _targets(best: Mapping[str, Any]) -> list[Block]:
    """The error of each target, where there are many."""
    each = {words(name): mapping(said) for name, said in list(mapping(best.get("targets")).items())[:MOST_TARGETS]}
    if not each:
        return []
    rows = [
        (name, score(number(said.get("mae"))), score(number(said.get("rmse"))), count(number(said.get("rows"))))
        for name, said in each.items()
    ]
    return [Table(title="Targets of the best model", head=("target", "MAE", "RMSE", "rows"), rows=rows)]


def _worst(worst: Sequence[Any]) -> list[Block]:
    """The samples that were furthest off."""
    found = [mapping(one) for one in worst[:50] if isinstance(one, dict)]
    if not found:
        return []
    head = {"sample": "sample", "target": "target", "true": "true", "answered": "answered"}
    head |= {"probability_of_the_true_one": "probability of the true one"}
    names = [name for name in head if any(name in one for one in found)]
    rows = [tuple(_said(one.get(name)) for name in names) for one in found]
    return [Table(title="Worst mistakes", head=tuple(head[name] for name in names), rows=rows)]


def _said(value: object) -> Cell:
    found = number(value)
    return score(found) if found is not None else words(value)


# --- searches ------------------------------------------------------------------------------------------


def search(found: Mapping[str, Any]) -> list[Block]:
    """Scores of the trials, what mattered, and all trials."""
    trials = [mapping(one) for one in listing(found.get("trials")) if isinstance(one, dict)]
    if not trials:
        return []
    monitor, higher = words(found.get("monitor")), found.get("higher_is_better") is True
    best = number(found.get("best"))
    table = _trials(trials, monitor, best)
    known = [
        (at, one)
        for trial in trials
        if (at := number(trial.get("number"))) is not None and (one := number(trial.get("score"))) is not None
    ]
    blocks: list[Block] = []
    if known:
        done = {number(trial.get("number")) for trial in trials if trial.get("state") == "complete"}
        line: list[tuple[float, float]] = []
        for at, one in known:
            if at in done:
                so_far = one if not line else (max if higher else min)(line[-1][1], one)
                line.append((at, so_far))
        lines = [Line(name="a trial", points=known, colour=1, is_dots=True)]
        lines += [Line(name="best so far", points=line, colour=0)] if line else []
        picture = lines_picture(f"{monitor} of each trial", lines, unit="trial")
        blocks.append(Chart(title=f"{monitor} of each trial", picture=picture, table=table))
    else:
        blocks.append(table)
    shares = {
        words(name): part for name, one in mapping(found.get("importance")).items() if (part := number(one)) is not None
    }
    if shares:
        order = sorted(shares.items(), key=lambda one: -one[1])
        bars = [Bar(name=name, value=part, words=f"{100 * part:.0f} %") for name, part in order]
        listed = Table(
            title="What mattered", head=("value", "share of the differences"), rows=[(n, share(p)) for n, p in order]
        )
        title = "How much each value explains"
        note = "Share of the differences in score, by Optuna's PED-ANOVA"
        blocks.append(Chart(title=title, picture=bars_picture(title, bars), table=listed, note=note))
    return blocks


def _trials(trials: Sequence[Mapping[str, Any]], monitor: str, best: float | None) -> Table:
    names = list(dict.fromkeys(name for trial in trials for name in mapping(trial.get("values"))))[:20]
    rows: list[tuple[Cell, ...]] = [
        (
            count(number(trial.get("number"))),
            words(trial.get("state")),
            score(number(trial.get("score"))),
            *(_said(mapping(trial.get("values")).get(name)) for name in names),
            seconds(number(trial.get("seconds"))),
            words(trial.get("why") or ""),
        )
        for trial in trials[:MOST_TRIALS]
    ]
    marked = tuple(
        at for at, trial in enumerate(trials[:MOST_TRIALS]) if best is not None and trial.get("number") == best
    )
    head = ("trial", "state", monitor, *map(words, names), "time", "ended")
    return Table(title="Trials", head=head, rows=rows, marked=marked)
