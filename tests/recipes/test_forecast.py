"""The recipe forecast from a wide table to many targets, on tables of which it is known what can be found in them."""

import csv
import importlib.util
import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recipe_data import write_rows
from typer.testing import CliRunner

import hotlap
from hotlap import trees
from hotlap.cli import app
from hotlap.core.errors import DataError, JobError, MachineError, StoreError
from hotlap.fitting import deadline
from hotlap.recipes.answers import answer
from hotlap.recipes.forecast import MODELS, RECIPE, steps_of
from hotlap.recipes.forecast_models import ALPHAS, KnownError, Ridge, blend_weights, telling_features, with_known
from hotlap.recipes.lag_features import Lags, filled, rolling, shifted
from hotlap.recipes.options import options_of
from hotlap.recipes.recipe import Trainer
from hotlap.recipes.training import train

QUICK = {"models": "ridge", "folds": 2, "lags": "1,2", "windows": "3", "length": 4, "plan": "off", "device": "cpu"}
OWN = {**QUICK, "targets": "a,b", "ahead": "2"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


def wave(rows, seed=0):
    """Two waves of 12 rows that swell slowly, with noise; and a column of noise alone."""
    numbers, at = np.random.default_rng(seed), np.arange(rows)
    size = 2 + np.sin(at / 40)
    waves = [size * np.sin(2 * np.pi * at / 12 + phase) for phase in (0, 1)]
    return np.stack([*waves, np.zeros(rows)], axis=1) + 0.1 * numbers.normal(size=(rows, 3))


def table_file(path, values, first=0, names=("a", "b", "c")):
    """A table with a `day` from `first` on; nan is written as nothing."""
    told = [[first + at, *("" if np.isnan(one) else one for one in row)] for at, row in enumerate(values.tolist())]
    return write_rows(path, ["day", *names], told)


def options(data, **more):
    return options_of(RECIPE.options_type, None, {"data": str(data), **OWN, **more})


def trained(data, out, lines=None, retrain=False, **more):
    said = [] if lines is None else lines
    return train(RECIPE, options(data, **more), out=out, retrain=retrain, say=said.append, progress=False)


def prepared(data, lines=None, **more):
    recipe = RECIPE(options(data, **more), [].append if lines is None else lines.append)
    recipe.look()
    recipe.split()
    return recipe


def report_of(run):
    return json.loads((run / "report.json").read_text())


# --- from a file to predictions ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of all models on 260 rows, with the 20 rows that follow, and what was said."""
    folder, lines = tmp_path_factory.mktemp("finished"), []
    values = wave(280)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_CACHE", str(folder / "cache"))
        data, test = table_file(folder / "train.csv", values[:260]), table_file(folder / "test.csv", values[260:], 260)
        more = {"models": ",".join(MODELS), "width": 4, "epochs": 2, "rounds": 4, "test": str(test), "season": 12}
        run = trained(data, folder / "run", lines, **more)
        again = []
        trained(data, folder / "again", again, **more)
        yield run, values, lines, again


def test_from_a_file_to_predictions_of_every_row_in_its_order(finished):
    run, values, lines, _ = finished
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["day"]) for row in rows] == list(range(260, 280))
    answered = np.array([[float(row[name]) for name in ("predicted_a", "predicted_b")] for row in rows])
    off = np.abs(answered[:-2] - values[262:280, :2])
    assert off.mean() < 0.5 * np.abs(values[260:278, :2] - values[262:280, :2]).mean()
    report = report_of(run)
    assert set(report["models"]) == {*MODELS, "blend"}
    assert set(report["baselines"]) == {"the mean", "the last value", "the value 12 rows before"}
    assert any(line.startswith("blend     mean shares over 2 targets: ridge 0.") for line in lines)
    assert sum(report["models"]["blend"]["shares"]["a"].values()) == pytest.approx(1)


def test_a_second_run_reads_its_models_from_the_cache_and_says_what_that_saved(finished):
    _, _, lines, again = finished
    for name in MODELS:
        assert any(line.startswith(name) and "trained in" in line for line in lines)
        assert any(line.startswith(name) and "trained before, which saved" in line for line in again)


