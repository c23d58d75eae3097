"""`fit`: one call from a job to a trained model and its run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotlap import machine
from hotlap.core.console import open_console
from hotlap.core.errors import JobError, PlanError, StoreError, TrainingError, listed, shown
from hotlap.core.job import Job
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.terminal import logger
from hotlap.core.units import show_seconds
from hotlap.data.dataset import training_dataset
from hotlap.data.order import mix, seed_host
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Randomness
from hotlap.engine.step import why_no_gradients
from hotlap.fitting.deadline import TimeLimit
from hotlap.fitting.metric_logs import Names, logs_named
from hotlap.fitting.progress import banner
from hotlap.fitting.record import (
    FILE,
    LOSS,
    Ended,
    Record,
    asked_by_command,
    first_key,
    kept_tensors,
    modules_of,
    note_gone_on,
    read_end,
    read_record,
    resume_words,
    start_record,
    weights_key,
    write_record,
)
from hotlap.fitting.run import Run
from hotlap.fitting.session import ProgressState, RunSession, counts, unfit_checkpoint
from hotlap.fitting.task import EVERYTHING, FIXED, OFF, TUNED, Found, Task, set_up, trained_tensors
from hotlap.fitting.training import train
from hotlap.guard.hangs import hang_s
from hotlap.guard.identity import differences, exact_identity
from hotlap.guard.saving import import_state
from hotlap.monitor.sampler import is_wanted
from hotlap.ranks.leader import Gpus, Leader, ranks_wanted
from hotlap.store.cache import Cache, model_key, store_model, stored_model
from hotlap.store.checkpoints import KEPT
from hotlap.store.files import finite, load_plan
from hotlap.store.run_folder import RunFolder
from hotlap.store.weights import load_weights_into, unwrapped

_log = logger(__name__)


Chosen = Plan | Found | Mapping[str, Any] | Ledger | str
"""How a training gets its plans: a plan, one to look after, choices, the ledger of a run to replay, or a word."""

_calls = 0
"""How often `fit` was called in this process: tells the trainings of one script apart."""


def next_call() -> int:
    """Count a call of `fit`, of networks or trees; its number, from 1 on."""
    global _calls
    _calls += 1
    return _calls


def fit(
    job: Job,
    *unnamed: object,
    plan: Plan | Found | Mapping[str, Any] | str | Path | None = None,
    tune_s: float | None = None,
    finish_in: float | str | TimeLimit | None = None,
    repeats: int = 1,
    without: Sequence[str] = (),
    out: str | Path | None = None,
    resume: str | Path | None = None,
    save_every: int | None = None,
    allow_changes: bool = False,
    reuse: bool = False,
    require_gpu: bool = False,
    gpus: Gpus = None,
    progress: bool = True,
    on_evaluation: Callable[[dict[str, Any]], object] | None = None,
    log: Names = None,
    started_by: Sequence[str] | None = None,
) -> Run:
    """Train the job, write its run folder, and return the Run.

    Args:
        plan: How to train. None or "auto": hotlap finds the fastest plan by measuring while it trains; HOTLAP_PLAN
            names another default. "off": as the job describes it. "max": everything that this machine can do,
            unmeasured. A Plan or a plan file is used as it is. A dict such as {"precision": "bf16"} changes choices
            of the job's own plan. The folder of a run replays its plans, each at its step.
        tune_s: Seconds that tuning may cost. None: 1.5 % of the run (4 % where the GPU waits for its host), plus a
            quarter of what tuning has saved or was seen to be there to save; at most 60 s.
        finish_in: The time for the whole call, as seconds or "15m". It is never longer: hotlap plans from the measured
            pace of steps, evaluations and files how many updates fit, has a schedule of (optimizer, updates) span
            these, and otherwise stops. Where validation data is given, the model then has its best weights so far.
            `Run.left_out` lists what was not trained.
        repeats: How many trainings like this one the plan will serve: tuning may cost what it saves in all of them.
        without: Names of moves and tricks to leave out, such as ["16-bit"]; `hotlap run --without '?'` lists all.
        out: A new or empty folder for the run. None: a new one under `runs/`.
        resume: The folder of a run to go on with, as if it had never been interrupted, and under the plan it had
            unless `plan` is given. Without a checkpoint the run begins again at step 0. A run that has ended is
            trained further only if the job asks for more. hotlap refuses other code, data, settings or first
            weights, and lists them.
        save_every: Updates between checkpoints, with one before the first step and one at the end. None: as often as
            2 % of the time allows, which may be never in a short run. 0: no checkpoints.
        allow_changes: Resume although the training differs.
        reuse: Load the model from the cache if the same data, code, settings, plan and first weights were trained
            before, and keep it there otherwise. If hotlap cannot know something that decides the training, it trains
            and says what that is.
        require_gpu: Raise MachineError if no GPU works.
        gpus: GPUs of this machine that share each batch: a number, or "all". Batch size, order and learning rate stay
            as they are. With "auto", hotlap measures whether more than one is faster, and otherwise goes on with one.
            On a machine without GPUs, a number means so many processes on the CPU.
        progress: Show progress on stderr.
        on_evaluation: Called with the figures of each evaluation, as `Run.history` holds them. A text that it returns
            ends the training, which gives it as the reason. What it raises ends it like any error of yours.
        log: Where the metrics of each evaluation go beside `metrics.jsonl`: "tensorboard", "trackio" or "wandb", or
            several with commas between them. A log that fails is left with one warning.
        started_by: Words that start this training again from a shell.

    SIGINT and SIGTERM end the training after the current step and a checkpoint, by KeyboardInterrupt or exit code 143.
    An error of the model, the loss or the data is raised after a checkpoint, with a note on how to go on. The random
    generators of the caller stay as they were.

    Raises:
        HotlapError: The job, the plan, the machine or a folder cannot be used as asked.
    """
    limit = None if finish_in is None else TimeLimit.of(finish_in)
    _check_job(job, unnamed)
    is_wanted(), hang_s()  # a mistake in a variable must show now
    logs = logs_named(log)
    call = next_call()
    device = machine.choose_device(job.device, require_gpu=require_gpu)
    ranks = ranks_wanted(gpus, device)
    if (reason := why_no_gradients()) is not None:
        raise TrainingError(reason)
    if resume is None:
        resume = asked_by_command(call)
    chosen = _chosen_plan(plan) if plan is not None or resume is None else _plan_of_run(resume)
    _check_settings(tune_s, repeats, out, resume)
    console = open_console(progress)
    dataset = training_dataset(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    randomness = Randomness(device)
    seed_host(mix(job.seed))
    if device.type == "cuda":
        torch.cuda.manual_seed(mix(job.seed))
    task: Task | None = None
    session: RunSession | None = None
    leader: Leader | None = None
    try:
        leader = Leader(job, ranks, device) if ranks > 1 else None
        task = set_up(job, dataset, chosen, device, console, save_every, without, leader)
        task = replace(task, tune_s=tune_s, on_evaluation=on_evaluation, limit=limit, repeats=repeats, logs=logs)
        if leader is not None:
            leader.changes = task.memory.changes
        kept = CachedModel(task.identity, job, task.rig, how=task.how) if reuse else None
        if resume is not None:
            session = RunSession(RunFolder.open(resume), task)
            left = go_on(
                task,
                session,
                allow_changes=allow_changes,
                keep_plan=chosen not in (TUNED, OFF) and not isinstance(chosen, Found),
            )
            note_gone_on(resume)
            if isinstance(left, Run):
                return left
            state = left
        else:
            started = start_record(call, started_by)
            # The folder is made last: a job that cannot run leaves none behind.
            session = RunSession(RunFolder.create(out, type(job.model).__name__), task)
            state = begin(task, session, started)
            if kept is not None and kept.why_not is not None:
                task.voice.say(f"note   reuse: trained anew and not kept, since {kept.why_not}")
            if kept is not None and (found := kept.load()) is not None:
                return from_cache(task, session, state, found)
        run = finish(task, session, state, stopped=train(task, session, state))
        # A model that was trained less is not the one that was asked for.
        if kept is not None and not state.is_cut and not state.asked_to_end:
            kept.store(run)
        return run
    finally:
        if leader is not None:
            leader.close()
        if task is not None:
            _let_go(task, session)
        randomness.restore()


def ended_run(job: Job, folder: Path) -> Run:
    """The Run of a training of this job that has ended in a folder; the job's model gets its weights.

    Raises StoreError where it has not ended, or was another training.
    """
    device, console = machine.choose_device(job.device), open_console(False)
    dataset, randomness = training_dataset(job, workers=0, on_gpu=device.type == "cuda"), Randomness(device)
    session: RunSession | None = None
    task = set_up(job, dataset, OFF, device, console, save_every=0)
    try:
        session = RunSession(RunFolder.open(folder), task)
        record = read_record(session.folder)
        _refuse(session.folder, differences(record.facts.get("identity", {}), finite(task.identity)), False)
        run = None if record.ended is None else as_it_ended(task, session, record.ended, [])
        if run is None:
            raise StoreError(f"{folder} has not ended; go on with: {resume_words(session.folder)}")
        return run
    finally:
        _let_go(task, session)
        randomness.restore()


def _check_job(job: object, unnamed: Sequence[object]) -> None:
    if unnamed or not isinstance(job, Job):
        given = ", ".join(type(value).__name__ for value in (job, *unnamed))
        raise JobError(
            [f"fit takes one Job, not ({given}): fit(Job(model=model, data=(x, y), loss=…, optimizer=…, …))"]
        )


def _check_settings(tune_s: object, repeats: object, out: str | Path | None, resume: str | Path | None) -> None:
    if tune_s is not None and not (isinstance(tune_s, (int, float)) and tune_s >= 0):
        raise PlanError(f"tune_s={shown(tune_s)} must be a number of seconds, 0 or more")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise PlanError(f"repeats={shown(repeats)} must be a whole number, 1 or more")
    if resume is not None and out is not None and Path(out).resolve() != Path(resume).resolve():
        raise StoreError(f"both out={str(out)!r} and resume={str(resume)!r} are given; a resumed run keeps its folder")


def _chosen_plan(plan: Plan | Found | Mapping[str, Any] | str | Path | None) -> Chosen:
    """What `plan` stands for: a plan, choices, the ledger of a run to replay, or one of the words."""
    if plan is None:
        plan = os.environ.get("HOTLAP_PLAN") or TUNED
    if isinstance(plan, (Plan, Found, Mapping)):
        return plan
    if plan in (TUNED, EVERYTHING, OFF):
        return str(plan)
    if not isinstance(plan, (str, Path)):
        raise PlanError(f"plan is a {type(plan).__name__}; give a Plan, a plan file, a run, or a dict of choices")
    if not Path(plan).exists():
        raise PlanError(f"unknown plan {shown(str(plan))}: use auto, off, max, a plan file or a run folder")
    if Path(plan).is_dir():
        return RunFolder.open(plan).read_ledger()
    return load_plan(plan)


def _plan_of_run(folder: str | Path) -> Chosen:
    """How a run chose its plan, to go on in the same way; a run of an earlier hotlap does not say."""
    try:
        how = read_record(RunFolder.open(folder)).facts.get("how")
    except StoreError:
        how = None
    if how in (TUNED, FIXED):
        return TUNED if how == TUNED else OFF
    return Ledger.from_lines(how) if isinstance(how, str) else _chosen_plan(None)


def _let_go(task: Task, session: RunSession | None) -> None:
    """Wait for the last checkpoint, then let go of workers, console and lock, however it ended."""
    try:
        if session is not None:
            session.saver.finish()
        task.rig.close()
        task.voice.console.close()
    finally:
        if session is not None:
            session.end()


# --- A model that was trained before on the same data, code and settings is loaded, not trained again ----


class CachedModel:
    """The place in the cache of the model that one training will come to."""

    def __init__(self, identity: dict[str, Any], job: Job, rig: Rig, *, how: str) -> None:
        """`how` its plan is chosen: one that is found while it trains may change numbers by rounding."""
        self._rig, self._cache = rig, Cache()
        whole, self.unknown = exact_identity(job, rig.optimizer, rig.schedule.scheduler, rig.device)
        """What decides this training and cannot be known, a line each; with one, nothing is loaded and nothing kept."""
        everything = {**identity, "plan": rig.plan.to_dict(), "how": how, "whole": whole}
        self._key = model_key(everything, {k: v.detach().cpu() for k, v in trained_tensors(rig).items()})

    @property
    def why_not(self) -> str | None:
        """Why the model can be neither loaded nor kept; None if it can."""
        more = f" (and {len(self.unknown) - 1} more)" if len(self.unknown) > 1 else ""
        return f"{self.unknown[0]}{more}" if self.unknown else None

    def load(self) -> dict[str, Any] | None:
        """Put the model's weights in place and tell how it was trained, or None where it never was."""
        found = None if self.unknown else stored_model(self._cache, self._key)
        if found is None:
            return None
        weights, record = found
        mine = trained_tensors(self._rig)
        if set(weights) != set(mine) or any(weights[name].shape != mine[name].shape for name in mine):
            _log.warning("the model in the cache does not fit this one; it is trained again")
            return None
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])
        result: dict[str, Any] = record
        return result

    def store(self, run: Run) -> None:
        """Keep a trained model."""
        if self.unknown:
            return
        values = {
            "history": run.history,
            "best": run.best,
            "counters": (run.steps, run.updates, run.samples),
            "train_s": run.train_s,
        }
        weights = {name: tensor.detach().cpu() for name, tensor in trained_tensors(self._rig).items()}
        store_model(self._cache, self._key, weights, values, {"model": type(run.model).__name__})


