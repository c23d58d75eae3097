"""Metrics of a training to TensorBoard, trackio or Weights & Biases, by a word. A log that fails stops nothing."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hotlap.core.errors import JobError, MachineError, did_you_mean, first_line, shown
from hotlap.core.terminal import clean

PROJECT = "hotlap"
"""What trackio and Weights & Biases call the trainings of hotlap, unless their own variables name a project."""
ASIDE = ("step", "epoch", "round")
"""Figures of a record that are its place."""


class MetricLog(Protocol):
    """A place for metrics, made of the folder of a run and the settings that it is known by."""

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Take in the figures of a step."""

    def close(self) -> None:
        """Finish."""


class TensorBoard:
    """Event files in `tensorboard/` of the run: `tensorboard --logdir runs`."""

    needs = ("tensorboard", "pip install hotlap[track]")

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))
        self._writer.add_text("settings", "\n".join(f"    {name}: {value}" for name, value in settings.items()))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Write scalars."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=step)
        self._writer.flush()  # so that a kill loses nothing

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Trackio:
    """A run of trackio, which keeps it on this machine: `trackio show`."""

    needs = ("trackio", "pip install hotlap[track]")

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        self._trackio.init(project=project, name=folder.name, config=dict(settings))

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log them."""
        self._trackio.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


class WeightsAndBiases:
    """A run of Weights & Biases in the folder of the run, offline unless WANDB_MODE says otherwise: `wandb sync`."""

    needs = ("wandb", "pip install wandb")

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            mode=os.environ.get("WANDB_MODE") or "offline",
            settings={"console": "off"},  # it would stand between the training and its terminal
        )

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Log them."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


LOGS: Mapping[str, type[Any]] = {"tensorboard": TensorBoard, "trackio": Trackio, "wandb": WeightsAndBiases}
"""The logs by the words that ask for them."""
Names = str | Sequence[str] | None
"""What a user asks for: a word, several with commas between them, or a list."""


def logs_named(asked: Names) -> tuple[str, ...]:
    """The names in `"tensorboard"`, `"tensorboard,wandb"` or a list of them.

    Raises JobError for one that is unknown, and MachineError where its library is not installed.
    """
    if not asked:
        return ()
    words = asked.split(",") if isinstance(asked, str) else [*asked]
    names = tuple(dict.fromkeys(word.strip().lower() if isinstance(word, str) else word for word in words))
    wrong = [
        f"unknown log {shown(name)}{did_you_mean(name, LOGS)}"
        for name in names
        if not isinstance(name, str) or name not in LOGS
    ]
    if wrong:
        raise JobError(wrong)
    for name in names:
        module, install = LOGS[name].needs
        if importlib.util.find_spec(module) is None:
            raise MachineError(f"log={name} needs {module}, which is not installed: {install}")
    return names


class MetricLogs:
    """The logs of one training. hotlap warns once of one that fails, and then leaves it alone."""

    def __init__(
        self, names: Sequence[str], folder: Path, settings: Mapping[str, Any], warn: Callable[[str], object]
    ) -> None:
        self._warn = warn
        self._open: dict[str, MetricLog] = {}
        for name in names:
            self._guarded(name, lambda name=name: self._open.update({name: LOGS[name](folder, settings)}))  # type: ignore[misc]

    def add(self, record: Mapping[str, Any]) -> None:
        """Take in the record of an evaluation."""
        figures = {
            clean(name): float(value)
            for name, value in record.items()
            if name not in ASIDE and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for name, each in [*self._open.items()]:
            self._guarded(name, lambda each=each: each.add(record["step"], figures))  # type: ignore[misc]

    def close(self) -> None:
        """Finish all of them."""
        for name, each in [*self._open.items()]:
            self._guarded(name, each.close)
        self._open.clear()

    def _guarded(self, name: str, work: Callable[[], object]) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr or io.StringIO()):  # results alone go to stdout
                work()
        except (Exception, SystemExit) as error:  # some end the process where a login is missing
            self._open.pop(name, None)
            self._warn(f"metrics no longer go to {name}: {first_line(error)}; training goes on")
