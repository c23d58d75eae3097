"""The features of a row for the recipe `price`: of its text, of its words, and of the columns beside it.

They are fitted to the rows that are trained on; later rows are read in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import first_few
from hotlap.recipes.kinds import Kind
from hotlap.recipes.product_texts import NAMES, WordParts, read_facts
from hotlap.recipes.recipe import Numbers, Say
from hotlap.recipes.tables import Table

PULL = 10.0
"""A category counts as the mean target of its rows and of so many average ones."""
PARTS = 5
"""Of the rows to train on, each part sees the means of the others: a row must not see its own target."""
EDGES = (0.001, 0.999)
"""Quantiles of the rows to train on; what lies beyond counts as these."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Means:
    """The mean target of each word of a column, and how often it comes; a new word counts as an average one."""

    words: dict[str, int]
    """Words that come twice or more, with their row in `values`."""
    values: Numbers
    """float32, words × 2: the standardised mean, pulled to that of all rows, and the logarithm of the count."""

    @classmethod
    def fit(cls, words: Sequence[str], z: Numbers, seed: int) -> tuple[Means, Numbers]:
        """The means of words beside standardised targets, and what rows see that are trained on: means of others."""
        distinct, codes = np.unique(np.asarray(words, dtype=object), return_inverse=True)
        part = np.random.default_rng(seed).permutation(len(codes)) % PARTS
        place = codes * PARTS + part
        sums, counts = (
            np.bincount(place, weights=one, minlength=len(distinct) * PARTS).reshape(-1, PARTS)
            for one in (z, np.ones(len(z)))
        )
        others = [(one.sum(1, keepdims=True) - one)[codes, part] for one in (sums, counts)]
        often = np.flatnonzero(counts.sum(1) >= 2)
        found = {str(distinct[at]): number for number, at in enumerate(often.tolist())}
        return cls(words=found, values=_means(sums.sum(1)[often], counts.sum(1)[often])), _means(*others)

    def of(self, words: Sequence[str]) -> Numbers:
        """float32: rows × 2."""
        rows = np.fromiter((self.words.get(word, -1) for word in words), np.int64, len(words))
        return np.concatenate([self.values, np.zeros((1, 2), np.float32)])[rows]

    def unseen(self, words: Sequence[str]) -> int:
        """How many rows have a new word, or one that came once."""
        return sum(word not in self.words for word in words)


