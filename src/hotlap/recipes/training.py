"""Running a recipe: every candidate trained and judged on what was held out, the best kept, all of it written down."""

from __future__ import annotations

import gc
import json
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, HotlapError, PlanError, StoreError, TrainingError, UsageError, shown
from hotlap.core.job import Job
from hotlap.core.table import table as tuning_table
from hotlap.core.units import MIB, show_seconds
from hotlap.fitting.fit import AnotherTrainingError, fit
from hotlap.fitting.run import Run
from hotlap.fitting.task import EVERYTHING, OFF, TUNED
from hotlap.machine.device import choose_device
from hotlap.recipes import onnx_files, plots
from hotlap.recipes.answers import (
    TABLES,
    VECTORS,
    Answered,
    answered,
    answers_of,
    check_name,
    kept_names,
    outputs_of,
    state_problem,
    write_answers,
    write_vectors,
)
from hotlap.recipes.options import Options, as_file, exists, is_file, recipe_in
from hotlap.recipes.recipe import Candidate, Numbers, Prepared, Reader, Say
from hotlap.recipes.scores import Report, Threshold, check_installed, judge_of, report_lines
from hotlap.recipes.tabular import TabularRecipe
from hotlap.store.files import read_text, write_text
from hotlap.store.run_folder import RunFolder, finite
from hotlap.store.weights import build_with_weights, plain_state, save_state

STATE, OPTIONS, REPORT, MODEL = "recipe.json", "options.toml", "report.json", "model.safetensors"
CURVES, CONFUSION = "curves.svg", "confusion.svg"
PLAN = "plan.toml"
"""In the folder of a training that was begun."""
MOST_STATE_BYTES = 64 * MIB
FORMAT = 1
"""Of the state file; one of a newer hotlap is refused."""


Recipe = type[TabularRecipe]


class DivergedError(TrainingError):
    """A model was trained until its answers were no numbers."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A trained candidate and how it did on what was held out."""

    name: str
    weights: dict[str, Tensor]
    answers: Numbers
    """Its probabilities, or its numbers."""
    threshold: Threshold | None
    report: dict[str, Any]
    history: list[dict[str, Any]]
    train_s: float
    was_kept: bool
    """Whether it was trained before, and read from the cache."""
    bytes_left: int
    """Of the device's memory, still taken once it was let go of."""


def train(recipe: Recipe, options: Options, *, out: Path | None, retrain: bool, say: Say, progress: bool) -> Path:
    """Train a recipe's models on its data, keep the best, and give the folder with all that was found."""
    if not options.data:
        raise UsageError(f"no data is named; give --data FILE ({recipe.expects})")
    _check_names(recipe, options, out)
    choose_device(options.device)
    check_installed()
    if getattr(options, "onnx", False):
        onnx_files.libraries()  # what is missing is said before anything is trained
    prepared = recipe.prepare(options, say)
    if options.test:
        # A mistake in it is to be known now, not after the training.
        table = prepared.reader.table(Path(options.test))
        say(f"test      {options.test}: {len(table):,} rows")
        prepared.reader.asked(table, say)
    folder = _folder(recipe, options, out, say)
    try:
        return _trained(recipe, options, prepared, folder, retrain=retrain, say=say, progress=progress)
    except (KeyboardInterrupt, SystemExit):
        say(f"stopped   go on with: {shlex.join(_words(folder))}")
        raise


