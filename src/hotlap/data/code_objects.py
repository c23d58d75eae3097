"""What code reads: attributes, entries and elements of values, each noted with the value it has now."""

from __future__ import annotations

import enum
import inspect
import os
import types
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.data.code_values import (
    MOST_CASES,
    NEW,
    NOTHING,
    NUMBER,
    SHARED,
    Atom,
    Attr,
    Box,
    Data,
    Given,
    Local,
    Method,
    RefusedError,
    Super,
    Thing,
    Value,
    is_leaf,
    joined,
    only,
    thing,
)
from hotlap.data.pure_calls import GENERATORS, OWN_GENERATOR, is_library, is_plain_tensor
from hotlap.data.read_state import MISSING, ReadState, is_content, is_fixed

_PLAIN_LOOKUPS = (object.__getattribute__, types.FunctionType.__getattribute__, types.SimpleNamespace.__getattribute__)

_NONE = type(None)
_SIMPLE = frozenset({int, float, bool, str, bytes, _NONE, Tensor, np.ndarray})


class Objects(ABC):
    """Reads values and notes what it reads."""

    def __init__(self) -> None:
        self.state = ReadState()
        self.reads_files = False
        self._elements: dict[int, tuple[Any, Value]] = {}

    @abstractmethod
    def call(self, function: Value, given: Given) -> Value:
        """What a call gives."""

    def read(self, value: Any) -> Value:
        """A value that was there before the call."""
        if value is os.environ:
            self.state.content(vars(value)["_data"])
            return frozenset({Box(dict, NEW, fresh=False)})
        if isinstance(value, np.memmap):
            self.reads_files = True
            return SHARED
        if is_content(value):
            self.state.content(value)
        return thing(value)

    def plain(self, value: Value, verb: str) -> bool:
        """Whether data is all fresh; refuses what is no data, nor a container of it."""
        is_fresh = True
        for atom in value:
            match atom:
                case Data():
                    is_fresh &= atom.fresh
                case Attr():
                    is_fresh &= atom.owner.fresh
                case Box():
                    is_fresh &= self.plain(atom.parts, verb)
                case Thing() if is_content(atom.value):
                    if not is_plain_tensor(atom.value) and not isinstance(atom.value, np.ndarray):
                        self.plain(self.elements_of(atom.value), verb)
                    is_fresh = False
                case Thing() if is_fixed(atom.value) or isinstance(atom.value, type):
                    pass
                case Thing() if isinstance(atom.value, GENERATORS):
                    raise RefusedError(f"draws from {OWN_GENERATOR}")
                case Thing():
                    raise RefusedError(f"{verb} an object of {type(atom.value).__name__}, which is not known")
                case _:
                    raise RefusedError(f"{verb} a function")
        return is_fresh

    def truth(self, value: Value) -> bool | None:
        """Whether a value is true, where that is known."""
        found = {self._truth(atom) for atom in value}
        return found.pop() if len(found) == 1 else None

    def _truth(self, atom: Atom) -> bool | None:
        match atom:
            case Thing() if atom.value is None or type(atom.value) in (bool, int, float, str, list, tuple, dict):
                return bool(atom.value)
            case Thing() if isinstance(atom.value, (type, types.FunctionType, types.MethodType, types.ModuleType)):
                return True
            case Thing() if is_content(atom.value) or is_fixed(atom.value):
                return None
            case Thing():
                for name in ("__bool__", "__len__"):
                    if self.of_class(atom.value, name) is not MISSING:
                        self.call(self.attribute(frozenset({atom}), name), Given())
                        return None
                return True
            case Method() | Local():
                return True
        return None

    def iterate(self, value: Value) -> Value:
        """What comes out of going through a value."""
        return joined(self._iterated(atom) for atom in value)

    def _iterated(self, atom: Atom) -> Value:
        match atom:
            case Data():
                return frozenset({Data(atom.fresh)})
            case Attr():
                return frozenset({Data(atom.owner.fresh)})
            case Box():
                return atom.parts
            case Thing() if isinstance(atom.value, (range, str, bytes)):
                return NEW
            case Thing() if is_plain_tensor(atom.value) or isinstance(atom.value, np.ndarray):
                return SHARED
            case Thing() if type(atom.value) in (nn.Sequential, nn.ModuleList):
                self.state.name(vars(atom.value), "_modules", atom.value._modules)
                self.state.content(atom.value._modules)
                return frozenset(Thing(one) for one in atom.value)
            case Thing() if is_content(atom.value):
                return self.elements_of(atom.value)
            case Thing() if atom.value is None:
                return NOTHING
            case Thing() if isinstance(atom.value, type) and issubclass(atom.value, enum.Enum):
                return NEW
            case Thing() if hasattr(type(atom.value), "__next__"):
                raise RefusedError(f"takes from a {type(atom.value).__name__} that it keeps")
        raise RefusedError("goes through an object that is not known")

    def entries_of(self, value: Value) -> Value:
        """What is in containers, keys and values alike."""
        return self.iterate(frozenset(atom for atom in value if not is_leaf(atom)))

    def elements_of(self, container: Any) -> Value:
        """What is in a container that is there."""
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
                return Box(tuple, simple)
        if is_plain_tensor(value) or isinstance(value, np.ndarray):
            return Data(False)
        if is_content(value):
            # Many alike make one case.
            return Box(type(value), self.elements_of(value), fresh=type(value) is tuple)
        return Data(True) if value is not None and is_fixed(value) else Thing(value)

    def subscript(self, value: Value, index: Value) -> Value:
        """What `value[index]` is."""
        return joined(self._subscripted(atom, index) for atom in value)

    def _subscripted(self, atom: Atom, index: Value) -> Value:
        match atom:
            case Thing() if is_content(atom.value):
                if not isinstance(atom.value, np.ndarray):
                    self.state.content(atom.value)
                return self._of_container(atom.value, index)
            case Thing() if isinstance(atom.value, (str, bytes, range, torch.Size)):
                return NEW
            case Thing() if atom.value is None:
                return NOTHING
            case Thing() if isinstance(atom.value, type):  # `list[int]`
                return thing(atom.value)
            case Thing():
                return self.call(self.attribute(frozenset({atom}), "__getitem__"), Given([index]))
            case Data() | Attr():
                self.plain(index, "looks up by")
                return frozenset({Data(atom.fresh if isinstance(atom, Data) else atom.owner.fresh)})
            case Box():
                return self._of_box(atom, index)
        raise RefusedError("looks something up in a function")

    def _of_box(self, box: Box, index: Value) -> Value:
        self.plain(index, "looks up by")
        at = only(index)
        if box.items is not None and type(at) is int and -len(box.items) <= at < len(box.items):
            return box.items[at]
        is_slice = any(isinstance(atom, Data) and atom.kind is slice for atom in index)
        return frozenset({Box(box.kind, box.parts)}) if is_slice else box.parts

    def _of_container(self, container: Any, index: Value) -> Value:
        self.plain(index, "looks up by")
        if isinstance(container, np.memmap):
            self.reads_files = True
            return SHARED
        if isinstance(container, (Tensor, np.ndarray)):
            self.state.content(container)
            return SHARED
        at = only(index)
        if type(container) is defaultdict:
            raise RefusedError("looks something up in a defaultdict, which may add to it")
        if at is not None and isinstance(at, (int, str)):
            try:
                return self.read(container[at])
            except (LookupError, TypeError):
                return NOTHING
        parts = self.elements_of(container)
        is_slice = any(isinstance(atom, Data) and atom.kind is slice for atom in index)
        return frozenset({Box(type(container), parts)}) if is_slice else parts

    def length(self, value: Value) -> Value:
        """What `len(value)` is."""
        for atom in value:
            if isinstance(atom, Thing) and not is_content(atom.value) and not is_fixed(atom.value):
                self.call(self.attribute(frozenset({atom}), "__len__"), Given())
        return NUMBER

    # --- attributes ------------------------------------------------------------------------------

    def attribute(self, value: Value, name: str) -> Value:
        """What `value.name` is."""
        return joined(self._attribute(atom, name) for atom in value)

    def _attribute(self, atom: Atom, name: str) -> Value:
        match atom:
            case Box() if atom.kind is tuple and not hasattr(tuple, name):  # a field of a named one
                return atom.parts
            case Data() | Box():
                return frozenset({Attr(name, atom)})
            case Attr():
                return frozenset({Attr(name, Data(atom.owner.fresh))})
            case Super():
                kinds = type(atom.owner.value).__mro__
                for kind in kinds[kinds.index(atom.kind) + 1 :]:
                    if name in vars(kind):
                        return self._bound(atom.owner, vars(kind)[name], name)
                return NOTHING
            case Thing() if name == "__class__":
                return thing(type(atom.value))
            case Thing() if atom.value is None and not hasattr(None, name):
                return NOTHING  # which raises
            case Thing() if is_content(atom.value):
                is_array = isinstance(atom.value, (Tensor, np.ndarray))
                kind = type(atom.value)
                owner = Data(False, kind) if is_array else Box(kind, self.elements_of(atom.value), fresh=False)
                return frozenset({Attr(name, owner)})
            case Thing() if isinstance(atom.value, enum.Enum):
                return thing(getattr(atom.value, name))
            case Thing() if is_fixed(atom.value):
                return frozenset({Attr(name, Data(True, type(atom.value)))})
            case Thing() if isinstance(atom.value, types.ModuleType):
                found = getattr(atom.value, name, MISSING)
                if not is_library(atom.value.__name__):
                    self.state.name(vars(atom.value), name, found)
                return NOTHING if found is MISSING else self.read(found)
            case Thing() if isinstance(atom.value, type) and name in ("__name__", "__qualname__"):
                return NEW
            case Thing() if isinstance(atom.value, type):
                return self._of_type(atom.value, name)
            case Thing():
                return self._of_object(atom, name)
        raise RefusedError(f"reads {name} of a function")

    def _of_type(self, kind: type, name: str) -> Value:
        for one in kind.__mro__:
            if name in vars(one):
                found = vars(one)[name]
                if not is_library(one.__module__):
                    self.state.name(vars(one), name, found)
                if isinstance(found, classmethod):
                    return frozenset({Method(found.__func__, Thing(kind))})
                if isinstance(found, staticmethod):
                    return thing(found.__func__)
                return self.read(getattr(kind, name) if hasattr(type(found), "__get__") else found)
        found = getattr(kind, name, MISSING)
        if found is MISSING:
            return NOTHING
        if isinstance(kind, enum.EnumMeta) or is_library(kind.__module__):
            return self.read(found)
        raise RefusedError(f"reads {name} of the class {kind.__name__}")

    def of_class(self, value: Any, name: str) -> Any:
        """What the class of an object has for a name; MISSING where nothing."""
        return next((vars(kind)[name] for kind in type(value).__mro__ if name in vars(kind)), MISSING)

    def _of_object(self, atom: Thing, name: str) -> Value:
        value, own = atom.value, getattr(atom.value, "__dict__", None)
        if isinstance(value, GENERATORS):
            raise RefusedError(f"draws from {OWN_GENERATOR}")
        lookup = self.of_class(value, "__getattribute__")
        if lookup not in _PLAIN_LOOKUPS:
            return self._foreign(value, name)
        found = self.of_class(value, name)
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
        raise RefusedError(f"reads {name} of an object of {type(value).__name__}, which answers in a way of its own")

    def _bound(self, owner: Thing, found: Any, name: str) -> Value:
        """What an entry of a class is to an object of it."""
        match found:
            case types.FunctionType():
                return frozenset({Method(found, owner)})
            case property() if isinstance(found.fget, types.FunctionType):
                return self.call(frozenset({Method(found.fget, owner)}), Given())
            case staticmethod():
                return self.read(found.__func__)
            case classmethod():
                return frozenset({Method(found.__func__, Thing(type(owner.value)))})
            case types.MemberDescriptorType():
                value = getattr(owner.value, name, MISSING)
                self.state.slot(owner.value, name, value)
                return NOTHING if value is MISSING else self.read(value)
        if hasattr(type(found), "__get__") and not isinstance(found, (type, types.BuiltinFunctionType)):
            if inspect.ismethoddescriptor(found):  # of a class that is written in C
                raise RefusedError(f"calls {name} of {type(owner.value).__name__}, which is not known")
            raise RefusedError(f"reads {name} of {type(owner.value).__name__}, which is computed")
        return self.read(found)


def _simple(container: Any) -> Value | None:
    """What is in a list or tuple of numbers, texts, tensors and arrays alone; None for others. Data may be many."""
    if type(container) not in (list, tuple):
        return None
    kinds = set(map(type, container))
    if not _SIMPLE.issuperset(kinds):
        return None
    return frozenset(Thing(None) if kind is _NONE else Data(kind not in (Tensor, np.ndarray)) for kind in kinds)
