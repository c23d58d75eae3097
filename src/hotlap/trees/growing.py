"""Boosters that grow in laps, so many at once; each stops by patience, and all of them on a signal."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hotlap.guard.signals import StopRequest
from hotlap.trees.job import TreeJob, TreePlan
from hotlap.trees.libraries import Held, Score

T = TypeVar("T")
EVER = 2**31
WAKE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A trained booster, in the library's own format."""

    targets: range
    content: bytes
    rounds: int
    """Rounds it trained."""
    best_round: int
    """Rounds that it keeps, counted from 1."""
    scores: tuple[Score, ...]
    """One a round, where there is data to judge by."""
    whole: bool
    """False where a signal or a deadline ended it."""


class Saves(Protocol):
    """Saves boosters that grow."""

    def begun(self, targets: range) -> Grown | None:
        """One that was saved before an interruption."""

    def is_due(self, targets: range) -> bool:
        """Whether one is to be saved now."""

    def save(self, booster: Grown) -> None:
        """Save one as far as it has grown."""


class Watch:
    """What all boosters of a training share: the request to stop, when time is over, and the count of rounds."""

    def __init__(
        self,
        stop: StopRequest,
        show: Callable[[int], object],
        until_s: float = math.inf,
        saves: Saves | None = None,
    ) -> None:
        """`until_s`: when the last round has to be over, by `time.perf_counter`; `saves` keeps boosters that grow."""
        self._stop, self._show, self.until_s, self.saves = stop, show, until_s, saves
        self.failed = False
        """Whether a booster raised an error, which ends the others."""
        self.rounds = 0
        """Rounds × targets so far, those of dropped boosters included."""

    @property
    def is_over(self) -> bool:
        """Whether boosters have to stop."""
        return self.failed or self._stop.signal is not None

    def share_s(self, parts: float) -> float:
        """When a booster has to end that may take one of so many parts of the time that is left."""
        now = time.perf_counter()
        return now + (self.until_s - now) / max(1.0, parts) if math.isfinite(self.until_s) else math.inf

    def count(self, rounds: int) -> None:
        """Note rounds that were grown."""
        self.rounds += rounds
        self._show(self.rounds)


class Growth:
    """A booster for one target, or for all of them, that grows to the end of its rounds or patience.

    It has a thread of its own. XGBoost draws rows and columns from one generator for each thread, so boosters that
    take turns in a thread would get other trees than each gets alone. Besides, OpenMP's threads wait without spinning
    while two teams of them are alive, this booster's and the one that quantised: on a machine with other work a round
    of LightGBM took 6 ms of the cores in place of 60.
    """

    def __init__(self, data: Held, job: TreeJob, targets: range, plan: TreePlan) -> None:
        self.targets, self._job = targets, job
        self.booster = data.begin(targets, plan)
        self.rounds, self.best_round = 0, 0
        self.scores: list[Score] = []
        self.ended = False
        self._thread = ThreadPoolExecutor(1)

    def grow(self, rounds: int, watch: Watch, until_s: float = math.inf) -> int:
        """Grow by so many rounds at most, at least by the first; how many rounds × targets it grew."""
        return _awaited(self._thread.submit(self._grow, rounds, watch, until_s))

    def _grow(self, rounds: int, watch: Watch, until_s: float) -> int:
        saves = watch.saves if self.booster.can_go_on else None
        self.booster.enter()
        if saves is not None and not self.rounds and (begun := saves.begun(self.targets)) is not None:
            self._go_on(begun)
        before = self.rounds
        while not self.ended and self.rounds - before < rounds and not watch.is_over:
            if self.rounds and time.perf_counter() >= until_s:
                break
            score = self.booster.grow()
            self.rounds += 1
            if score is not None:
                self._judge(score)
            self._note_end()
            watch.count(len(self.targets))
            if saves is not None and not self.ended and saves.is_due(self.targets):
                saves.save(self._grown(self.rounds))
        return (self.rounds - before) * len(self.targets)

    def _go_on(self, begun: Grown) -> None:
        """Go on where a booster was saved."""
        self.booster.go_on(begun.content, begun.rounds)
        for score in begun.scores:
            self.rounds += 1
            self._judge(score)
        self.rounds = begun.rounds
        self._note_end()

    def _note_end(self) -> None:
        if self._job.patience is None:
            self.best_round = self.rounds
        waited = self.rounds - self.best_round
        self.ended = self.rounds >= self._job.rounds or waited >= (self._job.patience or EVER)

    def finish(self, watch: Watch, until_s: float = math.inf) -> Grown:
        """Grow to the end, or until its time is over; what it came to."""
        self.grow(EVER, watch, until_s)
        self._thread.shutdown()
        if watch.saves is not None and self.rounds and not self.ended and self.booster.can_go_on:
            watch.saves.save(self._grown(self.rounds))
        return self._grown(max(1, self.best_round))

    def _grown(self, kept: int) -> Grown:
        """What it has come to, with so many of its rounds."""
        return Grown(
            targets=self.targets,
            content=self.booster.dump(kept) if self.rounds else b"",
            rounds=self.rounds,
            best_round=max(1, self.best_round),
            scores=tuple(self.scores),
            whole=self.ended,
        )

    def _judge(self, score: Score) -> None:
        best = self.scores[self.best_round - 1].value if self.best_round else math.nan
        self.scores.append(score)
        if math.isnan(best) or (score.value > best if score.higher else score.value < best):
            self.best_round = self.rounds


