"""Tokenising: every row as the tokenizer itself gives it, made once, and safe for processes forked later."""

import functools
import importlib
import itertools
import json
import logging
import math
import multiprocessing
import os
import pickle
import string
import sys
import textwrap
from datetime import UTC, datetime
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from hotlap.core.errors import DataError, StoreError
from hotlap.data import parallel, tokenising
from hotlap.data.tokenising import PARALLELISM, CallEncoder, encode_chunk, tokenised
from hotlap.store import disk
from hotlap.store.cache import Cache

WORDS = ["the", "cat", "sat", "on", "a", "mat", "##s", "##ting", *string.ascii_lowercase, "##a", "##t", "ü", "猫"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
TEXTS = ["the cat sat", "", "on a mat", "cats sitting on the mats 猫", "a", "the the the the the the the the"]
OTHERS = ["a mat", "the cat", "", "on", "the cat sat on the mat", "a a a a"]


def bare(words=tuple(WORDS), template="[CLS] $A [SEP]"):
    """A tokenizer of the tokenizers library, with pieces of words and special tokens."""
    vocabulary = {word: k for k, word in enumerate(dict.fromkeys([*SPECIAL, *words]))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template,
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def fast(**settings):
    """The same inside one of transformers."""
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    settings = {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **settings}
    return PreTrainedTokenizerFast(tokenizer_object=bare(), **names, **settings)


class Letters(PreTrainedTokenizer):
    """A tokenizer of transformers that is written in Python: one token for each letter."""

    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, letters=string.ascii_lowercase, **settings):
        self.letters = letters
        super().__init__(unk_token="?", letters=letters, **settings)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {letter: k for k, letter in enumerate(self.letters)} | self.added_tokens_encoder

    def _tokenize(self, text):
        if "!" in text:
            raise ValueError("this letter is too loud")
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token) if token in self.letters else len(self.letters)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()


class Loud(PreTrainedTokenizerFast):
    """One with a way of its own to be called."""

    def __call__(self, text, *rest, **settings):
        return super().__call__([one.upper() + " mat" for one in text] if isinstance(text, list) else text, **settings)


SHIFT = 1


def shifted(number):
    return number + SHIFT


def letters(texts):
    return [[shifted(ord(letter)) for letter in text] for text in texts]


def scaled(by, texts):
    return [[by * ord(letter) for letter in text] for text in texts]


def refusing(texts):
    if any("!" in text for text in texts):
        raise ValueError("this letter is too loud")
    return letters(texts)


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "cache")


def rows(tokens, field="input_ids"):
    """The rows of a field as lists."""
    ends = tokens.offsets.tolist()
    return [tokens.fields[field][start:end].tolist() for start, end in itertools.pairwise(ends)]


def own(tokenizer, texts, pairs=None, **limit):
    """What transformers gives for each text by itself."""
    pairs = [None] * len(texts) if pairs is None else [[pair] for pair in pairs]
    return [
        {name: value[0] for name, value in tokenizer([text], pair, **limit).items()}
        for text, pair in zip(texts, pairs, strict=True)
    ]


# --- every row as the tokenizer gives it -----------------------------------------------------------

