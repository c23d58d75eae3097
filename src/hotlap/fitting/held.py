"""A run folder in the hands of one training: locked, with its checkpoints and the one who writes them."""

from __future__ import annotations

import time

from hotlap.fitting.task import Task
from hotlap.fitting.trail import Trail
from hotlap.guard.saving import Saver, export_state
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.run_folder import RunFolder, RunLock


class HeldFolder:
    """The folder of a training that runs; raises StoreError where another one holds it."""

    def __init__(self, folder: RunFolder, task: Task) -> None:
        self._task = task
        self.folder = folder
        self.lock = RunLock(folder.path)
        self.checkpoints = Checkpoints(folder.path / "checkpoints")
        self.saver = Saver(
            self.checkpoints,
            task.save_every,
            task.voice.warn,
            before_s=time.perf_counter() - task.start_s,
            size=task.checkpoint_bytes(),
        )

    def save(self, trail: Trail, *, wait: bool = False) -> None:
        """Make a checkpoint of where the rig stands; it is written beside the training unless that is to `wait`."""
        rig, loop = self._task.rig, trail.export(self._task.rig.ledger)
        loop["order"] = self._task.course.order.saved()
        remembered, note = self._task.memory.found()
        if note is not None:
            self._task.voice.say(f"note   {note}")
        self.saver.save(rig.steps, lambda: export_state(rig, loop, remembered), self._task.facts(), wait=wait)
