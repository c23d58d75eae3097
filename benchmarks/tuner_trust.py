"""Whether the tuner can be trusted: what it accepts, what it promises, what it costs, and which faults it lets pass.

    python -m benchmarks.tuner_trust [--quick] [--device cpu|cuda] [--comparisons 1000] [--repeats 10] [--runs 3]
                                     [--only PART …] [--json FILE]

- statistics: comparisons over made-up laps, whose true gain is known;
- planted: comparisons over real laps of a real training, to whose steps real work is added;
- promise: what the ledger says that tuning saves, against whole runs;
- quality: faults at the smallest size that the gate claims to see;
- nothing: what tuning costs a run that nothing can make faster.

A requirement is `kept` where its figure is within the limit, `broken` where it is beyond it by more than the noise of
this machine explains, and `unclear` else. Exit code 1 where one is broken. Whole runs have processes of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from tests.tuner.traces import KINDS
from torch import Tensor, nn

import hotlap
from benchmarks.paired import compare as in_long_blocks
from benchmarks.tuner_stats import CALM, RATIOS, SPREADS, Row, broken, row, shown, summed
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.core.table import as_json
from hotlap.core.units import show_seconds
from hotlap.data.feeds import GatherFeeding
from hotlap.demo import digits_job
from hotlap.tuner.budget import Budget
from hotlap.tuner.gates import Gate
from hotlap.tuner.laps import LAP_S, Lap, LapClock
from hotlap.tuner.rounding import SAME, SAME_LOSS
from hotlap.tuner.stats import LEAST_GAIN, student_t
from hotlap.tuner.stepping import without_dropout
from hotlap.tuner.trials import Trials, Tried
from hotlap.tuner.tuner import WARM

QUIET = 0.02
"""The noise of a lap up to which gains have to be found."""
CHANCE = 3.0
"""Standard deviations by which a share may be off by chance: the worst of many is looked at."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a requirement was kept."""

    requirement: str
    outcome: str
    figure: str


