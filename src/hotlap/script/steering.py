"""One training of a script under a tuner: what the session sees of it, told on in the tuner's own terms."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from torch.optim import Optimizer

from hotlap.core.errors import PlanError
from hotlap.core.plan import Feed, Plan
from hotlap.core.tricks import EVALUATION_FEED
from hotlap.moves import everything
from hotlap.script.busy import Busy
from hotlap.script.feed.evaluating import Evaluating
from hotlap.script.feed.serving import Serving
from hotlap.script.judging import ScriptGate
from hotlap.script.resting import Trained
from hotlap.script.training import ScriptTraining
from hotlap.store.files import load_plan
from hotlap.store.run_folder import RunFolder
from hotlap.tuner.budget import Length
from hotlap.tuner.known import KnownPlans
from hotlap.tuner.laps import Lap
from hotlap.tuner.probe import Probe
from hotlap.tuner.tuner import Replay, Tuner

FEW_WINDOWS = 32
"""Batches of an epoch up to which laps are whole epochs, where these are short: what a script saves or shows in each
of them takes as long as many steps."""
REMEMBERED = 16
"""One step in so many is remembered while gates may be asked: it costs copies of what modules are called with."""


class Steering:
    """Steers one training: by a tuner, by the ledger of another run, or with one plan for all of it."""

    def __init__(
        self, training: ScriptTraining, *, plan: str | None, tune_s: float | None, length: Callable[[], Length]
    ) -> None:
        """`plan` as `Settings` has it. Raises HotlapError where it cannot be had."""
        self.training = training
        self.evaluating = Evaluating(training, length)
        self.began = self._last = time.perf_counter()
        self._paused_from: float | None = None
        self._quiet = self._dozed = 0
        """Steps before the next that the tuner has to be told of, and those since the last."""
        self._tuner: Tuner | Replay | None = None
        training.write_down("start", "chosen", "the script's own plan")
        if plan in (None, "auto"):
            self._tuner = Tuner(
                training,
                updates=length,
                most_s=tune_s,
                few_windows=FEW_WINDOWS,
                known=_known(training),
                gate=ScriptGate(training),
                probe=ScriptProbe(training),
            )
        elif plan == "max":
            training.use(_all_of_it(training), why="everything that can be done, unmeasured")
        elif Path(str(plan)).is_dir():
            self._tuner = Replay(training, RunFolder.open(str(plan)).read_ledger())
        else:
            asked = load_plan(str(plan))
            reason = training.supports(asked) or ScriptGate(training).why_not_fed(asked)
            if reason is not None:
                raise PlanError(reason)
            training.use(asked, why=f"from {plan}")

    @property
    def plan(self) -> Plan:
        """The plan that has been settled on so far."""
        return self._tuner.plan if self._tuner is not None else self.training.plan

    @property
    def looks_at_calls(self) -> bool:
        """Whether the calls of its modules have to be seen, to change them or to compare them."""
        may = isinstance(self._tuner, Tuner) and self._tuner.looks_soon and not self._quiet
        return may or self.training.computes_otherwise

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether the script's own plan is in force for good."""
        is_over = self._tuner is None or (isinstance(self._tuner, Tuner) and self._tuner.done)
        return is_over and self.plan == self.training.plan == self.training.own

    @property
    def idle_updates(self) -> int:
        """Updates after which there is something to do, where the script's own plan is in force until then; else 0."""
        idle = self._tuner.idle_updates if isinstance(self._tuner, Tuner) else 0
        return idle if idle and self.plan == self.training.plan == self.training.own else 0

    @property
    def changes_calls(self) -> bool:
        """Whether modules compute otherwise than the script has them, now or after this trial."""
        return any(self.training.changes_calls(plan) for plan in (self.plan, self.training.plan))

    @property
    def is_searching(self) -> bool:
        """Whether plans are being tried."""
        return isinstance(self._tuner, Tuner) and self._tuner.is_trying

    def hears_nothing_of(self, serving: Serving) -> bool:
        """Whether this batch of the loop needs no report: the tuner waits, and nothing else began or ended."""
        return self._quiet > 0 and self._paused_from is None and serving in self.training.servings

    def served(self, serving: Serving, seconds: float) -> None:
        """Told that a loader gave a batch, for which the script waited so long."""
        asked, is_of_loop = time.perf_counter() - seconds, serving in self.training.servings
        if not is_of_loop:
            self.evaluating.served(serving, seconds)
        elif self._paused_from is not None:
            if isinstance(self._tuner, Tuner):
                self._tuner.paused(max(0.0, asked - self._paused_from))
            self._paused_from = None
        if is_of_loop and isinstance(self._tuner, Tuner):
            self._tuner.fed(seconds)

    def begun(self, serving: Serving) -> None:
        """Told that a loader begins an epoch; with one that is no part of the loop, something else begins."""
        if serving not in self.training.servings:
            self._pause()
            if self.training.may(EVALUATION_FEED):
                self.evaluating.begun(serving, self.plan.feed)

    def ended(self, serving: Serving) -> None:
        """Told that a loader has no more batches in this epoch."""
        if self.training.servings and serving is self.training.servings[0]:
            self._pause()

    def changed(self, serving: Serving, feed: Feed, why: str) -> None:
        """Told that a loader's data changed, so that its feed was left for the script's own."""
        if serving in self.training.servings:
            self.training.data_changed(feed, why)
        else:
            self.evaluating.changed(serving, why)

    def dozes(self, optimizer: Optimizer) -> bool:
        """Count a step that the tuner does not have to hear of. False for other steps, and those of other loops."""
        if not self._quiet or optimizer is not self.training.optimizer:
            return bool(self._quiet) and optimizer in self.training.optimizers
        self.counted(optimizer)
        self._quiet, self._dozed = self._quiet - 1, self._dozed + 1
        return True

    def stay_awake(self) -> None:
        """Let the next step be seen, whatever the tuner needs."""
        self._quiet = 0

    def stepped(self, optimizer: Optimizer) -> None:
        """Told that an optimizer of the loop made a step."""
        if not self.counted(optimizer) or self._tuner is None:
            return
        if not isinstance(self._tuner, Tuner):
            self._tuner.stepped()
            return
        made, self._dozed = self._dozed + 1, 0
        self._tuner.stepped(made, made)
        self._quiet = self._tuner.quiet
        if self._tuner.looks_soon:
            is_due = made > 1 or self.training.steps % REMEMBERED == 0
            for call in self.training.calls:
                if is_due or call.last_inputs is None:
                    call.remember_next()
            if made > 1:
                self._quiet = 0  # before the next is seen

    def counted(self, optimizer: Optimizer) -> bool:
        """Take note of a step; False where it is not of the optimizer whose steps are counted."""
        if optimizer is not self.training.optimizer:
            return False
        self.training.stepped()
        self._last = time.perf_counter()
        return True

    def slept(self, updates: int, last: float) -> None:
        """Told of updates at once, less than `idle_updates`, and when the last of them was made."""
        self._paused_from, self._last = None, last
        self._quiet = self._dozed = 0
        self.training.steps += updates
        if updates and isinstance(self._tuner, Tuner):
            self._tuner.stepped(updates)

    def close(self) -> None:
        """The training is over: leave everything as the script made it."""
        if isinstance(self._tuner, Tuner):
            self._tuner.ended(self._dozed)
        try:
            self.evaluating.close()
        finally:
            self.training.close()

    def trained(self) -> Trained:
        """What there is to report of the training, as things stand."""
        training = self.training
        return Trained(
            ledger=training.ledger,
            plan=self.plan,
            before=training.before,
            steps=training.steps,
            began=self.began,
            last=self._last,
            notes=[*self._left_out, *self.evaluating.lines],
        )

    @property
    def _left_out(self) -> list[str]:
        """The tricks that are left out, in a line for people."""
        names = self.plan.execution.without
        return [f"left out: {', '.join(names)}"] if names else []

    def _pause(self) -> None:
        if self._paused_from is None:
            self._paused_from = time.perf_counter()


class ScriptProbe(Probe):
    """Knows how long the device computes for a step from looks in passing."""

    def __init__(self, training: ScriptTraining) -> None:
        super().__init__(training.device)
        self._busy = training.busy = Busy(training.device)

    def look(self, lap: Lap, *, may_s: float) -> None:
        """Find out what bounds it; nothing is made for that."""
        super().look(lap, may_s=may_s)
        self.busy_s = self._busy.step_s


def _all_of_it(training: ScriptTraining) -> Plan:
    """Everything that the script's training can obey; its own feed where another brings other batches."""
    plan = everything(training).plan
    reason = ScriptGate(training).why_not_fed(plan)
    if reason is None:
        return plan
    training.write_down(f"feed {plan.feed.kind}", "not tried", reason)
    return plan.with_feed(training.own.feed)


def _known(training: ScriptTraining) -> KnownPlans | None:
    first = training.servings[0] if training.servings else None
    if first is None or first.source is None or not first.batch_size:
        return None
    return KnownPlans(training, batch_size=first.batch_size)
