"""What this machine can do: measured once, in some tenths of a second, and cached."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor

from hotlap import __version__, machine
from hotlap.core.errors import StoreError, shown
from hotlap.core.plan import PRECISIONS
from hotlap.core.terminal import logger
from hotlap.core.units import GIB, MIB
from hotlap.machine.device import cpu_facts
from hotlap.machine.dtypes import proof
from hotlap.machine.tf32 import Tf32
from hotlap.store.cache import Cache, key_of

log = logger(__name__)

KIND = "calibration"
BUSY = 0.1
"""Share of the time that threads may wait for a core. Above it, other work keeps the cores busy."""
_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE")
"""Environment variables that change what is measured."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Rates of one device. Raises ValueError if a figure is impossible."""

    matmul_flops: Mapping[str, float]
    """Operations per second in a large square product, for each precision that the hardware has."""
    copy_bytes: float
    """Bytes per second, read and written together, of a copy within the device. For a CPU with a cache of more than 64
    MiB it is the cache's rate."""
    cache_bytes: float
    """Bytes of the device's last-level cache; 0 if unknown."""
    pinned_bytes: float | None
    """Bytes per second from pinned memory to the device; None on a CPU, or if no memory can be pinned."""
    pageable_bytes: float | None
    """The same from pageable memory; None on a CPU."""
    launch_s: float
    """Host seconds to issue one small operation."""
    sync_s: float
    """Seconds of a wait for an idle device; 0 on a CPU."""

    def __post_init__(self) -> None:
        figures: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rates = figures.pop("matmul_flops")
        if not isinstance(rates, Mapping) or "fp32" not in rates or not set(rates) <= set(PRECISIONS):
            raise ValueError(f"matmul_flops={shown(rates)} must have a rate for fp32, and for known precisions only")
        figures |= {f"matmul_flops.{name}": rate for name, rate in rates.items()}
        for name, value in figures.items():
            if value is None and name in ("pinned_bytes", "pageable_bytes"):
                continue
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name not in ("cache_bytes", "sync_s")):
                raise ValueError(f"{name}={shown(value)} must be a finite number above zero")

    @property
    def queued(self) -> bool:
        """Whether the device works through a queue while the host goes on, as a GPU does."""
        return self.sync_s > 0

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain values."""
        return {**vars(self), "matmul_flops": dict(self.matmul_flops)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """The figures from plain values. Raises ValueError if one is missing, unknown or wrong."""
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(raw, Mapping) or set(raw) != names:
            raise ValueError(f"{shown(raw)} is not a calibration, which has the figures {', '.join(sorted(names))}")
        return cls(**raw)


@overload
def calibration(
    device: torch.device | str, *, cache: Cache | None = None, afresh: bool = False, known_only: Literal[False] = False
) -> Calibration: ...
@overload
def calibration(
    device: torch.device | str, *, cache: Cache | None = None, afresh: bool = False, known_only: bool
) -> Calibration | None: ...
def calibration(
    device: torch.device | str, *, cache: Cache | None = None, afresh: bool = False, known_only: bool = False
) -> Calibration | None:
    """The rates of a device: from the cache if they were measured before, else measured and cached.

    With `known_only` nothing is measured: the result is None if they are unknown. Measuring leaves every generator as
    it is. On a GPU torch keeps the 250 MB that it needed, for the training to use. A cache that fails stops nothing.
    Rates that were measured while other work kept the cores busy are not cached.
    """
    known = None if afresh else _known(device, cache)
    if known is not None or known_only:
        return known
    device = torch.device(device)
    started, waited_s = time.perf_counter(), _waited_s()
    measured = measure(device)
    if _waited_s() - waited_s > BUSY * (time.perf_counter() - started):
        log.info("the calibration is not cached: other work kept the machine busy")
        return measured
    key, facts = _key(device)
    try:
        (cache or Cache()).replace(KIND, key, values=measured.to_dict(), facts=facts)
    except StoreError as error:
        log.warning("the calibration is not cached: %s", error)
    return measured


def _known(device: torch.device | str, cache: Cache | None) -> Calibration | None:
    """The cached rates; None if there are none, or if the cached entry is wrong."""
    try:
        found = (cache or Cache()).get(KIND, _key(torch.device(device))[0])
        return Calibration.from_dict(found.values) if found is not None else None
    except (StoreError, ValueError) as error:
        log.warning("the cached calibration is not used: %s", error)
        return None


def measure(device: torch.device) -> Calibration:
    """Measure the rates of a device."""
    on_gpu = device.type == "cuda"
    here = torch.cuda.device(device) if on_gpu else contextlib.nullcontext()
    with here, torch.no_grad(), torch.autocast(device.type, enabled=False):
        timing = Timing(device)
        return Calibration(
            matmul_flops={name: timing.matmul(name) for name in _precisions(device)},
            copy_bytes=timing.copy(),
            cache_bytes=_cache_bytes(device),
            pinned_bytes=timing.bring(pinned=True) if on_gpu else None,
            pageable_bytes=timing.bring(pinned=False) if on_gpu else None,
            launch_s=timing.launch(),
            sync_s=timing.wait(),
        )


def _precisions(device: torch.device) -> list[str]:
    """Precisions in the hardware. A CPU that pretends to be a GPU would take seconds to emulate some of that GPU's."""
    facts = [machine.dtype_facts(device)]
    if device.type == "cpu":
        facts.append(cpu_facts(machine.detect(), proof))
    held = [{name for name, fact in each.items() if fact.support is machine.Support.HARDWARE} for each in facts]
    return [name for name in PRECISIONS if name == "fp32" or all(name in each for each in held)]


