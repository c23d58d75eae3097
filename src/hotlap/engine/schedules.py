"""Learning-rate schedules: made when the optimizer is known, moved once per real update, epoch or evaluation."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hotlap.core.errors import JobError, TrainingError


class Schedule:
    """A torch schedule and the occasion on which it moves."""

    def __init__(self, scheduler: Any, per: str = "update") -> None:
        self.scheduler = scheduler
        self.waits_for_plateau = isinstance(scheduler, ReduceLROnPlateau)
        self.moves_per_update = scheduler is not None and per == "update" and not self.waits_for_plateau
        self._moves_per_epoch = scheduler is not None and per == "epoch" and not self.waits_for_plateau

    def move(self) -> None:
        """One step of the schedule."""
        try:
            self.scheduler.step()
        except ValueError as error:
            raise TrainingError(
                f"the schedule {type(self.scheduler).__name__} cannot go on: {error}; make it for as many updates "
                "as there are: schedule=lambda optimizer, updates: …"
            ) from error

    def epoch_ended(self) -> None:
        """Move, where the schedule moves by epochs."""
        if self._moves_per_epoch:
            self.move()

    def evaluated(self, score: float) -> None:
        """Move, where the schedule waits for a plateau."""
        if self.waits_for_plateau:
            self.scheduler.step(score)


def make_schedule(wanted: Any, optimizer: Optimizer, length: int | None, per: str = "update") -> Schedule:
    """The schedule of a training; a function gets the optimizer, and `length` if it takes two.

    `length` is the number of times it will move: updates or epochs.
    """
    if wanted is None or isinstance(wanted, (LRScheduler, ReduceLROnPlateau)):
        return Schedule(wanted, per)
    two = takes_two(wanted)
    if two and length is None:
        raise JobError([f"schedule takes (optimizer, {per}s), and how many {per}s there will be is not known"])
    made = wanted(optimizer, length) if two else wanted(optimizer)
    if not hasattr(made, "step") or not hasattr(made, "state_dict"):
        raise JobError([f"schedule returned {type(made).__name__}, which is no learning-rate scheduler"])
    return Schedule(made, per)


def takes_two(function: Any) -> bool:
    """Whether a function cannot do without a second positional argument."""
    try:
        required = [
            p
            for p in inspect.signature(function).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        ]
    except ValueError:
        return False
    return len(required) >= 2
