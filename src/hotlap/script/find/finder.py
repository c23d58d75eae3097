"""Finding the loop of a script while it runs: which optimizers step, on which modules, with which batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
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
