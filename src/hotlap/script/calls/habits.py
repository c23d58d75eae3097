"""What a script does with the outputs of a module's calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotlap.engine.capture import WARM_UPDATES
from hotlap.script.calls.trees import looked_at

MOST_UNUSED = 16
"""Calls that are looked at in vain, since none of them is differentiated."""


class Habits:
    """What the script does with the outputs of one kind of call, seen while they are made eagerly."""

    def __init__(self) -> None:
        self._calls = 0
        self.differentiated = 0
        """Calls whose outputs got gradients."""
        self.used: tuple[int, ...] = ()
        """Which outputs of the last one got them."""
        self.kept = False
        """Whether a backward pass kept its graph."""
        self.refused: str | None = None
        """Why it is not to be recorded."""

    @property
    def are_known(self) -> bool:
        """Whether enough calls were seen."""
        return self.differentiated >= WARM_UPDATES or self._calls > MOST_UNUSED

    def watch(self, outputs: Any) -> Any:
        """The outputs of a call, looked at for what becomes of them."""
        self._calls += 1
        if self._calls > MOST_UNUSED and not self.differentiated:
            self.refused = "its outputs are not differentiated"
        passes: dict[int, set[int]] = {}

        def came(number: int, _: Tensor) -> None:
            this = torch._C._current_graph_task_id()
            if not passes:
                self.differentiated += 1
            passes.setdefault(this, set()).add(number)
            self.used = tuple(sorted(passes[this]))
            self.kept |= torch._C._autograd._get_current_graph_task_keep_graph()
            if len(passes) > 1:
                self.refused = "its outputs are differentiated more than once"
            if torch.is_grad_enabled():
                self.refused = "its gradients are differentiated themselves"

        return looked_at(outputs, came)
