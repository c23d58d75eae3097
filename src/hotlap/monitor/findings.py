"""Findings: what is wrong with a training, what it costs, and what to change.

`hotlap diagnose` makes them from a training, a run or a process. `Findings` puts them in order and prints them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from hotlap.core.terminal import clean
from hotlap.core.units import show_about

WIDTH = 80
"""Columns that the rendering fits into; only lines of code may be longer."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong with a training, and its remedy."""

    name: str
    """A short, stable name, as `feeding`."""
    what: str
    """One plain sentence, without its full stop."""
    evidence: tuple[str, ...] = ()
    """The figures seen, in words."""
    cost_s: float | None = None
    """Seconds that the run takes less after the repair, from its first update on.

    None if it endangers the run itself, as a leak or workers that die.
    """
    unpriced: str = ""
    """What it costs in words, if seconds are not known; such findings come last."""
    share: float | None = None
    """The part of a step's time, from 0 to 1; None if it takes none."""
    where: str | None = None
    """The line to look at, as `train.py:31`."""
    changes_training: bool = False
    """Whether the remedy changes what the training computes, so that it is the user's choice."""
    grows_bytes: int | None = None
    """Bytes by which memory grows with each update; None if it does not."""
    change: str = ""
    """The remedy: a command, or a unified diff of the script; the first lines may be a sentence."""

    def __post_init__(self) -> None:
        """Raise ValueError for figures that make no sense."""
        if self.cost_s is not None and not 0 <= self.cost_s < float("inf"):
            raise ValueError(f"cost_s={self.cost_s!r} must be a number from 0 up, or None")
        if self.share is not None and not 0 <= self.share <= 1:
            raise ValueError(f"share={self.share!r} must be from 0 to 1, or None")

    @property
    def cost(self) -> str:
        """What it costs, in words."""
        if self.unpriced:
            return self.unpriced
        if self.cost_s is None:
            return "may end the run"
        part = f", {100 * self.share:.0f} % of a step" if self.share is not None else ""
        return f"{show_about(self.cost_s) if self.cost_s else 'no time'}{part}"

    def lines(self, number: int = 1) -> list[str]:
        """It as lines for a terminal, with its number in the list."""
        label = f"{number}. "
        found = _wrapped(f"{label}{self.name}: {self.what}", len(label))
        for title, text in (("cost", self.cost), ("seen", "; ".join(self.evidence)), ("where", self.where or "")):
            found += _wrapped(f"   {title:<6} {text}", 10) if text else []
        first, *others = self.change.split("\n")
        found += _wrapped(f"   {'change':<6} {first}", 10) if first else []
        return found + [f"   {clean(line)}".rstrip() for line in others]

    def as_json(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {**asdict(self), "evidence": list(self.evidence)}


LARGE = 0.1
"""The part of a run that a repair has to save to come before those that change the training."""


def costliest_first(found: Iterable[Finding], whole_s: float | None = None) -> tuple[Finding, ...]:
    """First what endangers the run, in the order given; then the others by cost; last those without seconds.

    A remedy that changes the training comes after those that save a large part of `whole_s` without a change.
    """

    def place(one: Finding) -> tuple[bool, bool, bool, float]:
        cost_s = one.cost_s or 0.0
        is_free = not one.changes_training and whole_s is not None and cost_s >= LARGE * whole_s
        return bool(one.unpriced), one.cost_s is not None, not is_free, -cost_s

    return tuple(sorted(found, key=place))


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What `hotlap diagnose` found of a training, a run or a process."""

    name: str
    """Of the training, run or process."""
    found: tuple[Finding, ...] = ()
    """In any order; the rendering sorts them."""
    bound: str = ""
    """What bounds it, with figures, in one line."""
    over: str = ""
    """What the costs are for, as `10 epochs of 250 updates`."""
    whole_s: float | None = None
    """Seconds that all of that takes at the measured pace, with evaluations, without start-up; None if unknown."""
    notes: tuple[str, ...] = ()
    """What hotlap could not look at, and why."""

    def __post_init__(self) -> None:
        """Sort the findings."""
        object.__setattr__(self, "found", costliest_first(self.found, self.whole_s))

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {**asdict(self), "found": [one.as_json() for one in self.found], "notes": list(self.notes)}

    def summary(self) -> str:
        """The findings in lines for a terminal, the costliest first."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        count = len(self.found)
        takes = f", {show_about(self.whole_s)}" if self.whole_s else ""
        over = f"; costs are for {self.over}{takes}" if self.over and count else ""
        found = f"{count} finding{'s' if count > 1 else ''}{over}" if count else "nothing wrong found"
        bound = f"; {self.bound}" if self.bound and not count else ""
        yield from _wrapped(f"{self.name}: {found}{bound}", 4)
        if self.bound and count:
            yield from _wrapped(self.bound, 4)
        for number, one in enumerate(self.found, 1):
            yield ""
            yield from one.lines(number)
        if self.notes:
            yield ""
        for note in self.notes:
            yield from _wrapped(f"note: {note}", 6)


def _wrapped(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        clean(text), WIDTH, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
