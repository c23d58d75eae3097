"""A tokenizer of a stranger ends in one line, whatever it holds: no panic of its library, no text without end."""

import json
import os

import pytest

from hotlap.core.errors import DataError, StoreError
from hotlap.data.tokenising import as_encoder, encode_chunk
from hotlap.recipes.encoders import encoder_in

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

CONFIG = {"model_type": "bert"}


@pytest.fixture(autouse=True)
def without_traces(monkeypatch):
    """What Rust writes of a panic is short."""
    monkeypatch.setenv("RUST_BACKTRACE", "0")


def tokenizer(**changes):
    """The text of a small tokenizer, with some parts changed."""
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return json.dumps(json.loads(made.to_str()) | changes)


DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
BELOW = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}]}
HOSTILE = {
    "nested": "[" * 100_000,
    "no object": "5",
    "a number of 30 digits": tokenizer(added_tokens=[{"id": 10**30}]),
    "a text that doubles 30 times": tokenizer(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 30}),
    "steps without end": tokenizer(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * 1000}),
    "a long beginning": tokenizer(normalizer={"type": "Prepend", "prepend": "x" * 100_000}),
    "a pattern that is none": tokenizer(normalizer=DOUBLED | {"pattern": {"Regex": "(a"}}),
    "a panic as it is read": tokenizer(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    "a panic as it works": tokenizer(
        post_processor=BELOW | {"single": [{"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {}}
    ),
    "tokens without end": tokenizer(
        post_processor=BELOW
        | {
            "single": [{"SpecialToken": {"id": "x", "type_id": 0}}],
            "special_tokens": {"x": {"id": "x", "ids": [1] * 10_000, "tokens": ["x"] * 10_000}},
        }
    ),
}


FAR = 4_000_000_000


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": FAR}}},
        {"model": {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": FAR}}},
        {"model": {"type": "BPE", "merges": [], "vocab": {"[UNK]": 0, "a": FAR}}},
        {"added_tokens": [{"id": FAR, "content": "x"}]},
    ],
)
def test_a_far_token_id_is_refused_before_the_library_reads_it(tmp_path, monkeypatch, changes):
    (tmp_path / "tokenizer.json").write_text(tokenizer(**changes))
    monkeypatch.setattr(tokenizers, "Tokenizer", None)
    with pytest.raises(StoreError, match=r"has a token with the id 4,000,000,000; an id is at most 10,000,000$"):
        encoder_in(tmp_path, CONFIG)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line(tmp_path, name):
    (tmp_path / "tokenizer.json").write_text(HOSTILE[name])
    with pytest.raises(StoreError) as caught:
        encoder_in(tmp_path, CONFIG)
    assert str(caught.value).startswith(f"{tmp_path / 'tokenizer.json'} ")
    assert len(str(caught.value).splitlines()) == 1


def test_a_plain_tokenizer_is_taken(tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer(normalizer={"type": "Sequence", "normalizers": [DOUBLED] * 2}))
    assert encoder_in(tmp_path, CONFIG).tokenizer.encode("b b").ids == [2, 2]


def test_a_panic_on_some_texts_names_the_first_of_them():
    made = tokenizers.Tokenizer.from_str(tokenizer(post_processor=BELOW | {"single": [], "special_tokens": {}}))
    made.post_processor = None

    class Panicking:
        def __call__(self, texts, pairs):
            if "b" in texts:
                raise type("PanicException", (BaseException,), {})("it gave up")
            return as_encoder(made, 8)(texts, pairs)

    with pytest.raises(DataError, match=r"texts\[6\] = 'b' cannot be tokenised: it gave up"):
        encode_chunk(Panicking(), (5, ["a", "b"], None))


def test_an_interrupt_is_no_panic():
    def interrupted(texts, pairs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_chunk(interrupted, (0, ["a"], None))


def test_a_pipe_in_the_place_of_a_tokenizer_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(StoreError, match=r"has no tokenizer\.json"):
        encoder_in(tmp_path, CONFIG)


def test_tokens_that_the_encoder_does_not_have_are_refused_before_it_is_asked(tmp_path):
    from hotlap.recipes.tables import read_table
    from hotlap.recipes.text import TextReader

    (tmp_path / "tokenizer.json").write_text(tokenizer())
    (tmp_path / "texts.csv").write_text("text,label\na b,x\nb a,y\n")
    small = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
    for known in (2, 3):
        reader = TextReader(encoder_in(tmp_path, CONFIG | small | {"vocab_size": known}), ["text"], ["x", "y"], 8, 0.0)
        table = read_table(tmp_path / "texts.csv")
        if known == 3:
            assert len(reader.sequences(table, lambda line: None)) == 2
            continue
        with pytest.raises(DataError, match="the tokenizer gives the token 2, and this encoder has 2 of them"):
            reader.sequences(table, lambda line: None)
