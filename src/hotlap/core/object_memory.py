"""What objects remember from one step of a training to the next, and how it is put back: in memory, and from a file.

A walk over everything that code of the user's can reach and change: attributes and slots, lists, dicts, sets, plain
tensors and arrays, generators of random numbers, closures, class attributes, and globals that functions read or write.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import random
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from hotlap.core.code_reads import is_users, is_users_function, reads_of, writes_of
from hotlap.core.torch_private import HOOKS_OF_ALL, LoaderIterator, or_none

Path = tuple[str, ...]
Left = Callable[[Any, Any], bool]
"""Whether a place, by what holds it and its name there, is kept by others."""
MOST_PARTS, MOST_DEPTH = 100_000, 12
"""How many things are looked at, and how far inside of others."""
LARGEST = 256 * 2**20
"""Bytes of a tensor or array from which on it is taken for data that no step changes."""
SMALL = 64 * 1024
"""Bytes up to which a tensor is compared number by number."""
INSIDE = frozenset(vars(nn.Module())) - {"training"}
"""What torch itself keeps in a module."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OPTIMIZER = ("state", "param_groups", "defaults")
_PLAIN = (int, float, bool, str, bytes, complex, type(None))
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_DATA = (DataLoader, LoaderIterator, Dataset)
_LEFT_ALONE = (types.ModuleType, *_DATA, LRScheduler, torch.device, torch.dtype, np.dtype, BaseException)
_HARMLESS = ("_thread", "threading", "logging", "weakref", "_weakref", "typing", "abc", "pathlib", "enum", "datetime")
TRAINERS = ("lightning", "pytorch_lightning", "lightning_fabric")
"""Packages whose objects drive trainings. A model that holds its trainer leads to progress bars, threads and files."""


