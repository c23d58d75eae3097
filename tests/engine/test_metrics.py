import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotlap.core.errors import TrainingError
from hotlap.engine.evaluate import make_metrics


def over_batches(wanted, output, target, size, loss=None):
    metrics = make_metrics(wanted, loss)
    for o, t in zip(output.split(size), target.split(size), strict=True):
        for metric in metrics.values():
            metric.add(o, t, len(t))
    return {name: metric.result() for name, metric in metrics.items()}


def f1_by_hand(predicted, target, classes):
    scores = []
    for c in range(classes):
        hits = ((predicted == c) & (target == c)).sum().item()
        wrong = ((predicted == c) ^ (target == c)).sum().item()
        if hits + wrong:
            scores.append(2 * hits / (2 * hits + wrong))
    return sum(scores) / len(scores)


@settings(deadline=None)
@given(n=st.integers(1, 40), classes=st.integers(2, 6), size=st.integers(1, 45), seed=st.integers(0, 99))
def test_class_metrics_do_not_depend_on_how_the_data_is_cut(n, classes, size, seed):
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(n, classes, generator=generator)
    target = torch.randint(classes, (n,), generator=generator)
    scores = over_batches(["accuracy", "macro_f1"], output, target, size)
    predicted = output.argmax(1)
    assert scores["accuracy"] == pytest.approx((predicted == target).double().mean().item())
    assert scores["macro_f1"] == pytest.approx(f1_by_hand(predicted, target, classes))


@settings(deadline=None)
@given(n=st.integers(1, 40), size=st.integers(1, 45), column=st.booleans(), seed=st.integers(0, 99))
def test_error_metrics_are_exact_and_a_column_is_not_broadcast(n, size, column, seed):
    generator = torch.Generator().manual_seed(seed)
    output, target = torch.randn(n, generator=generator), torch.randn(n, generator=generator)
    scores = over_batches(["mae", "rmse"], output.unsqueeze(1) if column else output, target, size)
    difference = output.double() - target.double()
    assert scores["mae"] == pytest.approx(difference.abs().mean().item())
    assert scores["rmse"] == pytest.approx(difference.square().mean().sqrt().item())


@pytest.mark.parametrize(
    "function",
    [
        lambda o, t: (o - t).abs(),
        lambda o, t: (o - t).abs().mean(),
        lambda o, t: (o - t).abs().mean().item(),
        lambda o, t: ((o - t).abs().sum(), len(t)),
        lambda o, t: ((o - t).abs().sum(), torch.tensor(len(t))),
    ],
    ids=["per sample", "mean", "number", "sum and int", "sum and tensor"],
)
def test_a_metric_of_ones_own_is_exact_in_every_form_it_may_have(function):
    output, target = torch.arange(7.0), torch.zeros(7)
    assert over_batches({"mine": function}, output, target, 3)["mine"] == pytest.approx(3.0)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_one_logit_is_a_binary_decision(shape):
    output = torch.tensor([2.0, -1.0, 0.5, -0.5, 3.0, -2.0]).reshape(shape)
    target = torch.tensor([1, 0, 0, 0, 1, 1])
    scores = over_batches(["accuracy", "macro_f1"], output, target, 4)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["macro_f1"] == pytest.approx((2 * 2 / 6 + 2 * 2 / 6) / 2)


def test_ignored_targets_do_not_count():
    output = torch.eye(3)[[0, 1, 2, 0]]
    target = torch.tensor([0, 1, -100, 2])
    scores = over_batches(["accuracy", "macro_f1"], output, target, 2)
    assert scores["accuracy"] == pytest.approx(2 / 3)
    assert scores["macro_f1"] == pytest.approx(f1_by_hand(torch.tensor([0, 1, 0]), torch.tensor([0, 1, 2]), 3))


