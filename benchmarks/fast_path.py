"""hotlap's fast plans against the trainings people write, and what they do to the numbers.

    python -m benchmarks.fast_path [--device cuda|cpu] [--only NAME] [--columns by_hand,hotlap,…] [--json FILE]

Samples a second of whole steps in the steady state, the same batch in every column of a row. hotlap and its rival by
hand take turns in laps (A B B A), with one wait for the device a lap, and the ratio is the median over pairs with its
95 % interval. Nobody clips gradients but the guides' last loop. `fit` is one whole call: its rate while training, and
from call to return, run folder, capture and checkpoints included. Quality: the same training of 200 steps under the
fast plan and under the plainest one in fp32, and the cosine of the gradient of one batch in both precisions.

On a GPU the columns are guide_before, guide_after, lightning, by_hand, hotlap, fit and quality; on the CPU loader,
by_hand, gather, resident and quality, for the small works. A column that fails says why, the others go on, and the
exit code is 1.
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
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotlap
from benchmarks import rivals
from benchmarks.paired import median_interval
from benchmarks.rivals import Steps, UnavailableError
from benchmarks.work import WORKS, Data, Normalise, Work, channels_last
from hotlap.core.errors import PlanError

LOADERS = ("guide_before", "guide_after", "lightning")
"""These come first for all works: worker processes forked after a capture may die of what they inherit."""
GPU = (*LOADERS, "by_hand", "hotlap", "fit", "quality")
CPU = ("loader", "by_hand", "gather", "resident", "quality")
CONTESTS = {"cuda": [("by_hand", "hotlap")], "cpu": [("loader", "gather"), ("loader", "resident")]}
"""Which columns take turns: the rival first."""
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
        nn.CrossEntropyLoss(),
        plan=plan,
        device=str(device),
        **prepare_of(work, plan, device),
    )


def engine(work: Work, model: nn.Module, data: Data, device: torch.device, plan: hotlap.Plan) -> Steps:
    """The work trained by hotlap."""
    rig = make_rig(work, model, plan, device)
    try:
        for window in rig.feed((data.x, data.y), batch_size=work.batch, steps=10**9, drop_last=True):
            before = rig.samples
            rig.step(window)
            yield rig.samples - before
    finally:
        rig.close()


def steps_of(column: str, work: Work, device: torch.device) -> Steps:
    """A column's training, from the work's first weights."""
    made: dict[str, Callable[..., Steps]] = {
        "guide_before": rivals.guide_before,
        "guide_after": rivals.guide_after,
        "loader": rivals.plain_loader,
        "by_hand": rivals.by_hand,
    }
    model, data = work.build(), work.data()
    if column == "by_hand" and device.type == "cpu":
        work = replace(work, replay_steps=1)  # with nothing to replay, a batch is best gathered when it is needed
    if column in made:
        return made[column](work, model, data, device)
    plan = fast_plan(work, device)
    return engine(work, model, data, device, plan if column == "hotlap" else plan.but(kind=column))


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
    model, data, plan = work.build(), work.data(), fast_plan(work, device)
    job = hotlap.Job(
        model=model,
        data=(data.x, data.y),
        loss=nn.CrossEntropyLoss(),
        optimizer=work.optimizer(model),
        batch_size=work.batch,
        steps=steps,
        drop_last=True,
        device=str(device),
        **prepare_of(work, plan, device),
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
    model, data = work.build(), work.data()
    given = (data.x, data.y)
    torch.manual_seed(masks)
    rig = make_rig(work, model, plan, device)
    for some in (max(0, steps - LAST), min(LAST, steps)):
        rig.totals.reset()
        for window in rig.feed(given, batch_size=work.batch, steps=some, drop_last=True) if some else ():
            rig.step(window)
    figures = {"steps": rig.steps, "last": rig.totals.mean(), "held_out": held_out(work, rig.model, device)}
    rig.close()
    return figures, rig.model


def held_out(work: Work, model: nn.Module, device: torch.device) -> float:
    """The loss over the samples kept apart, in evaluation mode and fp32 whatever the plan was."""
    data = work.data()
    x = _inputs(work, data.held_x, device)
    model.eval()
    with torch.no_grad(), rivals.switches(tf32=False, cudnn_tf32=False, benchmark=False):
        loss = float(F.cross_entropy(model(x), data.held_y.to(device)))
    model.train()
    return loss


def gradient(work: Work, weights: dict[str, Tensor], precision: str, device: torch.device) -> Tensor:
    """The gradient of one batch in a precision, all parameters in a row; no dropout, so that nothing is drawn."""
    model = work.build()
    model.load_state_dict(weights)
    without_dropout(model.to(device)).train()
    data = work.data()
    x, y = _inputs(work, data.x[: work.batch], device), data.y[: work.batch].to(device)
    if work.images and precision != "fp32":
        model, x = channels_last(model), x.to(memory_format=torch.channels_last)
    with rivals.switches(tf32=precision == "tf32", cudnn_tf32=precision != "fp32", benchmark=False):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = F.cross_entropy(model(x), y)
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


def _inputs(work: Work, x: Tensor, device: torch.device) -> Tensor:
    return Normalise(device).images(x.to(device)) if work.images else x.to(device)


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
        self.rows = {work.name: Row() for work in works}
        for work in works:
            for column in (c for c in columns if c in LOADERS):
                self._try(work, column, self._alone)
        for work in works:
            for pair in CONTESTS[self._device.type]:
                if set(pair) <= set(columns):
                    self._try(work, pair[1], functools.partial(self._contest, rival=pair[0]))
            for column in columns:
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
        rounds = rivals.WORKERS.get(column, 1)  # workers bring batches in bursts, one each
        lap_s = max(self._options.seconds, work.lap_s)
        return Laps(steps, self._device, lap_s=lap_s, warm_s=self._options.warm_seconds, rounds=rounds)

    def _alone(self, work: Work, column: str) -> str:
        options = self._options
        if column == "lightning":
            found = rivals.lightning(
                work,
                work.build(),
                work.data(),
                self._device,
                laps=options.laps,
                lap_s=options.seconds,
                warm_s=options.warm_seconds,
            )
            done = Column([Lap(*lap) for lap in found])
        else:
            steps = steps_of(column, work, self._device)
            try:
                laps = self._laps(steps, column, work)
                done = Column([laps.lap() for _ in range(options.laps)])
            finally:
                steps.close()
        self._row(work).columns[column] = done
        return f"{done} samples/s"

    def _contest(self, work: Work, mine: str, rival: str) -> str:
        row, options = self._row(work), self._options
        theirs, ours = steps_of(rival, work, self._device), steps_of(mine, work, self._device)
        try:
            # The rival by hand sets torch's switches while it captures, so it comes first.
            try:
                a = self._laps(theirs, rival, work)
            except Exception as error:
                raise RivalError(rival) from error
            b = self._laps(ours, mine, work)
            their_laps, our_laps, ratio = in_turn(a, b, options.pairs)
        finally:
            theirs.close()
            ours.close()
        row.columns.setdefault(rival, Column()).laps += their_laps
        row.columns[mine] = Column(our_laps)
        row.ratios[f"{mine}/{rival}"] = ratio
        return f"{row.columns[mine]} samples/s, {ratio} of {rival}'s {row.columns[rival]}"

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


def _timed(row: Row, name: str) -> bool:
    return name in row.columns and bool(row.columns[name].laps)


def table(rows: dict[str, Row], columns: Sequence[str]) -> Iterator[str]:
    """The report, for people."""
    timed = [name for name in columns if name not in ("fit", "quality")]
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
    if any(row.quality for row in rows.values()):
        yield ""
    for name, row in rows.items():
        if row.quality:
            yield from quality_lines(name, row.quality)


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
    for name in ("torchvision", "lightning", "pytorch-lightning"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="", help="part of a work's name")
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
    known = GPU if options.device == "cuda" else CPU
    options.columns = options.columns.split(",") if options.columns else list(known)
    unknown = [name for name in options.columns if name not in {*GPU, *CPU}]
    if unknown:
        parser.error(f"no column is called {', '.join(unknown)}; there are {', '.join(known)}")
    if options.seconds < SHORTEST_LAP_S:
        parser.error(f"a lap of {options.seconds} s is too short to time; the least is {SHORTEST_LAP_S} s")
    return options


def main(arguments: Sequence[str] | None = None, works: Sequence[Work] = WORKS) -> int:
    """Print the report; 1 where a column failed."""
    options = parsed(arguments)
    device = torch.device(options.device)
    on_gpu = device.type == "cuda"
    if options.threads:
        torch.set_num_threads(options.threads)
    # Large works on a CPU would take minutes, and hotlap does nothing for them there.
    small = [work for work in works if on_gpu or work.name.startswith(("MLP", "LSTM"))]
    chosen = [work for work in small if options.only.lower() in work.name.lower()]
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
        raw = {
            name: asdict(row) | {"samples_per_s": {c: row.columns[c].rate for c in row.columns if _timed(row, c)}}
            for name, row in bench.rows.items()
        }
        report = {"machine": where, "versions": versions(), "settings": settings, "seconds": took, "works": raw}
        options.json.write_text(json.dumps({**report, "failures": bench.failures}, indent=2, ensure_ascii=False) + "\n")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
