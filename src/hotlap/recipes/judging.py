"""How answers are judged, told and written: classes by F1, numbers by how far off they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from hotlap.recipes import scores
from hotlap.recipes.answers import Threshold, chosen, outputs_of
from hotlap.recipes.recipe import Numbers, Reader

RARE = 0.25
"""A class of two that has less than this share of the samples gets a threshold of its own."""
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
        """Where two classes are parted, if one of them is rare."""

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
        """Where two classes are parted, if one of them is rare."""
        shares = np.bincount(target, minlength=answers.shape[1]) / len(target)
        rare = int(shares.argmin())
        if len(shares) != 2 or not 0 < shares[rare] < RARE:
            return None
        return Threshold(rare, float(scores.best_threshold(answers[:, rare], (target == rare).astype(np.int64))))

    def report(self, target: Numbers, answers: Numbers, threshold: Threshold | None) -> Report:
        """All scores, those of the probabilities too."""
        return scores.report(target, chosen(answers, threshold), answers, self._classes)

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
        wrong = np.flatnonzero(chosen(answers, threshold) != target)
        return [
            {
                "sample": shown(int(at)),
                "true": self._classes[int(target[at])],
                "answered": self._classes[int(answers[at].argmax())],
                "probability_of_the_true_one": float(sure[at]),
            }
            for at in wrong[np.argsort(sure[wrong], kind="stable")][:MISTAKES]
        ]


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
