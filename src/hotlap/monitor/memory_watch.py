"""Notices beside a training that memory grows from step to step, and then finds the line that makes it and its holder.

Every few seconds it reads how much memory is taken. Only where that grows steadily, and so fast that it would be full
within a day, it watches the tensors of a few steps, which takes time.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from hotlap.core.errors import first_line
from hotlap.core.terminal import logger
from hotlap.core.torch_private import TorchDispatchMode, or_none
from hotlap.core.units import MIB, show_about, show_bytes
from hotlap.machine.limits import read_memory
from hotlap.monitor.growing_memory import TURNS, GrowthWatch
from hotlap.monitor.hardware import SHM
from hotlap.monitor.live_tensors import LiveTensors

log = logger(__name__)

LEAST_BYTES: Final = 64 * MIB
"""Growth below this is no matter."""
SOON_S: Final = 86_400.0
"""If memory lasts longer than this at its pace, that is no matter either."""
LOOKS: Final = 6
"""Marks over which memory grows steadily."""
MOST_MARKS: Final = 16
"""Marks that are kept: where there are more, every other one goes, so that slow growth shows as well."""
STEADY: Final = 0.25
"""The least rise from mark to mark, as a share of the median one: a cache that fills up slows down."""
MOST_TRIES: Final = 2
"""How often garbage is collected in one training, to see whether it grows without that too."""


class Mark(NamedTuple):
    """Memory at one moment."""

    at_s: float
    step: int
    bytes: int


class Growth(NamedTuple):
    """How fast memory grows."""

    bytes_a_step: float
    bytes_a_second: float


@dataclass
class Trend:
    """How one kind of memory develops."""

    name: str
    taken: Callable[[], int]
    free: Callable[[], int]
    """Bytes that are left before it is full."""
    marks: list[Mark] = field(default_factory=list)
    every: int = 1
    """Looks from mark to mark."""
    skipped: int = 0
    is_collected: bool = False
    """Whether the marks begin with a collection of garbage."""
    is_over: bool = False

    def look(self, step: int) -> Growth | None:
        """Take a look; how fast it grows, where it does so steadily."""
        self.skipped += 1
        if self.is_over or self.skipped < self.every or (self.marks and step <= self.marks[-1].step):
            return None
        self.skipped = 0
        try:
            self.marks.append(Mark(time.perf_counter(), step, self.taken()))
        except (OSError, ValueError, IndexError):
            self.is_over = True  # the system does not say
            return None
        if len(self.marks) >= MOST_MARKS:
            self.marks, self.every = self.marks[1::2], 2 * self.every
        return steady_growth(self.marks[-LOOKS:])

    def forget(self) -> None:
        """Begin anew."""
        self.marks, self.every, self.skipped, self.is_collected = [], 1, 0, False

    def forget_before(self, step: int) -> None:
        """Leave out what was before a step."""
        if self.marks and self.marks[0].step < step:
            self.marks = [mark for mark in self.marks if mark.step >= step]


def steady_growth(marks: list[Mark]) -> Growth | None:
    """How fast memory grows over these marks; None where it does not grow steadily, or not by enough."""
    if len(marks) < LOOKS:
        return None
    rates = [(after.bytes - before.bytes) / (after.step - before.step) for before, after in pairwise(marks)]
    a_step, steps = statistics.median(rates), marks[-1].step - marks[0].step
    if a_step * steps < LEAST_BYTES or min(rates) < STEADY * a_step:
        return None
    return Growth(a_step, a_step * steps / max(1e-9, marks[-1].at_s - marks[0].at_s))


class _SafeCount(LiveTensors):  # type: ignore[no-untyped-call]
    """Counts tensors beside a training that must not fail by it, and leaves torch's own count of the peak alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        with suppress(Exception):
            self.count(made, (args, kwargs))
        return made


