"""Replaying a tuned run: its ledger says under which plan every update was made."""

from __future__ import annotations

from bisect import bisect_right

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import MOST_REPLAY_STEPS, Plan
from hotlap.engine.protocol import TunableTraining


class Replay:
    """Puts a training under the plans of another run's ledger, each at its step; it is told of steps as a Tuner is."""

    done = True
    """There is nothing to search for."""

    def __init__(self, rig: TunableTraining, ledger: Ledger) -> None:
        changes = list(plan_changes(ledger))
        self._rig, self._plans = rig, [entry.plan for entry in changes]
        self._steps = [entry.step for entry in changes]
        self.stepped()

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._rig.plan

    def room(self) -> int:
        """Updates until the plan changes."""
        step = self._rig.place.served
        later = bisect_right(self._steps, step)
        return self._steps[later] - step if later < len(self._steps) else MOST_REPLAY_STEPS

    def stepped(self, updates: int = 1) -> None:
        """Told that a step has ended; when it returns, the plan for the next is in force."""
        now = bisect_right(self._steps, self._rig.steps) - 1
        if now >= 0:
            self._rig.use(self._plans[now], why="as in the run that is replayed")

    @property
    def trusted(self) -> int | None:
        """Nobody looks."""
        return None

    def drifted(self) -> int | None:
        """Nobody looks."""
        return None

    def fed(self, seconds: float) -> None:
        """Nothing is timed."""

    def paused(self, seconds: float) -> None:
        """Nothing is timed."""

    def failed(self, error: Exception) -> bool:
        """No plan is on trial."""
        return False

    def ended(self) -> None:
        """Nothing is left open."""


def plan_changes(ledger: Ledger) -> Ledger:
    """A ledger of those entries alone at which the plan changed."""
    last: dict[int, Entry] = {}
    for entry in ledger:
        last[entry.step] = entry
    found = Ledger()
    plan: Plan | None = None
    for entry in last.values():
        if entry.plan != plan:
            found.record(entry)
        plan = entry.plan
    return found