texts_of_any_kind = st.lists(st.text(), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(texts_of_any_kind, st.one_of(st.none(), st.integers(3, 9)), st.randoms(use_true_random=False))
def test_rows_are_those_of_the_tokenizer_for_any_text_limit_and_pair(texts, most, random):
    pairs = random.sample(texts, len(texts)) if most is None or most > 3 else None
    texts, pairs = [*texts, "a"], None if pairs is None else [*pairs, "the"]
    limit = {} if most is None else {"truncation": True, "max_length": most}
    expected = own(fast(), texts, pairs, **limit)
    for tokenizer in (bare(), fast()):
        tokens = tokenised(texts, tokenizer, pairs=pairs, most=most, cache=False)
        assert rows(tokens) == [row["input_ids"] for row in expected]
        if "token_type_ids" in tokens.fields:
            assert rows(tokens, "token_type_ids") == [row["token_type_ids"] for row in expected]
        whole = own(fast(), texts, pairs)
        lengths = [len(row["input_ids"]) for row in whole]
        assert tokens.truncated == (0 if most is None else sum(length > most for length in lengths))
    assert tokens.offsets.dtype == torch.int64
    assert {field.dtype for field in tokens.fields.values()} == {torch.int32}


@settings(max_examples=30, deadline=None)
@given(texts_of_any_kind, st.one_of(st.none(), st.integers(1, 9)))
def test_rows_of_a_function_are_its_own_and_are_cut_at_the_end(texts, most):
    texts = [*texts, "a"]
    tokens = tokenised(texts, letters, most=most, cache=False)
    assert rows(tokens) == [row[:most] for row in letters(texts)]
    assert tokens.truncated == (0 if most is None else sum(len(text) > most for text in texts))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pairs", [None, OTHERS])
@pytest.mark.parametrize(
    "tokenizer",
    [fast, Letters, lambda **settings: Loud(tokenizer_object=bare(), **settings)],
    ids=["fast", "py", "own"],
)
def test_each_kind_of_transformers_tokenizer_cuts_as_it_does_itself(tokenizer, pairs, side):
    tokenizer = tokenizer(truncation_side=side)
    pairs = None if isinstance(tokenizer, Loud) else pairs
    for most in (4, 6, 100):
        tokens = tokenised(TEXTS, tokenizer, pairs=pairs, most=most, cache=False)
        expected = own(tokenizer, TEXTS, pairs, truncation="longest_first", max_length=most)
        assert rows(tokens) == [row["input_ids"] for row in expected]
        lengths = [len(row["input_ids"]) for row in own(tokenizer, TEXTS, pairs)]
        assert tokens.truncated == sum(length > most for length in lengths)


def test_token_types_come_where_the_tokenizer_gives_them():
    assert set(tokenised(TEXTS, fast(), cache=False).fields) == {"input_ids", "token_type_ids"}
    assert set(tokenised(TEXTS, fast(model_input_names=["input_ids"]), cache=False).fields) == {"input_ids"}
    # The tokenizers library always has them: they are kept where they tell something.
    assert set(tokenised(TEXTS, bare(), cache=False).fields) == {"input_ids"}
    assert set(tokenised(TEXTS, bare(), pairs=OTHERS, cache=False).fields) == {"input_ids", "token_type_ids"}


def test_a_tokenizer_is_left_as_it_was_and_its_own_padding_does_not_count():
    for tokenizer, inner in [(one := bare(), one), (two := fast(), two.backend_tokenizer)]:
        two("")  # a call of transformers takes padding away by itself
        inner.enable_padding(length=20)
        inner.enable_truncation(5, direction="left")
        before = inner.truncation, inner.padding
        if inner is tokenizer:
            # Without a limit from the caller its own one holds.
            tokens = tokenised(TEXTS, tokenizer, cache=False)
            assert max(map(len, rows(tokens))) == 5
            assert tokens.truncated == 2
            assert (inner.truncation, inner.padding) == before
        tokens = tokenised(TEXTS, tokenizer, most=7, cache=False)
        assert max(map(len, rows(tokens))) == 7
        assert rows(tokens)[1] == rows(tokenised([""], bare(), cache=False))[0]


def test_special_tokens_in_a_text_are_split_where_the_tokenizer_says_so():
    text = ["the [SEP] cat"]
    together, split = fast(), fast(split_special_tokens=True)
    assert rows(tokenised(text, together, cache=False)) == [together(text)["input_ids"][0]]
    assert rows(tokenised(text, split, cache=False)) == [split(text)["input_ids"][0]]
    assert rows(tokenised(text, split, cache=False)) != rows(tokenised(text, together, cache=False))


def test_many_chunks_are_joined_in_order_with_progress(monkeypatch):
    monkeypatch.setattr(tokenising, "CHUNK", 4)
    monkeypatch.setattr(tokenising, "SLOW_CHUNK", 4)
    monkeypatch.setattr(parallel, "GROUP_S", 0.0)
    texts = [f"cat {'mat ' * (k % 5)}" for k in range(10)]
    for tokenizer in (bare(), fast(), Letters(), letters):
        told = []
        whole = tokenised(
            texts, tokenizer, cache=False, progress=lambda done, total, told=told: told.append((done, total))
        )
        assert told == [(4, 10), (8, 10), (10, 10)]
        assert rows(whole) == [rows(tokenised([text], tokenizer, cache=False))[0] for text in texts]


QUIET = """
    def ids(texts):
        if any("!" in text for text in texts):
            raise ValueError("too loud")
        return [list(text.encode()) for text in texts]
"""


def test_functions_work_in_processes_and_errors_there_name_the_row(tmp_path, monkeypatch):
    real = parallel.parallel_map
    monkeypatch.setattr(tokenising, "parallel_map", lambda *given, **more: real(*given, **{**more, "workers": 2}))
    monkeypatch.setattr(tokenising, "SLOW_CHUNK", 3)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quiet_letters.py").write_text(textwrap.dedent(QUIET))
    ids = importlib.import_module("quiet_letters").ids
    texts = [f"{'abc' * (k % 4)}x" for k in range(20)]
    tokens = tokenised(texts, ids, most=5, cache=False)
    assert rows(tokens) == [list(text.encode()[:5]) for text in texts]
    assert tokens.truncated == 10
    with pytest.raises(DataError) as raised:
        tokenised([*texts[:13], "oh!", *texts], ids, cache=False)
    assert str(raised.value) == "texts[13] = 'oh!' cannot be tokenised: too loud"
    assert "in ids" in "".join(raised.value.__notes__)  # the lines of the other process
    assert not multiprocessing.active_children()


def test_a_python_tokenizer_of_transformers_can_be_sent_to_another_process():
    work = functools.partial(encode_chunk, CallEncoder(Letters(), 4))
    assert parallel.why_not_in_processes(work) is None
    there = pickle.loads(pickle.dumps(work))((0, TEXTS, OTHERS))
    here = work((0, TEXTS, OTHERS))
    assert there.fields["input_ids"].tolist() == here.fields["input_ids"].tolist()
    assert there.lengths.tolist() == here.lengths.tolist()


@pytest.mark.parametrize("tokenizer", [Letters(), Loud(tokenizer_object=bare()), letters])
def test_an_error_names_the_row(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenising, "SLOW_CHUNK", 3)
    broken = "b\ud800" if isinstance(tokenizer, Loud) else 5 * "b!"
    with pytest.raises(DataError, match=r"^texts\[7\] = 'b.* cannot be tokenised: "):
        tokenised([*"abcdefg", broken, "h"], refusing if tokenizer is letters else tokenizer, cache=False)


# --- made once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [bare, fast, Letters, lambda: letters, lambda: functools.partial(scaled, 2)])
def test_a_second_run_reuses_what_the_first_has_made(cache, tokenizer):
    first = tokenised(TEXTS, tokenizer(), most=5, cache=cache)
    second = tokenised(TEXTS, tokenizer(), most=5, cache=cache)
    assert (first.reused, second.reused) == (False, True)
    assert first.saved_s == 0
    assert second.saved_s == first.took_s
    assert first.not_kept == second.not_kept == ""
    assert first.truncated == second.truncated
    assert torch.equal(first.offsets, second.offsets)
    assert list(first.fields) == list(second.fields)
    assert all(torch.equal(first.fields[name], second.fields[name]) for name in first.fields)


@pytest.mark.parametrize("order", [["input_ids", "token_type_ids"], ["token_type_ids", "input_ids"]])
def test_fields_come_out_of_the_cache_in_the_order_in_which_they_went_in(order):
    """Files of tensors keep none; what is trained on must be known again."""
    tensors = {name: torch.zeros(3) for name in (*order, "offsets")}
    entry = SimpleNamespace(
        tensors=tensors, values={"truncated": 0, "took_s": 1.0, "fields": ["token_type_ids", "input_ids"]}
    )
    assert list(tokenising._from_entry(entry, 0.0).fields) == ["token_type_ids", "input_ids"]


def test_a_line_says_what_was_done_and_what_was_saved(cache):
    first = tokenised(TEXTS, bare(), most=5, cache=cache)
    assert first.line.startswith(f"6 texts → {int(first.offsets[-1])} tokens (2 texts cut) in ")
    second = tokenised(TEXTS, bare(), most=5, cache=cache)
    assert second.line.startswith(
        f"6 texts → {int(first.offsets[-1])} tokens (2 texts cut), from the cache, which saved "
    )
    assert tokenised(TEXTS, bare(), cache=False).line.endswith(", not kept: cache=False")


def test_a_cached_run_tells_progress_once(cache):
    told = []
    for _ in range(2):
        tokenised(TEXTS, bare(), cache=cache, progress=lambda *so_far: told.append(so_far))
    assert told == [(6, 6), (6, 6)]


@pytest.mark.parametrize(
    "other",
    [
        {"texts": ["the cats sat", *TEXTS[1:]]},
        {"texts": TEXTS[::-1]},
        {"texts": ["the cat sa", "t", *TEXTS[2:]]},
        {"texts": TEXTS[:-1], "pairs": OTHERS[:-1]},
        {"pairs": OTHERS[::-1]},
        {"pairs": None},
        {"most": 6},
        {"most": None},
        {"tokenizer": lambda: bare(words=["mat", *WORDS])},
        {"tokenizer": lambda: bare(template="[CLS] $A")},
        {"tokenizer": lambda: letters, "pairs": None},
        {"tokenizer": lambda: fast(truncation_side="left")},
        {"tokenizer": lambda: fast(split_special_tokens=True)},
        {"tokenizer": lambda: fast(model_input_names=["input_ids"])},
        {"tokenizer": Letters},
    ],
)
def test_every_ingredient_counts(cache, other):
    usual = {"texts": TEXTS, "tokenizer": fast, "pairs": OTHERS, "most": 7}
    asked = [usual, {**usual, **other}, usual]
    reused = [
        tokenised(one["texts"], one["tokenizer"](), pairs=one["pairs"], most=one["most"], cache=cache).reused
        for one in asked
    ]
    assert reused == [False, False, True]
    assert len(cache.list("tokens")) == 2


def test_what_a_tokenizer_was_used_for_before_does_not_count(cache):
    tokenizer = fast()
    assert not tokenised(TEXTS, tokenizer, most=5, cache=cache).reused
    tokenizer(TEXTS, padding=True, truncation=True, max_length=4)
    assert tokenised(TEXTS, tokenizer, most=5, cache=cache).reused


def test_a_python_tokenizer_counts_by_what_it_holds(cache):
    assert not tokenised(TEXTS, Letters(), cache=cache).reused
    assert not tokenised(TEXTS, Letters(letters="zyx"), cache=cache).reused
    assert tokenised(TEXTS, Letters(), cache=cache).reused


def test_a_function_counts_by_its_values_and_those_of_the_functions_it_calls(cache, monkeypatch):
    assert not tokenised(TEXTS, letters, cache=cache).reused
    monkeypatch.setattr(sys.modules[__name__], "SHIFT", 2)
    second = tokenised(TEXTS, letters, cache=cache)
    assert not second.reused
    assert rows(second) == letters(TEXTS)
    assert not tokenised(TEXTS, functools.partial(scaled, 2), cache=cache).reused
    assert not tokenised(TEXTS, functools.partial(scaled, 3), cache=cache).reused
    assert tokenised(TEXTS, letters, cache=cache).reused


class Holder:
    def __init__(self, shift=0):
        self.shift = shift

    def ids(self, texts):
        return [[one + self.shift for one in row] for row in letters(texts)]


HELD = Holder()


def by_an_object(texts):
    return HELD.ids(texts)


@pytest.mark.parametrize("of", [lambda shift: Holder(shift).ids, lambda shift: by_an_object])
def test_a_function_that_works_with_objects_counts_by_what_they_hold(cache, monkeypatch, of):
    found = []
    for shift in (0, 3, 0):
        monkeypatch.setattr(HELD, "shift", shift)
        found.append(tokenised(TEXTS, of(shift), cache=cache))
    assert [one.reused for one in found] == [False, False, True]
    assert rows(found[1]) == Holder(3).ids(TEXTS)


def by_the_clock(texts):
    return [[datetime.now(UTC).day] for _ in texts]


def by_a_generator(texts):
    return next(GENERATOR) * len(texts)


GENERATOR = ([[1]] for _ in range(9))


@pytest.mark.parametrize(
    ("function", "said"), [(by_a_generator, "a builtins.generator cannot be hashed"), (by_the_clock, "uses datetime")]
)
def test_a_function_that_uses_what_no_key_can_know_is_not_cached_and_that_is_said(cache, caplog, function, said):
    with caplog.at_level(logging.INFO):
        tokens = [tokenised(TEXTS, function, cache=cache) for _ in range(2)]
    assert [one.reused for one in tokens] == [False, False]
    assert said in tokens[0].not_kept
    assert tokens[0].not_kept in tokens[0].line
    assert "the cache does not keep the tokens" in caplog.text
    assert cache.list() == []


def test_a_tokenizer_with_parts_in_python_is_not_cached_and_works(cache):
    class Commas:
        def pre_tokenize(self, text):
            text.split(lambda n, part: part.split(Regex(","), "removed"))

    tokenizer = bare()
    tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Commas())
    tokens = tokenised(["the,cat", "mat"], tokenizer, cache=cache)
    assert rows(tokens) == [tokenizer.encode(text).ids for text in ("the,cat", "mat")]
    assert "the tokenizer cannot be saved" in tokens.not_kept


