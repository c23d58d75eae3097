"""How answers are judged, told and written: classes by F1, numbers by how far off they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from hotlap.recipes import scores
from hotlap.recipes.answers import Threshold, outputs_of
from hotlap.recipes.recipe import Numbers, Reader

RARE = 0.5
"""A class that has less than this part of an equal share of the samples gets a threshold of its own."""
PARTS = 5
"""Into so many the rows are cut: each is judged by the threshold of the others."""
SURE = 2.0
"""So many standard errors are more than chance."""
MISTAKES = 10
"""Of the worst ones, shown."""
Report = dict[str, Any]


class Judge(Protocol):
    """What differs between answers that are classes and answers that are numbers."""

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Head and name of the scores that a table compares."""

    def answers(self, outputs: Tensor) -> Numbers:
        """A model's outputs as answers."""

    def threshold(self, answers: Numbers, target: Numbers) -> Threshold | None:
        """From where on the rarest class is answered, if it is rare."""

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores of a model's answers."""

    def rule_report(self, target: Numbers, answers: Numbers) -> Report:
        """All scores of what a simple rule answers."""

    def score(self, report: Report) -> float:
        """By which the best is chosen: higher is better."""

    def may_be_chance(self, rules: Sequence[Report], rows: int) -> bool:
        """Whether no rule is better than the simplest, the first, but for chance."""

    def written(self, name: str, answers: Numbers, threshold: Threshold | None, *, all_of_it: bool) -> dict[str, Any]:
        """The columns of a file of answers."""

    def worst(
        self, target: Numbers, answers: Numbers, threshold: Threshold | None, shown: Callable[[int], str]
    ) -> list[Mapping[str, Any]]:
        """The samples that it is most wrong about."""


def judge_of(classes: Sequence[str]) -> Judge:
    """The judge of answers that are one of these classes; without classes, of numbers."""
    return ByClass(tuple(classes)) if classes else ByNumber()


def answers_of(reader: Reader, model: nn.Module, data: Any, *, batch_size: int, device: str) -> Numbers:
    """What a model answers for each sample of `data`, in its order: probabilities of classes, or numbers."""
    found = outputs_of(reader.forward, model, data, batch_size=batch_size, device=device)
    return judge_of(reader.classes).answers(found)


class ByClass:
    """Answers are probabilities of classes."""

    columns = (("accuracy", "accuracy"), ("macro-F1", "macro_f1"))

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
        if scores.roc_auc(target == rare, answers[:, rare]) <= 0.5 + SURE * spread:
            return None
        found = Threshold(rare, _parting(answers, target, rare))
        plain, parted = (self.report(target, answers, one) for one in (None, found))
        return found if self.score(parted) > self.score(plain) else None

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores, those of the probabilities too; where there is a threshold, each row by that of others."""
        if threshold is None:
            return scores.report(target, chosen(answers, None), answers, self._classes)
        found = scores.report(target, parted_by_others(answers, target, threshold.rare), answers, self._classes)
        return {**found, "threshold": {"class": self._classes[threshold.rare], "least": threshold.least}}

    def rule_report(self, target: Numbers, answers: Numbers) -> Report:
        """All scores of classes."""
        return scores.report(target, answers, None, self._classes)

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
    return float(scores.best_threshold(answers[:, rare], (target == rare).astype(np.int64)))


class ByNumber:
    """Answers are numbers."""

    columns = (("MAE", "mae"), ("RMSE", "rmse"))

    def answers(self, outputs: Tensor) -> Numbers:
        """The one number of each row."""
        found: Numbers = outputs.double().reshape(len(outputs)).numpy()
        return found

    def threshold(self, answers: Numbers, target: Numbers) -> None:
        """There is none."""

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores of numbers."""
        return scores.number_report(target, answers)

    def rule_report(self, target: Numbers, answers: Numbers) -> Report:
        """The same."""
        return scores.number_report(target, answers)

    def score(self, report: Report) -> float:
        """The lower the root of the mean square, the better."""
        return -float(report["rmse"])

    def may_be_chance(self, rules: Sequence[Report], rows: int) -> bool:
        """Where even the mean, the simplest rule, is not beaten."""
        return True

    def written(self, name: str, answers: Numbers, threshold: Threshold | None, *, all_of_it: bool) -> dict[str, Any]:
        """The number."""
        return {name: answers.tolist()}

    def worst(
        self, target: Numbers, answers: Numbers, threshold: Threshold | None, shown: Callable[[int], str]
    ) -> list[Mapping[str, Any]]:
        """The samples whose answers are furthest off."""
        off = np.abs(answers - target)
        return [
            {"sample": shown(int(at)), "true": float(target[at]), "answered": float(answers[at])}
            for at in np.argsort(-off, kind="stable")[:MISTAKES]
        ]
