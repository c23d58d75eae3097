"""`fit`: one call from a job to a trained model and its run folder."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotlap import __version__, machine
from hotlap.core.job import Job
from hotlap.core.ledger import Entry
from hotlap.core.plan import Plan
from hotlap.data.course import Course, training_course
from hotlap.data.order import mix, seed_host
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Randomness
from hotlap.fitting.pace import Pace
from hotlap.fitting.run import Run
from hotlap.fitting.views import View, open_view
from hotlap.store.plans import load_plan
from hotlap.store.run_folder import RunFolder


def fit(
    job: Job,
    *,
    plan: Plan | str | Path | None = None,
    out: str | Path | None = None,
    require_gpu: bool = False,
    progress: bool = True,
) -> Run:
    """Train the job and write its run folder.

    `plan` is a Plan or a plan file; without one the training runs as the job describes it. `out` must be a
    new or empty folder; without it one is made under `runs/`. The caller's random generators are left as
    they were. Raises HotlapError where the job, plan, machine or folder will not do.
    """
    device = machine.choose_device(job.device, require_gpu=require_gpu)
    if plan is not None and not isinstance(plan, Plan):
        plan = load_plan(plan)
    course = training_course(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    randomness = Randomness(device)
    seed_host(mix(job.seed))
    if device.type == "cuda":
        torch.cuda.manual_seed(mix(job.seed))
    try:
        return _Training(job, course, plan, device, out, open_view(progress)).run()
    finally:
        randomness.restore()


class _Training:
    """One call of `fit`."""

    def __init__(
        self,
        job: Job,
        course: Course,
        plan: Plan | None,
        device: torch.device,
        out: str | Path | None,
        view: View,
    ) -> None:
        self._start_s = time.perf_counter()
        self._job, self._course, self._view = job, course, view
        self._per_epoch = len(course.order.epoch(0))
        self._total = job.steps if job.steps is not None else self._per_epoch * (job.epochs or 0)
        self._rig = Rig(
            job.model,
            job.optimizer,
            job.loss,
            forward=job.forward,
            schedule=job.schedule,
            schedule_per=job.schedule_per,
            updates=self._total,
            clip=job.clip,
            skip_nonfinite=job.skip_nonfinite,
            device=device,
        )
        self._rig.attach(course)
        if plan is not None:
            self._rig.use(plan, why="given")
        # Made last: a job that cannot run leaves no folder behind.
        self._folder = RunFolder.create(out, type(job.model).__name__)
        self._pace = Pace(self._total)
        self._history: list[dict[str, Any]] = []
        self._best: dict[str, Any] | None = None
        self._best_weights: dict[str, Tensor] = {}
        self._since_best = 0
        self._aside_s = 0.0
        self._warned = False

    def run(self) -> Run:
        """Train to the end."""
        self._begin()
        try:
            stopped = self._steps()
        finally:
            self._rig.close()
            self._view.close()
        return self._finish(stopped)

    def _begin(self) -> None:
        self._folder.write_plan(self._rig.plan)
        self._folder.write_ledger(self._rig.ledger)
        self._folder.write_environment({**machine.environment(), "job": describe(self._job)})
        for line in banner(self._job, self._rig, self._course, self._total, self._folder):
            self._view.say(line)
        self._loop_s = time.perf_counter()

    def _steps(self) -> str:
        job, rig, clock = self._job, self._rig, time.perf_counter
        every_s = self._view.every_s
        next_s = clock() + every_s
        rig.model.train()
        for window in rig.windows(epochs=job.epochs, steps=job.steps):
            rig.step(window)
            if clock() >= next_s:
                self._show()
                next_s = clock() + every_s
            if self._is_record_due() and self._record():
                return f"early: no better {job.monitor} in {job.patience} evaluations"
        if not self._history or self._history[-1]["step"] != rig.steps:
            self._record()
        return "after all epochs" if job.epochs is not None else "after all steps"

    def _is_record_due(self) -> bool:
        every = self._job.eval_every
        if every is not None:
            return self._rig.steps % every == 0
        return self._rig.place.window == self._rig.epoch_windows

    def _show(self) -> None:
        rig = self._rig
        loss = rig.totals.mean()  # waits for the device, so that the rates below are true
        self._view.show(self._pace.read(step=rig.steps, samples=rig.samples, epoch=rig.place.epoch, loss=loss))

    def _record(self) -> bool:
        """Evaluate and note the figures; whether it is time to stop."""
        job, rig = self._job, self._rig
        train_loss = rig.totals.mean()
        rig.totals.reset()
        aside = time.perf_counter()
        record: dict[str, Any] = {
            "step": rig.steps,
            "epoch": rig.place.epoch + 1,
            "samples": rig.samples,
            "train_loss": train_loss,
            "lr": float(rig.optimizer.param_groups[0]["lr"]),
        }
        if job.valid is not None:
            scores = rig.evaluate(job.valid, job.metrics, batch_size=job.eval_batch, collate=job.collate)
            record |= {("valid_loss" if name == "loss" else name): value for name, value in scores.items()}
            rig.schedule.evaluated(scores[job.monitor])
        record["elapsed_s"] = time.perf_counter() - self._start_s
        self._history.append(record)
        self._folder.add_metrics(record)
        self._view.say(_told(record))
        self._warn_of_nonfinite(record)
        stop = self._judge(record)
        spent = time.perf_counter() - aside
        self._aside_s += spent
        self._pace.pause(spent)
        return stop

    def _judge(self, record: dict[str, Any]) -> bool:
        job = self._job
        if job.patience is None:
            return False
        name = "valid_loss" if job.monitor == "loss" else job.monitor
        if self._best is None or _better(record[name], self._best[name], job.higher_is_better):
            self._best, self._since_best = record, 0
            self._best_weights = {k: v.detach().cpu().clone() for k, v in _tensors(self._rig.model).items()}
            return False
        self._since_best += 1
        return self._since_best >= job.patience

    def _warn_of_nonfinite(self, record: dict[str, Any]) -> None:
        if math.isfinite(record["train_loss"]) or self._warned:
            return
        self._warned = True
        rig = self._rig
        why = f"the training loss is {record['train_loss']} at step {rig.steps}"
        rig.ledger.record(Entry(step=rig.steps, what="loss not finite", outcome="fault", plan=rig.plan, why=why))
        self._view.say(f"warning: {why}; try a smaller learning rate, clip=1.0, precision fp32, or skip_nonfinite=True")

    def _finish(self, stopped: str) -> Run:
        rig, ended_s = self._rig, time.perf_counter()
        best = self._history[-1]
        if self._best is not None:
            best = self._best
            with torch.no_grad():
                for name, tensor in _tensors(rig.model).items():
                    tensor.copy_(self._best_weights[name])
        self._folder.write_plan(rig.plan)
        self._folder.write_ledger(rig.ledger)
        self._folder.write_model(rig.model)
        self._folder.write_artefacts()
        return Run(
            model=rig.model,
            plan=rig.plan,
            ledger=rig.ledger,
            history=self._history,
            best=best,
            steps=rig.steps,
            updates=rig.updates,
            samples=rig.samples,
            train_s=ended_s - self._loop_s - self._aside_s,
            total_s=time.perf_counter() - self._start_s,
            stopped=stopped,
            folder=self._folder,
        )


def banner(job: Job, rig: Rig, course: Course, total: int, folder: RunFolder) -> list[str]:
    """The settings in force, before the first step."""
    trained = sum(p.numel() for p in rig.model.parameters() if p.requires_grad)
    device = (
        torch.cuda.get_device_name(rig.device)
        if rig.device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    batch = f"batch {course.batch_size}"
    if job.accumulate > 1:
        batch += f" × {job.accumulate} accumulated = {course.batch_size * job.accumulate} per update"
    length = f"{job.epochs} epochs = {total:,} updates" if job.epochs is not None else f"{total:,} updates"
    return [
        f"hotlap {__version__} on {device}, torch {torch.__version__}",
        f"model  {type(job.model).__name__}, {trained:,} parameters in training",
        f"data   {len(course.source):,} samples, {batch}, {length}",
        f"plan   {rig.plan}",
        f"run    {folder.path}",
    ]


def describe(job: Job) -> dict[str, Any]:
    """The job's settings as JSON holds them; objects by the name of their class."""
    plain = (int, float, str, bool, type(None))
    return {
        name: value if isinstance(value, plain) else getattr(value, "__qualname__", type(value).__name__)
        for name, value in vars(job).items()
    }


def _told(record: dict[str, Any]) -> str:
    rest = [f"{k} {v:.4g}" for k, v in record.items() if k not in ("step", "epoch", "samples", "elapsed_s")]
    return " · ".join([f"epoch {record['epoch']}, step {record['step']:,}", *rest])


def _better(new: float, old: float, higher: bool) -> bool:
    if math.isnan(old):
        return not math.isnan(new)
    return new > old if higher else new < old


def _tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))