def test_a_run_holds_no_pickle_and_answers_where_it_is_unpacked(finished, tmp_path):
    run, _, _, _ = finished
    kinds = {path.suffix for path in run.rglob("*") if path.is_file() and path.name not in ("lock", "checkpoints.made")}
    assert kinds <= {".safetensors", ".json", ".jsonl", ".toml", ".csv", ".svg", ".txt", ".html"}
    for words in (["pack", run, tmp_path / "run.zip"], ["unpack", tmp_path / "run.zip", tmp_path / "home"]):
        assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    with (run / "predictions.csv").open() as file:
        given = [{name: row[name] for name in ("day", "a", "b", "c")} for row in csv.DictReader(file)]
    one, other = (hotlap.load(where).predict(given, device="cpu") for where in (run, tmp_path / "home"))
    assert one == other


@pytest.mark.parametrize("name", MODELS)
def test_each_model_is_read_back_as_it_was_judged(name, tmp_path):
    data = table_file(tmp_path / "a.csv", wave(200))
    more = {"models": name, "folds": 1, "width": 4, "epochs": 2, "rounds": 4}
    run, recipe = trained(data, tmp_path / "run", **more), prepared(data, **more)
    rows, report, model = recipe.whole.held, report_of(run), hotlap.load(run)
    answers = model.reader.answers(model.network, rows, batch_size=64, device="cpu")
    assert name in model.network.parts
    rmse = np.sqrt(np.nanmean((answers - recipe.y[rows.own]) ** 2, axis=0)).mean()
    assert rmse == pytest.approx(report["models"][report["best"]]["rmse"], rel=1e-4)


def test_trees_stop_at_the_rounds_that_were_best_out_of_fold(finished):
    run, _, lines, _ = finished
    (line,) = (line for line in lines if line.startswith("xgboost   ") and "rounds, as was best" in line)
    model = trees.load(run / "models" / "xgboost")
    assert {file.rounds for file in model.record.boosters} == {int(line.split()[1])}
    folds = [trees.load(run / "folds" / f"xgboost {number}").record for number in (1, 2)]
    best = [file.rounds for record in folds for file in record.boosters for _ in range(file.targets)]
    assert int(line.split()[1]) == round(float(np.median(best)))


def test_within_a_deadline_each_training_gets_the_share_of_its_rows_and_what_is_left_out_is_listed(
    tmp_path, monkeypatch
):
    recipe = prepared(table_file(tmp_path / "a.csv", wave(200)), models="xgboost")
    recipe.prepared()
    limits, grow = [], trees.fit

    def fit(job, *, finish_in, **how):
        limits.append((finish_in.all_s, finish_in.until_s))
        return replace(grow(replace(job, rounds=2), **how), left_out=("98 rounds",))

    monkeypatch.setattr(trees, "fit", fit)
    monkeypatch.setattr(deadline, "time", SimpleNamespace(perf_counter=lambda: 100.0))
    left_out, limit = [], deadline.TimeLimit(90.0, 160.0)
    recipe.train_trees(
        "xgboost",
        Trainer(fit=None, folder=tmp_path, reuse=False, progress=False, say=[].append, limit=limit, left_out=left_out),
    )
    rows = [len(part.train) for part in (*recipe.parts, recipe.whole)]
    for at in (0, 1):
        seconds = 60 * rows[at] / sum(rows[at:])
        assert limits[at] == pytest.approx((seconds, 100 + seconds))
    assert limits[2] == (90.0, 160.0)
    assert left_out == ["xgboost 1: 98 rounds", "xgboost 2: 98 rounds", "xgboost: 98 rounds"]


