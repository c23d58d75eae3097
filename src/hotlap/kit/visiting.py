"""Looks at somebody's script: each takes a process of its own, which is ended after some updates."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from hotlap.core.errors import StoreError, TrainingError
from hotlap.core.terminal import logger
from hotlap.kit.looks import Seen, Wish
from hotlap.kit.saved_files import bring_back, holds_files, put_back
from hotlap.kit.search import TooShortError
from hotlap.script.running import Target
from hotlap.store.cache import default_root, make_private
from hotlap.store.run_folder import RunLock

log = logger(__name__)

MOST_S = 600.0
"""What one look may take, with all that the script does before it trains."""
SAID = "said.txt"
"""What the script prints; in the folder of a look, once that is locked."""
RUNS = (
    "the script was run anew for each try, for some updates; files that it wrote, replaced or removed were put back, "
    "new ones of its torch.save taken away; other new files stay"
)


class EndedError(TrainingError):
    """A script ended by an error of its own."""

    def __init__(self, name: str, why: str, trace: str = "") -> None:
        """`why` in a line; `trace` are those of its code that led to it."""
        lines = [line if line.startswith("  ") else f"  {line}" for line in trace.split("\n") if trace]
        super().__init__("\n".join([f"{name} ended by an error: {why}", *lines]))
        self.why = why


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Inside, a signal that would end this process at once lets it put files back before: then it exits."""
    if threading.current_thread() is not threading.main_thread():  # Python has signals for the main one alone
        yield
        return
    watched = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    taken = [number for number in watched if signal.getsignal(number) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _look_folder() -> Iterator[Path]:
    """A folder for one look; what looks that were killed have left in theirs is brought back before."""
    looks = default_root() / "looks"
    try:
        make_private(looks.parent, looks)
        for left in [said.parent for said in looks.glob(f"*/{SAID}")]:
            with contextlib.suppress(StoreError), _locked(left):  # else it is being used
                _bring_back(left)
        folder = Path(tempfile.mkdtemp(dir=looks))
    except StoreError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot keep the files of a script in {looks}: {error.strerror or error}; name a folder with HOTLAP_CACHE"
        ) from error
    with _locked(folder):
        try:
            yield folder
        finally:
            if not holds_files(folder):
                shutil.rmtree(folder, ignore_errors=True)  # somebody may look whether it is left


def _bring_back(left: Path) -> None:
    try:
        for line in bring_back(left):
            log.warning("%s", line)
    except OSError as error:
        log.warning("files that an earlier look has kept are still in %s: %s", left, error)
    else:
        shutil.rmtree(left, ignore_errors=True)  # its owner may be at it


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = RunLock(folder)
    try:
        yield
    finally:
        lock.release()


def _put_back(folder: Path) -> None:
    try:
        for place in put_back(folder):
            _warn(f"{place} is opened to be changed, and too large to be copied: it is not put back")
    except OSError as error:
        raise StoreError(
            f"not all files that the script has written are put back: {error}; they are kept in {folder}, "
            "and the next look brings them back"
        ) from error


@functools.cache
def _warn(line: str) -> None:
    """Once in a process: there are many looks."""
    log.warning("%s", line)


def visit(target: Target, wish: Wish) -> Seen:
    """Run a script for some updates, as the wish says, and tell what was seen.

    Raises EndedError where it ended by an error of its own, TooShortError where it was over before it had made enough
    updates, TrainingError where it takes too long.
    """
    with _ended_in_order(), _look_folder() as folder:
        report, said = folder / "seen.json", folder / SAID
        settings = json.dumps({**asdict(wish), "report": str(report)})
        command = [sys.executable, "-m", "hotlap.kit.child", settings, *target.words]
        with said.open("wb") as out:
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=MOST_S, check=False
                )
            except subprocess.TimeoutExpired:
                raise TrainingError(f"{target.name} made too few updates in {MOST_S:.0f} s") from None
            finally:
                _put_back(folder)
        seen = Seen(**json.loads(report.read_text(encoding="utf-8"))) if report.is_file() else None
        last = said.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    if seen is not None and seen.late is not None:
        raise TrainingError(
            f"{target.name} has made no update in {wish.begins_s:g} s, and is at {seen.late}; "
            "name the script that trains, or give it more time (--seconds)"
        )
    is_seen = seen is not None and bool(seen.laps or seen.out_of_memory or seen.why_not)
    if seen is None or seen.error is not None or (done.returncode and not is_seen):
        why = seen.error if seen is not None and seen.error else (last[0] if last else f"exit code {done.returncode}")
        if why.startswith("EOFError"):
            why += " (it is run without anything to read on stdin)"
        raise EndedError(target.name, why, "" if seen is None else seen.trace)
    if not is_seen:
        changed = ", ".join(f"{name}={value}" for name, value in wish.change.items())
        raise TooShortError(
            f"{target.name} is over after {seen.updates:,} updates{f' with {changed}' if changed else ''}, "
            "too few to be timed; let it train for a few seconds"
            if seen.updates
            else f"{target.name} is over, and none of torch's optimizers made an update; name the script that trains"
        )
    return seen
