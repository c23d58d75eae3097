"""Options of a recipe: from words and files, every mistake at once, and the file that repeats a run."""

import re
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest

from hotlap.core.errors import JobError, StoreError
from hotlap.recipes import NAMES, recipe_named
from hotlap.recipes.options import (
    Calling,
    Options,
    as_file,
    as_json,
    calling_of,
    from_words,
    option,
    option_lines,
    options_of,
    recipe_in,
)
from hotlap.recipes.temporal import TemporalOptions
from hotlap.recipes.text import TextOptions
from hotlap.searching.space import checked_space


@dataclass(frozen=True, kw_only=True)
class Own(Options):
    text: tuple[str, ...] = option((), "columns")
    balance: bool = option(True, "whether")
    batch_size: int = option(16, "samples")


def test_words_become_what_the_options_are():
    given = from_words(["--text", "title", "--text", "body", "--balance=no", "--lr", "1e-3", "--valid-share", "0.1"])
    found = options_of(Own, None, {**given, "epochs": "4"})
    assert (found.text, found.balance, found.lr, found.valid_share, found.epochs) == (
        ("title", "body"), False, 1e-3, 0.1, 4,
    )  # fmt: skip
    assert found.batch_size == 16
    assert options_of(Own, None, {"text": "title, body"}).text == ("title", "body")


def test_the_file_of_a_run_repeats_it_and_what_is_given_wins(tmp_path):
    first = options_of(Own, None, {"data": 'a "quoted" näme.csv', "text": ("x", "y"), "lr": 0.5, "balance": False})
    file = tmp_path / "options.toml"
    file.write_text(as_file("own", first), encoding="utf-8")
    assert options_of(Own, file, {}) == first
    assert options_of(Own, file, {"lr": 0.25}).lr == 0.25
    assert recipe_in(file) == "own"


