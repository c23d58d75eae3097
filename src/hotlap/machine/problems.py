"""A problem: what it is, what it costs, what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Severity(StrEnum):
    """How bad a problem is."""

    STOPS = "stops"
    """hotlap could not train here as asked."""
    SLOWS = "slows"
    """It would train, and lose time, memory or trust by it."""
    NOTE = "note"
    """Good to know."""


_ORDER: Final = {Severity.STOPS: 0, Severity.SLOWS: 1, Severity.NOTE: 2}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something to know about this machine before a run."""

    key: str
    """A stable name for scripts, e.g. `cuda-launch-blocking`."""
    severity: Severity
    what: str
    costs: str
    do: str

    def as_json(self) -> dict[str, str]:
        """Plain values under stable keys."""
        return {
            "key": self.key,
            "severity": str(self.severity),
            "what": self.what,
            "costs": self.costs,
            "do": self.do,
        }


def worst_first(problems: list[Problem]) -> tuple[Problem, ...]:
    """Sorted by severity; within one, in the order they were found."""
    return tuple(sorted(problems, key=lambda problem: _ORDER[problem.severity]))
