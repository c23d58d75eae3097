"""`hotlap gpus --job`: a training on each GPU of the catalogue: how long it takes, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Any

from hotlap import machine
from hotlap.core.errors import TrainingError
from hotlap.core.job import Job
from hotlap.core.terminal import Say, clean, silent
from hotlap.core.units import show_bytes, show_seconds
from hotlap.kit.batch import COUNTED, MOST_S, RESERVE
from hotlap.kit.bench import JobTrials, opened
from hotlap.kit.memory import update_of
from hotlap.kit.probe import BEGINS_S, LAP_S, LAPS, RUNS, ProbeRequest, ProbeResult, run_probe
from hotlap.kit.savings import savings
from hotlap.kit.search import TooShortError
from hotlap.machine.catalogue import CATALOGUE, GpuModel
from hotlap.machine.prediction import (
    AS_IT_IS_ERROR,
    AT_BEST_ERROR,
    MEASURED,
    Error,
    Work,
    as_it_is_s,
    at_best_s,
    best_format,
)
from hotlap.monitor.savings import ModelFacts, Saving
from hotlap.script.running import Target

HEADROOM, NEAR = 1.3, 1.5
"""The recommended GPU has so many times the memory that is needed, and is at most so many times as slow as the fastest
at best."""
WIDTH = 79
"""Columns of the summary."""
WORKS = 3
"""Updates of a script to average over."""


@dataclass(frozen=True, kw_only=True)
class OnGpu:
    """A training on one GPU of the catalogue."""

    gpu: GpuModel
    needs_bytes: int
    as_it_is_s: float
    """Predicted seconds of an update."""
    at_best_s: float
    is_here: bool = False

    @property
    def runs(self) -> bool:
        """Whether default builds of torch have kernels for it, or the build that is here."""
        return self.gpu.has_kernels or self.is_here

    @property
    def room_bytes(self) -> int:
        """What the training may take, with the reserve kept."""
        return int((1 - RESERVE) * self.gpu.usable_bytes)

    @property
    def fits(self) -> bool:
        """Whether an update fits at the training's own batch size."""
        return self.needs_bytes <= self.room_bytes

    @property
    def format(self) -> str:
        """The number format at best."""
        return best_format(self.gpu)

    @property
    def is_measured(self) -> bool:
        """Whether predictions were compared with times measured on this GPU."""
        return self.gpu.key in MEASURED

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "gpu": self.gpu.key,
            "runs": self.runs,
            "fits": self.fits,
            "room_bytes": self.room_bytes,
            "measured": self.is_measured,
            "as_it_is_s": self.as_it_is_s,
            "at_best_s": self.at_best_s,
            "format": self.format,
        }


