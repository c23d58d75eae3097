"""Trees: hotlap beside the guides' way, and the plans it chooses beside a sweep of all plans.

    python -m benchmarks.trees targets [--library xgboost] [--rows 1961] [--columns 558] [--targets 24] [--rounds 50]
    python -m benchmarks.trees trials  [--trials 8] [--folds 3] …
    python -m benchmarks.trees sweep   [--rows 10000 100000 1000000] [--columns 50] [--targets 1] …

`targets`: a model for each column of `y`. The guides quantise the features anew for each target and leave threads to
the library; hotlap quantises once and chooses. Whole trainings in turns, tuning and files included.
`trials`: settings × folds, one target. The guides make a dataset for each; hotlap shares one `TreeData`.
`sweep`: boosters under each plan in turns, a lap each, and the plan that `fit` chose in a run of its own.

Both sides train the same trees: the last column is the largest difference between their answers (of `trials`, hotlap
has the bins of the whole table in each fold, so that they differ). A ratio has a 95 % interval of its median.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paired import median_interval
from hotlap import machine, trees
from hotlap.core.table import table as table_of
from hotlap.core.units import show_seconds
from hotlap.guard.signals import StopRequest
from hotlap.machine.limits import warn_if_busy
from hotlap.trees.growing import Crew, Growth, Watch
from hotlap.trees.libraries import hold

Array = np.ndarray[Any, Any]
PARAMS: dict[str, dict[str, Any]] = {
    "xgboost": {"max_depth": 6, "learning_rate": 0.1},
    "lightgbm": {"num_leaves": 31, "learning_rate": 0.1},
}
TRIALS = (0.05, 0.1, 0.2, 0.3)
FOLDS_LEAST = 0.4
"""Part of the rows before the first fold that is judged."""


def table(rows: int, columns: int, targets: int) -> tuple[Array, Array]:
    """Features with missing values, and targets that a tenth of them decide."""
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, columns), dtype=np.float32)
    weights = random.standard_normal((columns, targets)) * (random.random((columns, targets)) < 0.1)
    y = (x @ weights + random.standard_normal((rows, targets))).astype(np.float32)
    x[random.random(x.shape, dtype=np.float32) < 0.02] = np.nan
    return x, y


def by_the_guides(library: str, x: Array, y: Array, rounds: int, params: dict[str, Any]) -> Any:
    """One booster as the guides train it: its own dataset, the library's own threads."""
    if library == "xgboost":
        import xgboost

        settings = {**params, "objective": "reg:squarederror", "tree_method": "hist", "seed": 0, "verbosity": 0}
        return xgboost.train(settings, xgboost.DMatrix(x, label=y), rounds)
    import lightgbm

    settings = {**params, "objective": "regression", "seed": 0, "verbosity": -1}
    return lightgbm.train(settings, lightgbm.Dataset(x, label=y, params=settings), rounds)


def threads_of(options: argparse.Namespace) -> dict[str, int]:
    """Threads of the guides' side, where it does not leave them to the library."""
    return {"n_jobs": options.their_threads} if options.their_threads else {}


