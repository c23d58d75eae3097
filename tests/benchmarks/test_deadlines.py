"""The benchmark of deadlines says what was not kept, and finds rows without an answer."""

from dataclasses import replace

import pytest
from benchmarks.deadlines import DEADLINES, Ended, answered, files
from recipe_data import write_rows

from hotlap.recipes import NAMES, recipe_named
from hotlap.recipes.options import from_words, options_of

KEPT = Ended(
    recipe="text", limit_s=60, took_s=59, exit_code=0, left_out=["x"], rows=5, answered=5, is_complete=True, load=0
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"took_s": 60.5}, "overran by 0.5 s"),
        ({"took_s": 50}, "used 83.3%, though work was left"),
        ({"answered": 4, "is_complete": False}, "answered 4 of 5 rows"),
        ({"exit_code": 1}, "ended with exit code 1"),
    ],
)
def test_what_was_not_kept_is_named(change, problem):
    assert KEPT.problems == []
    assert KEPT.line.endswith("kept")
    assert replace(KEPT, **change).problems == [problem]
    assert replace(KEPT, took_s=10, left_out=[]).problems == []


def test_rows_without_an_answer_may_come_first_in_a_symbol_and_nowhere_else(tmp_path):
    begun = [["a", ""], ["a", "up"], ["b", ""], ["b", "down"]]
    path = write_rows(tmp_path / "out.csv", ["symbol", "direction"], begun)
    assert answered(path, lambda names: names[1:]) == (4, 2, True)
    write_rows(path, ["symbol", "direction"], [*begun, ["b", ""]])
    assert answered(path, lambda names: names[1:]) == (5, 2, False)


def test_each_recipe_has_two_deadlines():
    assert sorted(recipe for _, recipe in DEADLINES) == sorted([*NAMES, *NAMES])


@pytest.mark.parametrize("recipe", NAMES)
def test_the_files_and_options_of_a_recipe_are_those_it_takes(tmp_path, recipe):
    if recipe == "image":
        pytest.importorskip("PIL")
    options = options_of(recipe_named(recipe).options_type, None, from_words(files(recipe, tmp_path, None)))
    read = recipe_named(recipe)(options, [].append)
    read.look()
