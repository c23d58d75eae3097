"""A training that hotlap leaves alone from here on: its steps are counted, and nothing else is done."""

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
from hotlap.script.patches import Patches

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
    """Counts the steps of a training that is left alone, for good or for a while.

    The steps of any other optimizer are news.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer] | None, trained: Trained | None = None, *, most: float = math.inf
    ) -> None:
        """Of `optimizers` the steps of the first are counted, for `trained` where it is for good.

        None: all trainings are left alone. `most` is how many steps it lasts; the last of them is news, too.
        """
        self.is_for_all = optimizers is None
        self._optimizers = [weakref.ref(one) for one in optimizers or ()]
        self._first = self._optimizers[0] if self._optimizers else None
        self._most, self._trained = most, trained
        self.steps, self.last = 0, time.perf_counter()
        """Steps so far, and when the last of them was made."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the training that are still there."""
        return [one for ref in self._optimizers if (one := ref()) is not None]

    @property
    def trained(self) -> Trained | None:
        """What there is to report of the training by now, where it is left alone for good."""
        if self._trained is not None and self.steps:
            self._trained.steps, self._trained.last = self._trained.steps + self.steps, self.last
            self.steps = 0
        return self._trained

    def go_on(self, steps: int) -> None:
        """The script has come back to the training after another one, and made so many steps by now."""
        trained, self.last = self.trained, time.perf_counter()
        self.steps += steps
        if trained is not None:
            trained.began += self.last - trained.last

    def counts(self, optimizer: Optimizer) -> bool:
        """Take note of a step; False where it is news. Takes some tenths of a microsecond."""
        if self._first is None or self._first() is not optimizer:
            return self.is_for_all or any(one() is optimizer for one in self._optimizers)
        if not is_inner(optimizer):
            if self.steps + 1 >= self._most:
                return False
            self.steps += 1
            self.last = time.perf_counter()
        return True


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


# --- noticing that a script compiles with torch.compile, before torch reads any code ---------------
#
# torch.compile reads Python functions as they are found at that moment, and checks before each call that they are still
# the same. What hotlap puts into torch must therefore be gone before it begins, and must not come back.


DYNAMO = "torch._dynamo"
"""The module that compiles. Making the first optimizer imports it, and so does `torch.compile`."""
WHY = "the script compiles with torch.compile, so module calls are left alone"


class Compiling:
    """Calls `on_compile` before torch compiles anything, and `on_optimizer` before it compiles an optimizer's step."""

    def __init__(self, on_compile: Callable[[], object], on_optimizer: Callable[[], object]) -> None:
        self._on_compile, self._on_optimizer = on_compile, on_optimizer
        self._patches = Patches()
        self.has_begun = False
        """Whether torch has compiled something in this process, or might without being noticed."""

    @staticmethod
    def can_be_watched() -> bool:
        """Whether the module that compiles is there: importing it takes seconds, which only its users should pay."""
        return DYNAMO in sys.modules

    def watch(self, *, is_late: bool = False) -> None:
        """Begin to notice; `can_be_watched` has to hold. `is_late`: the script may have compiled something by now."""
        try:
            from torch._dynamo.callback import CompilationCallbackHandler as Handler
            from torch._dynamo.utils import counters
            from torch._dynamo.variables.optimizer import OptimizerVariable

            self.has_begun = is_late and any(any(counts.values()) for counts in counters.values())
            self._before(Handler, "run_start_callbacks", self._compiles)
            self._before(OptimizerVariable, "__init__", self._on_optimizer)
        except (ImportError, AttributeError):  # a torch of another build
            self.has_begun = True

    def close(self) -> None:
        """Leave torch as it was."""
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