def answers(library: str, booster: Any, x: Array) -> Array:
    """What a booster of the guides answers."""
    found: Array = booster.inplace_predict(x) if library == "xgboost" else booster.predict(x)
    return found


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, seconds of all cores, and what the work came to."""
    start, cpu = time.perf_counter(), time.process_time()
    done = work()
    return time.perf_counter() - start, time.process_time() - cpu, done


def ratio_of(slow: list[float], fast: list[float]) -> str:
    """How many times as long the first took, with its interval."""
    ratios = sorted(a / b for a, b in zip(slow, fast, strict=True))
    low, high = median_interval(len(ratios))
    return f"{statistics.median(ratios):.2f}x [{ratios[low]:.2f}, {ratios[high]:.2f}], {len(ratios)} pairs"


def in_turns(guides: Callable[[], Any], hotlap: Callable[[], Any], pairs: int) -> tuple[str, Any]:
    """Both sides, each first in every other pair: how they compare, and what they last came to.

    On a busy machine the seconds of cores say more than those on the clock.
    """
    walls: tuple[list[float], list[float]] = ([], [])
    cpus: tuple[list[float], list[float]] = ([], [])
    last: dict[int, Any] = {}
    for number in range(pairs):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            wall, cpu, last[side] = timed((guides, hotlap)[side])
            walls[side].append(wall)
            cpus[side].append(cpu)
        a, b, c, d = (show_seconds(side[-1]) for side in (*walls, *cpus))
        print(f"  pair {number + 1}: guides {a} (cores {c}), hotlap {b} (cores {d})", flush=True)
    return f"{ratio_of(*walls)}; by seconds of cores {ratio_of(*cpus)}", (last[0], last[1])


def targets(options: argparse.Namespace, folder: Path) -> None:
    """Many targets: the guides' way and hotlap in turns."""
    library, params = options.library, PARAMS[options.library]
    x, y = table(options.rows[0], options.columns, options.targets)
    count, theirs_too = iter(range(10**6)), {**params, **threads_of(options)}

    def guides() -> list[Any]:
        return [by_the_guides(library, x, y[:, n].copy(), options.rounds, theirs_too) for n in range(options.targets)]

    def hotlap() -> trees.TreeRun:
        job = trees.TreeJob(x, y, library=library, params=params, rounds=options.rounds)
        return trees.fit(job, plan=options.plan, out=folder / f"run{next(count)}", progress=False)

    found, (models, run) = in_turns(guides, hotlap, options.pairs)
    differ = max(np.abs(run.predict(x)[:, n] - answers(library, m, x)).max() for n, m in enumerate(models))
    print(run.summary())
    shape = f"{x.shape[0]:,} × {x.shape[1]:,} → {options.targets} targets, {options.rounds} rounds"
    print(f"{library} {shape}: {found}; answers differ by {differ:.3g}")