def begin(task: Task, session: RunSession, started: dict[str, Any]) -> ProgressState:
    """Begin in a new folder; `started` is what it keeps of its start."""
    session.folder.write_started(started)
    session.folder.write_environment({**machine.environment(), "job": task.identity["settings"]})
    return _begin_at_step_0(task, session, first_key(task.rig))


def go_on(task: Task, session: RunSession, *, allow_changes: bool, keep_plan: bool) -> ProgressState | Run:
    """Go on where a run was left: from its newest checkpoint that is whole, or from step 0 if it never had one.

    A Run, which is what it came to, where it had ended and no more is asked for; then nothing is trained. The plan is
    the run's own, unless the task's is to be kept.
    """
    session.checkpoints.tidy()
    try:
        record = read_record(session.folder)
    except StoreError:
        record = None  # of an earlier hotlap, or damaged: with a checkpoint one can do without
    if record is not None and record.ended is not None and record.ended.is_all(task.total, task.job.patience):
        changed = differences(record.facts.get("identity", {}), finite(task.identity))
        _refuse(session.folder, changed, allow_changes)
        ended = as_it_ended(task, session, record.ended, changed)
        if ended is not None:
            return ended
    if record is not None and session.checkpoints.none_completed():
        return _begin_again(task, session, record, allow_changes=allow_changes, keep_plan=keep_plan)
    if record is not None and record.ended is not None:
        _say_of_schedule(task, record.ended.asked)
    return _go_on_from_checkpoint(task, session, record, allow_changes=allow_changes, keep_plan=keep_plan)


