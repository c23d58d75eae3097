"""What calls give: of functions that are known to compute and do nothing else, and of code that is followed."""

from __future__ import annotations

import builtins
import copy
import functools
import inspect
import itertools
import os
import random
import re
import types
from abc import abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
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
    known_call,
)
from hotlap.data.pure.read_state import is_content, is_fixed
from hotlap.data.pure.values import (
    ITERATOR,
    NEW,
    NOTHING,
    NUMBER,
    Atom,
    Attr,
    Box,
    Data,
    Given,
    Local,
    Method,
    Objects,
    RefusedError,
    Super,
    Thing,
    Value,
    boxed,
    joined,
    kind_of,
    kinds_in,
    only,
    thing,
)

SYSTEMS = "draws from the system's randomness"
_SPREADS = ("extend", "update")
_ADDING = (*_SPREADS, "append", "insert", "setdefault", "add")
MOST_ROUNDS = 8
"""Rounds of a loop until nothing new comes."""


class Calls(Objects):
    """Follows calls."""

    def __init__(self, may_draw: bool) -> None:
        super().__init__()
        self._may_draw = may_draw
        self.is_seeded = False
        """Whether torch's generator was seeded by the code that is followed: what it draws is the same every time."""
        self.seedings = 0
        """How many times it was seeded, or put back."""

    def seed(self) -> None:
        """The code seeds torch's generators, those of devices too."""
        self.is_seeded = not self._may_draw
        self.seedings += 1

    def unseed(self) -> None:
        """The code puts the host's generator back to where it was."""
        self.is_seeded = False
        self.seedings += 1

    @abstractmethod
    def run(self, function: types.FunctionType, given: Given) -> Value:
        """What a function gives that is written in Python."""

    @abstractmethod
    def run_local(self, local: Local, given: Given) -> Value:
        """What a function gives that the followed code has written."""

    def written_to(self, value: Value, what: str) -> None:
        """Refuse where something is written to that was there before the call."""
        for atom in value:
            is_own = isinstance(atom, (Data, Box)) and atom.fresh
            is_own |= isinstance(atom, Attr) and atom.owner.fresh
            is_own |= isinstance(atom, Thing) and isinstance(atom.value, LEAVES)
            if not is_own:
                raise RefusedError(what)

    @abstractmethod
    def grow(self, box: Box, added: Value) -> None:
        """A container holds more from here on."""

    def call(self, function: Value, given: Given) -> Value:
        """What a call gives that may be made any number of times, as those of `map` are."""
        was_seeded = self.is_seeded
        found = joined(self._call(atom, given) for atom in function)
        self.left_as(was_seeded)
        return found

    def left_as(self, was_seeded: bool) -> None:
        """Refuse where torch's generator may be seeded or not, or stays seeded."""
        if self.is_seeded != was_seeded:
            raise RefusedError(f"seeds {TORCHS} and does not always put it back")

    def _call(self, atom: Atom, given: Given) -> Value:
        match atom:
            case Local():
                return self.run_local(atom, given)
            case Method():
                return self._call(Thing(atom.function), given.before(frozenset({atom.owner})))
            case Attr():
                return self._call_of_data(atom, given)
            case Data() if atom.kind is not None and computes_pictures(atom.kind):
                return frozenset({Data(self.plain(given.all, f"hands {atom.kind.__name__}"))})
            case Thing():
                return self._call_thing(atom, given)
        raise RefusedError("calls a value that cannot be followed")

    def _call_thing(self, atom: Thing, given: Given) -> Value:
        function = atom.value
        if function is torch.manual_seed:
            function = torch.random.manual_seed  # for which dynamo puts another in torch
        special = _SPECIAL.get(id(function))
        if special is not None:
            return special[1](self, given)
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
            case types.MethodType():
                return self._call(Thing(function.__func__), given.before(thing(function.__self__)))
            case functools.partial():
                names = {name: self.read(one) for name, one in function.keywords.items()}
                places = [self.read(one) for one in function.args]
                more = Given([*places, *given.places], {**names, **given.names}, given.rest, given.more)
                return self._call(Thing(function.func), more)
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

    def _computed(self, function: Any, known: Known, given: Given) -> Value:
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

    def _call_of_data(self, atom: Attr, given: Given) -> Value:
        name, owner = atom.name, atom.owner
        if isinstance(owner, Data) and owner.kind in GENERATORS:
            if name not in (*DRAWING, "manual_seed", "seed"):
                raise RefusedError(f"calls {name} of a generator")
            self.plain(given.all, f"hands {name}")
            self.written_to(
                _written_by(getattr(owner.kind, name, None), given.before(NOTHING)), f"writes with .{name}()"
            )
            return frozenset({owner}) if name == "manual_seed" else NEW
        if isinstance(owner, Box):
            found = self._call_of_box(atom.name, owner, given)
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
        # `tensor.add` computes; of sets, which `add` writes to, the way above is taken.
        is_writing = name in MUTATORS - {"add"} or (name.endswith("_") and not name.startswith("_"))
        is_writing |= name == "resize" and isinstance(owner, Data) and owner.kind is np.ndarray
        if is_writing or "refcheck" in given.names:
            if not owner.fresh:
                raise RefusedError(f"writes to its data with .{name}()")
            return NEW
        if name in METHODS_NEW:
            may_share = "copy" in given.names or (name == "astype" and len(given.places) > 1)
            found = frozenset({Data(not may_share or is_fresh)})
            return found | thing(None) if name in MAY_GIVE_NONE else found
        if name in METHODS_SAME:
            found = frozenset({Data(is_fresh)})
            return found | thing(None) if name in MAY_GIVE_NONE else found
        raise RefusedError(f"calls .{name}(), which is not known to compute and do nothing else")

    def _call_of_box(self, name: str, box: Box, given: Given) -> Value | None:
        """A method of a container; None where it is one that data has too."""
        if name == "sort" and given.names:
            raise RefusedError("sorts by a function")
        if name in MUTATORS or name == "rotate":
            if not box.fresh:
                raise RefusedError(f"writes to a {box.kind.__name__} with .{name}()")
            added = joined([given.all, *(self.iterate(one) for one in given.places if name in _SPREADS)])
            if name in _ADDING:
                self.grow(box, added)
            return box.parts | added if name in ("pop", "setdefault") else thing(None)
        if name in ("items", "keys", "values"):
            return boxed(list, boxed(tuple, box.parts) if name == "items" else box.parts)
        if name in ("get", "__getitem__"):
            return joined([box.parts, thing(None), *given.places[1:]])
        if name == "copy":
            return frozenset({Box(box.kind, box.parts)})
        return None

    def _transformed(self, atom: Thing, given: Given) -> Value:
        """What a transform gives that hangs on its settings alone."""
        if isinstance(atom.value, nn.Module):
            self._refuse_hooks(atom.value)
        for name in vars(atom.value):
            self.attribute(frozenset({atom}), name)
        return frozenset({Data(self.plain(given.all, f"hands {type(atom.value).__name__}"))})

    def _forward(self, atom: Thing, given: Given) -> Value:
        module = atom.value
        own = self.of_class(module, "__call__")
        if own is not vars(nn.Module)["__call__"] or isinstance(module, torch.jit.ScriptModule):
            raise RefusedError(f"calls {type(module).__name__}, which is called in a way of its own")
        self._refuse_hooks(module)
        return self.call(self.attribute(frozenset({atom}), "forward"), given)

    def _refuse_hooks(self, module: nn.Module) -> None:
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            held = vars(module).get(hooks)
            if held:
                raise RefusedError(f"calls {type(module).__name__}, which has hooks")
            if held is not None:
                self.state.content(held)

    def _made(self, kind: type, given: Given) -> Value:
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
        raise RefusedError(f"makes an object of {kind.__name__}, which is not known")

    def generator(self, kind: type, given: Given) -> Value:
        self.plain(given.all, f"hands {kind.__name__}")
        # Without a seed, which none of these may be, it begins anywhere.
        if kind is random.SystemRandom or (kind is not torch.Generator and thing(None) & given.all):
            raise RefusedError(SYSTEMS)
        if kind is not torch.Generator and not given.all:
            raise RefusedError(SYSTEMS)
        return frozenset({Data(True, kind)})

    def _container(self, kind: type, given: Given) -> Value:
        if kind in (list, set, frozenset, tuple, deque, dict, OrderedDict, Counter):
            spread = [self.iterate(one) for one in given.places]
            if issubclass(kind, dict):
                # Pairs, or another dict.
                spread += [self.entries_of(one) for one in spread]
            bases: dict[type, type] = {frozenset: set, deque: list, OrderedDict: dict, Counter: dict}
            return boxed(bases.get(kind, kind), joined([*spread, *given.names.values(), given.rest, given.more]))
        if issubclass(kind, tuple) and hasattr(kind, "_fields") and "__new__" in vars(kind):
            if not is_library(kind.__module__):
                self.state.name(vars(kind), "__new__", vars(kind)["__new__"])
            return boxed(tuple, given.all)
        raise RefusedError(f"makes an object of {kind.__name__}, which is not known")


