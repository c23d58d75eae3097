"""The gate of a script's training: each part that a plan changes is held against the script's own, by itself.

Nobody but the script can make its step again. What a plan changes in it can be: batches are fetched both ways, the
optimizer's last step is made again both ways, and the calls of its modules are made again both ways, with the inputs
and the gradients that came to their outputs in the last step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hotlap.core.errors import first_line
from hotlap.core.plan import Plan
from hotlap.script.calls.call import Call
from hotlap.script.calls.traces import Untouched
from hotlap.script.training import ScriptTraining
from hotlap.script.update.trials import memory_of
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
from hotlap.tuner.budget import check_allowed
from hotlap.tuner.gates import NUDGES, Judgement
from hotlap.tuner.moment import roundoff, without_dropout


class ScriptGate:
    """Judges plans against the script's own, from where its last step has left it."""

    updates = 8
    """About how many updates a check takes: one call forward and backward for each question."""

    def __init__(self, training: ScriptTraining) -> None:
        self._training = training

    @property
    def is_ready(self) -> bool:
        """Whether there is a call of each module to be made again."""
        return all(call.last_inputs is not None for call in self._training.calls)

    def check(self, plan: Plan) -> Judgement:
        """Whether training goes on as it would have. It leaves no trace in the training."""
        training = self._training
        touched: list[Tensor] = [
            t for one in training.optimizers for group in one.param_groups for t in group["params"]
        ]
        touched += [t for call in training.calls for t in (*call.module.parameters(), *call.module.buffers())]
        if (reason := self._why_no_trial()) is not None:
            return Judgement(ok=False, why=reason)
        try:
            # The script may yet go backward through what it computed before its step.
            with _unsafe_preserve_version_counter(tuple({id(t): t for t in touched}.values())):
                return self._judged(plan)
        except Exception as error:  # whatever a plan, or what the user's code makes of it, may do
            return Judgement(ok=False, why=first_line(error))

    def _why_no_trial(self) -> str | None:
        """Why steps and calls cannot be made again without a trace."""
        training = self._training
        found = [line for one in training.updates.optimizers for line in memory_of(one).unknown]
        found += [line for call in training.calls for line in Untouched(call.module, call.device).unknown]
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
        """Let go of the inputs that were kept."""
        for call in self._training.calls:
            call.forget_inputs()

    def why_not_fed(self, plan: Plan) -> str | None:
        """What batches by the plan's feed have other than the script's own; None where nothing."""
        if plan.feed == self._training.own.feed:
            return None
        return next(filter(None, (serving.why_other(plan.feed) for serving in self._training.servings)), None)

    def _called(self, plan: Plan) -> Judgement:
        figures: dict[str, float] = {}
        is_precise = plan.numerics.precision == self._training.own.numerics.precision
        for call in self._training.calls:
            found = _compared(call, self._training.own, plan, is_precise)
            worse = found.figures.get("cosine", 1.0) < figures.get("cosine", math.inf)
            figures = {**figures, **found.figures} if worse else {**found.figures, **figures}
            if found.why is not None:
                return Judgement(ok=False, why=found.why, figures=figures)
        words = "same maths" if is_precise else f"gradients agree to {shown_cosine(figures['cosine'])}"
        return Judgement(ok=True, why=words, figures=figures)


def _compared(call: Call, own: Plan, plan: Plan, is_precise: bool) -> Agreement:
    if call.last_inputs is None:
        return Agreement(why="no call of it was seen to be compared")
    found = _same(call, own, plan) if is_precise else _alike(call, own, plan)
    if found.why is None:
        return found
    # Other kernels may draw other masks from the same randomness.
    with without_dropout([call.module]) as dropped:
        return (_same if is_precise else _alike)(call, own, plan) if dropped else found


def _same(call: Call, own: Plan, plan: Plan) -> Agreement:
    truth, made = _outcome(call, own), _outcome(call, plan)
    by = roundoff([call.module], call.device, "fp32")

    def noise() -> Noise:
        with _nudged(call.module, by):
            return noise_of(truth, _outcome(call, own), by)

    return same_maths(truth, made, {}, noise)


def _alike(call: Call, own: Plan, plan: Plan) -> Agreement:
    exactly = dataclasses.replace(
        plan, numerics=dataclasses.replace(plan.numerics, precision=own.numerics.precision), execution=own.execution
    )
    if exactly.numerics.layout != own.numerics.layout:
        found = _same(call, own, exactly)
        if found.why is not None:
            return found
    truth, made = _outcome(call, own), _outcome(call, plan)

    def shaken(precision: str, seed: int) -> Outcome:
        with _nudged(call.module, roundoff([call.module], call.device, precision), seed):
            return _outcome(call, own)

    rounding = gaps_between(truth.gradients, shaken("fp32", 1).gradients)
    found = alike(truth, made, None, rounding)
    if found.why is None:
        return found
    # More than a network that does not amplify rounding would show: is it what this one makes of rounding?
    found = alike(truth, made, None, rounding, shaken=[shaken(plan.numerics.precision, seed) for seed in NUDGES])
    if found.why is None and found.blurred:
        return dataclasses.replace(found, why="rounding alone changes gradients too much here to compare them")
    return found


def _outcome(call: Call, plan: Plan) -> Outcome:
    """Forward and backward of a call under a plan; the loss is what its outputs weigh in the script's own."""
    assert call.last_inputs is not None
    check_allowed()
    args, kwargs = call.last_inputs
    outputs, gradients = call.trial(args, kwargs, call.last_output_grads, plan.numerics, plan.execution)
    pairs = zip(outputs, call.last_output_grads, strict=True)
    loss = sum(_weighed(out, grad) for out, grad in pairs if grad is not None)
    return Outcome(loss=loss, gradients=gradients)


def _weighed(output: Tensor, grad: Tensor) -> float:
    (both,) = brought_near({"output": output, "grad": grad})
    return float((both["output"].double() * both["grad"].double()).sum())


@contextmanager
def _nudged(module: nn.Module, by: float, seed: int = 1) -> Iterator[None]:
    """Inside, every weight is moved by that fraction of itself, up or down."""
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
