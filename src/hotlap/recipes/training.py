"""Run a recipe: train each model, judge it on the held-out rows, keep the best, and write everything down."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap import plots
from hotlap.core.console import open_console
from hotlap.core.errors import DataError, DivergedError, HotlapError, PlanError, StoreError, UsageError, shown
from hotlap.core.job import Job
from hotlap.core.table import table as tuning_table
from hotlap.core.units import show_seconds
from hotlap.fitting.deadline import TimeLimit
from hotlap.fitting.fit import AnotherTrainingError, ended_run, fit
from hotlap.fitting.metric_logs import logs_named
from hotlap.fitting.run import Run
from hotlap.fitting.task import EVERYTHING, OFF, TUNED
from hotlap.machine.device import choose_device
from hotlap.recipes import onnx_files, recipe_named
from hotlap.recipes.answers import FORMAT, MODEL, STATE, answer, answers_of, command_of, revived
from hotlap.recipes.options import OPTIONS, Options, as_file, exists, is_file, options_of, recipe_in
from hotlap.recipes.profiles import Known, expected_line
from hotlap.recipes.recipe import Candidate, Fold, Numbers, OwnCandidate, Prepared, Reader, Say, Trained, Trainer
from hotlap.recipes.scores import Judge, Report, Threshold, check_installed, judge_for, report_lines
from hotlap.recipes.tabular import TabularRecipe
from hotlap.recipes.time_plan import Phases, TimePlan
from hotlap.report import write_report as write_page
from hotlap.report.rendering import PAGE
from hotlap.searching.search import FILE as SEARCH
from hotlap.searching.search import search
from hotlap.searching.trainings import Ended, Trainings
from hotlap.searching.trials import optuna_or_why_not
from hotlap.store.files import finite, write_text
from hotlap.store.run_folder import RunFolder
from hotlap.store.weights import plain_state, save_state

REPORT, CURVES, CONFUSION = "report.json", "curves.svg", "confusion.svg"
PREDICTIONS = "predictions.csv"
"""Answers for `--test`."""
PLAN = "plan.toml"
"""In the folder of a training that was begun."""
GOES_ON = ("epochs", "patience", "device", "test", "finish_in", "trials", "log")
"""Options that may differ where a run goes on."""
Recipe = type[TabularRecipe]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A trained model, and its scores on the held-out rows."""

    name: str
    weights: dict[str, Tensor]
    answers: Numbers
    """Its probabilities, or its numbers."""
    threshold: Threshold | None
    report: dict[str, Any]
    history: list[dict[str, Any]]
    train_s: float
    was_kept: bool
    """Whether the model comes from the cache."""
    bytes_left: int
    """Bytes of the device's memory that stay taken after the model is freed."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What the report says of it beside its scores."""

    @property
    def as_trained(self) -> Trained:
        """As models that train themselves see it."""
        return Trained(weights=self.weights, answers=self.answers, train_s=self.train_s, was_kept=self.was_kept)


def train(
    recipe: Recipe,
    options: Options,
    *,
    out: Path | None,
    retrain: bool,
    say: Say,
    progress: bool,
    used_s: float = 0.0,
) -> Path:
    """Train a recipe's models on its data, keep the best, and give the folder with all that was found.

    `used_s` of the time that `finish_in` gives is over already.
    """
    plan = TimePlan(TimeLimit.of(options.finish_in, used_s=used_s) if options.finish_in else None, start_s=used_s)
    if not options.data:
        raise UsageError(f"no data is named; give --data FILE ({recipe.expects})")
    _check_names(recipe, options, out)
    choose_device(options.device)
    check_installed()
    logs_named(options.log)  # a missing package must show before the training
    if getattr(options, "onnx", False):
        onnx_files.libraries()  # a missing package must show before the training
        plan.expect_onnx()
    if options.trials:
        optuna_or_why_not()
    phases = Phases(used_s)
    with phases.of("data and features"):
        prepared = recipe.prepare(options, phases.listening(say))
    if options.trials and not prepared.space:
        raise UsageError(f"trials={options.trials}: {recipe.name} has no values to try; leave it out")
    if options.test:
        # A mistake in it must show now, not after the training.
        plan.expect_test(partial(_read_test, options.test, prepared.reader, say), held=len(prepared.target))
    known = Known(recipe=recipe.name, target=prepared.target_name, truth=prepared.target)
    if options.profile:
        for line in known.lines():
            say(line)
        if plan.limit is None:
            say(expected_line(prepared, options.profile, trials=options.trials))
    folder = _folder(recipe, options, out, say)
    run = _Training(
        recipe=recipe,
        options=options,
        prepared=prepared,
        folder=folder,
        retrain=retrain,
        say=say,
        progress=progress,
        time=plan,
        known=known,
        phases=phases,
    )
    try:
        run.train()
    except (KeyboardInterrupt, SystemExit):
        say(f"stopped   go on with: {shlex.join(command_of(folder))}")
        raise
    return folder


