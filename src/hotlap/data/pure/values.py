"""The kinds of values in followed code, and reading them; hotlap notes every value that the code reads."""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import itertools
import linecache
import os
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.data.pure.known_calls import GENERATORS, OWN_GENERATOR, is_library, is_plain_tensor
from hotlap.data.pure.read_state import MISSING, ReadState, is_content, is_fixed
from hotlap.store.keys import bytecode

Written = ast.FunctionDef | ast.Lambda


def tree_of(function: types.FunctionType) -> Written | None:
    """The syntax tree of a function; None without source text, or if the text is not what runs."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    found = _compiled("".join(lines), code.co_filename)
    if found is None:
        return None
    written, compiled = found
    if _key(code) not in compiled:
        return None
    nodes = [node for node in written.get((code.co_firstlineno, code.co_name), []) if _holds(node, code)]
    return min(nodes, key=_length) if nodes else None


@functools.lru_cache(maxsize=64)
def _compiled(text: str, file: str) -> tuple[dict[tuple[int, str], list[Written]], set[str]] | None:
    """The functions of a file by line and name, and the keys of their compiled code."""
    try:
        tree, code = ast.parse(text), compile(text, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    written: dict[tuple[int, str], list[Written]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            written.setdefault((first, node.name), []).append(node)
        elif isinstance(node, ast.Lambda):
            written.setdefault((node.lineno, "<lambda>"), []).append(node)
    return written, {_key(one) for one in _codes(code)}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _key(code: types.CodeType) -> str:
    return repr((code.co_firstlineno, code.co_name, code.co_varnames, code.co_freevars, bytecode(code)))


def _holds(node: Written, code: types.CodeType) -> bool:
    """Whether a node contains all of a function's code: one line may hold several lambdas."""
    if isinstance(node, ast.FunctionDef):
        return True
    start, end = (node.body.lineno, node.body.col_offset), (node.body.end_lineno or 0, node.body.end_col_offset or 0)
    for line, last, column, last_column in code.co_positions():
        if None in (line, last, column, last_column) or (column == 0 and last_column == 0):
            continue
        if (line, column) < start or (last, last_column) > end:
            return False
    return True


def _length(node: Written) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


MOST_CASES = 64
"""Values that a name may have, at most."""


class RefusedError(Exception):
    """The end of a proof; the text says what the code does, after the name of the dataset."""


@dataclass(frozen=True)
class Data:
    """A number, text, tensor, array or picture; `fresh` if the call itself made its memory."""

    fresh: bool
    kind: type | None = None


@dataclass(frozen=True, eq=False)
class Concrete:
    """An object that existed before the call."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Concrete) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Container:
    """A container or an iterator."""

    kind: type
    parts: Value
    """Its possible entries."""
    fresh: bool = True
    items: tuple[Value, ...] | None = None
    """Its entries in order, if they are known."""


@dataclass(frozen=True)
class Attribute:
    """An attribute of data, or a method of it or of a container."""

    name: str
    owner: Data | Container


@dataclass(frozen=True)
class Method:
    """A function bound to an object."""

    function: Any
    owner: Concrete

    def __hash__(self) -> int:
        return hash((id(self.function), self.owner))


@dataclass(frozen=True, eq=False)
class LocalFunction:
    """A function that the followed code defines."""

    node: Written
    scope: Scope


@dataclass(frozen=True)
class Super:
    """`super()`."""

    kind: type
    owner: Concrete


Atom = Data | Concrete | Container | Attribute | Method | LocalFunction | Super
Value = frozenset[Atom]

NEW: Value = frozenset({Data(True)})
SHARED: Value = frozenset({Data(False)})
NUMBER: Value = frozenset({Data(True, int)})
NOTHING: Value = frozenset()
ITERATOR = type(iter(()))


def concrete(value: Any) -> Value:
    return frozenset({Concrete(value)})


def make_container(kind: type, parts: Value, items: Sequence[Value] | None = None) -> Value:
    return frozenset({Container(kind, parts, items=None if items is None else tuple(items))})


def union(values: Iterable[Value]) -> Value:
    found = frozenset(itertools.chain.from_iterable(values))
    if len(found) > MOST_CASES:
        raise RefusedError("has too many cases to be followed")
    return found


@dataclass
class Arguments:
    """The arguments of a call."""

    places: list[Value] = field(default_factory=list)
    names: dict[str, Value] = field(default_factory=dict)
    rest: Value = NOTHING
    """Further positional arguments, of unknown number."""
    more: Value = NOTHING
    """Keyword arguments with unknown names."""

    @property
    def all(self) -> Value:
        return union([*self.places, *self.names.values(), self.rest, self.more])

    def before(self, first: Value) -> Arguments:
        return Arguments([first, *self.places], self.names, self.rest, self.more)


@dataclass
class Scope:
    """The variables of a function that hotlap follows."""

    function: types.FunctionType
    node: Written
    names: dict[str, Value] = field(default_factory=dict)
    outer: Scope | None = None
    returned: list[Value] = field(default_factory=list)
    loops: list[list[dict[str, Value]]] = field(default_factory=list)
    is_seeded: bool = False
    """Whether torch's generator was seeded when the function began; at its end it must be the same."""
    loops_seeded: list[bool] = field(default_factory=list)
    log: list[tuple[str, Value]] = field(default_factory=list)

    def set(self, name: str, value: Value) -> None:
        self.names[name] = value
        self.log.append((name, value))

    def inner(self, node: Written | None = None) -> Scope:
        """An inner scope; it sees the current variables of this one."""
        return Scope(self.function, node or self.node, outer=self)


