"""Who chooses the plan while `fit` trains: a tuner, the ledger of an earlier run, or neither."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from hotlap import machine
from hotlap.core.console import open_console
from hotlap.core.job import Job
from hotlap.core.ledger import Ledger
from hotlap.core.table import rows
from hotlap.data.dataset import training_dataset
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.fitting.task import TUNED, Found, Task, set_up
from hotlap.ranks.worth import SharedOrAlone
from hotlap.tuner.budget import MOST_S, Length
from hotlap.tuner.known import KnownPlans
from hotlap.tuner.tuner import PlanChooser, Replay, Tuner

FOREVER = 10**7
"""Updates."""


def chooser_for(task: Task, length: Callable[[], Length] | None = None) -> PlanChooser:
    """What chooses the plans of a training, from where it stands; `length` says how long it is, where a clock does."""
    rig = task.rig
    if task.replayed is not None:
        return Replay(rig, task.replayed)
    if not task.tuned:
        return PlanChooser()
    found = rig.plan if was_tuned(rig.ledger) else task.found
    if found is not None and rig.supports(found) is not None:
        found = None
    rig.use(task.own_plan, why="the user's own, to tune from")

    def whole() -> Length:
        one = Length(task.total) if length is None else length()
        return one._replace(updates=one.updates * task.repeats)

    tuner = Tuner(
        rig,
        updates=whole,
        most_s=task.tune_s,
        period=task.job.eval_every,
        known=KnownPlans(rig, batch_size=task.dataset.batch_size),
        found=found,
    )
    if rig.exchange is None:
        return tuner
    return SharedOrAlone(rig, tuner, rig.exchange.size, lambda: whole().updates - rig.steps)


def tuning_line(ledger: Ledger) -> str | None:
    """What tuning came to, in one line; None where it did not come to an end."""
    total = next((row for row in reversed(rows(ledger)) if row.what == "total"), None)
    if total is None:
        return None
    if total.ratio is None:
        return f"at step {ledger.last_step:,}: {total.why}"
    kept = ", ".join(row.what for row in rows(ledger) if row.outcome == "kept")
    interval = f"[{total.low:.3g}, {total.high:.3g}]"
    return f"at step {ledger.last_step:,}: {total.ratio:.3g}x {interval} by {kept or 'nothing'}; {total.why}"


def tune(job: Job, *, most_s: float = MOST_S, progress: bool = True) -> Found:
    """Find the plan for a job by training it, for at most about `most_s` seconds beyond its own pace.

    As many updates as that takes are made, however few the job asks for; its model, optimizer and schedule are left as
    they were. Raises HotlapError where the job will not do.
    """
    device = machine.choose_device(job.device)
    console = open_console(progress)
    dataset = training_dataset(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    randomness, modes = Randomness(device), Modes([job.model])
    try:
        # A schedule made for the job's own updates may refuse to go on beyond them, and takes no time to speak of.
        task = set_up(dataclasses.replace(job, schedule=None), dataset, TUNED, device, console, save_every=0)
        rig, before = task.rig, task.rig.snapshot()
        # For ever, as far as what pays is concerned: it is for runs to come.
        tuner = Tuner(rig, updates=max(task.total, FOREVER), most_s=most_s)
        windows = rig.windows()
        try:
            while not tuner.done:
                asked = time.perf_counter()
                window = next(windows)
                tuner.fed(time.perf_counter() - asked)
                try:
                    rig.advance(window)
                except Exception as error:
                    if not tuner.failed(error):
                        raise
                    continue
                tuner.stepped(window.updates)
            found = Found(plan=tuner.plan, ledger=rig.ledger, updates=rig.steps)
        finally:
            rig.restore(before)
            rig.restore_layout()
            rig.close()
    finally:
        console.close()
        modes.restore()
        randomness.restore()
    return found


def was_tuned(ledger: Ledger) -> bool:
    """Whether a search for a plan came to its end."""
    return any(entry.kind == "tuned" for entry in ledger)
