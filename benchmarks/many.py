"""`fit_many` on one device: several small trainings at once against one after the other, whole runs and laps.

    python -m benchmarks.many [--device cuda] [--jobs 8] [--each-s 0.4]

For an MLP and an LSTM it prints, for 2, 4, 8 and 16 at once, updates a second in laps of copies (no set-up), and
whole calls of `fit_many` in turns with one after the other, with their evaluations and files. Then whether all weights
are equal to the last bit, and the memory that each training takes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import hotlap
from hotlap.core.plan import Plan
from hotlap.searching.at_once import Copies
from hotlap.searching.crews import threads_of

COUNTS = (2, 4, 8, 16)
BATCH = 256


class Lstm(nn.Module):
    """An LSTM over 32 steps, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(16, 64, batch_first=True), nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number for each sample."""
        made: torch.Tensor = self.head(self.lstm(x)[0][:, -1])
        return made


def mlp() -> nn.Module:
    """Three layers of 256, with dropout."""
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
    return nn.Sequential(*layers)


def job(
    make: Callable[[], nn.Module], data: tuple[torch.Tensor, ...], device: str, epochs: int, seed: int
) -> hotlap.Job:
    """A training of one seed."""
    torch.manual_seed(seed)
    x, y, xv, yv = data
    return hotlap.Job(
        model=make(),
        data=(x, y),
        valid=(xv, yv),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        batch_size=BATCH,
        epochs=epochs,
        seed=seed,
        device=device,
    )


def weights(runs: list[hotlap.Run]) -> list[torch.Tensor]:
    """All weights of each run, as one tensor."""
    return [torch.cat([p.detach().flatten().cpu() for p in run.model.parameters()]) for run in runs]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8, help="in a whole call")
    parser.add_argument("--most", type=int, default=16, help="at once, in laps")
    parser.add_argument("--each-s", type=float, default=0.4, help="seconds of steps in one training, about")
    parser.add_argument("--rows", type=int, default=65_536)
    parser.add_argument("--most-s", type=float, default=90.0, help="leave out what does not fit")
    asked = parser.parse_args()
    began_s, on_gpu = time.perf_counter(), asked.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(f"{name}, torch {torch.__version__}, {asked.jobs} jobs, batch {BATCH}, {asked.rows:,} rows", flush=True)
    for number, (what, make, shape, together) in enumerate((("MLP", mlp, (64,), 32), ("LSTM", Lstm, (32, 16), 8))):
        until_s = began_s + asked.most_s * (number + 1) / 2
        captured = {"mode": "captured", "kind": "resident", "optimizer": "fused", "replay_steps": together}
        measure(what, make, shape, Plan().but(**(captured if on_gpu else {})), asked, until_s)


def measure(
    what: str,
    make: Callable[[], nn.Module],
    shape: tuple[int, ...],
    plan: Plan,
    asked: argparse.Namespace,
    until_s: float,
) -> None:
    """Print the figures of one network."""
    torch.manual_seed(0)
    rows, on_gpu = asked.rows, asked.device == "cuda"
    x, xv = torch.randn(rows, *shape), torch.randn(4096, *shape)
    data = (x, x.flatten(1).mean(1, keepdim=True).sin(), xv, xv.flatten(1).mean(1, keepdim=True).sin())
    device = torch.device(asked.device)
    say(f"\n{what}: {plan}")

    # Laps of copies: what steps alone gain, without set-up.
    paces: dict[int, float] = {}
    alone = Copies(job(make, data, asked.device, 1, 0), plan, 1, threads_of(1, device))
    try:
        alone.lap(0.3)
        for count in COUNTS:
            if count > asked.most:
                continue
            set_up_s, held = time.perf_counter(), reserved(on_gpu)
            many = Copies(job(make, data, asked.device, 1, 0), plan, count, threads_of(count, device))
            try:
                many.lap(0.3)
                set_up_s, held = time.perf_counter() - set_up_s, reserved(on_gpu) - held
                laps = [(alone.lap(0.3), many.lap(0.3)) for _ in range(3)]
            finally:
                many.close()
            ratios = sorted(one / other for one, other in laps)
            paces.setdefault(1, min(one for one, _ in laps))
            say(
                f"{what} laps   {count:2d} at once  {1 / min(other for _, other in laps):9,.0f} updates/s  "
                f"{ratios[1]:5.2f}x [{ratios[0]:.2f}, {ratios[-1]:.2f}]  alone {1 / paces[1]:,.0f}/s  "
                f"set up in {set_up_s:.1f} s  {held / count / 2**20:,.0f} MiB each"
            )
    finally:
        alone.close()

    # Whole calls, one after the other before and after.
    epochs = max(1, round(asked.each_s / (paces[1] * (rows // BATCH))))
    expected: list[torch.Tensor] = []
    base_s: list[float] = []
    for count in (1, 8, 4, 1, 2):
        if count > asked.jobs or time.perf_counter() + (max(base_s, default=0.0) / min(count, 6)) > until_s:
            say(f"{what} whole  {count:2d} at once  left out")
            continue
        jobs = [job(make, data, asked.device, epochs, seed) for seed in range(asked.jobs)]
        with tempfile.TemporaryDirectory() as folder:
            start_s = time.perf_counter()
            runs = hotlap.fit_many(
                jobs, at_once=count, plan=plan, out=Path(folder) / "many", progress=False, save_every=0
            )
            took_s = time.perf_counter() - start_s
        mine = weights(runs)
        expected = expected or mine
        equal = sum(torch.equal(one, other) for one, other in zip(mine, expected, strict=True))
        base_s += [took_s] if count == 1 else []
        steps, first = sum(run.steps for run in runs), base_s[0] if base_s else took_s
        busy_s = sum(run.train_s for run in runs) / len(runs)
        say(
            f"{what} whole  {count:2d} at once  {took_s:6.2f} s  {steps / took_s:9,.0f} updates/s  "
            f"{first / took_s:5.2f}x  weights equal {equal}/{len(jobs)}  "
            f"{epochs} epochs, {busy_s:.2f} s of steps in each"
        )


def reserved(on_gpu: bool) -> int:
    """Bytes that torch has taken of the GPU."""
    return torch.cuda.memory_reserved() if on_gpu else 0


def say(line: str) -> None:
    """Print at once: a run that is cut short has shown what it measured."""
    print(line, flush=True)


if __name__ == "__main__":
    main()