def _trained(
    recipe: Recipe,
    options: Options,
    prepared: Prepared,
    folder: Path,
    *,
    retrain: bool,
    say: Say,
    progress: bool,
) -> Path:
    found = _compete(prepared, options, folder, retrain=retrain, say=say, progress=progress)
    judge = judge_of(prepared.reader.classes)
    best = max(found, key=lambda one: judge.score(one.report))
    rules = {name: judge.rule_report(prepared.target, answers) for name, answers in prepared.baselines().items()}
    for line in _compared(found, rules, prepared):
        say(line)
    folds = _walked(prepared, best.name, options, folder, retrain=retrain, say=say, progress=progress)
    _write(recipe, options, prepared, found, best, rules, folds, folder)
    if prepared.finish is not None:
        prepared.finish(best.name, revived(folder)[2], folder, say)
    for line in report_lines(best.report):
        say(line)
    if options.test:
        answers = folder / "predictions.csv"
        said = answer(folder, Path(options.test), answers, say=say, device=options.device, was_shown=True)
        say(f"predictions of {options.test} in {answers}: {said.line}")
    looked_at = [name for name in (REPORT, CURVES, CONFUSION) if (folder / name).is_file()]
    say(f"run       {folder} ({', '.join(looked_at)}); predict with: hotlap predict {folder} --data FILE --out FILE")
    return folder


def _compete(
    prepared: Prepared, options: Options, folder: Path, *, retrain: bool, say: Say, progress: bool
) -> list[Judged]:
    """All candidates, trained and judged; one that diverges is told and left out, unless all do."""
    found, diverged = [], []
    for one in prepared.candidates:
        out = folder / "models" / one.name
        try:
            found.append(_judged(one, prepared, options, out, retrain=retrain, say=say, progress=progress))
        except DivergedError as error:
            diverged.append(error)
            if len(prepared.candidates) > 1:
                say(f"warning   left out: {error}")
    if not found:
        raise diverged[0]
    return found


def predict(
    folder: Path, data: Path, out: Path, *, say: Say, device: str = "auto", keep: tuple[str, ...] = (),
    probabilities: bool = False, embeddings: Path | None = None, was_shown: bool = False,
) -> int:  # fmt: skip
    """As `answer`; how many rows were answered."""
    return answer(
        folder, data, out, say=say, device=device, keep=keep, probabilities=probabilities, embeddings=embeddings,
        was_shown=was_shown,
    ).rows  # fmt: skip


def answer(
    folder: Path, data: Path, out: Path, *, say: Say, device: str = "auto", keep: tuple[str, ...] = (),
    probabilities: bool = False, embeddings: Path | None = None, was_shown: bool = False,
) -> Answered:  # fmt: skip
    """Write what the model of a run answers for each row of a file.

    Also, where a file for them is named, the `embeddings` of these rows. What is read is told unless it `was_shown`.
    """
    check_name(out, "out", TABLES)
    if embeddings is not None:
        check_name(embeddings, "embeddings", VECTORS)
    choose_device(device)
    state, reader, model = revived(folder)
    if embeddings is not None and reader.embedded is None:
        raise DataError(f"the recipe {state['recipe']} has no embeddings; the recipe text has")
    table = reader.table(data)
    if not was_shown:
        for note in table.notes:
            say(f"note      {note}")
    if probabilities and not reader.classes:
        say("note      answers are numbers, of which there are no probabilities")
    names = kept_names(table, keep)
    asked = reader.asked(table, (lambda line: None) if was_shown else say)
    answers = answers_of(reader, model, asked.data, batch_size=state["batch_size"], device=device)
    threshold = _threshold_in(state)
    written = partial(judge_of(reader.classes).written, all_of_it=probabilities)
    name, columns = state["target"], written(state["target"], answers, threshold)
    while any(column in names for column in columns):
        name = f"predicted_{name}"
        columns = written(name, answers, threshold)
    if name != state["target"]:
        say(f"answers   are in {name!r}, since {data} has a column of its own for {state['target']!r}")
    write_answers(out, data, table, names, asked.rows, columns)
    if embeddings is not None and reader.embedded is not None:
        vectors = outputs_of(reader.embedded, model, asked.data, batch_size=state["batch_size"], device=device)
        write_vectors(embeddings, vectors)
    found = answered(table, names, asked.rows)
    if found.missing:
        say(f"warning   {found.missing}")
    return found


