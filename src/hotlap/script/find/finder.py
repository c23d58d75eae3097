"""Finding the loop of a script while it runs: which optimizers step, on which modules, with which batches."""

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
    """The first one is the one whose steps are counted."""
    modules: list[nn.Module]
    """What the script calls while it trains, but for modules inside of these."""
    loaders: list[Any]
    """What its batches come from, as `Finder.served` was told."""
    before: int = 0
    """Steps that were made before it was known."""


class Finder:
    """Told what the script does, until the loop is known.

    Counting begins with the first step: what a script does before, such as a first evaluation, is no part of its loop.
    """

    def __init__(self, before: Mapping[Optimizer, int] | None = None) -> None:
        """`before` are steps that were made before it was there to see them."""
        self._before = dict(before or {})
        self._steps: Counter[Optimizer] = Counter()
        self._served: dict[int, tuple[Any, set[int]]] = {}
        self._called: dict[int, tuple[nn.Module, set[int]]] = {}

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that have made a step so far."""
        return list({**self._before, **self._steps})

    def served(self, loader: Any) -> None:
        """Told that a loader gave a batch."""
        self._note(self._served, loader)

    def called(self, module: nn.Module) -> None:
        """Told that the script itself called a module, to train it."""
        self._note(self._called, module)

    def stepped(self, optimizer: Optimizer) -> Loop | None:
        """Told that an optimizer made a step; the loop, once it is known."""
        self._steps[optimizer] += 1
        if self._steps[optimizer] < SEEN:
            return None
        optimizers = [one for one, steps in self._steps.items() if steps >= SEEN // 2]
        optimizers.sort(key=lambda one: one is not optimizer)
        trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
        called = [module for module, when in self._called.values() if len(when) >= SEEN // 2]
        modules = [module for module in called if any(id(p) in trained for p in module.parameters())]
        return Loop(
            optimizers=optimizers,
            modules=_outermost(modules),
            loaders=[loader for loader, when in self._served.values() if len(when) >= SEEN // 2],
            before=self._steps[optimizer] + self._before.get(optimizer, 0),
        )

    def _note(self, seen: dict[int, tuple[Any, set[int]]], what: Any) -> None:
        if self._steps:
            seen.setdefault(id(what), (what, set()))[1].add(sum(self._steps.values()))


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Without those that are part of another one: checkpointing calls them by themselves."""
    found = list(modules)
    inside = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inside]


# --- trainings without an optimizer: the script changes its weights itself ------------------------------
#
# No hook of torch tells of such updates, and `p.data.add_(...)` leaves no mark on a weight. So backward passes are
# counted. The first ones are looked at closely: which weights their gradients go to, and how many passes it takes until
# the values of a weight change. That many passes make one update from then on.


WAITED = 3
"""Backward passes without any optimizer's step, after which weights are looked at."""
PATIENCE = 64
"""Passes in a row that change no weight, after which nothing is expected of them."""
WALKS = 4
"""Passes after a change whose graphs are walked through for weights: those of an accumulation are all alike."""
COMPARED = 2**12
"""Values of a weight that are compared. Each comparison waits for the device."""
MOST_NODES = 100_000
WHY = "the script updates its weights itself, without an optimizer"


