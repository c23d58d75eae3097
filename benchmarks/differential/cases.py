"""One script, run in several ways, and what differed."""

from __future__ import annotations

import math
import random
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.differential.comparing import TIMES_DRIFT, Facts, beyond_rounding, differences, facts_of, is_chaotic
from benchmarks.differential.jobs import JobSketch, hotlap_text, plain_text
from benchmarks.differential.jobs import ways as job_ways
from benchmarks.differential.running import Outcome, Runner, clean
from benchmarks.differential.script import Sketch, compose, sensible
from hotlap.core.plan import Feed, Plan

EPSILONS = {"fp32": 4e-7, "tf32": 1e-3, "bf16": 4e-3, "fp16": 1e-3}
"""By how much of itself each weight is disturbed at every update, to see how far rounding drifts, by precision."""
DISTURBED = (1, 2)
"""Seeds of the disturbed runs."""
FAR, FAR_MASKS, TIMES_MASKS = 0.2, 5.0, 4.0
"""How far off disturbed figures are chaotic, as a fraction and in absolute terms; the same where dropout draws other
masks, and how many times their distance figures may be off there."""
EXACT = ("feed.",)
"""Choices of a plan that keep every bit."""


@dataclass(frozen=True)
class Way:
    """One way to run a training under hotlap: `max`, `auto`, `off`, or choices that make a plan."""

    kind: str
    choices: Mapping[str, Any] = field(default_factory=dict)

    def text(self, one: Sketch, device: str) -> str:
        """As `hotlap run` is given it: a word, or the text of a plan file."""
        return own_plan(one, device).but(**self.choices).to_text() if self.kind == "plan" else self.kind

    @property
    def given(self) -> Any:
        """As `fit` is given it: a word, or choices."""
        return dict(self.choices) if self.kind == "plan" else self.kind

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={value}" for name, value in self.choices.items())
        return f"{self.kind} {chosen}".strip()


def own_plan(one: Sketch, device: str) -> Plan:
    """The plan that the script itself describes."""
    workers = int(one["workers"].split()[0])
    prefetch = 4 if "prefetch" in one["workers"] else 2
    feed = Feed(
        kind="loader",
        workers=workers,
        prefetch=prefetch if workers else None,
        persistent="persistent" in one["workers"],
        pinned=one.pins(device),
    )
    return Plan(feed=feed).but(optimizer="fused" if one["optimizer"] == "fused" else "plain")


GATHERED = {"kind": "gather", "workers": 0, "prefetch": None, "persistent": False, "pinned": False}


def ways_of(one: Sketch | JobSketch, device: str) -> list[Way]:
    """The ways in which a training is run, drawn from its seed: the feed alone, one or two other choices, and all."""
    draw = random.Random(f"ways of {one.seed}")
    if isinstance(one, JobSketch):
        return [Way(plan) if isinstance(plan, str) else Way("plan", plan) for plan in job_ways(one, device, draw)]
    feeds: list[dict[str, Any]] = [GATHERED, GATHERED, {"kind": "loader", "workers": 2, "prefetch": 2}]
    others: list[dict[str, Any]] = [{"optimizer": "fused"}, {"optimizer": "fused"}, {"precision": "bf16"}]
    if one["inputs"] == "pictures":
        others.append({"layout": "channels_last"})
    if device == "cuda":
        resident, stream = ({**GATHERED, "kind": kind} for kind in ("resident", "stream"))
        feeds = [resident, resident, stream, *feeds]
        others += [{"mode": "captured"}] * 4
        others += [{"precision": "tf32"}, {"mode": "captured", "optimizer": "fused"}, {"autotune": True}]
    ways = [Way("plan", draw.choice(feeds)), Way("auto" if one.long else "max")]
    if draw.random() < 0.6:
        chosen = dict(draw.choice(others))
        if draw.random() < 0.4:
            chosen |= draw.choice(feeds)
        ways.append(Way("plan", chosen))
    return ways


@dataclass
class Finding:
    """One run under hotlap that came to something else than the plain one."""

    way: Way
    what: list[str]
    kind: str
    """`differs`, or `fault` where only hotlap itself had to stop."""
    sketch: Sketch | JobSketch
    shrunk: Sketch | JobSketch | None = None
    told: str = ""


@dataclass
class Result:
    """What came of one script."""

    sketch: Sketch | JobSketch
    runs: int = 0
    exact: int = 0
    """Runs under hotlap compared to the last bit."""
    rounded: int = 0
    """Those compared to rounding."""
    chaotic: int = 0
    """Those of which the way alone is compared, since a disturbed plain run takes another way."""
    refused: list[str] = field(default_factory=list)
    applied: list[tuple[str, str]] = field(default_factory=list)
    """Which choices were in force, by way."""
    findings: list[Finding] = field(default_factory=list)
    plain_code: int = 0
    unrepeatable: bool = False


