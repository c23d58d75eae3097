"""The folder of one run: plan, ledger, metrics, environment, model and their list; and its lock."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Self

from hotlap.core.errors import HotlapError, StoreError
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.units import MIB, show_bytes
from hotlap.store.disk import read_small
from hotlap.store.files import append_line, finite, from_json, load_plan, read_text, save_plan, write_text
from hotlap.store.telemetry import LIVE, SAMPLES

if TYPE_CHECKING:
    from torch import nn

ABOUT = {
    "plan.toml": "how it was run; use it again with --plan",
    "ledger.jsonl": "every change of plan, with figures",
    "metrics.jsonl": "loss and metrics, a line an evaluation",
    "environment.json": "machine, versions and settings",
    "model.safetensors": "trained weights, for plain PyTorch",
    "started.json": "how it was started",
    "result.json": "what the script came to",
    "report.html": "the report of the run, to look at and to share",
    "record.json": "what was trained, from which weights, and how it ended",
    "loss.safetensors": "trained weights of the loss",
    "artefacts.json": "this list",
    SAMPLES: "GPU and host over time",
    LIVE: "how it stood last; hotlap watch shows it",
    "checkpoints/": "to go on from: hotlap resume",
    "checkpoints.made": "says that there were checkpoints",
    "trees.json": "boosters with their targets, settings and plan",
    "grown.jsonl": "the boosters that are done: hotlap resume",
    "tensorboard/": "metrics: tensorboard --logdir",
    "boosters/": "trained trees, for plain XGBoost or LightGBM",
}
MOST_LEDGER_BYTES = 64 * MIB
"""About 150,000 lines; a run has hundreds."""
SET_UP = ("lock", "started.json", "environment.json", "record.json", "ledger.jsonl")
"""The files of a run folder before `plan.toml`, which makes it a run."""
TELEMETRY = (SAMPLES, LIVE)
"""Files that may be there from the first moment on."""


@dataclass(frozen=True, kw_only=True)
class Artefact:
    """A file of a run."""

    name: str
    bytes: int
    what: str


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: str | Path | None, name: str = "run", *, home: Path | None = None) -> Self:
        """A new folder; hotlap refuses a folder with files, so that it overwrites nothing.

        A folder that a crash left before any training counts as new. Without a path, hotlap makes a fresh folder under
        `runs` in `home`, by default the working directory.
        """
        if path is None:
            return cls(_fresh((home or Path()) / "runs", name))
        wanted = Path(path)
        try:
            if wanted.exists() and not wanted.is_dir():
                raise StoreError(f"cannot use {wanted} as a run folder: it is a file; name a new folder")
            if wanted.is_dir() and any(wanted.iterdir()) and not _is_half_set_up(wanted):
                raise StoreError(f"the run folder {wanted} is not empty; name a new one or remove it")
            wanted.mkdir(parents=True, exist_ok=True)
        except StoreError:
            raise
        except OSError as error:
            raise StoreError(f"cannot make the run folder {wanted}: {error.strerror or error}") from error
        return cls(wanted)

    @staticmethod
    def check(path: str | Path | None) -> None:
        """Raise StoreError if the folder that `create` would make is not writable; makes no folder."""
        wanted = Path("runs" if path is None else path)
        try:
            with TemporaryFile(dir=_nearest(wanted.absolute())):
                pass
        except OSError as error:
            raise StoreError(
                f"cannot write a run into {wanted}: {error.strerror or error}; name another (--out)"
            ) from None

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """The folder of an earlier run; raises StoreError if it is none."""
        if not (Path(path) / "plan.toml").is_file():
            if _is_half_set_up(Path(path)):
                raise StoreError(f"{path} holds no training yet: its run ended before the first step; start it anew")
            raise StoreError(f"{path} is not a run folder: it has no plan.toml")
        return cls(Path(path))

    def write_plan(self, plan: Plan) -> None:
        """Write `plan.toml`."""
        save_plan(plan, self.path / "plan.toml")

    def read_plan(self) -> Plan:
        """The plan at the end of the run."""
        return load_plan(self.path / "plan.toml")

    def write_ledger(self, ledger: Ledger) -> None:
        """Write `ledger.jsonl`."""
        write_text(self.path / "ledger.jsonl", ledger.to_lines())

    def read_ledger(self) -> Ledger:
        """Every change of plan of the run."""
        file = self.path / "ledger.jsonl"
        text = read_text(file, MOST_LEDGER_BYTES)
        try:
            return Ledger.from_lines(text)
        except HotlapError as error:
            raise StoreError(f"{file}: {error}") from None

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append a line to `metrics.jsonl`."""
        append_line(self.path / "metrics.jsonl", json.dumps(finite(record)))

    def write_metrics(self, records: list[dict[str, Any]]) -> None:
        """Replace `metrics.jsonl` by these lines."""
        lines = "".join(json.dumps(finite(record)) + "\n" for record in records)
        write_text(self.path / "metrics.jsonl", lines)

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of `metrics.jsonl`, without a last line that a crash cut short."""
        file = self.path / "metrics.jsonl"
        # A complete line ends with a line break; what follows the last one was cut short.
        *lines, _ = read_text(file).split("\n")
        records = []
        for number, line in enumerate(lines, 1):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                raise StoreError(f"{file}: line {number} is not JSON") from None
        return records

    def write_environment(self, facts: dict[str, Any]) -> None:
        """Write `environment.json`."""
        write_text(self.path / "environment.json", json.dumps(finite(facts), indent=2) + "\n")

    def write_started(self, record: dict[str, Any]) -> None:
        """Write `started.json`."""
        write_text(self.path / "started.json", json.dumps(finite(record), indent=2) + "\n")

    def read_started(self) -> dict[str, Any]:
        """The content of `started.json`: how the run was started."""
        name = "started.json"
        record = from_json(read_small(self.path / name, MIB), name)
        if not isinstance(record, dict):
            raise StoreError(f"{self.path / name} is not a start record")
        return record

    def write_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`."""
        write_text(self.path / "result.json", json.dumps(finite(result), indent=2) + "\n")

    def check_room(self, need_bytes: int) -> None:
        """Raise StoreError if the disk has fewer than `need_bytes` bytes free."""
        free = shutil.disk_usage(self.path).free
        if free < need_bytes:
            raise StoreError(
                f"checkpoints in {self.path} need {show_bytes(need_bytes)} and the disk has {show_bytes(free)} free; "
                "free some space, name another folder, or save none (save_every=0)"
            )

    def write_model(self, model: nn.Module) -> None:
        """Write `model.safetensors`."""
        from hotlap.store.weights import save_weights  # torch, which reading a run does without

        save_weights(model, self.path / "model.safetensors", {"format": "pt", "written_by": "hotlap"})

    def write_loss(self, loss: nn.Module) -> None:
        """Write `loss.safetensors`: the weights of the loss."""
        from hotlap.store.weights import save_weights

        save_weights(loss, self.path / "loss.safetensors", {"format": "pt", "written_by": "hotlap"})

    def artefacts(self) -> list[Artefact]:
        """The files of the run with their sizes, without hidden ones, which a crash may leave."""
        try:
            here = sorted(f for f in self.path.iterdir() if not f.name.startswith(".") and f.name != "lock")
            sizes = {f.name: f.stat().st_size for f in here if f.is_file()}
            for name, files in (("boosters", "*"), ("checkpoints", "step-*/*"), ("tensorboard", "*")):
                kept = [f.stat().st_size for f in (self.path / name).glob(files)]
                if kept:
                    sizes[f"{name}/"] = sum(kept)
            return [Artefact(name=name, bytes=size, what=ABOUT.get(name, "")) for name, size in sizes.items()]
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error.strerror or error}") from error

    def write_artefacts(self) -> None:
        """Write `artefacts.json`: all other files with their sizes."""
        rows = [vars(artefact) for artefact in self.artefacts() if artefact.name != "artefacts.json"]
        write_text(self.path / "artefacts.json", json.dumps(rows, indent=2) + "\n")


