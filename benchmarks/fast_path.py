"""hotlap's fast plans against the trainings people write, and what they do to the numbers.

    python -m benchmarks.fast_path [--device cuda|cpu] [--only NAME] [--columns by_hand,hotlap,…] [--json FILE]
    python -m benchmarks.fast_path --texts FILE

Samples a second of whole steps in the steady state, the same batch in every column of a row. hotlap and its rival by
hand take turns in laps (A B B A), with one wait for the device a lap, and the ratio is the median over pairs with its
95 % interval. Nobody clips gradients but the guides' last loop. `fit` is one whole call: its rate while training, and
from call to return, run folder, capture and checkpoints included. Quality: the same training of 200 steps under the
fast plan and under the plainest one in fp32, and the cosine of the gradient of one batch in both precisions.

On a GPU the columns are guide_before, guide_after, lightning, by_hand, hotlap, compiled, fit and quality; on the CPU
loader, by_hand, gather, resident and quality, for the small works. `compiled` is hotlap's plan with the model compiled
under the capture, for two of the works; it takes turns with `hotlap`, and the seconds of compiling are told apart. A
column that fails says why, the others go on, and the exit code is 1.

Texts have dynamic and hf_trainer instead of lightning. The guides' loops pad to the longest of all texts, `dynamic` to
the longest of each batch; hf_trainer is the best of three settings. hotlap may reorder; a lap of it and of its rival
by hand is a whole epoch, since its batches are of several widths. With --texts, BERT-base is trained on the texts of a
CSV file (class, title, description; no header), and two columns show what the widths do: `one_width` is hotlap's plan
with all batches as wide as the longest text, `by_width` with a few widths but in shuffled order. Without a GPU it only
tells how much is padding, unless columns are named. `torch_attention` is a column of texts that runs where it is named
alone: hotlap's plan with the kernels of attention that torch chooses, to be had beside `hotlap`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotlap
from benchmarks import rivals, text_rivals
from benchmarks.paired import median_interval
from benchmarks.rivals import Steps, UnavailableError
from benchmarks.texts import Paddings, TextWork, file_work, text_works
from benchmarks.work import WORKS, Normalise, Work, called, channels_last
from hotlap.core.errors import PlanError
from hotlap.core.plan import HOME
from hotlap.engine.attention import left_to_torch

LOADERS = ("guide_before", "guide_after", "dynamic", "lightning", "hf_trainer")
"""These come first for all works: worker processes forked after a capture may die of what they inherit."""
GPU = (*LOADERS, "by_hand", "hotlap", "compiled", "fit", "quality")
CPU = ("loader", "by_hand", "gather", "resident", "quality")
TEXTS = ("guide_before", "dynamic", "by_hand", "one_width", "by_width", "hotlap", "quality")
"""Of the texts of a file."""
NAMED_ALONE = ("torch_attention",)
"""Columns that run only where they are named."""
TEXTS_ALONE = ("dynamic", "hf_trainer", "one_width", "by_width", *NAMED_ALONE)
OTHERS_ALONE = ("lightning", "loader")
"""Columns that other works do not have, and those that texts do not have."""
CONTESTS = {
    "cuda": [("by_hand", "hotlap"), ("hotlap", "compiled")],
    "cpu": [("loader", "gather"), ("loader", "resident")],
    "texts": [("by_hand", "hotlap"), ("one_width", "hotlap"), ("by_width", "hotlap"), ("torch_attention", "hotlap")],
}
"""Which columns take turns: the rival first."""
DYNAMIC_BATCHES = 16
"""In a lap of batches that are as wide as their longest text: one alone says little."""
SHORTEST_LAP_S = 0.05
LAST = 20
"""Steps at the end of a quality run whose mean loss is told."""


# --- plans and trainings -------------------------------------------------------------------------------


def fast_plan(work: Work, device: torch.device) -> hotlap.Plan:
    """The plan that suits a work; on the CPU whole batches out of memory and the fused optimizer."""
    if device.type != "cuda":
        return hotlap.Plan().but(kind="gather", optimizer="fused")
    return hotlap.Plan().but(
        kind="resident",
        precision=work.precision,
        optimizer="fused",
        mode="captured",
        replay_steps=work.plan_steps or work.replay_steps,
        layout=work.layout,
        autotune=work.images,
    )


def prepare_of(work: Work, plan: hotlap.Plan, device: torch.device) -> dict[str, Any]:
    """The `prepare` of a Rig or Job, where the work has one; in the numbers that the plan computes in."""
    if not work.images:
        return {}
    return {"prepare": Normalise(device, torch.bfloat16 if plan.numerics.precision == "bf16" else torch.float32)}


def make_rig(work: Work, model: nn.Module, plan: hotlap.Plan, device: torch.device) -> hotlap.Rig:
    """A work under a plan."""
    return hotlap.Rig(
        model,
        work.optimizer(model),
        work.loss,
        plan=plan,
        device=str(device),
        **prepare_of(work, plan, device),
    )


def engine(
    work: Work,
    model: nn.Module,
    device: torch.device,
    plan: hotlap.Plan,
    *,
    column: str = "hotlap",
    made: Callable[[hotlap.Rig], None] = lambda rig: None,
) -> Steps:
    """The work trained by hotlap; who wants to ask its rig anything is given it when it is `made`."""
    with left_to_torch() if column == "torch_attention" else nullcontext():
        rig = make_rig(work, model, plan, device)
    made(rig)
    given, settings = work.fed(column)
    try:
        for window in rig.feed(given, batch_size=work.batch, steps=10**9, drop_last=True, **settings):
            before = rig.samples
            rig.step(window)
            yield rig.samples - before
    finally:
        rig.close()


def steps_of(
    column: str, work: Work, device: torch.device, made: Callable[[hotlap.Rig], None] = lambda rig: None
) -> Steps:
    """A column's training, from the work's first weights."""
    model = work.build()
    if isinstance(work, TextWork):
        if column in ("guide_before", "guide_after", "dynamic", "by_hand"):
            steps: Steps = getattr(text_rivals, column)(work, model, work.data(), device)
            return steps
    else:
        theirs: dict[str, Callable[..., Steps]] = {
            "guide_before": rivals.guide_before,
            "guide_after": rivals.guide_after,
            "loader": rivals.plain_loader,
            "by_hand": rivals.by_hand,
        }
        if column == "by_hand" and device.type == "cpu":
            work = replace(work, replay_steps=1)  # with nothing to replay, a batch is best gathered when it is needed
        if column in theirs:
            return theirs[column](work, model, work.data(), device)
    plan = fast_plan(work, device)
    if column in ("gather", "resident"):
        plan = plan.but(kind=column)
    elif column == "compiled":
        plan = plan.but(compile=work.compiles)
    return engine(work, model, device, plan, column=column, made=made)


def applies(column: str, work: Work) -> bool:
    """Whether a work has a column."""
    if column == "compiled":
        return work.compiles != "no" and "compile" in HOME
    return column not in (OTHERS_ALONE if isinstance(work, TextWork) else TEXTS_ALONE)


def contests(work: Work, device: torch.device) -> list[tuple[str, str]]:
    """Which columns of a work take turns: the rival first."""
    return CONTESTS["texts" if isinstance(work, TextWork) else device.type]


def steps_a_round(work: Work, column: str) -> int:
    """Laps are of whole rounds: of what workers bring in a burst, or of batches of all widths."""
    if isinstance(work, TextWork) and column not in ("guide_before", "guide_after"):
        return DYNAMIC_BATCHES if column == "dynamic" else work.epoch_batches
    return rivals.WORKERS.get(column, 1)


# --- laps ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lap:
    """Whole steps between two waits for the device."""

    samples: int
    seconds: float

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds


class Laps:
    """A training in laps of a fixed number of `next`s, warmed up: clocks, autotuning and captures are behind it."""

    def __init__(
        self, steps: Iterator[int], device: torch.device, *, lap_s: float, warm_s: float, rounds: int = 1
    ) -> None:
        self._steps = steps
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._count = rounds
        next(steps)  # starts workers, captures
        begun = time.perf_counter()
        recent: deque[float] = deque(maxlen=3)
        while True:
            # Laps grow until they are long enough; together they are the warm-up. Lengths go by the fastest of
            # three: one slow lap, from whatever else the machine did, would leave all others too short.
            recent.append(self.lap().seconds / self._count)
            wanted = math.ceil(lap_s / min(recent) / rounds) * rounds
            if len(recent) < 3 or wanted > self._count:
                self._count = max(self._count, min(wanted, 8 * self._count))
            elif time.perf_counter() - begun >= warm_s:
                return

    def lap(self) -> Lap:
        """One lap."""
        self._wait()
        begun, samples = time.perf_counter(), 0
        for _ in range(self._count):
            samples += next(self._steps)
        self._wait()
        return Lap(samples, time.perf_counter() - begun)


@dataclass
class Column:
    """What one training did, or why it did nothing."""

    laps: list[Lap] = field(default_factory=list)
    note: str = ""
    failed: bool = False

    @property
    def rate(self) -> float:
        """Samples a second: the median lap."""
        return statistics.median(lap.rate for lap in self.laps)

    def __str__(self) -> str:
        return f"{self.rate:,.0f}" if self.laps else self.note


@dataclass(frozen=True)
class Ratio:
    """How fast one column is as a multiple of another, by pairs of laps."""

    value: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def in_turn(rival: Laps, mine: Laps, pairs: int) -> tuple[list[Lap], list[Lap], Ratio]:
    """Laps A B B A of both, and how fast the second is as a multiple of the first."""
    theirs, ours = [], []
    for number in range(pairs):
        if number % 2 == 0:
            theirs.append(rival.lap())
            ours.append(mine.lap())
        else:
            ours.append(mine.lap())
            theirs.append(rival.lap())
    ratios = sorted(b.rate / a.rate for a, b in zip(theirs, ours, strict=True))
    low, high = median_interval(pairs)
    return theirs, ours, Ratio(statistics.median(ratios), ratios[low], ratios[high], pairs)


# --- a whole fit, and quality --------------------------------------------------------------------------


def whole_fit(work: Work, device: torch.device, steps: int) -> dict[str, float]:
    """One call of `fit`: samples a second after its first epoch, which captures, and from call to return."""
    model, plan = work.build(), fast_plan(work, device)
    given, settings = work.fed()
    job = hotlap.Job(
        model=model,
        data=given,
        loss=work.loss,
        optimizer=work.optimizer(model),
        batch_size=work.batch,
        steps=steps,
        drop_last=True,
        device=str(device),
        **prepare_of(work, plan, device),
        **settings,
    )
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        run = hotlap.fit(job, plan=plan, out=Path(folder) / "run", save_every=None, progress=False)
        whole_s = time.perf_counter() - begun
    return {
        "steps": run.steps,
        "samples": run.samples,
        "train_s": run.train_s,
        "whole_s": whole_s,
        "steady": _steady(run),
        "whole": run.samples / whole_s,
    }


def _steady(run: hotlap.Run) -> float:
    """Samples a second from the end of the first epoch on, by its own record; in all, where that is one alone."""
    first, last = run.history[0], run.history[-1]
    if first["step"] == last["step"]:
        return run.samples / run.train_s
    rate: float = (last["samples"] - first["samples"]) / (last["elapsed_s"] - first["elapsed_s"])
    return rate


def trained(work: Work, plan: hotlap.Plan, device: torch.device, *, steps: int, masks: int) -> tuple[Any, nn.Module]:
    """The work after so many steps from its first weights: mean loss of the last 20, and of samples held out.

    `masks` seeds what dropout leaves out; the order of samples is always the same.
    """
    model = work.build()
    given, settings = work.fed()
    torch.manual_seed(masks)
    rig = make_rig(work, model, plan, device)
    for some in (max(0, steps - LAST), min(LAST, steps)):
        rig.totals.reset()
        for window in rig.feed(given, batch_size=work.batch, steps=some, drop_last=True, **settings) if some else ():
            rig.step(window)
    figures = {"steps": rig.steps, "last": rig.totals.mean(), "held_out": held_out(work, rig.model, device)}
    rig.close()
    return figures, rig.model


def held_out(work: Work, model: nn.Module, device: torch.device) -> float:
    """The loss over the samples kept apart, in evaluation mode and fp32 whatever the plan was."""
    model.eval()
    loss, samples = 0.0, 0
    with torch.no_grad(), rivals.switches(tf32=False, cudnn_tf32=False, benchmark=False):
        for batch, count in work.held_batches(device):
            loss += count * float(work.judge(model, batch))
            samples += count
    model.train()
    return loss / samples


def gradient(work: Work, weights: dict[str, Tensor], precision: str, device: torch.device) -> Tensor:
    """The gradient of one batch in a precision, all parameters in a row; no dropout, so that nothing is drawn."""
    model = work.build()
    model.load_state_dict(weights)
    without_dropout(model.to(device)).train()
    batch = work.first_batch(device)
    if work.images and precision != "fp32":
        model, batch = channels_last(model), (batch[0].to(memory_format=torch.channels_last), batch[1])
    with rivals.switches(tf32=precision == "tf32", cudnn_tf32=precision != "fp32", benchmark=False):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = work.judge(model, batch)
        torch.autograd.backward(loss)
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every dropout at 0."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return model


def has_dropout(model: nn.Module) -> bool:
    """Whether training draws masks."""
    return any(getattr(layer, "dropout", 0.0) or isinstance(layer, nn.Dropout) for layer in model.modules())


def quality(work: Work, device: torch.device, steps: int) -> dict[str, Any]:
    """What the fast plan does to the numbers: losses after `steps`, and the gradient's cosine."""
    plain = hotlap.Plan().but(kind="gather")
    fast = fast_plan(work, device)
    found: dict[str, Any] = {"steps": steps}
    found["fp32"], model = trained(work, plain, device, steps=steps, masks=0)
    first = {name: value.clone() for name, value in work.build().state_dict().items()}
    last = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    del model
    found["fast"], _ = trained(work, fast, device, steps=steps, masks=0)
    if has_dropout(work.build()):
        # How far chance alone takes it.
        found["fp32, other masks"], _ = trained(work, plain, device, steps=steps, masks=1)
    precision = fast.numerics.precision
    if precision != "fp32":
        found["cosine"] = {
            when: float(
                F.cosine_similarity(
                    gradient(work, weights, precision, device), gradient(work, weights, "fp32", device), dim=0
                )
            )
            for when, weights in (("first weights", first), (f"after {steps} steps", last))
        }
    return found


