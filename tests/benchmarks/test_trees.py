"""The benchmark of trees trains the same trees on both sides, and under every plan of a sweep."""

import pytest

from benchmarks import trees

SMALL = ["--rows", "80", "--columns", "5", "--rounds", "4", "--pairs", "1", "--plan", "off", "--their-threads", "1"]
BOTH = pytest.mark.parametrize("library", ["xgboost", "lightgbm"])


@BOTH
def test_many_targets_get_the_same_answers_on_both_sides(library, capsys):
    trees.main(["targets", "--library", library, "--targets", "2", *SMALL])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith(f"{library} 80 × 5 → 2 targets, 4 rounds: ")
    assert last.endswith("1 pairs; answers differ by 0")


@BOTH
def test_trials_are_scored_on_both_sides(library, capsys):
    trees.main(["trials", "--library", library, "--trials", "2", "--folds", "2", *SMALL])
    assert "2 settings × 2 folds" in capsys.readouterr().out


@BOTH
def test_a_sweep_grows_the_same_trees_under_every_plan(library, capsys):
    trees.main(["sweep", "--library", library, "--targets", "2", "--laps", "2", *SMALL])
    assert "trees: the same under" in capsys.readouterr().out
