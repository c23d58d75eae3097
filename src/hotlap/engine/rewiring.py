"""Copies of a library's functions in which some names mean something else; the library itself stays as it is."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch


class Rewiring:
    """Copies what a function of one package reaches, wherever that is to be another thing.

    A copy runs the same code. Only the globals and the closure that the code reads differ, so nobody else sees it.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._copies: dict[int, tuple[Any, Any]] = {}

    def instead(self, holder: types.FunctionType, name: str, value: Any) -> Any:
        """What the global `name` of `holder` is to be; its own value, copied where need be, unless told otherwise."""
        return self.of(value)

    def of(self, thing: Any) -> Any:
        """A copy of `thing` that reaches other things; `thing` itself where all that it reaches stays as it is."""
        original = python_of(thing)
        if not isinstance(original, types.FunctionType) or not self.owns(original):
            return thing
        if id(original) not in self._copies:
            # A function that comes back to itself reaches itself as it is.
            self._copies[id(original)] = (original, original)
            self._copies[id(original)] = (original, self._copied(original))
        return self._copies[id(original)][1]

    def owns(self, thing: Any) -> bool:
        """Whether a class or a function is of the package."""
        return str(getattr(thing, "__module__", None)).partition(".")[0] == self._package

    def _copied(self, function: types.FunctionType) -> types.FunctionType:
        known = function.__globals__
        found = {name: self.instead(function, name, known[name]) for name in names_in(function) if name in known}
        changes = {name: value for name, value in found.items() if value is not known[name]}
        cells = tuple(self._copied_cell(cell) for cell in function.__closure__ or ())
        if not changes and all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
            return function
        copy = types.FunctionType(
            function.__code__, {**known, **changes}, function.__name__, function.__defaults__, cells or None
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
        copy.__dict__.update(function.__dict__)
        return copy

    def _copied_cell(self, cell: types.CellType) -> types.CellType:
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            return cell
        copy = self.of(held)
        return cell if copy is held else types.CellType(copy)


def python_of(thing: Any) -> Any:
    """The function that a scripted one was made from; anything else as it is.

    torch keeps it for its compiler, which runs it in place of the scripted one.
    """
    return getattr(thing, "_torchdynamo_inline", thing) if isinstance(thing, torch.jit.ScriptFunction) else thing


def names_in(function: types.FunctionType) -> dict[str, None]:
    """The names of globals and attributes that the code of a function speaks of, each once."""
    return dict.fromkeys(_names(function.__code__))


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def decorated(function: types.FunctionType) -> Iterator[types.FunctionType]:
    """A function and, where it decorates others, those too."""
    yield function
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:
            continue
        if isinstance(held, types.FunctionType) and held is not function:
            yield from decorated(held)
