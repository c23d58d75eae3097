"""Files for recipes, of the shapes of the guides' own data: bars of several symbols, and short texts of two classes."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.recipes.bars import simulated_bars

SYMBOLS, SIGNAL = 4, 0.3
MEDIAN, SPREAD, LONGEST = 8, 0.6, 150
"""Words of a text: log-normal."""
WORDS, TELLING = 60_000, range(2_000, 2_040)
"""Of the language, by rank; those that a positive text has more of."""
POSITIVE, TOLD = 0.17, 0.3
"""The share of positive texts, and of telling words in them."""
SYLLABLES = ["".join(pair) for pair in product("bdfgklmnprstvz", "aeiou")]


def bars_file(path: Path, rows: int, seed: int) -> Path:
    """Bars of each symbol, one below the other."""
    names = ("open", "high", "low", "close", "volume")
    lines = (
        [time, bars.symbol, *values]
        for bars in simulated_bars(rows, SYMBOLS, seed, SIGNAL)
        for time, *values in zip(
            bars.times.astype("datetime64[s]").astype(str), *(getattr(bars, name) for name in names), strict=True
        )
    )
    return _written(path, ("time", "symbol", *names), lines)


def texts_file(path: Path, rows: int, seed: int, *, labels: bool = True) -> Path:
    """Texts whose words are as frequent as words are; some words tell the positive ones."""
    chance = np.random.default_rng(seed)
    positive = chance.random(rows) < POSITIVE
    lengths = np.clip(np.rint(MEDIAN * np.exp(SPREAD * chance.standard_normal(rows))), 1, LONGEST).astype(int)
    count = int(lengths.sum())
    ranks = (WORDS ** chance.random(count)).astype(int)  # the k-th about as often as 1 / k
    told = np.repeat(positive, lengths) & (chance.random(count) < TOLD)
    ranks = np.where(told, chance.integers(TELLING.start, TELLING.stop, count), ranks)
    texts = (" ".join(map(word, own)) for own in np.split(ranks, np.cumsum(lengths)[:-1]))
    if not labels:
        return _written(path, ("text",), ([text] for text in texts))
    return _written(path, ("text", "label"), zip(texts, positive.astype(int).tolist(), strict=True))


def word(rank: int) -> str:
    """A word for each rank, longer ones for rarer words."""
    number, parts = int(rank) + len(SYLLABLES), []
    while number:
        number, part = divmod(number, len(SYLLABLES))
        parts.append(SYLLABLES[part])
    return "".join(parts)


def _written(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)
    return path
