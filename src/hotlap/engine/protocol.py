"""What moves and the tuner know of a training: little enough that a Rig and somebody's own script can both be it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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
    """Where in the data it stands."""

    @property
    def modules(self) -> list[nn.Module]:
        """All that is trained."""

    @property
    def plan(self) -> Plan:
        """The plan in force."""

    @property
    def optimizer(self) -> Optimizer:
        """What makes the updates; the first one, where there are several."""

    @property
    def source(self) -> Source:
        """Where the samples come from."""

    @property
    def steps(self) -> int:
        """Updates made so far."""

    @property
    def skipped(self) -> int:
        """Updates that were left out, since gradients overflowed; waits for the device."""

    @property
    def epoch_windows(self) -> int:
        """Windows in the current epoch."""

    @property
    def epoch_updates(self) -> int:
        """Updates in an epoch like the current one, about: a script may make one of several windows."""

    @property
    def most_replay_steps(self) -> int:
        """Updates that a plan may make at once."""

    @property
    def shapes(self) -> int:
        """Shapes that whole batches have, about: each is recorded by itself."""

    @property
    def warmup_steps(self) -> int:
        """Windows so far under the plan in force that were not at its own pace."""

    def supports(self, plan: Plan) -> str | None:
        """Why the plan cannot be obeyed here, or None where it can."""

    def why_not_spread(self) -> str | None:
        """Why samples may be others where processes fetch them that the user did not ask for; None where not."""

    def obeyed(self, plan: Plan) -> Plan:
        """The plan as the data allows it: with the user's own feed where the data changes."""

    def use(self, plan: Plan, *, why: str = "", outcome: str = "chosen") -> None:
        """Obey `plan` from the next step on."""

    def keep_plans(self) -> None:
        """From now on what belongs to a plan stays when another takes its place, until `tidy`."""

    def tidy(self) -> None:
        """Let go of all that belongs to other plans than the one in force."""

    def holding_s(self, feed: Feed) -> float:
        """About how many seconds it would take to hold all of the data as a feed needs it; 0 where it is there."""

    def learn(self) -> int | None:
        """Keep samples as they come by, so that holding them takes less.

        Gives the updates until more of them are there; None where nothing is spared.
        """

    def wait(self) -> None:
        """Wait for the device."""

    def write_down(
        self,
        what: str,
        outcome: str,
        why: str = "",
        *,
        figures: Mapping[str, float] | None = None,
        cost_s: float = 0.0,
    ) -> None:
        """Add a line to the ledger, under the plan in force."""
