"""The recipe price from a file to predictions, on products of which it is known what their prices follow from."""

import csv
import json
import shutil

import numpy as np
import pytest
import tiny_encoders
import torch
from recipe_data import products_file, tiny_config, write_rows
from typer.testing import CliRunner

import hotlap
from hotlap.cli import app
from hotlap.core.errors import DataError, JobError, StoreError
from hotlap.recipes import price, price_features
from hotlap.recipes.answers import answer, outputs_of
from hotlap.recipes.options import options_of
from hotlap.recipes.price import RECIPE, PriceOptions, joined_texts
from hotlap.recipes.price_features import Features, Means
from hotlap.recipes.price_models import Scale, Smape, best_shares
from hotlap.recipes.scores import number_report
from hotlap.recipes.tables import read_table
from hotlap.recipes.training import train

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")
pytest.importorskip("xgboost")
QUICK = {
    "epochs": 3, "vocabulary": 250, "most": 40, "lr": 5e-3, "plan": "off", "device": "cpu", "rounds": 80, "parts": 8
}  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


def options(data, **more):
    return options_of(PriceOptions, None, {"data": str(data), **QUICK, **more})


def trained(data, out, lines=None, **more):
    config = {"config": str(tiny_config(out.parent / "tiny.json"))}
    said = [] if lines is None else lines
    return train(RECIPE, options(data, **config, **more), out=out, retrain=False, say=said.append, progress=False)


def looked_at(data, lines=None, **more):
    """The recipe with its table read and split."""
    recipe = RECIPE(options(data, **more), [].append if lines is None else lines.append)
    recipe.look()
    recipe.split()
    return recipe


def report_of(run):
    return json.loads((run / "report.json").read_text())


def rows_of(path):
    with path.open() as file:
        return list(csv.DictReader(file))


# --- from a file to predictions ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run on 240 products with 30 others to predict, what was said, and what a second run said."""
    folder, lines, again = tmp_path_factory.mktemp("finished"), [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_CACHE", str(folder / "cache"))
        data, test = products_file(folder / "train.csv", 240), products_file(folder / "test.csv", 30, seed=5)
        run = trained(data, folder / "run", lines, test=str(test))
        trained(data, folder / "again", again, test=str(test))
        yield run, test, lines, again


def test_from_a_file_to_a_price_for_every_row_in_its_order(finished):
    run, test, lines, _ = finished
    answers, truth = rows_of(run / "predictions.csv"), rows_of(test)
    assert [row["product_id"] for row in answers] == [row["product_id"] for row in truth]
    found, true = (np.array([float(row[name]) for row in answers]) for name in ("predicted_price", "price"))
    assert (found > 0).all()
    median = np.full(30, np.median([float(row["price"]) for row in rows_of(test.parent / "train.csv")]))
    assert number_report(true, found)["smape"] < 0.6 * number_report(true, median)["smape"]
    said = "\n".join(lines)
    assert "note      image_link is not read: it holds links, or paths of pictures, as 'https://pictures" in said
    assert "note      not read, since they number the rows: product_id" in said
    assert "target    price is learnt in logarithms: its skewness is" in said
    assert "missing   days in " in said


def test_the_blend_is_at_least_as_good_as_its_parts_and_all_beat_the_simple_rules(finished):
    run, _, lines, _ = finished
    report = report_of(run)
    models = report["models"]
    assert set(models) == {"encoder", "trees", "blend"}
    assert models["blend"]["smape"] <= min(models["encoder"]["smape"], models["trees"]["smape"]) + 1e-9
    assert set(report["baselines"]) == {"the median", "the median by packaging"}
    worst = max(one["smape"] for one in models.values())
    assert worst < 0.9 * min(one["smape"] for one in report["baselines"].values())
    shares = models["blend"]["shares"]
    assert sum(shares.values()) == pytest.approx(1)
    assert any(line.startswith(f"blend     encoder {shares['encoder']:.2f}, trees") for line in lines)


def test_a_second_run_reads_all_from_the_cache_and_says_what_that_saved(finished):
    run, _, _, again = finished
    kept = [line.split()[0] for line in again if "from the cache, which saved" in line]
    assert sorted(kept) == ["facts", "tokens", "tokens", "tokens", "words"]
    for name in ("encoder", "trees"):
        assert any(line.startswith(name) and "trained before, which saved" in line for line in again)
    assert (run / "predictions.csv").read_text() == (run.parent / "again" / "predictions.csv").read_text()


def test_a_run_holds_no_pickle_and_answers_where_it_is_unpacked(finished, tmp_path):
    run, test, _, _ = finished
    files = [path for path in run.rglob("*") if path.is_file() and path.name not in ("lock", "checkpoints.made")]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jsonl", ".toml", ".csv", ".svg", ".html"}
    for words in (["pack", run, tmp_path / "run.zip"], ["unpack", tmp_path / "run.zip", tmp_path / "home"]):
        assert CliRunner().invoke(app, list(map(str, words))).exit_code == 0
    given = [{name: row[name] for name in ("title", "about", "packaging", "days")} for row in rows_of(test)]
    one, other = (hotlap.load(where).predict(given, device="cpu") for where in (run, tmp_path / "home"))
    assert one == other
    written = [float(row["predicted_price"]) for row in rows_of(run / "predictions.csv")]
    assert one == pytest.approx(written, rel=1e-4)


@pytest.mark.parametrize("name", ["encoder", "trees"])
def test_each_model_alone_answers_too_where_it_is_the_best(finished, tmp_path, name):
    run = shutil.copytree(finished[0], tmp_path / "run")
    state = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**state, "model": name}))
    if name == "encoder":
        shutil.copy(run / "models" / "encoder" / "model.safetensors", run / "model.safetensors")
    answered = answer(run, finished[1], tmp_path / "out.csv", say=lambda line: None, device="cpu")
    assert answered.report["smape"] < 100


