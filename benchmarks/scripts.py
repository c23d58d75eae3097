"""Somebody's own scripts, as they are and under `hotlap run`: whole runs, from start to exit.

    python -m benchmarks.scripts [--seconds 60] [--only NAME …] [--runs 1] [--once] [--json FILE]
    python -m benchmarks.scripts --seeds 3 --epochs 35 [--only NAME …]
    python -m benchmarks.scripts --tricks [NAME …] [--seconds 60] [--runs 3] [--only NAME …] [--json FILE]
    python -m benchmarks.scripts --idle [--runs 5] [--epochs 400]

Each script in `benchmarks/user_scripts` is run for as many epochs as take it `--seconds` by itself, then under hotlap
with an empty cache, then by itself again, so that drift of the machine shows (`--once`: not again). The seconds are
those of the whole process, imports included, with torch's and hotlap's bytecode at hand as after an installation;
beside them stand those that the script itself tells of its training. What it prints at last is shown for all of them.
Exit code 1 where one failed.

With `--seeds` it is looked at what 16-bit precision does to their figures: each is trained so often under one captured
plan in fp32 and under the same in bf16, with the same seeds.

With `--tricks` each script is run under one captured plan in fp32, with all tricks of `hotlap run` and without each one
(or each one named), in turns: a run with all of them before and after each run without one. Shown is how many times as
fast the training is with a trick as without it: the mean over `--runs` rounds, at least two, and the lowest and highest
of them. Needs a GPU; exit code 1 where a script failed, or hotlap left it as it was.

With `--idle` it is looked at what hotlap costs where there is nothing to gain: `benchmarks/idle_script.py`, tiny steps
on the CPU, by itself and under hotlap in pairs, in turns. Told are CPU and wall seconds of a step in the first half of
a run, in which hotlap decides, and in the second: the median epoch of each run, and over all pairs the median of the
differences with their spread. On a machine that is busy otherwise, CPU seconds say more than wall seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.versions import versions
from hotlap.core.plan import Feed, Plan
from hotlap.core.tricks import RUN_TRICKS
from hotlap.store.files import save_plan

HOME = Path(__file__).parent / "user_scripts"
GOALS = {"lstm": 2.5, "transformer": 2.5, "mlp": 4.0}
"""What is asked for on one H200."""
PRECISIONS = ("fp32", "bf16")
UNSET = ("HOTLAP_PLAN", "PYTHONDONTWRITEBYTECODE")
SHORT = (1, 4)
"""Epochs of two runs that tell how long one takes beside the start."""


@dataclass(frozen=True)
class Ran:
    """One run of a script."""

    kind: str
    seconds: float
    code: int
    lines: list[str]
    said: str


def ran(
    name: str, epochs: int, kind: str, bytecode: Path, *, seed: int | None = None, without: str | None = None
) -> Ran:
    """Run a script in a process of its own, with an empty cache of hotlap's; `kind` may be a precision.

    A run without a trick is called by the name of that.
    """
    with tempfile.TemporaryDirectory(prefix="hotlap-scripts-") as folder:
        hotlap = [] if kind == "alone" else ["-m", "hotlap", "run", "--out", f"{folder}/run"]
        if kind in PRECISIONS:
            plan = Plan(feed=Feed(kind="resident")).but(mode="captured", optimizer="fused", precision=kind)
            save_plan(plan, f"{folder}/plan.toml")
            hotlap += ["--plan", f"{folder}/plan.toml"]
        if without is not None:
            hotlap += ["--without", without]
            kind = without
        command = [sys.executable, *hotlap, str(HOME / f"{name}.py"), "--epochs", str(epochs)]
        command += [] if seed is None else ["--seed", str(seed)]
        fresh = {key: value for key, value in os.environ.items() if key not in UNSET} | {
            "HOTLAP_CACHE": f"{folder}/cache",
            "COLUMNS": "120",
            "PYTHONPATH": str(HOME.parents[1] / "src"),
            "PYTHONPYCACHEPREFIX": str(bytecode),
        }
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=fresh)
        seconds = time.perf_counter() - begun
    report(f"{name}: {kind} took {seconds:.1f} s for {epochs} epochs, exit code {done.returncode}")
    if done.returncode:
        report(done.stderr[-2000:])
    return Ran(kind, seconds, done.returncode, done.stdout.splitlines(), done.stderr)


def compile_hotlap(bytecode: Path) -> None:
    """Have hotlap's bytecode at hand, as pip does when it installs."""
    home = {key: value for key, value in os.environ.items() if key not in UNSET} | {
        "PYTHONPYCACHEPREFIX": str(bytecode)
    }
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(HOME.parents[1] / "src")], check=True, env=home)


