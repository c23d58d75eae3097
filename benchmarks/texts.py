"""What the benchmarks train on texts: two encoders of `transformers`, and texts of several lengths.

Weights are first weights, tokens are drawn or read from a file. DeBERTa's vocabulary is cut from 128,100 tokens to
32,000: the other rows are never looked up, and an optimizer that goes through them all would be what is timed.
"""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotlap
from benchmarks.work import HELD_OUT, Work
from hotlap.data.dataset import as_source
from hotlap.data.order import Order
from hotlap.data.sequences import LengthOrder, round_up, with_chosen_widths

Batch = dict[str, Tensor]
"""`input_ids`, `attention_mask`, `labels`, and `numbers` where there are any."""

BERT_TOKENS, DEBERTA_TOKENS, FILE_TOKENS = 30_522, 32_000, 8_000
"""Sizes of vocabularies."""
NUMBERS = 28
"""Numeric features beside a text."""
TELLING = 30
"""The most frequent tokens: pairs of which a text has one or the other."""
SPREAD = 0.6
"""Of the logarithm of lengths."""
MOST_POSITIONS = 512
"""Tokens of a file's text at most: no more positions have an embedding."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LR = 1e-5
"""Of both encoders, whose weights are random at first, and whose rate does not rise slowly: with 5e-5 two
of nine trainings of BERT ended at chance, one in fp32 and one in bf16 (`results/bert-rate-h200.txt`)."""
LONG_RUN = 24_000
"""Texts where a training takes a minute or more, so that it sees each of them a few times."""


# --- texts ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Texts:
    """Texts as tokens, one behind the other, with a row of each column for each text."""

    tokens: Tensor
    lengths: Tensor
    columns: Batch

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self) -> list[Tensor]:
        """The tokens of each text."""
        return list(self.tokens.split(self.lengths.tolist()))  # type: ignore[no-untyped-call]

    def sequences(self, widths: Sequence[int] | None = None) -> hotlap.Sequences:
        """As hotlap takes them."""
        offsets = F.pad(self.lengths.cumsum(0), (1, 0))
        return hotlap.Sequences({"input_ids": self.tokens}, columns=self.columns, offsets=offsets, widths=widths)

    def batches(self, size: int, device: torch.device) -> Iterator[Batch]:
        """All of them in their order, padded to a multiple of 32."""
        rows = self.rows()
        for start in range(0, len(rows), size):
            chosen = slice(start, start + size)
            some = [
                {"input_ids": row, **{name: column[start + number] for name, column in self.columns.items()}}
                for number, row in enumerate(rows[chosen])
            ]
            yield {name: part.to(device) for name, part in padded(some, multiple=32).items()}


class TextData(NamedTuple):
    """Texts to train on and texts to judge by."""

    train: Texts
    held: Texts

    @property
    def longest(self) -> int:
        """Tokens of the longest text, which is what everybody pads to who pads to the maximum."""
        return int(max(self.train.lengths.max(), self.held.lengths.max()))


def padded(samples: Sequence[Batch], *, width: int | None = None, multiple: int = 1) -> Batch:
    """Samples as a batch: padded to a width, or to the longest among them, round_up up to a multiple."""
    rows = [sample["input_ids"] for sample in samples]
    width = width or -(-max(map(len, rows)) // multiple) * multiple
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = row
        mask[number, : len(row)] = 1
    others = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0] if name != "input_ids"}
    return {"input_ids": ids, "attention_mask": mask, **others}


@functools.cache
def drawn(samples: int, *, median: int, longest: int, vocabulary: int, numbers: int = 0) -> TextData:
    """Random texts: lengths are log-normal and cut at the longest, tokens as frequent as words are.

    A text's class is which of each pair of frequent tokens it has. Where there are numbers, what is learnt is one too:
    a fixed teacher adds up those beside a text, and the class as 1 or -1.
    """
    generator = torch.Generator().manual_seed(4)
    count = samples + HELD_OUT
    lengths = median * torch.exp(SPREAD * torch.randn(count, generator=generator))
    lengths = lengths.round().long().clamp(min(8, median), longest)
    lengths[0] = longest
    chance = torch.rand(int(lengths.sum()), generator=generator, dtype=torch.float64)
    tokens = (vocabulary**chance).long()  # 1 … vocabulary - 1, the k-th about as often as 1 / k; 0 is padding
    classes = torch.randint(2, (count,), generator=generator)
    own = torch.repeat_interleave(classes, lengths)
    tokens = torch.where(tokens <= TELLING, (tokens - 1) // 2 * 2 + 1 + own, tokens)
    columns = {"labels": classes}
    if numbers:
        beside = torch.randn(count, numbers, generator=generator)
        teacher = torch.randn(numbers, generator=generator) / numbers**0.5
        columns = {"numbers": beside, "labels": 2.0 * classes - 1 + beside @ teacher}
    return _split(tokens, lengths, columns)


@functools.cache
def read(file: Path, held: int = HELD_OUT) -> TextData:
    """The texts of a file with the columns class, title and description, and no header; classes are what is learnt.

    Tokens are those of a WordPiece vocabulary of 8,000 that is trained on the file itself. The last texts are held
    out.
    """
    with file.open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.reader(lines) if row]
    short = next((number for number, row in enumerate(rows, 1) if len(row) < 3), None)
    if short is not None or len(rows) <= held:
        seen = f"row {short} has fewer" if short is not None else f"it has {len(rows):,} rows, {held:,} are held out"
        raise ValueError(f"{seen}; give a CSV file with the columns class, title and description")
    classes = sorted({row[0] for row in rows})
    found = _tokenised([f"{row[1]} {row[2]}" for row in rows])
    columns = {"labels": torch.tensor([classes.index(row[0]) for row in rows])}
    return _split(torch.from_numpy(np.concatenate(found)), torch.tensor([len(one) for one in found]), columns, held)


def _tokenised(texts: list[str]) -> list[np.ndarray[Any, Any]]:
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=FILE_TOKENS, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    first, last = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")
    return [
        np.array([first, *found.ids[: MOST_POSITIONS - 2], last], dtype=np.int64)
        for found in tokenizer.encode_batch(texts)
    ]


def _split(tokens: Tensor, lengths: Tensor, columns: Batch, held: int = HELD_OUT) -> TextData:
    kept = len(lengths) - held
    end = int(lengths[:kept].sum())
    return TextData(
        Texts(tokens[:end], lengths[:kept], {name: column[:kept] for name, column in columns.items()}),
        Texts(tokens[end:], lengths[kept:], {name: column[kept:] for name, column in columns.items()}),
    )


# --- models --------------------------------------------------------------------------------------------


def bert(*, classes: int = 2, vocabulary: int = BERT_TOKENS, **sizes: Any) -> nn.Module:
    """BERT-base, or one of other sizes, with a head for classes; dropout 0.1 as it is given out."""
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(num_labels=classes, vocab_size=vocabulary, **sizes)
    model: nn.Module = transformers.BertForSequenceClassification(config)
    return model


def bert_output(model: nn.Module, batch: Batch) -> Tensor:
    """Scores of the classes."""
    scores: Tensor = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return scores


def bert_loss(model: nn.Module, batch: Batch) -> Tensor:
    """As a user writes it."""
    return F.cross_entropy(bert_output(model, batch), batch["labels"])


def share_right(scores: Tensor, labels: Tensor) -> Tensor:
    """What a loop tells of a batch beside the loss."""
    return (scores.argmax(1) == labels).float().mean()


DEBERTA_V3 = {
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}


class Priced(nn.Module):
    """A number from a text and the numbers beside it: the encoder's mean state, and a small head over both."""

    def __init__(self, encoder: nn.Module, width: int, numbers: int = NUMBERS) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(width + numbers, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, numbers: Tensor) -> Tensor:
        """A number for each text."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return self.priced(states, attention_mask, numbers)

    def priced(self, states: Tensor, mask: Tensor, numbers: Tensor) -> Tensor:
        """The same from the encoder's states."""
        weights = mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        found: Tensor = self.head(torch.cat([mean, numbers], 1))
        return found.squeeze(1)

    def gradient_checkpointing_enable(self) -> None:
        """As models of the library have it."""
        self.encoder.gradient_checkpointing_enable()  # type: ignore[operator]


