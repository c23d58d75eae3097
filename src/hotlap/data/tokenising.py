"""Texts tokenised once, on all cores, by any kind of tokenizer, and kept in the cache.

A tokenizer of the `tokenizers` library has its own threads. A forked process does not inherit them and would wait for
them forever, so hotlap turns them off in processes that are forked later. This file imports torch only where it needs
it: without torch the processes that tokenise start in a tenth of the time.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from hotlap.core.errors import DataError, HotlapError, StoreError, first_few, first_line, kind_of, listed, shown
from hotlap.core.terminal import logger
from hotlap.core.units import show_seconds
from hotlap.data.parallel import parallel_map

if TYPE_CHECKING:
    from torch import Tensor

    from hotlap.store.cache import Cache, CacheEntry

log = logger(__name__)

Progress = Callable[[int, int], None]
"""A function of texts done and texts in all; for cached tokens hotlap calls it once, at the end."""

Numbers = np.ndarray[Any, Any]
Pairs = Sequence[str] | None

IDS, TYPES = "input_ids", "token_type_ids"
PARALLELISM = "TOKENIZERS_PARALLELISM"
_LIBRARY = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")


class Rows(NamedTuple):
    """The tokens of some texts, joined."""

    fields: dict[str, Numbers]
    """int32, by name."""
    lengths: Numbers
    truncated: int


class Encoder(Protocol):
    """A tokenizer with its limit of tokens."""

    threaded: bool
    """Whether it uses all cores itself."""
    takes_pairs: bool
    types_known: bool
    """Whether the caller wants token types if there are any; otherwise only if one of them is not 0."""

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The tokens of these texts, or pairs of texts."""

    def special_tokens(self, pair: bool) -> int:
        """How many tokens it adds to a text or a pair."""

    def identity(self) -> Any:
        """Everything that decides which tokens it gives, as parts of a key; StoreError if no key can hold it."""


def as_encoder(tokenizer: Any, most: int | None) -> Encoder | None:
    """The tokenizer as an encoder that gives at most `most` tokens; None for anything else."""
    # A tokenizer of a library shows that the library is imported.
    base = getattr(sys.modules.get("transformers.tokenization_utils_base"), "PreTrainedTokenizerBase", ())
    rust = getattr(sys.modules.get("tokenizers"), "Tokenizer", ())
    if isinstance(tokenizer, base):
        if tokenizer.is_fast and _is_plain(type(tokenizer)):
            return RustEncoder(tokenizer.backend_tokenizer, most, tokenizer)
        return CallEncoder(tokenizer, most)
    if isinstance(tokenizer, rust):
        return RustEncoder(tokenizer, most)
    return FunctionEncoder(tokenizer, most) if callable(tokenizer) and not isinstance(tokenizer, type) else None


def is_panic(error: BaseException) -> bool:
    """Whether a Rust library panicked; that is a BaseException in Python."""
    return type(error).__name__ == "PanicException"


def encode_chunk(encoder: Encoder, chunk: tuple[int, list[str], list[str] | None]) -> Rows:
    """The rows of a chunk: (number of the first text, texts, pairs); DataError names the text that failed."""
    start, texts, pairs = chunk
    try:
        return encoder(texts, pairs)
    except HotlapError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        for at, text in enumerate(texts):
            try:
                encoder([text], pairs and [pairs[at]])
            except BaseException as alone:
                if not isinstance(alone, Exception) and not is_panic(alone):
                    raise
                problem = f"texts[{start + at}] = {shown(text)} cannot be tokenised: {first_line(alone)}"
                raise DataError(problem) from alone
        rows = f"texts[{start}] to texts[{start + len(texts) - 1}]"
        raise DataError(f"{rows} cannot be tokenised together: {first_line(error)}") from error


