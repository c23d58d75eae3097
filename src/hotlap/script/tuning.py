"""Connects the training of a script to the tuner, and judges plans for it (its gate)."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import PlanError, TrainingError, first_line
from hotlap.core.plan import Feed, Plan
from hotlap.core.torch_private import preserve_version_counter
from hotlap.core.tricks import EVALUATION_FEED
from hotlap.moves import MOVES, everything
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.feed.evaluation_feed import EvaluationFeed
from hotlap.script.feed.loader_proxy import LoaderProxy
from hotlap.script.idle import TrainingSummary
from hotlap.script.lookout import WeightsWatch
from hotlap.script.training import ComputeTimer, ScriptTraining
from hotlap.script.update.capture import parameters_of
from hotlap.script.update.updates import memory_of
from hotlap.store.files import load_plan
from hotlap.store.run_folder import RunFolder
from hotlap.tuner.agreement import (
    Agreement,
    Noise,
    Outcome,
    alike,
    brought_near,
    gaps_between,
    noise_of,
    same_maths,
    shown_cosine,
)
from hotlap.tuner.budget import Length, check_allowed
from hotlap.tuner.gates import NUDGES, Judgement
from hotlap.tuner.known import KnownPlans
from hotlap.tuner.laps import Lap
from hotlap.tuner.moment import roundoff, without_dropout
from hotlap.tuner.probe import Probe
from hotlap.tuner.tuner import PlanChooser, Replay, Tuner

FEW_WINDOWS = 32
"""Up to so many batches an epoch, laps are whole short epochs: what a script saves or shows once an epoch takes as long
as many steps."""
REMEMBERED = 16
"""One step in so many keeps its inputs while gates may need them; it copies the inputs of all modules."""
MOST_LOST = 0.06
"""Share of the script's run that trials may cost before they have saved as much, however much a glance promises."""
FETCHED_S = 1.0
"""What fetching all samples may take whether they are used or not."""


