"""`search`: train a job with many values, one trial after the other, and give the Run of the best."""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hotlap import plots
from hotlap.core.console import Console, open_console
from hotlap.core.errors import JobError, StoreError, TrainingError, listed, shown
from hotlap.core.job import Job
from hotlap.core.plan import Plan
from hotlap.core.terminal import clean
from hotlap.core.units import MIB, show_seconds
from hotlap.data.order import mix, seed_all
from hotlap.engine.snapshot import Randomness
from hotlap.fitting.deadline import MARGIN, TimeLimit
from hotlap.fitting.fit import AnotherTrainingError, ended_run, fit
from hotlap.fitting.metric_logs import Names, logs_named
from hotlap.fitting.run import Run
from hotlap.fitting.task import TUNED, Found
from hotlap.fitting.tuning import was_tuned
from hotlap.machine.device import choose_device
from hotlap.monitor.sampler import is_wanted
from hotlap.report import write_report
from hotlap.searching.at_once import checked
from hotlap.searching.processes import failure
from hotlap.searching.space import Space, checked_space, described
from hotlap.searching.trainings import Ended, Judge, Trainings
from hotlap.searching.trials import Trials, Tried, optuna_or_why_not
from hotlap.store.disk import read_small
from hotlap.store.files import finite, from_json, write_text
from hotlap.store.run_folder import RunFolder, RunLock
from hotlap.store.telemetry import write_live
from hotlap.trees.fit import TreeRun
from hotlap.trees.fit import fit as fit_trees
from hotlap.trees.job import TreeJob, TreePlan
from hotlap.trees.libraries import more_is_better

