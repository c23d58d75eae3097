"""The results of calls: of functions that are known to only compute, and of code that hotlap follows."""

from __future__ import annotations

import abc
import builtins
import contextlib
import copy
import enum
import functools
import inspect
import itertools
import logging
import os
import random
import re
import types
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.utils.data import default_collate, default_convert, get_worker_info

from hotlap.data.pure.known_calls import (
    DRAWING,
    FILE_METHODS,
    GENERATORS,
    LEAVES,
    MAY_GIVE_NONE,
    METHODS_NEW,
    METHODS_SAME,
    MUTATORS,
    OWN_GENERATOR,
    TORCHS,
    Known,
    computes_pictures,
    drawn_from,
    is_deterministic,
    is_drawn,
    is_library,
    is_lookup,
    known_call,
)
from hotlap.data.pure.read_state import MISSING, is_content, is_fixed
from hotlap.data.pure.values import (
    ITERATOR,
    NEW,
    NOTHING,
    NUMBER,
    Arguments,
    Atom,
    Attribute,
    Concrete,
    Container,
    Data,
    Instance,
    LocalFunction,
    Method,
    Objects,
    RefusedError,
    Super,
    Value,
    concrete,
    exact,
    make_container,
    single,
    type_of,
    types_in,
    union,
)

SYSTEMS = "draws from the system's randomness"
_SPREADS = ("extend", "update")
_ADDING = (*_SPREADS, "append", "insert", "setdefault", "add")
MOST_ROUNDS = 8
"""Rounds of a loop before hotlap gives up on a stable result."""


