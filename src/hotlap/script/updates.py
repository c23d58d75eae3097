"""The optimizers of a script under a changeable kind of step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotlap.engine.optimizers import Fusion, is_fused, settle_counts, why_not_fused
from hotlap.tuner.gradients import Parts, gaps_between, percent
from hotlap.tuner.rounding import GRAIN, SAME

SCALES = "_step_supports_amp_scaling"
"""By which GradScaler knows, before a step, that the optimizer itself takes the scale out of its gradients."""
TRIED = 2
"""Steps that are compared: the second one needs what the first has left."""


class Updates:
    """Makes the steps of some optimizers with fused kernels, or as the script has set them.

    Settings are changed for the time of a step alone: in between, the script finds them as it made them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = list(optimizers)
        self.own = "fused" if all(is_fused(one) for one in self.optimizers) else "plain"
        self._reasons: dict[int, str | None] = {}
        self._fusions: dict[int, Fusion] = {}
        self._kind = self.own
        self._before: _Look | None = None
        self._hooks: list[Any] = []

    def supports(self, kind: str) -> str | None:
        """Why no optimizer can make its steps so; None where one can at least."""
        if kind == self.own:
            return None
        if kind == "plain":
            return "the script has fused its optimizer itself"
        reasons = [self._why_not(one) for one in self.optimizers]
        return None if None in reasons else reasons[0]

    def use(self, kind: str) -> None:
        """Make steps so, from the next on."""
        if kind == self._kind:
            return
        self._kind = kind
        self._unhook()
        if kind != self.own:
            for one in self._changed():
                self._fusions.setdefault(id(one), Fusion(one))
                self._hooks.append(one.register_state_dict_pre_hook(self._as_the_script_has_it))
        else:
            for one in self.optimizers:
                settle_counts(one)

    def close(self) -> None:
        """Leave the optimizers as the script made them."""
        self.use(self.own)

    def before_step(self, optimizer: Optimizer) -> None:
        """To be called as a step begins."""
        fusion = self._fusions.get(id(optimizer))
        if self._kind == self.own or fusion is None:
            return
        self._before = _Look(optimizer)
        fusion.set(True)

    def after_step(self, optimizer: Optimizer) -> None:
        """To be called as it ends."""
        before, self._before = self._before, None
        if before is not None:
            before.restore()

    def why_other(self, kind: str) -> str | None:
        """Why a step of that kind does not do what the script's own does, right after one of its steps; else None.

        Made with the gradients that are there; nothing is left of it.
        """
        for one in self.optimizers if kind != self.own else ():
            reason = self._why_not(one)
            if reason is None:
                reason = _why_other(one)
                if reason is not None:
                    return reason
        return None

    def _changed(self) -> Iterator[Optimizer]:
        return (one for one in self.optimizers if self._why_not(one) is None)

    def _why_not(self, optimizer: Optimizer) -> str | None:
        if id(optimizer) not in self._reasons:
            self._reasons[id(optimizer)] = why_not_fused(optimizer)
        return self._reasons[id(optimizer)]

    def _as_the_script_has_it(self, optimizer: Optimizer) -> None:
        settle_counts(optimizer)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


class _Look:
    """How an optimizer looks to the script: settings of its groups, and what GradScaler asks for."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        names = ("fused", "foreach", "capturable")
        self._settings = [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]
        self._scales = vars(optimizer).get(SCALES)

    def restore(self) -> None:
        for group, settings in zip(self._optimizer.param_groups, self._settings, strict=False):
            group.update(settings)
        if self._scales is None:
            vars(self._optimizer).pop(SCALES, None)
        else:
            setattr(self._optimizer, SCALES, self._scales)


def _why_other(optimizer: Optimizer) -> str | None:
    moved = {}
    for fused in (False, True):
        with _set_aside(optimizer) as before:
            Fusion(optimizer).set(fused)
            for _ in range(TRIED):
                _raw_step(optimizer)
            moved[fused] = {name: now.detach() - before[name] for name, now in _named(optimizer)}
    return _why_differ(moved[False], moved[True], dict(_named(optimizer)))


def _why_differ(truth: Parts, made: Parts, weights: Parts) -> str | None:
    for name, gap in gaps_between(truth, made).items():
        grain = GRAIN * float(torch.linalg.vector_norm(weights[name].detach())) * torch.finfo(weights[name].dtype).eps
        if not gap.error <= max(SAME * gap.size, grain):
            return f"the update of {name} differs by {percent(gap.relative)}"
    return None


@contextmanager
def _set_aside(optimizer: Optimizer) -> Iterator[dict[str, Tensor]]:
    """Inside, steps may be made; afterwards weights, state and settings are what they were, at the same addresses."""
    look = _Look(optimizer)
    weights = {name: tensor.detach().clone() for name, tensor in _named(optimizer)}
    gradients = {name: tensor.grad.detach().clone() for name, tensor in _named(optimizer) if tensor.grad is not None}
    state = {
        parameter: {key: (value, value.clone() if isinstance(value, Tensor) else value) for key, value in kept.items()}
        for parameter, kept in optimizer.state.items()
    }
    try:
        yield weights
    finally:
        look.restore()
        for parameter in set(optimizer.state) - set(state):
            del optimizer.state[parameter]
        with torch.no_grad():
            for name, tensor in _named(optimizer):
                tensor.copy_(weights[name])
                if name in gradients and tensor.grad is not None:
                    tensor.grad.copy_(gradients[name])
            for parameter, kept in state.items():
                for key, (value, was) in kept.items():
                    optimizer.state[parameter][key] = value
                    if isinstance(value, Tensor):
                        value.copy_(was)


def _raw_step(optimizer: Optimizer) -> None:
    """A step without anybody's hooks."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {number}.{place}", parameter