def _nearest(path: Path) -> Path:
    """The path, or its nearest parent that exists. Raises OSError if no parent does."""
    for each in (path, *path.parents):
        with suppress(FileNotFoundError):
            each.lstat()
            return each
    raise FileNotFoundError(path)


def _is_half_set_up(folder: Path) -> bool:
    """Whether a crash left this folder before it became a run; its first file is the lock, or how it stood."""
    try:
        names = {file.name for file in folder.iterdir()}
    except OSError:
        return False
    # Names of unfinished files of `write_atomically`.
    torn = tuple(f".{name}." for name in (*SET_UP, *TELEMETRY, "plan.toml"))
    known = (*SET_UP, *TELEMETRY)
    return bool({"lock", LIVE} & names) and all(name in known or name.startswith(torn) for name in names)


def _fresh(parent: Path, name: str) -> Path:
    """Make a folder that no other run has, not even one that starts at the same moment."""
    stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = parent / (f"{name}-{stamp}" if number == 1 else f"{name}-{stamp}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            if not parent.is_dir():  # `parent` is a file, so no number helps
                raise StoreError(f"cannot make the run folder {path}: {parent} is a file") from None
        except OSError as error:
            raise StoreError(f"cannot make the run folder {path}: {error.strerror or error}") from error
        else:
            return path
    raise AssertionError("numbers never end")


_locked_here: dict[Path, int] = {}
"""Folders locked by this process, with its pid: the system's lock works between processes only."""
_lock_changes = threading.Lock()


def is_locked_here(folder: Path) -> bool:
    """Whether this process has locked a run folder. Then no one else in it may open the lock: closing it unlocks."""
    return _locked_here.get(folder.resolve()) == os.getpid()


class RunLock:
    """Locks a run folder for this process. Raises StoreError if another training has it.

    The system releases the lock when the process ends, however it ends.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._owner = os.getpid()
        with _lock_changes:
            # A forked child has a copy of the table, but not its parent's locks.
            if _locked_here.get(self._folder) == self._owner:
                raise StoreError(f"{folder} is in use by another training in this process; name another folder")
            self._handle = _locked(self._folder, folder)
            _locked_here[self._folder] = self._owner
        with contextlib.suppress(OSError):  # a full disk; the lock works without the number
            os.ftruncate(self._handle, 0)
            os.write(self._handle, f"{self._owner}\n".encode())

    def release(self) -> None:
        """Release the lock; the file stays, since removing it could let two others in at once."""
        with _lock_changes:
            if self._handle >= 0 and self._owner == os.getpid():
                _locked_here.pop(self._folder, None)
                with contextlib.suppress(OSError):
                    os.ftruncate(self._handle, 0)  # this process may live on, and is at work here no more
                os.close(self._handle)
                self._handle = -1


def _locked(folder: Path, shown: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(folder / "lock", flags, 0o666)
    except OSError as error:
        raise StoreError(f"cannot lock {shown}: {error.strerror or error}") from error
    try:
        # Not flock: DataLoader workers would inherit it and hold it for seconds after a kill.
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(handle, 20).decode(errors="replace").strip()
        os.close(handle)
        if not isinstance(error, (BlockingIOError, PermissionError)):
            raise StoreError(f"cannot lock {shown}: {error.strerror or error}") from error
        owner = f"process {holder}" if holder.isdigit() else "another process"
        raise StoreError(f"{shown} is in use by {owner}; wait for it, or name another folder") from None
    return handle