class Crew:
    """Grows boosters in the threads of a plan."""

    def __init__(self, plan: TreePlan) -> None:
        self.plan = plan
        # The same threads for all laps: a new one costs a team of the library's own threads.
        self._pool = ThreadPoolExecutor(plan.at_once) if plan.at_once > 1 else None

    def lap(self, growths: Sequence[Growth], rounds: int, watch: Watch) -> float:
        """Grow each by so many rounds; seconds a round × target. NaN where one of them came to its end."""
        start = time.perf_counter()
        grown = self._map(lambda growth: growth.grow(rounds, watch, watch.until_s), growths)
        took = time.perf_counter() - start
        whole = all(rounds * len(growth.targets) == count for growth, count in zip(growths, grown, strict=True))
        return took / sum(grown) if whole and grown else math.nan

    def finish(
        self, job: TreeJob, slots: Sequence[Held], begun: Sequence[Growth], left: Sequence[range],
        watch: Watch, keep: Callable[[Grown], None], *, later: int = 0,
    ) -> None:  # fmt: skip
        """Grow those that have begun, `begun[i]` on `slots[i]`, and those that are left, on a slot for each thread.

        The time up to a deadline is shared out evenly over them and those that come `later`.
        """
        queue, lock = deque(left), threading.Lock()
        waiting = len(begun) + len(left) + later

        def done(growth: Growth) -> None:
            nonlocal waiting
            with lock:
                until_s = watch.share_s(waiting / self.plan.at_once)
                waiting -= 1
            grown = growth.finish(watch, until_s)
            with lock:
                keep(grown)

        def work(number: int) -> None:
            try:
                for growth in begun[number :: self.plan.at_once]:
                    done(growth)
                while not watch.is_over:
                    try:
                        targets = queue.popleft()
                    except IndexError:
                        return
                    done(Growth(slots[number], job, targets, self.plan))
            except BaseException:
                watch.failed = True
                raise

        self._map(work, range(self.plan.at_once))

    def close(self) -> None:
        """Let the threads go."""
        if self._pool is not None:
            self._pool.shutdown()

    def _map(self, work: Callable[..., int | None], items: Sequence[object]) -> list[int]:
        if self._pool is None:
            return [work(item) or 0 for item in items]
        return [_awaited(started) or 0 for started in [self._pool.submit(work, item) for item in items]]


def _awaited(work: Future[T]) -> T:
    """The result of work in another thread.

    Python notes a signal that comes just before the wait only when the wait ends, so each wait is short.
    """
    while not work.done():
        wait([work], WAKE_S)
    return work.result()
