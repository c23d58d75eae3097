"""The progress of a training in words: its settings, its pace, and its figures."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotlap import __version__
from hotlap.core.console import Console, SilentConsole
from hotlap.core.job import Job
from hotlap.core.terminal import logger
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
        self.total = total_steps
        """Steps in all, where that is known."""
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
        left = None if self.total is None else max(0, self.total - step)
        known = left is not None and self._steps_per_s > 0
        return Reading(
            step=step,
            total_steps=self.total,
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


class Voice:
    """Speaks to the user through a console, and keeps the problems that it showed."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.problems: list[str] = []
        """What went wrong without ending the training."""

    def say(self, line: str) -> None:
        """Show a line that stays."""
        self.console.say(line)

    def warn(self, problem: str, details: Sequence[str] = ()) -> None:
        """Show a problem and keep it for the Run; without a console it goes to the log, which shows warnings.

        `details` are lines to show below it.
        """
        self.problems.append(problem)
        self.mention(problem, details)

    def mention(self, problem: str, details: Sequence[str] = ()) -> None:
        """Show a problem that is none of the training's own, in the same places."""
        if isinstance(self.console, SilentConsole):
            for line in (problem, *details):
                log.warning("%s", line)
        for line in (f"warning: {problem}", *details):
            self.say(line)


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
        f"{job.epochs:,} epoch{'s' if job.epochs > 1 else ''} = {total:,} updates"
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
