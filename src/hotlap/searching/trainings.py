"""Several trainings: one after the other in this process, or some at once, in processes or in turns."""

from __future__ import annotations

import contextlib
import math
import pickle
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hotlap.core.console import Console
from hotlap.core.errors import JobError, TrainingError
from hotlap.core.job import Job
from hotlap.core.ledger import Ledger
from hotlap.engine.capture.recording import drops_in_recurrence
from hotlap.fitting.run import FinishedRun
from hotlap.machine.device import choose_device
from hotlap.searching.at_once import Ahead, Chosen, Copies, how_many
from hotlap.searching.crews import Crew, Pipe, Worker, crew_for, threads_of, why_not_at_once
from hotlap.searching.processes import failure
from hotlap.trees.job import TreeJob

Judge = Callable[[dict[str, Any]], object]
"""Takes the figures of an evaluation; a text that it returns ends the training."""
Train = Callable[[Judge], FinishedRun]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training that has ended."""

    number: int
    seconds: float
    best: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""
    left_out: tuple[str, ...] = ()
    run: FinishedRun | None = None
    """None where another process trained it; its folder holds all."""
    error: Exception | None = None
    """What it raised, if it failed."""


@dataclass(frozen=True, kw_only=True)
class _Begun:
    number: int
    train: Train
    judge: Judge
    began_s: float


class Trainings:
    """Trainings that are started one by one and end in any order."""

    def __init__(self, at_once: int | None, console: Console) -> None:
        """`at_once` train at once from the start; None: one, until `decide` has found how many are fastest."""
        self.at_once, self.ledger = at_once or 1, Ledger()
        self._is_decided, self._console = at_once is not None, console
        self._waiting: _Begun | None = None
        self._begun: dict[Worker, _Begun] = {}
        self._crew: Crew | None = None

    def run(
        self,
        numbers: Iterable[int],
        begin: Callable[[int], Any],
        train: Callable[[int, Any, Judge], FinishedRun],
        judge: Callable[[int, dict[str, Any]], object] | None = None,
    ) -> Iterator[tuple[Any, Ended]]:
        """Train as many at once as `at_once` says; give each as it ends, with its job if this process trained it.

        `begin` makes the job of a number, `train` trains it, and `judge` takes its evaluations in this process.
        """
        left, mine = iter(numbers), dict[int, Any]()
        try:
            while True:
                while self.in_progress < self.at_once and (number := next(left, None)) is not None:
                    try:
                        job = begin(number)
                    except Exception as error:
                        yield None, Ended(number=number, seconds=0.0, error=error)
                        continue
                    if self.at_once == 1:
                        mine[number] = job
                    told = _ignored if judge is None else partial(judge, number)
                    self.start(number, job, partial(train, number, job), told)
                    del job
                if not self.in_progress:
                    return
                yield self._next_with_job(mine)  # no name here: it would keep the model until the next one has ended
        finally:
            self.close()

    def decide(self, job: Job, plan: Chosen, *, each_s: float, steps: int, left: int, left_s: float = math.inf) -> None:
        """Find out, once, how many at once are fastest, on copies of a job.

        One took so many seconds for so many steps; `left` like it are to come, or as many as fit into `left_s`.
        """
        if self._is_decided:
            return
        self._is_decided, each_s = True, max(each_s, 1e-3)
        count = int(min(left, left_s / each_s))
        ahead = Ahead(count=count, each_s=each_s, step_s=each_s / max(1, steps))
        self.at_once = how_many(job, ahead, self.ledger, partial(Copies, job, plan), device=choose_device(job.device))
        for entry in self.ledger:
            if "ratio" in entry.figures:
                ratio, low, high = (entry.figures[name] for name in ("ratio", "low", "high"))
                self._console.say(f"{entry.what}: {ratio:.3g}x [{low:.3g}, {high:.3g}] · {entry.outcome}; {entry.why}")

    @property
    def in_progress(self) -> int:
        """How many have been started and not ended."""
        return len(self._begun) + (self._waiting is not None)

    def start(self, number: int, job: Job | TreeJob, train: Train, judge: Judge) -> None:
        """Start a training of a job; `judge` is called in this process.

        While one trains at a time, it trains in this process, once `next` is called. Raises JobError where others were
        asked for and cannot train this job.
        """
        begun = _Begun(number=number, train=train, judge=judge, began_s=time.perf_counter())
        if self.at_once == 1:
            self._waiting = begun
            return
        if not isinstance(job, Job):
            raise JobError([f"at_once={self.at_once}: trees use all cores by themselves"])
        device = choose_device(job.device)
        why = why_not_at_once(device, self.at_once)
        if why is not None:
            raise JobError([f"at_once={self.at_once}: {why}"])
        crew = self._crew = self._crew or crew_for(device)

        def work(pipe: Pipe) -> None:
            pipe.send(_outcome(train, pipe, is_sent=not crew.shares_memory))

        alone = drops_in_recurrence([job.model], device)  # torch has one state of that dropout for each GPU
        self._begun[crew.start(work, threads=threads_of(self.at_once, device), alone=alone)] = begun

    def next(self) -> Ended:
        """The next training that ends; evaluations of all are judged meanwhile."""
        if self._waiting is not None:
            begun, self._waiting = self._waiting, None
            return self._trained_here(begun)
        assert self._crew is not None
        while True:
            for worker in self._crew.wait():
                begun = self._begun[worker]
                try:
                    what, told = worker.receive()
                except TrainingError as error:
                    what, told = "failed", error
                if what == "evaluated":
                    answer = begun.judge(told)
                    with contextlib.suppress(BrokenPipeError):  # it has ended; the next look tells how
                        worker.pipe.send(answer if isinstance(answer, str) else None)
                    continue
                self._begun.pop(worker)
                self._crew.forget(worker)
                seconds = time.perf_counter() - begun.began_s
                if what == "failed":
                    return Ended(number=begun.number, seconds=seconds, error=told)
                return Ended(number=begun.number, seconds=seconds, **told)

    def _next_with_job(self, jobs: dict[int, Any]) -> tuple[Any, Ended]:
        ended = self.next()
        return jobs.pop(ended.number, None), ended

    def close(self) -> None:
        """End what still trains; each training saves a checkpoint first, where it keeps any."""
        if self._crew is not None:
            self._crew.close()
        self._crew = None
        self._begun.clear()

    def _trained_here(self, begun: _Begun) -> Ended:
        try:
            run = begun.train(begun.judge)
        except Exception as error:
            return Ended(number=begun.number, seconds=time.perf_counter() - begun.began_s, error=error)
        seconds = time.perf_counter() - begun.began_s
        return Ended(number=begun.number, seconds=seconds, run=run, **_figures(run))


def _ignored(record: dict[str, Any]) -> None:
    """An evaluation that nothing judges."""


def _figures(run: FinishedRun) -> dict[str, Any]:
    return {"best": run.best, "stopped": run.stopped, "left_out": run.left_out}


def _outcome(train: Train, pipe: Pipe, *, is_sent: bool) -> tuple[str, Any]:
    """Train, with the other end of this pipe; what comes back. It `is_sent` from one process to another, or handed."""

    def judge(record: dict[str, Any]) -> Any:
        pipe.send(("evaluated", record))
        return pipe.recv()

    try:
        run = train(judge)
        return "ended", _figures(run) | ({} if is_sent else {"run": run})
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:
        return "failed", _as_sent(error) if is_sent else error


def _as_sent(error: Exception) -> Exception:
    """An error as another process can read it, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        error.add_note(f"In its own process:\n{trace}")
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
    except Exception:  # of a class that is not made from its arguments, or defined in a function
        pass
    plain = TrainingError(failure(error))
    plain.add_note(f"In its own process:\n{trace}")
    return plain