class Calls(Objects):
    """Follows calls."""

    def __init__(self, may_draw: bool) -> None:
        super().__init__()
        self._may_draw = may_draw
        self.is_seeded = False
        """Whether the followed code seeded torch's generator, so that it draws the same numbers every time."""
        self.made_at = 0
        """The identity of the call in the followed code that is in progress."""
        self.seedings = 0
        """How often the code seeded or restored it."""

    def seed(self) -> None:
        """The code seeds torch's generators, also those of devices."""
        self.is_seeded = not self._may_draw
        self.seedings += 1

    def unseed(self) -> None:
        """The code restores the host's generator."""
        self.is_seeded = False
        self.seedings += 1

    @abstractmethod
    def run(self, function: types.FunctionType, given: Arguments) -> Value:
        """The result of a Python function."""

    @abstractmethod
    def run_local(self, local: LocalFunction, given: Arguments) -> Value:
        """The result of a function that the followed code defines."""

    def written_to(self, value: Value, what: str) -> None:
        """Refuse a write to anything that existed before the call."""
        for atom in value:
            is_own = isinstance(atom, (Data, Container)) and atom.fresh
            is_own |= isinstance(atom, Attribute) and atom.owner.fresh
            is_own |= isinstance(atom, Instance)
            is_own |= isinstance(atom, Concrete) and isinstance(atom.value, LEAVES)
            if not is_own:
                raise RefusedError(what)

    @abstractmethod
    def grow(self, container: Container, added: Value) -> None:
        """A container holds more from now on."""

    def call(self, function: Value, given: Arguments) -> Value:
        """The result of a call that may happen any number of times, as in `map`."""
        was_seeded = self.is_seeded
        for _ in range(MOST_ROUNDS):
            version = self.version
            found = union(self._call(atom, given) for atom in function)
            if self.version == version:
                self.left_as(was_seeded)
                return found
        raise RefusedError("calls a function that cannot be followed")

    def left_as(self, was_seeded: bool) -> None:
        """Refuse code that may leave torch's generator seeded."""
        if self.is_seeded != was_seeded:
            raise RefusedError(f"seeds {TORCHS} and does not always put it back")

    def _call(self, atom: Atom, given: Arguments) -> Value:
        match atom:
            case LocalFunction():
                return self.run_local(atom, given)
            case Method():
                return self._call(Concrete(atom.function), given.before(frozenset({atom.owner})))
            case Attribute():
                return self._call_of_data(atom, given)
            case Data() if atom.kind is not None and computes_pictures(atom.kind):
                return frozenset({Data(self.plain(given.all, f"hands {atom.kind.__name__}"))})
            case Concrete():
                return self._call_thing(atom, given)
        raise RefusedError("calls a value that cannot be followed")

    def _call_thing(self, atom: Concrete, given: Arguments) -> Value:
        function = atom.value
        if function is torch.manual_seed:
            function = torch.random.manual_seed  # dynamo replaces torch.manual_seed
        special = _SPECIAL.get(id(function))
        if special is not None:
            return special[1](self, given)
        if isinstance(function, types.MethodDescriptorType):
            return self._of_owner(function, given)
        if function is str and len(given.places) == 1 and type(exact(given.places[0])) is str:
            return given.places[0]
        known = known_call(function)
        if known is not None:
            return self._computed(function, known, given)
        generator = drawn_from(function)
        if generator is not None:
            may_draw = self._may_draw or (self.is_seeded and generator == TORCHS)
            if not may_draw or generator == OWN_GENERATOR:
                raise RefusedError(f"draws from {generator}")
            if generator == TORCHS and getattr(function, "__name__", "") == "seed":
                raise RefusedError(SYSTEMS)
            if getattr(function, "__name__", "") == "shuffle" or _is_in_place(function, given):
                self.written_to(given.all, "shuffles or changes its data")
            self.written_to(_written_by(function, given), "draws into its data")
            is_fresh = self.plain(given.all, "draws with")
            return frozenset({Data(is_fresh)}) if "dropout" in str(getattr(function, "__name__", "")) else NEW
        match function:
            case types.FunctionType():
                return self.run(function, given)
            case functools._lru_cache_wrapper():
                return self._cached(function, given)
            case types.MethodType():
                return self._call(Concrete(function.__func__), given.before(concrete(function.__self__)))
            case functools.partial():
                names = {name: self.read(one) for name, one in function.keywords.items()}
                places = [self.read(one) for one in function.args]
                more = Arguments([*places, *given.places], {**names, **given.names}, given.rest, given.more)
                return self._call(Concrete(function.func), more)
            case type():
                return self._made(function, given)
            case _ if is_deterministic(function):
                return self._transformed(atom, given)
            case nn.Module():
                return self._forward(atom, given)
        owner = getattr(function, "__self__", None)
        if (
            isinstance(function, types.BuiltinMethodType)
            and owner is not None
            and (is_content(owner) or is_fixed(owner))
        ):
            return self.call(self.attribute(self.read(owner), function.__name__), given)
        if isinstance(self.of_class(function, "__call__"), types.FunctionType):
            return self.call(self.attribute(frozenset({atom}), "__call__"), given)
        raise RefusedError(f"calls {_called_name(function)}, which is not known to compute and do nothing else")

    def _cached(self, function: functools._lru_cache_wrapper[Any], given: Arguments) -> Value:
        """The result of a function whose results are kept: the cache is no trace, and all calls share what is in it."""
        if function.cache_info().currsize and not inspect.signature(function).parameters:
            found = self.state.answer(functools.partial(_kept_result, function))
            if is_fixed(found):
                return concrete(found)
        found = self.call(concrete(function.__wrapped__), given)
        if not all(isinstance(atom, (Data, Concrete)) for atom in found):
            raise RefusedError(f"calls {_called_name(function)}, which keeps what it gives")
        return frozenset(Data(False, atom.kind) if isinstance(atom, Data) else atom for atom in found)

    def _of_owner(self, function: Any, given: Arguments) -> Value:
        """The result of a method of a text, or of an object that only looks values up."""
        owner, *places = given.places
        values = [exact(one) for one in places]
        held = single(owner)
        is_open = bool(given.names or given.rest or given.more) or MISSING in values
        asked = functools.partial(function, held, *values)
        if not is_open and type(held) is str:
            with contextlib.suppress(Exception):
                return concrete(asked())
        if not is_open and is_lookup(held, function.__name__):
            return concrete(self.state.answer(asked))
        if is_lookup(held, function.__name__):
            self.plain(union(places), f"hands {function.__name__}")
            return NEW | concrete(None)
        if type(held) is not str:
            raise RefusedError(f"calls {function.__name__} of {type(held).__name__}, which is not known")
        kept = Arguments(places, given.names, given.rest, given.more)
        return self._call_of_data(Attribute(function.__name__, Data(True, str)), kept)

    def _computed(self, function: Any, known: Known, given: Arguments) -> Value:
        self.written_to(_written_by(function, given), f"writes with {known.name}")
        if _is_in_place(function, given):
            self.written_to(given.all, f"writes to its data with {known.name}")
        is_fresh = self.plain(given.all, f"hands {known.name}")
        if known.reads_files:
            self.reads_files = True
        if known.name == "open" and not _reads_only(given):
            raise RefusedError("opens a file to write to it")
        if known.name in ("int", "float", "bool", "str"):
            return frozenset({Data(True, getattr(builtins, known.name))})
        return frozenset({Data((known.makes_new and "copy" not in given.names) or is_fresh)})

    def _call_of_data(self, atom: Attribute, given: Arguments) -> Value:
        name, owner = atom.name, atom.owner
        if isinstance(owner, Data) and owner.kind in GENERATORS:
            if name not in (*DRAWING, "manual_seed", "seed"):
                raise RefusedError(f"calls {name} of a generator")
            self.plain(given.all, f"hands {name}")
            self.written_to(
                _written_by(getattr(owner.kind, name, None), given.before(NOTHING)), f"writes with .{name}()"
            )
            return frozenset({owner}) if name == "manual_seed" else NEW
        if isinstance(owner, Container):
            found = self._call_of_container(atom.name, owner, given)
            if found is not None:
                return found
        if is_drawn(name) and not ((self._may_draw or self.is_seeded) and owner.fresh):
            raise RefusedError(f"draws from {TORCHS}")
        if is_drawn(name):
            return NEW
        is_fresh = self.plain(given.all, f"hands .{name}()") and owner.fresh
        self.written_to(_written_by(getattr(np, name, None), given.before(NOTHING)), f"writes with .{name}()")
        if name in FILE_METHODS and isinstance(owner, Data) and owner.kind is not None and issubclass(owner.kind, Path):
            if name == "open" and not _reads_only(given.before(NOTHING)):
                raise RefusedError("opens a file to write to it")
            self.reads_files = True
            return NEW
        # `tensor.add` only computes; for sets, whose `add` writes, the code above decides.
        is_writing = name in MUTATORS - {"add"} or (name.endswith("_") and not name.startswith("_"))
        is_writing |= name == "resize" and isinstance(owner, Data) and owner.kind is np.ndarray
        if is_writing or "refcheck" in given.names:
            if not owner.fresh:
                raise RefusedError(f"writes to its data with .{name}()")
            return NEW
        if name in METHODS_NEW:
            may_share = "copy" in given.names or (name == "astype" and len(given.places) > 1)
            found = frozenset({Data(not may_share or is_fresh)})
            return found | concrete(None) if name in MAY_GIVE_NONE else found
        if name in METHODS_SAME:
            found = frozenset({Data(is_fresh)})
            return found | concrete(None) if name in MAY_GIVE_NONE else found
        raise RefusedError(f"calls .{name}(), which is not known to compute and do nothing else")

    def _call_of_container(self, name: str, container: Container, given: Arguments) -> Value | None:
        """The result of a container's method; None for methods that data has too."""
        if name == "sort" and given.names:
            raise RefusedError("sorts by a function")
        if name in MUTATORS or name == "rotate":
            if not container.fresh:
                raise RefusedError(f"writes to a {container.kind.__name__} with .{name}()")
            added = given.all
            if name in _SPREADS:  # the entries of lists and dicts, or of pairs
                spread = [self.iterate(one) for one in (*given.places, given.rest, given.more)]
                pairs = [self.entries_of(one) for one in spread if name == "update"]
                added = union([*spread, *pairs, *given.names.values()])
            if name in _ADDING:
                self.grow(container, added)
            return container.found | added if name in ("pop", "setdefault") else concrete(None)
        if name in ("items", "keys", "values"):
            if name != "items":
                return make_container(list, container.parts if name == "keys" else container.found)
            pair = [container.parts, container.found]
            return make_container(list, make_container(tuple, union(pair), pair))
        if name in ("get", "__getitem__"):
            return union([container.found, concrete(None), *given.places[1:]])
        if name == "copy":
            return frozenset({Container(container.kind, container.parts, values=container.values)})
        return None

    def _transformed(self, atom: Concrete, given: Arguments) -> Value:
        """The result of a transform that depends on its settings only."""
        if isinstance(atom.value, nn.Module):
            self._refuse_hooks(atom.value)
        for name in vars(atom.value):
            self.attribute(frozenset({atom}), name)
        return frozenset({Data(self.plain(given.all, f"hands {type(atom.value).__name__}"))})

    def _forward(self, atom: Concrete, given: Arguments) -> Value:
        module = atom.value
        own = self.of_class(module, "__call__")
        if own is not vars(nn.Module)["__call__"] or isinstance(module, torch.jit.ScriptModule):
            raise RefusedError(f"calls {type(module).__name__}, which overrides __call__")
        self._refuse_hooks(module)
        return self.call(self.attribute(frozenset({atom}), "forward"), given)

    def _refuse_hooks(self, module: nn.Module) -> None:
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            held = vars(module).get(hooks)
            if held:
                raise RefusedError(f"calls {type(module).__name__}, which has hooks")
            if held is not None:
                self.state.content(held)

    def _made(self, kind: type, given: Arguments) -> Value:
        """A new object of a class."""
        if issubclass(kind, (list, set, frozenset, dict, tuple, deque)):
            return self._container(kind, given)
        if issubclass(kind, BaseException) or kind in _CONTEXTS or issubclass(kind, np.generic):
            self.plain(given.all, f"hands {kind.__name__}")
            return NEW
        if kind in _TENSORS:
            self.plain(given.all, f"hands {kind.__name__}")
            return NEW
        if kind is slice or kind is range or kind is torch.Size or issubclass(kind, Path):
            self.plain(given.all, f"hands {kind.__name__}")
            return frozenset({Data(True, kind)})
        if issubclass(kind, GENERATORS):
            return self.generator(kind, given)
        if computes_pictures(kind) and "inplace" not in given.names and len(given.places) <= 2 and not given.more:
            self.plain(given.all, f"hands {kind.__name__}")
            return frozenset({Data(True, kind)})
        if issubclass(kind, enum.Enum) and len(given.places) == 1 and exact(given.places[0]) is not MISSING:
            with contextlib.suppress(ValueError):
                return concrete(kind(exact(given.places[0])))
        if _is_plain_class(kind):
            return self._new_instance(kind, given)
        raise RefusedError(f"makes an object of {kind.__name__}, which is not known")

    def _new_instance(self, kind: type, given: Arguments) -> Value:
        """A new object of a class written in Python."""
        atom = Instance(kind, self.made_at)
        self.made.setdefault(atom, {})
        self.call(self.attribute(frozenset({atom}), "__init__"), given)
        return frozenset({atom})

    def generator(self, kind: type, given: Arguments) -> Value:
        self.plain(given.all, f"hands {kind.__name__}")
        # Without a seed, or with None, a generator starts anywhere.
        if kind is random.SystemRandom or (kind is not torch.Generator and concrete(None) & given.all):
            raise RefusedError(SYSTEMS)
        if kind is not torch.Generator and not given.all:
            raise RefusedError(SYSTEMS)
        return frozenset({Data(True, kind)})

    def _container(self, kind: type, given: Arguments) -> Value:
        if kind in (list, set, frozenset, tuple, deque, dict, OrderedDict, Counter):
            spread = [self.iterate(one) for one in given.places]
            if issubclass(kind, dict):
                # Pairs, or another dict.
                spread += [self.entries_of(one) for one in spread]
            bases: dict[type, type] = {frozenset: set, deque: list, OrderedDict: dict, Counter: dict}
            found = union([*spread, *given.names.values(), given.rest, given.more])
            return make_container(bases.get(kind, kind), found, made_at=self.made_at)
        if issubclass(kind, tuple) and hasattr(kind, "_fields") and "__new__" in vars(kind):
            if not is_library(kind.__module__):
                self.state.name(vars(kind), "__new__", vars(kind)["__new__"])
            return make_container(tuple, given.all)
        raise RefusedError(f"makes an object of {kind.__name__}, which is not known")


