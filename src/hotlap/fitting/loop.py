"""`fit`: one call from a job to a trained model and its run folder."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hotlap import machine
from hotlap.core.errors import JobError, PlanError, StoreError, listed
from hotlap.core.job import Job
from hotlap.core.job_checks import plateau_problems
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import MOST_REPLAY_STEPS, Plan
from hotlap.core.units import show_seconds
from hotlap.data.course import Course, training_course
from hotlap.data.order import mix, seed_host
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.engine.step import Window
from hotlap.fitting.best import Best, trained_tensors
from hotlap.fitting.forged import counts, records, unfit_checkpoint
from hotlap.fitting.kept import KeptModel
from hotlap.fitting.pace import Pace
from hotlap.fitting.record import (
    FILE,
    LOSS,
    Ended,
    Record,
    first_key,
    kept_tensors,
    modules_of,
    read_end,
    read_record,
    weights_key,
    write_record,
)
from hotlap.fitting.run import Run
from hotlap.fitting.started import asked_by_command, note_gone_on, resume_words, start_record
from hotlap.fitting.views import View, open_view
from hotlap.fitting.words import banner, told
from hotlap.guard.identity import differences, identity
from hotlap.guard.saver import Saver
from hotlap.guard.signals import StopRequest
from hotlap.guard.state import export_state, import_state
from hotlap.store.checkpoints import KEPT, Checkpoints
from hotlap.store.lock import RunLock
from hotlap.store.plans import load_plan
from hotlap.store.run_folder import RunFolder, finite
from hotlap.store.weights import load_weights_into, unwrapped


def fit(
    job: Job,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    save_every: int | None = None,
    allow_changes: bool = False,
    reuse: bool = False,
    require_gpu: bool = False,
    progress: bool = True,
    started_by: Sequence[str] | None = None,
) -> Run:
    """Train the job and write its run folder.

    `plan` is a Plan, a plan file, or a dict of choices to change in the plan that the job itself describes,
    such as {"precision": "bf16"}; without one the training runs as the job describes it. `out` must be a
    new or empty folder; without it one is made under `runs/`. `resume` names the folder of a run to go on
    with: it ends as if it had never been interrupted. One that has no checkpoint yet begins again at step 0, and
    says so; one that has ended is not trained again, unless more is asked for. A training with other code, data
    or settings, or at step 0 with other first weights, is refused there, with the differences, unless
    `allow_changes`. `save_every` is a number of updates between checkpoints, one before the first step and one
    at the end included; without it they come as often as 2 % of the time allows, which in a short run may be
    never; 0 keeps none.

    With `reuse`, a model that was trained before on the same data, code, settings, plan and first weights is
    loaded from the cache instead of trained again, and one that was not is kept there.

    SIGINT and SIGTERM end it after the step in hand and a checkpoint: KeyboardInterrupt, or exit code 143.
    The caller's random generators are left as they were. Raises HotlapError where the job, plan, machine or
    folder will not do. `started_by` are the words that start this training again from a shell.
    """
    global _calls
    _calls += 1
    device = machine.choose_device(job.device, require_gpu=require_gpu)
    if isinstance(plan, (str, Path)):
        plan = load_plan(plan)
    elif plan is not None and not isinstance(plan, (Plan, Mapping)):
        raise PlanError(f"plan is a {type(plan).__name__}; give a Plan, a plan file, or a dict of choices to change")
    if resume is None:
        resume = asked_by_command(_calls)
    if resume is not None and out is not None and Path(out).resolve() != Path(resume).resolve():
        raise StoreError(f"both out={str(out)!r} and resume={str(resume)!r} are given; a resumed run keeps its folder")
    view = open_view(progress)
    course = training_course(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    randomness = Randomness(device)
    seed_host(mix(job.seed))
    if device.type == "cuda":
        torch.cuda.manual_seed(mix(job.seed))
    training = None
    try:
        training = _Training(job, course, plan, device, view, save_every)
        kept = KeptModel(training.identity, job, training.rig) if reuse else None
        if resume is not None:
            ended = training.go_on(resume, allow_changes=allow_changes, keep_plan=plan is not None)
            note_gone_on(resume)
            if ended is not None:
                return ended
        else:
            training.begin(out, start_record(_calls, started_by))
            if kept is not None and (found := kept.load()) is not None:
                return training.loaded(found)
        run = training.run()
        if kept is not None:
            kept.store(run)
        return run
    finally:
        if training is not None:
            training.close()
        randomness.restore()


SIGNAL_S = 2.0
"""How long a signal may take to arrive after it has ended the workers."""

_calls = 0
"""How often `fit` was called in this process: tells the trainings of one script apart."""


class _Training:
    """One call of `fit`."""

    def __init__(
        self,
        job: Job,
        course: Course,
        plan: Plan | Mapping[str, Any] | None,
        device: torch.device,
        view: View,
        save_every: int | None,
    ) -> None:
        self._start_s = time.perf_counter()
        self._job, self._course, self._view, self._save_every = job, course, view, save_every
        self._total = job.steps if job.steps is not None else len(course.order.epoch(0)) * (job.epochs or 0)
        self._modes = Modes([job.model])
        self.rig = Rig(
            job.model,
            job.optimizer,
            job.loss,
            forward=job.forward,
            prepare=job.prepare,
            augment=job.augment,
            schedule=job.schedule,
            schedule_per=job.schedule_per,
            updates=job.epochs if job.schedule_per == "epoch" else self._total,
            clip=job.clip,
            skip_nonfinite=job.skip_nonfinite,
            device=device,
        )
        if isinstance(self.rig.schedule.scheduler, ReduceLROnPlateau):
            wrong = plateau_problems(self.rig.schedule.scheduler, job)
            if wrong:
                raise JobError(wrong)
        self.rig.attach(course)
        if plan is not None:
            self.rig.use(plan if isinstance(plan, Plan) else self.rig.plan.but(**plan), why="given")
        self.identity = identity(job, course, self.rig.optimizer)
        self._versions = machine.environment()["versions"]
        self._history: list[dict[str, Any]] = []
        self._best = Best(job, self.rig)
        self._before_s = 0.0
        self._train_before_s = 0.0
        self._aside_s = 0.0
        self._warned = False
        self._problems: list[str] = []
        self._lock: RunLock | None = None
        self._from_checkpoint: str | None = None
        self._first: str | None = None

    # --- beginning and going on --------------------------------------------------------------------

    def begin(self, out: str | Path | None, started: dict[str, Any]) -> None:
        """Begin in a new folder. It is made last: a job that cannot run leaves none behind."""
        self._take(RunFolder.create(out, type(self._job.model).__name__))
        self._folder.write_started(started)
        self._folder.write_environment({**machine.environment(), "job": self.identity["settings"]})
        self._begin_at_step_0(first_key(self.rig))

    def _begin_at_step_0(self, first: str | None) -> None:
        """Write down what this training begins with, which is all that a kill before the first checkpoint needs."""
        if self._save_every != 0:
            self._folder.check_room(self._checkpoint_bytes() * (KEPT + 1))
        self._first = first
        write_record(self._folder, Record(facts=self._facts(), first=first))
        self._folder.write_ledger(self.rig.ledger)
        self._folder.write_plan(self.rig.plan)  # the last one: with it the folder is a run's
        self._say_banner()
        if self._save_every:
            self._save()

    def _checkpoint_bytes(self) -> int:
        """About how large a checkpoint will be: weights, the optimizer's state, and the best weights."""
        weights = sum(t.numel() * t.element_size() for t in trained_tensors(self.rig).values())
        defaults = self.rig.optimizer.defaults
        states = 2 if "betas" in defaults else 1 if defaults.get("momentum") else 0
        return weights * (1 + states + (self._job.patience is not None))

    def go_on(self, resume: str | Path, *, allow_changes: bool, keep_plan: bool) -> Run | None:
        """Go on where a run was left: from its newest checkpoint that is whole, or from step 0 if it never had one.

        What it came to, where it had ended and no more is asked for; then nothing is trained.
        """
        self._take(RunFolder.open(resume))
        self._checkpoints.tidy()
        try:
            record = read_record(self._folder)
        except StoreError:
            record = None  # of an earlier hotlap, or damaged: with a checkpoint one can do without
        if record is not None and record.ended is not None and record.ended.is_all(self._total, self._job.patience):
            changed = differences(record.facts.get("identity", {}), finite(self.identity))
            self._refuse(changed, allow_changes)
            ended = self._as_it_ended(record.ended, changed)
            if ended is not None:
                return ended
        if record is not None and self._checkpoints.none_yet():
            self._begin_again(record, allow_changes=allow_changes, keep_plan=keep_plan)
        else:
            self._go_on_from_checkpoint(record, allow_changes=allow_changes, keep_plan=keep_plan)
        return None

    def _refuse(self, changed: list[str], allow_changes: bool) -> None:
        if changed and not allow_changes:
            raise StoreError(
                listed(f"{self._folder.path} was another training in", "point", changed)
                + "; resume it as it was, or allow the changes (allow_changes=True, --allow-changes)"
            )

    def _begin_again(self, record: Record, *, allow_changes: bool, keep_plan: bool) -> None:
        """Begin at step 0 in the folder of a run that was killed before its first checkpoint was whole."""
        rig, first = self.rig, first_key(self.rig)
        changed = differences(record.facts.get("identity", {}), finite(self.identity))
        if first is None or first != record.first:
            changed.append(
                f"the model's first weights are not those that {self._folder.path} began with, and it has no "
                "checkpoint yet: seed before the model is made (torch.manual_seed), or start anew in another folder"
            )
        self._refuse(changed, allow_changes)
        if not keep_plan:
            with unfit_checkpoint(FILE):
                rig.use(Plan.from_dict(record.facts["plan"]))
        why = "; ".join(["no checkpoint had been completed", *changed])
        rig.ledger.record(Entry(step=0, what="begun again at step 0", outcome="chosen", plan=rig.plan, why=why))
        self._folder.write_metrics([])
        self._begin_at_step_0(first)
        self._tell(f"no checkpoint of {self._folder.path} had been completed: begun again at step 0")

    def _go_on_from_checkpoint(self, record: Record | None, *, allow_changes: bool, keep_plan: bool) -> None:
        checkpoint, damaged = self._checkpoints.newest_good()
        for line in damaged:
            self._tell(line)
        changed = differences(checkpoint.facts.get("identity", {}), self.identity)
        self._refuse(changed, allow_changes)
        rig = self.rig
        if not keep_plan:
            with unfit_checkpoint(checkpoint.path.name):
                rig.use(Plan.from_dict(checkpoint.facts["plan"]))
        self._from_checkpoint = checkpoint.path.name
        with unfit_checkpoint(self._from_checkpoint):
            loop = import_state(rig, checkpoint.files)
            counts(*dataclasses.astuple(rig.place), rig.steps, rig.updates, rig.samples)
            rig.totals.mean()
            self._history = records(*loop["history"])
            self._best.put_back(loop["best"])
            self._before_s, self._train_before_s = float(loop["elapsed_s"]), float(loop["train_s"])
            rig.ledger = Ledger.from_lines(loop["ledger"])
        why = "; ".join([*damaged, *changed])
        rig.ledger.record(
            Entry(step=rig.steps, what=f"resumed at step {rig.steps}", outcome="chosen", plan=rig.plan, why=why)
        )
        if record is not None:
            self._first = record.first
            if record.ended is not None:  # from here on it has not
                write_record(self._folder, dataclasses.replace(record, ended=None))
        # Lines of steps that were lost with the crash are taken back: those steps come again.
        self._folder.write_metrics(self._history)
        self._folder.write_ledger(rig.ledger)
        self._say_banner()
        self._tell(f"resumed at step {rig.steps:,}, epoch {rig.place.epoch + 1}")

    def _as_it_ended(self, ended: Ended, changed: list[str]) -> Run | None:
        """A run that had ended, its weights put back; None, and said why, where they are not as they were written."""
        folder, rig = self._folder, self.rig
        try:
            weights, history = read_end(folder, ended)
            plan, ledger = folder.read_plan(), folder.read_ledger()
        except StoreError as error:
            self._tell(f"{folder.path} had ended, but {error}; what is missing is trained again")
            return None
        for file, module in modules_of(rig).items():
            load_weights_into(unwrapped(module), weights.get(file, {}))
        self._modes.restore()
        self._history, rig.ledger = history, ledger  # the plan is only told: nothing is run under it
        rig.steps, rig.updates, rig.samples = ended.steps, ended.updates, ended.samples
        what, why = f"resumed at step {rig.steps}", "; ".join(["it had ended", *changed])
        rig.ledger.record(Entry(step=rig.steps, what=what, outcome="chosen", plan=plan, why=why))
        folder.write_ledger(rig.ledger)
        self._tell(f"{folder.path} had ended {ended.stopped}: nothing is left to train; ask for more to go on")
        best = next(one for one in history if one["step"] == ended.best_step)
        return self._result(ended.stopped, plan, best, train_s=ended.train_s, total_s=ended.total_s)

    def _take(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = RunLock(folder.path)
        self._checkpoints = Checkpoints(folder.path / "checkpoints")
        self._saver = Saver(
            self._checkpoints,
            self._save_every,
            self._tell_problem,
            before_s=time.perf_counter() - self._start_s,
            size=self._checkpoint_bytes(),
        )

    def _say_banner(self) -> None:
        for line in banner(self._job, self.rig, self._course, self._total, self._folder.path):
            self._tell(line)
        for caution in self.rig.cautions(self.rig.plan):
            self._tell(f"note   {caution}")

    def close(self) -> None:
        """Let go of workers, view and lock, however it ended."""
        if self._lock is not None:
            self._saver.finish()
        self.rig.close()
        self._view.close()
        if self._lock is not None:
            self._lock.release()

    # --- training ----------------------------------------------------------------------------------

    def run(self) -> Run:
        """Train to the end."""
        self._loop_s = time.perf_counter()
        self._pace = Pace(self._total, self.rig.steps, self.rig.samples)
        try:
            with StopRequest() as stop:
                stopped = self._steps(stop)
                asked = stop.signal is not None
                saved = self._save_every != 0 and (asked or self._saver.due_at_end(self.rig.steps))
                if saved:
                    self._save(wait=True)
            if stop.signal is not None:
                if self._save_every != 0 and not saved:  # it came while that was decided
                    self._save(wait=True)
                self._tell(f"stopped by {stop.signal.name}; go on with: {resume_words(self._folder)}")
                stop.obey()
        finally:
            self._saver.finish()
        return self._finish(stopped)

    def _steps(self, stop: StopRequest) -> str:
        job, rig, saver, clock = self._job, self.rig, self._saver, time.perf_counter
        every_s = self._view.every_s
        next_s = clock() + every_s
        early = f"early: no better {job.monitor} in {job.patience} evaluations"
        if self._best.is_long_ago():
            return early
        # What a forged or foreign state breaks, it breaks in the first step.
        step = rig.advance if self._from_checkpoint is None else self._step_from_checkpoint
        for window in self._windows(stop):
            step(window)
            step = rig.advance
            if clock() >= next_s:
                self._show()
                next_s = clock() + every_s
            if self._is_record_due():
                self._record()
                if self._best.is_long_ago():
                    return early
            if stop.signal is not None:
                return "on a signal"
            if saver.due(rig.steps):
                self._save()
        if stop.signal is not None:
            return "on a signal"
        if not self._history or self._history[-1]["step"] != rig.steps:
            self._record()
        return "after all epochs" if job.epochs is not None else "after all steps"

    def _windows(self, stop: StopRequest) -> Iterator[Window]:
        """The rig's windows, until they end or a signal ends the workers that bring them."""
        windows = self.rig.windows(epochs=self._job.epochs, steps=self._job.steps, room=self._room)
        while True:
            try:
                window = next(windows)
            except StopIteration:
                return
            except RuntimeError:
                # A signal to the whole group ends the loader's workers too, and torch complains of that first.
                if not stop.comes_within(SIGNAL_S):
                    raise
                return
            yield window

    def _room(self) -> int:
        """Updates until somebody has to look: an evaluation, or a checkpoint that is due by number."""
        steps = self.rig.place.served
        periods = [every for every in (self._job.eval_every, self._save_every) if every]
        return min((every - steps % every for every in periods), default=MOST_REPLAY_STEPS)

    def _step_from_checkpoint(self, window: Window) -> Tensor:
        with unfit_checkpoint(str(self._from_checkpoint)):
            return self.rig.advance(window)

    def _save(self, *, wait: bool = False) -> None:
        rig, now = self.rig, time.perf_counter()
        loop = {
            "history": self._history,
            "best": self._best.export(),
            "ledger": rig.ledger.to_lines(),
            "elapsed_s": self._elapsed(now),
            "train_s": self._trained(now),
        }
        self._saver.save(rig.steps, lambda: export_state(rig, loop), self._facts(), wait=wait)

    def _facts(self) -> dict[str, Any]:
        return {"identity": self.identity, "plan": self.rig.plan.to_dict(), "versions": self._versions}

    def _elapsed(self, now: float) -> float:
        return self._before_s + now - self._start_s

    def _trained(self, now: float) -> float:
        begun = getattr(self, "_loop_s", now)
        return self._train_before_s + now - begun - self._aside_s

    def _is_record_due(self) -> bool:
        every = self._job.eval_every
        if every is not None:
            return self.rig.steps % every == 0
        return self.rig.place.window == self.rig.epoch_windows

    def _show(self) -> None:
        rig = self.rig
        if not self._saver.busy:
            self._saver.finish()  # tells of a checkpoint that could not be written
        loss = rig.totals.mean()  # waits for the device, so that the rates below are true
        self._view.show(self._pace.read(step=rig.steps, samples=rig.samples, epoch=rig.place.epoch, loss=loss))

    def _record(self) -> None:
        """Evaluate and note the figures."""
        job, rig = self._job, self.rig
        train_loss = rig.totals.mean()
        rig.totals.reset()
        rig.settle()
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
        record["elapsed_s"] = self._elapsed(time.perf_counter())
        self._history.append(record)
        try:
            self._folder.add_metrics(record)
        except StoreError as error:
            self._tell_problem(f"metrics.jsonl lacks step {rig.steps}: {error}; training goes on")
        self._tell(told(record, by_step=job.eval_every is not None))
        self._warn_of_nonfinite(record)
        self._best.judge(record)
        spent = time.perf_counter() - aside
        self._aside_s += spent
        self._pace.pause(spent)

    def _warn_of_nonfinite(self, record: dict[str, Any]) -> None:
        if math.isfinite(record["train_loss"]) or self._warned:
            return
        self._warned = True
        rig = self.rig
        why = f"the training loss is {record['train_loss']} at step {rig.steps}"
        rig.ledger.record(Entry(step=rig.steps, what="loss not finite", outcome="fault", plan=rig.plan, why=why))
        cures = ["a smaller learning rate", "clip=1.0", "precision fp32", "skip_nonfinite=True"]
        self._tell(f"warning: {why}; try {', '.join(cures[: 3 if self._job.skip_nonfinite else 4])}")

    def _tell(self, line: str) -> None:
        self._view.say(line)

    def _tell_problem(self, line: str) -> None:
        self._problems.append(line)
        self._tell(f"warning: {line}")

    def loaded(self, found: dict[str, Any]) -> Run:
        """End at once with a model that was trained before; its weights are in place already."""
        rig = self.rig
        self._history = found["history"]
        rig.steps, rig.updates, rig.samples = found["counters"]
        self._train_before_s = found["train_s"]
        self._folder.write_metrics(self._history)
        self._saver.finish()
        self._loop_s = time.perf_counter()
        return self._finish(
            f"trained before, in {show_seconds(found['train_s'])}: loaded from the cache", found["best"]
        )

    # --- the end -----------------------------------------------------------------------------------

    def _finish(self, stopped: str, best: dict[str, Any] | None = None) -> Run:
        rig, ended_s = self.rig, time.perf_counter()
        self._best.restore_weights()
        self._modes.restore()
        best = best or self._best.record or self._history[-1]
        train_s = self._trained(ended_s)
        try:
            self._folder.write_plan(rig.plan)
            self._folder.write_ledger(rig.ledger)
            self._folder.write_model(rig.model)
            modules = modules_of(rig)
            if LOSS in modules:
                self._folder.write_loss(modules[LOSS])
            ended = Ended(
                stopped=stopped,
                asked=self._total,
                patience=self._job.patience if self._best.is_long_ago() else None,
                steps=rig.steps,
                updates=rig.updates,
                samples=rig.samples,
                train_s=train_s,
                total_s=self._elapsed(time.perf_counter()),
                best_step=best["step"],
                weights={file: weights_key(kept_tensors(module)) for file, module in modules.items()},
            )
            write_record(self._folder, Record(facts=self._facts(), first=self._first, ended=ended))
            self._folder.write_artefacts()
        except StoreError as error:
            # The model is in memory: whoever called can still save it elsewhere.
            self._tell_problem(f"{error}; the trained model is in the Run that fit returns")
        return self._result(stopped, rig.plan, best, train_s=train_s, total_s=self._elapsed(time.perf_counter()))

    def _result(self, stopped: str, plan: Plan, best: dict[str, Any], *, train_s: float, total_s: float) -> Run:
        rig = self.rig
        return Run(
            model=rig.model,
            plan=plan,
            ledger=rig.ledger,
            history=self._history,
            best=best,
            steps=rig.steps,
            updates=rig.updates,
            samples=rig.samples,
            train_s=train_s,
            total_s=total_s,
            saving_s=self._saver.spent_s,
            stopped=stopped,
            problems=tuple(self._problems),
            folder=self._folder,
        )