def trials(options: argparse.Namespace, folder: Path) -> None:
    """Settings × walk-forward folds of one target."""
    library, rows = options.library, options.rows[0]
    x, y = table(rows, options.columns, 1)
    ends = np.linspace(FOLDS_LEAST * rows, rows, options.folds + 1).astype(int)
    rates = [TRIALS[n % len(TRIALS)] * (1 + n // len(TRIALS)) for n in range(options.trials)]
    settings = [{**PARAMS[library], "learning_rate": rate} for rate in rates]
    count = iter(range(10**6))

    def guides() -> list[float]:
        scores = []
        for params in settings:
            for begin, end in itertools.pairwise(ends):
                theirs_too = {**params, **threads_of(options)}
                model = by_the_guides(library, x[:begin], y[:begin, 0].copy(), options.rounds, theirs_too)
                error = answers(library, model, x[begin:end]) - y[begin:end, 0]
                scores.append(float(np.sqrt(np.mean(error**2))))
        return scores

    def hotlap() -> list[float]:
        shared, scores, plan = trees.TreeData(x, library=library), [], options.plan
        folds = [(shared.rows(np.arange(b)), b, e) for b, e in itertools.pairwise(ends)]
        for params in settings:
            for data, begin, end in folds:
                job = trees.TreeJob(data, y[:begin], library=library, params=params, rounds=options.rounds)
                run = trees.fit(job, plan=plan, out=folder / f"trial{next(count)}", progress=False)
                plan = run.plan  # the next one begins where this one has come to
                error = run.predict(x[begin:end])[:, 0] - y[begin:end, 0]
                scores.append(float(np.sqrt(np.mean(error**2))))
        return scores

    found, (before, after) = in_turns(guides, hotlap, options.pairs)
    shape = f"{rows:,} × {x.shape[1]:,}, {options.trials} settings × {options.folds} folds, {options.rounds} rounds"
    differ = max(abs(a - b) / a for a, b in zip(before, after, strict=True))
    print(f"{library} {shape}: {found}; errors differ by {differ:.2%} at most")


def plans(cores: int, count: int) -> list[trees.TreePlan]:
    """The sweep: threads × boosters at once that fill the cores at most once."""
    found = {
        (threads, at_once)
        for threads in (1 << n for n in range(cores.bit_length()))
        for at_once in ({1, cores // threads} if count > 1 else {1})
        if threads * at_once <= cores and at_once <= count
    }
    return [trees.TreePlan(threads=threads, at_once=at_once) for threads, at_once in sorted(found)]


def sweep(options: argparse.Namespace, folder: Path) -> None:
    """Boosters under each plan in turns, and what `fit` chose."""
    library, cores, watch = options.library, machine.detect().cpu.cores, Watch(StopRequest(), lambda rounds: None)
    for rows in options.rows:
        x, y = table(rows, options.columns, options.targets)
        job = trees.TreeJob(x, y, library=library, params=PARAMS[library], rounds=options.rounds)
        run = trees.fit(job, plan="auto", out=folder / f"sweep{rows}", progress=False)
        job = trees.TreeJob(x, y, library=library, params=PARAMS[library], rounds=1 + options.laps * options.lap_rounds)
        everything = sorted({*plans(cores, options.targets), run.plan}, key=str)
        growths = {}
        for plan in everything:
            count = 1 if plan.joint else min(options.targets, cores)
            parts = [range(options.targets)] if plan.joint else [range(n, n + 1) for n in range(count)]
            growths[plan] = [Growth(hold(job, plan), job, part, plan) for part in parts]
        crews = {plan: Crew(plan) for plan in everything}
        laps: dict[trees.TreePlan, list[float]] = {plan: [] for plan in everything}
        for plan in everything:
            crews[plan].lap(growths[plan], 1, watch)
        for number in range(options.laps):
            for plan in everything if number % 2 else reversed(everything):
                laps[plan].append(crews[plan].lap(growths[plan], options.lap_rounds, watch))
        print(*table_of(run.ledger), sep="\n")
        print(f"{library} {rows:,} × {options.columns}, {options.targets} targets; fit chose {run.plan}")
        for plan in everything:
            middle = statistics.median(laps[plan])
            print(
                f"  {plan}: {show_seconds(middle)} a round; the chosen one takes {ratio_of(laps[run.plan], laps[plan])}"
            )
        # LightGBM writes the threads below the trees.
        content = {
            growths[plan][0].booster.dump(job.rounds).partition(b"end of trees")[0]
            for plan in everything
            if not plan.joint
        }
        print(f"  trees: {'the same' if len(content) == 1 else 'DIFFERENT'} under {len(everything)} plans")
        for crew in crews.values():
            crew.close()


def main(words: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["targets", "trials", "sweep"])
    parser.add_argument("--library", choices=sorted(PARAMS), default="xgboost")
    parser.add_argument("--rows", type=int, nargs="+", default=None)
    parser.add_argument("--columns", type=int, default=None)
    parser.add_argument("--targets", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--laps", type=int, default=12)
    parser.add_argument("--lap-rounds", type=int, default=2)
    parser.add_argument("--plan", default="auto")
    parser.add_argument(
        "--their-threads", type=int, default=0, help="threads of the guides' side; 0: the library's own"
    )
    options = parser.parse_args(words)
    is_sweep = options.what == "sweep"
    options.rows = options.rows or ([10_000, 100_000, 1_000_000] if is_sweep else [1961])
    options.columns = options.columns or (50 if is_sweep else 558)
    options.targets = options.targets or (1 if is_sweep else 24)
    cpu = machine.detect().cpu
    print(f"{cpu.model}, {cpu.cores} cores")
    warn_if_busy(print)
    with tempfile.TemporaryDirectory(prefix="hotlap-trees-") as folder:
        {"targets": targets, "trials": trials, "sweep": sweep}[options.what](options, Path(folder))


if __name__ == "__main__":
    main()