def deberta(*, vocabulary: int = DEBERTA_TOKENS, **sizes: Any) -> nn.Module:
    """DeBERTa of the shape of v3-base, or of other sizes, with numbers and a head for one number."""
    transformers = importlib.import_module("transformers")
    config = transformers.DebertaV2Config(
        **{"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
        | DEBERTA_V3
        | {"vocab_size": vocabulary, **sizes}
    )
    return Priced(transformers.DebertaV2Model(config), config.hidden_size)


def priced_output(model: nn.Module, batch: Batch) -> Tensor:
    """Prices."""
    prices: Tensor = model(batch["input_ids"], batch["attention_mask"], batch["numbers"])
    return prices


def priced_loss(model: nn.Module, batch: Batch) -> Tensor:
    """As a user writes it."""
    return F.smooth_l1_loss(priced_output(model, batch), batch["labels"])


def mean_error(prices: Tensor, labels: Tensor) -> Tensor:
    """What a loop tells of a batch beside the loss."""
    return (prices - labels).abs().mean()


# --- works ---------------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What is asked of a model: its output, the loss of that, what else a loop tells; and its loss as a Rig has it."""

    output: Callable[[nn.Module, Batch], Tensor]
    judged: Callable[[Tensor, Tensor], Tensor]
    told: Callable[[Tensor, Tensor], Tensor]
    loss: Callable[[nn.Module, Batch], Tensor]


CLASSES = Task(bert_output, F.cross_entropy, share_right, bert_loss)
PRICES = Task(priced_output, F.smooth_l1_loss, mean_error, priced_loss)


@dataclass(frozen=True, kw_only=True)
class TextWork(Work):
    """A work whose `data` is a `TextData`; hotlap may reorder it, so that batches hold texts of similar length."""

    task: Task
    precision: str = "bf16"
    replay_steps: int = 1

    @property
    def loss(self) -> Callable[..., Any]:
        """As a Rig or a Job takes it."""
        return self.task.loss

    @property
    def epoch_batches(self) -> int:
        """Whole batches in an epoch."""
        return len(self.data().train) // self.batch

    def fed(self, column: str = "hotlap") -> tuple[Any, dict[str, Any]]:
        """Reordered with widths found; `by_width` with widths alone, `one_width` all as wide as the longest."""
        data = self.data()
        widths = (round_up(data.longest),) if column == "one_width" else None
        return data.train.sequences(widths), {"reorder": column not in ("one_width", "by_width")}

    def brought(self, *, drop_last: bool) -> dict[str, Any]:
        """Sequences, and the leave to reorder them; nothing else is told."""
        given, settings = self.fed()
        return {"data": given, "batch_size": self.batch, "drop_last": drop_last, **settings}

    def first_batch(self, device: torch.device) -> Batch:
        """Padded to a multiple of 32."""
        return next(self.data().train.batches(self.batch, device))

    def held_batches(self, device: torch.device) -> Iterator[tuple[Batch, int]]:
        """The texts kept apart, a batch at a time."""
        for batch in self.data().held.batches(self.batch, device):
            yield batch, len(batch["labels"])

    def judge(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of such a batch."""
        return self.task.loss(model, batch)


def bert_work(data: Callable[[], TextData], *, name: str = "BERT-base, batch 16", **settings: Any) -> TextWork:
    """BERT-base on some texts, with batches of 16."""
    return TextWork(
        name=name,
        model=functools.partial(bert, **settings),
        data=data,
        batch=16,
        lr=LR,
        task=CLASSES,
        lap_s=1.0,
        compiles="blocks",
    )


def text_works(samples: tuple[int, int] = (4_800, 1_600)) -> tuple[TextWork, ...]:
    """BERT-base and DeBERTa-base with numbers, on so many texts each; none where `transformers` is not installed.

    Those make 300 and 200 whole batches: epochs of two seconds or so, each of which is a lap.
    """
    if importlib.util.find_spec("transformers") is None:
        return ()
    return (
        bert_work(functools.partial(drawn, samples[0], median=49, longest=192, vocabulary=BERT_TOKENS)),
        TextWork(
            name="DeBERTa-base with numbers, batch 8",
            model=deberta,
            data=functools.partial(
                drawn, samples[1], median=120, longest=384, vocabulary=DEBERTA_TOKENS, numbers=NUMBERS
            ),
            batch=8,
            lr=LR,
            task=PRICES,
            lap_s=1.0,
        ),
    )


def file_work(file: Path) -> TextWork:
    """BERT-base on the texts of a file."""
    data = read(file)
    classes = int(data.train.columns["labels"].max()) + 1
    name = f"BERT-base on {file.name}, batch 16"
    return bert_work(lambda: data, name=name, classes=classes, vocabulary=FILE_TOKENS)


# --- padding -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Paddings:
    """How much of the batches of an epoch is padding, by how they are padded; and the widths that hotlap chooses."""

    texts: int
    median: int
    longest: int
    at_longest: float
    dynamic: float
    """Each batch padded to its own longest, in shuffled order."""
    by_width: float
    """To the next of a few widths, in the same order."""
    widths: tuple[int, ...]
    reordered: float
    """The same, with batches of similar length."""
    widths_reordered: tuple[int, ...]

    @classmethod
    def of(cls, work: TextWork) -> Paddings:
        """Of the first epoch of a work."""
        train, longest = work.data().train, work.data().longest
        lengths, source = train.lengths.numpy(), as_source(train.sequences())
        settings: dict[str, Any] = {"batch_size": work.batch, "drop_last": True}
        shuffled, by_length = Order(len(train), shuffled=True, **settings), LengthOrder(lengths, **settings)
        by_width, reordered = with_chosen_widths(source, shuffled)[1], with_chosen_widths(source, by_length)[1]
        assert by_width is not None
        assert reordered is not None
        epoch = shuffled.epoch(0).indices.numpy()[: work.epoch_batches * work.batch]
        batches = lengths[epoch].reshape(-1, work.batch)
        return cls(
            texts=len(train),
            median=int(train.lengths.median()),
            longest=longest,
            at_longest=1 - float(batches.mean()) / longest,
            dynamic=1 - float(batches.mean()) / float(batches.max(1).mean()),
            by_width=by_width.share,
            widths=by_width.widths,
            reordered=reordered.share,
            widths_reordered=reordered.widths,
        )

    def lines(self, name: str) -> Iterator[str]:
        """For people."""
        indent = " " * len(name)
        yield f"{name}: {self.texts:,} texts, the median has {self.median} tokens, the longest {self.longest}"
        yield (
            f"{indent}  padding {self.at_longest:.1%} at the longest of all, {self.dynamic:.1%} at each batch's "
            "longest in shuffled order"
        )
        for what, share, widths in (
            ("by widths alone", self.by_width, self.widths),
            ("reordered", self.reordered, self.widths_reordered),
        ):
            yield f"{indent}  hotlap {what}: {share:.1%}, {len(widths)} widths: {', '.join(map(str, widths))}"