# --- calls that take functions or look at kinds --------------------------------------------------------


def _call_len(follows: Calls, given: Given) -> Value:
    return follows.length(given.all)


def _call_isinstance(follows: Calls, given: Given) -> Value:
    if len(given.places) != 2:
        return NEW
    value, kinds = given.places
    wanted = kinds_in(kinds)
    if wanted is None:
        return NEW
    found = set()
    for atom in value:
        kind = kind_of(atom)
        found.add(None if kind is None else issubclass(kind, wanted))
    return thing(found.pop()) if len(found) == 1 and None not in found else NEW


def _call_type(follows: Calls, given: Given) -> Value:
    kinds = {kind_of(atom) for atom in given.all}
    kind = kinds.pop() if len(kinds) == 1 and len(given.places) == 1 else None
    return NEW if kind is None else thing(kind)


def _call_is_tensor(follows: Calls, given: Given) -> Value:
    return _call_isinstance(follows, Given([given.all, thing(Tensor)]))


def _call_callable(follows: Calls, given: Given) -> Value:
    found = {
        callable(atom.value) if isinstance(atom, Thing) else isinstance(atom, (Method, Local)) for atom in given.all
    }
    return thing(found.pop()) if len(found) == 1 else NEW


def _call_getattr(follows: Calls, given: Given) -> Value:
    name = only(given.places[1]) if len(given.places) > 1 else None
    if not isinstance(name, str):
        raise RefusedError("reads attributes by names that are not known")
    found = follows.attribute(given.places[0], name)
    if found or len(given.places) < 3:
        is_sure = all(isinstance(atom, (Thing, Method, Super)) for atom in given.places[0])
        return found if is_sure or len(given.places) < 3 else joined([found, given.places[2]])
    return given.places[2]


