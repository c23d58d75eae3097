"""One trial: start a training, harm it, resume it until it ends, and compare its fate with the undisturbed one's.

Every training runs in a forked child, so that torch is loaded once. The parent only forks, kills and compares:
it never computes with torch, whose threads would not survive a fork.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from hotlap.core.errors import StoreError
from hotlap.fitting.loop import fit
from hotlap.store import disk
from hotlap.stress.victim import fate_of, victim_job

SAVE_EVERY = 3
"""Updates between two checkpoints: most of them fall inside an epoch."""
PATIENCE_S = 120.0
"""A child that takes longer hangs."""
REFUSED = 40
"""Exit code of a child that could not resume, and said why."""


@dataclass
class Tally:
    """What came of all trials."""

    kills: int = 0
    damages: int = 0
    resumes: int = 0
    anew: int = 0
    """Killed before the first checkpoint: nothing had been trained, so it was begun anew."""
    equal: int = 0
    trials: int = 0
    lost: list[str] = field(default_factory=list)
    """Trials that did not end as the undisturbed training did, and how."""


def trained(folder: Path, *, resume: bool, workers: int, watcher: Callable[[str], None] | None = None) -> int:
    """Run the training in a child; its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ["HOTLAP_PROGRESS"] = "off"
        with disk.watched(watcher or (lambda _: None)):
            place = {"resume": folder} if resume else {"out": folder}
            fit(victim_job(workers), **place, save_every=SAVE_EVERY, progress=False)  # type: ignore[arg-type]
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except StoreError as error:
        (folder / "refused.txt").write_text(str(error)) if folder.is_dir() else None
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int, within_s: float = PATIENCE_S) -> int | None:
    """The exit code of a child (negative: the signal that killed it), or None where it is still running then."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def stop(pid: int) -> None:
    """Kill a child and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def kill_at(event: int) -> Callable[[str], None]:
    """A watcher that kills its own process at the so manieth moment before or after a system call of a save."""
    seen = 0

    def watch(_: str) -> None:
        nonlocal seen
        seen += 1
        if seen == event:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