@dataclass
class Part:
    """What came of one part."""

    lines: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Add a line to the report."""
        self.lines.append(line)

    def judge(self, requirement: str, figure: str, *, within: bool, beyond: bool) -> None:
        """Add a verdict: `within` the limit, or `beyond` it whatever the noise may be."""
        outcome = "kept" if within else "broken" if beyond else "unclear"
        self.verdicts.append(Verdict(requirement=requirement, outcome=outcome, figure=figure))

    def judge_share(
        self, requirement: str, hits: int, of: int, told: str, *, most: float = 1, least: float = 0
    ) -> None:
        """Add a verdict on how often something happened."""
        if not of:
            self.judge(requirement, f"none could be judged{told}", within=False, beyond=False)
            return
        low, high = share_interval(hits, of)
        limit = f"limit {100 * (least or most):g} %"
        figure = f"{hits} of {of}{told}, {100 * low:.2g} to {100 * high:.3g} % by chance, {limit}"
        share = hits / of
        self.judge(requirement, figure, within=least <= share <= most, beyond=low > most or high < least)


def share_interval(hits: int, of: int) -> tuple[float, float]:
    """Where the true share lies, as Wilson has it."""
    square = CHANCE**2 / of
    middle, half = hits / of + square / 2, math.sqrt(hits / of * (1 - hits / of) * square + square**2 / 4)
    # Where nothing was seen the share may be nothing, which rounding must not hide.
    return max(0.0, middle - half) / (1 + square) if hits else 0.0, (middle + half) / (1 + square) if hits < of else 1.0


def report(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


# --- laps that are made up ---------------------------------------------------------------------------


def made_up(options: argparse.Namespace) -> Part:
    """How often comparisons err, over kinds of machine, true ratios and spreads."""
    part, rows = Part(), list[Row]()
    for kind in KINDS:
        report(f"statistics: {kind} …")
        for ratio in RATIOS:
            for spread in SPREADS:
                rows.append(row(kind, ratio, spread, options.comparisons, seed=len(rows), tossed=True))
    gains = [one for one in rows if one.ratio > LEAST_GAIN]
    calm = [one for one in gains if one.kind in CALM]
    judge_worst(part, "the same plan is accepted", [one for one in rows if one.ratio == 1], most=0.01)
    judge_worst(part, "a gain of 2 % is accepted", [one for one in rows if one.ratio == LEAST_GAIN], most=0.05)
    judge_worst(part, "a slow-down is accepted", [one for one in rows if one.ratio < 1], most=0.0)
    judge_worst(part, "gains of 5 % and more are found", calm, least=0.95)
    judge_worst(part, "the interval holds the truth", rows, least=0.93, what="covered")
    least = min(gains, key=lambda one: one.accepted)
    part.say(f"{len(rows)} kinds of comparison, {options.comparisons:,} times each, by a coin A B B A or B A A B")
    part.say(f"gains are found least, calm or not, where it is {named(least)}: {share_of(least.accepted, least)}")
    twice = max(one.quads for one in calm if one.ratio >= 2)
    part.say(f"quads: {twice:.1f} at most for 2x and more, {statistics.mean(one.quads for one in calm):.1f} on average")
    part.lines += [f"beyond a limit, by chance or not: {problem}" for one in rows for problem in broken(one)]
    part.facts["rows"] = [asdict(one) for one in rows]
    return part


def judge_worst(part: Part, requirement: str, rows: Sequence[Row], *, what: str = "accepted", **limit: float) -> None:
    """A verdict on the worst of these."""
    sign = 1 if "least" in limit else -1
    worst = min(rows, key=lambda one: sign * getattr(one, what))
    part.judge_share(
        f"simulated: {requirement}", getattr(worst, what), worst.comparisons, f" ({named(worst)})", **limit
    )


def named(of: Row) -> str:
    """Which comparisons these were."""
    return f"{of.kind}, {of.ratio:g}x, spread {100 * of.spread:g} %"


def share_of(hits: int, of: Row) -> str:
    """As a share of all comparisons."""
    return f"{100 * hits / of.comparisons:.1f} %"


# --- real work in a real training --------------------------------------------------------------------


class Loaded:
    """A small training to whose steps work can be added, so many units of it, on the host or on the device."""

    def __init__(self, where: str, device: torch.device) -> None:
        # Whatever a GPU is asked for beside steps that only launching bounds is hidden; so those are large.
        on_gpu = where == "device" and device.type == "cuda"
        width, batch, size = (4096, 4096, 1024) if on_gpu else (128, 64, 64)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.rig = hotlap.Rig(model, lambda p: torch.optim.AdamW(p, fused=True), nn.CrossEntropyLoss(), device=device)
        data = torch.randn(400 * batch, 64), torch.randint(10, (400 * batch,))
        self._windows = self.rig.feed(data, batch_size=batch, steps=10**9)
        self._a = self._b = torch.randn(size, size, device=device)
        self._out, self._row = torch.empty_like(self._a), np.ones(256)
        self._work = self._on_device if where == "device" else self._on_host
        self.clock = LapClock(self.rig)
        self.trials = Trials(self.rig, Gate(self.rig, self.rig.plan), Budget(base_s=1.0, updates=10**9))

    def _on_device(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def _on_host(self) -> None:
        np.add(self._row, 1.0, out=self._row)

    def step(self, units: int) -> Lap | None:
        """One update and so much work; the lap, where it ends one."""
        for _ in range(units):
            self._work()
        asked = time.perf_counter()
        window = next(self._windows)
        self.clock.fed(time.perf_counter() - asked)
        self.rig.advance(window)
        return self.clock.stepped(1)

    def in_blocks(self, units: int, *, lap_s: float, pairs: int) -> tuple[float, float, float]:
        """How many times as long a step with so much work takes, and the interval of it."""
        found = in_long_blocks(
            (self.step(0) for _ in count()),
            (self.step(units) for _ in count()),
            device=self.rig.device,
            lap_s=lap_s,
            pairs=pairs,
        )
        return found.ratio, found.low, found.high

    def unit(self) -> float:
        """What one unit of work adds to a step, as a fraction of it."""
        units = 1
        while self.in_blocks(units, lap_s=0.02, pairs=3)[0] < 2:
            units *= 2
        return (self.in_blocks(units, lap_s=LAP_S, pairs=10)[0] - 1) / units

    def compared(self, a_units: int, b_units: int) -> Tried:
        """One trial as the tuner makes it."""
        a, b = Plan(), Plan()  # names for the two: nothing differs but the work
        asks, before = self.trials.compare(a, b, settled=a, whatever_it_costs=True), None
        asked = next(asks)
        while True:
            self.clock.ask(warm=0 if asked is before else WARM)
            before, lap = asked, None
            while lap is None:
                lap = self.step(a_units if asked is a else b_units)
            try:
                asked = asks.send(lap)
            except StopIteration as end:
                tried: Tried = end.value
                return tried


def planted(options: argparse.Namespace) -> Part:
    """How often real comparisons err."""
    part, device = Part(), torch.device(options.device)
    # Quickly, each ratio is planted in one place only.
    gains = {"device": (1.0, 1.05, 2.0), "host": (1 / 1.05, 1.1)} if options.quick else {}
    tried: list[dict[str, Any]] = []
    for where in ("device", "host"):
        load = Loaded(where, device)
        unit = load.unit()
        truths: dict[int, tuple[float, float, float]] = {0: (1.0, 1.0, 1.0)}
        for wanted in gains.get(where, (1.0, 1.05, 1.1, 2.0, 1 / 1.05)):
            units = round((max(wanted, 1 / wanted) - 1) / unit)
            if units not in truths:
                truths[units] = load.in_blocks(units, lap_s=4 * LAP_S, pairs=8 if options.quick else 16)
            truth = truths[units] if wanted >= 1 else tuple(1 / one for one in truths[units][:1] + truths[units][:0:-1])
            for number in range(options.repeats):
                report(f"planted: {wanted:.3g}x on the {where}, {number + 1} of {options.repeats} …")
                began = time.perf_counter()
                found = load.compared(units if wanted > 1 else 0, units if wanted < 1 else 0)
                took = time.perf_counter() - began
                tried.append({"where": where, "wanted": wanted, "truth": truth, "tried": found, "seconds": took})
            part.say(told_of(tried[-options.repeats :]))
        load.rig.close()
    judge_planted(part, tried)
    part.facts["comparisons"] = [
        {**one, "tried": {"verdict": one["tried"].verdict, **one["tried"].figures}} for one in tried
    ]
    return part


def told_of(tried: Sequence[dict[str, Any]]) -> str:
    """A line about comparisons of one kind."""
    truth, low, high = tried[0]["truth"]
    ends = [(one["tried"].verdict, one["tried"].estimate) for one in tried]
    spread = statistics.median(end.noise for _, end in ends)
    line = shown(summed(ends, kind=f"on the {tried[0]['where']}", ratio=round(truth, 3), spread=spread))
    return f"{line}{statistics.mean(one['seconds'] for one in tried):>8.1f}  truth {low:.3f} to {high:.3f}"


def judge_planted(part: Part, tried: Sequence[dict[str, Any]]) -> None:
    """Verdicts on all of them."""
    accepted = [(one["wanted"], one["tried"].accepted) for one in tried]
    noise = [one["tried"].estimate.noise for one in tried]
    calm = [took for (wanted, took), spread in zip(accepted, noise, strict=True) if wanted > 1 and spread <= QUIET]
    gained = [took for wanted, took in accepted if wanted > 1]
    heads = f"{'in % of comparisons':<16}{'accepted':>24}{'rejected':>10}{'slower':>10}{'undecided':>10}{'covered':>10}"
    part.lines.insert(0, f"{'real work':<16}{'truth':>6}{'noise %':>8}{heads[40:]}{'quads':>8}{'seconds':>8}")
    part.say(f"noise of a lap: {100 * statistics.median(noise):.1f} %, {100 * max(noise):.1f} % at worst")
    same = [took for wanted, took in accepted if wanted == 1]
    part.judge_share("real work: the same plan is accepted", sum(same), len(same), "", most=0.01)
    slower = [took for wanted, took in accepted if wanted < 1]
    part.judge_share("real work: a slow-down is accepted", sum(slower), len(slower), "", most=0.0)
    aside = f" with noise to 2 % ({sum(gained)} of {len(gained)} with any)"
    part.judge_share("real work: gains of 5 % and more are found", sum(calm), len(calm), aside, least=0.95)
    # As far as the truth is known.
    covered = [
        one["tried"].estimate.low <= one["truth"][2] and one["tried"].estimate.high >= one["truth"][1] for one in tried
    ]
    part.judge_share("real work: the interval holds the truth", sum(covered), len(covered), "", least=0.93)


# --- whole runs in processes of their own ------------------------------------------------------------


class Repeated(nn.Module):
    """One large layer, four times over, in fp64, which no plan makes faster."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """As many classes as the layer is wide."""
        x = x.repeat(1, self.layer.in_features // x.shape[1])
        for _ in range(4):
            x = torch.tanh(self.layer(x))
        return x


def bound_by_arithmetic(updates: int, device: str) -> hotlap.Job:
    """A training in which nothing can help: tensors, gathered; a fused optimizer; arithmetic."""
    width, batch = (4096, 1024) if device == "cuda" else (256, 64)
    torch.manual_seed(0)
    model = Repeated(width)
    x, y = torch.randn(200 * batch, 64, dtype=torch.float64), torch.randint(width, (200 * batch,))
    optimizer = torch.optim.AdamW(model.to(device).parameters(), fused=True)
    loss = nn.CrossEntropyLoss()
    return hotlap.Job(
        model=model, data=(x, y), loss=loss, optimizer=optimizer, batch_size=batch, steps=updates, device=device
    )


JOBS: dict[str, Callable[[int, str], hotlap.Job]] = {
    "promise": lambda updates, device: digits_job(epochs=max(1, updates // 45), device=device),
    "nothing": bound_by_arithmetic,
}


def trained(part: str, plan: str, updates: int, device: str) -> dict[str, Any]:
    """One call of `fit`."""
    with tempfile.TemporaryDirectory(prefix="hotlap-trust-", ignore_cleanup_errors=True) as folder:
        run = hotlap.fit(JOBS[part](updates, device), plan=plan, out=Path(folder) / "run", progress=False)
    return {"plan": plan, "train_s": run.train_s, "updates": run.steps, "ledger": run.ledger.to_lines()}


def alone(part: str, plan: str, updates: int, device: str) -> dict[str, Any]:
    """The same in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="hotlap-trust-", ignore_cleanup_errors=True) as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.tuner_trust", "--alone", part, plan, str(updates), str(answer)]
        subprocess.run(
            [*command, "--device", device],
            check=True,
            stdout=sys.stderr,
            env=os.environ | {"HOTLAP_CACHE": str(Path(folder) / "cache")},
            cwd=Path(__file__).parents[1],
        )
        found: dict[str, Any] = json.loads(answer.read_text())
    report(f"{part}: {plan} took {show_seconds(found['train_s'])} for {updates:,} updates")
    return found


