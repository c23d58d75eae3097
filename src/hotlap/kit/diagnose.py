"""`hotlap diagnose`: what is wrong with a training, measured on its own updates, with cost and remedy of each finding.

`diagnose_script` and `diagnose_job` observe a training; `findings_of` judges what they observed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hotlap.core.errors import HotlapError, TrainingError
from hotlap.core.job import Job
from hotlap.core.terminal import Say
from hotlap.core.units import show_bytes, show_seconds
from hotlap.fitting.lost_workers import NO_SHARED_MEMORY
from hotlap.kit import other_ways, remedies
from hotlap.kit.bench import Bench, JobTrials, opened
from hotlap.kit.observed import LineCost, Observed
from hotlap.kit.probe import BEGINS_S, RUNS, ProbeRequest, ProbeResult, ScriptEndedError, run_probe
from hotlap.machine.limits import read_cpu
from hotlap.machine.variables import HARMS
from hotlap.monitor.findings import Finding, Findings
from hotlap.monitor.growing_memory import GrowingMemory
from hotlap.monitor.verdict import Seen, verdict
from hotlap.script.advice import INSTEAD
from hotlap.script.running import Target

MOST_S = 60.0
FEEDING = 0.1
"""The share of an update from which on waiting for batches is a finding."""
LEAST = 0.03
"""The share of an update from which on a line is a finding."""
LARGER, GAIN = 8, 0.2
"""How much larger a batch to try, and the share of an update that it has to save."""
VARIABLE = 0.05
"""The share of an update that a variable has to cost."""
GROWS_BYTES = 32 * 2**20
"""Memory that has to grow by so much over the training."""
UNKNOWN = 1000
"""Updates that costs are for, if neither the training nor its epochs show their length."""
BEFORE_TRIALS = 0.6
"""The share of the time for the first look; the rest is for tries of other settings."""
TRY_S = 10.0
"""Most seconds for the updates of a try."""
LATE = 0.25
"""The share of the time beyond it by which the start of a script may end late, in a try."""
EVERY = 50
"""Updates between two entries of a log, in remedies."""
_LOGS = re.compile(r"flush|fsync|write|print\(|log|save|dump|add_scalar|savefig", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What tries of other settings gave; None for those not made."""

    larger: int | None = None
    """A larger batch."""
    own_sample_s: float | None = None
    larger_sample_s: float | None = None
    """Seconds a sample as it is, and with the larger batch."""
    bare_step_s: float | None = None
    """Seconds an update without the harmful variables."""
    left_out: tuple[str, ...] = ()
    """Tries that there was no time for."""


def diagnose_script(target: Target, *, seconds: float, say: Say) -> Findings:
    """Observe a script for some updates in a new process, then try other settings while there is time."""
    until = time.monotonic() + seconds
    say(f"diagnose   runs some updates of {target.name}, and looks for an evaluation")
    request = ProbeRequest(diagnose_s=BEFORE_TRIALS * seconds, begins_s=max(seconds, BEGINS_S))
    command = shlex.join(target.words)
    try:
        seen = run_probe(target, request)
    except ScriptEndedError as error:
        lost = _lost_workers(error)
        if lost is None:
            raise
        return Findings(name=target.name, found=(lost,), notes=(RUNS,))
    if seen.out_of_memory is not None:
        return Findings(name=target.name, found=(_out_of_memory(seen.out_of_memory, command),), notes=(RUNS,))
    observed = Observed.of(seen.diagnosis)
    if not observed.updates:
        raise TrainingError(f"{target.name} ended after {seen.updates:,} updates, too few to diagnose it")
    tried = _tries(target, seen, observed, until + LATE * seconds, say)
    found = findings_of(target.name, seen, observed, tried, command)
    return replace(found, notes=(RUNS, *found.notes))


