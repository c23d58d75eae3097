"""How good answers are: scores by scikit-learn, a threshold for a rare class, and what a file of answers holds.

Answers are probabilities of classes, judged by macro-F1, or numbers, judged by RMSE: one, or one for each of many
targets. Prices are judged by SMAPE. Classes are numbered from 0.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from hotlap.core.errors import library
from hotlap.core.terminal import clean
from hotlap.recipes.recipe import Numbers, Reader

RARE = 0.5
"""A class with less than this part of an equal share of the samples gets its own threshold."""
PARTS = 5
"""Parts of the rows: hotlap judges each part by the threshold of the others."""
SURE = 2.0
"""Standard errors above which a difference is more than chance."""
SHOWN = 400
"""Answers that a report shows beside the true numbers."""
MISTAKES = 10
"""Worst mistakes in a report."""
LONGEST_NAME = 30
"""Characters of a class name in a table."""
Report = dict[str, Any]
Columns = tuple[tuple[str, str], ...]
"""What a table of models shows: heads, and names of scores."""


class Threshold(NamedTuple):
    """The probability from which on the model answers a rare class."""

    rare: int
    least: float


# --- scores --------------------------------------------------------------------------------------------


def report(target: Numbers, predicted: Numbers, scores: Numbers | None, classes: Sequence[str]) -> Report:
    """All scores of predicted classes, as JSON holds them; with `scores` (probabilities) also log loss and ROC AUC.

    The macro mean is over the classes that occur in the target or the predictions. An undefined score is None.
    """
    metrics, labels = _metrics(), range(len(classes))
    table = metrics.confusion_matrix(target, predicted, labels=labels)
    each = metrics.precision_recall_fscore_support(target, predicted, labels=labels, zero_division=0)
    support = table.sum(1)
    macro, weighted = (_mean(each, weights) for weights in (table.sum(0) + support > 0, support))
    found: Report = {
        "rows": len(target),
        "accuracy": float(table.trace() / len(target)),
        "macro_f1": macro["f1"],
        "weighted_f1": weighted["f1"],
        "classes": {
            name: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for name, p, r, f, n in zip(classes, *each, strict=True)
        },
        "macro": macro,
        "weighted": weighted,
        "confusion": table.tolist(),
    }
    if scores is not None:
        auc = roc_auc(target, scores)
        found["roc_auc"] = auc if math.isfinite(auc) else None
        found["log_loss"] = float(metrics.log_loss(target, scores, labels=labels))
    return found


def number_report(target: Numbers, predicted: Numbers) -> Report:
    """All scores of predicted numbers, as JSON holds them.

    SMAPE is in per cent, from 0 to 200; a row of two zeros counts as 0. RMSLE is None where a number is -1 or less.
    """
    metrics, size = _metrics(), (np.abs(target) + np.abs(predicted)) / 2
    off, has_logs = np.abs(predicted - target), min(target.min(), predicted.min()) > -1
    return {
        "rows": len(target),
        "mae": float(metrics.mean_absolute_error(target, predicted)),
        "rmse": float(metrics.root_mean_squared_error(target, predicted)),
        "smape": 100 * float(np.divide(off, size, out=np.zeros(len(off)), where=size > 0).mean()),
        "rmsle": float(np.sqrt(np.mean((np.log1p(predicted) - np.log1p(target)) ** 2))) if has_logs else None,
    }


def target_report(target: Numbers, predicted: Numbers, names: Sequence[str]) -> Report:
    """All scores of rows × targets, as JSON holds them; true values that are nan do not count.

    MAE, RMSE, and RMSE as a share of the target's standard deviation (`scaled_rmse`), are means over the targets.
    `rank` is the mean over the rows of Spearman's correlation across the targets, `rank_score` that mean divided by the
    standard deviation over the rows. An undefined score is None.
    """
    off, known = predicted - target, np.isfinite(target).sum(0)
    mae, rmse = _column_means(np.abs(off)), np.sqrt(_column_means(off**2))
    spread = np.sqrt(_column_means((target - _column_means(target)) ** 2))
    scaled = np.divide(rmse, spread, out=np.full(len(rmse), np.nan), where=spread > 0)
    ranks = rank_correlations(target, predicted)
    ranks = ranks[np.isfinite(ranks)]
    found: Report = {"rows": int(np.isfinite(target).any(1).sum())}
    found |= {
        name: float(np.nanmean(values)) if np.isfinite(values).any() else None
        for name, values in (("mae", mae), ("rmse", rmse), ("scaled_rmse", scaled))
    }
    found["rank"] = float(ranks.mean()) if len(ranks) else None
    found["rank_score"] = float(ranks.mean() / ranks.std()) if len(ranks) > 1 and ranks.std() > 0 else None
    found["targets"] = {
        name: {"mae": float(mae[at]), "rmse": float(rmse[at]), "rows": int(known[at])} for at, name in enumerate(names)
    }
    return found


def rank_correlations(target: Numbers, predicted: Numbers) -> Numbers:
    """Spearman's correlation across the targets in each row; 0 where all predictions are equal.

    It is nan where fewer than two true values are known, or all of them are equal.
    """
    rankdata = library("scipy.stats", "a recipe", "[recipes]").rankdata
    known = np.isfinite(target) & np.isfinite(predicted)
    true, own = (rankdata(np.where(known, values, np.nan), axis=1, nan_policy="omit") for values in (target, predicted))
    count = np.maximum(1, known.sum(1, keepdims=True))
    true, own = (np.where(known, ranks - np.nansum(ranks, 1, keepdims=True) / count, 0.0) for ranks in (true, own))
    size = np.sqrt((true**2).sum(1) * (own**2).sum(1))
    found: Numbers = np.divide((true * own).sum(1), size, out=np.zeros(len(size)), where=size > 0)
    found[(true**2).sum(1) == 0] = np.nan
    return found


def _column_means(values: Numbers) -> Numbers:
    """The mean of what is known in each column; nan where nothing is."""
    known = np.isfinite(values)
    total = np.where(known, values, 0.0).sum(0)
    means: Numbers = np.divide(total, known.sum(0), out=np.full(values.shape[1], np.nan), where=known.any(0))
    return means


def roc_auc(target: Numbers, scores: Numbers) -> float:
    """ROC AUC of the second of two classes, or the mean over the classes that occur of one against the rest.

    `scores` has a column for each class, or is of the second of two alone. It is nan where all rows are of one class.
    """
    metrics, present = _metrics(), np.unique(target)
    if len(present) < 2:
        return math.nan
    if scores.ndim == 1:
        return float(metrics.roc_auc_score(target, scores))
    chosen = [1] if scores.shape[1] == 2 else present
    return float(np.mean([metrics.roc_auc_score(target == one, scores[:, one]) for one in chosen]))


def class_weights(target: Numbers, classes: int) -> Numbers:
    """Weights that make all classes count alike: rows / (classes × rows of the class); 0 for a class without rows."""
    counts = np.bincount(target, minlength=classes)
    present = counts > 0
    return np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)


def best_threshold(scores: Numbers, is_rare: Numbers) -> float:
    """The score from which on a row is best taken for the rare class: where its F1 is highest.

    It lies half way between two scores of these rows. Of equally good thresholds it is the highest.
    """
    values, place = np.unique(scores, return_inverse=True)
    # Of the rows at each score and above: how many are of the rare class, and how many there are.
    hits, taken = (
        np.append(np.bincount(place, weights=weights, minlength=len(values))[::-1].cumsum()[::-1], 0)
        for weights in (is_rare, np.ones(len(place)))
    )
    f1 = 2 * hits / np.maximum(1, taken + is_rare.sum())
    best = len(f1) - 1 - int(f1[::-1].argmax())
    if best == 0:
        return float(values[0])
    if best == len(values):
        return float(np.nextafter(values[-1], np.inf))
    below, above = values[best - 1], values[best]
    middle = below + (above - below) / 2
    return float(middle if middle > below else above)


def report_lines(found: Report) -> list[str]:
    """A report for people: a table of the classes, if there are any, and the scores of all rows in a line."""
    plain = {"accuracy": "accuracy", "macro_f1": "macro F1", "weighted_f1": "weighted F1", "roc_auc": "ROC AUC"}
    plain |= {
        "log_loss": "log loss",
        "mae": "MAE",
        "rmse": "RMSE",
        "smape": "SMAPE (%)",
        "rmsle": "RMSLE",
        "scaled_rmse": "RMSE/deviation",
    }
    plain |= {"rank": "rank correlation", "rank_score": "its mean/deviation over rows"}
    figures = [f"{words} {found[name]:.4g}" for name, words in plain.items() if found.get(name) is not None]
    last = f"{' · '.join(figures)} ({found['rows']:,} rows)"
    if "classes" not in found:
        return [last]
    rows = [*found["classes"].items(), ("macro mean", found["macro"]), ("weighted mean", found["weighted"])]
    labels = [_label(name) for name, _ in rows]
    width = max(map(len, labels))
    lines = [f"{'':<{width}}  precision  recall      F1     rows"]
    for label, (_, one) in zip(labels, rows, strict=True):
        row = f"{one['precision']:9.3f}  {one['recall']:6.3f}  {one['f1']:6.3f}  {one['support']:7,}"
        lines.append(f"{label:<{width}}  {row}")
    return [*lines, last]


def _mean(each: Sequence[Numbers], weights: Numbers) -> dict[str, Any]:
    means = {
        name: float(np.average(values, weights=weights))
        for name, values in zip(("precision", "recall", "f1"), each, strict=False)
    }
    return {**means, "support": int(each[3].sum())}


def _label(name: str) -> str:
    words = clean(name)
    return words if len(words) <= LONGEST_NAME else f"{words[: LONGEST_NAME - 2]} …"


def check_installed() -> None:
    """Raise MachineError where scikit-learn is missing, without the second that its import takes."""
    if importlib.util.find_spec("sklearn") is None:
        _metrics()


def _metrics() -> Any:
    return library("sklearn.metrics", "a recipe", "[recipes]")


# --- judges --------------------------------------------------------------------------------------------


def judge_of(classes: Sequence[str], targets: Sequence[str] = (), *, by_share: bool = False) -> Judge:
    """The judge of answers that are one of these classes, or numbers of these targets; without both, of one number."""
    if targets:
        return ByTarget(tuple(targets))
    if classes:
        return ByClass(tuple(classes))
    return ByShare() if by_share else ByNumber()


def judge_for(reader: Reader) -> Judge:
    """The judge of what a reader's models answer."""
    return judge_of(reader.classes, reader.targets, by_share=reader.by_share)