# --- calls that take functions or check types ---------------------------------------------------------


def _call_len(follows: Calls, given: Arguments) -> Value:
    return follows.length(given.all)


def _call_isinstance(follows: Calls, given: Arguments) -> Value:
    if len(given.places) != 2:
        return NEW
    value, kinds = given.places
    wanted = types_in(kinds)
    if wanted is None:
        return NEW
    found = set()
    for atom in value:
        kind = type_of(atom)
        found.add(None if kind is None else issubclass(kind, wanted))
    return concrete(found.pop()) if len(found) == 1 and None not in found else NEW


def _call_type(follows: Calls, given: Arguments) -> Value:
    kinds = {type_of(atom) for atom in given.all}
    kind = kinds.pop() if len(kinds) == 1 and len(given.places) == 1 else None
    return NEW if kind is None else concrete(kind)


def _call_is_tensor(follows: Calls, given: Arguments) -> Value:
    return _call_isinstance(follows, Arguments([given.all, concrete(Tensor)]))


def _call_callable(follows: Calls, given: Arguments) -> Value:
    found = {
        callable(atom.value) if isinstance(atom, Concrete) else isinstance(atom, (Method, LocalFunction))
        for atom in given.all
    }
    return concrete(found.pop()) if len(found) == 1 else NEW