# --- the report ----------------------------------------------------------------------------------------


@dataclass
class Row:
    """All that is known of a work."""

    columns: dict[str, Column] = field(default_factory=dict)
    ratios: dict[str, Ratio] = field(default_factory=dict)
    fit: dict[str, float] | None = None
    quality: dict[str, Any] | None = None
    padding: Paddings | None = None


class RivalError(Exception):
    """A rival failed when it was to run beside hotlap: its failure, not hotlap's."""

    def __init__(self, rival: str) -> None:
        super().__init__(rival)
        self.rival = rival


class Bench:
    """Runs columns, and goes on where one fails."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self._device, self._options = device, options
        self.rows: dict[str, Row] = {}
        self.failures: list[str] = []

    def run(self, works: Sequence[Work], columns: Sequence[str]) -> None:
        """All columns of all works."""
        self.rows = {
            work.name: Row(padding=Paddings.of(work) if isinstance(work, TextWork) else None) for work in works
        }
        for work in works:
            for column in (c for c in columns if c in LOADERS and applies(c, work)):
                self._try(work, column, self._alone)
        for work in works:
            theirs = [column for column in columns if applies(column, work)]
            for pair in contests(work, self._device):
                if set(pair) <= set(theirs):
                    self._try(work, pair[1], functools.partial(self._contest, rival=pair[0]))
            for column in theirs:
                if column in ("fit", "quality"):
                    self._try(work, column, self._fit if column == "fit" else self._quality)
                elif column not in self._row(work).columns:
                    # No contest for it, or one that the other side's failure ended.
                    self._try(work, column, self._alone)

    def _row(self, work: Work) -> Row:
        return self.rows[work.name]

    def _try(self, work: Work, column: str, what: Callable[[Work, str], str]) -> None:
        begun = time.perf_counter()
        try:
            told = what(work, column)
        except Exception as error:  # whatever it was, the others go on
            cause: BaseException = error
            if isinstance(error, RivalError) and error.__cause__:
                column, cause = error.rival, error.__cause__
            # A rival that is not there, or a feed that is not built for this device, is no failure.
            missing = isinstance(cause, UnavailableError) or (column == "resident" and isinstance(cause, PlanError))
            told = str(cause) if missing else f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
            self._row(work).columns[column] = Column(note=told, failed=not missing)
            if not missing:
                self.failures.append(f"{work.name}, {column}: {told}")
        self._clean()
        took = time.perf_counter() - begun
        print(f"{work.name:<28} {column:<13} {told}   ({took:.1f} s)", file=sys.stderr, flush=True)

    def _clean(self) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _laps(self, steps: Steps, column: str, work: Work) -> Laps:
        lap_s = max(self._options.seconds, work.lap_s)
        warm_s, rounds = self._options.warm_seconds, steps_a_round(work, column)
        return Laps(steps, self._device, lap_s=lap_s, warm_s=warm_s, rounds=rounds)

    def _alone(self, work: Work, column: str) -> str:
        if column == "lightning":
            done = self._lightning(work)
        elif column == "hf_trainer":
            assert isinstance(work, TextWork)
            done = self._hf_trainer(work)
        else:
            rigs: list[hotlap.Rig] = []
            steps = steps_of(column, work, self._device, rigs.append)
            try:
                laps = self._laps(steps, column, work)
                done = Column([laps.lap() for _ in range(self._options.laps)], told_by(rigs))
            finally:
                steps.close()
        self._row(work).columns[column] = done
        return f"{done} samples/s{f'; {done.note}' if done.note else ''}"

    def _lightning(self, work: Work) -> Column:
        options = self._options
        found = rivals.lightning(
            work,
            work.build(),
            work.data(),
            self._device,
            laps=options.laps,
            lap_s=options.seconds,
            warm_s=options.warm_seconds,
        )
        return Column([Lap(*lap) for lap in found])

    def _hf_trainer(self, work: TextWork) -> Column:
        """The best of its settings; the others are told."""
        options, found = self._options, {}
        for way in text_rivals.TRAINER_WAYS:
            laps = text_rivals.hf_trainer(
                work,
                way,
                self._device,
                laps=options.laps,
                lap_s=max(options.seconds, work.lap_s),
                warm_s=options.warm_seconds,
            )
            found[way] = Column([Lap(*lap) for lap in laps])
            self._clean()
        best = max(found.values(), key=lambda column: column.rate)
        best.note = "best of " + ", ".join(f"{column} {way}" for way, column in found.items())
        return best

    def _contest(self, work: Work, mine: str, rival: str) -> str:
        row, options = self._row(work), self._options
        their_rigs: list[hotlap.Rig] = []
        our_rigs: list[hotlap.Rig] = []
        theirs = steps_of(rival, work, self._device, their_rigs.append)
        ours = steps_of(mine, work, self._device, our_rigs.append)
        try:
            # The rival by hand sets torch's switches while it captures, so it comes first.
            try:
                a = self._laps(theirs, rival, work)
            except Exception as error:
                raise RivalError(rival) from error
            b = self._laps(ours, mine, work)
            their_laps, our_laps, ratio = in_turn(a, b, options.pairs)
            notes = told_by(their_rigs), told_by(our_rigs)
        finally:
            theirs.close()
            ours.close()
        for column, laps, note in ((rival, their_laps, notes[0]), (mine, our_laps, notes[1])):
            done = row.columns.setdefault(column, Column())
            done.laps, done.note = done.laps + laps, note
        row.ratios[f"{mine}/{rival}"] = ratio
        told = f"{row.columns[mine]} samples/s, {ratio} of {rival}'s {row.columns[rival]}"
        return "; ".join(filter(None, (told, *notes)))

    def _fit(self, work: Work, column: str) -> str:
        row = self._row(work)
        known = [row.columns[name].rate for name in ("hotlap", "gather", "by_hand") if _timed(row, name)]
        each = work.replay_steps
        rate = known[0] if known else 1000.0
        steps = max(1, round(rate * self._options.fit_seconds / work.batch / each)) * each
        row.fit = whole_fit(work, self._device, steps)
        return f"{row.fit['steady']:,.0f} samples/s, {row.fit['whole']:,.0f} from call to return, {steps:,} steps"

    def _quality(self, work: Work, column: str) -> str:
        row = self._row(work)
        row.quality = quality(work, self._device, self._options.quality_steps)
        return "done"


def told_by(rigs: Sequence[hotlap.Rig]) -> str:
    """What a column's rig has to say beside its pace: what compiling took, kernels, what is not as planned."""
    told = []
    for rig in rigs:
        compiled_s = [entry.cost_s for entry in rig.ledger if entry.what == "compile"]
        told += [f"compiling took {sum(compiled_s):.1f} s, which no lap has"] if compiled_s else []
        kernels = [entry.why for entry in rig.ledger if entry.what == "attention"]
        told += [f"attention: {kernels[-1]}"] if kernels else []
        told += [f"not as planned: {rig.given_up}"] if rig.given_up else []
    return "; ".join(told)


