"""What a training leaves behind it as it goes: its evaluations, the best of them, and the time it took."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from hotlap.core.ledger import Ledger
from hotlap.fitting.best import Best
from hotlap.fitting.forged import records
from hotlap.fitting.task import Task


@dataclass(kw_only=True)
class Clock:
    """The seconds of one training, those in earlier processes included. `now` is a `time.perf_counter()`."""

    start_s: float
    """When this process began with it."""
    before_s: float = 0.0
    """What earlier processes took in all."""
    train_before_s: float = 0.0
    """What earlier processes spent on steps."""
    loop_s: float | None = None
    """When the first step of this process was due; None before."""
    aside_s: float = 0.0
    """What this process spent on evaluations since."""

    def elapsed(self, now: float) -> float:
        """Seconds from start to now, all included."""
        return self.before_s + now - self.start_s

    def trained(self, now: float) -> float:
        """Seconds spent on steps until now."""
        begun = now if self.loop_s is None else self.loop_s
        return self.train_before_s + now - begun - self.aside_s


class Trail:
    """What the loop carries from step to step beside the rig; a checkpoint keeps it."""

    def __init__(self, task: Task, *, first: str | None, from_checkpoint: str | None = None) -> None:
        self.history: list[dict[str, Any]] = []
        """One record an evaluation or epoch."""
        self.best = Best(task.job, task.rig)
        self.clock = Clock(start_s=task.start_s)
        self.first = first
        """What `first_key` said before the first step of all; None where nobody knows."""
        self.from_checkpoint = from_checkpoint
        """The checkpoint that this process went on from; None where it began at step 0."""

    def export(self, ledger: Ledger) -> dict[str, Any]:
        """What a checkpoint keeps of it, and of the ledger."""
        now = time.perf_counter()
        return {
            "history": self.history,
            "best": self.best.export(),
            "ledger": ledger.to_lines(),
            "elapsed_s": self.clock.elapsed(now),
            "train_s": self.clock.trained(now),
        }

    def put_back(self, stored: dict[str, Any]) -> Ledger:
        """Go on from what a checkpoint kept; the ledger it had. Raises ValueError and the like where it is forged."""
        self.history = records(*stored["history"])
        self.best.put_back(stored["best"])
        self.clock.before_s, self.clock.train_before_s = float(stored["elapsed_s"]), float(stored["train_s"])
        return Ledger.from_lines(stored["ledger"])
