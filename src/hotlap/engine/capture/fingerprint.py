"""The Python state of a training: what a recording depends on, and what a module updates from step to step."""

from __future__ import annotations

import gc
import inspect
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter, is_, itemgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from hotlap.core.code_reads import is_users, names_in, reads_of

INSIDE = frozenset(nn.Module().__dict__)
"""Attributes that torch itself keeps in a module."""
_PLAIN = frozenset((int, float, bool, str, type(None), complex))
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
_FEW, _LISTED = 16, 256
"""Entries of a container that are compared, and of a list or tuple of numbers; for a longer one, also their number. Of
tensors, all are compared."""
_SMALL = 4096
"""Most bytes of an array of numpy whose numbers are compared."""
_GENERATORS = (random.Random, np.random.Generator, torch.Generator)
_HOLDERS = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""Where torch keeps the parts of a module, and its hooks."""
_inside, _parameters_in = attrgetter("__dict__"), itemgetter("_parameters")
_requires_grad, _hooks_of = attrgetter("requires_grad"), attrgetter("_backward_hooks")
_Thing = TypeVar("_Thing")


def fingerprint(modules: Sequence[nn.Module], functions: Sequence[Callable[..., Any] | None] = ()) -> tuple[Any, ...]:
    """What a recording depends on: layers, modes, settings such as a dropout rate, parameters and addresses.

    `functions` are the user's functions; the values that they hold count too. So do numbers and tensors that they, or
    the layers' own code, read as globals. It is computed at every step, so it checks each object once and not deeply.
    """
    found: list[Any] = []
    seen: set[int] = set()
    for module in modules:
        _add_module(module, found, seen)
    for function in functions:
        if function is not None:
            _add_function(function, found, seen)
    return tuple(found)


def place_of(tensor: Tensor) -> int:
    """The address of a tensor; its id if it has no address."""
    return tensor.data_ptr() if tensor.layout is torch.strided and not is_lazy(tensor) else id(tensor)


def places_in(state: Any) -> Iterator[int]:
    """The addresses of the tensors in an optimizer's state, at any depth."""
    if isinstance(state, Tensor):
        yield place_of(state)
    elif isinstance(state, Mapping):
        for part in state.values():
            yield from places_in(part)
    elif isinstance(state, (list, tuple)):
        for part in state:
            yield from places_in(part)


def _add_module(module: nn.Module, found: list[Any], seen: set[int]) -> None:
    inside, kind = module.__dict__, type(module)
    found += (id(module), kind, inside["training"])
    _add_globals(_globals_of_layers(kind), found)
    if len(inside) > len(INSIDE):
        for name, value in inside.items():
            if name not in INSIDE:
                _add_value(value, found, seen)
    for parameter in inside["_parameters"].values():
        if parameter is not None:
            hooks = parameter._backward_hooks
            found += (place_of(parameter), parameter.requires_grad, len(hooks) if hooks else 0)
    for buffer in inside["_buffers"].values():
        if buffer is not None:
            found += _form(buffer)
    # Hooks are Python, which a replay leaves out. Adding or removing one changes the step.
    found += (len(inside["_forward_hooks"]), len(inside["_forward_pre_hooks"]))
    found += (len(inside["_backward_hooks"]), len(inside["_backward_pre_hooks"]))
    for child in inside["_modules"].values():
        if child is not None:
            _add_module(child, found, seen)


def _add_function(function: Any, found: list[Any], seen: set[int]) -> None:
    found.append(id(function))
    _add_globals(_globals_of(function), found)
    if isinstance(function, types.MethodType):
        function = function.__self__
    for cell in getattr(function, "__closure__", None) or ():
        held = _content_of(cell)
        if held is not _EMPTY and not isinstance(held, nn.Module):
            _add_value(held, found, seen)
    if not isinstance(function, (*_CODE, nn.Module)):
        _add_value(function, found, seen)


# --- globals -------------------------------------------------------------------------------------------

_Globals = tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
"""Namespaces, and what code reads there: a name, and the attributes that it takes from it."""
_HELD = frozenset((list, tuple, dict, OrderedDict))
_of_layers: dict[type, _Globals] = {}
_of_code: dict[int, tuple[types.CodeType, _Globals]] = {}
"""By the id of code, which takes long to hash; with the code, so that no other gets that id."""


def _add_globals(read: _Globals, found: list[Any]) -> None:
    """Add the numbers and tensors among these globals: a script may bind the names anew."""
    for space, path in read:
        value = _global_at(space, path)
        if _is_frozen(value):
            _add_value(value, found, set())


def _global_at(space: Mapping[str, Any], path: Sequence[str]) -> Any:
    """The value there; an object of no use where there is none."""
    value: Any = space.get(path[0], _EMPTY)
    for name in path[1:]:
        value = getattr(value, "__dict__", {}).get(name, _EMPTY)
    return value