class ByHand(Optimizer):
    """Stands in for the optimizer of a training that has none. It holds nothing of the script's alive."""

    def __init__(self) -> None:
        # Not torch's own: it has no step, and making an optimizer imports what compiles, which takes seconds.
        self.defaults: dict[str, Any] = {}
        self.passes = 0
        """Backward passes so far."""
        self.rhythm = 1
        """Passes that make one update, once it is settled."""
        self._weights: dict[int, _Weight] = {}
        self._changed = 0
        self._lead: _Weight | None = None
        self._since = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The weights that the script changes, in one group."""
        return [{"params": [weight for one in self._weights.values() if (weight := one.ref()) is not None]}]

    @property
    def has_given_up(self) -> bool:
        """Whether backward passes were looked at in vain."""
        return self._lead is None and self.passes > WAITED + self._changed + PATIENCE

    @property
    def has_gradients(self) -> bool:
        """Whether the pass that has just ended left gradients for a weight of the training."""
        return self._lead is None or self._lead.was_filled()

    def passed(self, loss: Tensor | None) -> bool:
        """Told that a backward pass from `loss` has ended; whether an update is to be counted."""
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
        """Count updates by the rhythm of the passes seen so far; how many updates they were."""
        self._weights = {key: one for key, one in self._weights.items() if one.changes and one.ref() is not None}
        lead = max(self._weights.values(), key=lambda one: len(one.changes))
        gaps = [after - before for before, after in zip(lead.changes, lead.changes[1:], strict=False)]
        self.rhythm = median_low(gaps) if gaps else 1
        # A change is seen when the pass after it has ended.
        self._lead, self._since = lead, lead.changes[-1] - 1
        for weight in self._weights.values():
            weight.forget()
        lead.was_filled()
        return self.passes // self.rhythm


class _Weight:
    """A tensor that gradients go to, and the passes after which it was seen to have changed."""

    def __init__(self, tensor: Tensor) -> None:
        self.ref = weakref.ref(tensor)
        self.changes: list[int] = []
        self._values: Tensor | None = _values_of(tensor)
        self._grad: tuple[weakref.ref[Tensor], int] | None = None
        self._keeps_none = tensor.grad is None

    def has_changed(self, number: int) -> bool:
        """Whether its values differ from the last time, at the pass of that number."""
        tensor, before = self.ref(), self._values
        if tensor is None or before is None:
            return False
        self._values = _values_of(tensor)
        changed = not torch.equal(before, self._values)
        if changed:
            self.changes.append(number)
        return changed

    def was_filled(self) -> bool:
        """Whether its gradient is another than the last time this was asked, or it never keeps one."""
        tensor, before = self.ref(), self._grad
        grad = tensor.grad if tensor is not None else None
        self._grad = (weakref.ref(grad), grad._version) if grad is not None else None
        if grad is None:
            return self._keeps_none and tensor is not None
        return before is None or before[0]() is not grad or before[1] != grad._version

    def forget(self) -> None:
        """Let go of its values."""
        self._values = None


class Passes:
    """Finds trainings without an optimizer among the backward passes of a script, one after the other."""

    def __init__(self) -> None:
        self._known: ByHand | None = None
        self._new = ByHand()
        self._missed = 0

    @property
    def are_in_vain(self) -> bool:
        """Whether no training was found among them, and none is to be expected."""
        return self._known is None and self._new.has_given_up

    def passed(self, loss: Tensor | None) -> ByHand | None:
        """Told that a backward pass from `loss` has ended (None: a replayed one); whose update is to be counted."""
        one = self._known
        if one is not None:
            if one.has_gradients:
                self._new, self._missed = ByHand() if self._missed else self._new, 0
            else:
                self._missed += 1
        # Where several models are updated in turns, some passes of a step are not for the first one.
        if one is None or self._missed >= one.rhythm:
            one = self._new
            if one.has_given_up:
                return None
        return one if one.passed(loss) else None

    def settled(self, loop: Loop) -> Loop:
        """Told that a loop is known; if its weights are updated by hand, with the number of updates before."""
        one = loop.optimizers[0]
        if not isinstance(one, ByHand):
            return loop
        self._known, self._new, self._missed = one, ByHand(), 0
        return dataclasses.replace(loop, before=one.settle())


def _values_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:COMPARED].clone()


def _leaves_behind(loss: Tensor | None) -> Iterator[Tensor]:
    """The tensors that a backward pass from `loss` fills the gradients of."""
    ahead: list[Any] = [loss.grad_fn] if loss is not None and loss.grad_fn is not None else []
    seen = set(ahead)
    while ahead and len(seen) < MOST_NODES:
        node = ahead.pop()
        if type(node).__name__ == "AccumulateGrad" and node.variable.layout is torch.strided:
            yield node.variable
        fresh = {before for before, _ in node.next_functions if before is not None} - seen
        seen |= fresh
        ahead += fresh