def test_a_damaged_entry_is_made_anew(cache):
    first = tokenised(TEXTS, bare(), cache=cache)
    path = cache.list("tokens")[0].path / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second = tokenised(TEXTS, bare(), cache=cache)
    assert not second.reused
    assert rows(second) == rows(first)
    assert tokenised(TEXTS, bare(), cache=cache).reused


def test_an_interrupted_run_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(tokenising, "CHUNK", 2)
    monkeypatch.setattr(parallel, "GROUP_S", 0.0)

    def interrupt(done, total):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenised(TEXTS, bare(), cache=cache, progress=interrupt)
    assert cache.list() == []

    def interrupt_write(event):
        if event == "after write":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), disk.watched(interrupt_write):
        tokenised(TEXTS, bare(), cache=cache)
    assert cache.list() == []
    assert not tokenised(TEXTS, bare(), cache=cache).reused
    assert tokenised(TEXTS, bare(), cache=cache).reused


def test_a_cache_that_cannot_be_used_stops_nothing(cache, monkeypatch):
    def full(*_, **__):
        raise StoreError("the disk is full")

    monkeypatch.setattr(cache, "put", full)
    tokens = tokenised(TEXTS, bare(), cache=cache)
    assert tokens.not_kept == "the disk is full"
    assert rows(tokens) == rows(tokenised(TEXTS, bare(), cache=False))
    monkeypatch.setattr(cache, "get", full)
    assert rows(tokenised(TEXTS, bare(), cache=cache)) == rows(tokens)


