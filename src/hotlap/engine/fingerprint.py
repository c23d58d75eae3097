"""What a training holds in Python: what a capture is made for, and what a module remembers from step to step."""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

INSIDE = frozenset(nn.Module().__dict__)
"""What torch itself keeps in a module."""
_PLAIN = frozenset((int, float, bool, str, type(None), complex))
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
_FEW = 16
"""Entries of a container that are looked into; of a larger one it is told how many there are."""


def fingerprint(modules: Sequence[nn.Module], functions: Sequence[Callable[..., Any] | None] = ()) -> tuple[Any, ...]:
    """What a capture is made for: layers, modes, settings such as a dropout rate, parameters and their places.

    `functions` are the user's own beside the modules: what they hold counts too. Asked for in every step, so it looks
    at each thing once and not deeply.
    """
    found: list[Any] = []
    seen: set[int] = set()
    for module in modules:
        _print_module(module, found, seen)
    for function in functions:
        if function is not None:
            _print_function(function, found, seen)
    return tuple(found)


def place_of(tensor: Tensor) -> int:
    """Where a tensor lies in memory; for one that has no such place, which one it is."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not is_lazy(tensor) else id(tensor)


def places_in(state: Any) -> Iterator[int]:
    """Where the tensors in an optimizer's state lie, however nested."""
    if isinstance(state, Tensor):
        yield place_of(state)
    elif isinstance(state, Mapping):
        for part in state.values():
            yield from places_in(part)
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from places_in(part)


def _print_module(module: nn.Module, found: list[Any], seen: set[int]) -> None:
    inside = module.__dict__
    found += (id(module), type(module), inside["training"])
    if len(inside) > len(INSIDE):
        for name, value in inside.items():
            if name not in INSIDE:
                _print(value, found, seen)
    for parameter in inside["_parameters"].values():
        if parameter is not None:
            hooks = parameter._backward_hooks
            found += (place_of(parameter), parameter.requires_grad, len(hooks) if hooks else 0)
    found += [place_of(buffer) for buffer in inside["_buffers"].values() if buffer is not None]
    # Hooks are Python, which a replay leaves out: one that comes or goes makes another step.
    found += (len(inside["_forward_hooks"]), len(inside["_forward_pre_hooks"]))
    found += (len(inside["_backward_hooks"]), len(inside["_backward_pre_hooks"]))
    for child in inside["_modules"].values():
        if child is not None:
            _print_module(child, found, seen)


def _print_function(function: Any, found: list[Any], seen: set[int]) -> None:
    found.append(id(function))
    if isinstance(function, types.MethodType):
        function = function.__self__
    for cell in getattr(function, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if not isinstance(held, nn.Module):
            _print(held, found, seen)
    if not isinstance(function, (*_CODE, nn.Module)):
        _print(function, found, seen)


def _print(value: Any, found: list[Any], seen: set[int]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        found.append(value)
    elif isinstance(value, Tensor):
        found.append(place_of(value))
    elif kind in (tuple, list):
        found.append(len(value))
        found += [part if type(part) in _PLAIN else id(part) for part in value[:_FEW]]
    elif kind is dict:
        found.append(len(value))
        if len(value) <= _FEW:
            found += [part if type(part) in _PLAIN else id(part) for part in value.values()]
    elif id(value) not in seen:
        # A configuration is held by every layer of a model, and is looked at once.
        seen.add(id(value))
        found.append(id(value))
        inner = getattr(value, "__dict__", None)
        if inner and not isinstance(value, (*_CODE, nn.Module)):
            found += [part if type(part) in _PLAIN else id(part) for part in inner.values()]


# --- what is remembered ------------------------------------------------------------------------------


def memory(modules: Sequence[nn.Module]) -> dict[tuple[str, str], Any]:
    """What modules remember in Python, by owner and attribute; it holds what it saw, lest another take its place."""
    found: dict[tuple[str, str], Any] = {}
    for module in modules:
        for name, layer in module.named_modules():
            owner = f"{type(layer).__name__} {name}".strip()
            for attribute, value in layer.__dict__.items():
                if attribute not in INSIDE or attribute == "training":
                    found[owner, attribute] = _remembered(value)
            for attribute, buffer in layer._buffers.items():
                found[owner, attribute] = _This(buffer)
    return found


def what_changed(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> str | None:
    """Which attribute of which module is not what it was; None where all are."""
    for (owner, attribute), value in after.items():
        if (owner, attribute) not in before or before[owner, attribute] != value:
            return f"{owner} changes its attribute {attribute!r} in every step"
    return None


class _This:
    """Equal to another of the very same object."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _This) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


def _remembered(value: Any, depth: int = 0) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, (Tensor, nn.Module, *_CODE)) or depth == 3:
        return _This(value)
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return (len(value), *(_remembered(part, depth + 1) for part in list(value)[: 4 * _FEW]))
    if isinstance(value, Mapping):
        parts = list(value.items())[: 4 * _FEW]
        return (len(value), *((key, _remembered(part, depth + 1)) for key, part in parts))
    inner = getattr(value, "__dict__", None)
    if not inner:
        return _This(value)
    return (_This(value), *((key, _remembered(part, depth + 1)) for key, part in list(inner.items())[: 4 * _FEW]))
