"""The Tuner: after each step of a training it puts the plan for the next step in force."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable
from functools import partial

from hotlap.core.errors import first_line
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import MOST_REPLAY_STEPS, Plan
from hotlap.engine.protocol import TunableTraining
from hotlap.engine.rig import Place, Rig
from hotlap.monitor.bound import Diagnosis
from hotlap.tuner.budget import Length, SpentError, savings
from hotlap.tuner.gates import Gate, Judge
from hotlap.tuner.known import KnownPlans
from hotlap.tuner.laps import Lap, LapClock
from hotlap.tuner.probe import CountingProbe, Probe
from hotlap.tuner.search import Search
from hotlap.tuner.trials import Rest, TrialError


class PlanChooser:
    """Chooses the plan for each step of a training. This one leaves the plan as it is; others override what differs."""

    done = True
    """Whether the search for a plan is over."""

    @property
    def plan(self) -> Plan | None:
        """The plan that has been settled on so far, where another one may be in force; else None."""
        return None

    @property
    def is_trying(self) -> bool:
        """Whether plans are tried."""
        return False

    @property
    def idle_updates(self) -> int:
        """Updates after which there is something to do, where that is known; else 0."""
        return 0

    @property
    def quiet(self) -> int:
        """Updates that may pass before the next call of `stepped`, which may count all of them at once."""
        return 0

    @property
    def looks_soon(self) -> bool:
        """Whether plans may be compared after one of the next steps."""
        return False

    @property
    def trusted(self) -> int | None:
        """The last step at which the plan was seen to train as the user's own; None where nothing compares them."""
        return None

    @property
    def diagnosed(self) -> tuple[Diagnosis, Plan] | None:
        """What bounds a step, and the plan that it was made under; None where it was not looked at."""
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

    def stepped(self, updates: int = 1, windows: int = 1) -> None:
        """Take in that a step has ended, of so many updates; on return the plan for the next step is in force.

        Several `windows` where quiet ones came before it.
        """

    def failed(self, error: Exception) -> bool:
        """Whether the plan on trial broke the step, and another plan is in force to make it again."""
        return False

    def distrust(self) -> None:
        """Take in that numbers were not finite under the plan that was found: no later run is to begin with it."""

    def ended(self, updates: int = 0) -> None:
        """Take in that the training is over, so many updates after the last call of `stepped`."""


class Replay(PlanChooser):
    """Puts a training under the plans of another run's ledger, each at its step."""

    def __init__(self, rig: TunableTraining, ledger: Ledger) -> None:
        changes = list(plan_changes(ledger))
        self._rig, self._plans = rig, [entry.plan for entry in changes]
        self._steps = [entry.step for entry in changes]
        self.stepped()

    def room(self) -> int:
        """Updates until the plan changes."""
        step = self._rig.place.served
        later = bisect_right(self._steps, step)
        return self._steps[later] - step if later < len(self._steps) else MOST_REPLAY_STEPS

    def stepped(self, updates: int = 1, windows: int = 1) -> None:
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
        """The last good step, after a look that found drift. The training loop goes back to it and sets None."""
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
        """Updates that may pass before the next call of `stepped`."""
        return 0 if self.looks_soon else QUIET

    def stepped(self) -> None:
        """Look, if a look is due after this step."""
        if self.plan == self._baseline:
            return
        if time.perf_counter() < self._next_s and not self._is_in_a_storm():
            return
        if not self._gate.is_ready:
            self._next_s = 0.0
            return
        began = time.perf_counter()
        self.plan = self._rig.allowed_plan(self.plan)
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


WARM = 2
"""Windows under a plan that has just taken over, before a lap begins."""
AHEAD = 2
"""Batches that a worker keeps ready, where the plan leaves it open."""