def _timed(row: Row, name: str) -> bool:
    return name in row.columns and bool(row.columns[name].laps)


def table(rows: dict[str, Row], columns: Sequence[str]) -> Iterator[str]:
    """The report, for people."""
    timed = [name for name in columns if any(name in row.columns for row in rows.values())]
    timed = [name for name in timed if name not in ("fit", "quality")]
    ratios = list(dict.fromkeys(name for row in rows.values() for name in row.ratios))
    head = ["samples/s", *timed, *ratios, *(["fit, steady", "fit, whole run"] if "fit" in columns else [])]
    lines = [head]
    for name, row in rows.items():
        cells = [str(row.columns[c]) if _timed(row, c) else "–" for c in timed]
        cells += [str(row.ratios[r]) if r in row.ratios else "–" for r in ratios]
        if "fit" in columns:
            cells += [f"{row.fit['steady']:,.0f}", f"{row.fit['whole']:,.0f}"] if row.fit else ["–", "–"]
        lines.append([name, *cells])
    widths = [max(len(line[k]) for line in lines) for k in range(len(head))]
    for name, *cells in lines:
        yield "  ".join([name.ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells, widths[1:], strict=True))])
    for name, row in rows.items():
        for column, done in row.columns.items():
            if done.note:
                yield f"{name}, {column}: {done.note}"
    yield from (line for name, row in rows.items() if row.padding for line in row.padding.lines(name))
    yield from (line for name, row in rows.items() for line in alone_lines(name, row))
    if any(row.quality for row in rows.values()):
        yield ""
    for name, row in rows.items():
        if row.quality:
            yield from quality_lines(name, row.quality)


