"""What somebody new to the recipes may do wrong: one clear line, before time is spent, and nothing lost."""

import csv
import json
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from killed import code_of, forked
from recipe_data import TINY, bars_file, texts_file, tiny_config, write_rows
from safetensors.torch import load_file
from typer.testing import CliRunner

import hotlap
from hotlap.cli import app, main
from hotlap.core.errors import DataError, HotlapError, MachineError, PlanError, StoreError
from hotlap.recipes import encoders, scores, training
from hotlap.recipes.tables import read_table
from hotlap.recipes.training import Judged

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run, and its data."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_CACHE", str(folder / "cache"))
        data = texts_file(folder / "train.csv", rows=120)
        return train(folder, data, "run"), data


def quick(folder):
    config = str(tiny_config(folder / "tiny.json"))
    return {"config": config, "epochs": 1, "vocabulary": 300, "most": 48, "lr": 5e-3, "plan": "off", "device": "cpu"}


def train(folder, data, out, **more):
    return hotlap.train("text", data, out=folder / out, progress=False, **{**quick(folder), **more})


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# --- before the training ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"plan": "fast"}, PlanError, "unknown plan 'fast': use auto, off, max, a plan file or a run folder"),
        ({"test": "none.csv"}, DataError, "test=none.csv does not exist"),
        ({"valid": "none.csv"}, DataError, "valid=none.csv does not exist"),
        ({"test": "bars.csv"}, DataError, "bars.csv has no column 'text'"),
        ({"text": "label"}, DataError, "text names label, which is the target"),
        ({"group": "label"}, DataError, "group names label, which is the target"),
        ({"target": "id"}, DataError, "the target 'id' has 120 different values in 120 rows"),
    ],
)
def test_a_mistake_is_told_before_the_training_and_leaves_no_folder(tmp_path, more, error, said):
    bars_file(tmp_path / "bars.csv", rows=10, symbols=1)
    data = texts_file(tmp_path / "train.csv", rows=120)
    with pytest.raises(error, match=re.escape(said)):
        train(tmp_path, data, "run", **more)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_files_is_refused_at_once_and_left_as_it_is(tmp_path, finished):
    run, data = finished
    before = (run / "report.json").read_bytes()
    with pytest.raises(StoreError, match=r"was trained otherwise: data='none\.csv', it had .*; name a new folder"):
        hotlap.train("text", "none.csv", out=run, progress=False)
    (run.parent / "mine").mkdir()
    (run.parent / "mine" / "notes.txt").write_text("x")
    with pytest.raises(StoreError, match="mine holds files already"):
        hotlap.train("text", data, out=run.parent / "mine", progress=False)
    assert (run / "report.json").read_bytes() == before
    with pytest.raises(PlanError, match=r"name one of its models: .*encoder"):
        train(tmp_path, data, "other", plan=str(run))


def test_what_is_not_installed_is_said_before_texts_are_tokenised(tmp_path, monkeypatch):
    data = texts_file(tmp_path / "train.csv", rows=60)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MachineError, match=re.escape("needs transformers: pip install '.[text]' in a clone of hotlap")):
        train(tmp_path, data, "run")
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model_type": "bertt"}, "Unrecognized model identifier"), ({"hidden_size": 30}, "no model can be made")],
)
def test_a_config_of_no_encoder_is_refused_in_a_line(tmp_path, change, said):
    data = texts_file(tmp_path / "train.csv", rows=60)
    config = tmp_path / "bad.json"
    config.write_text(json.dumps({**TINY, "num_attention_heads": 4, **change}))
    with pytest.raises(StoreError, match=said) as raised:
        train(tmp_path, data, "run", config=str(config))
    assert len(str(raised.value)) < 400


def test_what_is_predicted_from_what_is_said(tmp_path, capsys):
    data = texts_file(tmp_path / "train.csv", rows=60)
    hotlap.train("text", data, out=tmp_path / "run", **quick(tmp_path))
    assert "task      label (3 classes) from text\n" in capsys.readouterr().err