def _is_frozen(value: Any) -> bool:
    """Whether a recording keeps a global as it is: its numbers, if they are not too many, or where its tensors are."""
    kind = type(value)
    if kind in _PLAIN or _is_ordinary(value) or isinstance(value, _OF_NUMPY):
        return True
    most = _LISTED if kind in (list, tuple) else _FEW
    return kind in _HELD and (_holds_tensors(value) or (len(value) <= most and _holds_numbers(value)))


def _globals_of_layers(kind: type[nn.Module]) -> _Globals:
    """What the user's code of a class of layers reads in its forward pass."""
    if kind not in _of_layers:
        _of_layers[kind] = _globals_read([getattr(kind, "forward", None)], kind)
    return _of_layers[kind]


def _globals_of(function: Any) -> _Globals:
    """What a function of the user's reads."""
    own = getattr(function, "__func__", function)
    owner = type(getattr(function, "__self__", function))
    if not isinstance(own, types.FunctionType):
        own = getattr(owner, "__call__", None)  # noqa: B004 -- its code
    if not isinstance(own, types.FunctionType):
        return ()
    code = own.__code__
    if id(code) not in _of_code:
        _of_code[id(code)] = code, _globals_read([own], owner)
    return _of_code[id(code)][1]


def _globals_read(ahead: list[Any], owner: type) -> _Globals:
    """What these functions read, with the functions and the owner's methods that they name, as far as they are the
    user's."""
    found: dict[tuple[int, tuple[str, ...]], tuple[dict[str, Any], tuple[str, ...]]] = {}
    seen: set[types.CodeType] = set()
    while ahead:
        one = ahead.pop()
        if not isinstance(one, types.FunctionType) or one.__code__ in seen or not is_users(one.__module__):
            continue
        seen.add(one.__code__)
        space = one.__globals__
        for read in reads_of(one.__code__):
            if not read.is_cell:
                path = read.name, *read.attributes
                for end in range(1, len(path) + 1):  # `settings.rate.item()` reads `settings.rate`
                    value = _global_at(space, path[:end])
                    ahead.append(value)
                    if _is_frozen(value) or isinstance(value, _GENERATORS):
                        found[id(space), path[:end]] = space, path[:end]
        ahead += [_code_of(inspect.getattr_static(owner, name, None)) for name in names_in(one.__code__)]
        ahead += map(_content_of, one.__closure__ or ())  # what a decorator wraps
    return tuple(found.values())


_EMPTY: Any = object()


def _content_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _EMPTY


def _code_of(member: Any) -> Any:
    """The function behind a method or property of a class."""
    return getattr(member, "__func__", getattr(member, "fget", member))


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor's address and layout: a tensor of another shape may take its place in memory."""
    if tensor.layout is not torch.strided or is_lazy(tensor):
        return (id(tensor),)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


_OF_NUMPY = (np.ndarray, np.generic)


def _is_on_host(value: Any) -> bool:
    """Whether a pass may take numbers from it on the host, which a recording freezes."""
    return isinstance(value, _OF_NUMPY) or (type(value) is Tensor and value.device.type == "cpu")