def _say_of_schedule(task: Task, asked: int) -> None:
    """More is asked for than the run was made for: what its schedule will do."""
    if task.job.schedule is not None and asked != task.total:
        task.voice.say(
            f"note   the schedule was made for {asked:,} updates, and goes on as it was made, to {task.total:,}: "
            "start anew where it should span them all"
        )


def _begin_at_step_0(task: Task, session: RunSession, first: str | None) -> ProgressState:
    """Write down what this training begins with: enough to begin again after a kill before the first checkpoint."""
    if task.save_every != 0:
        session.folder.check_room(task.checkpoint_bytes() * (KEPT + 1))
    write_record(session.folder, Record(facts=task.facts(), first=first))
    session.folder.write_ledger(task.rig.ledger)
    session.folder.write_plan(task.rig.plan)  # the last one: with it the folder is a run's
    _say_banner(task, session.folder)
    state = ProgressState(task, first=first)
    if task.save_every:
        session.save(state)
    return state


def _begin_again(
    task: Task, session: RunSession, record: Record, *, allow_changes: bool, keep_plan: bool
) -> ProgressState:
    """Begin at step 0 in the folder of a run that was killed before its first checkpoint was whole."""
    rig, path, first = task.rig, session.folder.path, first_key(task.rig)
    changed = differences(record.facts.get("identity", {}), finite(task.identity))
    if first is None or first != record.first:
        changed.append(
            f"the model's first weights are not those that {path} began with, and it has no "
            "checkpoint yet: seed before the model is made (torch.manual_seed), or start anew in another folder"
        )
    _refuse(session.folder, changed, allow_changes)
    if not keep_plan:
        with unfit_checkpoint(FILE):
            rig.use(task.with_ranks(Plan.from_dict(record.facts["plan"])))
    why = "; ".join(["no checkpoint had been completed", *changed])
    rig.ledger.record(Entry(step=0, what="begun again at step 0", outcome="chosen", plan=rig.plan, why=why))
    session.folder.write_metrics([])
    state = _begin_at_step_0(task, session, first)
    task.voice.say(f"no checkpoint of {path} had been completed: begun again at step 0")
    return state