def test_a_library_that_is_missing_leaves_its_model_out_with_a_warning(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lightgbm" else find(name))
    lines = []
    recipe = prepared(table_file(tmp_path / "a.csv", wave(200)), lines, models="lightgbm,ridge")
    assert [one.name for one in recipe.prepared().own] == ["ridge", "blend"]
    assert "warning   left out: lightgbm is not installed: pip install '.[trees]' in a clone of hotlap" in lines
    with pytest.raises(MachineError, match="lightgbm is not installed: pip install"):
        prepared(tmp_path / "a.csv", models="lightgbm").prepared()


def test_values_in_memory_are_answered_as_a_file_is_with_a_mapping_for_each_row(finished):
    run, values, _, _ = finished
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    later = {"day": list(range(260, 280)), **{name: values[260:, at].tolist() for at, name in enumerate("abc")}}
    found = hotlap.load(run).predict(later, device="cpu")
    assert found[3] == pytest.approx({name: float(rows[3][f"predicted_{name}"]) for name in ("a", "b")}, rel=1e-4)
    alone = hotlap.load(run).predict({name: later[name][:1] for name in later}, device="cpu")
    assert alone[0] == pytest.approx(found[0], rel=1e-4)  # one row, behind the last rows of the training


def test_a_file_with_the_rows_that_answers_need_is_answered_as_one_that_follows_the_training(finished, tmp_path):
    run, values, _, _ = finished
    whole = table_file(tmp_path / "whole.csv", values[200:], 200)
    lines = []
    found = answer(run, whole, tmp_path / "whole_out.csv", say=lines.append, device="cpu")
    assert any("have too little before them for an answer" in line for line in lines)
    assert found.of - found.rows == 5 + 12  # what is filled in, and the longest lag
    assert found.report["rows"] == found.rows - 2  # the truth of the last two rows is not there yet
    with (tmp_path / "whole_out.csv").open() as one, (run / "predictions.csv").open() as other:
        ours, theirs = ([float(row["predicted_b"] or "nan") for row in csv.DictReader(file)] for file in (one, other))
    np.testing.assert_allclose(ours[60:], theirs, rtol=1e-4, atol=1e-5)


def test_rows_behind_a_hole_in_time_are_not_put_behind_the_rows_of_the_training(finished, tmp_path):
    run, values, _, _ = finished
    late = table_file(tmp_path / "late.csv", values[260:], 300)
    answered = answer(run, late, tmp_path / "out.csv", say=lambda line: None, device="cpu")
    assert (answered.rows, answered.of) == (3, 20)
    few = table_file(tmp_path / "few.csv", values[260:270], 300)
    with pytest.raises(DataError, match=r"few.csv has 10 rows that do not follow .* needs the 17 rows before it"):
        answer(run, few, tmp_path / "few_out.csv", say=lambda line: None, device="cpu")


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ("day,a,c\n260,1,2\n", "lacks b, which the model reads"),
        ("a,b,c\n1,2,3\n", "lacks day, which the model reads"),
        ("day,a,b,c\n260,1,x,3\n", "b in .* must be numbers"),
        ("day,a,b,c\n2024-01-01,1,2,3\n", "the time 'day' of .* is date, unlike in training"),
        ("day,a,b,c\n261,1,2,3\n260,1,2,3\n", "is not in order of 'day'"),
    ],
)
def test_a_file_to_predict_that_will_not_do_gets_one_line(finished, tmp_path, rows, what):
    (tmp_path / "test.csv").write_text(rows)
    with pytest.raises(DataError, match=what) as error:
        answer(finished[0], tmp_path / "test.csv", tmp_path / "out.csv", say=lambda line: None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"members": ["ridge", "../x", "simple rule"]},
        {"width": 10**9},
        {"setup": {"own": [[9, 2]]}},
        {"setup": {"lags": {"lags": [10**9], "windows": [3], "fill": 5}}},
        {"setup": {"season": -1}},
        {"setup": {"inputs": ["a", "b"]}},
    ],
)
def test_a_damaged_state_is_refused_in_one_line(finished, tmp_path, change):
    run = shutil.copytree(finished[0], tmp_path / "run")
    state = json.loads((run / "recipe.json").read_text())
    reader = state["reader"]
    for name, value in change.items():
        reader[name] = {**reader[name], **value} if isinstance(value, dict) else value
    (run / "recipe.json").write_text(json.dumps(state | {"model": "blend"}))
    with pytest.raises(StoreError, match="damaged") as error:
        hotlap.load(run)
    assert "\n" not in str(error.value)


