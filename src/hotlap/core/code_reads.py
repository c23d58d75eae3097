"""Whose code it is, and what it reads from outside: globals, attributes taken from them, imports, the environment."""

from __future__ import annotations

import builtins
import dis
import functools
import importlib.util
import itertools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_BETWEEN = ("PUSH_NULL", "PRECALL", "NOP", "CACHE", "KW_NAMES", "EXTENDED_ARG")
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_CELL = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_LOCAL = ("LOAD_FAST", "LOAD_DEREF")
_ENVIRONMENT = ("environ", "getenv", "environb")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RUNS_TEXT = ("eval", "exec", "compile", "__import__", "globals", "input")
"""Functions of Python's whose result no reading of the code can tell."""


@dataclass(frozen=True)
class Read:
    """A name that code loads, and the attributes it takes from it at once: `settings.train.rate`."""

    name: str
    attributes: tuple[str, ...]
    is_cell: bool


def reads_of(code: types.CodeType) -> Iterator[Read]:
    """Every global and closed-over name that the code, or code inside of it, loads."""
    steps = _steps(code)
    for number, step in enumerate(steps):
        if step.opname in (*_GLOBAL, *_CELL):
            attributes = []
            for after in steps[number + 1 :]:
                if after.opname not in _ATTRIBUTE:
                    break
                attributes.append(after.argval)
            yield Read(step.argval, tuple(attributes), step.opname in _CELL)
    for inner in _inner(code):
        yield from reads_of(inner)


def writes_of(code: types.CodeType) -> set[str]:
    """Every global that the code, or code inside of it, gives a value."""
    found = {str(step.argval) for step in _steps(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return {*found, *(name for inner in _inner(code) for name in writes_of(inner))}


def names_in(code: types.CodeType) -> set[str]:
    """Every name of a global, attribute or method that the code, or code inside of it, mentions."""
    return {*code.co_names, *(name for inner in _inner(code) for name in names_in(inner))}


def attributes_taken(code: types.CodeType, variable: str) -> set[str]:
    """Every attribute that the code, or code inside of it, takes from a local variable such as `self`."""
    steps = _steps(code)
    found = {
        str(after.argval)
        for step, after in itertools.pairwise(steps)
        if step.opname.startswith(_LOCAL) and _last(step.argval) == variable and after.opname in _ATTRIBUTE
    }
    return {*found, *(name for inner in _inner(code) for name in attributes_taken(inner, variable))}


def _last(names: Any) -> Any:
    """The last of the variables that a step loads; some steps load two."""
    return names[-1] if isinstance(names, tuple) else names


def words_in(code: types.CodeType) -> set[str]:
    """Every word that is written out in the code."""
    found = {word for word in _flat(code.co_consts) if isinstance(word, str)}
    return {*found, *(word for inner in _inner(code) for word in words_in(inner))}


def builtins_read(code: types.CodeType, names: Mapping[str, Any]) -> set[str]:
    """The functions of Python's that the code loads by name."""
    loaded = {read.name for read in reads_of(code) if not read.is_cell}
    return {name for name in loaded if name not in names and hasattr(builtins, name)}


def variables_read(code: types.CodeType, names: Mapping[str, Any]) -> tuple[set[str], bool]:
    """The environment variables that code asks for, and whether it asks for others that it does not write out."""
    found: set[str] = set()
    others = False
    steps = _steps(code)
    for number, step in enumerate(steps):
        if step.argval not in _ENVIRONMENT or step.opname not in (*_ATTRIBUTE, *_GLOBAL, "IMPORT_FROM"):
            continue
        after = steps[number + 1 :]
        if after and after[0].opname in _ATTRIBUTE and after[0].argval in ("get", "setdefault", "__getitem__"):
            after = after[1:]
        key: Any = None
        if _is_alone(after):
            key = after[0].argval if after[0].opname == "LOAD_CONST" else names.get(after[0].argval)
        elif after and after[0].opname == "CONTAINS_OP":
            # In `"NAME" in os.environ` the name comes first.
            before = [one for one in steps[:number] if one.opname == "LOAD_CONST"]
            key = before[-1].argval if before else None
        if isinstance(key, str) and _VARIABLE.fullmatch(key):
            found.add(key)
        else:
            others = True
    if others:  # at least those whose names are written out somewhere
        found |= {word for word in words_in(code) if _VARIABLE.fullmatch(word) and word in os.environ}
    for inner in _inner(code):
        more, unclear = variables_read(inner, names)
        found |= more
        others |= unclear
    return found, others


def _is_alone(steps: list[dis.Instruction]) -> bool:
    """Whether a constant or global comes first and is used as it is: as an index, or in a call, a default beside it."""
    if len(steps) < 3 or steps[0].opname not in ("LOAD_CONST", *_GLOBAL):
        return False
    used, later = steps[1], steps[2]
    is_index = used.opname == "BINARY_SUBSCR" or (used.opname == "BINARY_OP" and used.argrepr == "[]")
    has_default = used.opname.startswith("LOAD_") and used.opname not in _ATTRIBUTE
    return is_index or used.opname.startswith("CALL") or (has_default and later.opname.startswith("CALL"))


def imports_in(code: types.CodeType, package: str | None) -> Iterator[tuple[str, types.ModuleType | None]]:
    """Name of each module that code imports while it runs, and the module where it is loaded; libraries' too."""
    for step in _steps(code):
        if step.opname == "IMPORT_NAME":
            name = str(step.argval)
            near = f"{package}.{name}" if package else name
            yield name, sys.modules.get(near) or sys.modules.get(name)
    for inner in _inner(code):
        yield from imports_in(inner, package)


def origin_of(module: str) -> str | None:
    """The file that a module which is not loaded yet would come from; None where there is none."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None else spec.origin


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]


def _inner(code: types.CodeType) -> list[types.CodeType]:
    return [part for part in code.co_consts if isinstance(part, types.CodeType)]


def _flat(constants: Any) -> Iterator[Any]:
    for part in constants:
        if isinstance(part, (tuple, frozenset)):
            yield from _flat(part)
        else:
            yield part


# --- whose code it is -----------------------------------------------------------------------------


@functools.cache
def is_library(file: Path) -> bool:
    """Whether a file is Python's, PyTorch's, an installed package's or hotlap's own."""
    return any(file.resolve().is_relative_to(home) for home in _library_homes())


@functools.cache
def _library_homes() -> tuple[Path, ...]:
    homes = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    homes += [Path(torch.__file__).parents[1], Path(__file__).parents[1]]
    return tuple(home.resolve() for home in homes)


def file_of(module: str | None) -> Path | None:
    """The file a module was read from, if there is one; from standard input Python says `<stdin>`."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return Path(file) if isinstance(file, str) and _exists(file) else None


@functools.cache
def _exists(file: str) -> bool:
    return Path(file).is_file()


def is_users(module: str | None) -> bool:
    """Whether a module is of the user's own: in no library, or in no file at all, as in a notebook."""
    file = file_of(module)
    if file is not None:
        return not is_library(file)
    return module == "__main__" or (
        module not in sys.modules and (module or "").partition(".")[0] not in sys.stdlib_module_names
    )


def is_users_function(function: types.FunctionType) -> bool:
    """Whether a function is of the user's own, also where it wraps one of a library and took over its names."""
    is_own = _is_users_file(function.__code__.co_filename)
    return is_users(function.__module__) if is_own is None else is_own


@functools.cache
def _is_users_file(file: str) -> bool | None:
    """Whether a file of code is in no library; None where there is no such file."""
    return not is_library(Path(file)) if _exists(file) else None
