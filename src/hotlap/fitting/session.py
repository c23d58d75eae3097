"""The run folder of a training in progress: lock, checkpoints, evaluations, best weights and time so far."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotlap.core.errors import HotlapError, StoreError, first_line
from hotlap.core.job import Job
from hotlap.core.ledger import Ledger
from hotlap.core.units import MIB
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import PythonState
from hotlap.fitting.first_nan import are_finite
from hotlap.fitting.task import Task, trained_tensors
from hotlap.guard.saving import Saver, export_state, import_state
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.disk import Piece
from hotlap.store.run_folder import RunFolder, RunLock
from hotlap.store.tensors import copied_to_host

KEPT_BYTES = 8 * MIB
"""The most weights, and the most of what functions hold, of which step 0 is kept in memory: a copy takes some ms."""


@contextmanager
def unfit_checkpoint(name: str) -> Iterator[None]:
    """Say of whatever goes wrong inside that the checkpoint does not fit."""
    try:
        yield
    except (HotlapError, torch.OutOfMemoryError):
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError, RuntimeError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        raise StoreError(f"checkpoint {name} does not fit this training: {why}") from error


def counts(*values: Any) -> None:
    """Raise ValueError for a value that counts nothing."""
    for value in values:
        if type(value) is not int or not 0 <= value < 2**53:
            raise ValueError(f"{value!r:.40} is no count")


def records(*values: Any) -> list[dict[str, Any]]:
    """The records of evaluations; raises ValueError for anything else."""
    for record in values:
        if not isinstance(record, dict) or not {"step", "epoch", "train_loss", "lr"} <= set(record):
            raise ValueError(f"{record!r:.40} is no record of an evaluation")
        for name, value in record.items():
            if not isinstance(name, str) or not isinstance(value, (int, float)):
                raise ValueError(f"{name!r:.40} is {value!r:.40} in a record of an evaluation")
        counts(record["step"], record["epoch"])
    return list(values)


class Best:
    """The best evaluation of a training; without `patience` nothing stops, and nothing is kept unless it `keeps`."""

    def __init__(self, job: Job, rig: Rig, *, keeps: bool) -> None:
        self._patience, self._rig, self._keeps = job.patience, rig, keeps
        self.decides = job.patience is not None
        """Whether the model ends with these weights, not with its last."""
        self._name = "valid_loss" if job.monitor == "loss" else job.monitor
        self._higher = job.higher_is_better
        self._record: dict[str, Any] | None = None
        self._weights: dict[str, Tensor] = {}
        self._since = 0

    def judge(self, record: dict[str, Any]) -> None:
        """Take in an evaluation; the weights of a better one are kept."""
        if not self._keeps or self._name not in record:
            return
        if self._record is None or self._beats(record[self._name], self._record[self._name]):
            self._record, self._since = record, 0
            self._weights = copied_to_host(trained_tensors(self._rig))
        else:
            self._since += 1

    @property
    def record(self) -> dict[str, Any] | None:
        """The record whose weights the model ends with; None for the last one."""
        return self._record if self.decides else None

    @property
    def is_known(self) -> bool:
        """Whether the weights of an evaluation with a finite score are kept."""
        return self.record is not None and math.isfinite(self.record[self._name])

    def is_long_ago(self) -> bool:
        """Whether patience is at its end."""
        return self._patience is not None and self._since >= self._patience

    def restore_weights(self) -> None:
        """Give the model the weights of the best evaluation, where there is one and it decides."""
        if not self.decides:
            return
        with torch.no_grad():
            for name, tensor in trained_tensors(self._rig).items():
                kept = self._weights.get(name)  # a buffer may be younger than the best weights
                if kept is not None and kept.shape == tensor.shape:
                    tensor.copy_(kept)

    def export(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"record": self._record, "weights": self._weights, "since": self._since}

    def put_back(self, stored: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept; raises ValueError where that is something else."""
        record, weights, since = stored["record"], stored["weights"], stored["since"]
        counts(since)
        if record is not None:
            records(record)
        if not isinstance(weights, dict) or not all(isinstance(kept, Tensor) for kept in weights.values()):
            raise ValueError("the best weights are no tensors")
        self._record, self._weights, self._since = record, weights, since

    def _beats(self, new: float, old: float) -> bool:
        if math.isnan(old):
            return not math.isnan(new)
        return new > old if self._higher else new < old


@dataclass(kw_only=True)
class Clock:
    """The seconds of one training, those in earlier processes included. `now` is a `time.perf_counter()`."""

    start_s: float
    """When this process began with it."""
    before_s: float = 0.0
    """What earlier processes took in all."""
    train_before_s: float = 0.0
    """What earlier processes spent on steps."""
    loop_s: float | None = None
    """When the first step of this process was due; None before."""
    aside_s: float = 0.0
    """What this process spent on evaluations since."""

    @property
    def setup_s(self) -> float | None:
        """Seconds before the first step; None where earlier processes had begun it."""
        return None if self.loop_s is None or self.before_s else self.loop_s - self.start_s

    def elapsed(self, now: float) -> float:
        """Seconds from start to now, all included."""
        return self.before_s + now - self.start_s

    def trained(self, now: float) -> float:
        """Seconds spent on steps until now."""
        begun = now if self.loop_s is None else self.loop_s
        return self.train_before_s + now - begun - self.aside_s