@dataclass(frozen=True)
class Runs:
    """Runs of a job in turn, the user's own plan first and last."""

    off: list[dict[str, Any]]
    auto: list[dict[str, Any]]

    @property
    def ratio(self) -> tuple[float, float, float]:
        """How many times as fast the tuned ones were, and the 95 % interval of it."""
        sides = [[math.log(run["train_s"]) for run in side] for side in (self.off, self.auto)]
        off, auto = (statistics.mean(side) for side in sides)
        half = student_t(self._freedom, 0.05) * self.noise * math.sqrt(1 / len(self.off) + 1 / len(self.auto))
        return math.exp(off - auto), math.exp(off - auto - half), math.exp(min(700.0, off - auto + half))

    @property
    def _freedom(self) -> int:
        return len(self.off) + len(self.auto) - 2

    @property
    def noise(self) -> float:
        """The spread of runs of the same kind, as a fraction."""
        sides = [[math.log(run["train_s"]) for run in side] for side in (self.off, self.auto)]
        squares = sum((one - statistics.mean(side)) ** 2 for side in sides for one in side)
        return math.sqrt(squares / self._freedom)

    def lines(self) -> Iterator[str]:
        """What they took."""
        for side in (self.off, self.auto):
            took = ", ".join(show_seconds(run["train_s"]) for run in side)
            yield f'plan="{side[0]["plan"]}": {took} for {side[0]["updates"]:,} updates'
        ratio, low, high = self.ratio
        yield f"tuned runs are {ratio:.3f}x as fast ({low:.3f} to {high:.3f}); noise of a run {100 * self.noise:.1f} %"


