"""How long the device computes for one step of a script, without the time that it waits for the host."""

from __future__ import annotations

import time

import torch

from hotlap.tuner.probe import CLOCK_HZ

LOOKS = 3
"""Steps that are looked at, of which the shortest counts."""
MOST_S = 0.1
"""What all looks may take, about; steps that take longer are not looked at."""
LONGER = 1.5
"""How many times as long as a step the device is made to wait, so that the host has asked for all of it by then."""


class Busy:
    """Makes the device wait, in a few steps of a script, until the host has issued all of the step.

    The device then computes without a gap. Where the script waits for the device in the middle of a step, or asks for
    more than the device remembers at once, gaps stay, and the figure is too high.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._looks = device, LOOKS if device.type == "cuda" else 0
        self._last: float | None = None
        self._step_s = 0.0
        self._began: torch.cuda.Event | None = None
        self.step_s: float | None = None
        """Seconds that the device computes for a step; None where that is not known."""

    def stepped(self) -> bool:
        """Told that a step has ended. Whether that step, or the next, is not at the script's own pace."""
        if not self._looks:
            return False
        if self._began is not None:
            self._look(self._began)
            self._began, self._last = None, None
            return True
        now = time.perf_counter()
        if self._last is not None:
            self._step_s = max(self._step_s, now - self._last)
        before, self._last = self._last, now
        if before is None:
            return False
        if LONGER * self._step_s > MOST_S / 2:
            self._looks = min(self._looks, 1)
        if LONGER * self._step_s > MOST_S:
            self._looks = 0
            return False
        self._wait()
        return True

    def _wait(self) -> None:
        with torch.cuda.device(self._device):
            torch.cuda._sleep(int(LONGER * self._step_s * CLOCK_HZ))  # type: ignore[no-untyped-call]
            self._began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._began.record()

    def _look(self, began: torch.cuda.Event) -> None:
        with torch.cuda.device(self._device):
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended.record()
            ended.synchronize()
        seconds = began.elapsed_time(ended) / 1000
        self.step_s = seconds if self.step_s is None else min(seconds, self.step_s)
        self._looks -= 1
        self._step_s = 0.0
