"""A script that reads JPEG files with random crops, by itself and under `hotlap run`: whole processes, in turns.

    python -m benchmarks.pictures [--files 160] [--epochs 6] [--pairs 3] [--only 500x375] [--json FILE]

The files are made here: smooth noise of 500×375 pixels, and of 1600×1200 that the script resizes to 256×256. Each is
read by 0 and by 2 workers. The ratio is the median over pairs, with the lowest and the highest. Exit code 1 where a
process failed, or printed other figures than by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.versions import versions

SCRIPT = Path(__file__).parent / "user_scripts" / "pictures.py"
WORKS = {
    "500x375, cropped": ((500, 375), 0),
    "1600x1200, resized to 256x256, cropped": ((1600, 1200), 256),
}
WORKERS = (0, 2)


def make_files(folder: Path, size: tuple[int, int], count: int) -> None:
    """So many JPEG files of two classes: smooth noise, as large as photographs are."""
    numbers = np.random.default_rng(0)
    for at in range(count):
        walk = np.cumsum(np.cumsum(numbers.normal(size=(size[1], size[0], 3)).astype(np.float32), 0), 1)
        pixels = (walk - walk.min()) / np.ptp(walk) * 255 + numbers.normal(size=walk.shape) * 12
        (folder / "ab"[at % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(folder / "ab"[at % 2] / f"{at}.jpg", quality=90)


def ran(words: list[str], *, under_hotlap: bool, folder: Path) -> tuple[float, str, str]:
    """Seconds of the process, what it printed, and hotlap's lines."""
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        hotlap = ["-m", "hotlap", "run", "--out", f"{cache}/run"] if under_hotlap else []
        fresh = os.environ | {"HOTLAP_CACHE": cache, "PYTHONPATH": str(SCRIPT.parents[2] / "src"), "COLUMNS": "120"}
        begun = time.perf_counter()
        done = subprocess.run(
            [sys.executable, *hotlap, str(SCRIPT), *words], capture_output=True, text=True, cwd=cache, env=fresh
        )
        seconds = time.perf_counter() - begun
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed:\n{done.stderr[-2000:]}")
    return seconds, done.stdout, done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=160)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--only", default="", help="files of this size")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found, differ = [], False
    with tempfile.TemporaryDirectory(prefix="hotlap-pictures-") as place:
        home = Path(place)
        for number, (name, (size, resize)) in enumerate(WORKS.items()):
            if not name.startswith(args.only):
                continue
            make_files(home / str(number), size, args.files)
            for workers in WORKERS:
                words = [str(home / str(number)), "--epochs", str(args.epochs), "--workers", str(workers)]
                words += ["--resize", str(resize)]
                pairs = []
                for pair in range(args.pairs):
                    sides = (False, True) if pair % 2 == 0 else (True, False)
                    by_side = {side: ran(words, under_hotlap=side, folder=home) for side in sides}
                    pairs.append((by_side[False][0], by_side[True][0]))
                    differ = differ or by_side[False][1] != by_side[True][1]
                    line = by_side[True][2].splitlines()[0]
                ratios = sorted(alone / with_hotlap for alone, with_hotlap in pairs)
                alone_s, hotlap_s = (statistics.median(column) for column in zip(*pairs, strict=True))
                ratio = statistics.median(ratios)
                print(
                    f"{name}, {workers} workers: {alone_s:.1f} s by itself, {hotlap_s:.1f} s under hotlap: "
                    f"{ratio:.2f}x [{ratios[0]:.2f}, {ratios[-1]:.2f}]\n    {line}",
                    flush=True,
                )
                found.append({"work": name, "workers": workers, "pairs": pairs, "ratio": ratio})
    print("figures differ" if differ else "all printed figures are the same")
    if args.json:
        args.json.write_text(
            json.dumps({"versions": versions(), "command": sys.argv[1:], "works": found}, indent=1) + "\n"
        )
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