def test_without_a_cache_given_hotlaps_own_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "own"))
    assert [tokenised(TEXTS, bare()).reused for _ in range(2)] == [False, True]
    item = Cache(tmp_path / "own").list("tokens")[0]
    assert item.facts["texts"] == 6


# --- forks -----------------------------------------------------------------------------------------


FORKING = """
    import json, os, warnings
    warnings.simplefilter("error")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from torch.utils.data import DataLoader, Dataset
    from hotlap.data.tokenising import tokenised

    tokenizer = Tokenizer(models.WordLevel({"the": 0, "cat": 1}, unk_token="the"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()

    class TokenisedByWorkers(Dataset):
        def __len__(self):
            return 4
        def __getitem__(self, index):
            # More than one text: a single one needs no threads.
            return len(tokenizer.encode_batch(["the cat"] * 200))

    def threads():
        return len(os.listdir("/proc/self/task"))

    before = threads()
    tokenised(["the cat"] * 200, tokenizer, cache=False)
    more = threads() - before
    workers = DataLoader(TokenisedByWorkers(), None, num_workers=2, multiprocessing_context="fork", timeout=600)
    told = {"workers": list(workers), "here": os.environ.get("TOKENIZERS_PARALLELISM"), "threads": more}
    print(json.dumps(told))
"""