FILE, HISTORY, IMPORTANCE = "search.json", "history.svg", "importance.svg"
FORMAT = 1
MOST_TRIALS, MOST_BYTES = 100_000, 64 * MIB
SCORE = ("monitor", "higher_is_better")
"""What the first job says of the score, in the record of a search."""
PICTURES_S = 1.0
"""Of a deadline, kept for the pictures at the end."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a search has found."""

    best: Run | TreeRun
    """The run of the best trial."""
    values: dict[str, Any]
    """The values of the best trial."""
    score: float
    monitor: str
    """What `score` is."""
    trials: tuple[Tried, ...]
    importance: dict[str, float]
    """How much of the differences in score each value explains."""
    left_out: tuple[str, ...]
    """What `finish_in` left no time for."""
    folder: Path

    def report(self, path: str | Path | None = None) -> Path:
        """Write the report of this search and give its path: `report.html` in its folder, or another file."""
        return write_report(self.folder, path)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON holds them."""
        figures: dict[str, Any] = finite(
            {
                "search": str(self.folder),
                "monitor": self.monitor,
                "score": self.score,
                "values": self.values,
                "best": str(self.best.folder),
                "importance": self.importance,
                "left_out": list(self.left_out),
                "trials": [vars(trial) for trial in self.trials],
            }
        )
        return figures

    def summary(self) -> str:
        """The outcome, for people."""
        states = [trial.state for trial in self.trials]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.importance.items())
        lines = [
            f"trials    {len(states)}: {counts}",
            f"best      {self.monitor} {self.score:.4g} by {_words(self.values)} ({self.best.folder})",
            *([f"explained {shares}"] if shares else []),
            *(f"left out  {line}" for line in self.left_out),
            f"search    {self.folder}",
        ]
        return "\n".join(map(clean, lines))


def search(
    space: Mapping[str, Any] | Callable[[Any], Job | TreeJob],
    job: Callable[[dict[str, Any]], Job | TreeJob] | None = None,
    *,
    trials: int,
    finish_in: float | str | TimeLimit | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    prune: bool = True,
    seed: int = 0,
    at_once: int | None = None,
    save_every: int | None = None,
    progress: bool = True,
    log: Names = None,
) -> Search:
    """Train a job with so many choices of values, and give the best trial's Run. Needs the extra `search`.

    Args:
        space: What may vary: name → a list of choices, `(low, high)` or `(low, high, "log")`. Or a function that takes
            an Optuna trial and gives the Job; then `job` is left out.
        job: Gives the Job, or the TreeJob, of a dict of values. It makes a new model each time, and needs `valid`: the
            job's `monitor`, or the booster's metric, decides which trial is best. hotlap seeds torch, numpy and Python
            before each call.
        trials: Trials in all, those of a resumed search included.
        finish_in: The time for the whole search. A trial begins only if one as short as the shortest so far fits.
        out: A new or empty folder. None: a new one under `runs/`.
        resume: The folder of a search to go on with. Finished trials stay; one that was interrupted goes on.
        plan: As for `fit`. With "auto" each trial begins with the plan that an earlier one found.
        prune: End a trial from its second evaluation on if it is worse there than the median of at least five others.
        seed: Decides the values and the first weights of each trial.
        at_once: Trials that train at once: in processes on the CPU, in turns on a GPU. None: as many as hotlap measures
            to be fastest, once the first trial has ended. The values of a trial depend on which others have ended.
        save_every: Updates between checkpoints of a trial, as for `fit`.
        progress: Show progress on stderr.
        log: Where the metrics of each trial go beside its folder, as for `fit`.

    A trial that raises an error has failed: it is recorded, and the search goes on. Raises TrainingError where no
    trial completes, and HotlapError where the space or a folder cannot be used as asked.
    """
    limit = None if finish_in is None else TimeLimit.of(finish_in)
    optuna_or_why_not()
    logs = logs_named(log)
    if isinstance(trials, bool) or not isinstance(trials, int) or not 1 <= trials <= MOST_TRIALS:
        raise JobError([f"trials={shown(trials)} must be a whole number from 1 to {MOST_TRIALS:,}"])
    wanted_at_once = checked(at_once)
    made, parts = _job_maker(space, job)
    about: dict[str, Any] = {"format": FORMAT, "space": None if parts is None else described(parts), "seed": seed}
    if resume is None:
        folder = RunFolder.create(out, "search").path
    else:
        folder = Path(resume)
        about |= _gone_on(folder, out, about)
    lock, console, randomness = RunLock(folder), open_console(progress), Randomness(choose_device("auto"))
    try:
        searching = _Searching(
            folder=folder,
            made=made,
            trials=Trials(folder, seed=seed, prunes=prune, sign=-1.0 if about.get("higher_is_better") else 1.0),
            wanted=trials,
            limit=limit,
            plan=plan,
            seed=seed,
            save_every=save_every,
            console=console,
            about=about,
            logs=logs,
            trainings=Trainings(wanted_at_once, console),
            monitor=str(about.get("monitor") or ""),
        )
        return searching.run()
    except (KeyboardInterrupt, SystemExit):
        console.say(f"stopped; go on with: hotlap.search(…, resume={str(folder)!r})")
        raise
    finally:
        randomness.restore()
        console.close()
        lock.release()


Maker = Callable[[Any], tuple[dict[str, Any], Callable[[], Job | TreeJob]]]
"""Gives the values of an Optuna trial, and what makes their Job."""


def _job_maker(space: Any, job: Any) -> tuple[Maker, Space | None]:
    """What gives the jobs, and the space where it is a dict."""
    if isinstance(space, Mapping):
        if not callable(job):
            raise JobError([f"job={shown(job)} must be a function that gives the Job of a dict of values"])
        parts = checked_space(space)

        def of_values(trial: Any) -> tuple[dict[str, Any], Callable[[], Job | TreeJob]]:
            values = {name: part.drawn(name, trial) for name, part in parts.items()}
            return values, partial(job, dict(values))

        return of_values, parts
    if not callable(space) or job is not None:
        raise JobError(["give search a dict and a function of values, or one function of an Optuna trial"])

    return lambda trial: (dict(trial.params), partial(space, trial)), None


def _gone_on(folder: Path, out: str | Path | None, now: dict[str, Any]) -> dict[str, Any]:
    """What the search in a folder has found out about its score; StoreError where it was another search."""
    if out is not None and Path(out).resolve() != folder.resolve():
        raise StoreError(f"both out={str(out)!r} and resume={str(folder)!r} are given; a search keeps its folder")
    if not (folder / FILE).is_file():
        raise StoreError(f"{folder} is no search: it has no {FILE}")
    had = from_json(read_small(folder / FILE, MOST_BYTES), FILE)
    if not isinstance(had, dict) or had.get("format") != FORMAT:
        raise StoreError(f"{folder / FILE} is not the record of a search")
    changed = [
        f"{name} was {shown(had.get(name))}, is {shown(now[name])}" for name in now if had.get(name) != now[name]
    ]
    if changed:
        raise StoreError(listed(f"{folder} was another search in", "point", changed))
    return {name: had.get(name) for name in SCORE}


@dataclass(kw_only=True)
class Attempt:
    """A trial in progress."""

    trial: Any
    eval_every: int | None = None
    epochs: int | None = None
    is_of_trees: bool = False
    is_pruned: bool = False


@dataclass(kw_only=True)
class _Searching:
    """A search that runs."""

    folder: Path
    made: Maker
    trials: Trials
    wanted: int
    limit: TimeLimit | None
    plan: Any
    seed: int
    save_every: int | None
    console: Console
    about: dict[str, Any]
    logs: Sequence[str] = ()
    trainings: Trainings
    found: Found | None = None
    """The plan that a trial has found."""
    tree_plan: TreePlan | None = None
    """The same of trees."""
    monitor: str = ""
    best: Ended | None = None
    """The best trial of this process: if it was trained here, the only model that stays in memory."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """The trials in progress, by their numbers."""

    def run(self) -> Search:
        """Make all trials, and write down what came of them."""
        self.write()
        for job, ended in self.trainings.run(self.numbers(), self.begin, self.trained, self.judged):
            self.take_in(job, ended)
            del job, ended
            gc.collect()  # models hold themselves in circles
        best = self.trials.best()
        if best is None:
            tried = self.trials.tried()
            why = next((trial.why for trial in tried if trial.why), "there was no time for one")
            raise TrainingError(f"none of {len(tried)} trials completed; the first: {why}")
        score = best.score
        assert score is not None
        if len(self.trainings.ledger):
            RunFolder(self.folder).write_ledger(self.trainings.ledger)
        importance, left_out = self.trials.importance(), self.left_out()
        self.draw(importance)
        self.write(best=best.number, importance=importance, left_out=left_out)
        return Search(
            best=self.run_of(best),
            values=self.values_of(best),
            score=score,
            monitor=self.monitor,
            trials=tuple(self.trials.tried()),
            importance=importance,
            left_out=left_out,
            folder=self.folder,
        )

    # --- trials ------------------------------------------------------------------------------------

    def numbers(self) -> Iterator[int]:
        """The trials to make: those that were interrupted, and new ones while there is time."""
        for trial in self.trials.begun():
            self.attempts[trial.number] = Attempt(trial=trial)
            yield trial.number
        while len(self.trials) < self.wanted and self.has_time():
            trial = self.trials.ask()
            self.attempts[trial.number] = Attempt(trial=trial)
            yield trial.number

    def begin(self, number: int) -> Job | TreeJob:
        """The job of a trial."""
        attempt = self.attempts[number]
        job = self.job_of(attempt.trial, number)
        attempt.is_of_trees = isinstance(job, TreeJob)
        if isinstance(job, Job):
            attempt.eval_every, attempt.epochs = job.eval_every, job.epochs
        return job

    def take_in(self, job: Job | TreeJob | None, ended: Ended) -> None:
        """Write down what became of a trial, whatever it raised; another training in its folder ends the search."""
        attempt, error = self.attempts.pop(ended.number), ended.error
        if isinstance(error, AnotherTrainingError):
            raise error
        try:
            if error is not None:
                raise error
            score = self.score_of(ended)
            if attempt.is_pruned or self.is_cut(ended):
                self.trials.pruned(attempt.trial, ended.seconds, ended.stopped)
            else:
                self.trials.completed(attempt.trial, score, ended.seconds, ended.stopped)
            self.keep(ended)
        except Exception as raised:
            self.trials.failed(attempt.trial, ended.seconds, failure(raised))
        self.say(self.trials.tried()[ended.number])
        self.write()
        if isinstance(job, Job) and isinstance(ended.run, Run):
            self.trainings.decide(
                job,
                self.found or self.plan,
                each_s=ended.seconds,
                steps=ended.run.steps,
                left=self.wanted - len(self.trials),
                left_s=math.inf if self.limit is None else self.limit.left_s - self.closing_s,
            )

    def job_of(self, trial: Any, number: int) -> Job | TreeJob:
        """The job of a trial; its first weights depend on the seed and its number alone."""
        seed = mix(self.seed, number)
        seed_all(seed)
        job = self.made(trial)[1]()
        if not isinstance(job, (Job, TreeJob)):
            raise JobError([f"the function gave {shown(job)}, and no Job"])
        if job.valid is None:
            raise JobError(["without valid, nothing says which trial is best"])
        if isinstance(job, Job):
            self.judge_by("valid_loss" if job.monitor == "loss" else job.monitor, higher=job.higher_is_better)
        return job

    def judge_by(self, monitor: str, *, higher: bool) -> None:
        """Judge all trials by the same figure."""
        if self.monitor and monitor != self.monitor:
            raise JobError([f"its monitor is {monitor}, that of the first trial {self.monitor}"])
        self.monitor, self.trials.sign = monitor, -1.0 if higher else 1.0

    def trained(self, number: int, job: Job | TreeJob, judged: Judge | None = None) -> Run | TreeRun:
        """Train a trial's job in its folder, or go on there."""
        folder = self.trial_folder(number)
        if isinstance(job, TreeJob):
            return self.grown(job, folder)
        is_begun = (folder / "plan.toml").is_file()
        left = None if self.limit is None else TimeLimit(self.limit.all_s, self.limit.until_s - self.closing_s)
        return fit(
            job,
            plan=self.found if self.found is not None else self.plan,
            out=None if is_begun else folder,
            resume=folder if is_begun else None,
            save_every=self.save_every,
            finish_in=left,
            repeats=max(1, self.wanted - number),
            progress=False,
            on_evaluation=judged,
            log=self.logs,
        )

    def trial_folder(self, number: int) -> Path:
        """The folder of a trial, whose number counts from 0 on."""
        return self.folder / "trials" / f"{number + 1:04d}"

    def grown(self, job: TreeJob, folder: Path) -> TreeRun:
        """Train trees, or go on where a trial was interrupted."""
        plan = self.tree_plan if self.tree_plan is not None else self.plan
        is_begun = (folder / "plan.toml").is_file()
        out, resume = (None, folder) if is_begun else (folder, None)
        return fit_trees(job, plan=plan, out=out, resume=resume, progress=False, log=self.logs)

    def judged(self, number: int, record: dict[str, Any]) -> str | None:
        """Take in an evaluation of a trial; why it is pruned, or None."""
        attempt = self.attempts[number]
        if self.monitor not in record or attempt.is_of_trees:
            return None
        trial = attempt.trial
        at = record["epoch"] if attempt.eval_every is None else record["step"] // attempt.eval_every
        done = at / max(1, attempt.epochs if attempt.eval_every is None and attempt.epochs else at + 1)
        words = f"trial {trial.number + 1}/{self.wanted} · {self.monitor} {record[self.monitor]:.4g}{self.best_words()}"
        self.console.show(trial.number + min(1.0, done), self.wanted, lambda width: words[:width])
        if not self.trials.report(trial, record[self.monitor], at):
            return None
        attempt.is_pruned = True
        return "pruned: worse than the median of the trials before"

    def score_of(self, ended: Ended) -> float:
        """What a trial is judged by: the figure of the weights that its model has."""
        if isinstance(ended.run, TreeRun):
            monitor = next(name for name in ended.best if name != "round")
            self.judge_by(monitor, higher=more_is_better(monitor.removeprefix("valid_")))
        score = ended.best.get(self.monitor)
        if score is None:
            raise TrainingError(f"there was no evaluation; {ended.stopped}")
        return float(score)

    def is_cut(self, ended: Ended) -> bool:
        """Whether the deadline has cut a trial short, which makes it no match for others; the first one counts."""
        return bool(ended.left_out) and self.trials.best() is not None

    def keep(self, ended: Ended) -> None:
        """Keep the trial if it is the best so far, and the plan that it found."""
        best, run = self.trials.best(), ended.run
        if best is not None and best.number == ended.number + 1:
            self.best = ended
        if isinstance(run, TreeRun):
            self.tree_plan = run.plan
        if not isinstance(run, Run):
            return
        is_tuned = self.plan in (None, TUNED) and was_tuned(run.ledger)
        if self.found is None and is_tuned:
            self.found = Found(plan=run.plan, ledger=run.ledger, updates=run.steps)

    # --- time --------------------------------------------------------------------------------------

    @property
    def closing_s(self) -> float:
        """Seconds of the deadline that are kept for the end."""
        return 0.0 if self.limit is None else min(PICTURES_S, MARGIN * self.limit.all_s)

    def has_time(self) -> bool:
        """Whether another trial may fit: one as short as the shortest complete one."""
        took = [trial.seconds for trial in self.trials.tried() if trial.state == "complete"]
        if self.limit is None or not took:
            return self.limit is None or self.limit.left_s > self.closing_s or not len(self.trials)
        return self.limit.left_s - self.closing_s > min(took)

    def left_out(self) -> tuple[str, ...]:
        """What there was no time for."""
        missing = self.wanted - len(self.trials)
        trials = [f"{missing:,} of {self.wanted:,} trials"] if missing > 0 else []
        best = self.best
        cut = [] if best is None else [f"trial {best.number + 1}: {line}" for line in best.left_out]
        return (*trials, *cut)

    # --- what came of it ---------------------------------------------------------------------------

    def values_of(self, best: Tried) -> dict[str, Any]:
        """The values of a trial, as its job had them."""
        return self.made(self.trials.again(best.number))[0]

    def run_of(self, best: Tried) -> Run | TreeRun:
        """The best trial's run; where an earlier process made it, read from its folder."""
        mine = self.best
        if mine is not None and mine.number == best.number - 1 and isinstance(mine.run, (Run, TreeRun)):
            return mine.run
        job = self.job_of(self.trials.again(best.number), best.number - 1)
        folder = self.trial_folder(best.number - 1)
        return ended_run(job, folder) if isinstance(job, Job) else self.grown(job, folder)

    def best_words(self) -> str:
        """The best so far, in words."""
        best = self.trials.best()
        return "" if best is None else f" · best {best.score:.4g} (trial {best.number})"

    def say(self, tried: Tried) -> None:
        """A line on a trial that has ended."""
        outcome = f"{self.monitor} {tried.score:.4g}" if tried.score is not None else tried.why
        state = "" if tried.state == "complete" else f"{tried.state} · "
        took = show_seconds(tried.seconds)
        head = f"trial {tried.number}/{self.wanted} · {state}{outcome}{self.best_words()}"
        self.console.say(f"{head} · {_words(tried.values)} · {took}")

    def draw(self, importance: dict[str, float]) -> None:
        """Draw the scores of the trials, and the importance of the values."""
        scores, best = [], []
        for trial in self.trials.tried():
            if trial.state == "complete" and trial.score is not None:
                scores.append((trial.number, trial.score))
                so_far = min((self.trials.sign * score for _, score in scores))
                best.append((float(trial.number), self.trials.sign * so_far))
        plots.search_history(scores, best, self.monitor, self.folder / HISTORY)
        if importance:
            plots.importance_bars(importance, self.folder / IMPORTANCE)

    def write(self, **outcome: Any) -> None:
        """Write `search.json`."""
        trials = [vars(trial) for trial in self.trials.tried()]
        score = {"monitor": self.monitor, "higher_is_better": self.trials.sign < 0}
        facts = finite({**self.about, **score, "wanted": self.wanted, **outcome, "trials": trials})
        write_text(self.folder / FILE, json.dumps(facts, indent=1, default=str) + "\n")
        if is_wanted():
            self.lay_out(ended=bool(outcome))

    def lay_out(self, *, ended: bool) -> None:
        """Write how the search stands, for `hotlap watch`; each trial does so in a folder of its own."""
        best, done = self.trials.best(), sum(trial.state != "running" for trial in self.trials.tried())
        state = {
            "pid": os.getpid(),
            "at": time.time(),
            "ended": ended,
            "kind": "search",
            "unit": "trials",
            "name": "search",
            "step": done,
            "steps": self.wanted,
            "left_s": None if self.limit is None else max(0.0, self.limit.left_s),
            "metrics": None if best is None else {self.monitor: best.score, "trial": best.number},
        }
        with suppress(OSError):  # a full disk, which an earlier write has reported
            write_live(self.folder, state)


def _words(values: Mapping[str, Any]) -> str:
    figures = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{name} {figure}" for name, figure in figures.items())
