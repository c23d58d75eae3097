"""The one console of hotlap: a live bar with lines above it in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TextIO, cast

from hotlap.core.errors import MachineError, did_you_mean
from hotlap.core.terminal import clean, is_terminal, say, wrapped, write

Describe = Callable[[int | None], str]
"""Gives the description beside a bar, in so many columns, or in any number of them."""


class Console(Protocol):
    """Shows lines that stay, and a bar below them, to the user."""

    every_s: float
    """Seconds between two states of the bar."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def show(self, done: float, total: float | None, describe: Describe) -> None:
        """Show how much of the work is done, and its description."""

    def close(self) -> None:
        """Finish what is live."""


def open_console(wanted: bool = True, stream: TextIO | None = None) -> Console:
    """The console for stderr, or for the cell of a notebook; HOTLAP_PROGRESS=off|lines overrides it."""
    anywhere = stream is None
    stream = stream or sys.stderr
    asked = os.environ.get("HOTLAP_PROGRESS", "").strip().lower()
    if asked not in ("", "off", "lines"):
        raise MachineError(f"HOTLAP_PROGRESS={asked[:40]!r} is not known{did_you_mean(asked, ('off', 'lines'))}")
    # Without a console, as under pythonw, there is no stderr.
    if not wanted or asked == "off" or stream is None:
        return SilentConsole()
    if asked != "lines":
        if anywhere and in_notebook():
            return NotebookConsole()
        if is_terminal(stream) and os.environ.get("TERM") != "dumb":
            return TerminalConsole(stream)
    return LineConsole(stream)


class SilentConsole:
    """Shows nothing."""

    every_s = float("inf")

    def say(self, line: str) -> None:
        """Nothing."""

    def show(self, done: float, total: float | None, describe: Describe) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LineConsole:
    """Plain lines for logs: one at the start, then seldom enough not to fill them."""

    every_s = 2.0

    def __init__(self, stream: TextIO, seldom_s: float = 15.0) -> None:
        self._stream = stream
        self._seldom_s = seldom_s
        self._next_s = 0.0

    def say(self, line: str) -> None:
        """Print the line."""
        say(line, stream=self._stream)

    def show(self, done: float, total: float | None, describe: Describe) -> None:
        """Print the reading, unless the last one is fresh."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._seldom_s
            self.say(describe(None))

    def close(self) -> None:
        """Nothing is live."""


class TerminalConsole:
    """A bar at the bottom of the terminal, lines above it."""

    every_s = 0.25

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskID, TextColumn

        class Unending(Console):
            def on_broken_pipe(self) -> None:
                """Not the end of the process, as rich would have it."""
                raise BrokenPipeError

        console = Unending(file=cast(TextIO, _Unbuffered(stream)))
        self._bar_width = min(24, console.width // 6)
        self._bar = Progress(
            BarColumn(bar_width=self._bar_width),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
            # What the user prints goes above the bar, but only where both are the same terminal:
            # results sent to a file belong there and not on stderr.
            redirect_stdout=sys.stdout is not None and is_terminal(sys.stdout),
            # Refreshed by `show` alone: a thread that redraws takes time from small steps.
            auto_refresh=False,
        )
        self._task: TaskID = self._bar.add_task("starting …", total=None)
        self._live = False

    def say(self, line: str) -> None:
        """Print the line above the bar."""
        with self._while_it_shows():
            for part in wrapped(clean(line), self._bar.console.width):
                self._bar.console.print(part, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def show(self, done: float, total: float | None, describe: Describe) -> None:
        """Move the bar."""
        with self._while_it_shows():
            if not self._live:
                self._bar.start()
                self._live = True
            line = describe(self._bar.console.width - self._bar_width - 2)
            self._bar.update(self._task, completed=done, total=total, description=line)
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away."""
        if self._live:
            self._live = False
            with self._while_it_shows():
                self._bar.stop()

    @contextlib.contextmanager
    def _while_it_shows(self) -> Iterator[None]:
        """A terminal that is gone, as after a hang-up, is shown nothing more; the training goes on."""
        try:
            yield
        except (OSError, ValueError):
            self._bar.console.quiet = True


class _Unbuffered:
    """A stream of which nothing waits to be written when the process ends."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write it at once."""
        write(self._stream, text)
        return len(text)


class NotebookConsole:
    """A bar in the output cell, changed in place; needs IPython, which every notebook has."""

    every_s = 0.5
    block = 50
    """Lines in one output."""

    def __init__(self) -> None:
        from IPython.display import display

        self._display: Any = display
        self._handle: Any = None
        self._lines: list[str] = []
        self._bar = ""

    def say(self, line: str) -> None:
        """Keep the line above the bar."""
        if len(self._lines) >= self.block:
            # Every change sends the whole output again, so a full one is left as it is and a new one begun.
            bar, self._bar = self._bar, ""
            self._draw()
            self._handle, self._lines, self._bar = None, [], bar
        self._lines.append(clean(line))
        self._draw()

    def show(self, done: float, total: float | None, describe: Describe) -> None:
        """Change the bar."""
        part = done / total if total else 0.0
        bar = f'<progress value="{part:.4f}" max="1" style="width:16em"></progress> '
        self._bar = bar + html.escape(describe(None))
        self._draw()

    def close(self) -> None:
        """Take the bar away and leave the lines."""
        if self._bar:
            self._bar = ""
            self._draw()

    def _draw(self) -> None:
        text = "".join(line + "\n" for line in self._lines)
        page = {"text/html": f"<pre>{html.escape(text)}</pre>{self._bar}", "text/plain": text}
        if self._handle is None:
            self._handle = self._display(page, raw=True, display_id=True)
        else:
            self._handle.update(page, raw=True)


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = cast(Any, get_ipython)()
    return shell is not None and "IPKernelApp" in shell.config
