"""One optimizer update, done right: pieces weighted by samples, clipped once, schedule moved once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from hotlap.data.batches import Batch, to_device
from hotlap.engine.objective import Objective, Scored, Totals
from hotlap.engine.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one update, in the pieces that go through the model one after the other."""

    pieces: list[Batch]
    sizes: list[int]
    all_count: bool = False
    """Whether it is known that the loss ignores none of its targets."""

    @property
    def samples(self) -> int:
        """Samples in all pieces together."""
        return sum(self.sizes)


def precision_context(precision: str, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What forward passes run inside, made anew for each."""
    if precision == "bf16":
        return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext


class EagerStep:
    """Runs an update operation by operation."""

    def __init__(
        self,
        objective: Objective,
        optimizer: Optimizer,
        schedule: Schedule,
        totals: Totals,
        *,
        device: torch.device,
        precision: str,
        clip: float | None,
        skip_nonfinite: bool,
    ) -> None:
        self._objective = objective
        self._optimizer = optimizer
        self._schedule = schedule
        self._totals = totals
        self._device = device
        self._moves = device.type != "cpu"
        self._context = precision_context(precision, device)
        self._clip = clip
        self._skip_nonfinite = skip_nonfinite
        self._modules = [m for m in (objective.model, objective.loss) if isinstance(m, nn.Module)]
        self._held = -1
        self._all: list[Tensor] = []
        self._strangers: list[Tensor] = []

    def __call__(self, window: Window) -> tuple[Tensor, bool]:
        """Make one update; the window's loss, and whether the weights were really updated."""
        self._optimizer.zero_grad(set_to_none=True)
        self._parameters()
        for parameter in self._strangers:
            parameter.grad = None
        if len(window.pieces) == 1:
            loss, scores = self._whole(window)
        else:
            loss, scores = self._in_pieces(window)
        updated = self._update()
        if updated:
            # A window that was left out does not count in the running loss either.
            for scored in scores:
                self._totals.add(scored)
            if self._schedule.moves_per_update:
                self._schedule.move()
        return loss, updated

    def _whole(self, window: Window) -> tuple[Tensor, list[Scored]]:
        with self._context():
            batch = self._here(window.pieces[0])
            scored = self._objective.whole(batch, window.sizes[0], all_count=window.all_count)
        torch.autograd.backward(scored.loss)
        return scored.loss.detach(), [scored]

    def _in_pieces(self, window: Window) -> tuple[Tensor, list[Scored]]:
        """Gradients of the whole window: means weighted by samples; counted sums divided once at the end."""
        everything = window.samples
        total: Tensor | float = 0.0
        count: Tensor | float = 0
        scores = []
        for batch, samples in zip(window.pieces, window.sizes, strict=True):
            with self._context():
                scored = self._objective.piece(self._here(batch), samples)
            adds_up = scored.counted or self._objective.sums
            torch.autograd.backward(scored.loss if adds_up else scored.loss * (samples / everything))
            scores.append(scored._replace(loss=scored.loss.detach()))
            total = total + scores[-1].loss * scored.factor
            count = count + scored.weight
        if any(scored.counted for scored in scores):
            self._divide_gradients(count)
        return torch.as_tensor(total if self._objective.sums else total / count), scores

    def _divide_gradients(self, count: Tensor | float) -> None:
        grads = self._gradients()
        if isinstance(count, Tensor):
            count = count.to(grads[0].device, torch.promote_types(grads[0].dtype, torch.float32))
        torch._foreach_div_(grads, count)

    def _update(self) -> bool:
        if self._clip is not None:
            norm = clip_grad_norm_(self._parameters(), self._clip)
        elif self._skip_nonfinite:
            norm = get_total_norm(self._gradients())
        # The only wait of a step, and only where the user asked for it.
        if self._skip_nonfinite and not torch.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            return False
        self._optimizer.step()
        return True

    def _here(self, batch: Batch) -> Batch:
        return to_device(batch, self._device, non_blocking=True) if self._moves else batch

    def _parameters(self) -> list[Tensor]:
        """All that may have a gradient: the optimizer's parameters, the model's and the loss's."""
        groups = self._optimizer.param_groups
        held = len(groups[0]["params"]) if len(groups) == 1 else sum(len(group["params"]) for group in groups)
        if held != self._held:
            mine = [p for group in self._optimizer.param_groups for p in group["params"]]
            every = [p for module in self._modules for p in module.parameters()]
            # By identity: tensors compare by value.
            self._all = list({id(p): p for p in (*every, *mine)}.values())
            known = {id(p) for p in mine}
            # Their gradients would pile up from step to step: the optimizer does not know them.
            self._strangers = [p for p in every if id(p) not in known]
            self._held = held
        return self._all

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._parameters() if p.grad is not None]
