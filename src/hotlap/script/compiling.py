"""Notices when a script compiles with torch.compile, before torch reads any of the code.

torch.compile reads Python functions as they are found at that moment, and checks before each call that they are still
the same. What hotlap puts into torch must therefore be gone before it begins, and must not come back.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from hotlap.script.patches import Patches

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