def _content(value: Any) -> Any:
    """A value that changes with the numbers of one on the host, as far as they are few."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return id(value), value.tobytes() if value.nbytes <= _SMALL else None
    writes = None if value.is_inference() else value._version
    is_small = value.layout is torch.strided and value.numel() <= _FEW
    return writes, repr(value.tolist()) if is_small else None  # NaN is not equal to itself


def _add_value(value: Any, found: list[Any], seen: set[int]) -> None:
    kind = type(value)
    if kind in _PLAIN:
        found.append(value)
    elif isinstance(value, (Tensor, *_OF_NUMPY)):
        found.append(_part(value))
    elif kind in (tuple, list):
        found.append(len(value))
        found += map(_part, value if _holds_tensors(value) else value[:_LISTED])
    elif kind is dict or (kind is OrderedDict and _holds_tensors(value)):
        found.append(len(value))
        if len(value) <= _FEW or _holds_tensors(value):
            found += map(_part, value.values())
    elif id(value) not in seen:
        # All layers of a model may hold one configuration; compare it once.
        seen.add(id(value))
        found.append(id(value))
        inner = getattr(value, "__dict__", None)
        if inner and not isinstance(value, (*_CODE, nn.Module)):
            found += map(_part, inner.values())


def _part(part: Any) -> Any:
    """What a fingerprint holds of a part of a container: its number, its place, or its few numbers."""
    if type(part) in _PLAIN:
        return part
    if type(part) in (list, tuple):
        return len(part), *(one if type(one) in _PLAIN else id(one) for one in part[:_FEW])
    content = _content(part) if _is_on_host(part) else None
    form = _form(part) if isinstance(part, Tensor) else id(part) if content is None else None
    return form, content


def _is_ordinary(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _holds_tensors(value: Any) -> bool:
    """Whether one of the first parts of a container is a tensor: a recording may read all, such as masks by layer."""
    return any(map(_is_ordinary, islice(_parts_of(value), _FEW)))


def _holds_numbers(value: Any) -> bool:
    found = [*_parts_of(value)]
    found += chain.from_iterable(part for part in found if type(part) in (list, tuple))
    return any(type(part) in (int, float) for part in found)


def _parts_of(value: Any) -> Iterable[Any]:
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        parts: Iterable[Any] = value.values()
        return parts
    return value if kind is list or kind is tuple else ()


# --- a quick look ------------------------------------------------------------------------------------


class QuickCheck:
    """Everything that a fingerprint is computed from, to be checked again at every step.

    It compares objects and addresses in flat lists that are built once. That takes a fraction of the time of a
    fingerprint.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._layers = list(dict.fromkeys(layer for module in modules for layer in module.modules()))
        self._kinds = list(map(type, self._layers))
        own = [(vars(layer), *item) for layer in self._layers for item in vars(layer).items() if item[0] not in INSIDE]
        self._odd = [(inside, name, value) for inside, name, value in own if not _is_plain(value)]
        read = [(space, path) for kind in dict.fromkeys(self._kinds) for space, path in _globals_of_layers(kind)]
        values = [(space, path, _global_at(space, path)) for space, path in read]
        self._globals = [(space, path, value) for space, path, value in values if _is_frozen(value)]
        odd = [value for *_, value in (*self._odd, *self._globals)]
        self._owners = [*self._layers, *_each_once(value for value in odd if _is_looked_into(value))]
        self._insides = list(map(vars, self._owners))
        self._attributes = gc.get_referents(*self._insides)
        self._parameter_dicts = [layer._parameters for layer in self._layers]
        self._parameters = _each_once(p for held in self._parameter_dicts for p in held.values() if p is not None)
        self._flags = list(map(_requires_grad, self._parameters))
        self._hooks = list(map(_hooks_of, self._parameters))
        dicts = [vars(layer)[name] for layer in self._layers for name in _HOLDERS]
        holders = list(filter(_holds_tensors, odd))
        dicts += [value for value in odd if type(value) is dict]
        dicts += [value for value in holders if type(value) is OrderedDict]
        dicts += [hooks for hooks in self._hooks if hooks is not None]
        self._empty = [one for one in (*self._insides, *dicts) if not one]
        self._dicts = [one for one in dicts if one]
        self._held = [part for one in self._dicts for part in one.values()]
        nested = chain.from_iterable(value for value in odd if type(value) in (list, tuple))
        self._lists = [value for value in (*odd, *nested) if type(value) is list]
        self._listed = [part for one in self._lists for part in one]
        self._sized = [*self._insides, *self._dicts, *self._lists]
        self._sizes = list(map(len, self._sized))
        buffers = (buffer for layer in self._layers for buffer in layer._buffers.values() if buffer is not None)
        tensors = [*self._parameters, *buffers, *(value for value in odd if isinstance(value, Tensor))]
        tensors += filter(_is_ordinary, chain.from_iterable(map(_parts_of, holders)))
        inside = (part for owner in self._owners[len(self._layers) :] for part in vars(owner).values())
        parts = chain(odd, chain.from_iterable(map(_parts_of, odd)), inside)
        self._on_host = [(value, _content(value)) for value in parts if _is_on_host(value)]
        self._are_settled = not any(map(is_lazy, tensors))  # a lazy tensor becomes another without a trace
        self._placed = [tensor for tensor in tensors if tensor.layout is torch.strided and self._are_settled]
        self._places = list(map(Tensor.data_ptr, self._placed))

    def still_holds(self) -> bool:
        """Whether nothing has changed, so that the fingerprint is the same. If False, the fingerprint may still be the
        same."""
        try:
            return (
                self._are_settled
                and not any(self._empty)
                and self._sizes == list(map(len, self._sized))
                and self._kinds == list(map(type, self._layers))
                and all(map(is_, map(_inside, self._owners), self._insides))
                # Equality is enough: values that can change inside are compared below.
                and self._attributes == gc.get_referents(*self._insides)
                and all(inside.get(name) is value for inside, name, value in self._odd)
                and all(_is_the_same(_global_at(space, path), value) for space, path, value in self._globals)
                and all(map(is_, self._parameter_dicts, map(_parameters_in, self._insides)))
                and all(map(is_, chain.from_iterable(map(dict.values, self._dicts)), self._held))
                and all(map(is_, chain.from_iterable(self._lists), self._listed))
                and all(map(is_, map(_hooks_of, self._parameters), self._hooks))
                and self._flags == list(map(_requires_grad, self._parameters))
                and self._places == list(map(Tensor.data_ptr, self._placed))
                and all(_content(value) == content for value, content in self._on_host)
            )
        except Exception:  # some objects refuse to be compared
            return False


