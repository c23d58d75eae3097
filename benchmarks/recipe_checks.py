"""Recipes with a blend, on data with something to learn and on the same data with shuffled targets.

    python -m benchmarks.recipe_checks price [--rows 2000]
    python -m benchmarks.recipe_checks forecast --data FOLDER_WITH_ETTh1 [--rows 17420]

`price`: generated products. `forecast`: all seven columns of ETTh1, 24 hours ahead, beside the last value and the value
a day before; shuffled, each row has the targets of another one. Both ask three things: whether the blend is at least as
good as its best part where its shares were chosen (out of fold; for price, the held-out rows), whether it is better
than each simple rule on the held-out rows, and whether with shuffled targets it is no better than the best rule by more
than a twentieth. Exit code 1 where one of them fails.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import hotlap
from benchmarks.recipe_files import products_file
from benchmarks.versions import versions
from hotlap.core.units import show_seconds

CHANCE = 0.95
"""A blend of models that learned from chance scores at least this share of the best simple rule's error."""
TARGETS = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
SCORES = {"price": "smape", "forecast": "scaled_rmse"}


def shuffled(path: Path, new: Path, names: tuple[str, ...], *, beside: str = "") -> Path:
    """The table with these columns of other rows; where a column is named, only that one stands beside them."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    order = np.random.default_rng(0).permutation(len(rows))
    kept = [beside] if beside else [name for name in rows[0] if name not in names]
    with new.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        # Other names than those of the inputs: a recipe reads no column that is a target.
        writer.writerow([*kept, *(f"another {name}" for name in names)])
        for row, at in zip(rows, order, strict=True):
            writer.writerow([*(row[name] for name in kept), *(rows[at][name] for name in names)])
    return new


def report_of(recipe: str, data: Path, out: Path, **options: Any) -> Mapping[str, Any]:
    """Train, and give the report; prints the score of each model and rule."""
    began = time.perf_counter()
    run = hotlap.train(recipe, data, out=out, progress=False, **options)
    report: dict[str, Any] = json.loads((run / "report.json").read_text(encoding="utf-8"))
    print(f"{recipe}, {out.name}: {show_seconds(time.perf_counter() - began)}")
    for name, scores in (report["models"] | report["baselines"]).items():
        print(f"  {name:<26}{SCORES[recipe]} {scores[SCORES[recipe]]:.4f}", flush=True)
    return report


def problems(recipe: str, plain: Mapping[str, Any], chance: Mapping[str, Any]) -> list[str]:
    """Which of the three fail."""
    score, blend = SCORES[recipe], plain["models"]["blend"]
    parts = {name: one[score] for name, one in plain["models"].items() if name != "blend"}
    if "out_of_fold" in blend:
        parts = {name: one for name, one in blend["out_of_fold"].items() if name != "blend"}
    chosen = blend["out_of_fold"]["blend"] if "out_of_fold" in blend else blend[score]
    print(f"  blend where its shares were chosen: {chosen:.4f}, its best part {min(parts.values()):.4f}")
    rules = {name: one[score] for name, one in plain["baselines"].items()}
    by_chance = chance["models"]["blend"][score] / min(one[score] for one in chance["baselines"].values())
    print(f"  blend to its best rule: {blend[score] / min(rules.values()):.3f}; with shuffled targets {by_chance:.3f}")
    wrong = [] if chosen <= min(parts.values()) * (1 + 1e-6) else ["the blend is worse than its best part"]
    wrong += [f"the blend is no better than {name}" for name, one in rules.items() if blend[score] >= one]
    return wrong + (["shuffled targets are answered better than by chance"] if by_chance < CHANCE else [])


def price(rows: int, folder: Path) -> list[str]:
    """Products, and products with the prices of others."""
    data = products_file(folder / "products.csv", rows, 0)
    small = {"target": "price", "weights": "scratch", "epochs": 4}
    plain = report_of("price", data, folder / "as it is", **small)
    other = shuffled(data, folder / "shuffled.csv", ("price",))
    return problems(
        "price", plain, report_of("price", other, folder / "shuffled", **{**small, "target": "another price"})
    )


def forecast(rows: int, folder: Path, source: Path) -> list[str]:
    """ETTh1, and its inputs with the targets of other hours."""
    lines = (source / "ETTh1.csv").read_text(encoding="utf-8").splitlines(keepends=True)[: rows + 1]
    data = folder / "ETTh1.csv"
    data.write_text("".join(lines), encoding="utf-8")
    plain = report_of("forecast", data, folder / "as it is", targets=TARGETS, ahead="24", season=24)
    other = shuffled(data, folder / "targets.csv", TARGETS, beside="date")
    chance = report_of("forecast", data, folder / "shuffled", targets=str(other), season=24)
    return problems("forecast", plain, chance)


def main() -> int:
    """Print scores and what fails; 1 if something does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=("price", "forecast"))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--data", type=Path, help="a folder with ETTh1.csv")
    args = parser.parse_args()
    if args.recipe == "forecast" and args.data is None:
        parser.error("forecast needs --data FOLDER")
    print(f"{os.cpu_count()} cores; {versions()}")
    with tempfile.TemporaryDirectory(prefix="hotlap-checks-") as place:
        os.environ["HOTLAP_CACHE"] = f"{place}/cache"
        if args.recipe == "price":
            wrong = price(args.rows or 2000, Path(place))
        else:
            wrong = forecast(args.rows or 17_420, Path(place), args.data)
    print("; ".join(wrong) or "all three hold")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
