"""Texts as an encoder takes them, and its answers: for the recipe `text`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError
from hotlap.data.sequences import SequenceColumns, Sequences
from hotlap.data.tokenising import tokenised
from hotlap.recipes.encoders import TOKENIZER, Encoder, encoder_in
from hotlap.recipes.onnx_files import write_onnx
from hotlap.recipes.reading import now_and_then
from hotlap.recipes.recipe import Asked, Say
from hotlap.recipes.tables import Table, read_table

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
