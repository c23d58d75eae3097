"""Whether steps made in another way do what an optimizer's own do, tried where training stands, without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from hotlap.core.errors import first_line
from hotlap.core.object_memory import Memory
from hotlap.engine.optimizers import Fusion, is_fused
from hotlap.engine.snapshot import Randomness
from hotlap.script.calls.graphs import Recording
from hotlap.script.update.capture import CapturedUpdate, hush, unhush
from hotlap.script.update.graphs import Desk, UpdateGraph
from hotlap.tuner.agreement import GRAIN, SAME, Parts, brought_near, gaps_between, percent

SCALES = "_step_supports_amp_scaling"
"""By which GradScaler knows, before a step, that the optimizer itself takes the scale out of its gradients."""
TRIED = 2
"""Steps that are compared: the second one needs what the first has left."""


class Look:
    """How an optimizer looks to the script: settings of its groups, and what GradScaler asks for."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        names = ("fused", "foreach", "capturable")
        self._settings = [{k: group[k] for k in names if k in group} for group in optimizer.param_groups]
        self._scales = vars(optimizer).get(SCALES)

    def restore(self) -> None:
        """Have it look so again."""
        for group, settings in zip(self.optimizer.param_groups, self._settings, strict=False):
            group.update(settings)
        if self._scales is None:
            vars(self.optimizer).pop(SCALES, None)
        else:
            setattr(self.optimizer, SCALES, self._scales)
        unhush(self.optimizer)


def raw_step(optimizer: Optimizer) -> None:
    """A step without anybody's hooks."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def why_fused_differs(optimizer: Optimizer) -> str | None:
    """Why fused steps differ from the plain loop's by more than rounding; else None."""
    return _why_differ(optimizer, _moved(optimizer, fused=False), _moved(optimizer, fused=True))


def why_captured_differs(
    optimizer: Optimizer, update: CapturedUpdate, *, fused: bool, make_recorder: Callable[[], Recording], desk: Desk
) -> str | None:
    """Why steps of that kind cannot be made by replays, or do not do what the optimizer's own do; else None."""
    if not any(tensor.grad is not None for _, tensor in _named(optimizer)):
        return None  # nothing to be compared: a recording tells when there is
    try:
        truth = _moved(optimizer, fused=is_fused(optimizer))
        with _set_aside(optimizer) as aside:
            Fusion(optimizer).set(fused, captured=True)
            hush(optimizer)
            raw_step(optimizer)
            reason = update.why_not()
            if reason is not None:
                return reason
            graph = UpdateGraph(optimizer, raw_step, make_recorder(), desk)
            graph.settle()
            for _ in range(TRIED - 1):
                aside.renew_gradients()
                graph.replay()
            made = _moves(optimizer, aside.weights)
    except Exception as error:  # whatever stops it is the answer
        return f"it cannot be recorded: {first_line(error)}"
    return _why_differ(optimizer, truth, made)


def _moved(optimizer: Optimizer, *, fused: bool) -> Parts:
    with _set_aside(optimizer) as aside:
        Fusion(optimizer).set(fused)
        hush(optimizer)
        for _ in range(TRIED):
            aside.renew_gradients()
            raw_step(optimizer)
        return _moves(optimizer, aside.weights)


def _moves(optimizer: Optimizer, before: dict[str, Tensor]) -> Parts:
    now, was = brought_near(dict(_named(optimizer)), before)
    return {name: tensor - was[name] for name, tensor in now.items()}


def _why_differ(optimizer: Optimizer, truth: Parts, made: Parts) -> str | None:
    weights = {name: tensor.detach() for name, tensor in _named(optimizer)}
    sizes = gaps_between(weights, {})
    for name, gap in gaps_between(truth, made).items():
        grain = GRAIN * sizes[name].size * torch.finfo(weights[name].dtype).eps
        if not gap.error <= max(SAME * gap.size, grain):
            return f"the update of {name} differs by {percent(gap.relative)}"
    return None


class _Aside:
    """Weights and gradients of an optimizer as they were."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.weights = {name: tensor.detach().clone() for name, tensor in _named(optimizer)}
        self._gradients = {
            name: tensor.grad.detach().clone() for name, tensor in _named(optimizer) if tensor.grad is not None
        }

    @torch.no_grad()
    def renew_gradients(self) -> None:
        """Put them back where they lie: some kinds of step change them (SGD with Nesterov's momentum, foreach)."""
        for name, tensor in _named(self._optimizer):
            if name in self._gradients and tensor.grad is not None:
                tensor.grad.copy_(self._gradients[name])


@contextmanager
def _set_aside(optimizer: Optimizer) -> Iterator[_Aside]:
    """Inside, steps may be made; afterwards weights, state and settings are what they were, at the same addresses.

    So are the generators of random numbers.
    """
    look, aside, states, memory = Look(optimizer), _Aside(optimizer), dict(optimizer.state), memory_of(optimizer)
    randomness = Randomness(next((tensor.device for _, tensor in _named(optimizer)), torch.device("cpu")))
    try:
        yield aside
    finally:
        look.restore()
        for parameter in set(optimizer.state) - set(states):
            del optimizer.state[parameter]
        memory.restore()
        randomness.restore()
        aside.renew_gradients()
        with torch.no_grad():
            for name, tensor in _named(optimizer):
                tensor.copy_(aside.weights[name])


def memory_of(optimizer: Optimizer) -> Memory:
    """All that an optimizer remembers beside its parameters: state, settings of its groups, attributes."""
    roots = {"optimizer": optimizer, "groups": optimizer.param_groups, "state": list(optimizer.state.values())}
    return Memory(roots, [parameter for _, parameter in _named(optimizer)])


def _named(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {number}.{place}", parameter