@pytest.mark.parametrize("value", [None, "false", "true"])
def test_workers_forked_after_tokenising_tokenise_without_threads_and_without_a_word(value, forks, tmp_path):
    # In a process of its own: the library's threads start once, and a worker that lacks them waits forever.
    environ = {name: text for name, text in os.environ.items() if name not in (PARALLELISM, "RAYON_NUM_THREADS")}
    environ |= {"RAYON_NUM_THREADS": "3"} | ({} if value is None else {PARALLELISM: value})
    ran = forks.run("-c", textwrap.dedent(FORKING), cwd=tmp_path, environment=environ)
    assert ran.stderr == ""
    told = json.loads(ran.stdout)  # no line beside it
    assert told["workers"] == [200] * 4
    assert told["here"] == value
    assert told["threads"] == (0 if value == "false" else 3)


# --- mistakes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"texts": "the cat"}, "texts is the text 'the cat'; give a list of texts"),
        ({"texts": []}, "texts is empty; give at least one text"),
        ({"texts": 5}, "texts is int 5; give a list of texts"),
        (
            {"texts": {"text": ["a"]}},
            "texts is dict {'text': ['a']}; give a list of texts, or one column, as df['text']",
        ),
        (
            {"texts": ["a", None]},
            "texts[1] is NoneType None, not text; leave out such rows or replace them by ''",
        ),
        (
            {"texts": ["a", math.nan, 3, "b", b"c", None]},
            "texts[1], texts[2], texts[4] and 1 more are float nan, not text; leave out such rows or replace them by",
        ),
        ({"pairs": ["a"] * 5}, "there are 6 texts and 5 pairs; give one of these for each text"),
        ({"pairs": ["a"] * 5 + [None]}, "pairs[5] is NoneType None, not text"),
        ({"pairs": OTHERS, "tokenizer": letters}, "a function takes no pairs"),
        ({"most": 2}, "most=2 leaves no room for text: the tokenizer adds 2 tokens; give 3 or more"),
        ({"most": 3, "pairs": OTHERS}, "most=3 leaves no room for text: the tokenizer adds 3 tokens; give 4 or more"),
        ({"most": 0}, "most=0 must be a whole number of at least 1"),
        ({"most": True}, "most=True must be a whole number of at least 1"),
        ({"tokenizer": "bert"}, "tokenizer is the name 'bert'; load it: AutoTokenizer.from_pretrained('bert')"),
        ({"tokenizer": Letters}, "tokenizer is the class Letters; give one of transformers or tokenizers"),
        ({"tokenizer": None}, "tokenizer is NoneType None"),
        ({"tokenizer": lambda texts: None}, "the tokenizer gave NoneType None; it must give a list with the ids"),
        (
            {"tokenizer": lambda texts: {"input_ids": []}},
            "the tokenizer gave dict {'input_ids': []}; it must give a list",
        ),
        ({"tokenizer": lambda texts: [[1]]}, "the tokenizer gave 1 rows for 6 texts; it must give one row for each"),
        ({"tokenizer": lambda texts: [[] for _ in texts]}, "the tokenizer gave no token for any of 6 texts"),
        ({"tokenizer": lambda texts: [[len(text)] if text else [0.5] for text in texts]}, "texts[1] = '' cannot be"),
        ({"tokenizer": lambda texts: [[len(text) - 1] for text in texts]}, "texts[1] = '' cannot be tokenised: the"),
        ({"tokenizer": lambda texts: [[2**31] for _ in texts]}, "texts[0] = 'the cat sat' cannot be tokenised: the"),
        ({"texts": ["a", "b\ud800"]}, "texts[1] = 'b\\ud800' cannot be tokenised: "),
    ],
)
def test_a_mistake_is_told_in_one_line_with_what_to_do(given, said):
    given = {"texts": TEXTS, "tokenizer": fast(), "cache": False, **given}
    with pytest.raises(DataError) as raised:
        tokenised(given.pop("texts"), given.pop("tokenizer"), **given)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


def test_all_mistakes_are_told_at_once():
    with pytest.raises(DataError) as raised:
        tokenised([None], "bert", pairs=[], most=0)
    lines = str(raised.value).splitlines()
    assert lines[0] == "the tokenising has 4 mistakes:"
    assert [line.split()[1] for line in lines[1:]] == ["texts[0]", "pairs", "most=0", "tokenizer"]


def test_the_libraries_are_not_imported_until_a_tokenizer_needs_them(torch_forks, tmp_path):
    code = (
        "import sys; from hotlap.data.tokenising import tokenised; tokenised(['ab'], lambda ts: [[1]], cache=False);"
        "print(sorted({'tokenizers', 'transformers'} & set(sys.modules)))"
    )
    ran = torch_forks.run("-c", code, cwd=tmp_path)
    assert ran.stdout.strip() == "[]", ran.stderr
