"""`hotlap batch`: which batch fits and which is fastest, by real updates, with a reserve kept free."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hotlap.core.errors import TrainingError
from hotlap.core.job import Job
from hotlap.core.terminal import Say, clean, silent
from hotlap.core.units import show_bytes, show_rate
from hotlap.kit.bench import JobTrials, only_new_garbage, opened, room_on
from hotlap.kit.probe import BEGINS_S, RUNS, ProbeRequest, ProbeResult, ScriptTrials, run_probe
from hotlap.kit.savings import Trials
from hotlap.kit.search import KNEE, Searched, SizeSearch, Trial, Try, fastest, knee
from hotlap.kit.start_size import StartSize, keep_measured, start_size
from hotlap.monitor.model_kind import kind_of_model
from hotlap.script.running import Target

RESERVE = 0.1
"""The part of the process's memory that has to stay free."""
MOST_S = 120.0
"""Seconds after which a command starts no new try."""
SCRIPT_FINER = 8
"""The largest batch of a script is found to this part of itself, since each try takes a process."""
COUNTED = "on the CPU, hotlap counts memory from the sizes of tensors"


@dataclass(frozen=True, kw_only=True)
class BatchFound:
    """The batches of a training: which fit, which are fastest, and what to write."""

    name: str
    device: str
    own_batch: int | None
    """Samples that go through the model at once in the training as written."""
    effective_batch: int | None
    """Samples of an update, which hotlap does not change."""
    searched: Searched
    began: StartSize
    room_bytes: int
    """What the process may take."""
    notes: tuple[str, ...] = ()
    least: int = 1
    """The smallest batch that can train."""
    writes: Callable[[int, int], str] = dataclasses.field(repr=False, default=lambda batch, times: "")
    """Takes samples at once and pieces of an update; returns the arguments to write."""

    @property
    def allowed_bytes(self) -> int:
        """The memory that a batch may take with the reserve kept."""
        return int((1 - RESERVE) * self.room_bytes)

    @property
    def largest(self) -> Trial | None:
        """The largest that trains at all."""
        return self.searched.largest

    @property
    def fastest(self) -> Trial | None:
        """The fastest that keeps the reserve."""
        return fastest(self.searched.within(self.allowed_bytes))

    @property
    def knee(self) -> Trial | None:
        """The smallest that is nearly as fast as the fastest."""
        return knee(self.searched.within(self.allowed_bytes))

    @property
    def _ends_early(self) -> bool:
        """Whether the largest tried size is the fastest, and larger ones may train too."""
        return not self.searched.found_largest and self.fastest is not None and self.fastest is self.largest

    @property
    def keeps_reserve(self) -> Trial | None:
        """The largest timed one that keeps the reserve."""
        return max(self.searched.within(self.allowed_bytes), key=lambda one: one.size, default=None)

    @property
    def advice(self) -> str:
        """What to write to keep the effective batch."""
        knee = self.knee
        if knee is None:
            return "no batch keeps the reserve: use a smaller model, shorter samples or a GPU with more memory"
        whole = self.effective_batch
        if whole is None:
            return f"{knee.size:,} samples at once; your batch sampler decides how many samples a batch has"
        if whole < self.least:
            most = f"{self.least} at least, up to {knee.size:,}"
            return f"a batch norm cannot train with {whole:,} sample at once, as you have it: {most}"
        if whole <= knee.size or self._is_near_best(whole):
            more = f"; up to {knee.size:,} would be faster, with another effective batch" if knee.size > whole else ""
            what = (
                "stays as it is" if whole == self.own_batch else f"goes through in one piece: {self.writes(whole, 1)}"
            )
            return f"the effective batch of {whole:,} {what}{more}"
        size = max(part for part in range(1, knee.size + 1) if whole % part == 0)
        return f"for the effective batch of {whole:,} as it is: {self.writes(size, whole // size)}"

    def _is_near_best(self, size: int) -> bool:
        """Whether a size keeps the reserve, and its timed neighbours are nearly as fast as the fastest."""
        timed = self.searched.within(self.allowed_bytes)
        below, above = ([one for one in timed if (one.size >= size) is is_above] for is_above in (False, True))
        beside = above[:1] if above and above[0].size == size else [*below[-1:], *above[:1]]
        least = min((one.samples_per_s or 0.0 for one in beside), default=0.0)
        return bool(above) and self.fastest is not None and least >= KNEE * (self.fastest.samples_per_s or 0.0)

    def summary(self) -> str:
        """The measured sizes and the advice, in lines for people."""
        fast, knee = self.fastest, self.knee
        top = max((trial.samples_per_s or 0.0 for trial in self.searched.trials), default=0.0) or 1.0
        lines = [f"{'samples':>9} {'samples/s':>11} {'tensors':>10} {'taken':>10}"]
        for one in self.searched.trials:
            if one.samples_per_s is None:
                continue
            bar = "#" * round(20 * one.samples_per_s / top)
            marks = [word for word, which in (("fastest", fast), ("knee", knee)) if which is one]
            if one.taken_bytes > self.allowed_bytes:
                marks.append("less than the reserve is left")
            peak, taken = (show_bytes(count) if count else "–" for count in (one.peak_bytes, one.taken_bytes))
            figures = f"{peak:>10} {taken:>10}"
            lines.append(
                f"{one.size:>9,} {show_rate(one.samples_per_s):>11} {figures}  {bar:<20} {', '.join(marks)}".rstrip()
            )
        largest = self.largest
        lines.append("")
        if largest is not None:
            seen = "the largest that trains" if self.searched.found_largest else "the largest tried"
            lines.append(f"largest    {largest.size:,} is {seen}: {self.searched.ended}")
        else:
            lines.append(f"largest    none: {self.searched.ended}")
        if self.keeps_reserve is not None and self.keeps_reserve.taken_bytes:
            kept = f"{show_bytes(self.allowed_bytes)} of {show_bytes(self.room_bytes)}"
            lines.append(f"reserve    up to {self.keeps_reserve.size:,} stays within {kept}")
        if fast is not None and knee is not None and fast.samples_per_s and knee.samples_per_s:
            part = knee.samples_per_s / fast.samples_per_s
            still = "; larger ones may be faster still" if self._ends_early else ""
            lines.append(f"knee       {knee.size:,} has {part:.0%} of the best speed, that of {fast.size:,}{still}")
        own = "" if self.own_batch is None else f" ({self.own_batch:,} at once)"
        whole = "set by your batch sampler" if self.effective_batch is None else f"{self.effective_batch:,}{own}"
        lines.append(f"effective  {whole}; hotlap does not change it")
        lines.append(f"started    with {self.began.size:,}: {self.began.why}")
        if (line := self.searched.line) is not None:
            lines.append(f"measured   {show_bytes(line.bytes_a_sample)} for each further sample")
        lines.append(f"write      {self.advice}")
        lines += [f"note       {note}" for note in self.notes]
        return "\n".join(map(clean, lines))

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""

        def size(one: Trial | None) -> int | None:
            return None if one is None else one.size

        return {
            "training": self.name,
            "device": self.device,
            "own_batch": self.own_batch,
            "effective_batch": self.effective_batch,
            "began": {"size": self.began.size, "why": self.began.why},
            "trials": [dataclasses.asdict(trial) | {"trains": trial.trains} for trial in self.searched.trials],
            "largest": size(self.largest),
            "largest_is_proven": self.searched.found_largest,
            "keeps_reserve": size(self.keeps_reserve),
            "fastest": size(self.fastest),
            "knee": size(self.knee),
            "ended": self.searched.ended,
            "measured": None if self.searched.line is None else dataclasses.asdict(self.searched.line),
            "room_bytes": self.room_bytes,
            "allowed_bytes": self.allowed_bytes,
            "write": self.advice,
            "notes": list(self.notes),
        }


