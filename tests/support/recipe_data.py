"""Files for recipes: bars that nobody traded, and texts that nobody wrote."""

import csv
import json
from datetime import UTC, datetime

import numpy as np

from hotlap.recipes.simulated_bars import simulated_bars

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


BRANDS = {"Acme": 0.0, "Borealis": 0.9, "Cobalt": -0.6, "Dunmore": 0.3, "Ember": 1.4}
GOODS = {"Coffee Beans": "oz", "Olive Oil": "ml", "Green Tea": "g", "Dish Soap": "fl oz", "Rice": "lb"}
GRADES = {"Premium": 0.5, "Basic": -0.5, "": 0.0}
PER_UNIT = {"oz": 28.35, "ml": 1.0, "g": 1.0, "fl oz": 29.57, "lb": 453.6}
MATERIALS = {"glass": 0.4, "tin": 0.0, "paper": -0.3}


def products_file(path, rows=300, seed=0, shuffled=False, gaps=0.1):
    """Products whose price follows from brand, amount, grade, packaging and shelf life, with a little noise."""
    draw, told = np.random.default_rng(seed), []
    for at in range(rows):
        brand, good, grade, material = (str(draw.choice(list(one))) for one in (BRANDS, GOODS, GRADES, MATERIALS))
        unit, amount, pack = GOODS[good], float(draw.choice([1, 2, 4, 8, 12, 16, 24])), int(draw.choice([1, 1, 2, 6]))
        days = int(draw.integers(10, 700))
        log_price = BRANDS[brand] + GRADES[grade] + MATERIALS[material] + 0.6 * np.log(amount * PER_UNIT[unit] * pack)
        price = np.exp(log_price + days / 700 + 0.1 * draw.normal())
        name = f"{brand} {grade} {good}".replace("  ", " ")
        title = f"{name}, {amount:g} {unit}" + (f" (Pack of {pack})" if pack > 1 else "")
        about = f"{good} by {brand}. " + " ".join(draw.choice(FILLER, draw.integers(3, 12)))
        kept = "" if draw.random() < gaps else days
        told.append([7 * at + 3, title, about, f"https://pictures.example/{at}.jpg", material, kept, round(price, 2)])
    if shuffled:
        prices = draw.permutation([row[-1] for row in told])
        told = [[*row[:-1], price] for row, price in zip(told, prices, strict=True)]
    head = ["product_id", "title", "about", "image_link", "packaging", "days", "price"]
    return write_rows(path, head, told)
