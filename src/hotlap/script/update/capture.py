"""Steps of an optimizer made by replaying what was recorded of one, with the numbers of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hotlap.core.errors import first_line
from hotlap.engine.optimizers import frozen_hyperparameters, why_not_captured
from hotlap.script.calls.graphs import Recording
from hotlap.script.update.graphs import Desk, UpdateGraph, frozen_names, parameters_of

WARM = 2
"""Steps in a row with the same settings and gradients, made by the optimizer itself before one is recorded."""
PATIENCE = 16
"""Steps that may be no replays, and one more for each four that were."""
MOST_AGAIN = 3
"""How often a step is recorded anew since gradients lie elsewhere: plans that take turns have memory of their own."""
CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")
"""What torch asks the driver before each step, by the names that its versions have for it: it takes a tenth of a
millisecond, and tells nothing new."""


class CapturedUpdate:
    """Makes the steps of one optimizer, in one kind, by replaying; those that are new or odd are left to it."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[[Optimizer], None],
        *,
        make_recorder: Callable[[], Recording],
        desk: Desk,
    ) -> None:
        self._optimizer, self._step, self._make_recorder, self._desk = optimizer, step, make_recorder, desk
        self._graph: UpdateGraph | None = None
        self._look: Any = None
        self._alike = 0
        self._replays = 0
        self._others: list[UpdateGraph] = []
        self._is_tried = False
        first = next(iter(parameters_of(optimizer)), None)
        self._device = first.device if first is not None else torch.device("cpu")
        self.idle = _idle(optimizer)
        """An optimizer of the kind that has nothing to update: it makes the step that was made by a replay."""
        self.warmup_steps = 0
        """Steps that were no replay of what had been recorded before, where there may be one yet."""
        self.given_up: str | None = why_strange(optimizer)
        """Why nothing is captured, once that is known."""

    @property
    def recorded(self) -> bool:
        """Whether there is something to replay."""
        return self._graph is not None

    def replayed(self) -> bool:
        """Make the step by a replay; False, and nothing done, where there is none for it."""
        graph = self._graph
        if graph is not None and graph.is_elsewhere:
            graph = self._graph = self._that_lies_as(graph)
        if graph is not None and graph.is_outrun and len(self._others) < MOST_AGAIN:
            others = [*self._others, graph]
            self.forget()
            self._others = others
            return False
        try:
            made = graph is not None and self._is_usual() and graph.fits and graph.replay()
        except Exception as error:  # the step is then the optimizer's own
            self.give_up(first_line(error))
            return False
        if made:
            self._replays += 1
            self._look = None
        return made

    def _that_lies_as(self, graph: UpdateGraph) -> UpdateGraph:
        """The one that was recorded for where the last gradients lay, if there is one: plans take turns."""
        for number, other in enumerate(self._others):
            if other.lies_as(graph):
                self._others[number] = graph
                other.begin_again()
                return other
        return graph

    def replayed_at_last(self) -> bool:
        """The same, once its counts lie where they are recorded; what does not fit even so is let go of."""
        if self.replayed():
            return True
        if self._graph is not None and not self._graph.fits:
            self.forget()
        return False

    def why_not(self) -> str | None:
        """Why a step of the optimizer, set as it is, cannot be recorded; on a GPU it is tried once with a twin."""
        reason = why_unfit(self._optimizer)
        if reason is None and self._device.type == "cuda" and not self._is_tried:
            reason = why_not_captured(self._optimizer)
            self._is_tried = reason is None
        return reason

    def prepare(self) -> UpdateGraph | None:
        """Told that the optimizer is set to be recorded, before a step that was no replay: a new graph if it is time.

        It is to be `taken` once the optimizer has its own settings again.
        """
        self.warmup_steps += 1
        if self.warmup_steps > PATIENCE + self._replays // 4:
            self.give_up("its settings, or which parameters have gradients, keep changing")
            return None
        try:
            look = self._looked() if self._is_usual() else None
            self._alike = self._alike + 1 if look is not None and look == self._look else 0
            self._look = look
            if self._alike < WARM:
                return None
            reason = self.why_not()
            if reason is not None:
                self.give_up(reason)
                return None
            return UpdateGraph(self._optimizer, self._step, self._make_recorder(), self._desk)
        except Exception as error:  # whatever it is, the optimizer makes its steps itself
            self.give_up(f"it cannot be recorded: {first_line(error)}")
            return None

    def taken(self, graph: UpdateGraph) -> bool:
        """Have a graph that was prepared, and make its first step."""
        graph.settle()
        self._graph = graph
        return self.replayed()

    def give_up(self, reason: str) -> None:
        """Leave all steps to the optimizer."""
        self.forget()
        self.given_up = self.given_up or reason

    def forget(self) -> None:
        """Let go of what was recorded."""
        self._graph, self._look, self._alike = None, None, 0
        self._others = []

    def _looked(self) -> Any:
        """What has to be the same for some steps before one is recorded."""
        parameters = parameters_of(self._optimizer)
        return (
            tuple((id(p), p.data_ptr(), p.grad is not None) for p in parameters),
            frozen_hyperparameters(self._optimizer),
        )

    def _is_usual(self) -> bool:
        """Whether nobody but torch has a part in this step, and it is made where all others are."""
        optimizer = self._optimizer
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or len(torch_optimizer._global_optimizer_pre_hooks) > 1
            or "found_inf" in optimizer.__dict__
            or "grad_scale" in optimizer.__dict__
            or torch.compiler.is_compiling()
        ):
            return False
        return self._desk.is_free(self._device)


def why_strange(optimizer: Optimizer) -> str | None:
    """Why nobody knows what steps of an optimizer do; None where it is one of torch's own."""
    name = type(optimizer).__name__
    if not type(optimizer).__module__.startswith("torch.optim."):
        return f"{name} is none of torch's own optimizers"
    return None if all(group["params"] for group in optimizer.param_groups) else f"{name} has an empty group"


def why_unfit(optimizer: Optimizer) -> str | None:
    """Why steps of an optimizer are not to be recorded as it is now; None where nothing speaks against it."""
    name = type(optimizer).__name__
    groups, parameters = optimizer.param_groups, parameters_of(optimizer)
    if len({parameter.device for parameter in parameters}) > 1:
        return f"{name} has parameters on several devices"
    if any(type(parameter) not in (Tensor, nn.Parameter) for parameter in parameters):
        return f"{name} has parameters that are more than tensors"
    if any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters):
        return f"{name} has parameters in float64, and rates are kept in float32"
    if any(group.get("differentiable") for group in groups):
        return f"{name} is differentiable"
    if not all(_is_plain(group.get(key)) for group in groups for key in ("lr", *frozen_names(group))):
        return f"{name} has settings that are more than plain values"
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(grad.layout is not torch.strided or type(grad) is not Tensor for grad in grads):
        return f"{name} has sparse gradients"
    device = parameters[0].device
    values = [value for kept in optimizer.state.values() for value in kept.values()]
    if any(not isinstance(value, Tensor) or value.device != device for value in values):
        return f"{name} keeps more than tensors on {device}"
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def hush(optimizer: Optimizer) -> None:
    """Have the optimizer not ask the driver before its steps."""
    for name in CHECKS:
        vars(optimizer).setdefault(name, _silently)


def unhush(optimizer: Optimizer) -> None:
    """Take that back."""
    for name in CHECKS:
        if vars(optimizer).get(name) is _silently:
            del vars(optimizer)[name]


def _silently() -> None:
    """Nothing."""


def _idle(optimizer: Optimizer) -> Optimizer:
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(defaults={"differentiable": False}, param_groups=[], state={})
    hush(made)
    return made
