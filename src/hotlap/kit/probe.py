"""Probes of a script: each runs it in a new process, which ends after some updates.

`ProbeRequest` names what to change and what to watch. `ProbeResult` holds what the process has seen. Both are plain
values that pass between the two processes. `ScriptTrials` tries other sizes and other ways by probes.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hotlap.core.errors import HotlapError, StoreError, TrainingError
from hotlap.core.terminal import Say
from hotlap.kit.search import TooShortError, Trial
from hotlap.kit.working_copy import WorkingCopy
from hotlap.monitor.savings import Saving
from hotlap.script.running import Target

LAP_ROUNDS = 8
"""Least batches of each worker in a lap: they come in bursts, and two of each may be ready before the lap."""
FEEDS = ("gather", "stream", "resident")
"""Feeds other than a DataLoader."""
LAPS, LAP_S = 3, 0.05
"""For memory: laps of each probe, of which the median counts, and the least seconds of a lap."""
BEGINS_S = 60.0
"""Seconds that a script may always take to its first update."""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest:
    """What to change in a script, and what to watch."""

    loader: int | None = None
    """The loader to change, by the order in which the first of each is made."""
    change: dict[str, Any] = field(default_factory=dict)
    """New arguments of that loader."""
    laps: int = 5
    lap_s: float = 0.1
    longest: bool = False
    """Whether every batch of that loader holds the longest samples of its dataset."""
    counts: bool = False
    """Whether to count the memory of one update."""
    lengths: bool = False
    """Whether to find out if the samples differ in length."""
    transforms: bool = False
    """Whether to time the transforms of its dataset."""
    watches: bool = False
    """Whether to count memory by kind and layer, and to look for memory that grows."""
    works: int = 0
    """Updates whose work to count, in place of looking for memory that grows."""
    begins_s: float | None = None
    """Seconds after which the probe ends without an update."""
    feed: str | None = None
    """The kind of feed for its batches, as under `hotlap run --plan`."""
    precision: str | None = None
    """The precision of its modules, as under `hotlap run --plan`."""
    checkpoint: bool = False
    """Whether to checkpoint the repeated blocks of its model."""
    keeps_gradients: bool = False
    """Whether gradients become zero, not None: they stay in memory as in accumulation."""
    diagnose_s: float | None = None
    """Seconds for a diagnosis after the first update, if the request is for one."""
    without: list[str] = field(default_factory=list)
    """Environment variables that the script runs without, also if it sets them itself."""

    @property
    def program(self) -> str:
        """The module that runs the script."""
        return "hotlap.kit.probe_process" if self.diagnose_s is None else "hotlap.kit.diagnosis_process"

    @property
    def has_plan(self) -> bool:
        """Whether the script has to run under a plan of hotlap."""
        return self.feed is not None or self.precision is not None


@dataclass(kw_only=True)
class ProbeResult:
    """What hotlap has seen of a training: the process of a script, or a job in this process."""

    updates: int = 0
    laps: list[list[float]] = field(default_factory=list)
    """Seconds and samples of each lap."""
    lap_updates: list[int] = field(default_factory=list)
    """Updates of each lap."""
    samples_an_update: int = 0
    """From the loader that brings its batches."""
    first_batch_s: float | None = None
    """From asking the loader for an iterator to its first batch."""
    loader: int | None = None
    """Which of its loaders brings the training's batches."""
    batch_size: int | None = None
    """Of that loader; None if a batch sampler decides."""
    why_fixed: str | None = None
    """Why hotlap cannot set its batch size."""
    other_loaders: int = 0
    """How many other loaders also bring batches for its updates."""
    workers: int = 0
    pinned: bool = False
    iterates: bool = False
    """Whether its dataset is an IterableDataset, which each worker reads as a whole."""
    samples: int | None = None
    """In its dataset."""
    longest: str | None = None
    """The lengths of its samples in words; None if unknown."""
    varies: bool = False
    """Whether the lengths differ."""
    transforms: list[tuple[str, float]] = field(default_factory=list)
    """Name and seconds a sample of each."""
    device: str = "cpu"
    peak_bytes: int = 0
    taken_bytes: int = 0
    rest_bytes: int = 0
    """The memory of weights, gradients and optimizer state, which no batch changes."""
    room_bytes: int = 0
    account: dict[str, Any] = field(default_factory=dict)
    """Memory by kind and layer, if the request asks for it."""
    work: dict[str, Any] = field(default_factory=dict)
    """The fields of `Work` of an update, if the request asks for it."""
    model: dict[str, Any] = field(default_factory=dict)
    """The fields of `ModelFacts`, if the request watches memory."""
    diagnosis: dict[str, Any] = field(default_factory=dict)
    """The fields of `Observed`, if the request is for a diagnosis."""
    late: str | None = None
    """The line of a script that has made no update in time."""
    why_not: str | None = None
    """Why the request could not be fulfilled."""
    refused: dict[str, str] = field(default_factory=dict)
    """Feeds that hotlap cannot bring its batches by, with reasons, if the request names one."""
    out_of_memory: str | None = None
    error: str | None = None
    trace: str = ""
    """The lines of the user's code that led to the error."""

    @property
    def sample_s(self) -> float | None:
        """Seconds a sample, the median of the laps; None without laps."""
        every = sorted(spent / samples for spent, samples in self.laps if samples)
        return every[len(every) // 2] if every else None

    @property
    def step_s(self) -> float:
        """Seconds an update, by its samples if known, since some updates have fewer. Needs a lap."""
        if self.sample_s is not None:
            return self.sample_s * self.samples_an_update
        every = sorted(spent / count for (spent, _), count in zip(self.laps, self.lap_updates, strict=True))
        return every[len(every) // 2]


MOST_S = 600.0
"""Most seconds of a probe, with what the script does before it trains."""
RUNS = (
    "each try ran some updates of the script in a copy of its working folder; what it wrote there is gone, and files "
    "elsewhere are as they were"
)


class ScriptEndedError(TrainingError):
    """A script has raised an error."""

    def __init__(self, name: str, why: str, trace: str = "", seen: ProbeResult | None = None) -> None:
        """`why` is one line; `trace` holds the lines of its code that led to the error, `seen` what came before it."""
        lines = [line if line.startswith("  ") else f"  {line}" for line in trace.split("\n") if trace]
        super().__init__("\n".join([f"{name} ended by an error: {why}", *lines]))
        self.why, self.seen = why, seen


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


def run_probe(target: Target, request: ProbeRequest, most_s: float = MOST_S) -> ProbeResult:
    """Run a script for some updates as the request says, and return what the process has seen.

    Raises ScriptEndedError if the script ends by an error of its own, TooShortError if it ends before it has made
    enough updates, and TrainingError if it takes too long.
    """
    with _in_copy() as (folder, copy):
        report, output = folder / "seen.json", folder / "output.txt"
        settings = json.dumps({**asdict(request), "report": str(report)})
        there = target if target.path is None else replace(target, path=copy.path_of(target.path))
        command = [sys.executable, "-m", request.program, settings, *there.words]
        with output.open("wb") as out:
            try:
                done = subprocess.run(
                    command,
                    cwd=copy.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    timeout=most_s,
                    check=False,
                    env={name: value for name, value in os.environ.items() if name not in request.without},
                )
            except subprocess.TimeoutExpired:
                raise TrainingError(f"{target.name} made too few updates in {most_s:.0f} s") from None
        found = copy.original(report.read_text(encoding="utf-8")) if report.is_file() else None
        seen = None if found is None else ProbeResult(**json.loads(found))
        last = copy.original(output.read_text(encoding="utf-8", errors="replace")).strip().splitlines()[-1:]
    if seen is not None and seen.late is not None:
        raise TrainingError(
            f"{target.name} has made no update in {request.begins_s:g} s, and is at {seen.late}; "
            "name the script that trains, or give it more time (--seconds)"
        )
    is_seen = seen is not None and bool(seen.laps or seen.out_of_memory or seen.why_not)
    if seen is None or seen.error is not None or (done.returncode and not is_seen):
        why = seen.error if seen is not None and seen.error else (last[0] if last else f"exit code {done.returncode}")
        if why.startswith("EOFError"):
            why += " (hotlap runs it with an empty stdin)"
        raise ScriptEndedError(target.name, why, "" if seen is None else seen.trace, seen)
    if not is_seen:
        changed = ", ".join(f"{name}={value}" for name, value in request.change.items())
        raise TooShortError(
            f"{target.name} ended after {seen.updates:,} updates{f' with {changed}' if changed else ''}, "
            "too few for timing; let it train for a few seconds"
            if seen.updates
            else f"{target.name} ended without an update of a torch optimizer; name the script that trains"
        )
    return seen


class ScriptTrials:
    """Tries a script, in a new process each time; see `Trials`."""

    def __init__(self, target: Target, own: ProbeResult, say: Say) -> None:
        self._target, self._own, self._say = target, own, say
        self._request = ProbeRequest(laps=LAPS, lap_s=LAP_S, counts=True, loader=own.loader, longest=own.varies)

    def of_size(self, size: int, timed: bool) -> Trial:
        """Batches of this size. Raises ScriptEndedError if the script fails with its own size."""
        own, laps = self._own, 5 if timed else 1
        request = ProbeRequest(
            loader=own.loader, change={"batch_size": size}, longest=own.varies, laps=laps, counts=True
        )
        is_own = size == own.batch_size
        try:
            seen = own if is_own and not own.varies else run_probe(self._target, request)
        except ScriptEndedError as error:
            if is_own:
                raise
            return Trial(size=size, why_not=error.why)  # the script may only work with its own size
        if seen.out_of_memory is not None:
            return Trial(size=size, why_not=seen.out_of_memory)
        speeds = sorted(samples / spent for spent, samples in seen.laps)
        return Trial(
            size=size,
            samples_per_s=speeds[len(speeds) // 2],
            peak_bytes=seen.peak_bytes,
            taken_bytes=seen.taken_bytes,
            rest_bytes=seen.rest_bytes,
        )

    def in_pieces(self, size: int) -> Saving:
        """Batches of this size with an update after each; gradients stay in memory, as in accumulation."""
        request = replace(self._request, change={"batch_size": size}, keeps_gradients=True)
        tried = self._tried(f"micro-batches of {size:,}", request)
        norms = "batch norms see micro-batches, so their statistics differ"
        return replace(tried, changes=norms) if self._own.model["least"] > 1 else tried

    def checkpointed(self, blocks: int) -> Saving:
        """Updates with checkpointed blocks."""
        return self._tried(f"all {blocks} blocks checkpointed", replace(self._request, checkpoint=True))

    def in_precision(self, precision: str) -> Saving:
        """Updates under autocast, as under `hotlap run --plan`."""
        return self._tried(f"{precision} autocast", replace(self._request, precision=precision))

    def _tried(self, what: str, request: ProbeRequest) -> Saving:
        self._say(f"memory     tries {what}")
        try:
            seen = run_probe(self._target, request)
        except HotlapError as error:
            return Saving(why_not=str(error).partition("\n")[0])
        over = None if seen.peak_bytes else f"{self._target.name} ended before hotlap had measured its memory"
        why_not = seen.why_not or seen.out_of_memory or over
        if why_not is not None:
            return Saving(why_not=why_not)
        # The time of as many smaller batches as have the samples of an update.
        step_s = seen.step_s if seen.sample_s is None else seen.sample_s * self._own.samples_an_update
        return Saving(peak_bytes=seen.peak_bytes, step_s=step_s)
