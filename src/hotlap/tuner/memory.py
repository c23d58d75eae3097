"""Whether a plan leaves enough memory: an allocator that has to try again is out of memory soon."""

from __future__ import annotations

import torch

from hotlap.core.units import show_bytes
from hotlap.machine.cuda import free_for_torch, usable_bytes

RESERVE = 0.05
"""Of the GPU's memory, what has to stay free."""


class MemoryWatch:
    """Watches the device's memory while a plan is on trial; on a CPU there is nothing to see."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._retries = 0

    def begin(self) -> None:
        """From here on retries count."""
        self._retries = self._count()

    def why_short(self) -> str | None:
        """Why memory is short under the plan in force, or None where it is not."""
        if self._device is None:
            return None
        retries = self._count() - self._retries
        if retries > 0:
            return f"memory is short: the allocator had to start over {retries} times"
        free, usable = free_for_torch(self._device), usable_bytes(self._device)
        if free < RESERVE * usable:
            return f"memory is short: {show_bytes(free)} of {show_bytes(usable)} would be left"
        return None

    def _count(self) -> int:
        if self._device is None:
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
