"""Notices that a training makes no progress, says what it waits for, and ends workers that bring nothing.

A thread beside the training compares what has been done, every few seconds. A step pays nothing for it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final, Self

from hotlap.core.errors import MachineError
from hotlap.core.terminal import logger, say
from hotlap.core.units import read_seconds, show_seconds
from hotlap.data import sources
from hotlap.data.feeds import WorkerStart
from hotlap.guard.processes import ANSWERING, Work, end_processes, is_at_work, state_of, work_so_far
from hotlap.guard.stacks import (
    DATASET,
    GPU,
    THREADS,
    WORKERS,
    Wait,
    is_attended,
    is_long,
    of_worker,
    report,
    stacks_here,
    waiting_for,
)
from hotlap.monitor.beside import Beside

log = logger(__name__)

SWITCH: Final = "HOTLAP_HANG_S"
"""The variable with the least seconds without progress that are a hang, or `off`."""
LEAST_S: Final = 60.0
USUAL_STEPS: Final = 10
"""A hang takes at least so many usual steps,"""
LONGEST_GAPS: Final = 2
"""so many times the longest time without progress after which the training has gone on by itself,"""
BEFORE_FIRST: Final = 5
"""and before the first step so many times the least."""
LOOKS: Final = 12
"""Looks in the shortest hang."""
AT_WORK_FROM: Final = 0.75
"""The share of that time after which hotlap looks whether processes still work."""
MOST_WINDOWS: Final = 10
"""How often a training that works and makes no step gets the same time again."""
MOST_INDICES: Final = 8


def hang_s() -> float | None:
    """The least seconds without progress that are a hang; None if nobody wants to know. Raises MachineError."""
    asked = os.environ.get(SWITCH, "").strip().lower()
    if asked == "off":
        return None
    try:
        return read_seconds(asked) if asked else LEAST_S
    except ValueError:
        raise MachineError(f"{SWITCH}={asked[:40]!r} is not known: use a number of seconds, or off") from None


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A training that makes no progress."""

    wait: Wait
    waited_s: float
    why: str
    """What it waits for and for how long, in one line."""
    details: tuple[str, ...]
    """Processes and stacks, a line each."""


class HangWatch:
    """Inside `with`, calls `notice` when the thread that opened it makes no progress for too long, once each time.

    `progress` returns the number of steps, and what else changes when there is progress. `notice` runs in another
    thread. Afterwards, if the training waits for worker processes, these are ended.
    """

    def __init__(
        self,
        progress: Callable[[], tuple[int, Hashable]],
        notice: Callable[[Hang], object],
        *,
        on_gpu: bool = False,
        clock: Callable[[], float] = time.monotonic,
        at_work: Callable[[], Work] | None = None,
    ) -> None:
        """`at_work` returns seconds of cores and bytes that this process and its children have used."""
        least_s = hang_s()
        self._is_wanted, self._least_s = least_s is not None, least_s or LEAST_S
        self._progress, self._notice, self._on_gpu = progress, notice, on_gpu
        self._clock, self._at_work = clock, at_work or functools.partial(work_so_far, os.getpid())
        self.every_s = min(5.0, self._least_s / LOOKS)
        """Seconds between two looks."""
        self._thread = Beside("hotlap hangs", self.look, lambda: self.every_s)
        self._watched = threading.get_ident()
        self._seen = progress()
        self._first: int | None = None
        """The number of the first step that was seen."""
        self._looked_s = self._moved_s = self._since_s = clock()
        """When it looked last, when there was progress, and when the time began that may be a hang."""
        self._moving_s = self._longest_s = self._step_s = 0.0
        self._work: tuple[float, Work] | None = None
        """When `at_work` was asked in this time, and what it returned."""
        self._windows, self._is_noticed, self._has_ended_workers = 0, False, False
        self._patience = 1
        """How many times as long a hang takes: twice as long each time that ending workers has brought no step."""

    def __enter__(self) -> Self:
        if self._is_wanted:
            self._thread.begin(self.every_s)
            watch_end(os.getpid())
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.end()

    @property
    def limit_s(self) -> float:
        """Seconds without progress that are a hang."""
        if self._first is None:
            return BEFORE_FIRST * self._least_s * self._patience
        return max(self._least_s * self._patience, USUAL_STEPS * self._step_s, LONGEST_GAPS * self._longest_s)

    def look(self) -> None:
        """Compare with the last look."""
        try:
            self._look(self._clock())
        except Exception as error:  # such as a state that changed while it was read
            log.info("no look at the progress: %s: %s", type(error).__name__, error)

    def _look(self, now: float) -> None:
        paused, self._looked_s = now - self._looked_s > 4 * self.every_s + 1.0, now
        seen = self._progress()
        if seen != self._seen or paused:  # also where the whole process was stopped for a while
            self._go_on(now, seen, counts=not paused)
            return
        waited_s = now - self._since_s
        if self._is_noticed or waited_s < AT_WORK_FROM * self.limit_s:
            return
        if self._work is None:
            self._work = now, self._at_work()
        elif waited_s >= self.limit_s:
            self._judge(now, self._work)

    def _go_on(self, now: float, seen: tuple[int, Hashable], *, counts: bool) -> None:
        """There was progress."""
        if counts and self._first is not None and not self._has_ended_workers:
            self._longest_s = max(self._longest_s, now - self._moved_s)
            self._moving_s += now - self._moved_s
        if seen[0] != self._seen[0]:
            self._patience = 1
            self._first = seen[0] if self._first is None else self._first
            made = seen[0] - self._first
            self._step_s = self._moving_s / made if made > 0 else 0.0
        self._seen, self._moved_s, self._since_s = seen, now, now
        self._windows, self._work, self._is_noticed, self._has_ended_workers = 0, None, False, False

    def _judge(self, now: float, work: tuple[float, Work]) -> None:
        """There was no progress for too long: find out whether it is a hang."""
        frame = sys._current_frames().get(self._watched)
        stacks = stacks_here(self._watched)
        calls = stacks[0].calls
        if frame is None or is_attended(calls):
            return
        wait = waiting_for(calls, on_gpu=self._on_gpu)
        if (
            wait is not GPU
            and is_at_work(work[1], self._at_work(), now - work[0])
            and (is_long(calls) or self._windows < MOST_WINDOWS)
        ):
            self._since_s, self._windows, self._work = now, self._windows + 1, None
            return
        self._is_noticed = True
        loader = _loader_in(frame) if wait is WORKERS else None
        workers = [] if loader is None else [worker.pid for worker in loader._workers if worker.pid]
        sample = _sample_in(frame) if wait.kind == DATASET.kind else ""
        waited_s = now - self._moved_s
        since = f"no progress for {show_seconds(waited_s)} after step {self._seen[0]:,}"
        why = f"{since}: the training waits for {wait.words}{sample}{wait.cause}"
        details = [line for pid in workers for line in _worker_lines(pid, loader)]
        self._notice(Hang(wait=wait, waited_s=waited_s, why=why, details=(*details, *report(stacks))))
        self._seen = self._progress()  # what was said and written down is no progress
        if workers:
            self._has_ended_workers = True
            self._patience *= 2
            end_processes(workers)