def test_without_progress_warnings_are_shown_and_nothing_else(tmp_path, capsys, monkeypatch):
    data, fit = texts_file(tmp_path / "train.csv", rows=60), training.fit
    (tmp_path / "train.csv").write_text(data.read_text() + "61,Rain falls,weather\n")
    monkeypatch.setattr(training, "fit", lambda *job, **how: replace(fit(*job, **how), problems=("the disk is full",)))
    run = train(tmp_path, data, "run")
    warned = capsys.readouterr().err.splitlines()
    assert any(line.startswith("warning   class 'weather' of 'label' has a single row") for line in warned)
    assert "warning   the disk is full" in warned
    assert all(line.startswith("warning") for line in warned)
    hotlap.predict(run, data, tmp_path / "answers.csv", device="cpu", progress=False)
    (warned,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warning   on the rows held out in training, .* did at least as well as this model", warned)


@pytest.mark.parametrize("recipe", ["text", "temporal"])
def test_a_folder_of_pictures_is_told_its_recipe(tmp_path, recipe):
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        (tmp_path / "pictures" / name / "1.png").touch()
    with pytest.raises(DataError, match=r"pictures is a folder of pictures; .*hotlap train image --data pictures"):
        hotlap.train(recipe, "pictures", progress=False, device="cpu")


def test_rows_without_a_group_are_refused(tmp_path):
    rows = [[f"some words {at}", "ab"[at % 2], "" if at % 3 else f"g{at}"] for at in range(30)]
    data = write_rows(tmp_path / "train.csv", ["text", "label", "author"], rows)
    with pytest.raises(DataError, match="group=author is missing in 20 rows"):
        train(tmp_path, data, "run", group="author", text="text")


def test_frames_that_the_bars_are_too_long_for_are_named_as_the_user_writes_them(tmp_path):
    rows = [[f"2020-01-{at + 1:02}", 10, 11, 9, 10] for at in range(28)]
    data = write_rows(tmp_path / "daily.csv", ["time", "open", "high", "low", "close"], rows)
    with pytest.raises(DataError, match=r"frame h1 cannot be made of bars of d1.*--frames="):
        hotlap.train("temporal", data, frames=["h1"], progress=False, device="cpu")


def test_a_single_bar_and_a_short_file_to_judge_by_are_said(tmp_path):
    one, many = bars_file(tmp_path / "one.csv", rows=1, symbols=1), bars_file(tmp_path / "many.csv", rows=600)
    with pytest.raises(DataError, match=r"one\.csv has a single bar"):
        hotlap.train("temporal", one, progress=False, device="cpu")
    few = bars_file(tmp_path / "few.csv", rows=40, symbols=1)
    few.write_text(few.read_text().replace("SIM1", "another"))
    with pytest.raises(DataError, match=r"few\.csv has 0 windows to hold out"):
        hotlap.train("temporal", many, valid=few, progress=False, device="cpu")


# --- files without a header ------------------------------------------------------------------------


def test_a_file_without_header_is_known_by_a_number_that_comes_again(tmp_path):
    data = tmp_path / "news.csv"
    data.write_text("3,Stocks fall,Banks lose\n4,Comet seen,It is far\n3,Debt grows,Taxes rise\n")
    table = read_table(data)
    assert (len(table), list(table.columns), table.has_header) == (3, ["column_0", "column_1", "column_2"], False)
    assert "its first row is data: '3', 'Stocks fall'" in table.notes[0]
    years = tmp_path / "years.csv"
    years.write_text("land,2019,2020\nA,1,2\nB,3,4\n")
    assert list(read_table(years).columns) == ["land", "2019", "2020"]


def test_bars_without_a_header_are_told_what_can_be_done(tmp_path, capsys):
    data = bars_file(tmp_path / "bars.csv", rows=400, symbols=1)
    bare = tmp_path / "bare.csv"
    rows = data.read_text().splitlines(keepends=True)[1:]
    for lines in (rows, [*rows, rows[0]]):  # the first row comes again, so that it is no header
        bare.write_text("".join(lines))
        with pytest.raises(
            DataError, match=r"^no column is called as those of bars are: there are \['.*; name them, in"
        ):
            hotlap.train("temporal", bare, device="cpu")
    assert "note: bare.csv has no header (its first row is data: " in (shown := capsys.readouterr().err)
    assert "--header" not in shown


def test_texts_without_a_header_are_told_the_option(tmp_path, capsys):
    data = tmp_path / "bare.csv"
    data.write_text("3,Stocks fall\n4,Comet seen\n3,Debt grows\n")
    for header, count in (("auto", 1), ("no", 0)):
        with pytest.raises(DataError):
            hotlap.train("text", data, target="none", header=header, device="cpu")
        assert capsys.readouterr().err.count("note: say --header yes if its first row holds names") == count


def test_a_run_of_a_file_without_header_predicts_one(tmp_path):
    named = rows_of(texts_file(tmp_path / "named.csv", rows=120))
    bare = tmp_path / "bare.csv"
    with bare.open("w", newline="") as file:
        csv.writer(file).writerows([["sport", "money", "science"].index(row["label"]), row["text"]] for row in named)
    run = train(tmp_path, bare, "run", target="column_0")
    few = tmp_path / "few.csv"  # by itself it would seem to have a header
    few.write_text("".join(bare.read_text().splitlines(keepends=True)[:1]))
    assert hotlap.predict(run, few, tmp_path / "answers.csv", progress=False, device="cpu") == 1
    (row,) = rows_of(tmp_path / "answers.csv")
    assert row["column_1"] == named[0]["text"]
    assert row["predicted_column_0"] in "012"


# --- predictions -----------------------------------------------------------------------------------


def test_a_damaged_run_is_refused_by_the_name_of_its_file(tmp_path, finished):
    run, data = finished

    def damaged(name, text):
        folder = tmp_path / f"damaged-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(run, folder)
        (folder / name).write_text(text)
        with pytest.raises(HotlapError) as raised:
            hotlap.predict(folder, data, tmp_path / "answers.csv", progress=False)
        assert not (tmp_path / "answers.csv").exists()
        return str(raised.value)

    state = (run / "recipe.json").read_text()
    assert "recipe.json is damaged" in damaged("recipe.json", '{"format": 1}')
    for change in ({"threshold": "x"}, {"threshold": [0]}, {"target": 5}):
        assert "recipe.json is damaged" in damaged("recipe.json", json.dumps({**json.loads(state), **change}))
    assert "recipe.json is damaged" in damaged("recipe.json", state.replace('"columns"', '"colums"'))
    assert "recipe.json is damaged" in damaged("recipe.json", state.replace('"recipe": "text"', '"recipe": "temporal"'))
    assert "tokenizer.json is no tokenizer" in damaged("tokenizer.json", "{}")
    assert "model.safetensors" in damaged("model.safetensors", "")


def test_a_folder_without_a_finished_run_is_refused_with_what_to_do(tmp_path, finished):
    run, data = finished
    with pytest.raises(StoreError, match="nope does not exist"):
        hotlap.predict(tmp_path / "nope", data, tmp_path / "answers.csv")
    with pytest.raises(StoreError, match="is no run of a recipe"):
        hotlap.predict(tmp_path, data, tmp_path / "answers.csv")
    shutil.copytree(run, tmp_path / "interrupted", ignore=lambda *_: ["recipe.json"])
    with pytest.raises(StoreError, match="was interrupted before it had a model; go on with: hotlap train text"):
        hotlap.predict(tmp_path / "interrupted", data, tmp_path / "answers.csv")


def test_where_answers_cannot_be_written_is_said_before_any_is_given(tmp_path, finished):
    run, data = finished
    with pytest.raises(StoreError, match="there is no folder"):
        hotlap.predict(run, "none.csv", tmp_path / "nowhere" / "answers.csv")
    kept = data.read_bytes()
    with pytest.raises(StoreError, match="is there already"):
        hotlap.predict(run, "none.csv", data)
    assert data.read_bytes() == kept


def test_the_true_labels_of_a_file_stay_and_answers_have_a_name_of_their_own(tmp_path, finished, capsys):
    run, data = finished
    hotlap.predict(run, data, tmp_path / "all.csv", device="cpu")
    rows = rows_of(tmp_path / "all.csv")
    assert list(rows[0]) == ["id", "text", "label", "predicted_label"]
    assert [row["label"] for row in rows] == [row["label"] for row in rows_of(data)]
    assert f"answers   are in 'predicted_label', since {data} has its own column for 'label'" in capsys.readouterr().err
    # A file of answers that is asked about again loses nothing either.
    hotlap.predict(run, tmp_path / "all.csv", tmp_path / "again.csv", device="cpu", progress=False)
    assert list(rows_of(tmp_path / "again.csv")[0])[-2:] == ["predicted_label", "predicted_predicted_label"]
    bare = write_rows(tmp_path / "bare.csv", ["id", "text"], [[row["id"], row["text"]] for row in rows])
    hotlap.predict(run, bare, tmp_path / "bare_answers.csv", device="cpu", progress=False)
    assert list(rows_of(tmp_path / "bare_answers.csv")[0]) == ["id", "text", "label"]


@pytest.mark.parametrize(
    ("keep", "header"),
    [
        (["id"], ["id", "label"]),
        ("label,id", ["label", "id", "predicted_label"]),
        (["id, label"], ["id", "label", "predicted_label"]),
    ],
)
def test_columns_to_keep_are_named_one_by_one_or_with_commas(tmp_path, finished, keep, header):
    run, data = finished
    hotlap.predict(run, data, tmp_path / "answers.csv", keep=keep, device="cpu", progress=False)
    assert list(rows_of(tmp_path / "answers.csv")[0]) == header


def test_a_column_with_a_comma_in_its_name_can_be_kept(tmp_path, finished):
    run, _ = finished
    data = write_rows(tmp_path / "comma.csv", ["a,b", "text"], [["1", "the bank"], ["2", "the team"]])
    hotlap.predict(run, data, tmp_path / "answers.csv", keep=["a,b"], device="cpu", progress=False)
    assert rows_of(tmp_path / "answers.csv")[0]["a,b"] == "1"


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"keep": ["nocol"]}, DataError, "has no column 'nocol'"),
        ({"device": "cuda:77"}, MachineError, "cuda:77"),
        (
            {"out": "answers.xlsx"},
            StoreError,
            "answers.xlsx is no file that can be written; give --out a name that ends",
        ),
        ({"out": "answers.csv.gz"}, StoreError, "ends in .csv, .tsv, .txt, .parquet, .pq"),
        ({"embeddings": "e.csv"}, StoreError, "e.csv is no file that can be written; give --embeddings a name"),
    ],
)
def test_what_cannot_be_done_is_said_before_texts_are_tokenised(tmp_path, finished, more, error, said):
    run, data = finished
    with pytest.raises(error, match=re.escape(said)):
        hotlap.predict(run, data, **{"out": "answers.csv", "progress": False, **more})
    assert not (tmp_path / "cache").exists()
    assert not list(tmp_path.glob("answers*"))