def _tries(target: Target, seen: ProbeResult, observed: Observed, until: float, say: Say) -> Tried:
    """Try the script without harmful variables, and with a larger batch, as far as each may begin to train in time."""
    tried, left_out = Tried(), []
    names, size = [one.partition("=")[0] for one in observed.variables], _larger(seen)
    if names and time.monotonic() + observed.begun_s > until:
        left_out.append(f"to run it without {', '.join(names)}")
    elif names:
        say(f"diagnose   runs it without {', '.join(names)}")
        bare = _tried(target, ProbeRequest(without=names, lap_s=0.2), until)
        tried = tried if bare is None else replace(tried, bare_step_s=bare.step_s)
    if size is not None and time.monotonic() + observed.begun_s > until:
        left_out.append(f"to try batches of {size:,}")
    elif size is not None:
        say(f"diagnose   tries batches of {size:,}")
        request = ProbeRequest(loader=seen.loader, change={"batch_size": size}, laps=3, lap_s=0.2)
        large = _tried(target, request, until)
        if large is not None and large.sample_s is not None:
            tried = replace(tried, larger=size, own_sample_s=seen.sample_s, larger_sample_s=large.sample_s)
    return replace(tried, left_out=tuple(left_out))


def _tried(target: Target, request: ProbeRequest, until: float) -> ProbeResult | None:
    try:
        seen = run_probe(target, request, most_s=max(1.0, until - time.monotonic()) + TRY_S)
    except HotlapError:  # it may only work as it is
        return None
    return seen if seen.laps else None


