"""Whether the tuner can be trusted: what it accepts, what it promises, what it costs, and which faults it lets pass.

    python -m benchmarks.tuner_trust [--quick] [--device cpu|cuda] [--comparisons 1000] [--repeats 10] [--runs 3]
                                     [--only PART …] [--json FILE]

- statistics: comparisons over made-up laps, whose true gain is known;
- planted: the tuner's own comparisons over laps of a real training, to whose steps real work is added;
- promise: what the ledger says that tuning saves, against whole runs in processes of their own;
- quality: faults of about the smallest size that the gate claims to see;
- nothing: what tuning costs whole runs that nothing can make faster.

A requirement is `kept` where its figure is within the limit, `broken` where it is beyond it by more than noise
explains, and `unclear` else. Exit code 1 where one is broken. CPU: set OMP_NUM_THREADS=1 where others use it too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, product, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.audit import test_precision as precision_plants
from tests.tuner import test_gates as plants
from tests.tuner.traces import KINDS
from torch import nn

import hotlap
from benchmarks.paired import compare as in_blocks
from benchmarks.tuner_runs import Runs, report, trained
from benchmarks.tuner_stats import CALM, RATIOS, SPREADS, Row, broken, row, shown, summed
from hotlap.core.plan import Plan
from hotlap.core.units import show_seconds
from hotlap.tuner.agreement import SAME_LOSS
from hotlap.tuner.budget import Budget, Length
from hotlap.tuner.gates import Gate
from hotlap.tuner.laps import LAP_S, LapClock
from hotlap.tuner.stats import LEAST_GAIN, Estimate
from hotlap.tuner.trials import Trials
from hotlap.tuner.tuner import WARM

QUIET = 0.02  # the noise of a lap up to which gains have to be found
PROMISE, COST = 0.05, 0.02  # how far whole runs may be from the promise, and how much slower where nothing helps
CHANCE = 3.0  # standard deviations by which a share may be off: the worst of many is looked at


@dataclass
class Part:
    """What came of one part."""

    lines: list[str] = field(default_factory=list)
    verdicts: list[tuple[str, str, str]] = field(default_factory=list)
    """Outcome, requirement and figure of each."""
    facts: dict[str, Any] = field(default_factory=dict)

    def judge(self, requirement: str, figure: str, *, within: bool, beyond: bool) -> None:
        """Add a verdict: `within` the limit, or `beyond` it whatever the noise may be."""
        self.verdicts.append(("kept" if within else "broken" if beyond else "unclear", requirement, figure))

    def judge_share(self, requirement: str, hits: int, of: int, *, limit: float, least: bool = False) -> None:
        """Add a verdict on how often something happened: at most, or at least, in such a share of cases."""
        if not of:
            self.judge(requirement, "none could be judged", within=False, beyond=False)
            return
        share, square = hits / of, CHANCE**2 / of  # Wilson's interval
        half = math.sqrt(share * (1 - share) * square + square**2 / 4)
        low, high = ((share + square / 2 + side * half) / (1 + square) for side in (-1, 1))
        low, high = low if hits else 0.0, high if hits < of else 1.0  # and not a rounding beside them
        figure = f"{hits} of {of}, so {100 * low:.2g} to {100 * high:.3g} %; limit {100 * limit:g} %"
        within = share >= limit if least else share <= limit
        self.judge(requirement, figure, within=within, beyond=high < limit if least else low > limit)

    def judge_ratio(self, requirement: str, value: float, half: float, *, limit: float, sides: int) -> None:
        """Add a verdict on a ratio that should be 1, give or take the limit; on one side, it may be any smaller.

        `half` is half of its interval, as a logarithm.
        """
        low, high = value * math.exp(-half), value * math.exp(min(half, 700.0))
        told = f"({low - 1:+.1%} to {high - 1:+.1%})" if math.isfinite(half) else "(too few runs for an interval)"
        within = value - 1 <= limit and (sides == 1 or 1 - value <= limit)
        beyond = low - 1 > limit or (sides == 2 and 1 - high > limit)
        self.judge(requirement, f"{value - 1:+.1%} {told}; limit {limit:.0%}", within=within, beyond=beyond)


# --- laps that are made up ---------------------------------------------------------------------------


def made_up(options: argparse.Namespace) -> Part:
    """How often comparisons err, over kinds of machine, true ratios and spreads."""
    part, rows = Part(), list[Row]()
    for kind, ratio, spread in product(KINDS, RATIOS, SPREADS):
        if len(rows) % (len(RATIOS) * len(SPREADS)) == 0:
            report(f"statistics: {kind} …")
        rows.append(row(kind, ratio, spread, options.comparisons, seed=len(rows), tossed=True))
    gains = [one for one in rows if one.ratio > LEAST_GAIN]
    calm = [one for one in gains if one.kind in CALM]

    def judge(name: str, of: Sequence[Row], limit: float, *, least: bool = False, what: str = "accepted") -> None:
        worst = min(of, key=lambda one: (1 if least else -1) * getattr(one, what))
        hits, told = getattr(worst, what), f"{worst.kind}, {worst.ratio:g}x, spread {100 * worst.spread:g} %"
        part.lines.append(f"{name}: {hits / worst.comparisons:.2%} at worst ({told})")
        if limit < 1:
            part.judge_share(f"simulated: {name}", hits, worst.comparisons, limit=limit, least=least)

    judge("same plan accepted", [one for one in rows if one.ratio == 1], 0.01)
    judge("gain of 2 % accepted", [one for one in rows if one.ratio == LEAST_GAIN], 0.05)
    judge("slow-down accepted", [one for one in rows if one.ratio < 1], 0.0)
    judge("gain of 5 % and more found", calm, 0.95, least=True)
    judge("interval holds the truth", rows, 0.93, least=True, what="covered")
    judge("for the record, gain of 5 % and more found on machines that are not calm", gains, 1.0, least=True)
    quads = statistics.mean(one.quads for one in calm)
    part.lines.append(f"{options.comparisons:,} comparisons each; {quads:.1f} quads until a gain is found, on average")
    part.lines += [f"beyond a limit, by chance or not: {problem}" for one in rows for problem in broken(one)]
    part.facts["rows"] = [asdict(one) for one in rows]
    return part


# --- real work in a real training --------------------------------------------------------------------


@dataclass(frozen=True)
class Compared:
    """One comparison as the tuner makes it; `truth` is how many times faster B is in long blocks, and the interval."""

    where: str
    wanted: float
    truth: tuple[float, float, float]
    verdict: str
    estimate: Estimate
    seconds: float


class Loaded:
    """A small training to whose steps work can be added, so many units of it, on the host or on the device."""

    def __init__(self, where: str, device: torch.device) -> None:
        # Whatever a GPU is asked for beside steps that launching bounds is hidden; so here they are large.
        on_gpu = where == "device" and device.type == "cuda"
        width, batch, windows, size = (4096, 4096, 200, 1024) if on_gpu else (128, 64, 2000, 48)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
        self.rig = hotlap.Rig(model, lambda p: torch.optim.AdamW(p, fused=True), nn.CrossEntropyLoss(), device=device)
        data = torch.randn(windows * batch, 64), torch.randint(10, (windows * batch,))
        self._windows = self.rig.feed(data, batch_size=batch, steps=10**9)
        self._where, self._row = where, np.ones(256)
        self._matrix = torch.randn(size, size, device=device)
        self._out = torch.empty_like(self._matrix)
        self._clock = LapClock(self.rig)
        own = self.rig.plan
        self._trials = Trials(self.rig, Gate(self.rig, own), Budget(base_s=1.0, length=lambda: Length(10**9)), own)

    def step(self, units: int) -> None:
        """One update, and so much work."""
        for _ in range(units):
            if self._where == "device":
                torch.mm(self._matrix, self._matrix, out=self._out)
            else:
                np.add(self._row, 1.0, out=self._row)
        self.rig.advance(next(self._windows))

    def times(self, units: int, *, lap_s: float, pairs: int) -> tuple[float, float, float]:
        """How many times as long a step with so much work takes, and the interval of it."""
        without, with_it = (map(self.step, repeat(many)) for many in (0, units))
        found = in_blocks(without, with_it, device=self.rig.device, lap_s=lap_s, pairs=pairs)
        return found.ratio, found.low, found.high

    def unit(self) -> float:
        """What one unit of work adds to a step, as a fraction of it."""
        units = 1
        while self.times(units, lap_s=0.02, pairs=3)[0] < 2:
            units *= 2
        return (self.times(units, lap_s=LAP_S, pairs=8)[0] - 1) / units

    def compared(self, a_units: int, b_units: int) -> tuple[str, Estimate, float]:
        """One trial, in the tuner's own order of laps; its seconds last."""
        a, b = Plan(), Plan()  # names for the two: nothing differs but the work
        asks, before, began = self._trials.compare(a, b, settled=a, may_lose_s=math.inf), None, time.perf_counter()
        asked = next(asks)
        while True:
            self._clock.ask(warm=0 if asked is before else WARM)
            before, lap = asked, None
            while lap is None:
                self.step(a_units if asked is a else b_units)
                lap = self._clock.stepped(1)
            try:
                asked = asks.send(lap)
            except StopIteration as end:
                return end.value.verdict, end.value.estimate, time.perf_counter() - began