class MemoryWatch:
    """Watches the memory of one training; the training calls `look` every few seconds, between two steps.

    While `is_open`, the training calls `step_ended` after each step. Both give a line for the user, or None.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.trends = [Trend("RAM", private_bytes, lambda: read_memory().free_bytes)]
        if SHM.is_dir():
            self.trends.append(Trend(str(SHM), _shm_used, lambda: shutil.disk_usage(SHM).free))
        if device.type == "cuda":
            self.trends.append(Trend("memory of the GPU", self._allocated, self._free_on_gpu))
        self._turns: GrowthWatch | None = None
        self._found: tuple[Trend, Growth] | None = None
        self._tries = self._filled_at = 0

    @property
    def is_open(self) -> bool:
        """Whether the tensors of steps are watched now."""
        return self._turns is not None

    def forget(self) -> None:
        """What memory was before does not count: the training is another one now, such as under another plan."""
        for trend in self.trends:
            trend.forget()

    def look(self, step: int, *, filled_at: int | None = None, may_watch: bool = True) -> str | None:
        """Read memory, and begin to watch where it grows.

        Until the step `filled_at`, a cache may fill up: such as samples that the first epoch reads. Without
        `may_watch` no tensor is looked at, and the line names none.
        """
        if self.is_open:
            return None
        self._filled_at = self._filled_at or filled_at or 0
        for trend in self.trends:
            if step >= self._filled_at:
                trend.forget_before(self._filled_at)
            growth = trend.look(step)
            if growth is None:
                if trend.is_collected and len(trend.marks) >= LOOKS:
                    trend.forget()
                continue
            free = trend.free()
            if free / growth.bytes_a_second > SOON_S:
                continue
            if free > growth.bytes_a_step * (self._filled_at - step) > 0:
                continue
            if not trend.is_collected:
                self._collect(trend)
                continue
            trend.is_over = True
            if not may_watch or trend.name == str(SHM) or or_none(TorchDispatchMode) is None:
                return self._line(trend, growth, "`hotlap memory` may find the line" if not may_watch else "")
            self.watch_steps(trend, growth)
            return None
        return None

    def step_ended(self) -> str | None:
        """A step of those that are watched has ended; what grows, after the last of them."""
        turns = self._turns
        if turns is None or self._found is None:
            return None
        found = []
        try:
            turns.end()
            if not turns.are_done:
                return None
            self._leave()
            found = [one for one in turns.growth() if one.line or one.holder]
        except Exception as error:  # objects of the user may answer a question with an error
            log.info("memory that grows is not watched: %s", first_line(error))
        self.close()
        where = str(found[0]) if found else "no tensor does, so it may be a list of Python objects or a library"
        return self._line(*self._found, where)

    def close(self) -> None:
        """Watch no tensors any more."""
        self._leave()
        self._turns = None

    def watch_steps(self, trend: Trend, growth: Growth) -> None:
        """Watch the tensors of the next steps: this kind of memory grows so fast."""
        self._found = trend, growth
        device = self._device if trend.name.endswith("GPU") else torch.device("cpu")
        live = _SafeCount(device, lines=True)
        live.__enter__()  # type: ignore[no-untyped-call]
        self._turns = GrowthWatch(live, graphs_every=TURNS // 4)
        _open.add(self)

    def _leave(self) -> None:
        if self in _open and self._turns is not None:
            _open.discard(self)
            self._turns.live.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _collect(self, trend: Trend) -> None:
        """Collect garbage, and see whether memory grows on: what the system does not get back is used again first."""
        level = (trend.marks[-LOOKS].bytes + trend.marks[-1].bytes) / 2
        trend.forget()
        if self._tries >= MOST_TRIES:
            trend.is_over = True
            return
        self._tries += 1
        gc.collect()
        trend.is_collected = trend.taken() > level

    def _line(self, trend: Trend, growth: Growth, where: str) -> str:
        left_s = max(0.0, trend.free() / growth.bytes_a_second)
        about = f": {where}" if where else ""
        return (
            f"{trend.name} grows by {show_bytes(growth.bytes_a_step)} a step{about}; at this pace it is full in "
            f"{show_about(left_s)}"
        )

    def _allocated(self) -> int:
        return int(torch.cuda.memory_allocated(self._device))

    def _free_on_gpu(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free + torch.cuda.memory_reserved(self._device) - self._allocated())


def private_bytes() -> int:
    """The memory of this process that no file backs: the host drops pages of a mapped dataset as it likes."""
    try:
        _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text(encoding="ascii").split())
    except OSError:
        import psutil

        return int(psutil.Process().memory_info().rss)
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _shm_used() -> int:
    return shutil.disk_usage(SHM).used


_open: weakref.WeakSet[MemoryWatch] = weakref.WeakSet()
"""Those that watch now. A worker process that is forked meanwhile must not watch on."""


def _in_child() -> None:
    for watch in list(_open):
        watch.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
