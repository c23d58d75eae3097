"""Probes of a script: each runs it in a process of its own, which ends after some updates.

`ProbeRequest` names what to change and what to watch. `ProbeResult` holds what the process has seen. Both are plain
values that pass between the two processes.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hotlap.core.errors import StoreError, TrainingError
from hotlap.kit.search import TooShortError
from hotlap.kit.working_copy import WorkingCopy
from hotlap.script.running import Target

LAP_ROUNDS = 8
"""Batches of each worker in a lap at least: they come in bursts, and two of each may have been ready before it."""

BEGINS_S = 60.0
"""A script may take so long to its first update, whatever time is given."""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What is to be looked at."""

    loader: int | None = None
    """Which of its loaders is to be made otherwise, by the order in which the first of each is made."""
    change: dict[str, Any] = field(default_factory=dict)
    """Arguments of that loader in place of the script's own."""
    laps: int = 5
    lap_s: float = 0.1
    longest: bool = False
    """Whether every batch of that loader is to hold the longest samples of its dataset."""
    counts: bool = False
    """Whether the memory of one update is looked at."""
    lengths: bool = False
    """Whether it is looked whether the samples of the training's dataset differ in length."""
    transforms: bool = False
    """Whether the transforms of its dataset are timed."""
    watches: bool = False
    """Whether it is looked for memory that grows in more updates; without, nor at kinds and layers."""
    begins_s: float | None = None
    """Seconds after which the look ends if no update was made by then."""
    feed: str | None = None
    """The kind of feed that its batches are to come by, as `hotlap run --plan` brings them."""
    precision: str | None = None
    """What its modules are to compute in, as under `hotlap run --plan`."""
    checkpoint: bool = False
    """Whether the blocks that its model repeats are checkpointed."""
    keeps_gradients: bool = False
    """Whether gradients are set to zero in place of none: so they lie in memory as while they are accumulated."""

    @property
    def has_plan(self) -> bool:
        """Whether hotlap has to be around the script for it."""
        return self.feed is not None or self.precision is not None