def _check_names(recipe: Recipe, options: Options, out: Path | None) -> None:
    """Refuse what is not there, or is there already, before anything is read."""
    plan = Path(options.plan)
    if options.plan not in (TUNED, EVERYTHING, OFF) and not exists(plan):
        raise PlanError(f"plan={options.plan} is none of auto, off, max, and no file or folder of a run")
    if is_file(plan / OPTIONS):
        models = ", ".join(sorted(str(one) for one in plan.glob("models/*")))
        raise PlanError(f"plan={options.plan} is a recipe's run; name one of its models: {models}")
    for name in ("valid", "test"):
        path = getattr(options, name)
        if path and not exists(path):
            raise DataError(f"{name}={path} does not exist; check the name and the folder")
    RunFolder.check(out)
    if out is not None and out.is_dir() and any(out.iterdir()) and not _was_begun(recipe, options, out):
        raise StoreError(f"{out} holds files already; name a new folder with --out")


def _was_begun(recipe: Recipe, options: Options, folder: Path) -> bool:
    """Whether this training was begun in a folder and has not ended."""
    said = folder / OPTIONS
    return said.is_file() and not (folder / STATE).exists() and read_text(said) == as_file(recipe.name, options)


def _folder(recipe: Recipe, options: Options, out: Path | None, say: Say) -> Path:
    """A new folder, or that in which this training was begun."""
    if out is not None and _was_begun(recipe, options, out):
        say(f"run       {out} was begun before: it goes on")
        return out
    folder = RunFolder.create(out, recipe.name).path
    write_text(folder / OPTIONS, as_file(recipe.name, options))
    return folder


def _fitted(job: Job, options: Options, out: Path, *, retrain: bool, say: Say, progress: bool) -> Run:
    """Train a job in its folder, or go on where it was interrupted there."""
    was_begun = (out / PLAN).is_file()
    try:
        run = fit(
            job,
            plan=options.plan,
            out=out,
            resume=out if was_begun else None,
            reuse=not retrain,
            progress=progress,
            started_by=_words(out.parents[1]),
        )
    except AnotherTrainingError as error:
        raise StoreError(f"{error.what}; go on with the files and options that it had, or name another --out") from None
    for problem in () if progress else run.problems:
        say(f"warning   {problem}")
    return run


def _words(folder: Path) -> list[str]:
    """The command that begins a recipe's run again, or goes on with it."""
    options = folder / OPTIONS
    return ["hotlap", "train", recipe_in(options) or "", "--options", str(options), "--out", str(folder)]


def revived(folder: Path) -> tuple[dict[str, Any], Reader, nn.Module]:
    """The state, the reader and the model of a finished run."""
    from hotlap.recipes import recipe_named

    path = folder / STATE
    if not folder.is_dir():
        raise StoreError(f"{folder} does not exist; name the folder of a run")
    if not path.is_file() and (folder / OPTIONS).is_file():
        raise StoreError(f"{folder} was interrupted before it had a model; go on with: {shlex.join(_words(folder))}")
    if not path.is_file():
        raise StoreError(f"{folder} is no run of a recipe: there is no {STATE} in it")
    try:
        state = json.loads(read_text(path, MOST_STATE_BYTES))
        version = state["format"]
    except StoreError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError):
        raise StoreError(f"{path} is damaged; train again") from None
    if version != FORMAT:
        told = shown(version)
        raise StoreError(f"{path} has format {told}, and this hotlap reads {FORMAT}; update hotlap or train again")
    try:
        problem = state_problem(state)
        if problem is not None:
            raise StoreError(f"{path} is damaged: {problem}; train again")
        reader = recipe_named(state["recipe"]).revive(state["reader"], folder)
        model = build_with_weights(partial(reader.model, state["model"]), folder / MODEL)
        if not isinstance(state["target"], str):
            raise TypeError(f"target={shown(state['target'])}")
        state["batch_size"]  # is needed later
        threshold = _threshold_in(state)
        if threshold is not None and not 0 <= threshold.rare < len(reader.classes):
            raise ValueError(f"threshold={shown(state['threshold'])}")
    except MemoryError:
        raise StoreError(f"{path} asks for a model that needs more memory than there is; train again") from None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, HotlapError):
            raise
        raise StoreError(f"{path} is damaged: {shown(error)}; train again") from None
    return state, reader, model.eval()


