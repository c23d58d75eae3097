"""What is wrong with a run, by the files that it left: what cost time, what failed, and whether it learnt anything.

Nothing here imports torch. `outside` does the same for a process that runs.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from hotlap.core.table import Row, rows
from hotlap.core.units import MIB, show_bytes, show_seconds
from hotlap.machine.problems import Severity
from hotlap.machine.variables import variable_problems
from hotlap.monitor.findings import Finding, Findings
from hotlap.monitor.outside import diagnose_process
from hotlap.report.checks import LOOK, checks_of
from hotlap.report.reading import (
    RECIPE,
    SCRIPT,
    TREES,
    RunFiles,
    Training,
    listing,
    mapping,
    number,
    read_run,
    words,
)
from hotlap.report.training_sections import total_of

LEAST_SHARE = 0.1
"""The part of the time from which on something is a finding."""
LEAST_S = 1.0
"""Seconds from which on something is a finding."""
FULL, SLOWER, IDLE = 0.95, 0.85, 0.5
"""Cores at work of all; a clock of the highest one; the part of the time that a GPU works: limits of findings."""
GROWN, LEAST_GROWN = 1.1, 256 * MIB
"""How many times its first memory, and by how many bytes more, a training has to hold at its end."""
LONGER = 1.25
"""How many times as long as before a step has to take to be called slower."""
FELL = 1e-3
"""The part by which a loss has to fall to count as falling."""
MOST_SHOWN = 3
"""Trainings, moves and faults that a finding names."""

NOT_FINITE = ("weights not finite", "loss not finite", "numbers not finite")
FAULTS: dict[tuple[str, ...], tuple[str, str, str]] = {
    ("out of memory",): ("out-of-memory", "memory ran out", "`hotlap memory {command}` shows what holds it"),
    ("workers died",): (
        "workers-die",
        "workers of the loader died",
        "`dmesg` names a kill; `hotlap workers {command}`",
    ),
    NOT_FINITE: ("not-finite", "numbers became NaN or infinite", "a lower learning rate, or clip=1.0"),
    ("memory grows",): ("memory-grows", "memory grew while it trained", "`hotlap memory {command}` names the lines"),
    ("hang",): ("hang", "it hung", "the stacks are in ledger.jsonl of the run; `hotlap diagnose {command}`"),
    ("sample left out",): ("bad-samples", "samples raised errors and were left out", "mend or remove them"),
    ("hotlap",): ("hotlap-failed", "hotlap failed, and the script went on without it", "report it: CONTRIBUTING.md"),
    ("data changed",): ("data-changed", "data that hotlap held changed", "keep the dataset as it is while it trains"),
}
"""Faults of the ledger by how they begin: the name of the finding, what happened, what to do."""
BOUNDS = {
    "feeding": ("the training waits for its batches", "`hotlap workers {command}`"),
    "pageable copies": ("the host waits for copies to the GPU", "pin the memory: DataLoader(…, pin_memory=True)"),
    "launching": ("the GPU waits for the host to launch work", "`hotlap batch {command}` finds a larger batch"),
    "synchronising": ("the host waits for values of the GPU", "`hotlap diagnose {command}` names the lines"),
    "saving": ("checkpoints hold the training up", "save less often (save_every), or on a faster disk"),
    "another process": ("another process takes what this training needs", "end it, or choose another GPU or hour"),
    "throttling": ("the GPU runs below its clock", "`nvidia-smi -q -d PERFORMANCE,POWER` shows why; see to cooling"),
    "swapping": ("the host moves memory to a disk and back", "end other work, or take fewer workers"),
    "running on battery": ("the machine ran on its battery", "plug the power supply in"),
    "gpu-idle": ("the GPU has nothing to do for most of the time", "`hotlap diagnose {command}` names the cause"),
}
"""What can hold a training up and be mended, and how."""
QUALITY = {
    "a model beats the simple rules": ("no-model", "no model is better than a simple rule", ""),
    "the gain is larger than the folds differ": ("uncertain", "folds differ by more than the model gains", ""),
    "validation data of its own": ("same-data", "the training data also judges the model", "give other data as valid"),
    "nothing was left out": ("left-out", "the deadline left out what was asked for", "allow more time (finish_in)"),
    "all files can be read": ("unreadable", "files of the run cannot be read", ""),
}
"""Checks of `hotlap checklist` that are findings here, by the beginning of their names."""


@dataclass(frozen=True, kw_only=True)
class _Past:
    """A training that is over or under way, as its files show it."""

    run: RunFiles
    training: Training
    command: str
    """What names it for other commands of hotlap."""

    @property
    def seconds(self) -> float | None:
        """How long its steps took; None if no file tells."""
        ended, result, live = self.training.ended, self.training.result, self.training.live
        known = (ended.get("train_s"), result.get("training_s"), live.get("elapsed_s"))
        return next((found for one in known if (found := number(one)) is not None and found > 0), None)

    @property
    def moves(self) -> list[Row]:
        """What became of the moves."""
        return rows(self.training.ledger) if self.training.ledger is not None else []

    def finding(self, name: str, what: str, *, share: float | None, change: str, seen: Sequence[str]) -> Finding:
        """A finding that takes a part of the time; its cost is unknown where the files have no time."""
        cost_s = None if share is None or self.seconds is None else share * self.seconds
        return Finding(
            name=name,
            what=what,
            evidence=tuple(words(one) for one in seen if one),
            cost_s=cost_s,
            unpriced="" if cost_s is not None else "its seconds are not known",
            change=change.format(command=self.command),
        )


def diagnose_named(named: object) -> Findings | None:
    """The findings of a run by its folder, or of a process by its number; None for anything else."""
    if isinstance(named, int) and not isinstance(named, bool):
        return diagnose_process(named)
    if isinstance(named, (str, Path)):
        if Path(named).is_dir() and not (Path(named) / "__main__.py").exists():
            return diagnose_run(Path(named))
        if str(named).isdecimal() and len(str(named)) < 10:
            return diagnose_process(int(str(named)))
    return None


def diagnose_run(folder: Path) -> Findings:
    """What went wrong in the run of this folder, what it cost, and what to do. Raises StoreError if it is no run."""
    run = read_run(folder)
    past = [_Past(run=run, training=one, command=_command(run, one)) for one in run.trainings if _is_model(one)]
    each = [list(_of_training(one)) for one in past]
    found = [*_of_run(run, past), *_merged(zip(past, each, strict=True))]
    seconds = [one.seconds for one in past if one.seconds is not None]
    over = f"the {show_seconds(sum(seconds))} of training" if seconds else ""
    bounds = [line for one in past[:1] if (line := _bound_line(one))]
    notes = [*(["it still runs: these are its figures so far"] if run.is_live else []), *run.problems[:MOST_SHOWN]]
    notes += [note for one in past[:MOST_SHOWN] for note in _notes(one)]
    return Findings(name=run.name, found=tuple(found), bound="".join(bounds), over=over, notes=tuple(notes))


def _is_model(training: Training) -> bool:
    return training.path.parent.name != "folds"


def _command(run: RunFiles, training: Training) -> str:
    """What names the training for other commands: the words behind `hotlap run` or `python`."""
    if run.kind == RECIPE:
        return f"{words(run.options.get('recipe'))} --options {shlex.quote(str(run.path / 'options.toml'))}"
    told = [words(one) for one in listing(training.started.get("words"))]
    own = told[2:] if told[:1] == ["hotlap"] else told
    return shlex.join(own) or "TRAINING"


def _merged(each: Iterable[tuple[_Past, list[Finding]]]) -> Iterator[Finding]:
    """The findings of all trainings, those of the same name in one."""
    named: dict[str, list[tuple[str, Finding]]] = {}
    for past, found in each:
        for one in found:
            named.setdefault(one.name, []).append((past.training.name, one))
    for same in named.values():
        first = same[0][1]
        if len(same) == 1:
            yield first
            continue
        costs = [one.cost_s for _, one in same if one.cost_s is not None]
        seen = [f"{name}: {'; '.join(one.evidence)}" for name, one in same[:MOST_SHOWN]]
        more = [f"and {len(same) - MOST_SHOWN} trainings more"] if len(same) > MOST_SHOWN else []
        cost_s, unpriced = (sum(costs), "") if costs else (None, first.unpriced)
        yield replace(first, evidence=(*seen, *more), cost_s=cost_s, unpriced=unpriced)


# --- the whole run ---------------------------------------------------------------------------------------


def _of_run(run: RunFiles, past: Sequence[_Past]) -> Iterator[Finding]:
    yield from _stopped(run, past)
    whole_s = sum(one.seconds or 0.0 for one in past)
    for check in checks_of(run):
        known = next((found for begin, found in QUALITY.items() if check.what.startswith(begin)), None)
        if known is None or check.outcome != LOOK:
            continue
        name, what, change = known
        is_vain = name == "no-model" and whole_s > 0
        if name == "no-model":
            change = f"look at the data and its target: `hotlap report {run.path}`; use the simple rule until then"
        elif name == "uncertain":
            change = (
                f"do not trust the gain yet; train on more data, or over other seeds: `hotlap compare {run.path} RUN`"
            )
        cost = {"cost_s": whole_s} if is_vain else {"unpriced": "the trust in its results"}
        yield Finding(name=name, what=what, evidence=(check.found,), change=change, **cost)


def _stopped(run: RunFiles, past: Sequence[_Past]) -> Iterator[Finding]:
    """A run that is gone and did not come to its end."""
    live = next((one.training.live for one in past if one.training.live), {})
    is_killed = bool(live) and live.get("ended") is not True
    if run.is_live or (run.is_finished and not (run.kind == SCRIPT and is_killed)):
        return
    step, steps = number(live.get("step")), number(live.get("steps"))
    reached = f"at step {step:,.0f}{f' of {steps:,.0f}' if steps else ''}" if step is not None else ""
    why = next((words(one.training.ended.get("stopped")) for one in past if one.training.ended), "")
    again = past[0].command if past else "train.py"
    change = f"`hotlap run {again}` starts it again" if run.kind == SCRIPT else f"`hotlap resume {run.path}`"
    what = "the process was killed before the run came to its end" if is_killed else "the run did not come to its end"
    yield Finding(name="stopped", what=what, evidence=tuple(filter(None, (reached, why))), change=change)


# --- one training ----------------------------------------------------------------------------------------


def _of_training(past: _Past) -> Iterator[Finding]:
    for look in (_faults, _bounds, _evaluation, _slower, _tuning, _not_tried, _memory, _hardware, _learning):
        yield from look(past)


def _faults(past: _Past) -> Iterator[Finding]:
    entries = [one for one in past.training.ledger or () if one.outcome == "fault"]
    for begin, (name, what, change) in FAULTS.items():
        same = [entry for entry in entries if entry.what.startswith(begin)]
        if name == "out-of-memory":  # its entries are named by the change of plan that answered it
            same = [entry for entry in entries if entry.why.startswith(begin)]
        if not same:
            continue
        times = f" {len(same)} times" if len(same) > 1 else ""
        seen = [f"step {one.step:,}: {words(one.why or one.what)}" for one in same[:MOST_SHOWN]]
        change = change.format(command=past.command)
        yield Finding(name=name, what=f"{what}{times}", evidence=tuple(seen), change=change)


def _bounds(past: _Past) -> Iterator[Finding]:
    """What held the training up: by the paces with and without it, by the samples, or by what its process saw last."""
    live = mapping(past.training.live.get("bound"))
    known = _conditions(past)
    yield from filter(None, known.values())
    looks = {name: look for name, look in SAMPLED.items() if name not in known}
    found = {name: seen for name, look in looks.items() if (seen := look(past.training)) is not None}
    by, share = words(live.get("by")), number(live.get("share"))
    if by in BOUNDS and by not in SAMPLED:
        found[by] = share, f"at the end {words(live.get('why'))}"
    if {"feeding", "launching", "synchronising", "pageable copies"} & found.keys():
        found.pop("gpu-idle", None)  # that is how it shows
    for name, (part, why) in found.items():
        if part is None or (part >= LEAST_SHARE and part * (past.seconds or math.inf) >= LEAST_S):
            what, change = BOUNDS[name]
            part = None if part is None else min(1.0, part)
            yield past.finding(_hyphened(name), what, share=part, change=change, seen=[why])


def _hyphened(bound: str) -> str:
    """The name of a finding."""
    return {"pageable copies": "copies"}.get(bound, bound.replace(" ", "-"))


def _conditions(past: _Past) -> dict[str, Finding | None]:
    """What the ledger says of conditions of the host, which compares the paces with and without them; None: no cost."""
    found: dict[str, Finding | None] = {}
    for name in ("another process", "throttling", "swapping", "running on battery"):
        same = [one for one in past.training.ledger or () if one.outcome == "fault" and one.what.startswith(name)]
        over = [one for one in same if one.what != name] or same[-1:]  # a run that was killed knows no end of it
        lost = [lost_s for one in over if (lost_s := number(one.figures.get("lost_s"))) is not None]
        if over:
            what, change = BOUNDS[name]
            finding = past.finding(_hyphened(name), what, share=None, change=change, seen=[one.why for one in over[:2]])
            priced = replace(finding, cost_s=sum(lost), unpriced="") if sum(lost) > 0 else None
            found[name] = priced if lost else finding
    return found


def _evaluation(past: _Past) -> Iterator[Finding]:
    """Evaluations that take much of a run: what it costs to make more than a tenth of the time of them."""
    ended, seconds = past.training.ended, past.seconds
    took_s, count = number(ended.get("evaluation_s")), len(past.training.history)
    if seconds is None or took_s is None or not count or took_s < 2 * LEAST_SHARE * seconds or took_s < LEAST_S:
        return
    steps, share = number(ended.get("steps")) or 0.0, LEAST_SHARE * seconds / took_s
    every = math.ceil(steps / count / share) if steps else None
    yield Finding(
        name="evaluation",
        what="evaluations take a large part of the run",
        evidence=(f"{count} evaluations took {show_seconds(took_s)}, the steps {show_seconds(seconds)}",),
        cost_s=took_s - LEAST_SHARE * seconds,
        change=f"evaluate less often: eval_every={every}" if every else "evaluate less often: eval_every=N",
    )


def _slower(past: _Past) -> Iterator[Finding]:
    """Steps that took longer in the last quarter of the evaluations than in the second: the first has the tuning."""
    known = [(number(one.get("step")), number(one.get("elapsed_s"))) for one in past.training.history]
    points = [(step, at_s) for step, at_s in known if step is not None and at_s is not None]
    gaps = [(after[0] - before[0], after[1] - before[1]) for before, after in pairwise(points)]
    paces = [took_s / steps for steps, took_s in gaps if steps > 0 and took_s > 0]
    quarter = len(paces) // 4
    if quarter < 2:
        return
    early, late = median(paces[quarter : 2 * quarter]), median(paces[-quarter:])
    lost_s = sum(max(0.0, took_s - early * steps) for steps, took_s in gaps[2 * quarter :])
    if late > LONGER * early and lost_s >= LEAST_S:
        yield Finding(
            name="slower",
            what="it became slower while it trained",
            evidence=(f"{show_seconds(early)} a step early, {show_seconds(late)} at the end",),
            cost_s=lost_s,
            change=f"`hotlap report {past.run.path}` shows GPU, cores and memory over time",
        )


def _tuning(past: _Past) -> Iterator[Finding]:
    total = total_of(past.training.ledger)
    cost_s, saved_s = number(total.get("cost_s")), number(total.get("saved_s"))
    if cost_s is None or saved_s is None or saved_s >= -LEAST_S:
        return
    plan = past.training.path / "plan.toml"
    yield Finding(
        name="tuning",
        what="tuning cost more than it saved",
        evidence=(f"it cost {show_seconds(cost_s)}", f"net loss {show_seconds(-saved_s)}"),
        cost_s=-saved_s,
        change=f"use the plan that it found: --plan {plan}; or none: --plan off",
    )


def _not_tried(past: _Past) -> Iterator[Finding]:
    """Moves that only their trial kept out."""
    left = [row for row in past.moves if row.outcome == "not tried" and not row.unfit and row.needs_s]
    if not left:
        return
    needs_s = math.ceil(1.25 * max(row.needs_s or 0.0 for row in left))
    option = f"hotlap run --tune-seconds {needs_s} {past.command}" if past.run.kind == SCRIPT else f"tune_s={needs_s}"
    yield Finding(
        name="not-tried",
        what=f"{len(left)} move{'s' if len(left) > 1 else ''} may pay, and trying would have cost too much",
        evidence=tuple(f"{row.what}: {row.why}" for row in left[:MOST_SHOWN]),
        unpriced="what it would have saved shows in a trial",
        change=f"`{option}`",
    )


def _memory(past: _Past) -> Iterator[Finding]:
    """Memory that grows from the second quarter of the samples to the last, where no fault names it."""
    if any(one.what.startswith("memory grows") for one in past.training.ledger or ()):
        return
    for part, name, where in (("host", "own_ram_bytes", "of the host"), ("torch", "allocated_bytes", "of the GPU")):
        known = [(number(one.get("step")), number(mapping(one.get(part)).get(name))) for one in past.training.samples]
        points = [(step, held) for step, held in known if step is not None and held is not None]
        quarter = len(points) // 4
        if quarter < 2:
            continue
        early, late = points[quarter : 2 * quarter], points[-quarter:]
        before, after = median(held for _, held in early), median(held for _, held in late)
        steps = median(step for step, _ in late) - median(step for step, _ in early)
        if after <= GROWN * before or after - before < LEAST_GROWN or steps <= 0:
            continue
        each = (after - before) / steps
        yield Finding(
            name="memory-grows",
            what=f"memory {where} grows while it trains",
            evidence=(f"{show_bytes(before)} early, {show_bytes(after)} at the end", f"{show_bytes(each)} a step"),
            change=f"`hotlap memory {past.command}` names the lines",
        )


def _hardware(past: _Past) -> Iterator[Finding]:
    environment, training = past.training.environment, past.training
    gpus = [words(mapping(one).get("name")) for one in listing(environment.get("gpus"))]
    named = [training.live.get("device"), training.result.get("device"), training.job.get("device")]
    device = next((one for one in named if isinstance(one, str) and one.startswith(("cuda", "cpu"))), "")
    if gpus and device == "cpu":
        change = "move model and batches to the GPU: model.to('cuda'), x.to('cuda'); for a job device='cuda'"
        yield past.finding("on-cpu", "a GPU was there, and the CPU trained", share=None, change=change, seen=gpus[:1])
    elif len(gpus) > 1 and device.startswith("cuda") and past.run.kind != TREES:
        change = "run another training beside it: CUDA_VISIBLE_DEVICES=1 hotlap run …, or `hotlap.fit_many`"
        what = f"one of {len(gpus)} GPUs worked"
        yield past.finding("one-gpu", what, share=None, change=change, seen=[", ".join(gpus)])
    cores = int(number(mapping(environment.get("cpu")).get("cores")) or 1)
    variables = {name: one for name, one in mapping(environment.get("variables")).items() if isinstance(one, str)}
    harms = [one for one in variable_problems(variables, cores) if one.severity is not Severity.NOTE]
    if harms:
        what = "variables of the environment slow it down"
        seen, change = [f"{one.what}: {one.costs}" for one in harms], "; ".join(one.do for one in harms)
        yield past.finding(
            "variables", what, share=None, change=change.replace("{", "{{").replace("}", "}}"), seen=seen
        )


def _learning(past: _Past) -> Iterator[Finding]:
    """Whether the model learnt anything, and for how long."""
    training, history, seconds = past.training, past.training.history, past.seconds
    losses = [number(one.get("train_loss")) for one in history if "train_loss" in one]
    known = [one for one in losses if one is not None]
    if losses and not known:
        what, change = "the loss was NaN or infinite throughout", "a lower learning rate; look at the data for NaN"
        yield past.finding("not-finite", what, share=1.0, change=change, seen=[f"{len(losses)} evaluations"])
    elif len(known) > 1 and known[-1] > known[0] - FELL * abs(known[0]):
        seen = [f"training loss {known[0]:.4g} at the first evaluation, {known[-1]:.4g} at the last"]
        change = "try another learning rate, and look at loss and labels"
        yield past.finding("not-learning", "the training loss did not fall", share=1.0, change=change, seen=seen)
    steps, updates = number(training.ended.get("steps")), number(training.ended.get("updates"))
    if steps and updates is not None and steps - updates > 0.01 * steps:
        seen = [f"{steps - updates:,.0f} of {steps:,.0f} steps had gradients that are not finite"]
        change = "a lower learning rate, or bf16 in place of fp16"
        part = (steps - updates) / steps
        yield past.finding("skipped-steps", "updates were skipped", share=part, change=change, seen=seen)
    valid = [(loss, one) for one in history if (loss := number(one.get("valid_loss"))) is not None]
    if len(valid) > 2 and training.job.get("patience") is None:
        best, last = min(valid, key=lambda one: one[0]), valid[-1]
        ends = [number(one.get("elapsed_s")) for one in (best[1], last[1])]
        if last[0] > 1.05 * best[0] and ends[0] is not None and ends[1] is not None and seconds:
            seen = [f"validation loss {best[0]:.4g} after {show_seconds(ends[0])}, {last[0]:.4g} at the end"]
            part = min(1.0, max(0.0, ends[1] - ends[0]) / seconds)
            what = "it trained on after its best evaluation, and became worse"
            yield past.finding("overfitting", what, share=part, change="stop there: patience=3", seen=seen)


# --- notes -----------------------------------------------------------------------------------------------


def _bound_line(past: _Past) -> str:
    found = mapping(past.training.live.get("bound"))
    return f"bound by {words(found['by'])} at the end: {words(found.get('why'))}" if found.get("by") else ""


def _notes(past: _Past) -> Iterator[str]:
    """What was tried and not kept, with the reason."""
    if not any(one.kind == "baseline" for one in past.training.ledger or ()):
        return  # nothing was timed
    for outcome in ("rejected", "undecided", "not tried"):
        same = [row for row in past.moves if row.outcome == outcome and not row.unfit and not row.needs_s]
        if same:
            yield f"{outcome}: {'; '.join(f'{row.what} ({row.why})' if row.why else row.what for row in same)}"


# --- what samples show -----------------------------------------------------------------------------------

Sampled = tuple[float | None, str]
"""A part of the time, and the figures behind it."""


def _gpu(training: Training) -> list[dict[str, Any]]:
    """The samples of the training's GPU."""
    return [mapping(listing(sample.get("gpus"))[0]) for sample in training.samples if listing(sample.get("gpus"))]