def _call_getattr(follows: Calls, given: Arguments) -> Value:
    name = single(given.places[1]) if len(given.places) > 1 else None
    if not isinstance(name, str):
        raise RefusedError("reads attributes by names that are not known")
    found = follows.attribute(given.places[0], name)
    if found or len(given.places) < 3:
        is_sure = all(isinstance(atom, (Concrete, Method, Super)) for atom in given.places[0])
        return found if is_sure or len(given.places) < 3 else union([found, given.places[2]])
    return given.places[2]


def _call_hasattr(follows: Calls, given: Arguments) -> Value:
    name = single(given.places[1]) if len(given.places) == 2 else None
    if not isinstance(name, str) or not all(isinstance(atom, Concrete) for atom in given.places[0]):
        return NEW
    found = {bool(follows.attribute(frozenset({atom}), name)) for atom in given.places[0]}
    return concrete(found.pop()) if len(found) == 1 else NEW


def _call_enumerate(follows: Calls, given: Arguments) -> Value:
    parts = follows.iterate(given.places[0])
    return make_container(ITERATOR, make_container(tuple, NUMBER | parts, [NUMBER, parts]))


def _call_zip(follows: Calls, given: Arguments) -> Value:
    parts = [follows.iterate(one) for one in given.places]
    if given.rest:
        return make_container(ITERATOR, make_container(tuple, union([*parts, follows.iterate(given.rest)])))
    return make_container(ITERATOR, make_container(tuple, union(parts), parts))


