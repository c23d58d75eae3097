"""A training whose session ends: how long before it has to stop to be saved, and whether it will be over by then."""

from __future__ import annotations

import time

from torch.utils.data import DataLoader

from hotlap.core.units import show_about
from hotlap.data.dataset import as_source
from hotlap.fitting.deadline import FORWARD
from hotlap.fitting.session import ProgressState, RunSession
from hotlap.fitting.task import Task
from hotlap.guard.signals import StopRequest
from hotlap.machine.session_end import SessionEnd

WAITED_S = 600.0
"""Before the end, how long hotlap waits for the device at each look: the host may run far ahead of it."""
SAVES = 2.0
"""A checkpoint may take so many times as long as expected: another one may be under way."""


class SavedInTime:
    """Keeps a stop before the end of the session early enough for a step in hand and a checkpoint."""

    def __init__(self, task: Task, session: RunSession, state: ProgressState, stop: StopRequest) -> None:
        self._task, self._session, self._state, self._rig, self._stop = task, session, state, task.rig, stop
        self._began_s, self._first, self._first_epoch = time.perf_counter(), task.rig.steps, task.rig.place.epoch
        self._looked = (self._began_s, task.rig.steps)
        self._aside_s, self._evaluation_s, self._is_paced = state.clock.aside_s, 0.0, False

    def leaves_time_to_evaluate(self) -> bool:
        """Whether an evaluation would be over before the training has to stop; one that is left out comes on resume."""
        return not self._stop.comes_before(self._expected_evaluation_s())

    def look(self) -> str | None:
        """Take in the pace; once, where it is too slow for the session, a line on that."""
        end = self._stop.end
        if end is None:
            return None
        if end.left_s < WAITED_S:
            self._rig.wait()
        now, (then, steps) = time.perf_counter(), self._looked
        aside_s = self._state.clock.aside_s - self._aside_s
        if aside_s > 0:
            self._evaluation_s = aside_s
        if self._rig.steps > steps:
            step_s = max(0.0, now - then - aside_s) / (self._rig.steps - steps)
            steps_at_once = self._rig.plan.execution.replay_steps
            self._stop.lead_s = SAVES * (step_s * steps_at_once + self._session.saver.expected_s)
        self._looked, self._aside_s = (now, self._rig.steps), self._state.clock.aside_s
        return self._pace_line(end, now)

    def _expected_evaluation_s(self) -> float:
        """Seconds of an evaluation: as the last one took, or by the pace of training."""
        valid, made = self._task.job.valid, self._rig.steps - self._first
        if valid is None or self._evaluation_s or not made:
            return self._evaluation_s
        samples = len(as_source(valid.dataset if isinstance(valid, DataLoader) else valid))
        return FORWARD * self._step_s(time.perf_counter()) * made * samples / max(1, self._rig.samples)

    def _step_s(self, now: float) -> float:
        """Seconds a step since the start of this process, evaluations included."""
        return (now - self._began_s) / max(1, self._rig.steps - self._first)

    def _pace_line(self, end: SessionEnd, now: float) -> str | None:
        if self._is_paced or self._rig.place.epoch == self._first_epoch:
            return None
        self._is_paced = True
        needs_s = self._step_s(now) * max(0, self._task.total - self._rig.steps)
        if self._task.limit is not None:
            needs_s = min(needs_s, self._task.limit.left_s)
        spare_s = end.left_s - end.margin_s - self._stop.lead_s
        if needs_s <= spare_s:
            return None
        return (
            f"at this pace the training takes {show_about(needs_s)} more, and the session {end.line}: hotlap saves it "
            "before. To have it end in time with its best weights, begin it with "
            f"finish_in={_fitting(spare_s)!r} (--finish-in)"
        )


def _fitting(seconds: float) -> str:
    """A time as `finish_in` takes it, rounded down: `11523.7` → `3h 12m`."""
    minutes = int(seconds) // 60
    if minutes >= 60:
        return f"{minutes // 60}h {minutes % 60}m"
    return f"{minutes}m" if minutes > 1 else f"{max(1, int(seconds))}s"
