"""What the recipe.json of a run may hold: it may be a stranger's, and decides how large a model is made."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from hotlap.core.errors import shown

WHOLE = {
    "batch_size": 10_000_000,
    "depth": 256,
    "length": 10_000,
    "most": 65_536,
    "outputs": 1_000_000,
    "seconds": 400 * 86_400,
    "size": 4096,
    "tta": 10,
    "width": 4096,
}
"""Whole numbers, and the most that each may be; the least is 1. Options have the same bounds."""
LISTS = {"classes": 1_000_000, "columns": 2, "features": 10_000}
"""Lists of words, and how long each may be."""
SHARES = ("crop", "dropout")
AMOUNTS = ("mean", "spread")
WORDS = ("fit", "model", "path", "recipe", "root", "target")
FLAGS = ("has_header", "header", "mirrors")
FRAMES, LONGEST_FRAME = 20, 400 * 86_400
CONFIG = "config"
"""Of a model of transformers: looked at where that is made."""


def state_problem(state: Mapping[str, Any]) -> str | None:
    """What is wrong with the numbers and words of a run's state; None where nothing is."""
    return next(_problems(state), None)


def _problems(state: Any) -> Iterator[str]:
    for name, value in state.items():
        if name == CONFIG:
            continue
        if name in WHOLE:
            is_none = value is None and name == "seconds"  # which runs of an earlier hotlap do not say
            if not is_none and (type(value) is not int or not 1 <= value <= WHOLE[name]):
                yield f"{name}={shown(value)} must be a whole number from 1 to {WHOLE[name]:,}"
        elif name in LISTS:
            if not _are_words(value) or len(value) > LISTS[name]:
                yield f"{name}={shown(value)} must be a list of at most {LISTS[name]:,} words"
        elif name in SHARES:
            if not _is_number(value) or not 0 <= value <= 1:
                yield f"{name}={shown(value)} must be a number from 0 to 1"
        elif name == "frames":
            wrong = not isinstance(value, list) or len(value) > FRAMES
            if wrong or any(type(one) is not int or not 1 <= one <= LONGEST_FRAME for one in value):
                yield f"{name}={shown(value)} must be at most {FRAMES} numbers of seconds"
        elif name in AMOUNTS:
            if not all(map(_is_number, value if isinstance(value, list) else [value])):
                yield f"{name}={shown(value)} must be a number, or a list of them"
        elif name in WORDS:
            if not isinstance(value, str):
                yield f"{name}={shown(value)} must be a word"
        elif name in FLAGS:
            if value is not None and not isinstance(value, bool):
                yield f"{name}={shown(value)} must be true or false"
        elif isinstance(value, dict):
            yield from _problems(value)


def _are_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _is_number(value: Any) -> bool:
    """A finite number that a float holds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 2**63 if isinstance(value, int) else math.isfinite(value)
