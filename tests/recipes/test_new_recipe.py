"""A new recipe is one file: this one predicts a number from columns of numbers, and inherits all else."""

import csv
import json
import random
from dataclasses import replace
from functools import partial

import made_up_time
import numpy as np
import pytest
import torch
from amount_recipe import AmountOptions, AmountReader, AmountRecipe

from hotlap import Rig
from hotlap.core.errors import DataError, JobError, UsageError
from hotlap.fitting.deadline import TimeLimit
from hotlap.recipes import answers, training
from hotlap.recipes.options import options_of
from hotlap.recipes.recipe import Asked, Fold, OwnCandidate, Prepared, Trained
from hotlap.recipes.time_plan import TimePlan
from hotlap.recipes.training import train
from hotlap.store.weights import load_weights


@pytest.fixture
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(answers, "recipe_named", {"amount": AmountRecipe}.__getitem__)
    chance, path = random.Random(0), tmp_path / "train.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "target"])
        for _ in range(120):
            a, b = chance.random(), chance.random()
            writer.writerow([a, b, 2 * a - b])
    return path


def test_a_new_recipe_trains_answers_and_is_scored_with_what_it_inherits(data, tmp_path):
    given = {"data": str(data), "plan": "off", "device": "cpu", "batch_size": 16, "patience": 20}
    options = options_of(AmountRecipe.options_type, None, given)
    run = train(AmountRecipe, options, out=tmp_path / "run", retrain=True, say=(said := []).append, progress=False)
    assert "split     96 rows to train on, 24 held out" in said
    report = json.loads((run / "report.json").read_text())
    assert report["models"]["amount"]["mae"] < 0.3 * report["baselines"]["the mean"]["mae"]
    found = answers.answer(run, data, tmp_path / "answers.csv", say=lambda line: None, device="cpu")
    assert (found.rows, found.report["rows"]) == (120, 120)
    (one,) = answers.Model(run).predict({"a": [0.5], "b": [0.25]}, device="cpu")
    assert one == pytest.approx(0.75, abs=0.2)


def test_a_new_recipe_inherits_messages_and_the_check_of_a_validation_file(data, tmp_path):
    prepare = partial(AmountRecipe.prepare, say=lambda line: None)
    with pytest.raises(DataError, match=r"which column of .* is to be predicted"):
        other = tmp_path / "other.csv"
        other.write_text("x,z\n1,2\n3,4\n")
        prepare(AmountOptions(data=str(other)))
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b,target\n1,2,none\n3,4,5\n")
    with pytest.raises(DataError, match=r"the target 'target' is missing in 1 of 2 rows \(row 1\)"):
        prepare(AmountOptions(data=str(data), valid=str(wrong)))


