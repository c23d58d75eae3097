"""Runs side by side: which numbers are figures, which are times, and what is said where the lines differ."""

import pytest

from hotlap.script.compare import Figure, Outcome, figures, format_comparison


def outcome(out="", err="", wall_s=10.0, code=0, **more):
    return Outcome(wall_s=wall_s, code=code, out=out, err=err, **more)


def found(line, other=None):
    return {figure.name: figure.without for figure in figures(outcome(line), outcome(other or line))}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("loss 0.1234", {"loss": "0.1234"}),
        ("acc: 0.98, f1=.5", {"acc": "0.98", "f1": ".5"}),
        ("Epoch [3/10] Loss: 0.2345 Test Acc: 98.50%", {"Epoch": "3", "Loss": "0.2345", "Test Acc": "98.50"}),
        ("Train Acc: 98.50% Test Acc: 97.10%", {"Train Acc": "98.50", "Test Acc": "97.10"}),
        ("step 900 · train 0.58 · valid 0.36", {"step": "900", "train": "0.58", "valid": "0.36"}),
        (
            "{'loss': 0.5, 'learning_rate': 1e-05, 'train_runtime': 12.3, 'train_samples_per_second': 99.1}",
            {"loss": "0.5", "learning_rate": "1e-05"},
        ),
        (
            "Test set: Average loss: 0.0500, Accuracy: 9836/10000 (98%)",
            {"set: Average loss": "0.0500", "Accuracy": "9836"},
        ),
        ("2026-11-15 21:24:56,123 INFO loss nan after 1,437 samples", {"INFO loss": "nan", "after": "1,437"}),
        ("took 12.5, 3.2 ms, 75 seconds, 44.5it/s, 300 samples/s, elapsed 00:12, ETA: 5", {}),
        ("resnet18 on cuda:0 with fp16", {"resnet18 on cuda": "0"}),
        ("sentiment 0.5 beta 0.9", {"sentiment": "0.5", "beta": "0.9"}),
        ("12 of 40", {"of": "40"}),
    ],
)
def test_a_number_is_called_by_the_words_before_it_unless_it_tells_a_time(line, named):
    assert found(line) == named


def test_the_last_value_counts_whichever_line_it_is_in():
    lines = "epoch 1 loss 0.9\nepoch 2 loss 0.5\nfinal loss 0.4\nepoch 3 loss 0.3\n"
    assert found(lines) == {"epoch": "3", "loss": "0.3", "final loss": "0.4"}


def test_a_bar_that_is_drawn_anew_has_its_last_value():
    assert found("loss 3\rloss 2\rloss 1\n") == {"loss": "1"}


def test_lines_of_one_run_alone_have_no_figures():
    assert found("loss 0.5\nbest 0.1", "loss 0.4\nworst 0.2") == {"loss": "0.5"}


def test_figures_are_found_on_stderr_too_and_hotlaps_own_words_are_none_of_them():
    mine = figures(outcome(err="INFO loss 0.5\n"), outcome(err="INFO loss 0.4\nbaseline 2.88 ms/step 1.2x\n"))
    assert mine == [Figure("INFO loss", "0.5", "0.4")]


@pytest.mark.parametrize(
    ("without", "under", "difference"),
    [
        ("0.5", "0.5", "same"),
        ("0.50", "0.51", "+0.01 (+2.00%)"),
        ("1,000", "900", "-100 (-10.00%)"),
        ("0", "0.5", "+0.5"),
        ("nan", "nan", "same"),
        ("1", "nan", "+nan (+nan%)"),
    ],
)
def test_a_difference_is_told_as_such_and_as_a_part(without, under, difference):
    assert Figure("x", without, under).difference == difference


def test_both_stand_side_by_side():
    lines = format_comparison(
        [outcome("loss 0.50\ntook 9 s", wall_s=10)], [outcome("loss 0.51\ntook 840 ms", wall_s=4)]
    )
    assert lines == [
        "           without hotlap  with hotlap",
        "wall       10 s            4 s          2.5x as fast",
        "CPU time   0 s             0 s",
        "start-up   0 s             0 s",
        "tuning     0 s             0 s",
        "the rest   10 s            4 s          2.5x as fast",
        "exit code  0               0            same",
        "loss       0.50            0.51         +0.01 (+2.00%)",
        "hotlap changed nothing in the end: a difference in time is noise plus the cost of watching and trials",
        "printed: the same 2 lines except for their numbers",
    ]


def test_times_of_several_runs_have_their_spread_and_start_up_and_tuning_stand_apart():
    without = [outcome(wall_s=10, cpu_s=12, startup_s=2), outcome(wall_s=12, cpu_s=14, startup_s=2)]
    under = [outcome(wall_s=6, cpu_s=7, startup_s=3, tuning_s=1, is_changed=True) for _ in range(2)]
    assert format_comparison(without, under)[1:6] == [
        "wall       11 s [10 s, 12 s]  6 s [6 s, 6 s]  1.83x as fast [1.67, 2]",
        "CPU time   13 s [12 s, 14 s]  7 s [7 s, 7 s]",
        "start-up   2 s [2 s, 2 s]     3 s [3 s, 3 s]",
        "tuning     0 s                1 s [1 s, 1 s]",
        "the rest   9 s [8 s, 10 s]    2 s [2 s, 2 s]  4.5x as fast [4, 5]",
    ]


@pytest.mark.parametrize(
    ("without", "under", "changed", "said"),
    [
        ([10, 12], [6, 7], True, "all 2 runs with hotlap were faster than all runs without"),
        ([6, 7], [10, 12], True, "all 2 runs with hotlap were SLOWER than all runs without"),
        ([10, 12], [9, 11], True, "runs of the same kind differ as much as both kinds do"),
        ([10], [5], True, "one run each has no spread"),
        ([10, 12], [6, 7], False, "hotlap changed nothing in the end: a difference in time is noise"),
    ],
)
def test_it_says_what_a_difference_in_time_is_worth(without, under, changed, said):
    runs = [[outcome(wall_s=s, is_changed=changed) for s in times] for times in (without, under)]
    assert format_comparison(*runs)[-2].startswith(said)


@pytest.mark.parametrize(
    ("without", "under", "said"),
    [
        ("a 1\n", "a 1\n", "identical"),
        ("at 0x7f01\n", "at 0x7f02\n", "the same 1 lines except for their numbers"),
        ("a\nb\n", "b\na\n", "DIFFERENT in structure: the same lines except for their numbers, in another order"),
        ("a 1\na 2\nb\n", "a 1\n", "DIFFERENT in structure: 2 lines only without hotlap, the first: 'a #'"),
        (
            "a\n",
            "b\x1b\n",
            "DIFFERENT in structure: "
            "1 lines only without hotlap, the first: 'a'; 1 lines only with it, the first: 'b\\x1b'",
        ),
    ],
)
def test_it_says_whether_the_same_lines_were_printed(without, under, said):
    assert format_comparison([outcome(without)], [outcome(under)])[-1] == f"printed: {said}"


def test_exit_codes_that_differ_are_not_overlooked():
    assert "exit code  0               137          DIFFERENT" in format_comparison([outcome()], [outcome(code=137)])
