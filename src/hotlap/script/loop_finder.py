"""Finds the training loop of a running script: which optimizers step, on which modules, with which batches."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

SEEN = 4
"""Steps of one optimizer after which its loop is known."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The parts of a training loop."""

    optimizers: list[Optimizer]
    """The steps of the first one count."""
    modules: list[nn.Module]
    """Modules that the script calls while it trains, without their submodules."""
    loaders: list[Any]
    """Sources of batches, as given to `LoopFinder.batch_given`."""
    before: int = 0
    """Steps before the loop was known."""


class LoopFinder:
    """Follows the events of a script until its loop is known.

    It begins with the first step: what a script does before, such as a first evaluation, is not part of its loop.
    """

    def __init__(self, before: Mapping[Optimizer, int] | None = None) -> None:
        """`before` holds steps made before this object existed."""
        self._before = dict(before or {})
        self._steps: Counter[Optimizer] = Counter()
        self._loaders: dict[int, tuple[Any, set[int]]] = {}
        self._modules: dict[int, tuple[nn.Module, set[int]]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers with a step so far."""
        return list({**self._before, **self._steps})

    @property
    def steps(self) -> int:
        return sum(self._before.values()) + sum(self._steps.values())

    def batch_given(self, loader: Any) -> None:
        self._note(self._loaders, loader)

    def module_called(self, module: nn.Module) -> None:
        """The script called a module in training mode."""
        self._note(self._modules, module)

    def stepped(self, optimizer: Optimizer) -> Loop | None:
        """An optimizer made a step; returns the loop once it is known."""
        self._steps[optimizer] += 1
        if self._steps[optimizer] < SEEN:
            return None
        optimizers = [other for other, steps in self._steps.items() if steps >= SEEN // 2]
        optimizers.sort(key=lambda other: other is not optimizer)
        trained = {id(p) for each in optimizers for group in each.param_groups for p in group["params"]}
        called = [module for module, when in self._modules.values() if len(when) >= SEEN // 2]
        modules = [module for module in called if any(id(p) in trained for p in module.parameters())]
        return Loop(
            optimizers=optimizers,
            modules=list(dict.fromkeys(map(_passed_on_by, _outermost(modules)))),  # two may wrap the same
            loaders=[loader for loader, when in self._loaders.values() if len(when) >= SEEN // 2],
            before=self._steps[optimizer] + self._before.get(optimizer, 0),
        )

    def _note(self, steps_of: dict[int, tuple[Any, set[int]]], thing: Any) -> None:
        if self._steps:
            steps_of.setdefault(id(thing), (thing, set()))[1].add(sum(self._steps.values()))


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that are not part of another one: checkpointing calls submodules by themselves."""
    found = list(modules)
    inside = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inside]


def _passed_on_by(module: nn.Module) -> nn.Module:
    """The module that gets this one's calls: `DataParallel` on one device spreads nothing and passes them on."""
    while type(module) is nn.DataParallel and len(module.device_ids) < 2:
        module = module.module
    return module


# --- trainings without an optimizer ------------------------------------------------------
#
# Some scripts update weights by hand. No hook of torch reports that, and `p.data.add_(...)` leaves no mark on a weight.
# So hotlap counts backward passes. It inspects the first ones closely: which weights get gradients, and how many passes
# it takes until a weight's values change. From then on, that many passes count as one update.


WAITED = 3
"""Backward passes without any optimizer step before hotlap looks at weights."""
PATIENCE = 64
"""Consecutive passes without a changed weight after which hotlap gives up."""
WALKS = 4
"""Passes after a change in whose graphs hotlap searches for weights: passes of an accumulation are alike."""
COMPARED = 2**12
"""Values of a weight to compare. Each comparison waits for the GPU."""
MOST_NODES = 100_000
WHY = "the script updates its weights itself, without an optimizer"


