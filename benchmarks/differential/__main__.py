"""Scripts put together at random from parts, run by plain PyTorch and under hotlap, and compared.

    python -m benchmarks.differential [--minutes 10] [--count N] [--device cpu|cuda] [--seed N] [--jobs N]
                                      [--only SEED] [--without PART …] [--keep DIR] [--shrink N] [--out FILE]

Each seed stands for one script: a dataset, a sampler, a model, a loss, an optimizer, a schedule, evaluations,
checkpoints and odd habits. Python runs it alone, then hotlap runs it: with another feed, with `--plan max` or tuned,
and often with a plan of one or two choices. Every fourth seed is a training for `hotlap.fit` or a `hotlap.Rig`, which
is compared with a plain loop of the same meaning. Compared are exit code, printed lines, written files, weights,
gradients, the state of the optimizers, and the states of all random generators at the end.

Where the plan changes the feed alone, all of it has to be the same to the last bit. Else figures may be off by
rounding: by at most 30 times as much as in two plain runs whose weights are disturbed by 4e-7 of themselves at every
update (4e-3 under bf16, 1e-3 under tf32 and fp16), or 2e-5 of the figure. A script that takes another way when it is
disturbed so is compared by exit code and files alone; these are counted as chaotic.

Where something differs, the command shows the seed, shrinks the script by leaving parts out, and writes it to `--keep`.
The exit code is 1 then. `--out` names a file for the summary, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.differential.cases import Finding, Result, examined, shrink
from benchmarks.differential.jobs import JobSketch, hotlap_text, job_sketch, plain_text
from benchmarks.differential.running import Runner
from benchmarks.differential.script import Sketch, compose, sketch
from benchmarks.versions import versions

LEAVES_S = 15.0
"""So long before the end, or as long as the longest script took, no script is begun any more."""
SHRINKS_S = 90.0
"""Of one script, at most."""


JOBS = 4
"""Every so many-th seed is a training for `fit` or a Rig."""


def sketch_of(seed: int) -> Sketch | JobSketch:
    """What a seed stands for."""
    return job_sketch(seed) if seed % JOBS == JOBS - 1 else sketch(seed)


class Tally:
    """What came of all scripts so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.applied: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.findings: list[Finding] = []

    def add(self, result: Result) -> None:
        """Count one script."""
        self.counts.update(
            scripts=1,
            runs=result.runs,
            exact=result.exact,
            rounded=result.rounded,
            chaotic=result.chaotic,
            failing_by_themselves=int(result.plain_code not in (0, 3)),
            unrepeatable=int(result.unrepeatable),
            acted_on=int(bool(result.applied)),
            differing=int(any(one.kind == "differs" for one in result.findings)),
            faulty=int(any(one.kind == "fault" for one in result.findings)),
        )
        self.applied.update(f"{kind}: {name}" for kind, name in result.applied)
        self.refused.update(result.refused)
        self.findings += result.findings

    def lines(self) -> list[str]:
        """For people."""
        counts = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in self.counts.items())
        lines = [counts, "scripts in which a choice of a plan was in force:"]
        lines += [f"  {count:5}  {name}" for name, count in sorted(self.applied.items())]
        lines += ["plans refused:"]
        lines += [f"  {count:5}  {reason}" for reason, count in self.refused.most_common(12)]
        return lines

    def facts(self) -> dict[str, Any]:
        """For the file."""
        return {
            "counts": dict(self.counts),
            "applied": dict(self.applied),
            "refused": dict(self.refused),
            "findings": [
                {
                    "seed": one.sketch.seed,
                    "kind": one.kind,
                    "way": str(one.way),
                    "what": one.what[:20],
                    "script": str(one.sketch),
                    "shrunk": str(one.shrunk) if one.shrunk is not None else None,
                    "told": one.told,
                }
                for one in self.findings
            ],
        }