def batch_of_job(job: Job, *, name: str, most: int | None, seconds: float, say: Say) -> BatchFound:
    """`hotlap.batch` for a job, in this process."""
    with opened(job) as bench, only_new_garbage():
        rig, effective, own = bench.rig, bench.job.effective_batch, bench.dataset.batch_size
        room, allowed = show_bytes(bench.room_bytes), (1 - RESERVE) * bench.room_bytes
        most = min(bench.most, most or bench.most)
        began = StartSize(size=own, why="yours")
        if bench.memory_ends:
            guess = start_size(rig.model, bench.batch(1), allowed, bench.where)
            began = dataclasses.replace(guess, size=min(guess.size, most))
        say(f"batch      starts with {began.size:,}: {began.why}; {bench.most:,} samples, {room}")
        until = time.monotonic() + seconds
        searched = SizeSearch(
            attempt=_shown(JobTrials(bench), say),
            start=began.size,
            least=bench.least,
            most=most,
            room_bytes=allowed,
            by_speed=not bench.memory_ends,
            enough=lambda: f"{seconds:g} s were spent" if time.monotonic() > until else None,
        ).run()
        if bench.memory_ends and searched.line is not None:
            keep_measured(kind_of_model(rig.model, bench.batch(1)), bench.where, searched.line)
        best = knee(searched.within(allowed))
        notes = [
            *(rig.cautions(rig.plan.but(micro_batch=best.size)) if best and best.size < (effective or 0) else []),
            bench.longest.words,
            "speed is that of the step with its batch ready; for the time of loading: hotlap workers",
            *([] if bench.device.type == "cuda" else [COUNTED]),
        ]
        return BatchFound(
            name=name,
            device=str(bench.device),
            own_batch=own,
            effective_batch=effective,
            searched=searched,
            began=began,
            room_bytes=bench.room_bytes,
            notes=tuple(notes),
            least=bench.least,
            writes=partial(_job_words, bench.job.accumulate > 1),
        )


