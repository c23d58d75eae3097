"""What chooses the plan for each step of a training: a fixed plan, or the ledger of a run that is replayed."""

from __future__ import annotations

from bisect import bisect_right

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import MOST_REPLAY_STEPS, Plan
from hotlap.engine.protocol import TunableTraining


class PlanChooser:
    """Chooses the plan for each step of a training. This one leaves the plan as it is; others override what differs."""

    done = True
    """Whether the search for a plan is over."""

    @property
    def trusted(self) -> int | None:
        """The last step at which the plan was seen to train as the user's own; None where nothing compares them."""
        return None

    def drifted(self) -> int | None:
        """The last step at which all was well, once after the plan was seen to train otherwise; else None."""
        return None

    def room(self) -> int:
        """Updates that may be made before `stepped` has to be called."""
        return MOST_REPLAY_STEPS

    def fed(self, seconds: float) -> None:
        """Take in how long the host waited for the batch of the next step."""

    def paused(self, seconds: float) -> None:
        """Take in how many seconds went by for something else than steps: an evaluation, a save."""

    def stepped(self, updates: int = 1) -> None:
        """Take in that a step has ended, of so many updates; on return the plan for the next step is in force."""

    def failed(self, error: Exception) -> bool:
        """Whether the plan on trial broke the step, and another plan is in force to make it again."""
        return False

    def ended(self) -> None:
        """Take in that the training is over."""


class Replay(PlanChooser):
    """Puts a training under the plans of another run's ledger, each at its step."""

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
        """Put the plan of the next step in force."""
        now = bisect_right(self._steps, self._rig.steps) - 1
        if now >= 0:
            self._rig.use(self._plans[now], why="as in the run that is replayed")


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
