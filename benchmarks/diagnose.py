"""Planted problems: what `hotlap diagnose` names first and says of the cost, and what the repair gives.

    python -m benchmarks.diagnose [--held-out] [--only NAME …] [--seconds 30] [--rounds 1]

Each script in `benchmarks/planted` has one problem, and with `--repaired` it has not. The scripts in
`benchmarks/planted_held_out` were written before the estimates that they judge, in other shapes.

A cost is the seconds that the run takes less after the repair, from the end of its first update to the end of the run;
start-up is no part of it. Both sides measure that: `diagnose` predicts it, and the twins take it, one after the other,
each alone. A round is the script, its diagnosis, and the repaired script; rows show medians of rounds. The pace of a
busy machine changes meanwhile, so the parts of the run that both make up are compared as well. For memory that grows,
bytes are compared: what each twin adds to its memory. The goal: the planted problem named first in at least eleven of
twelve, its cost within a factor of two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hotlap.core.units import show_bytes, show_seconds
from hotlap.machine.limits import busy_share, read_cpu

PLANTED, HELD_OUT = (Path(__file__).with_name(name) for name in ("planted", "planted_held_out"))
TWIN = """
import resource, runpy, sys, time
import torch, torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook
layer = torch.nn.Linear(1, 1)
layer(next(iter(torch.utils.data.DataLoader(torch.zeros(1, 1))))).sum().backward()
for kind in (torch.optim.SGD, torch.optim.Adam):
    kind(layer.parameters()).step()
sys.argv = sys.argv[1:]
base, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
def stepped(*_):
    hook.remove()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    began.append(time.perf_counter())
hook = register_optimizer_step_post_hook(stepped)
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
    ended = "whole"
except BaseException as error:
    ended = type(error).__name__
if torch.cuda.is_initialized():
    torch.cuda.synchronize()
spent = time.perf_counter() - began[0]
grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
print("\\n" + repr((spent, grown, ended)), flush=True)
"""


@dataclass(frozen=True)
class Planted:
    """A script with a problem, and what `diagnose` has to name it."""

    script: str
    finding: str
    needs_gpu: bool = False
    kind: str = "time"
    """What it costs: time, memory, or the run."""
    folder: Path = PLANTED


ALL = (
    Planted("sleeping_loader", "feeding"),
    Planted("item_everywhere", "synchronising", needs_gpu=True),
    Planted("float64", "float64"),
    Planted("on_cpu", "on-cpu", needs_gpu=True),
    Planted("gradients_kept", "memory-grows", kind="memory"),
    Planted("growing_losses", "graphs-kept", kind="memory"),
    Planted("dying_workers", "workers-die", kind="run"),
    Planted("small_batch", "small-batch"),
    Planted("launch_blocking", "variables", needs_gpu=True),
    Planted("evaluation_gradients", "evaluation-gradients"),
    Planted("copied_data", "copies"),
    Planted("synchronising_logger", "logging"),
)
OTHERS = (
    Planted("default_double_lstm", "float64", folder=HELD_OUT),
    Planted("slow_transform_cnn", "feeding", folder=HELD_OUT),
    Planted("validation_graph_cnn", "evaluation-gradients", folder=HELD_OUT),
    Planted("tiny_batch_lstm", "small-batch", folder=HELD_OUT),
    Planted("checkpoint_each_update", "logging", folder=HELD_OUT),
    Planted("deep_copied_batches", "copies", folder=HELD_OUT),
)


@dataclass(frozen=True)
class Twin:
    """A script that ran to its end: seconds after its first update, bytes of memory that it added, and how it ended."""

    seconds: float
    grown: float
    ended: str


@dataclass(frozen=True)
class Row:
    """What came of one."""

    planted: Planted
    names: tuple[str, ...]
    """The first finding of each round."""
    took_s: float
    """Of a diagnosis."""
    predicted: float | None = None
    gave: float | None = None
    """Seconds; bytes of memory that grows."""
    shares: tuple[float, float] | None = None
    """Both as parts of the run."""
    ended: str = ""

    @property
    def named(self) -> str:
        """The name that came first in most rounds."""
        return Counter(self.names).most_common(1)[0][0]

    @property
    def ratio(self) -> float | None:
        """The predicted cost in parts of what the repair gave."""
        return self.predicted / self.gave if self.predicted is not None and self.gave else None

    @property
    def ratio_of_shares(self) -> float | None:
        """The same of parts of the run; of bytes, for memory."""
        return self.ratio if self.shares is None else self.shares[0] / self.shares[1]

    @property
    def line(self) -> str:
        """For the table."""
        show = show_bytes if self.planted.kind == "memory" else show_seconds
        predicted = show(self.predicted) if self.predicted is not None else "the run"
        gave = show(self.gave) if self.gave is not None else self.ended
        both = [f"{one:.2f}" if one is not None else "-" for one in (self.ratio, self.ratio_of_shares)]
        share = " and ".join(f"{100 * one:.0f} %" for one in self.shares) if self.shares is not None else ""
        named = self.named + (f" {Counter(self.names)[self.named]}/{len(self.names)}" if len(self.names) > 1 else "")
        return (
            f"{self.planted.script:<23}{named:<25}{predicted:>9} {gave:>12} {both[0]:>6} {share:>15} {both[1]:>6}"
            f"{self.took_s:>6.0f} s"
        )


def diagnosed(planted: Planted, seconds: float) -> dict[str, Any]:
    """What `hotlap diagnose --json` prints, with the seconds that it took."""
    words = ["diagnose", "--json", "--quiet", "--seconds", f"{seconds:g}", f"{planted.script}.py"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "hotlap", *words], cwd=planted.folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{planted.script}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {**found, "took_s": time.monotonic() - began}


def twin(planted: Planted, *words: str) -> Twin:
    """Run the script to its end, in a folder that goes afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", TWIN, str(planted.folder / f"{planted.script}.py"), *words],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "CUDA_LAUNCH_BLOCKING"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
        )
    return Twin(*eval(done.stdout.strip().rpartition("\n")[2], {}))  # the tuple that TWIN prints