class ProgressState:
    """What the loop carries from step to step beside the rig; a checkpoint keeps it."""

    def __init__(self, task: Task, *, first: str | None, from_checkpoint: str | None = None) -> None:
        self.history: list[dict[str, Any]] = []
        """One record an evaluation or epoch."""
        self.best = Best(task.job, task.rig, keeps=task.keeps_best)
        self.clock = Clock(start_s=task.start_s)
        self.first = first
        """`first_key` before the very first step; None if unknown."""
        self.planned: int | None = None
        """Updates that the schedule was made to span, where a deadline made it fewer than were asked for."""
        self.left_out: tuple[str, ...] = ()
        """What the training has not done for want of time."""
        self.asked_to_end: str | None = None
        """Why the user's own function wants the training to end."""
        self.is_cut = False
        """Whether a deadline has changed what was trained."""
        self.from_checkpoint = from_checkpoint
        """The checkpoint that this process went on from; None where it began at step 0."""

    def export(self, ledger: Ledger) -> dict[str, Any]:
        """What a checkpoint keeps of it, and of the ledger."""
        now = time.perf_counter()
        return {
            "history": self.history,
            "best": self.best.export(),
            "planned": self.planned,
            "ledger": ledger.to_lines(),
            "elapsed_s": self.clock.elapsed(now),
            "train_s": self.clock.trained(now),
        }

    def put_back(self, stored: dict[str, Any]) -> Ledger:
        """Go on from what a checkpoint kept; the ledger it had. Raises ValueError and the like where it is forged."""
        self.put_back_records(stored)
        self.clock.before_s, self.clock.train_before_s = float(stored["elapsed_s"]), float(stored["train_s"])
        return Ledger.from_lines(stored["ledger"])

    def put_back_records(self, stored: dict[str, Any]) -> None:
        """As `put_back`, in the process that made the checkpoint: its clock and its ledger go on."""
        self.history = records(*stored["history"])
        self.best.put_back(stored["best"])
        self.planned = stored.get("planned")
        counts(self.planned or 0)


class RunSession:
    """The folder of a training that runs; raises StoreError where another one holds it."""

    def __init__(self, folder: RunFolder, task: Task) -> None:
        self._task = task
        self.folder = folder
        self.lock = RunLock(folder.path)
        self._contexts = ExitStack()
        self.checkpoints = Checkpoints(folder.path / "checkpoints")
        self.saver = Saver(
            self.checkpoints,
            task.save_every,
            task.voice.warn,
            before_s=time.perf_counter() - task.start_s,
            size=task.checkpoint_bytes(),
        )

        self._start: dict[str, Iterable[Piece]] | None = None
        """The files of a checkpoint of step 0, if they were kept in memory."""
        self._remembered: PythonState | None = None
        """What modules, the optimizer and functions remembered at step 0."""

    def until_it_ends(self, context: AbstractContextManager[object]) -> None:
        """Enter a context; the end of the session leaves it."""
        self._contexts.enter_context(context)

    def end(self) -> None:
        """Leave the folder to others."""
        self._contexts.close()
        self.lock.release()

    def save(self, state: ProgressState, *, wait: bool = False) -> None:
        """Make a checkpoint of where the rig stands; it is written beside the training unless that is to `wait`."""
        rig = self._task.rig
        if not are_finite(p for module in rig.modules for p in module.parameters()):
            self._task.voice.warn(f"step {rig.steps:,} is not saved: its weights are not finite")
            return
        loop = self._exported(state)
        remembered, note = self._task.memory.found()
        if note is not None:
            self._task.voice.say(f"note   {note}")
        self.saver.save(rig.steps, lambda: export_state(rig, loop, remembered), self._task.facts(), wait=wait)

    def keep_start(self, state: ProgressState) -> None:
        """Keep step 0 of a small model in memory: a short run has no checkpoint to go back to."""
        rig = self._task.rig
        if rig.steps or self._task.weights_bytes() > KEPT_BYTES:
            return
        # A training does without where no file can hold its state, memory is too small, or a device fails.
        with suppress(StoreError, OSError, MemoryError, RuntimeError):
            remembered = rig.python_state()
            if remembered.size <= KEPT_BYTES:
                self._start, self._remembered = export_state(rig, self._exported(state)), remembered

    def put_back(self, *, until: int, or_start: bool = False) -> dict[str, Any]:
        """Put rig and sampler back to the newest checkpoint up to a step; what it kept of the loop.

        Goes back to step 0 if asked to and there is no checkpoint. Raises StoreError if that was not kept either.
        """
        task = self._task
        self.saver.finish()
        remembered = None
        try:
            files = self.checkpoints.newest_good(until=until)[0].files
        except StoreError:
            if not or_start or self._start is None or until < 0:
                raise
            files = {name: b"".join(pieces) for name, pieces in self._start.items()}
            self._start, remembered = {name: [whole] for name, whole in files.items()}, self._remembered
        loop = import_state(task.rig, files, task.memory.changes)
        if remembered is not None:
            remembered.restore()
        task.rig.outdate_ranks()
        task.dataset.order.restore_sampler(loop.get("order"))
        return loop

    def _exported(self, state: ProgressState) -> dict[str, Any]:
        return {**state.export(self._task.rig.ledger), "order": self._task.dataset.order.sampler_state()}
