"""What checkpoints cost: whole runs of `fit` with and without them, in turn (A B B A).

    python -m benchmarks.checkpoint [--device cpu|cuda] [--seconds 40] [--pairs 4] [--json FILE]

Each model without a checkpoint (save_every=0) against two ways. As hotlap chooses, in runs of several lengths: never
more than one in 30 s, and so seldom that copying and writing stay within 2 % of the time since the run began, so a
short run makes none at all. And at a forced interval, with one before the first step and one at the end, so often
that what saves cost shows in a short run. "Saving" is the seconds of copying and of writing, in the training's way or
beside it, as a share of the run; "most" is the largest share it ever had after a step. The noise of the machine is
what runs without checkpoints differ by.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotlap
from benchmarks.overhead import mlp
from hotlap.core.units import show_bytes, show_seconds
from hotlap.guard.saving import Saver

BATCH = 256
LENGTHS = (1 / 4, 1, 2)
"""Runs that leave the saving to hotlap, as multiples of --seconds."""
WORK: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "MLP, 0.07 M parameters": (mlp, 100),
    "MLP, 25 M parameters": (lambda: large(), 1024),
}


def large() -> nn.Module:
    """25 million parameters: with AdamW about 300 MB of state."""
    layers: list[nn.Module] = [nn.Linear(1024, 2048), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Linear(2048, 2048), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 3))


def data_for(width: int) -> tuple[Tensor, Tensor]:
    """Random rows."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(4096, width, generator=generator), torch.randint(3, (4096,), generator=generator)


def one_run(name: str, device: str, steps: int, save_every: int | None) -> dict[str, float]:
    """A whole run of `fit`; what it took, and what of it went into saving."""
    make, width = WORK[name]
    torch.manual_seed(0)
    model = make()
    job = hotlap.Job(
        model=model,
        data=data_for(width),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4),
        batch_size=BATCH,
        steps=steps,
        device=device,
    )
    savers: list[Saver] = []
    begun, most = 0.0, 0.0
    real, due = Saver.__init__, Saver.due

    def noted(self: Saver, *given: Any, **named: Any) -> None:
        real(self, *given, **named)
        savers.append(self)

    def watched(self: Saver, step: int) -> bool:
        nonlocal most
        most = max(most, self.cost_s / (time.perf_counter() - begun))
        return due(self, step)

    Saver.__init__, Saver.due = noted, watched  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            begun = time.perf_counter()
            run = hotlap.fit(job, out=Path(folder) / "run", save_every=save_every, progress=False)
            took_s = time.perf_counter() - begun
            sizes = [f.stat().st_size for f in (Path(folder) / "run/checkpoints").glob("step-*/*")]
            kept = len(list((Path(folder) / "run/checkpoints").glob("step-*")))
    finally:
        Saver.__init__, Saver.due = real, due  # type: ignore[method-assign]
    (saver,) = savers
    return {
        "run_s": took_s,
        "step_s": run.train_s / run.steps,
        "stood_s": saver.spent_s,
        "saving_s": saver.cost_s,
        "most": max(most, saver.cost_s / took_s),
        "saves": saver.saved,
        "bytes": sum(sizes) / kept if kept else 0,
        "problems": len(run.problems),
    }


def in_turn(one: Callable[[], dict[str, float]], other: Callable[[], dict[str, float]], pairs: int) -> list[Any]:
    """Runs of both, A B B A."""
    found = []
    for number in range(pairs):
        first = (one if number % 2 == 0 else other)()
        second = (other if number % 2 == 0 else one)()
        found.append((first, second) if number % 2 == 0 else (second, first))
    return found


# Two-sided 95 % points of Student's t for 1, 2, 3 … degrees of freedom: whole runs are few.
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = T95[min(len(values) - 2, len(T95) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def compared(name: str, device: str, steps: int, save_every: int | None, pairs: int) -> dict[str, Any]:
    """Runs with checkpoints against runs without."""
    runs = in_turn(
        lambda: one_run(name, device, steps, 0),
        lambda: one_run(name, device, steps, save_every),
        pairs,
    )
    share = interval([(b["run_s"] / a["run_s"] - 1) * 100 for a, b in runs])
    without = [a["run_s"] for a, _ in runs]
    return {
        "steps": steps,
        "save_every": save_every,
        "pairs": pairs,
        "share_percent": share,
        "saving_percent": max(b["saving_s"] / b["run_s"] * 100 for _, b in runs),
        "most_percent": max(b["most"] * 100 for _, b in runs),
        "noise_percent": (max(without) / min(without) - 1) * 100,
        **{f"without_{key}": statistics.median(a[key] for a, _ in runs) for key in ("run_s", "step_s")},
        **{key: statistics.median(b[key] for _, b in runs) for key in runs[0][1]},
    }


def shown(way: str, found: dict[str, Any]) -> str:
    """One row."""
    mean, low, high = found["share_percent"]
    return (
        f"  {way:<26} run {show_seconds(found['without_run_s']):>7} → {show_seconds(found['run_s']):>7}  "
        f"step {show_seconds(found['without_step_s']):>8} → {show_seconds(found['step_s']):>8}  "
        f"{found['saves']:.0f} saves of {show_bytes(int(found['bytes']))}, "
        f"stood {show_seconds(found['stood_s'])}, saving {show_seconds(found['saving_s'])}: "
        f"{found['saving_percent']:.2f} % of the run, most {found['most_percent']:.2f} %  "
        f"whole run {mean:+.1f} % [{low:+.1f}, {high:+.1f}]; noise {found['noise_percent']:.1f} %"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run without checkpoints")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--forced", type=int, default=4, help="saves between the first and the last, where forced")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"checkpoints on {where}, torch {torch.__version__}, Python {platform.python_version()}, AdamW, batch {BATCH}"
    )
    rows: dict[str, Any] = {}
    for name in [name for name in WORK if options.only in name]:
        one_run(name, options.device, 20, 0)
        step_s = one_run(name, options.device, 20, 0)["step_s"]
        steps = max(20, round(options.seconds / step_s))
        print(f"{name}, {steps:,} steps in {options.seconds:g} s", flush=True)
        every = max(1, steps // (options.forced + 1))
        ways: list[tuple[int, int | None]] = [(max(20, round(steps * length)), None) for length in LENGTHS]
        for length, save_every in [*ways, (steps, every)]:
            way = f"every {every:,} of {length:,}" if save_every else f"as hotlap chooses, {length:,}"
            rows[f"{name}, {way}"] = found = compared(name, options.device, length, save_every, options.pairs)
            print(shown(way, found), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": where, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