def test_what_is_missing_unseen_or_beyond_the_training_gets_an_answer_all_the_same(finished, tmp_path):
    run, lines = finished[0], []
    rows = [
        ["Zephyr Oil, 1,000,000 oz", "", "gold", 10**12],
        ["", "", "", ""],
        ["Acme Rice, 2 lb", "Rice by Acme", "tin", "inf"],
    ]
    other = write_rows(tmp_path / "odd.csv", ["title", "about", "packaging", "days"], rows)
    answered = answer(run, other, tmp_path / "out.csv", say=lines.append, device="cpu")
    assert answered.rows == 3
    found = [float(row["price"]) for row in rows_of(tmp_path / "out.csv")]
    assert np.isfinite(found).all()
    assert min(found) > 0
    assert any(
        line == "unseen    of 3 rows, the brand in 2, packaging in 2; it counts as an average one" for line in lines
    )


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (["title", "about", "packaging"], "no column 'days'"),
        (["title", "packaging", "days"], "no column 'about'"),
    ],
)
def test_a_file_to_predict_that_lacks_a_column_is_refused_in_a_line(finished, tmp_path, columns, said):
    other = write_rows(tmp_path / "other.csv", columns, [["Acme Rice", "tin", 5], ["Acme Tea", "tin", 6]])
    with pytest.raises(DataError, match=said) as error:
        answer(finished[0], other, tmp_path / "out.csv", say=lambda line: None)
    assert "\n" not in str(error.value)


def test_rows_in_memory_that_will_not_do_get_a_line(finished):
    model = hotlap.load(finished[0])
    with pytest.raises(DataError, match="the rows lack days, packaging, which the model reads"):
        model.predict([{"title": "Acme Rice", "about": "nice"}])
    with pytest.raises(DataError, match="'soon' in column 'days' is no number"):
        model.predict([{"title": "Acme Rice", "about": "nice", "packaging": "tin", "days": "soon"}])


@pytest.mark.parametrize(
    "change",
    [
        {"members": ["encoder", "../x"]},
        {"members": ["trees"]},
        {"in_logs": "yes"},
        {"rows": {"known": [["acme"]]}},
        {"rows": {"words": []}},
        {"rows": {"numbers": {}}},
        {"rows": {"vocabulary": ["a"]}},
    ],
)
def test_a_damaged_state_is_refused_in_one_line(finished, tmp_path, change):
    run = shutil.copytree(finished[0], tmp_path / "run")
    state = json.loads((run / "recipe.json").read_text())
    reader = state["reader"]
    for name, value in change.items():
        reader[name] = {**reader[name], **value} if isinstance(value, dict) else value
    (run / "recipe.json").write_text(json.dumps(state))
    with pytest.raises(StoreError, match=r"damaged|do not fit the model") as error:
        hotlap.load(run)
    assert "\n" not in str(error.value)


