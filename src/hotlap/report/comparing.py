"""Which differences between runs are real, and which are noise.

A run, or a group of runs of the same training with other seeds, stands beside others. Welch's t-test decides between
groups of two and more. Between single runs only intervals decide: that of the speed-up for the time of a step, and for
scores of classes that of the chance in which rows were held out. All else is left open.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from hotlap.core.chance import student_t
from hotlap.core.table import as_json as table_as_json
from hotlap.core.units import show_seconds
from hotlap.plots.trainings import NO_METRICS
from hotlap.report.document import Cell, Figure, Table, score
from hotlap.report.reading import RECIPE, SEARCH, RunFiles, listing, mapping, number, words
from hotlap.report.recipe_sections import LOWER, SCORES, judged
from hotlap.report.sections import best_record, best_trial, time_of
from hotlap.report.training_sections import ROUND, total_of
from hotlap.store.files import finite

REAL, NOISE, OPEN, SAME = "real", "noise", "open", "same"
CHANCE = 0.05
"""How often a difference that is none may be called real."""
DRAWS = 2000
"""Times that rows are drawn anew for the interval of a score."""
STEP, TIME = "time of a step", "time"
NO_SPREAD = "the runs of a group are equal, as those of one seed are: repeat them with other seeds"


@dataclass(frozen=True, kw_only=True)
class Value:
    """A figure of one run, with the interval in which it lies by chance, where that is known."""

    value: float
    low: float | None = None
    high: float | None = None
    why: str = ""
    """Where the interval comes from."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A figure of two groups of runs."""

    name: str
    first: str
    second: str
    """Names of the groups."""
    values: tuple[tuple[float, ...], tuple[float, ...]]
    verdict: str
    """`real`, `noise`, `open` where the files decide nothing, or `same`."""
    why: str

    @property
    def means(self) -> tuple[float, float]:
        """The mean of each group."""
        return statistics.fmean(self.values[0]), statistics.fmean(self.values[1])

    def to_dict(self) -> dict[str, Any]:
        """The difference as JSON holds it."""
        shown: dict[str, Any] = finite({**vars(self), "means": self.means})
        return shown


Group = tuple[str, Sequence[RunFiles]]


def compare(groups: Sequence[Group]) -> list[Difference]:
    """Every figure that two groups have, pair by pair."""
    found = []
    for (name, runs), (other, others) in combinations(groups, 2):
        ours, theirs = [figures_of(run) for run in runs], [figures_of(run) for run in others]
        for figure in ours[0]:
            if all(figure in one for one in (*ours, *theirs)):
                pair = [one[figure] for one in ours], [one[figure] for one in theirs]
                verdict, why = judge(*pair)
                if figure not in (STEP, TIME) and len({judged_on(run) for run in (*runs, *others)} - {""}) > 1:
                    verdict, why = OPEN, "judged on other data: these scores cannot be compared"
                values = tuple(value.value for value in pair[0]), tuple(value.value for value in pair[1])
                found.append(Difference(name=figure, first=name, second=other, values=values, verdict=verdict, why=why))
    return found


def judged_on(run: RunFiles) -> str:
    """What a run was judged on, as a text to compare; empty where its files do not say."""
    if run.kind == RECIPE:
        best = mapping(mapping(run.scores.get("models")).get(words(run.scores.get("best"))))
        named = [run.options.get(name) for name in ("recipe", "data", "target", "valid", "group", "valid_share")]
        return words([*named, best.get("rows")])
    identity = mapping(run.trainings[0].facts.get("identity")) if run.trainings else {}
    found = mapping(identity.get("data")).get("validation sha256") or identity.get("valid")
    return words(found) if found else ""