@dataclass(frozen=True, kw_only=True)
class GpusFound:
    """What a training asks for, and how long it takes on each GPU of the catalogue."""

    name: str
    device: str
    """On which hotlap has counted."""
    work: Work
    """Of an update."""
    samples: int
    """In an update."""
    peak_bytes: int
    epoch_updates: int | None
    """None if unknown, as for a dataset without a length."""
    updates: int | None
    """Of the whole run; None if unknown, as for a script."""
    here: str | None = None
    """The GPU of the catalogue on which its own updates were timed."""
    step_s: float | None = None
    """Measured there."""
    correction: float = 1.0
    """Measured over predicted seconds there. It is in all predictions of the training as it is."""
    savings: tuple[Saving, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[OnGpu, ...]:
        """The training on each GPU of the catalogue."""
        return tuple(
            OnGpu(
                gpu=gpu,
                needs_bytes=self.peak_bytes,
                as_it_is_s=self.correction * as_it_is_s(self.work, gpu),
                at_best_s=at_best_s(self.work, gpu),
                is_here=gpu.key == self.here,
            )
            for gpu in CATALOGUE
        )

    @property
    def least(self) -> OnGpu | None:
        """The GPU with the least memory that trains it at its own batch size; None if it fits on none."""
        return _smallest(self.rows)

    @property
    def smaller(self) -> tuple[tuple[str, OnGpu], ...]:
        """What would lower the peak, and a smaller GPU that then trains it, by prediction."""
        room = math.inf if self.least is None else self.least.gpu.usable_bytes
        found = []
        for saving in self.savings:
            if saving.predicted_bytes is None or saving.changes:
                continue
            rows = (replace(row, needs_bytes=saving.predicted_bytes) for row in self.rows)
            smallest = _smallest([row for row in rows if "autocast" not in saving.what or row.format != "fp32"])
            if smallest is not None and smallest.gpu.usable_bytes < room:
                found.append((saving.what, smallest))
        return tuple(found)

    @property
    def recommended(self) -> OnGpu | None:
        """The GPU to take, by rules that need no prices; None if there is none.

        Of those with 16-bit tensor cores and head-room that are nearly as fast at best as the fastest of them: the one
        with the lowest published 16-bit rate, then with the least memory.
        """
        able = [row for row in self.rows if row.runs and row.gpu.tensor_cores]
        able = [row for row in able if HEADROOM * row.needs_bytes <= row.gpu.usable_bytes]
        fastest_s = min((row.at_best_s for row in able), default=0.0)
        near = [row for row in able if row.at_best_s <= NEAR * fastest_s]
        return min(near, key=lambda row: (row.gpu.fp16_flops, row.gpu.usable_bytes), default=None)

    def summary(self) -> str:
        """The figures in lines, for people."""
        words = [*self._advice(), *(f"note       {note}" for note in self.notes)]
        wrapped = (
            line for one in words for line in wrap(one, WIDTH, subsequent_indent=" " * 11, break_on_hyphens=False)
        )
        return "\n".join(clean(line).rstrip() for line in (*self._asked(), "", *self._table(), "", *wrapped))

    def _asked(self) -> Iterator[str]:
        work = self.work
        moved = show_bytes(work.bytes + work.step_bytes)
        yield f"update     {self.samples:,} samples, {work.operations:,.0f} operations"
        yield f"           {_flop(work.total_flops)}, {moved} read and written"
        yield f"memory     {show_bytes(self.peak_bytes)} at the peak"
        epoch = "epochs of unknown length" if self.epoch_updates is None else f"{self.epoch_updates:,} updates an epoch"
        yield f"length     {epoch}{'' if self.updates is None else f', {self.updates:,} in all'}"

    def _table(self) -> Iterator[str]:
        count, long = (self.updates, "whole run") if self.updates else (self.epoch_updates, "epoch")
        long = long if count else ""
        yield f"{'':<23}{'as it is':>10}{'':>13}{'at best':>12}"
        yield f"  {'GPU':<10}{'memory':<11}{'step':>10}{long:>13}{'step':>12}{long:>13}"
        for row in self.rows:
            mark = "*" if row.is_here else " " if row.is_measured else "?"
            if not row.runs:
                yield f"{mark} {row.gpu.key:<10}no kernels in default builds of torch"
                continue
            room = "fits" if row.fits else "too small"
            as_it_is = _times(row.as_it_is_s, count)
            yield f"{mark} {row.gpu.key:<10}{room:<11}{as_it_is}  {_times(row.at_best_s, count)}  {row.format}"
        yield "at best: captured, in 16 bits if the GPU has them, held data, fused optimizer"

    def _advice(self) -> Iterator[str]:
        yield f"error      {_off(AS_IT_IS_ERROR)} as it is and {_off(AT_BEST_ERROR)} at best, on an H200"
        yield "?          never measured: at least that far off"
        if self.here is not None:
            yield f"* here     {show_seconds(self.step_s or 0.0)} were measured, which corrects all times as it is"
        least, needs = self.least, show_bytes(self.peak_bytes)
        if least is None:
            most = max(row.room_bytes for row in self.rows)
            yield f"least      does not fit: needs {needs}, and the largest GPU may give {show_bytes(most)}"
        else:
            yield f"least      {least.gpu.key}: needs {needs} of {show_bytes(least.room_bytes)}, with a tenth kept free"
        for what, row in self.smaller:
            yield f"           with {what}: {row.gpu.key}, {show_bytes(row.needs_bytes)} predicted"
        chosen, able = self.recommended, f"16-bit tensor cores and {HEADROOM} times the memory"
        rule = f"within {NEAR}x of the fastest at best, it has the lowest 16-bit rate"
        yield (
            f"take       no GPU has {able}"
            if chosen is None
            else f"take       {chosen.gpu.key}: of those with {able}, {rule}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values under stable keys."""
        return {
            "training": self.name,
            "device": self.device,
            "samples": self.samples,
            "work": self.work.to_dict(),
            "peak_bytes": self.peak_bytes,
            "epoch_updates": self.epoch_updates,
            "updates": self.updates,
            "here": self.here,
            "step_s": self.step_s,
            "correction": self.correction,
            "errors": {"as_it_is": vars(AS_IT_IS_ERROR), "at_best": vars(AT_BEST_ERROR)},
            "gpus": [row.to_dict() for row in self.rows],
            "least": None if self.least is None else self.least.gpu.key,
            "smaller": [
                {"with": what, "gpu": row.gpu.key, "predicted_bytes": row.needs_bytes} for what, row in self.smaller
            ],
            "recommended": None if self.recommended is None else self.recommended.gpu.key,
            "notes": list(self.notes),
        }


def _smallest(rows: Sequence[OnGpu]) -> OnGpu | None:
    """The GPU with the least memory of those that train it."""
    return min((row for row in rows if row.runs and row.fits), key=lambda row: row.gpu.usable_bytes, default=None)


def _times(step_s: float, count: int | None) -> str:
    whole = "" if count is None else show_seconds(count * step_s)
    return f"{show_seconds(step_s):>10}{whole:>13}"


def _flop(count: float) -> str:
    """`4.1e11` → `410 GFLOP`."""
    size, unit = next((one for one in ((1e12, "TFLOP"), (1e9, "GFLOP")) if count >= 0.9995 * one[0]), (1e6, "MFLOP"))
    return f"{count / size:,.3g} {unit}" if count < 1e15 else f"{count / size:,.0f} {unit}"


def _off(error: Error) -> str:
    return f"within {error.within:.2g}x in {error.works} trainings"


def gpus_of_job(job: Job, *, name: str, say: Say) -> GpusFound:
    """`hotlap.gpus` for a job, in this process."""
    with opened(job) as bench:
        trials = JobTrials(bench, say)
        seen = trials.unchanged(grows=False)
        work, step_s = trials.ordinary()
        epoch = len(bench.dataset.order.epoch(0))
        updates = job.steps if job.steps is not None else epoch * (job.epochs or 0)
        found = _found(name, seen, work, step_s)
    return replace(found, epoch_updates=epoch, updates=updates)


def gpus_of_script(target: Target, *, seconds: float = MOST_S, say: Say = silent) -> GpusFound:
    """`hotlap.gpus` for a script, which runs for some updates in a new process."""
    say(f"gpus       runs some updates of {target.name}")
    request = ProbeRequest(laps=LAPS, lap_s=LAP_S, counts=True, watches=True, works=WORKS)
    seen = run_probe(target, replace(request, lengths=True, begins_s=max(seconds, BEGINS_S)))
    if seen.out_of_memory is not None:
        raise TrainingError(f"{target.name} runs out of memory unchanged: {seen.out_of_memory}; lower its batch size")
    if not seen.work:
        raise TooShortError(f"{target.name} ended before hotlap had counted its updates; let it train longer")
    work = Work(**seen.work)
    longest = seen
    if seen.varies and seen.loader is not None:
        say("gpus       runs it again with its longest samples")
        longest = run_probe(target, replace(request, works=0, loader=seen.loader, longest=True))
        longest = longest if longest.account else seen
    found = _found(target.name, longest, work, seen.step_s)
    is_known = bool(seen.samples and seen.samples_an_update)
    epoch = -(-(seen.samples or 0) // seen.samples_an_update) if is_known else None
    unknown = "how many epochs the script trains is unknown"
    return replace(found, epoch_updates=epoch, notes=(RUNS, unknown, *found.notes))


def _found(name: str, seen: ProbeResult, work: Work, step_s: float) -> GpusFound:
    """The training on all GPUs, corrected by its measured step if a GPU of the catalogue is here."""
    update = update_of(seen)
    on_gpu = seen.device != "cpu"
    here = _here(seen.device)
    notes = [] if on_gpu else [COUNTED]
    if work.unfused:
        notes.append("torch's CPU splits its recurrent layers into small operations: times come out far too long")
    if "fp64" in work.flops:
        notes.append("some of its arithmetic is in fp64, which is predicted as fp32: convert the data to fp32")
    return GpusFound(
        name=name,
        device=seen.device,
        work=work,
        samples=seen.samples_an_update,
        peak_bytes=update.peak_bytes,
        epoch_updates=None,
        updates=None,
        here=None if here is None else here.key,
        step_s=step_s if here is not None else None,
        correction=1.0 if here is None else step_s / as_it_is_s(work, here),
        savings=tuple(savings(update, ModelFacts(**seen.model))) if seen.model else (),
        notes=tuple(notes),
    )


def _here(device: str) -> GpuModel | None:
    """The catalogue's entry of the GPU that the training ran on; None if it is not listed, or another is pretended."""
    found = machine.detect()
    if not device.startswith("cuda") or found.pretended is not None:
        return None
    index = int(device.partition(":")[2] or 0)
    key = next((gpu.model for gpu in found.gpus if gpu.index == index), None)
    return next((gpu for gpu in CATALOGUE if gpu.key == key), None)
