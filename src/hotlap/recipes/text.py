"""The recipe `text`: one or two columns of text → classes, by fine-tuning an encoder or training one from scratch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, JobError, shown
from hotlap.core.job import Job
from hotlap.core.units import show_seconds
from hotlap.data.sequences import SequenceColumns, Sequences
from hotlap.data.tokenising import tokenised
from hotlap.machine.device import choose_device
from hotlap.recipes import checks, word_counts
from hotlap.recipes.encoders import TOKENIZER, Encoder, EncoderOptions, encoder_for, encoder_in
from hotlap.recipes.kinds import Column
from hotlap.recipes.onnx_files import write_onnx
from hotlap.recipes.options import MOST, option, outside
from hotlap.recipes.recipe import Asked, Candidate, Numbers, Prepared, Recipe, Say
from hotlap.recipes.scores import class_weights
from hotlap.recipes.tables import Table, named_columns, read_table
from hotlap.recipes.tabular import (
    HEADERS,
    by_group,
    now_and_then,
    refuse,
    refuse_pictures,
    shown_table,
    stratified,
    stratified_by_group,
    warm_up_and_cosine,
)
from hotlap.store.cache import Cache, key_of

TARGETS = ("label", "target", "class", "category", "sentiment", "y")
"""Names of a column to predict, as people have them."""
NEARLY = 0.95
"""Of the values of a column of ids at least this share are single words, and as many different ones."""
_SPACE = re.compile(r"\s")


def target_of(table: Table, named: str) -> str:
    """The column to predict: the one named, or the only one that is called as such columns are."""
    if named:
        return table[named].name
    found = [name for name in table.columns if name.lower() in TARGETS]
    if len(found) != 1:
        raise DataError(
            f"which column of {table.path} is to be predicted? Say --target; there are {named_columns(table)}"
        )
    return found[0]


def columns_of(table: Table, named: Sequence[str], used: Sequence[str], say: Say) -> list[str]:
    """The columns of text: those named, or all that are not used otherwise; ids beside them are left out, and said."""
    if named:
        return [table[name].name for name in named]
    found = [name for name, column in table.columns.items() if column.kind == "text" and name not in used]
    ids = [name for name in found if _holds_ids(table[name])]
    read = [name for name in found if name not in ids] or found
    for name in ids if read != found else ():
        say(
            f"note      {name} is not read: its values, as {_first(table[name])}, are nearly all different and single "
            "words, as ids are; name it with --text if it is text"
        )
    if not 1 <= len(read) <= 2:
        raise DataError(f"which column of {table.path} holds the text? Say --text; there are {named_columns(table)}")
    others = [name for name, column in table.columns.items() if column.kind == "category" and name not in used]
    if read == ids and others:
        say(
            f"warning   the values of {' and '.join(read)}, as {_first(table[read[0]])}, look like ids; "
            f"if the text is in {' or '.join(others)}, name that with --text"
        )
    return read


def target_problems(table: Table, target: str) -> list[str]:
    """Why a column cannot be learned as classes, one line each."""
    column = table[target]
    found = checks.target_problems(column)
    different = len(set(column.texts()))
    if not found and 2 * different > len(table):
        found.append(
            f"the target {target!r} has {different:,} different values in {len(table):,} rows, "
            f"as {shown(column.texts()[0])}; name a column of classes, each with several rows"
        )
    return found


def _holds_ids(column: Column) -> bool:
    """Whether nearly all values are single words, and different: hashes, addresses, names of files, numbers.

    Of plain letters: whole sentences of Chinese or Thai have no spaces either.
    """
    texts = [text for text in column.texts() if text]
    if len(set(texts)) < NEARLY * len(texts):
        return False
    return sum(text.isascii() and not _SPACE.search(text) for text in texts) >= NEARLY * len(texts)


def _first(column: Column) -> str:
    return shown(next(text for text in column.texts() if text))


EXAMPLES = 64
"""Texts that a written ONNX file is tried on."""


class Classifier(nn.Module):
    """An encoder, the mean over a text's tokens, and a layer for the classes."""

    def __init__(self, encoder: nn.Module, width: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder, self.dropout, self.head = encoder, nn.Dropout(dropout), nn.Linear(width, classes)

    def embedded(self, attention_mask: Tensor, **tokens: Tensor) -> Tensor:
        """A vector for each text."""
        hidden = self.encoder(attention_mask=attention_mask, **tokens).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        mean: Tensor = (hidden * mask).sum(1) / mask.sum(1)
        return mean

    def forward(self, **batch: Tensor) -> Tensor:
        """A row of scores for each text."""
        scores: Tensor = self.head(self.dropout(self.embedded(**batch)))
        return scores


class TextReader:
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
        self._most, self._dropout, self.has_header = most, dropout, has_header

    def table(self, data: Path) -> Table:
        """A file of texts, were they all numbers."""
        return read_table(data, header=self.has_header, kinds=dict.fromkeys(self.columns, "text"))

    def state(self) -> dict[str, Any]:
        """All that it needs to be made again."""
        return {
            "columns": list(self.columns),
            "classes": list(self.classes),
            "most": self._most,
            "dropout": self._dropout,
            "has_header": self.has_header,
            "config": self.encoder.config,
        }

    def keep_files(self, folder: Path) -> None:
        """Write the tokenizer."""
        self.encoder.save_tokenizer(folder)

    def model(self, name: str) -> nn.Module:
        """The classifier with first weights; those of the encoder are random."""
        return Classifier(self.encoder.made(), self.encoder.width, len(self.classes), self._dropout)

    def begun(self) -> nn.Module:
        """The classifier as its training begins: with the encoder's pretrained weights, where it has any."""
        return Classifier(self.encoder.begun(), self.encoder.width, len(self.classes), self._dropout)

    def sequences(self, table: Table, say: Say, columns: Mapping[str, Any] | None = None) -> Sequences:
        """The texts of a table as tokens."""
        first, *more = (texts_of(table, name) for name in self.columns)
        tokens = tokenised(
            first,
            self.encoder.tokenizer,
            pairs=more[0] if more else None,
            most=self._most,
            progress=now_and_then(say, "tokens    of {done:,} of {total:,} texts"),
        )
        say(f"tokens    {tokens.line}")
        fields = {name: field for name, field in tokens.fields.items() if name in self.encoder.fields}
        made = Sequences(fields, offsets=tokens.offsets, columns=columns, pad=self._pads(fields))
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
        """The mean over a text's tokens, as the last layer sees it."""
        return lambda model, batch: model.embedded(**_inputs(batch))  # type: ignore[operator]

    def _pads(self, fields: Mapping[str, Tensor]) -> dict[str, float]:
        return {name: self.encoder.pad if name == "input_ids" else 0 for name in fields}


def revive(state: Mapping[str, Any], folder: Path) -> TextReader:
    """The reader of a finished run."""
    encoder = encoder_in(folder, state["config"])
    return TextReader(
        encoder, state["columns"], state["classes"], state["most"], state["dropout"], state.get("has_header", True)
    )


def texts_of(table: Table, name: str) -> list[str]:
    """The texts of a column; one that is missing is a single space, which a tokenizer makes its own signs of."""
    return [text or " " for text in table[name].texts()]


def _inputs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: part for name, part in batch.items() if name != "labels"}


