"""The recipe `text`: one or two columns of text → classes, by fine-tuning an encoder or training one from scratch."""

from __future__ import annotations

from collections.abc import Sequence
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
from hotlap.data.sequences import Sequences
from hotlap.machine.device import choose_device
from hotlap.recipes import checks, splits, word_counts
from hotlap.recipes.encoders import EncoderOptions, encoder_for
from hotlap.recipes.options import MOST, option, outside
from hotlap.recipes.reading import HEADERS, refuse, refuse_pictures, shown_table
from hotlap.recipes.recipe import Candidate, Numbers, Prepared, Recipe, Say
from hotlap.recipes.schedules import warm_up_and_cosine
from hotlap.recipes.scores import class_weights
from hotlap.recipes.tables import Table, read_table
from hotlap.recipes.text_columns import columns_of, target_of, target_problems
from hotlap.recipes.text_reader import TextReader, revive, texts_of, written_as_onnx
from hotlap.store.cache import Cache, key_of

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
        split = splits.by_group(np.asarray(group.texts()), options.valid_share, options.seed)
        train, held_out = ([texts[row] for row in rows] for rows in split)
        _warn_of_copies(train, held_out, f"give rows of one text the same {group.name}, or leave copies out", say)
    elif len(places) < len(texts):
        copies = len(texts) - len(places)
        say(f"copies    {copies:,} rows have the text of a row before them: all rows of a text are on one side")
        groups = np.asarray([places[text] for text in texts])
        split = splits.stratified_by_group(labels, groups, options.valid_share, options.seed)
    else:
        split = splits.stratified(labels, options.valid_share, options.seed)
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