def _read_test(path: str, reader: Reader, say: Say) -> int:
    """Read the table to predict as its answers will; its rows."""
    table = reader.table(Path(path))
    say(f"test      {path}: {len(table):,} rows")
    reader.asked(table, say)
    return len(table)


def resume(folder: Path, given: Mapping[str, Any], *, retrain: bool = False, say: Say, progress: bool) -> Path:
    """Go on with a recipe's run under its own options, but for those `given`, such as more epochs."""
    file = folder / OPTIONS
    recipe = recipe_named(recipe_in(file) or "")
    options = options_of(recipe.options_type, file, given)
    return train(recipe, options, out=folder, retrain=retrain, say=say, progress=progress)


def _check_names(recipe: Recipe, options: Options, out: Path | None) -> None:
    """Refuse files that are missing and folders that are taken, before anything is read."""
    plan = Path(options.plan)
    if options.plan not in (TUNED, EVERYTHING, OFF) and not exists(plan):
        raise PlanError(f"unknown plan {shown(options.plan)}: use auto, off, max, a plan file or a run folder")
    if is_file(plan / OPTIONS):
        models = ", ".join(sorted(str(one) for one in plan.glob("models/*")))
        raise PlanError(f"plan={options.plan} is a recipe's run; name one of its models: {models}")
    for name in ("valid", "test"):
        path = getattr(options, name)
        if path and not exists(path):
            raise DataError(f"{name}={path} does not exist; check the name and the folder")
    RunFolder.check(out)
    if out is not None and out.is_dir() and any(out.iterdir()):
        _refuse_other_training(recipe, options, out)


def _refuse_other_training(recipe: Recipe, options: Options, folder: Path) -> None:
    """Refuse to go on in a folder that holds something else, another training, or one that has nothing left to do."""
    file = folder / OPTIONS
    if not file.is_file() or recipe_in(file) != recipe.name:
        raise StoreError(f"{folder} holds files already; name a new folder with --out")
    begun = options_of(recipe.options_type, file, {})
    pairs = [(one.name, getattr(begun, one.name), getattr(options, one.name)) for one in fields(begun)]
    other = [
        f"{name}={shown(now)}, it had {shown(had)}" for name, had, now in pairs if had != now and name not in GOES_ON
    ]
    if other:
        raise StoreError(f"{folder} was trained otherwise: {'; '.join(other)}; name a new folder with --out")
    is_more = options.finish_in != begun.finish_in or options.trials > begun.trials > 0
    if (folder / STATE).exists() and not is_more and (not options.epochs or options.epochs <= begun.epochs):
        had = f"{begun.epochs}" if begun.epochs else "those of the recipe"
        raise StoreError(
            f"{folder} is finished after its epochs ({had}); to go on name more: "
            f"{shlex.join(['hotlap', 'resume', str(folder)])} --epochs N"
        )


def _folder(recipe: Recipe, options: Options, out: Path | None, say: Say) -> Path:
    """A new folder, or that in which this training was begun."""
    if out is not None and (out / OPTIONS).is_file():
        say(f"run       {out} was begun before: it goes on")
        folder = out
        # Until the longer training is done, the folder is that of an interrupted one.
        for name in (STATE, PREDICTIONS, PAGE, onnx_files.NAME):
            (folder / name).unlink(missing_ok=True)
    else:
        folder = RunFolder.create(out, recipe.name).path
    write_text(folder / OPTIONS, as_file(recipe.name, options))
    return folder