# --- ONNX ----------------------------------------------------------------------------------------------


class Answering(nn.Module):
    """Tokens in, probabilities out."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """The probability of each class."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        scores: Tensor = self.classifier(input_ids=input_ids, attention_mask=attention_mask, **types)
        return scores.softmax(1)


def written_as_onnx(reader: TextReader, held: Sequences, name: str, model: nn.Module, folder: Path, say: Say) -> None:
    """Write a trained classifier as ONNX, tried on some of these texts."""
    path = folder / "model.onnx"
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
    gap = write_onnx(
        Answering(model),
        tuple(batch[one] for one in names),
        path,
        about,
        names=(*names, "probabilities"),
        axes=("batch", "length"),
    )
    say(f"onnx      {path}: its answers are the model's to {gap:.1g}")


COUNTS = "word-counts"
"""What the cache calls the answers of a simple rule."""
JUDGED_TOKENS = 2**16
"""Of all texts together that are answered at a time, at most, unless four batches have more."""
EXCERPT = 160
"""Characters of a text that a list of mistakes shows."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(EncoderOptions):
    """What the recipe can be told."""

    text: tuple[str, ...] = option((), "one or two columns of text; without it all that there are, but for ids")
    header: str = option("auto", "whether the first row holds names: yes, no, or auto to find out")
    batch_size: int = option(16, "samples an update")
    patience: int = option(2, "evaluations without improvement before it stops")
    warm_up: float = option(0.06, "the share of updates in which the learning rate rises")
    dropout: float = option(0.1, "before the last layer")
    weight_decay: float = option(0.01, "of AdamW")
    balance: bool = option(True, "weigh classes by how rare they are")
    onnx: bool = option(False, "write the best model as model.onnx too")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = outside(self, warm_up=(0, 1), dropout=(0, 1), weight_decay=(0, MOST))
        if self.header not in HEADERS:
            wrong.append(f"header={shown(self.header)} must be one of {', '.join(HEADERS)}")
        if len(self.text) > 2:
            wrong.append(f"text names {len(self.text)} columns, and one or two are taken")
        if len(set(self.text)) < len(self.text):
            wrong.append(f"text names {self.text[0]} twice; name it once")
        if wrong:
            raise JobError(wrong)

    @property
    def judged_at_once(self) -> int:
        """Texts that are answered at a time: few of them at a time keep no GPU busy."""
        return self._judged_within(JUDGED_TOKENS, self.most)


def prepare(options: TextOptions, say: Say) -> Prepared:
    """Read the file, make tokens of its texts, and hold a part out."""
    table = shown_table(options.data, say, header=HEADERS[options.header])
    refuse_pictures(table)
    target = target_of(table, options.target)
    columns = columns_of(table, options.text, (target, options.group), say)
    for name, named in (("text", columns), ("group", [options.group])):
        if target in named:
            raise DataError(f"{name} names {target}, which is the target; name another column")
    unread = [name for name in table.columns if name not in columns]
    refuse([*target_problems(table, target), *checks.leaks(table, target, but=unread)])
    for line in (*checks.target_warnings(table[target]), *checks.suspects(table, target, but=unread)):
        say(f"warning   {line}")
    for line in checks.unread_leaks(table, target, but=[*columns, options.group]):
        say(f"note      {line}")
    if options.test:
        asked = read_table(Path(options.test), header=table.has_header)
        # A column that it lacks is told with the names that it has, where it is read.
        read = replace(table, columns={name: table[name] for name in columns if name in asked})
        refuse(checks.mismatch_problems(read, asked, ""))
    classes, labels = checks.classes_of(table[target])
    say(f"task      {target} ({len(classes)} classes) from {' and '.join(columns)}")
    train, train_labels, held, held_labels, rows = _parts(options, table, target, columns, classes, labels, say)
    counted = _by_word_counts(options, train, train_labels, held, columns, say)
    encoder = encoder_for(options, [text for name in columns for text in texts_of(train, name)], say)
    reader = TextReader(encoder, columns, classes, options.most, options.dropout, table.has_header)
    data = reader.sequences(train, say, {"labels": torch.from_numpy(train_labels)})
    valid = reader.sequences(held, say, {"labels": torch.from_numpy(held_labels)})
    weights = torch.from_numpy(class_weights(train_labels, len(classes))).float() if options.balance else None
    shown = texts_of(held, columns[0])
    return Prepared(
        reader=reader,
        candidates=[Candidate(name="encoder", job=partial(_job, options, reader, data, valid, weights))],
        target_name=target,
        held_out=valid,
        target=held_labels,
        shown=lambda at: f"row {rows[at] + 1:,} of {held.path}: {shown[at][:EXCERPT]}",
        baselines=partial(_rules, train_labels, len(held_labels), counted, say),
        finish=partial(written_as_onnx, reader, valid) if options.onnx else None,
    )


def _job(options: TextOptions, reader: TextReader, data: Sequences, held: Sequences, weights: Tensor | None) -> Job:
    torch.manual_seed(options.seed)
    model = reader.begun()
    fresh = not reader.encoder.is_pretrained
    return Job(
        model=model,
        data=data,
        valid=held,
        loss=nn.CrossEntropyLoss(weight=weights),
        forward=_Forward(reader),
        optimizer=torch.optim.AdamW(
            model.parameters(), lr=options.lr or (5e-4 if fresh else 5e-5), weight_decay=options.weight_decay
        ),
        schedule=warm_up_and_cosine(options.warm_up),
        clip=1.0,
        batch_size=options.batch_size,
        eval_batch=options.judged_at_once,
        epochs=options.epochs or (12 if fresh else 3),
        reorder=True,
        metrics=["accuracy", "macro_f1"],
        monitor="macro_f1",
        patience=options.patience,
        seed=options.seed,
        device=options.device,
    )


class _Forward:
    """The classifier's outputs and labels, for a Job."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return self._reader.forward(model, batch), batch["labels"]


