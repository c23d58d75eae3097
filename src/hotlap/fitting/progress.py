"""How progress is shown: a live bar in a terminal or a notebook, plain lines elsewhere; banner and figures in words."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO, cast

import torch

from hotlap import __version__
from hotlap.core.errors import MachineError, did_you_mean
from hotlap.core.job import Job
from hotlap.core.terminal import clean, is_terminal, logger, say, wrapped, write
from hotlap.core.units import show_rate, show_seconds
from hotlap.data.dataset import OrderedDataset
from hotlap.engine.rig import Rig

log = logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where a training stands at one moment."""

    step: int
    total_steps: int | None
    epoch: int
    loss: float
    steps_per_s: float
    samples_per_s: float
    elapsed_s: float
    eta_s: float | None


class Pace:
    """Turns counts of steps and samples into rates; the clock stands still during `pause`."""

    def __init__(self, total_steps: int | None, step: int = 0, samples: int = 0) -> None:
        self._total = total_steps
        self._start_s = self._last_s = time.perf_counter()
        self._last_step, self._last_samples = step, samples
        self._steps_per_s = self._samples_per_s = 0.0
        self._paused_s = 0.0

    def read(self, *, step: int, samples: int, epoch: int, loss: float) -> Reading:
        """Rates since the last reading; call it after the device has caught up."""
        now = time.perf_counter()
        spent = now - self._last_s - self._paused_s
        if step > self._last_step and spent > 0:
            self._steps_per_s = (step - self._last_step) / spent
            self._samples_per_s = (samples - self._last_samples) / spent
            self._last_s, self._last_step, self._last_samples, self._paused_s = now, step, samples, 0.0
        left = None if self._total is None else max(0, self._total - step)
        known = left is not None and self._steps_per_s > 0
        return Reading(
            step=step,
            total_steps=self._total,
            epoch=epoch,
            loss=loss,
            steps_per_s=self._steps_per_s,
            samples_per_s=self._samples_per_s,
            elapsed_s=now - self._start_s,
            eta_s=left / self._steps_per_s if known and left is not None else None,
        )

    def pause(self, seconds: float) -> None:
        """Leave so many seconds (an evaluation, a save) out of the rates."""
        self._paused_s += seconds


class View(Protocol):
    """Shows a training to its user."""

    every_s: float
    """Seconds between two readings; each waits for the device once."""

    def say(self, line: str) -> None:
        """Show a line that stays."""

    def show(self, reading: Reading) -> None:
        """Show where the training stands."""

    def close(self) -> None:
        """Finish what is live."""


def open_view(wanted: bool = True, stream: TextIO | None = None) -> View:
    """The view that fits where the output goes (stderr, or the cell); HOTLAP_PROGRESS=off|lines overrides it."""
    anywhere = stream is None
    stream = stream or sys.stderr
    asked = os.environ.get("HOTLAP_PROGRESS", "").strip().lower()
    if asked not in ("", "off", "lines"):
        raise MachineError(f"HOTLAP_PROGRESS={asked[:40]!r} is not known{did_you_mean(asked, ('off', 'lines'))}")
    # Without a console, as under pythonw, there is no stderr.
    if not wanted or asked == "off" or stream is None:
        return Silence()
    if asked != "lines":
        if anywhere and _in_notebook():
            return NotebookView()
        if is_terminal(stream) and os.environ.get("TERM") != "dumb":
            return TerminalView(stream)
    return LineView(stream)


def status(reading: Reading, width: int | None = None) -> str:
    """A reading in one line; where it has to fit `width`, what matters least is left out first."""
    place = f"{reading.step:,}/{reading.total_steps:,}" if reading.total_steps else f"{reading.step:,}"
    parts = [
        f"step {place}",
        f"epoch {reading.epoch + 1}",
        f"loss {reading.loss:.4g}",
        f"{show_rate(reading.steps_per_s)} steps/s",
        f"{show_rate(reading.samples_per_s)} samples/s",
    ]
    if reading.eta_s is not None:
        parts.append(f"{show_seconds(reading.eta_s)} left")
    for least in ("samples/s", "epoch", "steps/s", "loss"):
        if width is None or len(" · ".join(parts)) <= width:
            break
        parts = [part for part in parts if least not in part]
    return " · ".join(parts)