def _call_hasattr(follows: Calls, given: Given) -> Value:
    name = only(given.places[1]) if len(given.places) == 2 else None
    if not isinstance(name, str) or not all(isinstance(atom, Thing) for atom in given.places[0]):
        return NEW
    found = {bool(follows.attribute(frozenset({atom}), name)) for atom in given.places[0]}
    return thing(found.pop()) if len(found) == 1 else NEW


def _call_enumerate(follows: Calls, given: Given) -> Value:
    parts = follows.iterate(given.places[0])
    return boxed(ITERATOR, boxed(tuple, NUMBER | parts, [NUMBER, parts]))


def _call_zip(follows: Calls, given: Given) -> Value:
    parts = [follows.iterate(one) for one in given.places]
    if given.rest:
        return boxed(ITERATOR, boxed(tuple, joined([*parts, follows.iterate(given.rest)])))
    return boxed(ITERATOR, boxed(tuple, joined(parts), parts))


def _call_map(follows: Calls, given: Given) -> Value:
    function, *rows = given.places
    return boxed(ITERATOR, follows.call(function, Given([follows.iterate(one) for one in rows])))


def _call_filter(follows: Calls, given: Given) -> Value:
    function, rows = given.places
    parts = follows.iterate(rows)
    follows.call(frozenset(atom for atom in function if atom != Thing(None)), Given([parts]))
    return boxed(ITERATOR, parts)


def _call_sorted(follows: Calls, given: Given) -> Value:
    parts = follows.iterate(given.places[0])
    if "key" in given.names:
        follows.call(given.names["key"], Given([parts]))
    else:
        follows.plain(parts, "sorts")
    return boxed(list, parts)


def _call_reversed(follows: Calls, given: Given) -> Value:
    return boxed(ITERATOR, follows.iterate(given.all))


def _call_reduce(follows: Calls, given: Given) -> Value:
    function, rows, *first = given.places
    parts = follows.iterate(rows)
    found = joined(first or [parts])
    for _ in range(MOST_ROUNDS):
        more = joined([found, follows.call(function, Given([found, parts]))])
        if more == found:
            return found
        found = more
    raise RefusedError("has a loop that cannot be followed")


def _call_next(follows: Calls, given: Given) -> Value:
    if not all(isinstance(atom, Box) and atom.fresh for atom in given.places[0]):
        raise RefusedError("takes from an iterator that it keeps")
    return joined([follows.iterate(given.places[0]), *given.places[1:]])


def _call_any(follows: Calls, given: Given) -> Value:
    follows.plain(follows.iterate(given.all), "looks at")
    return NEW


def _call_chain(follows: Calls, given: Given) -> Value:
    return boxed(ITERATOR, joined(follows.iterate(one) for one in (*given.places, given.rest)))


def _call_default_rng(follows: Calls, given: Given) -> Value:
    return follows.generator(np.random.Generator, given)


def _call_get_state(follows: Calls, given: Given) -> Value:
    if follows.is_seeded:
        raise RefusedError(f"seeds {TORCHS} within what is seeded")
    return frozenset({Data(True, _SavedState)})


def _call_seed(follows: Calls, given: Given) -> Value:
    follows.plain(given.all, "seeds with")
    follows.seed()
    return NEW


def _call_set_state(follows: Calls, given: Given) -> Value:
    if any(kind_of(atom) is not _SavedState for atom in given.all) or not given.all:
        raise RefusedError(f"sets {TORCHS}")
    follows.unseed()
    return thing(None)