def test_a_gpu_that_is_not_there_is_said_before_a_training_reads_anything(tmp_path):
    with pytest.raises(MachineError, match="cuda:77"):
        hotlap.train("text", "none.csv", device="cuda:77", progress=False)


def test_answers_are_written_as_the_name_of_their_file_says(tmp_path, finished):
    parquet = pytest.importorskip("pyarrow.parquet")
    run, data = finished
    for name in ("a.csv", "a.tsv", "a.parquet"):
        hotlap.predict(run, data, name, probabilities=True, device="cpu", progress=False)
    plain, found = rows_of(tmp_path / "a.csv"), parquet.read_table(tmp_path / "a.parquet")
    assert found.column_names == list(plain[0])
    assert found["id"].to_pylist() == list(range(1, 121))
    assert found["predicted_label"].to_pylist() == [row["predicted_label"] for row in plain]
    shares = [float(row["predicted_label_money"]) for row in plain]
    np.testing.assert_allclose(found["predicted_label_money"].to_numpy(), shares, rtol=1e-5)
    assert (tmp_path / "a.tsv").read_text().startswith("id\ttext\tlabel\tpredicted_label\t")
    # What was written is read as it was.
    hotlap.predict(run, "a.parquet", "b.parquet", keep=["id", "text"], device="cpu", progress=False)
    assert parquet.read_table("b.parquet")["label"].to_pylist() == found["predicted_label"].to_pylist()


