"""Results of a function over many items, kept in the cache as they come: what was interrupted goes on from there."""

from __future__ import annotations

import argparse
import contextlib
import dis
import functools
import importlib.util
import inspect
import re
import site
import sysconfig
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.terminal import logger
from hotlap.store.cache import Cache
from hotlap.store.keys import key_of

log = logger(__name__)

KIND = "map"
_LIBRARIES = tuple(
    {
        *(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
        str(Path(__file__).parents[1]),
    }
)
"""Folders of what is installed, and hotlap's own: what changes there is no change of the user's function."""
KEEP_S = 5.0
"""Results are written down so often: what a crash may lose."""


def reached(f: Callable[..., Any]) -> list[Any]:
    """What a function uses, and what that uses, as far as it is found by name and written in no library.

    Functions, classes and modules by their text; words, numbers, tensors, patterns and what holds them by value.
    """
    waiting, seen, found = [("", f)], dict[tuple[str, int], Any](), list[Any]()
    while waiting:
        name, value = waiting.pop()
        if (name, id(value)) in seen:
            continue
        seen[name, id(value)] = value  # which keeps it, and so its id
        waiting += _used_by(value)
        if (part := _part_of_key(value)) is not None:
            found.append([name, part])
    return sorted(found, key=repr)  # a set gives what it holds in another order in every process


def _used_by(value: Any) -> Iterator[tuple[str, Any]]:
    """What a value uses, each with its name."""
    own_attributes = getattr(value, "__dict__", {})
    if "__wrapped__" in own_attributes:
        yield "", own_attributes["__wrapped__"]
    match value:
        case functools.partial():
            yield from (("", one) for one in (value.func, *value.args))
            yield from value.keywords.items()
        case types.MethodType():
            yield from (("", value.__func__), ("", value.__self__))
        case staticmethod() | classmethod():
            yield "", value.__func__
        case property():
            yield from (("", one) for one in (value.fget, value.fset))
        case types.FunctionType() if _is_own(value):
            yield from _named_in(value)
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # it has no value yet
                    yield name, cell.cell_contents
            yield from (("", one) for one in value.__defaults__ or ())
            yield from (value.__kwdefaults__ or {}).items()
        case type() if _is_own(value):
            yield from (("", base) for base in value.__bases__)
            yield from ((name, one) for name, one in vars(value).items() if not name.startswith("__") or callable(one))
        case list() | tuple() | set() | frozenset():
            yield from (("", one) for one in value if callable(one))
        case dict():
            yield from (("", one) for one in value.values() if callable(one))
        case argparse.Namespace() | types.SimpleNamespace():
            yield from own_attributes.items()
        case _ if _is_own(type(value)):
            yield "", type(value)
            yield from own_attributes.items()


def _named_in(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What the names in a function stand for: in its file, in modules that it names, in those it imports itself."""
    names = sorted(_names_in(function.__code__))
    imported = list(_imported_in(function.__code__, function.__globals__.get("__package__")))
    yield from ((one.__name__, one) for one in imported)
    scopes = [function.__globals__, *map(vars, imported)]
    for scope in scopes:
        for name in names:
            if name not in scope:
                continue
            value = scope[name]
            yield name, value
            if isinstance(value, types.ModuleType) and _is_own(value) and not any(vars(value) is it for it in scopes):
                scopes.append(vars(value))


def _imported_in(code: types.CodeType, package: str | None) -> Iterator[types.ModuleType]:
    """The modules of no library that a piece of code imports when it runs."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for at, step in enumerate(steps):
        if step.opname != "IMPORT_NAME":
            continue
        with contextlib.suppress(Exception):  # it may be there on other machines only
            dots = "." * steps[at - 2].argval  # how many is put before it, and what of it is wanted
            spec = importlib.util.find_spec(f"{dots}{step.argval}", package)
            if spec is not None and spec.origin is not None and not spec.origin.startswith(_LIBRARIES):
                yield importlib.import_module(spec.name)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _imported_in(inner, package)


def _part_of_key(value: Any) -> Any:
    """What stands for a value in a key; None where nothing does."""
    match value:
        case types.FunctionType() | type() | types.ModuleType():
            return _own_text(value)
        case re.Pattern():
            return [value.pattern, value.flags]
        case set() | frozenset():
            with contextlib.suppress(StoreError):
                return sorted(key_of(one) for one in value)
        case _:
            with contextlib.suppress(StoreError, OSError):
                return key_of(value)
    return None


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a piece of code uses, with what is written within it."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)


def _own_text(value: Any) -> str | None:
    """The source of something that is written in Python, and in no library; else None."""
    with contextlib.suppress(TypeError, OSError):
        return inspect.getsource(value) if _is_own(value) else None
    return None


def _is_own(value: Any) -> bool:
    """Whether a function, class or module is written in Python, and in no library."""
    with contextlib.suppress(TypeError, OSError):
        file = inspect.getsourcefile(value) or next(iter(getattr(value, "__path__", ())), None)
        return file is not None and not file.startswith(_LIBRARIES)
    return any(not one.startswith(_LIBRARIES) for one in getattr(value, "__path__", ()))


class KeptResults:
    """Results by the number of their item. Inside `with`, those that are added are kept, part by part.

    When all are there they become one entry. A cache that cannot store them stops nothing: that is told in the log.
    """

    def __init__(self, f: Callable[..., Any], items: Sequence[Any], cache: Cache | None = None) -> None:
        """Raises StoreError where function or items can be no part of a key."""
        self._cache, self._items = cache or Cache(), list(items)
        self._key = key_of(KIND, f, self._items, reached(f))
        self._name = getattr(f, "__qualname__", type(f).__name__)
        self.found: dict[int, Any] = {}
        """What is there."""
        self._new: dict[int, Any] = {}
        self._parts, self._is_whole, self._why_not = 0, False, ""
        self._kept_s = time.monotonic()

    def __enter__(self) -> KeptResults:
        whole = self._read(self._key)
        self._is_whole = whole is not None
        while whole is None and (part := self._read(self._part_key(self._parts))) is not None:
            self.found |= part
            self._parts += 1
        self.found |= whole or {}
        return self

    def __exit__(self, *how: Any) -> None:
        """All of it as one entry, or, where it ended before, what has come since the last part."""
        if self._is_whole:
            return
        if len(self.found) < len(self._items):
            self._keep_part()
            return
        self._put(self._key, self.found)
        for number in range(self._parts):
            with contextlib.suppress(StoreError):
                self._cache.drop(KIND, self._part_key(number))

    def add(self, number: int, result: Any) -> None:
        """The result of an item has come."""
        self.found[number] = self._new[number] = result
        if time.monotonic() - self._kept_s >= KEEP_S:
            self._keep_part()

    def _keep_part(self) -> None:
        if self._new and self._put(self._part_key(self._parts), self._new):
            self._parts += 1
            self._new = {}
        self._kept_s = time.monotonic()

    def _part_key(self, number: int) -> str:
        return key_of(self._key, number)

    def _read(self, key: str) -> dict[int, Any] | None:
        try:
            entry = self._cache.get(KIND, key)
        except StoreError as error:
            log.warning("results kept before are not used: %s", error)
            return None
        return None if entry is None else dict(zip(entry.values["numbers"], entry.values["results"], strict=True))

    def _put(self, key: str, results: dict[int, Any]) -> bool:
        if self._why_not:
            return False
        values = {"numbers": list(results), "results": list(results.values())}
        facts = {"function": self._name, "items": len(self._items), "done": len(results)}
        try:
            self._cache.put(KIND, key, values=values, facts=facts)
        except StoreError as error:
            self._why_not = str(error)
            log.warning("results of %s are not kept: %s", self._name, error)
            return False
        return True