@dataclass(slots=True)
class Slot:
    """One place that holds a value."""

    path: Path
    holder: Any
    key: Any
    value: Any

    @property
    def name(self) -> str:
        """The place as a user would write it."""
        return ".".join(self.path)

    def put(self, value: Any) -> None:
        """Have the place hold a value."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, (dict, list)):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


class Walk:
    """Every place that can be reached from `roots`; `own` are tensors and objects that are kept elsewhere."""

    def __init__(self, roots: Mapping[str, Any], own: Iterable[Any] = ()) -> None:
        self._own = {id(one): one for one in own}
        self.slots: list[Slot] = []
        self.spaces: dict[Path, dict[str, Any]] = {}
        """The dicts that hold attributes, by their path."""
        self.unknown: list[str] = []
        """What can be neither copied nor put back, a line each."""
        self._seen: dict[int, Any] = {}
        for name, root in roots.items():
            self._value((name,), root)

    def _slot(self, path: Path, holder: Any, key: Any, value: Any) -> None:
        if type(value) not in weakref.ProxyTypes:  # its object may be gone
            self.slots.append(Slot(path, holder, key, value))
            self._value(path, value)

    def _value(self, path: Path, value: Any) -> None:
        kind = type(value)
        if kind in _PLAIN or kind in weakref.ProxyTypes or id(value) in self._own or id(value) in self._seen:
            return  # what a weak reference leads to is held elsewhere
        if isinstance(value, _LEFT_ALONE) or (isinstance(value, type) and not is_users(value.__module__)):
            return
        if len(path) > MOST_DEPTH or kind.__module__.startswith("hotlap."):
            return
        if len(self.slots) > MOST_PARTS:
            self._refuse(path, "is one of more things than hotlap can put back")
            return
        self._seen[id(value)] = value
        if isinstance(value, (Tensor, np.ndarray, *_GENERATORS)):
            return
        if isinstance(value, nn.Module):
            self._module(path, value)
        elif isinstance(value, Optimizer):
            self._space(path, value, {k: v for k, v in vars(value).items() if k not in _OPTIMIZER and "hooks" not in k})
        elif isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            self._members(path, value)
        elif isinstance(value, types.FunctionType):
            self._function(path, value)
        elif isinstance(value, types.MethodType):
            self._value(path, value.__func__)
            self._value((*path, "self"), value.__self__)
        elif isinstance(value, functools.partial):
            for part, held in (("func", value.func), ("args", value.args), ("keywords", value.keywords)):
                self._value((*path, part), held)
        elif isinstance(value, type):
            self._class(path, value)
        elif inspect.isroutine(value):
            bound = getattr(value, "__self__", None)
            if bound is not None:
                self._value((*path, "self"), bound)
        elif kind.__module__.partition(".")[0] in TRAINERS:
            return
        elif hasattr(kind, "__next__"):
            self._refuse(path, f"is a {kind.__name__}, whose place cannot be put back")
        elif kind.__module__.partition(".")[0] not in _HARMLESS:
            self._object(path, value)

    def _refuse(self, path: Path, why: str) -> None:
        # What a global holds in turn may be the whole program: a step that draws from there does it by name.
        if path[0] != "global" or len(path) == 2:
            self.unknown.append(f"{'.'.join(path)} {why}")

    def _module(self, path: Path, module: nn.Module) -> None:
        for name, layer in module.named_modules():
            here = (*path, name) if name else path
            self._seen[id(layer)] = layer
            self._space(here, layer, {k: v for k, v in vars(layer).items() if k not in INSIDE})
            for table in (layer._parameters, layer._buffers):
                for leaf, tensor in table.items():
                    if tensor is not None and id(tensor) not in self._own:
                        self._slot((*here, leaf), table, leaf, tensor)
            for kind in _HOOKS:
                for number, hook in enumerate(getattr(layer, kind).values()):
                    self._value((*here, kind.strip("_"), str(number)), hook)

    def _object(self, path: Path, value: Any) -> None:
        slots = {n for base in type(value).__mro__ for n, v in vars(base).items() if inspect.ismemberdescriptor(v)}
        for name in sorted(slots):
            if hasattr(value, name):
                self._slot((*path, name), value, name, getattr(value, name))
        if hasattr(value, "__dict__"):
            self._space(path, value, vars(value))

    def _space(self, path: Path, owner: Any, held: dict[str, Any]) -> None:
        self.spaces[path] = vars(owner)
        self._value((*path, "class"), type(owner))
        for name, value in list(held.items()):
            if not (name.startswith("__") and name.endswith("__")):
                self._slot((*path, name), vars(owner), name, value)

    def _members(self, path: Path, value: Any) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                if type(part) not in _PLAIN:
                    self._slot((*path, str(key)), value, key, part)
            return
        for number, part in enumerate(value):
            if type(part) in _PLAIN:
                continue
            if isinstance(value, list):
                self._slot((*path, str(number)), value, number, part)
            else:
                self._value((*path, str(number)), part)

    def _function(self, path: Path, function: types.FunctionType) -> None:
        if not is_users_function(function):
            if (wrapped := getattr(function, "__wrapped__", None)) is not None:
                self._value(path, wrapped)
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._slot((*path, name), cell, None, cell.cell_contents)
            except ValueError:  # it has no value yet
                continue
        for name, part in vars(function).items():
            self._slot((*path, name), vars(function), name, part)
        self._value((*path, "defaults"), function.__defaults__)
        self._value((*path, "defaults"), function.__kwdefaults__)
        names = function.__globals__
        written = writes_of(function.__code__)
        for name in {read.name for read in reads_of(function.__code__) if not read.is_cell} | written:
            if name in names and (name in written or not isinstance(names[name], _PLAIN)):
                self._slot(("global", name), names, name, names[name])

    def _class(self, path: Path, kind: type) -> None:
        for base in kind.__mro__:
            if not is_users(base.__module__):
                continue
            for name, part in vars(base).items():
                inner = getattr(part, "__func__", getattr(part, "fget", part))
                if isinstance(inner, types.FunctionType):
                    self._value((*path, name), inner)
                elif not (name.startswith("__") and name.endswith("__")) and not name.startswith("_abc"):
                    self._slot((*path, name), base, name, part)


def generators_in(name: str, owner: Any) -> list[str]:
    """The places of all generators of random numbers that an object keeps."""
    walk = Walk({name: dict(getattr(owner, "__dict__", {}))})
    return [slot.name for slot in walk.slots if isinstance(slot.value, _GENERATORS)]


# --- in memory ------------------------------------------------------------------------------------


class ObjectMemory:
    """What everything that can be reached from `roots` remembers now; `restore` puts it back without a trace."""

    def __init__(self, roots: Mapping[str, Any], own: Iterable[Any] = (), left: Left | None = None) -> None:
        """Places that are `left` are put back by others."""
        walk = Walk({**roots, "hooks of all modules": _hooks_of_all()}, own)
        self.unknown = walk.unknown
        slots = [slot for slot in walk.slots if left is None or not left(slot.holder, slot.key)]
        self._slots = [(slot, None if id(slot.value) in walk._own else _content(slot.value)) for slot in slots]
        self._names = [(space, set(space)) for space in walk.spaces.values()]
        self._own, self._left = walk._own, left

    @property
    def size(self) -> int:
        """About how many bytes its copies of tensors, arrays and containers take."""
        return sum(_bytes_of(content) for _, content in self._slots)

    def restore(self, *, generators: bool = True) -> None:
        """Put all of it back; generators only where they are not to go on."""
        for space, names in self._names:
            for name in [name for name in space if name not in names and name not in INSIDE]:
                if self._left is None or not self._left(space, name):
                    del space[name]
        for slot, content in self._slots:
            if _held(slot) is not slot.value:
                slot.put(slot.value)
            goes_on = not generators and isinstance(slot.value, _GENERATORS)
            if content is not None and id(slot.value) not in self._own and not goes_on:
                _fill(slot.value, content)


_NOTHING = object()


def _hooks_of_all() -> list[Any]:
    """The hooks that run with every module: they belong to the process, and to no module's state."""
    return [hook for hooks in HOOKS_OF_ALL for hook in (or_none(hooks) or {}).values()]


