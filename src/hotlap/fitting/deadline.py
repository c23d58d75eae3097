"""The time that a training may take: how much of it fits, and when it has to end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch.utils.data import DataLoader

from hotlap.core.errors import JobError, shown
from hotlap.core.job import Job
from hotlap.core.units import read_seconds, show_seconds
from hotlap.data.dataset import as_source, first_samples
from hotlap.engine.rig import Rig
from hotlap.tuner.budget import Length

MARGIN = 0.01
"""Of the time, kept free for what cannot be planned."""
PLANNED_AT = (0.05, 0.15, 0.3, 0.5, 0.7, 0.85)
"""Shares of the time after which hotlap plans how many updates fit."""
WORTH = 0.02
"""A plan that differs less from the last one, as a share of the updates left, does not replace it."""
SETTLED = 8
"""Updates before the first plan."""
UNUSED = 0.04
"""Of the time, how much may be left where the planned updates are made; with more, hotlap plans anew."""
TRIED = 16
"""Before the first evaluation, this part of its samples says what it will take; at least a batch of the training's."""
FORWARD = 0.5
"""What evaluating a sample is taken to cost of training on it, where no part of an evaluation could be timed."""
MOST_UNSEEN = 0.3
"""Of the time, what an evaluation that was never timed is taken to need at most, with what follows it."""


@dataclass(frozen=True)
class TimeLimit:
    """When a work has to be over, by the clock of this process."""

    all_s: float
    until_s: float
    evaluations_after: float = 0.0
    """What has to follow the training within this time, such as predictions, in evaluations."""

    @classmethod
    def of(cls, finish_in: float | str | TimeLimit, *, used_s: float = 0.0) -> TimeLimit:
        """So much time from now, of which some was used before. Raises JobError where it is no time."""
        if isinstance(finish_in, TimeLimit):
            return finish_in
        try:
            all_s = read_seconds(finish_in)
        except ValueError:
            raise JobError(
                [f'finish_in={shown(finish_in)} is no time: give seconds, or "90s", "15m", "1h 30m"']
            ) from None
        return cls(all_s, time.perf_counter() + all_s - used_s)

    @property
    def left_s(self) -> float:
        """Seconds that are left; below 0 where it is over."""
        return self.until_s - time.perf_counter()

    def part(self, share: float) -> TimeLimit:
        """This share of the time that is left, which ends so much earlier."""
        if share >= 1:
            return self
        left_s = max(0.1, self.left_s)
        return replace(self, all_s=share * left_s, until_s=self.until_s - (1 - share) * left_s)

    def __str__(self) -> str:
        return show_seconds(self.all_s)