class RustEncoder:
    """A tokenizer of the `tokenizers` library, alone or inside one of transformers.

    hotlap calls the inner one directly: transformers would also compute offsets and make Python lists of everything.
    Afterwards its settings are as before, those of an inner one as a call of transformers leaves them.
    """

    threaded = takes_pairs = True

    def __init__(self, inner: Any, most: int | None, outer: Any = None) -> None:
        self._inner, self._most, self._outer = inner, most, outer
        self.types_known = outer is not None
        self._wants_types = outer is None or TYPES in outer.model_input_names
        forks_without_threads()
        if outer is not None:
            outer("")  # tokenizers of several languages choose the source language

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The tokens of these texts, on all cores."""
        given = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        with self._set_up():
            found = self._inner.encode_batch_fast(given)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        fields = {IDS: _flat((one.ids for one in found), lengths)}
        if self._wants_types:
            fields[TYPES] = _flat((one.type_ids for one in found), lengths)
        # The library keeps what does not fit as further rows; only full rows can have them.
        most = (self._inner.truncation or {}).get("max_length") if self._most is None else self._most
        full = (one for one, length in zip(found, lengths, strict=True) if most is not None and length >= most)
        return Rows(fields, lengths, sum(bool(one.overflowing) for one in full))

    def special_tokens(self, pair: bool) -> int:
        """The number of tokens that the library adds."""
        return int(self._inner.num_special_tokens_to_add(pair))

    def identity(self) -> Any:
        """The tokenizer in its saved form, with the limit."""
        import tokenizers

        try:
            with self._set_up():
                content = self._inner.to_str()
                whole = bool(self._inner.encode_special_tokens)
        except Exception as error:  # the library raises plain exceptions
            raise StoreError(f"the tokenizer cannot be saved: {first_line(error)}") from error
        return "tokenizers", tokenizers.__version__, content, whole, self._wants_types, self.types_known

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        """Inside, the tokenizer has the limit and no padding; afterwards its own settings."""
        inner, outer = self._inner, self._outer
        cut, padded, split = inner.truncation, inner.padding, inner.encode_special_tokens
        own = {} if outer is not None or cut is None else {key: cut[key] for key in ("strategy", "direction")}
        try:
            if outer is not None:
                inner.encode_special_tokens = outer.split_special_tokens
                own = {"direction": outer.truncation_side}
                inner.no_truncation()
            if self._most is not None:
                inner.enable_truncation(self._most, **own)
            inner.no_padding()
            yield
        finally:
            inner.encode_special_tokens = split
            if cut is None:
                inner.no_truncation()
            else:
                inner.enable_truncation(**cut)
            if padded is not None:
                inner.enable_padding(**padded)


class CallEncoder:
    """A tokenizer of transformers that is written in Python or overrides how it is called."""

    takes_pairs = types_known = True

    def __init__(self, tokenizer: Any, most: int | None) -> None:
        self._tokenizer, self._most = tokenizer, most
        self.threaded = bool(tokenizer.is_fast)
        if self.threaded:
            forks_without_threads()

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The tokens of these texts."""
        texts, pairs = list(texts), None if pairs is None else list(pairs)
        found = self._called(texts, pairs, self._most)
        lengths = np.fromiter(map(len, found[IDS]), np.int64, len(texts))
        fields = {name: _flat(found[name], lengths) for name in (IDS, TYPES) if name in found}
        # A full row was cut or just fits: tokenise it again without a limit.
        full = [k for k, length in enumerate(lengths) if self._most is not None and length >= self._most]
        whole = self._called([texts[k] for k in full], pairs and [pairs[k] for k in full], None)[IDS] if full else []
        truncated = sum(len(ids) > int(lengths[k]) for k, ids in zip(full, whole, strict=True))
        return Rows(fields, lengths, truncated)

    def special_tokens(self, pair: bool) -> int:
        """The number of tokens that the library adds."""
        return int(self._tokenizer.num_special_tokens_to_add(pair=pair))

    def identity(self) -> Any:
        """Its saved files, and its code where that is not the library's."""
        import transformers

        tokenizer, kind = self._tokenizer, type(self._tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            try:
                tokenizer.save_pretrained(folder)
            except Exception as error:  # a tokenizer of the user may raise anything
                raise StoreError(f"{kind.__name__} cannot be saved: {first_line(error)}") from error
            files = {path.name: path for path in Path(folder).iterdir()}
            content = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
        code = kind.__qualname__ if kind.__module__.startswith("transformers.") else kind
        settings = tokenizer.truncation_side, tokenizer.split_special_tokens, list(tokenizer.model_input_names)
        return "transformers", transformers.__version__, code, content, settings, self._most

    def _called(self, texts: list[str], pairs: list[str] | None, most: int | None) -> Any:
        limit = {"truncation": "longest_first", "max_length": most} if most is not None else {"truncation": False}
        with _quiet_pairs():
            return self._tokenizer(texts, pairs, padding=False, return_attention_mask=False, verbose=False, **limit)


class FunctionEncoder:
    """A function from a list of texts to a list of rows of ids; hotlap cuts rows at their end."""

    threaded = takes_pairs = False
    types_known = True

    def __init__(self, function: Callable[[list[str]], Any], most: int | None) -> None:
        self._function, self._most = function, most

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The ids that the function gives for these texts."""
        given = self._function(list(texts))
        if isinstance(given, (str, bytes, dict)) or not hasattr(given, "__iter__"):
            raise DataError(f"the tokenizer gave {kind_of(given)}; it must give a list with the ids of each text")
        whole = [_ids(row) for row in given]
        if len(whole) != len(texts):
            raise DataError(
                f"the tokenizer gave {len(whole)} rows for {len(texts)} texts; it must give one row for each"
            )
        rows = [row[: self._most] for row in whole]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.concatenate([np.zeros(0, np.int32), *rows])
        return Rows({IDS: flat}, lengths, sum(len(row) > len(cut) for row, cut in zip(whole, rows, strict=True)))

    def special_tokens(self, pair: bool) -> int:
        """0: hotlap cannot know."""
        return 0

    def identity(self) -> Any:
        """The hash of its code and of everything that code uses; StoreError names what a hash cannot know."""
        from hotlap.data.content_keys import ContentKeys  # imports torch

        keys = ContentKeys()
        content = keys.key("the tokenizer", self._function)
        if keys.unknown:
            raise StoreError(next(iter(keys.unknown)))
        return "function", content, self._most


@functools.cache
def forks_without_threads() -> None:
    """From now on tokenizers use no threads in forked processes, without a warning; in this process they still do.

    The library does this itself unless the user sets the variable to true; old releases warn. With the variable set, a
    forked process would wait forever.
    """
    was: list[str | None] = []

    def before() -> None:
        was.append(os.environ.get(PARALLELISM))
        os.environ[PARALLELISM] = "false"

    def after() -> None:
        value = was.pop()
        if value is None:
            os.environ.pop(PARALLELISM, None)
        else:
            os.environ[PARALLELISM] = value

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=after)


@contextmanager
def _quiet_pairs() -> Iterator[None]:
    """Inside, a tokenizer in Python logs no line for each pair that it cuts."""
    logger = logging.getLogger("transformers.tokenization_python")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_plain(kind: type) -> bool:
    """Whether a class of transformers tokenises as the library does."""
    ways = (getattr(kind, name, None) for name in ("__call__", "_encode_plus", "_convert_encoding"))
    return all(isinstance(way, types.FunctionType) and way.__module__ in _LIBRARY for way in ways)


def _flat(rows: Iterator[list[int]] | list[list[int]], lengths: Numbers) -> Numbers:
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))


def _ids(row: Any) -> Numbers:
    """A row from a user's function as int32; ValueError if it holds anything but ids."""
    ids = np.asarray(row)
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"the tokenizer gave {shown(row)}; it must give whole numbers of at least 0")
    return ids.astype(np.int32)