def _means(sums: Numbers, counts: Numbers) -> Numbers:
    return np.stack([sums / (counts + PULL), np.log1p(counts)], axis=1).astype(np.float32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """What rows are turned into: a matrix for trees, and the same standardised for a network."""

    numbers: Mapping[str, Kind]
    """Columns of numbers, flags and dates, with their kinds."""
    words: tuple[str, ...]
    """Columns of categories."""
    parts: WordParts
    means: tuple[Means, ...]
    """Of the brand, and of each column of categories."""
    low: Numbers
    high: Numbers
    """Of each feature; what lies beyond counts as this."""
    mean: Numbers
    deviation: Numbers
    gaps: Numbers
    """bool: whether a feature is missing in some rows that are trained on."""

    @classmethod
    def fit(
        cls, table: Table, texts: Sequence[str], names: Sequence[str], z: Numbers, *, parts: int, seed: int, say: Say
    ) -> tuple[Features, Numbers]:
        """Features of the rows to train on, whose standardised targets are `z`, and the matrix of these rows."""
        numbers = {name: _read_as(table[name].kind) for name in names if table[name].kind not in ("category", "text")}
        words = tuple(name for name in names if name not in numbers)
        facts = read_facts(texts, say)
        columns = [facts.brands, *(_words(table, name) for name in words)]
        fitted = [Means.fit(column, z, seed) for column in columns]
        cut, own = WordParts.fit(texts, parts, say)
        plain = np.concatenate([facts.numbers, own, _numbers(table, numbers)], axis=1)
        low, high = _edges(plain)
        matrix = np.concatenate([plain.clip(low, high), *(seen for _, seen in fitted)], axis=1).astype(np.float32)
        free = np.full(2 * len(fitted), np.inf)
        mean, deviation = _moments(matrix)
        made = cls(
            numbers=numbers,
            words=words,
            parts=cut,
            means=tuple(means for means, _ in fitted),
            low=np.concatenate([low, -free]),
            high=np.concatenate([high, free]),
            mean=mean,
            deviation=deviation,
            gaps=np.asarray(np.isnan(matrix).any(0)),
        )
        for line in made.lines(table, plain):
            say(line)
        return made, matrix

    @property
    def width(self) -> int:
        """Numbers of a row for the network: features, and whether they are missing."""
        return len(self.mean) + int(self.gaps.sum())

    @property
    def kinds(self) -> dict[str, Kind]:
        """How to read the columns."""
        return {**self.numbers, **dict.fromkeys(self.words, "text")}

    def matrix(self, table: Table, texts: Sequence[str], say: Say) -> Numbers:
        """float32, rows × features; nan where a value is missing."""
        facts = read_facts(texts, say)
        columns = [facts.brands, *(_words(table, name) for name in self.words)]
        names = ("the brand", *self.words)
        new = {name: means.unseen(one) for name, means, one in zip(names, self.means, columns, strict=True)}
        if any(new.values()):
            counts = ", ".join(f"{name} in {count:,}" for name, count in new.items() if count)
            say(f"unseen    of {len(table):,} rows, {counts}; it counts as an average one")
        coded = [means.of(one) for means, one in zip(self.means, columns, strict=True)]
        found = np.concatenate([facts.numbers, self.parts.of(texts), _numbers(table, self.numbers), *coded], axis=1)
        return found.clip(self.low, self.high).astype(np.float32)

    def standardised(self, matrix: Numbers) -> Tensor:
        """float32, rows × `width`: 0 for a missing value, and 1 behind for each that is missing."""
        missing = np.isnan(matrix)
        z = np.where(missing, 0.0, (matrix - self.mean) / self.deviation)
        return torch.from_numpy(np.concatenate([z, missing[:, self.gaps]], axis=1).astype(np.float32))

    def lines(self, table: Table, plain: Numbers) -> list[str]:
        """What the features are of, and what is missing or cut off in the columns beside the text."""
        counts = [f"{len(NAMES)} of the text", f"{len(self.parts.parts)} of its words", "2 of its brand"]
        for number, names in ((1, list(self.numbers)), (2, self.words)):
            counts += [f"{number} of {'each of ' if len(names) > 1 else ''}{first_few(names)}"] if names else []
        lines = [f"features  {len(self.mean)} of each row: {', '.join(counts)}"]
        first = plain.shape[1] - len(self.numbers)
        missing = {name: int(np.isnan(plain[:, first + at]).sum()) for at, name in enumerate(self.numbers)}
        missing |= {name: _words(table, name).count("") for name in self.words}
        if any(missing.values()):
            lines.append(
                f"missing   {first_few([f'{name} in {n:,} rows' for name, n in missing.items() if n])}; {MISSING}"
            )
        size = plain.shape[1]
        beyond = ((plain < self.low[:size]) | (plain > self.high[:size])).sum(0)[first:]
        ends = [f"{low:.4g} … {high:.4g}" for low, high in zip(self.low[first:], self.high[first:], strict=True)]
        cut = [
            f"{name} in {n:,} rows, beyond {end}" for name, n, end in zip(self.numbers, beyond, ends, strict=False) if n
        ]
        return [*lines, *([f"outliers  {first_few(cut)}; they count as these ends"] if cut else [])]

    def state(self) -> dict[str, Any]:
        """All that makes the features again, beside their tensors, as JSON."""
        return {
            "numbers": dict(self.numbers),
            "words": list(self.words),
            "known": [list(means.words) for means in self.means],
            "vocabulary": self.parts.words,
        }

    def tensors(self) -> dict[str, Tensor]:
        """As a file of weights holds them."""
        found = {name: torch.from_numpy(np.ascontiguousarray(getattr(self, name))) for name in _ARRAYS}
        found |= {f"means.{at}": torch.from_numpy(means.values) for at, means in enumerate(self.means)}
        return {**found, "idf": self.parts.idf, "parts": self.parts.parts}

    @classmethod
    def of(cls, state: Mapping[str, Any], stored: Mapping[str, Tensor]) -> Features:
        """The features of a finished run; ValueError where state and tensors do not fit."""
        known = [{str(word): at for at, word in enumerate(words)} for words in state["known"]]
        values = [stored[f"means.{at}"].numpy() for at in range(len(known))]
        arrays = {name: stored[name].numpy() for name in _ARRAYS}
        parts = WordParts(state["vocabulary"], stored["idf"], stored["parts"])
        count = len(NAMES) + len(parts.parts) + len(state["numbers"]) + 2 * len(known)
        wrong = [name for name, one in arrays.items() if one.shape != (count,)]
        wrong += [f"means.{at}" for at, one in enumerate(values) if one.shape != (len(known[at]), 2)]
        if wrong or len(known) != 1 + len(state["words"]):
            raise ValueError(f"the features have {count} columns, and {wrong or 'known'} another shape")
        means = tuple(Means(words=words, values=one) for words, one in zip(known, values, strict=True))
        return cls(numbers=dict(state["numbers"]), words=tuple(state["words"]), parts=parts, means=means, **arrays)


_ARRAYS = ("low", "high", "mean", "deviation", "gaps")
MISSING = "that a value is missing is a feature too"


def _read_as(kind: Kind) -> Kind:
    """A later file may have decimals where this one has whole numbers."""
    return "number" if kind == "whole number" else kind


def _words(table: Table, name: str) -> list[str]:
    return [text.casefold() for text in table[name].texts()]


def _numbers(table: Table, names: Mapping[str, Kind]) -> Numbers:
    """float32, rows × columns; dates are in days, and what is missing or infinite is nan."""
    found = np.full((len(table), len(names)), np.nan, np.float32)
    for at, name in enumerate(names):
        column = table[name]
        values = column.values
        if column.kind == "date":
            values = values.astype("datetime64[s]").astype(np.int64) / 86_400
        found[:, at] = np.where(column.present, values.astype(np.float64), np.nan)
    found[np.isinf(found)] = np.nan
    return found


def _edges(plain: Numbers) -> tuple[Numbers, Numbers]:
    """The quantiles of what is known in each feature; no bound where nothing is."""
    ends = np.full((2, plain.shape[1]), [[-np.inf], [np.inf]])
    known = ~np.isnan(plain).all(0)
    # By the nearest value outside, so that of few rows none is cut.
    ends[0, known] = np.nanquantile(plain[:, known], EDGES[0], axis=0, method="lower")
    ends[1, known] = np.nanquantile(plain[:, known], EDGES[1], axis=0, method="higher")
    return ends[0], ends[1]


def _moments(matrix: Numbers) -> tuple[Numbers, Numbers]:
    """The mean and the deviation of what is known in each feature; 1 in place of a deviation of 0."""
    known, values = ~np.isnan(matrix), matrix.astype(np.float64)
    count = np.maximum(1, known.sum(0))
    mean = np.where(known, values, 0.0).sum(0) / count
    deviation = np.sqrt((np.where(known, values - mean, 0.0) ** 2).sum(0) / count)
    return mean, np.where(deviation > 1e-9, deviation, 1.0)
