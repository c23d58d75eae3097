"""The check after the first epoch: whether it went as its first steps promised, and what it would be worth to mend."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotlap.core.units import show_bytes, show_seconds

LONGER = 1.25
"""How many times as long as expected an epoch has to take to be called longer."""
LEAST_S = 2.0
"""What it has to take longer by at least, and what an epoch takes that is checked at all."""
GROWN = 1.1
"""How many times as much memory as after the first steps counts as grown."""


@dataclass(frozen=True, kw_only=True)
class FirstEpoch:
    """What the first epoch was expected to be, and what it was."""

    expected_s: float
    """What its first steps promised for all of its steps."""
    steps_s: float
    """What its steps took."""
    feeding_s: float = 0.0
    """Of that, how long the host waited for batches."""
    tuning_s: float = 0.0
    """Of that, what tuning cost."""
    evaluation_s: float = 0.0
    """What the evaluation after it took."""
    epochs_left: float = 0.0
    first_loss: float = math.nan
    last_loss: float = math.nan
    first_bytes: int | None = None
    last_bytes: int | None = None
    """Memory that the training held after its first steps, and at the end of the epoch."""

    def lines(self) -> list[str]:
        """What was expected and seen, and then what looks wrong, a line each."""
        seen = f"first epoch: {show_seconds(self.steps_s)}, expected {show_seconds(self.expected_s)}"
        tuned = f", of which tuning cost {show_seconds(self.tuning_s)}" if self.tuning_s >= 0.01 * self.steps_s else ""
        whole_s = self.epochs_left * (self.steps_s + self.evaluation_s)
        left = f"; {show_seconds(whole_s)} for the rest at this pace" if self.epochs_left else ""
        return [f"{seen}{tuned}{left}", *self.problems()]

    def problems(self) -> list[str]:
        """What looks wrong after the first epoch, a line each."""
        found = []
        own_s = self.steps_s - self.tuning_s
        if own_s > LONGER * self.expected_s and own_s - self.expected_s > LEAST_S:
            fed = f"; batches were waited for {show_seconds(self.feeding_s)}" if self.feeding_s > own_s / 4 else ""
            found.append(f"steps became slower: {own_s / self.expected_s:.2g} times as long as the first ones{fed}")
        if self.evaluation_s > self.steps_s and self.evaluation_s > LEAST_S:
            found.append(
                f"the evaluation took {show_seconds(self.evaluation_s)}, longer than the epoch: evaluate less often "
                "(eval_every) or in larger batches (eval_batch)"
            )
        if math.isfinite(self.first_loss) and not self.last_loss < self.first_loss:
            found.append(
                f"the loss has not fallen: {self.first_loss:.4g} after the first steps, {self.last_loss:.4g} at the "
                "end; look at the learning rate, the loss and the labels"
            )
        if self.first_bytes and self.last_bytes and self.last_bytes > GROWN * self.first_bytes:
            found.append(
                f"memory has grown from {show_bytes(self.first_bytes)} to {show_bytes(self.last_bytes)}: look for what "
                "holds on to tensors with `hotlap memory`"
            )
        return found