def _cache_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
    found = {}
    for index in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            level, cores = int((index / "level").read_text()), (index / "shared_cpu_list").read_text()
            found[level, cores] = int((index / "size").read_text().strip().removesuffix("K")) * 1024
    last = max((level for level, _ in found), default=0)
    return float(sum(size for (level, _), size in found.items() if level == last))


def _waited_s() -> float:
    """Seconds that this process's threads were ready to run and had no core; 0 if the system does not report them."""
    waited_ns = 0
    for task in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            waited_ns += int(task.read_text().split()[1])
    return waited_ns / 1e9


def _key(device: torch.device) -> tuple[str, dict[str, Any]]:
    """The cache key of everything that the figures depend on, and the facts that people may want to read."""
    here = machine.detect()
    gpu = None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        gpu = next((gpu for gpu in here.gpus if gpu.index == index), None)
    facts: dict[str, Any] = {
        "device": gpu.name if gpu else here.cpu.model,
        "memory_bytes": gpu.memory_bytes if gpu else here.memory.allowed_bytes,
        "kind": device.type,
        "cpu": here.cpu.model,
        "cores": here.cpu.cores,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": here.cuda,
        "driver": here.driver,
        "hotlap": __version__,
        "pretend": here.pretended.key if here.pretended else None,
    }
    return key_of(KIND, facts, {name: os.environ.get(name) for name in _VARIABLES}), facts


# ---
# How fast a device multiplies, copies, is fed and gets commands: each is timed for some hundredths of a second. The
# best block counts, not the median: other work on the machine, or a clock that is still rising, only slows it down.
#
# The best block counts, not the middle one: other work on the machine, or a clock that is still rising, only slows.


BLOCK_S, BLOCKS = 0.004, 5
"""Least seconds of a block, which holds at least one run; the best of this many blocks counts."""
ENOUGH_S = 0.03
"""Seconds after which no further block starts: two runs are enough to tell a slow device from a fast one."""
WARM_S = 0.03
"""A GPU that has rested takes about so long to raise its clock."""
GROW_S = 0.02
"""Seconds of a product above which the next size is not tried: it takes up to eight times as long."""
MANY_THREADS = 8
"""Threads above which a product of 1024 × 1024 does not keep all of them busy."""
LAUNCHES = 200
"""Launches in a block: fewer than a GPU's queue holds, so that issuing them never waits."""
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Timing:
    """Times work on one device. Draws from a separate generator."""

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
        # Random numbers as in a training: a GPU multiplies zeros faster.
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
        """Bytes per second from the host to a GPU; None if no memory can be pinned."""
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
        """Seconds of a wait for an idle device; 0 on a CPU."""
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
        """Seconds of one run, over blocks with one wait each."""
        self._block(run)  # warm-up
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