def _call_map(follows: Calls, given: Arguments) -> Value:
    function, *rows = given.places
    return make_container(ITERATOR, follows.call(function, Arguments([follows.iterate(one) for one in rows])))


def _call_filter(follows: Calls, given: Arguments) -> Value:
    function, rows = given.places
    parts = follows.iterate(rows)
    follows.call(frozenset(atom for atom in function if atom != Concrete(None)), Arguments([parts]))
    return make_container(ITERATOR, parts)


def _call_sorted(follows: Calls, given: Arguments) -> Value:
    parts = follows.iterate(given.places[0])
    if "key" in given.names:
        follows.call(given.names["key"], Arguments([parts]))
    else:
        follows.plain(parts, "sorts")
    return make_container(list, parts)


def _call_reversed(follows: Calls, given: Arguments) -> Value:
    return make_container(ITERATOR, follows.iterate(given.all))


def _call_reduce(follows: Calls, given: Arguments) -> Value:
    function, rows, *first = given.places
    parts = follows.iterate(rows)
    found = union(first or [parts])
    for _ in range(MOST_ROUNDS):
        more = union([found, follows.call(function, Arguments([found, parts]))])
        if more == found:
            return found
        found = more
    raise RefusedError("has a loop that cannot be followed")


def _call_next(follows: Calls, given: Arguments) -> Value:
    if not all(isinstance(atom, Container) and atom.fresh for atom in given.places[0]):
        raise RefusedError("takes from an iterator that it keeps")
    return union([follows.iterate(given.places[0]), *given.places[1:]])


def _call_any(follows: Calls, given: Arguments) -> Value:
    follows.plain(follows.iterate(given.all), "looks at")
    return NEW


def _call_chain(follows: Calls, given: Arguments) -> Value:
    return make_container(ITERATOR, union(follows.iterate(one) for one in (*given.places, given.rest)))


def _call_default_rng(follows: Calls, given: Arguments) -> Value:
    return follows.generator(np.random.Generator, given)