class ScriptTuning:
    """Tunes one training: by the tuner, by the ledger of another run, or with a fixed plan."""

    def __init__(
        self, training: ScriptTraining, *, plan: str | None, tune_s: float | None, length: Callable[[], Length]
    ) -> None:
        """`plan` as in `Settings`. Raises HotlapError if it cannot be read or applied."""
        self.training = training
        self.evaluation_feed = EvaluationFeed(training, length)
        self._weights = WeightsWatch(training)
        self.began = self._last = time.perf_counter()
        self._paused_from: float | None = None
        self._quiet_steps = self._unreported = 0
        """Steps until the tuner needs the next report, and steps since the last one."""
        self._tuner = PlanChooser()
        training.write_down("start", "chosen", "the script's own plan")
        if plan in (None, "auto"):
            self._tuner = Tuner(
                training,
                updates=length,
                most_s=tune_s,
                most_lost=MOST_LOST,
                few_windows=FEW_WINDOWS,
                known=_known_plans(training),
                gate=ScriptGate(training),
                probe=ScriptProbe(training),
            )
        elif plan == "max":
            why = "everything that this machine and script support, unmeasured"
            training.use(_max_plan(training, length()), why=why)
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
        """The best plan so far."""
        return self._tuner.plan or self.training.plan

    @property
    def looks_at_calls(self) -> bool:
        """Whether the session must see module calls, to change or compare them."""
        return (self._tuner.looks_soon and not self._quiet_steps) or self.training.computes_otherwise

    @property
    def has_nothing_to_do(self) -> bool:
        """Whether the script's own plan is in force for good."""
        is_over = self._tuner.done and not isinstance(self._tuner, Replay)
        return is_over and self.plan == self.training.plan == self.training.own

    @property
    def idle_updates(self) -> int:
        """Updates until there is something to do, if the script's own plan is in force until then; else 0."""
        idle = self._tuner.idle_updates
        return idle if idle and self.plan == self.training.plan == self.training.own else 0

    @property
    def changes_calls(self) -> bool:
        """Whether modules compute differently from the script's own plan, now or after this trial."""
        return any(self.training.changes_calls(plan) for plan in (self.plan, self.training.plan))

    @property
    def is_searching(self) -> bool:
        return self._tuner.is_trying

    def ignores(self, proxy: LoaderProxy) -> bool:
        """Whether this batch needs no report: it belongs to the loop, and the tuner waits."""
        return self._quiet_steps > 0 and self._paused_from is None and proxy in self.training.proxies

    def batch_given(self, proxy: LoaderProxy, seconds: float) -> None:
        """A loader gave a batch, after the script waited so many seconds."""
        asked, is_of_loop = time.perf_counter() - seconds, proxy in self.training.proxies
        if not is_of_loop:
            self.evaluation_feed.batch_given(proxy, seconds)
        elif self._paused_from is not None:
            self._tuner.paused(max(0.0, asked - self._paused_from))
            self._paused_from = None
        if is_of_loop:
            self._tuner.fed(seconds)

    def epoch_began(self, proxy: LoaderProxy) -> None:
        """A loader begins an epoch; with a loader outside the loop, something else begins, such as an evaluation."""
        if proxy not in self.training.proxies:
            self._pause()
            if self.training.uses(EVALUATION_FEED):
                self.evaluation_feed.epoch_began(proxy, self.plan.feed)

    def epoch_ended(self, proxy: LoaderProxy) -> None:
        """A loader has no more batches in this epoch."""
        if self.training.proxies and proxy is self.training.proxies[0]:
            self._pause()

    def data_changed(self, proxy: LoaderProxy, feed: Feed, why: str) -> None:
        """A loader's data changed, so its feed went back to the script's own."""
        if proxy in self.training.proxies:
            self.training.data_changed(feed, why)
        else:
            self.evaluation_feed.data_changed(proxy, why)

    def skips_tuner(self, optimizer: Optimizer) -> bool:
        """Count a step that the tuner need not see; False for steps that it must see, and those of other loops."""
        if not self._quiet_steps or optimizer is not self.training.optimizer:
            return bool(self._quiet_steps) and optimizer in self.training.optimizers
        self.count_step(optimizer)
        self._quiet_steps, self._unreported = self._quiet_steps - 1, self._unreported + 1
        return True

    def report_next_step(self) -> None:
        """Report the next step to the tuner in any case."""
        self._quiet_steps = 0

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer of the loop made a step."""
        if not self.count_step(optimizer):
            return
        made, self._unreported = self._unreported + 1, 0
        self._tuner.stepped(made, made)
        self._quiet_steps = self._tuner.quiet
        if self._tuner.looks_soon:
            is_due = made > 1 or self.training.steps % REMEMBERED == 0
            for call in self.training.calls:
                if is_due or call.last_inputs is None:
                    call.remember_next()
            if made > 1:
                self._quiet_steps = 0  # so that the tuner sees the next step

    def count_step(self, optimizer: Optimizer) -> bool:
        """Count a step; False if it belongs to another optimizer than the one whose steps count."""
        if optimizer is not self.training.optimizer:
            return False
        self.training.stepped()
        self._last = time.perf_counter()
        if self._weights.is_due(self._last):
            self._look_at_weights()
        return True

    def _look_at_weights(self) -> None:
        """Drop a plan on trial under which weights are not finite any more, and keep no plan for later runs."""
        line = self._weights.look()
        if line is not None and self.training.plan != self.training.own:
            self._tuner.distrust()
            self._tuner.failed(TrainingError(line))

    def count_idle_updates(self, updates: int, last: float) -> None:
        """Count updates made while idle, fewer than `idle_updates`, and when the last of them happened."""
        self._paused_from, self._last = None, last
        self._quiet_steps = self._unreported = 0
        self.training.steps += updates
        if updates:
            self._tuner.stepped(updates)

    def close(self) -> None:
        """The training is over: restore everything."""
        self._look_at_weights()
        self._tuner.ended(self._unreported)
        try:
            self.evaluation_feed.close()
        finally:
            self.training.close()

    def summary(self) -> TrainingSummary:
        training, tricks = self.training, self.plan.execution.without
        left_out = [f"left out: {', '.join(tricks)}"] if tricks else []
        return TrainingSummary(
            ledger=training.ledger,
            plan=self.plan,
            before=training.before,
            steps=training.steps,
            began=self.began,
            last=self._last,
            notes=[*left_out, *self.evaluation_feed.lines, *filter(None, [self._weights.line])],
            device=str(training.device),
        )

    def _pause(self) -> None:
        if self._paused_from is None:
            self._paused_from = time.perf_counter()


class ScriptProbe(Probe):
    """Takes the GPU time of a step from the compute timer of the training."""

    def __init__(self, training: ScriptTraining) -> None:
        super().__init__(training.device)
        self._compute_timer = training.compute_timer = ComputeTimer(training.device)

    def look(self, lap: Lap, *, may_s: float) -> None:
        """Find out what bounds a step, from measurements made so far."""
        super().look(lap, may_s=may_s)
        self.busy_s = self._compute_timer.step_s

    def is_bound_to_pay(self, plan: Plan, proposed: Plan) -> bool:
        """Whether the device computes for most of a step: its arithmetic was not counted."""
        return self.is_busy


def _max_plan(training: ScriptTraining, length: Length) -> Plan:
    """The plan with everything that this training supports; the script's own feed if the batches would differ.

    Samples are not fetched in advance where most of them will not be used.
    """
    plan = everything(training).plan
    first = training.proxies[0] if training.proxies else None
    is_dear = length.known and training.holding_s(plan.feed) > FETCHED_S
    if is_dear and first is not None and first.source is not None:
        batches = length.updates * training.epoch_windows / training.epoch_updates
        if batches * (first.batch_size or 1) < len(first.source):
            plan = everything(training, moves=[move for move in MOVES if move.feeds != "held"]).plan
    reason = ScriptGate(training).why_not_fed(plan)
    if reason is None:
        return plan
    training.write_down(f"feed {plan.feed.kind}", "not tried", reason)
    return plan.with_feed(training.own.feed)


def _known_plans(training: ScriptTraining) -> KnownPlans | None:
    first = training.proxies[0] if training.proxies else None
    if first is None or first.source is None or not first.batch_size:
        return None
    return KnownPlans(training, batch_size=first.batch_size)


# --- the gate ----------------------------------------------------------------------------
#
# The gate compares each part that a plan changes with the script's own part. Only the script can repeat a whole step.
# hotlap can repeat parts of it: it fetches batches both ways and makes the optimizer's last step both ways. It also
# repeats module calls both ways, with the inputs and output gradients of the last step.


class ScriptGate:
    """Judges plans against the script's own, starting from the state after its last step."""

    updates = 8
    """About how many updates a check costs: one forward and backward pass for each comparison."""

    def __init__(self, training: ScriptTraining) -> None:
        self._training = training

    @property
    def is_ready(self) -> bool:
        """Whether inputs of each module are there to repeat a call."""
        return all(call.last_inputs is not None for call in self._training.calls)

    def check(self, plan: Plan) -> Judgement:
        """Whether training continues as it would without the plan. The check does not change the training."""
        training = self._training
        touched = [weight for optimizer in training.optimizers for weight in parameters_of(optimizer)]
        touched += [t for call in training.calls for t in (*call.module.parameters(), *call.module.buffers())]
        if (reason := self._why_no_trial()) is not None:
            return Judgement(ok=False, why=reason)
        try:
            # The script may still call backward on what it computed before its step.
            with preserve_version_counter(tuple({id(t): t for t in touched}.values())):
                return self._judged(plan)
        except Exception as error:  # a plan or the user's code may raise anything
            return Judgement(ok=False, why=first_line(error))

    def _why_no_trial(self) -> str | None:
        """Why steps and calls cannot be repeated without changing something; None if they can."""
        training = self._training
        found = [line for one in training.updates.optimizers for line in memory_of(one).unknown]
        found += [line for call in training.calls for line in ModuleState(call.module, call.device).unknown]
        return next(iter(found), None)

    def _judged(self, plan: Plan) -> Judgement:
        training = self._training
        reason = training.supports(plan) or self.why_not_fed(plan)
        if reason is None:
            captured = plan.execution.mode == "captured"
            reason = training.updates.why_other(plan.numerics.optimizer, captured=captured)
        if reason is not None:
            return Judgement(ok=False, why=reason)
        if not training.changes_calls(plan):
            return Judgement(ok=True, why="same maths")
        return self._called(plan)

    def forget(self) -> None:
        """Release the inputs that were kept."""
        for call in self._training.calls:
            call.forget_inputs()

    def why_not_fed(self, plan: Plan) -> str | None:
        """How batches of the plan's feed differ from the script's own; None if they are the same."""
        if plan.feed == self._training.own.feed:
            return None
        return next(filter(None, (proxy.why_other(plan.feed) for proxy in self._training.proxies)), None)

    def _called(self, plan: Plan) -> Judgement:
        figures: dict[str, float] = {}
        is_precise = plan.numerics.precision == self._training.own.numerics.precision
        for call in self._training.calls:
            found = _compare(call, self._training.own, plan, is_precise)
            worse = found.figures.get("cosine", 1.0) < figures.get("cosine", math.inf)
            figures = {**figures, **found.figures} if worse else {**found.figures, **figures}
            if found.why is not None:
                return Judgement(ok=False, why=found.why, figures=figures)
        words = "same maths" if is_precise else f"gradients agree to {shown_cosine(figures['cosine'])}"
        return Judgement(ok=True, why=words, figures=figures)


