"""How fast a device multiplies, copies, is fed and is told what to do: each timed for a few hundredths of a second.

The best block counts, not the middle one: other work on the machine, or a clock that is still rising, only slows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from hotlap.core.units import GIB, MIB
from hotlap.machine.tf32 import Tf32

BLOCK_S, BLOCKS = 0.004, 5
"""A block is so long, or one run of what is timed where that takes longer; the best of so many counts."""
ENOUGH_S = 0.03
"""No further block after so long: a slow device is told apart from a fast one by two runs."""
WARM_S = 0.03
"""A GPU that has rested takes about so long to raise its clock."""
GROW_S = 0.02
"""A product that took longer is not tried in the next size, which takes up to eight times as long."""
MANY_THREADS = 8
"""More of them are not kept busy by a product of 1024 × 1024."""
LAUNCHES = 200
"""Fewer than a GPU's queue holds, so that issuing them never waits."""
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Timing:
    """What is timed on one device. Draws from a generator of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_gpu = device, device.type == "cuda"
        self._draw = torch.Generator(device).manual_seed(0)
        self._roomy = not self._on_gpu or torch.cuda.mem_get_info(device)[0] > 2 * GIB

    def matmul(self, precision: str) -> float:
        """Operations per second in a square product of the best size."""
        if self._on_gpu:
            sides = [4096 if self._roomy else 1024]
        else:
            sides = [256, 512, 1024, *([2048] if torch.get_num_threads() > MANY_THREADS else [])]
        # Numbers as a training has them: a GPU multiplies zeros faster than these.
        drawn = self._drawn(256, 256, dtype=_DTYPES[precision])
        best = 0.0
        with Tf32(precision == "tf32", convolutions=False):
            for side in sides:
                factor = drawn.repeat(side // 256, side // 256)
                product = partial(torch.mm, factor, factor.clone(), out=torch.empty_like(factor))
                self._warm(product)
                took_s = self._seconds(product)
                best = max(best, 2 * side**3 / took_s)
                if took_s > GROW_S:
                    break
        return best

    def copy(self) -> float:
        """Bytes per second, read and written together, of a copy within the device."""
        size = 128 * MIB if self._on_gpu and self._roomy else 32 * MIB
        source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        target = torch.ones_like(source)
        return 2 * size / self._seconds(lambda: target.copy_(source))

    def bring(self, *, pinned: bool) -> float | None:
        """Bytes per second from the host to a GPU; None where no page-locked memory can be had."""
        size = 32 * MIB
        target = torch.zeros(size, dtype=torch.uint8, device=self._device)
        source = torch.ones(size, dtype=torch.uint8, device="cpu")
        try:
            source = source.pin_memory() if pinned else source
        except RuntimeError:  # a container may allow none
            return None
        return size / self._seconds(lambda: target.copy_(source, non_blocking=pinned))

    def launch(self) -> float:
        """Host seconds to issue one small operation."""
        small = self._drawn(8, dtype=torch.float32)
        other = torch.zeros_like(small)
        blocks = []
        for _ in range(BLOCKS + 1):
            self._wait()
            started = time.perf_counter()
            for _ in range(LAUNCHES):
                other.add_(small)
            blocks.append((time.perf_counter() - started) / LAUNCHES)
        self._wait()
        return min(blocks[1:])

    def wait(self) -> float:
        """Seconds of a wait for a device that has nothing to do; 0 on a CPU."""
        return self._seconds(self._wait) if self._on_gpu else 0.0

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _drawn(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device).normal_(generator=self._draw)

    def _warm(self, run: Callable[[], object]) -> None:
        until = time.perf_counter() + WARM_S
        while self._on_gpu and time.perf_counter() < until:
            self._block(run)

    def _seconds(self, run: Callable[[], object]) -> float:
        """Seconds of one run, over blocks each of which is waited for once."""
        self._block(run)  # what is loaded at first use is no part of it
        best = self._block(run)
        times, until = max(1, int(BLOCK_S / best)), time.perf_counter() + ENOUGH_S
        for _ in range(BLOCKS):
            best = min(best, self._block(run, times))
            if time.perf_counter() > until:
                break
        return best

    def _block(self, run: Callable[[], object], times: int = 1) -> float:
        started = time.perf_counter()
        for _ in range(times):
            run()
        self._wait()
        return max((time.perf_counter() - started) / times, 1e-9)
