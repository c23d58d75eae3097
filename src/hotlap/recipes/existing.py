"""Whether there is something of a name: one that is too long, holds a zero or may not be looked up is that of nothing.

A Path raises for such names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def exists(path: str | Path) -> bool:
    """Whether anything is there."""
    return _is(Path.exists, path)


def is_file(path: str | Path) -> bool:
    """Whether a file is there."""
    return _is(Path.is_file, path)


def is_folder(path: str | Path) -> bool:
    """Whether a folder is there."""
    return _is(Path.is_dir, path)


def _is(asked: Callable[[Path], bool], path: str | Path) -> bool:
    try:
        return asked(Path(path))
    except (OSError, ValueError):
        return False