def planted(options: argparse.Namespace) -> Part:
    """How often real comparisons err."""
    part, all_tried = Part(), list[Compared]()
    names = ("accepted", "rejected", "slower", "undecided", "covered")
    part.lines.append(f"{'in %':<16}{'truth':>6}{'noise':>8}{''.join(f'{one:>10}' for one in names)}   quads seconds")
    # Quickly, each ratio is planted in one place only.
    gains = {"device": (1.0, 1.05, 2.0), "host": (1 / 1.05, 1.1)} if options.quick else {}
    for where in ("device", "host"):
        load = Loaded(where, torch.device(options.device))
        unit, truths = load.unit(), {0: (1.0, 1.0, 1.0)}
        for wanted in gains.get(where, (1.0, 1.05, 1.1, 2.0, 1 / 1.05)):
            units = 0 if wanted == 1 else max(1, round((max(wanted, 1 / wanted) - 1) / unit))
            tried: list[Compared] = []
            if units not in truths:
                truths[units] = load.times(units, lap_s=(2 if options.quick else 4) * LAP_S, pairs=16)
            middle, low, high = truths[units]
            truth = (middle, low, high) if wanted >= 1 else (1 / middle, 1 / high, 1 / low)
            for number in range(options.repeats):
                report(f"planted: {wanted:.3g}x on the {where}, {number + 1} of {options.repeats} …")
                ended = load.compared(units if wanted > 1 else 0, units if wanted < 1 else 0)
                tried.append(Compared(where, wanted, truth, *ended))
            noise = statistics.median(one.estimate.noise for one in tried)
            ends = [(one.verdict, one.estimate) for one in tried]
            line = shown(summed(ends, kind=f"on the {where}", ratio=round(truth[0], 3), spread=noise))
            took = statistics.mean(one.seconds for one in tried)
            part.lines.append(f"{line}{took:>8.1f}  truth {truth[1]:.3f} to {truth[2]:.3f}")
            all_tried += tried
        load.rig.close()
    _judge_planted(part, all_tried)
    part.facts["comparisons"] = [asdict(one) for one in all_tried]
    return part