class Tuner(PlanChooser):
    """Finds the fastest plan for a training while it trains; the training loop stays in charge.

        tuner = Tuner(rig, updates=10_000)
        for batch in rig.feed(data, batch_size=64, steps=10_000):
            rig.step(batch)
            tuner.stepped(batch.updates)
        tuner.ended()

    `updates` is how many there will be in all; `most_s` how many seconds tuning may cost at most; `most_lost` which
    share of the run it may cost before it has saved as much. `period` says after how many updates something else than
    an epoch's end cuts in, such as an evaluation. `found` is a plan that an
    earlier process has found for this very training: then nothing is searched for, and it is only looked after.
    A training that is no Rig brings what judges its plans, and what probes it; `few_windows` is that of `LapClock`.
    """

    def __init__(
        self,
        rig: TunableTraining,
        *,
        updates: int | Callable[[], Length],
        most_s: float | None = None,
        most_lost: float = math.inf,
        period: int | None = None,
        few_windows: int = 0,
        known: KnownPlans | None = None,
        found: Plan | None = None,
        gate: Judge | None = None,
        probe: Probe | None = None,
    ) -> None:
        self._rig = rig
        if gate is None or probe is None:
            assert isinstance(rig, Rig), "for any other training, name its gate and its probe"
            gate, probe = gate or Gate(rig, rig.plan), probe or CountingProbe(rig)
        length = partial(Length, updates) if isinstance(updates, int) else updates
        self._search = Search(
            rig, length=length, gate=gate, probe=probe, most_s=most_s, most_lost=most_lost, known=known
        )
        self._asks = self._search.run()
        self._clock = LapClock(rig, period=period, few_windows=few_windows)
        self._may_s = math.inf
        """What the lap under way may cost, in seconds beyond the user's own pace."""
        self._rest: Rest | None = None
        self._rested, self._rest_began = 0, 0.0
        self._canary: Canary | None = None
        self._is_counted = False
        self._place = rig.place
        self.done = False
        """Whether the search is over."""
        next(self._asks)  # it asks for a lap of the user's own plan, which is in force
        self._clock.ask(warm=WARM)
        if found is not None:
            self._asks.close()
            self._search.plan = found
            rig.use(found, why="found before")
            self._finish()

    @property
    def plan(self) -> Plan:
        """The plan that has been settled on so far; while another is on trial, that one is in force."""
        return self._canary.plan if self._canary is not None else self._search.plan

    @property
    def is_trying(self) -> bool:
        """Whether plans are tried, rather than that a run which seems short is waited for."""
        return not self.done and not (self._search.is_waiting and self._rest is not None)

    @property
    def idle_updates(self) -> int:
        """Updates after which it has something to do, while it waits for a run that seems short; else none."""
        return 0 if self.done or self.is_trying or self._rest is None else self._rest.updates - self._rested

    @property
    def quiet(self) -> int:
        if self.done:
            return self._canary.quiet if self._canary is not None else 0
        return self._clock.quiet if self._rest is None else self._rest.updates - self._rested - 1

    @property
    def looks_soon(self) -> bool:
        """Whether a gate may be asked after one of the next steps."""
        return self.is_trying or (self._canary is not None and self._canary.looks_soon)

    @property
    def trusted(self) -> int | None:
        """The last step at which the tuned plan was seen to train as the user's own; None while no canary looks."""
        return self._canary.good if self._canary is not None else None

    def drifted(self) -> int | None:
        """The last good step, once, after a canary has found that the plan trains differently; else None."""
        if self._canary is None:
            return None
        good, self._canary.drifted = self._canary.drifted, None
        return good

    def fed(self, seconds: float) -> None:
        """Take in how long the host waited for the next batch. Optional; it shows whether feeding bounds the step."""
        self._clock.fed(seconds)

    def paused(self, seconds: float) -> None:
        """Take in that so many seconds went by for something else than steps: an evaluation, a save."""
        self._clock.paused(seconds)
        self._rest_began += seconds

    def stepped(self, updates: int = 1, windows: int = 1) -> None:
        if self.done:
            if self._canary is not None:
                self._canary.stepped()
            return
        self._place = self._rig.place
        if self._rest is not None:
            self._rested += updates
            if self._rested < self._rest.updates:
                return
            self._go_on(self._rested_lap())
            return
        lap = self._clock.stepped(updates, windows)
        if lap is not None:
            self._go_on(lap)
        elif self._may_s < math.inf and self._spent_s() > self._may_s:
            self._give_up(SpentError(), "what may be spent on a trial is")

    @property
    def diagnosed(self) -> tuple[Diagnosis, Plan] | None:
        """What bounds a step of the user's own plan, as far as it was counted."""
        return self._search.probe.diagnosed

    def failed(self, error: Exception) -> bool:
        """Take in that a step broke. If a plan was on trial, it is dropped, and True says to make the step again."""
        if self.done or self._rig.plan == self._search.plan:
            return False
        self._give_up(TrialError(first_line(error)), "a plan on trial broke a step", self._place)
        return True

    def distrust(self) -> None:
        """Drop the plan that was found from the cache, and keep nothing of this search; the plan in force stays."""
        known, self._search.known = self._search.known, None
        if known is not None:
            known.forget()

    def ended(self, updates: int = 0) -> None:
        """Count the savings: the training is over, so many updates after the last call of `stepped`."""
        if self.done:
            self._count_savings()
            return
        self._rested += updates
        if self._rest is not None and self._rested:
            self._rested_lap()
        self._rig.use(self._search.plan, why="the run ended before tuning did")
        self._search.cut_short()
        self._asks.close()
        self.done = True

    def _rested_lap(self) -> Lap:
        """The rest that is over, booked."""
        self._rig.wait()
        took_s = time.perf_counter() - self._rest_began
        self._rest = None
        search = self._search
        if search.budget is not None:
            # The user's own plan costs and saves nothing, whatever the pace of the machine.
            is_own = search.plan == search.baseline
            search.budget.made(self._rested, self._rested * search.budget.base_s if is_own else took_s)
        return Lap(step_s=took_s / self._rested, updates=self._rested, wall_s=took_s)

    def _count_savings(self) -> None:
        """Write down what the plan that was found has saved, where it is still the one in force."""
        rig, canary, was_counted, self._is_counted = self._rig, self._canary, self._is_counted, True
        tuned = next((entry for entry in reversed(list(rig.ledger)) if entry.kind == "tuned"), None)
        if canary is None or tuned is None or was_counted:
            return
        figures = {name: value for name, value in tuned.figures.items() if name != "saved_s"}
        why = tuned.why
        if rig.plan != tuned.plan or rig.steps < tuned.step:
            figures.pop("net_s", None)
        if rig.allowed_plan(tuned.plan) != tuned.plan:
            figures = {name: value for name, value in figures.items() if name == "cost_s"}
            why = "the data changed, and the feed that was found was left"
        figures = savings(figures, updates=rig.steps - tuned.step, looks_s=canary.spent_s)
        rig.write_down("tuned", "chosen", why, figures=figures, kind="tuned")

    def _go_on(self, lap: Lap) -> None:
        try:
            asked = self._asks.send(lap)
        except StopIteration:
            self._finish()
            return
        self._obey(asked)

    def _spent_s(self) -> float:
        """What the lap under way has taken beyond the user's own pace."""
        updates, wall_s = self._clock.so_far()
        return wall_s - updates * self._search.budget.base_s if self._search.budget is not None else 0.0

    def _give_up(self, reason: BaseException, why: str, place: Place | None = None) -> None:
        """End the trial whose plan is in force; what its lap took is booked."""
        if self._search.budget is not None:
            self._search.budget.made(*self._clock.so_far())
        self._rig.use(self._search.plan, why=why)
        if place is not None:
            self._rig.place = place
        try:
            asked = self._asks.throw(reason)
        except StopIteration:
            self._finish()
            return
        self._obey(asked)

    def _obey(self, asked: Plan | Rest) -> None:
        rig, began = self._rig, time.perf_counter()
        if isinstance(asked, Rest):
            rig.use(self._search.plan)
            if self._search.is_waiting:
                self._search.gate.forget()
            self._rest, self._rested, self._rest_began = asked, 0, began
            return
        warm, self._may_s = 0, self._search.lap_may_s
        if asked != rig.plan:
            feed = asked.feed
            warm = WARM + feed.workers * (feed.prefetch or AHEAD)
            try:
                rig.use(asked, outcome="measured")
            except (RuntimeError, ValueError) as error:  # no memory for its data, say
                self._clock.ask(warm=0, since=began)
                self._give_up(TrialError(first_line(error)), "a plan on trial cannot be obeyed")
                return
        self._clock.ask(warm=warm, since=began)

    def _finish(self) -> None:
        self.done = True
        search = self._search
        search.gate.forget()
        if search.plan != search.baseline:
            self._canary = Canary(
                self._rig, search.gate, plan=search.plan, baseline=search.baseline, takes_s=search.gate_s
            )
