"""What is put into torch while a script runs, and taken out again exactly."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch

_NOTHING = object()
Make = Callable[[Any], Any]
"""Given what is found at an attribute, makes what stands in for it."""


class _Patch:
    """What stands in for one attribute of a class or module."""

    def __init__(self, owner: Any, name: str, make: Make, *, in_forks: bool) -> None:
        self.owner, self.name, self.make, self.in_forks = owner, name, make, in_forks
        self.beneath, self.own = vars(owner).get(name, _NOTHING), getattr(owner, name)
        """What was there before, and as it is called: it may belong to a class beneath."""
        self.value = make(self.own)
        setattr(owner, name, self.value)

    @property
    def is_on_top(self) -> bool:
        """Whether it is what is found there, so that nobody else has put something over it."""
        return vars(self.owner).get(self.name, _NOTHING) is self.value


class _Stacks:
    """All patches of this process, by attribute, in the order in which they were put: they come out in any order."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[int, str], list[_Patch]] = {}

    def put(self, owner: Any, name: str, make: Make, *, in_forks: bool) -> _Patch:
        """One more on top of what is there."""
        patch = _Patch(owner, name, make, in_forks=in_forks)
        self._stacks.setdefault((id(owner), name), []).append(patch)
        return patch

    def take_out(self, patch: _Patch) -> None:
        """Remove one; those above it are made anew, on what is beneath it."""
        stack = self._stacks.get((id(patch.owner), patch.name), [])
        if patch not in stack:  # in a process that was forked since
            return
        above = stack[stack.index(patch) + 1 :]
        is_on_top = stack[-1].is_on_top
        stack.remove(patch)
        if not stack:
            del self._stacks[id(patch.owner), patch.name]
        gone, beneath, own = patch.value, patch.beneath, patch.own
        for one in above:
            if one.beneath is not gone:
                return  # somebody else has put something between: what that calls passes on
            gone, one.beneath, one.own = one.value, beneath, own
            beneath = own = one.value = one.make(own)
        # If somebody has put something on top since, it stays, and what it calls passes on.
        if is_on_top and beneath is _NOTHING:
            delattr(patch.owner, patch.name)
        elif is_on_top:
            setattr(patch.owner, patch.name, beneath)

    def leave_fork(self) -> None:
        """Told that this process was forked: remove what belongs to the one that trains."""
        for patch in [patch for stack in self._stacks.values() for patch in reversed(stack) if not patch.in_forks]:
            self.take_out(patch)


_stacks = _Stacks()
os.register_at_fork(after_in_child=_stacks.leave_fork)


class Patches:
    """Attributes that stand in for torch's own, and hooks, until they are removed.

    Processes that are forked meanwhile, such as the workers of a loader, have torch's own attributes.
    """

    def __init__(self, *, in_forks: bool = False) -> None:
        """With `in_forks`, processes that are forked have those of hotlap, too."""
        self._in_forks = in_forks
        self._undo: dict[str, Callable[[], Any]] = {}

    def put(self, owner: Any, name: str, make: Make) -> None:
        """Let what `make` gives stand in for an attribute of a class or module, which `make` is given.

        It is made anew when something beneath is taken out, and may still be called after it was taken out itself.
        """
        key = f"{owner.__name__}.{name}"
        if key not in self._undo:
            patch = _stacks.put(owner, name, make, in_forks=self._in_forks)
            self._undo[key] = functools.partial(_stacks.take_out, patch)

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
