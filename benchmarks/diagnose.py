"""Twelve planted problems: what `hotlap diagnose` names first and says of the cost, and what the repair gives.

    python -m benchmarks.diagnose [--only NAME …] [--seconds 30]

Each script in `benchmarks/planted` has one problem, and with `--repaired` it has not. Both twins run at the same time,
so that other work on the machine slows both alike; what the repair gives is the difference of their times, without
what torch does once in a process. The machine may be busier than during the diagnosis, so costs are compared as shares
of the training's time. For memory that grows, bytes are compared: what each twin adds to its memory. The goal: the
planted problem named first in at least eleven, its cost within a factor of two.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hotlap.core.units import show_bytes, show_seconds
from hotlap.machine.limits import busy_share, read_cpu

PLANTED = Path(__file__).with_name("planted")
TWIN = """
import resource, runpy, sys, time
import torch, torch.utils.data
layer = torch.nn.Linear(1, 1)
layer(next(iter(torch.utils.data.DataLoader(torch.zeros(1, 1))))).sum().backward()
for kind in (torch.optim.SGD, torch.optim.Adam):
    kind(layer.parameters()).step()
base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
try:
    runpy.run_path(sys.argv[1], run_name="__main__")
    ended = "whole"
except BaseException as error:
    ended = type(error).__name__
grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base)
print("\\n" + repr((time.perf_counter() - began, grown, ended)), flush=True)
"""


@dataclass(frozen=True)
class Planted:
    """A script with a problem, and what `diagnose` has to name it."""

    script: str
    finding: str
    needs_gpu: bool = False
    kind: str = "time"
    """What it costs: time, memory, or the run."""


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


@dataclass(frozen=True)
class Row:
    """What came of one."""

    planted: Planted
    named: str
    predicted: float | None = None
    gave: float | None = None
    """Seconds; bytes of memory that grows."""
    shares: tuple[float, float] | None = None
    """Both as parts of the training's time."""
    ended: str = ""

    @property
    def is_first(self) -> bool:
        """Whether the planted problem was named first."""
        return self.named == self.planted.finding

    @property
    def ratio(self) -> float | None:
        """The predicted cost in parts of what the repair gave."""
        predicted, gave = self.shares or (self.predicted, self.gave)
        return predicted / gave if predicted is not None and gave else None

    @property
    def line(self) -> str:
        """For the table."""
        show = show_bytes if self.planted.kind == "memory" else show_seconds
        predicted = show(self.predicted) if self.predicted is not None else "the run"
        gave = show(self.gave) if self.gave is not None else self.ended
        ratio = f"{self.ratio:.2f}" if self.ratio is not None else "-"
        share = " and ".join(f"{100 * one:.0f} %" for one in self.shares) if self.shares is not None else ""
        return f"{self.planted.script:<21}{self.named:<21}{predicted:>10} {gave:>12} {share:>15}{ratio:>7}"


def diagnosed(planted: Planted, seconds: float) -> dict[str, Any]:
    """What `hotlap diagnose --json` prints."""
    words = ["diagnose", "--json", "--quiet", "--seconds", f"{seconds:g}", f"{planted.script}.py"]
    done = subprocess.run(
        [sys.executable, "-m", "hotlap", *words], cwd=PLANTED, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{planted.script}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def twins(planted: Planted) -> tuple[tuple[float, float, str], tuple[float, float, str]]:
    """Seconds, growth of memory and end of the script as planted and as repaired, both run at the same time."""
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", TWIN, str(PLANTED / f"{planted.script}.py"), *words],
                cwd=folder,
                env={name: value for name, value in os.environ.items() if name != "CUDA_LAUNCH_BLOCKING"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for words in ([], ["--repaired"])
        ]
        ended = [one.communicate()[0].strip().rpartition("\n")[2] for one in started]
    spent_s, grown, how = zip(*(eval(one, {}) for one in ended), strict=True)  # the tuples that TWIN prints
    return (spent_s[0], grown[0], how[0]), (spent_s[1], grown[1], how[1])


def row(planted: Planted, seconds: float) -> Row:
    """Diagnose one, and run it with its twin."""
    found = diagnosed(planted, seconds)
    first = found["found"][0] if found["found"] else {"name": "nothing", "cost_s": None}
    before, after = twins(planted)
    predicted, gave = first["cost_s"], before[0] - after[0]
    if planted.kind == "memory":
        updates = int(found["over"].split()[0].replace(",", "")) if found["over"] else 0
        predicted, gave = float(first.get("grows_bytes") or 0) * updates, before[1] - after[1]
    if planted.kind == "run":
        return Row(planted, first["name"], ended=f"{before[2]}, {after[2]}")
    shares = None
    if planted.kind == "time" and predicted is not None:
        shares = predicted / found["whole_s"], gave / before[0]
    return Row(planted, first["name"], predicted, gave, shares)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[one.script for one in ALL])
    parser.add_argument("--seconds", type=float, default=30.0)
    args = parser.parse_args()
    has_gpu, cpu = torch.cuda.is_available(), read_cpu()
    where = torch.cuda.get_device_name() if has_gpu else f"{cpu.cores} cores of {cpu.model}, no GPU"
    print(f"{where}; torch {torch.__version__}, Python {platform.python_version()}")
    print(
        f"{100 * busy_share(1.0):.0f} % of the cores were at work before this began; {args.seconds:g} s a diagnosis\n"
    )
    print(f"{'planted':<21}{'named first':<21}{'predicted':>10} {'repair gave':>12} {'of the time':>15}{'ratio':>7}")
    rows = []
    for one in ALL:
        if one.script not in args.only:
            continue
        if one.needs_gpu and not has_gpu:
            print(f"{one.script:<21}needs a GPU")
            continue
        rows.append(row(one, args.seconds))
        print(rows[-1].line, flush=True)
    near = [one for one in rows if one.ratio is not None]
    within = sum(0.5 <= (one.ratio or 0.0) <= 2 for one in near)
    print(f"\nnamed first: {sum(one.is_first for one in rows)} of {len(rows)} run here, {len(ALL)} planted")
    print(f"cost within a factor of two: {within} of {len(near)} that cost time or memory")


if __name__ == "__main__":
    main()