def _call_deepcopy(follows: Calls, given: Given) -> Value:
    follows.plain(given.all, "copies")
    return NEW


def _call_copy(follows: Calls, given: Given) -> Value:
    """A copy of a container holds the very things that it holds, and that of a tensor lies in the same memory."""
    found = Data(follows.plain(given.all, "copies"))
    boxes = [
        Box(atom.kind, atom.parts) if isinstance(atom, Box) else Box(type(atom.value), follows.elements_of(atom.value))
        for atom in given.all
        if isinstance(atom, Box)
        or (isinstance(atom, Thing) and is_content(atom.value) and not isinstance(atom.value, (Tensor, np.ndarray)))
    ]
    return frozenset({found, *boxes})


def _call_most(follows: Calls, given: Given) -> Value:
    parts = follows.iterate(given.places[0]) if len(given.places) == 1 else joined(given.places)
    if "key" in given.names:
        follows.call(given.names["key"], Given([parts]))
    else:
        follows.plain(parts, "compares")
    return joined([parts, given.names.get("default", NOTHING), given.rest, follows.entries_of(given.rest)])


def _call_collate(follows: Calls, given: Given) -> Value:
    follows.plain(given.all, "collates")
    # Of texts lists, of dicts dicts, of pairs lists; all of it is made anew.
    return joined([NEW, boxed(list, NEW), boxed(dict, NEW)])


def _call_worker_info(follows: Calls, given: Given) -> Value:
    raise RefusedError("asks which worker it runs in")


def _call_getenv(follows: Calls, given: Given) -> Value:
    return joined([follows.iterate(follows.read(os.environ)), thing(None), *given.places[1:]])


def _call_pad_sequence(follows: Calls, given: Given) -> Value:
    follows.plain(given.all, "pads")
    return NEW


def _special() -> dict[Any, Callable[[Calls, Given], Value]]:
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
        max: _call_most,
        min: _call_most,
        default_collate: _call_collate,
        default_convert: _call_collate,
        get_worker_info: _call_worker_info,
        rnn.pad_sequence: _call_pad_sequence,
        os.getenv: _call_getenv,
    }


class _SavedState:
    """The kind of what `torch.get_rng_state()` gives."""


_SPECIAL = {id(function): (function, followed) for function, followed in _special().items()}
"""By identity: some functions of libraries cannot be told by anything else."""
_CONTEXTS = (torch.no_grad, torch.enable_grad, torch.inference_mode)
_TENSORS = (
    torch.FloatTensor,
    torch.LongTensor,
    torch.DoubleTensor,
    torch.IntTensor,
    torch.BoolTensor,
    torch.ByteTensor,
)


def _called_name(function: Any) -> str:
    name = getattr(function, "__qualname__", None) or type(function).__name__
    home = getattr(function, "__module__", None)
    return f"{home}.{name}" if home and home != "__main__" else str(name)


@functools.lru_cache(maxsize=512)
def _parameters(function: Any) -> tuple[str, ...]:
    """The names of a function's parameters in their order, as far as it tells."""
    if isinstance(function, np.ufunc):
        return ("x",) * function.nin + ("out",) * function.nout
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of torch's functions, which take `out` by name alone
        return ()


def _written_by(function: Any, given: Given) -> Value:
    """What a call may write to since it is to put its result there."""
    names = _parameters(function)
    found = [value for name, value in zip(names, given.places, strict=False) if name == "out"]
    found += [value for name, value in given.names.items() if name in ("out", "dst")]
    found += [given.rest] if "out" in names else []
    flat = joined([*found, given.more])
    return joined([flat, *(atom.parts for atom in flat if isinstance(atom, Box))])


_IN_PLACE = {"inplace": False, "in_place": False, "overwrite_input": False, "max_norm": None}
"""Parameters by which functions are asked to write to what they are given, and what leaves it alone."""


def _is_in_place(function: Any, given: Given) -> bool:
    """Whether a function may write to what it is given, since it is asked to."""
    names, harmless = _parameters(function), dict(_IN_PLACE)
    if function is np.nan_to_num:
        harmless["copy"] = True
    placed = dict(zip(names, given.places, strict=False))
    for name, value in harmless.items():
        asked = given.names.get(name) or placed.get(name)
        if asked is not None and asked != thing(value):
            return True
        if asked is None and name in names and (given.rest or given.more):
            return True
    return False


def _reads_only(given: Given) -> bool:
    """Whether a file is opened to be read."""
    modes = [*given.places[1:2], *([given.names["mode"]] if "mode" in given.names else [])]
    return all(isinstance(only(mode), str) and not re.search("[wax+]", only(mode)) for mode in modes)
