"""Results of a function over many items, kept in the cache as they come: what was interrupted goes on from there."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sysconfig
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.store.cache import Cache
from hotlap.store.keys import key_of

log = logging.getLogger(__name__)

KIND = "map"
_LIBRARIES = tuple(sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
KEEP_S = 5.0
"""Results are written down so often: what a crash may lose."""


def reached(f: Callable[..., Any]) -> list[Any]:
    """What a function uses by name: the text of functions, classes and modules of no library, and words and numbers."""
    while isinstance(f, functools.partial):
        f = f.func
    waiting: list[Any] = [f]
    seen, found = {id(f)}, []
    while waiting:
        one = waiting.pop()
        for name in sorted(_names_in(one.__code__)) if isinstance(one, types.FunctionType) else ():
            value = one.__globals__.get(name)
            if isinstance(value, (bool, int, float, str, bytes)):
                found.append([name, value])
            elif isinstance(value, (types.FunctionType, type, types.ModuleType)) and id(value) not in seen:
                seen.add(id(value))
                if (text := _own_text(value)) is not None:
                    found.append([name, text])
                    waiting.append(value)
    return found


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a piece of code uses, with what is written within it."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)


def _own_text(value: Any) -> str | None:
    """The source of something that is written in Python, and in no library; else None."""
    with contextlib.suppress(TypeError, OSError):
        file = inspect.getsourcefile(value)
        if file is not None and not file.startswith(_LIBRARIES):
            return inspect.getsource(value)
    return None


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
