"""A training of `fit` that hangs: hotlap shows what it waits for, and keeps that in the run folder."""

from __future__ import annotations

import time
from collections.abc import Hashable

from hotlap.core.ledger import Entry
from hotlap.core.turns import turn
from hotlap.fitting.session import ProgressState, RunSession
from hotlap.fitting.task import Task
from hotlap.guard.hangs import Hang, HangWatch


def watch_for_hangs(task: Task, session: RunSession, state: ProgressState) -> HangWatch:
    """A watch over this training. Workers that hang it ends, and the loop starts others as for workers that died."""
    rig, folder, mine = task.rig, session.folder, turn.get()

    def progress() -> tuple[int, Hashable]:
        # Plans on trial, workers started anew and evaluations leave entries, records or words.
        others = time.monotonic() if mine is not None and mine.is_waiting else None
        return rig.steps, (len(rig.ledger), len(state.history), session.saver.saved, len(task.voice.problems), others)

    def notice(hang: Hang) -> None:
        step = max(rig.steps, rig.ledger.last_step)
        details = "\n".join((hang.why, *hang.details))
        rig.ledger.record(Entry(step=step, what="hang", outcome="fault", plan=rig.plan, why=details))
        task.voice.warn(hang.why, hang.details)
        folder.write_ledger(rig.ledger)  # while it hangs, nothing else writes it

    return HangWatch(progress, notice, on_gpu=rig.device.type == "cuda")
