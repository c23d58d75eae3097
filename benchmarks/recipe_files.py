"""Files for recipes, of the shapes of the guides' own data, and files in which it is known what can be learned."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.recipes.simulated_bars import simulated_bars

SYMBOLS, SIGNAL = 4, 0.3
MEDIAN, SPREAD, LONGEST = 8, 0.6, 150
"""Words of a text: log-normal."""
WORDS, TELLING = 60_000, range(2_000, 2_040)
"""Of the language, by rank; those that a positive text has more of."""
POSITIVE, TOLD = 0.17, 0.3
"""The share of positive texts, and of telling words in them."""
BRANDS = 40
GOODS = {"coffee beans": "oz", "olive oil": "ml", "green tea": "g", "dish soap": "fl oz", "rice": "lb"}
UNITS = {"oz": 28.35, "ml": 1.0, "g": 1.0, "fl oz": 29.57, "lb": 453.6}
"""In grams or millilitres."""
GRADES = {"premium": 0.5, "basic": -0.5, "": 0.0}
PACKAGING = {"glass": 0.4, "tin": 0.0, "paper": -0.3}
STRIPES = {"narrow": 4, "middle": 7, "wide": 12}
"""Classes of pictures, and how many pixels wide their stripes are."""
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


def products_file(path: Path, rows: int, seed: int) -> Path:
    """Products whose price follows from brand, amount, pack, grade, packaging and shelf life, with noise of a tenth."""
    draw, names = np.random.default_rng(seed), list(GOODS)
    worth = np.random.default_rng(0).normal(0, 0.6, BRANDS)  # the same in each file

    def product(at: int) -> list[Any]:
        brand, good, days = int(draw.integers(BRANDS)), names[draw.integers(len(names))], int(draw.integers(10, 700))
        grade, packaging = (list(words)[draw.integers(3)] for words in (GRADES, PACKAGING))
        amount, pack, unit = int(draw.choice([1, 2, 4, 8, 12, 16, 24])), int(draw.choice([1, 1, 2, 6])), GOODS[good]
        size = 0.6 * np.log(amount * UNITS[unit] * pack)
        price = np.exp(worth[brand] + GRADES[grade] + PACKAGING[packaging] + size + days / 700 + 0.1 * draw.normal())
        title = " ".join(filter(None, (word(40 + brand).title(), grade, good))) + f", {amount} {unit}"
        about = " ".join(map(word, (WORDS ** draw.random(draw.integers(5, 60))).astype(int)))
        kept = days if draw.random() < 0.9 else ""
        return [10_000 + 7 * at, f"{title} (pack of {pack})", about, packaging, kept, round(price, 2)]

    return _written(path, ("product_id", "title", "about", "packaging", "days", "price"), map(product, range(rows)))


def wide_file(path: Path, rows: int, columns: int, targets: int, seed: int) -> Path:
    """A table of a row a day: a few hidden series move all columns, each some days later than the one before."""
    draw = np.random.default_rng(seed)
    hidden = draw.normal(size=(rows + 10, 12))
    for at in range(1, len(hidden)):
        hidden[at] += 0.8 * hidden[at - 1]
    moved = [hidden[late : late + rows] @ draw.normal(size=12) for late in draw.integers(0, 10, columns)]
    values = np.round(np.stack(moved, axis=1) + draw.normal(size=(rows, columns)), 4)
    header = ["date", *(f"target_{at}" if at < targets else f"input_{at}" for at in range(columns))]
    days = np.datetime64("2018-01-01") + np.arange(rows)
    return _written(path, header, ([day, *row] for day, row in zip(days.astype(str), values.tolist(), strict=True)))


def pictures_folder(folder: Path, count: int, side: int, seed: int, *, classes: bool = True) -> Path:
    """JPEG files of noisy stripes; how wide the stripes are is the class, and the folder."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    for at in range(count):
        name, angle = list(STRIPES)[at % len(STRIPES)], draw.random() * np.pi
        along = np.add.outer(np.arange(side) * np.cos(angle), np.arange(side) * np.sin(angle))
        stripes = np.sin(np.pi * along / STRIPES[name] + draw.random() * 7)
        pixels = 128 + 60 * stripes[..., None] * draw.random(3) + 40 * draw.normal(size=(side, side, 3))
        file = folder / (name if classes else "") / f"{at:05}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, quality=90)
    return folder


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
