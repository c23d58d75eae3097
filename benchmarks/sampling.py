"""What the sampler beside a training costs: laps of one training with and without it, in turn.

    python -m benchmarks.sampling [--device cpu|cuda] [--pairs 12] [--lap 2] [--often 20]

One reading a second is too little to be seen in the noise of a machine. So the sampler reads `--often` times as often
as it does, writes its files as it does, and what that costs is divided by as much. Beside it stands what the sampler
measures itself: the seconds of a core that its thread takes.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.overhead import WORK, data_for, engine_steps
from benchmarks.paired import median_interval
from hotlap.core.units import show_seconds
from hotlap.fitting.live import LOOK_S, gpu_of, sample_of
from hotlap.monitor import sampler as module
from hotlap.monitor.growing_memory import TURNS
from hotlap.monitor.hardware import HostReader
from hotlap.monitor.memory_watch import Growth, MemoryWatch
from hotlap.monitor.sampler import EVERY_S, Sampler


def lap(steps: Iterator[None], seconds: float, device: torch.device) -> tuple[float, float]:
    """Seconds a step, by the clock and of cores."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began, cpu, count = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < seconds:
        next(steps)
        count += 1
    wait()
    return (time.perf_counter() - began) / count, (time.process_time() - cpu) / count


def share(pairs: list[tuple[float, float]], often: float) -> str:
    """What one reading each second adds to a step: the median over pairs of laps, and its 95 % interval."""
    ratios = sorted((with_s / without_s - 1) / often for without_s, with_s in pairs)
    low, high = median_interval(len(ratios))
    return f"{100 * statistics.median(ratios):+.2f} % [{100 * ratios[low]:+.2f}, {100 * ratios[high]:+.2f}]"


def memory_lines(steps: Iterator[None], device: torch.device) -> list[str]:
    """What a look at memory costs, and what it takes once to find the line where memory grows."""
    watch, looks = MemoryWatch(device), []
    for step in range(200):
        watch.forget()
        began = time.perf_counter()
        watch.look(step)
        looks.append(time.perf_counter() - began)
    look_s = statistics.median(looks)
    took = []
    for is_watched in (False, True):
        began = time.perf_counter()
        if is_watched:
            watch.watch_steps(watch.trends[0], Growth(1.0, 1.0))
        for _ in range(TURNS):
            next(steps)
            watch.step_ended()
        took.append(time.perf_counter() - began)
    watch.close()
    share = f"{100 * look_s / LOOK_S:.4f} % of the time"
    return [
        f"a look at memory takes {show_seconds(look_s)}, every {show_seconds(LOOK_S)}: {share}",
        f"where memory grows, {TURNS} watched steps take {show_seconds(took[1])}, not {show_seconds(took[0])}, once",
    ]


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--lap", type=float, default=2.0)
    parser.add_argument("--often", type=float, default=20.0)
    args = parser.parse_args()
    device = torch.device(args.device)
    module.MOST_COST, module.FIRST_S = 1e9, 0.0  # it is to read as often as it is asked to
    name = "MLP, batch 256, gathered"
    make, shape, batch, kind = WORK[name]
    torch.manual_seed(0)
    steps = engine_steps(make(), data_for(shape), batch, kind, device)
    gpu, _ = gpu_of(device)
    walls, cores, spent_s, readings = [], [], 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        host = HostReader(Path(folder))
        lap(steps, args.lap, device)
        for number in range(args.pairs):
            sides = {}
            for is_sampled in (False, True) if number % 2 == 0 else (True, False):
                sampler = Sampler(
                    Path(folder),
                    lambda: sample_of(host, gpu, device, 0),
                    lambda sample: {"losses": [(n, 0.5) for n in range(240)]},
                    every_s=EVERY_S / args.often,
                )
                with sampler if is_sampled else nullcontext():
                    sides[is_sampled] = lap(steps, args.lap, device)
                spent_s, readings = spent_s + sampler.spent_s, readings + sampler.readings
            walls.append((sides[False][0], sides[True][0]))
            cores.append((sides[False][1], sides[True][1]))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"sampler beside a training on {where}, torch {torch.__version__}, Python {platform.python_version()}")
    print(f"{name}: {show_seconds(statistics.median(a for a, _ in walls))}/step")
    print(f"one reading takes {show_seconds(spent_s / readings)} of a core, in {readings:,} readings")
    print(f"read once a second it adds {share(walls, args.often)} to the time of a step")
    print(f"                       and {share(cores, args.often)} to what a step takes of the cores")
    for line in memory_lines(steps, device):
        print(line)
    print("promised: at most 1 %")


if __name__ == "__main__":
    main()