def _loader_in(frame: FrameType | None) -> Any:
    """The loader's iterator that waits for its workers, on a stack that does."""
    while frame is not None:
        found = frame.f_locals.get("self")
        if hasattr(found, "_workers") and frame.f_code.co_name in ("_try_get_data", "_get_data"):
            return found
        frame = frame.f_back
    return None


def _sample_in(frame: FrameType | None) -> str:
    """Which sample is fetched on this stack, in words."""
    while frame is not None:
        if frame.f_code.co_filename == sources.__file__:
            found = frame.f_locals
            kind = type(getattr(found.get("self"), "samples", None)).__name__
            if "index" in found:
                return f" (sample {found['index']} of {kind})"
            if frame.f_code.co_name == "read":
                several = [*found["indices"]]
                shown = ", ".join(map(str, several[:MOST_INDICES])) + (", …" if len(several) > MOST_INDICES else "")
                return f" (samples {shown} of {kind})"
        frame = frame.f_back
    return ""


# --- worker processes -------------------------------------------------------------------------------


def _worker_lines(pid: int, loader: Any) -> list[str]:
    """The state of a worker, and where it is, if it can say."""
    state, start = state_of(pid), getattr(loader, "_worker_init_fn", None)
    text = start.stacks_of(pid) if state in ANSWERING and isinstance(start, WorkerStart) else ""
    return of_worker(pid, state, text)


# --- the end of the process -------------------------------------------------------------------------


@functools.cache
def watch_end(pid: int) -> None:
    """From when this process has nothing more to run: say what it waits for, if it does not end."""
    register = getattr(threading, "_register_atexit", None)  # before Python waits for threads; `atexit` comes after
    if register is not None:
        with suppress(RuntimeError):  # it ends already
            register(_has_ended, pid)


def _has_ended(pid: int) -> None:
    least_s = hang_s()
    if os.getpid() == pid and least_s is not None:  # not at the end of a forked child
        timer = threading.Timer(least_s, _say_of_end, (least_s,))
        timer.daemon, timer.name = True, "hotlap hangs"
        with suppress(RuntimeError):
            timer.start()


def _say_of_end(waited_s: float) -> None:
    ident = threading.main_thread().ident or 0
    stacks = stacks_here(ident)
    wait = waiting_for(stacks[0].calls, on_gpu=False)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.ident != ident]
    words = f"{wait.words} ({', '.join(left)})" if wait is THREADS else wait.words
    say(
        f"warning: the program has ended, and its process has not for {show_seconds(waited_s)}: it waits for {words}",
        *report(stacks),
    )
