"""Whether the weights of a script's training are still finite, and between which updates they ceased to be."""

from __future__ import annotations

import math
import time

import torch

from hotlap.fitting.first_nan import are_finite
from hotlap.script.training import ScriptTraining
from hotlap.script.update.capture import parameters_of

LOOK_S = 5.0
"""Seconds between two looks, each of which waits once for the device."""


class WeightsWatch:
    """Looks at the weights of one training every few seconds, and at its end."""

    def __init__(self, training: ScriptTraining) -> None:
        self._training = training
        self._good: int | None = None
        """The last update after which all weights were finite."""
        self._next_s = 0.0
        self.line: str | None = None
        """What to say of weights that are not finite; None if they are."""

    def is_due(self, now_s: float) -> bool:
        return now_s >= self._next_s

    def look(self) -> str | None:
        """What to say of weights that are found not to be finite, once; the ledger has it too."""
        training = self._training
        if self.line is not None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return None
        self._next_s = time.perf_counter() + LOOK_S
        weights = [weight for optimizer in training.optimizers for weight in parameters_of(optimizer)]
        step = training.before + training.steps
        try:
            is_good = are_finite(weights)
        except RuntimeError:  # on several devices, or of a kind that cannot be asked
            self._next_s = math.inf
            return None
        if is_good or self._good is None:  # a script may begin with whatever it likes
            self._good, self._next_s = (step, self._next_s) if is_good else (None, math.inf)
            return None
        self._next_s = math.inf
        plan, own = training.plan, training.own
        changes = ", ".join(f"{name} {was} → {now}" for name, (was, now) in own.changes(plan).items())
        since = f"weights are not finite after update {step:,}; they were after update {self._good:,}"
        self.line = f"{since}; in force: {f'the plan with {changes}' if changes else 'your own plan'}"
        training.write_down("weights not finite", "fault", self.line)
        return self.line
