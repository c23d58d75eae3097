"""One hash of everything that values, code and objects hold, and a list of what no hash can know.

hotlap reuses a result only if its hash is the same and the list is empty: a difference that hotlap overlooks would hand
back the wrong result. `hotlap.guard.fingerprint` looks at the same things for a resume, where naming them is enough.
"""

from __future__ import annotations

import argparse
import enum
import functools
import hashlib
import importlib
import inspect
import marshal
import os
import random
import re
import sys
import types
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

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
from hotlap.core.warning_filters import filtered
from hotlap.machine.limits import read_cpu
from hotlap.store.keys import bytecode, key_of

WHOLE_BYTES = 32 * 1024 * 1024
"""Tensors up to this size are hashed in one piece; without `whole`, only evenly spread rows of larger ones count."""
MOST_DEPTH, MOST_PARTS, MOST_FILES = 60, 2_000_000, 20_000
"""Limits: levels of nesting, parts in all, and files of a folder."""
_PLAIN = (int, float, bool, type(None), bytes)
_SPACES = (argparse.Namespace, types.SimpleNamespace)
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_HARMLESS = ("_thread", "threading", "logging", "weakref", "_weakref", "_weakrefset", "warnings", "typing", "abc")
"""Python modules whose objects decide no result."""
_OUTSIDE = ("time", "datetime", "socket", "urllib", "http", "requests", "subprocess", "sqlite3", "ctypes", "secrets")
"""Modules whose answers differ from run to run."""
_NOT_CODE = frozenset((
    "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "_abc_impl", "__firstlineno__", "__static_attributes__", "__abstractmethods__",
    "__parameters__", "__orig_bases__", "__dataclass_params__", "__dataclass_fields__", "__match_args__",
    "__hash__", "__classcell__", "__annotations_cache__",
))  # fmt: skip
_OF_LOADERS = ("dataset", "batch_size", "drop_last", "collate_fn", "sampler", "batch_sampler", "worker_init_fn")
_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)


