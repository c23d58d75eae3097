"""Patches of torch that are active while a script runs, and that can be removed exactly."""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from hotlap.core.errors import MachineError
from hotlap.core.torch_private import (
    FrameAction,
    FrameExecStrategy,
    or_none,
    scripted_builtins,
    set_code_exec_strategy,
)

_NOTHING = object()
Make = Callable[[Any], Any]
"""Given the original attribute, returns its replacement."""


class _Patch:
    """The replacement of one attribute of a class or module."""

    def __init__(self, owner: Any, name: str, make: Make, *, in_forks: bool) -> None:
        self.owner, self.name, self.make, self.in_forks = owner, name, make, in_forks
        self.beneath, self.own = vars(owner).get(name, _NOTHING), getattr(owner, name)
        """The value in the owner's own namespace before, and as found by lookup: it may come from a base class."""
        self.value = make(self.own)
        setattr(owner, name, self.value)

    @property
    def is_on_top(self) -> bool:
        """Whether no other code has replaced the attribute since."""
        return vars(self.owner).get(self.name, _NOTHING) is self.value


class _Stacks:
    """All patches of this process by attribute, in order of installation; they can be removed in any order."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[int, str], list[_Patch]] = {}

    def put(self, owner: Any, name: str, make: Make, *, in_forks: bool) -> _Patch:
        """Install a patch on top of those there."""
        patch = _Patch(owner, name, make, in_forks=in_forks)
        self._stacks.setdefault((id(owner), name), []).append(patch)
        return patch

    def take_out(self, patch: _Patch) -> None:
        """Remove a patch; those above it are made again on top of what was below it."""
        stack = self._stacks.get((id(patch.owner), patch.name), [])
        if patch not in stack:  # removed in a forked process
            return
        above = stack[stack.index(patch) + 1 :]
        is_on_top = stack[-1].is_on_top
        stack.remove(patch)
        if not stack:
            del self._stacks[id(patch.owner), patch.name]
        gone, beneath, own = patch.value, patch.beneath, patch.own
        for one in above:
            if one.beneath is not gone:
                return  # other code has patched in between; its patch calls ours, which passes on
            gone, one.beneath, one.own = one.value, beneath, own
            beneath = own = one.value = one.make(own)
        # If other code has patched on top since, its patch stays and calls ours, which passes on.
        if is_on_top and beneath is _NOTHING:
            delattr(patch.owner, patch.name)
        elif is_on_top:
            setattr(patch.owner, patch.name, beneath)

    def leave_fork(self) -> None:
        """After a fork: remove the patches that belong to the process that trains."""
        for patch in [patch for stack in self._stacks.values() for patch in reversed(stack) if not patch.in_forks]:
            self.take_out(patch)


_stacks = _Stacks()
os.register_at_fork(after_in_child=_stacks.leave_fork)


class Patches:
    """Patches and hooks of one owner, until they are removed.

    By default, processes forked meanwhile, such as DataLoader workers, get torch's own attributes back.
    """

    def __init__(self, *, in_forks: bool = False) -> None:
        """With `in_forks`, forked processes keep the patches."""
        self._in_forks = in_forks
        self._undo: dict[str, Callable[[], Any]] = {}

    def put(self, owner: Any, name: str, make: Make) -> None:
        """Replace an attribute of a class or module by what `make` returns for the original.

        `make` may be called again when a patch below is removed. The replacement may be called even after its removal.
        """
        key = f"{owner.__name__}.{name}"
        if key not in self._undo:
            patch = _stacks.put(owner, name, make, in_forks=self._in_forks)
            self._undo[key] = functools.partial(_stacks.take_out, patch)

    def has(self, key: str) -> bool:
        """Whether a patch or hook is installed, by its attribute's name or its key."""
        return key in self._undo

    def hooked(self, key: str, handle: Any) -> None:
        self._undo[key] = handle.remove

    def take_out(self, key: str) -> None:
        """Remove a patch or hook, by its attribute's name or its key; does nothing if there is none."""
        undo = self._undo.pop(key, None)
        if undo is not None:
            undo()

    def take_out_all(self) -> None:
        for key in list(self._undo):
            self.take_out(key)


@contextmanager
def calls_noted(*functions: tuple[Any, str]) -> Iterator[list[str]]:
    """Inside, the yielded list gets the names of those functions, each an owner and a name, that are called."""
    called: list[str] = []
    patches = Patches()

    def make(own: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            called.append(own.__name__)
            return own(*args, **kwargs)

        return noted

    for owner, name in functions:
        patches.put(owner, name, make)
    try:
        yield called
    finally:
        patches.take_out_all()


def untraced(patch: Any, *, beneath: bool = True) -> Callable[..., Any]:
    """Exclude a patch from torch.compile, where a compiled function falls back to Python.

    This also excludes what the patch calls; with `beneath=False`, torch compiles that as usual.
    """
    with suppress(MachineError, AttributeError):  # older versions of torch have no such setting
        skip, as_ever = FrameAction.SKIP, FrameAction.DEFAULT
        set_code_exec_strategy(patch.__code__, FrameExecStrategy(skip, skip if beneath else as_ever))
    return cast("Callable[..., Any]", patch)


def scripted_as(own: Any, patch: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch.jit take a patch for the function of torch that it replaces, in scripts compiled meanwhile."""
    if or_none(scripted_builtins) is not None:
        names = scripted_builtins()
        name = names.get(id(inspect.unwrap(own)))
        if name is not None:
            names[id(patch)] = name
            weakref.finalize(patch, names.pop, id(patch), None)  # another object may get this id
    return patch
