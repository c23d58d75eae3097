"""The rule that counts words answers the same here and in a process of its own."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from recipe_data import texts_file

from hotlap.recipes import encoders, text, word_counts
from hotlap.recipes.options import options_of

pytest.importorskip("sklearn")

TEXTS = ["good film", "bad film", "a good day", "a bad day", "good good", "bad bad"] * 5
LABELS = [1, 0, 1, 0, 1, 0] * 5
HELD = ["good", "bad", "a good film", "a bad film"]


def test_the_baseline_answers_by_words():
    assert word_counts.fitted(TEXTS, LABELS, HELD).answers == [1, 0, 1, 0]


def test_a_process_of_its_own_answers_the_same():
    beside = word_counts.started(TEXTS, LABELS, HELD)()
    assert beside.answers == word_counts.fitted(TEXTS, LABELS, HELD).answers
    assert beside.took_s > 0


def test_texts_of_which_no_word_comes_twice_have_no_answer():
    assert word_counts.fitted(["one two", "three four"], [0, 1], HELD).answers is None
    assert word_counts.started(["one two", "three four"], [0, 1], HELD)().answers is None


def test_the_error_of_its_process_is_raised():
    with pytest.raises(RuntimeError, match="at least 2 classes"):
        word_counts.started(TEXTS, [0] * len(TEXTS), HELD)()


def test_a_killed_process_is_named_by_its_exit_status(monkeypatch):
    monkeypatch.setattr(word_counts.sys, "executable", shutil.which("false"))
    with pytest.raises(RuntimeError, match="ended with 1"):
        word_counts.started(TEXTS, LABELS, HELD)()


def test_the_baseline_imports_nothing_of_hotlap():
    seen = "import runpy, sys; runpy.run_path(sys.argv[1]); print([m for m in sys.modules if m.startswith('hotlap')])"
    done = subprocess.run([sys.executable, "-c", seen, word_counts.__file__], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_process_whose_answers_are_dropped_is_ended():
    answers = word_counts.started(TEXTS, LABELS, HELD)
    process = answers._process
    del answers
    assert process.wait(timeout=600) is not None


@pytest.fixture
def prepared_by(tmp_path, monkeypatch):
    """Prepares a file of texts as where a GPU is there, or as on a CPU."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
    data = texts_file(tmp_path / "train.csv", rows=120)
    lines = []

    def prepare(device):
        kind = type("Device", (), {"type": device})
        monkeypatch.setattr(text, "choose_device", lambda name: kind)
        return text.RECIPE.prepare(
            options_of(text.RECIPE.options_type, None, {"data": str(data), "most": 48}), lines.append
        )

    prepare.lines = lines
    return prepare


def test_beside_a_gpu_it_is_fitted_in_another_process_and_here_otherwise(prepared_by, tmp_path, monkeypatch):
    here = prepared_by("cpu").baselines()
    assert list(here) == ["most frequent class", word_counts.NAME]
    monkeypatch.setattr(word_counts, "fitted", None)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "another"))
    beside = prepared_by("cuda").baselines()
    assert all(np.array_equal(here[name], beside[name]) for name in here)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_second_time_its_answers_come_from_the_cache_with_the_time_saved(prepared_by, monkeypatch, device):
    first = prepared_by(device).baselines()
    monkeypatch.setattr(word_counts, "fitted", None)
    monkeypatch.setattr(word_counts, "started", None)
    told = len(prepared_by.lines)
    again = prepared_by(device).baselines()
    assert all(np.array_equal(first[name], again[name]) for name in first)
    said = f"rule      {word_counts.NAME}, from the cache, which saved"
    assert sum(line.startswith(said) for line in prepared_by.lines[told:]) == 1


def test_a_baseline_that_fails_is_left_out_with_a_warning(prepared_by, monkeypatch):
    def failing(*_):
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(word_counts, "started", lambda *_: failing)
    assert list(prepared_by("cuda").baselines()) == ["most frequent class"]
    assert "no memory is left" in prepared_by.lines[-1]
