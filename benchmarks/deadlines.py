"""Deadlines of recipes: `hotlap train RECIPE … --test … --finish-in T` for ten times from 1 to 20 minutes, on the CPU.

    python -m benchmarks.deadlines [--only text|temporal|image|price|forecast] [--most MINUTES] [--data FOLDER]

Each is a process with a cache of its own, on generated files, and is asked for more epochs than fit. The time is that
of the whole process, by a clock outside of it. A deadline is kept if the process ends before it, and if it used at
least 95 % of the time where it left work out. Each row of `--test` must have an answer; of bars, each from the first
that has enough before it. With `--data`, forecast reads ETTh1.csv in this folder.

Exit code 1 where anything is not kept. All ten take 70 minutes.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.recipe_files import bars_file, pictures_folder, products_file, texts_file, wide_file
from benchmarks.versions import versions

DEADLINES = [
    (1, "text"), (1.5, "temporal"), (2, "image"), (3, "price"), (4, "forecast"),
    (5, "temporal"), (7, "text"), (10, "forecast"), (15, "image"), (20, "price"),
]  # fmt: skip
"""Minutes, and the recipe that has them."""
LEAST = 0.95
"""Of the time, what has to be used where work was left out."""
LONG = ["--epochs", "1000", "--patience", "1000"]
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that was given a deadline."""

    recipe: str
    limit_s: float
    took_s: float
    exit_code: int
    left_out: list[str]
    rows: int
    """Of the file to predict."""
    answered: int
    is_complete: bool
    load: float
    """Processes that wanted a core at the end, by the mean over a minute."""

    @property
    def problems(self) -> list[str]:
        """What was not kept."""
        share = self.took_s / self.limit_s
        wrong = [f"ended with exit code {self.exit_code}"] if self.exit_code else []
        wrong += [f"overran by {self.took_s - self.limit_s:.1f} s"] if share > 1 else []
        wrong += [f"used {share:.1%}, though work was left"] if share < LEAST and self.left_out else []
        return wrong + ([] if self.is_complete else [f"answered {self.answered:,} of {self.rows:,} rows"])

    @property
    def line(self) -> str:
        """A row of the table."""
        used, was_left = f"{self.took_s / self.limit_s:.1%}", "yes" if self.left_out else "no"
        answers, kept = f"{self.answered:,} of {self.rows:,}", "; ".join(self.problems) or "kept"
        return (
            f"{self.recipe:<9} {self.limit_s:>7.0f} s {self.took_s:>9.1f} s {used:>7}  {was_left:<9}  {answers:<16} "
            f"{self.load:>4.1f}  {kept}"
        )


