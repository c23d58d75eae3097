"""The steps of a training: one for each plan that computes them another way, kept with its recordings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.plan import MOST_REPLAY_STEPS, Execution, Numerics, Plan
from hotlap.core.tricks import (
    ATTENTION_KERNEL,
    CAPTURED_UPDATE,
    CAST_TOGETHER,
    LOSS_WITHOUT_WAITING,
    OVERLAPPED_GRADIENTS,
    REWIRED_LAYERS,
)
from hotlap.engine.assists.attention import Attention
from hotlap.engine.assists.overlap import Overlap
from hotlap.engine.assists.rewiring import rewire, without_waiting
from hotlap.engine.blocks import Checkpointing
from hotlap.engine.capture.captured_step import CapturedStep, ReplayOutputs
from hotlap.engine.capture.recording import Recorder
from hotlap.engine.compiling import CompiledStep, Compiling
from hotlap.engine.exchange import Exchange
from hotlap.engine.layout import Layout
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.optimizers import has_step_hooks, why_not_captured
from hotlap.engine.precision import AUTOCAST
from hotlap.engine.scaling import Guards
from hotlap.engine.schedules import Rates, Schedule, moves_rates_only
from hotlap.engine.step import EagerStep

Step = EagerStep | CapturedStep


class StepCache:
    """Creates the step of a plan at first use, and keeps it.

    `note` is called with the reason if a plan is obeyed in part only. `tell_attention` is called with the attention
    kernels of captured steps, and the seconds that choosing them took.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        schedule: Schedule,
        totals: Totals,
        *,
        modules: Sequence[nn.Module],
        device: torch.device,
        layout: Layout,
        guards: Guards,
        compiling: Compiling,
        clip: float | None,
        note: Callable[[str], None],
        tell_attention: Callable[[str, float], None],
    ) -> None:
        self._objective, self._optimizer, self._schedule, self._totals = objective, optimizer, schedule, totals
        self._modules, self._device, self._layout, self._guards = modules, device, layout, guards
        self._compiling, self._clip, self._note = compiling, clip, note
        self._attention = Attention(tell_attention)
        self._made: dict[tuple[Numerics, Execution, int], Step] = {}
        self._recorder: Recorder | None = None
        self._outputs: ReplayOutputs | None = None
        self.exchange: Exchange | None = None
        """What ranks exchange, where there are several."""

    def values(self) -> Iterator[Step]:
        """The steps that are kept."""
        return iter(self._made.values())

    def of(self, plan: Plan) -> Step:
        """The step of a plan. Steps of other plans are kept with their recordings."""
        numerics, execution, blocks = plan.numerics, plan.execution, plan.memory.checkpoint
        # A step does not depend on the feed, and each window knows its number of updates.
        key = (numerics, dataclasses.replace(execution, replay_steps=1), blocks)
        if key not in self._made:
            self._made[key] = self._new(numerics, execution, blocks)
        return self._made[key]

    def attention(self, execution: Execution) -> AbstractContextManager[None]:
        """Inside, attention uses the kernels that such steps are recorded with."""
        # torch's compiler chooses attention kernels itself, and would trace the choice.
        chooses = execution.mode == "captured" and execution.compile == "no"
        return self._attention if chooses and ATTENTION_KERNEL not in execution.without else nullcontext()

    def keep(self, step: Step) -> None:
        """Keep only this step."""
        self._made = {key: one for key, one in self._made.items() if one is step}

    def clear(self) -> None:
        """Release all steps."""
        self._made.clear()

    def forget(self) -> None:
        """Release all recordings."""
        for step in self._made.values():
            step.forget()

    def settle(self) -> None:
        """Bring schedules on the host up to date with those that moved on the device."""
        for step in self._made.values():
            if step.rates is not None:
                step.rates.settle()

    def _new(self, numerics: Numerics, execution: Execution, blocks: int) -> Step:
        captured = execution.mode == "captured"
        why_split = self._why_split(execution) if captured else None
        scale, on_device = self._guards.of(numerics.precision)
        rates = None
        if (captured and why_split is None) or (on_device and self._schedule.moves_per_update):
            rates = Rates(
                self._optimizer, self._schedule, self._device, updates=MOST_REPLAY_STEPS, counted=scale is not None
            )
        kind: Callable[..., EagerStep] = EagerStep
        if execution.compile != "no":
            kind = functools.partial(CompiledStep, self._compiling)
        eager = kind(
            self._objective,
            self._optimizer,
            self._schedule,
            self._totals,
            device=self._device,
            numerics=numerics,
            execution=execution,
            layout=self._layout,
            clip=self._clip,
            scale=scale,
            skips_on_device=on_device,
            rates=rates,
            exchange=self.exchange if execution.ranks > 1 else None,
        )
        if blocks:
            checkpointing = Checkpointing(self._objective.model, blocks)
            eager.gradients = checkpointing.during(eager.gradients)  # type: ignore[method-assign]
        elif captured and execution.compile == "no":
            # torch's compiler casts by itself. Checkpointed blocks, computed again, would not find the cast weights.
            eager.overlap = self._overlap(numerics, execution)
        return self._recording(eager, why_split, execution) if captured else eager

    def _overlap(self, numerics: Numerics, execution: Execution) -> Overlap | None:
        dtype = AUTOCAST.get(numerics.precision)
        overlaps, casts = (name not in execution.without for name in (OVERLAPPED_GRADIENTS, CAST_TOGETHER))
        if not overlaps and (dtype is None or not casts):
            return None
        return Overlap(self._device, dtype, overlaps=overlaps, casts_together=casts)

    def _recording(self, eager: EagerStep, why_split: str | None, execution: Execution) -> CapturedStep:
        without = execution.without
        adapted = rewire(*self._modules) if REWIRED_LAYERS not in without else None
        if adapted is not None:
            eager.gradients = adapted.during(eager.gradients)  # type: ignore[method-assign]
        if LOSS_WITHOUT_WAITING not in without:
            eager.gradients = without_waiting(eager.gradients)  # type: ignore[method-assign]
        # The captures of all plans share one memory pool, since they are replayed one after the other.
        self._recorder = self._recorder or Recorder(self._device)
        self._outputs = self._outputs or ReplayOutputs(self._device)
        return CapturedStep(
            eager,
            device=self._device,
            recorder=self._recorder,
            outputs=self._outputs,
            why_split=why_split,
            attention=self.attention(execution),
            note=self._note,
            without=without,
        )

    def _why_split(self, execution: Execution) -> str | None:
        """Why the optimizer's step stays outside a capture, or None where it can be recorded."""
        if CAPTURED_UPDATE in execution.without:
            return f"the plan leaves {CAPTURED_UPDATE} out"
        if any(isinstance(group["lr"], Tensor) for group in self._optimizer.param_groups):
            return "its learning rate is the user's tensor"
        if has_step_hooks(self._optimizer):
            return "the user's hooks run with it"
        if not moves_rates_only(self._schedule, self._optimizer):
            return f"{type(self._schedule.scheduler).__name__} moves more than the learning rate"
        return why_not_captured(self._optimizer)
