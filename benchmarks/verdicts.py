"""Trainings with a planted bottleneck, and what hotlap says bounds them while they run.

    python -m benchmarks.verdicts [--only NAME …] [--seconds 12]

Each training runs in a process of its own, for `--seconds` after its first verdict, under `fit` without the moves that
would mend it. The verdicts are read from the run's `live.json`, as `hotlap watch` reads it; the first third is left
out, and the most frequent one counts. Exit code 1 where one is not the planted one. Needs a GPU.
"""

from __future__ import annotations

import argparse
import collections
import json
import operator
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.versions import versions
from hotlap import Job, fit
from hotlap.core.tricks import FIT_TRICKS, MOVE_WORDS

LIMIT_S = 120
"""The most seconds for a training to show its first verdict."""


class Sleeping(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that reads slowly."""

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(0.0003)
        return torch.full((32,), index / 1e5), torch.tensor(index % 4)


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches in memory that is not pinned."""

    def __init__(self, rows: int, width: int) -> None:
        self.blocks = [table(rows, width) for _ in range(16)]

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.blocks[index % len(self.blocks)]


class Elementwise(nn.Module):
    """Reads and writes much and computes little."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.repeat(1, 64).view(len(x), 64, -1)
        for _ in range(20):
            wide = torch.sin(wide) + 1
        return self.head(wide.mean(2))


class Reading(nn.CrossEntropyLoss):
    """Reads scores back, as a careful person's logging does."""

    def forward(self, scores: Tensor, answers: Tensor) -> Tensor:
        for part in range(8):
            float(scores[part].mean())
        return super().forward(scores, answers)


def table(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Rows of numbers in the host's memory."""
    return torch.randn(rows, width), torch.randint(4, (rows,))


def perceptron(width: int, hidden: int, layers: int) -> nn.Module:
    """Linear layers and ReLUs."""
    blocks = [part for _ in range(layers) for part in (nn.Linear(hidden, hidden), nn.ReLU())]
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), *blocks, nn.Linear(hidden, 4))


def planted(model: nn.Module, data: Any, batch: int, **settings: Any) -> Job:
    """A job that trains for as long as it is let."""
    usual = {"loss": nn.CrossEntropyLoss(), "optimizer": lambda p: torch.optim.SGD(p, lr=1e-3), "epochs": 10_000}
    return Job(model=model, data=data, batch_size=batch, **{**usual, **settings})


JOBS: dict[str, Callable[[], Job]] = {
    "feeding": lambda: planted(perceptron(32, 256, 2), Sleeping(), 256),
    "launching": lambda: planted(perceptron(32, 32, 60), table(65_536, 32), 64),
    "synchronising": lambda: planted(perceptron(32, 64, 4), table(65_536, 32), 64, loss=Reading()),
    "memory traffic": lambda: planted(Elementwise(), table(65_536, 512), 4096),
    "arithmetic": lambda: planted(perceptron(512, 4096, 6), table(65_536, 512), 8192),
    "another process": lambda: planted(perceptron(512, 4096, 6), table(65_536, 512), 8192),
    "pageable copies": lambda: planted(
        perceptron(16_384, 64, 1), Blocks(1024, 16_384), 1, collate=operator.itemgetter(0)
    ),
    "evaluation": lambda: planted(
        perceptron(64, 1024, 4), table(8192, 64), 256, valid=table(400_000, 64), metrics=["accuracy"], eval_batch=256
    ),
}
ON_DEVICE = ("launching", "synchronising", "memory traffic", "arithmetic", "another process")
"""Those that hold their data on the GPU, so that feeding is no part of them."""


def train(name: str, folder: str) -> None:
    """Train a planted job until the process is ended."""
    job = JOBS[name]()
    kept = {"held-data", "gathered"} if name in ON_DEVICE else set()
    fit(job, without=sorted({*MOVE_WORDS, *FIT_TRICKS} - kept), tune_s=4, out=folder, save_every=0, progress=False)


def load() -> None:
    """Compute on the GPU until the process is ended."""
    a = torch.randn(8192, 8192, device="cuda")
    while True:
        a @ a
        torch.cuda.synchronize()


def watched(name: str, seconds: float) -> list[dict[str, Any]]:
    """The verdicts on a planted training, in order."""
    with tempfile.TemporaryDirectory(prefix="verdicts-", ignore_cleanup_errors=True) as made:
        folder = Path(made) / "run"
        command = [sys.executable, "-m", "benchmarks.verdicts"]
        other = subprocess.Popen([*command, "--load"]) if name == "another process" else None
        training = subprocess.Popen([*command, "--train", name, "--out", str(folder)], stdout=subprocess.DEVNULL)
        found: list[dict[str, Any]] = []
        begun = first = time.monotonic()
        try:
            while time.monotonic() - first < seconds and time.monotonic() - begun < LIMIT_S and training.poll() is None:
                time.sleep(0.5)
                live = folder / "live.json"
                state = json.loads(live.read_text()) if live.is_file() else {}
                if state.get("bound"):
                    found.append({**state["bound"], "plan": state["plan"]})
                else:
                    first = time.monotonic()
        finally:
            for process in (training, other):
                if process is not None:
                    process.kill()
                    process.wait()
    return found[len(found) // 3 :]


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verdicts", description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(JOBS), choices=list(JOBS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        load()
    if options.train:
        train(options.train, options.out)
        return 0
    print(*(f"{name} {version}" for name, version in versions().items()), sep=", ")
    right = 0
    for name in options.only:
        seen = watched(name, options.seconds)
        bounds = collections.Counter(state["by"] for state in seen)
        most = bounds.most_common(1)[0][0] if bounds else "nothing"
        right += most == name
        last = next((state for state in reversed(seen) if state["by"] == most), {"why": "", "plan": ""})
        others = ", ".join(f"{bound} {count}" for bound, count in bounds.most_common()[1:])
        print(f"{name:<16} {'right' if most == name else 'WRONG':<6} {most}: {last['why']}", flush=True)
        print(
            f"{'':<23} under {last['plan'].partition(', without')[0]}{f'; also {others}' if others else ''}", flush=True
        )
    print(f"right: {right} of {len(options.only)}")
    return int(right < len(options.only))


if __name__ == "__main__":
    sys.exit(main())