def _judge_planted(part: Part, tried: Sequence[Compared]) -> None:
    noise = [one.estimate.noise for one in tried]
    gains = [one for one in tried if one.wanted > 1]
    quiet = [one for one in gains if one.estimate.noise <= QUIET]
    told = f"noise of a lap {statistics.median(noise):.1%}, {max(noise):.1%} at worst"
    found = sum(one.verdict == "accepted" for one in gains)
    part.lines.append(f"{told}; of gains, whatever the noise, {found} of {len(gains)} are found")
    for requirement, chosen, limit, least in (
        ("same plan accepted", [one for one in tried if one.wanted == 1], 0.01, False),
        ("slow-down accepted", [one for one in tried if one.wanted < 1], 0.0, False),
        (f"gain of 5 % and more found, noise to {QUIET:.0%}", quiet, 0.95, True),
    ):
        accepted = sum(one.verdict == "accepted" for one in chosen)
        part.judge_share(f"real work: {requirement}", accepted, len(chosen), limit=limit, least=least)
    # A truth that is known less well than the comparison knows it says nothing of its interval.
    known = [one for one in tried if one.truth[2] / one.truth[1] <= one.estimate.high / one.estimate.low]
    covered = sum(one.estimate.low <= one.truth[2] and one.estimate.high >= one.truth[1] for one in known)
    part.judge_share("real work: interval holds the truth", covered, len(known), limit=0.93, least=True)


# --- whole runs in processes of their own ------------------------------------------------------------


