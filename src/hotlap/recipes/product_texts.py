"""What the text of a product holds: lengths, quantities in base units, words that tell quality, brand and word counts.

Units and words are English.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import library
from hotlap.core.units import show_seconds
from hotlap.data.parallel import parallel_map
from hotlap.recipes.recipe import Numbers, Say
from hotlap.recipes.tabular import now_and_then
from hotlap.store.cache import Cache, key_of

FACTS, PARTS = "text-facts", "word-parts"
"""The cache's names for what is found here."""
NEEDS = ("a recipe", "[recipes]")
Found = tuple[Mapping[str, Any], dict[str, Any]]
"""Arrays by name, and values."""
FEW, CHUNK, MOST_WORDS = 100, 1000, 20_000
"""Texts that are not worth the cache; texts in a piece of work; words and pairs that count, the most frequent."""
_SIZES: dict[str, dict[str, float]] = {
    "grams": {
        "mg": 0.001, "g": 1, "gr": 1, "gm": 1, "gram": 1, "grams": 1, "kg": 1000, "kilo": 1000, "kilogram": 1000,
        "kilograms": 1000, "oz": 28.3495, "ounce": 28.3495, "ounces": 28.3495, "lb": 453.592, "lbs": 453.592,
        "pound": 453.592, "pounds": 453.592,
    },
    "millilitres": {
        "ml": 1, "milliliter": 1, "milliliters": 1, "millilitre": 1, "millilitres": 1, "cl": 10, "l": 1000,
        "liter": 1000, "liters": 1000, "litre": 1000, "litres": 1000, "floz": 29.5735, "fluidounce": 29.5735,
        "fluidounces": 29.5735, "gallon": 3785.41, "gallons": 3785.41, "pint": 473.176, "pints": 473.176,
        "quart": 946.353, "quarts": 946.353,
    },
    "centimetres": {
        "mm": 0.1, "cm": 1, "m": 100, "meter": 100, "meters": 100, "metre": 100, "metres": 100, "inch": 2.54,
        "inches": 2.54, "ft": 30.48, "feet": 30.48, "foot": 30.48, "yard": 91.44, "yards": 91.44,
    },
    "pieces": dict.fromkeys(("ct", "count", "pcs", "pc", "piece", "pieces", "pack", "packs", "pk", "bags", "capsules",
                             "tablets", "sheets", "pods"), 1.0),
    "gigabytes": {"mb": 0.001, "gb": 1, "tb": 1000},
    "watts": {"w": 1, "watt": 1, "watts": 1, "kw": 1000},
}  # fmt: skip
BASES = tuple(_SIZES)
"""The units that quantities are turned into."""
_UNITS = {word: (base, factor) for base, words in _SIZES.items() for word, factor in words.items()}
_NUMBER = r"(?<![\w.,])([0-9]+(?:[.,][0-9]+)*)"
# "12 oz", "12-ounce", "500ml", "8 fl. oz"; and as some catalogues write it: "Value: 12.0 Unit: Ounce".
_QUANTITY = re.compile(rf"{_NUMBER}[\s-]*(?:unit\s*:\s*)?(fl(?:uid)?\.?\s*(?:oz|ounces?)|[a-z]+)")
_PACK = re.compile(r"\b(?:pack|set|box|case|bundle|lot) of ([0-9]{1,6})\b")
_TIMES = re.compile(r"\b([0-9]{1,4})\s*[x×]\s*[0-9.,]+\s*([a-z]+)")
_ANY_NUMBER = re.compile(_NUMBER)
_WORD, _CAPITALS, _DIGITS = re.compile(r"[^\W\d_]+"), re.compile(r"[A-Z]"), re.compile(r"[0-9]")
_LABEL = re.compile(r"\s*(?:item name|title|product|name)\s*:", re.IGNORECASE)
_NO_BRAND, QUALITY, CHEAP = (
    frozenset(words.split())
    for words in (
        "a an the new set pack of for with and by in my your best",
        "premium luxury deluxe professional pro organic gourmet handmade genuine leather gold silver stainless "
        "titanium artisan limited exclusive signature authentic imported certified ultra elite finest reserve "
        "original vintage aged crafted superior advanced diamond platinum solid cashmere silk",
        "basic budget value economy economical cheap refurbished used refill sample mini travel trial small generic "
        "disposable plastic lite starter affordable",
    )
)
NAMES = (
    "characters", "words", "lines", "letters a word", "capitals", "digits", "numbers", "largest number", *BASES,
    "quantities", "size of all pieces", "words of quality", "words of cheapness",
)  # fmt: skip
"""What `numbers_of_text` finds in a text."""