# --- what is learnt ------------------------------------------------------------------------------------


def test_it_beats_each_simple_rule_where_there_is_something_to_learn_and_is_chance_where_targets_are_shuffled(tmp_path):
    numbers = np.random.default_rng(1)
    values = numbers.normal(size=(500, 4))
    targets = np.stack([values[:, at] * (1 + at) - values[:, 0] for at in range(1, 4)], axis=1)
    targets += 0.5 * numbers.normal(size=targets.shape)
    names = [*"abcd", *(f"target_{at}" for at in range(3))]
    found = {}
    for kind, its in (("true", targets), ("shuffled", numbers.permutation(targets))):
        data = table_file(tmp_path / f"{kind}.csv", np.concatenate([values, its], axis=1), names=names)
        found[kind] = report_of(trained(data, tmp_path / kind, targets="target_*", ahead="0"))
    for rule in found["true"]["baselines"].values():
        assert found["true"]["models"]["blend"]["scaled_rmse"] < 0.5 * rule["scaled_rmse"]
    assert found["true"]["models"]["blend"]["rank"] > 0.5
    assert found["shuffled"]["models"]["blend"]["scaled_rmse"] == pytest.approx(1, abs=0.05)
    assert abs(found["shuffled"]["models"]["blend"]["rank"]) < 0.2


def test_the_blend_is_never_worse_than_its_best_part_on_the_rows_that_decide_it(finished):
    numbers = np.random.default_rng(0)
    parts = [numbers.normal(size=(40, 30)) * numbers.uniform(0.5, 2, 30) for _ in range(3)]
    parts[0][3, 4] = np.nan
    shares = blend_weights(parts)
    np.testing.assert_allclose(shares.sum(0), 1)
    assert (shares >= 0).all()
    assert (shares.max(0) < 1).any()
    squares = [np.square(np.nan_to_num(one)).sum(0) for one in (*parts, sum(map(np.multiply, shares, parts)))]
    assert (squares[-1] <= np.min(squares[:-1], axis=0) + 1e-9).all()
    errors = report_of(finished[0])["models"]["blend"]["out_of_fold"]
    assert errors["blend"] <= min(errors.values())


def test_each_target_begins_from_the_simple_rule_that_misses_least_and_from_its_mean_where_that_says_nothing(tmp_path):
    numbers = np.random.default_rng(0)
    walk, noise = np.cumsum(numbers.normal(size=300)), numbers.normal(size=300)
    season = np.tile(5 * numbers.normal(size=12), 25) + 0.1 * noise
    values = np.stack([walk, noise, season], axis=1)
    values[280:286, 0] = np.nan  # longer than what is filled in
    recipe = prepared(table_file(tmp_path / "a.csv", values), targets="a,b,c", ahead=5, season=12)
    scale, rows = recipe.whole.scale, recipe.whole.held
    assert scale.rule.tolist() == [0, -1, 1]  # the last value, the mean, the value one season before
    base = scale.base(rows)
    at = 270 - rows.begin
    np.testing.assert_allclose(base[at], [walk[270], scale.level[1], season[275 - 12]])
    assert base[285 - rows.begin, 0] == scale.level[0]
    z = scale.targets(rows, recipe.y)
    np.testing.assert_allclose(scale.answers(rows, z)[at], values[275])


def test_the_ridge_solves_all_targets_and_missing_ones_count_as_its_own_answers():
    numbers = np.random.default_rng(0)
    for rows, columns in ((60, 5), (12, 30)):
        x, z = numbers.normal(size=(rows, columns)).astype(np.float32), numbers.normal(size=(rows, 3))
        alphas = np.asarray(ALPHAS)[[2, 3, 4]]
        for at, weights in enumerate(Ridge(x, z).weights(alphas).T):
            wanted = np.linalg.solve(x.T @ x + alphas[at] * rows * np.eye(columns), x.T @ z[:, at])
            np.testing.assert_allclose(weights, wanted, rtol=1e-3, atol=1e-4)
        answers = Ridge(x, z).answers(x)[3]
        np.testing.assert_allclose(answers, x @ Ridge(x, z).weights(np.full(3, ALPHAS[3])), rtol=1e-3, atol=1e-4)
    x = numbers.normal(size=(80, 3)).astype(np.float32)
    z = (x @ np.array([[1.0], [2.0], [-1.0]])) + 0.0
    z[::10] = np.nan
    assert np.isfinite(Ridge(x, z).weights(np.full(1, 0.001))).all()