def _call_get_state(follows: Calls, given: Arguments) -> Value:
    if follows.is_seeded:
        raise RefusedError(f"seeds {TORCHS} within what is seeded")
    return frozenset({Data(True, _SavedState)})


def _call_seed(follows: Calls, given: Arguments) -> Value:
    follows.plain(given.all, "seeds with")
    follows.seed()
    return NEW


def _call_set_state(follows: Calls, given: Arguments) -> Value:
    if any(type_of(atom) is not _SavedState for atom in given.all) or not given.all:
        raise RefusedError(f"sets {TORCHS}")
    follows.unseed()
    return concrete(None)


def _call_deepcopy(follows: Calls, given: Arguments) -> Value:
    follows.plain(given.all, "copies")
    return NEW


def _call_copy(follows: Calls, given: Arguments) -> Value:
    """A copy of a container holds the same objects, and that of a tensor shares its memory."""
    found = Data(follows.plain(given.all, "copies"))
    containers = [
        Container(atom.kind, atom.parts, values=atom.values)
        if isinstance(atom, Container)
        else Container(type(atom.value), follows.elements_of(atom.value))
        for atom in given.all
        if isinstance(atom, Container)
        or (isinstance(atom, Concrete) and is_content(atom.value) and not isinstance(atom.value, (Tensor, np.ndarray)))
    ]
    return frozenset({found, *containers})


def _call_most(follows: Calls, given: Arguments) -> Value:
    parts = follows.iterate(given.places[0]) if len(given.places) == 1 else union(given.places)
    if "key" in given.names:
        follows.call(given.names["key"], Arguments([parts]))
    else:
        follows.plain(parts, "compares")
    return union([parts, given.names.get("default", NOTHING), given.rest, follows.entries_of(given.rest)])


def _call_collate(follows: Calls, given: Arguments) -> Value:
    follows.plain(given.all, "collates")
    # Lists of texts, dicts of dicts, lists of pairs; everything is new.
    return union([NEW, make_container(list, NEW), make_container(dict, NEW)])


def _call_worker_info(follows: Calls, given: Arguments) -> Value:
    raise RefusedError("asks which worker it runs in")


def _call_getenv(follows: Calls, given: Arguments) -> Value:
    return union([follows.iterate(follows.read(os.environ)), concrete(None), *given.places[1:]])


def _call_pad_sequence(follows: Calls, given: Arguments) -> Value:
    follows.plain(given.all, "pads")
    return NEW


def _call_load(follows: Calls, given: Arguments) -> Value:
    """`torch.load` reads a file and nothing more, unless the file may bring code."""
    safely = single(given.names.get("weights_only", concrete(True))) is True and not given.more
    if not safely or "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" in os.environ:
        raise RefusedError("loads a file that may bring code")
    follows.plain(given.all, "loads with")
    follows.reads_files = True
    return NEW


def _call_log(follows: Calls, given: Arguments, level: int) -> Value:
    logger = single(given.places[0])
    if not isinstance(logger, logging.Logger) or follows.state.answer(functools.partial(logger.isEnabledFor, level)):
        raise RefusedError("writes to a log")
    return concrete(None)


def _call_dict_get(follows: Calls, given: Arguments) -> Value:
    owner, key, *others = given.places
    held, at = single(owner), exact(key)
    other = others[0] if others else concrete(None)
    if held is None or isinstance(at, tuple) or at is MISSING:
        if held is not None:
            follows.plain(key, "looks up by")
        return union([follows.elements_of(held) if held is not None else follows.iterate(owner), other])
    return follows.entry(held, at, other)


def _call_mapping_view(follows: Calls, given: Arguments, name: str) -> Value:
    keys = follows.iterate(given.all)
    if name == "keys":
        return make_container(list, keys)
    values = follows.subscript(given.all, keys)
    return make_container(list, values if name == "values" else make_container(tuple, keys | values, [keys, values]))


