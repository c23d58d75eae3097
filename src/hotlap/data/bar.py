"""A bar on stderr for work over many items: live in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from hotlap.core.terminal import is_terminal, say, write
from hotlap.core.units import show_rate, show_seconds

PATIENCE_S = 1.0
"""Work that is done before has no bar."""
LIVE_S, LINES_S = 0.2, 15.0
"""Seconds between two views of it, in a terminal and in a log."""
WIDTH = 30


@contextlib.contextmanager
def shown_bar(stream: TextIO | None = None) -> Iterator[Callable[[int, int], None]]:
    """Inside `with`, a function that is told how many items are done, of how many; HOTLAP_PROGRESS=off|lines counts."""
    stream = stream or sys.stderr
    asked = os.environ.get("HOTLAP_PROGRESS", "").strip().lower()
    # Without a console, as under pythonw, there is no stderr.
    if asked == "off" or stream is None:
        yield lambda done, total: None
        return
    live = is_terminal(stream) and asked != "lines" and os.environ.get("TERM") != "dumb"
    bar = _Bar(stream, live=live)
    try:
        yield bar.show
    finally:
        bar.close()


class _Bar:
    def __init__(self, stream: TextIO, *, live: bool) -> None:
        self._stream, self._live, self._width = stream, live, 0
        self._began: tuple[float, int] | None = None
        """When it was first told of items, and how many were done then: some may have been before."""
        self._next_s = 0.0

    def show(self, done: int, total: int) -> None:
        """Draw it anew, unless the last one is fresh."""
        now_s = time.monotonic()
        if self._began is None:
            self._began, self._next_s = (now_s, done), now_s + PATIENCE_S
        began_s, first = self._began
        if now_s < self._next_s or done == first:
            return
        self._next_s = now_s + (LIVE_S if self._live else LINES_S)
        each_s = (now_s - began_s) / (done - first)
        left_s = each_s * (total - done)
        told = f"{done:,}/{total:,} · {show_rate(1 / max(each_s, 1e-9))} a second · {show_seconds(left_s)} left"
        if not self._live:
            say(told, stream=self._stream)
            return
        filled = round(WIDTH * done / max(1, total))
        self._draw(f"{'━' * filled}{' ' * (WIDTH - filled)} {told}")

    def close(self) -> None:
        """Take it away."""
        if self._width:
            self._draw("")
            self._draw("")

    def _draw(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            write(self._stream, f"\r{line:<{self._width}}")
        self._width = len(line)