# --- the table -------------------------------------------------------------------------------------


def _parts(
    options: TextOptions,
    table: Table,
    target: str,
    columns: Sequence[str],
    classes: Sequence[str],
    labels: Numbers,
    say: Say,
) -> tuple[Table, Numbers, Table, Numbers, Numbers]:
    """What is trained on and what is held out, with labels: a file of its own, whole groups, a share of each class.

    As the last, which rows of their file those held out are. Rows of one text are on one side where the split is free
    to have them so.
    """
    texts = _joined(table, columns)
    places = {text: at for at, text in enumerate(dict.fromkeys(texts))}
    if options.valid:
        held = shown_table(options.valid, say, header=HEADERS[options.header])
        refuse(checks.mismatch_problems(table, held, ""))
        theirs, numbers = checks.classes_of(held[target])
        unknown = [name for name in theirs if name not in classes]
        refuse(
            [
                f"{options.valid} has the class {shown(name)}, which {options.data} has not; leave its rows out"
                for name in unknown
            ]
        )
        known = np.asarray([classes.index(name) for name in theirs])[numbers]
        _warn_of_copies(texts, _joined(held, columns), f"leave them out of {options.valid}", say)
        return table, labels, held, known, np.arange(len(held))
    if options.group:
        group = table[options.group]
        if group.missing is not None:
            raise DataError(f"group={group.name} is missing in {int(group.missing.sum()):,} rows; fill it in")
        split = by_group(np.asarray(group.texts()), options.valid_share, options.seed)
        train, held_out = ([texts[row] for row in rows] for rows in split)
        _warn_of_copies(train, held_out, f"give rows of one text the same {group.name}, or leave copies out", say)
    elif len(places) < len(texts):
        copies = len(texts) - len(places)
        say(f"copies    {copies:,} rows have the text of a row before them: all rows of a text are on one side")
        groups = np.asarray([places[text] for text in texts])
        split = stratified_by_group(labels, groups, options.valid_share, options.seed)
    else:
        split = stratified(labels, options.valid_share, options.seed)
    for number in np.setdiff1d(labels[split.valid], labels[split.train]):
        say(f"warning   all rows of {shown(classes[number])} are held out by their groups: it is never trained on")
    say(f"split     {len(split.train):,} rows to train on, {len(split.valid):,} held out")
    train_labels, held_labels = labels[split.train], labels[split.valid]
    return table.rows(split.train), train_labels, table.rows(split.valid), held_labels, split.valid