def _special() -> dict[Any, Callable[[Calls, Arguments], Value]]:
    return {
        len: _call_len,
        isinstance: _call_isinstance,
        type: _call_type,
        torch.is_tensor: _call_is_tensor,
        callable: _call_callable,
        getattr: _call_getattr,
        hasattr: _call_hasattr,
        enumerate: _call_enumerate,
        zip: _call_zip,
        map: _call_map,
        filter: _call_filter,
        sorted: _call_sorted,
        reversed: _call_reversed,
        iter: _call_reversed,
        functools.reduce: _call_reduce,
        next: _call_next,
        any: _call_any,
        all: _call_any,
        itertools.chain: _call_chain,
        np.random.default_rng: _call_default_rng,
        torch.get_rng_state: _call_get_state,
        torch.random.manual_seed: _call_seed,
        torch.set_rng_state: _call_set_state,
        copy.deepcopy: _call_deepcopy,
        copy.copy: _call_copy,
        dict.get: _call_dict_get,
        **{
            getattr(logging.Logger, name): functools.partial(_call_log, level=getattr(logging, name.upper()))
            for name in ("debug", "info", "warning", "error", "critical")
        },
        **{
            getattr(Mapping, name): functools.partial(_call_mapping_view, name=name)
            for name in ("items", "keys", "values")
        },
        max: _call_most,
        min: _call_most,
        default_collate: _call_collate,
        default_convert: _call_collate,
        get_worker_info: _call_worker_info,
        rnn.pad_sequence: _call_pad_sequence,
        os.getenv: _call_getenv,
        torch.load: _call_load,
    }


class _SavedState:
    """The type that stands for the result of `torch.get_rng_state()`."""


_SPECIAL = {id(function): (function, followed) for function, followed in _special().items()}
"""By identity, since nothing else identifies some library functions."""
_CONTEXTS = (torch.no_grad, torch.enable_grad, torch.inference_mode)
_TENSORS = (
    torch.FloatTensor,
    torch.LongTensor,
    torch.DoubleTensor,
    torch.IntTensor,
    torch.BoolTensor,
    torch.ByteTensor,
)


def _kept_result(function: functools._lru_cache_wrapper[Any]) -> Any:
    """What a cached function without parameters has given; runs none of its code."""
    return function() if function.cache_info().currsize else MISSING


def _is_plain_class(kind: type) -> bool:
    """Whether objects of a class are made and written to as those of most classes written in Python."""
    names = {"__new__": object.__new__, "__setattr__": object.__setattr__, "__getattribute__": object.__getattribute__}
    is_usual = type(kind) in (type, abc.ABCMeta) and isinstance(getattr(kind, "__init__", None), types.FunctionType)
    return is_usual and not hasattr(kind, "__del__") and all(getattr(kind, name) is own for name, own in names.items())


def _called_name(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    home = getattr(function, "__module__", None)
    return f"{home}.{name}" if home and home != "__main__" else str(name)


@functools.lru_cache(maxsize=512)
def _parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters in order, if they are known."""
    if isinstance(function, np.ufunc):
        return ("x",) * function.nin + ("out",) * function.nout
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # torch's functions take `out` by name only
        return ()


def _written_by(function: Any, given: Arguments) -> Value:
    """The arguments into which a call puts its result."""
    names = _parameters(function)
    found = [value for name, value in zip(names, given.places, strict=False) if name == "out"]
    found += [value for name, value in given.names.items() if name in ("out", "dst")]
    found += [given.rest] if "out" in names else []
    flat = union([*found, given.more])
    return union([flat, *(atom.parts for atom in flat if isinstance(atom, Container))])


_IN_PLACE = {"inplace": False, "in_place": False, "overwrite_input": False, "max_norm": None}
"""Parameters that make a function write to its arguments, and the value that does not."""


def _is_in_place(function: Any, given: Arguments) -> bool:
    """Whether the arguments tell a function to write to its input."""
    names, harmless = _parameters(function), dict(_IN_PLACE)
    if function is np.nan_to_num:
        harmless["copy"] = True
    placed = dict(zip(names, given.places, strict=False))
    for name, value in harmless.items():
        asked = given.names.get(name) or placed.get(name)
        if asked is not None and asked != concrete(value):
            return True
        if asked is None and name in names and (given.rest or given.more):
            return True
    return False


def _reads_only(given: Arguments) -> bool:
    """Whether the arguments open a file for reading only."""
    modes = [*given.places[1:2], *([given.names["mode"]] if "mode" in given.names else [])]
    return all(isinstance(single(mode), str) and not re.search("[wax+]", single(mode)) for mode in modes)