def judge(ours: Sequence[Value], theirs: Sequence[Value]) -> tuple[str, str]:
    """Whether two groups of values differ by more than chance, and why so."""
    first, second = [one.value for one in ours], [one.value for one in theirs]
    if not all(map(math.isfinite, (*first, *second))):
        return OPEN, "not finite in one of the runs"
    if set(first) == set(second) and len(set(first)) == 1:
        return SAME, "equal"
    if len(first) > 1 and len(second) > 1:
        return _welch(first, second)
    if len(first) == len(second) == 1:
        return _intervals(ours[0], theirs[0])
    many, alone = (first, second[0]) if len(first) > 1 else (second, first[0])
    return _one_of(many, alone)


def _welch(first: Sequence[float], second: Sequence[float]) -> tuple[str, str]:
    """Welch's t-test of two groups."""
    variances = [statistics.variance(group) / len(group) for group in (first, second)]
    error = math.sqrt(sum(variances))
    apart = statistics.fmean(second) - statistics.fmean(first)
    if error == 0:
        return OPEN, NO_SPREAD
    freedom = sum(variances) ** 2 / sum(
        part**2 / (len(group) - 1) for part, group in zip(variances, (first, second), strict=True)
    )
    half = student_t(max(1, int(freedom)), CHANCE) * error
    between = f"difference in [{apart - half:.3g}, {apart + half:.3g}]"
    return (REAL if abs(apart) > half else NOISE), f"{between} with 95 % by {len(first)} and {len(second)} runs"


def _one_of(many: Sequence[float], alone: float) -> tuple[str, str]:
    """Whether one run may belong to a group of others."""
    middle, spread, count = statistics.fmean(many), statistics.stdev(many), len(many)
    if count < 3:
        return OPEN, f"{count} runs are too few to judge one by; make one more"
    if spread == 0:
        return OPEN, NO_SPREAD
    half = student_t(count - 1, CHANCE) * spread * math.sqrt(1 + 1 / count)
    within = f"[{middle - half:.4g}, {middle + half:.4g}]"
    is_real = abs(alone - middle) > half
    return (REAL if is_real else NOISE), f"one more run of the {count} lies in {within} with 95 %"


def _intervals(ours: Value, theirs: Value) -> tuple[str, str]:
    """Two single runs, by the interval that each has."""
    if ours.low is None or theirs.low is None or ours.high is None or theirs.high is None:
        return OPEN, "one run each has no spread: repeat both with other seeds"
    halves = [(one.high - one.low) / 2 for one in (ours, theirs) if one.high is not None and one.low is not None]
    is_real = abs(ours.value - theirs.value) > math.hypot(*halves)
    return (REAL if is_real else NOISE), ours.why or theirs.why


# --- figures -------------------------------------------------------------------------------------------


def figures_of(run: RunFiles) -> dict[str, Value]:
    """The figures of a run that others may have too."""
    found: dict[str, Value] = {}
    if run.kind == RECIPE:
        found |= _recipe(run)
    elif run.kind == SEARCH:
        value = number(best_trial(run).get("score"))
        found |= {} if value is None else {words(run.search.get("monitor")): Value(value=value)}
    elif run.trainings:
        record = best_record(run.trainings[0])
        names = [name for name in record if name not in (*NO_METRICS, ROUND)] + ["valid_loss", "train_loss"]
        held = {name: math.nan if record[name] is None else number(record[name]) for name in names if name in record}
        found |= {words(name): Value(value=value) for name, value in held.items() if value is not None}
        found |= _step(run)
    took = time_of(run)
    return found | ({TIME: Value(value=took)} if took is not None else {})


def _recipe(run: RunFiles) -> dict[str, Value]:
    """The scores of the best model; those of classes with the chance in which rows were held out."""
    by = judged(run.scores, run.options.get("recipe"))
    best = mapping(mapping(run.scores.get("models")).get(words(run.scores.get("best"))))
    found = {SCORES[name]: Value(value=value) for name in SCORES if (value := number(best.get(name))) is not None}
    for name, interval in _drawn(best.get("confusion")).items():
        if SCORES[name] in found:
            low, high = interval
            why = "by the chance in which rows were held out; that of training is not in it"
            found[SCORES[name]] = Value(value=found[SCORES[name]].value, low=low, high=high, why=why)
    if by is not None and by.words in found:  # the one that decides comes first
        found = {by.words: found[by.words], **found}
    return found