def _go_on_from_checkpoint(
    task: Task, session: RunSession, record: Record | None, *, allow_changes: bool, keep_plan: bool
) -> ProgressState:
    """Go on from the newest checkpoint that is whole; `record` is None where the folder has none that can be read."""
    rig, voice = task.rig, task.voice
    checkpoint, damaged = session.checkpoints.newest_good()
    for line in damaged:
        voice.say(line)
    changed = differences(checkpoint.facts.get("identity", {}), task.identity)
    _refuse(session.folder, changed, allow_changes)
    name = checkpoint.path.name
    if not keep_plan:
        with unfit_checkpoint(name):
            rig.use(task.with_ranks(Plan.from_dict(checkpoint.facts["plan"])))
    state = ProgressState(task, first=None if record is None else record.first, from_checkpoint=name)
    with unfit_checkpoint(name):
        loop = import_state(rig, checkpoint.files, task.memory.changes)
        task.dataset.order.restore_sampler(loop.get("order"))
        counts(*rig.place, rig.steps, rig.updates, rig.samples)
        rig.totals.mean()
        rig.ledger = state.put_back(loop)
    what, why = f"resumed at step {rig.steps}", "; ".join([*damaged, *changed])
    rig.ledger.record(Entry(step=rig.steps, what=what, outcome="chosen", plan=rig.plan, why=why))
    if record is not None and (record.ended is not None or record.facts.get("how") != task.how):
        # From here on it has not ended, and its plan is chosen as it is now.
        write_record(session.folder, Record(facts=record.facts | {"how": task.how}, first=record.first))
    # Lines of steps that were lost with the crash are taken back: those steps come again.
    session.folder.write_metrics(state.history)
    session.folder.write_ledger(rig.ledger)
    _say_banner(task, session.folder)
    voice.say(f"resumed at step {rig.steps:,}, epoch {rig.place.epoch + 1}")
    return state


