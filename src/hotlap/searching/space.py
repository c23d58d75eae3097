"""What a search may vary: names with choices or ranges, as a plain dict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hotlap.core.errors import JobError, shown

LOG = "log"
PLAIN = (str, int, float, bool, type(None))
"""Choices that Optuna stores as they are; of others it stores the text."""


@dataclass(frozen=True)
class Choices:
    """One of these."""

    values: tuple[Any, ...]

    def drawn(self, name: str, trial: Any) -> Any:
        """The choice of a trial."""
        if all(isinstance(value, PLAIN) for value in self.values):
            return trial.suggest_categorical(name, list(self.values))
        by_text = {repr(value): value for value in self.values}
        return by_text[trial.suggest_categorical(name, list(by_text))]


@dataclass(frozen=True)
class Range:
    """A number between two, both included; whole where both are, and drawn by its logarithm if `is_log`."""

    low: float
    high: float
    is_log: bool

    def drawn(self, name: str, trial: Any) -> Any:
        """The number of a trial."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=self.is_log)
        return trial.suggest_float(name, self.low, self.high, log=self.is_log)


Space = dict[str, Choices | Range]


def checked_space(given: Mapping[str, Any]) -> Space:
    """The space that a dict describes; JobError with all mistakes at once.

    A list holds choices; `(low, high)` is a range, and `(low, high, "log")` one that is drawn by its logarithm.
    """
    wrong, space = [], Space()
    for name, value in given.items():
        found = _part(value)
        if isinstance(found, str):
            wrong.append(f"space[{name!r}]={shown(value)} {found}")
        else:
            space[str(name)] = found
    if not given:
        wrong.append('the space is empty; name what may vary, such as {"lr": (1e-4, 1e-1, "log")}')
    if wrong:
        raise JobError(wrong)
    return space


def described(space: Space) -> dict[str, str]:
    """The space as a file holds it."""
    return {name: repr(part) for name, part in space.items()}


def _part(value: Any) -> Choices | Range | str:
    """A part of a space, or what is wrong with it."""
    if isinstance(value, list):
        texts = {repr(choice) for choice in value}
        return Choices(tuple(value)) if len(texts) == len(value) > 0 else "needs choices that differ, at least one"
    if not isinstance(value, tuple) or len(value) not in (2, 3) or value[2:] not in ((), (LOG,)):
        return 'must be a list of choices, (low, high) or (low, high, "log")'
    return _range(value)


def _range(value: Sequence[Any]) -> Range | str:
    low, high, is_log = value[0], value[1], len(value) == 3
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in (low, high)):
        return "needs two numbers; write choices as a list"
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return "needs two finite numbers, the smaller one first"
    return "is drawn by its logarithm, so both must be above 0" if is_log and low <= 0 else Range(low, high, is_log)