def test_a_file_may_say_what_the_command_can_and_that_of_a_run_does_not(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('lr = 0.5\nout = "here"\nretrain = true\nquiet = true\njson = false\n')
    found = options_of(Own, file, {})
    assert found.lr == 0.5
    assert calling_of(file) == Calling(out="here", retrain=True, quiet=True)
    assert calling_of(None) == Calling()
    assert not re.search("^(out|retrain|quiet|json)", as_file("own", found), re.MULTILINE)
    file.write_text('lr = "fast"\nretrain = "perhaps"\n')
    with pytest.raises(JobError) as raised:
        options_of(Own, file, {})
    assert len(raised.value.problems) == 2


def test_all_mistakes_are_told_at_once():
    with pytest.raises(JobError) as raised:
        options_of(Own, None, {"epoch": "3", "lr": "fast", "balance": "perhaps", "batch-size": "2.5"})
    assert len(raised.value.problems) == 4
    said = str(raised.value)
    assert "no option is called 'epoch'; did you mean 'epochs'?" in said
    assert "lr='fast' must be a number" in said
    assert "balance='perhaps' must be true or false" in said
    assert "batch_size='2.5' must be a whole number" in said


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        (Own, ["label"], "'label' is no option"),
        (Own, ["--lr", "--text"], "--lr needs a value"),
        (Own, ["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (Own, ["--epochs", "-1"], "epochs=-1 is below 0"),
        (Own, ["--valid-share", "1.0"], "valid_share=1.0 must be between 0 and 1"),
        (TextOptions, ["--seed", "-1"], "seed=-1 must be from 0 to"),
        (TextOptions, ["--lr", "nan"], "lr=nan must be a number of at least 0"),
        (TextOptions, ["--device", "gpu"], "device='gpu' is none of auto, cpu, cuda, cuda:N"),
        (TextOptions, ["--dropout", "2"], "dropout=2.0 must be from 0 to 1"),
        (TextOptions, ["--weight-decay", "-1"], "weight_decay=-1.0 must be a number of at least 0"),
        (TextOptions, ["--most", "0"], "most=0 must be a number of at least 1"),
        (TextOptions, ["--header", "perhaps"], "header='perhaps' must be one of auto, yes, no"),
        (TextOptions, ["--text", "a,b,c"], "text names 3 columns"),
        (TextOptions, ["--text", "a,a"], "text names a twice"),
        (TextOptions, ["--plan", "off", "--plan", "max"], "--plan is given 2 times (off, max); give it once"),
        (TextOptions, ["--epochs"], "--epochs needs a value: a whole number"),
        (TemporalOptions, ["--smoothing", "2"], "smoothing=2.0 must be from 0 to 1"),
        (TemporalOptions, ["--clip", "0"], "clip=0.0 must be above 0"),
        (TemporalOptions, ["--folds", "-1"], "folds=-1 must be a number of at least 0"),
        (TemporalOptions, ["--volatility", "1"], "volatility=1 must be 0, or at least 2"),
        (TemporalOptions, ["--group", "symbol"], "group=symbol is not for bars"),
        (TemporalOptions, ["--models="], "models is empty"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(kind, words, said):
    with pytest.raises(JobError, match=re.escape(said)):
        options_of(kind, None, from_words(words))


def test_a_flag_needs_no_value_and_a_list_may_be_empty():
    found = options_of(TemporalOptions, None, from_words(["--onnx", "--frames=", "--ahead", "2"]))
    assert (found.onnx, found.frames, found.ahead) == (True, (), 2)


def test_for_a_file_alone_the_option_data_is_suggested(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.csv").touch()
    with pytest.raises(JobError, match=re.escape("'train.csv' is no option; did you mean --data train.csv?")):
        from_words(["train.csv"])


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(StoreError, match="cannot read"):
        options_of(Own, tmp_path / "none.toml", {})
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(StoreError, match="is no options file"):
        options_of(Own, tmp_path / "bad.toml", {})
    assert recipe_in(tmp_path / "bad.toml") is None


def test_help_lists_every_option_with_type_sentence_and_default_within_the_width():
    lines = option_lines(Own, 80)
    assert max(map(len, lines)) <= 80
    named = [line.split()[0] for line in lines if line.startswith("  --")]
    assert named[:3] == ["--data", "--target", "--text"]  # a recipe's own options come before those of all recipes
    text = " ".join(" ".join(lines).split())
    for one in fields(Own):
        assert f"--{one.name.replace('_', '-')} " in text
    assert "--batch-size INTEGER Samples. [default: 16]" in text
    assert "--balance YES|NO Whether. [default: yes]" in text


def test_all_recipes_say_the_same_of_epochs_and_learning_rate():
    for name in ("epochs", "lr"):
        said = {(one["default"], one["help"]) for one in (as_json(recipe_named(r).options_type)[name] for r in NAMES)}
        assert len(said) == 1
        assert next(iter(said))[1].endswith("0 leaves it to the recipe")


@pytest.mark.parametrize(
    ("options", "at_once"),
    [
        (TemporalOptions(length=20), 4096),  # small ones, many of them
        (TemporalOptions(length=10_000, batch_size=32), 128),
        (TextOptions(most=192), 256),
        (TextOptions(most=192, batch_size=256), 1024),
    ],
)
def test_more_is_answered_at_a_time_than_is_trained_on(options, at_once):
    assert options.judged_at_once == at_once


@pytest.mark.parametrize("name", ["image", "price", "temporal", "text"])
def test_a_recipe_takes_every_value_that_its_trials_may_have(name):
    recipe = recipe_named(name)
    made = recipe(recipe.options_type(), lambda line: None)
    made.reader = SimpleNamespace(encoder=SimpleNamespace(is_pretrained=True))
    for part, (low, high, *_) in made.space().items():
        for value in (low, high):
            made.use({part: value})
            assert getattr(made.options, part) == value
    assert checked_space(made.space())
