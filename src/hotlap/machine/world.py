"""Everything the machine is read from, in one value, so that a test can bring a machine of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hotlap.machine.cuda import Cuda, free_bytes, read_cuda
from hotlap.machine.disk import DiskSpeed, Room, measure_disk, read_room
from hotlap.machine.kernels import run_kernel, times_as_long
from hotlap.machine.limits import ROOT
from hotlap.machine.nvml import Driver, read_driver


@dataclass(frozen=True, kw_only=True)
class World:
    """Where facts come from; the defaults are this machine."""

    driver: Callable[[], Driver] = read_driver
    cuda: Callable[[], Cuda] = read_cuda
    free_bytes: Callable[[int], int | None] = free_bytes
    kernel: Callable[[str, str], str | None] = run_kernel
    """Device and format to None, or to one line that says why the kernel failed."""
    pace: Callable[[str], float] = times_as_long
    """How many times as long as in fp32 the CPU takes in a format."""
    room: Callable[[Path], Room | None] = read_room
    measure_disk: Callable[[Path], DiskSpeed] = measure_disk
    which: Callable[[str], str | None] = shutil.which
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    root: Path = ROOT
    folder: Path = field(default_factory=Path.cwd)
    """Where runs are written."""
    affinity: int | None = None
    """Cores the scheduler allows; None asks it."""
    has_module: Callable[[str], bool] | None = None