def alone_lines(name: str, row: Row) -> Iterator[str]:
    """How fast hotlap is as a multiple of those that were timed alone, for texts: by medians, without an interval."""
    if row.padding is None or not _timed(row, "hotlap"):
        return
    mine = row.columns["hotlap"].rate
    others = [other for other in LOADERS if _timed(row, other)]
    if others:
        told = ", ".join(f"{mine / row.columns[other].rate:.2f}x as fast as {other}" for other in others)
        yield f"{name}: hotlap is {told}"


def quality_lines(name: str, found: dict[str, Any]) -> Iterator[str]:
    """The quality of a work, for people."""
    ways = [way for way in ("fp32", "fast", "fp32, other masks") if way in found]
    steps, indent = found["steps"], " " * len(name)
    last, held = (", ".join(f"{way} {found[way][key]:.4f}" for way in ways) for key in ("last", "held_out"))
    yield f"{name}: loss of steps {max(0, steps - LAST) + 1}–{steps}: {last}"
    yield f"{indent}  loss held out: {held}"
    if "cosine" in found:
        told = ", ".join(f"{value:.6f} ({when})" for when, value in found["cosine"].items())
        yield f"{indent}  cosine of the gradient, fast against fp32: {told}"


def versions() -> dict[str, str]:
    """Of what the figures depend on."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "hotlap": hotlap.__version__}
    for name in ("torchvision", "lightning", "pytorch-lightning", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="words, or their beginnings, in a work's name")
    parser.add_argument("--texts", type=Path, metavar="FILE", help="train BERT-base on a CSV file's texts instead")
    parser.add_argument("--columns", default="", help="some columns only, with commas between")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a lap, at least")
    parser.add_argument("--warm-seconds", type=float, default=1.0, help="of work before a column is timed")
    parser.add_argument("--pairs", type=int, default=12, help="of laps, hotlap against its rival")
    parser.add_argument("--laps", type=int, default=4, help="of a column that is timed alone")
    parser.add_argument("--fit-seconds", type=float, default=6.0, help="of training in a whole fit")
    parser.add_argument("--quality-steps", type=int, default=200)
    parser.add_argument("--threads", type=int, help="CPU threads; one has far less noise than all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    known = TEXTS if options.texts else GPU if options.device == "cuda" else CPU
    too_slow = options.texts and options.device == "cpu"
    options.columns = options.columns.split(",") if options.columns else [] if too_slow else list(known)
    unknown = [name for name in options.columns if name not in {*GPU, *CPU, *TEXTS, *NAMED_ALONE}]
    if unknown:
        parser.error(f"no column is called {', '.join(unknown)}; there are {', '.join(known)}")
    if options.seconds < SHORTEST_LAP_S:
        parser.error(f"a lap of {options.seconds} s is too short to time; the least is {SHORTEST_LAP_S} s")
    return options


def all_works(texts: tuple[int, int] | None = None) -> tuple[Work, ...]:
    """All that is trained, on so many texts; where the texts' models cannot be made, that is said."""
    of_texts = text_works(texts) if texts else text_works()
    if not of_texts:
        print("texts are left out: transformers is not installed", file=sys.stderr)
    return *WORKS, *of_texts