def test_copies_of_a_row_are_on_one_side_in_every_recipe(data):
    class Copied(AmountRecipe):
        def keys(self, table, rows):
            return [int(row) // 2 for row in rows]

    said = []
    recipe = Copied(AmountOptions(data=str(data)), said.append)
    recipe.look()
    recipe.split()
    assert "copies    60 rows are copies of one before: all copies are on one side" in said
    assert not {row // 2 for row in recipe.train.rows} & {row // 2 for row in recipe.held.rows}


class PairReader(AmountReader):
    """Answers the two sums of a table by the weights of a least-squares fit: no network."""

    targets = ("sum", "twice")

    def load(self, name, folder):
        return load_weights(folder / "model.safetensors")["solution"].numpy()

    def answers(self, model, data, *, batch_size, device):
        return data @ model

    def asked(self, table, say):
        return Asked(data=self.inputs(table).double().numpy(), rows=np.arange(len(table)))

    def truth(self, table, rows):
        return None


class PairRecipe(AmountRecipe):
    """Many targets from a model that trains itself."""

    def prepared(self):
        reader = PairReader(["a", "b"], 1)
        x, held = (reader.asked(side.table, self.say).data for side in (self.train, self.held))
        sums = np.array([[1.0, 2.0], [1.0, 2.0]])

        def fitted(trainer):
            solution = np.linalg.lstsq(x, x @ sums, rcond=None)[0]
            assert trainer.folder.is_dir()
            return Trained(weights={"solution": torch.from_numpy(solution)}, answers=held @ solution, train_s=0.1,
                           about={"kind": "least squares"})  # fmt: skip

        rules = {"zero": np.zeros((len(held), 2))}
        return Prepared(reader=reader, candidates=(), own=[OwnCandidate(name="sums", train=fitted)], target_name="",
                        held_out=held, target=held @ sums, shown=self.example_of, baselines=lambda: rules)  # fmt: skip

    @classmethod
    def revive(cls, state, folder):
        return PairReader(state["columns"], state["width"])


def test_a_model_that_trains_itself_answers_many_targets(data, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "recipe_named", {"amount": PairRecipe}.__getitem__)
    options = options_of(PairRecipe.options_type, None, {"data": str(data), "device": "cpu"})
    run = train(PairRecipe, options, out=tmp_path / "run", retrain=False, say=(said := []).append, progress=False)
    report = json.loads((run / "report.json").read_text())
    assert report["models"]["sums"]["kind"] == "least squares"
    assert report["models"]["sums"]["rmse"] < 1e-6 < report["baselines"]["zero"]["rmse"]
    assert not (run / "curves.svg").exists()
    (tmp_path / "new.csv").write_text("a,b,sum\n1,2,9\n3,4,9\n")
    answers.answer(run, tmp_path / "new.csv", tmp_path / "out.csv", say=said.append, device="cpu")
    header, first, _ = (tmp_path / "out.csv").read_text().splitlines()
    assert header == "a,b,sum,predicted_sum,predicted_twice"
    assert [float(cell) for cell in first.split(",")[3:]] == pytest.approx([3, 6])
    assert any("are in 'predicted_sum', since" in line and "column for 'sum'" in line for line in said)
    assert answers.Model(run).predict({"a": [1], "b": [2]}) == [pytest.approx({"sum": 3, "twice": 6})]


# --- a deadline ------------------------------------------------------------------------------------------


class Three(AmountRecipe):
    """Two models and three folds."""

    def models(self):
        return ["first", "second"]

    def folds(self, name):
        data, held = self.data_of(self.train), self.data_of(self.held)
        job = partial(self.job, name, data, held)
        return [Fold(name=f"fold {at}", job=job, held_out=held, target=self.held.target) for at in (1, 2, 3)]


@pytest.fixture
def clock(monkeypatch):
    """A step takes 0.2 s, an evaluation 0.5 s, and answers 1 s."""
    made = made_up_time.make_up_time(monkeypatch)
    monkeypatch.setattr(made_up_time, "STEP_S", 0.2)
    for owner, name, seconds in ((Rig, "evaluate", 0.5), (training, "answers_of", 1.0), (training, "answer", 1.0)):
        monkeypatch.setattr(owner, name, slower(getattr(owner, name), made, seconds))
    return made


def slower(function, clock, seconds):
    def slow(*given, **settings):
        clock.passes(seconds)
        return function(*given, **settings)

    return slow


def trained(data, out, **given):
    usual = {"data": str(data), "plan": "off", "device": "cpu", "batch_size": 48, "patience": 1000, "test": str(data)}
    options = options_of(Three.options_type, None, {**usual, **given})
    train(Three, options, out=out, retrain=True, say=(said := []).append, progress=False)
    return said, json.loads((out / "report.json").read_text())


def test_within_a_deadline_models_share_the_time_folds_get_what_is_left_and_predictions_are_written(
    data, tmp_path, clock, monkeypatch
):
    monkeypatch.setattr(answers, "recipe_named", {"amount": Three}.__getitem__)
    began = clock()
    said, report = trained(data, tmp_path / "run", epochs=1000, finish_in="1m 40s")
    assert 80 < clock() - began <= 100
    left = report["left_out"]
    assert [line.partition(":")[0] for line in left] == ["first", "second", "fold 1", "fold 2", "fold 3"]
    assert [f"left out  {line}" for line in left] == [line for line in said if line.startswith("left out")]
    assert any(line.startswith("time      1 min ") and line.endswith(" of 1 min 40 s") for line in said)
    steps = [len((tmp_path / "run/models" / one / "metrics.jsonl").read_text().splitlines()) for one in Three.models(0)]
    assert max(steps) < 1.5 * min(steps)
    assert len((tmp_path / "run/predictions.csv").read_text().splitlines()) == 121


def test_folds_that_fit_are_trained_and_more_time_goes_on_where_it_ended(data, tmp_path, clock, monkeypatch):
    monkeypatch.setattr(answers, "recipe_named", {"amount": Three}.__getitem__)
    run = tmp_path / "run"
    _, report = trained(data, run, epochs=25, finish_in="90s")
    assert list(report["folds"]) == ["fold 1"]
    assert report["left_out"] == ["fold 2", "fold 3"]
    said, report = trained(data, run, epochs=25, finish_in="10m")
    assert (list(report["folds"]), report["left_out"]) == (["fold 1", "fold 2", "fold 3"], [])
    assert (run / "predictions.csv").exists()
    assert f"run       {run} was begun before: it goes on" in said


def test_models_are_left_out_where_each_would_have_next_to_no_time():
    plan = TimePlan(TimeLimit.of(12))
    assert (plan.how_many(4), TimePlan(TimeLimit.of(2)).how_many(4), TimePlan(None).how_many(4)) == (2, 1, 4)


def test_a_time_that_is_none_is_refused_with_the_other_mistakes():
    with pytest.raises(JobError, match=r"epochs=-1 is below 0(.|\n)*finish_in='soon' is no time"):
        AmountOptions(finish_in="soon", epochs=-1)


def test_a_quick_model_is_never_left_out_for_want_of_time(data, tmp_path, monkeypatch):
    class Several(PairRecipe):
        def prepared(self):
            found = super().prepared()
            (one,) = found.own
            more = [one, replace(one, name="other"), replace(one, name="blend", is_quick=True)]
            return replace(found, own=more)

    monkeypatch.setattr(answers, "recipe_named", {"amount": Several}.__getitem__)
    monkeypatch.setattr(TimePlan, "how_many", lambda plan, models: models - 1)
    options = options_of(Several.options_type, None, {"data": str(data), "device": "cpu", "finish_in": "1h"})
    run = train(Several, options, out=tmp_path / "run", retrain=False, say=lambda line: None, progress=False)
    report = json.loads((run / "report.json").read_text())
    assert (list(report["models"]), report["left_out"]) == (["sums", "blend"], ["the model other"])


# --- trials ----------------------------------------------------------------------------------------------


class Searched(Three):
    """Only the learning rate varies; the models differ by what begins them."""

    rates: list = []  # noqa: RUF012

    def space(self):
        return {"lr": [1e-9, 0.05]}

    def job(self, name, data, held):
        self.rates.append(self.options.lr)
        return super().job(name, data, held)


def with_trials(data, out, **given):
    options = options_of(Searched.options_type, None, {"data": str(data), "plan": "off", "device": "cpu", **given})
    train(Searched, options, out=out, retrain=False, say=(said := []).append, progress=False)
    return said, json.loads((out / "report.json").read_text())


def test_trials_vary_the_declared_options_and_the_models_and_folds_use_the_best(data, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "recipe_named", {"amount": Searched}.__getitem__)
    monkeypatch.setattr(Searched, "rates", [])
    said, report = with_trials(data, tmp_path / "run", trials=5, epochs=4, batch_size=16)
    (name,) = report["models"]
    one = report["models"][name]
    assert (one["values"], one["trials"], name in ("first", "second")) == ({"lr": 0.05}, 5, True)
    assert Searched.rates[-3:] == [0.05] * 3  # the folds
    assert any(line.startswith("trials    5: ") for line in said)
    assert len(list((tmp_path / "run/search/trials").iterdir())) == 5
    answers.answer(tmp_path / "run", data, tmp_path / "answers.csv", say=lambda line: None, device="cpu")
    _, more = with_trials(data, tmp_path / "run", trials=7, epochs=4, batch_size=16)
    assert next(iter(more["models"].values()))["trials"] == 7


def test_a_learning_rate_that_is_given_is_not_tried_and_no_space_is_refused(data, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "recipe_named", {"amount": Searched}.__getitem__)
    monkeypatch.setattr(Searched, "rates", [])
    _, report = with_trials(data, tmp_path / "run", trials=2, epochs=1, lr=0.02)
    assert set(Searched.rates) == {0.02}
    assert list(next(iter(report["models"].values()))["values"]) == []
    monkeypatch.setattr(Searched, "space", lambda recipe: {})
    with pytest.raises(UsageError, match="trials=2: amount has no values to try"):
        with_trials(data, tmp_path / "none", trials=2)
