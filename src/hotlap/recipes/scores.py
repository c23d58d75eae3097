"""How good predictions are: scores of classes and of numbers, defined as scikit-learn defines them.

Classes are whole numbers from 0 on. What is divided by nothing is 0, as the precision of a class that is never
predicted; a ROC AUC of one class alone is nan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hotlap.core.errors import DataError
from hotlap.core.terminal import clean

Array = np.ndarray[Any, Any]
CLASSES = "give a whole number from 0 on for the class of each row"


class PerClass(NamedTuple):
    """A value for each class."""

    precision: Array
    recall: Array
    f1: Array
    support: Array
    """Rows of the class."""


# --- classes -------------------------------------------------------------------------------------------


def confusion(target: Any, predicted: Any, classes: int | None = None) -> Array:
    """How many rows of each class (down) were predicted as each (across)."""
    target, predicted = _classes("target", target), _classes("predictions", predicted)
    _refuse_unequal(target, predicted)
    highest = int(max(target.max(), predicted.max()))
    side = highest + 1 if classes is None else classes
    if highest >= side:
        raise DataError(f"there is a class {highest} among {side} classes; they are counted from 0")
    counts = np.bincount(target * side + predicted, minlength=side * side)
    return counts.reshape(side, side)


def per_class(target: Any, predicted: Any, classes: int | None = None) -> PerClass:
    """Precision, recall, F1 and number of rows of each class."""
    return _per_class(confusion(target, predicted, classes))


def accuracy(target: Any, predicted: Any) -> float:
    """The share of rows that were predicted right."""
    table = confusion(target, predicted)
    return float(table.trace() / table.sum())


def macro_f1(target: Any, predicted: Any) -> float:
    """The mean of F1 over the classes that are there or were predicted."""
    return _macro(confusion(target, predicted)).f1


def weighted_f1(target: Any, predicted: Any) -> float:
    """The mean of F1 over classes, each as often as it is there."""
    return _weighted(confusion(target, predicted)).f1


def roc_auc(target: Any, scores: Any) -> float:
    """The chance that a row of a class is scored above one of another; half of it for equal scores.

    For two classes, scores of the second, or a column for each. For more, a column for each: the mean over
    classes of one against the rest. A class that no row has does not count.
    """
    target, scores = _classes("target", target), _numbers("scores", scores)
    _refuse_unequal(target, scores)
    if scores.ndim == 1 or scores.shape[1] == 2:
        return _auc(target == _second(target), scores if scores.ndim == 1 else scores[:, 1])
    _refuse_beyond(target, scores.shape[1])
    return float(np.mean([_auc(target == one, scores[:, one]) for one in np.unique(target)]))


def log_loss(target: Any, probabilities: Any) -> float:
    """The mean of −log of the probability that was given to the true class.

    For two classes, probabilities of the second, or a column for each. None is taken for less than the smallest
    step of its type, so that a wrong answer of full certainty is very bad and not infinite.
    """
    target, given = _classes("target", target), _numbers("probabilities", probabilities)
    _refuse_unequal(target, given)
    if given.ndim == 1:
        given = np.stack([1 - given, given], axis=1)
    _refuse_beyond(target, given.shape[1])
    least = float(np.finfo(given.dtype).eps)
    chosen = np.clip(given[np.arange(len(target)), target], least, 1 - least)
    return float(-np.log(chosen).mean())


def best_threshold(scores: Any, target: Any) -> float:
    """The score from which on a row is best taken for class 1 of two, so that F1 of the rarer class is highest.

    It lies half way between two scores that were seen. Of equally good ones it is the highest.
    """
    scores, target = _numbers("scores", scores).astype(np.float64), _classes("target", target)
    _refuse_unequal(target, scores)
    if scores.ndim != 1 or target.max() > 1:
        raise DataError(f"a threshold parts two classes, 0 and 1; there is class {int(target.max())}")
    values, place = np.unique(scores, return_inverse=True)
    # Of rows at each score and above, how many are of class 1, and how many there are.
    ones = np.bincount(place, weights=target, minlength=len(values))[::-1].cumsum()[::-1]
    rows = np.bincount(place, minlength=len(values))[::-1].cumsum()[::-1]
    ones, rows = np.append(ones, 0), np.append(rows, 0)
    rare = int(target.sum() * 2 <= len(target))
    hits = ones if rare else (len(target) - rows) - (ones[0] - ones)
    taken = rows if rare else len(target) - rows
    f1 = 2 * hits / np.maximum(1, taken + (target == rare).sum())
    best = len(f1) - 1 - int(f1[::-1].argmax())
    if best == 0:
        return float(values[0])
    if best == len(values):
        return float(np.nextafter(values[-1], np.inf))
    below, above = values[best - 1], values[best]
    middle = below + (above - below) / 2
    return float(middle if middle > below else above)


def class_weights(target: Any, classes: int | None = None) -> Array:
    """Weights with which all classes count alike: rows / (classes × rows of the class); 0 for one that has no rows."""
    counts = np.bincount(_classes("target", target), minlength=classes or 0)
    present = counts > 0
    return np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)


# --- numbers -------------------------------------------------------------------------------------------


def mae(target: Any, predicted: Any) -> float:
    """The mean absolute error."""
    target, predicted = _both(target, predicted)
    return float(np.abs(predicted - target).mean())


def rmse(target: Any, predicted: Any) -> float:
    """The square root of the mean squared error."""
    target, predicted = _both(target, predicted)
    return float(np.sqrt(np.square(predicted - target).mean()))


def smape(target: Any, predicted: Any) -> float:
    """The mean of |error| / mean of |target| and |prediction|, from 0 to 2; 0 where both are 0."""
    target, predicted = _both(target, predicted)
    size = (np.abs(target) + np.abs(predicted)) / 2
    return float(np.divide(np.abs(predicted - target), size, out=np.zeros_like(size), where=size > 0).mean())


# --- all of them ---------------------------------------------------------------------------------------


def report(target: Any, predicted: Any, scores: Any = None, classes: Sequence[str] = ()) -> dict[str, Any]:
    """All scores of predicted classes as JSON holds them; with `scores` (probabilities) also log loss and ROC AUC.

    A score that is none is None. `told` makes lines for people of it.
    """
    table = confusion(target, predicted, len(classes) or None)
    names = tuple(classes) or tuple(map(str, range(len(table))))
    each, macro, weighted = _per_class(table), _macro(table), _weighted(table)
    found: dict[str, Any] = {
        "rows": int(table.sum()),
        "accuracy": float(table.trace() / table.sum()),
        "macro_f1": macro.f1,
        "weighted_f1": weighted.f1,
        "classes": {
            name: {"precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
            for name, p, r, f, n in zip(names, *each, strict=True)
        },
        "macro": macro._asdict(),
        "weighted": weighted._asdict(),
        "confusion": table.tolist(),
    }
    if scores is not None:
        auc = roc_auc(target, scores)
        found["roc_auc"] = auc if math.isfinite(auc) else None
        found["log_loss"] = log_loss(target, scores)
    return found


def number_report(target: Any, predicted: Any) -> dict[str, Any]:
    """All scores of predicted numbers, as JSON holds them."""
    said = {"mae": mae(target, predicted), "rmse": rmse(target, predicted), "smape": smape(target, predicted)}
    return {"rows": len(np.asarray(target)), **said}


def told(found: dict[str, Any]) -> list[str]:
    """The lines of a report for people: a table of classes where there are any, and the scores of all rows."""
    plain = {"accuracy": "accuracy", "macro_f1": "macro F1", "weighted_f1": "weighted F1", "roc_auc": "ROC AUC"}
    plain |= {"log_loss": "log loss", "mae": "MAE", "rmse": "RMSE", "smape": "SMAPE"}
    said = [f"{words} {found[name]:.4g}" for name, words in plain.items() if found.get(name) is not None]
    last = f"{' · '.join(said)} ({found['rows']:,} rows)"
    if "classes" not in found:
        return [last]
    rows = [*found["classes"].items(), ("macro mean", found["macro"]), ("weighted mean", found["weighted"])]
    labels = [_label(name) for name, _ in rows]
    width = max(map(len, labels))
    lines = [f"{'':<{width}}  precision  recall      F1     rows"]
    for label, (_, one) in zip(labels, rows, strict=True):
        figures = f"{one['precision']:9.3f}  {one['recall']:6.3f}  {one['f1']:6.3f}  {one['support']:7,}"
        lines.append(f"{label:<{width}}  {figures}")
    return [*lines, last]


class _Mean(NamedTuple):
    precision: float
    recall: float
    f1: float
    support: int


def _per_class(table: Array) -> PerClass:
    hits, predicted, support = table.diagonal(), table.sum(0), table.sum(1)
    return PerClass(_share(hits, predicted), _share(hits, support), _share(2 * hits, predicted + support), support)


def _macro(table: Array) -> _Mean:
    """Over the classes that are there or were predicted."""
    return _mean(table, (table.sum(0) + table.sum(1) > 0).astype(np.int64))


def _weighted(table: Array) -> _Mean:
    return _mean(table, table.sum(1))


def _mean(table: Array, weights: Array) -> _Mean:
    precision, recall, f1 = (float(np.average(values, weights=weights)) for values in _per_class(table)[:3])
    return _Mean(precision, recall, f1, int(table.sum()))


def _share(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.zeros(len(whole)), where=whole > 0)


def _second(target: Array) -> int:
    if target.max() > 1:
        raise DataError(f"scores of one class are for two classes, and there is class {int(target.max())}")
    return 1


def _auc(positive: Array, scores: Array) -> float:
    ones = int(positive.sum())
    others = len(positive) - ones
    if not ones or not others:
        return math.nan
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # equal scores share the mean of their ranks
    return float((ranks[place[positive]].sum() - ones * (ones + 1) / 2) / (ones * others))


def _label(name: str) -> str:
    words = clean(name)
    return words if len(words) <= 30 else f"{words[:28]} …"


# --- what goes in --------------------------------------------------------------------------------------


def _classes(name: str, values: Any) -> Array:
    found = np.asarray(values)
    if found.dtype == bool:
        found = found.astype(np.int64)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise DataError(f"the {name} of shape {found.shape} and type {found.dtype} cannot be classes; {CLASSES}")
    if found.min() < 0:
        raise DataError(f"there is {found.min()} in the {name}; {CLASSES}")
    return found.astype(np.int64)


def _numbers(name: str, values: Any) -> Array:
    found = np.asarray(values)
    if found.dtype.kind in "iub":
        found = found.astype(np.float64)
    if found.ndim not in (1, 2) or not len(found) or found.dtype.kind != "f":
        raise DataError(f"the {name} of shape {found.shape} and type {found.dtype} cannot be numbers; give one a row")
    cells = found.reshape(len(found), -1)
    wrong = np.flatnonzero(~np.isfinite(cells).all(1))
    if len(wrong):
        cell = next(cell for cell in cells[wrong[0]] if not np.isfinite(cell))
        raise DataError(f"there is {cell} in row {wrong[0] + 1:,} of the {name}, the first of {len(wrong):,} such rows")
    return found


def _both(target: Any, predicted: Any) -> tuple[Array, Array]:
    target, predicted = _numbers("target", target), _numbers("predictions", predicted)
    if target.shape != predicted.shape:
        raise DataError(f"the target has shape {target.shape} and the predictions {predicted.shape}; give the same")
    return target.astype(np.float64), predicted.astype(np.float64)


def _refuse_unequal(target: Array, other: Array) -> None:
    if len(target) != len(other):
        raise DataError(f"the target has {len(target):,} rows and what is compared with it {len(other):,}")


def _refuse_beyond(target: Array, columns: int) -> None:
    if target.max() >= columns:
        raise DataError(f"there is a class {int(target.max())}, and scores have {columns} columns: one for each class")