def test_trials_vary_the_encoder_and_the_best_one_is_blended(tmp_path):
    pytest.importorskip("optuna")
    data = products_file(tmp_path / "train.csv", 100)
    run = trained(data, tmp_path / "run", trials=2, epochs=1, rounds=20, lr=0, test=str(data))
    report = report_of(run)
    assert {"lr", "weight_decay"} <= set(report["models"]["encoder"]["values"])
    shutil.rmtree(run / "search")
    answers = hotlap.load(run).predict(rows_of(data), device="cpu")
    assert answers == pytest.approx(
        [float(row["predicted_price"]) for row in rows_of(run / "predictions.csv")], rel=1e-4
    )


def test_with_shuffled_prices_it_is_as_good_as_the_median(tmp_path):
    data = products_file(tmp_path / "train.csv", 300, shuffled=True)
    report = report_of(trained(data, tmp_path / "run", epochs=1))
    median = report["baselines"]["the median"]["smape"]
    assert report["models"]["blend"]["smape"] > 0.9 * median


def test_a_deadline_keeps_both_models_and_the_predictions(tmp_path, monkeypatch):
    data, lines, limits, fit = products_file(tmp_path / "train.csv", 120), [], [], price.trees.fit

    def short(job, *, finish_in, **how):
        limits.append(finish_in.left_s)
        return fit(job, finish_in=1e-6, **how)

    monkeypatch.setattr(price.trees, "fit", short)
    run = trained(data, tmp_path / "run", lines, finish_in="10m", epochs=1, test=str(data))
    assert 0 < limits[0] < 300  # half of the time, of which the encoder has what the trees leave
    assert set(report_of(run)["models"]) == {"encoder", "trees", "blend"}
    assert any(line.startswith("left out  trees: ") for line in lines)
    first, last = (
        next(at for at, line in enumerate(lines) if line.startswith(words)) for words in ("trees  ", "plan  ")
    )
    assert first < last
    assert len(rows_of(run / "predictions.csv")) == 120


# --- the table -----------------------------------------------------------------------------------------


def changed(folder, head, change, rows=60):
    """Products with rows that a function of their number and values changes."""
    products = rows_of(products_file(folder / "products.csv", rows))
    told = [[change(at, name, row[name]) for name in head] for at, row in enumerate(products)]
    return write_rows(folder / "train.csv", head, told)


PLAIN = ("title", "packaging", "days", "price")


@pytest.mark.parametrize(
    ("head", "change", "more", "said"),
    [
        (
            ("packaging", "days", "price"),
            {},
            {},
            "which column of .* holds the text.*; for a table without texts, use hotlap.trees",
        ),
        (PLAIN, {"price": lambda at, one: f"${one}"}, {}, r"the target 'price' is text, as '\$.*give numbers"),
        (PLAIN, {"price": lambda at, one: ""}, {}, "the target 'price' has no values"),
        (PLAIN, {"price": lambda at, one: "" if at == 3 else one}, {}, "'price' is missing in 1 of 60 rows .row 4"),
        (PLAIN, {"price": lambda at, one: 5}, {}, "nothing to learn"),
        (PLAIN, {"price": lambda at, one: "inf" if at == 3 else one}, {}, "is infinite in 1 of 60 rows"),
        (PLAIN, {}, {"target": "prize"}, "no column 'prize'; did you mean 'price'"),
        (PLAIN, {}, {"features": "dyas"}, "no column 'dyas'; did you mean 'days'"),
        (PLAIN, {}, {"features": "price"}, "features names price, which is the target"),
        (PLAIN, {"days": lambda at, one: f"{at}.5", "price": lambda at, one: f"{at}.5"}, {}, "is equal to the target"),
    ],
)
def test_data_that_will_not_do_is_refused_in_a_line(tmp_path, head, change, more, said):
    data = changed(tmp_path, head, lambda at, name, one: change.get(name, lambda at, one: one)(at, one))
    with pytest.raises(DataError, match=said) as error:
        looked_at(data, **more)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"log_price": "perhaps"}, "log_price='perhaps' must be one of auto, yes, no"),
        ({"trees": "forest"}, "trees='forest' must be one of xgboost, lightgbm"),
        ({"accumulate": 0}, "accumulate=0 must be at least 1"),
        ({"parts": -1}, "parts=-1 must be from 0"),
        ({"onnx": True}, "onnx=True is not for a price"),
        ({"text": "title", "features": "days,title"}, "features names title, which text names too"),
    ],
)
def test_options_that_will_not_do_are_refused_in_a_line(more, said):
    with pytest.raises(JobError, match=said):
        options("train.csv", **more)


