"""How a training stands while it runs: what its sampler writes down, and the check after its first epoch."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hotlap import machine
from hotlap.core.ledger import Ledger
from hotlap.core.turns import turn
from hotlap.engine.objective import PendingMean
from hotlap.engine.rig import Rig
from hotlap.fitting.session import ProgressState, RunSession
from hotlap.fitting.task import Task
from hotlap.machine.catalogue import GpuModel, find_gpu
from hotlap.machine.cuda import cuda_gpu
from hotlap.monitor.conditions import Conditions, Event, Stretch
from hotlap.monitor.first_epoch import LEAST_S, FirstEpoch
from hotlap.monitor.hardware import GpuReader, HostReader, open_gpus
from hotlap.monitor.memory_watch import MemoryWatch
from hotlap.monitor.verdict import Seen, Verdict, headway, verdict
from hotlap.tuner.tuner import PlanChooser

LOOK_S = 2.0
"""Between two looks at the loss, which cost some 50 µs each and wait for nothing."""
MOST_LOSSES = 240
"""Points of the curve of losses."""
MARKS = 8
"""States that are remembered: rates are those of the time since the oldest."""
LAST_ENTRIES = 6
"""Lines of the ledger that others see."""


class Mark(NamedTuple):
    """Counts at one moment, of which the differences are rates."""

    at_s: float
    steps: int
    samples: int
    fed_s: float
    aside_s: float
    saving_s: float


class LiveTraining:
    """What one training lays out for others.

    The loop of the training adds to it and calls `look`. The thread of a sampler calls `read` and `state`, which only
    read what lies about.
    """

    def __init__(self, task: Task, session: RunSession, state: ProgressState, tuner: PlanChooser) -> None:
        self._task, self._session, self._state, self._rig = task, session, state, task.rig
        self.tuner = tuner
        self.fed_s = 0.0
        """How long the host has waited for batches."""
        self.doing = "training"
        """Or `evaluating`, or `saving`."""
        self.stopped = ""
        """Why it ended; empty while it runs."""
        self.losses = LossCurve()
        self._first = FirstEpochWatch(task)
        self._memory, self._watched_plan = MemoryWatch(task.rig.device), task.rig.plan
        self._begun_at = task.rig.steps
        self._host = HostReader(session.folder.path)
        self._gpu, self._model = gpu_of(task.rig.device)
        self._marks: deque[Mark] = deque([self._mark()], maxlen=MARKS)
        self._samples: deque[dict[str, Any]] = deque(maxlen=MARKS)
        self._conditions = Conditions()

    # --- in the thread of the training -----------------------------------------------------------------

    def look(self) -> None:
        """Read the loss of the last look, ask for that of this moment, and check the first epoch."""
        totals = self._rig.totals
        self.losses.look(self._rig.steps, totals.peek(), totals.resets)
        for line in self._first.look(self._mark(), self.losses, self._rig.ledger):
            self._task.voice.say(f"check  {line}")
        self._tell_of_conditions(self._conditions.take())
        self._look_at_memory()

    def stepped(self) -> None:
        """Take in a step, as long as the first epoch is not over."""
        if not self._first.is_over and self._rig.place.window >= self._rig.epoch_windows:
            self._first.epoch_over(self._mark())
        if self._memory.is_open:
            self._tell_of_memory(self._memory.step_ended())

    def close(self) -> None:
        """The training makes no more steps, and its sampler has ended."""
        self._memory.close()
        self._tell_of_conditions(self._conditions.close())

    def _tell_of_conditions(self, events: Iterable[Event]) -> None:
        for event in events:
            self._rig.write_down(event.what, "fault", event.line, figures=event.figures)
            self._task.voice.say(f"host   {event.line}")

    def _look_at_memory(self) -> None:
        """Whether memory grows, under one plan: trials and other plans take and give back memory."""
        rig = self._rig
        if turn.get() is not None:  # others take and give back memory of this process
            return
        if not self.tuner.done or rig.plan != self._watched_plan:
            self._memory.forget()
            self._watched_plan = rig.plan
            return
        filled_at = self._begun_at + rig.epoch_windows
        self._tell_of_memory(self._memory.look(rig.steps, filled_at=filled_at, may_watch=_runs_its_lines(rig)))

    def _tell_of_memory(self, line: str | None) -> None:
        if line is not None:
            self._rig.write_down("memory grows", "fault", line)
            self._task.voice.warn(line)

    # --- in the thread of the sampler ------------------------------------------------------------------

    def read(self) -> dict[str, Any]:
        """The figures of a sample."""
        return sample_of(self._host, self._gpu, self._rig.device, self._rig.steps)

    def state(self, sample: dict[str, Any]) -> dict[str, Any]:
        """How the training stands, as `live.json` has it."""
        rig, task, state = self._rig, self._task, self._state
        before, now = self._marks[-1], self._mark()
        self._samples.append(sample)
        self._marks.append(now)
        since = self._marks[0]
        seconds, steps = now.at_s - since.at_s, now.steps - since.steps
        moved_s = max(1e-9, seconds - (now.aside_s - since.aside_s) - (now.saving_s - since.saving_s))
        rate = steps / moved_s if seconds > 0 else 0.0
        left = max(0, task.total - rig.steps)
        return {
            "kind": "fit",
            "unit": "steps",
            "name": type(task.job.model).__name__,
            "device": str(rig.device),
            "doing": self.doing,
            "stopped": self.stopped,
            "step": rig.steps,
            "steps": task.total,
            "epoch": min(rig.place.epoch + 1, task.job.epochs or rig.place.epoch + 1),
            "epochs": task.job.epochs,
            "loss": self.losses.last,
            "losses": self.losses.points(),
            "steps_per_s": rate,
            "samples_per_s": (now.samples - since.samples) / moved_s if seconds > 0 else 0.0,
            "elapsed_s": state.clock.elapsed(now.at_s),
            "left_s": self._left_s(left, rate),
            "metrics": dict(state.history[-1]) if state.history else None,
            "best": dict(state.best.record) if state.best.record is not None else None,
            "plan": str(rig.plan),
            "is_tuning": not self.tuner.done,
            "ledger": ledger_lines(rig.ledger),
            **self._verdict(since, now, before),
        }

    def _verdict(self, since: Mark, now: Mark, before: Mark) -> dict[str, Any]:
        rig, diagnosed, steps = self._rig, self.tuner.diagnosed, now.steps - since.steps
        seconds = now.at_s - since.at_s
        seen = Seen(
            seconds=seconds,
            steps=steps,
            feeding_s=now.fed_s - since.fed_s,
            evaluation_s=seconds if self.doing == "evaluating" and not steps else now.aside_s - since.aside_s,
            saving_s=now.saving_s - since.saving_s,
            on_gpu=rig.device.type == "cuda",
            samples=tuple(self._samples),
            plan=rig.plan,
            diagnosed=diagnosed,
        )
        found = verdict(seen)
        aside_s = now.aside_s - before.aside_s + now.saving_s - before.saving_s
        stretch = Stretch(rig.plan, max(0.0, now.at_s - before.at_s - aside_s), now.steps - before.steps)
        # Trials take time of their own, and an evaluation under way is no pace.
        counts = self.tuner.done and self.doing == "training" and stretch.steps > 0
        self._conditions.see(seen, stretch if counts else None)
        told: dict[str, Any] = {}
        if found is not None:
            told["bound"] = as_state(found)
        if diagnosed is not None and steps and seconds > 0:
            reached = headway(diagnosed[0], seconds / steps, rig.plan.numerics.precision, self._model)
            told["headway"] = {"mfu": reached.mfu, "floor_s": reached.floor_s, "line": reached.line}
        return told

    def _left_s(self, left: int, rate: float) -> float | None:
        by_pace = left / rate if rate > 0 else None
        limit = self._task.limit
        if limit is None:
            return by_pace
        return limit.left_s if by_pace is None else min(by_pace, limit.left_s)

    def _mark(self) -> Mark:
        rig, clock = self._rig, self._state.clock
        saving_s = self._session.saver.spent_s
        return Mark(time.perf_counter(), rig.steps, rig.samples, self.fed_s, clock.aside_s, saving_s)


class LossCurve:
    """The mean loss between looks, in a bounded number of points."""

    def __init__(self) -> None:
        self._points: list[tuple[int, float]] = []
        self._pending: tuple[int, PendingMean, int] | None = None
        self._before = (0.0, 0.0, 0)

    @property
    def first(self) -> float:
        """The loss of the first steps; NaN before the first look."""
        return self._points[0][1] if self._points else math.nan

    @property
    def last(self) -> float:
        """The loss of the latest steps; NaN before the first look."""
        return self._points[-1][1] if self._points else math.nan

    @property
    def is_lost(self) -> bool:
        """Whether the loss of the latest steps is not finite."""
        return bool(self._points) and not math.isfinite(self._points[-1][1])

    def points(self) -> list[tuple[int, float]]:
        """Steps, and the mean loss up to each."""
        return [(step, loss) for step, loss in self._points[:MOST_LOSSES]]

    def look(self, step: int, total: PendingMean, resets: int) -> None:
        """Take in the running loss at a step, to be read at the next look: by then the device has come to it."""
        before, self._pending = self._pending, (step, total, resets)
        if before is not None:
            summed, counted, more = before[1].numbers()
            self.add(before[0], float(summed), float(counted) + more, before[2])

    def add(self, step: int, summed: float, count: float, resets: int = 0) -> None:
        """Take in the sum of losses up to a step, what divides it, and how often both began anew."""
        had, of, was = self._before
        self._before = summed, count, resets
        if resets != was:
            had, of = 0.0, 0.0
        if count > of:
            self._points.append((step, (summed - had) / (count - of)))
        if len(self._points) >= MOST_LOSSES:
            pairs = zip(self._points[::2], self._points[1::2], strict=False)
            self._points = [(later, (one + other) / 2) for (_, one), (later, other) in pairs]


class FirstEpochWatch:
    """Expects of the first epoch what its first steps promise, and compares once it is over."""

    def __init__(self, task: Task) -> None:
        self._task, self._rig, self._began_s = task, task.rig, time.perf_counter()
        self._looks: list[Mark] = []
        self._bytes: int | None = None
        self._seen: tuple[Mark, int | None] | None = None
        self.is_over = self._rig.steps > 0
        """Whether there is nothing left to see of it; one that was resumed in the middle is not checked."""
        self._is_told = self.is_over

    def look(self, now: Mark, losses: LossCurve, ledger: Ledger) -> list[str]:
        """Take in how it stands; the lines of the check, once, when what came after the epoch is known too."""
        if self._is_told:
            return []
        if not self.is_over:
            self._looks.append(now)
            if len(self._looks) == 2:
                self._bytes = _held(self._rig.device)
            return []
        self._is_told = True
        found = self.compared(now, losses, ledger)
        return [] if found is None else found.lines()

    def epoch_over(self, now: Mark) -> None:
        """Take in that the last step of the epoch was made."""
        self.is_over, self._seen = True, (now, _held(self._rig.device))

    def compared(self, now: Mark, losses: LossCurve, ledger: Ledger) -> FirstEpoch | None:
        """What was expected and seen; None where the epoch was too short to tell."""
        if self._seen is None or len(self._looks) < 2:
            return None
        (end, held), (one, other) = self._seen, self._looks[:2]
        step_s = (other.at_s - one.at_s - (other.aside_s - one.aside_s)) / max(1, other.steps - one.steps)
        for entry in ledger:
            if entry.kind == "baseline":
                step_s = entry.figures.get("step_s", step_s)
        tuning_s = max((entry.figures.get("cost_s", 0.0) for entry in ledger if entry.kind == "tuned"), default=0.0)
        steps_s = end.at_s - self._began_s - end.aside_s - end.saving_s
        if steps_s < LEAST_S:
            return None
        return FirstEpoch(
            expected_s=end.steps * step_s,
            steps_s=steps_s,
            feeding_s=end.fed_s,
            tuning_s=tuning_s,
            evaluation_s=now.aside_s - end.aside_s,
            epochs_left=max(0.0, self._task.total / max(1, end.steps) - 1),
            first_loss=losses.first,
            last_loss=losses.last,
            first_bytes=self._bytes,
            last_bytes=held,
        )


def _runs_its_lines(rig: Rig) -> bool:
    """Whether each step runs the model's own code, operation by operation."""
    how = rig.plan.execution
    compiled = (vars(one).get("_compiled_call_impl") or hasattr(one, "_orig_mod") for one in rig.model.modules())
    return how.mode == "eager" and how.compile == "no" and not any(compiled)