def test_targets_that_are_unknown_have_no_part_in_the_loss_of_the_network():
    z = np.array([[1.0, np.nan], [3.0, 4.0]])
    target = with_known(z, before=1)
    assert target.shape == (3, 2, 2)
    output = torch.tensor([[2.0, 100.0], [3.0, 2.0]])
    total, count = KnownError()(output, target[1:])
    assert (float(total), int(count)) == (1.0 + 0.0 + 4.0, 3)
    assert int(KnownError()(output[:1], target[:1])[1]) == 0


def test_the_features_that_tell_most_about_the_targets_are_those_chosen_for_trees():
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(200, 6)).astype(np.float32)
    z = np.stack([x[:, 4], x[:, 1] + x[:, 4]], axis=1)
    z[0, 0] = np.nan
    assert telling_features(x, z, 2).tolist() == [1, 4]
    assert telling_features(x, z, 9).tolist() == list(range(6))


# --- time ----------------------------------------------------------------------------------------------


def test_features_are_what_a_loop_over_the_rows_finds():
    numbers = np.random.default_rng(0)
    values = numbers.normal(size=(30, 2))
    values[numbers.random(values.shape) < 0.2] = np.nan
    mean, deviation = rolling(values, 4)
    full = filled(values, 2)
    for row in range(30):
        for column in range(2):
            seen = [one for one in values[max(0, row - 3) : row + 1, column] if not np.isnan(one)]
            np.testing.assert_allclose(mean[row, column], np.mean(seen) if seen else np.nan)
            np.testing.assert_allclose(deviation[row, column], np.std(seen) if seen else np.nan, atol=1e-12)
            near = [one for one in values[max(0, row - 2) : row + 1, column] if not np.isnan(one)]
            np.testing.assert_equal(full[row, column], near[-1] if near else np.nan)
    np.testing.assert_equal(shifted(values, 3)[3:], values[:-3])
    np.testing.assert_equal(shifted(values, -3)[:-3], values[3:])
    assert np.isnan(shifted(values, 40)).all()


def test_what_comes_later_changes_no_feature_and_no_target_that_is_trained_on(tmp_path):
    values = wave(300)
    values[40, 1] = np.nan
    changed = values.copy()
    last = prepared(table_file(tmp_path / "a.csv", values)).whole.train.end + 2  # the row of the last target
    changed[last:] = 1e6
    mine, theirs = (prepared(table_file(tmp_path / f"{at}.csv", one)) for at, one in enumerate((values, changed)))
    for one, other in zip((*mine.parts, mine.whole), (*theirs.parts, theirs.whole), strict=True):
        np.testing.assert_array_equal(one.train.features[one.train.own], other.train.features[one.train.own])
        np.testing.assert_array_equal(mine.y[one.train.own], theirs.y[one.train.own])
        np.testing.assert_array_equal(one.scale.inputs(one.train), other.scale.inputs(one.train))
    assert mine.whole.held.begin == last
    # No row before the change sees it, the held-out ones included.
    for row in (100, 200, 280):
        later = values.copy()
        later[row + 1 :] = -1e6
        features = prepared(table_file(tmp_path / f"{row}.csv", later)).whole.train.features
        np.testing.assert_array_equal(features[: row + 1], mine.whole.train.features[: row + 1])


