"""How many cores and how much memory this process may use, which is often less than the host has.

Three things bind: the CPU affinity, the cpuset, and the quotas of every cgroup from this process's
own up to the root. The tightest counts. `root` stands for `/`, so that tests can bring a tree.
"""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from hotlap.core.terminal import Say

ROOT: Final = Path("/")

WORKERS_A_CORE: Final = 4
"""Processes that may be started for each core: those that wait for a disk or a network leave theirs to others."""

BUSY: Final = 0.5
"""From this part of the cores at work on, a machine counts as busy."""

# cgroup v1 writes "no limit" as a page-rounded 2**63.
_NO_LIMIT: Final = 2**60


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """The processor as this process may use it."""

    model: str
    cores: int
    """How many this process may keep busy: affinity, cpuset and quota taken together."""
    host_cores: int
    quota: float | None
    """Cores' worth of time the tightest cgroup grants; None where none does."""
    flags: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Host memory as this process may use it."""

    allowed_bytes: int
    host_bytes: int
    free_bytes: int


def read_cpu(root: Path = ROOT, affinity: int | None = None) -> Cpu:
    """The CPU; `affinity` is the number of cores the scheduler allows (None: ask it)."""
    info = _text(root / "proc/cpuinfo")
    host = os.cpu_count() or 1
    if affinity is None:
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    bounds = [affinity]
    bounds += [count for folder in _folders(root, "cpuset") if (count := _cpuset(folder))]
    quotas = [quota for folder in _folders(root, "cpu") if (quota := _quota(folder))]
    quota = min(quotas, default=None)
    if quota is not None:
        bounds.append(math.ceil(quota))
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", info, re.MULTILINE)
    return Cpu(
        model=" ".join(model[1].split()) if model else platform.machine(),
        cores=max(1, min(bounds)),
        host_cores=host,
        quota=quota,
        flags=frozenset(flags[1].split()) if flags else frozenset(),
    )


def most_workers(cores: int | None = None) -> int:
    """How many worker processes may be started by so many cores (None: this process's): some for each, at least 8."""
    return max(8, WORKERS_A_CORE * (cores or read_cpu().cores))


def read_memory(root: Path = ROOT) -> HostMemory:
    """The memory a process may fill before it is killed, and what of it is free now."""
    host, host_free = _host_memory(root)
    allowed, free = host, host_free
    for folder in _folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or not 0 < limit < _NO_LIMIT:
            continue
        allowed = min(allowed, limit)
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # Pages of files read long ago count as used, but the kernel drops them on demand.
        stat = dict(line.partition(" ")[::2] for line in _text(folder / "memory.stat").splitlines())
        cached = _whole(stat.get("total_inactive_file", stat.get("inactive_file", ""))) or 0
        free = min(free, max(0, limit - used + cached))
    return HostMemory(allowed_bytes=allowed, host_bytes=host, free_bytes=min(free, allowed))


def busy_share(seconds: float = 0.1) -> float:
    """The part of the host's cores that is at work, seen over so many seconds, which this call takes."""
    import psutil

    return psutil.cpu_percent(interval=seconds) / 100


def why_timings_are_off(share: float) -> str | None:
    """What a busy machine does to timings, in a line; None if fewer than half of its cores are at work."""
    if share < BUSY:
        return None
    return f"other work keeps {share:.0%} of this machine's {os.cpu_count() or 1} cores busy, so timings may be off"


def warn_if_busy(show: Say) -> None:
    """Warn before timings if other work keeps this machine busy."""
    why = why_timings_are_off(busy_share())
    if why is not None:
        show(f"warning    {why}")


def _host_memory(root: Path) -> tuple[int, int]:
    """Total and available bytes of the host."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    info: dict[str, str] = dict(lines)
    if "MemTotal" in info:
        total = int(info["MemTotal"]) * 1024
        return total, int(info.get("MemAvailable", info["MemTotal"])) * 1024
    import psutil

    seen = psutil.virtual_memory()
    return seen.total, seen.available


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup folders for one controller, from its own up to the root of each mount."""
    base = root / "sys/fs/cgroup"
    paths = {"": "/", controller: "/"}
    for line in _text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for name in parts[1].split(","):
                paths[name] = parts[2]
    joint = "cpu,cpuacct"
    mounts = [(base, paths[""]), (base / "unified", paths[""]), (base / controller, paths[controller])]
    if controller == "cpu":
        mounts.append((base / joint, paths[controller]))
    for mount, path in mounts:
        # Inside a container the path is often the host's and not mounted here: the root still is.
        inner = [part for part in PurePosixPath(path).parts if part not in ("/", "..", ".")]
        for depth in range(len(inner), -1, -1):
            folder = mount.joinpath(*inner[:depth])
            if folder.is_dir():
                yield folder


def _quota(folder: Path) -> float | None:
    """Cores' worth of time granted here: v2 `cpu.max`, v1 `cpu.cfs_quota_us`."""
    words = _text(folder / "cpu.max").split()
    if len(words) == 2:
        quota, period = _whole(words[0]), _whole(words[1])
    else:
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    if quota is None or period is None or quota <= 0 or period <= 0:
        return None
    return quota / period


def _cpuset(folder: Path) -> int | None:
    """How many CPUs a cpuset names (`0-3,8`); None where it names none."""
    for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
        cpus: set[int] = set()
        for part in _text(folder / name).strip().split(","):
            span = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if span:
                cpus.update(range(int(span[1]), int(span[2] or span[1]) + 1))
        if cpus:
            return len(cpus)
    return None


def _text(path: Path) -> str:
    """The file's text; empty where it cannot be read, since a missing limit is no limit."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    return _whole(_text(path).strip())


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?\d{1,20}", text) else None