class Silence:
    """Shows nothing."""

    every_s = float("inf")

    def say(self, line: str) -> None:
        """Nothing."""

    def show(self, reading: Reading) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class LineView:
    """Plain lines for logs: one at the start, then seldom enough not to fill them."""

    every_s = 2.0

    def __init__(self, stream: TextIO, seldom_s: float = 15.0) -> None:
        self._stream = stream
        self._seldom_s = seldom_s
        self._next_s = 0.0

    def say(self, line: str) -> None:
        """Print the line."""
        say(line, stream=self._stream)

    def show(self, reading: Reading) -> None:
        """Print the reading, unless the last one is fresh."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._seldom_s
            self.say(status(reading))

    def close(self) -> None:
        """Nothing is live."""


class TerminalView:
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

    def show(self, reading: Reading) -> None:
        """Move the bar."""
        with self._while_it_shows():
            if not self._live:
                self._live = True
                self._bar.start()
            line = status(reading, self._bar.console.width - self._bar_width - 2)
            self._bar.update(self._task, completed=reading.step, total=reading.total_steps, description=line)
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


class NotebookView:
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

    def show(self, reading: Reading) -> None:
        """Change the bar."""
        done = reading.step / reading.total_steps if reading.total_steps else 0.0
        bar = f'<progress value="{done:.4f}" max="1" style="width:16em"></progress> '
        self._bar = bar + html.escape(status(reading))
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


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from IPython import get_ipython

    shell = cast(Any, get_ipython)()
    return shell is not None and "IPKernelApp" in shell.config


class Voice:
    """Speaks to the user through a view, and keeps the problems that it showed."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.problems: list[str] = []
        """What went wrong without ending the training."""

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.view.say(line)

    def warn(self, problem: str) -> None:
        """Show a problem and keep it for the Run; without a view it goes to the log, which shows warnings."""
        self.problems.append(problem)
        if isinstance(self.view, Silence):
            log.warning("%s", problem)
        self.say(f"warning: {problem}")


def banner(job: Job, rig: Rig, dataset: OrderedDataset, total: int, folder: Path) -> list[str]:
    """The settings in force, before the first step."""
    trained = sum(p.numel() for p in rig.model.parameters() if p.requires_grad)
    device = (
        torch.cuda.get_device_name(rig.device)
        if rig.device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    batch = f"batch {dataset.batch_size}"
    if job.accumulate > 1:
        batch += f" × {job.accumulate} accumulated = {dataset.batch_size * job.accumulate} per update"
    length = (
        f"{job.epochs} epoch{'s' if job.epochs > 1 else ''} = {total:,} updates"
        if job.epochs is not None
        else f"{total:,} updates"
    )
    return [
        f"hotlap {__version__} on {device}, torch {torch.__version__}",
        f"model  {type(job.model).__name__}, {trained:,} parameters in training",
        f"data   {len(dataset.source):,} samples, {batch}, {length}",
        *([f"       {dataset.padding.line}"] if dataset.padding is not None else []),
        f"plan   {rig.plan}",
        f"run    {folder}",
    ]


def format_record(record: dict[str, Any], *, by_step: bool = False) -> str:
    """An evaluation in one line: what changes, and nothing that the run folder holds anyway."""
    names = {"train_loss": "train", "valid_loss": "valid"}
    aside = ("step", "epoch", "samples", "elapsed_s", "lr")
    rest = [f"{names.get(name, name)} {value:.4g}" for name, value in record.items() if name not in aside]
    return " · ".join([f"step {record['step']:,}" if by_step else f"epoch {record['epoch']}", *rest])
