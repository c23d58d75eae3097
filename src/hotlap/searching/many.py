"""`fit_many`: train many jobs, as many at once as pay, and give their Runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotlap.core.console import Console, open_console
from hotlap.core.errors import JobError, StoreError, TrainingError, shown
from hotlap.core.job import Job
from hotlap.core.plan import Plan
from hotlap.core.units import show_seconds
from hotlap.data.order import mix, seed_all
from hotlap.engine.snapshot import Randomness
from hotlap.fitting.fit import AnotherTrainingError, ended_run, fit
from hotlap.fitting.run import Run
from hotlap.fitting.task import TUNED, Found
from hotlap.fitting.tuning import was_tuned
from hotlap.machine.device import choose_device
from hotlap.searching.at_once import Chosen, checked
from hotlap.searching.processes import failure
from hotlap.searching.trainings import Ended, Trainings
from hotlap.store.run_folder import RunFolder, RunLock

JobOrMaker = Job | Callable[[], Job]


def fit_many(
    jobs: Iterable[JobOrMaker],
    *,
    at_once: int | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    save_every: int | None = None,
    progress: bool = True,
    on_evaluation: Callable[[int, dict[str, Any]], object] | None = None,
) -> list[Run]:
    """Train many jobs, such as folds or seeds, and give their Runs in the order of the jobs.

    Args:
        jobs: Each a Job with a model of its own, or a function that makes one. A function is called when its turn
            comes, after hotlap has seeded torch, numpy and Python, and once more at the end for its model.
        at_once: Jobs that train at once: in processes on the CPU, in turns on a GPU. None: as many as hotlap measures
            to be fastest, once the first job has ended.
        plan: As for `fit`. With "auto" each job begins with the plan that the first one found.
        out: A new or empty folder, in which each job gets a folder. None: a new one under `runs/`.
        resume: The folder of an earlier call with the same jobs. Jobs that have ended are read; others go on.
        save_every: Updates between checkpoints of a job, as for `fit`.
        progress: Show progress on stderr.
        on_evaluation: Called with the number of a job, from 0 on, and the figures of each of its evaluations. A text
            that it returns ends the training of that job.

    Each job's numbers are those that it has alone on as many threads. Where other processes train, an optimizer that is
    given as an object keeps no state. A job that fails ends no other: TrainingError names it once all have ended.
    """
    given, wanted = list(jobs), checked(at_once)
    _check(given)
    if resume is not None and out is not None and Path(out).resolve() != Path(resume).resolve():
        raise StoreError(f"both out={str(out)!r} and resume={str(resume)!r} are given; a resumed call keeps its folder")
    folder = RunFolder.create(out, "many").path if resume is None else Path(resume)
    if resume is not None and not folder.is_dir():
        raise StoreError(f"resume={str(resume)!r} is not a folder; name that of an earlier call of fit_many")
    lock, console, randomness = RunLock(folder), open_console(progress), Randomness(choose_device("auto"))
    try:
        trainings = Trainings(wanted, console)
        many = _Many(given, folder, trainings, plan, save_every, on_evaluation, console)
        return many.runs()
    except (KeyboardInterrupt, SystemExit):
        console.say(f"stopped; go on with: hotlap.fit_many(…, resume={str(folder)!r})")
        raise
    finally:
        randomness.restore()
        console.close()
        lock.release()


def _check(jobs: Sequence[Any]) -> None:
    """Refuse what is no job, and jobs that share a model."""
    if not jobs:
        raise JobError(["fit_many needs at least one job"])
    for number, job in enumerate(jobs):
        if not isinstance(job, Job) and not callable(job):
            raise JobError([f"job {number + 1} is {shown(job)}; give a Job, or a function that makes one"])
    owners: dict[int, int] = {}
    for number, job in enumerate(jobs):
        if isinstance(job, Job) and (owner := owners.setdefault(id(job.model), number)) != number:
            raise JobError([f"jobs {owner + 1} and {number + 1} share their model; give each its own"])


class _Many:
    """One call of `fit_many`."""

    def __init__(
        self,
        jobs: Sequence[JobOrMaker],
        folder: Path,
        trainings: Trainings,
        plan: Chosen,
        save_every: int | None,
        on_evaluation: Callable[[int, dict[str, Any]], object] | None,
        console: Console,
    ) -> None:
        self._jobs, self._folder, self._trainings, self._console = jobs, folder, trainings, console
        self._plan, self._save_every, self._on_evaluation = plan, save_every, on_evaluation
        self._failed: dict[int, Exception] = {}

    def runs(self) -> list[Run]:
        """Train all jobs; their Runs."""
        here: dict[int, Run] = {}
        numbers = range(len(self._jobs))
        for job, ended in self._trainings.run(numbers, self._job, self._train, self._on_evaluation):
            self._say(ended)
            if isinstance(ended.error, AnotherTrainingError):
                raise ended.error
            if ended.error is not None:
                self._failed[ended.number] = ended.error
            if isinstance(ended.run, Run):
                here[ended.number] = ended.run
            if isinstance(ended.run, Run) and job is not None:
                self._learn(job, ended.run, left=len(self._jobs) - ended.number - 1)
        if len(self._trainings.ledger):
            RunFolder(self._folder).write_ledger(self._trainings.ledger)
        if self._failed:
            number, error = min(self._failed.items())
            others = f" and {len(self._failed) - 1} more" if len(self._failed) > 1 else ""
            raise TrainingError(
                f"job {number + 1} of {len(self._jobs)} failed{others}: {failure(error)}; "
                f"the others have ended in {self._folder}"
            ) from error
        return [here[at] if at in here else ended_run(self._job(at), self._run_folder(at)) for at in numbers]

    def _job(self, number: int) -> Job:
        job = self._jobs[number]
        if isinstance(job, Job):
            return job
        seed_all(mix(0, number))
        made = job()
        if not isinstance(made, Job):
            raise JobError([f"the function of job {number + 1} gave {shown(made)}, and no Job"])
        return made

    def _train(self, number: int, job: Job, judge: Any) -> Run:
        folder = self._run_folder(number)
        is_begun = (folder / "plan.toml").is_file()
        return fit(
            job,
            plan=self._plan,
            out=None if is_begun else folder,
            resume=folder if is_begun else None,
            save_every=self._save_every,
            repeats=max(1, len(self._jobs) - number),
            progress=False,
            on_evaluation=judge,
        )

    def _run_folder(self, number: int) -> Path:
        return self._folder / f"{number:04d}"

    def _learn(self, job: Job, run: Run, *, left: int) -> None:
        """Take from a training what those to come can use: its plan, and how many at once are fastest."""
        if self._plan in (None, TUNED) and was_tuned(run.ledger):
            self._plan = Found(plan=run.plan, ledger=run.ledger, updates=run.steps)
        self._trainings.decide(job, self._plan, each_s=run.total_s, steps=run.steps, left=left)

    def _say(self, ended: Ended) -> None:
        what = ended.stopped if ended.error is None else failure(ended.error)
        shown_best = {name: score for name, score in ended.best.items() if name.startswith("valid_")}
        scores = "".join(f" · {name} {score:.4g}" for name, score in shown_best.items())
        took = show_seconds(ended.seconds)
        self._console.say(f"job {ended.number + 1}/{len(self._jobs)}{scores} · {what} · {took}")
