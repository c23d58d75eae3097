"""Large batches gathered on the host while a GPU trains on them: by torch's threads and by hotlap's, in turn.

    python -m benchmarks.gathering [--device cuda] [--rows 16000] [--size 224] [--pairs 24]

Batches of 64 pictures in bytes, out of a file that is read from memory, to the `image` recipe's ResNet. A line for
each: milliseconds that a batch takes in the middle, on average and at worst, and a step in the middle. The last line
is how many times as fast steps are by hotlap's threads, whole, with a 95 % interval.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import hotlap
from benchmarks.paired import compare
from hotlap.core.plan import Feed
from hotlap.data import sources
from hotlap.recipes.networks import NetworkSpec, new_network

BATCH, CLASSES = 64, 10


def noise(path: Path, rows: int, size: int) -> Tensor:
    """Pictures as a recipe's cache has them."""
    shape = (rows, 3, size, size)
    file = np.memmap(path, np.uint8, "w+", shape=shape)
    some = np.random.default_rng(0).integers(0, 255, (BATCH, *shape[1:]), dtype=np.uint8)
    for start in range(0, rows, BATCH):
        file[start : start + BATCH] = some[: rows - start]
    file.flush()
    return torch.from_numpy(np.memmap(path, np.uint8, "c", shape=shape))


def steps(pictures: Tensor, device: torch.device, waits: list[float]) -> Iterator[None]:
    """A training, a step at a time; `waits` gets the seconds that each batch takes."""
    torch.manual_seed(0)
    plan = NetworkSpec(outputs=CLASSES, size=pictures.shape[-1])
    rig = hotlap.Rig(new_network("resnet", plan), torch.optim.AdamW, nn.CrossEntropyLoss(), device=device)
    data = TensorDataset(pictures, torch.randint(CLASSES, (len(pictures),)))
    rig.feed(data, batch_size=BATCH, epochs=10_000)
    rig.use(rig.plan.with_feed(Feed(kind="gather")))
    windows = rig.windows(room=lambda: 1)
    while True:
        began = time.perf_counter()
        window = next(windows)
        waits.append(time.perf_counter() - began)
        rig.advance(window)
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--pairs", type=int, default=24)
    options = parser.parse_args()
    device = torch.device(options.device)
    hands = {"torch's": 0, "hotlap's": sources.GATHER_THREADS}
    waits: dict[str, list[float]] = {name: [] for name in hands}
    with tempfile.TemporaryDirectory(prefix="hotlap-gathering-") as folder:
        pictures = noise(Path(folder) / "pictures", options.rows, options.size)
        trainings = []
        for name, count in hands.items():
            sources.GATHER_THREADS = count  # rows keep to what there was when they were made
            trainings.append(steps(pictures, device, waits[name]))
            next(trainings[-1])
        found = compare(trainings[0], trainings[1], device=device, pairs=options.pairs)
    for name, step_s in zip(hands, (found.a_step_s, found.b_step_s), strict=True):
        middle, mean, worst = (1000 * of(waits[name]) for of in (statistics.median, statistics.mean, max))
        batch = f"a batch {middle:.2f} ms in the middle, {mean:.2f} on average, {worst:.1f} at worst"
        print(f"{name} threads: {batch} of {len(waits[name]):,}; a step {1000 * step_s:.2f} ms")
    gains = [1 / ratio for ratio in (found.ratio, found.high, found.low)]
    print(f"steps by hotlap's threads: {gains[0]:.3f}x as fast [{gains[1]:.3f}, {gains[2]:.3f}], {found.pairs} pairs")


if __name__ == "__main__":
    main()