class Trials:
    """Trials against one undisturbed training, in a folder of their own."""

    def __init__(self, *, seed: int, workers: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hotlap-stress-"))
        self.tally = Tally()
        self._draw = random.Random(seed)
        self._workers = workers
        torch.set_num_threads(1)
        victim_job(0)  # loads what torch loads late, once for all children
        whole = self.folder / "undisturbed"
        pid = trained(whole, resume=False, workers=workers)
        self._first_checkpoint(whole)
        begun = time.monotonic()
        code = ended(pid)
        if code != 0:
            raise StoreError(f"the undisturbed training ended with {code}")
        self.whole_s = time.monotonic() - begun
        self.fate = fate_of(whole)
        shutil.rmtree(whole)

    def close(self) -> None:
        """Remove all that the trials left."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def at_random(self) -> None:
        """Kill at random moments, now and then several times, with or without damage to the newest checkpoint."""
        run = self.folder / f"run-{self.tally.trials}"
        told, resume = [], False
        for _ in range(self._draw.choice((1, 1, 2, 3))):
            way = self._draw.choice(("time", "time", "save", "term"))
            if way == "save":
                event = self._draw.randrange(1, 160)
                pid = trained(run, resume=resume, workers=self._workers, watcher=kill_at(event))
                code = ended(pid)
                told.append(f"killed at moment {event} of saving")
            else:
                pid = trained(run, resume=resume, workers=self._workers)
                # One in five is killed while it sets itself up, the others while they train.
                if self._draw.random() < 0.8:
                    self._first_checkpoint(run)
                code = ended(pid, self._draw.uniform(0.0, 1.0) * self.whole_s)
                if code is None:
                    os.kill(pid, signal.SIGTERM if way == "term" else signal.SIGKILL)
                    code = ended(pid)
                    told.append(f"{'terminated' if way == 'term' else 'killed'} at random")
            if code in (-signal.SIGKILL, 143, -signal.SIGTERM):
                self.tally.kills += 1
            elif code != 0:
                self._lose(told, f"a child ended with {code}{_words(run)}")
                return
            if self._draw.random() < 0.4:
                told.append(self._damage(run))
            resume = self._has_checkpoint(run)
            if not resume and run.exists():
                shutil.rmtree(run)
        self._conclude(run, told, resume)

    def at_every_call(self) -> Iterator[int]:
        """Kill before and after every system call of one save in the middle; the number of moments so far."""
        # Each save of this training makes as many calls as the one before, once there are two to keep.
        counted = self.folder / "calls"
        moments = self._moments_of_saves(counted)
        save = len(moments) // 2
        first, last = moments[save - 1] + 1, moments[save]
        for event in range(first, last + 1):
            run = self.folder / f"call-{event}"
            code = ended(trained(run, resume=False, workers=self._workers, watcher=kill_at(event)))
            self.tally.kills += code == -signal.SIGKILL
            told = [f"killed at moment {event} ({event - first + 1} of {last - first + 1}) of a save"]
            if code != -signal.SIGKILL:
                self._lose(told, f"a child ended with {code}{_words(run)}")
            else:
                self._conclude(run, told, resume=True)
            yield event - first + 1

    def _moments_of_saves(self, folder: Path) -> list[int]:
        """After how many moments each save of an undisturbed training was done."""
        log = self.folder / "moments"

        def count(moment: str) -> None:
            with log.open("a") as file:
                file.write(moment + "\n")

        code = ended(trained(folder, resume=False, workers=self._workers, watcher=count))
        if code != 0:
            raise StoreError(f"the training whose calls are counted ended with {code}")
        lines = log.read_text().splitlines()
        # A save begins with a folder of its own.
        starts = [n for n, line in enumerate(lines) if line == "before make folder"]
        shutil.rmtree(folder)
        return starts[1:]

    def _conclude(self, run: Path, told: list[str], resume: bool) -> None:
        """Let the training end, and compare."""
        if resume:
            self.tally.resumes += 1
        else:
            self.tally.anew += 1
        code = ended(trained(run, resume=resume, workers=self._workers))
        if code != 0:
            self._lose(told, f"it could not go on: {'hangs' if code is None else code}{_words(run)}")
            return
        self.tally.trials += 1
        if fate_of(run) == self.fate:
            self.tally.equal += 1
        else:
            self.tally.lost.append(f"{'; '.join(told)}: ended otherwise")
        shutil.rmtree(run)

    def _lose(self, told: list[str], how: str) -> None:
        self.tally.trials += 1
        self.tally.lost.append(f"{'; '.join(told)}: {how}")

    def _first_checkpoint(self, run: Path) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self._has_checkpoint(run) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _has_checkpoint(self, run: Path) -> bool:
        return any((run / "checkpoints").glob("step-*"))

    def _damage(self, run: Path) -> str:
        """Flip, cut or remove a file of the newest checkpoint, where there is one before it to fall back on."""
        found = sorted((run / "checkpoints").glob("step-*"))
        if len(found) < 2:
            return "nothing to damage"
        self.tally.damages += 1
        file = self._draw.choice(sorted(found[-1].iterdir()))
        way = self._draw.choice(("flipped", "cut", "removed", "emptied"))
        content = bytearray(file.read_bytes())
        if way == "flipped":
            content[self._draw.randrange(len(content))] ^= 1 << self._draw.randrange(8)
            file.write_bytes(content)
        elif way == "cut":
            file.write_bytes(content[: self._draw.randrange(len(content))])
        elif way == "emptied":
            file.write_bytes(b"")
        else:
            file.unlink()
        return f"{file.parent.name}/{file.name} {way}"


def _words(run: Path) -> str:
    file = run / "refused.txt"
    return f": {file.read_text()}" if file.is_file() else ""
