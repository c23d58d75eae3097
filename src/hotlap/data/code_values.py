"""The kinds of values that code is followed with."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotlap.data.read_state import MISSING, is_fixed
from hotlap.data.source_text import Written

MOST_CASES = 64
"""Values that a name may stand for."""


class RefusedError(Exception):
    """The proof ends: what the code does, as the rest of a sentence that begins with the dataset's name."""


@dataclass(frozen=True)
class Data:
    """A number, text, tensor, array or picture; `fresh` where its memory is the call's own."""

    fresh: bool
    kind: type | None = None


@dataclass(frozen=True, eq=False)
class Thing:
    """An object that is there."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class Box:
    """A container or an iterator."""

    kind: type
    parts: Value
    """What may be in it."""
    fresh: bool = True
    items: tuple[Value, ...] | None = None
    """What is in it, one by one, where that is known."""


@dataclass(frozen=True)
class Attr:
    """An attribute of data, or a method of it or of a container."""

    name: str
    owner: Data | Box


@dataclass(frozen=True)
class Method:
    """A function with the object that it is called on."""

    function: Any
    owner: Thing

    def __hash__(self) -> int:
        return hash((id(self.function), self.owner))


@dataclass(frozen=True, eq=False)
class Local:
    """A function that the code itself writes."""

    node: Written
    scope: Scope


@dataclass(frozen=True)
class Super:
    """`super()`."""

    kind: type
    owner: Thing


Atom = Data | Thing | Box | Attr | Method | Local | Super
Value = frozenset[Atom]

NEW: Value = frozenset({Data(True)})
SHARED: Value = frozenset({Data(False)})
NUMBER: Value = frozenset({Data(True, int)})
NOTHING: Value = frozenset()
ITERATOR = type(iter(()))


def thing(value: Any) -> Value:
    return frozenset({Thing(value)})


def boxed(kind: type, parts: Value, items: Sequence[Value] | None = None) -> Value:
    return frozenset({Box(kind, parts, items=None if items is None else tuple(items))})


def joined(values: Iterable[Value]) -> Value:
    found = frozenset(itertools.chain.from_iterable(values))
    if len(found) > MOST_CASES:
        raise RefusedError("has too many cases to be followed")
    return found


@dataclass
class Given:
    """The arguments of a call."""

    places: list[Value] = field(default_factory=list)
    names: dict[str, Value] = field(default_factory=dict)
    rest: Value = NOTHING
    """What may come behind the places, unknown how many."""
    more: Value = NOTHING
    """What may come by names that are not known."""

    @property
    def all(self) -> Value:
        return joined([*self.places, *self.names.values(), self.rest, self.more])

    def before(self, first: Value) -> Given:
        return Given([first, *self.places], self.names, self.rest, self.more)


@dataclass
class Scope:
    """The variables of a function while it is followed."""

    function: types.FunctionType
    node: Written
    names: dict[str, Value] = field(default_factory=dict)
    outer: Scope | None = None
    returned: list[Value] = field(default_factory=list)
    loops: list[list[dict[str, Value]]] = field(default_factory=list)
    is_seeded: bool = False
    """Whether torch's generator was when the function was called: it has to be so again when it ends."""
    loops_seeded: list[bool] = field(default_factory=list)
    log: list[tuple[str, Value]] = field(default_factory=list)

    def set(self, name: str, value: Value) -> None:
        self.names[name] = value
        self.log.append((name, value))

    def inner(self, node: Written | None = None) -> Scope:
        """A scope within this one: it sees these variables as they are when it asks."""
        return Scope(self.function, node or self.node, outer=self)


# --- small questions ---------------------------------------------------------------------------------


def only(value: Value, other: Any = MISSING) -> Any:
    """The object that a value is, where it is one alone; else `other`, or None."""
    if len(value) == 1:
        (atom,) = value
        if isinstance(atom, Thing):
            return atom.value
    return None if other is MISSING else other


def is_leaf(atom: Atom) -> bool:
    return isinstance(atom, (Data, Attr)) or (isinstance(atom, Thing) and is_fixed(atom.value))


def may_be_none(atom: Atom) -> bool:
    return isinstance(atom, Thing) and atom.value is None


def kind_of(atom: Atom) -> type | None:
    match atom:
        case Thing():
            return type(atom.value)
        case Data() | Box():
            return atom.kind
    return None


def kinds_in(value: Value) -> tuple[type, ...] | None:
    """Classes that are asked for."""
    found: list[type] = []
    for atom in value:
        if isinstance(atom, Thing) and isinstance(atom.value, type):
            found.append(atom.value)
        elif isinstance(atom, Thing) and isinstance(atom.value, tuple):
            found += [one for one in atom.value if isinstance(one, type)]
        elif isinstance(atom, Box):
            inner = kinds_in(atom.parts)
            if inner is None:
                return None
            found += inner
        else:
            return None
    return tuple(found)


def merged(a: dict[str, Value], b: dict[str, Value]) -> dict[str, Value]:
    return {name: joined([a.get(name, NOTHING), b.get(name, NOTHING)]) for name in {**a, **b}}