def test_tokens_of_a_test_file_are_not_said_to_be_cached_in_the_run_that_made_them(tmp_path, capsys):
    data, test = texts_file(tmp_path / "train.csv", rows=60), texts_file(tmp_path / "test.csv", rows=30, seed=4)
    hotlap.train("text", data, out=tmp_path / "run", test=str(test), **quick(tmp_path))
    said = capsys.readouterr().err
    assert f"test      {test}: 30 rows\ntokens    30 texts" in said
    assert "from the cache" not in said
    assert said.count("tokens    30 texts") == 1
    hotlap.train("text", data, out=tmp_path / "again", test=str(test), **quick(tmp_path))
    assert "tokens    30 texts" in (again := capsys.readouterr().err)
    assert again.count("from the cache, which saved") == 4  # tokens of three files, and what the simple rule answers


def test_the_command_counts_rows(tmp_path, finished):
    run, data = finished
    one = tmp_path / "one.csv"
    one.write_text("".join(data.read_text().splitlines(keepends=True)[:2]))
    done = CliRunner().invoke(app, ["predict", str(run), "--data", str(one), "--out", "answers.csv"])
    assert "1 row answered in answers.csv" in done.output


# --- scores ----------------------------------------------------------------------------------------


def told_of(target, answers, words):
    """What is shown of a model that gives these answers, beside rules, one of which goes by words."""
    classes = ("a", "b", "c")
    model = Judged(
        name="model", weights={}, answers=np.zeros((len(target), 3)), threshold=None, history=[], train_s=1.0,
        report=scores.report(target, answers, None, classes), was_kept=False, bytes_left=0,
    )  # fmt: skip
    rules = {"most frequent class": np.full(len(target), 2), "words": words}
    told = {name: scores.report(target, answers, None, classes) for name, answers in rules.items()}
    reader = SimpleNamespace(classes=classes, targets=(), by_share=False)
    prepared = SimpleNamespace(target=target, reader=reader, advice="")
    return "\n".join(training._compared([model], told, prepared))