KIND = "tokens"
FORMAT = 1
"""Version of the stored form; a change makes old cache entries miss."""
CHUNK = 4096
"""Texts in a chunk for a tokenizer with threads: enough for all threads, few enough to show progress."""
SLOW_CHUNK = 128
"""Texts in a chunk for a tokenizer in several processes."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of many texts, joined, as `hotlap.Sequences(fields, offsets=offsets)` takes them."""

    fields: dict[str, Tensor]
    """int32, by the names of model inputs: input_ids, and token_type_ids if the tokenizer gives them."""
    offsets: Tensor
    """int64: the start of each text, and the end of the last one."""
    truncated: int
    """Texts longer than the limit."""
    reused: bool
    """Whether the tokens come from the cache."""
    took_s: float
    saved_s: float
    """Seconds that the cache saved; 0 if hotlap tokenised the texts now."""
    not_kept: str = ""
    """Why the cache does not keep the tokens; empty if it does."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def line(self) -> str:
        """A summary in one line."""
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
    """The tokens of all texts or pairs of texts, from the cache or tokenised now on all cores and then kept there.

    `tokenizer` is one of transformers or of tokenizers, or a function from a list of texts to a list of lists of ids.
    It gives at most `most` tokens a text; None leaves the limit to it. A pair loses tokens from its longer text first.
    hotlap leaves the tokenizer's settings as they were. The key holds the texts, the tokenizer and `most`. `cache` is
    None for hotlap's own, or False for none; without a usable cache tokenising goes on. Raises DataError with all
    mistakes, or with the row at which the tokenizer failed.
    """
    import torch

    began = time.perf_counter()
    encoder, first, second = _checked(texts, tokenizer, pairs, most)
    store, key, why_not = _cache_and_key(cache, encoder, first, second)
    entry = None if store is None else store.get_or_warn(KIND, key)
    if entry is not None:
        if progress is not None:
            progress(len(first), len(first))
        return _from_entry(entry, began)
    rows = _encoded(encoder, first, second, progress)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.lengths)])
    if offsets[-1] == 0:
        raise DataError(
            f"the tokenizer gave no token for any of {len(first):,} texts; check what it gives for one text"
        )
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
    return _keep(tokens, store, key) if store is not None else tokens


# --- the cache -------------------------------------------------------------------------------------


def _cache_and_key(
    cache: Cache | Literal[False] | None, encoder: Encoder, texts: list[str], pairs: list[str] | None
) -> tuple[Cache | None, str, str]:
    """The cache and the key of these tokens; or why there is no cache."""
    if cache is False:
        return None, "", "cache=False"
    from hotlap.store.cache import Cache, key_of  # imports torch

    try:
        parts = [None if part is None else _content(part) for part in (texts, pairs)]
        return cache or Cache(), key_of(KIND, FORMAT, encoder.identity(), parts), ""
    except StoreError as error:
        log.info("the cache does not keep the tokens: %s", error)
        return None, "", str(error)


def _content(texts: list[str]) -> tuple[Any, ...]:
    """Many texts in a form for a key: joined by the thousands, which is faster than one by one."""
    from hotlap.store.cache import key_of

    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    return lengths, [key_of("".join(texts[at : at + CHUNK])) for at in range(0, len(texts), CHUNK)]


def _from_entry(entry: CacheEntry, began: float) -> Tokens:
    tensors, values = dict(entry.tensors), entry.values
    offsets = tensors.pop("offsets")
    return Tokens(
        fields={name: tensors[name] for name in values.get("fields", sorted(tensors))},  # the file keeps no order
        offsets=offsets,
        truncated=values["truncated"],
        reused=True,
        took_s=time.perf_counter() - began,
        saved_s=values["took_s"],
    )


def _keep(tokens: Tokens, cache: Cache, key: str) -> Tokens:
    """The same tokens, after putting them into the cache."""
    figures = {"truncated": tokens.truncated, "took_s": tokens.took_s}
    facts = {"texts": len(tokens), "tokens": int(tokens.offsets[-1]), **figures}
    values = {**figures, "fields": list(tokens.fields)}
    try:
        cache.put(KIND, key, tensors={**tokens.fields, "offsets": tokens.offsets}, values=values, facts=facts)
    except StoreError as error:
        log.warning("the cache does not keep the tokens: %s", error)
        return replace(tokens, not_kept=str(error))
    return tokens


# --- tokenising ------------------------------------------------------------------------------------


def _encoded(encoder: Encoder, texts: list[str], pairs: list[str] | None, progress: Progress | None) -> Rows:
    """All rows, from the tokenizer's own threads or from processes."""
    size, total = CHUNK if encoder.threaded else SLOW_CHUNK, len(texts)
    starts = range(0, total, size)
    chunks = [(at, texts[at : at + size], pairs and pairs[at : at + size]) for at in starts]

    def report(done: int, _: int) -> None:
        if progress is not None:
            progress(min(done * size, total), total)

    # The threads use all cores already.
    workers = 1 if encoder.threaded else None
    found = parallel_map(functools.partial(encode_chunk, encoder), chunks, workers=workers, progress=report)
    fields = {name: np.concatenate([rows.fields[name] for rows in found]) for name in found[0].fields}
    if not encoder.types_known and not fields[TYPES].any():
        del fields[TYPES]  # models assume zeros, and some take no token types
    return Rows(fields, np.concatenate([rows.lengths for rows in found]), sum(rows.truncated for rows in found))


