"""A Run is what a training left: history, score, plan, ledger, and its folder."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.table import as_json, table
from hotlap.core.terminal import clean
from hotlap.core.units import show_bytes, show_rate, show_seconds
from hotlap.engine.rig import NO_SAMPLES
from hotlap.report import write_report
from hotlap.store.files import finite
from hotlap.store.run_folder import Artefact, RunFolder


@dataclass(frozen=True, kw_only=True)
class FinishedRun(ABC):
    """A finished training, of a network or of trees."""

    ledger: Ledger
    history: list[dict[str, Any]]
    """One record an evaluation, epoch or round."""
    best: dict[str, Any]
    """The record of what the model keeps."""
    train_s: float
    """Seconds spent on training."""
    total_s: float
    """Seconds from start to end, all included."""
    stopped: str
    """Why it ended."""
    left_out: tuple[str, ...] = ()
    """What was asked for and not done, since `finish_in` left no time for it."""
    problems: tuple[str, ...] = ()
    """What went wrong without ending it, such as a file that could not be written."""
    files: RunFolder
    """The files of the run's folder, to be read."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.files.path

    @property
    def path(self) -> Path:
        """The run's folder, as `folder`."""
        return self.folder

    def artefacts(self) -> list[Artefact]:
        """The files it left, with sizes."""
        return self.files.artefacts()

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report of this run and give its path: `report.html` in its folder, or another .html, .md or .json.

        Raises StoreError for a file that is there and that hotlap did not write.
        """
        return write_report(self.folder, path)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON holds them, null for numbers that are none."""
        figures: dict[str, Any] = finite(
            {
                "run": str(self.path),
                "stopped": self.stopped,
                **self._counts(),
                "train_s": self.train_s,
                "total_s": self.total_s,
                "left_out": list(self.left_out),
                "problems": list(self.problems),
                "best": self.best,
                "tuning": as_json(self.ledger),
                "artefacts": [vars(artefact) for artefact in self.artefacts()],
            }
        )
        return figures

    def summary(self) -> str:
        """What was done and how it scored, for people."""
        tuning, score = table(self.ledger), self._score()
        lines = [
            *([*tuning, ""] if tuning else []),
            *self._trained(),
            f"ended     {self.stopped}, {show_seconds(self.total_s)} in all",
            *(f"left out  {line}" for line in self.left_out),
            *([f"score     {score}"] if score else []),
            *(f"problem   {problem}" for problem in self.problems),
            f"run       {self.path}",
        ]
        lines += [f"          {show_bytes(a.bytes):>9}  {a.name:<18} {a.what}" for a in self.artefacts()]
        return "\n".join(map(clean, lines))

    @abstractmethod
    def _counts(self) -> dict[str, Any]:
        """The plan, and how much was trained, as JSON holds them."""

    @abstractmethod
    def _trained(self) -> list[str]:
        """The plan, and how much was trained, for people."""

    @abstractmethod
    def _score(self) -> str:
        """The score of the model; empty where it has none."""

    def _repr_html_(self) -> str:
        """The summary, as a notebook shows it."""
        return f"<pre>{html.escape(self.summary())}</pre>"


@dataclass(frozen=True, kw_only=True)
class Run(FinishedRun):
    """A finished training of a network.

    Records of `history` have step, epoch, train_loss, valid_loss, metrics, lr and elapsed_s.
    """

    model: nn.Module
    """The trained model: the best weights where early stopping was asked for, else the last."""
    plan: Plan
    """The plan in force at the end."""
    steps: int
    """Windows gone through."""
    updates: int
    """Real updates of the weights."""
    samples: int
    """Samples seen."""
    saving_s: float
    """Seconds that training stood still for checkpoints."""

    def _counts(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "updates": self.updates,
            "samples": self.samples,
            "saving_s": self.saving_s,
            "plan": self.plan.to_dict(),
        }

    def _trained(self) -> list[str]:
        per_step = self.train_s / self.steps if self.steps else 0.0
        rate = self.samples / self.train_s if self.train_s else 0.0
        empty = sum(entry.what == NO_SAMPLES for entry in self.ledger)
        skipped = self.steps - self.updates - empty
        return [
            f"plan      {self.plan}",
            f"trained   {self.updates:,} updates, {self.samples:,} samples in {show_seconds(self.train_s)}: "
            f"{show_seconds(per_step)}/step, {show_rate(rate)} samples/s",
            *([f"skipped   {skipped:,} updates whose gradients were not finite"] if skipped else []),
            *([f"skipped   {empty:,} updates whose samples were all left out"] if empty else []),
        ]

    def _score(self) -> str:
        passed = ("step", "epoch", "lr", "elapsed_s", "samples")
        judged = {k: v for k, v in self.best.items() if k not in passed and v is not None}
        figures = " · ".join(f"{name} {value:.4g}" for name, value in judged.items())
        return f"{figures} (epoch {self.best['epoch']}, step {self.best['step']:,})"
