"""Lap times to compare plans on: made up, of many kinds of machine, and recorded from a real one.

    python -m tests.tuner.traces --threads 2 --out FILE

records 400 laps of an MLP on this CPU, in half a minute. With two threads on a machine that others use too, a step
can take anything from 4 to 200 ms: `mlp-2-threads-busy` is as bad as it gets.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Laps = npt.NDArray[np.float64]

RECORDED = Path(__file__).parent / "recorded"
STEP_S = 0.01


def steady(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """Normal noise, each lap for itself."""
    return rng.normal(0, spread, shape)


def drifting(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """A speed that changes by up to 0.3 % a lap, always the same way."""
    return steady(shape, spread, rng) + rng.uniform(-0.003, 0.003, (shape[0], 1)) * np.arange(shape[1])


def wandering(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """A speed on a random walk, in steps of 0.5 % a lap."""
    return steady(shape, spread, rng) + rng.normal(0, 0.005, shape).cumsum(axis=1)


def spiky(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """One lap in twenty takes 1.2 to 3 times as long."""
    spikes = np.log(rng.uniform(1.2, 3, shape)) * (rng.random(shape) < 0.05)
    return steady(shape, spread, rng) + spikes


def two_speed(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """Two speeds 10 % apart; each lasts ten laps on average."""
    changes = (rng.random(shape) < 0.1).cumsum(axis=1) + rng.integers(0, 2, (shape[0], 1))
    return steady(shape, spread, rng) + changes % 2 * math.log(1.1)


def autocorrelated(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """Normal noise of which four fifths carry over to the next lap."""
    carried = 0.8
    laps = rng.normal(0, spread, shape)
    laps[:, 1:] *= math.sqrt(1 - carried**2)
    for lap in range(1, shape[1]):
        laps[:, lap] += carried * laps[:, lap - 1]
    return laps


def beating(shape: tuple[int, int], spread: float, rng: np.random.Generator) -> Laps:
    """Every fourth lap, in step with the quads, takes 10 % longer."""
    beat = (np.arange(shape[1]) + rng.integers(0, 4, (shape[0], 1))) % 4 == 0
    return steady(shape, spread, rng) + math.log(1.1) * beat


KINDS: dict[str, Callable[[tuple[int, int], float, np.random.Generator], Laps]] = {
    "steady": steady,
    "drifting": drifting,
    "wandering": wandering,
    "spiky": spiky,
    "two-speed": two_speed,
    "autocorrelated": autocorrelated,
}
"""What a comparison must not be taken in by."""


def quads(
    make: Callable[[tuple[int, int], float, np.random.Generator], Laps],
    *,
    ratio: float,
    spread: float,
    comparisons: int,
    count: int,
    rng: np.random.Generator,
    uneven: float = 0.0,
    tossed: bool = False,
) -> Laps:
    """Seconds a step as (comparison, quad, a1 b1 b2 a2) for a B that is `ratio` times faster.

    `uneven`: by how much (in log time) the gain itself differs from quad to quad. `tossed`: a coin decides whether a
    quad is run as A B B A or as B A A B.
    """
    laps = make((comparisons, count * 4), spread, rng).reshape(comparisons, count, 4)
    if tossed:
        laps = np.where(rng.random((comparisons, count, 1)) < 0.5, laps, laps[:, :, [1, 0, 3, 2]])
    gains = math.log(ratio) + rng.normal(0, uneven, (comparisons, count, 1))
    laps[:, :, 1:3] -= gains
    return STEP_S * np.exp(laps)


def recorded(name: str) -> Laps:
    """Seconds a step of laps that were really run one after the other, all of the same plan."""
    return np.array(json.loads((RECORDED / f"{name}.json").read_text())["step_s"])


def consecutive(laps: Laps, *, count: int, every: int = 1, ratio: float = 1.0) -> Laps:
    """Comparisons cut from a row of laps, one from each `every`th lap on; B's laps are made `ratio` times shorter."""
    starts = range(0, len(laps) - 4 * count + 1, every)
    cut = np.stack([laps[start : start + 4 * count] for start in starts]).reshape(-1, count, 4)
    return cut / np.array([1, ratio, ratio, 1])


def record(path: Path, *, threads: int, laps: int, lap_s: float, busy: bool) -> None:
    """Train a small MLP, lap after lap of at least `lap_s`, and keep what a step took in each."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x, y = torch.randn(256, 100), torch.randint(3, (256,))

    def lap() -> float:
        steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < lap_s:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            steps += 1
        return (time.perf_counter() - start) / steps

    for _ in range(20):
        lap()
    facts = {
        "machine": "2 cores, CPU",
        "work": "MLP 100-256-128-3, batch 256, AdamW, fp32",
        "threads": threads,
        "busy": busy,
        "lap_s": lap_s,
        "step_s": [float(f"{lap():.4g}") for _ in range(laps)],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts) + "\n")


def main() -> None:
    """Record anew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--laps", type=int, default=400)
    parser.add_argument("--lap-s", type=float, default=0.06)
    parser.add_argument("--busy", action="store_true", help="say that other programs wanted the cores")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    record(options.out, threads=options.threads, laps=options.laps, lap_s=options.lap_s, busy=options.busy)


if __name__ == "__main__":
    main()
