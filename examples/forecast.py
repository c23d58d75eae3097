"""From a wide table to forecasts of many columns: python examples/forecast.py (some 10 s on a CPU)."""

import csv
import json
import tempfile
from pathlib import Path

import numpy as np

import hotlap

folder = Path(tempfile.mkdtemp(prefix="hotlap-forecast-"))

# 1. A file as you may have one: a column of times, and columns of numbers. Here are eight meters of a town, an hour a
#    row: a day's wave of their own size, and weather that moves all of them some hours later.
data, later = folder / "meters.csv", folder / "later.csv"
chance, hours = np.random.default_rng(0), np.arange(1000)
weather = np.convolve(chance.normal(size=len(hours) + 11), np.ones(12) / 4, mode="valid")
day = np.sin(2 * np.pi * hours / 24)
meters = [(1 + at) * (2 + day) + np.roll(weather, 1 + at % 4) + 0.3 * chance.normal(size=len(hours)) for at in range(8)]
times = np.datetime64("2024-01-01T00:00") + hours.astype("timedelta64[h]")
rows = [[time, *values] for time, *values in zip(times, weather, *meters, strict=True)]
for path, part in ((data, rows[:900]), (later, rows[900:])):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["time", "weather", *(f"meter_{at}" for at in range(8))], *part])

# 2. Train: each meter in each of the next 2 hours, which makes 16 numbers a row. The last fifth is held out.
models = ["ridge", "lightgbm", "lstm"]  # xgboost too, if none are named
small = {"epochs": 3, "rounds": 20, "width": 16}
run = hotlap.train(
    "forecast", data, targets="meter_*", ahead="1-2", season=24, models=models, **small, out=folder / "run"
)

# 3. What came of it, beside what simple rules score on the same rows: the error as a share of each target's deviation.
report = json.loads((run / "report.json").read_text(encoding="utf-8"))
scores = report["models"] | report["baselines"]
for name, score in scores.items():
    print(f"{name:<24} RMSE/deviation {score['scaled_rmse']:.3f}")

# 4. Predict. These rows follow those of the training, so that each one is answered.
answers = folder / "answers.csv"
count = hotlap.predict(run, later, answers, keep=["time"])
print(f"{count:,} rows answered in {answers}, scores and curves in {run}")
