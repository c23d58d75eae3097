"""Which columns the recipe text reads where nobody names them."""

import hashlib

import pytest
from recipe_data import write_rows

from hotlap.core.errors import DataError
from hotlap.recipes.tables import read_table
from hotlap.recipes.text import TextOptions, TextRecipe

ROWS = 60


def a_table(folder, **columns):
    """A table of these columns, each a function of a row's number, and a label."""
    columns["label"] = lambda at: "ab"[at % 2]
    rows = [[make(at) for make in columns.values()] for at in range(ROWS)]
    return read_table(write_rows(folder / "train.csv", list(columns), rows))


def read_of(table, lines, named=()):
    recipe = TextRecipe(TextOptions(data="train.csv", text=named), lines.append)
    recipe.table, recipe.target = table, "label"
    return recipe.columns_of(table)


def a_hash(at):
    return hashlib.sha256(str(at).encode()).hexdigest()[:16]


def a_text(at):
    return f"the text number {at}"


@pytest.mark.parametrize(
    "an_id", [a_hash, lambda at: f"https://some.where/{at}", lambda at: f"a{at}.txt", lambda at: f"{at:06}"]
)
def test_a_column_of_ids_beside_a_text_is_left_out_and_that_is_said(tmp_path, an_id):
    lines = []
    assert read_of(a_table(tmp_path, key=an_id, comment=a_text), lines) == ["comment"]
    (line,) = lines
    assert line.startswith(f"note      key is not read: its values, as {an_id(0)!r}, are nearly all different")
    assert line.endswith("name it with --text if it is text")


def test_a_few_ids_that_come_twice_or_have_a_space_are_ids_all_the_same(tmp_path):
    def mostly(at):
        return "" if at < 20 else "no id" if at == 40 else a_hash(min(at, 58))

    assert read_of(a_table(tmp_path, key=mostly, text=a_text), []) == ["text"]


def test_an_id_that_is_named_is_read(tmp_path):
    lines = []
    assert read_of(a_table(tmp_path, key=a_hash, comment=a_text), lines, ("key", "comment")) == ["key", "comment"]
    assert lines == []


@pytest.mark.parametrize(
    "words",
    [
        lambda at: f"word{at % 40}",  # single words that come again
        lambda at: f"word{at}" if at % 10 else f"two words {at}",
        lambda at: f"这部电影很好看{chr(0x4E00 + at)}",  # sentences without spaces
    ],
)
def test_single_words_that_come_again_and_texts_stay(tmp_path, words):
    lines = []
    assert read_of(a_table(tmp_path, title=words, body=a_text), lines) == ["title", "body"]
    assert lines == []


def test_single_words_that_are_all_there_is_to_read_are_read(tmp_path):
    lines = []
    assert read_of(a_table(tmp_path, name=lambda at: f"name{at}"), lines) == ["name"]
    assert lines == []


def test_ids_without_a_text_beside_categories_are_warned_of(tmp_path):
    lines = []
    assert read_of(a_table(tmp_path, key=a_hash, comment=lambda at: ["good one", "bad"][at % 2]), lines) == ["key"]
    (line,) = lines
    assert line.startswith(f"warning   the values of key, as {a_hash(0)!r}, look like ids")
    assert line.endswith("if the text is in comment, name that with --text")


def test_three_texts_are_asked_about_and_three_with_an_id_are_not(tmp_path):
    assert read_of(a_table(tmp_path, key=a_hash, title=a_text, body=a_text), []) == ["title", "body"]
    with pytest.raises(DataError, match="Say --text"):
        read_of(a_table(tmp_path, lead=a_text, title=a_text, body=a_text), [])
