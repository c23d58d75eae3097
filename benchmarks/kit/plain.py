"""Whether a batch trains: in a process of its own, by a plain loop that has nothing of hotlap's.

    python -m benchmarks.kit.plain NAME SIZE DEVICE [--quick]

What was tried before in the same process may count: on an H200 with the memory of a T4, ResNet-18 trains with 684
pictures at once where they failed in that process before, and in none of its own. cuDNN keeps what it chose for a
shape, which may be why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.kit.rows import Options
from benchmarks.kit.trainings import as_t4, jobs

UPDATES = 20
ROOT = Path(__file__).parents[2]


def why_not(name: str, size: int, options: Options) -> str | None:
    """What torch says where memory is too small for the updates, and None where they were made."""
    command = [sys.executable, "-m", "benchmarks.kit.plain", name, str(size), options.device]
    command += ["--quick"] * options.quick
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{ran.stderr}")
    return ran.stdout.strip() or None


def main() -> None:
    """Make some updates; print what torch says where memory is too small, and nothing where they were made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("size", type=int)
    parser.add_argument("device")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    job = jobs(Options(device=given.device, quick=given.quick, files=0))[given.name]
    inputs, targets = (part[: given.size] for part in job.data)
    with as_t4(given.device):
        model = job.model.to(given.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        measure = torch.nn.CrossEntropyLoss()
        try:
            for _ in range(UPDATES):
                optimizer.zero_grad()
                measure(model(inputs.to(given.device)), targets.to(given.device)).backward()
                optimizer.step()
            if given.device != "cpu":
                torch.cuda.synchronize()
        except torch.OutOfMemoryError as error:
            print(str(error).split(" GPU ")[0])


if __name__ == "__main__":
    main()
