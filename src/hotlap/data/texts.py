"""Tokenizers of every kind as one: texts in, rows of tokens out, and what a tokenizer is made of, for a key.

A tokenizer of the `tokenizers` library has threads of its own. Forked processes do not inherit them and would wait
for them forever, so before such threads are used it is arranged that processes forked later do without. Nothing here
imports torch: processes that are started to tokenise need none.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hotlap.core.errors import DataError, HotlapError, StoreError, first_line, kind_of, shown

Numbers = np.ndarray[Any, Any]
Pairs = Sequence[str] | None

IDS, TYPES = "input_ids", "token_type_ids"
PARALLELISM = "TOKENIZERS_PARALLELISM"
_LIBRARY = ("transformers.tokenization_utils_base", "transformers.tokenization_utils_tokenizers")


class Rows(NamedTuple):
    """The tokens of some texts, one row behind the other."""

    fields: dict[str, Numbers]
    """int32, by name."""
    lengths: Numbers
    truncated: int


class Encoder(Protocol):
    """A tokenizer with its limit of tokens."""

    threaded: bool
    """Whether it uses all cores by itself."""
    takes_pairs: bool
    types_known: bool
    """Whether token types are wanted where there are any; else they are, where one of them is not 0."""

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The tokens of these texts, or pairs of texts."""

    def special_tokens(self, pair: bool) -> int:
        """How many tokens it adds to a text or a pair."""

    def identity(self) -> Any:
        """All that decides which tokens it gives, as parts of a key; StoreError where that cannot be known."""


def as_encoder(tokenizer: Any, most: int | None) -> Encoder | None:
    """The tokenizer as an encoder that gives at most so many tokens; None for what is no tokenizer."""
    # Who has a tokenizer of a library has imported the library.
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
    """Whether a library written in Rust gave up: Python does not count that among the errors of programs."""
    return type(error).__name__ == "PanicException"


def encode_chunk(encoder: Encoder, chunk: tuple[int, list[str], list[str] | None]) -> Rows:
    """The rows of some texts, of which the first is text number so-and-so; DataError names the one that failed."""
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
                told = f"texts[{start + at}] = {shown(text)} cannot be tokenised: {first_line(alone)}"
                raise DataError(told) from alone
        rows = f"texts[{start}] to texts[{start + len(texts) - 1}]"
        raise DataError(f"{rows} cannot be tokenised together: {first_line(error)}") from error


class RustEncoder:
    """A tokenizer of the `tokenizers` library, by itself or inside one of transformers.

    One inside is asked directly: transformers would have offsets made too, and Python lists of everything, which
    nobody needs here. It is left as it was found, one inside as a call of transformers leaves it.
    """

    threaded = takes_pairs = True

    def __init__(self, inner: Any, most: int | None, outer: Any = None) -> None:
        self._inner, self._most, self._outer = inner, most, outer
        self.types_known = outer is not None
        self._wants_types = outer is None or TYPES in outer.model_input_names
        forks_without_threads()
        if outer is not None:
            outer("")  # tokenizers of several languages turn to the one they read

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The tokens of these texts, by all cores."""
        given = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        with self._set_up():
            found = self._inner.encode_batch_fast(given)
        lengths = np.fromiter(map(len, found), np.int64, len(found))
        fields = {IDS: _flat((one.ids for one in found), lengths)}
        if self._wants_types:
            fields[TYPES] = _flat((one.type_ids for one in found), lengths)
        # What does not fit is kept as more rows behind a row; asked only of rows that are full.
        most = (self._inner.truncation or {}).get("max_length") if self._most is None else self._most
        full = (one for one, length in zip(found, lengths, strict=True) if most is not None and length >= most)
        return Rows(fields, lengths, sum(bool(one.overflowing) for one in full))

    def special_tokens(self, pair: bool) -> int:
        """As the library counts them."""
        return int(self._inner.num_special_tokens_to_add(pair))

    def identity(self) -> Any:
        """The tokenizer as it would be saved, with the limit in it."""
        import tokenizers

        try:
            with self._set_up():
                content = self._inner.to_str()
                whole = bool(self._inner.encode_special_tokens)
        except Exception as error:  # the library raises nothing more exact
            raise StoreError(f"the tokenizer cannot be written down: {first_line(error)}") from error
        return "tokenizers", tokenizers.__version__, content, whole, self._wants_types, self.types_known

    @contextmanager
    def _set_up(self) -> Iterator[None]:
        """With the limit and without padding; afterwards as it was."""
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
    """A tokenizer of transformers that is written in Python, or has a way of its own to be called."""

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
        # Rows that are full were cut, or happen to fit: without a limit they show it.
        full = [k for k, length in enumerate(lengths) if self._most is not None and length >= self._most]
        whole = self._called([texts[k] for k in full], pairs and [pairs[k] for k in full], None)[IDS] if full else []
        truncated = sum(len(ids) > int(lengths[k]) for k, ids in zip(full, whole, strict=True))
        return Rows(fields, lengths, truncated)

    def special_tokens(self, pair: bool) -> int:
        """As the library counts them."""
        return int(self._tokenizer.num_special_tokens_to_add(pair=pair))

    def identity(self) -> Any:
        """The files it would be saved as, and its code where that is not the library's."""
        import transformers

        tokenizer, kind = self._tokenizer, type(self._tokenizer)
        with tempfile.TemporaryDirectory() as folder:
            try:
                tokenizer.save_pretrained(folder)
            except Exception as error:  # a tokenizer of the user's own may do anything
                raise StoreError(f"{kind.__name__} cannot be saved: {first_line(error)}") from error
            files = {path.name: path for path in Path(folder).iterdir()}
            content = {name: path.read_bytes() for name, path in files.items() if path.is_file()}
        code = kind.__qualname__ if kind.__module__.startswith("transformers.") else kind
        settings = tokenizer.truncation_side, tokenizer.split_special_tokens, list(tokenizer.model_input_names)
        return "transformers", transformers.__version__, code, content, settings, self._most

    def _called(self, texts: list[str], pairs: list[str] | None, most: int | None) -> Any:
        limit = {"truncation": "longest_first", "max_length": most} if most is not None else {"truncation": False}
        with _without_a_line_for_each_pair():
            return self._tokenizer(texts, pairs, padding=False, return_attention_mask=False, verbose=False, **limit)


