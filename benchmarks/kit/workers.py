"""How many workers pay, against loops over a plain DataLoader with every count."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import hotlap
from benchmarks.kit.rows import Options, Row, wait
from hotlap import Job
from hotlap.core.units import show_seconds
from hotlap.machine.limits import read_cpu
from hotlap.tuner.stats import Comparison, Estimate

NEAR = 1.05
"""A count of workers is right whose time is within so much of the best."""
QUADS, LEAST_STEPS = 6, 20


class Slow(Dataset[tuple[Tensor, int]]):
    """Samples that take some milliseconds of a core each."""

    def __init__(self, count: int, rounds: int) -> None:
        self._count, self._rounds = count, rounds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        numbers = np.random.default_rng(index).standard_normal(4096)
        for _ in range(self._rounds):
            numbers = np.sort(np.tanh(numbers))
        return torch.from_numpy(numbers[:256]).float(), index % 10


def small_job(data: Any, options: Options, **more: Any) -> Job:
    """A small network over vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    loss = nn.CrossEntropyLoss()
    return Job(model=model, data=data, loss=loss, optimizer=optimizer, epochs=1, device=options.device, **more)


def workers_rows(options: Options) -> Iterator[Row]:
    """How many workers pay, against a plain loop with every count.

    The count that is named is right unless the fastest of the sweep is faster by more than `NEAR`, in turns with it.
    """
    count = 512 if options.quick else 4096
    in_memory = (torch.randn(count, 256), torch.randint(10, (count,)))
    slow = Slow(count, 2 if options.quick else 8)
    for name, data in (("data in memory", in_memory), ("a slow dataset", slow)):
        dataset = torch.utils.data.TensorDataset(*data) if isinstance(data, tuple) else data
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=32, shuffle=True)
        found = hotlap.workers(small_job(loader, options), seconds=30 if options.quick else 200)
        print(f"\n{name}\n{found.summary()}\n")
        chosen = found.best_count
        assert chosen is not None
        cores = read_cpu().cores
        tries = [n for n in sorted({0, 1, 2, 3, 4, 6, 8, 12, cores, chosen}) if n <= cores]
        lap_s = 0.3 if options.quick else 1.5
        loops = {n: PlainLoop(dataset, n, options) for n in tries}
        # There and back: what has drifted meanwhile has done so for the first as for the last.
        swept = {n: loops[n].step_s(lap_s) for n in tries}
        swept |= {n: (swept[n] + loops[n].step_s(lap_s)) / 2 for n in reversed(tries)}
        best = min(swept, key=lambda n: swept[n])
        told = f"{best} best ({', '.join(f'{n}: {show_seconds(step_s)}' for n, step_s in swept.items())})"
        gain = in_turns(loops[chosen], loops[best], lap_s) if best != chosen else None
        if gain is not None:
            told += f"; in turns {gain.ratio:.3f}x [{gain.low:.3f}, {gain.high:.3f}] as fast as {chosen}"
        is_right = gain is None or gain.low <= NEAR or options.quick
        yield Row(part="workers", what=f"{name}: {chosen} workers", seen=told, kept=is_right)


def in_turns(a: PlainLoop, b: PlainLoop, lap_s: float) -> Estimate:
    """How many times as fast as `a` the loop `b` is."""
    comparison = Comparison(most_quads=QUADS)
    while comparison.verdict is None:
        a1, b1, b2, a2 = (loop.step_s(lap_s) for loop in (a, b, b, a))
        comparison.add(a1, b1, b2, a2)
    assert comparison.estimate is not None
    return comparison.estimate


class PlainLoop:
    """A loop as people write it, made lap by lap."""

    def __init__(self, dataset: Any, workers: int, options: Options) -> None:
        self._workers, self._device = workers, torch.device(options.device)
        self._model = small_job(dataset, options, batch_size=32).model.to(self._device)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        pinned = self._device.type == "cuda"
        self._loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=32, shuffle=True, num_workers=workers, persistent_workers=workers > 0, pin_memory=pinned
        )
        self._batches: Iterator[Any] = iter(())

    def step_s(self, lap_s: float) -> float:
        """Seconds a step of a lap, from the second round of the workers on."""
        for _ in range(2 * self._workers + 2):
            self._step()
        wait(self._device)
        begun, made_steps = time.perf_counter(), 0
        while made_steps < LEAST_STEPS or time.perf_counter() - begun < lap_s:
            self._step()
            made_steps += 1
        wait(self._device)
        return (time.perf_counter() - begun) / made_steps

    def _step(self) -> None:
        batch = next(self._batches, None)
        if batch is None:
            self._batches = iter(self._loader)
            batch = next(self._batches)
        x, y = (part.to(self._device, non_blocking=True) for part in batch)
        self._optimizer.zero_grad()
        F.cross_entropy(self._model(x), y).backward()
        self._optimizer.step()