def _throttled(training: Training) -> Sampled | None:
    """Clocks below the highest, while the GPU works and the driver gives a reason."""
    lost, reasons = [], dict[str, None]()
    for gpu in _gpu(training):
        clock, most, busy = (number(gpu.get(name)) for name in ("sm_mhz", "most_sm_mhz", "busy"))
        is_slow = bool(clock and most and clock <= SLOWER * most and (busy is None or busy >= IDLE))
        causes = [words(one) for one in listing(gpu.get("throttled"))]
        lost.append(1 - clock / most if is_slow and causes and clock and most else 0.0)
        reasons |= dict.fromkeys(causes)
    if len(lost) < MOST_SHOWN or not any(lost):
        return None
    slow = sum(one > 0 for one in lost)
    return fmean(lost), f"in {slow} of {len(lost)} samples its clock was lowered: {', '.join(reasons)}"


def _others(training: Training) -> Sampled | None:
    """Other processes on the GPU, or on all cores of the host."""
    busy = [found for one in _gpu(training) if (found := number(one.get("others_busy"))) is not None]
    if len(busy) >= MOST_SHOWN and fmean(busy) >= LEAST_SHARE:
        return fmean(busy), f"others computed on the GPU {100 * fmean(busy):.0f} % of the time"
    if training.plan is not None and training.plan.feed.workers:
        return None  # workers count as others
    parts = []
    for sample in training.samples:
        cores, used, own = (number(mapping(sample.get("host")).get(n)) for n in ("cores", "cores_busy", "own_cores"))
        if cores and used is not None and own is not None:
            is_taken = used >= FULL * cores and used - own >= cores / 4
            parts.append((used - own) / cores if is_taken else 0.0)
    if len(parts) < MOST_SHOWN or not any(parts):
        return None
    return fmean(parts), f"in {sum(map(bool, parts))} of {len(parts)} samples no core was free, and others had most"


def _idle(training: Training) -> Sampled | None:
    busy = [found for one in _gpu(training) if (found := number(one.get("busy"))) is not None]
    device = training.live.get("device")
    if len(busy) < MOST_SHOWN or fmean(busy) >= IDLE or not (isinstance(device, str) and device.startswith("cuda")):
        return None
    return 1 - fmean(busy), f"the GPU worked {100 * fmean(busy):.0f} % of the time"


SAMPLED: dict[str, Callable[[Training], Sampled | None]] = {
    "throttling": _throttled,
    "another process": _others,
    "gpu-idle": _idle,
}