class FunctionEncoder:
    """Any function from a list of texts to a list of rows of ids; rows are cut at their end."""

    threaded = takes_pairs = False
    types_known = True

    def __init__(self, function: Callable[[list[str]], Any], most: int | None) -> None:
        self._function, self._most = function, most

    def __call__(self, texts: Sequence[str], pairs: Pairs) -> Rows:
        """The ids that the function gives for these texts."""
        given = self._function(list(texts))
        if isinstance(given, (str, bytes, dict)) or not hasattr(given, "__iter__"):
            raise DataError(f"the tokenizer gave {kind_of(given)}; a list with the ids of each text is wanted")
        whole = [_ids(row) for row in given]
        if len(whole) != len(texts):
            raise DataError(f"the tokenizer gave {len(whole)} rows for {len(texts)} texts; one for each is wanted")
        rows = [row[: self._most] for row in whole]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        flat = np.concatenate([np.zeros(0, np.int32), *rows])
        return Rows({IDS: flat}, lengths, sum(len(row) > len(cut) for row, cut in zip(whole, rows, strict=True)))

    def special_tokens(self, pair: bool) -> int:
        """None that anybody knows of."""
        return 0

    def identity(self) -> Any:
        """Its code, that of the functions it calls, and the values they use."""
        from hotlap.data.provenance import made_of

        return "function", made_of(self._function), self._most


@functools.cache
def forks_without_threads() -> None:
    """From here on, tokenizers in forked processes use no threads, and do not warn about it; here they go on to.

    Where nothing is set the library sees to that itself, in old releases with a warning. Where the user has set the
    variable to true it does not, and a forked process would wait forever.
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
def _without_a_line_for_each_pair() -> Iterator[None]:
    """Without the line that a tokenizer in Python logs for every pair it cuts."""
    logger = logging.getLogger("transformers.tokenization_python")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_plain(kind: type) -> bool:
    """Whether a class of transformers leaves the tokenising as the library does it."""
    ways = (getattr(kind, name, None) for name in ("__call__", "_encode_plus", "_convert_encoding"))
    return all(isinstance(way, types.FunctionType) and way.__module__ in _LIBRARY for way in ways)


def _flat(rows: Iterator[list[int]] | list[list[int]], lengths: Numbers) -> Numbers:
    return np.fromiter(chain.from_iterable(rows), np.int32, int(lengths.sum()))


def _ids(row: Any) -> Numbers:
    """A row that a user's function gave, as int32; ValueError where it holds anything but ids."""
    ids = np.asarray(row)
    if ids.size == 0:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"the tokenizer gave {shown(row)}; a list of whole numbers from 0 on is wanted")
    return ids.astype(np.int32)
