"""Profiles: what they mean for each recipe, the time that is expected, and what earlier runs scored."""

from types import SimpleNamespace

import made_up_time
import numpy as np
import pytest
import torch
from amount_recipe import AmountRecipe
from plain import class_data, small_mlp
from recipe_data import products_file, tiny_config, write_rows
from torch import nn

from hotlap import Job, Rig
from hotlap.core.errors import JobError
from hotlap.data.dataset import as_source
from hotlap.recipes import NAMES, forecast, price, profiles, recipe_named
from hotlap.recipes.options import EPOCHS, options_of
from hotlap.recipes.profiles import network_s, trees_s
from hotlap.recipes.training import train
from hotlap.trees import TreeJob


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("recipe", NAMES)
def test_each_profile_of_a_recipe_is_of_options_that_it_has_and_what_is_given_wins(recipe):
    kind = recipe_named(recipe).options_type
    assert set(kind.PROFILES) <= set(EPOCHS)
    for profile in EPOCHS:
        found, usual = options_of(kind, None, {"profile": profile}), options_of(kind, None, {})
        changed = kind.PROFILES.get(profile, {})
        assert {name: getattr(found, name) for name in changed} == changed
        assert all(getattr(usual, name) != value for name, value in changed.items())
        for name in changed:
            given = getattr(usual, name)
            assert getattr(options_of(kind, None, {"profile": profile, name: given}), name) == given
    assert options_of(kind, None, {"profile": "balanced"}).epochs_of(12) == usual.epochs_of(12) == 12
    assert options_of(kind, None, {"profile": "fast"}).epochs_of(12) == 4
    assert options_of(kind, None, {"profile": "best"}).epochs_of(12) == 24
    assert options_of(kind, None, {"profile": "best", "epochs": 5}).epochs_of(12) == 5


def test_another_profile_is_refused_with_those_there_are():
    with pytest.raises(JobError, match=r"profile='quick' must be one of fast, balanced, best"):
        options_of(recipe_named("text").options_type, None, {"profile": "quick"})


def test_the_time_is_expected_before_the_training_and_earlier_scores_are_known(tmp_path, monkeypatch):
    numbers = np.random.default_rng(0).random((120, 2))
    data = write_rows(tmp_path / "train.csv", ["a", "b", "target"], [[a, b, 2 * a - b] for a, b in numbers.tolist()])
    monkeypatch.setattr(profiles, "network_s", lambda job: 10.0 * job.epochs)

    def lines(name, **given):
        said = []
        options = options_of(AmountRecipe.options_type, None, {"data": str(data), "plan": "off", **given})
        train(AmountRecipe, options, out=tmp_path / name, retrain=True, say=said.append, progress=False)
        return [line for line in said if line.startswith(("time ", "known "))]

    assert lines("usual") == []
    first = lines("fast", profile="fast")
    assert first[0].startswith("known     balanced: MAE 0.")
    assert first[0].endswith(f"({tmp_path / 'usual'})")
    assert first[1:] == ["time      profile fast: about 1 min 10 s at most (amount 1 min 10 s), without tuning"]
    last = lines("within", profile="fast", finish_in="1h")
    assert [line.split(":")[0] for line in last[:2]] == ["known     fast", "known     balanced"]
    assert not any("profile" in line for line in last)
    for name in ("few", "again"):  # a run with epochs of its own is not one of the profile
        assert len(lines(name, epochs=1, profile="best")) == 3


def test_scores_of_other_rows_are_not_known(tmp_path):
    known = profiles.Known(recipe="amount", target="y", truth=np.arange(5.0))
    known.keep("fast", {"MAE": "0.5"}, 90.0, tmp_path)
    assert known.lines() == [f"known     fast: MAE 0.5, trained in 1 min 30 s ({tmp_path})"]
    for change in ({"truth": np.arange(6.0)}, {"target": "z"}, {"recipe": "price"}):
        other = {"recipe": "amount", "target": "y", "truth": np.arange(5.0)} | change
        assert profiles.Known(**other).lines() == []


def test_a_few_steps_and_a_part_of_an_evaluation_say_what_a_whole_training_takes(monkeypatch):
    made = made_up_time.make_up_time(monkeypatch)
    monkeypatch.setattr(profiles, "time", SimpleNamespace(perf_counter=made))
    monkeypatch.setattr(made_up_time, "STEP_S", 0.5)
    evaluate = Rig.evaluate

    def evaluated(rig, data, **settings):
        made.passes(0.1 * len(as_source(data)))
        return evaluate(rig, data, **settings)

    monkeypatch.setattr(Rig, "evaluate", evaluated)
    model = small_mlp()
    job = Job(
        model=model, data=class_data(), valid=class_data(30, seed=9), loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1), batch_size=5, epochs=40, device="cpu",
    )  # fmt: skip
    assert network_s(job) == pytest.approx(40 * (10 * 0.5 + 30 * 0.1), rel=0.05)


def test_a_few_rounds_of_a_few_targets_say_what_all_trees_take(monkeypatch):
    asked = []

    def fit(job, **settings):
        asked.append((job.rounds, job.targets, job.valid))
        return SimpleNamespace(train_s=2.0)

    monkeypatch.setattr(profiles.trees, "fit", fit)
    x, y = np.random.default_rng(0).random((30, 3)), np.zeros((30, 20))
    assert trees_s(TreeJob(x, y, valid=(x, y), rounds=100, patience=5)) == pytest.approx(2.0 * 20 * 2.5)
    assert asked == [(5, 8, None)]
    assert trees_s(TreeJob(x, y[:, 0], rounds=3)) == 2.0


def test_a_forecast_counts_the_trainings_of_its_folds_and_a_price_its_trees(tmp_path, monkeypatch):
    pytest.importorskip("xgboost")
    pytest.importorskip("transformers")
    jobs = []
    for module in (forecast, price):
        monkeypatch.setattr(module, "trees_s", lambda job: jobs.append(job) or 7.0)
    monkeypatch.setattr(forecast, "network_s", lambda job: jobs.append(job) or 7.0)
    rows = [[at, *row] for at, row in enumerate(np.random.default_rng(0).random((300, 2)).tolist())]
    given = {"data": str(write_rows(tmp_path / "t.csv", ["day", "a", "b"], rows)), "targets": "a", "ahead": "1"}
    given |= {"models": "ridge,xgboost,lstm", "folds": 2, "device": "cpu"}
    recipe = forecast.RECIPE(options_of(forecast.ForecastOptions, None, given), [].append)
    recipe.look()
    recipe.split()
    own = {one.name: one.expected_s for one in recipe.prepared().own}
    assert (own["ridge"], own["blend"]) == (None, None)
    sizes = [len(part.train) for part in (*recipe.parts, recipe.whole)]
    assert own["xgboost"]() == own["lstm"]() == pytest.approx(7.0 * sum(sizes) / sizes[-1])
    assert (jobs[0].rounds, jobs[0].patience, jobs[1].epochs) == (100, None, 10)
    given = {"data": str(products_file(tmp_path / "p.csv", 60)), "config": str(tiny_config(tmp_path / "tiny.json"))}
    options = options_of(price.PriceOptions, None, {**given, "vocabulary": 250, "profile": "fast"})
    own = {one.name: one.expected_s for one in price.RECIPE.prepare(options, [].append).own}
    assert (own["trees"](), jobs[-1].rounds, own["blend"]) == (7.0, 300, None)
