"""The recipe `price`: texts, numbers and categories → a price, by an encoder, boosted trees, and a blend of both."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hotlap import trees
from hotlap.core.errors import DataError, JobError, first_few, shown
from hotlap.core.job import Job
from hotlap.data.sequences import Sequences
from hotlap.recipes import checks
from hotlap.recipes.answers import outputs_of
from hotlap.recipes.boosted_trees import Mixture, missing_line, settings_of, train_trees
from hotlap.recipes.encoders import Encoder, encoder_for, encoder_in
from hotlap.recipes.kinds import Column, Kind
from hotlap.recipes.options import below_one, is_folder, option, outside, unknown_words
from hotlap.recipes.picture_files import OTHERS, SUFFIXES
from hotlap.recipes.price_features import Features
from hotlap.recipes.price_models import (
    Blend,
    PriceNetwork,
    Scale,
    Smape,
    best_shares,
    skewness,
)
from hotlap.recipes.price_pictures import PictureColumn, are_there
from hotlap.recipes.profiles import trees_s
from hotlap.recipes.recipe import Asked, Numbers, OwnCandidate, Prepared, Say, Trained, Trainer
from hotlap.recipes.tables import Table, read_table, table_in_memory
from hotlap.recipes.tabular import Side
from hotlap.recipes.text import NEARLY, TextOptions, TextReader, TextRecipe
from hotlap.store.weights import MODEL, build_with_weights, load_weights, save_state

ENCODER, TREES, BLEND = "encoder", "trees", "blend"
FEATURES = "features.safetensors"
"""In the folder of a run: how features are made, and the scale of the prices."""
LOGS = {"auto": None, "yes": True, "no": False}
"""Whether models learn the logarithm of a price, as an option says it."""
LIBRARIES: dict[str, dict[str, Any]] = {
    "xgboost": {"max_depth": 5, "eta": 0.05, "subsample": 0.8, "colsample_bytree": 0.5, "min_child_weight": 5},
    "lightgbm": {
        "num_leaves": 31, "learning_rate": 0.05, "bagging_fraction": 0.8, "bagging_freq": 1, "feature_fraction": 0.5,
        "min_data_in_leaf": 10,
    },
}  # fmt: skip
"""Libraries of boosted trees, with the parameters that hotlap gives them."""
TREE_PATIENCE = 40
"""Rounds without improvement after which the trees stop."""
RULES, LEAST = 3, 3
"""Categories whose medians are baselines, and rows of a category that has a median."""
_LINK = re.compile(rf"https?://\S+|\S+({'|'.join(map(re.escape, SUFFIXES + OTHERS))})", re.IGNORECASE)
_ID = re.compile(r"(.*[_ -])?(id|index|idx|sku|asin|ean|upc|gtin|uuid|key)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PriceOptions(TextOptions):
    """The options of the recipe."""

    text: tuple[str, ...] = option((), "columns of text; the default is all of them, except ids")
    features: tuple[str, ...] = option((), "columns to read beside the text; the default is all but ids and pictures")
    pictures: str = option("", "a column of files of pictures, for the encoder to see")
    root: str = option("", "the folder that paths of pictures begin at; the default is that of the file")
    size: int = option(64, "pixels along a side of a picture", most=1024)
    log_price: str = option("auto", "learn the logarithm of the price: yes, no, or auto, where it is less skewed")
    accumulate: int = option(1, "batches that make an update")
    most: int = option(384, "most tokens of a text", most=65_536)
    parts: int = option(32, "numbers that word counts are reduced to; 0: none", most=1000)
    trees: str = option("xgboost", "the library of the boosted trees: xgboost or lightgbm")
    rounds: int = option(1000, "most rounds of the boosted trees", most=100_000)

    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fast": {"rounds": 300},
        "best": {"rounds": 3000, "patience": 4},
    }
    MOST_TEXTS: ClassVar[int] = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = below_one(self, "accumulate", "rounds") + outside(self, parts=(0, 1000))
        wrong += unknown_words(self, log_price=LOGS, trees=LIBRARIES)
        if self.onnx:
            wrong.append("onnx=True is not for a price, which a blend of models answers; leave it out")
        wrong += outside(self, size=(16, 1024))
        if self.root and not (self.pictures and is_folder(self.root)):
            cure = "name a folder" if self.pictures else "name the column with --pictures"
            wrong.append(f"root={shown(self.root)} is the folder of pictures; {cure}")
        if self.pictures and self.pictures in (*self.text, *self.features, self.target):
            wrong.append(f"pictures={self.pictures} is named for something else too; name another column")
        wrong += [f"features names {name}, which text names too" for name in self.features if name in self.text]
        if wrong:
            raise JobError(wrong)


class PriceRecipe(TextRecipe):
    """A number from texts, numbers and categories."""

    name = "price"
    summary = "a price from texts, numbers and categories: an encoder, boosted trees, and a blend of both"
    expects = "one or more columns of text, a column with the price, and any other columns"
    options_type = PriceOptions
    targets = ("price", "target", "cost", "amount", "value", "sale_price", "y")

    beside: list[str]
    """The columns that are read beside the text."""
    pictures: PictureColumn | None

    # the table

    def is_number(self) -> bool:
        """It is."""
        return True

    def columns_of(self, table: Table) -> list[str]:
        """The columns of text; those to read beside them are found too."""
        options, known = self.options, (self.target, self.options.group, *self.options.text)
        given = options.features
        self.pictures = None
        if options.pictures:
            name = table[options.pictures].name
            self.pictures = PictureColumn(name=name, root=options.root, size=options.size)
            self.pictures.check(table)
            known = (*known, name)
        rest = [name for name in table.columns if name not in (*known, *given)]
        pictures = [name for name in rest if _holds_links(table[name])]
        for name in pictures:
            example = shown(next(filter(None, table[name].texts())), 60)
            there = "; the files are there: --pictures reads them" if are_there(table[name], table, "") else ""
            self.say(f"note      {name} is not read: it holds links, or paths of pictures, as {example}{there}")
        self.apart = (*given, *pictures, options.pictures)
        texts = super().columns_of(table)
        if given:
            self.beside = [table[name].name for name in given]
            return texts
        rest = [name for name in rest if name not in pictures and table[name].kind not in ("text", "empty")]
        ids = [name for name in rest if _counts_rows(table[name])]
        if ids:
            what = f"not read, since they number the rows: {first_few(ids)}; name them with --features if not"
            self.say(f"note      {what}")
        self.beside = [name for name in rest if name not in (*ids, *texts)]
        return texts

    @property
    def inputs(self) -> list[str]:
        """All columns that are read."""
        return [*self.columns, *self.beside, *([self.pictures.name] if self.pictures else [])]

    def problems(self) -> list[str]:
        """Also a target that is no number."""
        column = self.table[self.target]
        if column.kind not in (*checks.NUMBERS, "empty"):
            example = shown(next(filter(None, column.texts())))
            return [f"the target {self.target!r} is {column.kind}, as {example}; give numbers, without currencies"]
        if self.target in self.beside:
            return [f"features names {self.target}, which is the target; name another column"]
        return super().problems()

    # the models

    def reader_of(self) -> PriceReader:
        """A reader with the scale of the prices, the features of the rows to train on, and the encoder."""
        options, train = self.options, self.train
        self.scale = Scale.fit(train.target, self._in_logs())
        z, texts = self.scale.standardised(train.target), joined_texts(train.table, self.columns)
        features, self.matrix = Features.fit(
            train.table, texts, self.beside, z, parts=options.parts, seed=options.seed, say=self.say
        )
        encoder = encoder_for(options, texts, self.say)
        has_header = self.table.has_header
        return PriceReader(
            encoder, self.columns, options.most, options.dropout, has_header, features, self.scale, self.pictures
        )

    def _in_logs(self) -> bool:
        """Whether models learn logarithms: as asked, or where these are less skewed in the rows to train on."""
        asked, name = LOGS[self.options.log_price], self.target
        low = [side for side in (self.train, self.held) if side.target.min() <= 0]
        if low and asked:
            row, least = low[0].rows[low[0].target.argmin()] + 1, low[0].target.min()
            raise DataError(
                f"log_price=yes needs values above 0, and the target {name!r} is {least:g} in row {row:,} of "
                f"{low[0].whole.path}; correct it, or leave --log-price out"
            )
        if low or asked is not None:
            why = "since some are 0 or less" if low and asked is None else f"as log_price={self.options.log_price} says"
            self.say(f"target    {name} is learnt {'in logarithms' if asked else 'as it is'}, {why}")
            return bool(asked)
        plain, logs = skewness(self.train.target), skewness(np.log(self.train.target))
        is_less = abs(logs) < abs(plain)
        words = "in logarithms" if is_less else "as it is"
        self.say(f"target    {name} is learnt {words}: its skewness is {plain:.2f}, that of its logarithm {logs:.2f}")
        return bool(is_less)

    def data_of(self, side: Side) -> Any:
        """The rows of a side, with their prices; those that are trained on do not see their own."""
        labels = torch.from_numpy(self.scale.standardised(side.target).astype(np.float32))
        matrix = self.matrix if side is self.train else None
        return self.reader.rows(side.table, self.say, labels=labels, matrix=matrix)

    def job(self, name: str, data: PriceRows, held: PriceRows) -> Job:
        """The training of the encoder with the numbers beside it; errors count as they are, not squared."""
        scored = {"metrics": {"smape": Smape(self.scale)}, "monitor": "smape", "better": "lower"}
        loss = nn.SmoothL1Loss(beta=0.1)
        return self.encoder_job(data.tokens, held.tokens, loss=loss, accumulate=self.options.accumulate, **scored)

    def prepared(self) -> Prepared:
        """The encoder is a job; trees and blend train themselves."""
        prepared = super().prepared()
        own = [
            OwnCandidate(
                name=TREES, train=self.train_trees, comes_first=True, expected_s=lambda: trees_s(self.tree_job())
            ),
            OwnCandidate(name=BLEND, train=self.train_blend, is_quick=True),
        ]
        if (line := missing_line(self.options.trees)) is not None:
            self.say(line)
            own = []
        self.held_matrix = prepared.held_out.matrix
        return replace(prepared, own=own)

    def tree_job(self) -> trees.TreeJob:
        """Boosted trees on the same features, as many rounds as are best for the held-out rows."""
        options, name = self.options, self.options.trees
        return trees.TreeJob(
            self.matrix,
            self.scale.standardised(self.train.target),
            valid=(self.held_matrix, self.scale.standardised(self.held.target)),
            rounds=options.rounds,
            patience=TREE_PATIENCE,
            **settings_of(options, name, LIBRARIES[name]),
        )

    def train_trees(self, trainer: Trainer) -> Trained:
        """Train them."""
        options, name = self.options, self.options.trees
        run = train_trees(
            self.tree_job(), trainer.folder / "models" / TREES, trainer, options, progress=trainer.progress
        )
        self.say(f"trees     {name}, {run.best['round']:,} rounds")
        return Trained(
            weights={"shares": torch.ones(1)},
            answers=self.scale.prices(run.predict(self.held_matrix)),
            train_s=run.train_s,
            was_kept="cache" in run.stopped,
        )

    def train_blend(self, trainer: Trainer) -> Trained:
        """The shares of encoder and trees with the least SMAPE on the held-out rows."""
        began = time.perf_counter()
        before = {name: trainer.before[name] for name in (ENCODER, TREES) if name in trainer.before}
        parts = {name: trained.answers for name, trained in before.items()}
        shares, answers = best_shares(parts, self.held.target, self.scale)
        self.reader.members = tuple(parts)
        each = ", ".join(f"{name} {share:.2f}" for name, share in zip(parts, shares, strict=True))
        self.say(f"blend     {each}: the shares with the least SMAPE on the rows held out")
        return Trained(
            weights=Blend.weights_of(shares, before[ENCODER].weights if ENCODER in before else {}),
            answers=answers,
            train_s=time.perf_counter() - began,
            about={"shares": dict(zip(parts, shares.tolist(), strict=True))},
        )

    def baselines(self) -> Mapping[str, Numbers]:
        """The median, and the median of each category."""
        middle = float(np.median(self.train.target))
        rules = {"the median": np.full(len(self.held.target), middle)}
        for name in self.reader.features.words[:RULES]:
            words, theirs = (np.asarray(side.table[name].texts(), dtype=object) for side in (self.train, self.held))
            names, counts = np.unique(words, return_counts=True)
            medians = {word: float(np.median(self.train.target[words == word])) for word in names[counts >= LEAST]}
            rules[f"the median by {name}"] = np.array([medians.get(word, middle) for word in theirs])
        return rules

    @classmethod
    def revive(cls, state: Mapping[str, Any], folder: Path) -> PriceReader:
        """The reader of a finished run."""
        stored = load_weights(folder / FEATURES)
        mean, deviation, low, high = stored["scale"].tolist()
        scale = Scale(in_logs=state["in_logs"], mean=mean, deviation=deviation, low=low, high=high)
        features, encoder = Features.of(state["rows"], stored), encoder_in(folder, state["config"])
        pictures = PictureColumn(**state["pictures"]) if state.get("pictures") else None
        reader = PriceReader(
            encoder, state["columns"], state["most"], state["dropout"], state["has_header"], features, scale, pictures
        )
        reader.members = tuple(state["members"])
        return reader


@dataclass(frozen=True, kw_only=True, eq=False)
class PriceRows:
    """Rows as the models take them: tokens beside standardised features for the encoder, and features for trees."""

    tokens: Sequences
    matrix: Numbers


class PriceReader(TextReader):
    """Texts and features of rows, and the models that answer for them."""

    by_share = True

    def __init__(
        self,
        encoder: Encoder,
        columns: Sequence[str],
        most: int,
        dropout: float,
        has_header: bool,
        features: Features,
        scale: Scale,
        pictures: PictureColumn | None,
    ) -> None:
        super().__init__(encoder, columns, (), most, dropout, has_header)
        self.features, self.scale, self.pictures = features, scale, pictures
        self.members: tuple[str, ...] = ()
        """What the blend is of, in the order of its shares."""

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        """How the columns are read."""
        pictures = [] if self.pictures is None else [self.pictures.name]
        texts: dict[str, Kind] = dict.fromkeys((*self.columns, *pictures), "text")
        return {**self.features.kinds, **texts}

    def table(self, data: Path) -> Table:
        """A file with all columns that were trained on."""
        return read_table(data, header=self.has_header, kinds=self.kinds)

    def rows_of(self, data: Any) -> Table:
        """Rows in memory; a list of plain texts will do where nothing else is read."""
        table = table_in_memory(data, self.columns, self.kinds)
        if lacking := [name for name in self.kinds if name not in table]:
            raise DataError(f"the rows lack {first_few(lacking)}, which the model reads; add what is missing")
        return table if self.pictures is None else self.pictures.in_memory(table)

    def state(self) -> dict[str, Any]:
        """All that makes the reader again, beside its tensors."""
        own = {"rows": self.features.state(), "in_logs": self.scale.in_logs, "members": list(self.members)}
        own["pictures"] = None if self.pictures is None else self.pictures.state()
        return {**super().state(), **own}

    def keep_files(self, folder: Path) -> None:
        """Write the tokenizer, and the tensors of features and scale."""
        super().keep_files(folder)
        scale = (self.scale.mean, self.scale.deviation, self.scale.low, self.scale.high)
        save_state({**self.features.tensors(), "scale": torch.tensor(scale, dtype=torch.float64)}, folder / FEATURES)

    def texts(self, table: Table) -> list[list[str]]:
        """All texts of a row as one."""
        return [joined_texts(table, self.columns)]

    def rows(self, table: Table, say: Say, *, labels: Tensor | None = None, matrix: Numbers | None = None) -> PriceRows:
        """The rows of a table, with labels where they are to train on; `matrix` are their features, if known."""
        if matrix is None:
            matrix = self.features.matrix(table, self.texts(table)[0], say)
        beside = {"numbers": self.features.standardised(matrix)}
        if self.pictures is not None:
            beside |= self.pictures.read(table, say, is_asked=labels is None)
        if labels is not None:
            beside["labels"] = labels
        return PriceRows(tokens=self.sequences(table, say, beside), matrix=matrix)

    def asked(self, table: Table, say: Say) -> Asked:
        """All rows of a table."""
        return Asked(data=self.rows(table, say), rows=np.arange(len(table)))

    def around(self, encoder: nn.Module) -> nn.Module:
        """The network around an encoder."""
        width, numbers = self.encoder.width, self.features.width
        return PriceNetwork(encoder, width, numbers, self.dropout, sees_pictures=self.pictures is not None)

    @property
    def embedded(self) -> None:
        """None: the answers are of several models."""
        return None

    def load(self, name: str, folder: Path) -> Mixture:
        """The models that have a share of the answers."""
        if name == ENCODER:
            return Mixture(parts={ENCODER: super().load(name, folder)}, shares={ENCODER: 1.0})
        if name == TREES:
            return Mixture(parts={TREES: self._trees(folder)}, shares={TREES: 1.0})
        if not set(self.members) <= {ENCODER, TREES}:
            raise ValueError(f"members={shown(self.members)}")
        count, has_network = len(self.members), ENCODER in self.members
        blend: Any = build_with_weights(
            lambda: Blend(count, self.model(ENCODER) if has_network else None), folder / MODEL
        )
        shares = {name: share for name, share in zip(self.members, blend.shares.tolist(), strict=True) if share}
        parts = {name: blend.network.eval() if name == ENCODER else self._trees(folder) for name in shares}
        return Mixture(parts=parts, shares=shares)

    def _trees(self, folder: Path) -> trees.TreeModel:
        found = trees.load(folder / "models" / TREES)
        kind = (found.record.features, found.record.one_target, found.record.task)
        if kind != (len(self.features.mean), True, "regression"):
            raise ValueError(f"the trees have {kind[0]} features and are for {kind[2]}")
        return found

    def answers(self, model: Any, data: PriceRows, *, batch_size: int, device: str) -> Numbers:
        """The prices that a model, or a mixture of models, answers."""
        mixture = model if isinstance(model, Mixture) else Mixture(parts={ENCODER: model}, shares={ENCODER: 1.0})
        z = np.zeros(len(data.matrix))
        for name, part in mixture.parts.items():
            if name == TREES:
                answered = part.predict(data.matrix)
            else:
                answered = outputs_of(self.forward, part, data.tokens, batch_size=batch_size, device=device).numpy()
            z = z + mixture.shares[name] * answered
        prices: Numbers = self.scale.prices(z)
        return prices


def joined_texts(table: Table, names: Sequence[str]) -> list[str]:
    """All texts of each row as one, a line each; a single space where there is none."""
    return ["\n".join(filter(None, row)) or " " for row in zip(*(table[name].texts() for name in names), strict=True)]


def _holds_links(column: Column) -> bool:
    """Whether nearly all values are links, or names of pictures."""
    if column.kind not in ("text", "category"):
        return False
    texts = [text for text in column.texts() if text]
    return sum(_LINK.fullmatch(text) is not None for text in texts) >= NEARLY * max(1, len(texts))


def _counts_rows(column: Column) -> bool:
    """Whether whole numbers are ids: all are different, and rise from row to row, or are called so."""
    if column.kind != "whole number" or column.missing is not None:
        return False
    values = column.values
    is_rising = bool((np.diff(values) == 1).all())
    return len(np.unique(values)) == len(values) and (is_rising or _ID.fullmatch(column.name) is not None)


RECIPE = PriceRecipe
