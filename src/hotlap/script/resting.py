"""A training that hotlap leaves alone from here on: its steps are counted, and nothing else is done."""

from __future__ import annotations

import functools
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan

_HOOKING = torch_optimizer.__file__
"""The file of torch's whose function `wrapper` runs the hooks of a step."""


@dataclass
class Trained:
    """What there is to report of a training. It holds nothing of the script's."""

    ledger: Ledger
    plan: Plan
    """The plan that was settled on."""
    before: int
    """Updates before the training was found."""
    steps: int
    """Updates since."""
    began: float
    last: float
    """When it was found and when it made its last update, by `time.perf_counter`."""
    notes: list[str]

    @property
    def updates(self) -> int:
        """All of them."""
        return self.before + self.steps

    @property
    def seconds(self) -> float:
        """From when it was found to its last update."""
        return self.last - self.began


class Rest:
    """Knows the steps of a training that is left alone; the steps of any other optimizer are news."""

    def __init__(self, optimizers: Sequence[Optimizer] | None, trained: Trained | None = None) -> None:
        """Of `optimizers` the steps of the first are counted in `trained`. None: all trainings are left alone."""
        self.is_for_all = optimizers is None
        self._optimizers = [weakref.ref(one) for one in optimizers or ()]
        self._first = self._optimizers[0] if self._optimizers else None
        self.trained = trained

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the training that are still there."""
        return [one for ref in self._optimizers if (one := ref()) is not None]

    def go_on(self, steps: int) -> None:
        """The script has come back to the training after another one, and made so many steps by now."""
        if self.trained is not None:
            now = time.perf_counter()
            self.trained.began += now - self.trained.last
            self.trained.steps, self.trained.last = self.trained.steps + steps, now

    def counts(self, optimizer: Optimizer) -> bool:
        """Take note of a step; False where it is not one of this training. Takes some tenths of a microsecond."""
        if self._first is not None and self._first() is optimizer:
            if self.trained is not None and not is_inner(optimizer):
                self.trained.steps += 1
                self.trained.last = time.perf_counter()
            return True
        return self.is_for_all or any(one() is optimizer for one in self._optimizers)


def is_inner(optimizer: Optimizer) -> bool:
    """Whether the hook that asks runs for a step inside another step of the same optimizer.

    torch runs its hooks for the step of a class, and once more for that of the class beneath, where the one calls the
    other.
    """
    kind: Any = type(optimizer)
    if not _may_nest(kind):
        return False
    steps, frame = 0, sys._getframe(1)
    while frame is not None and steps < 2:
        code = frame.f_code
        if code.co_name == "wrapper" and code.co_filename == _HOOKING:
            steps += frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1


@functools.lru_cache(maxsize=64)
def _may_nest(kind: Any) -> bool:
    return sum("step" in vars(one) for one in kind.__mro__ if one is not Optimizer) > 1