def _compare(call: ModuleCall, own: Plan, plan: Plan, is_precise: bool) -> Agreement:
    """Compare a call under both plans, as it is and without dropout; one agreement is enough.

    Other kernels may draw other dropout masks from the same random state; those of another precision mostly do. Where
    neither agrees, the result without dropout is the one to report: no mask explains its difference.
    """
    if call.last_inputs is None:
        return Agreement(why="hotlap has seen no call of it to compare")
    judge = _same_maths if is_precise else _agreement

    def as_it_is() -> Agreement:
        return judge(call, own, plan)

    def without_masks() -> Agreement | None:
        with without_dropout([call.module]) as has_dropout:
            return judge(call, own, plan) if has_dropout else None

    if is_precise:
        found = as_it_is()
        return found if found.why is None else without_masks() or found
    found_without = without_masks()
    if found_without is not None and found_without.why is None:
        return found_without
    found = as_it_is()
    return found if found.why is None else found_without or found


def _same_maths(call: ModuleCall, own: Plan, plan: Plan) -> Agreement:
    truth, made = _outcome(call, own), _outcome(call, plan)
    by = roundoff([call.module], call.device, "fp32")

    def noise() -> Noise:
        with _perturbed(call.module, by):
            return noise_of(truth, _outcome(call, own), by)

    return same_maths(truth, made, {}, noise)


