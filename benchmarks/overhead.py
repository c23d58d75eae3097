"""What the engine costs over the plain loop it replaces, under the same plan.

    python -m benchmarks.overhead [--device cpu|cuda] [--pairs 16] [--json FILE]

The plain loops are what a careful person writes: no value is read back inside the loop, the running loss
stays on the device. Both sides train: same model, data, order, optimizer, clipping and batch.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hotlap
from benchmarks.paired import Comparison, compare
from hotlap.core.units import show_seconds

SAMPLES = 20_000


class Lstm(nn.Module):
    """Two bidirectional layers of 128 over windows of 20 × 29, three classes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(29, 128, num_layers=2, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Classes from the last step."""
        return self.head(self.lstm(x)[0][:, -1])


def mlp() -> nn.Module:
    """100-256-128-64-3 with batch norms."""
    sizes, layers = (100, 256, 128, 64), []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(64, 3))


WORK: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, str]] = {
    "MLP, batch 256, gathered": (mlp, (100,), 256, "gather"),
    "MLP, batch 256, DataLoader": (mlp, (100,), 256, "loader"),
    "LSTM, batch 128, gathered": (Lstm, (20, 29), 128, "gather"),
}


def data_for(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Random data of the stated shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *shape, generator=generator)
    return x, torch.randint(3, (SAMPLES,), generator=generator)


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as people use it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain_batches(data: tuple[Tensor, Tensor], batch: int, kind: str) -> Iterator[list[Tensor]]:
    """Shuffled batches, epoch after epoch, as written by hand."""
    x, y = data
    loader = DataLoader(TensorDataset(x, y), batch_size=batch, shuffle=True)
    while True:
        if kind == "loader":
            yield from loader
        else:
            for chosen in torch.randperm(len(x)).split(batch):
                yield [x.index_select(0, chosen), y.index_select(0, chosen)]


def plain_steps(
    model: nn.Module, data: tuple[Tensor, Tensor], batch: int, kind: str, device: torch.device
) -> Iterator[None]:
    """The loop by hand."""
    model.to(device)
    optimizer, loss = new_optimizer(model), nn.CrossEntropyLoss()
    running = torch.zeros((), dtype=torch.float64, device=device)
    for x, y in plain_batches(data, batch, kind):
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        value = loss(model(x), y)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running += value.detach() * len(x)
        yield


def engine_steps(
    model: nn.Module, data: tuple[Tensor, Tensor], batch: int, kind: str, device: torch.device
) -> Iterator[None]:
    """The same training by the Rig."""
    plan = hotlap.Plan().but(kind=kind)
    rig = hotlap.Rig(model, new_optimizer(model), nn.CrossEntropyLoss(), clip=1.0, plan=plan, device=str(device))
    for window in rig.feed(data, batch_size=batch, steps=10**9):
        rig.step(window)
        yield


def steps_in_turn(name: str, device: torch.device, pairs: int) -> Comparison:
    """One row: the engine's step over the plain step."""
    make, shape, batch, kind = WORK[name]
    data = data_for(shape)
    torch.manual_seed(0)
    plain, engine = make(), make()
    return compare(
        plain_steps(plain, data, batch, kind, device),
        engine_steps(engine, data, batch, kind, device),
        device=device,
        lap_s=0.1,
        pairs=pairs,
    )


def whole_fit(device: torch.device, seconds: float) -> dict[str, float]:
    """`fit` from call to return, run folder and all, over the plain loop for as many steps."""
    make, shape, batch, kind = WORK["MLP, batch 256, gathered"]
    data = data_for(shape)
    torch.manual_seed(0)
    plain = plain_steps(make(), data, batch, kind, device)
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def timed_plain(steps: int) -> float:
        sync()
        start = time.perf_counter()
        for _ in range(steps):
            next(plain)
        sync()
        return time.perf_counter() - start

    def timed_fit(steps: int) -> float:
        model = make()
        job = hotlap.Job(
            model=model,
            data=data,
            loss=nn.CrossEntropyLoss(),
            optimizer=new_optimizer(model),
            batch_size=batch,
            steps=steps,
            clip=1.0,
            device=str(device),
        )
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            hotlap.fit(job, out=Path(folder) / "run", progress=False)
            sync()
            return time.perf_counter() - start

    timed_fit(20)
    steps = round(seconds / (timed_plain(200) / 200))
    ratios = []
    for number in range(7):
        a, b = (timed_plain, timed_fit) if number % 2 == 0 else (timed_fit, timed_plain)
        first, second = a(steps), b(steps)
        ratios.append(second / first if number % 2 == 0 else first / second)
    return {"steps": steps, "ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pairs", type=int, default=100, help="short laps in many pairs: what drifts, drifts in both")
    parser.add_argument("--threads", type=int, help="CPU threads; one has far less noise than all")
    parser.add_argument("--fit-seconds", type=float, default=4.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.threads:
        torch.set_num_threads(options.threads)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"engine over plain loop on {name}, torch {torch.__version__}, Python {platform.python_version()}")
    rows = {}
    for work in WORK:
        found = steps_in_turn(work, device, options.pairs)
        rows[work] = asdict(found)
        print(
            f"{work:<28} plain {show_seconds(found.a_step_s):>8}  engine {show_seconds(found.b_step_s):>8}  "
            f"{(found.ratio - 1) * 100:+.1f} % [{(found.low - 1) * 100:+.1f}, {(found.high - 1) * 100:+.1f}]",
            flush=True,
        )
    fitted = whole_fit(device, options.fit_seconds)
    percent = {name: (fitted[name] - 1) * 100 for name in ("ratio", "low", "high")}
    told = f"{percent['ratio']:+.1f} % (of 7: {percent['low']:+.1f} to {percent['high']:+.1f})"
    print(f"{'MLP, whole fit':<28} {fitted['steps']:,} steps  {told}")
    if options.json:
        options.json.write_text(json.dumps({"machine": name, "rows": rows, "whole_fit": fitted}, indent=2) + "\n")


if __name__ == "__main__":
    main()
