"""From a file of products to prices: python examples/price.py (some 15 s on a CPU, nothing is downloaded)."""

import csv
import json
import random
import tempfile
from pathlib import Path

import hotlap

folder = Path(tempfile.mkdtemp(prefix="hotlap-price-"))

# 1. A file as you may have one: a title with brand, grade and amount in it, other columns, and the price.
BRANDS = {"Acme": 1.0, "Borealis": 2.4, "Cobalt": 0.6, "Dunmore": 1.3}
GOODS = {"Coffee Beans": 0.05, "Olive Oil": 0.02, "Green Tea": 0.09, "Rice": 0.004}
PACKAGING = {"glass": 1.3, "tin": 1.0, "paper": 0.8}


def write_products(path: Path, rows: int, chance: random.Random) -> Path:
    """Products whose price follows from what their row says, but for a tenth; some lack the shelf life."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "title", "packaging", "days", "price"])
        for number in range(rows):
            brand, good, packaging = (chance.choice(list(words)) for words in (BRANDS, GOODS, PACKAGING))
            grams, pack, days = (
                chance.choice([100, 250, 500, 1000]),
                chance.choice([1, 1, 2, 6]),
                chance.randint(10, 700),
            )
            price = BRANDS[brand] * GOODS[good] * PACKAGING[packaging] * (grams * pack) ** 0.8
            price *= chance.lognormvariate(0, 0.1) * (1 + days / 1000)
            title = f"{brand} {good}, {grams} g (Pack of {pack})"
            writer.writerow([number, title, packaging, days if chance.random() < 0.9 else "", round(price, 2)])
    return path


chance = random.Random(0)
train, test = write_products(folder / "train.csv", 300, chance), write_products(folder / "test.csv", 50, chance)

# 2. Train: a small encoder from scratch, boosted trees on the same features, and a blend of both.
small = {"weights": "scratch", "vocabulary": 300, "epochs": 3, "rounds": 200}
run = hotlap.train("price", train, target="price", **small, out=folder / "run")

# 3. What came of it, beside what simple rules score on the same rows.
report = json.loads((run / "report.json").read_text(encoding="utf-8"))
scores = report["models"] | report["baselines"]
for name, score in scores.items():
    print(f"{name:<24} SMAPE {score['smape']:.1f} %")

# 4. Predict. The columns of the file come first, the answers behind them.
answers = folder / "answers.csv"
count = hotlap.predict(run, test, answers, keep=["id", "title"])
print(f"{count:,} rows answered in {answers}, scores and curves in {run}")
