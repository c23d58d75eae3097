"""Shared memory, room on the disk, and how fast the disk is."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hotlap.core.units import GIB, MIB, show_bytes
from hotlap.machine.problems import Problem, Severity

_CHUNK: Final = 4 * MIB
_MOST_BYTES: Final = 64 * MIB
_MOST_S: Final = 0.5
"""For writing; reading gets the same again."""

SMALL_SHM: Final = 1 * GIB
FULL_DISK: Final = 256 * MIB
SHORT_DISK: Final = 5 * GIB
SLOW_WRITE: Final = 50 * MIB
"""Bytes per second."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A file system's size and what of it is free."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """A short measurement; `error` instead of figures where the folder cannot be written."""

    write_bytes_per_s: float | None = None
    read_bytes_per_s: float | None = None
    """May come from the page cache where the system does not let go of it."""
    error: str | None = None


def read_room(folder: Path) -> Room | None:
    """How much fits there; None where the folder does not exist."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return Room(total_bytes=usage.total, free_bytes=usage.free)


def measure_disk(folder: Path, clock: Callable[[], float] = time.perf_counter) -> DiskSpeed:
    """Write, sync and read back one temporary file: at most 64 MiB and about a second."""
    chunk = os.urandom(_CHUNK)  # zeros would flatter a file system that compresses
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hotlap-disk-", buffering=0) as file:
            number = file.fileno()
            start, written = clock(), 0
            while written < _MOST_BYTES and clock() - start < _MOST_S:
                # Synced piece by piece, so that a slow disk ends the loop and not the user's patience.
                written += os.write(number, chunk)
                os.fsync(number)
            write_s = clock() - start
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(number, 0, os.SEEK_SET)
            start, read = clock(), 0
            while read < written and clock() - start < _MOST_S:
                read += len(os.read(number, _CHUNK))
            read_s = clock() - start
    except OSError as error:
        return DiskSpeed(error=error.strerror or str(error))
    return DiskSpeed(write_bytes_per_s=written / max(write_s, 1e-9), read_bytes_per_s=read / max(read_s, 1e-9))


def shm_problems(room: Room | None, *, expected: bool) -> list[Problem]:
    """What is wrong with `/dev/shm`; `expected` on systems that have one."""
    if room is None and not expected:
        return []
    free = 0 if room is None else room.free_bytes
    if free >= SMALL_SHM:
        return []
    what = "there is no /dev/shm" if room is None else f"only {show_bytes(free)} free in /dev/shm"
    return [
        Problem(
            key="shared-memory",
            severity=Severity.SLOWS,
            what=what,
            costs="loader workers hand batches over through it; when it is full they die with a bus error",
            do="start the container with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir of medium "
            "Memory on /dev/shm), or train with NUM_WORKERS=0",
        )
    ]


def disk_problems(room: Room | None, speed: DiskSpeed | None) -> list[Problem]:
    """What is wrong with the folder runs are written to."""
    if speed is not None and speed.error is not None:
        return [
            Problem(
                key="disk-not-writable",
                severity=Severity.STOPS,
                what=f"this folder cannot be written: {speed.error}",
                costs="a run keeps its checkpoints, its ledger and its report here",
                do="change to a folder with room that you may write to (Kaggle: /kaggle/working, Colab: /content)",
            )
        ]
    found = []
    if room is not None and room.free_bytes < SHORT_DISK:
        full = room.free_bytes < FULL_DISK
        found.append(
            Problem(
                key="disk-full" if full else "disk-short",
                severity=Severity.STOPS if full else Severity.NOTE,
                what=f"{show_bytes(room.free_bytes)} free on this disk",
                costs="checkpoints hold the weights and twice as much optimizer state: they may not fit",
                do="free some room, or run in a folder on another disk",
            )
        )
    if speed is not None and speed.write_bytes_per_s is not None and speed.write_bytes_per_s < SLOW_WRITE:
        found.append(
            Problem(
                key="disk-slow",
                severity=Severity.SLOWS,
                what=f"this disk writes {show_bytes(speed.write_bytes_per_s)}/s",
                costs="every checkpoint and every cache takes that much longer",
                do="run in a folder on a local disk; copy the results to the slow one at the end",
            )
        )
    return found