def quantities(text: str) -> dict[str, float]:
    """The largest quantity of each kind that a text names, in its base unit: 12 oz is 340 grams."""
    found: dict[str, float] = {}
    text = text.casefold()
    for number, word in _QUANTITY.findall(text):
        base, factor = _UNITS.get("floz" if word.startswith("fl") and "o" in word else word, ("", 0.0))
        if base:
            found[base] = max(found.get(base, 0.0), _value(number) * factor)
    sizes = ("grams", "millilitres")
    times = [number for number, word in _TIMES.findall(text) if _UNITS.get(word, ("",))[0] in sizes]
    for number in (*_PACK.findall(text), *times):
        found["pieces"] = max(found.get("pieces", 0.0), _value(number))
    return found


def numbers_of_text(text: str) -> list[float]:
    """A value for each of `NAMES`: counts, shares, and logarithms of sizes; nan where the text does not say."""
    words, amounts = _WORD.findall(text.casefold()), quantities(text)
    numbers = [_value(one) for one in _ANY_NUMBER.findall(text)]
    letters = sum(map(len, words))
    size = amounts.get("grams") or amounts.get("millilitres") or 1.0
    total = size * amounts.get("pieces", 1.0)
    return [
        _log(len(text)),
        _log(len(words)),
        float(text.count("\n")),
        letters / max(1, len(words)),
        len(_CAPITALS.findall(text)) / max(1, letters),
        len(_DIGITS.findall(text)) / max(1, len(text)),
        float(len(numbers)),
        _log(max(numbers)) if numbers else np.nan,
        *(_log(amounts[base]) if base in amounts else np.nan for base in BASES),
        float(len(amounts)),
        _log(total) if amounts else np.nan,
        float(sum(word in QUALITY for word in words)),
        float(sum(word in CHEAP for word in words)),
    ]


def brand_of(text: str) -> str:
    """The first word that may be a brand, without capitals; empty where there is none."""
    text = text[found.end() :] if (found := _LABEL.match(text)) else text
    words = (found.group().casefold() for found in _WORD.finditer(text))
    return next((word for word in words if len(word) > 1 and word not in _NO_BRAND and word not in _UNITS), "")


def _value(number: str) -> float:
    """1,000 is a thousand and 1,5 one and a half; 1.2.3 is no size and counts as 1.2."""
    head, comma, tail = number.rpartition(",")
    plain = head.replace(",", "") + ("" if len(tail) == 3 and comma else "." if comma else "") + tail
    return float(".".join(plain.split(".")[:2])[:30])


def _log(value: float) -> float:
    return float(np.log1p(value))


# --- many texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class TextFacts:
    """What many texts hold."""

    numbers: Numbers
    """float32: texts × `NAMES`."""
    brands: list[str]


def read_facts(texts: Sequence[str], say: Say) -> TextFacts:
    """What these texts hold, from the cache or found now on all cores but one; of a few it is found at once."""
    if len(texts) <= FEW:
        numbers, brands = _facts_of(texts)
        return TextFacts(numbers=numbers, brands=brands)

    def find() -> Found:
        chunks = [texts[at : at + CHUNK] for at in range(0, len(texts), CHUNK)]
        shows = now_and_then(say, "facts     of {done:,} of {total:,} texts")
        parts = parallel_map(
            _facts_of, chunks, progress=lambda done, _: shows(min(done * CHUNK, len(texts)), len(texts))
        )
        joined = np.concatenate([numbers for numbers, _ in parts])
        return {"numbers": joined}, {"brands": [one for _, brands in parts for one in brands]}

    tensors, values = _kept(FACTS, (list(texts),), f"facts     of {len(texts):,} texts", find, say)
    return TextFacts(numbers=np.asarray(tensors["numbers"]), brands=values["brands"])


