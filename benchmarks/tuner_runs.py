"""Whole runs of a training in processes of their own, under the user's own plan and tuned."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hotlap
from hotlap.core.ledger import Ledger
from hotlap.core.table import as_json, table
from hotlap.core.units import show_seconds
from hotlap.demo import digits_job
from hotlap.tuner.stats import student_t

report = partial(print, file=sys.stderr, flush=True)  # progress


class InFp64(nn.Module):
    """Hands on what it is given in double precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same in fp64."""
        return x.double()


def job_of(model: nn.Module, width: int, batch: int, updates: int, device: str, dtype: torch.dtype) -> hotlap.Job:
    """Tensors, gathered; a fused optimizer: what is left is arithmetic."""
    model = model.to(device)
    return hotlap.Job(
        model=model,
        data=(torch.randn(200 * batch, 64, dtype=dtype), torch.randint(width, (200 * batch,))),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), fused=True),
        batch_size=batch,
        steps=updates,
        device=device,
    )


def bound_by_arithmetic(updates: int, device: str) -> hotlap.Job:
    """A training in which nothing can help: all of its arithmetic is in fp64."""
    width, batch = (4096, 1024) if device == "cuda" else (256, 32)
    torch.manual_seed(0)
    large = nn.Linear(width, width)
    model = nn.Sequential(nn.Linear(64, width), *[nn.Tanh(), large] * 4).to(torch.float64)
    return job_of(model, width, batch, updates, device, torch.float64)


def arithmetic_in_part(updates: int, device: str) -> hotlap.Job:
    """A training whose first layers a lower precision makes faster, and whose last ones, in fp64, nothing does.

    What it gains is so small that the tuned run is long enough for all that is tried, and what bounds it is the GPU,
    whose pace changes less than its host's.
    """
    width, batch = 4096, 1024
    torch.manual_seed(0)
    first, last = nn.Linear(width, width), nn.Linear(width, width, dtype=torch.float64)
    layers = [nn.Linear(64, width), *[nn.Tanh(), first] * 2, InFp64(), *[nn.Tanh(), last] * 2]
    return job_of(nn.Sequential(*layers), width, batch, updates, device, torch.float32)


def promising(updates: int, device: str) -> hotlap.Job:
    """A training that can be made faster."""
    if device == "cuda":
        return arithmetic_in_part(updates, device)
    return digits_job(epochs=max(1, updates // 45), device=device)


JOBS: dict[str, Callable[[int, str], hotlap.Job]] = {"promise": promising, "nothing": bound_by_arithmetic}


def trained(job: str, plan: str, updates: int, device: str) -> dict[str, Any]:
    """One call of `fit`."""
    with tempfile.TemporaryDirectory(prefix="hotlap-trust-", ignore_cleanup_errors=True) as folder:
        run = hotlap.fit(JOBS[job](updates, device), plan=plan, out=Path(folder) / "run", progress=False)
    return {"plan": plan, "train_s": run.train_s, "updates": run.steps, "ledger": run.ledger.to_lines()}


def alone(job: str, plan: str, updates: int, device: str) -> dict[str, Any]:
    """The same in a process of its own, with an empty cache."""
    with tempfile.TemporaryDirectory(prefix="hotlap-trust-", ignore_cleanup_errors=True) as folder:
        answer, fresh = Path(folder) / "answer.json", {"HOTLAP_CACHE": str(Path(folder) / "cache")}
        command = [sys.executable, "-m", "benchmarks.tuner_trust", "--alone", job, plan, str(updates), str(answer)]
        command += ["--device", device]
        here = Path(__file__).parents[1]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | fresh, cwd=here)
        found: dict[str, Any] = json.loads(answer.read_text())
    report(f"{job}: {plan} took {show_seconds(found['train_s'])} for {found['updates']:,} updates")
    return found


class Runs:
    """Whole runs of a job in turn, under the user's own plan first and last."""

    def __init__(self, job: str, options: argparse.Namespace, *, seconds: float) -> None:
        """`seconds`: what one takes under the user's own plan, about."""
        # The faster of two: a slow moment would make the runs too short to tune.
        paces = [trained(job, "off", 450, options.device) for _ in range(2)]
        updates = round(seconds / min(run["train_s"] / run["updates"] for run in paces))
        plans = ["off", *["auto", "off"] * options.runs]
        self.all = [alone(job, plan, updates, options.device) for plan in plans]
        self.auto = [run for run in self.all if run["plan"] == "auto"]
        self.updates = self.auto[0]["updates"]
        ledgers = [Ledger.from_lines(run["ledger"]) for run in self.auto]
        self.tuning = [as_json(ledger) for ledger in ledgers]
        took = [math.log(run["train_s"]) for run in self.all]
        # Each tuned run against the two around it: what drifts in a straight line cancels.
        gains = [(took[at - 1] + took[at + 1]) / 2 - took[at] for at in range(1, len(took), 2)]
        self.ratios = [math.exp(gain) for gain in gains]  # how many times as fast each tuned run is
        self.ratio = math.exp(statistics.mean(gains))
        # Half of the interval of one ratio, and of all together, as logarithms; one run says nothing of its noise.
        self.half_of_one = student_t(len(gains) - 1, 0.05) * statistics.stdev(gains) if len(gains) > 1 else math.inf
        self.half = self.half_of_one / math.sqrt(len(gains))
        self.lines = [
            f"{run['plan']:<5} {run['train_s']:>6.2f} s for {run['updates']:,} updates, "
            f"{show_seconds(run['train_s'] / run['updates'])} a step"
            for run in self.all
        ]
        told = f"tuned runs are {self.ratio:.3f}x as fast: {', '.join(f'{one:.3f}x' for one in self.ratios)}"
        self.lines.append(f"{told}; runs of the user's own plan differ by {statistics.stdev(took[::2]):.1%}")
        for ledger in ledgers:
            self.lines += ["", *table(ledger, 116)]
