"""Running a recipe: every candidate trained and judged on what was held out, the best kept, all of it written down."""

from __future__ import annotations

import gc
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, PlanError, StoreError, shown
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.fitting.loop import fit
from hotlap.fitting.run import Run
from hotlap.fitting.task import EVERYTHING, OFF, TUNED
from hotlap.recipes import pictures, scores
from hotlap.recipes.answers import (
    Threshold,
    chosen,
    outputs_of,
    refuse_written,
    scores_of,
    write_answers,
    write_vectors,
)
from hotlap.recipes.options import Options, as_file, recipe_in
from hotlap.recipes.recipe import Asked, Candidate, Numbers, Prepared, Reader, Recipe, Say
from hotlap.recipes.tables import Table, read_table
from hotlap.store.files import read_text, write_text
from hotlap.store.loading import load_into
from hotlap.store.run_folder import RunFolder, finite
from hotlap.store.weights import save_weights

STATE, OPTIONS, REPORT, MODEL = "recipe.json", "options.toml", "report.json", "model.safetensors"
PLAN = "plan.toml"
"""In the folder of a training that was begun."""
FORMAT = 1
"""Of the state file; one of a newer hotlap is refused."""
RARE = 0.25
"""A class of two that has less than this share of the samples gets a threshold of its own."""
SURE = 2.0
"""So many standard errors are more than chance."""
MISTAKES = 10
"""Of the worst ones, shown."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A trained candidate and how it did on what was held out."""

    name: str
    weights: dict[str, Tensor]
    answers: Numbers
    """Its probabilities."""
    threshold: Threshold | None
    report: dict[str, Any]
    history: list[dict[str, Any]]
    train_s: float
    was_kept: bool
    """Whether it was trained before, and read from the cache."""
    bytes_left: int
    """Of the device's memory, still taken once it was let go of."""

    @property
    def score(self) -> float:
        """By which the best is chosen."""
        return float(self.report["macro_f1"])


def train(recipe: Recipe, options: Options, *, out: Path | None, retrain: bool, say: Say, progress: bool) -> Path:
    """Train a recipe's models on its data, keep the best, and give the folder with all that was found."""
    if not options.data:
        raise StoreError(f"no data is named; give --data FILE ({recipe.expects})")
    _check_names(recipe, options, out)
    prepared = recipe.prepare(options, say)
    if options.test:
        # A mistake in it is to be known now, not after the training.
        _asked(prepared.reader, Path(options.test), lambda line: None)
    folder = _folder(recipe, options, out, say)
    try:
        return _trained(recipe, options, prepared, folder, retrain=retrain, say=say, progress=progress)
    except (KeyboardInterrupt, SystemExit):
        say(f"stopped   go on with: {shlex.join(_words(folder))}")
        raise


def _trained(
    recipe: Recipe, options: Options, prepared: Prepared, folder: Path, *, retrain: bool, say: Say, progress: bool
) -> Path:
    found = [
        _judged(one, prepared, options, folder / "models" / one.name, retrain=retrain, progress=progress)
        for one in prepared.candidates
    ]
    best = max(found, key=lambda one: one.score)
    for line in _compared(found, prepared):
        say(line)
    folds = _walked(prepared, best.name, options, folder, retrain=retrain, say=say, progress=progress)
    _write(recipe, options, prepared, found, best, folds, folder)
    if prepared.finish is not None:
        prepared.finish(best.name, revived(folder)[2], folder, say)
    for line in scores.told(best.report):
        say(line)
    if options.test:
        predict(folder, Path(options.test), folder / "predictions.csv", say=say, device=options.device)
        say(f"predictions of {options.test} in {folder / 'predictions.csv'}")
    say(f"run       {folder}; predict with: hotlap predict {folder} --data FILE --out FILE")
    return folder


def predict(
    folder: Path, data: Path, out: Path, *, say: Say, device: str = "auto", keep: tuple[str, ...] = (),
    probabilities: bool = False, embeddings: Path | None = None,
) -> int:  # fmt: skip
    """Write what the model of a run answers for each row of a file; how many rows were answered.

    Also, where a file for them is named, the `embeddings` of these rows.
    """
    for path in filter(None, (out, embeddings)):
        refuse_written(path)
    state, reader, model = revived(folder)
    if embeddings is not None and reader.embedded is None:
        raise DataError(f"the recipe {state['recipe']} has no embeddings; the recipe text has")
    table, asked = _asked(reader, data, say)
    answers = scores_of(reader, model, asked.data, batch_size=state["batch_size"], device=device)
    threshold = Threshold(*state["threshold"]) if state["threshold"] is not None else None
    words = np.asarray(reader.classes, dtype=object)[chosen(answers, threshold)]
    columns: dict[str, Any] = {state["target"]: words.tolist()}
    if probabilities:
        columns |= {f"{state['target']}_{name}": answers[:, n].tolist() for n, name in enumerate(reader.classes)}
    write_answers(out, data, table, asked.rows, columns, keep=keep)
    if embeddings is not None and reader.embedded is not None:
        vectors = outputs_of(reader.embedded, model, asked.data, batch_size=state["batch_size"], device=device)
        write_vectors(embeddings, vectors)
    return len(asked.rows)


