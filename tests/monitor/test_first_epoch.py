"""The check after the first epoch, from made-up figures."""

import pytest

from hotlap.monitor.first_epoch import FirstEpoch


def check(**figures):
    return FirstEpoch(**{"expected_s": 20.0, "steps_s": 21.0, "first_loss": 2.0, "last_loss": 1.0, **figures})


def test_an_epoch_that_went_as_expected_is_one_line():
    assert check().lines() == ["first epoch: 21 s, expected 20 s"]
    assert check(epochs_left=9, evaluation_s=1.0).lines() == [
        "first epoch: 21 s, expected 20 s; 3 min 18 s for the rest at this pace"
    ]


def test_what_tuning_cost_is_shown_and_no_problem():
    lines = check(steps_s=30.0, tuning_s=9.0).lines()
    assert lines == ["first epoch: 30 s, expected 20 s, of which tuning cost 9 s"]


@pytest.mark.parametrize(
    ("problem", "figures"),
    [
        ("steps became slower: 2 times as long as the first ones", {"steps_s": 40.0}),
        ("steps became slower: 2 times as long as the first ones; batches were waited for 15 s",
         {"steps_s": 40.0, "feeding_s": 15.0}),
        ("the evaluation took 25 s, longer than the epoch", {"evaluation_s": 25.0}),
        ("the loss has not fallen: 2 after the first steps, 2.5 at the end", {"last_loss": 2.5}),
        ("the loss has not fallen: 2 after the first steps, nan at the end", {"last_loss": float("nan")}),
        ("memory has grown from 1.0 GiB to 2.0 GiB", {"first_bytes": 2**30, "last_bytes": 2**31}),
    ],
)  # fmt: skip
def test_what_looks_wrong_gets_a_line_with_its_figures(problem, figures):
    (found,) = check(**figures).problems()
    assert found.startswith(problem)


@pytest.mark.parametrize(
    "figures",
    [
        {"steps_s": 24.0}, {"expected_s": 1.0, "steps_s": 2.5}, {"first_bytes": 100, "last_bytes": 105},
        {"first_loss": float("nan")}, {"evaluation_s": 15.0}, {"steps_s": 2.1, "expected_s": 2.0, "evaluation_s": 2.0},
    ],
)  # fmt: skip
def test_what_is_usual_is_no_problem(figures):
    assert check(**figures).problems() == []
