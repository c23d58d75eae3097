"""Whether several ranks are faster than one, measured on steps of the training itself."""

from __future__ import annotations

import time
from collections.abc import Callable

from hotlap.core.ledger import Entry
from hotlap.core.plan import Plan
from hotlap.core.units import show_seconds
from hotlap.engine.rig import Rig
from hotlap.monitor.bound import Diagnosis
from hotlap.tuner.stats import Comparison
from hotlap.tuner.tuner import PlanChooser

LAP_S, LAP_STEPS, WARM_STEPS = 0.2, 5, 2
"""A lap takes so many seconds, and so many steps at least. The first steps after a change of plan do not count."""
MOST_QUADS = 6
LIKELY_LAPS = 10
"""Laps of a comparison, as far as the cost is foreseen: two quads, and the first lap of each side."""
START_S = 5.0
"""Seconds until further ranks have their job, about."""
SHARE = 0.1
"""Of the seconds that several ranks can save, what finding out may cost."""
ORDER = (False, True, True, False)
"""Which laps of a quad several ranks make."""


def shared(plan: Plan, ranks: int) -> Plan:
    """The plan with so many ranks, without what these cannot do."""
    return plan.but(ranks=ranks, mode="eager", replay_steps=1, compile="no")


class SharedOrAlone(PlanChooser):
    """Lets a tuner find the plan of one rank, and then compares that with all ranks. The faster one stays.

    Both make the same updates, so all laps are steps of the training.
    """

    def __init__(self, rig: Rig, alone: PlanChooser, ranks: int, left: Callable[[], int]) -> None:
        """`left` says how many updates the training still makes."""
        self._rig, self._alone, self._ranks, self._left = rig, alone, ranks, left
        self._plans: tuple[Plan, Plan] | None = None
        """The plans of one rank and of all, while they are compared."""
        self._is_decided = self._is_shared = False
        self._comparison = Comparison(most_quads=MOST_QUADS)
        self._laps: list[float] = []
        self._began_s = 0.0
        self._steps = 0
        """Steps since the last change of plan."""
        self._counted, self._since_s = 0, 0.0
        """Steps that count since, and when the first of them began."""
        self._is_first = True
        """Whether the first lap is still to come."""

    @property
    def done(self) -> bool:  # type: ignore[override]
        """Whether both are over: the search for a plan, and the comparison."""
        return self._is_decided

    @property
    def trusted(self) -> int | None:
        """As the tuner says."""
        return self._alone.trusted

    @property
    def diagnosed(self) -> tuple[Diagnosis, Plan] | None:
        """As the tuner says."""
        return self._alone.diagnosed

    def drifted(self) -> int | None:
        """As the tuner says of the plan of one rank."""
        return self._alone.drifted() if self._looks_alone else None

    def room(self) -> int:
        """Updates that may be made before `stepped` has to be called."""
        return self._alone.room()

    def fed(self, seconds: float) -> None:
        """Take in a wait for a batch."""
        if self._looks_alone:
            self._alone.fed(seconds)

    def paused(self, seconds: float) -> None:
        """Take in time for something else than steps: a lap with it begins again."""
        self._steps = 0
        if self._looks_alone:
            self._alone.paused(seconds)

    def stepped(self, updates: int = 1, windows: int = 1) -> None:
        """Take in that a step has ended; on return the plan for the next one is in force."""
        if self._looks_alone:
            self._alone.stepped(updates, windows)
            if self._alone.done and not self._is_decided:
                self._begin()
        elif self._plans is not None:
            self._time(updates)

    def failed(self, error: Exception) -> bool:
        """Whether an error of several ranks on trial was answered by the plan of one."""
        if self._plans is None:
            return self._looks_alone and self._alone.failed(error)
        is_theirs = self._rig.plan == self._plans[1]
        self._decide(f"several ranks failed: {error}" if is_theirs else f"a step failed: {error}")
        return is_theirs

    def distrust(self) -> None:
        """As the tuner does."""
        self._alone.distrust()

    def ended(self, updates: int = 0) -> None:
        """Take in that the training is over."""
        if self._plans is not None:
            self._decide("the training ended before that was known")
        if not self._is_shared:
            self._alone.ended(updates)
        self._is_decided = True

    @property
    def _looks_alone(self) -> bool:
        """Whether the tuner is in charge of the plan."""
        return self._plans is None and not self._is_shared

    def _begin(self) -> None:
        rig = self._rig
        plans = (rig.plan, shared(rig.plan, self._ranks))
        self._began_s = time.perf_counter()
        if (reason := rig.supports(plans[1])) is not None:
            self._write("not tried", reason)
            self._is_decided = True
            return
        self._plans = plans
        self._use(False)

    def _use(self, is_shared: bool) -> None:
        assert self._plans is not None, "a comparison is under way"
        self._rig.use(self._plans[is_shared], why="timed", outcome="measured")
        self._steps = 0

    def _time(self, updates: int) -> None:
        """Count a step of a lap, and go on to the next one where it is over."""
        self._steps += updates
        if self._steps <= WARM_STEPS:
            self._rig.wait()
            self._counted, self._since_s = 0, time.perf_counter()
            return
        self._counted += updates
        if self._counted < LAP_STEPS or time.perf_counter() - self._since_s < LAP_S:
            return
        self._rig.wait()
        step_s = (time.perf_counter() - self._since_s) / self._counted
        is_first, self._is_first = self._is_first, False
        if is_first and (why := self._why_not_worth_it(step_s)) is not None:
            self._decide(why, outcome="not tried")
            return
        self._laps.append(step_s)
        if len(self._laps) == len(ORDER):
            self._comparison.add(*self._laps)
            self._laps.clear()
            if self._comparison.verdict is not None:
                self._conclude(self._comparison.verdict)
                return
        self._use(ORDER[len(self._laps)])

    def _why_not_worth_it(self, step_s: float) -> str | None:
        lap_s = max(LAP_S, LAP_STEPS * step_s)
        cost_s, saves_s = START_S + LIKELY_LAPS * lap_s, (1 - 1 / self._ranks) * self._left() * step_s
        if cost_s > SHARE * saves_s:
            return f"finding out takes about {show_seconds(cost_s)}, and at most {show_seconds(saves_s)} can be saved"
        return None

    def _conclude(self, verdict: str) -> None:
        seen = self._comparison.estimate
        figures = {"ratio": seen.ratio, "low": seen.low, "high": seen.high, "noise": seen.noise}
        is_faster = verdict == "accepted"
        self._decide("the same updates in less time" if is_faster else verdict, is_faster, figures)

    def _decide(
        self,
        why: str,
        is_faster: bool = False,
        figures: dict[str, float] | None = None,
        *,
        outcome: str = "",
    ) -> None:
        assert self._plans is not None, "a comparison is under way"
        plan, self._plans = self._plans[is_faster], None
        if is_faster:
            self._alone.ended()
        self._is_decided, self._is_shared = True, is_faster
        outcome = outcome or ("kept" if is_faster else "rejected")
        self._rig.use(plan, why=why, outcome="chosen")
        self._write(outcome, why, figures or {})

    def _write(self, outcome: str, why: str, figures: dict[str, float] | None = None) -> None:
        rig = self._rig
        rig.ledger.record(
            Entry(
                step=max(rig.steps, rig.ledger.last_step),
                what=f"{self._ranks} ranks",
                outcome=outcome,
                plan=rig.plan,
                why=why,
                figures=figures or {},
                cost_s=0.0 if outcome == "not tried" else time.perf_counter() - self._began_s,
            )
        )