def promise(options: argparse.Namespace) -> Part:
    """What the ledger says that tuning saves, against what it did."""
    seconds = 40.0 if options.device == "cuda" else 25.0
    runs = Runs("promise", options, seconds=0.6 * seconds if options.quick else seconds)
    part, promised = Part(lines=runs.lines, facts={"runs": runs.all}), list[tuple[float, float]]()
    for tuning, ratio in zip(runs.tuning, runs.ratios, strict=True):
        total = tuning["total"]
        if total is not None and total["saved_s"] is not None:
            # At the pace of the user's own plan when the promise was made: beside the tuned one, where there is one.
            own_s = runs.updates * (total["own_s"] or tuning["baseline"]["step_s"])
            promised.append((own_s / max(own_s - total["saved_s"], 0.01 * own_s), ratio))
            told = f"{show_seconds(total['saved_s'])} saved of {show_seconds(own_s)}"
            part.lines.append(f"promised {promised[-1][0]:.3f}x ({told}), measured {ratio:.3f}x")
    part.facts["promised_and_measured"] = promised
    if promised:
        worst = max((ratio / one for one, ratio in promised), key=lambda off: abs(math.log(off)))
        name = f"whole runs against their promise, the worst of {len(promised)}"
        part.judge_ratio(name, worst, runs.half_of_one, limit=PROMISE, sides=2)
    else:
        figure = "none was made: tuning did not come to its end"
        part.judge("whole runs against their promise", figure, within=False, beyond=False)
    return part


def nothing(options: argparse.Namespace) -> Part:
    """What tuning costs where nothing helps."""
    # On a GPU a shorter run may spend too little for any trial.
    runs = Runs("nothing", options, seconds=6.0 if options.quick else 30.0 if options.device == "cuda" else 20.0)
    part, harmful = Part(lines=runs.lines, facts={"runs": runs.all}), list[str]()
    for tuning in runs.tuning:
        kept = [move for move in tuning["moves"] if move["outcome"] == "kept"]
        judged = [*kept, tuning["total"]] if kept and tuning["total"] else kept
        harmful += [one["what"] for one in judged if one["ratio"] is not None and one["ratio"] < 1]
    part.judge_ratio("nothing helps: tuned runs slower", 1 / runs.ratio, runs.half, limit=COST, sides=1)
    figure = f"{len(harmful)} in {len(runs.auto)} runs {' '.join(harmful)}"
    part.judge("nothing helps: harmful moves kept", figure, within=not harmful, beyond=True)
    return part


# --- faults ------------------------------------------------------------------------------------------


