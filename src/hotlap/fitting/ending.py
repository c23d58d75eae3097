"""How a training ends: what is written, and the Run that is handed back, whether it was trained now or before."""

from __future__ import annotations

import time
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.ledger import Entry
from hotlap.core.plan import Plan
from hotlap.core.units import show_seconds
from hotlap.fitting.held import HeldFolder
from hotlap.fitting.record import LOSS, Ended, Record, kept_tensors, modules_of, read_end, weights_key, write_record
from hotlap.fitting.run import Run
from hotlap.fitting.task import Task
from hotlap.fitting.trail import Trail
from hotlap.store.weights import load_weights_into, unwrapped


def finish(task: Task, held: HeldFolder, trail: Trail, stopped: str, best: dict[str, Any] | None = None) -> Run:
    """Put the best weights in place, write what the folder of an ended run holds, and hand back the Run.

    `best` is the record whose weights the model has, where the trail does not know. A folder that takes no more is
    told of and stops nothing.
    """
    rig, folder, clock, ended_s = task.rig, held.folder, trail.clock, time.perf_counter()
    trail.best.restore_weights()
    task.modes.restore()
    rig.hand_back()
    best = best or trail.best.record or trail.history[-1]
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
            asked=task.total,
            patience=task.job.patience if trail.best.is_long_ago() else None,
            steps=rig.steps,
            updates=rig.updates,
            samples=rig.samples,
            train_s=train_s,
            total_s=clock.elapsed(time.perf_counter()),
            best_step=best["step"],
            weights={file: weights_key(kept_tensors(module)) for file, module in modules.items()},
        )
        write_record(folder, Record(facts=task.facts(), first=trail.first, ended=ended))
        folder.write_artefacts()
    except StoreError as error:
        # The model is in memory: whoever called can still save it elsewhere.
        task.voice.warn(f"{error}; the trained model is in the Run that fit returns")
    total_s = clock.elapsed(time.perf_counter())
    return _run(task, held, stopped, rig.plan, trail.history, best, train_s=train_s, total_s=total_s)


def from_cache(task: Task, held: HeldFolder, trail: Trail, found: dict[str, Any]) -> Run:
    """End at once with a model that was trained before; its weights are in place already."""
    rig = task.rig
    trail.history = found["history"]
    rig.steps, rig.updates, rig.samples = found["counters"]
    trail.clock.train_before_s = found["train_s"]
    held.folder.write_metrics(trail.history)
    held.saver.finish()
    trail.clock.loop_s = time.perf_counter()
    stopped = f"trained before, in {show_seconds(found['train_s'])}: loaded from the cache"
    return finish(task, held, trail, stopped, found["best"])


def as_it_ended(task: Task, held: HeldFolder, ended: Ended, changed: list[str]) -> Run | None:
    """A run that had ended, its weights put back; None, and said why, where they are not as they were written."""
    folder, rig, say = held.folder, task.rig, task.voice.say
    try:
        weights, history = read_end(folder, ended)
        plan, ledger = folder.read_plan(), folder.read_ledger()
    except StoreError as error:
        say(f"{folder.path} had ended, but {error}; what is missing is trained again")
        return None
    for file, module in modules_of(rig).items():
        load_weights_into(unwrapped(module), weights.get(file, {}))
    task.modes.restore()
    rig.ledger = ledger  # the plan is only told: nothing is run under it
    rig.steps, rig.updates, rig.samples = ended.steps, ended.updates, ended.samples
    what, why = f"resumed at step {rig.steps}", "; ".join(["it had ended", *changed])
    rig.ledger.record(Entry(step=rig.steps, what=what, outcome="chosen", plan=plan, why=why))
    folder.write_ledger(rig.ledger)
    say(f"{folder.path} had ended {ended.stopped}: nothing is left to train; ask for more to go on")
    best = next(one for one in history if one["step"] == ended.best_step)
    return _run(task, held, ended.stopped, plan, history, best, train_s=ended.train_s, total_s=ended.total_s)


def _run(
    task: Task,
    held: HeldFolder,
    stopped: str,
    plan: Plan,
    history: list[dict[str, Any]],
    best: dict[str, Any],
    *,
    train_s: float,
    total_s: float,
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
        saving_s=held.saver.spent_s,
        stopped=stopped,
        problems=tuple(task.voice.problems),
        folder=held.folder,
    )