def _threshold_in(state: dict[str, Any]) -> Threshold | None:
    """The threshold of a run's state; TypeError or ValueError where it is none."""
    if state["threshold"] is None:
        return None
    rare, least = state["threshold"]
    return Threshold(int(rare), float(least))


def _walked(
    prepared: Prepared, name: str, options: Options, folder: Path, *, retrain: bool, say: Say, progress: bool
) -> dict[str, dict[str, Any]]:
    """How the best model does on other splits, by their names."""
    found = {}
    for fold in prepared.folds(name):
        run = _fitted(fold.job(), options, folder / "folds" / fold.name, retrain=retrain, say=say, progress=progress)
        try:
            answers = _held_out_answers(fold.name, run, prepared, fold.held_out, options)
        except DivergedError as error:
            say(f"warning   left out: {error}")
            continue
        judge = judge_of(prepared.reader.classes)
        said = judge.report(fold.target, answers, None)
        figures = ", ".join(f"{head} {said[name]:.3f}" for head, name in judge.columns)
        say(f"{fold.name}: {figures} ({len(fold.target):,} samples)")
        found[fold.name] = said
        del run
        _bytes_left()
    if found:
        head, score = judge_of(prepared.reader.classes).columns[-1]
        of_all = [said[score] for said in found.values()]
        spread = f"from {min(of_all):.3f} to {max(of_all):.3f}"
        say(f"over {len(of_all)} folds {head} is {np.mean(of_all):.3f} on average, {spread}")
    return found


def _judged(
    one: Candidate, prepared: Prepared, options: Options, out: Path, *, retrain: bool, say: Say, progress: bool
) -> Judged:
    run = _fitted(one.job(), options, out, retrain=retrain, say=say, progress=progress)
    was_kept = "cache" in run.stopped
    for line in () if was_kept else (*tuning_table(run.ledger), f"plan   {run.plan}"):
        say(line)
    answers = _held_out_answers(one.name, run, prepared, prepared.held_out, options)
    judge = judge_of(prepared.reader.classes)
    threshold = judge.threshold(answers, prepared.target)
    report = judge.report(prepared.target, answers, threshold)
    weights = plain_state(run.model)
    history, train_s = run.history, run.train_s
    del run
    return Judged(
        name=one.name,
        weights=weights,
        answers=answers,
        threshold=threshold,
        report=report,
        history=history,
        train_s=train_s,
        was_kept=was_kept,
        bytes_left=_bytes_left(),
    )


def _held_out_answers(name: str, run: Run, prepared: Prepared, held_out: Any, options: Options) -> Numbers:
    """What a trained model answers for data to judge by; DivergedError where that is nothing, since it diverged."""
    batch = options.judged_at_once
    answers = answers_of(prepared.reader, run.model, held_out, batch_size=batch, device=options.device)
    wrong = int((~np.isfinite(answers.reshape(len(answers), -1)).all(1)).sum())
    if wrong:
        lower = f"than {options.lr:g}, or without it" if options.lr else "than the recipe's own, as 1e-5"
        raise DivergedError(
            f"the training of {name} diverged: its answers are nan for {wrong:,} of {len(answers):,} rows held out; "
            f"train with a smaller --lr {lower}"
        )
    return answers


