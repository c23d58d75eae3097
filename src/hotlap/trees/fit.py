"""`fit`: from a TreeJob to a trained model and its run folder."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hotlap import __version__, machine
from hotlap.core.console import Console, open_console
from hotlap.core.errors import JobError, PlanError, StoreError, library, shown
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.units import show_seconds
from hotlap.fitting.deadline import TimeLimit
from hotlap.fitting.fit import next_call
from hotlap.fitting.metric_logs import MetricLogs, Names, logs_named
from hotlap.fitting.record import asked_by_command, note_gone_on, resume_words, start_record
from hotlap.fitting.run import FinishedRun
from hotlap.guard.signals import StopRequest
from hotlap.machine.session_end import session_end
from hotlap.monitor.sampler import Sampler, is_wanted
from hotlap.store.cache import Cache, store_model, stored_model
from hotlap.store.keys import key_of
from hotlap.store.run_folder import RunFolder, RunLock
from hotlap.trees.choosing import Choice
from hotlap.trees.data import Array
from hotlap.trees.files import content_of
from hotlap.trees.growing import Grown, Watch
from hotlap.trees.job import TreeJob, TreePlan
from hotlap.trees.libraries import can_join, check_obeyed, hold
from hotlap.trees.live import LiveTrees
from hotlap.trees.model import (
    BOOSTERS,
    ModelRecord,
    TreeModel,
    load,
    read_record,
    record_of,
    settings_of,
    write_record,
)
from hotlap.trees.parameters import EXTRA, NEEDS, device_of
from hotlap.trees.saving import Saver, read_left

AUTO, OFF = "auto", "off"
CLOSING, CLOSING_S, BOOSTER_S = 0.03, 0.2, 0.005
"""What the end of a training takes of its time at most: a part of it, seconds, and seconds for each target."""


@dataclass(frozen=True, kw_only=True)
class TreeRun(FinishedRun):
    """A finished training of trees.

    Where there is `valid`, `history` has the score of each round, averaged over targets. `best` has the rounds that the
    model keeps (a list for several targets) and its score.
    """

    model: TreeModel
    """The trained model; under `patience` each target has its trees up to its best round."""
    plan: TreePlan
    """The plan at the end."""

    def predict(self, x: Any) -> Array:
        """The answers of the model."""
        return self.model.predict(x)

    def _counts(self) -> dict[str, Any]:
        return {"plan": asdict(self.plan)}

    def _trained(self) -> list[str]:
        record = self.model.record
        rounds = sum(file.rounds * file.targets for file in record.boosters)
        what = f"{targets_of(record.targets)} with {record.library}, {rounds:,} rounds kept"
        return [f"plan      {self.plan}", f"trained   {what}, in {show_seconds(self.train_s)}"]

    def _score(self) -> str:
        return " · ".join(f"{name} {value:.4g}" for name, value in self.best.items() if name != "round")


def fit(
    job: TreeJob,
    *,
    plan: TreePlan | Mapping[str, Any] | str | Path | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    reuse: bool = False,
    finish_in: float | str | TimeLimit | None = None,
    progress: bool = True,
    log: Names = None,
    started_by: Sequence[str] | None = None,
) -> TreeRun:
    """Train the boosters of a job, write the run folder, and return the TreeRun.

    Args:
        plan: How to train; it changes time and never the trees. None or "auto": hotlap times CPU or GPU, threads, and
            boosters at once on the training itself. "off": all cores for one booster after the other. A TreePlan, or a
            dict of its choices, is used as it is. The folder of a run gives the plan that was found there.
        out: A new or empty folder for the run. None: a new one under `runs/`.
        resume: The folder of a run to go on with: with its plan unless `plan` is given, and to the same trees as if it
            had never been interrupted. Boosters that were done stay, and saved ones grow on. Nothing is trained where
            it had ended. hotlap refuses other data or settings, and lists them.
        reuse: Load the model from the cache if the same data and settings were trained before, and keep it there
            otherwise.
        finish_in: End in this time, files included: seconds, or a text such as "15m". Where it is short, each target
            gets an even share and stops when that is over; `left_out` says so. Each target gets one round at least.
        progress: Show progress on stderr.
        log: Where the score of each round goes at the end, as for `hotlap.fit`.
        started_by: Words that start this training again from a shell.

    SIGINT and SIGTERM end the training after the current round, by KeyboardInterrupt or exit code 143. The folder
    keeps what was trained; it is a model if every target has trees.

    Raises:
        HotlapError: The job, the plan, the machine or a folder cannot be used as asked.
    """
    if not isinstance(job, TreeJob):
        raise JobError([f"fit takes one TreeJob, not {type(job).__name__}: trees.fit(trees.TreeJob(x, y))"])
    is_wanted()  # a mistake in the variable must show now
    logs = logs_named(log)
    start_s, call = time.perf_counter(), next_call()
    limit = None if finish_in is None else TimeLimit.of(finish_in)
    resume = asked_by_command(call) if resume is None else resume
    if resume is not None and out is not None and Path(out).resolve() != Path(resume).resolve():
        raise StoreError(f"both out={str(out)!r} and resume={str(resume)!r} are given; a resumed run keeps its folder")
    folder = None if resume is None else RunFolder.open(resume)
    left = None if folder is None else read_left(folder, job)
    plan = plan if plan is not None else AUTO if left is None else left.plan
    chosen, device = _chosen_plan(plan, job), _device(job, plan)
    cached = _Cached(job, chosen.device) if reuse else None
    console = open_console(progress)
    folder = folder or RunFolder.create(out, job.library)
    lock = RunLock(folder.path)
    training = Training(job, Saver(folder, job, left), chosen, console, start_s, limit, logs)
    try:
        return training.run(start_record(call, started_by), cached, tunes=plan == AUTO, gpu=device == "auto")
    finally:
        console.close()
        lock.release()


def _chosen_plan(plan: TreePlan | Mapping[str, Any] | str | Path, job: TreeJob) -> TreePlan:
    """The plan to begin with."""
    asked = device_of(job.params)
    base = TreePlan(threads=machine.detect().cpu.cores, device=asked if asked and asked != "gpu" else "cpu")
    if isinstance(plan, TreePlan):
        chosen = plan
    elif isinstance(plan, Mapping):
        chosen = TreePlan.from_dict(plan, base)
    elif plan in (AUTO, OFF):
        return base
    elif isinstance(plan, (str, Path)) and Path(plan).is_dir():
        chosen = TreePlan.from_dict(read_record(Path(plan)).plan)
    else:
        raise PlanError(f"unknown plan {shown(plan)}: use auto, off, a TreePlan, a dict of its choices or a run folder")
    if asked is not None and chosen.device != base.device:
        raise PlanError(f"the plan names device={chosen.device!r} and the parameters {asked!r}; name one")
    if chosen.joint and not can_join(job):
        raise PlanError("joint=True would change the trees: it needs XGBoost, regression, several targets, no valid "
                        "and no sampling of rows or columns")  # fmt: skip
    return chosen


def _device(job: TreeJob, plan: object) -> str:
    """`auto` where a GPU works and may be tried; raises MachineError where one was asked for and none works."""
    asked = device_of(job.params)
    if asked is not None and str(asked).startswith("cuda") and job.library == "xgboost":
        machine.choose_device(asked, require_gpu=True)
    if asked is not None or job.library != "xgboost" or plan != AUTO:
        return "fixed"
    built = library("xgboost", NEEDS, EXTRA).build_info().get("USE_CUDA", False)
    return "auto" if built and machine.choose_device().type == "cuda" else "cpu"


class Training:
    """One training in its run folder."""

    def __init__(
        self, job: TreeJob, saver: Saver, plan: TreePlan, console: Console, start_s: float, limit: TimeLimit | None,
        logs: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._job, self._saver, self._folder, self._plan, self._console = job, saver, saver.folder, plan, console
        self._start_s, self._limit, self._ledger, self._logs = start_s, limit, Ledger(), logs
        self._lock, self._shown_s, self._session_end = threading.Lock(), -math.inf, session_end()

    def run(self, started: dict[str, Any], cached: _Cached | None, *, tunes: bool, gpu: bool) -> TreeRun:
        """The run as it had ended, or of a model in the cache, or trained."""
        if self._saver.is_resumed:
            note_gone_on(self._folder.path)
            if (ended := self.as_it_ended()) is not None:
                return ended
        self.begin(started, tunes=tunes)
        if cached is not None and (found := cached.load()) is not None:
            return self.from_cache(*found)
        run = self.train(tunes=tunes, gpu=gpu)
        if cached is not None and not run.left_out:
            cached.store(run)
        return run

    def begin(self, started: dict[str, Any], *, tunes: bool) -> None:
        """Write what the training begins with, or goes on with, and say it."""
        job, folder, left = self._job, self._folder, self._saver.left
        if self._saver.is_resumed:
            self._ledger = folder.read_ledger()
            done, saved = len(left.grown), len(left.begun)
            what = f"resumed with {done:,} boosters that were done and {saved:,} that grow on"
            self._ledger.record(Entry(step=self._ledger.last_step, what=what, outcome="chosen", plan=Plan()))
            self._console.say(f"{folder.path} is {what}")
        else:
            folder.write_started(started)
            folder.write_environment({**machine.environment(), "job": settings_of(job)})
        self._saver.note(plan=asdict(self._plan), tunes=tunes, ended=None)
        folder.write_ledger(self._ledger)
        folder.write_plan(Plan())  # the last one: with it the folder is a run's
        (rows, columns), version = job.x.shape, library(job.library, NEEDS, EXTRA).__version__
        say = self._console.say
        say(f"hotlap {__version__}, {job.library} {version}")
        say(f"data   {rows:,} rows × {columns:,} columns, {targets_of(job.targets)}, {job.rounds:,} rounds")
        say(f"plan   {self._plan}")
        say(f"run    {folder.path}")
        if self._session_end is not None:
            say(f"session  {self._session_end.line}; rounds that are grown by then are saved before")

    def train(self, *, tunes: bool, gpu: bool) -> TreeRun:
        """Train to the end, or to a signal."""
        job, saver = self._job, self._saver
        with StopRequest(self._session_end) as stop:
            watch = Watch(stop, self._show, self._until_s(), saver)
            choice = Choice(job, hold(job, self._plan), self._plan, self._ledger, watch, saver)
            live = LiveTrees(job, self._folder.path, watch, lambda: choice.plan, self._ledger)
            with Sampler(self._folder.path, live.read, live.state):
                if choice.left and tunes:
                    choice.find(machine.detect().cpu.cores, gpu=gpu)
                elif choice.left:
                    choice.fix()
                self._plan = choice.plan
                saver.note(plan=asdict(self._plan), tunes=tunes and not choice.is_found, ran=choice.ran)
                check_obeyed(job, choice.plan, choice.ran)
                grown = choice.finish()
                live.stopped = "on a signal" if stop.signal is not None else self._why_ended(grown)
            train_s = saver.train_s
            record = record_of(job, self._plan, grown, choice.ran)
            contents = [booster.content for booster in grown]
            is_model = sum(file.targets for file in record.boosters) == job.targets
            self._write(record, contents, is_model=is_model)
        if not is_model or stop.signal is not None:
            self._console.say(_stop_line(self._folder, stop.reason, is_model=is_model))
            stop.obey()
        model = TreeModel(record, contents, trusted=not saver.is_resumed)
        return self._ended(model, grown_history(grown), train_s, self._why_ended(grown), _left_out(grown, job))

    def from_cache(self, record: ModelRecord, contents: list[bytes], values: dict[str, Any]) -> TreeRun:
        """The run of a model that was trained before."""
        self._plan = TreePlan.from_dict(record.plan)
        self._ledger.record(Entry(step=0, what="cache", outcome="chosen", plan=Plan(), why="trained before"))
        self._write(record, contents, is_model=True)
        self._console.say(f"cache  trained before in {show_seconds(values['train_s'])}; loaded")
        model = TreeModel(record, contents, trusted=True)
        return self._ended(model, values["history"], values["train_s"], "loaded from the cache")

    def as_it_ended(self) -> TreeRun | None:
        """The run of a folder whose training had ended; None where it had not, or where files have changed since."""
        if (ended := self._saver.left.ended) is None:
            return None
        try:
            model = load(self._folder.path)
            self._plan, self._ledger = TreePlan.from_dict(model.record.plan), self._folder.read_ledger()
            history = self._folder.read_metrics()
        except StoreError as error:
            self._console.say(f"{self._folder.path} had ended, but {error}; what is missing is trained again")
            return None
        self._console.say(f"{self._folder.path} had ended {ended.stopped}: nothing is left to train")
        return self._as_run(model, history, ended.train_s, ended.total_s, ended.stopped, ())

    def _ended(
        self, model: TreeModel, history: list[dict[str, Any]], train_s: float, stopped: str,
        left_out: tuple[str, ...] = (),
    ) -> TreeRun:  # fmt: skip
        self._folder.write_metrics(history)
        logs = MetricLogs(self._logs, self._folder.path, settings_of(self._job), self._console.say)
        for record in history:
            logs.add({"step": record["round"], **record})
        logs.close()
        total_s = time.perf_counter() - self._start_s
        if not left_out:
            self._saver.tidy([file.name for file in model.record.boosters])
            self._saver.note(ended={"stopped": stopped, "train_s": train_s, "total_s": total_s})
        self._folder.write_artefacts()
        return self._as_run(model, history, train_s, time.perf_counter() - self._start_s, stopped, left_out)

    def _as_run(
        self, model: TreeModel, history: list[dict[str, Any]], train_s: float, total_s: float, stopped: str,
        left_out: tuple[str, ...],
    ) -> TreeRun:  # fmt: skip
        rounds = [file.rounds for file in model.record.boosters]
        score = {name: value for name, value in history[-1].items() if name != "round"} if history else {}
        return TreeRun(
            model=model,
            plan=self._plan,
            ledger=self._ledger,
            history=history,
            best={"round": rounds[0] if len(rounds) == 1 else rounds, **score},
            train_s=train_s,
            total_s=total_s,
            stopped=stopped,
            left_out=left_out,
            files=self._folder,
        )

    def _write(self, record: ModelRecord, contents: list[bytes], *, is_model: bool) -> None:
        """Write boosters and ledger, then `trees.json` if they are a model."""
        for file, content in zip(record.boosters, contents, strict=True):
            self._saver.write(file.name, content)
        self._folder.write_ledger(self._ledger)
        if is_model:
            write_record(self._folder.path, record)

    def _until_s(self) -> float:
        """When the last round has to be over: the files come after it."""
        if self._limit is None:
            return math.inf
        closing_s = min(CLOSING * self._limit.all_s, CLOSING_S + BOOSTER_S * self._job.targets)
        return self._limit.until_s - closing_s

    def _why_ended(self, grown: list[Grown]) -> str:
        if any(not booster.whole for booster in grown):
            return f"finish_in={self._limit} left no more time"
        early = sum(booster.rounds < self._job.rounds for booster in grown)
        if not early:
            return "all rounds"
        return "early, by patience" if len(grown) == 1 else f"{early:,} of {len(grown):,} targets early, by patience"

    def _show(self, rounds: int) -> None:
        """Show progress, seldom enough to cost nothing."""
        now = time.perf_counter()
        if now - self._shown_s < self._console.every_s:
            return
        with self._lock:
            self._shown_s = now
            total = self._job.rounds * self._job.targets
            self._console.show(min(rounds, total), total, lambda width: f"{min(rounds, total):,} of {total:,} rounds")


def targets_of(count: int) -> str:
    """How many targets there are, in words."""
    return f"{count:,} target{'s' if count > 1 else ''}"


def grown_history(grown: list[Grown]) -> list[dict[str, Any]]:
    """A record a round: the score averaged over targets. A target that has ended counts with its best round."""
    if not all(booster.scores for booster in grown):
        return []
    name, length = f"valid_{grown[0].scores[0].metric}", max(booster.rounds for booster in grown)
    curves = np.empty((len(grown), length))
    for curve, booster in zip(curves, grown, strict=True):
        values = [score.value for score in booster.scores]
        curve[: len(values)] = values
        curve[len(values) :] = values[booster.best_round - 1]
    return [{"round": number, name: mean} for number, mean in enumerate(curves.mean(0).tolist(), 1)]


def _left_out(grown: list[Grown], job: TreeJob) -> tuple[str, ...]:
    cut = [booster.rounds for booster in grown if not booster.whole]
    least_to_most = f"{min(cut, default=0):,} to {max(cut, default=0):,} of {job.rounds:,} rounds"
    return (f"{len(cut):,} of {len(grown):,} boosters stopped after {least_to_most}",) if cut else ()


def _stop_line(folder: RunFolder, reason: str, *, is_model: bool) -> str:
    path = folder.path
    left = f"{path} has the model as far as it was trained"
    if not is_model:
        left = f"{path / BOOSTERS} has the boosters that were trained, not one for each target"
    return f"stopped by {reason or 'a signal'}; {left}; go on with: {resume_words(folder)}"


class _Cached:
    """The place in the cache of the model that a job comes to."""

    def __init__(self, job: TreeJob, device: str) -> None:
        self._cache = Cache()
        versions = [__version__, library(job.library, NEEDS, EXTRA).__version__, np.__version__]
        valid = job.valid and (content_of(job.valid[0]), job.valid[1])
        data = [content_of(job.x), job.y, valid, job.weight, list(map(list, job.classes))]
        whole = {**settings_of(job), "params": dict(job.params)}
        bins = job.shared and [job.shared.whole.x, job.shared.params, job.shared.numbers]
        self._key = key_of("trees", versions, whole, data, bins, job.one_target, device)

    def load(self) -> tuple[ModelRecord, list[bytes], dict[str, Any]] | None:
        """Record, boosters and figures, or None."""
        found = stored_model(self._cache, self._key)
        if found is None:
            return None
        tensors, values = found
        record = ModelRecord.from_dict(values["record"])
        return record, [tensors[file.name].numpy().tobytes() for file in record.boosters], values

    def store(self, run: TreeRun) -> None:
        """Keep a trained model."""
        record, folder = run.model.record, run.folder / BOOSTERS
        contents = {file.name: bytearray((folder / file.name).read_bytes()) for file in record.boosters}
        tensors = {name: torch.frombuffer(content, dtype=torch.uint8) for name, content in contents.items()}
        values = {"record": asdict(record), "history": run.history, "train_s": run.train_s}
        store_model(self._cache, self._key, tensors, values, {"model": record.library})
