"""Files for recipes: bars that nobody traded, and texts that nobody wrote."""

import csv
import json
from datetime import UTC, datetime

import numpy as np

from hotlap.recipes.bars import simulated_bars

TOPICS = {
    "sport": "goal match team coach league score player season win final",
    "money": "bank market stock price profit trade share growth debt tax",
    "science": "space planet cell gene atom star research theory study orbit",
}
FILLER = ["the", "of", "and", "in", "to", "was", "for", "on", "with", "new", "today", "said", "after", "people", "year"]
TINY = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def write_rows(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def bars_file(path, rows=700, symbols=2, seed=0, signal=0.4):
    """Bars of some symbols, one symbol below the other."""
    told = []
    for bars in simulated_bars(rows, symbols, seed, signal):
        for at in range(len(bars)):
            when = datetime.fromtimestamp(int(bars.times[at]), UTC).strftime("%Y-%m-%d %H:%M:%S")
            prices = (bars.open[at], bars.high[at], bars.low[at], bars.close[at], bars.volume[at])
            told.append([when, bars.symbol, *prices])
    return write_rows(path, ["time", "symbol", "open", "high", "low", "close", "volume"], told)


def texts_file(path, rows=240, seed=0, shuffled=False, rare=None):
    """Texts of three topics (or two, one of them rare), told apart by some of their words."""
    numbers = np.random.default_rng(seed)
    names = list(TOPICS) if rare is None else list(TOPICS)[:2]
    shares = None if rare is None else [1 - rare, rare]
    labels = numbers.choice(len(names), rows, p=shares)
    told = []
    for at, label in enumerate(labels):
        words = numbers.choice(FILLER, numbers.integers(3, 25)).tolist()
        words += numbers.choice(TOPICS[names[label]].split(), 4).tolist()
        numbers.shuffle(words)
        told.append([at + 1, " ".join(words), names[label]])
    if shuffled:
        mixed = numbers.permutation([row[2] for row in told])
        told = [[*row[:2], label] for row, label in zip(told, mixed, strict=True)]
    return write_rows(path, ["id", "text", "label"], told)


def tiny_config(path):
    """The config of an encoder that trains in a second."""
    path.write_text(json.dumps(TINY))
    return path
