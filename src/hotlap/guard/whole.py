"""Everything that decides a training, down to the last byte, and what of it cannot be known.

A model is only taken from the cache where nothing of the kind is left: a difference that is not seen would hand back
the wrong one. `Holdings` looks at the same things for a resume, where a word to the user is enough.
"""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import inspect
import marshal
import os
import platform
import random
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from hotlap import __version__
from hotlap.core.code_reads import (
    RUNS_TEXT,
    builtins_read,
    file_of,
    imports_in,
    is_library,
    is_users,
    is_users_function,
    names_in,
    origin_of,
    reads_of,
    variables_read,
    words_in,
)
from hotlap.core.job import Job
from hotlap.guard.fingerprint import (
    HOOKS,
    STEP_HOOKS,
    attributes_of,
    name_of,
    optimizer_inside,
    sha256_of,
    tensor_text,
    type_name,
    users_hooks,
)
from hotlap.guard.identity import functions_of, parameter_names
from hotlap.store.keys import bytecode, key_of

MOST_DEPTH, MOST_PARTS, MOST_FILES = 60, 2_000_000, 20_000
"""How far into what a training holds is looked, and how many files of a folder."""
_PLAIN = (int, float, bool, type(None), bytes)
_SPACES = (argparse.Namespace, types.SimpleNamespace)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_HARMLESS = ("_thread", "threading", "logging", "weakref", "_weakref", "_weakrefset", "warnings", "typing", "abc")
"""Modules of Python's whose objects decide no training."""
_OUTSIDE = ("time", "datetime", "socket", "urllib", "http", "requests", "subprocess", "sqlite3", "ctypes", "secrets")
"""Modules that bring in what differs from one run to the next."""
_NOT_CODE = frozenset(
    [
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__qualname__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "_abc_impl",
        "__firstlineno__",
        "__static_attributes__",
        "__abstractmethods__",
        "__parameters__",
        "__orig_bases__",
        "__dataclass_params__",
        "__dataclass_fields__",
        "__match_args__",
        "__hash__",
        "__classcell__",
        "__annotations_cache__",
    ]
)
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
_LOADER = ("dataset", "batch_size", "drop_last", "collate_fn", "sampler", "batch_sampler", "worker_init_fn")


def whole_of(job: Job, optimizer: Optimizer, scheduler: Any, device: torch.device) -> tuple[dict[str, str], list[str]]:
    """A hash of every part that decides the training, by name; and one line for each thing that cannot be known."""
    loss = job.loss if isinstance(job.loss, nn.Module) else None
    own = [job.model] if loss is None else [job.model, loss]
    whole = Whole(own, optimizer)
    parts: dict[str, Any] = {"model": job.model, "schedule made": scheduler, **functions_of(job)}
    parts |= {"data": job.data, "valid": job.valid, "metrics": job.metrics}
    found = {name: whole.key(name, part) for name, part in parts.items()}
    found["layers"] = whole.key_of_layers(own)
    found["optimizer made"] = whole.key_of_optimizer(optimizer, parameter_names(own))
    found["process"] = whole.key("the process", _process(device))
    return found, list(whole.unknown)


def _process(device: torch.device) -> dict[str, Any]:
    """What torch and the process are set to, as far as it changes numbers."""
    tables = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    patched = {
        f"{space.__name__}.{name}": value
        for space in (torch, nn.functional)
        for name, value in vars(space).items()
        if isinstance(value, types.FunctionType) and is_users_function(value)
    }
    return {
        "versions": [__version__, str(torch.__version__), np.__version__, platform.python_version()],
        "device": [device.type, torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()],
        "dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": [
            (kind, torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))) for kind in ("cpu", "cuda")
        ],
        "hooks": [hook for table in tables for hook in users_hooks(getattr(torch_module, table, None))],
        "patched": patched,
    }


