"""What the lap clock knows of a training: little enough that a Rig and somebody's own script can both be it."""

from __future__ import annotations

from typing import Protocol

from hotlap.core.plan import Plan
from hotlap.engine.route import Place


class Driven(Protocol):
    """A training that obeys plans and makes steps."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""

    @property
    def steps(self) -> int:
        """Updates made so far."""

    @property
    def place(self) -> Place:
        """Where in the data it stands."""

    @property
    def epoch_windows(self) -> int:
        """Windows in the current epoch."""

    @property
    def firsts(self) -> int:
        """Windows so far under the plan in force that were not at its own pace."""

    def wait(self) -> None:
        """Wait for the device."""