def files(recipe: str, folder: Path, real: Path | None) -> list[str]:
    """Make the files of a recipe; the options that name them."""
    train, test = folder / "train.csv", folder / "test.csv"
    if recipe == "text":
        texts_file(train, 8_000, 0)
        texts_file(test, 1_000, 1)
        more = ["--target", "label", "--weights", "scratch", *LONG]
    elif recipe == "temporal":
        bars_file(train, 8_000, 0)
        bars_file(test, 500, 1)
        more = LONG
    elif recipe == "image":
        train, test = pictures_folder(folder / "train", 600, 96, 0), folder / "test"
        pictures_folder(test, 100, 96, 1, classes=False)
        more = ["--size", "48", "--width", "16", "--batch-size", "16", *LONG]
    elif recipe == "price":
        products_file(train, 4_000, 0)
        products_file(test, 500, 1)
        more = ["--weights", "scratch", "--batch-size", "8", "--accumulate", "4", *LONG]
    elif real is not None:
        lines = (real / "ETTh1.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        train.write_text("".join(lines[:-500]), encoding="utf-8")
        test.write_text("".join([lines[0], *lines[-500:]]), encoding="utf-8")
        more = ["--targets", "HUFL,HULL,MUFL,MULL,LUFL,LULL,OT", "--ahead", "1-24", "--season", "24"]
    else:
        wide_file(folder / "whole.csv", 1_961, 558, 424, 0)
        header, *lines = (folder / "whole.csv").read_text(encoding="utf-8").splitlines(keepends=True)
        train.write_text("".join([header, *lines[:-100]]), encoding="utf-8")
        test.write_text("".join([header, *lines[-100:]]), encoding="utf-8")
        more = ["--targets", "target_*", "--ahead", "1"]
    return ["--data", str(train), "--test", str(test), *more]


def answered(path: Path, columns: Callable[[list[str]], list[str]]) -> tuple[int, int, bool]:
    """Rows, rows with all answers, and whether no row without comes behind one with, within a symbol."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = columns(list(rows[0]))
    has = [all(row[name] for name in names) for row in rows]
    before = zip(rows, has, rows[1:], has[1:], strict=False)
    is_whole = all(now or not then or row.get("symbol") != other.get("symbol") for row, then, other, now in before)
    return len(rows), sum(has), is_whole


def ended(recipe: str, minutes: float, folder: Path, real: Path | None) -> Ended:
    """Train under a deadline, and look at what came of it."""
    words = files(recipe, folder, real)
    run, limit_s = folder / "run", 60 * minutes
    command = [sys.executable, "-m", "hotlap", "train", recipe, *words, "--device", "cpu", "--out", str(run)]
    own = {"HOTLAP_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    log = folder / "log.txt"
    with log.open("w") as said:
        began = time.perf_counter()
        done = subprocess.run(
            [*command, "--finish-in", f"{limit_s:g}s"], env=os.environ | own, stdout=said, stderr=said, check=False
        )
        took_s = time.perf_counter() - began
    if done.returncode:
        print("".join(log.read_text().splitlines(keepends=True)[-20:]))
    report, predictions = run / "report.json", run / "predictions.csv"
    rows, count, is_whole = (0, 0, False)
    if predictions.is_file():
        # The answers stand behind the file's own columns, and a forecast's are its targets.
        rows, count, is_whole = answered(predictions, lambda names: names[1:] if recipe == "forecast" else names[-1:])
    test = folder / "test.csv"
    wanted = len(test.read_text().splitlines()) - 1 if test.is_file() else len(list((folder / "test").iterdir()))
    left_out = json.loads(report.read_text())["left_out"] if report.is_file() else []
    return Ended(
        recipe=recipe,
        limit_s=limit_s,
        took_s=took_s,
        exit_code=done.returncode,
        left_out=left_out,
        rows=wanted,
        answered=count,
        is_complete=rows == wanted and is_whole and (count == wanted or (recipe == "temporal" and count > 0)),
        load=os.getloadavg()[0],
    )


def main(words: list[str] | None = None) -> int:
    """Print a row for each deadline; 1 where one was not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a recipe")
    parser.add_argument("--most", type=float, default=20, help="minutes of the longest deadline")
    parser.add_argument("--data", type=Path, help="a folder with ETTh1.csv")
    parser.add_argument("--keep", type=Path, help="a new folder for files, runs and logs")
    args = parser.parse_args(words)
    print(f"{platform.machine()}, {os.cpu_count()} cores; {versions()}")
    print(
        f"{'recipe':<9} {'deadline':>9} {'ended after':>11} {'used':>7}  {'work left':<9}  {'rows answered':<16} load"
    )
    failed = False
    for minutes, recipe in DEADLINES:
        if args.only not in ("", recipe) or minutes > args.most:
            continue
        with tempfile.TemporaryDirectory(prefix="hotlap-deadlines-") as place:
            folder = Path(place)
            if args.keep:
                folder = args.keep / f"{recipe}-{minutes:g}"
                folder.mkdir(parents=True)
            one = ended(recipe, minutes, folder, args.data)
        print(one.line, flush=True)
        for line in one.left_out:
            print(f"          left out: {line}", flush=True)
        failed = failed or bool(one.problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