def _held(slot: Slot) -> Any:
    """What a place holds now."""
    holder, key = slot.holder, slot.key
    if isinstance(holder, types.CellType):
        return holder.cell_contents
    if isinstance(holder, dict):
        return holder.get(key, _NOTHING)
    if isinstance(holder, list):
        return holder[key] if key < len(holder) else _NOTHING
    return vars(holder).get(key, _NOTHING) if isinstance(holder, type) else getattr(holder, key, _NOTHING)


def _bytes_of(content: Any) -> int:
    if isinstance(content, Tensor):
        return content.numel() * content.element_size()
    return content.nbytes if isinstance(content, np.ndarray) else 8 * len(content) if hasattr(content, "__len__") else 0


def _content(value: Any) -> Any:
    """A copy of what is inside of something that can be changed in place; None for all else."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.nbytes <= LARGEST else None
    if isinstance(value, np.ndarray):
        return value.copy() if value.nbytes <= LARGEST else None
    if isinstance(value, _GENERATORS):
        return generator_state(value)
    if isinstance(value, (list, dict, set, deque)):
        return value.copy()
    return None


def _fill(value: Any, content: Any) -> None:
    """Put a copy back into what it was made of."""
    if isinstance(value, Tensor):
        # Not seen by autograd: what was computed from it before may still be differentiated.
        if value.shape == content.shape and value.dtype == content.dtype:
            value.data.copy_(content)
        else:
            value.data = content.clone()
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value[...] = content
    elif isinstance(value, _GENERATORS):
        set_generator(value, content)
    elif isinstance(value, (list, deque)):
        if len(value) != len(content) or any(a is not b for a, b in zip(value, content, strict=True)):
            value.clear()
            value.extend(content)
    elif isinstance(value, dict):
        if len(value) != len(content) or any(value.get(k, _NOTHING) is not v for k, v in content.items()):
            value.clear()
            value.update(content)
    elif value != content:
        value.clear()
        value.update(content)


def generator_state(generator: Any) -> Any:
    """The state of a generator of random numbers."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    try:
        return generator.getstate()
    except NotImplementedError:  # the system's own has none
        return None


def set_generator(generator: Any, state: Any) -> None:
    """Set a generator back to a state."""
    if state is None:
        return
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif not isinstance(generator, torch.Generator) or not torch.equal(generator.get_state(), state):
        generator.set_state(state)


# --- in a file ------------------------------------------------------------------------------------


class Changes:
    """What objects came to remember since this was made, in a form that a file can hold."""

    def __init__(
        self,
        roots: Mapping[str, Any],
        own: Callable[[], Iterable[Any]] = tuple,
        left: Left | None = None,
    ) -> None:
        """`own` gives what is kept elsewhere; it is asked each time, since layers come and go."""
        self._roots, self._own, self._left = roots, own, left
        self._first = {slot.path: _mark(slot.value) for slot in Walk(roots, own()).slots}

    def found(self) -> tuple[list[tuple[Path, Any]], list[str]]:
        """Path and form of everything that has changed; and a line for each thing that no file can hold."""
        walk = Walk(self._roots, self._own())
        found: dict[Path, Any] = {}
        unsaved = list(walk.unknown)
        own = {id(one) for one in self._own()}
        for slot in walk.slots:
            if id(slot.value) in own or (self._left is not None and self._left(slot.holder, slot.key)):
                continue
            if any(slot.path[:n] in found for n in range(1, len(slot.path))):
                continue
            if slot.path in self._first and _same(self._first[slot.path], _mark(slot.value)):
                continue
            try:
                found[slot.path] = _form(slot.value, own)
            except TypeError as error:
                if not isinstance(slot.value, (list, dict, tuple)) and not hasattr(slot.value, "__dict__"):
                    unsaved.append(f"{slot.name} {error}")
        return list(found.items()), unsaved

    def put_back(self, stored: Iterable[tuple[Path, Any]]) -> None:
        """Have the objects remember what `found` gave. Raises KeyError for a path that leads nowhere."""
        walk = Walk(self._roots, self._own())
        places = {slot.path: slot for slot in walk.slots}
        for path, form in stored:
            path = tuple(path)
            name, value = path[-1], _value(form)
            slot = places.get(path)
            if slot is None:
                # It came to be in training, so the fresh object does not have it yet.
                space = walk.spaces.get(path[:-1])
                if space is None or not name.isidentifier() or name.startswith("__") or name in INSIDE:
                    raise KeyError(f"nothing is called {'.'.join(path)}")
                space[name] = value
            elif not _put_into(slot.value, value):
                if callable(slot.value):
                    raise KeyError(f"{'.'.join(path)} is a function")
                slot.put(value)


