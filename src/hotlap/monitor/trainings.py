"""Trainings as others see them: what their folders say, and whether their processes still run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError, UsageError
from hotlap.core.terminal import clean
from hotlap.store.telemetry import LIVE, read_live, still_runs

DEEPEST, MOST_FOLDERS = 4, 5000
"""How far below a folder trainings are looked for, and in how many folders at most."""
NO_RUNS = ("checkpoints", "boosters")
"""Folders of a run that hold no other run."""
SILENT_S = 30.0
"""Without a word for so long, a training that runs is stopped, or hangs."""
RUNNING, SILENT, ENDED, KILLED = "running", "silent", "ended", "killed"


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that has laid out how it stands."""

    folder: Path
    status: str
    """`running`, `silent` (it runs and says nothing), `ended`, or `killed` (it is gone without an end)."""
    state: dict[str, Any]
    """What `live.json` holds, which may be a stranger's."""

    @property
    def is_open(self) -> bool:
        """Whether its process still runs."""
        return self.status in (RUNNING, SILENT)

    def text(self, name: str) -> str:
        """A text of the state; empty where it has none."""
        value = self.state.get(name)
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> float | None:
        """A number of the state; None where it has none."""
        value = self.state.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    def part(self, *names: str) -> dict[str, Any]:
        """An object of the state; empty where it has none."""
        found: Any = self.state
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        return found if isinstance(found, dict) else {}

    def to_dict(self) -> dict[str, Any]:
        """It as JSON."""
        return {"run": str(self.folder), "status": self.status, **self.state}


def find(folder: Path) -> list[Training]:
    """All trainings in a folder and below it: those that run first, then the latest."""
    found = [training for path in _folders(folder) if (training := _training(path)) is not None]
    return sorted(found, key=lambda one: (not one.is_open, -one.state["at"]))


def _training(folder: Path) -> Training | None:
    state = read_live(folder)
    if state is None:
        return None
    if state.get("ended") is True:
        status = ENDED
    elif not still_runs(state["pid"], state["at"]):
        status = KILLED
    else:
        status = RUNNING if time.time() - state["at"] < SILENT_S or state.get("kind") == "search" else SILENT
    return Training(folder=folder, status=status, state=state)


def _folders(top: Path) -> Iterator[Path]:
    """The folders that may be runs, the nearest first."""
    level, seen = [top], 0
    for _ in range(DEEPEST + 1):
        below: list[Path] = []
        for folder in level:
            seen += 1
            if seen > MOST_FOLDERS:
                return
            with suppress(OSError), os.scandir(folder) as entries:
                inner = [Path(entry.path) for entry in entries if _may_hold_runs(entry)]
                if (folder / LIVE).is_file():
                    yield folder
                below += sorted(inner, reverse=True)  # names end with times: the latest first
        level = below


def _may_hold_runs(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and entry.name not in NO_RUNS


# --- a process that is no training of hotlap's ------------------------------------------------------------------


class OutsideReader:
    """Reads what can be seen of a process from outside. Raises UsageError where there is no such process."""

    def __init__(self, pid: int) -> None:
        import psutil

        self._psutil = psutil
        try:
            self._process = psutil.Process(pid)
            self._before = self._work()
        except (psutil.Error, ValueError, OverflowError):
            raise UsageError(f"no process has the number {pid}; `hotlap watch` without it lists trainings") from None

    def read(self, gpus: list[dict[str, Any]]) -> dict[str, Any] | None:
        """The figures of this moment; those of work are since the last reading. None once it has ended."""
        process = self._process
        try:
            now, before = self._work(), self._before
            self._before = now
            with process.oneshot():
                command = " ".join(process.cmdline()) or process.name()
                found: dict[str, Any] = {
                    "pid": process.pid,
                    "command": clean(command[:400]),
                    "seconds": max(0.0, time.time() - process.create_time()),
                    "cores_busy": max(0.0, now[1] - before[1]) / max(1e-6, now[0] - before[0]),
                    "ram_bytes": int(process.memory_info().rss),
                    "threads": process.num_threads(),
                }
            children = process.children(recursive=True)
        except self._psutil.NoSuchProcess:
            return None
        except self._psutil.Error as error:  # of another user, say
            return {"pid": process.pid, "command": "", "why": clean(str(error))}
        held = [_ram(child) for child in children]
        found |= {"children": len(children), "children_ram_bytes": sum(held)}
        own = {process.pid, *(child.pid for child in children)}
        found["gpus"] = [gpu["index"] for gpu in gpus if own & set(gpu.get("other_pids", ()))]
        return found

    def _work(self) -> tuple[float, float]:
        times = self._process.cpu_times()
        return time.monotonic(), times.user + times.system


def _ram(process: Any) -> int:
    with suppress(Exception):  # it may end at any moment
        return int(process.memory_info().rss)
    return 0


def named(target: str | os.PathLike[str] | None) -> Path | int:
    """What a user wants to watch: a folder, or a process by its number. Raises StoreError where it is neither."""
    if target is None:
        return Path("runs")
    path = Path(target)
    if path.is_dir():
        return path
    if str(target).isdecimal() and len(str(target)) < 10:
        return int(str(target))
    what = "is a file" if path.exists() else "does not exist"
    raise StoreError(f"{clean(str(target))} {what}; name the folder of a run, or the number of a process")