def _joined(table: Table, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """All that is read of each row."""
    return list(zip(*(texts_of(table, name) for name in columns), strict=True))


def _warn_of_copies(train: Sequence[Any], held: Sequence[Any], cure: str, say: Say) -> None:
    """Texts that are on both sides make a score too good."""
    seen = set(train)
    copies = [text for text in held if text in seen]
    if copies:
        say(
            f"warning   {len(copies):,} of {len(held):,} rows held out have a text that is trained on too, "
            f"as {shown(copies[0][0])}; {cure}"
        )


def _by_word_counts(
    options: TextOptions, train: Table, labels: Numbers, held: Table, columns: Sequence[str], say: Say
) -> word_counts.Counting | None:
    """What a logistic regression over TF-IDF answers, where scikit-learn is installed: once, into the cache.

    It is fitted while a GPU trains; cores that train themselves are left alone.
    """
    if not word_counts.is_there():
        return None
    texts, theirs = ([" ".join(parts) for parts in _joined(part, columns)] for part in (train, held))
    cache, key = Cache(), key_of(texts, labels.tolist(), theirs, word_counts.version())
    if (kept := cache.get(COUNTS, key)) is not None:
        found = word_counts.Counted(*kept.values)
        say(f"rule      {word_counts.NAME}, from the cache, which saved {show_seconds(found.took_s)}")
        return lambda: found
    if choose_device(options.device).type == "cuda":
        counting = word_counts.begun(texts, labels.tolist(), theirs)
    else:
        say(f"rule      {word_counts.NAME} is fitted to {len(texts):,} texts")
        counting = partial(word_counts.Counted, *word_counts.fitted(texts, labels.tolist(), theirs))
    return lambda: word_counts.Counted(*cache.get_or_make(COUNTS, key, lambda: ({}, tuple(counting())))[1])


def _rules(labels: Numbers, held: int, counted: word_counts.Counting | None, say: Say) -> dict[str, Numbers]:
    """What simple rules answer; one that failed is said and left out."""
    rules = {"most frequent class": np.full(held, np.bincount(labels).argmax())}
    try:
        answers = counted().answers if counted is not None else None
    except RuntimeError as error:
        say(f"warning   {word_counts.NAME} is left out, since it failed: {error}")
        return rules
    return rules if answers is None else {**rules, word_counts.NAME: np.asarray(answers)}


RECIPE = Recipe(
    name="text",
    summary="classes of texts: an encoder fine-tuned, or trained from scratch",
    expects="one or two columns of text, and a column with the class",
    options=TextOptions,
    prepare=prepare,
    revive=revive,
)
