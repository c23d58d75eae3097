"""The kinds of values in followed code, and reading them; hotlap notes every value that the code reads."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import itertools
import os
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.data.pure.known_calls import (
    GENERATORS,
    OWN_GENERATOR,
    is_library,
    is_lookup,
    is_plain_tensor,
    is_shown_whole,
)
from hotlap.data.pure.read_state import MISSING, ReadState, is_content, is_fixed
from hotlap.data.pure.syntax import Written

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
    """Its possible entries: of a dict, keys and values."""
    fresh: bool = True
    items: tuple[Value, ...] | None = None
    """Its entries in order, if they are known."""
    values: Value | None = None
    """The values of a dict, if they are known apart from its keys."""
    names: tuple[str, ...] | None = None
    """The keys of a dict of keyword arguments; `items` holds their values."""
    made_at: int = 0
    """Which expression of the followed code made it; 0 if none did. All that it made count as one."""

    @property
    def found(self) -> Value:
        """What looking something up in it may give."""
        return self.parts if self.values is None else self.values


@dataclass(frozen=True)
class Attribute:
    """An attribute of data, or a method of it or of a container."""

    name: str
    owner: Data | Container


@dataclass(frozen=True)
class Instance:
    """An object that the followed code makes, of a class written in Python; one for each call that makes such."""

    kind: type
    made_at: int


@dataclass(frozen=True)
class Method:
    """A function bound to an object."""

    function: Any
    owner: Concrete | Instance

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
    owner: Concrete | Instance


Atom = Data | Concrete | Container | Instance | Attribute | Method | LocalFunction | Super
Value = frozenset[Atom]

NEW: Value = frozenset({Data(True)})
SHARED: Value = frozenset({Data(False)})
NUMBER: Value = frozenset({Data(True, int)})
NOTHING: Value = frozenset()
ITERATOR = type(iter(()))


def concrete(value: Any) -> Value:
    return frozenset({Concrete(value)})


def make_container(kind: type, parts: Value, items: Sequence[Value] | None = None, made_at: int = 0) -> Value:
    return frozenset({Container(kind, parts, items=None if items is None else tuple(items), made_at=made_at)})


def make_named(names: Mapping[str, Value]) -> Value:
    """A dict of keyword arguments."""
    values = union(names.values())
    return frozenset({Container(dict, NEW | values, items=tuple(names.values()), values=values, names=tuple(names))})


def make_dict(keys: Value, values: Value, made_at: int = 0) -> Value:
    return frozenset({Container(dict, union([keys, values]), values=values, made_at=made_at)})


def union(values: Iterable[Value]) -> Value:
    found = frozenset(itertools.chain.from_iterable(values))
    made: dict[tuple[type, int], list[Container]] = {}
    for atom in found:
        if isinstance(atom, Container) and (atom.made_at or atom.kind is tuple) and atom.items is None:
            made.setdefault((atom.kind, atom.made_at), []).append(atom)
    for same in made.values():
        if len(same) > 1:
            found = found.difference(same) | {joined(same)}
    if len(found) > MOST_CASES:
        raise RefusedError("has too many cases to be followed")
    return found


def joined(same: Sequence[Container]) -> Container:
    """One container that may be any of these, which the same expression made."""
    has_values = all(one.values is not None for one in same)
    values = union(one.values or NOTHING for one in same) if has_values else None
    return dataclasses.replace(same[0], parts=union(one.parts for one in same), values=values)


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


def exact(value: Value) -> Any:
    """The object that a value is, if it is one known plain value or a tuple of such; else MISSING."""
    (atom,) = value if len(value) == 1 else (None,)
    match atom:
        case Concrete() if is_fixed(atom.value):
            return atom.value
        case Container() if atom.kind is tuple and atom.items is not None:
            found = tuple(map(exact, atom.items))
            return MISSING if MISSING in found else found
    return MISSING


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
        case Data() | Container() | Instance():
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
        self.made: dict[Instance, dict[str, Value]] = {}
        """All that the attributes of new objects may be."""
        self.version = 0
        """A number that changes whenever new objects hold more."""
        self.overwritten: dict[tuple[int, Any], Value] = {}
        """Entries of existing dicts, by identity and key, that the code in progress has changed and will restore."""

    def hold(self, atom: Instance, name: str, value: Value) -> None:
        """An attribute of a new object may be this, too."""
        known = self.made[atom].get(name, NOTHING)
        self.made[atom][name] = union([known, value])
        self.version += self.made[atom][name] != known

    @abstractmethod
    def noted_read(self, space: Mapping[Any, Any], name: Any) -> None:
        """An entry of an existing dict is read, or an attribute of an object."""

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
                case Instance():  # its class may do anything when it is compared, added, hashed or shown
                    raise RefusedError(f"{verb} an object of {atom.kind.__name__}, which is not known")
                case Concrete() if is_content(atom.value):
                    if not is_plain_tensor(atom.value) and not isinstance(atom.value, np.ndarray):
                        self.plain(self.elements_of(atom.value), verb)
                    is_fresh = False
                case Concrete() if is_fixed(atom.value) or isinstance(atom.value, type):
                    pass
                case Concrete() if isinstance(atom.value, GENERATORS):
                    raise RefusedError(f"draws from {OWN_GENERATOR}")
                case Concrete() if is_shown_whole(atom.value):
                    self.state.shown(atom.value)
                case Concrete():
                    raise RefusedError(f"{verb} an object of {type(atom.value).__name__}, which is not known")
                case _:
                    raise RefusedError(f"{verb} a function")
        return is_fresh

    def truth(self, value: Value) -> bool | None:
        """Whether a value is true; None if that is not known."""
        found = {self._truth(atom) for atom in value}
        return found.pop() if len(found) == 1 else None

    def call_method(self, atom: Instance, name: str, given: Arguments | None = None) -> Value:
        """The result of a special method of a new object."""
        return self.call(self.attribute(frozenset({atom}), name), given or Arguments())

    def _truth(self, atom: Atom) -> bool | None:
        match atom:
            case Instance():
                for name in ("__bool__", "__len__"):
                    if _of_kind(atom.kind, name) is not MISSING:
                        self.call_method(atom, name)
                        return None
                return True
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
            case Data() if atom.kind in (int, float, bool):
                return NOTHING  # which raises
            case Data():
                return frozenset({Data(atom.fresh)})
            case Attribute():
                return frozenset({Data(atom.owner.fresh)})
            case Container():
                return atom.parts
            case Instance():
                return self.iterate(self.call_method(atom, "__iter__"))
            case Concrete() if isinstance(atom.value, (range, str, bytes)):
                return NEW
            case Concrete() if is_plain_tensor(atom.value) or isinstance(atom.value, np.ndarray):
                return SHARED
            case Concrete() if type(atom.value) in (nn.Sequential, nn.ModuleList):
                self.state.name(vars(atom.value), "_modules", atom.value._modules)
                self.state.content(atom.value._modules)
                return frozenset(Concrete(one) for one in atom.value)
            case Concrete() if isinstance(atom.value, dict):
                self.elements_of(atom.value)
                return self.entries_in(atom.value)
            case Concrete() if is_content(atom.value):
                return self.elements_of(atom.value)
            case Concrete() if atom.value is None or type(atom.value) in (int, float, bool):
                return NOTHING
            case Concrete() if isinstance(atom.value, type) and issubclass(atom.value, enum.Enum):
                return NEW
            case Concrete() if hasattr(type(atom.value), "__next__"):
                raise RefusedError(f"takes from a {type(atom.value).__name__} that it keeps")
            case Concrete() if isinstance(self.of_class(atom.value, "__iter__"), types.FunctionType):
                return self.iterate(self.call(self.attribute(frozenset({atom}), "__iter__"), Arguments()))
        raise RefusedError("goes through an object that is not known")

    def entries_of(self, value: Value) -> Value:
        """The entries of containers: keys and values."""
        held = [atom for atom in value if not is_leaf(atom)]
        dicts = [atom.value for atom in held if isinstance(atom, Concrete) and isinstance(atom.value, dict)]
        return union([self.iterate(frozenset(held)), *map(self.elements_of, dicts)])

    def elements_of(self, container: Any) -> Value:
        """The entries of an existing container."""
        if any(owner == id(container) for owner, _ in self.overwritten):
            raise RefusedError("goes through a dict to which it writes")
        self.state.content(container)
        if id(container) not in self._elements:
            simple = _simple(container)
            if simple is not None:
                return simple
            rows = [part for row in container.items() for part in row] if hasattr(container, "items") else container
            self._elements[id(container)] = container, self.entries_in(rows)
        return self._elements[id(container)][1]

    def _element(self, value: Any) -> Atom:
        if type(value) is tuple:
            simple = _simple(value)
            if simple is not None:
                return Container(tuple, simple)
        if is_plain_tensor(value) or isinstance(value, np.ndarray):
            return Data(False, type(value))
        if is_content(value):
            # Many similar ones become one case.
            return self._as_container(value)
        return Data(True, type(value)) if value is not None and is_fixed(value) else Concrete(value)

    def _as_container(self, value: Any) -> Container:
        values = self.entries_in(value.values()) if isinstance(value, dict) else None
        return Container(type(value), self.elements_of(value), fresh=type(value) is tuple, values=values)

    def entries_in(self, rows: Iterable[Any]) -> Value:
        """All that these entries of an existing container are."""
        known: dict[Any, None] = {}
        for one in rows:
            known[self._element(one)] = None
            if len(known) > MOST_CASES:
                raise RefusedError("holds too many objects to be followed")
        return frozenset(known)

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
            case Instance():
                return self.call_method(atom, "__getitem__", Arguments([index]))
            case Data() if atom.kind in (int, float, bool):
                return NOTHING  # which raises
            case Data() | Attribute():
                self.plain(index, "looks up by")
                return frozenset({Data(atom.fresh if isinstance(atom, Data) else atom.owner.fresh)})
            case Container():
                return self._of_new_container(atom, index)
        raise RefusedError("looks something up in a function")

    def _of_new_container(self, container: Container, index: Value) -> Value:
        self.plain(index, "looks up by")
        at = single(index)
        if type(at) is str and container.kind in (list, tuple):
            return NOTHING  # which raises
        if container.names is not None and container.items is not None and type(at) is str:
            return dict(zip(container.names, container.items, strict=True)).get(at, NOTHING)
        if (
            container.names is None
            and container.items is not None
            and type(at) is int
            and -len(container.items) <= at < len(container.items)
        ):
            return container.items[at]
        is_slice = any(isinstance(atom, Data) and atom.kind is slice for atom in index)
        return frozenset({Container(container.kind, container.parts)}) if is_slice else container.found

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
        if isinstance(at, (int, str)) and isinstance(container, dict):
            return self.entry(container, at)
        if at is not None and isinstance(at, (int, str)):
            try:
                return self.read(container[at])
            except (LookupError, TypeError):
                return NOTHING
        parts = self.elements_of(container)
        if isinstance(container, dict):
            return self._as_container(container).found
        is_slice = any(isinstance(atom, Data) and atom.kind is slice for atom in index)
        return frozenset({Container(type(container), parts)}) if is_slice else parts

    def entry(self, held: Mapping[Any, Any], key: Any, other: Value = NOTHING) -> Value:
        """The entry of an existing dict under a key, or `other`."""
        self.noted_read(held, key)
        if (id(held), key) in self.overwritten:
            return self.overwritten[id(held), key]
        found = held.get(key, MISSING)
        self.state.name(held, key, found)
        return other if found is MISSING else self.read(found)

    def length(self, value: Value) -> Value:
        """The result of `len(value)`."""
        for atom in value:
            if isinstance(atom, Instance):
                self.call_method(atom, "__len__")
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
            case Instance():
                return self._of_instance(atom, name)
            case Super():
                kinds = (type_of(atom.owner) or object).__mro__
                for kind in kinds[kinds.index(atom.kind) + 1 :]:
                    if name in vars(kind):
                        return self._bound(atom.owner, vars(kind)[name], name)
                return NOTHING
            case Concrete() if name == "__class__":
                return concrete(type(atom.value))
            case Concrete() if atom.value is None and not hasattr(None, name):
                return NOTHING  # which raises
            case Concrete() if isinstance(atom.value, dict) and name == "get":
                return frozenset({Method(dict.get, atom)})
            case Concrete() if type(atom.value) is str and isinstance(vars(str).get(name), types.MethodDescriptorType):
                return frozenset({Method(vars(str)[name], atom)})
            case Concrete() if is_content(atom.value):
                is_array = isinstance(atom.value, (Tensor, np.ndarray))
                kind = type(atom.value)
                return frozenset({Attribute(name, Data(False, kind) if is_array else self._as_container(atom.value))})
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
        return _of_kind(type(value), name)

    def _of_object(self, atom: Concrete, name: str) -> Value:
        value, own = atom.value, getattr(atom.value, "__dict__", None)
        if isinstance(value, GENERATORS):
            raise RefusedError(f"draws from {OWN_GENERATOR}")
        lookup = self.of_class(value, "__getattribute__")
        if lookup not in _PLAIN_LOOKUPS:
            return self._foreign(value, name)
        found = self.of_class(value, name)
        if name == "__dict__" and isinstance(own, dict):
            return concrete(own)
        if is_lookup(value, name):
            return frozenset({Method(found, atom)})
        self.state.slot(value, "__class__", type(value))
        for kind in type(value).__mro__:
            if name in vars(kind):
                if not is_library(kind.__module__):
                    self.state.name(vars(kind), name, found)
                break
        is_data = found is not MISSING and hasattr(type(found), "__set__")
        if own is not None and not is_data:
            if name in own or (id(own), name) in self.overwritten:
                return self.entry(own, name)
            self.state.name(own, name, MISSING)
            if isinstance(value, nn.Module):
                for group in ("_parameters", "_buffers", "_modules"):
                    if name in own.get(group, {}):
                        self.state.name(own[group], name, own[group][name])
                        return self.read(own[group][name])
        if found is MISSING:
            fallback = self.of_class(value, "__getattr__")
            if fallback is MISSING or isinstance(value, nn.Module):
                return NOTHING  # which raises
            if isinstance(fallback, types.FunctionType) and name[:2] != "__":
                return self.call(self._bound(atom, fallback, "__getattr__"), Arguments([concrete(name)]))
            return self._foreign(value, name)
        return self._bound(atom, found, name)

    def _of_instance(self, atom: Instance, name: str) -> Value:
        if name == "__class__":
            return concrete(atom.kind)
        found = _of_kind(atom.kind, name)
        set_here = self.made[atom].get(name, NOTHING)
        if found is MISSING:
            fallback = _of_kind(atom.kind, "__getattr__")
            if set_here or fallback is MISSING:
                return set_here
            return self.call(self._bound(atom, fallback, "__getattr__"), Arguments([concrete(name)]))
        for kind in atom.kind.__mro__:
            if name in vars(kind):
                if not is_library(kind.__module__):
                    self.state.name(vars(kind), name, found)
                break
        return union([set_here, self._bound(atom, found, name)])

    def _foreign(self, value: Any, name: str) -> NoReturn:
        raise RefusedError(f"reads {name} of an object of {type(value).__name__}, which has its own attribute lookup")

    def _bound(self, owner: Concrete | Instance, found: Any, name: str) -> Value:
        """The entry of a class as an object of the class sees it."""
        kind = type_of(owner) or object
        match found:
            case types.FunctionType():
                return frozenset({Method(found, owner)})
            case property() if isinstance(found.fget, types.FunctionType):
                return self.call(frozenset({Method(found.fget, owner)}), Arguments())
            case staticmethod():
                return self.read(found.__func__)
            case classmethod():
                return frozenset({Method(found.__func__, Concrete(kind))})
            case types.MemberDescriptorType() if isinstance(owner, Concrete):
                value = getattr(owner.value, name, MISSING)
                self.state.slot(owner.value, name, value)
                return NOTHING if value is MISSING else self.read(value)
        if hasattr(type(found), "__get__") and not isinstance(found, (type, types.BuiltinFunctionType)):
            if inspect.ismethoddescriptor(found):  # of a class written in C
                raise RefusedError(f"calls {name} of {kind.__name__}, which is not known")
            raise RefusedError(f"reads {name} of {kind.__name__}, which is computed")
        return self.read(found)


def _of_kind(kind: type, name: str) -> Any:
    """The entry of a class for a name, or MISSING."""
    return next((vars(one)[name] for one in kind.__mro__ if name in vars(one)), MISSING)


def _simple(container: Any) -> Value | None:
    """The entries of a list or tuple with only numbers, texts, tensors and arrays; None for others."""
    if type(container) not in (list, tuple):
        return None
    kinds = set(map(type, container))
    if not _SIMPLE.issuperset(kinds):
        return None
    return frozenset(
        Concrete(None) if kind is _NONE else Data(kind not in (Tensor, np.ndarray), kind) for kind in kinds
    )
