"""The checklist of a run: what its files show before, during and after the training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hotlap.core.units import show_seconds
from hotlap.report.document import Check
from hotlap.report.reading import RECIPE, SCRIPT, TREES, RunFiles, Training, listing, mapping, number, words
from hotlap.report.recipe_sections import judged
from hotlap.report.training_sections import total_of

MOST_EACH = 3
"""Trainings whose checks are listed one by one."""
BEFORE, DURING, AFTER = "before", "during", "after"
OK, LOOK, UNKNOWN = "ok", "look", "unknown"
WORSE = 1.05
"""How many times its lowest value a validation loss may come to before the model counts as overfitted."""


def checks_of(run: RunFiles) -> list[Check]:
    """What is right, what to look at, and what the files do not say."""
    found = [*_before(run), *_during(run), *_after(run)]
    return [Check(when=when, what=what, outcome=outcome, found=said) for when, what, outcome, said in found]


Found = tuple[str, str, str, str]
Line = tuple[str, str, str]


def _before(run: RunFiles) -> Iterator[Found]:
    first = run.trainings[0] if run.trainings else None
    environment = first.environment if first is not None else {}
    if environment:
        gpus = [words(mapping(gpu).get("name")) for gpu in listing(environment.get("gpus"))]
        yield BEFORE, "a GPU for the training", OK if gpus else LOOK, ", ".join(gpus) or "none: it trained on the CPU"
        variables = mapping(environment.get("variables"))
        slow = variables.get("CUDA_LAUNCH_BLOCKING") not in (None, "", "0")
        said = "CUDA_LAUNCH_BLOCKING makes the host wait for every kernel; unset it" if slow else "none is set"
        yield BEFORE, "variables that slow every step", LOOK if slow else OK, said
    if run.kind not in (RECIPE, TREES, SCRIPT) and first is not None and first.job:
        is_judged = first.job.get("valid") is not None
        said = "given" if is_judged else "none: nothing says how good the model is on new data; give valid=(x, y)"
        yield BEFORE, "validation data", OK if is_judged else LOOK, said
        data = mapping(mapping(first.facts.get("identity")).get("data"))
        ours, theirs = data.get("sha256"), data.get("validation sha256")
        if ours and theirs:
            same = ours == theirs
            said = "the same as the training data: its scores say nothing" if same else "not the training data"
            yield BEFORE, "validation data of its own", LOOK if same else OK, said
    rules = mapping(run.scores.get("baselines"))
    if run.kind == RECIPE and run.scores:
        said = f"{len(rules)} beside the models: {', '.join(map(words, rules))}" if rules else "none"
        yield BEFORE, "simple rules to compare with", OK if rules else LOOK, said


def _during(run: RunFiles) -> Iterator[Found]:
    yield from ((DURING, *found) for found in _together(run, _of_training))


def _together(run: RunFiles, made: Callable[[Training], Iterator[Line]]) -> Iterator[Line]:
    """The checks of each training; of many, what is right in all of them is one line, and so is what is not."""
    trainings = _models(run)
    each = [(training, list(made(training))) for training in trainings]
    if len(trainings) <= MOST_EACH:
        for training, lines in each:
            name = f" ({training.name})" if len(trainings) > 1 else ""
            yield from ((what + name, outcome, said) for what, outcome, said in lines)
        return
    for what in dict.fromkeys(what for _, lines in each for what, *_ in lines):
        found = [(training.name, line) for training, lines in each for line in lines if line[0] == what]
        wrong = [(name, line) for name, line in found if line[1] != OK]
        if wrong:
            yield what, LOOK, f"{len(wrong)} of {len(found)} trainings, such as {wrong[0][0]}: {wrong[0][1][2]}"
        else:
            yield what, OK, f"in all {len(found)} trainings"


def _of_training(training: Training) -> Iterator[tuple[str, str, str]]:
    entries = list(training.ledger) if training.ledger is not None else []
    faults = [entry for entry in entries if entry.outcome == "fault"]
    if entries:
        said = "; ".join(f"step {fault.step:,}: {words(fault.what)}" for fault in faults[:3]) or "the ledger has none"
        yield "no faults", LOOK if faults else OK, said
    total = total_of(training.ledger)
    cost_s, saved_s = number(total.get("cost_s")), number(total.get("saved_s"))
    if total and cost_s is not None:
        train_s = number(training.ended.get("train_s"))
        part = f", {100 * cost_s / train_s:.1f} % of the training" if train_s else ""
        net = "" if not saved_s else f"; net {'saving' if saved_s > 0 else 'loss'} {show_seconds(abs(saved_s))}"
        yield "tuning pays", LOOK if (saved_s or 0.0) < 0 else OK, f"it cost {show_seconds(cost_s)}{part}{net}"
    losses = [number(record.get("train_loss")) for record in training.history if "train_loss" in record]
    if losses:
        lost = sum(loss is None for loss in losses)
        said = f"{lost} of {len(losses)} evaluations have none" if lost else f"in all {len(losses)} evaluations"
        yield "a finite training loss", LOOK if lost else OK, said
        known = [loss for loss in losses if loss is not None]
        if len(known) > 1:
            fell = known[-1] < known[0]
            yield "the training loss falls", OK if fell else LOOK, f"from {known[0]:.4g} to {known[-1]:.4g}"
    steps, updates = number(training.ended.get("steps")), number(training.ended.get("updates"))
    if steps is not None and updates is not None:
        skipped = steps - updates
        said = (
            f"{skipped:,.0f} of {steps:,.0f} had gradients that are not finite"
            if skipped
            else f"all {updates:,.0f} were made"
        )
        yield "no skipped updates", LOOK if skipped > 0.01 * steps else OK, said


def _after(run: RunFiles) -> Iterator[Found]:
    if run.kind == RECIPE:
        yield from _recipe(run)
    else:
        first = run.trainings[0] if run.trainings else None
        if first is not None and first.ended:
            yield AFTER, "it came to its end", OK, words(first.ended.get("stopped"))
        elif run.kind != SCRIPT and not run.search:
            said = "it still runs" if run.is_live else "its folder has no end; go on with hotlap resume"
            yield AFTER, "it came to its end", UNKNOWN if run.is_live else LOOK, said
    yield from ((AFTER, *found) for found in _together(run, _fit))
    left = [words(line) for line in listing(run.scores.get("left_out")) + listing(run.search.get("left_out"))]
    left += [words(line) for training in run.trainings for line in listing(training.ended.get("left_out"))]
    yield (
        AFTER,
        "nothing was left out",
        LOOK if left else OK,
        "; ".join(dict.fromkeys(left)) or "all that was asked for",
    )
    unread = "; ".join(run.problems[:5])
    yield AFTER, "all files can be read", LOOK if run.problems else OK, unread or "all of this report"


def _models(run: RunFiles) -> list[Training]:
    """The trainings that are checked one by one: no folds."""
    return [training for training in run.trainings if training.path.parent.name != "folds"]


def _recipe(run: RunFiles) -> Iterator[Found]:
    if not run.state:
        said = "it still runs" if run.is_live else "no; go on with hotlap resume"
        yield AFTER, "it came to its end", UNKNOWN if run.is_live else LOOK, said
        return
    by = judged(run.scores, run.options.get("recipe"))
    if by is None:
        return
    best, rule = by.best(mapping(run.scores.get("models"))), by.best(mapping(run.scores.get("baselines")))
    if best is None or rule is None:
        return
    won = (best[1] > rule[1]) == by.higher and best[1] != rule[1]
    said = f"{by.words} {best[1]:.4g} ({words(best[0])}) beside {rule[1]:.4g} ({words(rule[0])})"
    yield AFTER, "a model beats the simple rules", OK if won else LOOK, said
    folds = [number(mapping(one).get(by.name)) for one in mapping(run.scores.get("folds")).values()]
    known = [fold for fold in folds if fold is not None]
    if len(known) > 1:
        spread, gain = max(known) - min(known), abs(best[1] - rule[1])
        said = f"folds differ by {spread:.3g}, and the model is {gain:.3g} from the best simple rule"
        yield AFTER, "the gain is larger than the folds differ", OK if won and gain > spread else LOOK, said


def _fit(training: Training) -> Iterator[tuple[str, str, str]]:
    """Whether a training went on too long, or ended too early, by its validation loss."""
    known = [
        (loss, record)
        for record in training.history
        if (loss := number(record.get("valid_loss"))) is not None and math.isfinite(loss)
    ]
    if len(known) < 3:
        return
    best = min(known, key=lambda one: one[0])
    last = known[-1]
    has_patience = training.job.get("patience") is not None
    if best is last:
        yield "trained long enough", LOOK, f"the last evaluation was the best ({last[0]:.4g}): more epochs may help"
        return
    said = f"best {best[0]:.4g} at {_at(best[1])}, {last[0]:.4g} at the end"
    if last[0] > WORSE * best[0] and not has_patience:
        yield "no overfitting", LOOK, f"validation loss {said}; patience=N keeps the best weights"
    else:
        yield "trained long enough", OK, f"validation loss {said}"


def _at(record: Mapping[str, Any]) -> str:
    epoch = number(record.get("epoch"))
    return f"epoch {epoch:,.0f}" if epoch is not None else f"step {number(record.get('step')) or 0:,.0f}"
