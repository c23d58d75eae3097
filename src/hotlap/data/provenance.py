"""What a function is made of, for a key: its code, the functions it calls, and the values they use."""

from __future__ import annotations

import functools
import platform
import sys
import types
from collections.abc import Iterator
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.store.keys import key_of


def made_of(function: Any) -> list[str]:
    """Keys of all that decides what a function gives, as far as its code tells.

    Followed are the names it uses, and those of the functions among them. Installed packages and Python's own count
    by their version. Raises StoreError where something cannot be told, as an object that a name stands for.
    """
    return list(_keys(function, {}))


def _keys(value: Any, seen: dict[int, int]) -> Iterator[str]:
    match value:
        case types.FunctionType() | types.BuiltinFunctionType() | type() | types.ModuleType():
            yield from _code_keys(value, seen)
        case functools.partial():
            yield key_of("partial", len(value.args), list(value.keywords))
            for part in (value.func, *value.args, *value.keywords.values()):
                yield from _keys(part, seen)
        case _:
            yield key_of(value)


def _code_keys(value: Any, seen: dict[int, int]) -> Iterator[str]:
    if id(value) in seen:  # functions that call each other
        yield key_of("again", seen[id(value)])
        return
    seen[id(value)] = len(seen)
    home = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or "builtins"
    version = _version(home)
    if version is not None:
        yield key_of(home, version, getattr(value, "__qualname__", ""))
        return
    if not isinstance(value, types.FunctionType):
        # Its text could be read, but not the values that it works with.
        raise StoreError(f"what {value.__name__} works with cannot be told; use functions in its place")
    yield key_of(value)
    for name in sorted(_names(value.__code__) & set(value.__globals__)):
        yield key_of("name", name)
        yield from _keys(value.__globals__[name], seen)
    for cell in value.__closure__ or ():
        yield from _keys(cell.cell_contents, seen)


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and those written inside it use."""
    inner = [_names(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return set(code.co_names).union(*inner)


def _version(module: str) -> str | None:
    """The release that code of a module belongs to; None for what is the user's own, and may change any time."""
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names:
        return platform.python_version()
    package = sys.modules.get(root)
    place = str(getattr(package, "__file__", ""))
    if "site-packages" not in place and "dist-packages" not in place:
        return None
    version = getattr(package, "__version__", None)
    return str(version) if version else None