class Case:
    """One script with its plain run, and the disturbed ones where they are needed."""

    def __init__(self, one: Sketch | JobSketch, runner: Runner, device: str, home: Path) -> None:
        self.sketch, self._runner, self._device = one, runner, device
        self._home = Path(tempfile.mkdtemp(prefix=f"{one.seed}-", dir=home))
        self.script = self._home / "train.py"
        self.script.write_text(plain_text(one, device) if isinstance(one, JobSketch) else compose(one, device))
        self._count = 0
        self._disturbed: dict[tuple[float, bool], list[Facts]] = {}
        self.runs = 0

    @cached_property
    def plain(self) -> tuple[Outcome, Facts]:
        """By python alone."""
        return self._looked_at(self._runner.alone(self.script, self._folder()))

    @cached_property
    def repeats(self) -> bool:
        """Whether python alone comes to the same bits again."""
        again = self._looked_at(self._runner.alone(self.script, self._folder()))[1]
        return not differences(self.plain[1], again)

    def check(self, way: Way) -> tuple[str, list[str], Outcome]:
        """How a way was compared (`exact`, `rounded`, `chaotic` or `unrepeatable`), and what differs."""
        found, theirs = self._looked_at(self._under(way))
        mine, one = self.plain[1], self.sketch
        changed = {name: value for plan in found.plans for name, value in plan.items()}
        is_exact = all(name.startswith(EXACT) for name in changed) and (self._device == "cpu" or self.repeats)
        if isinstance(one, JobSketch):
            is_exact = is_exact and one["accumulate"] == "1"  # whose pieces are weighted in another order
        if is_exact:
            wrong = differences(mine, theirs)
            if isinstance(one, JobSketch):  # `fit` sums up losses in its own way; all else is compared to the last bit
                wrong = differences(*(_without("stdout", facts) for facts in (mine, theirs)))
                wrong += beyond_rounding(mine, theirs, [])
            if wrong and not self.repeats:
                return "unrepeatable", [], found
            return "exact", wrong, found
        # A script that failed before it trained has no plans.
        precisions = {"fp32", *(str(plan.get("numerics.precision", "fp32")) for plan in found.plans)}
        epsilon = max(EPSILONS[precision] for precision in precisions)
        moves = one.draws and any(plan.get("execution.mode") == "captured" for plan in found.plans)
        drifted = self._drifted(epsilon, moves=moves)
        if moves:  # the GPU's generator goes on elsewhere, and other masks lead far away
            mine, theirs, *drifted = (_without(".cuda", facts) for facts in (mine, theirs, *drifted))
        if is_chaotic(mine, drifted, far=FAR_MASKS if moves else FAR):
            names = ("exit code", "files")
            return "chaotic", differences(*({name: facts[name] for name in names} for facts in (mine, theirs))), found
        times_drift = TIMES_MASKS if moves else TIMES_DRIFT
        return "rounded", beyond_rounding(mine, theirs, drifted, times_drift=times_drift), found

    def _under(self, way: Way) -> Outcome:
        if not isinstance(self.sketch, JobSketch):
            return self._runner.under(self.script, self._folder(), way.text(self.sketch, self._device))
        door = self.script.with_name(f"door-{self._count}.py")
        door.write_text(hotlap_text(self.sketch, self._device, way.given))
        return self._runner.alone(door, self._folder())

    def _drifted(self, epsilon: float, *, moves: bool) -> list[Facts]:
        key = (epsilon, moves)
        if key not in self._disturbed:
            seeds = [-seed if moves else seed for seed in DISTURBED]
            self._disturbed[key] = [
                self._looked_at(self._runner.disturbed(self.script, self._folder(), epsilon, seed))[1] for seed in seeds
            ]
        return self._disturbed[key]

    def _looked_at(self, outcome: Outcome) -> tuple[Outcome, Facts]:
        facts = facts_of(outcome)
        clean(outcome.folder.parent)
        return outcome, facts

    def _folder(self) -> Path:
        self._count += 1
        self.runs += 1
        return self._home / f"run-{self._count}"

    def close(self) -> None:
        """Remove all of it."""
        clean(self._home)


def _without(part: str, facts: Facts) -> Facts:
    return {name: value for name, value in facts.items() if part not in name}


def examined(one: Sketch | JobSketch, runner: Runner, device: str, home: Path) -> Result:
    """Run one script in all of its ways."""
    case, result = Case(one, runner, device, home), Result(one)
    try:
        result.plain_code = case.plain[0].code
        for way in ways_of(one, device):
            how, wrong, outcome = case.check(way)
            if how == "unrepeatable":
                result.unrepeatable = True
                continue
            setattr(result, how, getattr(result, how) + 1)
            changed = {f"{name}={value}" for plan in outcome.plans for name, value in plan.items()}
            result.applied += [(way.kind, name) for name in sorted(changed)]
            if outcome.is_refused:
                line = next(line for line in outcome.told.splitlines() if "hotlap leaves the script alone" in line)
                result.refused.append(line.partition("hotlap leaves the script alone: ")[2])
            fault = outcome.fault
            if wrong or fault is not None:
                kind = "differs" if wrong else "fault"
                result.findings.append(Finding(way, wrong or [str(fault)], kind, one, told=outcome.told[-3000:]))
        result.runs = case.runs
    finally:
        case.close()
    return result


def shrink(
    finding: Finding, runner: Runner, device: str, home: Path, *, most_tries: int = 60, until: float = math.inf
) -> Sketch | JobSketch:
    """The sketch with parts left out for as long as it still comes to something else, and `until` is not there."""
    best, tries, shrinks = finding.sketch, 0, True
    while shrinks and tries < most_tries:
        shrinks = False
        for simpler in best.simpler():
            if isinstance(simpler, Sketch):
                simpler = sensible(simpler)
            if str(simpler) == str(best) or tries >= most_tries or time.monotonic() > until:
                continue
            tries += 1
            case = Case(simpler, runner, device, home)
            try:
                _, wrong, outcome = case.check(finding.way)
            finally:
                case.close()
            same = bool(wrong) if finding.kind == "differs" else outcome.fault is not None
            if same:
                best, shrinks = simpler, True
                break
    return best