def in_turn(part: str, options: argparse.Namespace, seconds: float) -> Runs:
    """Runs of a job that takes so many seconds at the user's own pace."""
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, HOTLAP_CACHE=cache):
        pace = trained(part, "off", 450, options.device)
    updates = round(seconds * pace["updates"] / pace["train_s"])
    report(f"{part}: {updates:,} updates at {show_seconds(pace['train_s'] / pace['updates'])}")
    plans = ["off", *chain.from_iterable([("auto", "off")] * options.runs)]
    runs = [alone(part, plan, updates, options.device) for plan in plans]
    return Runs([run for run in runs if run["plan"] == "off"], [run for run in runs if run["plan"] == "auto"])


def promise(options: argparse.Namespace) -> Part:
    """What the ledger says that tuning saves, against what it did."""
    part, runs = Part(), in_turn("promise", options, 15.0 if options.quick else 25.0)
    part.lines += runs.lines()
    own = [run["train_s"] / run["updates"] for run in runs.off]
    part.say(f"a step of the user's own plan, over whole runs: {', '.join(map(show_seconds, own))}")
    promised = []
    for run in runs.auto:
        tuning = as_json(Ledger.from_lines(run["ledger"]))
        kept = ", ".join(move["what"] for move in tuning["moves"] if move["outcome"] == "kept") or "nothing"
        if tuning["total"] is None:
            part.say("the ledger promises nothing: tuning did not come to its end")
            continue
        own_s, saved_s = run["updates"] * tuning["baseline"]["step_s"], tuning["total"]["saved_s"]
        promised.append(own_s / (own_s - saved_s))
        told = f"{show_seconds(saved_s)} of {show_seconds(own_s)} saved, tuning cost {tuning['total']['cost_s']:.2g} s"
        base = show_seconds(tuning["baseline"]["step_s"])
        part.say(f"the ledger promises {promised[-1]:.3f}x: {told}; {base} a step before; kept: {kept}")
    part.facts |= {**asdict(runs), "promised": promised}
    if promised:
        middle = statistics.geometric_mean(promised)
        off, low, high = (one / middle - 1 for one in runs.ratio)
        figure = (
            f"runs are {100 * off:+.1f} % from the promised {middle:.3f}x ({100 * low:+.1f} to {100 * high:+.1f} %)"
        )
        beyond = low > 0.05 or high < -0.05
        part.judge("the promise holds for whole runs", f"{figure}, limit 5 %", within=abs(off) <= 0.05, beyond=beyond)
    else:
        part.judge("the promise holds for whole runs", "none was made", within=False, beyond=False)
    return part


