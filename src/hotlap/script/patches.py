"""What is put into torch while a script runs, and taken out again exactly."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch

_NOTHING = object()


class Patches:
    """Attributes that stand in for torch's own, and hooks, until they are removed."""

    def __init__(self) -> None:
        self._undo: dict[str, Callable[[], Any]] = {}

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Let `value` stand in for an attribute of a class or module."""
        key = f"{owner.__name__}.{name}"
        if key in self._undo:
            return
        before = vars(owner).get(name, _NOTHING)
        setattr(owner, name, value)

        def undo() -> None:
            # Whoever has put something else there since is in charge of it.
            if vars(owner).get(name) is value:
                if before is _NOTHING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

        self._undo[key] = undo

    def has(self, key: str) -> bool:
        """Whether one of them is in place, by the name of its attribute or its key."""
        return key in self._undo

    def hooked(self, key: str, handle: Any) -> None:
        """Know a hook of torch's by its handle."""
        self._undo[key] = handle.remove

    def take_out(self, key: str) -> None:
        """Remove one of them, by the name of its attribute or its key."""
        undo = self._undo.pop(key, None)
        if undo is not None:
            undo()

    def take_out_all(self) -> None:
        """Remove all of them."""
        for key in list(self._undo):
            self.take_out(key)


def untraced(patch: Any, *, beneath: bool = True) -> Callable[..., Any]:
    """What stands in for torch's own, and is not to be compiled where a compiled function falls back to Python.

    Nor is what it calls; without `beneath`, that is compiled as ever.
    """
    with suppress(AttributeError):  # an older torch has no such setting
        frames = torch._C._dynamo.eval_frame
        skip, as_ever = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(patch.__code__, frames._FrameExecStrategy(skip, skip if beneath else as_ever))
    return cast("Callable[..., Any]", patch)
