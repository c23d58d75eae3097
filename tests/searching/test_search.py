"""`hotlap.search`: trials that are chosen, pruned, killed and gone on with; the best one is a Run."""

import functools
import gc
import json
import sys

import killed
import made_up_time
import pytest
import torch
from plain import class_data, parameters_of
from torch import nn

import hotlap
from hotlap import JobError, MachineError, StoreError, TrainingError, search, trees
from hotlap.fitting.task import Found
from hotlap.searching import search as module
from hotlap.searching.search import _Searching
from hotlap.searching.space import checked_space
from hotlap.store.telemetry import read_live
from hotlap.trees.libraries import more_is_better

SPACE = {"lr": (1e-3, 1.0, "log"), "width": [4, 8]}


class Network(nn.Sequential):
    """Of its own class, to be counted."""

    def __init__(self, width):
        super().__init__(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3))


def job(values, **changes):
    given = {
        "model": Network(values["width"]).double(),
        "data": class_data(),
        "valid": class_data(30, seed=9),
        "loss": nn.CrossEntropyLoss(),
        "optimizer": functools.partial(torch.optim.SGD, lr=values["lr"]),
        "batch_size": 10,
        "epochs": 3,
        "device": "cpu",
    }
    return hotlap.Job(**{**given, **changes})


def searched(out=None, *, space=SPACE, made=job, trials=3, **settings):
    return search(space, made, trials=trials, out=out, **{"plan": "off", "progress": False, **settings})


def told(found):
    return [(one.number, one.values, one.state, one.score) for one in found.trials]


def test_the_best_trial_is_a_run_and_all_are_listed(tmp_path):
    found = searched(tmp_path / "search", trials=4)
    scores = [one.score for one in found.trials]
    best = found.trials[scores.index(min(scores))]
    assert [one.state for one in found.trials] == ["complete"] * 4
    assert (found.score, found.values, found.monitor) == (best.score, best.values, "valid_loss")
    assert isinstance(found.best, hotlap.Run)
    assert found.best.best["valid_loss"] == found.score
    assert found.best.folder == tmp_path / f"search/trials/{best.number:04d}"
    assert all(1e-3 <= one.values["lr"] <= 1.0 and one.values["width"] in (4, 8) for one in found.trials)
    stored = json.loads((tmp_path / "search/search.json").read_text())
    assert [one["score"] for one in stored["trials"]] == scores
    assert json.loads(json.dumps(found.to_dict()))["values"] == found.values
    assert "trials    4: 4 complete" in found.summary()


def test_trials_are_weighed_and_drawn(tmp_path):
    found = searched(tmp_path / "search", trials=6)
    assert set(found.importance) == {"lr", "width"}
    assert sum(found.importance.values()) == pytest.approx(1)
    assert "explained" in found.summary()
    assert (tmp_path / "search/history.svg").read_text().count("<circle") >= 6
    assert "lr</text>" in (tmp_path / "search/importance.svg").read_text()


def test_higher_is_better_where_the_monitor_says_so(tmp_path):
    def of_accuracy(values):
        return job(values, metrics=["accuracy"], monitor="accuracy")

    found = searched(tmp_path / "search", made=of_accuracy)
    assert found.score == max(one.score for one in found.trials)
    again = searched(made=of_accuracy, resume=tmp_path / "search")
    assert (again.score, told(again)) == (found.score, told(found))


def test_a_function_of_an_optuna_trial_gives_the_job(tmp_path):
    def of_trial(trial):
        return job({"lr": trial.suggest_float("rate", 0.01, 0.1), "width": 4})

    found = searched(tmp_path / "search", space=of_trial, made=None)
    assert [list(one.values) for one in found.trials] == [["rate"]] * 3


def test_the_same_search_comes_to_the_same_to_the_last_bit(tmp_path):
    one, other = searched(tmp_path / "a"), searched(tmp_path / "b")
    assert told(one) == told(other)
    assert torch.equal(parameters_of(one.best.model), parameters_of(other.best.model))


# --- killed --------------------------------------------------------------------------------------------


