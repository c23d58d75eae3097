"""Conditions of the host beside a training: when each begins and ends, and what it costs by the pace before and during.

The thread of a sampler lays in what it sees; the training takes out what there is to say.
"""

from __future__ import annotations

import multiprocessing.process
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from hotlap.core.plan import Plan
from hotlap.core.units import show_about, show_rate, show_seconds
from hotlap.monitor.verdict import Seen, Verdict, another_process, on_battery, swapping, throttled

LONG_S: Final = 5.0
"""Of training under a condition, before hotlap says that it has begun: shorter ones are no matter."""
NOISE: Final = 0.02
"""Of the time, a loss below which is none: paces differ by as much anyway."""
LATE: Final = 3
"""Stretches of training before a condition is seen that count neither way: a mean over samples shows it late."""
NAMES: Final = {
    "another process": "another process",
    "throttling": "throttling",
    "swapping": "swapping",
    "battery": "running on battery",
}
"""What the ledger calls each, by the verdict's name."""


@dataclass(frozen=True)
class Stretch:
    """A stretch of training under one plan."""

    plan: Plan
    seconds: float
    """Without evaluations and checkpoints."""
    steps: int


@dataclass
class Pace:
    """Seconds and steps, by plan: paces under two plans cannot be compared."""

    of: dict[Plan, tuple[float, int]] = field(default_factory=dict)

    def add(self, one: Stretch) -> None:
        """Take in a stretch."""
        seconds, steps = self.of.get(one.plan, (0.0, 0))
        self.of[one.plan] = seconds + one.seconds, steps + one.steps

    @property
    def seconds(self) -> float:
        """All seconds."""
        return sum(seconds for seconds, _ in self.of.values())

    def against(self, other: Pace) -> tuple[float, float, float] | None:
        """Steps a second here, and there, and the seconds lost here, under plans that both have; None without any."""
        both = [plan for plan, (_, steps) in self.of.items() if steps and other.of.get(plan, (0.0, 0))[1]]
        if not both:
            return None
        steps = sum(self.of[plan][1] for plan in both)
        here_s = sum(self.of[plan][0] for plan in both)
        there_s = sum(self.of[plan][1] * other.of[plan][0] / other.of[plan][1] for plan in both)
        return steps / max(1e-9, here_s), steps / max(1e-9, there_s), max(0.0, here_s - there_s)


@dataclass
class Spell:
    """A condition, from its beginning to its end."""

    why: str
    answer: str
    pace: Pace = field(default_factory=Pace)
    is_told: bool = False


@dataclass(frozen=True)
class Event:
    """A condition has begun, or is over."""

    what: str
    line: str
    """With its figures."""
    figures: dict[str, float]


class Conditions:
    """The conditions beside one training."""

    def __init__(self) -> None:
        self._spells: dict[str, Spell] = {}
        self._clear = Pace()
        self._recent: deque[Stretch] = deque()
        self._events: deque[Event] = deque()

    def see(self, seen: Seen, stretch: Stretch | None) -> None:
        """Take in the samples of the last seconds, and the training since the last call; None where none counts."""
        now = {one.bound: one for one in found_in(seen)}
        for name in [name for name in self._spells if name not in now]:
            self._events += self._over(name, self._spells.pop(name))
        for name, one in now.items():
            if name not in self._spells:
                self._spells[name] = Spell(one.why, one.answer)
        if now:
            self._recent.clear()
        if stretch is not None:
            self._add(stretch)
        for name, spell in self._spells.items():
            if not spell.is_told and spell.pace.seconds >= LONG_S:
                spell.is_told = True
                self._events.append(self._begun(name, spell))

    def take(self) -> Iterator[Event]:
        """What has begun and ended since the last call."""
        while self._events:
            yield self._events.popleft()

    def close(self) -> Iterator[Event]:
        """The same, at the end of the training: what has not ended is told of as far as it came."""
        yield from self.take()
        for name in list(self._spells):
            yield from self._over(name, self._spells.pop(name), when="lasted to the end")

    def _add(self, stretch: Stretch) -> None:
        for spell in self._spells.values():
            spell.pace.add(stretch)
        if not self._spells:
            self._recent.append(stretch)
            if len(self._recent) > LATE:
                self._clear.add(self._recent.popleft())

    def _begun(self, name: str, spell: Spell) -> Event:
        figures, paces = _compared(spell, self._clear)
        line = f"{NAMES[name]} for {_took(spell)}: {spell.why}; {paces}; {spell.answer}"
        return Event(NAMES[name], line, figures)

    def _over(self, name: str, spell: Spell, when: str = "is over") -> Iterator[Event]:
        if not spell.is_told:
            return
        figures, paces = _compared(spell, self._clear)
        what, lost_s = f"{NAMES[name]} {when}", figures.get("lost_s")
        cost = "" if lost_s is None else f"it cost {show_about(lost_s)}; " if lost_s > 0 else "it cost nothing; "
        yield Event(what, f"{what} after {_took(spell)} of training: {cost}{paces}", figures)


def _compared(spell: Spell, clear: Pace) -> tuple[dict[str, float], str]:
    """The paces under a condition and without it, as figures and in words."""
    figures, paces = {"seconds": spell.pace.seconds}, spell.pace.against(clear)
    if paces is None:
        return figures, "no pace without it is known"
    during, without, lost_s = paces
    lost_s = lost_s if lost_s >= NOISE * spell.pace.seconds else 0.0
    figures |= {"steps_per_s": during, "steps_per_s_without": without, "lost_s": lost_s}
    return figures, f"{show_rate(during)} steps/s, {show_rate(without)} without"


def _took(spell: Spell) -> str:
    return show_seconds(float(f"{spell.pace.seconds:.2g}"))


def found_in(seen: Seen) -> list[Verdict]:
    """The conditions that the samples of the last seconds show."""
    # Processes of the training's own, such as workers, are no others; on a GPU they compute nothing.
    has_children = bool(getattr(multiprocessing.process, "_children", ()))
    others = None if has_children and not seen.on_gpu else another_process(seen)
    return [one for one in (others, throttled(seen), swapping(seen), on_battery(seen)) if one is not None]
