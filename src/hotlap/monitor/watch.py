"""`hotlap watch`: the GPUs and the running trainings, live in a terminal or a notebook, or once."""

from __future__ import annotations

import html
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any

from hotlap.core.console import in_notebook
from hotlap.core.errors import StoreError
from hotlap.core.terminal import clean, is_terminal, say
from hotlap.monitor.hardware import HostReader, open_gpus
from hotlap.monitor.screen import PLAIN, View, lines
from hotlap.monitor.trainings import OutsideReader, Training, find, named

GLANCE_S = 0.25
"""How long a single look takes: work is seen over a time only."""
RESIZED_S = 0.1
"""Between two looks whether the terminal has another size."""
MOST_ENDED = 3
"""Trainings that have ended which a single folder is shown with."""
NOTEBOOK_WIDTH = 100


class Watcher:
    """Looks at the machine and at what a user wants to watch: a folder, or a process."""

    def __init__(self, target: str | PathLike[str] | None = None) -> None:
        """A folder with runs (by default `runs`), the folder of a run, or the number of a process.

        Raises HotlapError where it is none of them.
        """
        self._target = named(target)
        self._is_run = target is not None and isinstance(self._target, Path)
        self._gpus, self._gpu_why = open_gpus()
        folder = self._target if isinstance(self._target, Path) else Path()
        self._host = HostReader(folder if folder.is_dir() else Path())
        self._outside: OutsideReader | None = None
        if isinstance(self._target, int) and not self._of_process(self._target):
            self._outside = OutsideReader(self._target)
        if self._is_run and not find(folder):
            raise StoreError(_why_nothing(folder))

    def look(self) -> View:
        """What is to be seen now."""
        gpus = [gpu.read() for gpu in self._gpus]
        note, process = "", None
        if self._outside is not None:
            process = self._outside.read(gpus)
            shown: list[Training] = []
            note = (
                "not a training that hotlap samples, so this is what can be seen from outside; "
                "loss, pace and plan need fit, or `hotlap run --out FOLDER`"
                if process is not None
                else f"process {self._target} has ended"
            )
        elif isinstance(self._target, int):
            shown = self._of_process(self._target)
        else:
            shown = self._of_folder(self._target)
            if not shown:
                note = f"no training runs in {self._target.resolve()}; --help says what can be watched"
        return View(
            at=time.time(), gpus=gpus, gpu_why=self._gpu_why, host=self._host.read(), trainings=shown, process=process,
            note=note,
        )  # fmt: skip

    def is_over(self, view: View) -> bool:
        """Whether what was named has ended, so that there is nothing left to watch."""
        if self._outside is not None:
            return view.process is None
        is_named = self._is_run or isinstance(self._target, int)
        return is_named and not any(training.is_open for training in view.trainings)

    def _of_folder(self, folder: Path) -> list[Training]:
        """The trainings that run; where none does, or one was named, the last that have ended too."""
        found = find(folder)
        running = [training for training in found if training.is_open]
        if self._is_run:
            return [*running, *found[len(running) :][:MOST_ENDED]]
        return running or found[:1]

    @staticmethod
    def _of_process(pid: int) -> list[Training]:
        return [training for training in find(Path("runs")) if training.state["pid"] == pid]


def watch(run: str | PathLike[str] | int | None = None, *, every_s: float = 1.0) -> None:
    """Show the GPUs and the running trainings until you interrupt it, or until the named training has ended.

    In a notebook it is a display that changes in place, in a terminal a live view, and elsewhere one look.

    Args:
        run: The folder of a run, a folder with runs (by default `runs`), or the number of a process.
        every_s: Seconds between two looks.

    Raises:
        HotlapError: There is no such folder or process.
    """
    watcher = Watcher(str(run) if isinstance(run, int) else run)
    if in_notebook():
        _in_notebook(watcher, every_s)
    elif is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb":
        in_terminal(watcher, every_s)
    else:
        say(*once(watcher), stream=sys.stdout)


def look_once(watcher: Watcher) -> View:
    """One look, after a moment over which work can be seen."""
    time.sleep(GLANCE_S)
    return watcher.look()


def once(watcher: Watcher) -> list[str]:
    """One look as lines, as wide as the terminal."""
    width = shutil.get_terminal_size((100, 24)).columns
    return [line.text for line in lines(look_once(watcher), width)]


def in_terminal(watcher: Watcher, every_s: float) -> None:
    """A live view that fills the terminal; it ends by Ctrl-C, or with what is watched, and leaves its last lines."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(file=sys.stdout)
    is_plain = not (sys.stdout.encoding or "").lower().startswith("utf")

    def drawn(view: View) -> Text:
        shown = lines(view, console.size.width, console.size.height)
        texts = [Text(line.text.translate(PLAIN) if is_plain else line.text, style=line.style) for line in shown]
        return Text("\n", no_wrap=True, overflow="crop").join(texts)

    def draw(view: View) -> None:
        live.update(drawn(view), refresh=True)

    live = Live(console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    seen = look_once(watcher)
    with suppress(OSError), suppress(KeyboardInterrupt), live:
        for view in _looks(watcher, every_s, seen, draw):
            seen = view
    texts = [line.text for line in lines(seen, console.size.width)]
    say(*(text.translate(PLAIN) if is_plain else text for text in texts), stream=sys.stdout)


def _looks(watcher: Watcher, every_s: float, view: View, draw: Callable[[View], object]) -> Iterator[View]:
    """A view now and then, until what is watched is over, each drawn, and again where the terminal has another size."""
    while True:
        draw(view)
        yield view
        if watcher.is_over(view):
            return
        size, until = shutil.get_terminal_size(), time.monotonic() + every_s
        while (left_s := until - time.monotonic()) > 0:
            time.sleep(min(RESIZED_S, left_s))
            if shutil.get_terminal_size() != size:
                size = shutil.get_terminal_size()
                draw(view)
        view = watcher.look()


def _in_notebook(watcher: Watcher, every_s: float) -> None:
    """A display that changes in place."""
    from IPython.display import display

    handle: Any = None

    def draw(view: View) -> None:
        nonlocal handle
        text = "\n".join(line.text for line in lines(view, NOTEBOOK_WIDTH))
        page = {"text/html": f"<pre>{html.escape(text)}</pre>", "text/plain": text}
        if handle is None:
            handle = display(page, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            handle.update(page, raw=True)

    with suppress(KeyboardInterrupt):
        for _ in _looks(watcher, every_s, look_once(watcher), draw):
            pass


def _why_nothing(folder: Path) -> str:
    if (folder / "plan.toml").is_file():
        return (
            f"{clean(str(folder))} does not say how its training stands: it was shorter than a second, ran with "
            "HOTLAP_SAMPLES=off, or is of `hotlap run` without --out; see `hotlap show`"
        )
    return f"no training in {clean(str(folder))} says how it stands; name the folder of a run, or start one"
