"""From a file of bars to predictions: python examples/temporal.py (some 10 s on a CPU, nothing is downloaded)."""

import csv
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import hotlap
from hotlap.recipes.simulated_bars import simulated_bars

folder = Path(tempfile.mkdtemp(prefix="hotlap-temporal-"))

# 1. A file as you may have one: time, open, high, low, close; volume and symbol if there are any. These bars of
#    15 minutes nobody traded; they follow their own trend a little, which is all there is to find.
data = folder / "bars.csv"
with data.open("w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["time", "symbol", "open", "high", "low", "close", "volume"])
    for bars in simulated_bars(1500, symbols=2, signal=0.4):
        for row in zip(bars.times, bars.open, bars.high, bars.low, bars.close, bars.volume, strict=True):
            writer.writerow([datetime.fromtimestamp(int(row[0]), UTC).isoformat(), bars.symbol, *row[1:]])

# 2. Train: whether prices fall, stay or rise over the next 4 bars. The last fifth of each symbol is held out.
run = hotlap.train("temporal", data, models=["mlp"], frames=["h1", "h4"], ahead=4, epochs=10, out=folder / "run")

# 3. What came of it, beside what simple rules score on the same bars.
report = json.loads((run / "report.json").read_text(encoding="utf-8"))
scores = report["models"] | report["baselines"]
for name, score in scores.items():
    print(f"{name:<20} macro-F1 {score['macro_f1']:.3f}")

# 4. Predict. Bars that have too little before them are left without an answer.
answers = folder / "answers.csv"
count = hotlap.predict(run, data, answers, keep=["time", "symbol", "close"])
print(f"{count:,} bars answered in {answers}, scores and pictures in {run}")