class ByClass:
    """Answers are probabilities of classes."""

    columns = (("accuracy", "accuracy"), ("macro-F1", "macro_f1"))
    judged_by, higher = "macro_f1", True
    """The score that decides, and whether more of it is better."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self._classes = classes

    def answers(self, outputs: Tensor) -> Numbers:
        """The probability of each class."""
        found: Numbers = outputs.double().softmax(1).numpy()
        return found

    def threshold(self, answers: Numbers, target: Numbers) -> Threshold | None:
        """From where on the rarest class is answered, if it is rare: others come as they are likely."""
        counts = np.bincount(target, minlength=answers.shape[1])
        # Fewer rows than there are parts are too few to say which threshold suits them.
        rare = int(np.where(counts >= PARTS, counts, len(target)).argmin())
        ours, theirs = counts[rare], len(target) - counts[rare]
        if not PARTS <= ours < RARE * len(target) / len(counts):
            return None
        # By chance alone a threshold that suits these rows would be found, too.
        spread = ((len(target) + 1) / (12 * ours * theirs)) ** 0.5
        if roc_auc(target == rare, answers[:, rare]) <= 0.5 + SURE * spread:
            return None
        found = Threshold(rare, _parting(answers, target, rare))
        plain, parted = (self.report(target, answers, one) for one in (None, found))
        return found if self.score(parted) > self.score(plain) else None

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores, those of the probabilities too; where there is a threshold, each row by that of others."""
        if threshold is None:
            return report(target, chosen(answers, None), answers, self._classes)
        found = report(target, parted_by_others(answers, target, threshold.rare), answers, self._classes)
        return {**found, "threshold": {"class": self._classes[threshold.rare], "least": threshold.least}}

    def new_report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores for rows that had no part in the training or the choice of the threshold."""
        return report(target, chosen(answers, threshold), answers, self._classes)

    def rule_report(self, target: Numbers, answers: Numbers) -> Report:
        """All scores of classes."""
        return report(target, answers, None, self._classes)

    def score(self, report: Report) -> float:
        """Macro-F1."""
        return float(report["macro_f1"])

    def may_be_chance(self, rules: Sequence[Report], rows: int) -> bool:
        """By accuracy, which is a share of rows."""
        right = [said["accuracy"] for said in rules]
        return bool(max(right) <= right[0] + SURE * (right[0] * (1 - right[0]) / rows) ** 0.5)

    def written(self, name: str, answers: Numbers, threshold: Threshold | None, *, all_of_it: bool) -> dict[str, Any]:
        """The class, and the probability of each where all of it is wanted."""
        words = np.asarray(self._classes, dtype=object)[chosen(answers, threshold)]
        columns: dict[str, Any] = {name: words.tolist()}
        if all_of_it:
            columns |= {f"{name}_{one}": answers[:, number].tolist() for number, one in enumerate(self._classes)}
        return columns

    def pairs(self, target: Numbers, answers: Numbers) -> dict[str, Any]:
        """Classes have none: their confusion says more."""
        return {}

    def worst(
        self, target: Numbers, answers: Numbers, threshold: Threshold | None, shown: Callable[[int], str]
    ) -> list[Mapping[str, Any]]:
        """The samples of which it was surest and wrong."""
        sure = answers[np.arange(len(answers)), target]
        answered = chosen(answers, threshold)
        wrong = np.flatnonzero(answered != target)
        return [
            {
                "sample": shown(int(at)),
                "true": self._classes[int(target[at])],
                "answered": self._classes[int(answered[at])],
                "probability_of_the_true_one": float(sure[at]),
            }
            for at in wrong[np.argsort(sure[wrong], kind="stable")][:MISTAKES]
        ]


def some_pairs(target: Numbers, answers: Numbers) -> dict[str, Any]:
    """True numbers beside answers, of rows that are spread evenly over all."""
    known = np.flatnonzero(np.isfinite(target) & np.isfinite(answers))
    rows = known[np.linspace(0, len(known) - 1, min(len(known), SHOWN)).round().astype(int)] if len(known) else known
    return {"of": len(known), "true": target[rows].tolist(), "answered": answers[rows].tolist()}


def chosen(answers: Numbers, threshold: Threshold | None) -> Numbers:
    """The class of each row: the likeliest; where there is a threshold, the rare one from it on, else one of others."""
    if threshold is None:
        likeliest: Numbers = answers.argmax(1)
        return likeliest
    is_rare = answers[:, threshold.rare] >= threshold.least
    others = answers.copy()
    others[:, threshold.rare] = -1
    return np.where(is_rare, threshold.rare, others.argmax(1))


def parted_by_others(answers: Numbers, target: Numbers, rare: int) -> Numbers:
    """The class of each row, by the threshold that suits the rows of all parts but its own: never by itself."""
    parts = np.empty(len(target), dtype=np.int64)
    for one in np.unique(target):  # as many of each class in each
        rows = np.flatnonzero(target == one)
        # Stretches: of two rows that follow each other, as windows of bars, one would tell the other's class.
        parts[rows] = np.arange(len(rows)) * PARTS // len(rows)
    found = np.empty_like(target)
    for part in range(PARTS):
        inside = parts == part
        least = _parting(answers[~inside], target[~inside], rare)
        found[inside] = chosen(answers[inside], Threshold(rare, least))
    return found


def _parting(answers: Numbers, target: Numbers, rare: int) -> float:
    return best_threshold(answers[:, rare], target == rare)


class ByNumber:
    """Answers are numbers."""

    columns: Columns = (("MAE", "mae"), ("RMSE", "rmse"))
    judged_by, higher = "rmse", False

    def answers(self, outputs: Tensor) -> Numbers:
        """The one number of each row."""
        found: Numbers = outputs.double().reshape(len(outputs)).numpy()
        return found

    def threshold(self, answers: Numbers, target: Numbers) -> None:
        """Numbers have none."""

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores of numbers."""
        return number_report(target, answers)

    def new_report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """The same."""
        return number_report(target, answers)

    def rule_report(self, target: Numbers, answers: Numbers) -> Report:
        """The same."""
        return number_report(target, answers)

    def score(self, report: Report) -> float:
        """The lower the root of the mean square, the better."""
        return -float(report["rmse"])

    def may_be_chance(self, rules: Sequence[Report], rows: int) -> bool:
        """Where even the mean, the simplest rule, is not beaten."""
        return True

    def written(self, name: str, answers: Numbers, threshold: Threshold | None, *, all_of_it: bool) -> dict[str, Any]:
        """The number."""
        return {name: answers.tolist()}

    def pairs(self, target: Numbers, answers: Numbers) -> dict[str, Any]:
        """True numbers beside answers."""
        return some_pairs(target, answers)

    def worst(
        self, target: Numbers, answers: Numbers, threshold: Threshold | None, shown: Callable[[int], str]
    ) -> list[Mapping[str, Any]]:
        """The samples whose answers are furthest off."""
        off = np.abs(answers - target)
        return [
            {"sample": shown(int(at)), "true": float(target[at]), "answered": float(answers[at])}
            for at in np.argsort(-off, kind="stable")[:MISTAKES]
        ]


