"""How a training begins: at step 0 in a new folder, or where a run was left.

That is at its newest checkpoint, at step 0 again if it never had one, and nowhere if it had ended.
"""

from __future__ import annotations

from typing import Any

from hotlap import machine
from hotlap.core.errors import StoreError, listed
from hotlap.core.ledger import Entry
from hotlap.core.plan import Plan
from hotlap.fitting.ending import as_it_ended
from hotlap.fitting.forged import counts, unfit_checkpoint
from hotlap.fitting.held import HeldFolder
from hotlap.fitting.record import FILE, Record, first_key, read_record, write_record
from hotlap.fitting.run import Run
from hotlap.fitting.task import Task
from hotlap.fitting.trail import Trail
from hotlap.fitting.words import banner
from hotlap.guard.identity import differences
from hotlap.guard.saving import import_state
from hotlap.store.checkpoints import KEPT
from hotlap.store.run_folder import RunFolder, finite


def begin(task: Task, held: HeldFolder, started: dict[str, Any]) -> Trail:
    """Begin in a new folder; `started` is what it keeps of its start."""
    held.folder.write_started(started)
    held.folder.write_environment({**machine.environment(), "job": task.identity["settings"]})
    return _begin_at_step_0(task, held, first_key(task.rig))


def go_on(task: Task, held: HeldFolder, *, allow_changes: bool, keep_plan: bool) -> Trail | Run:
    """Go on where a run was left: from its newest checkpoint that is whole, or from step 0 if it never had one.

    A Run, which is what it came to, where it had ended and no more is asked for; then nothing is trained. The plan is
    the run's own, unless the task's is to be kept.
    """
    held.checkpoints.tidy()
    try:
        record = read_record(held.folder)
    except StoreError:
        record = None  # of an earlier hotlap, or damaged: with a checkpoint one can do without
    if record is not None and record.ended is not None and record.ended.is_all(task.total, task.job.patience):
        changed = differences(record.facts.get("identity", {}), finite(task.identity))
        _refuse(held.folder, changed, allow_changes)
        ended = as_it_ended(task, held, record.ended, changed)
        if ended is not None:
            return ended
    if record is not None and record.ended is not None:
        _say_of_schedule(task, record.ended.asked)
    if record is not None and held.checkpoints.none_yet():
        return _begin_again(task, held, record, allow_changes=allow_changes, keep_plan=keep_plan)
    return _go_on_from_checkpoint(task, held, record, allow_changes=allow_changes, keep_plan=keep_plan)


def _say_of_schedule(task: Task, asked: int) -> None:
    """More is asked for than the run was made for: what its schedule will do."""
    if task.job.schedule is not None and asked != task.total:
        task.voice.say(
            f"note   the schedule was made for {asked:,} updates, and goes on as it was made, to {task.total:,}: "
            "start anew where it should span them all"
        )


def _begin_at_step_0(task: Task, held: HeldFolder, first: str | None) -> Trail:
    """Write down what this training begins with, which is all that a kill before the first checkpoint needs."""
    if task.save_every != 0:
        held.folder.check_room(task.checkpoint_bytes() * (KEPT + 1))
    write_record(held.folder, Record(facts=task.facts(), first=first))
    held.folder.write_ledger(task.rig.ledger)
    held.folder.write_plan(task.rig.plan)  # the last one: with it the folder is a run's
    _say_banner(task, held.folder)
    trail = Trail(task, first=first)
    if task.save_every:
        held.save(trail)
    return trail


def _begin_again(task: Task, held: HeldFolder, record: Record, *, allow_changes: bool, keep_plan: bool) -> Trail:
    """Begin at step 0 in the folder of a run that was killed before its first checkpoint was whole."""
    rig, path, first = task.rig, held.folder.path, first_key(task.rig)
    changed = differences(record.facts.get("identity", {}), finite(task.identity))
    if first is None or first != record.first:
        changed.append(
            f"the model's first weights are not those that {path} began with, and it has no "
            "checkpoint yet: seed before the model is made (torch.manual_seed), or start anew in another folder"
        )
    _refuse(held.folder, changed, allow_changes)
    if not keep_plan:
        with unfit_checkpoint(FILE):
            rig.use(Plan.from_dict(record.facts["plan"]))
    why = "; ".join(["no checkpoint had been completed", *changed])
    rig.ledger.record(Entry(step=0, what="begun again at step 0", outcome="chosen", plan=rig.plan, why=why))
    held.folder.write_metrics([])
    trail = _begin_at_step_0(task, held, first)
    task.voice.say(f"no checkpoint of {path} had been completed: begun again at step 0")
    return trail


def _go_on_from_checkpoint(
    task: Task, held: HeldFolder, record: Record | None, *, allow_changes: bool, keep_plan: bool
) -> Trail:
    """Go on from the newest checkpoint that is whole; `record` is None where the folder has none that can be read."""
    rig, voice = task.rig, task.voice
    checkpoint, damaged = held.checkpoints.newest_good()
    for line in damaged:
        voice.say(line)
    changed = differences(checkpoint.facts.get("identity", {}), task.identity)
    _refuse(held.folder, changed, allow_changes)
    name = checkpoint.path.name
    if not keep_plan:
        with unfit_checkpoint(name):
            rig.use(Plan.from_dict(checkpoint.facts["plan"]))
    trail = Trail(task, first=None if record is None else record.first, from_checkpoint=name)
    with unfit_checkpoint(name):
        loop = import_state(rig, checkpoint.files, task.memory.changes)
        task.course.order.go_back(loop.get("order"))
        counts(*rig.place, rig.steps, rig.updates, rig.samples)
        rig.totals.mean()
        rig.ledger = trail.put_back(loop)
    what, why = f"resumed at step {rig.steps}", "; ".join([*damaged, *changed])
    rig.ledger.record(Entry(step=rig.steps, what=what, outcome="chosen", plan=rig.plan, why=why))
    if record is not None and (record.ended is not None or record.facts.get("how") != task.how):
        # From here on it has not ended, and its plan is chosen as it is now.
        write_record(held.folder, Record(facts=record.facts | {"how": task.how}, first=record.first))
    # Lines of steps that were lost with the crash are taken back: those steps come again.
    held.folder.write_metrics(trail.history)
    held.folder.write_ledger(rig.ledger)
    _say_banner(task, held.folder)
    voice.say(f"resumed at step {rig.steps:,}, epoch {rig.place.epoch + 1}")
    return trail


class AnotherTrainingError(StoreError):
    """A folder holds a training that differs from the one that is to go on in it."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; resume it as it was, or allow the changes (allow_changes=True, --allow-changes)")
        self.what = what


def _refuse(folder: RunFolder, changed: list[str], allow_changes: bool) -> None:
    if changed and not allow_changes:
        raise AnotherTrainingError(listed(f"{folder.path} was another training in", "point", changed))


def _say_banner(task: Task, folder: RunFolder) -> None:
    for line in banner(task.job, task.rig, task.course, task.total, folder.path):
        task.voice.say(line)
    for caution in task.rig.cautions(task.rig.plan):
        task.voice.say(f"note   {caution}")