def _kept(kind: str, key: Any, words: str, find: Callable[[], Found], say: Say) -> Found:
    """What was found before with this key, or is found now; a line that begins with `words` says what it took."""
    cache, whole, began = Cache(), key_of(kind, key, sys.modules[__name__]), time.perf_counter()
    if (kept := cache.get(kind, whole)) is not None:
        say(f"{words}, from the cache, which saved {show_seconds(kept.values['took_s'])}")
        return kept.tensors, kept.values
    tensors, values = find()
    took_s = time.perf_counter() - began
    say(f"{words} in {show_seconds(took_s)}")
    return cache.get_or_make(kind, whole, lambda: (tensors, {**values, "took_s": took_s}))


def _facts_of(texts: Sequence[str]) -> tuple[Numbers, list[str]]:
    return np.array([numbers_of_text(text) for text in texts], np.float32), [brand_of(text) for text in texts]


class WordParts:
    """TF-IDF of the words and pairs of words of a text, reduced to its main parts (a singular value decomposition)."""

    def __init__(self, words: Sequence[str], idf: Tensor, parts: Tensor) -> None:
        """`idf` is of each word, `parts` are parts × words."""
        if idf.shape != (len(words),) or parts.shape[1:] != (len(words),):
            raise ValueError(f"{len(words)} words have weights of the shapes {idf.shape} and {parts.shape}")
        self.words, self.idf, self.parts = list(words), idf, parts

    @classmethod
    def fit(cls, texts: Sequence[str], count: int, say: Say) -> tuple[WordParts, Numbers]:
        """So many parts, and their values of these texts, from the cache or found now; none where no word repeats."""

        def find() -> Found:
            vectorizer = _vectorizer(min_df=2, max_features=MOST_WORDS)
            try:
                matrix = vectorizer.fit_transform(texts)
            except ValueError:  # no word comes twice
                return {"idf": torch.zeros(0), "parts": torch.zeros(0, 0), "own": np.zeros((len(texts), 0))}, {
                    "words": []
                }
            words, most = vectorizer.get_feature_names_out().tolist(), min(count, matrix.shape[1] - 1)
            parts = torch.zeros(0, len(words))
            if most > 0:
                svd = library("sklearn.decomposition", *NEEDS).TruncatedSVD(most, random_state=0).fit(matrix)
                parts = torch.from_numpy(svd.components_.astype(np.float32))
            made = cls(words, torch.from_numpy(vectorizer.idf_.astype(np.float32)), parts)
            return {"idf": made.idf, "parts": parts, "own": made.of(texts)}, {"words": words}

        key = (list(texts), count, importlib.metadata.version("scikit-learn"))
        words = f"words     of {len(texts):,} texts, reduced to {count} numbers"
        tensors, values = _kept(PARTS, key, words, find, say)
        return cls(values["words"], tensors["idf"], tensors["parts"]), np.asarray(tensors["own"], np.float32)

    def of(self, texts: Sequence[str]) -> Numbers:
        """float32: texts × parts."""
        if not len(self.parts):
            return np.zeros((len(texts), 0), np.float32)
        vectorizer = _vectorizer(vocabulary=self.words)
        vectorizer.idf_ = self.idf.numpy()
        found: Numbers = vectorizer.transform(texts) @ self.parts.numpy().T
        return found.astype(np.float32)


def _vectorizer(**settings: Any) -> Any:
    counting = library("sklearn.feature_extraction.text", *NEEDS)
    return counting.TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, dtype=np.float32, **settings)
