"""Fingerprints of data, functions and objects, by which a resumed training recognises them.

hotlap fetches no sample for this: a sample may be broken, or move a generator that the dataset keeps.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import os
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from hotlap.core.code_reads import is_users, is_users_function, reads_of, variables_read
from hotlap.data.content_keys import (
    HOOKS,
    STEP_HOOKS,
    attributes_of,
    cells_of,
    hooks_on,
    name_of,
    optimizer_inside,
    tensor_text,
    type_name,
    users_hooks,
)
from hotlap.store.keys import bytecode, key_of

ENTRIES = 1000
"""Entries of a list or dict that count, evenly spread."""
DEPTH = 4
HELD_DEPTH, HELD_PARTS = 10, 20_000
"""Limits inside of a function or object: levels of nesting, and parts in all."""
SHORT = 40
"""Numbers of at most so many characters are kept as text; everything else is kept as a hash."""
CODE = "code of "
"""Prefix in the names of code parts."""
_NUMBER = (int, float, complex, bool, type(None))
_PLAIN = (*_NUMBER, str, bytes)
_INTERNAL = frozenset(vars(nn.Module()))
# Attributes that a schedule changes as it moves, so that they differ in the middle of a training.
_MOVING = frozenset(
    ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i")
)
_BY_REPR = ("datetime", "decimal", "fractions", "uuid")


def describe(value: Any, depth: int = 0) -> str:
    """A text that differs where two values do, as far as a spread of their bytes and entries shows.

    Numbers, texts and tensors count by value, objects by their attributes.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.isnative:
        return tensor_text(torch.from_numpy(np.ascontiguousarray(value)), whole=False)
    if isinstance(value, Tensor):
        return tensor_text(value, whole=False)
    if isinstance(value, (bytes, int, float, bool, type(None), str, os.PathLike)):
        return repr(value)
    if depth >= DEPTH:
        return type(value).__qualname__
    if isinstance(value, (list, tuple)):
        spread = value[:: max(1, len(value) // ENTRIES)]
        return f"{len(value)}[{','.join(describe(part, depth + 1) for part in spread)}]"
    if isinstance(value, Mapping):
        # Sorted, so that the order of filling does not count.
        entries = sorted(value.items(), key=lambda entry: repr(entry[0]))[:: max(1, len(value) // ENTRIES)]
        return f"{len(value)}{{{','.join(f'{key!r}:{describe(part, depth + 1)}' for key, part in entries)}}}"
    parts = sorted(getattr(value, "__dict__", {}).items())
    return f"{type(value).__qualname__}({','.join(f'{name}={describe(part, depth + 1)}' for name, part in parts)})"


def _is_described(part: Any) -> bool:
    """Whether `describe` shows the content of a part."""
    if isinstance(part, np.ndarray):
        return part.dtype.kind in "biuf"
    return _is_value(part) and not isinstance(part, (set, frozenset))


# --- what functions and objects hold --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Digest:
    """A part in its final form."""

    text: str


class Holdings:
    """Names and hashes of everything that functions and objects hold, the same in every process.

    `own` are the trained modules: their tensors count by shape, since they change. Objects without readable content,
    such as locks and open files, count by the name of their type. `known` are objects with a fingerprint elsewhere,
    such as the data, by name.
    """

    def __init__(self, own: Iterable[nn.Module] = (), known: Mapping[str, Any] | None = None) -> None:
        layers = {id(layer): layer for module in own for layer in module.modules()}
        tensors = [t for m in layers.values() for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
        self._layers, self._tensors = layers, {id(tensor): tensor for tensor in tensors}
        self._elsewhere = {id(value): (value, name) for name, value in (known or {}).items() if value is not None}
        self._inside: list[int] = []
        # With the value itself: while it is alive, no other object can have its id.
        self._known: dict[int, tuple[Any, str]] = {}
        self._left = HELD_PARTS

    def of(self, value: Any) -> dict[str, str]:
        """Name and content of everything that a function or object holds: numbers as text, the rest as hashes."""
        self._left = HELD_PARTS
        try:
            parts = self._parts(value, top=True)
        except Exception:  # an unusual callable: its name and file have to do
            return {}
        return {name: self._text(part) for name, part in parts.items()}

    def of_data(self, value: Any) -> dict[str, str]:
        """The code of a dataset, what that code reads, and its functions and objects; the rest is data."""
        self._left = HELD_PARTS
        attributes = {n: part for n, part in attributes_of(value).items() if _counts(part) and not _is_described(part)}
        return {name: self._text(part) for name, part in {**_class_parts(type(value)), **attributes}.items()}

    def of_module(self, module: nn.Module) -> dict[str, str]:
        """The same for a trained module and its layers, without what their `extra_repr` shows."""
        self._left = HELD_PARTS
        found: dict[str, Any] = {}
        for name, layer in module.named_modules():
            shown = f", {layer.extra_repr()},"
            for key, part in _settings_of(layer).items():
                # The key first: the text of a list of weights takes long.
                is_shown = f" {key}=" in shown and any(f" {key}={text}," in shown for text in (str(part), repr(part)))
                if not is_shown:
                    found[f"{name}.{key}" if name else key] = part
            for kind in HOOKS:
                if hooks := users_hooks(getattr(layer, kind, None)):
                    found[f"{name or 'its'} {kind.strip('_').replace('_', ' ')}"] = hooks
        for name, parameter in module.named_parameters():
            if hooks := hooks_on(parameter):
                found[f"{name} hooks"] = hooks
        frozen = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
        resting = [name for name, layer in module.named_modules() if not layer.training]
        found |= {"frozen parameters": frozen} if frozen else {}
        found |= {"layers in evaluation mode": resting} if resting else {}
        for made_of in {type(layer): None for layer in module.modules()}:
            found |= _class_parts(made_of)
        return {name: self._text(part) for name, part in found.items()}

    def of_optimizer(self, optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, str]:
        """The parameters of each group, settings that only the user's optimizer class has, and hooks."""
        self._left = HELD_PARTS
        found: dict[str, Any] = dict(_class_parts(type(optimizer)))
        for number, group in enumerate(optimizer.param_groups):
            found[f"parameters of group {number}"] = [names.get(id(p), "?") for p in group["params"]]
            more = {k: v for k, v in group.items() if k != "params" and k not in optimizer.defaults and _counts(v)}
            found |= {f"{k} of group {number}": v for k, v in more.items() if k != "initial_lr"}
        own = {n: part for n, part in vars(optimizer).items() if n not in optimizer_inside() and _counts(part)}
        hooks = [hook for kind in STEP_HOOKS for hook in users_hooks(getattr(optimizer, kind, None))]
        found |= {name: part for name, part in own.items() if not inspect.isroutine(part)}
        found |= {"step hooks": hooks} if hooks else {}
        return {name: self._text(part) for name, part in found.items()}

    def _text(self, part: Any) -> str:
        if isinstance(part, _Digest):
            return part.text
        if _is_number(part) and len(shown := repr(part)) <= SHORT:
            return shown
        return f"sha256 {key_of(self._form(part))}"

    def _form(self, value: Any) -> Any:
        """A value in a form that `key_of` takes."""
        if isinstance(value, _Digest):
            return "told", value.text
        if isinstance(value, _PLAIN) and not isinstance(value, (complex, enum.Enum)):
            return value
        if id(value) in self._elsewhere:
            return "elsewhere", self._elsewhere[id(value)][1]
        if id(value) in self._inside:
            return "itself", len(self._inside) - self._inside.index(id(value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        self._left -= 1
        if len(self._inside) >= HELD_DEPTH or self._left < 0:
            return type_name(value)
        self._inside.append(id(value))
        try:
            key = key_of(self._opened(value))
        except Exception:  # objects of other libraries may raise anything: the type has to do
            key = type_name(value)
        finally:
            self._inside.pop()
        self._known[id(value)] = value, key
        return key

    def _opened(self, value: Any) -> Any:
        match value:
            case Tensor() if id(value) in self._tensors:
                return "trained", str(value.dtype), list(value.shape)
            case Tensor():
                return "tensor", tensor_text(value, whole=False)
            case np.ndarray() if value.dtype.hasobject:
                return "objects", self._form(value.reshape(-1)[:ENTRIES].tolist()), list(value.shape)
            case np.ndarray() if value.dtype.kind in "biuf" and value.dtype.isnative:
                return "array", describe(value)
            case np.ndarray() | np.generic():
                return "array", str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()
            case list() | tuple() | deque():
                spread = list(value)[:: max(1, len(value) // ENTRIES)]
                return type(value).__name__, len(value), [self._form(part) for part in spread]
            case set() | frozenset():
                return "set", sorted(key_of(self._form(part)) for part in value)
            case dict() | types.MappingProxyType():
                rows = list(value.items())[:: max(1, len(value) // ENTRIES)]
                return "dict", len(value), {key_of(self._form(k)): self._form(v) for k, v in rows}
            case enum.Enum():
                return type_name(value), value.name
            case types.ModuleType():
                return "module", value.__name__
            case complex() | range() | slice() | torch.dtype() | np.dtype():
                return type(value).__name__, repr(value)
            case os.PathLike():
                return "path", str(os.fspath(value))
            case type() | types.BuiltinFunctionType():
                return name_of(value), {name: self._form(part) for name, part in self._parts(value).items()}
            case types.FunctionType():
                return name_of(value), {name: self._form(part) for name, part in self._parts(value).items()}
            case nn.Module() if id(value) not in self._layers:
                state = {name: self._form(part) for name, part in value.state_dict().items()}
                layers = [self._form((name, type(m), _settings_of(m))) for name, m in value.named_modules()]
                return type_name(value), state, layers
        # A function written in C, such as one of numpy, has only its name.
        name = str(getattr(value, "__name__", "")) if callable(value) else ""
        return type_name(value), name, {name: self._form(part) for name, part in self._parts(value).items()}

    def _parts(self, value: Any, *, top: bool = False) -> dict[str, Any]:
        """The parts of a value, by name."""
        if isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value):
            return self._parts(vars(value)["_torchdynamo_orig_callable"], top=top)
        match value:
            case functools.partial():
                # At the top level, the settings show plain arguments.
                shown = _PLAIN if top else ()
                rows = [(f"argument {n}", part) for n, part in enumerate(value.args)] + [*value.keywords.items()]
                more = {k: part for k, part in rows if not isinstance(part, (*shown, *((tuple,) if top else ())))}
                return {**self._callee(value.func, top), **more}
            case types.MethodType():
                return {**self._callee(value.__func__, top), **self._parts(value.__self__)}
            case types.FunctionType():
                return _function_parts(value)
            case type():
                return _class_parts(value)
            case nn.Module() if id(value) in self._layers:
                return {}
            case nn.Module():
                return {"its layers and weights": value}
            case Optimizer() | torch.device() | torch.Generator():
                return {}
            case DataLoader():
                return {"dataset": value.dataset, "batch_size": value.batch_size, "collate_fn": value.collate_fn}
            case functools.cached_property():
                return {"function": value.func}
        wrapped = getattr(value, "__wrapped__", None)
        if inspect.isfunction(wrapped) and not isinstance(value, type):
            return self._parts(wrapped, top=top)
        kind = type(value).__module__.partition(".")[0]
        if kind in _BY_REPR:
            return {"value": repr(value)}
        if kind in sys.stdlib_module_names and not is_users(type(value).__module__):
            return {}  # locks, loggers, files, parsed arguments: their content is not part of the training
        left_out = _MOVING if isinstance(value, LRScheduler) else frozenset()
        held = {k: v for k, v in attributes_of(value).items() if k not in left_out and not _is_place(k, v)}
        return {**_class_parts(type(value)), **held}

    def _callee(self, function: Any, top: bool) -> dict[str, Any]:
        return self._parts(function, top=top) if callable(function) else {}


def _is_number(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return len(value) <= SHORT and all(type(part) in _NUMBER for part in value)
    return type(value) in _NUMBER


def _is_place(name: str, value: Any) -> bool:
    """Whether this is a device, which may change between runs."""
    return name == "device" or isinstance(value, torch.device)


def _settings_of(layer: nn.Module) -> dict[str, Any]:
    """Attributes of one layer that are values, functions or the user's objects, without those of every module.

    This includes functions that replace a method, such as a replaced forward.
    """
    found = {name: part for name, part in vars(layer).items() if name not in (*_INTERNAL, "_compiled_call_impl")}
    return {name: part for name, part in found.items() if not _is_place(name, part) and _counts(part)}


def _counts(part: Any, depth: int = 0) -> bool:
    """Whether this is a value, a function, an object of a user's class, or a short collection of them."""
    if isinstance(part, (list, tuple, set, frozenset, dict)):
        inner = (*part, *part.values()) if isinstance(part, dict) else part
        return _is_value(part) or (depth < 4 and len(part) <= ENTRIES and all(_counts(p, depth + 1) for p in inner))
    if isinstance(part, nn.Module):
        return False
    if isinstance(part, functools.partial) or inspect.isroutine(part) or _is_value(part):
        return True
    return callable(part) or is_users(type(part).__module__)


def _is_value(part: Any, depth: int = 0) -> bool:
    """Whether this is a number, text, tensor, or a short collection of them."""
    if isinstance(part, (list, tuple, set, frozenset)):
        return depth < 4 and len(part) <= ENTRIES and all(_is_value(p, depth + 1) for p in part)
    if isinstance(part, dict):
        return depth < 4 and len(part) <= ENTRIES and all(_is_value(p, depth + 1) for p in (*part, *part.values()))
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return _is_value(vars(part), depth + 1) if hasattr(part, "__dict__") else False
    return isinstance(part, (*_PLAIN, enum.Enum, torch.dtype, Tensor, np.ndarray, np.generic))


def _function_parts(function: types.FunctionType) -> dict[str, Any]:
    """Code, closure and defaults of a function, and the globals that a user's function reads."""
    code, defaults = function.__code__, function.__defaults__ or ()
    places = code.co_varnames[: code.co_argcount][code.co_argcount - len(defaults) :]
    found: dict[str, Any] = dict(zip(places, defaults, strict=False))
    found |= function.__kwdefaults__ or {}
    cells = dict(cells_of(function))
    found |= {name: part for name, part in cells.items() if name != "__class__"}
    found |= {name: part for name, part in vars(function).items() if name != "__wrapped__" and _counts(part)}
    if is_users_function(function):
        found[f"{CODE}{function.__qualname__}"] = _Digest(_code_of(code))
        found |= _read(code, function.__globals__, cells)
    return found


def _class_parts(part: type) -> dict[str, Any]:
    """Code, attributes and globals of a class and its bases, as far as they are the user's.

    Of a library's class these are the methods that the user replaced.
    """
    found: dict[str, Any] = {}
    for kind in part.__mro__:
        is_own = is_users(kind.__module__)
        functions = {name: f for name, value in sorted(vars(kind).items()) if (f := _function_in(value)) is not None}
        functions = {name: f for name, f in functions.items() if is_own or is_users_function(f)}
        if not functions and not is_own:
            continue
        codes = [(name, _code_of(f.__code__)) for name, f in functions.items()]
        found[f"{CODE}{kind.__qualname__}"] = _Digest(key_of(codes))
        for name, value in vars(kind).items() if is_own else ():
            if not (name.startswith("__") and name.endswith("__")) and name not in functions and _counts(value):
                found[f"{kind.__name__}.{name}"] = value
        for function in functions.values():
            if is_users_function(function):  # a dataclass has generated methods
                made = _function_parts(function)
                found |= {f"{function.__name__}: {k}": v for k, v in made.items() if not k.startswith((CODE, *_OUTER))}
                found |= {name: value for name, value in made.items() if name.startswith(_OUTER)}
    return found


_OUTER = ("global ", "environment ")


def _function_in(value: Any) -> types.FunctionType | None:
    """The function behind an entry of a class."""
    for name in ("__func__", "fget", "func"):
        value = getattr(value, name, value) if not isinstance(value, types.FunctionType) else value
    return value if isinstance(value, types.FunctionType) else None


def _code_of(code: types.CodeType) -> str:
    """The hash of a function's source, which is the same in every Python version; without source, of its bytecode."""
    if code.co_name != "<lambda>":  # its text is the whole line, which may hold several lambdas
        with suppress(OSError, TypeError, SyntaxError):
            return key_of(inspect.getsource(code))
    return key_of(bytecode(code))


def _read(code: types.CodeType, names: dict[str, Any], cells: dict[str, Any]) -> dict[str, Any]:
    """What code reads: globals, attributes of modules and arguments, and environment variables."""
    found: dict[str, Any] = {}
    for read in reads_of(code):
        source = cells if read.is_cell else names
        if read.name not in source:
            continue
        value, known = source[read.name], read.name
        for attribute in read.attributes:
            # Of a module or of parsed arguments only what the code reads counts.
            if _is_value(value) or isinstance(value, (nn.Module, type)) or not hasattr(value, "__dict__"):
                break
            if attribute not in vars(value):
                break
            value, known = vars(value)[attribute], f"{known}.{attribute}"
        if read.is_cell and known == read.name:
            continue
        is_code = isinstance(value, (types.FunctionType, type))
        if is_code and not (is_users_function(value) if inspect.isfunction(value) else is_users(value.__module__)):
            continue
        if _counts(value) and not inspect.isbuiltin(value) and not _is_place(known, value):
            found[known if read.is_cell else f"global {known}"] = value
    variables, _ = variables_read(code, names)
    return found | {f"environment {name}": os.environ.get(name) for name in sorted(variables)}