def keep(finding: Finding, folder: Path, device: str) -> Path:
    """Write the script of a finding, and the shrunk one beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{finding.sketch.seed}-{str(finding.way).split()[0]}"
    about = "\n".join(f"# {line}" for line in (f"way: {finding.way}", *finding.what[:20]))
    path = folder / f"{name}.py"
    for one, end in ((finding.sketch, ""), (finding.shrunk, "-shrunk")):
        if isinstance(one, JobSketch):
            path = folder / f"{name}{end}.py"
            path.write_text(f"{about}\n{hotlap_text(one, device, finding.way.given)}")
            path.with_name(f"{name}{end}-plain.py").write_text(plain_text(one, device))
        elif one is not None:
            path = folder / f"{name}{end}.py"
            path.write_text(f"{about}\n{compose(one, device)}")
            if finding.way.kind == "plan":
                path.with_suffix(".toml").write_text(finding.way.text(one, device))
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--count", type=int, help="scripts at most")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=0, help="of the first script; the next ones follow")
    parser.add_argument("--only", type=int, help="this one alone")
    parser.add_argument("--without", nargs="+", default=[], metavar="PART", help="leave out scripts with these parts")
    parser.add_argument("--jobs", type=int, default=max(1, min(8, len(os.sched_getaffinity(0)))))
    parser.add_argument("--keep", type=Path, default=Path("differential-findings"))
    parser.add_argument("--shrink", type=int, default=8, help="findings that are shrunk at most")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    first, count = (options.only, 1) if options.only is not None else (options.seed, options.count or 10**9)
    sketches = (sketch_of(seed) for seed in range(first, first + count))
    left_out = set(options.without)
    chosen = (one for one in sketches if not left_out & {one.model, *one.choices.values(), *one.habits})
    with tempfile.TemporaryDirectory(prefix="hotlap-differential-", ignore_cleanup_errors=True) as folder:
        tally = run(chosen, options, Path(folder))
    for finding in tally.findings:
        print(f"seed {finding.sketch.seed}: written to {keep(finding, options.keep, options.device)}")
    print("\n".join(tally.lines()))
    if options.out is not None:
        facts = {"versions": versions(), "device": options.device, "first seed": first, **tally.facts()}
        options.out.write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    return int(bool(tally.findings))


def run(chosen: Iterator[Sketch | JobSketch], options: argparse.Namespace, home: Path) -> Tally:
    """Run scripts, several at a time, for as long as there is time, and shrink the first of those that differ."""
    end, longest_s = time.monotonic() + 60 * options.minutes, LEAVES_S
    tally, runner, pool = Tally(), Runner(options.device, home), ThreadPoolExecutor(options.jobs)
    running: dict[Future[Any], tuple[float, Finding | None]] = {}
    shrunk = 0
    try:
        while True:
            while len(running) < options.jobs and time.monotonic() < end - longest_s:
                one = next(chosen, None)
                if one is None:
                    break
                begun = pool.submit(examined, one, runner, options.device, home)
                running[begun] = (time.monotonic(), None)
            if not running or time.monotonic() > end:
                break
            for future in wait(running, timeout=1, return_when=FIRST_COMPLETED)[0]:
                since, finding = running.pop(future)
                if finding is not None:
                    finding.shrunk = future.result()
                    print(f"seed {finding.sketch.seed} under {finding.way}: shrunk to {finding.shrunk}", flush=True)
                    continue
                longest_s = max(longest_s, time.monotonic() - since)
                result = future.result()
                tally.add(result)
                for finding in result.findings:
                    report(finding)
                    if shrunk < options.shrink:
                        shrunk += 1
                        until = min(end - longest_s, time.monotonic() + SHRINKS_S)
                        begun = pool.submit(shrink, finding, runner, options.device, home, until=until)
                        running[begun] = (time.monotonic(), finding)
                if tally.counts["scripts"] % 50 == 0:
                    print(f"{tally.counts['scripts']} scripts, {len(tally.findings)} findings", flush=True)
        tally.counts["left unfinished"] = sum(finding is None for _, finding in running.values())
    finally:
        runner.close()
        pool.shutdown(wait=False, cancel_futures=True)
    return tally


def report(finding: Finding) -> None:
    """Tell of a finding at once."""
    print(f"\nseed {finding.sketch.seed} {finding.kind} under {finding.way}: {finding.sketch}", flush=True)
    for line in finding.what[:6]:
        print(f"    {line}", flush=True)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a script that has not come to its end is not waited for