def test_folds_walk_forward_and_no_target_of_their_training_reaches_into_what_they_answer(tmp_path):
    recipe = prepared(table_file(tmp_path / "a.csv", wave(300)), folds=3, gap=7)
    assert [part.train.begin for part in recipe.parts] == [recipe.whole.train.begin] * 3
    for part in (*recipe.parts, recipe.whole):
        assert part.train.end + 7 == part.held.begin
    for one, other in zip(recipe.parts, recipe.parts[1:], strict=False):
        assert one.held.end == other.held.begin
    assert recipe.parts[-1].held.end == recipe.whole.train.end


def test_each_step_ahead_is_a_target_and_the_season_is_known_at_that_time(tmp_path):
    values = wave(200)
    recipe = prepared(table_file(tmp_path / "a.csv", values), ahead="1-3,14", season=12)
    assert recipe.setup.targets[:3] == ("a+1", "b+1", "a+2")
    assert len(recipe.setup.targets) == 8
    last, season = recipe.whole.held.rules[:, 100]
    np.testing.assert_allclose(recipe.y[100, [0, 2, 6]], values[[101, 102, 114], 0])
    np.testing.assert_allclose(last[[0, 6]], values[100, 0])
    np.testing.assert_allclose(season[[0, 2, 6]], values[[101 - 12, 102 - 12, 114 - 24], 0])


def test_the_calendar_is_a_feature_of_dates_alone(tmp_path):
    lags = Lags(lags=(), windows=(), fill=0)
    hours = np.arange(48) * 3600.0
    found = lags.features(np.zeros((48, 1)), hours, True)
    np.testing.assert_allclose(found[:24, 1:3], found[24:, 1:3], atol=1e-6)
    assert np.abs(found[6] - found[18]).max() > 1
    assert len(lags.names(["a"], True)) == found.shape[1] == 7
    assert lags.features(np.zeros((48, 1)), hours, False).shape == (48, 1)


# --- files ---------------------------------------------------------------------------------------------


def test_targets_in_a_file_of_their_own_are_those_of_the_rows_with_their_times(tmp_path):
    values = wave(300)
    targets = np.roll(values[:, :2], -1, axis=0)
    targets[5, 0] = np.nan
    data = table_file(tmp_path / "x.csv", values)
    both = table_file(tmp_path / "both.csv", np.concatenate([values, targets], axis=1), names=[*"abc", "t_0", "t_1"])
    apart = table_file(tmp_path / "y.csv", targets[4:], first=4, names=["t_0", "t_1"])
    ours = prepared(data, targets=str(apart), ahead="")
    theirs = prepared(both, targets="t_*", ahead="0")
    np.testing.assert_array_equal(ours.y[4:], theirs.y[4:])
    assert np.isnan(ours.y[:4]).all()
    assert ours.setup.inputs == theirs.setup.inputs == ("a", "b", "c")
    assert ours.setup.own == ()


def test_gaps_missing_values_and_unread_columns_are_shown(tmp_path):
    values = wave(200)
    values[10:30, 2] = np.nan
    rows = [[f"2024-01-{1 + at // 24:02} {at % 24:02}:00:00", *row, "x"] for at, row in enumerate(values.tolist())]
    rows = [["" if one != one else one for one in row] for row in rows[:50] + rows[53:]]
    lines = []
    prepared(write_rows(tmp_path / "a.csv", ["when", "a", "b", "c", "word"], rows), lines)
    assert (
        "          1 of 196 steps in time are longer than usual, the longest 4 times, after 2024-01-03T01:00:00; "
        in ("\n".join(lines))
    )
    assert any(line.startswith("missing   3.38% of the values, in 1 of 3 columns; most in c (10.2%)") for line in lines)
    assert "note      not read, since they hold no numbers: word" in lines


def _bad(values, **changes):
    rows = [[at, *row] for at, row in enumerate(values.tolist())]
    for place, value in changes.items():
        rows[int(place[1:])][0] = value
    return rows