def as_state(found: Verdict) -> dict[str, Any]:
    """A verdict as `live.json` has it."""
    return {"by": found.bound, "why": found.why, "share": found.share, "answer": found.answer}


def ledger_lines(ledger: Ledger) -> list[dict[str, Any]]:
    """The last entries on what became of what was tried, as JSON; of those about the same thing, the last."""
    left_out = ("measured", "not tried")
    told = {(entry.what, entry.outcome): entry for entry in list(ledger) if entry.outcome not in left_out}
    return [
        {"step": one.step, "outcome": one.outcome, "what": one.what, "why": why, "ratio": one.figures.get("ratio")}
        for one in [*told.values()][-LAST_ENTRIES:]
        for why in one.why.split("\n")[:1]  # stacks of a hang follow
    ]


def gpu_of(device: torch.device) -> tuple[GpuReader | None, GpuModel | None]:
    """The reader of a GPU that torch calls so, and its entry in the catalogue, where there are such."""
    if device.type != "cuda" or not torch.cuda.is_available():  # boosters may ask for a GPU that torch lacks
        return None, None
    index = torch.cuda.current_device() if device.index is None else device.index
    seen = cuda_gpu(index)
    readers, _ = open_gpus(seen.uuid, seen.bus_id)
    key = next((gpu.model for gpu in machine.detect().gpus if gpu.index == index), None)
    return (readers[0] if readers else None), (find_gpu(key) if key else None)


def sample_of(host: HostReader, gpu: GpuReader | None, device: torch.device, step: int) -> dict[str, Any]:
    """The figures of a sample."""
    found: dict[str, Any] = {"step": step, "host": host.read()}
    if gpu is not None:
        found["gpus"] = [gpu.read(own=(os.getpid(),))]
    if device.type == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch"] = _torch_memory(device)
    return found


def _torch_memory(device: torch.device) -> dict[str, int]:
    """What torch holds of the GPU's memory."""
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_bytes": int(stats.get("allocated_bytes.all.current", 0)),
        "reserved_bytes": int(stats.get("reserved_bytes.all.current", 0)),
        "peak_bytes": int(stats.get("allocated_bytes.all.peak", 0)),
    }


def _held(device: torch.device) -> int | None:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else None