def main(arguments: Sequence[str] | None = None, works: Sequence[Work] | None = None) -> int:
    """Print the report; 1 where a column failed, 2 where a file of texts cannot be used."""
    options = parsed(arguments)
    if works is None:
        try:
            works = [file_work(options.texts)] if options.texts else all_works()
        except (OSError, ValueError, ImportError) as error:
            print(f"--texts {options.texts}: {error}", file=sys.stderr)
            return 2
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    # Large works on a CPU would take minutes, and hotlap does nothing for them there.
    chosen = called((work for work in works if on_gpu or work.small or options.texts), options.only)
    where = torch.cuda.get_device_name(device) if on_gpu else f"{torch.get_num_threads()} CPU threads"
    begun = time.perf_counter()
    bench = Bench(device, options)
    bench.run(chosen, options.columns)
    took = time.perf_counter() - begun
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"fast path on {where}, {told}; laps of {options.seconds} s, {options.pairs} pairs, {took:.0f} s in all")
    for line in table(bench.rows, options.columns):
        print(line)
    for failure in bench.failures:
        print(f"failed: {failure}")
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        settings["texts"] = str(options.texts) if options.texts else None
        raw = {
            name: asdict(row) | {"samples_per_s": {c: row.columns[c].rate for c in row.columns if _timed(row, c)}}
            for name, row in bench.rows.items()
        }
        report = {"machine": where, "versions": versions(), "settings": settings, "seconds": took, "works": raw}
        options.json.write_text(json.dumps({**report, "failures": bench.failures}, indent=2, ensure_ascii=False) + "\n")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
