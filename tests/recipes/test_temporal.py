"""The recipe temporal from a file to predictions, on bars of which it is known what can be found in them."""

import csv
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from recipe_data import bars_file, write_rows
from typer.testing import CliRunner

from hotlap.cli import app
from hotlap.core.errors import DataError, JobError, TrainingError
from hotlap.recipes import recipe_named, temporal, training
from hotlap.recipes.answers import answer, revived
from hotlap.recipes.bars import PRICES, bars_from, resampled
from hotlap.recipes.indicators import direction
from hotlap.recipes.options import options_of
from hotlap.recipes.simulated_bars import simulated_bars
from hotlap.recipes.tables import read_table
from hotlap.recipes.temporal import RECIPE, known_features, seconds_of
from hotlap.recipes.training import train

QUICK = {"models": "mlp", "epochs": 3, "batch_size": 64, "plan": "off", "device": "cpu", "frames": "h1"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


def options(data, **more):
    return options_of(RECIPE.options_type, None, {"data": str(data), **QUICK, **more})


def prepared(data, **more):
    return RECIPE.prepare(options(data, **more), lambda line: None)


def trained(data, out, lines, **more):
    return train(RECIPE, options(data, **more), out=out, retrain=False, say=lines.append, progress=False)


def test_from_a_file_to_predictions_and_again_from_the_cache(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv"), []
    folder = trained(data, tmp_path / "run", lines, test=str(data))
    left = {path.name for path in folder.iterdir()}
    assert left >= {
        "model.safetensors", "recipe.json", "options.toml", "report.json", "curves.svg", "confusion.svg",
        "predictions.csv", "models",
    }  # fmt: skip
    report = json.loads((folder / "report.json").read_text())
    assert report["best"] == "mlp"
    assert set(report["baselines"]) == {"most frequent class", "what it did last"}
    assert any(line.startswith("most frequent class") for line in lines)
    with (folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    with data.open() as file:
        given = list(csv.DictReader(file))
    assert [(row["time"], row["symbol"]) for row in rows] == [(row["time"], row["symbol"]) for row in given]
    answered = [row["direction"] for row in rows if row["direction"]]
    assert set(answered) <= {"down", "flat", "up"}
    assert len(answered) > 0.5 * len(rows)
    again = []
    trained(data, tmp_path / "again", again)
    assert any("from the cache, which saved" in line for line in again)
    assert any(line.startswith("mlp") and "trained before, which saved" in line for line in again)
    retrained = []
    train(RECIPE, options(data), out=tmp_path / "third", retrain=True, say=retrained.append, progress=False)
    assert any(line.startswith("mlp") and "trained in" in line for line in retrained)


def test_what_tuning_did_is_told_behind_each_training_and_not_where_there_was_none(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "tuning_table", lambda ledger: [f"table of {[entry.what for entry in ledger]}"])
    data, lines, again = bars_file(tmp_path / "bars.csv"), [], []
    trained(data, tmp_path / "run", lines)
    at = lines.index("table of ['start']")
    assert lines[at + 1] == "plan   gather · fp32 · plain optimizer · batches whole · eager"
    trained(data, tmp_path / "again", again)
    assert not any(line.startswith(("table of", "plan   ")) for line in again)


def test_the_file_of_a_run_repeats_it(tmp_path):
    data = bars_file(tmp_path / "bars.csv")
    folder = trained(data, tmp_path / "run", [])
    given = options_of(RECIPE.options_type, folder / "options.toml", {})
    assert given == options(data)
    other = train(RECIPE, given, out=tmp_path / "other", retrain=True, say=lambda line: None, progress=False)
    assert (other / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_the_last_part_of_each_symbol_is_held_out_and_labels_do_not_reach_over_the_cut(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=500, symbols=2)
    chosen = options(data, ahead="6")
    lines = []
    found = RECIPE.prepare(chosen, lines.append)
    bars, known = known_features(read_table(data), [3600], lambda line: None)
    windows, held = found.candidates[0].job().data, found.held_out
    # How many windows each side has, and the labels of those that are held out, worked out once more.
    labels = [direction(one, 6, 1.0, volatility_window=96) for one in bars]
    expected_train, expected_held = 0, []
    for one, its, truth in zip(bars, known, labels, strict=True):
        first = its.first + chosen.length - 1
        cut = first + round((len(one) - 6 - first) * 0.8)
        known_from = max(first, int(np.flatnonzero(truth >= 0)[0]))
        expected_train += cut - 6 - known_from
        expected_held.append(truth[cut : len(one) - 6])
    assert len(windows) == expected_train
    assert found.target.tolist() == np.concatenate(expected_held).tolist()
    assert len(held) == len(found.target)


def test_what_comes_later_changes_nothing_that_was_trained_on(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=600, symbols=1)
    rows = data.read_text().splitlines()
    changed = tmp_path / "changed.csv"
    later = []
    for line in rows[560:]:
        time, symbol, *prices, volume = line.split(",")
        later.append(",".join([time, symbol, *(str(1.5 * float(price)) for price in prices), volume]))
    changed.write_text("\n".join([*rows[:560], *later]) + "\n")
    mine, theirs = (
        RECIPE.prepare(options(path), lambda line: None).candidates[0].job().data for path in (data, changed)
    )
    assert torch.equal(mine.series, theirs.series)
    assert torch.equal(mine.target, theirs.target)


def test_it_learns_what_can_be_learnt_and_nothing_where_there_is_chance_alone(tmp_path):
    scores = {}
    for signal in (0.45, 0.0):
        data = bars_file(tmp_path / f"bars{signal}.csv", rows=6000, symbols=1, signal=signal)
        folder = trained(data, tmp_path / f"run{signal}", [], epochs="6", ahead="1", threshold="0.2")
        scores[signal] = json.loads((folder / "report.json").read_text())["models"]["mlp"]["roc_auc"]
    assert scores[0.45] > 0.6
    assert abs(scores[0.0] - 0.5) < 0.06


def test_three_models_are_compared_and_the_best_is_the_one_that_is_kept(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=400, symbols=1), []
    folder = trained(data, tmp_path / "run", lines, models="lstm,transformer,mlp", epochs="1")
    report = json.loads((folder / "report.json").read_text())
    assert set(report["models"]) == {"lstm", "transformer", "mlp"}
    best = max(report["models"], key=lambda name: report["models"][name]["macro_f1"])
    assert report["best"] == best
    state, reader, model = revived(folder)
    assert state["model"] == best
    assert type(model) is type(reader.model(best))


def test_a_last_batch_of_one_window_is_left_out_for_every_model_alike(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=1)
    count = len(prepared(data).candidates[0].job().data)
    chosen = {"batch_size": str(count - 1), "models": "lstm,transformer,mlp", "epochs": "1"}
    assert [one.job().drop_last for one in prepared(data, **chosen).candidates] == [True] * 3
    folder = trained(data, tmp_path / "run", [], **chosen)
    assert set(json.loads((folder / "report.json").read_text())["models"]) == {"lstm", "transformer", "mlp"}
    more = RECIPE.prepare(options(data, batch_size=str(count - 2)), lambda line: None)
    assert more.candidates[0].job().drop_last is None


def test_a_fold_whose_last_batch_holds_one_window_is_trained_and_one_of_a_single_window_is_refused(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=900, symbols=1)
    folds = prepared(data, folds="3").folds("mlp")
    size = len(folds[1].job().data) - 1
    folder = trained(data, tmp_path / "run", [], folds="3", epochs="1", batch_size=str(size))
    assert len(json.loads((folder / "report.json").read_text())["folds"]) == 3
    with pytest.raises(DataError, match="there are too few bars for 133 folds; ask for fewer"):
        prepared(data, folds="133").folds("mlp")


@pytest.fixture
def hasty(monkeypatch):
    """Some models, by name, learn at a rate that leaves no numbers of them."""
    names, made = set(), temporal.TemporalRecipe.job

    def job(recipe, name, *rest):
        found = made(recipe, name, *rest)
        if name in names:
            found.optimizer.param_groups[0].update(lr=1e30, initial_lr=1e30)
        return found

    monkeypatch.setattr(temporal.TemporalRecipe, "job", job)
    return names


def test_one_model_that_diverges_is_left_out_and_all_that_do_are_an_error(tmp_path, hasty):
    data, lines = bars_file(tmp_path / "bars.csv", rows=400, symbols=1), []
    hasty.add("lstm")
    folder = trained(data, tmp_path / "run", lines, models="lstm,mlp", epochs="1")
    assert [
        line
        for line in lines
        if line.startswith("warning   left out: the training of lstm diverged: the weights are not finite")
    ]
    report = json.loads((folder / "report.json").read_text())
    assert (report["best"], set(report["models"])) == ("mlp", {"mlp"})
    with pytest.raises(TrainingError, match="the training of lstm diverged"):
        trained(data, tmp_path / "alone", [], models="lstm", epochs="1")


def test_a_fold_that_diverges_is_left_out_of_the_average(tmp_path, hasty, monkeypatch):
    data, lines = bars_file(tmp_path / "bars.csv", rows=900, symbols=1), []
    folds = temporal.TemporalRecipe.folds

    def first_in_haste(recipe, name):
        first, *rest = folds(recipe, name)

        def in_haste():
            hasty.add(name)
            try:
                return first.job()
            finally:
                hasty.discard(name)

        return [replace(first, job=in_haste), *rest]

    monkeypatch.setattr(temporal.TemporalRecipe, "folds", first_in_haste)
    folder = trained(data, tmp_path / "run", lines, folds="3", epochs="1")
    assert [line for line in lines if line.startswith("warning   left out: the training of fold 1 of 3 diverged")]
    assert any(line.startswith("over 2 folds macro-F1 is") for line in lines)
    assert list(json.loads((folder / "report.json").read_text())["folds"]) == ["fold 2 of 3", "fold 3 of 3"]


def test_folds_at_once_are_judged_as_folds_one_after_the_other(tmp_path, monkeypatch):
    data, told = bars_file(tmp_path / "bars.csv", rows=900, symbols=1), []
    given = options(data, folds="3", epochs="1", models="mlp", plan="off")

    def judged(out, lines):
        return train(RECIPE, given, out=out, retrain=True, say=lines.append, progress=False)

    one = judged(tmp_path / "one", [])
    monkeypatch.setattr("hotlap.searching.trainings.how_many", lambda *given, **named: 2)
    two = judged(tmp_path / "two", told)
    reports = [json.loads((folder / "report.json").read_text())["folds"] for folder in (one, two)]
    assert reports[0] == reports[1]
    assert list(reports[0]) == ["fold 1 of 3", "fold 2 of 3", "fold 3 of 3"]
    assert sum(line.startswith("over 3 folds") for line in told) == 1


def test_an_export_of_metatrader_is_read_as_the_same_bars(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=1)
    with data.open() as file:
        rows = list(csv.DictReader(file))
    lines = ["<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>"]
    for row in rows:
        day, hour = row["time"].split()
        prices = [row[name] for name in ("open", "high", "low", "close", "volume")]
        lines.append("\t".join([day.replace("-", "."), hour, *prices, "0", "2"]))
    (tmp_path / "export.csv").write_text("\n".join(lines) + "\n")
    mine, theirs = (RECIPE.prepare(options(tmp_path / name), lambda line: None) for name in ("bars.csv", "export.csv"))
    assert torch.equal(mine.candidates[0].job().data.series, theirs.candidates[0].job().data.series)


def first_rows(path, data, counts):
    """So many of the first rows of each symbol of a file."""
    header, *lines = data.read_text().splitlines(keepends=True)
    kept = [line for name, count in counts.items() for line in [one for one in lines if f",{name}," in one][:count]]
    path.write_text("".join([header, *kept]))
    return path


def test_symbols_with_too_few_bars_for_a_window_are_said(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=500, symbols=5), []
    counts = {"SIM1": 500, "SIM2": 1, "SIM3": 40, "SIM4": 60, "SIM5": 80}
    RECIPE.prepare(options(first_rows(tmp_path / "some.csv", data, counts)), lines.append)
    (line,) = [line for line in lines if line.startswith("warning   left out: ")]
    begin, _, needed = line.partition(" and 1 more: a window to train on needs ")
    assert begin == "warning   left out: bars of SIM2 with 1, SIM3 with 40, SIM4 with 60"
    enough = int(needed.removesuffix(" of a symbol"))
    for count, said in ((enough - 5, 1), (enough, 0)):
        lines = []
        RECIPE.prepare(options(first_rows(tmp_path / "two.csv", data, {"SIM1": 500, "SIM2": count})), lines.append)
        assert sum(line.startswith("warning   left out: ") for line in lines) == said


@pytest.mark.parametrize(
    "chosen", [{}, {"frames": "h1,h4"}, {"volatility": "200"}, {"frames": "", "valid_share": "0.6"}]
)
@pytest.mark.parametrize("rows", [30, 130])
def test_too_few_bars_are_refused_with_a_number_that_is_enough(tmp_path, chosen, rows):
    data = bars_file(tmp_path / "bars.csv", rows=rows, symbols=1)
    with pytest.raises(DataError, match=r"50 are needed: the first \d+ bars of each symbol have too little") as raised:
        prepared(data, **chosen)
    said = str(raised.value)
    assert said.endswith("--frames") is (chosen.get("frames") == "h1,h4")
    enough = int(said.partition("; give ")[2].split()[0])
    lines = []
    RECIPE.prepare(options(bars_file(tmp_path / "more.csv", rows=enough, symbols=1), **chosen), lines.append)
    with pytest.raises(DataError, match="50 are needed"):
        RECIPE.prepare(options(bars_file(tmp_path / "fewer.csv", rows=enough - 5, symbols=1), **chosen), lines.append)


def files_of(folder, data, parts):
    """The rows of a file, without their symbols, in files of a folder: from where to where for each name."""
    folder.mkdir()
    header, *rows = [line.split(",") for line in data.read_text().splitlines()]
    for name, (begin, end) in parts.items():
        write_rows(folder / name, [header[0], *header[2:]], [[row[0], *row[2:]] for row in rows[begin:end]])
    return folder


def test_files_that_share_times_are_of_one_symbol_each_called_as_they_are(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=400, symbols=2), []
    many = files_of(tmp_path / "many", data, {"AAA.csv": (0, 400), "NA.csv": (400, 800)})
    mine, theirs = prepared(data), RECIPE.prepare(options(many), lines.append)
    assert torch.equal(mine.candidates[0].job().data.series, theirs.candidates[0].job().data.series)
    note = "its 2 files are taken to be of one each, called as the file is, such as AAA"
    assert f"          note: there is no column of symbols: {note}" in lines
    folder = trained(many, tmp_path / "run", [], epochs="1")
    said = []
    answer(folder, many, tmp_path / "answers.csv", say=said.append, device="cpu")
    with (tmp_path / "answers.csv").open() as file:
        assert [row["symbol"] for row in csv.DictReader(file)] == ["AAA"] * 400 + ["NA"] * 400
    assert any("there is no column of symbols" in line for line in said)


def test_files_that_follow_each_other_stay_one_symbol(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=400, symbols=1), []
    parts = files_of(tmp_path / "parts", data, {"2022.csv": (0, 150), "2023.csv": (150, 400)})
    mine, theirs = prepared(data), RECIPE.prepare(options(parts), lines.append)
    assert torch.equal(mine.candidates[0].job().data.series, theirs.candidates[0].job().data.series)
    assert not any("no column of symbols" in line for line in lines)
    twice = files_of(tmp_path / "twice", data, {"2022.csv": (0, 151), "2023.csv": (150, 400)})
    with pytest.raises(DataError, match=r"2023.csv row 1: its time .* is that of 2022.csv row 151 too; where rows are"):
        RECIPE.prepare(options(twice), lambda line: None)


def test_bars_to_judge_by_that_are_trained_on_are_known_by_the_names_of_files(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=2)
    many = files_of(tmp_path / "many", data, {"AAA.csv": (0, 400), "BBB.csv": (400, 800)})
    with pytest.raises(DataError, match=r"400 bars of BBB in .*BBB.csv, from .* are of times that .*many has too"):
        RECIPE.prepare(options(many, valid=str(many / "BBB.csv")), lambda line: None)


def test_files_of_two_lengths_are_refused_by_their_names(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=1)
    files_of(tmp_path / "many", data, {"EURUSD_m15.csv": (0, 400)})
    hours = hours_of(tmp_path / "hours.csv", data).read_text().splitlines()
    rows = [line.split(",") for line in hours[1:]]
    header = ["time", "open", "high", "low", "close", "volume"]
    write_rows(tmp_path / "many" / "EURUSD_h1.csv", header, [[row[0], *row[2:], 0] for row in rows])
    with pytest.raises(DataError, match=r"the bars of EURUSD_h1 in .*many are h1, and the others m15; give bars of"):
        RECIPE.prepare(options(tmp_path / "many"), lambda line: None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("close", "last"), "close"),
        (lambda text: "\n".join(text.splitlines()[:60]) + "\n", "windows to train on, and 50 are needed"),
        (lambda text: text.splitlines()[0] + "\n", "no rows"),
    ],
)
def test_data_that_will_not_do_is_refused_in_a_line(tmp_path, change, said):
    data = bars_file(tmp_path / "bars.csv", rows=300, symbols=1)
    data.write_text(change(data.read_text()))
    with pytest.raises(DataError, match=said):
        trained(data, tmp_path / "run", [])
    assert not (tmp_path / "run").exists()


def test_options_that_make_no_sense_are_refused_together():
    with pytest.raises(JobError) as raised:
        options_of(RECIPE.options_type, None, {"models": "lstm,gru", "frames": "auto,h1", "length": "0"})
    assert len(raised.value.problems) == 3


@pytest.mark.parametrize(
    ("frame", "seconds"), [("h1", 3600), ("H4", 14400), ("m15", 900), ("1d", 86400), ("0h", None), ("x", None)]
)
def test_frames_are_written_as_traders_do(frame, seconds):
    assert seconds_of(frame) == seconds


def test_the_commands_train_predict_and_list(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=1)
    said = [word for name, value in QUICK.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = CliRunner().invoke(app, ["train", "temporal", "--data", str(data), "--out", "run", "--quiet", *said])
    assert done.exit_code == 0, done.output
    told = ["predict", "run", "--data", str(data), "--out", "answers.csv", "--keep", "time", "--probabilities"]
    done = CliRunner().invoke(app, told)
    assert done.exit_code == 0, done.output
    header = (tmp_path / "answers.csv").read_text().splitlines()[0]
    assert header == "time,direction,direction_down,direction_flat,direction_up"
    listed = CliRunner().invoke(app, ["recipes"]).output
    assert all(recipe_named(name).summary in listed for name in ("temporal", "text"))
    listed = CliRunner().invoke(app, ["recipes", "temporal"]).output
    assert "--ahead" in listed
    assert re.search(r"--group TEXT +Not for bars, of which the last part is held out", listed)


def test_bars_of_all_symbols_are_answered_each_in_its_row(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=300, symbols=2)
    lines = data.read_text().splitlines()
    mixed = tmp_path / "mixed.csv"
    order = np.random.default_rng(0).permutation(len(lines) - 1)
    mixed.write_text("\n".join([lines[0], *(lines[1 + at] for at in order)]) + "\n")
    folder = trained(data, tmp_path / "run", [])
    answers = {}
    for path, out in ((data, "a.csv"), (mixed, "b.csv")):
        answer(folder, path, tmp_path / out, say=lambda line: None)
        with (tmp_path / out).open() as file:
            answers[out] = {(row["time"], row["symbol"]): row["direction"] for row in csv.DictReader(file)}
    assert answers["a.csv"] == answers["b.csv"]
    assert len(bars_from({n: np.asarray(c.texts()) for n, c in read_table(mixed).columns.items()})) == 2


def test_walking_forward_trains_on_what_came_before_and_judges_what_comes_next(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=900, symbols=1), []
    folder = trained(data, tmp_path / "run", lines, folds="3", epochs="1")
    report = json.loads((folder / "report.json").read_text())
    assert list(report["folds"]) == ["fold 1 of 3", "fold 2 of 3", "fold 3 of 3"]
    assert any(line.startswith("over 3 folds macro-F1 is") for line in lines)
    found = prepared(data, folds="3")
    folds = found.folds("mlp")
    trained_on = [len(fold.job().data) for fold in folds]
    assert trained_on == sorted(trained_on)
    assert trained_on[0] < trained_on[-1]
    # What is judged lies side by side and is never judged twice.
    truth = direction(bars_from(_columns_of(data))[0], 4, 1.0, volatility_window=96)
    judged = np.concatenate([fold.target for fold in folds])
    known = np.flatnonzero(truth >= 0)
    assert judged.tolist() == truth[known[-1] + 1 - len(judged) : known[-1] + 1].tolist()


def _columns_of(path):
    return {name: np.asarray(column.texts()) for name, column in read_table(path).columns.items()}


def test_an_onnx_file_answers_as_the_model_does_and_says_what_it_takes(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    data, lines = bars_file(tmp_path / "bars.csv", rows=500, symbols=1), []
    folder = trained(data, tmp_path / "run", lines, onnx="true", epochs="1")
    assert any(line.startswith("onnx") and "its answers are the model's to" in line for line in lines)
    session = runtime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["down", "flat", "up"]
    bars, known = known_features(read_table(data), [3600], lambda line: None)
    assert json.loads(about["features"]) == list(known[0].names)
    length = json.loads(about["length"])
    first = known[0].first
    windows = np.stack([known[0].values[at : at + length] for at in range(first, first + 30)])
    (given,) = session.run(None, {"bars": windows})
    answer(folder, data, tmp_path / "answers.csv", say=lambda line: None, probabilities=True, device="cpu")
    with (tmp_path / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    asked = bars[0].rows[first + length - 1 : first + length + 29]
    mine = [[float(rows[at][f"direction_{name}"]) for name in ("down", "flat", "up")] for at in asked]
    np.testing.assert_allclose(given, np.asarray(mine), atol=2e-5)


def test_bars_have_no_embeddings(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=1)
    folder = trained(data, tmp_path / "run", [], epochs="1")
    with pytest.raises(DataError, match="the recipe temporal has no embeddings"):
        answer(folder, data, tmp_path / "a.csv", say=lambda line: None, embeddings=tmp_path / "v.npy")


# --- what would make a score or an answer false ------------------------------------------------------


def hours_of(path, data):
    """The bars of a file made four times as long."""
    table = read_table(data)
    longer = [resampled(one, 3600) for one in bars_from({name: table[name].values if table[name].kind in ("number",
              "date") else table[name].texts() for name in table.columns})]  # fmt: skip
    rows = [
        [str(one.times[at].astype("datetime64[s]")), one.symbol, one.open[at], one.high[at], one.low[at], one.close[at]]
        for one in longer
        for at in range(len(one))
    ]
    return write_rows(path, ["time", "symbol", "open", "high", "low", "close"], rows)


def test_bars_of_another_length_than_those_trained_on_are_refused(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=1200, symbols=1)
    folder = trained(data, tmp_path / "run", [], epochs=1)
    hours = hours_of(tmp_path / "hours.csv", data)
    with pytest.raises(DataError) as raised:
        answer(folder, hours, tmp_path / "answers.csv", say=lambda line: None, device="cpu")
    assert str(raised.value) == (f"the bars of SIM1 in {hours} are h1, and those trained on m15; give bars of m15")
    assert not (tmp_path / "answers.csv").exists()
    with pytest.raises(DataError, match=r"hours.csv are h1, and those trained on m15"):
        RECIPE.prepare(options(data, valid=str(hours)), lambda line: None)
    assert answer(folder, data, tmp_path / "answers.csv", say=lambda line: None, device="cpu").rows > 1000
    state = json.loads((folder / "recipe.json").read_text())
    assert state["reader"]["seconds"] == 900


def test_symbols_of_different_lengths_are_refused(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=600, symbols=1)
    hours = hours_of(tmp_path / "hours.csv", data).read_text().replace("SIM1", "HOURLY").splitlines()[1:]
    mixed = tmp_path / "mixed.csv"
    mixed.write_text(data.read_text() + "".join(f"{line},0\n" for line in hours))
    with pytest.raises(DataError, match=r"the bars of HOURLY in .*mixed\.csv are h1, and the others m15"):
        RECIPE.prepare(options(mixed), lambda line: None)


def test_a_file_to_judge_by_with_times_that_are_trained_on_is_refused(tmp_path):
    data = bars_file(tmp_path / "bars.csv", rows=1200, symbols=1)
    header, *rows = data.read_text().splitlines(keepends=True)
    early, late, both = (tmp_path / f"{name}.csv" for name in ("early", "late", "both"))
    early.write_text("".join([header, *rows[:700]]))
    late.write_text("".join([header, *rows[700:]]))
    both.write_text("".join([header, *rows[690:]]))
    with pytest.raises(DataError) as raised:
        RECIPE.prepare(options(early, valid=str(both)), lambda line: None)
    said = str(raised.value)
    first, last = (rows[at].split(",")[0].replace(" ", "T") for at in (690, 699))
    assert said.startswith(f"10 bars of SIM1 in {both}, from {first} to {last}, are of times")
    assert "\n" not in said
    RECIPE.prepare(options(early, valid=str(late)), lambda line: None)
    both.write_text(both.read_text().replace("SIM1", "SIM2"))
    RECIPE.prepare(options(early, valid=str(both)), lambda line: None)


@pytest.mark.parametrize("name", ["close", "symbol"])
def test_a_target_that_is_a_column_is_refused(tmp_path, name):
    data = bars_file(tmp_path / "bars.csv", rows=300, symbols=1)
    with pytest.raises(DataError, match=f"target={name} is a column of .*choose a name that is no column"):
        prepared(data, target=name)


def test_answers_do_not_take_the_place_of_a_column_of_their_name(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=600, symbols=1), []
    folder = trained(data, tmp_path / "run", [], epochs=1)
    answer(folder, data, tmp_path / "first.csv", say=lambda line: None, device="cpu")
    answer(folder, tmp_path / "first.csv", tmp_path / "second.csv", say=lines.append, device="cpu")
    with (tmp_path / "second.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-2:] == ["direction", "predicted_direction"]
    assert all(row["direction"] == row["predicted_direction"] for row in rows)
    assert any("'predicted_direction', since" in line for line in lines)


@pytest.mark.parametrize(
    ("seconds", "frame", "said"),
    [
        (900, "m5", "name multiples of it, such as --frames h1,h4, or none: --frames="),
        (14400, "h1", "name multiples of it, such as --frames d1,d7, or none: --frames="),
        (86400, "h1", "name multiples of it, such as --frames d7, or none: --frames="),
        (864000, "d7", "name none: --frames="),
    ],
)
def test_frames_that_can_be_made_of_the_bars_are_suggested(tmp_path, seconds, frame, said):
    rows = [[int(1_600_000_000 // 86400 * 86400 + at * seconds), 10, 11, 9, 10] for at in range(30)]
    data = write_rows(tmp_path / "bars.csv", ["time", "open", "high", "low", "close"], rows)
    with pytest.raises(DataError) as raised:
        prepared(data, frames=frame)
    assert str(raised.value).endswith(said)


@pytest.mark.parametrize(
    ("seconds", "made", "said"),
    [
        (900, [3600, 14400], None),
        (3600, [14400], "h1: not longer than the file's own bars of h1; name longer ones, such as --frames h4,d1"),
        (86400, [], "h1 and h4: not longer than the file's own bars of d1; name longer ones, such as --frames d7"),
        (5400, [], "h1 and h4: not to be made of the file's own bars of m90; name longer ones, such as --frames d1,d7"),
        (864000, [], "h1 and h4: not longer than the file's own bars of d10"),
    ],
)
def test_of_the_usual_frames_those_are_made_that_are_longer_where_none_are_named(tmp_path, seconds, made, said):
    data, lines = tmp_path / "bars.csv", []
    (bars,) = simulated_bars(700, 1)
    rows = [[1_599_955_200 + at * seconds, *(getattr(bars, name)[at] for name in PRICES)] for at in range(700)]
    write_rows(data, ["time", *PRICES], rows)
    chosen = options(data, frames="auto")
    found = RECIPE.prepare(chosen, lines.append)
    assert found.reader.state()["frames"] == made
    assert [line for line in lines if line.startswith("frames")] == ([f"frames    without {said}"] if said else [])
    assert chosen.frames == RECIPE.options_type(data=str(data)).frames


def test_features_of_a_test_file_are_not_said_to_be_cached_in_the_run_that_made_them(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=600), []
    test = bars_file(tmp_path / "test.csv", rows=500, seed=3)
    trained(data, tmp_path / "run", lines, test=str(test), epochs=1)
    assert f"test      {test}: 1,000 rows" in lines
    assert not any("from the cache" in line for line in lines)
    assert sum(line.startswith("features") for line in lines) == 2


def test_bars_without_an_answer_are_told_with_what_would_give_them_one(tmp_path):
    data, lines = bars_file(tmp_path / "bars.csv", rows=400, symbols=1), []
    trained(data, tmp_path / "run", lines, test=str(data), epochs=1)
    (line,) = [line for line in lines if line.startswith("bars  ")]
    assert line.endswith(
        "of 400 have too little before them for an answer; put those that came before in front of them"
    )


@pytest.mark.parametrize("symbols", [1, 2])
def test_the_worst_mistakes_are_told_by_the_time_of_their_last_bar_and_by_their_symbol(tmp_path, symbols):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=symbols)
    found = prepared(data)
    bars, _ = known_features(read_table(data), [3600], lambda line: None)
    each = len(found.target) // symbols
    moments = [one.times[-4 - each : -4].astype("datetime64[s]") for one in bars]
    words = [
        f"the window up to the bar of {moment}" + (f" of {one.symbol}" if symbols > 1 else "")
        for one, its in zip(bars, moments, strict=True)
        for moment in its
    ]
    assert [found.shown(at) for at in range(len(found.target))] == words
    folder = trained(data, tmp_path / "run", [], epochs="1")
    worst = json.loads((folder / "report.json").read_text())["worst"]
    assert {one["sample"] for one in worst} <= set(words)


def test_no_epochs_and_no_rate_leave_both_to_the_recipe(tmp_path):
    found = RECIPE.prepare(options(bars_file(tmp_path / "bars.csv"), epochs=0, lr=0), lambda line: None)
    job = found.candidates[0].job()
    assert (job.epochs, job.optimizer.param_groups[0]["lr"]) == (20, 1e-3)


def test_a_rule_that_is_right_more_often_than_the_best_by_macro_f1_is_named():
    def judged(accuracy):
        return SimpleNamespace(name="mlp", report={"accuracy": accuracy, "macro_f1": 0.4})

    rules = {"most frequent class": {"accuracy": 0.749}, "what it did last": {"accuracy": 0.58}}
    (line,) = training._more_often_right(judged(0.412), rules)
    assert line.startswith("by accuracy most frequent class is better than mlp: 0.749 against 0.412")
    assert training._more_often_right(judged(0.8), rules) == []
    assert training._more_often_right(judged(0.1), {}) == []
