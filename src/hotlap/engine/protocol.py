"""What moves and the tuner know of a training. A Rig and a user's script both provide it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Feed, Plan
from hotlap.data.sources import Source
from hotlap.engine.cursor import Place


class TunableTraining(Protocol):
    """A training that obeys plans and makes steps."""

    device: torch.device
    ledger: Ledger
    place: Place
    """Where in the data the training is."""

    @property
    def modules(self) -> list[nn.Module]:
        """The modules that the training updates."""

    @property
    def plan(self) -> Plan:
        """The current plan."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; the first one if there are several."""

    @property
    def source(self) -> Source:
        """Where the samples come from."""

    @property
    def steps(self) -> int:
        """Updates made so far."""

    @property
    def skipped(self) -> int:
        """Updates that were skipped because gradients overflowed. Waits for the device."""
        return 0

    @property
    def epoch_windows(self) -> int:
        """Windows in the current epoch."""

    @property
    def epoch_updates(self) -> int:
        """Updates in an epoch like the current one, about. A script may make one update of several windows."""

    @property
    def most_replay_steps(self) -> int:
        """The largest number of updates in one replay."""
        return 1

    @property
    def shapes(self) -> int:
        """Number of shapes that whole batches have, about. Each shape is recorded separately."""
        return 1

    @property
    def warmup_steps(self) -> int:
        """Windows under the current plan so far that were warm-up: still to be recorded, compiled or set up."""

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be obeyed here, or None where it can."""

    def why_no_workers(self) -> str | None:
        """Why worker processes that the user did not ask for might change samples; None if they cannot."""
        return None

    def allowed_plan(self, plan: Plan) -> Plan:
        """The plan that the data allows: with the user's own feed if the data changes."""

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Use `plan` from the next step on."""

    def keep_plans(self) -> None:
        """Keep what belongs to each plan when another replaces it, until `release_other_plans`."""
        return

    def release_other_plans(self) -> None:
        """Release what belongs to plans other than the current one."""

    def holding_s(self, feed: Feed) -> float:
        """Seconds to hold all data as a feed needs it, about; 0 if the data is held on the device already."""

    def keep_samples(self, epochs_left: float) -> int | None:
        """Keep samples as the training fetches them, or fetch them in the background, to hold them faster later.

        Returns the updates until more of them are kept; None if that saves nothing in the epochs that are left.
        """

    def wait(self) -> None:
        """Wait for the device."""

    def write_down(self, what: str, outcome: str, why: str = "", **fields: Any) -> None:
        """Add an entry to the ledger under the current plan; `fields` are other fields of `Entry`."""