def _bytes_left() -> int:
    """Of the device's memory, once all that is no longer used has been let go of."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _compared(found: list[Judged], rules: dict[str, Report], prepared: Prepared) -> list[str]:
    """One table of all candidates and of what simple rules score."""
    judge = judge_of(prepared.reader.classes)
    rows = [(one.name, one.report, _when(one)) for one in sorted(found, key=lambda one: -judge.score(one.report))]
    rows += [(name, report, "a rule, for comparison") for name, report in rules.items()]
    width = max(len(name) for name, *_ in rows)
    best = max(judge.score(one.report) for one in found)
    beaten_by = [name for name, report in rules.items() if judge.score(report) >= best]
    lines = [f"{'':<{width}}  {'  '.join(f'{head:>8}' for head, _ in judge.columns)}"]
    for name, said, words in rows:
        figures = "  ".join(f"{_figure(said[score]):>8}" for _, score in judge.columns)
        lines.append(f"{name:<{width}}  {figures}  {words}")
    for one in found:
        if one.threshold is not None:
            words = (
                f"{prepared.reader.classes[one.threshold.rare]!r} from a probability of {one.threshold.least:.3g} on"
            )
            lines.append(
                f"{one.name} answers {words}, which suits the rows held out; each was judged by that of others"
            )
    if beaten_by and best < 1:
        is_chance = judge.may_be_chance(list(rules.values()), len(prepared.target))
        why = "there may be nothing to learn here" if is_chance else "train longer, or on more rows"
        lines.append(f"no model is better than {' or '.join(beaten_by)}: {why}")
    elif prepared.reader.classes:
        lines += _more_often_right(max(found, key=lambda one: judge.score(one.report)), rules)
    return lines


def _more_often_right(best: Judged, rules: dict[str, Report]) -> list[str]:
    """Told where a rule, such as the most frequent class, is right more often than what is best by macro-F1."""
    often = max(rules, key=lambda name: rules[name]["accuracy"], default=None)
    if often is None or rules[often]["accuracy"] <= best.report["accuracy"]:
        return []
    figures = f"{rules[often]['accuracy']:.3f} against {best.report['accuracy']:.3f}"
    why = "by macro-F1, where classes count alike, it is not"
    return [f"by accuracy {often} is better than {best.name}: {figures}; {why}"]


def _told(one: Judged) -> dict[str, Any]:
    """What a report says of a training beside its scores."""
    return {"train_s": one.train_s, "from_cache": one.was_kept, "device_bytes_left": one.bytes_left}


def _figure(score: float) -> str:
    """Of three decimals, where that is not too long."""
    return f"{score:.3f}" if score < 1000 else f"{score:.4g}"


def _when(one: Judged) -> str:
    took = show_seconds(one.train_s)
    return f"trained before, which saved {took}" if one.was_kept else f"trained in {took}"


def _write(
    recipe: Recipe,
    options: Options,
    prepared: Prepared,
    found: list[Judged],
    best: Judged,
    rules: dict[str, Report],
    folds: dict[str, dict[str, Any]],
    folder: Path,
) -> None:
    judge = judge_of(prepared.reader.classes)
    save_state(best.weights, folder / MODEL, {"recipe": recipe.name, "model": best.name})
    state = {
        "format": FORMAT,
        "recipe": recipe.name,
        "model": best.name,
        "target": prepared.target_name,
        "threshold": best.threshold,
        "batch_size": options.judged_at_once,
        "reader": prepared.reader.state(),
    }
    write_text(folder / STATE, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
    prepared.reader.keep_files(folder)
    told = {
        "best": best.name,
        "models": {one.name: {**one.report, **_told(one)} for one in found},
        "baselines": rules,
        "folds": folds,
        "worst": judge.worst(prepared.target, best.answers, best.threshold, prepared.shown),
    }
    write_text(folder / REPORT, json.dumps(finite(told), indent=1, ensure_ascii=False) + "\n")
    plots.curves({one.name: one.history for one in found}, folder / CURVES)
    if prepared.reader.classes:
        counts = np.asarray(best.report["confusion"])
        plots.confusion_picture(counts, prepared.reader.classes, folder / CONFUSION)
