"""Scores: worked out by hand; a threshold for a rare class; answers that are classes, and answers that are numbers."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import MachineError
from hotlap.recipes import scores
from hotlap.recipes.scores import (
    PARTS,
    ByClass,
    ByNumber,
    ByTarget,
    Threshold,
    judge_of,
    parted_by_others,
    rank_correlations,
)

TARGET = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
PREDICTED = np.array([0, 0, 0, 1, 1, 1, 0, 2, 2, 0])


def test_scores_of_classes_are_those_worked_out_by_hand():
    found = scores.report(TARGET, PREDICTED, None, ["down", "flat", "up"])
    assert found["confusion"] == [[3, 1, 0], [1, 2, 0], [1, 0, 2]]
    assert found["classes"]["down"] == pytest.approx({"precision": 3 / 5, "recall": 3 / 4, "f1": 6 / 9, "support": 4})
    assert found["classes"]["up"] == pytest.approx({"precision": 1.0, "recall": 2 / 3, "f1": 4 / 5, "support": 3})
    assert found["accuracy"] == 0.7
    assert found["macro_f1"] == pytest.approx((2 / 3 + 2 / 3 + 4 / 5) / 3, abs=1e-15)
    assert found["weighted_f1"] == pytest.approx((4 * 2 / 3 + 3 * 2 / 3 + 3 * 4 / 5) / 10, abs=1e-15)


def test_a_class_that_is_neither_there_nor_predicted_does_not_count():
    found = scores.report(np.array([0, 0, 2]), np.array([0, 0, 2]), None, ["a", "b", "c", "d"])
    assert found["macro_f1"] == 1.0
    assert [one["f1"] for one in found["classes"].values()] == [1, 0, 1, 0]


def test_roc_auc_counts_equal_scores_as_half():
    # Of 2 × 3 pairs of a one and a zero: 4 in the right order, one equal, one wrong.
    target, given_scores = np.array([0, 0, 1, 0, 1]), np.array([0.1, 0.4, 0.4, 0.5, 0.8])
    assert scores.roc_auc(target, given_scores) == pytest.approx(4.5 / 6, abs=1e-15)
    assert scores.roc_auc(target, np.stack([np.zeros(5), given_scores], 1)) == pytest.approx(4.5 / 6, abs=1e-15)
    assert math.isnan(scores.roc_auc(np.array([1, 1]), np.array([0.2, 0.3])))


def test_roc_auc_of_several_classes_is_the_mean_of_one_against_the_rest():
    given_scores = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
    # Class 0: above all 3. Class 1: of 4 pairs, 2 right. Class 2: 2 of 3 right and one equal.
    expected = (1 + 2 / 4 + 2.5 / 3) / 3
    assert scores.roc_auc(np.array([0, 1, 2, 1]), given_scores) == pytest.approx(expected, abs=1e-15)
    # A class that no row has does not count.
    wider = np.concatenate([given_scores, np.zeros((4, 1))], 1)
    assert scores.roc_auc(np.array([0, 1, 2, 1]), wider) == pytest.approx(expected, abs=1e-15)


def test_scores_of_numbers_are_those_worked_out_by_hand():
    found = scores.number_report(np.array([1.0, 2.0, 0.0, -4.0]), np.array([2.0, 2.0, 0.0, -1.0]))
    assert found["mae"] == 1.0
    assert found["rmse"] == pytest.approx(math.sqrt(10 / 4), abs=1e-15)
    assert found["smape"] == pytest.approx(100 * (1 / 1.5 + 0 + 0 + 3 / 2.5) / 4, abs=1e-12)
    assert found["rmsle"] is None  # of -4 there is no logarithm
    found = scores.number_report(np.array([1.0, 3.0]), np.array([1.0, 1.0]))
    assert found["rmsle"] == pytest.approx(math.log(2) / math.sqrt(2), abs=1e-15)


def test_class_weights_make_all_classes_count_alike():
    target = np.array([0] * 6 + [1] * 3 + [3])
    weights = scores.class_weights(target, 5)
    assert weights.tolist() == [10 / 18, 10 / 9, 0, 10 / 3, 0]
    assert (weights[target]).sum() == pytest.approx(len(target))


def f1_of(target, predicted):
    hits = sum(p == t == 1 for p, t in zip(predicted, target, strict=True))
    return 2 * hits / max(1, sum(p == 1 for p in predicted) + sum(t == 1 for t in target))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.3, 0.30000000000000004, 0.7, 1.0])),
        min_size=2,
        max_size=25,
    )
)
def test_no_threshold_is_better_than_the_best(rows):
    target, given_scores = (np.array(column) for column in zip(*rows, strict=True))
    found = scores.best_threshold(given_scores, target)
    best = f1_of(target, [int(s >= found) for s in given_scores])
    for other in (*given_scores, 0.05, 0.5, 2.0):
        assert f1_of(target, [int(s >= other) for s in given_scores]) <= best + 1e-12


def test_the_best_threshold_lies_half_way_between_two_scores():
    given_scores = np.array([0.1, 0.2, 0.6, 0.8])
    assert scores.best_threshold(given_scores, np.array([0, 0, 1, 1])) == pytest.approx(0.4)


@pytest.mark.parametrize("below", [0.1, 0.3, 0.7, 1e-300])
def test_the_best_threshold_parts_scores_that_have_nothing_between_them(below):
    between = np.nextafter(below, 1)
    for one, other in ((below, between), (between, np.nextafter(between, 1))):
        assert one < scores.best_threshold(np.array([one, other]), np.array([0, 1])) <= other


def test_a_report_is_json_and_lines_of_it_are_aligned():
    probabilities = np.eye(3)[PREDICTED] * 0.7 + 0.1
    found = scores.report(TARGET, PREDICTED, probabilities, ["down", "flat", "up"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["roc_auc"] == pytest.approx((17 / 24 + 16 / 21 + 5 / 6) / 3, abs=1e-15)
    assert found["log_loss"] == pytest.approx(-(7 * math.log(0.8) + 3 * math.log(0.1)) / 10, abs=1e-12)
    assert scores.report_lines(found) == [
        "               precision  recall      F1     rows",
        "down               0.600   0.750   0.667        4",
        "flat               0.667   0.667   0.667        3",
        "up                 1.000   0.667   0.800        3",
        "macro mean         0.756   0.694   0.711       10",
        "weighted mean      0.740   0.700   0.707       10",
        "accuracy 0.7 · macro F1 0.7111 · weighted F1 0.7067 · ROC AUC 0.7679 · log loss 0.847 (10 rows)",
    ]


def test_an_undefined_roc_auc_is_null_and_not_shown():
    found = scores.report(np.array([1, 1]), np.array([1, 0]), np.array([[0.4, 0.6], [0.6, 0.4]]), ["a", "b"])
    assert found["roc_auc"] is None
    assert "ROC" not in scores.report_lines(found)[-1]


def test_a_report_of_numbers_has_one_line():
    found = scores.number_report(np.array([1.0, 2.0]), np.array([1.0, 4.0]))
    assert scores.report_lines(found) == ["MAE 1 · RMSE 1.414 · SMAPE (%) 33.33 · RMSLE 0.3612 (2 rows)"]


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.metrics", None)
    with pytest.raises(MachineError, match=r"pip install '\.\[recipes\]'"):
        scores.number_report(np.array([1.0]), np.array([1.0]))


# --- judges --------------------------------------------------------------------------------------------


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


def test_ranks_across_the_targets_are_correlated_row_by_row_as_scipy_does_over_what_is_known():
    from scipy.stats import spearmanr

    numbers = np.random.default_rng(0)
    target = numbers.integers(0, 5, (20, 7)).astype(float)
    predicted = target + numbers.normal(size=target.shape)
    target[3, 2], target[4], target[5] = np.nan, np.nan, 1.0
    found = rank_correlations(target, predicted)
    known = np.isfinite(target[3])
    assert found[0] == pytest.approx(spearmanr(target[0], predicted[0])[0])
    assert found[3] == pytest.approx(spearmanr(target[3][known], predicted[3][known])[0])
    assert np.isnan(found[4:6]).all()
    assert rank_correlations(target, np.zeros_like(target))[0] == 0


def test_many_targets_are_scored_over_what_is_known_each_in_its_own_deviations():
    target = np.array([[1.0, 10.0], [3.0, np.nan], [5.0, 30.0]])
    found = judge_of((), ("a", "b")).report(target, target + np.array([1.0, 10.0]), None)
    assert isinstance(judge_of((), ("a", "b")), ByTarget)
    assert found["mae"] == found["rmse"] == pytest.approx(5.5)
    assert found["scaled_rmse"] == pytest.approx((1 / np.std([1, 3, 5]) + 10 / np.std([10, 30])) / 2)
    assert found["targets"]["b"] == {"mae": 10.0, "rmse": 10.0, "rows": 2}
    assert (found["rank"], found["rank_score"]) == (1.0, None)
    assert judge_of((), ("a",)).report(target[:, :1], target[:, :1], None)["rank"] is None


def test_the_worst_of_many_targets_are_those_most_deviations_off():
    target = np.array([[0.0, 0.0], [1.0, 100.0], [0.0, np.nan]])
    answers = target + np.array([[0.0, 10.0], [2.0, 0.0], [0.0, 5.0]])
    worst = judge_of((), ("a", "b")).worst(target, answers, None, lambda at: f"row {at}")
    assert worst[0] == {"sample": "row 1", "target": "a", "true": 1.0, "answered": 3.0}