# --- arguments -------------------------------------------------------------------------------------


def _checked(texts: Any, tokenizer: Any, pairs: Any, most: Any) -> tuple[Encoder, list[str], list[str] | None]:
    """The tokenizer and the texts; DataError lists all mistakes."""
    from hotlap.core.job_checks import is_whole  # imports torch

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
    """Texts as a list; appends its problems to `wrong`."""
    if isinstance(texts, (str, bytes)):
        wrong.append(f"{name} is the text {shown(texts)}; give a list of texts")
        return []
    if isinstance(texts, Mapping) or getattr(texts, "ndim", 1) != 1 or not hasattr(texts, "__iter__"):
        wrong.append(f"{name} is {kind_of(texts)}; give a list of texts, or one column, as df['text']")
        return []
    given = list(texts)
    bad = [at for at, text in enumerate(given) if not isinstance(text, str)]
    if bad:
        rows = first_few([f"{name}[{at}]" for at in bad])
        what = "is" if len(bad) == 1 else "are"
        value = kind_of(given[bad[0]])
        wrong.append(f"{rows} {what} {value}, not text; leave out such rows or replace them by ''")
    elif not given:
        wrong.append(f"{name} is empty; give at least one text")
    return given


def _no_tokenizer(value: Any) -> str:
    if isinstance(value, str):
        return f"tokenizer is the name {shown(value)}; load it: AutoTokenizer.from_pretrained({shown(value)})"
    return f"tokenizer is {kind_of(value)}; give one of transformers or tokenizers, or a function of a list of texts"
