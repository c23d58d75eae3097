"""Answers that are classes, and answers that are numbers, each judged in its own way."""

import numpy as np
import pytest
import torch

from hotlap.recipes import scores
from hotlap.recipes.answers import Threshold
from hotlap.recipes.judging import PARTS, ByClass, ByNumber, judge_of, parted_by_others


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


def two_classes(rows, *, tells, seed=0, rare=0.1):
    """Probabilities of two classes, one of them rare, which tell so much of it; none reaches a half."""
    numbers = np.random.default_rng(seed)
    target = (numbers.random(rows) < rare).astype(np.int64)
    sure = np.clip(0.2 + tells * target + 0.1 * numbers.standard_normal(rows), 0.01, 0.49)
    return target, np.stack([1 - sure, sure], axis=1)


def test_a_threshold_is_sought_for_a_rare_class_that_is_told_apart():
    judge = judge_of(("ham", "spam"))
    target, answers = two_classes(2000, tells=0.2)
    found = judge.threshold(answers, target)
    assert found.rare == 1
    assert 0.2 < found.least < 0.45
    report = judge.report(target, answers, found)
    assert report["threshold"] == {"class": "spam", "least": found.least}
    assert report["macro_f1"] > judge.report(target, answers, None)["macro_f1"] + 0.2


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_not_made_to_look_better_by_a_threshold(seed):
    judge = judge_of(("ham", "spam"))
    target, answers = two_classes(200, tells=0.0, seed=seed)
    found = judge.threshold(answers, target)
    auc = scores.roc_auc(target, answers)
    assert found is None or auc > 0.5 + 2 * (201 / 12 / target.sum() / (200 - target.sum())) ** 0.5
    if found is None:
        assert judge.report(target, answers, found)["macro_f1"] == judge.report(target, answers, None)["macro_f1"]


def test_no_row_is_judged_by_a_threshold_that_it_has_helped_to_choose():
    target, answers = two_classes(300, tells=0.1, seed=3)
    before = parted_by_others(answers, target, 1)
    rows = np.flatnonzero(target == 1)
    for row in rows[:5]:
        # However sure the model were of this one, the threshold that it is held against stays the same.
        moved = answers.copy()
        moved[row] = [0.6, 0.4]
        after = parted_by_others(moved, target, 1)
        parts = np.arange(len(rows)) * PARTS // len(rows)
        own = rows[parts == parts[rows == row]]
        others = np.setdiff1d(own, [row])
        np.testing.assert_array_equal(after[others], before[others])


def test_a_threshold_that_gains_nothing_is_not_used():
    target = np.array([0] * 90 + [1] * 10)
    sure = np.where(target == 1, 0.9, 0.1)
    assert judge_of(("no", "yes")).threshold(np.stack([1 - sure, sure], axis=1), target) is None


def three_classes(rows, *, tells, seed=0, rare=0.08):
    """Probabilities of three classes, the second of them rare and never the likeliest; the others are known well."""
    numbers = np.random.default_rng(seed)
    target = numbers.choice(3, rows, p=[0.5, rare, 0.5 - rare])
    sure = np.clip(0.15 + tells * (target == 1) + 0.05 * numbers.standard_normal(rows), 0.01, 0.32)
    is_first = np.where(target == 1, numbers.random(rows) < 0.5, target == 0)
    first = (1 - sure) * np.where(is_first, 0.7, 0.3)
    return target, np.stack([first, sure, 1 - sure - first], axis=1)


def test_of_three_classes_the_rare_one_has_a_threshold_and_the_others_stay_as_likely_as_they_are():
    judge = judge_of(("ham", "spam", "jam"))
    target, answers = three_classes(2000, tells=0.15)
    found = judge.threshold(answers, target)
    assert found.rare == 1
    assert 0.15 < found.least < 0.32
    report, plain = judge.report(target, answers, found), judge.report(target, answers, None)
    assert report["threshold"] == {"class": "spam", "least": found.least}
    assert report["macro_f1"] > plain["macro_f1"] + 0.2
    assert plain["classes"]["spam"]["recall"] == 0
    words = judge.written("y", answers, found, all_of_it=False)["y"]
    likeliest = np.where(answers[:, 0] > answers[:, 2], "ham", "jam")
    assert words == np.where(answers[:, 1] >= found.least, "spam", likeliest).tolist()
    assert set(words) == {"ham", "spam", "jam"}


def test_below_its_threshold_a_rare_class_is_not_answered_were_it_the_likeliest():
    answers = np.array([[0.2, 0.5, 0.3], [0.1, 0.7, 0.2]])
    judge = judge_of(("ham", "spam", "jam"))
    assert judge.written("y", answers, Threshold(1, 0.6), all_of_it=False) == {"y": ["jam", "spam"]}


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_three_classes_is_not_made_to_look_better_by_a_threshold(seed):
    judge = judge_of(("ham", "spam", "jam"))
    target, answers = three_classes(400, tells=0.0, seed=seed)
    found = judge.threshold(answers, target)
    rare = int((target == 1).sum())
    auc = scores.roc_auc(target == 1, answers[:, 1])
    assert found is None or auc > 0.5 + 2 * (401 / 12 / rare / (400 - rare)) ** 0.5


def test_noise_of_three_classes_has_a_threshold_less_often_than_once_in_twenty():
    judge = judge_of(("ham", "spam", "jam"))
    found = [judge.threshold(*three_classes(400, tells=0.0, seed=seed)[::-1]) for seed in range(200)]
    assert sum(one is not None for one in found) < 10


def test_of_many_classes_that_are_all_alike_none_is_rare():
    target = np.repeat(np.arange(10), [30] * 9 + [28])
    answers = np.full((len(target), 10), 0.05)
    answers[np.arange(len(target)), target] = 0.1
    answers[:, 9] += 0.2
    assert judge_of(tuple("abcdefghij")).threshold(answers, target) is None


def test_a_class_of_a_few_rows_does_not_keep_the_next_one_from_its_threshold():
    target, answers = three_classes(2000, tells=0.15)
    more = np.concatenate([target, [3, 3]])
    wider = np.concatenate([np.pad(answers, ((0, 0), (0, 1))), [[0.4, 0.1, 0.4, 0.1]] * 2])
    assert judge_of(("ham", "spam", "jam", "lamb")).threshold(wider, more).rare == 1


def test_the_worst_mistakes_are_mistakes_of_the_answers_that_are_given():
    answers = np.array([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]])
    found = judge_of(("no", "yes")).worst(np.array([0, 0, 1]), answers, Threshold(1, 0.25), lambda at: f"row {at}")
    assert [(row["sample"], row["true"], row["answered"]) for row in found] == [("row 1", "no", "yes")]