class ContentKeys:
    """Hashes of all that values hold; `unknown` lists what a hash cannot know, one line each.

    `modules` are the trained modules and `optimizer` is theirs: inside other values they count by name. With
    `exact=False` files do not count, neither those that a text names nor those of libraries, and hotlap imports a
    module that the code imports later.
    """

    def __init__(
        self, modules: Sequence[nn.Module] = (), optimizer: Optimizer | None = None, *, exact: bool = True
    ) -> None:
        self.unknown: dict[str, None] = {}
        self._exact = exact
        self._elsewhere: dict[int, tuple[Any, str]] = {}
        for number, module in enumerate(modules):
            for name, layer in module.named_modules():
                self._elsewhere[id(layer)] = layer, f"layer {number}.{name}"
                for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items()):
                    if tensor is not None:
                        self._elsewhere.setdefault(id(tensor), (tensor, f"tensor {number}.{name}.{leaf}"))
        # Seeded by `fit`, or drawn from in the order of the training.
        shared = (torch.default_generator, np.random.mtrand._rand, random._inst)
        self._elsewhere |= {id(one): (one, f"global generator {n}") for n, one in enumerate(shared)}
        if optimizer is not None:
            self._elsewhere[id(optimizer)] = optimizer, "the optimizer"
        self._known: dict[int, tuple[Any, str]] = {}
        self._inside: list[int] = []
        self._left = MOST_PARTS
        self._part = ""

    def key(self, part: str, value: Any) -> str:
        """The hash of a value; the lines in `unknown` call it `part`."""
        self._part = part
        if id(value) in self._elsewhere:
            return self._elsewhere[id(value)][1]
        return key_of(self._form(value))

    def key_of_layers(self, modules: Sequence[nn.Module]) -> str:
        """The hash of trained modules: everything but the numbers in their weights."""
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
        """A value in a form that `key_of` takes."""
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
            self._refuse("it holds more parts than hotlap looks at")
            return type_name(value)
        self._inside.append(id(value))
        try:
            key = key_of(self._opened(value))
        except Exception as error:  # objects of other libraries may raise anything
            self._refuse(f"a {type_name(value)} cannot be hashed ({type(error).__name__})")
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
            case re.Pattern():
                return "pattern", value.pattern, value.flags
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
                return type_name(value), {name: self._form(getattr(value, name)) for name in _OF_LOADERS}
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
                # 100 times as fast for plain numbers and texts as one by one.
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
        # Only its own code can read that memory: hash what it gives to pickle.
        reduced = value.__reduce_ex__(4)
        if isinstance(reduced, str):
            return found, reduced
        made, given, state, *items = (*reduced, None, None, None)[:5]
        rest = [[self._form(item) for item in listed] for listed in items if listed is not None]
        return found, self._form(made), self._form(given), self._form(state), rest

    def _layers(self, module: nn.Module) -> Any:
        """A module and its layers: classes, settings, modes, hooks, and the numbers of tensors that are not trained."""
        found = []
        for name, layer in module.named_modules():
            inside = vars(layer)
            own = {k: self._form(v) for k, v in inside.items() if k not in _MODULE and k not in _COMPILED}
            tensors = [
                (leaf, None if t is None else (self._form(t), t.requires_grad, *map(self._form, hooks_on(t))))
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
        cells = dict(cells_of(function))
        # Of parsed arguments in a cell only what the code reads counts, see `_reads`.
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
            self._refuse(f"{called} calls {name}(), whose result hotlap cannot know beforehand")
        if "__file__" in names_in(code):
            self._refuse(f"{called} looks for files beside its own")
        variables, others = variables_read(code, names)
        if others:
            self._refuse(f"{called} reads environment variables whose names it computes")
        return found, {name: os.environ.get(name) for name in variables}

    def _imports(self, code: types.CodeType, names: dict[str, Any]) -> Any:
        found = []
        for name, module in imports_in(code, names.get("__package__")):
            if module is not None:
                found.append(self._form(module))
                continue
            file = origin_of(name)
            self._look_outside(name)
            if name.partition(".")[0] in sys.stdlib_module_names or (file and is_library(Path(file))):
                continue
            if self._exact:
                self._refuse(f"it imports {name} while it runs")
                continue
            with suppress(Exception):  # the module may exist on other machines only
                found.append(self._form(importlib.import_module(name)))
        return found

    def _look_outside(self, module: str | None) -> None:
        if (module or "").partition(".")[0] in _OUTSIDE and not is_users(module):
            self._refuse(f"its code uses {module}, whose answers differ from run to run")

    # --- files -----------------------------------------------------------------------------------

    def _file_of(self, module: str | None) -> str:
        """Size and times of a library's file; for torch and numpy their versions are enough."""
        if not self._exact:
            return ""
        root = (module or "").partition(".")[0]
        file = None if root in ("torch", "numpy", "hotlap") or root in sys.stdlib_module_names else file_of(module)
        return "" if file is None or not is_library(file) else _stamp(file.stat())

    def _file(self, word: str | bytes) -> str:
        """Size and times of the file that a text names, or of all files in the folder it names."""
        if not self._exact or not isinstance(word, str) or not 1 < len(word) < 1024 or "\0" in word or word == "..":
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


# --- what to hash of tensors, objects, modules and optimizers ----------------------------------------


def tensor_text(tensor: Tensor, whole: bool) -> str:
    """Dtype, shape and hash of a tensor; without `whole`, of evenly spread rows only where it is large."""
    flat = tensor.detach().reshape(len(tensor), -1) if tensor.ndim else tensor.detach().reshape(1, 1)
    step = 1 if whole else max(1, -(-flat.numel() * flat.element_size() // WHOLE_BYTES))
    rows = flat[::step].cpu().contiguous().reshape(-1)
    digest = sha256_of(rows.view(torch.uint8).numpy().data if rows.numel() else memoryview(b""))
    return f"{tensor.dtype}{tuple(tensor.shape)}{digest}"


def sha256_of(data: memoryview) -> str:
    """The sha256 of bytes; of several pieces the sha256 of their hashes, which all cores compute in parallel."""
    pieces = [data[start : start + WHOLE_BYTES] for start in range(0, len(data), WHOLE_BYTES)]
    if len(pieces) < 2:
        return hashlib.sha256(data).hexdigest()
    with ThreadPoolExecutor(min(len(pieces), read_cpu().cores)) as threads:
        return hashlib.sha256(b"".join(threads.map(lambda piece: hashlib.sha256(piece).digest(), pieces))).hexdigest()


def name_of(part: Any) -> str:
    module = getattr(part, "__module__", None)
    return f"{module}.{getattr(part, '__qualname__', type(part).__qualname__)}"


def type_name(value: Any) -> str:
    return name_of(type(value))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, in its `__dict__` and in its slots."""
    found = {}
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            part = inspect.getattr_static(value, name, None) if name.startswith("__") else getattr(value, name, None)
            found[name] = part
    found |= getattr(value, "__dict__", {})
    return {name: part for name, part in found.items() if name not in ("__dict__", "__weakref__")}


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module keeps its hooks."""
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
"""The attributes in which an optimizer keeps the hooks of its steps."""


def users_hooks(hooks: Any) -> list[Any]:
    """The hooks in one of torch's tables, without hotlap's own."""
    found = list(hooks.values()) if isinstance(hooks, Mapping) else []
    return [hook for hook in found if not str(getattr(hook, "__module__", "")).startswith("hotlap.")]


@functools.cache
def optimizer_inside() -> frozenset[str]:
    """The attributes that every optimizer has, or that schedules and the plan write."""
    with filtered():
        plain = torch.optim.Adam([torch.zeros(1)])
    of_schedules = ("_opt_called", "_step_count", "step", "_warned_capturable_if_run_uncaptured")
    of_plans = ("_step_supports_amp_scaling", "found_inf", "grad_scale")
    return frozenset((*vars(plain), *of_schedules, *of_plans))


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


def cells_of(function: types.FunctionType) -> Iterable[tuple[str, Any]]:
    """The names that a function closes over, with their values as far as they have one."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has no value yet
            continue


def hooks_on(tensor: Tensor) -> list[Any]:
    """The user's hooks on a parameter or buffer."""
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
    """Whether objects of a class keep state outside of their attributes and slots."""
    slots = sum(
        1 for base in kind.__mro__ for part in vars(base).values() if isinstance(part, types.MemberDescriptorType)
    )
    places = 8 * (slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0))
    return kind.__basicsize__ - places > object.__basicsize__
