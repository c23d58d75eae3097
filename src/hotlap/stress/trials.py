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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from hotlap.core.errors import StoreError
from hotlap.fitting.fit import fit
from hotlap.store import disk
from hotlap.stress.victim import ended_at, fate_of, victim_job

SAVE_EVERY = 3
"""Updates between two checkpoints: most of them fall inside an epoch."""
UNSAVED = 0.3
"""Of the trials so many leave it to hotlap when to save, for which these trainings are too short: they are killed
before their first checkpoint."""
PATIENCE_S = 120.0
"""A child that takes longer hangs."""
REFUSED = 40
"""Exit code of a child that cannot resume, and has written the reason down."""


@dataclass
class Tally:
    """What came of all trials."""

    kills: int = 0
    damages: int = 0
    resumes: int = 0
    anew: int = 0
    """Killed before the first checkpoint: begun again at step 0."""
    equal: int = 0
    trials: int = 0
    """Trainings that were killed at least once."""
    lost: list[str] = field(default_factory=list)
    """Trials that did not end as the undisturbed training did, and how."""


class Child:
    """A training in a separate process."""

    def __init__(
        self,
        folder: Path,
        *,
        workers: int,
        save_every: int | None = SAVE_EVERY,
        watcher: Callable[[str], None] | None = None,
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._code: int | None = None
        self._pid = os.fork()
        if not self._pid:
            _train_and_exit(folder, workers, save_every, watcher)

    def ended(self, within_s: float = PATIENCE_S) -> int | None:
        """Its exit code (negative: the signal that killed it), or None where it is still running then."""
        deadline = time.monotonic() + within_s
        while self._code is None:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= deadline:
                break
            else:
                time.sleep(0.002)
        return self._code

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        if self.ended(0) is None:
            os.kill(self._pid, number)

    def end(self) -> None:
        """Make sure that it is gone."""
        self.signal(signal.SIGKILL)
        self.ended()


def _train_and_exit(
    folder: Path, workers: int, save_every: int | None, watcher: Callable[[str], None] | None
) -> NoReturn:
    code = 1
    try:
        torch.set_num_threads(1)
        os.environ["HOTLAP_PROGRESS"] = "off"
        with disk.watched(watcher or (lambda _: None)):
            # Before there is a plan nothing was begun there: it is started anew, in the same folder.
            place = {"resume": folder} if (folder / "plan.toml").is_file() else {"out": folder}
            fit(victim_job(workers), plan="off", **place, save_every=save_every, progress=False)  # type: ignore[arg-type]
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except StoreError as error:
        if folder.is_dir():
            (folder / "refused.txt").write_text(str(error))
        code = REFUSED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


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
        self._child: Child | None = None
        torch.set_num_threads(1)
        victim_job(0)  # loads what torch loads late, once for all children
        whole = self.folder / "undisturbed"
        child = self._start(whole)
        self._wait_for(lambda: _has_checkpoint(whole), child)
        begun = time.monotonic()
        code = child.ended()
        if code != 0:
            self.close()
            raise StoreError(f"the undisturbed training {_how_it_ended(code, whole)}")
        self.whole_s = time.monotonic() - begun
        self.fate = fate_of(whole)
        shutil.rmtree(whole)

    def close(self) -> None:
        """End running children, and remove the files of the trials."""
        if self._child is not None:
            self._child.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def at_random(self) -> None:
        """Kill at random moments, now and then several times, with or without damage to the newest checkpoint."""
        run = self.folder / f"run-{self.tally.trials}"
        events: list[str] = []
        had, kills = False, self.tally.kills
        save_every = None if self._draw.random() < UNSAVED else SAVE_EVERY
        for _ in range(self._draw.choice((1, 1, 2, 3))):
            how, code = self._harm(run, save_every)
            events += [how] if how else []
            if code in (-signal.SIGKILL, 143, -signal.SIGTERM):
                self.tally.kills += 1
            elif code != 0:
                self._lose(run, events, f"a child {_how_it_ended(code, run)}")
                return
            # What had ended is as it was written, whatever becomes of the checkpoints.
            if self._draw.random() < 0.4 and ended_at(run) is None:
                events.append(self._damage(run))
            if had and not _has_checkpoint(run):
                self._lose(run, events, "its checkpoints are gone")
                return
            had = _has_checkpoint(run)
        self._conclude(run, events, counts=self.tally.kills > kills)

    def _harm(self, run: Path, save_every: int | None) -> tuple[str, int | None]:
        """Run the training and kill it in one of the ways there are; in which, and its exit code."""
        way = self._draw.choice(("time", "time", "save", "term"))
        if way == "save" and save_every is not None:
            event = self._draw.randrange(1, 160)
            child = self._start(run, watcher=kill_at(event))
            return f"killed at moment {event} of saving", child.ended()
        child = self._start(run, save_every=save_every)
        # One in five is killed while it sets itself up, the others while they train.
        if self._draw.random() < 0.8:
            begun = (lambda: _has_checkpoint(run)) if save_every is not None else (run / "plan.toml").is_file
            self._wait_for(begun, child)
        code = child.ended(self._draw.uniform(0.0, 1.0) * self.whole_s)
        if code is not None:
            return "", code
        child.signal(signal.SIGTERM if way == "term" else signal.SIGKILL)
        return f"{'terminated' if way == 'term' else 'killed'} at random", child.ended()

    def moments(self) -> dict[int, str]:
        """Every moment before and after a system call of one save in the middle, by number.

        Each save of the training makes as many calls as the one before, once there are two to keep.
        """
        log = self.folder / "moments"

        def note(moment: str) -> None:
            with log.open("a") as file:
                file.write(moment + "\n")

        counted = self.folder / "counted"
        code = self._start(counted, watcher=note).ended()
        if code != 0:
            raise StoreError(f"the training whose calls are counted {_how_it_ended(code, counted)}")
        shutil.rmtree(counted)
        lines = log.read_text().splitlines()
        log.unlink()
        # A save begins with a new folder.
        starts = [n for n, line in enumerate(lines) if line == "before make folder"]
        middle = len(starts) // 2
        return {n + 1: lines[n] for n in range(starts[middle], starts[middle + 1])}

    def at_call(self, event: int, name: str) -> None:
        """Kill at one of these moments."""
        run = self.folder / f"call-{event}"
        code = self._start(run, watcher=kill_at(event)).ended()
        events = [f"killed {name} (moment {event}) of a save"]
        if code != -signal.SIGKILL:
            self._lose(run, events, f"a child {_how_it_ended(code, run)}")
        else:
            self.tally.kills += 1
            self._conclude(run, events, counts=True)

    def _conclude(self, run: Path, events: list[str], *, counts: bool) -> None:
        """Let the training end, and compare. One that was never killed counts only where it ended otherwise."""
        if counts and _has_checkpoint(run):
            self.tally.resumes += 1
        elif counts:
            self.tally.anew += 1
        # One that left the saving to hotlap may have ended before, and then has a result and no state.
        had_ended = ended_at(run) is not None
        code = self._start(run).ended()
        result, state = fate_of(run) if code == 0 else ("", None)
        if code != 0:
            self._lose(run, events, f"it could not go on: it {_how_it_ended(code, run)}")
        elif result != self.fate[0] or (state != self.fate[1] and not (had_ended and state is None)):
            self._lose(run, events, "ended otherwise")
        else:
            self.tally.trials += counts
            self.tally.equal += counts
            shutil.rmtree(run)

    def _lose(self, run: Path, events: list[str], how: str) -> None:
        self.tally.trials += 1
        self.tally.lost.append(f"{'; '.join(events) or 'not killed'}: {how}")
        shutil.rmtree(run, ignore_errors=True)

    def _start(
        self, run: Path, *, save_every: int | None = SAVE_EVERY, watcher: Callable[[str], None] | None = None
    ) -> Child:
        """Start the training, or go on with it where it was begun."""
        if self._child is not None:
            self._child.end()  # one that hangs
        self._child = Child(run, workers=self._workers, save_every=save_every, watcher=watcher)
        return self._child

    def _wait_for(self, happened: Callable[[], bool], child: Child) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened() and child.ended(0) is None and time.monotonic() < deadline:
            time.sleep(0.002)

    def _damage(self, run: Path) -> str:
        """Flip, cut or remove a file of the newest checkpoint, where there is one before it to fall back on."""
        found = sorted((run / "checkpoints").glob("step-*"))
        if len(found) < 2:
            return "nothing to damage"
        files = [file for file in sorted(found[-1].iterdir()) if file.stat().st_size]
        if not files:
            return "nothing to damage"
        self.tally.damages += 1
        file = self._draw.choice(files)
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


def _has_checkpoint(run: Path) -> bool:
    # Also one that was being replaced by another of the same step, which a resume gives its name back.
    return any(any((run / "checkpoints").glob(name)) for name in ("step-*", ".was-*"))


def _how_it_ended(code: int | None, run: Path) -> str:
    file = run / "refused.txt"
    reason = f": {file.read_text()}" if code == REFUSED and file.is_file() else ""
    return "hangs" if code is None else f"ended with {code}{reason}"
