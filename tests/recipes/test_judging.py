"""Answers that are classes, and answers that are numbers, each judged in its own way."""

import numpy as np
import pytest
import torch

from hotlap.recipes.answers import Threshold
from hotlap.recipes.judging import ByClass, ByNumber, judge_of


def test_without_classes_numbers_are_judged():
    assert isinstance(judge_of(()), ByNumber)
    assert isinstance(judge_of(("a", "b")), ByClass)


def test_classes_are_answered_by_probabilities_and_numbers_as_they_are():
    found = judge_of(("a", "b")).answers(torch.tensor([[0.0, 0.0], [0.0, np.log(3.0)]]))
    np.testing.assert_allclose(found, [[0.5, 0.5], [0.25, 0.75]])
    np.testing.assert_allclose(judge_of(()).answers(torch.tensor([[1.5], [-2.0]])), [1.5, -2.0])


def test_numbers_that_are_less_far_off_score_higher():
    judge, target = judge_of(()), np.array([1.0, 2.0, 3.0])
    near, far = (judge.report(target, target + off, None) for off in (0.1, 0.5))
    assert judge.score(near) > judge.score(far)
    assert near["mae"] == pytest.approx(0.1)
    assert judge.threshold(target, target) is None


def test_the_worst_numbers_are_the_furthest_off():
    found = judge_of(()).worst(np.array([1.0, 2.0, 3.0]), np.array([1.5, 2.1, 0.0]), None, lambda at: f"row {at}")
    assert [row["sample"] for row in found] == ["row 2", "row 0", "row 1"]
    assert found[0]["true"] == 3.0


def test_what_is_written_are_classes_by_their_threshold_or_numbers():
    answers = np.array([[0.9, 0.1], [0.7, 0.3]])
    judge = judge_of(("no", "yes"))
    assert judge.written("y", answers, None, all_of_it=False) == {"y": ["no", "no"]}
    assert judge.written("y", answers, Threshold(1, 0.25), all_of_it=True) == {
        "y": ["no", "yes"], "y_no": [0.9, 0.7], "y_yes": [0.1, 0.3],
    }  # fmt: skip
    assert judge_of(()).written("y", np.array([1.5]), None, all_of_it=True) == {"y": [1.5]}