class StateCheck:
    """The same for the tensors that an optimizer keeps, and their addresses. It holds none of them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        parts = optimizer.state.values()
        # A quick check does not see nested values, or tensors without an address.
        self._are_settled = all(type(part) is dict and all(map(_is_settled, part.values())) for part in parts)
        if self._are_settled:
            values = self._values()
            self._ids = list(map(id, values))
            self._tensors = [number for number, value in enumerate(values) if isinstance(value, Tensor)]
            self._places = self._places_of(values)

    def still_holds(self) -> bool:
        """Whether nothing has changed."""
        try:
            values = self._values() if self._are_settled else []
            return self._are_settled and list(map(id, values)) == self._ids and self._places_of(values) == self._places
        except (TypeError, AttributeError):  # for new state that is no dict or no tensor
            return False

    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._optimizer.state.values())))

    def _places_of(self, values: list[Any]) -> list[int]:
        return [values[number].data_ptr() for number in self._tensors]


def _is_settled(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.layout is torch.strided and not is_lazy(value)
    return type(value) in _PLAIN


def _is_plain(value: Any) -> bool:
    """Whether equal values are interchangeable."""
    if type(value) is tuple:
        return all(type(part) in _PLAIN for part in value)
    return type(value) in _PLAIN or isinstance(value, _CODE)


def _is_the_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and _is_plain(now) and now == before)


def _is_looked_into(value: Any) -> bool:
    """Whether a fingerprint covers a value's attributes, such as those of a configuration."""
    return hasattr(value, "__dict__") and not isinstance(value, (Tensor, nn.Module))


def _each_once(things: Iterable[_Thing]) -> list[_Thing]:
    return list({id(thing): thing for thing in things}.values())


# --- what is remembered ------------------------------------------------------------------------------


def memory(
    modules: Sequence[nn.Module], functions: Sequence[Callable[..., Any] | None] = ()
) -> dict[tuple[str, str], Any]:
    """The Python state of modules, by owner and attribute. It holds the objects, so that their ids stay taken.

    Of the user's functions, and of what layers read as globals, it notes the generators that they draw from.
    """
    found: dict[tuple[str, str], Any] = {}
    kinds = dict.fromkeys(type(layer) for module in modules for layer in module.modules())
    read = [*chain.from_iterable(map(_globals_of_layers, kinds)), *chain.from_iterable(map(_globals_of, functions))]
    named = [(".".join(path), _global_at(space, path)) for space, path in read]
    named += chain.from_iterable(map(_held_by, functions))
    for attribute, value in named:
        if isinstance(value, _GENERATORS):
            found["the script", attribute] = _comparable(value)
    for module in modules:
        for name, layer in module.named_modules():
            owner = f"{type(layer).__name__} {name}".strip()
            for attribute, value in layer.__dict__.items():
                if attribute not in INSIDE or attribute == "training":
                    found[owner, attribute] = _comparable(value)
            for attribute, buffer in layer._buffers.items():
                found[owner, attribute] = _SameObject(buffer)
    return found


def _held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """What a function of the user's holds by name: in its closure, or as attributes of its object."""
    own, owner = getattr(function, "__func__", function), getattr(function, "__self__", function)
    if isinstance(own, types.FunctionType):
        yield from zip(own.__code__.co_freevars, map(_content_of, own.__closure__ or ()), strict=True)
    if not isinstance(owner, (*_CODE, nn.Module)):
        yield from getattr(owner, "__dict__", {}).items()


def what_changed(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any]) -> str | None:
    """The module and attribute that changed; None if all are the same."""
    for (owner, attribute), value in after.items():
        if (owner, attribute) not in before or before[owner, attribute] != value:
            return f"{owner} changes its attribute {attribute!r} in every step"
    return None


class _SameObject:
    """Equal only to one of the very same object."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameObject) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


def _comparable(value: Any, depth: int = 0) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy())
    if isinstance(value, (Tensor, nn.Module, *_CODE)) or depth == 3:
        return _SameObject(value)
    if isinstance(value, (tuple, list, deque, set, frozenset)):
        return (len(value), *(_comparable(part, depth + 1) for part in list(value)[: 4 * _FEW]))
    if isinstance(value, Mapping):
        parts = list(value.items())[: 4 * _FEW]
        return (len(value), *((key, _comparable(part, depth + 1)) for key, part in parts))
    inner = getattr(value, "__dict__", None)
    if not inner:
        return _SameObject(value)
    return (_SameObject(value), *((key, _comparable(part, depth + 1)) for key, part in list(inner.items())[: 4 * _FEW]))