def _agreement(call: ModuleCall, own: Plan, plan: Plan) -> Agreement:
    exactly = dataclasses.replace(
        plan, numerics=dataclasses.replace(plan.numerics, precision=own.numerics.precision), execution=own.execution
    )
    if exactly.numerics.layout != own.numerics.layout:
        found = _same_maths(call, own, exactly)
        if found.why is not None:
            return found
    truth, made = _outcome(call, own), _outcome(call, plan)

    def shaken(precision: str, seed: int) -> Outcome:
        with _perturbed(call.module, roundoff([call.module], call.device, precision), seed):
            return _outcome(call, own)

    rounding = gaps_between(truth.gradients, shaken("fp32", 1).gradients)
    found = alike(truth, made, None, rounding)
    if found.why is None:
        return found
    # The gap is larger than in a network that does not amplify rounding: compare it with what rounding does here.
    found = alike(truth, made, None, rounding, shaken=[shaken(plan.numerics.precision, seed) for seed in NUDGES])
    if found.why is None and found.blurred:
        return dataclasses.replace(found, why="rounding alone changes gradients too much here to compare them")
    return found


def _outcome(call: ModuleCall, plan: Plan) -> Outcome:
    """Forward and backward pass of a call under a plan; the loss weighs outputs by their gradients in the script."""
    assert call.last_inputs is not None
    check_allowed()
    args, kwargs = call.last_inputs
    outputs, gradients = call.trial(args, kwargs, call.last_output_grads, plan.numerics, plan.execution)
    pairs = zip(outputs, call.last_output_grads, strict=True)
    loss = sum(_weighted_sum(out, grad) for out, grad in pairs if grad is not None)
    return Outcome(loss=loss, gradients=gradients)


def _weighted_sum(output: Tensor, grad: Tensor) -> float:
    (both,) = brought_near({"output": output, "grad": grad})
    return float((both["output"].double() * both["grad"].double()).sum())


@contextmanager
def _perturbed(module: nn.Module, by: float, seed: int = 1) -> Iterator[None]:
    """Inside, every weight differs by that fraction of itself, up or down."""
    weights: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.is_floating_point():
                generator = torch.Generator(parameter.device).manual_seed(seed)
                weights.append((parameter, parameter.detach().clone()))
                sign = torch.empty_like(parameter).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
                parameter.add_(sign.mul_(parameter), alpha=max(by, torch.finfo(parameter.dtype).eps / 2))
    try:
        yield
    finally:
        with torch.no_grad():
            for moved, was in weights:
                moved.copy_(was)
