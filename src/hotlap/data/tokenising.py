"""Texts tokenised once: by all cores, with progress, and kept in the cache for the next run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError, StoreError, kind_of, listed, shown
from hotlap.core.job_checks import is_whole
from hotlap.core.terminal import logger
from hotlap.core.units import show_seconds
from hotlap.data.parallel import parallel_map
from hotlap.data.texts import TYPES, Encoder, Rows, as_encoder, encode_chunk
from hotlap.store.cache import Cache, Entry, key_of

log = logger(__name__)

Progress = Callable[[int, int], None]
"""Told how many texts are done, of how many; once at the end where they come from the cache."""

KIND = "tokens"
FORMAT = 1
"""What is kept has another form under another number."""
CHUNK = 4096
"""Texts at a time for a tokenizer with threads: enough for all of them, few enough to show progress."""
SLOW_CHUNK = 128
"""The same for one that is called by several processes."""
NAMED = 3
"""How many wrong rows an error names."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of many texts, one text behind the other: what `hotlap.Sequences(fields, offsets=offsets)` takes."""

    fields: dict[str, Tensor]
    """int32, by the names that models know: input_ids, and token_type_ids where the tokenizer gives them."""
    offsets: Tensor
    """int64: where each text begins, and as the last number the end."""
    truncated: int
    """How many texts were longer than the limit."""
    reused: bool
    """Whether they come from the cache."""
    took_s: float
    saved_s: float
    """What it took to make them, where they come from the cache; else 0."""
    not_kept: str = ""
    """Why the next run has to make them again; empty where it does not."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def line(self) -> str:
        """The tokenising in one line, for people."""
        whole = f"{len(self):,} texts → {int(self.offsets[-1]):,} tokens"
        cut = f" ({self.truncated:,} texts cut)" if self.truncated else ""
        if self.reused:
            return f"{whole}{cut}, from the cache, which saved {show_seconds(self.saved_s)}"
        kept = f", not kept: {self.not_kept}" if self.not_kept else ""
        return f"{whole}{cut} in {show_seconds(self.took_s)}{kept}"


def tokenised(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    pairs: Iterable[str] | None = None,
    most: int | None = None,
    cache: Cache | Literal[False] | None = None,
    progress: Progress | None = None,
) -> Tokens:
    """The tokens of all texts, or of pairs of texts: from the cache where they are, else made by all cores and kept.

    `tokenizer` is one of transformers or of tokenizers, or a function from a list of texts to a list of lists of ids.
    It gives at most `most` tokens a text; None leaves that to it. A pair loses from the longer of the two first. The
    tokenizer is left as it was. Tokens are kept by what is in the texts, in the tokenizer and in `most`, in `cache`
    (None: hotlap's own, False: none). A cache that cannot be used stops nothing. Raises DataError with all mistakes,
    or with the row that the tokenizer failed at.
    """
    began = time.perf_counter()
    encoder, first, second = _checked(texts, tokenizer, pairs, most)
    held, key, why_not = _place(cache, encoder, first, second)
    entry = _found(held, key)
    if entry is not None:
        if progress is not None:
            progress(len(first), len(first))
        return _from(entry, began)
    rows = _encoded(encoder, first, second, progress)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.lengths)])
    if offsets[-1] == 0:
        raise DataError(f"the tokenizer gave no token for any of {len(first):,} texts; look at what it gives for one")
    fields = {name: torch.from_numpy(field) for name, field in rows.fields.items()}
    tokens = Tokens(
        fields=fields,
        offsets=torch.from_numpy(offsets),
        truncated=rows.truncated,
        reused=False,
        took_s=time.perf_counter() - began,
        saved_s=0.0,
        not_kept=why_not,
    )
    return _kept(tokens, held, key) if held is not None else tokens


# --- the cache -------------------------------------------------------------------------------------


def _place(
    cache: Cache | Literal[False] | None, encoder: Encoder, texts: list[str], pairs: list[str] | None
) -> tuple[Cache | None, str, str]:
    """The cache, and the key of these tokens in it; without a cache, why there is none."""
    if cache is False:
        return None, "", "no cache was wanted"
    try:
        parts = [None if part is None else _content(part) for part in (texts, pairs)]
        return cache or Cache(), key_of(KIND, FORMAT, encoder.identity(), parts), ""
    except StoreError as error:
        log.info("the tokens are not cached: %s", error)
        return None, "", str(error)


def _content(texts: list[str]) -> tuple[Any, ...]:
    """What stands for many texts in a key: thousands joined at a time, which is faster than one by one."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return lengths, [key_of("".join(texts[at : at + CHUNK])) for at in range(0, len(texts), CHUNK)]


def _found(cache: Cache | None, key: str) -> Entry | None:
    if cache is None:
        return None
    try:
        return cache.get(KIND, key)
    except StoreError as error:
        log.warning("the cached tokens are not used: %s", error)
        return None


def _from(entry: Entry, began: float) -> Tokens:
    tensors, values = dict(entry.tensors), entry.values
    offsets = tensors.pop("offsets")
    return Tokens(
        fields={name: tensors[name] for name in values.get("fields", sorted(tensors))},  # files keep no order
        offsets=offsets,
        truncated=values["truncated"],
        reused=True,
        took_s=time.perf_counter() - began,
        saved_s=values["took_s"],
    )


def _kept(tokens: Tokens, cache: Cache, key: str) -> Tokens:
    """The same tokens, in the cache too where it takes them."""
    figures = {"truncated": tokens.truncated, "took_s": tokens.took_s}
    facts = {"texts": len(tokens), "tokens": int(tokens.offsets[-1]), **figures}
    values = {**figures, "fields": list(tokens.fields)}
    try:
        cache.put(KIND, key, tensors={**tokens.fields, "offsets": tokens.offsets}, values=values, facts=facts)
    except StoreError as error:
        log.warning("the tokens are not cached: %s", error)
        return replace(tokens, not_kept=str(error))
    return tokens


# --- tokenising ------------------------------------------------------------------------------------


def _encoded(encoder: Encoder, texts: list[str], pairs: list[str] | None, progress: Progress | None) -> Rows:
    """All rows, by the tokenizer's own threads or by processes."""
    size, total = CHUNK if encoder.threaded else SLOW_CHUNK, len(texts)
    starts = range(0, total, size)
    chunks = [(at, texts[at : at + size], pairs and pairs[at : at + size]) for at in starts]

    def told(done: int, _: int) -> None:
        if progress is not None:
            progress(min(done * size, total), total)

    # Where threads have all cores, processes would only take them away.
    workers = 1 if encoder.threaded else None
    found = parallel_map(functools.partial(encode_chunk, encoder), chunks, workers=workers, progress=told)
    fields = {name: np.concatenate([rows.fields[name] for rows in found]) for name in found[0].fields}
    if not encoder.types_known and not fields[TYPES].any():
        del fields[TYPES]  # models take them for zeros, and some take none
    return Rows(fields, np.concatenate([rows.lengths for rows in found]), sum(rows.truncated for rows in found))


# --- what is given ---------------------------------------------------------------------------------


def _checked(texts: Any, tokenizer: Any, pairs: Any, most: Any) -> tuple[Encoder, list[str], list[str] | None]:
    """The tokenizer and the texts, read once; DataError with all that is wrong."""
    wrong: list[str] = []
    first = _read("texts", texts, wrong)
    second = None if pairs is None else _read("pairs", pairs, wrong)
    if not wrong and second is not None and len(first) != len(second):
        wrong.append(f"there are {len(first):,} texts and {len(second):,} pairs; give one of these for each text")
    if most is not None and (not is_whole(most) or most < 1):
        wrong.append(f"most={shown(most)} must be a whole number of at least 1")
        most = None
    encoder = as_encoder(tokenizer, None if most is None else int(most))
    if encoder is None:
        wrong.append(_no_tokenizer(tokenizer))
    elif pairs is not None and not encoder.takes_pairs:
        wrong.append("a function takes no pairs; give a tokenizer of transformers or tokenizers, or join the texts")
    elif most is not None and most <= (added := encoder.special_tokens(pairs is not None)):
        wrong.append(
            f"most={most} leaves no room for text: the tokenizer adds {added} tokens; give {added + 1} or more"
        )
    if wrong or encoder is None:
        raise DataError(listed("the tokenising has", "mistake", wrong))
    return encoder, first, second


def _read(name: str, texts: Any, wrong: list[str]) -> list[str]:
    """Texts as a list; what is wrong with them is put to `wrong`."""
    if isinstance(texts, (str, bytes)):
        wrong.append(f"{name} is the text {shown(texts)}; give a list of texts")
        return []
    if isinstance(texts, Mapping) or getattr(texts, "ndim", 1) != 1 or not hasattr(texts, "__iter__"):
        wrong.append(f"{name} is {kind_of(texts)}; give a list of texts, or one column, as df['text']")
        return []
    given = list(texts)
    bad = [at for at, text in enumerate(given) if not isinstance(text, str)]
    if bad:
        rows = ", ".join(f"{name}[{at}]" for at in bad[:NAMED])
        more = f" and {len(bad) - NAMED:,} more" if len(bad) > NAMED else ""
        what = "is" if len(bad) == 1 else "are"
        value = kind_of(given[bad[0]])
        wrong.append(f"{rows}{more} {what} no text but {value}; leave out such rows, or put '' in their place")
    elif not given:
        wrong.append(f"{name} is empty; give at least one text")
    return given


def _no_tokenizer(value: Any) -> str:
    if isinstance(value, str):
        return f"tokenizer is the name {shown(value)}; load it: AutoTokenizer.from_pretrained({shown(value)})"
    return f"tokenizer is {kind_of(value)}; give one of transformers or tokenizers, or a function of a list of texts"