def _drawn(confusion: object) -> dict[str, tuple[float, float]]:
    """Intervals of accuracy and macro-F1, from the confusion of classes drawn anew with as many rows."""
    rows = [[number(one) for one in listing(row)] for row in listing(confusion)]
    flat = [one for row in rows for one in row]
    side = len(rows)
    if not 2 <= side <= 200 or len(flat) != side * side or any(one is None or one < 0 or one > 1e9 for one in flat):
        return {}
    counts = np.array(flat, dtype=np.float64)
    total = counts.sum()
    if total < 2:
        return {}
    draws = max(50, min(DRAWS, 4_000_000 // side**2))
    tables = np.random.default_rng(0).multinomial(int(total), counts / total, size=draws).reshape(draws, side, side)
    right = tables.diagonal(axis1=1, axis2=2)
    sums = tables.sum(1) + tables.sum(2)
    present = sums > 0
    f1 = np.divide(2 * right, sums, out=np.zeros(right.shape), where=present)
    accuracy, macro = right.sum(1) / total, f1.sum(1) / present.sum(1)
    return {
        name: (float(np.quantile(drawn, CHANCE / 2)), float(np.quantile(drawn, 1 - CHANCE / 2)))
        for name, drawn in (("accuracy", accuracy), ("macro_f1", macro))
    }


def _step(run: RunFiles) -> dict[str, Value]:
    """The time of a step at the end, with the interval that tuning found."""
    ledger = run.trainings[0].ledger
    if ledger is None:
        return {}
    total, baseline = total_of(ledger), mapping(table_as_json(ledger)["baseline"])
    before, now = number(baseline.get("step_s")), number(total.get("step_s"))
    low, high = number(total.get("low")), number(total.get("high"))
    if now is not None and before is not None and low and high:
        return {STEP: Value(value=now, low=before / high, high=before / low, why="by the laps of tuning")}
    value = now if now is not None else before
    return {} if value is None else {STEP: Value(value=value)}


# --- for people ----------------------------------------------------------------------------------------


def comparison_table(differences: Sequence[Difference]) -> Table:
    """The differences as a table."""
    rows: list[tuple[Cell, ...]] = []
    for one in differences:
        show = show_seconds if one.name in (STEP, TIME) else _plain
        first, second = one.means
        ratio = f" ({(second - first) / abs(first):+.1%})" if first else ""
        is_apart = one.verdict != SAME and math.isfinite(second - first)
        apart = f"{'+' if second > first else '-'}{show(abs(second - first))}{ratio}" if is_apart else ""
        cells = (one.name, one.first, Figure(first, show(first)), one.second, Figure(second, show(second)))
        verdict = f"{one.verdict}{_better(one.name, first, second)}" if one.verdict == REAL else one.verdict
        rows.append((*cells, Figure(second - first, apart), verdict, one.why))
    head = ("figure", "run", "", "run", "", "difference", "verdict", "why")
    return Table(title="Differences", head=head, rows=rows)


def _plain(value: float) -> str:
    return score(value).words


HIGHER = ("accuracy", "f1", "auc", "precision", "recall", "rank")
"""Parts of names of which more is better."""


def _better(name: str, first: float, second: float) -> str:
    """Whether the second of two figures is the better one; empty for figures that hotlap does not know."""
    plain, known = {shown: score for score, shown in SCORES.items()}.get(name, name).lower(), name.lower()
    lower = name in (STEP, TIME) or plain in LOWER or any(part in known for part in ("loss", "rmse", "mae", "error"))
    if not lower and not any(part in plain for part in HIGHER):
        return ""
    return ", better" if (second < first) == lower else ", worse"