def _job_words(accumulates: bool, size: int, times: int) -> str:
    """What to write in a job; `accumulates` says whether it does so now."""
    if times == 1:
        return f"batch_size={size}{', accumulate=1' if accumulates else ''}"
    return f"batch_size={size}, accumulate={times}; or leave the job and give the plan micro_batch={size}"


def _shown(trials: Trials, say: Say) -> Try:
    """Tries sizes, and shows each in a line."""

    def attempt(size: int, timed: bool) -> Trial:
        one = trials.of_size(size, timed)
        speed = "trains" if one.samples_per_s is None else f"{show_rate(one.samples_per_s)} samples/s"
        # A script may end before hotlap has measured its memory.
        memory = show_bytes(one.taken_bytes) if one.taken_bytes else "memory not measured"
        result = f": {speed}, {memory}" if one.trains else f" does not train: {one.why_not}"
        say(f"batch      {size:,}{result}")
        return one

    return attempt


def batch_of_script(
    target: Target, *, most: int | None = None, seconds: float = MOST_S, say: Say = silent
) -> BatchFound:
    """`hotlap.batch` for a script: each try runs it in a new process, with another batch size of its training loader.

    Raises TrainingError if the script makes its batches in another way, or does not train.
    """
    until = time.monotonic() + seconds
    say(f"batch      runs {target.name} unchanged, to find its loader")
    first = run_probe(target, ProbeRequest(counts=True, lengths=True, begins_s=max(seconds, BEGINS_S)))
    if first.out_of_memory is not None:
        raise TrainingError(f"{target.name} runs out of memory as it is ({first.out_of_memory}); lower its batch size")
    if first.why_fixed is not None or first.batch_size is None:
        raise TrainingError(f"hotlap cannot set the batch size of {target.name}: {first.why_fixed}")
    own, on_gpu = first.batch_size, first.device != "cpu"
    room = first.room_bytes if on_gpu else room_on(torch.device("cpu"))
    began = StartSize(size=own, why="that of the script")
    searched = SizeSearch(
        attempt=_shown(ScriptTrials(target, first, say), say),
        start=own,
        most=min(filter(None, (most, first.samples)), default=2**20),
        room_bytes=(1 - RESERVE) * room,
        by_speed=not on_gpu,
        enough=lambda: f"{seconds:g} s were spent" if time.monotonic() > until else None,
        finer=SCRIPT_FINER,
    ).run()
    return BatchFound(
        name=target.name,
        device=first.device,
        own_batch=own,
        effective_batch=first.samples_an_update or None,
        searched=searched,
        began=began,
        room_bytes=room,
        notes=_script_notes(first, searched),
        writes=partial(_script_words, own < (first.samples_an_update or own)),
    )


def _script_words(accumulates: bool, size: int, times: int) -> str:
    """What to write in a script; `accumulates` says whether it does so now."""
    updates = f", and an update every {times} batches" if times > 1 else ", and an update with every batch"
    return f"the loader's batch_size={size}{updates if times > 1 or accumulates else ''}"


def _script_notes(first: ProbeResult, searched: Searched) -> tuple[str, ...]:
    notes = [
        RUNS,
        "speed is that of the script's loop, with its loading; hotlap has not changed its accumulation",
        first.longest or "the lengths of samples are unknown, so batches are the first that came",
    ]
    if first.other_loaders:
        several = f"{first.other_loaders + 1} loaders bring the batches of an update"
        notes.append(f"{several}: sizes are those of the first, the others stay as they are")
    if any(trial.trains and not trial.taken_bytes for trial in searched.trials):
        notes.append("memory not measured: the script ended before; let it train longer")
    if first.device == "cpu":
        notes.append(COUNTED)
    return tuple(notes)
