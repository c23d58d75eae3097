"""What is found in the text of a product, against what a reader finds there."""

import numpy as np
import pytest
import torch

from hotlap.data import parallel
from hotlap.recipes import product_texts, tabular
from hotlap.recipes.product_texts import NAMES, WordParts, brand_of, numbers_of_text, quantities, read_facts

TEXTS = [f"{brand} {good}, {size} oz" for brand in ("acme", "borealis") for good in ("tea", "rice") for size in (2, 8)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Coffee, 12 oz (Pack of 6)", {"grams": 340.194, "pieces": 6}),
        ("500ml bottle", {"millilitres": 500}),
        ("3 x 500 ml", {"millilitres": 500, "pieces": 3}),
        ("10 x 20 cm frame", {"centimetres": 20}),
        ("16-ounce jar, 2 Count", {"grams": 453.592, "pieces": 2}),
        ("8 fl. oz and 1 Fluid Ounce", {"millilitres": 236.588}),
        ("Value: 12.0\nUnit: Fl Oz", {"millilitres": 354.882}),
        ("1,000 g or 1,5 kg", {"grams": 1500}),
        ("set of 4, 64GB, 5 W", {"pieces": 4, "gigabytes": 64, "watts": 5}),
        ("2 in 1 remover v1.2.3 oz, no 7", {}),
        ("", {}),
    ],
)
def test_quantities_are_turned_into_base_units(text, found):
    assert quantities(text) == pytest.approx(found, rel=1e-4)


def test_a_text_gives_a_number_for_each_name_and_nan_where_it_does_not_say():
    found = dict(zip(NAMES, numbers_of_text("Acme Premium Oil\n2 x 500 ml, refill"), strict=True))
    assert found["words"] == pytest.approx(np.log1p(6))
    assert (found["lines"], found["words of quality"], found["words of cheapness"]) == (1, 1, 1)
    assert found["size of all pieces"] == pytest.approx(np.log1p(1000))
    assert np.isnan(found["grams"])
    assert np.isfinite(numbers_of_text("9" * 5000 + " oz")[NAMES.index("grams")])
    assert len(numbers_of_text("")) == len(NAMES)


@pytest.mark.parametrize(
    ("text", "brand"),
    [("The Acme Tea", "acme"), ("Item Name: Borealis Oil", "borealis"), ("12 oz Ember Tea", "ember"), ("7 !", "")],
)
def test_the_brand_is_the_first_word_that_may_be_one(text, brand):
    assert brand_of(text) == brand


def test_many_texts_are_read_in_parts_and_a_second_time_from_the_cache(monkeypatch):
    monkeypatch.setattr(product_texts, "CHUNK", 3)
    monkeypatch.setattr(product_texts, "FEW", 3)
    monkeypatch.setattr(tabular, "PROGRESS_S", 0.0)
    monkeypatch.setattr(parallel, "GROUP_S", 0.0)
    lines = []
    first, again = read_facts(TEXTS, lines.append), read_facts(TEXTS, lines.append)
    np.testing.assert_array_equal(first.numbers, again.numbers)
    np.testing.assert_allclose(first.numbers, [numbers_of_text(text) for text in TEXTS], rtol=1e-6)
    assert first.brands == again.brands == [brand_of(text) for text in TEXTS]
    assert lines[0].startswith("facts     of 3 of 8 texts, ")
    assert lines[-2].startswith("facts     of 8 texts in ")
    assert lines[-1].startswith("facts     of 8 texts, from the cache, which saved ")


def test_a_few_texts_leave_nothing_in_the_cache(tmp_path):
    assert read_facts(TEXTS, [].append).brands == [brand_of(text) for text in TEXTS]
    assert not (tmp_path / "cache").exists()


def test_words_are_reduced_alike_when_they_are_read_back():
    lines = []
    made, own = WordParts.fit(TEXTS, 3, lines.append)
    other = WordParts(made.words, made.idf.clone(), made.parts.clone())
    found = other.of([*TEXTS, "words that are new"])
    assert found.shape == (9, 3)
    np.testing.assert_array_equal(found[:8], own)
    assert not found[8].any()
    tea = np.array(["tea" in text for text in TEXTS])
    apart = np.abs(found[:8][tea].mean(0) - found[:8][~tea].mean(0)).max()
    assert apart > 0.3  # one of the parts tells tea from rice
    again, kept = WordParts.fit(TEXTS, 3, lines.append)
    assert again.words == made.words
    np.testing.assert_array_equal(kept, own)
    assert "from the cache, which saved" in lines[-1]


def test_texts_in_which_no_word_comes_twice_have_no_parts():
    made, own = WordParts.fit(["one two", "three four"], 4, [].append)
    assert own.shape == (2, 0)
    assert made.of(["one two"]).shape == (1, 0)
    with pytest.raises(ValueError, match="2 words have weights of the shapes"):
        WordParts(["a", "b"], torch.zeros(3), torch.zeros(1, 2))