def _mark(value: Any, depth: int = 0) -> Any:
    """What a value is like now, to see later whether it has changed."""
    if type(value) in _PLAIN:
        return type(value), value
    if isinstance(value, Tensor):
        is_small = value.nbytes <= SMALL and value.layout is torch.strided and not value.is_quantized
        # The counter of its changes says nothing of those that are made by way of `.data`.
        return "tensor", _Kept(value), value.detach().cpu().tolist() if is_small else _version(value)
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value) if value.nbytes <= LARGEST and not value.dtype.hasobject else None
        return "array", value.shape, _Kept(value) if data is None else zlib.crc32(data.reshape(-1).view(np.uint8).data)
    if isinstance(value, _GENERATORS):
        # Whole: how a long tensor is shown leaves out its middle.
        return "generator", pickle.dumps(generator_state(value))
    if isinstance(value, (list, tuple, deque)) and depth < 4:
        return type(value), [_mark(part, depth + 1) for part in value]
    if isinstance(value, (set, frozenset)):
        return type(value), set(value)
    if isinstance(value, dict) and depth < 4:
        return type(value), [(key, _mark(part, depth + 1)) for key, part in value.items()]
    return "object", type(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Kept:
    """Equal to another of the very same object."""

    __slots__ = ("_object",)

    def __init__(self, value: Any) -> None:
        self._object = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kept) and other._object is self._object

    __hash__ = None  # type: ignore[assignment]


def _same(one: Any, other: Any) -> bool:
    return repr(one) == repr(other) if "nan" in repr(one) else bool(one == other)


def _form(value: Any, own: set[int]) -> Any:
    """A value in a form that `store.encoding` takes; TypeError says why there is none."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if id(value) in own:
        raise TypeError("is a part of the model")
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        if isinstance(value, np.ndarray) and (value.dtype.kind not in "biuf" or not value.dtype.isnative):
            raise TypeError(f"is an array of {value.dtype}, which is not saved")
        return {"tensor" if isinstance(value, Tensor) else "array": value}
    if isinstance(value, random.Random):
        state = generator_state(value)
        return None if state is None else {"random": [state[0], np.array(state[1], dtype=np.int64), state[2]]}
    if isinstance(value, _GENERATORS):
        return {"torch" if isinstance(value, torch.Generator) else "numpy": generator_state(value)}
    if type(value) in (list, tuple, deque, set, frozenset):
        return {type(value).__name__: [_form(part, own) for part in value]}
    if isinstance(value, dict) and all(isinstance(key, (str, int, float, bool)) for key in value):
        return {"dict": [[key, _form(part, own)] for key, part in value.items()]}
    raise TypeError(f"is a {type(value).__name__}, which is not saved")


_BUILDERS: dict[str, Callable[[Any], Any]] = {
    "list": list, "tuple": tuple, "deque": deque, "set": set, "frozenset": frozenset
}  # fmt: skip


@dataclass(frozen=True)
class _State:
    """The state of a generator, to be put into one."""

    kind: str
    state: Any


def _value(form: Any) -> Any:
    """The value of a form; raises ValueError for what is none."""
    if not isinstance(form, dict):
        return form
    ((kind, inner),) = form.items()
    if kind in ("tensor", "array"):
        return inner
    if kind == "random":
        version, words, gauss = inner
        return _State(kind, (version, tuple(words.tolist()), gauss))
    if kind in ("torch", "numpy"):
        return _State(kind, inner)
    if kind in _BUILDERS:
        return _BUILDERS[kind](_value(part) for part in inner)
    if kind == "dict":
        return {key: _value(part) for key, part in inner}
    raise ValueError(f"{kind!r:.40} is no form of a value")


def _put_into(now: Any, value: Any) -> bool:
    """Whether a value could be put into what is there, so that whatever else holds that sees it too."""
    if isinstance(value, _State):
        if not isinstance(now, _GENERATORS):
            raise KeyError("a generator is no longer there")
        set_generator(now, value.state)
        return True
    if isinstance(now, Tensor) and isinstance(value, Tensor) and (now.shape, now.dtype) == (value.shape, value.dtype):
        with torch.no_grad():
            now.copy_(value)
        return True
    if isinstance(now, (list, deque)) and type(now) is type(value):
        now.clear()
        now.extend(value)
        return True
    if isinstance(now, (dict, set)) and isinstance(value, (dict, set)) and isinstance(now, type(value)):
        now.clear()
        now.update(value)
        return True
    return False


def tensors_of(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of modules: they are kept by others."""
    for module in modules:
        yield from module.parameters()
        yield from module.buffers()