def _asked(reader: Reader, data: Path, say: Say) -> tuple[Table, Asked]:
    """A file as the one that was trained on, and its rows as the model takes them."""
    table = read_table(data, header=reader.has_header, kinds=reader.kinds)
    return table, reader.asked(table, say)


def _check_names(recipe: Recipe, options: Options, out: Path | None) -> None:
    """Refuse what is not there, or is there already, before anything is read."""
    plan = Path(options.plan)
    if options.plan not in (TUNED, EVERYTHING, OFF) and not plan.exists():
        raise PlanError(f"plan={options.plan} is none of auto, off, max, and no file or folder of a run")
    if (plan / OPTIONS).is_file():
        models = ", ".join(sorted(str(one) for one in plan.glob("models/*")))
        raise PlanError(f"plan={options.plan} is a recipe's run; name one of its models: {models}")
    for name in ("valid", "test"):
        path = getattr(options, name)
        if path and not Path(path).exists():
            raise DataError(f"{name}={path} does not exist; check the name and the folder")
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


def _fitted(job: Job, options: Options, out: Path, *, retrain: bool, progress: bool) -> Run:
    """Train a job in its folder, or go on where it was interrupted there."""
    was_begun = (out / PLAN).is_file()
    return fit(
        job,
        plan=options.plan,
        out=out,
        resume=out if was_begun else None,
        reuse=not retrain,
        progress=progress,
        started_by=_words(out.parents[1]),
    )


def _words(folder: Path) -> list[str]:
    """The command that begins a recipe's run again, or goes on with it."""
    options = folder / OPTIONS
    return ["hotlap", "train", recipe_in(options) or "", "--options", str(options), "--out", str(folder)]


def revived(folder: Path) -> tuple[dict[str, Any], Reader, nn.Module]:
    """The state, the reader and the model of a finished run."""
    from hotlap.recipes.every import recipe_named

    path = folder / STATE
    if not path.is_file():
        raise StoreError(f"{folder} is no run of a recipe: there is no {STATE} in it")
    try:
        state = json.loads(read_text(path))
        version = state["format"]
    except (ValueError, KeyError, TypeError):
        raise StoreError(f"{path} is damaged; train again") from None
    if version != FORMAT:
        raise StoreError(f"{path} has format {version}, and this hotlap reads {FORMAT}; update hotlap or train again")
    try:
        reader = recipe_named(state["recipe"]).revive(state["reader"], folder)
        model = reader.model(state["model"])
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is damaged: {shown(error)}; train again") from None
    load_into(model, folder / MODEL)
    return state, reader, model.eval()


def _walked(
    prepared: Prepared, name: str, options: Options, folder: Path, *, retrain: bool, say: Say, progress: bool
) -> dict[str, dict[str, Any]]:
    """How the best model does on other splits, by their names."""
    found = {}
    for fold in prepared.folds(name):
        run = _fitted(fold.job(), options, folder / "folds" / fold.name, retrain=retrain, progress=progress)
        answers = scores_of(
            prepared.reader, run.model, fold.held_out, batch_size=4 * options.batch_size, device=options.device
        )
        said = scores.report(fold.target, chosen(answers, None), answers, prepared.reader.classes)
        figures = f"accuracy {said['accuracy']:.3f}, macro-F1 {said['macro_f1']:.3f}"
        say(f"{fold.name}: {figures} ({len(fold.target):,} samples)")
        found[fold.name] = said
        del run
        _bytes_left()
    if found:
        of_all = [said["macro_f1"] for said in found.values()]
        spread = f"from {min(of_all):.3f} to {max(of_all):.3f}"
        say(f"over {len(of_all)} folds macro-F1 is {np.mean(of_all):.3f} on average, {spread}")
    return found


