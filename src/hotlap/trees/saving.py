"""What a training of trees saves, and what a resumed one finds: boosters that are done, and some that grow.

A booster that grows is saved only where it can go on to the same bits: one of XGBoost on a CPU without sampling. Others
begin again.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError, listed
from hotlap.core.units import MIB
from hotlap.fitting.fit import AnotherTrainingError
from hotlap.fitting.record import Record, read_record, write_record
from hotlap.guard.fingerprint import describe
from hotlap.store.files import append_line, read_bytes, read_text, write_bytes, write_text
from hotlap.store.run_folder import RunFolder
from hotlap.trees.booster_checks import need
from hotlap.trees.files import content_of
from hotlap.trees.growing import Grown
from hotlap.trees.job import TreeJob
from hotlap.trees.libraries import Score
from hotlap.trees.model import BOOSTERS, MOST_BOOSTER_BYTES, booster_name, checked_booster, settings_of

GROWN = "grown.jsonl"
MOST_LINES_BYTES = 1024 * MIB
SAVE_S, COSTS = 10.0, 0.02
"""A booster that grows is saved after so many seconds, and for this part of the time at most."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a training ended."""

    stopped: str
    train_s: float
    total_s: float


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a training has left in its folder."""

    plan: dict[str, Any] | str = "auto"
    """Its plan; "auto" where it had still to be found."""
    ran: dict[str, str] = field(default_factory=dict)
    """The parameters that the library reported."""
    grown: tuple[Grown, ...] = ()
    """Boosters that are done."""
    begun: tuple[Grown, ...] = ()
    """Boosters that had grown for some rounds."""
    train_s: float = 0.0
    """Seconds of training before."""
    ended: Ended | None = None


class Saver:
    """Saves the boosters of a training in its folder, from any thread."""

    def __init__(self, folder: RunFolder, job: TreeJob, left: Left | None = None) -> None:
        self.folder, self.left, self.is_resumed = folder, left or Left(), left is not None
        self._library, self._facts, self._lock = job.library, {"identity": identity_of(job)}, threading.Lock()
        self._kept = {_key(self._name(booster), booster.content) for booster in self.left.grown}
        self._next_s: dict[range, float] = {}
        self._began_s = time.perf_counter()

    @property
    def train_s(self) -> float:
        """Seconds of training, those before an interruption included."""
        return self.left.train_s + time.perf_counter() - self._began_s

    def note(self, **facts: Any) -> None:
        """Write down the plan, what the library reports, or how the training ended."""
        self._facts |= facts
        write_record(self.folder, Record(facts=self._facts, first=None))

    def keep(self, booster: Grown, ran: dict[str, str]) -> None:
        """Keep a booster that is done, and the parameters that its library reports."""
        with self._lock:
            if "ran" not in self._facts:
                self.note(ran=ran)
            if booster.whole:
                name = self._name(booster)
                self.write(name, booster.content)
                self._kept.add(_key(name, booster.content))
                append_line(self.folder.path / GROWN, json.dumps(_fields(booster, self.train_s)))

    def write(self, name: str, content: bytes) -> None:
        """Write the file of a booster, unless it is there. Hundreds are not synced one by one: hashes are elsewhere."""
        folder = self.folder.path / BOOSTERS
        try:
            folder.mkdir(exist_ok=True)
            if _key(name, content) not in self._kept:
                (folder / name).write_bytes(content)
        except OSError as error:
            raise StoreError(f"cannot write {folder}: {error.strerror or error}") from error

    def tidy(self, names: Sequence[str]) -> None:
        """Remove all files of boosters but these, which are a model."""
        for file in (self.folder.path / BOOSTERS).iterdir():
            if file.name not in names:
                file.unlink()

    def begun(self, targets: range) -> Grown | None:
        """A booster that had grown for some rounds when the training was interrupted."""
        return next((booster for booster in self.left.begun if booster.targets == targets), None)

    def is_due(self, targets: range) -> bool:
        """Whether a booster that grows is to be saved now."""
        now = time.perf_counter()
        return now >= self._next_s.setdefault(targets, now + SAVE_S)

    def save(self, booster: Grown) -> None:
        """Save a booster that grows, as far as it has grown."""
        start_s = time.perf_counter()
        folder = self.folder.path / BOOSTERS
        head = json.dumps(_fields(booster, self.train_s)).encode()
        with suppress(StoreError, OSError):  # a full disk: the training itself can go on
            folder.mkdir(exist_ok=True)
            write_bytes(folder / f"{booster.targets.start:04d}.part", head + b"\n" + booster.content)
        now = time.perf_counter()
        self._next_s[booster.targets] = now + max(SAVE_S, (now - start_s) / COSTS)

    def _name(self, booster: Grown) -> str:
        return booster_name(booster.targets, self._library)


def identity_of(job: TreeJob) -> dict[str, str]:
    """What makes a training another one, by name; of large data a spread of the rows."""
    shared = job.shared and (job.shared.params, job.shared.numbers, job.shared.whole.x)
    valid = job.valid and (content_of(job.valid[0]), job.valid[1])
    data = {"x": content_of(job.x), "y": job.y, "valid": valid, "weight": job.weight, "bins": shared}
    parts = {**settings_of(job), **data, "labels": job.classes}
    return {name: hashlib.sha256(describe(value).encode()).hexdigest()[:16] for name, value in parts.items()}


def read_left(folder: RunFolder, job: TreeJob) -> Left:
    """What a training has left in its folder, which may be a stranger's.

    Raises StoreError where it is no training of trees, and AnotherTrainingError where it is another one.
    """
    facts = read_record(folder).facts
    before, now = facts.get("identity"), identity_of(job)
    if not isinstance(before, dict) or set(before) != set(now):
        raise StoreError(f"{folder.path} is no training of trees; resume it with the Job that it began with")
    if changed := [f"{name} differs" for name in now if before[name] != now[name]]:
        what = listed(f"{folder.path} was another training in", "point", changed)
        raise AnotherTrainingError(what, "resume it as it was, or train anew in another folder")
    boosters = folder.path / BOOSTERS
    found = [_read(line.encode(), boosters, job) for line in _lines(folder.path / GROWN)]
    good = [(booster, fields) for booster, fields in filter(None, found) if booster.whole and facts.get("ran")]
    # Without a line that was cut short, nor boosters that are damaged: these grow again.
    write_text(folder.path / GROWN, "".join(json.dumps(fields) + "\n" for _, fields in good))
    begun = [_read(_part(file), None, job) for file in sorted(boosters.glob("*.part"))]
    rest = [(booster, fields) for booster, fields in filter(None, begun)]
    try:
        return Left(
            plan="auto" if facts["tunes"] else dict(facts["plan"]),
            ran={str(name): str(value) for name, value in facts.get("ran", {}).items()},
            grown=tuple(booster for booster, _ in good),
            begun=tuple(booster for booster, _ in rest),
            train_s=max((float(fields["train_s"]) for _, fields in (*good, *rest)), default=0.0),
            ended=None if facts["ended"] is None else Ended(**facts["ended"]),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        raise StoreError(f"the record in {folder.path} is not one of a training of trees") from None


def _lines(path: Path) -> list[str]:
    return read_text(path, MOST_LINES_BYTES).split("\n")[:-1] if path.is_file() else []


def _part(file: Path) -> bytes:
    with suppress(StoreError):
        return read_bytes(file, MOST_BOOSTER_BYTES)
    return b""


def _key(name: str, content: bytes) -> tuple[str, str]:
    return name, hashlib.sha256(content).hexdigest()


def _fields(booster: Grown, train_s: float) -> dict[str, Any]:
    """A booster without its content, as JSON."""
    first = booster.scores[0] if booster.scores else None
    return {
        "targets": [booster.targets.start, booster.targets.stop],
        "sha256": hashlib.sha256(booster.content).hexdigest(),
        "rounds": booster.rounds,
        "best_round": booster.best_round,
        "whole": booster.whole,
        "metric": None if first is None else [first.metric, first.higher],
        # As texts: JSON has no NaN.
        "scores": [repr(score.value) for score in booster.scores],
        "train_s": train_s,
    }


def _read(line: bytes, folder: Path | None, job: TreeJob) -> tuple[Grown, dict[str, Any]] | None:
    """A booster and its fields, with its content in a file of this folder or behind the line; None where damaged."""
    head, _, content = line.partition(b"\n")
    try:
        fields = json.loads(head)
        start, stop = fields["targets"]
        need(type(start) is int and type(stop) is int and 0 <= start < stop <= job.targets, "its targets are wrong")
        targets, rounds, best = range(start, stop), fields["rounds"], fields["best_round"]
        if folder is not None:
            content = read_bytes(folder / booster_name(targets, job.library), MOST_BOOSTER_BYTES)
        need(hashlib.sha256(content).hexdigest() == fields["sha256"], "its content is not that of its hash")
        need(type(rounds) is int and type(best) is int and 1 <= best <= rounds <= job.rounds, "its rounds are wrong")
        need(len(fields["scores"]) == (rounds if job.valid is not None else 0), "its scores are not one a round")
        metric, higher = fields["metric"] or ("", False)
        checked = checked_booster(content, targets, job)
        booster = Grown(
            targets=targets,
            content=content if folder is not None else checked,
            rounds=rounds,
            best_round=best,
            scores=tuple(Score(metric=str(metric), value=float(v), higher=bool(higher)) for v in fields["scores"]),
            whole=fields["whole"] is True,
        )
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, StoreError):
        return None
    return booster, fields