# --- small questions ---------------------------------------------------------------------------------


def single(value: Value, other: Any = MISSING) -> Any:
    """The object, if the value is exactly one; else `other` or None."""
    if len(value) == 1:
        (atom,) = value
        if isinstance(atom, Concrete):
            return atom.value
    return None if other is MISSING else other


def is_leaf(atom: Atom) -> bool:
    return isinstance(atom, (Data, Attribute)) or (isinstance(atom, Concrete) and is_fixed(atom.value))


def may_be_none(atom: Atom) -> bool:
    return isinstance(atom, Concrete) and atom.value is None


def type_of(atom: Atom) -> type | None:
    match atom:
        case Concrete():
            return type(atom.value)
        case Data() | Container():
            return atom.kind
    return None


def types_in(value: Value) -> tuple[type, ...] | None:
    """The classes in the second argument of `isinstance`."""
    found: list[type] = []
    for atom in value:
        if isinstance(atom, Concrete) and isinstance(atom.value, type):
            found.append(atom.value)
        elif isinstance(atom, Concrete) and isinstance(atom.value, tuple):
            found += [one for one in atom.value if isinstance(one, type)]
        elif isinstance(atom, Container):
            inner = types_in(atom.parts)
            if inner is None:
                return None
            found += inner
        else:
            return None
    return tuple(found)


def merged(a: dict[str, Value], b: dict[str, Value]) -> dict[str, Value]:
    return {name: union([a.get(name, NOTHING), b.get(name, NOTHING)]) for name in {**a, **b}}


_PLAIN_LOOKUPS = (object.__getattribute__, types.FunctionType.__getattribute__, types.SimpleNamespace.__getattribute__)

_NONE = type(None)
_SIMPLE = frozenset({int, float, bool, str, bytes, _NONE, Tensor, np.ndarray})