class ManualUpdates(Optimizer):
    """Represents the optimizer of a training that has none. It keeps no object of the script alive."""

    def __init__(self) -> None:
        # Without torch's `__init__`: there is no step to hook, and an optimizer imports the compiler, which is slow.
        self.defaults: dict[str, Any] = {}
        self.passes = 0
        """Backward passes so far."""
        self.rhythm = 1
        """Passes for each update, once settled."""
        self._weights: dict[int, _Weight] = {}
        self._changed = 0
        self._lead: _Weight | None = None
        self._since = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The weights that the script changes, as one group."""
        return [{"params": [weight for one in self._weights.values() if (weight := one.ref()) is not None]}]

    @property
    def has_given_up(self) -> bool:
        """Whether too many passes changed no weight."""
        return self._lead is None and self.passes > WAITED + self._changed + PATIENCE

    @property
    def has_gradients(self) -> bool:
        """Whether the pass that just ended left gradients for this training's weights."""
        return self._lead is None or self._lead.was_filled()

    def passed(self, loss: Tensor | None) -> bool:
        """A backward pass from `loss` has ended; returns whether it completes an update."""
        self.passes += 1
        if self._lead is not None:
            return (self.passes - self._since) % self.rhythm == 0
        if self.passes < WAITED:
            return False
        changed = [weight.has_changed(self.passes) for weight in self._weights.values()]
        for leaf in _leaves_behind(loss) if self.passes - WAITED - self._changed < WALKS else ():
            if id(leaf) not in self._weights or self._weights[id(leaf)].ref() is not leaf:
                self._weights[id(leaf)] = _Weight(leaf)
        if any(changed):
            self._changed = self.passes - WAITED
        return any(changed) or (self.passes == WAITED and bool(self._weights))

    def settle(self) -> int:
        """From here on count updates by the rhythm so far; returns the updates so far."""
        self._weights = {key: one for key, one in self._weights.items() if one.changes and one.ref() is not None}
        lead = max(self._weights.values(), key=lambda one: len(one.changes))
        gaps = [after - before for before, after in zip(lead.changes, lead.changes[1:], strict=False)]
        self.rhythm = median_low(gaps) if gaps else 1
        # hotlap sees a change only after the next pass has ended.
        self._lead, self._since = lead, lead.changes[-1] - 1
        for weight in self._weights.values():
            weight.forget()
        lead.was_filled()
        return self.passes // self.rhythm


class _Weight:
    """A tensor that gets gradients, and the passes after which its values had changed."""

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self.changes: list[int] = []
        self._values: Tensor | None = _values_of(tensor)
        self._grad: tuple[weakref.ref[Tensor], int] | None = None
        self._keeps_none = tensor.grad is None

    def has_changed(self, number: int) -> bool:
        """Whether its values differ from the last check; `number` is that of the current pass."""
        tensor, before = self.ref(), self._values
        if tensor is None or before is None:
            return False
        self._values = _values_of(tensor)
        changed = not torch.equal(before, self._values)
        if changed:
            self.changes.append(number)
        return changed

    def was_filled(self) -> bool:
        """Whether its gradient differs from the last check; True if it never keeps one."""
        tensor, before = self.ref(), self._grad
        grad = tensor.grad if tensor is not None else None
        self._grad = (weakref.ref(grad), grad._version) if grad is not None else None
        if grad is None:
            return self._keeps_none and tensor is not None
        return before is None or before[0]() is not grad or before[1] != grad._version

    def forget(self) -> None:
        self._values = None


class BackwardPasses:
    """Finds trainings without an optimizer among the backward passes of a script, one after the other."""

    def __init__(self) -> None:
        self._known: ManualUpdates | None = None
        self._new = ManualUpdates()
        self._missed = 0

    @property
    def are_in_vain(self) -> bool:
        """Whether it found no training and expects none."""
        return self._known is None and self._new.has_given_up

    def passed(self, loss: Tensor | None) -> ManualUpdates | None:
        """A backward pass from `loss` (None: a replay) has ended; returns the training whose update it completes."""
        training = self._known
        if training is not None:
            if training.has_gradients:
                self._new, self._missed = ManualUpdates() if self._missed else self._new, 0
            else:
                self._missed += 1
        # A script that updates several models in turn makes passes that are not for the first training.
        if training is None or self._missed >= training.rhythm:
            training = self._new
            if training.has_given_up:
                return None
        return training if training.passed(loss) else None

    def settled(self, loop: Loop) -> Loop:
        """A loop is known; if it updates its weights by hand, returns it with the number of updates before."""
        training = loop.optimizers[0]
        if not isinstance(training, ManualUpdates):
            return loop
        self._known, self._new, self._missed = training, ManualUpdates(), 0
        return dataclasses.replace(loop, before=training.settle())


def _values_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:COMPARED].clone()


def _leaves_behind(loss: Tensor | None) -> Iterator[Tensor]:
    """The tensors whose gradients a backward pass from `loss` fills."""
    ahead: list[Any] = [loss.grad_fn] if loss is not None and loss.grad_fn is not None else []
    seen = set(ahead)
    while ahead and len(seen) < MOST_NODES:
        node = ahead.pop()
        if type(node).__name__ == "AccumulateGrad" and node.variable.layout is torch.strided:
            yield node.variable
        fresh = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= fresh
        ahead += fresh