@dataclass(frozen=True, kw_only=True)
class _Training:
    """One call of `train`: the recipe with its data, and how to train."""

    recipe: Recipe
    options: Options
    prepared: Prepared
    folder: Path
    retrain: bool
    say: Say
    progress: bool
    time: TimePlan
    known: Known
    phases: Phases

    @cached_property
    def judge(self) -> Judge:
        """Scores answers."""
        return judge_for(self.prepared.reader)

    def train(self) -> None:
        """Train all models, compare them with the baselines, and write down the best and its answers."""
        options, prepared, folder, say = self.options, self.prepared, self.folder, self.say
        # With a deadline they come first: what they take is then known.
        rules = self.rule_reports() if self.time.limit is not None else {}
        found = self.train_models()
        best = max(found, key=lambda one: self.judge.score(one.report))
        rules = rules or self.rule_reports()
        beaten_by = _beaten_by(found, rules, self.judge)
        for line in _compared(found, rules, prepared):
            say(line)
        with self.phases.of("folds"):
            folds = self.train_folds(best)
        report = self.report(found, best, rules, folds)
        with self.phases.of("files"):
            self.write(found, best, report, beaten_by)
        if self.time.limit is None:
            self.finish(best.name)
        for line in report_lines(best.report):
            say(line)
        if options.test:
            out = folder / PREDICTIONS
            with self.phases.of("predictions"):
                answered = answer(folder, Path(options.test), out, say=say, device=options.device, was_shown=True)
            say(f"predictions of {options.test} in {out}: {answered.line}")
        if self.time.limit is not None:
            self.finish(best.name)
        if beaten_by:
            names, advice = " and ".join(beaten_by), f"; {prepared.advice}" if prepared.advice else ""
            say(f"warning   {best.name} gives the answers of this run, though {names} did at least as well{advice}")
        if not (options.epochs or options.trials or self.time.left_out):
            scores = {head: _figure(best.report[score]) for head, score in self.judge.columns}
            self.known.keep(options.profile or "balanced", scores, sum(one.train_s for one in found), folder)
        self.write_page(report)
        files = [name for name in (PAGE, REPORT, CURVES, CONFUSION) if (folder / name).is_file()]
        for line in self.time.lines():
            say(line)
        say(f"run       {folder} ({', '.join(files)}); predict with: hotlap predict {folder} --data FILE --out FILE")

    def rule_reports(self) -> dict[str, Report]:
        """The scores of the baselines."""
        target = self.prepared.target
        with self.phases.of("simple rules"):
            rules = self.prepared.baselines().items()
            return {name: self.judge.rule_report(target, answers) for name, answers in rules}

    def finish(self, best: str) -> None:
        """What the recipe does with the best model at the end, such as writing it as ONNX."""
        if self.prepared.finish is None:
            return
        if self.time.has_time_for_onnx():
            self.prepared.finish(best, revived(self.folder)[2], self.folder, self.say)
        else:
            self.time.left_out.append(onnx_files.NAME)

    def train_models(self) -> list[Judged]:
        """All models, trained and judged; hotlap warns of one that diverges and leaves it out, unless all do."""
        found, diverged = list[Judged](), []
        networks = self.prepared.candidates
        if self.options.trials:
            self.time.begin_model(1 + sum(not one.is_quick for one in self.prepared.own))
            with self.phases.of("trials"):
                found.append(self.search())
            networks = ()
        own = sorted(self.prepared.own, key=lambda one: not one.comes_first)
        first = sum(one.comes_first for one in own)
        candidates: list[Candidate | OwnCandidate] = [*own[:first], *networks, *own[first:]]
        quick = [one for one in candidates if isinstance(one, OwnCandidate) and one.is_quick]
        slow = [one for one in candidates if one not in quick]
        fit = self.time.how_many(len(slow))
        self.time.left_out += [f"the model {candidate.name}" for candidate in slow[fit:]]
        for at, candidate in enumerate([*slow[:fit], *quick]):
            self.time.begin_model(max(1, fit - at))
            try:
                with self.phases.of(f"model {candidate.name}"):
                    if isinstance(candidate, OwnCandidate):
                        found.append(self.train_own(candidate, found))
                    else:
                        found.append(self.train_model(candidate))
            except DivergedError as error:
                diverged.append(error)
                if len(candidates) > 1:
                    self.say(f"warning   left out: {error}")
        if not found:
            raise diverged[0]
        return found

    def train_model(self, candidate: Candidate) -> Judged:
        """A model, trained and judged on the held-out rows."""
        return self.judged(candidate.name, self.fit(candidate.job(), self.folder / "models" / candidate.name))

    def judged(self, name: str, run: Run, **about: Any) -> Judged:
        """A trained network, judged on the held-out rows; `about` is what the report says of it beside its scores."""
        was_kept = "cache" in run.stopped
        for line in () if was_kept else (*tuning_table(run.ledger), f"plan   {run.plan}"):
            self.say(line)
        answers = self.held_out_answers(name, run, self.prepared.held_out)
        threshold = self.judge.threshold(answers, self.prepared.target)
        report = self.judge.report(self.prepared.target, answers, threshold)
        weights = plain_state(run.model)
        history, train_s = run.history, run.train_s
        del run
        return Judged(
            name=name,
            weights=weights,
            answers=answers,
            threshold=threshold,
            report=report,
            history=history,
            train_s=train_s,
            was_kept=was_kept,
            bytes_left=_bytes_left(),
            about=about,
        )

    def search(self) -> Judged:
        """The best of many trainings of the networks, each with other values; folds then use its values."""
        options, prepared, folder = self.options, self.prepared, self.folder / "search"
        jobs = {one.name: one.job for one in prepared.candidates}
        first = next(iter(jobs))
        space = {name: part for name, part in prepared.space.items() if name != "lr" or not options.lr}
        if len(jobs) > 1:
            space["model"] = list(jobs)

        def job_of(values: dict[str, Any]) -> Job:
            prepared.use({name: value for name, value in values.items() if name != "model"})
            return jobs[values.get("model", first)]()

        found = search(
            space,
            job_of,
            trials=options.trials,
            finish_in=self.time.share,
            out=folder,
            resume=folder if (folder / SEARCH).is_file() else None,
            plan=options.plan,
            seed=options.seed,
            progress=self.progress,
            log=options.log,
        )
        for line in found.summary().split("\n"):
            self.say(line)
        self.time.left_out += found.left_out
        assert isinstance(found.best, Run)
        values = dict(found.values)
        name = values.pop("model", first)
        prepared.use(values)
        return self.judged(name, found.best, values=values, importance=found.importance, trials=len(found.trials))

    def train_own(self, candidate: OwnCandidate, before: list[Judged]) -> Judged:
        """A model that trains itself, judged on the held-out rows, as those `before` it are."""
        trained = candidate.train(
            Trainer(
                fit=self.fit,
                folder=self.folder,
                reuse=not self.retrain,
                progress=self.progress,
                say=self.say,
                before={one.name: one.as_trained for one in before},
                limit=self.time.share,
                left_out=self.time.left_out,
            )
        )
        return Judged(
            name=candidate.name,
            weights=trained.weights,
            answers=trained.answers,
            threshold=None,
            report=self.judge.report(self.prepared.target, trained.answers, None),
            history=trained.history,
            train_s=trained.train_s,
            was_kept=trained.was_kept,
            bytes_left=_bytes_left(),
            about=trained.about,
        )

    def train_folds(self, best: Judged) -> dict[str, Report]:
        """The scores of the best model on other splits, by their names; as many at once as pay."""
        folds, found = list(self.prepared.folds(best.name)), dict[str, Report]()
        if not folds:
            return found
        console = open_console(self.progress)
        trainings = Trainings(None, console)
        if best.history:
            steps, left = best.history[-1]["step"], self.time.spare_s
            decide = partial(trainings.decide, plan=self.options.plan, each_s=best.train_s, steps=steps)
            decide(folds[0].job(), left=len(folds), left_s=left)

        def fitting() -> Iterator[int]:
            for number, fold in enumerate(folds):
                if self.time.begin_fold(best.train_s):
                    yield number
                else:
                    self.time.left_out.append(fold.name)

        def fit_fold(number: int, job: Job, judge: object) -> Run:
            return self.fit(job, self.fold_folder(folds[number]), quiet=trainings.at_once > 1)

        for _, ended in trainings.run(fitting(), lambda number: folds[number].job(), fit_fold):
            fold = folds[ended.number]
            try:
                report = self.fold_report(fold, ended)
            except DivergedError as error:
                self.say(f"warning   left out: {error}")
                continue
            figures = ", ".join(f"{head} {report[score]:.3f}" for head, score in self.judge.columns)
            self.say(f"{fold.name}: {figures} ({len(fold.target):,} samples)")
            found[fold.name] = report
            _bytes_left()
        console.close()
        if found:
            head, score = self.judge.columns[-1]
            of_all = [report[score] for report in found.values()]
            spread = f"from {min(of_all):.3f} to {max(of_all):.3f}"
            self.say(f"over {len(of_all)} folds {head} is {np.mean(of_all):.3f} on average, {spread}")
        return {fold.name: found[fold.name] for fold in folds if fold.name in found}

    def fold_folder(self, fold: Fold) -> Path:
        """The folder of a fold's training."""
        return self.folder / "folds" / fold.name

    def fold_report(self, fold: Fold, ended: Ended) -> Report:
        """The scores of a model that was trained on a fold; raises what its training raised."""
        if ended.error is not None:
            raise ended.error
        run = ended.run
        if not isinstance(run, Run):
            self.time.left_out += [f"{fold.name}: {line}" for line in ended.left_out]
            run = ended_run(fold.job(), self.fold_folder(fold))
        return self.judge.report(fold.target, self.held_out_answers(fold.name, run, fold.held_out), None)

    def fit(self, job: Job, out: Path, *, quiet: bool = False, share: float = 1.0) -> Run:
        """Train a job in its folder, or go on where it was interrupted there; `quiet` shows no progress.

        With a deadline it has this share of what is left of the model's time.
        """
        try:
            run = fit(
                job,
                plan=self.options.plan,
                out=out,
                resume=out if (out / PLAN).is_file() else None,
                reuse=not self.retrain,
                gpus=None if quiet else self.options.gpus_wanted,  # quiet ones train at once
                progress=self.progress and not quiet,
                started_by=command_of(self.folder),
                finish_in=None if self.time.share is None else self.time.share.part(share),
                log=self.options.log,
            )
        except DivergedError as error:
            raise self.diverged(out.name, str(error).partition("\n  try ")[0]) from None
        except AnotherTrainingError as error:
            raise StoreError(
                f"{error.what}; go on with the files and options that it had, or name another --out"
            ) from None
        self.time.left_out += [f"{out.name}: {line}" for line in run.left_out]
        for problem in () if self.progress and not quiet else run.problems:
            self.say(f"warning   {problem}")
        return run

    def held_out_answers(self, name: str, run: Run, held_out: Any) -> Numbers:
        """What a trained model answers for held-out data; DivergedError where answers are nan."""
        options, reader = self.options, self.prepared.reader
        size, device = options.judged_at_once, options.device
        answers = self.time.answered(lambda: answers_of(reader, run.model, held_out, batch_size=size, device=device))
        wrong = int((~np.isfinite(answers.reshape(len(answers), -1)).all(1)).sum())
        if wrong:
            raise self.diverged(name, f"its answers are nan for {wrong:,} of {len(answers):,} rows held out")
        return answers

    def diverged(self, name: str, why: str) -> DivergedError:
        """The error of a training that diverged, with what to do."""
        lr = self.options.lr
        lower = f"than {lr:g}, or without it" if lr else "than the recipe's own, as 1e-5"
        then = "\n  " if "\n" in why else "; "
        return DivergedError(f"the training of {name} diverged: {why}{then}train with a smaller --lr {lower}")

    def report(
        self, found: list[Judged], best: Judged, rules: dict[str, Report], folds: dict[str, Report]
    ) -> dict[str, Any]:
        """All scores, and what the time went to so far."""
        judge, target = self.judge, self.prepared.target
        return {
            "best": best.name,
            "judged_by": {"name": judge.judged_by, "higher": judge.higher},
            "models": {one.name: {**one.report, **_about(one)} for one in found},
            "baselines": rules,
            "folds": folds,
            "left_out": self.time.left_out,
            "worst": judge.worst(target, best.answers, best.threshold, self.prepared.shown),
            "answered": judge.pairs(target, best.answers),
            "phases": self.phases.seconds,
            "said": self.phases.said,
        }

    def write_page(self, report: dict[str, Any]) -> None:
        """Write the scores again, now with all phases, and the page; a page that cannot be written ends nothing."""
        write_report_file(self.folder, report)
        try:
            write_page(self.folder)
        except HotlapError as error:
            self.say(f"warning   no {PAGE}: {error}")

    def write(self, found: list[Judged], best: Judged, report: dict[str, Any], beaten_by: list[str]) -> None:
        """Write the best model, all that predictions need, the report and the plots."""
        prepared, folder = self.prepared, self.folder
        save_state(best.weights, folder / MODEL, {"recipe": self.recipe.name, "model": best.name})
        state = {
            "format": FORMAT,
            "recipe": self.recipe.name,
            "model": best.name,
            "target": prepared.target_name,
            "threshold": best.threshold,
            "beaten_by": beaten_by,
            "batch_size": self.options.judged_at_once,
            "reader": prepared.reader.state(),
        }
        write_text(folder / STATE, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
        prepared.reader.keep_files(folder)
        write_report_file(folder, report)
        if histories := {one.name: one.history for one in found if one.history}:
            plots.curves(histories, folder / CURVES)
        if prepared.reader.classes:
            counts = np.asarray(best.report["confusion"])
            plots.confusion_picture(counts, prepared.reader.classes, folder / CONFUSION)


def write_report_file(folder: Path, report: Mapping[str, Any]) -> None:
    """Write `report.json`."""
    write_text(folder / REPORT, json.dumps(finite(dict(report)), indent=1, ensure_ascii=False) + "\n")


def _bytes_left() -> int:
    """Bytes taken on the device, after unused memory is freed."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _beaten_by(found: list[Judged], rules: dict[str, Report], judge: Judge) -> list[str]:
    """The trivial baselines that no model beats; none where a model is perfect."""
    best = max(judge.score(one.report) for one in found)
    return [name for name, report in rules.items() if best < 1 and judge.score(report) >= best]


def _compared(found: list[Judged], rules: dict[str, Report], prepared: Prepared) -> list[str]:
    """The verdict first, where a baseline wins, and one table of all models and baselines."""
    judge = judge_for(prepared.reader)
    rows = [(one.name, one.report, _when(one)) for one in sorted(found, key=lambda one: -judge.score(one.report))]
    rows += [(name, report, "a baseline") for name, report in rules.items()]
    width = max(len(name) for name, *_ in rows)
    lines = []
    if beaten_by := _beaten_by(found, rules, judge):
        is_chance = judge.may_be_chance(list(rules.values()), len(prepared.target))
        why = "there may be nothing to learn here" if is_chance else prepared.advice or "train longer, or on more rows"
        lines.append(f"result    no model is better than {' or '.join(beaten_by)}: {why}")
    lines += [f"{'':<{width}}  {'  '.join(f'{head:>8}' for head, _ in judge.columns)}"]
    for name, said, words in rows:
        figures = "  ".join(f"{_figure(said[score]):>8}" for _, score in judge.columns)
        lines.append(f"{name:<{width}}  {figures}  {words}")
    for one in found:
        if one.threshold is not None:
            rare = prepared.reader.classes[one.threshold.rare]
            lines.append(
                f"{one.name} answers {rare!r} from a probability of {one.threshold.least:.3g} on, which suits the rows "
                "held out; each was judged by that of others"
            )
    if prepared.reader.classes and not beaten_by:
        lines += _more_often_right(max(found, key=lambda one: judge.score(one.report)), rules)
    return lines


def _more_often_right(best: Judged, rules: dict[str, Report]) -> list[str]:
    """A line where a baseline is right more often than the best model by macro-F1."""
    often = max(rules, key=lambda name: rules[name]["accuracy"], default=None)
    if often is None or rules[often]["accuracy"] <= best.report["accuracy"]:
        return []
    figures = f"{rules[often]['accuracy']:.3f} against {best.report['accuracy']:.3f}"
    why = "by macro-F1, where classes count alike, it is not"
    return [f"by accuracy {often} is better than {best.name}: {figures}; {why}"]


def _about(one: Judged) -> dict[str, Any]:
    """What a report holds of a training beside its scores."""
    kept = {"train_s": one.train_s, "from_cache": one.was_kept, "device_bytes_left": one.bytes_left}
    return {**kept, **one.about}


def _figure(score: float | None) -> str:
    """Of three decimals, where these are enough and not too long."""
    if score is None:
        return "–"
    if 0 < abs(score) < 0.1:
        return f"{score:.3g}"
    return f"{score:.3f}" if score < 1000 else f"{score:.4g}"


def _when(one: Judged) -> str:
    took = show_seconds(one.train_s)
    return f"trained before, which saved {took}" if one.was_kept else f"trained in {took}"