def test_prices_are_learnt_in_logarithms_where_these_are_less_skewed_and_all_are_above_0(tmp_path):
    lines = []
    assert looked_at(products_file(tmp_path / "products.csv", 60), lines)._in_logs()
    even = changed(tmp_path, PLAIN, lambda at, name, one: 100 + at if name == "price" else one)
    assert not looked_at(even, lines)._in_logs()
    assert looked_at(even, lines, log_price="yes")._in_logs()
    free = changed(tmp_path, PLAIN, lambda at, name, one: at if name == "price" else one)
    assert not looked_at(free, lines)._in_logs()
    assert lines[-1] == "target    price is learnt as it is, since some are 0 or less"
    with pytest.raises(DataError, match=r"log_price=yes needs values above 0, and the target 'price' is 0 in row 1 of"):
        looked_at(free, log_price="yes")._in_logs()


def test_the_features_can_be_named_and_pictures_and_ids_are_else_left_out(tmp_path):
    data = products_file(tmp_path / "products.csv", 60)
    assert looked_at(data).inputs == ["title", "about", "packaging", "days"]
    named = looked_at(data, text="title", features="product_id,about")
    assert (named.columns, named.beside) == (["title"], ["product_id", "about"])


def test_batches_are_accumulated_as_asked(tmp_path):
    data, config = products_file(tmp_path / "products.csv", 60), str(tiny_config(tmp_path / "tiny.json"))
    prepared = RECIPE.prepare(options(data, config=config, batch_size=8, accumulate=4), lambda line: None)
    job = prepared.candidates[0].job()
    assert (job.batch_size, job.accumulate, job.effective_batch) == (8, 4, 32)


def test_an_encoder_as_deberta_is_read_from_a_folder_of_weights(tmp_path):
    data, lines = products_file(tmp_path / "products.csv", 60), []
    config = tiny_encoders.tiny("deberta-v3", head="Model").config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    first = RECIPE.prepare(options(data, config=str(tmp_path / "config.json")), lines.append).reader
    model = first.initial_model()
    assert model.encoder.encoder.position_buckets == 8
    model.encoder.save_pretrained(tmp_path / "weights")
    first.encoder.save_tokenizer(tmp_path / "weights")
    found = RECIPE.prepare(options(data, weights=str(tmp_path / "weights")), lines.append)
    assert any(line.startswith("encoder   deberta-v2 of ") and line.endswith(", pretrained") for line in lines)
    mine, theirs = (one.encoder.state_dict() for one in (model, found.reader.initial_model()))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    z = outputs_of(found.reader.forward, model, found.held_out.tokens, batch_size=8, device="cpu")
    assert z.shape == (12,)
    assert torch.isfinite(z).all()


def test_without_the_library_of_trees_the_encoder_answers_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(price.LIBRARIES, "no_such_library", {})
    data, config, lines = products_file(tmp_path / "products.csv", 60), str(tiny_config(tmp_path / "tiny.json")), []
    prepared = RECIPE.prepare(options(data, config=config, trees="no_such_library"), lines.append)
    assert prepared.own == []
    assert "warning   left out: no_such_library is not installed: pip install '.[trees]' in a clone of hotlap" in lines


# --- features and models -------------------------------------------------------------------------------


def test_a_row_to_train_on_does_not_see_its_own_price():
    z = np.random.default_rng(0).normal(size=1000)
    words = [f"w{at // 2}" for at in range(1000)]
    means, seen = Means.fit(words, z, seed=0)
    assert abs(np.corrcoef(seen[:, 0], z)[0, 1]) < 0.1
    assert np.corrcoef(means.of(words)[:, 0], z)[0, 1] > 0.5
    z[0] += 1000
    np.testing.assert_array_equal(Means.fit(words, z, seed=0)[1][0], seen[0])
    np.testing.assert_array_equal(means.of(["new"]), [[0, 0]])


