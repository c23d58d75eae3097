"""What other processes do, and how to end those that hang. Needs no torch."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import psutil

AT_WORK: Final = (0.05, 2**20)
"""From which share of a core on, or from how many bytes read and written, processes are at work."""
GRACE_S: Final = 3.0
"""How long processes have to end after SIGTERM."""
ANSWERING: Final = ("is running", "is asleep")
"""States in which a process handles signals."""
_STATES: Final = {
    psutil.STATUS_RUNNING: "is running",
    psutil.STATUS_SLEEPING: "is asleep",
    psutil.STATUS_IDLE: "is asleep",
    psutil.STATUS_DISK_SLEEP: "waits for a disk",
    psutil.STATUS_STOPPED: "is stopped",
    psutil.STATUS_TRACING_STOP: "is stopped by a debugger",
    psutil.STATUS_ZOMBIE: "has ended",
    psutil.STATUS_DEAD: "has ended",
}
Work = tuple[float, int]
"""Seconds of cores, and bytes read and written."""


def state_of(pid: int) -> str:
    """What a process does, in words."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        state = psutil.STATUS_DEAD
    return _STATES.get(state, f"is {state}")


def children_of(pid: int) -> list[int]:
    """The child processes of a process."""
    with suppress(psutil.Error):
        return [child.pid for child in psutil.Process(pid).children()]
    return []


def work_so_far(pid: int) -> Work:
    """The work of a process and of those that descend from it."""
    seconds, moved = 0.0, 0
    with suppress(psutil.Error):
        me = psutil.Process(pid)
        for process in (me, *me.children(recursive=True)):
            with suppress(psutil.Error, OSError, AttributeError):  # one that has ended; a system without such counts
                spent = process.cpu_times()
                seconds += spent.user + spent.system
                counts: Any = process.io_counters()  # type: ignore[attr-defined,unused-ignore]
                moved += counts.read_chars + counts.write_chars
    return seconds, moved


def is_at_work(before: Work, after: Work, seconds: float) -> bool:
    """Whether processes with this work have been at work in these seconds."""
    least_share, least_bytes = AT_WORK
    return after[0] - before[0] > least_share * seconds or after[1] - before[1] > least_bytes


def end_processes(pids: Sequence[int]) -> None:
    """End children of this process: by SIGTERM, and after a while by SIGKILL."""
    for number in (signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
        alive = [pid for pid in pids if _is_running_child(pid)]
        for pid in alive:
            with suppress(OSError):
                os.kill(pid, number)
        ends = time.monotonic() + GRACE_S
        while any(map(_is_running_child, alive)) and time.monotonic() < ends:
            time.sleep(0.02)


def _is_running_child(pid: int) -> bool:
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return process.ppid() == os.getpid() and process.status() != psutil.STATUS_ZOMBIE
    return False