def suspect(seed: int, device: str, middle: type[nn.Linear] = nn.Linear) -> hotlap.Rig:
    """A training that has made some steps; what is planted in it is at work under the proposed plan alone."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), middle(64, 64), nn.ReLU(), nn.Linear(64, 5))
    rig = hotlap.Rig(model, lambda p: torch.optim.AdamW(p, lr=1e-3), nn.CrossEntropyLoss(), device=device)
    windows = rig.feed((torch.randn(1024, 32), torch.randint(5, (1024,))), batch_size=32, epochs=100, seed=seed)
    for _ in range(10 if middle is not precision_plants.Growing else 510):
        rig.advance(next(windows))
    return rig


def _repeat_masks(rig: Any) -> None:
    seeds = count()
    plants.seeded_before_each_step(rig, lambda: torch.manual_seed(next(seeds) % 2))


def _round_input(rig: Any) -> None:
    rig.model[5].register_forward_pre_hook(lambda _, x: (x[0].bfloat16().float(),) if plants.is_tried(rig) else x)


FUSED, LOADED, HELD = {"optimizer": "fused"}, {"kind": "loader"}, {"kind": "resident"}
Fault = tuple[dict[str, Any], Callable[[Any, Any], None], str]
"""The plan that is tried, what plants the fault in a rig or by a patch, and a word by which it has to be named."""
FAULTS: dict[str, Fault] = {
    "masks repeat every other step": (FUSED, lambda rig, _: _repeat_masks(rig), "random"),
    # Twice what is taken for rounding is about the least that the gate says it sees.
    f"loss {2 * SAME_LOSS:.0e} too large": (FUSED, lambda rig, _: plants.scaled_loss(rig, 1 + 2 * SAME_LOSS), "loss"),
    "input of a layer in bf16": (FUSED, lambda rig, _: _round_input(rig), "gradient"),
    "last batch dropped": (LOADED, lambda _, patch: plants.planted(patch, plants.without_the_last), "ends before"),
    "one sample twice": (LOADED, lambda _, patch: plants.planted(patch, plants.with_a_sample_twice), "other samples"),
}
LAYERS: dict[str, tuple[str, type[nn.Linear]]] = {
    "layer biased in bf16": ("bf16", precision_plants.Biased),
    "epsilon that vanishes in bf16": ("bf16", precision_plants.Shifted),
    "sum of 100,000 terms in bf16": ("bf16", precision_plants.Summed),
    "fp16 that overflows after 500 steps": ("fp16", precision_plants.Growing),
}
"""Layers that are wrong in one precision alone."""
HONEST: dict[str, dict[str, Any]] = {
    **{"fused": FUSED, "loader": LOADED, "held": HELD, "bf16": {"precision": "bf16"}, "tf32": {"precision": "tf32"}},
    "captured": {**HELD, **FUSED, "mode": "captured", "replay_steps": 8},
}


def quality(options: argparse.Namespace) -> Part:
    """Which faults the gate sees, and which honest plans it lets through."""
    part, right = (
        Part(facts={"checks": []}),
        {"planted faults caught": list[bool](), "honest plans passed": list[bool]()},
    )
    honest: dict[str, Fault] = {name: (choices, lambda *_: None, "") for name, choices in HONEST.items()}
    wrong: dict[str, Fault] = {name: ({"precision": one}, lambda *_: None, " ") for name, (one, _) in LAYERS.items()}
    for seed in range(2 if options.quick else 5):
        report(f"quality: seed {seed} …")
        for name, (choices, plant, word) in {**honest, **FAULTS, **wrong}.items():
            rig = suspect(seed, options.device, *([LAYERS[name][1]] if name in LAYERS else []))
            plan = rig.plan.but(**choices)
            if rig.supports(plan) is not None:
                continue
            with pytest.MonkeyPatch.context() as patch:
                plant(rig, patch)
                found = Gate(rig, rig.plan).check(plan)
            rig.close()
            # An error in a plant is no fault that was seen: it has to be named.
            good = not found.ok and word in found.why if word else found.ok
            right["planted faults caught" if word else "honest plans passed"].append(good)
            said = ("caught" if good else "missed") if word else "passed" if good else "refused"
            part.facts["checks"].append({"seed": seed, "name": name, "outcome": said, "why": found.why})
            if seed == 0 or not good:
                part.lines.append(f"{said:<8} {name:<30} {found.why}")
    for requirement, seen in right.items():
        part.judge(f"quality: {requirement}", f"{sum(seen)} of {len(seen)}", within=all(seen), beyond=True)
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
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    amounts = {
        "comparisons": ("simulated ones of each kind", 1000, 300),
        "repeats": ("real comparisons of each kind", 10, 3),
        "runs": ("whole tuned runs of each job", 3, 1),
    }
    for name, (words, usual, quickly) in amounts.items():
        parser.add_argument(f"--{name}", type=int, help=f"{words} ({usual}, quickly {quickly})")
    options = parser.parse_args(arguments)
    for name, (_, usual, quickly) in amounts.items():
        if getattr(options, name) is None:
            setattr(options, name, quickly if options.quick else usual)
    return options


def main() -> None:
    """Print all parts, then a verdict on each requirement."""
    options = parsed()
    if options.alone:
        job, plan, updates, answer = options.alone
        Path(answer).write_text(json.dumps(trained(job, plan, int(updates), options.device)))
        return
    on_gpu = options.device == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, hotlap {hotlap.__version__}")
    facts: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "quick": options.quick, "parts": {}}
    verdicts: list[tuple[str, str, str]] = []
    for name in options.only:
        began = time.perf_counter()
        part = PARTS[name](options)
        took = time.perf_counter() - began
        verdicts += part.verdicts
        print(f"\n{name} ({show_seconds(took)})", *part.lines, sep="\n  ", flush=True)
        facts["parts"][name] = {"seconds": took, "verdicts": part.verdicts, "lines": part.lines, **part.facts}
        if options.json:
            options.json.write_text(json.dumps(facts, indent=1) + "\n")
    print()
    for outcome, requirement, figure in verdicts:
        print(f"{outcome:<8} {requirement:<52} {figure}")
    sys.exit(any(outcome == "broken" for outcome, _, _ in verdicts))


if __name__ == "__main__":
    main()