def nothing(options: argparse.Namespace) -> Part:
    """What tuning costs where nothing helps."""
    part, runs = Part(), in_turn("nothing", options, 6.0 if options.quick else 20.0)
    part.lines += runs.lines()
    harmful = []
    for run in runs.auto:
        tuning = as_json(Ledger.from_lines(run["ledger"]))
        total, kept = tuning["total"], [move for move in tuning["moves"] if move["outcome"] == "kept"]
        harmful += [move["what"] for move in kept if move["ratio"] is not None and move["ratio"] < 1]
        if kept and total is not None and total["ratio"] is not None and total["ratio"] < 1:
            harmful.append("all of it together")
        said = "nothing helped" if tuning["nothing_helped"] else ", ".join(move["what"] for move in kept) or "no word"
        cost = f"tuning cost {total['cost_s']:.2g} s" if total is not None else "no total"
        tried = [f"{move['what']}: {move['why']}" for move in tuning["moves"] if not move["unfit"] and move not in kept]
        part.say(f"the ledger says: {said}; {cost}; {'; '.join(tried)}")
    slower, low, high = (1 / one - 1 for one in (runs.ratio[0], runs.ratio[2], runs.ratio[1]))
    figure = f"{100 * slower:+.1f} % ({100 * low:+.1f} to {100 * high:+.1f} %), limit +2 %"
    part.judge("where nothing helps, tuned runs are slower by", figure, within=slower <= 0.02, beyond=low > 0.02)
    told = f"{len(harmful)} in {len(runs.auto)} runs" + (f": {', '.join(harmful)}" if harmful else "")
    part.judge("where nothing helps, nothing harmful is kept", told, within=not harmful, beyond=bool(harmful))
    part.facts |= asdict(runs)
    return part


