"""`fit`: one call from a job to a trained model and its run folder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hotlap import machine
from hotlap.core.errors import PlanError, StoreError, TrainingError, shown
from hotlap.core.job import Job
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.terminal import logger
from hotlap.data.dataset import training_course
from hotlap.data.order import mix, seed_host
from hotlap.engine.rig import Rig
from hotlap.engine.snapshot import Randomness
from hotlap.engine.step import why_no_gradients
from hotlap.fitting.beginning import begin, go_on
from hotlap.fitting.best import trained_tensors
from hotlap.fitting.ending import from_cache
from hotlap.fitting.held import HeldFolder
from hotlap.fitting.record import read_record
from hotlap.fitting.run import Run
from hotlap.fitting.started import asked_by_command, note_gone_on, start_record
from hotlap.fitting.task import EVERYTHING, FIXED, OFF, TUNED, Task, set_up
from hotlap.fitting.training import train
from hotlap.fitting.views import open_view
from hotlap.guard.whole import whole_of
from hotlap.store.cache import Cache, model_key, store_model, stored_model
from hotlap.store.files import load_plan
from hotlap.store.run_folder import RunFolder

_calls = 0
"""How often `fit` was called in this process: tells the trainings of one script apart."""


def fit(
    job: Job,
    *,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    tune_s: float | None = None,
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

    Without a `plan`, or with "auto", the fastest one is found by measuring while it trains; HOTLAP_PLAN names another
    default. With "off" the training runs as the job describes it, with "max" under everything that this machine can
    do, unmeasured. A Plan or a plan file is used as it is; a dict, such as {"precision": "bf16"}, changes choices in
    the plan that the job itself describes; the folder of a run replays its plans, each at its step. Tuning takes at
    most 1.5 % of the run (4 % where the GPU waits for its host), a quarter of what it has saved or was seen to be
    there to save, and 60 s, or `tune_s` seconds. `out` must be a new or empty folder; without it one is made under
    `runs/`. `resume` names the folder of a run to go on with: it ends as if it had never been interrupted. Without a
    `plan` it goes on under the plan it had: tuned, fixed or replayed. Without a checkpoint it begins again at step 0,
    and says so; one that has ended is not trained again, unless more is asked for. A training with other code, data or
    settings, or at step 0 with other first weights, is refused there, with the differences, unless `allow_changes`.
    `save_every` is a number of updates between checkpoints, one before the first step and one at the end included;
    without it they come as often as 2 % of the time allows, which in a short run may be never; 0 keeps none.

    With `reuse`, a model that was trained before on the same data, code, settings, plan and first weights is
    loaded from the cache instead of trained again, and one that was not is kept there. Where something that decides the
    training cannot be known, it is trained, and a line says what that is.

    SIGINT and SIGTERM end it after the step in hand and a checkpoint: KeyboardInterrupt, or exit code 143. An error
    of the model, the loss or the data is raised after a checkpoint, with a note that says how to go on.
    The caller's random generators are left as they were. Raises HotlapError where the job, plan, machine or
    folder will not do. `started_by` are the words that start this training again from a shell.
    """
    global _calls
    _calls += 1
    device = machine.choose_device(job.device, require_gpu=require_gpu)
    if (reason := why_no_gradients()) is not None:
        raise TrainingError(reason)
    if resume is None:
        resume = asked_by_command(_calls)
    chosen = _chosen_plan(plan) if plan is not None or resume is None else _plan_of_run(resume)
    if tune_s is not None and not (isinstance(tune_s, (int, float)) and tune_s >= 0):
        raise PlanError(f"tune_s={shown(tune_s)} must be a number of seconds, 0 or more")
    if resume is not None and out is not None and Path(out).resolve() != Path(resume).resolve():
        raise StoreError(f"both out={str(out)!r} and resume={str(resume)!r} are given; a resumed run keeps its folder")
    view = open_view(progress)
    course = training_course(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    randomness = Randomness(device)
    seed_host(mix(job.seed))
    if device.type == "cuda":
        torch.cuda.manual_seed(mix(job.seed))
    task: Task | None = None
    held: HeldFolder | None = None
    try:
        task = set_up(job, course, chosen, device, view, save_every, tune_s)
        kept = KeptModel(task.identity, job, task.rig, how=task.how) if reuse else None
        if resume is not None:
            held = HeldFolder(RunFolder.open(resume), task)
            left = go_on(task, held, allow_changes=allow_changes, keep_plan=chosen not in (TUNED, OFF))
            note_gone_on(resume)
            if isinstance(left, Run):
                return left
            trail = left
        else:
            started = start_record(_calls, started_by)
            # The folder is made last: a job that cannot run leaves none behind.
            held = HeldFolder(RunFolder.create(out, type(job.model).__name__), task)
            trail = begin(task, held, started)
            if kept is not None and kept.unknown:
                more = f" (and {len(kept.unknown) - 1} more)" if len(kept.unknown) > 1 else ""
                task.voice.say(f"note   reuse: trained anew and not kept, since {kept.unknown[0]}{more}")
            if kept is not None and (found := kept.load()) is not None:
                return from_cache(task, held, trail, found)
        run = train(task, held, trail)
        if kept is not None:
            kept.store(run)
        return run
    finally:
        if task is not None:
            _let_go(task, held)
        randomness.restore()


def _chosen_plan(plan: Plan | Mapping[str, Any] | str | Path | None) -> Plan | Mapping[str, Any] | Ledger | str:
    """What `plan` stands for: a plan, choices, the ledger of a run to replay, or one of the words."""
    if plan is None:
        plan = os.environ.get("HOTLAP_PLAN") or TUNED
    if isinstance(plan, (Plan, Mapping)):
        return plan
    if plan in (TUNED, EVERYTHING, OFF):
        return str(plan)
    if not isinstance(plan, (str, Path)):
        raise PlanError(f"plan is a {type(plan).__name__}; give a Plan, a plan file, a run, or a dict of choices")
    if Path(plan).is_dir():
        return RunFolder.open(plan).read_ledger()
    return load_plan(plan)


def _plan_of_run(folder: str | Path) -> Plan | Mapping[str, Any] | Ledger | str:
    """How a run chose its plan, to go on in the same way; a run of an earlier hotlap does not say."""
    try:
        how = read_record(RunFolder.open(folder)).facts.get("how")
    except StoreError:
        how = None
    if how in (TUNED, FIXED):
        return TUNED if how == TUNED else OFF
    return Ledger.from_lines(how) if isinstance(how, str) else _chosen_plan(None)


def _let_go(task: Task, held: HeldFolder | None) -> None:
    """Wait for the last checkpoint, then let go of workers, view and lock, however it ended."""
    if held is not None:
        held.saver.finish()
    task.rig.close()
    task.voice.view.close()
    if held is not None:
        held.lock.release()


# --- A model that was trained before on the same data, code and settings is loaded, not trained again ----


log = logger(__name__)


class KeptModel:
    """The place in the cache of the model that one training will come to."""

    def __init__(self, identity: dict[str, Any], job: Job, rig: Rig, *, how: str) -> None:
        """`how` its plan is chosen: one that is found while it trains may change numbers by rounding."""
        self._rig, self._cache = rig, Cache()
        whole, self.unknown = whole_of(job, rig.optimizer, rig.schedule.scheduler, rig.device)
        """What decides this training and cannot be known, a line each; with one, nothing is loaded and nothing kept."""
        everything = {**identity, "plan": rig.plan.to_dict(), "how": how, "whole": whole}
        self._key = model_key(everything, {k: v.detach().cpu() for k, v in trained_tensors(rig).items()})

    def load(self) -> dict[str, Any] | None:
        """Put the model's weights in place and tell how it was trained, or None where it never was."""
        found = None if self.unknown else stored_model(self._cache, self._key)
        if found is None:
            return None
        weights, told = found
        mine = trained_tensors(self._rig)
        if set(weights) != set(mine) or any(weights[name].shape != mine[name].shape for name in mine):
            log.warning("the model in the cache does not fit this one; it is trained again")
            return None
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])
        result: dict[str, Any] = told
        return result

    def store(self, run: Run) -> None:
        """Keep a trained model; a cache that cannot take it is told in the log and stops nothing."""
        if self.unknown:
            return
        values = {
            "history": run.history,
            "best": run.best,
            "counters": (run.steps, run.updates, run.samples),
            "train_s": run.train_s,
        }
        weights = {name: tensor.detach().cpu() for name, tensor in trained_tensors(self._rig).items()}
        try:
            store_model(self._cache, self._key, weights, values, {"model": type(run.model).__name__})
        except StoreError as error:
            log.warning("the trained model is not kept in the cache: %s", error)
