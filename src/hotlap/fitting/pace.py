"""How fast a training goes, and when it will be done."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Where a training stands at one moment."""

    step: int
    total_steps: int | None
    epoch: int
    loss: float
    steps_per_s: float
    samples_per_s: float
    elapsed_s: float
    eta_s: float | None


class Pace:
    """Turns counts of steps and samples into rates; the clock stands still during `pause`."""

    def __init__(self, total_steps: int | None, step: int = 0, samples: int = 0) -> None:
        self._total = total_steps
        self._start_s = self._last_s = time.perf_counter()
        self._last_step, self._last_samples = step, samples
        self._steps_per_s = self._samples_per_s = 0.0
        self._paused_s = 0.0

    def read(self, *, step: int, samples: int, epoch: int, loss: float) -> Reading:
        """Rates since the last reading; call it after the device has caught up."""
        now = time.perf_counter()
        spent = now - self._last_s - self._paused_s
        if step > self._last_step and spent > 0:
            self._steps_per_s = (step - self._last_step) / spent
            self._samples_per_s = (samples - self._last_samples) / spent
            self._last_s, self._last_step, self._last_samples, self._paused_s = now, step, samples, 0.0
        left = None if self._total is None else max(0, self._total - step)
        known = left is not None and self._steps_per_s > 0
        return Reading(
            step=step,
            total_steps=self._total,
            epoch=epoch,
            loss=loss,
            steps_per_s=self._steps_per_s,
            samples_per_s=self._samples_per_s,
            elapsed_s=now - self._start_s,
            eta_s=left / self._steps_per_s if known and left is not None else None,
        )

    def pause(self, seconds: float) -> None:
        """Leave so many seconds (an evaluation, a save) out of the rates."""
        self._paused_s += seconds
