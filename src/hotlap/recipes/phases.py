"""What the time of a recipe's run went to, and what the recipe said of its data: for the report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from hotlap.core.terminal import Say, clean

MOST_LINES, LONGEST_LINE = 60, 300


class Phases:
    """Seconds of a run by phase, in their order."""

    def __init__(self, start_s: float = 0.0) -> None:
        """`start_s` is what the start of the process took."""
        self.seconds: dict[str, float] = {"start": start_s} if start_s else {}
        self.said: list[str] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count what happens inside as this phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    def listening(self, say: Say) -> Say:
        """Says the same, and keeps the first lines."""

        def said(line: str) -> None:
            if len(self.said) < MOST_LINES:
                self.said.append(clean(line[:LONGEST_LINE]))
            say(line)

        return said