class AnotherTrainingError(StoreError):
    """A folder holds a training that differs from the one that is to go on in it."""

    def __init__(
        self, what: str, advice: str = "resume it as it was, or allow the changes (allow_changes=True, --allow-changes)"
    ) -> None:
        super().__init__(f"{what}; {advice}")
        self.what, self._advice = what, advice

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.what, self._advice)


def _refuse(folder: RunFolder, changed: list[str], allow_changes: bool) -> None:
    if changed and not allow_changes:
        raise AnotherTrainingError(listed(f"{folder.path} was another training in", "point", changed))


def _say_banner(task: Task, folder: RunFolder) -> None:
    for line in banner(task.job, task.rig, task.dataset, task.total, folder.path):
        task.voice.say(line)
    for note in (*task.notes(), *task.rig.cautions(task.rig.plan)):
        task.voice.say(f"note   {note}")
    if task.session_end is not None:
        saved = "" if task.save_every == 0 else "; a training that is not over by then is saved before"
        task.voice.say(f"session  {task.session_end.line}{saved}")
    if task.limit is not None:
        task.voice.say(f"time   {task.limit} for this training; what does not fit is left out and listed")
    for problem in task.value_warnings:
        task.voice.warn(problem)


def finish(
    task: Task, session: RunSession, state: ProgressState, stopped: str, best: dict[str, Any] | None = None
) -> Run:
    """Put the best weights in place, write what the folder of an ended run holds, and hand back the Run.

    `best` is the record whose weights the model has, where the state does not know. A folder that takes no more is
    told of and stops nothing.
    """
    rig, folder, clock, ended_s = task.rig, session.folder, state.clock, time.perf_counter()
    state.best.restore_weights()
    task.modes.restore()
    rig.restore_layout()
    best = best or state.best.record or state.history[-1]
    train_s = clock.trained(ended_s)
    try:
        folder.write_plan(rig.plan)
        folder.write_ledger(rig.ledger)
        folder.write_model(rig.model)
        modules = modules_of(rig)
        if LOSS in modules:
            folder.write_loss(modules[LOSS])
        ended = Ended(
            stopped=stopped,
            asked=rig.steps if state.left_out or state.asked_to_end else task.total,
            patience=task.job.patience if state.best.is_long_ago() else None,
            steps=rig.steps,
            updates=rig.updates,
            samples=rig.samples,
            train_s=train_s,
            total_s=clock.elapsed(time.perf_counter()),
            best_step=best["step"],
            weights={file: weights_key(kept_tensors(module)) for file, module in modules.items()},
            setup_s=clock.setup_s,
            evaluation_s=None if clock.before_s else clock.aside_s,
            left_out=state.left_out,
        )
        write_record(folder, Record(facts=task.facts(), first=state.first, ended=ended))
        folder.write_artefacts()
    except StoreError as error:
        # The model is in memory: the caller can still save it elsewhere.
        task.voice.warn(f"{error}; the trained model is in the Run that fit returns")
    total_s = clock.elapsed(time.perf_counter())
    plan, left_out = rig.plan, state.left_out
    return _run(task, session, stopped, plan, state.history, best, train_s=train_s, total_s=total_s, left_out=left_out)


