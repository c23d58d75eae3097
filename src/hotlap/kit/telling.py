"""Lines to the user while something is tried: on stderr, or nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable


def sayer(progress: bool) -> Callable[[str], None]:
    """Shows a line on stderr, where progress is wanted."""
    return _say if progress else silent


def silent(line: str) -> None:
    """Shows it to nobody."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201
