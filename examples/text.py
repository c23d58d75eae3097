"""From a file of texts to predictions: python examples/text.py (some 15 s on a CPU, nothing is downloaded)."""

import csv
import random
import tempfile
from pathlib import Path

import hotlap

folder = Path(tempfile.mkdtemp(prefix="hotlap-text-"))

# 1. A file as you may have one: a column of text, and a column with its class.
TOPICS = {
    "sport": ["goal", "match", "team", "coach", "league", "player"],
    "money": ["bank", "market", "stock", "profit", "trade", "debt"],
    "science": ["planet", "cell", "gene", "atom", "theory", "orbit"],
}
FILLER = ["the", "of", "and", "in", "to", "was", "for", "new", "today", "said", "people", "year"]


def write_texts(path: Path, rows: int, chance: random.Random) -> Path:
    """Texts of three topics, told apart by some of their words."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "text", "label"])
        for number in range(rows):
            label = chance.choice(list(TOPICS))
            words = chance.choices(FILLER, k=chance.randint(4, 14)) + chance.choices(TOPICS[label], k=3)
            words += chance.choices(TOPICS[chance.choice(list(TOPICS))], k=2)  # of any topic: it is not that easy
            writer.writerow([number, " ".join(chance.sample(words, len(words))), label])
    return path


chance = random.Random(0)
train, test = write_texts(folder / "train.csv", 300, chance), write_texts(folder / "test.csv", 50, chance)

# 2. Train. Here a small encoder from scratch; without `weights`, a pretrained one where hotlap[minilm] is installed.
run = hotlap.train("text", train, target="label", weights="scratch", epochs=4, out=folder / "run")

# 3. Predict. The columns of the file come first, the answers behind them.
answers = folder / "answers.csv"
hotlap.predict(run, test, answers, probabilities=True)
with answers.open(encoding="utf-8") as file, test.open(encoding="utf-8") as truth:
    pairs = list(zip(csv.DictReader(file), csv.DictReader(truth), strict=True))
right = sum(mine["predicted_label"] == theirs["label"] for mine, theirs in pairs)
print(f"{right} of {len(pairs)} right; answers in {answers}, scores and pictures in {run}")