@dataclass(kw_only=True)
class ProbeResult:
    """What was."""

    updates: int = 0
    laps: list[list[float]] = field(default_factory=list)
    """Seconds and samples of each lap."""
    lap_updates: list[int] = field(default_factory=list)
    """Updates of each lap."""
    samples_an_update: int = 0
    """Of the loader that brings its batches."""
    first_batch_s: float | None = None
    """From asking the loader for an iterator to its first batch."""
    loader: int | None = None
    """Which of its loaders brings the training's batches."""
    batch_size: int | None = None
    """Of that one; None where a batch sampler decides it."""
    why_fixed: str | None = None
    """Why its batch size cannot be set."""
    other_loaders: int = 0
    """How many others bring batches for its updates, too."""
    workers: int = 0
    pinned: bool = False
    iterates: bool = False
    """Whether its dataset is an IterableDataset, which each worker goes through by itself."""
    samples: int | None = None
    """In its dataset."""
    longest: str | None = None
    """What is known of the lengths of its samples, in words; None where they were not looked at."""
    varies: bool = False
    """Whether these differ."""
    transforms: list[tuple[str, float]] = field(default_factory=list)
    """What each takes for a sample, in seconds."""
    device: str = "cpu"
    peak_bytes: int = 0
    taken_bytes: int = 0
    rest_bytes: int = 0
    """What weights, gradients and the optimizer's state take, however large the batch."""
    room_bytes: int = 0
    account: dict[str, Any] = field(default_factory=dict)
    """Where memory goes, where that was asked for."""
    model: dict[str, Any] = field(default_factory=dict)
    """The model, as `ModelFacts` has it, where its memory was watched."""
    late: str | None = None
    """Where the script was when it had made no update in time."""
    why_not: str | None = None
    """Why it could not be looked at as wished."""
    refused: dict[str, str] = field(default_factory=dict)
    """Kinds of feed that hotlap cannot bring its batches by, and why; where one was wished for."""
    out_of_memory: str | None = None
    error: str | None = None
    trace: str = ""
    """The lines of the user's code that led to it."""

    @property
    def sample_s(self) -> float | None:
        """Seconds a sample, in the middle one of its laps; None where there was none."""
        every = sorted(spent / samples for spent, samples in self.laps if samples)
        return every[len(every) // 2] if every else None

    @property
    def step_s(self) -> float:
        """Seconds an update; by its samples where they are known, since some updates have fewer. It needs a lap."""
        if self.sample_s is not None:
            return self.sample_s * self.samples_an_update
        every = sorted(spent / count for (spent, _), count in zip(self.laps, self.lap_updates, strict=True))
        return every[len(every) // 2]


MOST_S = 600.0
"""What one look may take, with all that the script does before it trains."""
RUNS = (
    "each try ran some updates of the script in a copy of its working folder; what it wrote there is gone, and files "
    "elsewhere are as they were"
)


class ScriptEndedError(TrainingError):
    """A script ended by an error of its own."""

    def __init__(self, name: str, why: str, trace: str = "") -> None:
        """`why` in a line; `trace` are those of its code that led to it."""
        lines = [line if line.startswith("  ") else f"  {line}" for line in trace.split("\n") if trace]
        super().__init__("\n".join([f"{name} ended by an error: {why}", *lines]))
        self.why = why


@contextlib.contextmanager
def _in_copy() -> Iterator[tuple[Path, WorkingCopy]]:
    """A folder for one probe, with a copy of the working folder in it; both go afterwards."""
    with tempfile.TemporaryDirectory(prefix="hotlap-probe-", ignore_cleanup_errors=True) as folder:
        try:
            copy = WorkingCopy(Path(folder))
        except OSError as error:
            raise StoreError(
                f"cannot copy the working folder to {tempfile.gettempdir()}: {error.strerror or error}; "
                "name another place with TMPDIR"
            ) from error
        yield Path(folder), copy


def run_probe(target: Target, request: ProbeRequest) -> ProbeResult:
    """Run a script for some updates as the request says, and return what the process has seen.

    Raises ScriptEndedError if the script ends by an error of its own, TooShortError if it ends before it has made
    enough updates, and TrainingError if it takes too long.
    """
    with _in_copy() as (folder, copy):
        report, said = folder / "seen.json", folder / "said.txt"
        settings = json.dumps({**asdict(request), "report": str(report)})
        there = target if target.path is None else replace(target, path=copy.path_of(target.path))
        command = [sys.executable, "-m", "hotlap.kit.probe_process", settings, *there.words]
        with said.open("wb") as out:
            try:
                done = subprocess.run(
                    command,
                    cwd=copy.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    timeout=MOST_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise TrainingError(f"{target.name} made too few updates in {MOST_S:.0f} s") from None
        found = copy.original(report.read_text(encoding="utf-8")) if report.is_file() else None
        seen = None if found is None else ProbeResult(**json.loads(found))
        last = copy.original(said.read_text(encoding="utf-8", errors="replace")).strip().splitlines()[-1:]
    if seen is not None and seen.late is not None:
        raise TrainingError(
            f"{target.name} has made no update in {request.begins_s:g} s, and is at {seen.late}; "
            "name the script that trains, or give it more time (--seconds)"
        )
    is_seen = seen is not None and bool(seen.laps or seen.out_of_memory or seen.why_not)
    if seen is None or seen.error is not None or (done.returncode and not is_seen):
        why = seen.error if seen is not None and seen.error else (last[0] if last else f"exit code {done.returncode}")
        if why.startswith("EOFError"):
            why += " (it is run without anything to read on stdin)"
        raise ScriptEndedError(target.name, why, "" if seen is None else seen.trace)
    if not is_seen:
        changed = ", ".join(f"{name}={value}" for name, value in request.change.items())
        raise TooShortError(
            f"{target.name} is over after {seen.updates:,} updates{f' with {changed}' if changed else ''}, "
            "too few to be timed; let it train for a few seconds"
            if seen.updates
            else f"{target.name} is over, and none of torch's optimizers made an update; name the script that trains"
        )
    return seen