class Objects(ABC):
    """Reads values, and notes what it reads."""

    def __init__(self) -> None:
        self.state = ReadState()
        self.reads_files = False
        self._elements: dict[int, tuple[Any, Value]] = {}

    @abstractmethod
    def call(self, function: Value, given: Arguments) -> Value:
        """The result of a call."""

    def read(self, value: Any) -> Value:
        """An object that existed before the call, as a value."""
        if value is os.environ:
            self.state.content(vars(value)["_data"])
            return frozenset({Container(dict, NEW, fresh=False)})
        if isinstance(value, np.memmap):
            self.reads_files = True
            return SHARED
        if is_content(value):
            self.state.content(value)
        return concrete(value)

    def plain(self, value: Value, verb: str) -> bool:
        """Whether all data is fresh; refuses anything but data and containers of data."""
        is_fresh = True
        for atom in value:
            match atom:
                case Data():
                    is_fresh &= atom.fresh
                case Attribute():
                    is_fresh &= atom.owner.fresh
                case Container():
                    is_fresh &= self.plain(atom.parts, verb)
                case Concrete() if is_content(atom.value):
                    if not is_plain_tensor(atom.value) and not isinstance(atom.value, np.ndarray):
                        self.plain(self.elements_of(atom.value), verb)
                    is_fresh = False
                case Concrete() if is_fixed(atom.value) or isinstance(atom.value, type):
                    pass
                case Concrete() if isinstance(atom.value, GENERATORS):
                    raise RefusedError(f"draws from {OWN_GENERATOR}")
                case Concrete():
                    raise RefusedError(f"{verb} an object of {type(atom.value).__name__}, which is not known")
                case _:
                    raise RefusedError(f"{verb} a function")
        return is_fresh

    def truth(self, value: Value) -> bool | None:
        """Whether a value is true; None if that is not known."""
        found = {self._truth(atom) for atom in value}
        return found.pop() if len(found) == 1 else None

    def _truth(self, atom: Atom) -> bool | None:
        match atom:
            case Concrete() if atom.value is None or type(atom.value) in (bool, int, float, str, list, tuple, dict):
                return bool(atom.value)
            case Concrete() if isinstance(atom.value, (type, types.FunctionType, types.MethodType, types.ModuleType)):
                return True
            case Concrete() if is_content(atom.value) or is_fixed(atom.value):
                return None
            case Concrete():
                for name in ("__bool__", "__len__"):
                    if self.of_class(atom.value, name) is not MISSING:
                        self.call(self.attribute(frozenset({atom}), name), Arguments())
                        return None
                return True
            case Method() | LocalFunction():
                return True
        return None

    def iterate(self, value: Value) -> Value:
        """The items of a value."""
        return union(self._iterated(atom) for atom in value)

    def _iterated(self, atom: Atom) -> Value:
        match atom:
            case Data():
                return frozenset({Data(atom.fresh)})
            case Attribute():
                return frozenset({Data(atom.owner.fresh)})
            case Container():
                return atom.parts
            case Concrete() if isinstance(atom.value, (range, str, bytes)):
                return NEW
            case Concrete() if is_plain_tensor(atom.value) or isinstance(atom.value, np.ndarray):
                return SHARED
            case Concrete() if type(atom.value) in (nn.Sequential, nn.ModuleList):
                self.state.name(vars(atom.value), "_modules", atom.value._modules)
                self.state.content(atom.value._modules)
                return frozenset(Concrete(one) for one in atom.value)
            case Concrete() if is_content(atom.value):
                return self.elements_of(atom.value)
            case Concrete() if atom.value is None:
                return NOTHING
            case Concrete() if isinstance(atom.value, type) and issubclass(atom.value, enum.Enum):
                return NEW
            case Concrete() if hasattr(type(atom.value), "__next__"):
                raise RefusedError(f"takes from a {type(atom.value).__name__} that it keeps")
        raise RefusedError("goes through an object that is not known")

    def entries_of(self, value: Value) -> Value:
        """The entries of containers: keys and values."""
        return self.iterate(frozenset(atom for atom in value if not is_leaf(atom)))

    def elements_of(self, container: Any) -> Value:
        """The entries of an existing container."""
        if id(container) not in self._elements:
            simple = _simple(container)
            if simple is not None:
                return simple
            rows = [part for row in container.items() for part in row] if hasattr(container, "items") else container
            known: dict[Any, None] = {}
            for one in rows:
                known[self._element(one)] = None
                if len(known) > MOST_CASES:
                    raise RefusedError("holds too many objects to be followed")
            self._elements[id(container)] = container, frozenset(known)
        return self._elements[id(container)][1]

    def _element(self, value: Any) -> Atom:
        if type(value) is tuple:
            simple = _simple(value)
            if simple is not None:
                return Container(tuple, simple)
        if is_plain_tensor(value) or isinstance(value, np.ndarray):
            return Data(False)
        if is_content(value):
            # Many similar ones become one case.
            return Container(type(value), self.elements_of(value), fresh=type(value) is tuple)
        return Data(True) if value is not None and is_fixed(value) else Concrete(value)

    def subscript(self, value: Value, index: Value) -> Value:
        """The result of `value[index]`."""
        return union(self._subscripted(atom, index) for atom in value)

    def _subscripted(self, atom: Atom, index: Value) -> Value:
        match atom:
            case Concrete() if is_content(atom.value):
                if not isinstance(atom.value, np.ndarray):
                    self.state.content(atom.value)
                return self._of_container(atom.value, index)
            case Concrete() if isinstance(atom.value, (str, bytes, range, torch.Size)):
                return NEW
            case Concrete() if atom.value is None:
                return NOTHING
            case Concrete() if isinstance(atom.value, type):  # `list[int]`
                return concrete(atom.value)
            case Concrete():
                return self.call(self.attribute(frozenset({atom}), "__getitem__"), Arguments([index]))
            case Data() | Attribute():
                self.plain(index, "looks up by")
                return frozenset({Data(atom.fresh if isinstance(atom, Data) else atom.owner.fresh)})
            case Container():
                return self._of_new_container(atom, index)
        raise RefusedError("looks something up in a function")

    def _of_new_container(self, container: Container, index: Value) -> Value:
        self.plain(index, "looks up by")
        at = single(index)
        if container.items is not None and type(at) is int and -len(container.items) <= at < len(container.items):
            return container.items[at]
        is_slice = any(isinstance(atom, Data) and atom.kind is slice for atom in index)
        return frozenset({Container(container.kind, container.parts)}) if is_slice else container.parts

    def _of_container(self, container: Any, index: Value) -> Value:
        self.plain(index, "looks up by")
        if isinstance(container, np.memmap):
            self.reads_files = True
            return SHARED
        if isinstance(container, (Tensor, np.ndarray)):
            self.state.content(container)
            return SHARED
        at = single(index)
        if type(container) is defaultdict:
            raise RefusedError("looks something up in a defaultdict, which may add to it")
        if at is not None and isinstance(at, (int, str)):
            try:
                return self.read(container[at])
            except (LookupError, TypeError):
                return NOTHING
        parts = self.elements_of(container)
        is_slice = any(isinstance(atom, Data) and atom.kind is slice for atom in index)
        return frozenset({Container(type(container), parts)}) if is_slice else parts

    def length(self, value: Value) -> Value:
        """The result of `len(value)`."""
        for atom in value:
            if isinstance(atom, Concrete) and not is_content(atom.value) and not is_fixed(atom.value):
                self.call(self.attribute(frozenset({atom}), "__len__"), Arguments())
        return NUMBER

    # --- attributes ------------------------------------------------------------------------------

    def attribute(self, value: Value, name: str) -> Value:
        """The result of `value.name`."""
        return union(self._attribute(atom, name) for atom in value)

    def _attribute(self, atom: Atom, name: str) -> Value:
        match atom:
            case Container() if atom.kind is tuple and not hasattr(tuple, name):  # a field of a named one
                return atom.parts
            case Data() | Container():
                return frozenset({Attribute(name, atom)})
            case Attribute():
                return frozenset({Attribute(name, Data(atom.owner.fresh))})
            case Super():
                kinds = type(atom.owner.value).__mro__
                for kind in kinds[kinds.index(atom.kind) + 1 :]:
                    if name in vars(kind):
                        return self._bound(atom.owner, vars(kind)[name], name)
                return NOTHING
            case Concrete() if name == "__class__":
                return concrete(type(atom.value))
            case Concrete() if atom.value is None and not hasattr(None, name):
                return NOTHING  # which raises
            case Concrete() if is_content(atom.value):
                is_array = isinstance(atom.value, (Tensor, np.ndarray))
                kind = type(atom.value)
                owner = Data(False, kind) if is_array else Container(kind, self.elements_of(atom.value), fresh=False)
                return frozenset({Attribute(name, owner)})
            case Concrete() if isinstance(atom.value, enum.Enum):
                return concrete(getattr(atom.value, name))
            case Concrete() if is_fixed(atom.value):
                return frozenset({Attribute(name, Data(True, type(atom.value)))})
            case Concrete() if isinstance(atom.value, types.ModuleType):
                found = getattr(atom.value, name, MISSING)
                if not is_library(atom.value.__name__):
                    self.state.name(vars(atom.value), name, found)
                return NOTHING if found is MISSING else self.read(found)
            case Concrete() if isinstance(atom.value, type) and name in ("__name__", "__qualname__"):
                return NEW
            case Concrete() if isinstance(atom.value, type):
                return self._of_type(atom.value, name)
            case Concrete():
                return self._of_object(atom, name)
        raise RefusedError(f"reads {name} of a function")

    def _of_type(self, kind: type, name: str) -> Value:
        for one in kind.__mro__:
            if name in vars(one):
                found = vars(one)[name]
                if not is_library(one.__module__):
                    self.state.name(vars(one), name, found)
                if isinstance(found, classmethod):
                    return frozenset({Method(found.__func__, Concrete(kind))})
                if isinstance(found, staticmethod):
                    return concrete(found.__func__)
                return self.read(getattr(kind, name) if hasattr(type(found), "__get__") else found)
        found = getattr(kind, name, MISSING)
        if found is MISSING:
            return NOTHING
        if isinstance(kind, enum.EnumMeta) or is_library(kind.__module__):
            return self.read(found)
        raise RefusedError(f"reads {name} of the class {kind.__name__}")

    def of_class(self, value: Any, name: str) -> Any:
        """The entry of an object's class for a name, or MISSING."""
        return next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), MISSING)

    def _of_object(self, atom: Concrete, name: str) -> Value:
        value, own = atom.value, getattr(atom.value, "__dict__", None)
        if isinstance(value, GENERATORS):
            raise RefusedError(f"draws from {OWN_GENERATOR}")
        lookup = self.of_class(value, "__getattribute__")
        if lookup not in _PLAIN_LOOKUPS:
            return self._foreign(value, name)
        found = self.of_class(value, name)
        self.state.slot(value, "__class__", type(value))
        for kind in type(value).__mro__:
            if name in vars(kind):
                if not is_library(kind.__module__):
                    self.state.name(vars(kind), name, found)
                break
        is_data = found is not MISSING and hasattr(type(found), "__set__")
        if own is not None and not is_data:
            self.state.name(own, name, own.get(name, MISSING))
            if name in own:
                return self.read(own[name])
            if isinstance(value, nn.Module):
                for group in ("_parameters", "_buffers", "_modules"):
                    if name in own.get(group, {}):
                        self.state.name(own[group], name, own[group][name])
                        return self.read(own[group][name])
        if found is MISSING:
            if self.of_class(value, "__getattr__") is MISSING or isinstance(value, nn.Module):
                return NOTHING  # which raises
            return self._foreign(value, name)
        return self._bound(atom, found, name)

    def _foreign(self, value: Any, name: str) -> NoReturn:
        raise RefusedError(f"reads {name} of an object of {type(value).__name__}, which has its own attribute lookup")

    def _bound(self, owner: Concrete, found: Any, name: str) -> Value:
        """The entry of a class as an object of the class sees it."""
        match found:
            case types.FunctionType():
                return frozenset({Method(found, owner)})
            case property() if isinstance(found.fget, types.FunctionType):
                return self.call(frozenset({Method(found.fget, owner)}), Arguments())
            case staticmethod():
                return self.read(found.__func__)
            case classmethod():
                return frozenset({Method(found.__func__, Concrete(type(owner.value)))})
            case types.MemberDescriptorType():
                value = getattr(owner.value, name, MISSING)
                self.state.slot(owner.value, name, value)
                return NOTHING if value is MISSING else self.read(value)
        if hasattr(type(found), "__get__") and not isinstance(found, (type, types.BuiltinFunctionType)):
            if inspect.ismethoddescriptor(found):  # of a class written in C
                raise RefusedError(f"calls {name} of {type(owner.value).__name__}, which is not known")
            raise RefusedError(f"reads {name} of {type(owner.value).__name__}, which is computed")
        return self.read(found)


def _simple(container: Any) -> Value | None:
    """The entries of a list or tuple with only numbers, texts, tensors and arrays; None for others."""
    if type(container) not in (list, tuple):
        return None
    kinds = set(map(type, container))
    if not _SIMPLE.issuperset(kinds):
        return None
    return frozenset(Concrete(None) if kind is _NONE else Data(kind not in (Tensor, np.ndarray)) for kind in kinds)
