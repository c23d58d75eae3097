"""Lines to the user while something is tried: on stderr, or nowhere."""

from __future__ import annotations

from collections.abc import Callable

from hotlap.core.terminal import say


def sayer(progress: bool) -> Callable[[str], None]:
    """Shows a line on stderr, where progress is wanted."""
    return say if progress else silent


def silent(line: str) -> None:
    """Shows it to nobody."""