def test_rows_are_read_in_prediction_as_in_training_and_from_a_file_of_features(tmp_path):
    days = {0: 10**9, 1: "", 2: "inf"}
    data = changed(tmp_path, PLAIN, lambda at, name, one: days.get(at, one) if name == "days" else one, rows=90)
    table, lines = read_table(data), []
    texts, z = joined_texts(table, ["title"]), np.log([float(row["price"]) for row in rows_of(data)])
    price_features.EDGES, edges = (0.05, 0.95), price_features.EDGES
    try:
        made, matrix = Features.fit(table, texts, ["days", "packaging"], z, parts=4, seed=0, say=lines.append)
    finally:
        price_features.EDGES = edges
    again = Features.of(json.loads(json.dumps(made.state())), made.tensors())
    found = again.matrix(table, texts, lines.append)
    np.testing.assert_array_equal(found, made.matrix(table, texts, lines.append))
    own = matrix.shape[1] - 4  # but for the means of brand and packaging
    np.testing.assert_array_equal(found[:, :own], matrix[:, :own])
    assert np.isnan(found[1:3, own - 1]).all()
    assert found[0, own - 1] == made.high[own - 1] < 1000
    assert any(line.startswith("outliers  days in ") for line in lines)
    numbers = again.standardised(found)
    assert numbers.shape == (90, again.width)
    assert torch.isfinite(numbers).all()


def test_dates_and_flags_are_features_too(tmp_path):
    columns = ("title", "since", "fresh", "price")
    values = {"since": lambda at: f"2024-01-{1 + at % 28:02}", "fresh": lambda at: "yes" if at % 2 else "no"}
    rows = rows_of(products_file(tmp_path / "products.csv", 60))
    told = [[values[one](at) if one in values else row[one] for one in columns] for at, row in enumerate(rows)]
    table = read_table(write_rows(tmp_path / "train.csv", columns, told))
    z = np.random.default_rng(0).normal(size=60)
    made, matrix = Features.fit(table, ["a text"] * 60, ["since", "fresh"], z, parts=0, seed=0, say=[].append)
    assert made.kinds == {"since": "date", "fresh": "flag"}
    first = matrix.shape[1] - 4
    np.testing.assert_array_equal(np.diff(matrix[:28, first]), 1)
    np.testing.assert_array_equal(matrix[:4, first + 1], [0, 1, 0, 1])


@pytest.mark.parametrize("in_logs", [True, False])
def test_the_scale_gives_prices_back_and_bounds_what_is_answered(in_logs):
    prices = np.array([1.0, 10.0, 200.0])
    scale = Scale.fit(prices, in_logs)
    z = scale.standardised(prices)
    np.testing.assert_allclose(scale.prices(z), prices)
    assert scale.prices(np.array([1e9]))[0] == pytest.approx(scale.prices(np.array([z.max() + 1.0]))[0])
    shown = Smape(scale)(torch.from_numpy(z[:2]), torch.from_numpy(z[1:])).mean()
    assert float(shown) == pytest.approx(number_report(prices[1:], prices[:2])["smape"])


def test_shares_of_the_blend_are_those_with_the_least_error_and_never_worse_than_a_part():
    draw = np.random.default_rng(0)
    target = np.exp(draw.normal(size=500))
    scale = Scale.fit(target, True)
    parts = {name: target * np.exp(size * draw.normal(size=500)) for name, size in (("encoder", 0.3), ("trees", 0.3))}
    shares, mix = best_shares(parts, target, scale)
    errors = {name: number_report(target, one)["smape"] for name, one in (*parts.items(), ("mix", mix))}
    assert errors["mix"] < 0.9 * min(errors["encoder"], errors["trees"])
    assert 0.3 < shares[0] < 0.7
    assert (shares * 20).tolist() == np.round(shares * 20).tolist()
    for useless in parts:
        shares, mix = best_shares({**parts, useless: np.ones(500)}, target, scale)
        assert number_report(target, mix)["smape"] <= min(errors.values()) + 60
        assert shares[list(parts).index(useless)] <= 0.15
    assert best_shares({"trees": parts["trees"]}, target, scale)[0].tolist() == [1.0]
