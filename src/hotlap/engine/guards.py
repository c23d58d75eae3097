"""What may leave an update out: fp16's scaled loss, and the user's wish to skip what is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from hotlap.engine.rates import moves_rates_only
from hotlap.engine.scaling import LossScale, skips_on_device
from hotlap.engine.schedules import Schedule


class Guards:
    """The guards of one training: they outlive changes of plan, as the scale that fp16 has found has to."""

    def __init__(self, optimizer: Optimizer, schedule: Schedule, device: torch.device, *, skip_nonfinite: bool) -> None:
        self._optimizer, self._schedule, self._device = optimizer, schedule, device
        self._scale: LossScale | None = None
        self._check = LossScale(device, enabled=False) if skip_nonfinite else None
        self._before = 0

    def of(self, precision: str) -> tuple[LossScale | None, bool]:
        """The guard of steps in this precision, and whether the device can leave an update out without the host."""
        guard = self._check
        if precision == "fp16":
            guard = self._scale = self._scale or LossScale(self._device)
        if guard is None:
            return None, False
        # A schedule that moves more than the rate cannot wait for the device to say how far it is.
        return guard, skips_on_device(self._optimizer) and moves_rates_only(self._schedule, self._optimizer)

    @property
    def skipped(self) -> int:
        """Updates that were left out; waits for the device, which counts them."""
        return self._before + sum(guard.skips() for guard in self._all())

    def set_skipped(self, skipped: int) -> None:
        """Say how many were left out so far."""
        self._before = skipped - sum(guard.skips() for guard in self._all())

    def saved(self) -> dict[str, Any]:
        """A copy of all that they remember."""
        kept: dict[str, Any] = {"before": self._before}
        if self._scale is not None:
            kept["scale"] = self._scale.saved()
        if self._check is not None:
            kept["check"] = self._check.saved()
        return kept

    def put_back(self, saved: dict[str, Any]) -> None:
        """Remember what was saved."""
        if "scale" in saved:
            self._scale = self._scale or LossScale(self._device)
            self._scale.put_back(saved["scale"])
        elif self._scale is not None:
            self._scale.reset()
        if self._check is not None and "check" in saved:
            self._check.put_back(saved["check"])
        self._before = saved["before"]

    def _all(self) -> list[LossScale]:
        return [guard for guard in (self._scale, self._check) if guard is not None]
