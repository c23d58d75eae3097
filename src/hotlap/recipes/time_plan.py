"""What of a recipe's run fits into its time, and what that went to.

Models share the time, folds get what they leave, predictions always fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from hotlap.core.terminal import Say, clean
from hotlap.core.units import show_seconds
from hotlap.fitting.deadline import MARGIN, TimeLimit

FILES_S = 0.7
"""For the report, its page and the plots."""
LEAVING, MOST_LEAVING = 1.0, 0.07
"""Kept free for the end, since a slow start means a busy machine: a multiple of it, and most of the time."""
LEAST_S = 5.0
"""A model that would have less time is left out, while there is another one."""
ONNX_S = 15.0
"""For a model as ONNX; torch takes most of it to load what it exports with."""
MOST_LINES, LONGEST_LINE = 60, 300
"""Lines that a report keeps of what a recipe said, and their longest."""
T = TypeVar("T")


class TimePlan:
    """Parts the time of a run among its models, and keeps what was left out; without a limit nothing is."""

    def __init__(self, limit: TimeLimit | None, *, start_s: float = 0.0) -> None:
        """`start_s` is what the start of the process took."""
        self.limit = limit
        self.share: TimeLimit | None = None
        """The time of the model or fold in training."""
        self.left_out: list[str] = []
        self._after_s = 0.0
        if limit is not None:
            self._after_s = FILES_S + MARGIN * limit.all_s + min(LEAVING * start_s, MOST_LEAVING * limit.all_s)
        self._test_share, self._answers_s = 0.0, 0.0

    def expect_test(self, read: Callable[[], int], *, held: int) -> None:
        """Plan for reading and answering the table to predict at the end: `read` reads it and gives its rows.

        `held` rows are held out.
        """
        before_s = self._left_s
        rows = read()
        self._after_s += 1.5 * (before_s - self._left_s) if self.limit is not None else 0.0
        self._test_share = rows / max(1, held)

    def expect_onnx(self) -> None:
        """Plan for an ONNX file, unless that would take most of the time."""
        if self.limit is not None and 0.25 * self.limit.all_s > ONNX_S:
            self._after_s += ONNX_S

    def how_many(self, models: int) -> int:
        """How many of so many models have time enough."""
        return models if self.limit is None else max(1, min(models, int(self.spare_s / LEAST_S)))

    def begin_model(self, models: int) -> None:
        """Give the next model its share of what is left, as the first of so many."""
        self._begin(self.spare_s / models)

    def answered(self, answer: Callable[[], T]) -> T:
        """Answers for the held-out rows; what they take says what predictions will."""
        before_s = self._left_s
        answers = answer()
        if self.limit is not None:
            self._answers_s = max(self._answers_s, before_s - self._left_s)
        return answers

    def begin_fold(self, took_s: float) -> bool:
        """Whether a training that takes so long still fits; it then has all time that is left."""
        fits = self.spare_s > took_s + self._answers_s
        if fits:
            self._begin(self.spare_s)
        return fits

    def has_time_for_onnx(self) -> bool:
        """Whether an ONNX file can be written after all else."""
        return self._left_s > ONNX_S

    def lines(self) -> list[str]:
        """The time used, and what was left out for want of it."""
        if self.limit is None:
            return []
        used = f"time      {show_seconds(self.limit.all_s - self._left_s)} of {self.limit}"
        return [used, *(f"left out  {line}" for line in self.left_out)]

    @property
    def _left_s(self) -> float:
        return math.inf if self.limit is None else self.limit.left_s

    @property
    def spare_s(self) -> float:
        """Seconds for trainings, with the answers that each is judged by."""
        return self._left_s - self._after_s - self._test_share * self._answers_s

    def _begin(self, seconds: float) -> None:
        if self.limit is None:
            return
        seconds, now = max(0.1, seconds), self.limit.until_s - self.limit.left_s
        self.share = TimeLimit(seconds, now + seconds, evaluations_after=1 + self._test_share)


class Phases:
    """Seconds of a run by phase, in their order, and what the recipe said of its data: for the report."""

    def __init__(self, start_s: float = 0.0) -> None:
        """`start_s` is what the start of the process took."""
        self.seconds: dict[str, float] = {"start": start_s} if start_s else {}
        self.said: list[str] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count what happens inside as this phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def listening(self, say: Say) -> Say:
        """Says the same, and keeps the first lines."""

        def said(line: str) -> None:
            if len(self.said) < MOST_LINES:
                self.said.append(clean(line[:LONGEST_LINE]))
            say(line)

        return said