@pytest.mark.parametrize(
    ("share_right", "said"),
    [(0.9, "or words: train longer, or on more rows"), (0.36, "or words: there may be nothing to learn here")],
)
def test_a_model_that_a_rule_beats_is_told_why(share_right, said):
    numbers = np.random.default_rng(0)
    target = np.arange(300) % 3
    words = np.where(numbers.random(300) < share_right, target, (target + 1) % 3)
    assert said in told_of(target, np.full(300, 1), words)


def test_a_perfect_model_is_not_scolded_for_a_rule_that_is_perfect_too():
    target = np.arange(30) % 3
    assert "no model" not in told_of(target, target, target)


# --- interrupted -----------------------------------------------------------------------------------


def test_a_training_that_was_interrupted_goes_on_with_the_same_options_and_folder(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=60)
    given = {**quick(tmp_path), "epochs": 15, "patience": 15}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["hotlap", "train", "text", "--data", str(data), "--out", "run", *words]
    reading, writing = os.pipe()

    def command():
        os.environ["HOTLAP_PROGRESS"] = "lines"
        os.dup2(writing, 2)
        os.close(writing)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        sys.argv = words
        main()

    process = forked(command)
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert any(line.startswith("epoch 1 ") for line in lines)
        os.kill(process, signal.SIGINT)
        told = lines.read()
    assert code_of(process) == 130
    assert "stopped   go on with: hotlap train text --options run/options.toml --out run\n" in told
    assert "hotlap resume" not in told
    assert not (tmp_path / "run" / "recipe.json").exists()

    with pytest.raises(StoreError, match="run was trained otherwise: most=31, it had 48; name a new folder"):
        train(tmp_path, data, "run", **{**given, "most": 31})
    begun = json.loads((tmp_path / "run" / "models" / "encoder" / "started.json").read_text())
    run = train(tmp_path, data, "run", **given)
    assert json.loads((run / "models" / "encoder" / "started.json").read_text()) == begun
    undisturbed = train(tmp_path, data, "undisturbed", retrain=True, **given)
    mine, theirs = (load_file(one / "model.safetensors") for one in (run, undisturbed))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
