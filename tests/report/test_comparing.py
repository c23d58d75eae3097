"""Differences are called real where chance makes them seldom, and open where nothing tells."""

import numpy as np
import pytest
import torch
from finished_runs import fitted, small_job, tuned

import hotlap
from hotlap.report.comparing import NOISE, OPEN, REAL, SAME, Value, compare, comparison_table, figures_of, judge
from hotlap.report.document import Figure
from hotlap.report.reading import read_run
from hotlap.report.runs import list_runs


def values(numbers):
    return [Value(value=float(number)) for number in numbers]


def test_groups_that_are_apart_differ_and_groups_that_overlap_do_not():
    assert judge(values([1.0, 1.1, 0.9]), values([2.0, 2.1, 1.9]))[0] == REAL
    assert judge(values([1.0, 2.0, 3.0]), values([1.5, 2.5, 2.2]))[0] == NOISE
    assert judge(values([1.0, 1.0]), values([1.0, 1.0]))[0] == SAME


def test_runs_that_are_equal_show_no_spread():
    for ours, theirs in (([1.0, 1.0], [2.0, 2.0]), ([1.0, 1.0, 1.0], [2.0]), ([1e-200, 2e-200], [1.0, 1.0])):
        verdict, why = judge(values(ours), values(theirs))
        assert verdict == OPEN
        assert "with other seeds" in why


def test_a_score_that_is_not_finite_is_named_and_not_left_out(tmp_path):
    runs = [fitted(tmp_path / name, epochs=2) for name in "ab"]
    runs[1].files.write_metrics([{**record, "valid_loss": float("nan")} for record in runs[1].history])
    found = {one.name: one for one in compare([(run.folder.name, [read_run(run.folder)]) for run in runs])}
    assert found["valid_loss"].verdict == OPEN
    assert "not finite" in found["valid_loss"].why
    assert found["valid_loss"].to_dict()["values"][1] == [None]
    row = next(row for row in comparison_table([found["valid_loss"]]).rows)
    assert [cell.words for cell in row if isinstance(cell, Figure)][1:] == ["nan", ""]


def test_numbers_whose_squares_overflow_are_left_out(tmp_path):
    for at, name in enumerate("abcd"):
        run = fitted(tmp_path / name, epochs=1)
        run.files.write_metrics([{**record, "score": (-1) ** at * 1e299} for record in run.history])
    pairs = [("ab", [read_run(tmp_path / one) for one in "ab"]), ("cd", [read_run(tmp_path / one) for one in "cd"])]
    assert "score" not in {one.name for one in compare(pairs)}


def test_a_difference_of_equal_groups_is_called_real_in_5_percent_of_cases():
    draw = np.random.default_rng(0)
    called = [judge(values(draw.normal(size=4)), values(draw.normal(size=6)))[0] for _ in range(2000)]
    assert 0.03 < np.mean([one == REAL for one in called]) < 0.065


def test_a_run_against_several_is_judged_by_their_spread():
    draw = np.random.default_rng(0)
    called = [judge(values(draw.normal(size=5)), values(draw.normal(size=1)))[0] for _ in range(2000)]
    assert 0.03 < np.mean([one == REAL for one in called]) < 0.07
    assert judge(values([1.0, 1.1]), values([9.0]))[0] == OPEN


def test_one_run_each_is_open_unless_it_has_an_interval():
    assert judge(values([1.0]), values([2.0]))[0] == OPEN
    near = Value(value=1.0, low=0.9, high=1.1), Value(value=1.1, low=1.0, high=1.2)
    far = Value(value=1.0, low=0.9, high=1.1), Value(value=1.5, low=1.4, high=1.6)
    assert judge([near[0]], [near[1]])[0] == NOISE
    assert judge([far[0]], [far[1]])[0] == REAL


def test_the_step_of_a_tuned_run_has_the_interval_of_its_tuning(tmp_path):
    run = read_run(tuned(tmp_path / "run").folder)
    step = figures_of(run)["time of a step"]
    assert step.value == pytest.approx(0.02)
    assert step.low == pytest.approx(0.04 / 2.1)
    assert step.high == pytest.approx(0.04 / 1.9)


def test_scores_of_classes_have_the_chance_of_the_rows_held_out(runs):
    found = figures_of(read_run(runs / "temporal"))
    first = next(iter(found))
    assert first == "macro-F1"  # what decides
    for name in ("macro-F1", "accuracy"):
        assert found[name].low < found[name].value < found[name].high
        rows = 144
        wide = found[name].high - found[name].low
        assert 0.3 < wide / (4 * (0.25 / rows) ** 0.5) < 1.5


def test_runs_are_compared_by_what_they_have_in_common(runs, tmp_path):
    for seed in range(6):
        fitted(tmp_path / str(seed), seed=seed, epochs=1 if seed > 2 else 8)
    groups = [(name, [read_run(tmp_path / one) for one in name]) for name in ("012", "345")]
    found = {one.name: one for one in compare(groups)}
    assert {"accuracy", "valid_loss", "train_loss", "time"} <= set(found)
    assert found["train_loss"].verdict == REAL  # 8 epochs and 1
    assert compare([("a", [read_run(runs / "temporal")]), ("b", [read_run(runs / "fit")])]) != []
    names = {one.name for one in compare([("a", [read_run(runs / "temporal")]), ("b", [read_run(runs / "fit")])])}
    assert names <= {"accuracy", "time"}


def test_the_list_of_runs_has_kind_score_speed_time_and_plan(runs):
    listed = {one.name: one for one in list_runs(runs)}
    assert {name: one.kind for name, one in listed.items()} == {
        "fit": "fit", "trees": "trees", "search": "search", "temporal": "recipe temporal", "script": "hotlap run"
    }  # fmt: skip
    assert all(one.state == "done" for one in listed.values())
    assert listed["fit"].speed_up == 2.0
    assert listed["temporal"].score.startswith("macro-F1 ")
    assert "best of 5 trials" in listed["search"].score
    assert "at_once" in listed["trees"].plan
    assert "eager" in listed["fit"].plan
    assert all(one.seconds > 0 for one in listed.values())


def test_scores_on_other_data_are_not_compared(runs, tmp_path):
    ours = read_run(fitted(tmp_path / "a").folder)
    x = torch.randn(50, 8)
    other = hotlap.fit(small_job_on(x), plan="off", out=tmp_path / "c", progress=False)
    found = {one.name: one for one in compare([("a", [ours]), ("c", [read_run(other.folder)])])}
    assert "other data" in found["accuracy"].why
    assert "other data" not in found["time"].why
    recipe = compare([("a", [read_run(runs / "temporal")]), ("b", [ours])])
    assert all(one.verdict == OPEN for one in recipe)


def test_runs_of_other_seeds_on_the_same_data_are_compared(tmp_path):
    job = small_job()
    runs = []
    for seed in range(2):
        again = hotlap.Job(
            model=small_job(seed).model, data=job.data, valid=job.valid, loss=job.loss, batch_size=20, epochs=2,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), metrics=["accuracy"], seed=seed,
        )  # fmt: skip
        runs.append(read_run(hotlap.fit(again, plan="off", out=tmp_path / str(seed), progress=False).folder))
    assert not any("other data" in one.why for one in compare([("a", runs[:1]), ("b", runs[1:])]))


def small_job_on(x):
    """The small job, judged on other data."""
    job = small_job()
    return hotlap.Job(
        model=job.model, data=job.data, valid=(x, (x[:, 0] > 0).long()), loss=job.loss, optimizer=job.optimizer,
        batch_size=20, epochs=8, metrics=["accuracy"],
    )  # fmt: skip