class Whole:
    """Hashes of all that objects hold. What it cannot look into is named in `unknown`."""

    def __init__(self, own: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self.unknown: dict[str, None] = {}
        self._elsewhere: dict[int, tuple[Any, str]] = {}
        for number, module in enumerate(own):
            for name, layer in module.named_modules():
                self._elsewhere[id(layer)] = layer, f"layer {number}.{name}"
                for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                    if tensor is not None:
                        self._elsewhere.setdefault(id(tensor), (tensor, f"tensor {number}.{name}.{leaf}"))
        # Seeded by `fit`, or drawn from in the order of the training.
        shared = (torch.default_generator, np.random.mtrand._rand, random._inst)
        self._elsewhere |= {id(one): (one, f"global generator {n}") for n, one in enumerate(shared)}
        self._elsewhere[id(optimizer)] = optimizer, "the optimizer"
        self._known: dict[int, tuple[Any, str]] = {}
        self._inside: list[int] = []
        self._left = MOST_PARTS
        self._part = ""

    def key(self, part: str, value: Any) -> str:
        """The hash of a value; `part` is what it is called where something in it cannot be known."""
        self._part = part
        if id(value) in self._elsewhere:
            return self._elsewhere[id(value)][1]
        return key_of(self._form(value))

    def key_of_layers(self, modules: Sequence[nn.Module]) -> str:
        """The hash of modules that are trained: all but the numbers in their weights."""
        self._part = "model"
        return key_of([self._layers(module) for module in modules])

    def key_of_optimizer(self, optimizer: Optimizer, names: Mapping[int, str]) -> str:
        """The hash of an optimizer: its class, groups, state, hooks and attributes."""
        self._part = "optimizer"
        groups = [
            {
                k: [names.get(id(p)) or self._form(p) for p in v] if k == "params" else self._form(v)
                for k, v in g.items()
            }
            for g in optimizer.param_groups
        ]
        state = [(names.get(id(p), "?"), self._form(dict(values))) for p, values in optimizer.state.items()]
        hooks = [self._form(hook) for kind in STEP_HOOKS for hook in users_hooks(getattr(optimizer, kind, None))]
        inside = optimizer_inside()
        own = {name: self._form(part) for name, part in vars(optimizer).items() if name not in inside}
        return key_of([self._form(type(optimizer)), groups, state, hooks, own])

    # --- values ----------------------------------------------------------------------------------

    def _form(self, value: Any) -> Any:
        """A value as something of which a key can be made."""
        if isinstance(value, enum.Enum):
            return type_name(value), value.name
        if type(value) in _PLAIN:
            return value
        if isinstance(value, str):
            return str(value), self._file(value)
        if id(value) in self._elsewhere:
            return "elsewhere", self._elsewhere[id(value)][1]
        if id(value) in self._inside:
            return "itself", len(self._inside) - self._inside.index(id(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        self._left -= 1
        if len(self._inside) >= MOST_DEPTH or self._left < 0:
            self._refuse("it holds more than hotlap looks through")
            return type_name(value)
        self._inside.append(id(value))
        try:
            key = key_of(self._opened(value))
        except Exception as error:  # anything may go wrong within objects of others
            self._refuse(f"a {type_name(value)} cannot be looked into ({type(error).__name__})")
            key = type_name(value)
        finally:
            self._inside.pop()
        self._known[id(value)] = value, key
        return key

    def _refuse(self, why: str) -> None:
        self.unknown[f"{self._part}: {why}"] = None

    def _opened(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_meta:  # which holds no numbers
            return type_name(value), str(value.dtype), tuple(value.shape), value.requires_grad
        match value:
            case Tensor():
                more = {name: self._form(part) for name, part in vars(value).items()}
                return "tensor", type_name(value), tensor_text(value, whole=True), value.requires_grad, more
            case np.ndarray() if value.dtype.hasobject:
                return "objects", list(value.shape), self._form(value.reshape(-1).tolist())
            case np.ndarray() | np.generic():
                data = np.ascontiguousarray(value)
                digest = sha256_of(data.reshape(-1).view(np.uint8).data) if data.size else ""
                more = {name: self._form(part) for name, part in getattr(value, "__dict__", {}).items()}
                return "array", type_name(value), repr(value.dtype.descr), list(value.shape), digest, more
            case bytearray() | memoryview():
                return type(value).__name__, bytes(value)
            case list() | tuple() | deque() | set() | frozenset() | dict() | types.MappingProxyType():
                return self._collection(value)
            case complex() | range() | slice() | torch.dtype() | torch.device() | np.dtype() | int() | float():
                return type_name(value), repr(value)
            case os.PathLike():
                return "path", os.fspath(value), self._file(os.fspath(value))
            case types.ModuleType():
                return self._module(value)
            case type():
                return self._class(value)
            case types.FunctionType():
                return self._function(value)
            case types.MethodType():
                return "method", self._form(value.__func__), self._form(value.__self__)
            case functools.partial():
                return "partial", self._form(value.func), self._form(value.args), self._form(value.keywords)
            case property():
                return "property", [self._form(part) for part in (value.fget, value.fset, value.fdel)]
            case staticmethod() | classmethod():
                return type_name(value), self._form(value.__func__)
            case nn.Module():
                return self._layers(value)
            case DataLoader():
                names = (
                    "dataset",
                    "batch_size",
                    "drop_last",
                    "collate_fn",
                    "sampler",
                    "batch_sampler",
                    "worker_init_fn",
                )
                return type_name(value), {name: self._form(getattr(value, name)) for name in names}
        if isinstance(value, _GENERATORS):
            return type_name(value), self._form(_state_of(value))
        if isinstance(value, _BUILT_IN):
            bound = getattr(value, "__self__", None)
            is_bound = bound is not None and not isinstance(bound, (types.ModuleType, type))
            return "built in", name_of(value), self._form(bound) if is_bound else ""
        return self._object(value)

    def _collection(self, value: Any) -> Any:
        kind, more = type_name(value), {k: self._form(v) for k, v in getattr(value, "__dict__", {}).items()}
        if type(value) in (list, tuple, dict):
            try:
                # Plain numbers and words, however many: 100 times as fast as one by one.
                data = marshal.dumps(value, 2)
            except ValueError:
                pass
            else:
                return kind, hashlib.sha256(data).hexdigest(), [f for word in _words(value) if (f := self._file(word))]
        if isinstance(value, (set, frozenset)):
            return kind, sorted(key_of(self._form(part)) for part in value), more
        if isinstance(value, (dict, types.MappingProxyType)):
            factory = value.default_factory if isinstance(value, defaultdict) else None
            return kind, [(self._form(k), self._form(v)) for k, v in value.items()], more, self._form(factory)
        return kind, [self._form(part) for part in value], more, getattr(value, "maxlen", None)

    def _object(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__.partition(".")[0] in _HARMLESS:
            return type_name(value)
        parts = sorted(attributes_of(value).items())
        found = self._form(kind), {name: self._form(part) for name, part in parts if not isinstance(part, torch.device)}
        if not _hides_state(kind):  # type: ignore[arg-type]
            return found
        # Memory that only its own code can read: what it would give to a pickle.
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return found, reduced
        made, given, state, *items = (*reduced, None, None, None)[:5]
        rest = [[self._form(item) for item in listed] for listed in items if listed is not None]
        return found, self._form(made), self._form(given), self._form(state), rest

    def _layers(self, module: nn.Module) -> Any:
        """A module and its layers: classes, settings, modes, hooks; the numbers of those that are trained elsewhere."""
        found = []
        for name, layer in module.named_modules():
            inside = vars(layer)
            own = {k: self._form(v) for k, v in inside.items() if k not in _MODULE and k not in _COMPILED}
            tensors = [
                (leaf, None if t is None else (self._form(t), t.requires_grad, *map(self._form, _hooks_on(t))))
                for leaf, t in (*layer._parameters.items(), *layer._buffers.items())
            ]
            hooks = [self._form(hook) for kind in HOOKS for hook in users_hooks(inside.get(kind))]
            found.append((name, self._form(type(layer)), layer.training, own, tensors, hooks))
        return found

    # --- code ------------------------------------------------------------------------------------

    def _module(self, module: types.ModuleType) -> Any:
        if not is_users(module.__name__):
            self._look_outside(module.__name__)
            return "module", module.__name__, self._file_of(module.__name__)
        values = {n: v for n, v in vars(module).items() if not n.startswith("__") and not inspect.ismodule(v)}
        return "module", module.__name__, {name: self._form(part) for name, part in sorted(values.items())}

    def _class(self, part: type) -> Any:
        found: list[Any] = []
        for kind in part.__mro__:
            rows = vars(kind).items()
            if is_users(kind.__module__):
                own = sorted((n, v) for n, v in rows if n not in _NOT_CODE and not isinstance(v, _SLOTS))
            else:
                self._look_outside(kind.__module__)
                own = [(n, v) for n, v in rows if isinstance(v, types.FunctionType) and is_users_function(v)]
            found.append((name_of(kind), self._file_of(kind.__module__), [(n, self._form(v)) for n, v in own]))
        return "class", found

    def _function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        cells = dict(_cells_of(function))
        # Of parsed arguments in a cell only what is read counts, which comes below.
        held = {name: self._form(part) for name, part in cells.items() if not isinstance(part, _SPACES)}
        if not is_users_function(function):
            self._look_outside(function.__module__)
            return "function", name_of(function), self._file_of(function.__module__), held
        names = function.__globals__
        return (
            "function",
            bytecode(code),
            held,
            self._form(function.__defaults__),
            self._form(function.__kwdefaults__),
            {name: self._form(part) for name, part in vars(function).items()},
            self._reads(function.__qualname__, code, names, cells),
            self._imports(code, names),
            [found for word in sorted(words_in(code)) if (found := self._file(word))],
        )

    def _reads(self, called: str, code: types.CodeType, names: dict[str, Any], cells: dict[str, Any]) -> Any:
        found: dict[str, Any] = {}
        for read in reads_of(code):
            source = cells if read.is_cell else names
            if read.name not in source:
                continue
            value, path = source[read.name], read.name
            for attribute in read.attributes:
                if not isinstance(value, (types.ModuleType, *_SPACES)) or attribute not in vars(value):
                    break
                value, path = vars(value)[attribute], f"{path}.{attribute}"
            if read.is_cell and not isinstance(source[read.name], _SPACES):
                continue
            if value is os.environ:
                continue
            found[path] = self._form(value)
        for name in sorted(builtins_read(code, names) & set(RUNS_TEXT)):
            self._refuse(f"{called} calls {name}(), whose result cannot be known beforehand")
        if "__file__" in names_in(code):
            self._refuse(f"{called} looks for files beside its own")
        variables, others = variables_read(code, names)
        if others:
            self._refuse(f"{called} reads environment variables by names that it does not write out")
        return found, {name: os.environ.get(name) for name in variables}

    def _imports(self, code: types.CodeType, names: dict[str, Any]) -> Any:
        found = []
        for name, module in imports_in(code, names.get("__package__")):
            if module is not None:
                found.append(self._form(module))
                continue
            file = origin_of(name)
            self._look_outside(name)
            if name.partition(".")[0] not in sys.stdlib_module_names and not (file and is_library(Path(file))):
                self._refuse(f"it imports {name} while it runs")
        return found

    def _look_outside(self, module: str | None) -> None:
        if (module or "").partition(".")[0] in _OUTSIDE and not is_users(module):
            self._refuse(f"its code uses {module}, whose answers differ from run to run")

    # --- files -----------------------------------------------------------------------------------

    def _file_of(self, module: str | None) -> str:
        """When the file of a library was written; the versions of torch and numpy say it for theirs."""
        root = (module or "").partition(".")[0]
        file = None if root in ("torch", "numpy", "hotlap") or root in sys.stdlib_module_names else file_of(module)
        return "" if file is None or not is_library(file) else _stamp(file.stat())

    def _file(self, word: str | bytes) -> str:
        """Size and times of the file that a word names, or of all in the folder it names."""
        if not isinstance(word, str) or not 1 < len(word) < 1024 or "\0" in word or word == "..":
            return ""
        try:
            found = Path(word).stat()
        except (OSError, ValueError):
            return ""
        if not Path(word).is_dir():
            return _stamp(found)
        stamps: list[str] = []
        for folder, folders, files in os.walk(word):
            folders.sort()
            if len(stamps) + len(files) > MOST_FILES:
                self._refuse(f"the folder {word} holds more than {MOST_FILES:,} files")
                return ""
            for name in sorted(files):
                place = Path(folder, name)
                stamps.append(f"{place} {_stamp(place.lstat())}")
        return key_of(stamps)


_MODULE = frozenset(vars(nn.Module()))
_COMPILED = ("_compiled_call_impl",)


def _stamp(found: os.stat_result) -> str:
    return f"<{found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}>"


def _words(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            yield from _words(part)
    elif isinstance(value, dict):
        for pair in value.items():
            yield from _words(pair)


def _cells_of(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def _hooks_on(tensor: Tensor) -> list[Any]:
    late = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*users_hooks(tensor._backward_hooks), *users_hooks(late)]


def _state_of(generator: Any) -> Any:
    match generator:
        case torch.Generator():
            return generator.get_state()
        case np.random.Generator():
            return generator.bit_generator.state
        case np.random.BitGenerator():
            return generator.state
        case np.random.RandomState():
            return generator.get_state(legacy=False)
    return generator.getstate()


@functools.cache
def _hides_state(kind: type) -> bool:
    """Whether objects of a class have memory that is neither in their attributes nor in their slots."""
    slots = sum(
        1 for base in kind.__mro__ for part in vars(base).values() if isinstance(part, types.MemberDescriptorType)
    )
    places = 8 * (slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))
    return kind.__basicsize__ - places > object.__basicsize__