def epochs_for(name: str, seconds: float, bytecode: Path) -> int:
    """How many epochs take so long, start and imports included."""
    few, more = (ran(name, epochs, "alone", bytecode) for epochs in SHORT)
    if few.code or more.code:
        sys.exit(f"{name}: the script fails by itself, so there is nothing to compare")
    each = max(1e-3, (own_seconds(more) - own_seconds(few)) / (SHORT[1] - SHORT[0]))
    return max(2, round((seconds - more.seconds) / each + SHORT[1]))


def own_seconds(one: Ran) -> float:
    """What the script says that its training took."""
    told = re.findall(r"([0-9.]+) s$", one.lines[-1]) if one.lines else []
    return float(told[0]) if told else math.nan


def report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def figures(lines: list[str]) -> list[str]:
    """The last line that is not about time alone, shortened to its figures."""
    told = [line for line in lines if re.search(r"\d\.\d{3}", line)]
    return told[-1:]


def gains(found: Sequence[Ran], of: Callable[[Ran], float]) -> list[float]:
    """How many times as fast each run under hotlap was as those by itself before and after it."""
    pairs = [found[max(0, at - 1) : at + 2 : 2] for at in range(1, len(found), 2)]
    return [
        math.exp(statistics.mean(math.log(of(one)) for one in alone) - math.log(of(found[1 + 2 * number])))
        for number, alone in enumerate(pairs)
    ]


def shown(ratios: Sequence[float]) -> str:
    """Ratios for people."""
    return ", ".join(f"{ratio:.2f}x" for ratio in ratios)


def precisions(options: argparse.Namespace, bytecode: Path) -> int:
    """What each script tells at its end in both precisions, seed by seed, and the means."""
    failed = False
    for name in options.only:
        print(f"\n{name}: {options.epochs} epochs under a captured plan")
        told: dict[str, list[list[float]]] = {kind: [] for kind in PRECISIONS}
        for seed in range(options.seeds):
            for kind in PRECISIONS:
                one = ran(name, options.epochs, kind, bytecode, seed=seed)
                line = "; ".join(figures(one.lines))
                told[kind].append([float(number) for number in re.findall(r"\d+\.\d{3,}(?!\d*e)", line)])
                failed |= bool(one.code)
                print(f"  seed {seed}  {kind}  {line}", flush=True)
        for kind, rows in told.items():
            means = [statistics.mean(column) for column in zip(*rows, strict=False)]
            print(f"  mean    {kind}  {'  '.join(f'{mean:.4f}' for mean in means)}")
    return int(failed)


def tricks(options: argparse.Namespace, bytecode: Path) -> int:
    """How many times as fast the training of each script is with each trick as without it."""
    rounds, facts = max(2, options.runs), {"versions": versions(), "seconds": options.seconds, "scripts": {}}
    for name in options.only:
        epochs = epochs_for(name, options.seconds, bytecode)
        print(f"\n{name}: {epochs} epochs under a captured plan in fp32, with each trick beside without it", flush=True)
        found: dict[str, list[float]] = {trick: [] for trick in options.tricks or RUN_TRICKS}
        for number in range(rounds):
            turns = list(found)[:: -1 if number % 2 else 1]
            runs = [ran(name, epochs, PRECISIONS[0], bytecode)]
            for trick in turns:
                runs.append(ran(name, epochs, PRECISIONS[0], bytecode, without=trick))
                runs.append(ran(name, epochs, PRECISIONS[0], bytecode))
            wrong = next((one for one in runs if one.code or (one.kind in found and not _left_out(one))), None)
            if wrong is not None:
                report(f"{name}: nothing is known of {wrong.kind}, since it failed or hotlap left the script as it was")
                return 1
            for trick, faster in zip(turns, gains(runs, own_seconds), strict=True):
                found[trick].append(1 / faster)
        for trick, ratios in found.items():
            mean = statistics.geometric_mean(ratios)
            print(f"  {trick:<20} {mean:.3f}x [{min(ratios):.3f}, {max(ratios):.3f}]", flush=True)
        facts["scripts"][name] = {"epochs": epochs, "tricks": found}  # type: ignore[index]
        if options.json is not None:
            options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    return 0