class Deadline:
    """Plans a training from its measured pace so that it ends in time, with its evaluations and files."""

    def __init__(
        self, limit: TimeLimit, job: Job, rig: Rig, *, total: int, closing_s: Callable[[], float], planned: int | None
    ) -> None:
        """`closing_s` says what the files take at the end; `planned` is what an interrupted run had planned."""
        self._limit, self._job, self._rig, self._closing_s = limit, job, rig, closing_s
        self.total = total
        """Updates that were asked for."""
        self.updates = min(total, planned or total) if rig.schedule.spans_the_run else total
        """Updates that are planned, and that the schedule spans; all where it can span nothing else."""
        self._evaluation_s: float | None = None
        self._aside_s = self._pace_s = 0.0
        self._first = self._mark = (rig.steps, time.perf_counter())
        self._begun_s = limit.until_s - limit.all_s
        self._plans_at = [self._begun_s + share * limit.all_s for share in PLANNED_AT]
        self._next_s = -math.inf
        valid = job.valid.dataset if isinstance(job.valid, DataLoader) else job.valid
        self._samples = 0 if valid is None else len(as_source(valid))
        self._tried_s: float | None = None
        self.is_shorter = self.updates != total
        """Whether the schedule was made to span less than was asked for."""
        if self.is_shorter:
            span_schedule(rig, job, self.updates, total)

    # --- while it trains ---------------------------------------------------------------------------

    def try_evaluation(self) -> None:
        """Time a part of an evaluation; before the first one that says what all that needs the model will take."""
        self._tried_s = expected_evaluation_s(self._rig, self._job)
        self._first = self._mark = (self._rig.steps, time.perf_counter())

    def evaluated(self, seconds: float) -> None:
        """Take in what an evaluation took."""
        self._evaluation_s, self._aside_s = seconds, self._aside_s + seconds

    def room(self) -> int:
        """Updates until the planned end."""
        return max(1, self.updates - self._rig.steps)

    def is_over(self) -> bool:
        """Whether there is no time for another step and what has to follow it, or all that was planned is done."""
        if self._rig.steps >= self.updates:
            return self.updates < self.total
        if time.perf_counter() < self._next_s:
            return False
        self._rig.wait()  # the host runs ahead of a GPU
        if self._mark is self._first:  # a first step takes longer than others
            self._begin_measuring()
        now, step_s = time.perf_counter(), self._step_s() * self._rig.plan.execution.replay_steps
        spare_s = self._spare_s(now)
        # Ever more often towards the end: a look waits for the device.
        self._next_s = min([now + spare_s / 4, *self._plans_at[:1]])
        return spare_s <= step_s

    def goes_on(self) -> bool:
        """Whether more updates fit after all, since the last evaluation took less than was expected."""
        if self._rig.steps >= self.total or self._spare_s(time.perf_counter()) <= UNUSED * self._limit.all_s:
            return False
        if self._rig.schedule.spans_the_run:
            self.updates = self._rig.steps  # has the next look plan anew
        return True

    def planned(self) -> str | None:
        """Plan anew, if that is due: what the plan is, in words, where it has changed."""
        now, made = time.perf_counter(), self._rig.steps - self._first[0]
        is_early = self.total > self.updates <= self._rig.steps and self._spare_s(now) > UNUSED * self._limit.all_s
        if not is_early and not (self._plans_at and now >= self._plans_at[0] and made >= SETTLED):
            return None
        self._rig.wait()
        is_first = len(self._plans_at) == len(PLANNED_AT)
        self._plans_at = [at for at in self._plans_at if at > now]
        fit = min(self.total, self._fitting(time.perf_counter()))
        self._begin_measuring()
        schedule = self._rig.schedule
        if not schedule.spans_the_run:
            return self._words_of_no_span(fit) if is_first and fit < self.total else None
        if abs(fit - self.updates) <= WORTH * (self.updates - self._rig.steps):
            return None
        self.updates = max(fit, self._rig.steps + 1)
        before, self.is_shorter = self._lr(), True
        span_schedule(self._rig, self._job, self.updates, self.total)
        return (
            f"{self._of_all(self.updates)} fit in {self._limit}: from step {self._rig.steps:,} on the schedule spans "
            f"{self.updates:,} updates (learning rate {before:.3g} → {self._lr():.3g})"
        )

    def may_evaluate(self) -> bool:
        """Whether an evaluation and what has to follow it fit into the time."""
        return self._limit.left_s > self._end_s() + self._closing_s()

    def length(self) -> Length:
        """How many updates there will be, for the tuner, which spends shares of that."""
        if self._rig.steps == self._first[0]:
            return Length(self.updates)
        return Length(min(self.updates, self._fitting(time.perf_counter())))

    # --- in words ----------------------------------------------------------------------------------

    @property
    def why(self) -> str:
        """Why the training has ended."""
        return f"early: {self._of_all(self._rig.steps)} fit in {self._limit}"

    def left_out(self) -> list[str]:
        """What the training has not done for want of time, a line each."""
        left = self.total - self._rig.steps
        if left <= 0:
            return []
        epochs = self._job.epochs
        parts = "" if epochs is None else f", {left * epochs / self.total:,.1f} of {epochs:,} epochs"
        return [f"{left:,} of {self.total:,} updates{parts}"]

    def _of_all(self, updates: int) -> str:
        return f"{updates:,} of {self.total:,} updates"

    def _words_of_no_span(self, fit: int) -> str:
        words = f"about {self._of_all(fit)} fit in {self._limit}"
        schedule = self._rig.schedule
        if schedule.scheduler is None or schedule.waits_for_plateau:
            return words
        return (
            f"{words}; the schedule was made for more and ends on the way: give a function of (optimizer, updates), "
            "and hotlap makes it span what fits"
        )

    # --- the pace ----------------------------------------------------------------------------------

    def _begin_measuring(self) -> None:
        """Measure the pace from here on; until then it is the last one."""
        self._pace_s = self._step_s()
        self._mark, self._aside_s = (self._rig.steps, time.perf_counter()), 0.0

    def _step_s(self) -> float:
        """Seconds an update, without evaluations, since the last plan."""
        steps, since_s = self._mark
        made = self._rig.steps - steps
        return (time.perf_counter() - since_s - self._aside_s) / made if made else self._pace_s

    def _evaluation(self) -> float:
        """Seconds that an evaluation takes, before the first one by a part of it, else by the pace of training."""
        if self._job.valid is None:
            return 0.0
        if (known := self._evaluation_s or self._tried_s) is not None:
            return known
        return FORWARD * self._step_s() * self._samples * self._rig.steps / max(1, self._rig.samples)

    def _end_s(self) -> float:
        """Seconds that the last evaluation takes, with what has to follow."""
        seconds = self._evaluation() * (1 + self._limit.evaluations_after)
        is_known = self._evaluation_s is not None or self._tried_s is not None
        return seconds if is_known else min(MOST_UNSEEN * self._limit.all_s, seconds)

    def _spare_s(self, now: float) -> float:
        """Seconds that are left for steps, and for evaluations among them."""
        return self._limit.until_s - now - MARGIN * self._limit.all_s - self._closing_s() - self._end_s()

    def _fitting(self, now: float) -> int:
        """Updates that will have been made at the end, at the pace since the last plan."""
        steps, step_s = self._rig.steps, self._step_s()
        if not step_s:
            return self.updates
        period = self._job.eval_every or self._rig.epoch_windows
        each_s = step_s + (self._evaluation() / period if period else 0.0)
        return steps + max(0, int(self._spare_s(now) / each_s))

    def _lr(self) -> float:
        return float(self._rig.optimizer.param_groups[0]["lr"])


def expected_evaluation_s(rig: Rig, job: Job) -> float | None:
    """Seconds that an evaluation takes, by a part of it; None where none can be timed."""
    if job.valid is None or isinstance(job.valid, DataLoader):  # a loader would start its workers for it
        return None
    samples = len(as_source(job.valid))
    few = min(samples, max(job.batch_size or 1, samples // TRIED))
    part, took = first_samples(job.valid, few), []
    try:
        for _ in range(3):
            began = time.perf_counter()
            # In the training's batches: a larger one of few samples would be padded to the longest of all.
            rig.evaluate(part, batch_size=job.batch_size, collate=job.collate)
            took.append(time.perf_counter() - began)
    except Exception:  # it comes again where it is due, and is explained there
        return None
    return statistics.median(took) * samples / few


def span_schedule(rig: Rig, job: Job, updates: int, total: int) -> None:
    """Make the schedule span so many updates of all that were asked for."""
    rig.settle()
    if job.schedule_per == "epoch" and job.epochs is not None:
        updates = math.ceil(updates * job.epochs / total)
    rig.schedule.span(updates)