def _judged(
    one: Candidate, prepared: Prepared, options: Options, out: Path, *, retrain: bool, progress: bool
) -> Judged:
    run = _fitted(one.job(), options, out, retrain=retrain, progress=progress)
    batch = 4 * options.batch_size
    answers = scores_of(prepared.reader, run.model, prepared.held_out, batch_size=batch, device=options.device)
    threshold = _threshold(answers, prepared.target)
    report = scores.report(prepared.target, chosen(answers, threshold), answers, prepared.reader.classes)
    weights = {name: value.detach().cpu().clone() for name, value in run.model.state_dict().items()}
    history, train_s = run.history, run.train_s
    was_kept = "cache" in run.stopped
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


def _bytes_left() -> int:
    """Of the device's memory, once all that is no longer used has been let go of."""
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def _threshold(answers: Numbers, target: Numbers) -> Threshold | None:
    """Where two classes are parted, if one of them is rare."""
    shares = np.bincount(target, minlength=answers.shape[1]) / len(target)
    rare = int(shares.argmin())
    if len(shares) != 2 or not 0 < shares[rare] < RARE:
        return None
    return Threshold(rare, float(scores.best_threshold(answers[:, rare], (target == rare).astype(np.int64))))


def _compared(found: list[Judged], prepared: Prepared) -> list[str]:
    """One table of all candidates and of what simple rules would score."""
    rows = [(one.name, one.report, _when(one)) for one in sorted(found, key=lambda one: -one.score)]
    for name, answers in prepared.baselines.items():
        report = scores.report(prepared.target, answers, None, prepared.reader.classes)
        rows.append((name, report, "a rule, for comparison"))
    width = max(len(name) for name, *_ in rows)
    best = max(one.score for one in found)
    rules = {name: said["macro_f1"] for name, said, _ in rows if name in prepared.baselines}
    beaten_by = [name for name, score in rules.items() if score >= best]
    lines = [
        f"{'':<{width}}  accuracy  macro-F1",
        *(f"{name:<{width}}  {said['accuracy']:8.3f}  {said['macro_f1']:8.3f}  {words}" for name, said, words in rows),
    ]
    if beaten_by and best < 1:
        right = [said["accuracy"] for name, said, _ in rows if name in prepared.baselines]
        # Rules that are no better than the most frequent class, but for chance, have found nothing either.
        chance = SURE * (right[0] * (1 - right[0]) / len(prepared.target)) ** 0.5
        is_learnable = max(right) > right[0] + chance
        why = "train longer, or on more rows" if is_learnable else "there may be nothing to learn here"
        lines.append(f"no model is better than {' or '.join(beaten_by)}: {why}")
    return lines


def _when(one: Judged) -> str:
    took = show_seconds(one.train_s)
    return f"trained before, which saved {took}" if one.was_kept else f"trained in {took}"


def _write(
    recipe: Recipe,
    options: Options,
    prepared: Prepared,
    found: list[Judged],
    best: Judged,
    folds: dict[str, dict[str, Any]],
    folder: Path,
) -> None:
    model = prepared.reader.model(best.name)
    model.load_state_dict(best.weights)
    save_weights(model, folder / MODEL, {"recipe": recipe.name, "model": best.name})
    state = {
        "format": FORMAT,
        "recipe": recipe.name,
        "model": best.name,
        "target": prepared.target_name,
        "threshold": best.threshold,
        "batch_size": 4 * options.batch_size,
        "reader": prepared.reader.state(),
    }
    write_text(folder / STATE, json.dumps(state, indent=1, ensure_ascii=False) + "\n")
    prepared.reader.keep_files(folder)
    told = {
        "best": best.name,
        "models": {one.name: {**one.report, "train_s": one.train_s, "from_cache": one.was_kept} for one in found},
        "baselines": {
            name: scores.report(prepared.target, answers, None, prepared.reader.classes)
            for name, answers in prepared.baselines.items()
        },
        "folds": folds,
        "worst": _worst(best, prepared),
    }
    write_text(folder / REPORT, json.dumps(finite(told), indent=1, ensure_ascii=False) + "\n")
    pictures.curves({one.name: one.history for one in found}, folder / "curves.svg")
    pictures.confusion_picture(np.asarray(best.report["confusion"]), prepared.reader.classes, folder / "confusion.svg")


def _worst(best: Judged, prepared: Prepared) -> list[Mapping[str, Any]]:
    """The samples of which it was surest and wrong."""
    given, classes = best.answers, prepared.reader.classes
    sure = given[np.arange(len(given)), prepared.target]
    wrong = np.flatnonzero(chosen(given, best.threshold) != prepared.target)
    return [
        {
            "sample": prepared.shown(int(at)),
            "true": classes[int(prepared.target[at])],
            "answered": classes[int(given[at].argmax())],
            "probability_of_the_true_one": float(sure[at]),
        }
        for at in wrong[np.argsort(sure[wrong], kind="stable")][:MISTAKES]
    ]
