"""What a script's objects hold, read without running any of its code."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

MOST_EPOCHS, MOST_STEPS = 100_000, 10**9
"""What is more says that somebody stops the script otherwise."""
MOST_FIELDS = 1000
"""A dict that holds more holds data."""


def own_of(thing: Any) -> Mapping[str, Any]:
    """The attributes that an object itself holds; none of its code runs."""
    try:
        found = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, Mapping) else {}


def fields_of(thing: Any) -> Mapping[str, Any]:
    """What settings hold by name, be they a dict, a class or an object; none of their code runs."""
    if issubclass(type(thing), dict):
        few = dict.__len__(thing) < MOST_FIELDS
        return {name: value for name, value in dict.items(thing) if type(name) is str} if few else {}
    kind = thing if issubclass(type(thing), type) else type(thing)
    return ChainMap(*(dict(own_of(one)) for one in (thing, *type.mro(kind)) if one is not object))


def whole_number(value: Any, *, least: int = 2, most: int = MOST_STEPS) -> int | None:
    """A number that counts something; `3.0` does, True does not."""
    if type(value) is float and math.isfinite(value) and value == int(value):
        value = int(value)
    return value if type(value) is int and least <= value <= most else None