def _larger(seen: ProbeResult) -> int | None:
    """A larger batch that leaves several updates in an epoch."""
    if seen.batch_size is None or seen.iterates or not seen.samples:
        return None
    size = min(LARGER * seen.batch_size, seen.samples // 2)
    return size if size >= 4 * seen.batch_size else None


def _out_of_memory(why: str, command: str) -> Finding:
    return Finding(
        name="out-of-memory",
        what="an update does not fit in memory",
        evidence=(why,),
        change=f"`hotlap memory {command}` shows what holds it, `hotlap batch {command}` finds which batch fits",
    )


def _lost_workers(error: ScriptEndedError) -> Finding | None:
    """The finding of workers that died; None if the script ended by another error."""
    seen = error.seen
    if seen is None or not seen.diagnosis.get("lost_workers"):
        return None
    is_short = any(words in error.why for words in NO_SHARED_MEMORY)
    loader = seen.diagnosis["loader_at"]
    shm = f"/dev/shm has {show_bytes(shutil.disk_usage('/dev/shm').free)} free" if os.path.isdir("/dev/shm") else ""  # noqa: PTH112
    cause = (
        "/dev/shm is too small for its batches: enlarge it, as with docker run --shm-size=8g"
        if is_short
        else "load in the training's own process, which shows the sample at fault; a kill without an error is often "
        "memory: `dmesg` names it"
    )
    diff = "" if is_short else remedies.argument_set(loader, "num_workers", "0")
    return Finding(
        name="workers-die",
        what="workers of the loader die, and the training with them",
        evidence=tuple(filter(None, (error.why, f"after {seen.updates:,} updates", shm))),
        where=loader or None,
        change="\n".join(filter(None, (cause, diff))),
    )


# --- the findings of what was observed -----------------------------------------------------------------------


def findings_of(name: str, seen: ProbeResult, observed: Observed, tried: Tried, command: str) -> Findings:
    """Judge what was observed. `command` names the training behind `hotlap run`."""
    judge = _Judge(seen, observed, tried, command)
    found = tuple(judge.found())
    step_s, n = observed.step_s, observed.updates
    rate = 0.0 if observed.evaluation is None else observed.evaluation.seconds / max(1.0, observed.evaluation.every)
    bound = verdict(
        Seen(
            seconds=n * (step_s + rate),
            steps=n,
            feeding_s=n * observed.feeding_s,
            evaluation_s=n * rate,
            on_gpu=seen.device != "cpu",
        )
    )
    line = f"{bound.line}; {show_seconds(step_s)} an update" if bound is not None else ""
    whole_s = judge.updates * (step_s + rate)
    judge.notes += _unseen(observed, tried)
    return Findings(name=name, found=found, bound=line, over=judge.over, whole_s=whole_s, notes=tuple(judge.notes))


def _unseen(observed: Observed, tried: Tried) -> Iterator[str]:
    """Notes on what there was no time for."""
    if observed.unseen and observed.ended:
        yield f"the script ended before hotlap could look for {', '.join(observed.unseen)}"
    left = [f"to look for {', '.join(observed.unseen)}"] if observed.unseen and not observed.ended else []
    left += tried.left_out
    if left:
        yield f"there was no time left {', or '.join(left)}: give it more with --seconds"


class _Judge:
    """Makes findings of what was observed of a training."""

    def __init__(self, seen: ProbeResult, observed: Observed, tried: Tried, command: str) -> None:
        self._seen, self._observed, self._tried, self._command = seen, observed, tried, command
        self._step_s = observed.step_s
        total, epoch = observed.total_updates, observed.epoch_updates
        self.updates = total or epoch or UNKNOWN
        self.over = f"{self.updates:,} updates" + (", an epoch" if total is None and epoch is not None else "")
        self.notes: list[str] = []

    def found(self) -> Iterator[Finding]:
        """All findings, in any order."""
        yield from self._growing()
        yield from self._feeding()
        yield from self._lines()
        yield from self._waits()
        yield from self._copies()
        yield from self._device()
        yield from self._evaluation()
        yield from self._variables()
        yield from self._batch()
        yield from self._first_epoch()

    def _costs(self, update_s: float) -> dict[str, Any]:
        """The cost of so many seconds an update, as fields of a finding."""
        update_s = min(update_s, self._step_s)  # calls are timed in other updates than steps
        return {"cost_s": update_s * self.updates, "share": update_s / self._step_s}

    @property
    def _computing_s(self) -> float:
        """What is left of an update for the model."""
        rest = self._observed.feeding_s + sum(one.update_s for one in (*self._observed.own, *self._observed.copies))
        return max(0.0, self._step_s - rest)

    def _of_update(self, seconds: float) -> str:
        return f"{show_seconds(seconds)} of {show_seconds(self._step_s)} an update"

    # --- memory ------------------------------------------------------------------------------------

    def _growing(self) -> Iterator[Finding]:
        observed = self._observed
        held = [GrowingMemory(**one) for one in observed.held]
        keeps_graphs = bool(held) and (observed.graph_steps > 0 or "steps of autograd" in held[0].what)
        size = max(sum(one.bytes_an_update for one in held), int(observed.rss_an_update) if keeps_graphs else 0)
        if keeps_graphs:
            yield self._graphs_kept(held, size)
        elif held and size * self.updates >= GROWS_BYTES:
            most = held[0]
            holder = f", held by {most.holder}" if most.holder else ""
            yield Finding(
                name="memory-grows",
                what=f"memory grows with every update{holder}",
                evidence=tuple(str(one) for one in held),
                where=most.line.partition(" in ")[0] or None,
                grows_bytes=size,
                change="keep a number (.item(), .norm()) or a copy on disk, and let go of the tensors",
            )
        elif held:
            self.notes.append(f"memory grows a little: {held[0]}")
        for one in observed.retained:
            yield Finding(
                name="graph-retained",
                what="a backward pass keeps its graph, and no other pass uses it",
                evidence=("one backward pass an update", "its activations stay in memory into the next update"),
                unpriced="memory only",
                where=one.where,
                change="\n".join(
                    ["drop retain_graph=True", remedies.lines_changed([one.where], _without_retaining)]
                ).rstrip(),
            )

    def _graphs_kept(self, held: Sequence[GrowingMemory], size: int) -> Finding:
        most = next((one for one in held if one.holder), held[0])
        where, holder = most.line.partition(" in ")[0], self._observed.graph_holder or most.holder
        file = where.rpartition(":")[0] or self._seen_file
        diff = remedies.detached(file, holder) if file and holder else ""
        held_by = f": {holder}" if holder else ""
        return Finding(
            name="graphs-kept",
            what=f"losses are kept with the graph behind them, and memory grows with every update{held_by}",
            evidence=(
                *(str(one) for one in held),
                f"{self._observed.graph_steps:,} steps of autograd stay from each update",
                f"the process grows by {show_bytes(size)} an update",
            ),
            where=_first_changed(file, diff) or where or None,
            grows_bytes=size,
            change="\n".join(filter(None, ("keep the value without its graph (.detach() or .item())", diff))),
        )

    @property
    def _seen_file(self) -> str:
        """The script's file, by one of its lines."""
        return (self._observed.loader_at or self._observed.feeding_at).rpartition(":")[0]

    # --- what takes time in each update ------------------------------------------------------------

    def _feeding(self) -> Iterator[Finding]:
        observed, seen = self._observed, self._seen
        if observed.feeding_s < FEEDING * self._step_s:
            return
        workers = f"{seen.workers} worker{'' if seen.workers == 1 else 's'}"
        count = max(2, min(read_cpu().cores, 8)) if not seen.workers else 2 * seen.workers
        diff = remedies.argument_set(observed.loader_at, "num_workers", str(count)) if observed.loader_at else ""
        finds = f"`hotlap workers {self._command}` finds the best number"
        yield Finding(
            name="feeding",
            what="updates wait for their batches",
            evidence=(self._of_update(observed.feeding_s), workers, *(f"{n} {_s:.1e} s" for n, _s in seen.transforms)),
            where=(observed.feeding_at if not seen.workers else "") or observed.loader_at or None,
            change="\n".join(filter(None, (f"`hotlap run {self._command}` tries to mend it; {finds}", diff))),
            **self._costs(observed.feeding_s),
        )

    def _lines(self) -> Iterator[Finding]:
        groups: dict[str, list[LineCost]] = {}
        for one in self._observed.own:
            groups.setdefault(one.caller or one.where, []).append(one)
        for caller, group in groups.items():
            spent_s = sum(one.update_s for one in group)
            if spent_s < LEAST * self._step_s:
                continue
            most = group[0]
            texts = [remedies.text_at(one.where) for one in group]
            logs = any(_LOGS.search(text) for text in (*texts, remedies.text_at(caller)))
            through = sorted({one.what for one in group if one.what})
            shown = [f"{one.where}: {text}" for one, text in zip(group, texts, strict=True)]
            yield Finding(
                name="logging" if logs else "own-code",
                what="the script writes a log in every update, and the training waits for it"
                if logs
                else "lines of the script take time in every update, and compute nothing with torch",
                evidence=(
                    self._of_update(spent_s),
                    *shown[:3],
                    *([f"through {', '.join(through)}"] if through else []),
                ),
                where=most.where,
                change=f"do it every {EVERY} updates\n{remedies.only_every(caller, EVERY)}".rstrip()
                if logs
                else "take it out of the loop, or into the dataset, where workers do it beside the training",
                **self._costs(spent_s),
            )

    def _waits(self) -> Iterator[Finding]:
        waits = [one for one in self._observed.waits if one.update_s >= LEAST * self._step_s]
        if not waits:
            return
        spent_s = min(self._step_s, sum(one.update_s for one in waits))
        yield Finding(
            name="synchronising",
            what="the script waits for the GPU in every update",
            evidence=tuple(
                f"{one.where}: {one.what} {one.times:.3g} times, up to {show_seconds(one.update_s)}" for one in waits
            ),
            where=waits[0].where,
            change=INSTEAD,
            **self._costs(spent_s),
        )

    def _copies(self) -> Iterator[Finding]:
        held = " ".join(one["line"] for one in self._observed.held)
        copies = [one for one in self._observed.copies if f"{one.where} " not in f"{held} "]  # those are for the list
        spent_s = sum(one.update_s for one in copies)
        if not copies or spent_s < LEAST * self._step_s:
            return
        diff = remedies.lines_changed([one.where for one in copies], remedies.without_copy)
        yield Finding(
            name="copies",
            what="data is copied, and neither the copy nor the original changes after that",
            evidence=(
                self._of_update(spent_s),
                *(f"{one.where}: {one.what} of {show_bytes(one.size)}, {one.times:.3g} times" for one in copies),
            ),
            where=copies[0].where,
            change="\n".join(filter(None, ("use the tensor as it is", diff))),
            **self._costs(spent_s),
        )

    # --- where and how the model computes ----------------------------------------------------------

    def _device(self) -> Iterator[Finding]:
        observed = self._observed
        pair, whole = observed.wide_updates or observed.wide, observed.wide_updates is not None
        if pair is not None and pair.saved:
            file = self._seen_file
            diff = remedies.every_line_changed(file, remedies.narrowed) if file else ""
            yield Finding(
                name="float64",
                what="the model computes in float64, which float32 does faster",
                evidence=(
                    f"{'an update takes' if whole else 'its passes take'} {show_seconds(pair.now_s)}, "
                    f"and {show_seconds(pair.then_s)} in float32",
                ),
                where=_first_changed(file, diff) or None,
                change="\n".join(filter(None, ("use float32 for the model and the data", diff))),
                **self._costs(pair.saved * (self._step_s if whole else self._computing_s)),
            )
        if observed.on_cpu is not None:
            pair = observed.on_cpu
            yield Finding(
                name="on-cpu",
                what="the model computes on the CPU, and a GPU works",
                evidence=(f"its passes take {show_seconds(pair.now_s)}, and {show_seconds(pair.then_s)} on the GPU",),
                change='model.to("cuda") before the optimizer is made, and batch = batch.to("cuda") in each update',
                **self._costs(pair.saved * self._computing_s),
            )
        if observed.gpus > 1:
            yield Finding(
                name="one-gpu",
                what=f"the training uses one of {observed.gpus} GPUs",
                evidence=("the cost is the most that others could save; hotlap has not tried it",),
                change=f"torchrun --nproc-per-node {observed.gpus}, with DistributedDataParallel around the model",
                **self._costs((1 - 1 / observed.gpus) * self._computing_s),
            )

    def _evaluation(self) -> Iterator[Finding]:
        seen = self._observed.evaluation
        if seen is None or not seen.with_grad_s:
            return
        saved = seen.calls.saved if seen.calls is not None else 0.0
        calls = (
            f"a call takes {show_seconds(seen.calls.now_s)}, and {show_seconds(seen.calls.then_s)} without"
            if seen.calls is not None
            else "hotlap could not time a call without"
        )
        diff = remedies.under_no_grad(seen.where) if seen.where else ""
        yield Finding(
            name="evaluation-gradients",
            what="the evaluation records a graph for gradients that it never computes",
            evidence=(
                f"{show_seconds(seen.with_grad_s)} of {show_seconds(seen.seconds)} of an evaluation",
                calls,
                f"every {seen.every:,.0f} updates, in {seen.mode} mode",
            ),
            cost_s=saved * seen.with_grad_s * self.updates / max(1.0, seen.every),
            where=seen.where or None,
            change="\n".join(filter(None, ("evaluate inside torch.no_grad()", diff))),
        )

    # --- settings ----------------------------------------------------------------------------------

    def _variables(self) -> Iterator[Finding]:
        names, bare_s = self._observed.variables, self._tried.bare_step_s
        if not names:
            return
        costs = [harm.costs for one in names for harm in HARMS if one.startswith(f"{harm.name}=")]
        if bare_s is None or self._step_s - bare_s < VARIABLE * self._step_s:
            seen = "hotlap has not tried without" if bare_s is None else "costs nothing that hotlap could measure"
            self.notes.append(f"{', '.join(names)}: {seen}")
            return
        yield Finding(
            name="variables",
            what=f"{', '.join(names)}: {'; '.join(costs)}",
            evidence=(f"{show_seconds(self._step_s)} an update, and {show_seconds(bare_s)} without",),
            change=f"unset {' '.join(one.partition('=')[0] for one in names)}",
            **self._costs(self._step_s - bare_s),
        )

    def _batch(self) -> Iterator[Finding]:
        tried, own = self._tried, self._seen
        size, own_s, large_s = tried.larger, tried.own_sample_s, tried.larger_sample_s
        if size is None or own_s is None or large_s is None or own.batch_size is None:
            return
        # What other findings cost in each update is theirs, though fewer updates pay it less often.
        others = sum(one.update_s for one in (*self._observed.own, *self._observed.waits))
        fewer = 1 - own.batch_size / size
        bare_s = min(self._step_s, own_s * own.samples_an_update)  # of a job, timed apart from its batches
        saved_s = (1 - large_s / own_s) * bare_s - fewer * others
        observed = self._observed
        for pair in (observed.wide_updates or observed.wide, observed.on_cpu):  # what mending these leaves of it
            saved_s *= 1 - pair.saved if pair is not None else 1
        if saved_s < GAIN * self._step_s:
            return
        a_sample = f"{show_seconds(own_s)} a sample, and {show_seconds(large_s)} with {size:,}"
        diff = remedies.argument_set(self._observed.loader_at, "batch_size", str(size))
        yield Finding(
            name="small-batch",
            what=f"batches of {own.batch_size:,} are too small for the device",
            evidence=(a_sample,),
            where=self._observed.loader_at or None,
            changes_training=True,
            change="\n".join(
                filter(
                    None,
                    (
                        "your choice: larger batches make fewer updates and need another learning rate; "
                        f"`hotlap batch {self._command}` finds the fastest",
                        diff,
                    ),
                )
            ),
            **self._costs(saved_s),
        )

    def _first_epoch(self) -> Iterator[Finding]:
        observed = self._observed
        if observed.first_epoch:
            first, *others = observed.first_epoch
            yield Finding(
                name="first-epoch",
                what=first,
                evidence=(*others, f"{show_seconds(observed.slower_s)} longer"),
                cost_s=observed.slower_s * self.updates / max(1, observed.epoch_updates or self.updates),
                change="look for what grows with the epoch: lists, logs, files in a folder, a GPU that gets hot",
            )


def _without_retaining(line: str) -> str:
    return re.sub(r"\(\s*retain_graph\s*=\s*True\s*\)", "()", re.sub(r",\s*retain_graph\s*=\s*True", "", line))


def _first_changed(file: str, diff: str) -> str:
    """The first line that a diff takes out, as `train.py:31`; empty without a diff."""
    head = re.search(r"^@@ -(\d+)", diff, re.MULTILINE)
    if head is None:
        return ""
    body = diff[head.end() :].split("\n")[1:]
    before = next((at for at, line in enumerate(body) if line.startswith("-")), 0)
    return f"{file}:{int(head[1]) + before}"


# --- jobs ----------------------------------------------------------------------------------------------------


TIMED, TIMED_S = 20, 1.5
"""Least updates and seconds of a job to time."""


def diagnose_job(job: Job, *, name: str, seconds: float, say: Say) -> Findings:
    """Observe updates of a job in this process; its weights and its data are as before afterwards."""
    until = time.monotonic() + seconds
    say("diagnose   makes updates of the job as it is")
    with opened(job) as bench:
        trials = JobTrials(bench)
        try:
            seen = trials.unchanged()
        except TrainingError as error:
            if "does not fit" not in str(error):
                raise
            return Findings(name=name, found=(_out_of_memory(str(error), name),))
        tried, own_sample_s = Tried(), seen.sample_s  # both without waiting for batches
        observed = _observed(job, bench, seen)
        size = min(LARGER * (seen.batch_size or 1), bench.most)
        if size >= 4 * (seen.batch_size or 1) and time.monotonic() < until:
            say(f"diagnose   tries batches of {size:,}")
            large = trials.of_size(size, timed=True)
            if large.samples_per_s:
                tried = Tried(larger=size, own_sample_s=own_sample_s, larger_sample_s=1 / large.samples_per_s)
    return findings_of(name, seen, observed, tried, name)


def _observed(job: Job, bench: Bench, seen: ProbeResult) -> Observed:
    rig, inputs = bench.rig, list[Any]()
    handle = rig.model.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append((args, kwargs)), with_kwargs=True
    )
    windows, fed_s = rig.windows(), 0.0
    rig.advance(next(windows))
    handle.remove()
    rig.wait()
    count, began = 0, time.perf_counter()
    while count < TIMED or time.perf_counter() - began < TIMED_S:
        asked = time.perf_counter()
        window = next(windows)
        fed_s += time.perf_counter() - asked
        rig.advance(window)
        count += 1
    rig.wait()
    spent_s = time.perf_counter() - began
    seen.laps = [[spent_s, count * seen.samples_an_update]]
    seen.workers = rig.plan.feed.workers
    observed = Observed(
        updates=count,
        step_s=spent_s / count,
        feeding_s=fed_s / count,
        epoch_updates=rig.windows_here,
        total_updates=job.steps if job.epochs is None else job.epochs * rig.windows_here,
        held=seen.account["held"],
    )
    dtypes = {p.dtype for p in rig.model.parameters()}
    if torch.float64 in dtypes and inputs:
        observed.wide = other_ways.in_float32(rig.model, *inputs[0])
    if rig.device.type == "cpu" and torch.cuda.is_available() and inputs:
        observed.on_cpu = other_ways.on_gpu(rig.model, *inputs[0])
    return observed
