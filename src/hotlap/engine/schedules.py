"""Learning-rate schedules: made when the optimizer is known, moved once per real update, epoch or evaluation."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hotlap.core.errors import JobError


class Schedule:
    """A torch schedule and the occasion on which it moves."""

    def __init__(self, scheduler: Any, per: str = "update") -> None:
        self.scheduler = scheduler
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.moves_per_update = scheduler is not None and per == "update" and not self._plateau
        self._moves_per_epoch = scheduler is not None and per == "epoch" and not self._plateau

    def epoch_ended(self) -> None:
        """Move, where the schedule moves by epochs."""
        if self._moves_per_epoch:
            self.scheduler.step()

    def evaluated(self, score: float) -> None:
        """Move, where the schedule waits for a plateau."""
        if self._plateau:
            self.scheduler.step(score)


def make_schedule(wanted: Any, optimizer: Optimizer, updates: int | None, per: str = "update") -> Schedule:
    """The schedule of a job; a function gets the optimizer, and the number of updates if it takes two."""
    if wanted is None or isinstance(wanted, (LRScheduler, ReduceLROnPlateau)):
        return Schedule(wanted, per)
    made = wanted(optimizer, updates) if _takes_two(wanted) else wanted(optimizer)
    if not hasattr(made, "step") or not hasattr(made, "state_dict"):
        raise JobError([f"schedule returned {type(made).__name__}, which is no learning-rate scheduler"])
    return Schedule(made, per)


def _takes_two(function: Any) -> bool:
    try:
        required = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
    except ValueError:
        return False
    return len(required) >= 2
