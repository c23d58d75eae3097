"""A training that needs nothing more from hotlap: count its steps, and do nothing else."""

from __future__ import annotations

import functools
import math
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.torch_private import DYNAMO, or_none
from hotlap.script.patches import Patches

_HOOKING = torch_optimizer.__file__
"""The file of torch with the function `wrapper`, which runs the hooks of a step."""


@dataclass
class TrainingSummary:
    """What the report shows of a training. It keeps no object of the script alive."""

    ledger: Ledger
    plan: Plan
    """The final plan."""
    before: int
    """Updates before hotlap found the training."""
    steps: int
    """Updates since."""
    began: float
    last: float
    """When hotlap found it, and when it made its last update, by `time.perf_counter`."""
    notes: list[str]
    device: str = "cpu"

    @property
    def updates(self) -> int:
        return self.before + self.steps

    @property
    def seconds(self) -> float:
        """Seconds from when hotlap found it to its last update."""
        return self.last - self.began


class IdleCounter:
    """Counts the steps of a training that hotlap leaves alone, for good or for a while.

    `counts` is False for the steps of any other optimizer.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer] | None, summary: TrainingSummary | None = None, *, most: float = math.inf
    ) -> None:
        """Count the steps of the first of `optimizers`; None: leave all trainings alone.

        `summary` receives the count if the training is left alone for good. After `most` steps, `counts` is False.
        """
        self.is_for_all = optimizers is None
        self._optimizers = [weakref.ref(one) for one in optimizers or ()]
        self._first = self._optimizers[0] if self._optimizers else None
        self._most, self._summary = most, summary
        self.steps, self.last = 0, time.perf_counter()
        """Steps so far, and when the last of them happened."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The training's optimizers that still exist."""
        return [one for ref in self._optimizers if (one := ref()) is not None]

    @property
    def summary(self) -> TrainingSummary | None:
        """The summary of a training that is left alone for good, up to date; else None."""
        if self._summary is not None and self.steps:
            self._summary.steps, self._summary.last = self._summary.steps + self.steps, self.last
            self.steps = 0
        return self._summary

    @property
    def summary_before(self) -> TrainingSummary | None:
        """The summary without the `steps` since; reading it changes nothing, so that another thread may."""
        return self._summary

    def go_on(self, steps: int) -> None:
        """The script has returned to this training, and has made this many steps of it by now."""
        summary, self.last = self.summary, time.perf_counter()
        self.steps += steps
        if summary is not None:
            summary.began += self.last - summary.last

    def counts(self, optimizer: Optimizer) -> bool:
        """Count a step; False if the session has to handle it. Costs some tenths of a microsecond."""
        if self._first is None or self._first() is not optimizer:
            return self.is_for_all or any(one() is optimizer for one in self._optimizers)
        if not is_inner(optimizer):
            if self.steps + 1 >= self._most:
                return False
            self.steps += 1
            self.last = time.perf_counter()
        return True


def is_inner(optimizer: Optimizer) -> bool:
    """Whether the calling hook runs for a step inside another step of the same optimizer.

    torch runs its hooks for the `step` of a class, and again for the `step` of its base class if the first calls it.
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


# --- torch.compile -----------------------------------------------------------------------
#
# torch.compile reads Python functions as it finds them, and checks before each call that they are unchanged. So hotlap
# must remove its patches before torch begins to compile, and must not put them back.


WHY = "the script uses torch.compile, so hotlap leaves module calls alone"


class CompileWatch:
    """Calls `on_compile` before torch compiles anything, and `on_optimizer` before it compiles an optimizer's step."""

    def __init__(self, on_compile: Callable[[], object], on_optimizer: Callable[[], object]) -> None:
        self._on_compile, self._on_optimizer = on_compile, on_optimizer
        self._patches = Patches()
        self.has_begun = False
        """Whether torch has compiled something in this process, or may have without hotlap seeing it."""

    @staticmethod
    def can_be_watched() -> bool:
        """Whether the compiler is imported: importing it takes seconds, which other scripts must not pay."""
        return DYNAMO in sys.modules

    def watch(self, *, is_late: bool = False) -> None:
        """Begin to watch; requires `can_be_watched`. `is_late`: the script may already have compiled something."""
        try:
            from hotlap.core.torch_private import CompilationHandler, OptimizerVariable, compile_counters

            if None in map(or_none, (CompilationHandler, OptimizerVariable, compile_counters)):
                raise AttributeError
            self.has_begun = is_late and any(any(counts.values()) for counts in compile_counters.values())
            self._before(CompilationHandler, "run_start_callbacks", self._compiles)
            self._before(OptimizerVariable, "__init__", self._on_optimizer)
        except AttributeError:  # another version of torch
            self.has_begun = True

    def close(self) -> None:
        self._patches.take_out_all()

    def _compiles(self) -> None:
        self.has_begun = True
        self._on_compile()

    def _before(self, owner: Any, name: str, tell: Callable[[], object]) -> None:
        def make(own: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(own)
            def watched(*args: Any, **kwargs: Any) -> Any:
                tell()
                return own(*args, **kwargs)

            return watched

        self._patches.put(owner, name, make)
