"""Frames of hotlap beneath those of a script, made cheap to show."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

HOTLAP = f"{Path(__file__).parents[1]}{os.sep}"
"""The folder of hotlap's own code."""


def files_beneath() -> set[str]:
    """The files of hotlap, and the command that has started it, whose functions are being run."""
    found = set[str]()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        is_command = frame.f_globals.get("__name__") == "__main__" and not file.endswith(".py")
        if file.startswith(HOTLAP) or is_command:
            found.add(file)
        frame = frame.f_back
    return found


def without_text(files: Iterable[str]) -> Callable[[], None]:
    """Show frames of these files without their lines of source, until what is returned is called.

    torch formats the whole stack at each `torch.manual_seed` as long as CUDA or XPU has not begun. Datasets may call
    that for every sample, in workers that have the stack they were forked from: 14 µs a frame with its line, 3 without.
    """
    cache: dict[str, Any] = linecache.cache
    ours = {file: (0, None, list[str](), file) for file in files}  # of such an entry no file is looked at
    before = {file: cache[file] for file in ours if file in cache}
    cache.update(ours)

    def undo() -> None:
        for file in [file for file, entry in ours.items() if cache.get(file) is entry]:
            del cache[file]
            cache.update({file: before[file]} if file in before else {})

    return undo