# --- faults ------------------------------------------------------------------------------------------


class Weighed(nn.CrossEntropyLoss):
    """A loss that can be wrong by a factor, in its value or in its gradients."""

    value = gradient = 0.0

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        loss = super().forward(input, target)
        return loss * (1 + self.value) + self.gradient * (loss - loss.detach())


class Suspect(hotlap.Rig):
    """A training whose steps have a fault under a fused optimizer."""

    fault: Callable[[], AbstractContextManager[Any]] = staticmethod(nullcontext)

    def advance(self, batch: Any) -> Tensor:
        """A step."""
        with self.fault() if self.plan.numerics.optimizer == "fused" else nullcontext():
            return super().advance(batch)


def suspect(seed: int, device: str) -> tuple[Suspect, nn.Sequential]:
    """A training that has made some steps, on data whose last batch is a short one."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
    own = Plan().but(kind="loader")
    rig = Suspect(model, lambda p: torch.optim.AdamW(p, lr=1e-3), Weighed(), plan=own, device=device)
    windows = rig.feed((torch.randn(1000, 32), torch.randint(5, (1000,))), batch_size=32, epochs=100, seed=seed)
    for _ in range(10):
        rig.advance(next(windows))
    return rig, model


@contextmanager
def repeating_masks(numbers: Iterator[int]) -> Iterator[None]:
    """The masks of a step come again two steps later."""
    torch.manual_seed(next(numbers) % 2)
    yield


@contextmanager
def in_bf16(layer: nn.Module, device: str) -> Iterator[None]:
    """One layer computes in bf16."""
    made = layer.forward

    def forward(x: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return made(x).to(x.dtype)

    with patch.object(layer, "forward", forward):
        yield


def misfed(change: Callable[[list[Tensor]], list[Tensor]]) -> AbstractContextManager[Any]:
    """Whatever is gathered is gathered at changed indices; a batch is the last one where it is a short one."""
    made = GatherFeeding.pieces
    return patch.object(GatherFeeding, "pieces", lambda self, rows, epoch: made(self, change(list(rows)), epoch))


def without_last(rows: list[Tensor]) -> list[Tensor]:
    """The last batch is dropped."""
    return [row for row in rows if len(row) == 32]


def with_one_twice(rows: list[Tensor]) -> list[Tensor]:
    """One sample of the last batch comes twice, in the place of another."""
    return [row if len(row) == 32 else torch.cat((row[:1], row[:-1])) for row in rows]


def quality(options: argparse.Namespace) -> Part:
    """Which faults the gate sees, and which honest plans it lets through."""
    part, device, seen = Part(), options.device, list[dict[str, Any]]()
    for seed in range(2 if options.quick else 5):
        report(f"quality: seed {seed} …")
        rig, model = suspect(seed, device)
        loss, own, numbers = rig.loss, rig.plan, count()
        fused, gathered = own.but(optimizer="fused"), own.but(kind="gather")
        # Twice what is taken for rounding is the least that the gate says it sees.
        faults: dict[str, tuple[Plan, Callable[[], AbstractContextManager[Any]]]] = {
            "masks that repeat": (fused, lambda numbers=numbers: repeating_masks(numbers)),
            "no dropout": (fused, lambda rig=rig: without_dropout(rig.modules)),
            f"loss {2 * SAME_LOSS:.0e} too large": (fused, lambda it=loss: patch.object(it, "value", 2 * SAME_LOSS)),
            f"gradients {2 * SAME:.0e} too large": (fused, lambda it=loss: patch.object(it, "gradient", 2 * SAME)),
            "last layer in bf16": (fused, lambda layer=model[-1]: in_bf16(layer, device)),
            "last batch dropped": (gathered, lambda: misfed(without_last)),
            "one sample twice": (gathered, lambda: misfed(with_one_twice)),
        }
        honest = {"fused": fused, "gathered": gathered, "held": own.but(kind="resident")}
        honest |= {name: own.but(precision=name) for name in ("bf16", "tf32")}
        honest["captured"] = honest["held"].but(optimizer="fused", mode="captured", replay_steps=8)
        for name, (plan, fault) in faults.items():
            with ExitStack() as planted_here:
                if plan is fused:
                    rig.fault = fault  # type: ignore[method-assign]
                else:
                    planted_here.enter_context(fault())
                found = Gate(rig, own).check(plan)
            rig.fault = nullcontext  # type: ignore[method-assign,assignment]
            seen.append({"seed": seed, "fault": name, "ok": found.ok, "why": found.why})
        for name, plan in honest.items():
            if rig.supports(plan) is None:
                found = Gate(rig, own).check(plan)
                seen.append({"seed": seed, "honest": name, "ok": found.ok, "why": found.why})
        rig.close()
    part.facts["checks"] = seen
    faulty, fair = ([one for one in seen if kind in one] for kind in ("fault", "honest"))
    for one in seen:
        wrong = one["ok"] == ("fault" in one)
        if one["seed"] == 0 or wrong:
            words = ("passed", "refused") if "honest" in one else ("missed", "caught")
            part.say(f"{words[not one['ok']]:<8} {one.get('fault') or one['honest']:<26} {one['why']}")
    for name, checks, right in (("faults are caught", faulty, False), ("honest plans pass", fair, True)):
        good = sum(one["ok"] == right for one in checks)
        part.judge(f"quality: {name}", f"{good} of {len(checks)}", within=good == len(checks), beyond=True)
    return part


# --- all of it ---------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace], Part]] = {
    "statistics": made_up,
    "planted": planted,
    "promise": promise,
    "quality": quality,
    "nothing": nothing,
}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="all parts in about three minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--comparisons", type=int, help="simulated ones of each kind (1000, quickly 300)")
    parser.add_argument("--repeats", type=int, help="real comparisons of each kind (10, quickly 3)")
    parser.add_argument("--runs", type=int, help="whole tuned runs of each kind (3, quickly 1)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for name, usual, quickly in (("comparisons", 1000, 300), ("repeats", 10, 3), ("runs", 3, 1)):
        if getattr(options, name) is None:
            setattr(options, name, quickly if options.quick else usual)
    return options


def main() -> None:
    """Print all parts, then a verdict on each requirement."""
    options = parsed()
    if options.alone:
        part, plan, updates, answer = options.alone
        Path(answer).write_text(json.dumps(trained(part, plan, int(updates), options.device)))
        return
    on_gpu = options.device == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, hotlap {hotlap.__version__}")
    facts: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "quick": options.quick, "parts": {}}
    verdicts: list[Verdict] = []
    for name in options.only:
        began = time.perf_counter()
        part = PARTS[name](options)
        took = time.perf_counter() - began
        verdicts += part.verdicts
        print(f"\n{name} ({show_seconds(took)})", *part.lines, sep="\n  ", flush=True)
        facts["parts"][name] = {**part.facts, "lines": part.lines, "seconds": took}
        facts["verdicts"] = [asdict(verdict) for verdict in verdicts]
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n")
    print()
    for verdict in verdicts:
        print(f"{verdict.outcome:<8}{verdict.requirement:<48}{verdict.figure}")
    sys.exit(any(verdict.outcome == "broken" for verdict in verdicts))


if __name__ == "__main__":
    main()
