"""The canary: now and then the user's own step is made again beside the tuned one, to see that they still agree."""

from __future__ import annotations

import time

from hotlap.core.plan import Plan
from hotlap.engine.protocol import TunableTraining
from hotlap.tuner.gates import Judge

SHARE = 0.005
"""Of the time, what looking may take."""
FIRST_S = 5.0
"""The least between the end of tuning and the first look, and between two."""

SOON_S = 1.0
"""What is near: a script's calls are watched from then on."""
QUIET = 32
"""Updates that pass before the next check whether a look is near."""
STORM_STEPS = 100
"""Steps in fp16 after each of which skipped updates are counted; where half of them were, a look is due."""


class Canary:
    """Looks after a tuned training: where its plan and the user's own drift apart, it goes back to one that agrees."""

    def __init__(self, rig: TunableTraining, gate: Judge, *, plan: Plan, baseline: Plan, takes_s: float = 0.0) -> None:
        """`takes_s` is about what a look takes."""
        self._rig, self._gate, self._baseline = rig, gate, baseline
        self.plan = plan
        """The plan that is trusted."""
        self.good = rig.steps
        """The last step at which the plans agreed."""
        self.drifted: int | None = None
        """That step, once they did not; whoever drives goes back to it, and sets None."""
        self._next_s = time.perf_counter() + max(FIRST_S, takes_s / SHARE)
        self._doubts = 0
        self._counted = rig.steps, rig.skipped
        """Steps and skipped updates when they were last counted."""
        self.spent_s = 0.0
        """What all looks took."""

    @property
    def looks_soon(self) -> bool:
        """Whether a look is near."""
        return self.plan != self._baseline and time.perf_counter() > self._next_s - SOON_S

    @property
    def quiet(self) -> int:
        """Updates before the next that it has to be told of."""
        return 0 if self.looks_soon else QUIET

    def stepped(self) -> None:
        """Told that a step has ended."""
        if self.plan == self._baseline:
            return
        if time.perf_counter() < self._next_s and not self._is_in_a_storm():
            return
        if not self._gate.is_ready:
            self._next_s = 0.0
            return
        began = time.perf_counter()
        self.plan = self._rig.obeyed(self.plan)
        passed = self._gate.check(self.plan)
        self._gate.forget()
        took_s = time.perf_counter() - began
        self.spent_s += took_s
        self._next_s = time.perf_counter() + max(FIRST_S, took_s / SHARE)
        if passed.ok:
            self.good, self._doubts = self._rig.steps, 0
        elif self._doubts == 0:
            self._doubts = 1
            self._next_s = 0.0  # once more, on the next batch: one may be an odd one
        else:
            self._go_back(passed.why)

    def _is_in_a_storm(self) -> bool:
        """Whether most of the latest updates were skipped: numbers that have grown too large for fp16."""
        steps, skipped = self._counted
        if self.plan.numerics.precision != "fp16" or self._rig.steps - steps < STORM_STEPS:
            return False
        made = self._rig.steps - steps
        self._counted = self._rig.steps, self._rig.skipped
        return self._rig.skipped - skipped > made / 2

    def _go_back(self, why: str) -> None:
        rig = self._rig
        exact = self.plan.but(precision=self._baseline.numerics.precision)
        self.plan = exact if exact != self.plan and self._gate.check(exact).ok else self._baseline
        self._gate.forget()
        rig.write_down("canary", "fault", why)
        rig.use(self.plan, why="the last plan that agrees with the user's own")
        self.drifted, self._doubts = self.good, 0
