"""Run the tests of this folder in several processes at a time: a GPU mostly waits for the host of one.

    python tests/gpu/together.py [pytest options]

Those that time things, take most of the memory, or look at who else uses the GPU, come last and by themselves. Exit
code 1 where one failed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ALONE = (
    "test_machine_gpu.py",
    "test_monitor.py",
    "test_out_of_memory_gpu.py",
    "test_tuner_gpu.py",
    "test_waits_gpu.py",
)
LONGEST = (
    "test_compiling_gpu.py",
    "test_encoders_gpu.py",
    "test_engine_gpu.py",
    "test_kit_gpu.py",
    "test_kit_lengths_gpu.py",
    "test_kit_scripts_gpu.py",
)
"""These are begun first: the last one is waited for."""
MOST = 6
"""Processes at a time."""


def ran(file: Path, options: list[str]) -> tuple[int, str]:
    """The exit code of one file's tests, and what they printed."""
    command = [sys.executable, "-m", "pytest", "-q", str(file.relative_to(Path.cwd())), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    print(f"{file.name:<28} {last}", flush=True)
    if done.returncode not in (0, 5):
        print(f"\n{done.stdout}", flush=True)
    return done.returncode, done.stdout


def main() -> int:
    """Run all of them, and tell how many passed."""
    began, options = time.perf_counter(), sys.argv[1:]
    files = sorted(HERE.glob("test_*.py"), key=lambda file: (file.name not in LONGEST, -file.stat().st_size))
    beside = max(1, min(MOST, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(beside) as pool:
        found = list(pool.map(lambda file: ran(file, options), [f for f in files if f.name not in ALONE]))
    found += [ran(file, options) for file in files if file.name in ALONE]
    counts = {
        kind: sum(int(number) for _, output in found for number in re.findall(rf"(\d+) {kind}", output[-200:]))
        for kind in ("passed", "failed", "error", "skipped")
    }
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    print(f"{told} in {time.perf_counter() - began:.0f} s, up to {beside} files at a time")
    return int(any(code not in (0, 5) for code, _ in found))


if __name__ == "__main__":
    sys.exit(main())