@pytest.mark.parametrize(
    ("header", "rows", "more", "what"),
    [
        (["x", "a", "b", "c"], _bad(wave(90)), {}, "which column of .* orders its rows in time"),
        (["day", "a", "b", "c"], _bad(wave(90), r7=3), {}, r"not in order of 'day': 3 in row 8 comes behind 6"),
        (["day", "a", "b", "c"], _bad(wave(90), r7=6), {}, "has the time 6 in rows 7 and 8"),
        (["day", "a", "b", "c"], _bad(wave(90), r7=""), {}, "the time 'day' of .* is missing in row 8"),
        (["day", "a", "b", "c"], _bad(wave(90)), {"targets": "q_*"}, "'q_\\*' matches no column of .*, and is no file"),
        (["day", "a", "b", "c"], _bad(wave(90)), {"targets": ""}, "say which columns of .* to forecast"),
        (["day", "a", "b", "c"], _bad(wave(90)), {"ahead": ""}, "say with --ahead how many rows later a, b"),
        (["day", "a", "b", "c"], _bad(wave(40)), {}, "has 40 rows, and about .* are needed"),
        (["day", "a", "b", "c"], _bad(wave(90) * [np.nan, 1, 1]), {}, "the target 'a' has no values"),
        (["day", "a", "b", "word"], [[*row[:3], "x"] for row in _bad(wave(90))], {"targets": "word"}, "'word' is cat"),
        (["day", "t"], [row[:2] for row in _bad(wave(90))], {"targets": "t", "ahead": "0"}, "no columns of numbers"),
        (["day", "a", "b", "c"], _bad(wave(90)), {"time": "when"}, "has no column 'when'"),
    ],
)
def test_bad_input_gets_one_clear_line(tmp_path, header, rows, more, what):
    rows = [["" if one != one else one for one in row] for row in rows]
    with pytest.raises(DataError, match=what) as error:
        prepared(write_rows(tmp_path / "a.csv", header, rows), **more)
    assert len([line for line in str(error.value).splitlines() if line.strip()]) <= 2


def test_a_target_that_is_unknown_in_all_rows_to_train_on_is_refused(tmp_path):
    values = wave(200)
    values[:180, 1] = np.nan
    with pytest.raises(DataError, match="nothing is known of b in the rows to train on"):
        prepared(table_file(tmp_path / "a.csv", values))


def test_files_of_targets_that_do_not_fit_get_one_line(tmp_path):
    data = table_file(tmp_path / "x.csv", wave(100))
    (tmp_path / "y.csv").write_text("when,t\n1,2\n2,3\n")
    with pytest.raises(DataError, match="has no column 'day', which says which row a target is of"):
        prepared(data, targets=str(tmp_path / "y.csv"), ahead="")
    table_file(tmp_path / "y.csv", wave(50), first=500, names="tuv")
    with pytest.raises(DataError, match=r"no time of .* is a time of"):
        prepared(data, targets=str(tmp_path / "y.csv"), ahead="")


def test_mistakes_in_options_are_all_named_at_once():
    wrong = {"lags": "0", "windows": "1", "ahead": "x", "models": "arima", "folds": 0, "season": -1, "valid": "v.csv"}
    with pytest.raises(JobError) as error:
        options("a.csv", **wrong)
    for name in ("lags='0'", "windows='1'", "ahead='x'", "'arima'", "folds=0", "season=-1", "valid='v.csv'"):
        assert name in str(error.value)
    assert options("a.csv", ahead=3).steps == options("a.csv", ahead=[3]).steps == (3,)
    with pytest.raises(JobError, match="ahead=True must be words"):
        options("a.csv", ahead=True)
    with pytest.raises(JobError, match="has 0, which means"):
        options("a.csv", ahead="0,3")
    assert (list(steps_of("2-4")), list(steps_of("7")), list(steps_of("4-2")), list(steps_of("-"))) == (
        [2, 3, 4], [7], [], []
    )  # fmt: skip


def test_the_models_of_a_forecast_cannot_be_measured_as_a_single_network(tmp_path):
    data = table_file(tmp_path / "a.csv", wave(200))
    words = ["batch", "forecast", "--data", str(data), "--targets", "a", "--ahead", "1"]
    found = CliRunner().invoke(app, words)
    assert "has no single network to measure" in found.output + str(found.exception)