def row(planted: Planted, seconds: float, rounds: int) -> Row:
    """Diagnose one, and run it with its twin, in turn."""
    before, found, after = [], [], []
    for _ in range(rounds):
        before.append(twin(planted))
        found.append(diagnosed(planted, seconds))
        after.append(twin(planted, "--repaired"))
    firsts = [one["found"][0] if one["found"] else {"name": "nothing", "cost_s": None} for one in found]
    names, took_s = tuple(one["name"] for one in firsts), median(one["took_s"] for one in found)
    if planted.kind == "run":
        return Row(planted, names, took_s, ended=f"{before[0].ended}, {after[0].ended}")
    if planted.kind == "memory":
        updates = int(found[0]["over"].split()[0].replace(",", "")) if found[0]["over"] else 0
        predicted = median(float(one.get("grows_bytes") or 0) for one in firsts) * updates
        return Row(
            planted, names, took_s, predicted, median(b.grown - a.grown for b, a in zip(before, after, strict=True))
        )
    whole_s = median(one.seconds for one in before)
    gave = whole_s - median(one.seconds for one in after)
    costs = [one["cost_s"] for one in firsts]
    if None in costs:
        return Row(planted, names, took_s, gave=gave)
    share = median(cost / one["whole_s"] for cost, one in zip(costs, found, strict=True))
    return Row(planted, names, took_s, median(costs), gave, (share, gave / whole_s))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    every = OTHERS if args.held_out else ALL
    has_gpu, cpu = torch.cuda.is_available(), read_cpu()
    where = torch.cuda.get_device_name() if has_gpu else f"{cpu.cores} cores of {cpu.model}, no GPU"
    threads = f"{torch.get_num_threads()} thread{'s'[: torch.get_num_threads() != 1]}"
    print(f"{where}; {threads}; torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"{100 * busy_share(1.0):.0f} % of the cores were at work before this began; {args.seconds:g} s a diagnosis, "
        f"medians of {args.rounds}\n"
    )
    print(
        f"{'planted':<23}{'named first':<25}{'predicted':>9} {'repair gave':>12} {'ratio':>6} {'of the run':>15} "
        f"{'ratio':>6}{'took':>8}"
    )
    rows = []
    for one in every:
        if args.only and one.script not in args.only:
            continue
        if one.needs_gpu and not has_gpu:
            print(f"{one.script:<23}needs a GPU")
            continue
        rows.append(row(one, args.seconds, args.rounds))
        print(rows[-1].line, flush=True)
    near = [one for one in rows if one.planted.kind != "run"]
    named = sum(one.named == one.planted.finding for one in rows)
    print(f"\nnamed first: {named} of {len(rows)} run here, {len(every)} planted")
    for how, ratios in (
        ("seconds or bytes", [one.ratio for one in near]),
        ("parts of the run", [one.ratio_of_shares for one in near]),
    ):
        within = sum(one is not None and 0.5 <= one <= 2 for one in ratios)
        print(f"cost within a factor of two in {how}: {within} of {len(near)} that cost time or memory")


if __name__ == "__main__":
    main()
