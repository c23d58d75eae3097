"""Scores: worked out by hand, and the same as scikit-learn's where that is installed."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import DataError
from hotlap.recipes import scores

TARGET = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2])
PREDICTED = np.array([0, 0, 0, 1, 1, 1, 0, 2, 2, 0])


def test_confusion_and_scores_of_classes_are_those_worked_out_by_hand():
    assert scores.confusion(TARGET, PREDICTED).tolist() == [[3, 1, 0], [1, 2, 0], [1, 0, 2]]
    each = scores.per_class(TARGET, PREDICTED)
    assert each.precision.tolist() == [3 / 5, 2 / 3, 1.0]
    assert each.recall.tolist() == [3 / 4, 2 / 3, 2 / 3]
    assert each.f1.tolist() == [6 / 9, 4 / 6, 4 / 5]
    assert each.support.tolist() == [4, 3, 3]
    assert scores.accuracy(TARGET, PREDICTED) == 0.7
    assert scores.macro_f1(TARGET, PREDICTED) == pytest.approx((2 / 3 + 2 / 3 + 4 / 5) / 3, abs=1e-15)
    assert scores.weighted_f1(TARGET, PREDICTED) == pytest.approx((4 * 2 / 3 + 3 * 2 / 3 + 3 * 4 / 5) / 10, abs=1e-15)


def test_a_class_that_is_neither_there_nor_predicted_does_not_count():
    target, predicted = [0, 0, 2], [0, 0, 2]
    assert scores.macro_f1(target, predicted) == 1.0
    assert scores.report(target, predicted, classes=["a", "b", "c", "d"])["macro_f1"] == 1.0
    assert scores.per_class(target, predicted, 4).f1.tolist() == [1, 0, 1, 0]


def test_roc_auc_counts_equal_scores_as_half():
    # Of 2 × 3 pairs of a one and a zero: 4 in the right order, one equal, one wrong.
    target, given_scores = [0, 0, 1, 0, 1], [0.1, 0.4, 0.4, 0.5, 0.8]
    assert scores.roc_auc(target, given_scores) == pytest.approx(4.5 / 6, abs=1e-15)
    assert scores.roc_auc(target, np.stack([np.zeros(5), given_scores], 1)) == pytest.approx(4.5 / 6, abs=1e-15)
    assert scores.roc_auc([0, 1, 0, 1], [0.5, 0.5, 0.5, 0.5]) == 0.5
    assert math.isnan(scores.roc_auc([1, 1], [0.2, 0.3]))


def test_roc_auc_of_several_classes_is_the_mean_of_one_against_the_rest():
    target = [0, 1, 2, 1]
    given_scores = np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1], [0.1, 0.7, 0.2], [0.5, 0.3, 0.2]])
    # Class 0: above all 3. Class 1: of 4 pairs, 2 right. Class 2: 2 of 3 right and one equal.
    assert scores.roc_auc(target, given_scores) == pytest.approx((1 + 2 / 4 + 2.5 / 3) / 3, abs=1e-15)


def test_log_loss_is_the_mean_surprise_and_never_infinite():
    assert scores.log_loss([1, 0], [0.5, 0.25]) == pytest.approx(-(math.log(0.5) + math.log(0.75)) / 2, abs=1e-15)
    assert scores.log_loss([0, 2], np.array([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])) == pytest.approx(
        -(math.log(0.2) + math.log(0.8)) / 2, abs=1e-15
    )
    assert scores.log_loss([0], [1.0]) == pytest.approx(-math.log(np.finfo(np.float64).eps))


def test_scores_of_numbers_are_those_worked_out_by_hand():
    target, predicted = [1.0, 2.0, 0.0, -4.0], [2.0, 2.0, 0.0, -1.0]
    assert scores.mae(target, predicted) == 1.0
    assert scores.rmse(target, predicted) == pytest.approx(math.sqrt(10 / 4), abs=1e-15)
    assert scores.smape(target, predicted) == pytest.approx((1 / 1.5 + 0 + 0 + 3 / 2.5) / 4, abs=1e-15)


def test_class_weights_make_all_classes_count_alike():
    target = np.array([0] * 6 + [1] * 3 + [3])
    weights = scores.class_weights(target, 5)
    assert weights.tolist() == [10 / 18, 10 / 9, 0, 10 / 3, 0]
    assert (weights[target]).sum() == pytest.approx(len(target))


def f1_of(rare, target, predicted):
    hits = sum(p == t == rare for p, t in zip(predicted, target, strict=True))
    return 2 * hits / max(1, sum(p == rare for p in predicted) + sum(t == rare for t in target))


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from([0.0, 0.1, 0.3, 0.30000000000000004, 0.7, 1.0])),
        min_size=2,
        max_size=25,
    )
)
def test_no_threshold_is_better_than_the_best(rows):
    target, given_scores = [t for t, _ in rows], [s for _, s in rows]
    rare = int(2 * sum(target) <= len(target))
    found = scores.best_threshold(given_scores, target)
    best = f1_of(rare, target, [int(s >= found) for s in given_scores])
    for other in (*given_scores, 0.05, 0.5, 2.0):
        assert f1_of(rare, target, [int(s >= other) for s in given_scores]) <= best + 1e-12


def test_the_best_threshold_lies_half_way_between_two_scores():
    assert scores.best_threshold([0.1, 0.2, 0.6, 0.8], [0, 0, 1, 1]) == pytest.approx(0.4)
    assert scores.best_threshold([0.1, 0.2, 0.3, 0.6, 0.8], [0, 1, 1, 1, 1]) == pytest.approx(0.15)


@pytest.mark.parametrize("below", [0.1, 0.3, 0.7, 1e-300])
def test_the_best_threshold_parts_scores_that_have_nothing_between_them(below):
    between = np.nextafter(below, 1)
    for one, other in ((below, between), (between, np.nextafter(between, 1))):
        assert one < scores.best_threshold([one, other], [0, 1]) <= other


def test_a_report_is_json_and_lines_of_it_are_aligned():
    probabilities = np.eye(3)[PREDICTED] * 0.7 + 0.1
    found = scores.report(TARGET, PREDICTED, probabilities, ["down", "flat", "up"])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["classes"]["flat"] == {"precision": 2 / 3, "recall": 2 / 3, "f1": 2 / 3, "support": 3}
    assert found["confusion"] == [[3, 1, 0], [1, 2, 0], [1, 0, 2]]
    assert found["roc_auc"] == pytest.approx((17 / 24 + 16 / 21 + 5 / 6) / 3, abs=1e-15)
    assert found["log_loss"] == pytest.approx(-(7 * math.log(0.8) + 3 * math.log(0.1)) / 10, abs=1e-12)
    assert scores.told(found) == [
        "               precision  recall      F1     rows",
        "down               0.600   0.750   0.667        4",
        "flat               0.667   0.667   0.667        3",
        "up                 1.000   0.667   0.800        3",
        "macro mean         0.756   0.694   0.711       10",
        "weighted mean      0.740   0.700   0.707       10",
        "accuracy 0.7 · macro F1 0.7111 · weighted F1 0.7067 · ROC AUC 0.7679 · log loss 0.847 (10 rows)",
    ]


def test_a_roc_auc_that_is_none_is_null_and_not_told():
    found = scores.report([1, 1], [1, 0], [0.6, 0.4])
    assert found["roc_auc"] is None
    assert "ROC" not in scores.told(found)[-1]


def test_a_report_of_numbers_has_one_line():
    found = scores.number_report([1.0, 2.0], [1.0, 4.0])
    assert scores.told(found) == ["MAE 1 · RMSE 1.414 · SMAPE 0.3333 (2 rows)"]


def test_tensors_lists_and_flags_are_taken():
    assert scores.accuracy(torch.tensor([0, 1]), [0, 1]) == 1.0
    assert scores.roc_auc([False, True], torch.tensor([0.1, 0.2])) == 1.0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: scores.accuracy([0, 1], [0]), "the target has 2 rows and what is compared with it 1"),
        (lambda: scores.accuracy([0, -1], [0, 1]), "there is -1 in the target; give a whole number"),
        (lambda: scores.accuracy([0.5, 1], [0, 1]), "the target of shape (2,) and type float64 cannot be"),
        (lambda: scores.accuracy([], []), "the target of shape (0,)"),
        (lambda: scores.confusion([0, 3], [0, 1], 3), "there is a class 3 among 3 classes"),
        (lambda: scores.roc_auc([0, 2], [0.1, 0.2]), "there is class 2"),
        (lambda: scores.roc_auc([0, 3], np.ones((2, 3))), "scores have 3 columns"),
        (lambda: scores.log_loss([0, 1], [0.5, float("nan")]), "there is nan in row 2 of the probabilities"),
        (lambda: scores.mae([1.0, 2.0], [[1.0], [2.0]]), "shape (2,) and the predictions (2, 1)"),
        (lambda: scores.best_threshold([0.1, 0.2], [0, 2]), "a threshold parts two classes"),
    ],
)
def test_what_cannot_be_scored_is_refused_in_a_line(make, said):
    with pytest.raises(DataError) as error:
        make()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("seed", range(5))
def test_scores_are_those_of_scikit_learn(classes, seed):
    metrics = pytest.importorskip("sklearn.metrics")
    weights = pytest.importorskip("sklearn.utils.class_weight")
    rng = np.random.default_rng(seed)
    target = np.concatenate([np.arange(classes), rng.integers(classes, size=300)])
    given_scores = np.round(rng.random((len(target), classes)), 1) + 0.01  # many are equal
    given_scores /= given_scores.sum(1, keepdims=True)
    predicted = given_scores.argmax(1)
    predicted[predicted == classes - 1] = 0  # one class is never predicted
    assert np.array_equal(scores.confusion(target, predicted), metrics.confusion_matrix(target, predicted))
    each = metrics.precision_recall_fscore_support(target, predicted, zero_division=0)
    for ours, theirs in zip(scores.per_class(target, predicted), each, strict=True):
        assert np.allclose(ours, theirs, rtol=0, atol=1e-14)
    auc = metrics.roc_auc_score(target, given_scores[:, 1] if classes == 2 else given_scores, multi_class="ovr")
    numbers, others = rng.normal(size=50), rng.normal(size=50)
    for ours, theirs in [
        (scores.accuracy(target, predicted), metrics.accuracy_score(target, predicted)),
        (scores.macro_f1(target, predicted), metrics.f1_score(target, predicted, average="macro")),
        (scores.weighted_f1(target, predicted), metrics.f1_score(target, predicted, average="weighted")),
        (scores.roc_auc(target, given_scores), auc),
        (scores.log_loss(target, given_scores), metrics.log_loss(target, given_scores)),
        (scores.mae(numbers, others), metrics.mean_absolute_error(numbers, others)),
        (scores.rmse(numbers, others), metrics.root_mean_squared_error(numbers, others)),
    ]:
        assert ours == pytest.approx(theirs, abs=1e-12)
    balanced = weights.compute_class_weight("balanced", classes=np.arange(classes), y=target)
    assert np.allclose(scores.class_weights(target), balanced, rtol=1e-14, atol=0)


def test_rows_with_nan_are_counted_not_cells():
    scores_of = np.full((4, 3), 1 / 3)
    scores_of[1:3] = np.nan
    with pytest.raises(DataError, match=r"there is nan in row 2 of the scores, the first of 2 such rows"):
        scores.roc_auc([0, 1, 2, 1], scores_of)
