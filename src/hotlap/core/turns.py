"""Turns: several trainings share one process, and one of them computes at a time."""

from __future__ import annotations

from contextvars import ContextVar
from signal import Signals
from typing import Protocol


class Turn(Protocol):
    """The place of one training among others in its process."""

    stop: Signals | None
    """The signal to stop by, once a stop is asked for."""
    is_waiting: bool
    """Whether others compute."""

    def pass_on(self, *, until_done: bool = False) -> None:
        """Let others compute if this training has had its turn; call it between two steps.

        With `until_done`, they compute until the device has done what this training has queued.
        """


turn: ContextVar[Turn | None] = ContextVar("turn", default=None)
"""The turn of the training that this thread runs; None for a training that has the process to itself."""