def from_cache(task: Task, session: RunSession, state: ProgressState, found: dict[str, Any]) -> Run:
    """End at once with a model that was trained before; its weights are in place already."""
    rig = task.rig
    state.history = found["history"]
    rig.steps, rig.updates, rig.samples = found["counters"]
    state.clock.train_before_s = found["train_s"]
    session.folder.write_metrics(state.history)
    session.saver.finish()
    state.clock.loop_s = time.perf_counter()
    stopped = f"trained before, in {show_seconds(found['train_s'])}: loaded from the cache"
    return finish(task, session, state, stopped, found["best"])


def as_it_ended(task: Task, session: RunSession, ended: Ended, changed: list[str]) -> Run | None:
    """A run that had ended, with its weights put back; None, with a line on why, if its files have changed."""
    folder, rig, say = session.folder, task.rig, task.voice.say
    try:
        weights, history = read_end(folder, ended)
        plan, ledger = folder.read_plan(), folder.read_ledger()
    except StoreError as error:
        say(f"{folder.path} had ended, but {error}; what is missing is trained again")
        return None
    for file, module in modules_of(rig).items():
        load_weights_into(unwrapped(module), weights.get(file, {}))
    task.modes.restore()
    rig.ledger = ledger  # nothing runs under its plan
    rig.steps, rig.updates, rig.samples = ended.steps, ended.updates, ended.samples
    what, why = f"resumed at step {rig.steps}", "; ".join(["it had ended", *changed])
    rig.ledger.record(Entry(step=rig.steps, what=what, outcome="chosen", plan=plan, why=why))
    folder.write_ledger(rig.ledger)
    say(f"{folder.path} had ended {ended.stopped}: nothing is left to train; ask for more to go on")
    best = next(one for one in history if one["step"] == ended.best_step)
    took, left_out = {"train_s": ended.train_s, "total_s": ended.total_s}, tuple(ended.left_out)
    return _run(task, session, ended.stopped, plan, history, best, **took, left_out=left_out)


def _run(
    task: Task,
    session: RunSession,
    stopped: str,
    plan: Plan,
    history: list[dict[str, Any]],
    best: dict[str, Any],
    *,
    train_s: float,
    total_s: float,
    left_out: tuple[str, ...],
) -> Run:
    rig = task.rig
    return Run(
        model=rig.model,
        plan=plan,
        ledger=rig.ledger,
        history=history,
        best=best,
        steps=rig.steps,
        updates=rig.updates,
        samples=rig.samples,
        train_s=train_s,
        total_s=total_s,
        saving_s=session.saver.spent_s,
        stopped=stopped,
        left_out=left_out,
        problems=tuple(task.voice.problems),
        files=session.folder,
    )
