"""Numbers that are not finite: hotlap goes back and on under another plan, or ends and names where it began."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from hotlap.core.errors import StoreError
from hotlap.core.plan import Plan
from hotlap.fitting.first_nan import Origin, are_finite, find_origin, last_batch
from hotlap.fitting.session import ProgressState, RunSession
from hotlap.fitting.task import Task

LOOK = 100
"""Steps between two counts of skipped updates, each of which waits once for the device."""
IN_A_ROW = 10
"""Updates skipped in a row after which the plan is under suspicion."""
IN_FP16 = IN_A_ROW + 24
"""As many in fp16, whose scaled loss may come down from 2**24 first."""
SEARCH_S = 40.0
"""The most seconds for making steps again to find where it began."""


class NotFinite:
    """Watches the numbers of one training, and answers where they are not finite."""

    def __init__(self, task: Task, session: RunSession, state: ProgressState) -> None:
        self._task, self._rig, self._session, self._state = task, task.rig, session, state
        self.has_dead_weights = False
        """Whether weights that are not finite have ended the training."""
        self._failed: set[Plan] = set()
        """Plans under which numbers were not finite."""
        self._warned = False
        self._counted, self._row = (self._rig.steps, 0), 0
        """Steps and skipped updates when they were last counted; updates that were skipped in a row."""
        self._good = self._rig.steps
        """The last step up to which every loss is known to have been finite."""

    def warn_of_loss(self, record: dict[str, Any]) -> None:
        """Warn once of a training loss that is not finite."""
        if math.isfinite(record["train_loss"]):
            if not self._rig.guards.may_skip:  # a skipped loss does not count
                self._good = record["step"]
            return
        if self._warned:
            return
        self._warned = True
        rig, warnings = self._rig, self._task.value_warnings
        why = f"the training loss is {record['train_loss']} at step {record['step']}"
        rig.write_down("loss not finite", "fault", why)
        causes = f"most likely since {warnings[0]}; else " if warnings else ""
        self._task.voice.warn(f"{why}; {causes}try {self._cures()}")

    def has_finite_weights(self) -> bool:
        """Whether all weights are finite; waits for the device."""
        return are_finite(p for module in self._rig.modules for p in module.parameters())

    def skipped_in_a_row(self, *, is_record: bool = False) -> int:
        """Updates that were skipped in a row, if they are too many; else 0. Counts every `LOOK` steps and at records.

        Under a plan that can give way to another one few are too many, otherwise `LOOK` or a whole epoch.
        """
        rig, (steps, skipped) = self._rig, self._counted
        made = rig.steps - steps
        if not rig.guards.may_skip or (made < LOOK and not (is_record and made > 0)):
            if made < 0:
                self._counted, self._row = (rig.steps, rig.skipped), 0
            return 0
        self._counted = rig.steps, rig.skipped
        self._row = self._row + made if self._counted[1] - skipped == made else 0
        if self._row < (IN_FP16 if rig.plan.numerics.precision == "fp16" else IN_A_ROW):
            return 0
        is_last = self._row < min(LOOK, rig.epoch_windows) and next(self._others(rig.plan), None) is None
        return 0 if is_last else self._row

    def go_back(self, what: str, in_force: Plan | None, *, until: int) -> Plan | None:
        """Put the training back to its newest finite state up to a step, and under a plan that may do without it.

        Returns that plan; None if there is no other plan or no finite state. `in_force` is the plan under which it
        happened; None if several took turns, which have been dropped since. Finite weights may stay where they are.
        """
        rig, before, failed_at = self._rig, self._rig.plan, self._rig.steps
        plan = next(self._others(in_force), None)
        if in_force is not None:
            self._failed.add(in_force)
        if plan is None:
            return None
        rig.use(plan, why=what)
        may_stay = self.has_finite_weights()
        loop = self._put_back(until, or_start=not may_stay)
        if loop is not None:
            self._state.put_back_records(loop)
            self._session.folder.write_metrics(self._state.history)
        elif not may_stay:
            rig.use(before, why="there is no checkpoint with finite weights")
            return None
        self._counted, self._row, self._good = (rig.steps, rig.skipped), 0, min(self._good, rig.steps)
        changes = {} if in_force is None else in_force.changes(plan)
        words = ", ".join(f"{name} {was} → {now}" for name, (was, now) in changes.items())
        left = f"with {words}" if words else "without moves on trial"
        place = f"gone back to step {rig.steps:,}, on" if loop is not None else "on from here"
        why = f"{what} at step {failed_at:,}; {place} {left}"
        rig.write_down("weights not finite", "fault", why)
        self._task.voice.warn(why)
        return plan

    def stop(self, what: str) -> list[str]:
        """Find out where it began; what to say of it, a line each. The training is over then.

        A model whose weights are not finite is left with the newest that were, if there are some.
        """
        rig, until = self._rig, self._rig.steps
        counters = rig.place, rig.steps, rig.samples
        weights = self.has_dead_weights = not self.has_finite_weights()
        lines = [f"{what} at step {until:,}"]
        bad = [name for name, p in rig.model.named_parameters() if not are_finite([p])]
        batch = last_batch(rig, self._task.dataset.order)
        try:
            origin = self._origin(until) if weights else self._origin_from_here()
        except Exception as error:  # the search must not hide what it looks for
            origin = None
            lines.append(f"hotlap could not find the layer: {type(error).__name__}")
        if origin is not None:
            lines[0] += f"; {origin}"
            lines += origin.values
        else:
            lines[0] += f"; it begins between step {self._good:,} and here"
            lines.append(f"the last batch: {batch}")
            if bad:
                lines.append(f"not finite: {len(bad):,} parameters, such as {bad[0]}")
        if weights:
            self._put_back(until)
            rig.place, rig.steps, rig.samples = counters
        lines += [f"most likely since {warning}" for warning in self._task.value_warnings[:1]]
        lines.append(f"try {self._cures()}")
        rig.write_down("numbers not finite", "fault", "; ".join(lines))
        try:
            self._session.folder.write_ledger(rig.ledger)
        except StoreError as error:
            self._task.voice.warn(str(error))
        return lines

    def _others(self, in_force: Plan | None) -> Iterator[Plan]:
        """Plans under which it may not happen, the likeliest first.

        The plan without a move on trial, fp32, one move less, and the user's own plan. One move less only the first
        time: going back costs steps.
        """
        rig, plan = self._rig, self._rig.plan
        found = [] if plan == in_force else [plan]
        if plan.numerics.precision in ("bf16", "fp16"):
            found.append(_in_fp32(plan))
        if len(self._failed) < 2:
            chosen = [entry.plan for entry in rig.ledger if entry.outcome in ("kept", "chosen")]
            found += [_in_fp32(one) for one in reversed(chosen) if one != plan][:1]
        found.append(_in_fp32(replace(self._task.own_plan, memory=plan.memory)))
        for one in found:
            if one != in_force and one not in self._failed and rig.supports(one) is None:
                yield one

    def _put_back(self, until: int, *, or_start: bool = True) -> dict[str, Any] | None:
        """Put the rig back to its newest checkpoint with finite weights up to a step, else to step 0 if asked to."""
        while True:
            try:
                loop = self._session.put_back(until=until, or_start=or_start)
            except StoreError:
                return None
            if self.has_finite_weights():
                return loop
            until = self._rig.steps - 1

    def _origin(self, until: int) -> Origin | None:
        history = {record["step"]: record for record in self._state.history}
        return self._search(until, history) if self._put_back(until) is not None else None

    def _origin_from_here(self) -> Origin | None:
        return self._search(self._rig.steps + IN_A_ROW, {}, skips=True)

    def _search(self, until: int, history: dict[int, dict[str, Any]], *, skips: bool = False) -> Origin | None:
        """Make steps again from where the rig stands, operation by operation."""
        task, rig = self._task, self._rig
        plan = rig.plan
        rig.use(plan.but(mode="eager", compile="no", replay_steps=1), why="to find where numbers cease to be finite")
        name = "valid_loss" if task.job.monitor == "loss" else task.job.monitor
        left_s = SEARCH_S if task.limit is None else min(SEARCH_S, task.limit.left_s / 2)

        def ended() -> None:
            record = history.get(rig.steps, {})
            if name in record:  # for a schedule that waits for a plateau
                rig.schedule.evaluated(record[name])

        windows = rig.windows(epochs=task.job.epochs, steps=task.job.steps, room=lambda: 1)
        try:
            order, good = task.dataset.order, self._good
            return find_origin(rig, order, windows, good=good, skips=skips, until=until, most_s=left_s, ended=ended)
        finally:
            rig.use(plan)

    def _cures(self) -> str:
        job, rig = self._task.job, self._rig
        others = {
            "clip=1.0": job.clip is None,
            "precision fp32": rig.plan.numerics.precision != "fp32",
            "skip_nonfinite=True": not job.skip_nonfinite,
        }
        return ", ".join(["a smaller learning rate", *(cure for cure, is_new in others.items() if is_new)])


def _in_fp32(plan: Plan) -> Plan:
    return replace(plan, numerics=replace(plan.numerics, precision="fp32"))