def _left_out(one: Ran) -> bool:
    """Whether hotlap tells that it trained without the trick."""
    return f"left out: {one.kind}\n" in f"{one.said}\n"


def idle(options: argparse.Namespace, bytecode: Path) -> int:
    """What a step of tiny steps takes by itself and under hotlap, pair by pair."""
    found: dict[str, list[dict[str, list[float]]]] = {"alone": [], "hotlap": []}
    for number in range(options.runs):
        for kind in list(found)[:: 1 if number % 2 else -1]:
            one = ran("../idle_script", options.epochs, kind, bytecode)
            if one.code:
                return 1
            found[kind].append(json.loads(one.lines[-1]))
    pairs = list(zip(found["alone"], found["hotlap"], strict=True))
    for half in ("first", "second"):
        for clock in ("cpu_s", "wall_s"):
            both = [[half_of(run[clock], half) for run in pair] for pair in pairs]
            more = sorted(1e6 * (hotlap - alone) for alone, hotlap in both)
            share = statistics.median(hotlap / alone - 1 for alone, hotlap in both)
            alone_us = 1e6 * statistics.median(alone for alone, _ in both)
            print(
                f"{half:>6} half, {clock.removesuffix('_s'):>4}: {alone_us:7.1f} µs a step by itself, under hotlap "
                f"{statistics.median(more):+6.1f} µs [{more[0]:+.1f}, {more[-1]:+.1f}], {100 * share:+.1f} %"
            )
    print("asked for in the second half: at most 0.5 % or 20 µs")
    return 0


def half_of(epochs: list[float], half: str) -> float:
    """The median epoch of one half of a run."""
    middle = len(epochs) // 2
    return statistics.median(epochs[:middle] if half == "first" else epochs[middle:])


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=sorted(GOALS), default=sorted(GOALS))
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--epochs", type=int, default=35, help="with --seeds and --idle")
    parser.add_argument("--tricks", nargs="*", choices=list(RUN_TRICKS), metavar="NAME")
    parser.add_argument("--idle", action="store_true")
    options = parser.parse_args()
    facts: dict[str, object] = {"versions": versions(), "seconds": options.seconds, "scripts": {}}
    failed = False
    with tempfile.TemporaryDirectory(prefix="hotlap-bytecode-") as bytecode:
        compile_hotlap(Path(bytecode))
        if options.idle:
            return idle(options, Path(bytecode))
        if options.tricks is not None:
            return tricks(options, Path(bytecode))
        if options.seeds:
            return precisions(options, Path(bytecode))
        for name in options.only:
            epochs = epochs_for(name, options.seconds, Path(bytecode))
            kinds = ["alone", "hotlap"] if options.once else ["alone", *["hotlap", "alone"] * options.runs]
            found = [ran(name, epochs, kind, Path(bytecode)) for kind in kinds]
            failed |= any(one.code for one in found)
            whole, training = (gains(found, of) for of in (lambda one: one.seconds, own_seconds))
            print(f"\n{name}: {epochs} epochs, whole run {shown(whole)}, training {shown(training)}", end="")
            print(f"; asked for on one H200: {GOALS[name]}x")
            for one in found:
                print(
                    f"  {one.kind:<7} {one.seconds:6.1f} s, {own_seconds(one):6.1f} s  {'; '.join(figures(one.lines))}"
                )
            for one in found:
                if one.kind == "hotlap":
                    print("\n".join(f"    {line}" for line in one.said.splitlines()), flush=True)
            facts["scripts"][name] = {  # type: ignore[index]
                "epochs": epochs,
                "whole": whole,
                "training": training,
                "runs": [{**asdict(one), "own_seconds": own_seconds(one)} for one in found],
            }
            if options.json is not None:
                options.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