def killed_in(method, when):
    """Have a method of the search kill the process when its `when`-th call begins."""
    real, calls = getattr(_Searching, method), []

    def deadly(*given):
        calls.append(given)
        if len(calls) == when:
            killed.kill_me()
        return real(*given)

    setattr(_Searching, method, deadly)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What an undisturbed search comes to."""
    return searched(tmp_path_factory.mktemp("whole") / "search")


@pytest.mark.parametrize(
    ("method", "when", "save_every"), [("judged", 5, None), ("judged", 5, 2), ("score_of", 2, 2), ("say", 2, None)]
)
def test_a_search_that_is_killed_goes_on_and_comes_to_the_same(tmp_path, whole, method, when, save_every):
    def child():
        killed_in(method, when)
        searched(tmp_path / "killed", save_every=save_every)

    assert killed.in_a_child(child) == -9
    with (tmp_path / "killed/trials.journal").open("a") as journal:
        journal.write('{"op_code":8,"wor')  # a line that the kill cut short
    made = []

    def counted(values):
        made.append(values)
        return job(values)

    gone_on = searched(made=counted, resume=tmp_path / "killed", save_every=save_every)
    assert told(gone_on) == told(whole)
    assert len(made) <= 3


def test_an_interrupt_ends_the_search_with_the_line_that_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(values):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "search", made=interrupted, progress=True)
    assert f"go on with: hotlap.search(…, resume='{tmp_path / 'search'}')" in capsys.readouterr().err
    assert len(searched(resume=tmp_path / "search").trials) == 3


def test_another_space_or_seed_is_refused_where_a_search_goes_on(tmp_path):
    searched(tmp_path / "search", trials=1)
    with pytest.raises(StoreError, match=r"was another search in 2 points:(.|\n)*space was(.|\n)*seed was 0, is 1"):
        searched(resume=tmp_path / "search", space={**SPACE, "width": [4]}, seed=1)
    with pytest.raises(StoreError, match="is no search"):
        searched(resume=tmp_path)


# --- trials that end early -----------------------------------------------------------------------------


def test_a_trial_that_fails_is_recorded_and_ends_nothing(tmp_path):
    def failing(values):
        if values["width"] == 8:
            raise RuntimeError("no room\nfor 8")
        return job(values)

    found = searched(tmp_path / "search", space={"width": [4, 8], "lr": [0.1]}, made=failing, trials=8)
    failed = [one for one in found.trials if one.values["width"] == 8]
    assert {one.state for one in failed} == {"failed"}
    assert {one.why for one in failed} == {"RuntimeError: no room"}
    assert 0 < len(failed) < 8 == len(found.trials)


def test_where_no_trial_completes_the_first_reason_is_given(tmp_path):
    with pytest.raises(TrainingError, match=r"none of 2 trials completed; the first: JobError: .*without valid"):
        searched(tmp_path / "search", made=lambda values: job(values, valid=None), trials=2)


def test_a_trial_worse_than_the_median_is_pruned_after_its_first_evaluations(tmp_path):
    space = {"lr": [0.3, 1e-9], "width": [4]}
    longer = functools.partial(job, epochs=8)
    found = searched(tmp_path / "search", space=space, made=longer, trials=11)
    bad = [one for one in found.trials[6:] if one.values["lr"] == 1e-9]
    assert bad
    assert {one.state for one in bad} == {"pruned"}
    assert all("worse than the median" in one.why for one in bad)
    lines = (tmp_path / f"search/trials/{bad[0].number:04d}/metrics.jsonl").read_text().splitlines()
    assert len(lines) == 2
    whole = searched(tmp_path / "whole", space=space, made=longer, trials=bad[0].number, prune=False)
    assert {one.state for one in whole.trials} == {"complete"}


# --- what trials share ---------------------------------------------------------------------------------


def test_memory_is_flat_the_best_model_and_that_of_the_trial_are_all(tmp_path):
    def living():
        gc.collect()
        return sum(isinstance(thing, Network) for thing in gc.get_objects())

    before, alive = living(), []

    def counted(values):
        made = job(values)
        alive.append(living() - before)
        return made

    searched(tmp_path / "search", made=counted, trials=6)
    assert alive[0] == 1
    assert max(alive) == 2


def test_the_plan_that_a_trial_found_is_where_the_next_begins(tmp_path, monkeypatch):
    real, begun, served = module.fit, [], []

    def fit(given, **settings):
        begun.append(settings["plan"])
        served.append(settings["repeats"])
        return real(given, **{**settings, "plan": settings["plan"] or "off"})

    monkeypatch.setattr(module, "fit", fit)
    monkeypatch.setattr(module, "was_tuned", lambda ledger: len(begun) == 2)
    found = searched(tmp_path / "search", trials=4, plan=None)
    assert begun[:2] == [None, None]
    assert served == [4, 3, 2, 1]
    assert isinstance(begun[2], Found)
    assert begun[2] is begun[3]
    assert begun[2].plan == found.best.plan


def test_the_randomness_of_the_caller_stays_as_it_was(tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    searched(tmp_path / "search", trials=1)
    assert torch.equal(torch.get_rng_state(), before)


# --- a deadline, and what cannot be --------------------------------------------------------------------


def test_within_a_deadline_there_are_fewer_trials_and_what_is_missing_is_listed(tmp_path, monkeypatch):
    clock = made_up_time.make_up_time(monkeypatch)
    monkeypatch.setattr(made_up_time, "STEP_S", 0.2)
    began = clock()
    found = searched(tmp_path / "search", trials=20, finish_in=20)
    assert 15 < clock() - began <= 20
    complete = [one for one in found.trials if one.state == "complete"]
    assert len(complete) == len(found.trials) == 6
    assert found.left_out == ("14 of 20 trials",)
    assert "left out  14 of 20 trials" in found.summary()


def test_a_first_trial_that_does_not_fit_is_cut_and_still_the_best(tmp_path, monkeypatch):
    made_up_time.make_up_time(monkeypatch)
    monkeypatch.setattr(made_up_time, "STEP_S", 0.2)
    found = searched(tmp_path / "search", made=lambda values: job(values, epochs=100), finish_in=10)
    assert len(found.trials) == 1
    assert [line.partition(" of ")[0].rstrip("0123456789") for line in found.left_out] == ["", "trial 1: "]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "the space is empty"),
        ({"a": []}, "needs choices that differ"),
        ({"a": [1, 1]}, "needs choices that differ"),
        ({"a": 3}, "must be a list of choices"),
        ({"a": (1, 2, "lin")}, "must be a list of choices"),
        ({"a": (2, 1)}, "the smaller one first"),
        ({"a": (0, 1, "log")}, "both must be above 0"),
        ({"a": ("x", "y")}, "write choices as a list"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused(wrong, why):
    with pytest.raises(JobError, match=why):
        checked_space(wrong)


def test_choices_may_be_anything(tmp_path):
    found = searched(
        tmp_path / "search", space={"sizes": [(4, 4), (8,)]}, made=lambda v: job({"lr": 0.1, "width": v["sizes"][0]})
    )
    assert found.values["sizes"] in ((4, 4), (8,))


def test_without_optuna_the_extra_is_named_before_anything_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MachineError, match=r"pip install '\.\[search\]'"):
        searched(tmp_path / "search")
    assert not (tmp_path / "search").exists()


@pytest.mark.parametrize(
    ("given", "why"), [({"trials": 0}, "trials=0"), ({"made": None}, "job=None"), ({"space": 3}, "a dict and")]
)
def test_a_call_that_makes_no_sense_is_refused(given, why, tmp_path):
    with pytest.raises(JobError, match=why):
        searched(tmp_path / "search", **given)


# --- trees ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("library", "metric"), [("xgboost", "rmse"), ("lightgbm", "l2")])
def test_trees_are_searched_as_networks_are(tmp_path, library, metric):
    pytest.importorskip(library)
    x, y = (column.numpy() for column in class_data(200))

    def of_trees(chosen):
        valid, params = (x[150:], y[150:]), {"learning_rate": chosen["rate"]}
        return trees.TreeJob(x[:150], y[:150], valid=valid, library=library, params=params, rounds=4)

    space = {"rate": (0.01, 1.0, "log")}
    found = searched(tmp_path / "search", space=space, made=of_trees)
    assert isinstance(found.best, trees.TreeRun)
    assert found.monitor == f"valid_{metric}"
    assert found.score == min(one.score for one in found.trials) == found.best.best[found.monitor]
    again = searched(space=space, made=of_trees, trials=4, resume=tmp_path / "search")
    assert told(again)[:3] == told(found)
    assert again.best.best[found.monitor] == again.score


def test_of_auc_more_is_better_and_of_mape_less():
    assert [more_is_better(one) for one in ("auc", "aucpr", "ndcg@5", "map", "map@3-", "mape", "rmse", "prex")] == [
        True, True, True, True, True, False, False, False
    ]  # fmt: skip


def test_a_search_and_its_trials_lay_out_how_they_stand(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_SAMPLES", "on")
    searched(tmp_path / "search", trials=2)
    live = read_live(tmp_path / "search")
    assert (live["kind"], live["step"], live["steps"], live["ended"]) == ("search", 2, 2, True)
    assert live["metrics"]["valid_loss"] > 0
    monkeypatch.setenv("HOTLAP_SAMPLES", "off")
    searched(tmp_path / "other", trials=1)
    assert read_live(tmp_path / "other") is None