class ByShare(ByNumber):
    """Answers are numbers, whose errors count as shares of their size."""

    columns = (("SMAPE %", "smape"), ("MAE", "mae"), ("RMSLE", "rmsle"))
    judged_by = "smape"

    def score(self, report: Report) -> float:
        """The lower SMAPE, the better."""
        return -float(report["smape"])


class ByTarget:
    """Answers are numbers, one for each of many targets; true values may be missing."""

    judged_by, higher = "scaled_rmse", False

    def __init__(self, targets: tuple[str, ...]) -> None:
        self._targets = targets
        ranks = (("rank", "rank"), ("rank/dev", "rank_score")) if len(targets) > 1 else ()
        self.columns = (*ranks, ("MAE", "mae"), ("RMSE", "rmse"), ("RMSE/dev", "scaled_rmse"))

    def answers(self, outputs: Tensor) -> Numbers:
        """The numbers of each row."""
        found: Numbers = outputs.double().numpy()
        return found

    def threshold(self, answers: Numbers, target: Numbers) -> None:
        """Numbers have none."""

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores of all targets."""
        return target_report(target, answers, self._targets)

    def new_report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """The same."""
        return target_report(target, answers, self._targets)

    def rule_report(self, target: Numbers, answers: Numbers) -> Report:
        """The same."""
        return target_report(target, answers, self._targets)

    def score(self, report: Report) -> float:
        """The lower the error as a share of each target's deviation, the better."""
        return -float(report["rmse"] if report["scaled_rmse"] is None else report["scaled_rmse"])

    def may_be_chance(self, rules: Sequence[Report], rows: int) -> bool:
        """Where even the mean, the simplest rule, is not beaten."""
        return True

    def written(self, name: str, answers: Numbers, threshold: Threshold | None, *, all_of_it: bool) -> dict[str, Any]:
        """A column for each target, whose name begins with `name`."""
        return {f"{name}{one}": answers[:, at].tolist() for at, one in enumerate(self._targets)}

    def pairs(self, target: Numbers, answers: Numbers) -> dict[str, Any]:
        """True numbers beside answers; of many targets they have no scale in common."""
        return some_pairs(target[:, 0], answers[:, 0]) if len(self._targets) == 1 else {}

    def worst(
        self, target: Numbers, answers: Numbers, threshold: Threshold | None, shown: Callable[[int], str]
    ) -> list[Mapping[str, Any]]:
        """The values that are furthest off, in deviations of their target."""
        spread = np.sqrt(_column_means((target - _column_means(target)) ** 2))
        off = np.nan_to_num(np.abs(answers - target) / np.where(spread > 0, spread, 1.0), nan=-1.0)
        found: list[Mapping[str, Any]] = []
        for place in np.argsort(-off, axis=None, kind="stable")[:MISTAKES]:
            row, at = divmod(int(place), len(self._targets))
            true, own = float(target[row, at]), float(answers[row, at])
            found.append({"sample": shown(row), "target": self._targets[at], "true": true, "answered": own})
        return found


Judge = ByClass | ByNumber | ByTarget