def test_sequences_have_their_classes_in_dimension_one():
    output = torch.zeros(2, 4, 5)
    output[:, 3] = 1
    target = torch.full((2, 5), 3)
    target[0, 0] = 1
    assert over_batches(["accuracy"], output, target, 1)["accuracy"] == pytest.approx(0.9)


def test_what_cannot_be_compared_is_an_error_with_both_shapes():
    with pytest.raises(TrainingError, match=r"\(4, 3, 2\).*\(4,\)"):
        over_batches(["accuracy"], torch.zeros(4, 3, 2), torch.zeros(4), 4)
    with pytest.raises(TrainingError, match=r"\(4, 3\).*\(4,\)"):
        over_batches(["mae"], torch.zeros(4, 3), torch.zeros(4), 4)
    with pytest.raises(TrainingError, match="metric 'mine' returned str"):
        over_batches({"mine": lambda o, t: "good"}, torch.zeros(4), torch.zeros(4), 4)


def test_probabilities_are_told_from_logits_by_the_loss():
    output, target = torch.tensor([0.2, 0.9, 0.4]), torch.tensor([0.0, 1.0, 1.0])
    assert over_batches(["accuracy"], output, target, 2, nn.BCELoss())["accuracy"] == pytest.approx(2 / 3)
    assert over_batches(["accuracy"], output, target, 2, nn.BCEWithLogitsLoss())["accuracy"] == pytest.approx(2 / 3)
    assert over_batches(["accuracy"], output - 0.5, target, 2, nn.BCEWithLogitsLoss())["accuracy"] == pytest.approx(
        2 / 3
    )
    assert over_batches(["accuracy"], output, 1 - target, 2, nn.BCELoss())["accuracy"] == pytest.approx(1 / 3)


def test_one_hot_targets_are_classes_to_cross_entropy_and_answers_to_binary_losses():
    output = torch.tensor([[2.0, 1.0, -1.0], [0.0, 3.0, 1.0]])
    target = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    assert over_batches(["accuracy"], output, target, 1, nn.CrossEntropyLoss())["accuracy"] == pytest.approx(0.5)
    assert over_batches(["accuracy"], output, target, 1, nn.BCEWithLogitsLoss())["accuracy"] == pytest.approx(4 / 6)
    with pytest.raises(TrainingError, match="one-hot classes or several yes-or-no"):
        over_batches(["accuracy"], output, target, 1)


def test_what_the_loss_ignores_the_metrics_ignore():
    output, target = torch.eye(3)[[0, 1, 2]], torch.tensor([0, 1, 1])
    assert over_batches(["accuracy"], output, target, 3, nn.CrossEntropyLoss(ignore_index=0))[
        "accuracy"
    ] == pytest.approx(0.5)


def test_where_the_classes_are_is_found_or_refused():
    output = torch.zeros(2, 5, 4)
    output[..., 3] = 1
    target = torch.full((2, 5), 3)
    assert over_batches(["accuracy"], output, target, 1)["accuracy"] == 1.0
    with pytest.raises(TrainingError, match="dimension 1 or in the last"):
        over_batches(["accuracy"], torch.zeros(2, 4, 4), torch.zeros(2, 4).long(), 1)
    assert (
        over_batches(["accuracy"], torch.zeros(2, 4, 4), torch.zeros(2, 4).long(), 1, nn.CrossEntropyLoss())["accuracy"]
        == 1
    )


@pytest.mark.parametrize("said", [np.float32(2), np.full(3, 2.0), np.int64(2)])
def test_numbers_of_numpy_are_numbers(said):
    assert over_batches({"mine": lambda o, t: said}, torch.zeros(3), torch.zeros(3), 3)["mine"] == pytest.approx(2)


def test_a_list_of_two_values_is_not_a_sum_and_a_count():
    with pytest.raises(TrainingError, match="returned list"):
        over_batches({"mine": lambda o, t: [1.0, 2.0]}, torch.zeros(2), torch.zeros(2), 2)
