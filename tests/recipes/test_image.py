"""The recipe image from files to predictions, with networks that train in seconds."""

import csv
import errno
import json
import os
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from picture_data import coloured_files, digits_folder
from recipe_data import write_rows
from torch import nn
from typer.testing import CliRunner

from hotlap.cli import app
from hotlap.core.errors import DataError, HotlapError, JobError, MachineError, StoreError
from hotlap.data import pictures
from hotlap.engine.augment import Augment
from hotlap.recipes.answers import answer, revived
from hotlap.recipes.image import RECIPE, ImageOptions, views
from hotlap.recipes.networks import NetworkSpec, ResNet, VisionTransformer, initial_network, new_network, patch_side
from hotlap.recipes.options import options_of
from hotlap.recipes.picture_files import folder_columns, placed
from hotlap.recipes.tables import read_table
from hotlap.recipes.training import train

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


QUICK = {"size": 16, "width": 4, "depth": 1, "epochs": 2, "lr": 5e-3, "plan": "off", "device": "cpu"}


def options(data, **more):
    return options_of(ImageOptions, None, {"data": str(data), **QUICK, **more})


def trained(data, out, lines, **more):
    return train(RECIPE, options(data, **more), out=out, retrain=False, say=lines.append, progress=False)


def prepared(data, lines=None, **more):
    return RECIPE.prepare(options(data, **more), (lines if lines is not None else []).append)


def report_of(folder):
    return json.loads((folder / "report.json").read_text())


def rows_of(path):
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def table_of(folder, count=40, name="train.csv", **more):
    """A CSV of pictures in a folder beside it, red ones and blue ones."""
    found = coloured_files(folder / "pictures", count, **more)
    return write_rows(folder / name, ["image", "label"], [[f"pictures/{path}", colour] for path, colour in found])


# --- from files to predictions -----------------------------------------------------------------------


def test_digits_as_png_files_with_broken_ones_among_them_are_learnt_through_the_command(tmp_path):
    pytest.importorskip("sklearn")
    folder = digits_folder(tmp_path / "digits")
    test = [folder / "3" / name for name in ("empty.png", "0003.png", "0013.png")]
    test[0].write_bytes(b"")
    (folder / "5" / "notes.txt").write_text("no picture")
    whole = (folder / "1" / "0001.png").read_bytes()
    (folder / "1" / "cut.png").write_bytes(whole[: len(whole) // 2])
    asked = write_rows(tmp_path / "asked.csv", ["path"], [[f"digits/{path.relative_to(folder)}"] for path in test])
    words = "--size 16 --width 8 --depth 1 --epochs 4 --batch-size 24 --lr 4e-3 --flip no --crop 0.1 --colour 0"
    words = [*words.split(), "--plan", "off", "--device", "cpu", "--test", str(asked)]
    done = CliRunner().invoke(
        app, ["train", "image", "--data", str(folder), "--out", str(tmp_path / "run"), *words], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    report = report_of(tmp_path / "run")
    assert report["models"]["resnet"]["accuracy"] > 0.95
    assert report["models"]["resnet"]["accuracy"] > report["baselines"]["nearest mean thumbnail"]["accuracy"]
    assert report["baselines"]["most frequent class"]["accuracy"] < 0.15
    left_out = {row["file"]: row["why"] for row in rows_of(tmp_path / "run" / "broken.csv")}
    assert set(left_out) >= {"1/cut.png", "3/empty.png", "5/notes.txt"}
    assert left_out["3/empty.png"] == "is empty"
    assert "warning   3 files left out: cut.png cannot be decoded" in done.output
    answers = rows_of(tmp_path / "run" / "predictions.csv")
    assert [row["path"] for row in answers] == [f"digits/{path.relative_to(folder)}" for path in test]
    assert [row["class"] for row in answers] == ["", "3", "3"]
    assert "warning   1 of 3 rows have no answer: their cells are empty, the first in row 1 below" in done.output
    assert f"predictions of {asked} in {tmp_path / 'run' / 'predictions.csv'}: 2 of 3 rows answered" in done.output
    assert (
        f"run       {tmp_path / 'run'} (report.html, report.json, curves.svg, confusion.svg); predict with: "
        in done.output
    )
    for name in ("curves.svg", "confusion.svg", "model.safetensors", "options.toml"):
        assert (tmp_path / "run" / name).is_file()
    # The second time nothing is decoded and nothing trained.
    done = CliRunner().invoke(
        app, ["train", "image", "--data", str(folder), "--out", str(tmp_path / "again"), *words], catch_exceptions=False
    )
    assert "pixels (1.3 MiB on disk), from the cache, which saved" in done.output
    assert "trained before, which saved" in done.output


def test_with_a_shuffled_target_it_scores_chance(tmp_path):
    pytest.importorskip("sklearn")
    folder = digits_folder(tmp_path / "digits", count=700, size=16, shuffled=True)
    report = report_of(trained(folder, tmp_path / "run", [], flip="no"))
    assert abs(report["models"]["resnet"]["roc_auc"] - 0.5) < 0.09


def test_numbers_are_answered_in_their_own_units_with_onnx_beside_them(tmp_path):
    numbers, rows = np.random.default_rng(0), []
    (tmp_path / "in").mkdir()
    for at in range(200):
        shade = int(numbers.integers(20, 230))
        pixels = (numbers.normal(shade, 6, (16, 16, 3))).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "in" / f"{at}.png")
        rows.append([f"in/{at}.png", f"{5000 + 10 * shade}.5"])
    data, lines = write_rows(tmp_path / "train.csv", ["file", "price"], rows), []
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    more = {"target": "price", "colour": 0, "epochs": 8, "batch_size": 16, "mixup": 0.2, "onnx": True, "tta": 2}
    folder = trained(data, tmp_path / "run", lines, **more)
    report = report_of(folder)
    mine, rule = report["models"]["resnet"], report["baselines"]["the mean"]
    assert mine["rmse"] < rule["rmse"] / 2
    assert {"mae", "rmse", "smape"} <= set(mine)
    assert "task      price (a number) from the pictures of file" in lines
    assert not (folder / "confusion.svg").exists()
    assert f"run       {folder} (report.html, report.json, curves.svg); predict with: " in lines[-1]
    answer(folder, data, tmp_path / "answers.csv", say=lambda line: None, device="cpu")
    answers = rows_of(tmp_path / "answers.csv")
    assert [row["file"] for row in answers] == [row[0] for row in rows]
    off = [float(row["price"]) - float(truth[1]) for row, truth in zip(answers, rows, strict=True)]
    assert np.sqrt(np.mean(np.square(off))) < rule["rmse"] / 2
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    _, _, model = revived(folder)
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    (found,) = session.run(["numbers"], {"pictures": pixels.numpy()})
    state = json.loads((folder / "recipe.json").read_text())["reader"]
    with torch.no_grad():
        wanted = model(pixels) * state["spread"] + state["mean"]
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-3 * state["spread"])


def test_a_table_of_paths_with_groups_weights_views_and_a_file_to_judge_by(tmp_path):
    data, lines = table_of(tmp_path, 60), []
    with data.open("a") as file:
        file.writelines(f"pictures/{at:03d}.png,{'red' if at % 2 else 'blue'}\n" for at in range(8))  # copies
    judged = table_of(tmp_path / "other", 20, seed=5)
    folder = trained(data, tmp_path / "run", lines, valid=str(judged), tta=4, cutmix=1.0, epochs=6, batch_size=16)
    report = report_of(folder)["models"]["resnet"]
    assert (report["rows"], report["accuracy"] > 0.9) == (20, True)
    answer(folder, judged, tmp_path / "answers.csv", say=lambda line: None, probabilities=True, device="cpu")
    answers = rows_of(tmp_path / "answers.csv")
    assert [row["image"] for row in answers] == [row["image"] for row in rows_of(judged)]
    assert all(
        abs(float(row["predicted_label_blue"]) + float(row["predicted_label_red"]) - 1) < 1e-4 for row in answers
    )
    groups = write_rows(
        tmp_path / "grouped.csv",
        ["image", "label", "who"],
        [[row["image"], row["label"], f"p{at // 6}"] for at, row in enumerate(rows_of(data)[:60])],
    )
    held = prepared(groups, (said := []), group="who", target="label")
    assert not any("trained on too" in line for line in said)
    assert len(held.target) % 6 == 0
    assert 0 < len(held.target) < 30


@pytest.mark.parametrize("is_number", [False, True])
def test_copies_of_a_picture_are_on_one_side_unless_a_group_parts_them(tmp_path, is_number):
    found = coloured_files(tmp_path, 24)
    rows = [[path, colour, path[:3]] for path, colour in found]
    for at in range(8):
        (tmp_path / f"copy{at}.png").write_bytes((tmp_path / found[at][0]).read_bytes())
        rows.append([f"copy{at}.png", found[at][1], f"c{at}"])
    rows = [[path, 10.5 + 3 * at if is_number else colour, who] for at, (path, colour, who) in enumerate(rows)]
    data = write_rows(tmp_path / "train.csv", ["image", "label", "who"], rows)
    for seed in range(4):
        job = prepared(data, lines := [], seed=seed).candidates[0].job()
        assert "copies    8 pictures are copies of one before: all copies are on one side" in lines[-2]
        assert not any("trained on too" in line for line in lines)
        train, held = ({rows[at][0] for at in one.indices} for one in (job.data, job.valid))
        assert not {name.replace("copy", "00") for name in train} & {name.replace("copy", "00") for name in held}
        assert len(train) + len(held) == 32
    prepared(data, lines, group="who", seed=1)
    assert any("pictures held out are trained on too, as " in line for line in lines)


@pytest.mark.parametrize("out", ["file", "file/run", "x" * 300])
def test_a_folder_that_cannot_be_written_is_refused_before_pictures_are_decoded(tmp_path, out):
    data, lines = table_of(tmp_path, 24), []
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=r"cannot write a run into .*; name another"):
        trained(data, tmp_path / out, lines)
    assert (lines, sorted(tmp_path.rglob("*"))) == ([], before)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"valid": "other.csv"}, "other.csv has the class 'green', which .*train.csv has not"),
        ({"valid": "pathless.csv"}, "which column of .*pathless.csv holds the paths"),
        ({"test": "pathless.csv"}, "which column of .*pathless.csv holds the paths"),
        ({"group": "none"}, "train.csv has no column 'none'"),
    ],
)
def test_mistakes_of_other_files_and_of_groups_are_said_before_pictures_are_decoded(tmp_path, more, said, monkeypatch):
    data, lines = table_of(tmp_path, 24), []
    write_rows(tmp_path / "other.csv", ["image", "label"], [["pictures/000.png", "green"]])
    write_rows(tmp_path / "pathless.csv", ["what", "label"], [["1", "red"], ["2", "blue"]])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=said):
        trained(data, tmp_path / "run", lines, **more)
    assert not any(line.startswith("pictures") for line in lines)


def test_quiet_shows_warnings_and_nothing_else(tmp_path):
    data = table_of(tmp_path, 24)
    with data.open("a") as file:
        file.write("pictures/000.png,green\npictures/none.png,red\n")
    words = [word for name, value in QUICK.items() for word in (f"--{name}", str(value))]
    words = ["train", "image", "--data", str(data), "--out", str(tmp_path / "run"), *words, "--quiet"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.stdout == f"{tmp_path / 'run'}\n"
    lines = done.stderr.splitlines()
    assert any(line.startswith("warning   class 'green' of 'label' has a single row") for line in lines)
    assert any(line.startswith("warning   1 file left out: none.png") for line in lines)
    assert all(line.startswith("warning") for line in lines)


def test_the_folder_of_a_run_may_be_named_in_a_file_and_the_command_line_wins(tmp_path):
    lines = [f"{name} = {json.dumps(value)}" for name, value in QUICK.items()]
    lines += [f'data = "{table_of(tmp_path, 24)}"', f'out = "{tmp_path / "run"}"', "quiet = true"]
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["train", "image", "--options", str(file)], catch_exceptions=False)
    assert done.stdout == f"{tmp_path / 'run'}\n"
    # The model trains for two epochs only: a simple rule is better, and that is no secret.
    assert all(line.startswith("warning   resnet gives the answers") for line in done.stderr.splitlines())
    words = ["train", "image", "--options", str(file), "--out", str(tmp_path / "other"), "--json"]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(done.stdout)["best"] == "resnet"
    assert (tmp_path / "other" / "report.json").is_file()


def test_two_models_are_compared_and_the_best_is_kept(tmp_path):
    folder = trained(table_of(tmp_path, 30), tmp_path / "run", [], models="resnet,vit", epochs=1)
    report = report_of(folder)
    assert set(report["models"]) == {"resnet", "vit"}
    assert revived(folder)[0]["model"] == report["best"]


def test_rare_classes_weigh_more_and_augmentation_is_what_the_options_say(tmp_path):
    data = table_of(tmp_path, 40, classes=("blue", "blue", "blue", "red"))
    job = prepared(data, mixup=0.2).candidates[0].job()
    blue, red = job.loss.weight.tolist()
    assert red == pytest.approx(3 * blue)
    assert job.augment == Augment(flip=True, crop=0.2, colour=0.2, mixup=0.2, classes=2)
    plain = prepared(data, balance=False, flip=False, crop=0, colour=0).candidates[0].job()
    assert plain.loss.weight is None
    assert plain.augment is None


def test_a_last_batch_of_a_single_picture_is_left_out(tmp_path):
    data = table_of(tmp_path, 21)
    trained(data, tmp_path / "run", lines := [], size=8, batch_size=8, epochs=1)
    assert "split     17 pictures to train on, 4 held out" in lines
    jobs = [prepared(data, batch_size=size).candidates[0].job() for size in (8, 16, 7, 1, 32)]
    assert [job.drop_last for job in jobs] == [True, True, False, False, False]


def test_the_recipe_is_listed_with_its_options():
    said = CliRunner().invoke(app, ["recipes"]).output
    assert "image      classes or numbers of pictures" in said
    assert "--cutmix" in CliRunner().invoke(app, ["recipes", "image"]).output


# --- what will not do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 4}, "size=4 must be from 8 to 4096"),
        ({"models": "resnett"}, "no model is called 'resnett'; did you mean 'resnet'?"),
        ({"models": "timm:"}, "no model is called 'timm:'"),
        ({"fit": "pad"}, "fit='pad' must be one of stretch, crop"),
        ({"task": "words"}, "task='words' must be one of auto, classes, numbers"),
        ({"crop": 1.0}, r"crop=1\.0 must be from 0 to 0\.9"),
        ({"tta": 3, "flip": False, "crop": 0.0}, r"tta=3, and with flip=False and crop=0\.0 a picture has 1 view$"),
        ({"models": "resnet,vit", "weights": "a.safetensors"}, "weights=a.safetensors are those of one model"),
    ],
)
def test_options_that_make_no_sense_are_refused(given, said):
    with pytest.raises(JobError, match=said):
        options_of(ImageOptions, None, given)


def test_paths_that_lead_out_of_the_folder_of_the_table_are_refused_unless_a_root_allows_them(tmp_path):
    (tmp_path / "tables").mkdir()
    found = coloured_files(tmp_path / "pictures", 8)
    rows = [[f"../pictures/{path}", colour] for path, colour in found]
    data = write_rows(tmp_path / "tables" / "train.csv", ["image", "label"], rows)
    with pytest.raises(DataError, match=r"8 paths of .*train\.csv lead out of .*tables, as '\.\./pictures/000\.png'"):
        prepared(data)
    absolute = [[str(tmp_path / "pictures" / path), colour] for path, colour in found]
    other = write_rows(tmp_path / "tables" / "absolute.csv", ["image", "label"], absolute)
    with pytest.raises(DataError, match=r"lead out of .*; name the folder that pictures may be read from with --root"):
        prepared(other)
    assert len(prepared(other, root=str(tmp_path)).target) == 2
    for root in (tmp_path, tmp_path / "pictures"):
        assert len(prepared(data, root=str(root)).target) == 2
    with pytest.raises(DataError, match=r"8 paths .* lead out of .*tables, as .*; give one that holds them all with"):
        prepared(data, root=str(tmp_path / "tables"))
    within = ["pictures/../pictures/000.png"]
    assert placed(within, tmp_path / "x.csv", "")[0].endswith("pictures/../pictures/000.png")


def test_a_root_does_not_let_a_single_path_out_of_it(tmp_path):
    coloured_files(tmp_path / "in" / "pictures", 2)
    coloured_files(tmp_path, 1)
    for name in ("in/tables", "a/b"):
        (tmp_path / name).mkdir(parents=True)
    table, root = tmp_path / "in" / "tables" / "t.csv", str(tmp_path / "in")
    inner = ["../pictures/000.png", "../pictures/001.png"]
    assert placed(inner, table, root)[1].endswith("in/tables/../pictures/001.png")
    for path in ("../../000.png", str(tmp_path / "000.png")):
        with pytest.raises(DataError, match=r"a path of .*t\.csv leads out of .*in, as .*; give one"):
            placed([*inner, path], table, root)
    found = placed(["../../in/pictures/000.png"], tmp_path / "a" / "b" / "t.csv", root)
    assert found[0].endswith("a/b/../../in/pictures/000.png")
    # A file to predict may lie elsewhere, and names what is beside it.
    assert placed(["000.png"], tmp_path / "t.csv", root) == [str(tmp_path / "000.png")]
    with pytest.raises(DataError, match="leads out of"):
        placed(["000.png", "../000.png"], tmp_path / "t.csv", root)


def test_a_row_without_a_path_is_left_out_and_said(tmp_path):
    found = coloured_files(tmp_path, 12)
    data, lines = write_rows(tmp_path / "train.csv", ["image", "label"], [*found, ["", "red"]]), []
    prepared(data, lines)
    assert "warning   1 file left out: (no path) has no path" in lines


def test_a_name_that_is_too_long_is_a_broken_file_wherever_it_stands(tmp_path):
    found, lines = coloured_files(tmp_path, 12), []
    data = write_rows(tmp_path / "train.csv", ["image", "label"], [[f"{'x' * 5000}.png", "red"], *found])
    prepared(data, lines)
    assert any(line.startswith("warning   1 file left out: xxx") and "too long" in line for line in lines)


def test_names_without_an_ending_are_found_under_the_root(tmp_path):
    found = coloured_files(tmp_path / "pictures", 12)
    rows = [[path.removesuffix(".png"), colour] for path, colour in found]
    data = write_rows(tmp_path / "train.csv", ["id", "label"], rows)
    lines = []
    assert len(prepared(data, lines, root=str(tmp_path / "pictures")).target) == 2
    assert not any("broken" in line for line in lines)


def test_the_folder_that_pictures_are_in_is_named_where_none_is_beside_the_table(tmp_path):
    found = coloured_files(tmp_path / "kg" / "train", 12)
    coloured_files(tmp_path / "kg" / "a test", 12, seed=2)
    named = write_rows(tmp_path / "kg" / "train.csv", ["id", "label"], found)
    with pytest.raises(DataError, match=r"names '000\.png', which is not in .*kg: it is .*; say --root .*kg/train$"):
        prepared(named)
    bare = [[path.removesuffix(".png"), colour] for path, colour in found]
    deep, root = write_rows(tmp_path / "train.csv", ["id", "label"], bare), str(tmp_path / "kg" / "train")
    with pytest.raises(DataError, match=r"it is .*train/000\.png, whose ending may be left out; say --root .*train$"):
        prepared(deep)
    lines = []
    folder = trained(deep, tmp_path / "run", [], epochs=1, root=root)
    test = write_rows(tmp_path / "kg" / "test.csv", ["id"], [["011.png"]])
    answer(folder, test, tmp_path / "wrong.csv", say=lines.append, device="cpu")
    assert f"warning   pictures of {test} are read from {root}, the root of the training; " in "\n".join(lines)
    (tmp_path / "kg" / "train" / "011.png").unlink()
    with pytest.raises(DataError, match=r"names '011\.png', which is not in .*: it is .*; move test\.csv into .*test$"):
        answer(folder, test, tmp_path / "answers.csv", say=lambda line: None, device="cpu")
    test = test.rename(tmp_path / "kg" / "a test" / "test.csv")
    answer(folder, test, tmp_path / "answers.csv", say=(said := []).append, device="cpu")
    assert not any("warning   pictures of" in line for line in said)


def test_a_file_to_predict_names_what_is_beside_it_before_what_the_training_had(tmp_path):
    (tmp_path / "test").mkdir()
    coloured_files(tmp_path / "train", 2), coloured_files(tmp_path / "test", 2)
    at = (["000.png", "001.png"], tmp_path / "test" / "test.csv", str(tmp_path / "train"))
    assert placed(*at)[0] == str(tmp_path / "train" / "000.png")
    assert placed(*at, is_asked=True)[0] == str(tmp_path / "test" / "000.png")


@pytest.mark.parametrize(
    ("rows", "more", "said"),
    [
        ([["a.png", "x"], ["b.png", "x"]], {}, "nothing to learn"),
        ([["a.png", 3], ["b.png", 8], ["c.png", 5]], {}, "3 different values in 3 rows.*or say --task numbers"),
        ([["a.png", "x"]] * 4, {"target": "colour"}, "no column 'colour'"),
        ([["a.png", "x"]] * 4, {"path": "label", "target": "label"}, "path names label, which is the target"),
        ([["a.png", "x"], ["b.png", "y"]] * 4, {"task": "numbers"}, "task=numbers, and the target 'label' is"),
        ([["a.png", "x"], ["b.png", "y"]] * 4, {}, "none of the 8 files that .* names is there, as 'a.png'.*--root"),
        ([["in\\a.png", "x"], ["in\\b.png", "y"]] * 4, {}, r"none of the 8 files .*; write / in place of \\ in paths"),
        ([["a.png", "x"], ["b.png", "y"]] * 4, {"root": "nowhere"}, "root=nowhere is no folder; name the one"),
    ],
)
def test_data_that_will_not_do_is_refused_in_a_line(tmp_path, rows, more, said):
    data = write_rows(tmp_path / "train.csv", ["image", "label"], rows)
    with pytest.raises(DataError, match=said):
        trained(data, tmp_path / "run", [], **more)
    assert not (tmp_path / "run").exists()


def test_a_class_of_which_no_file_is_a_picture_is_said(tmp_path):
    coloured_files(tmp_path / "in" / "red", 6)
    coloured_files(tmp_path / "in" / "blue", 6)
    (tmp_path / "in" / "none").mkdir()
    (tmp_path / "in" / "none" / "a.png").write_text("words")
    (tmp_path / "in" / "none" / "b.png").write_text("words")
    with pytest.raises(DataError, match="no file of the class 'none' is a picture"):
        prepared(tmp_path / "in")


def test_a_flat_folder_has_nothing_to_learn_but_can_be_answered(tmp_path):
    coloured_files(tmp_path / "flat", 6, seed=9)
    with pytest.raises(DataError, match="no folders of classes; sort them into one for each class"):
        prepared(tmp_path / "flat")
    for name in ("blue", "red"):
        coloured_files(tmp_path / "in" / name, 16, classes=(name,))
    folder = trained(tmp_path / "in", tmp_path / "run", [], epochs=6, batch_size=8)
    answer(folder, tmp_path / "flat", tmp_path / "answers.csv", say=lambda line: None, device="cpu")
    answers = rows_of(tmp_path / "answers.csv")
    assert [(row["path"], row["class"]) for row in answers] == [
        (f"{at:03d}.png", "red" if at % 2 else "blue") for at in range(6)
    ]


def test_a_folder_lists_its_files_by_class_and_leaves_hidden_and_loose_ones_out(tmp_path):
    for name in ("b/2.png", "b/deep/1.jpg", "a/x.PNG", ".hidden/1.png", "a/.DS_Store"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "readme.txt").write_text("words")
    (tmp_path / "empty").mkdir()
    table = read_table(tmp_path)
    assert table["path"].texts() == ["a/x.PNG", "b/2.png", "b/deep/1.jpg"]
    assert table["class"].texts() == ["a", "b", "b"]
    assert table.notes == (
        "1 files beside the folders of classes are left out, as readme.txt", "1 folders hold no file, as empty",
    )  # fmt: skip
    assert folder_columns(tmp_path / "empty") is None


def test_folders_that_cannot_be_read_are_told_and_not_taken_for_empty_ones(tmp_path, monkeypatch):
    for name in ("red", "blue", "locked"):
        coloured_files(tmp_path / name, 2)
    listed, locked = os.scandir, str(tmp_path / "locked")

    def scandir(folder="."):
        if os.fspath(folder) == locked:
            raise PermissionError(errno.EACCES, "Permission denied", locked)
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert read_table(tmp_path).notes == (f"1 folders cannot be read, as {locked}: Permission denied",)


@pytest.mark.parametrize("name", ["x" * 5000, f"{'x' * 5000}.csv"])
def test_a_name_that_no_file_can_have_is_refused_in_a_line(tmp_path, name):
    with pytest.raises(DataError, match=r"cannot read .*: File name too long; check the name and its rights"):
        read_table(tmp_path / name)


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    data = write_rows(tmp_path / "train.csv", ["image", "label"], [["a.png", "x"], ["b.png", "y"]] * 2)
    monkeypatch.setitem(sys.modules, "PIL", None)
    pictures.pillow.cache_clear()
    try:
        with pytest.raises(MachineError, match=r"pictures need Pillow: pip install '\.\[images\]'"):
            prepared(data)
    finally:
        pictures.pillow.cache_clear()


# --- networks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [32, 100, 224])
def test_built_in_networks_give_a_row_of_outputs_for_each_picture(size):
    for name in ("resnet", "vit"):
        model = new_network(name, NetworkSpec(size=size, outputs=5, width=4, depth=1)).eval()
        pixels = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8)
        assert model(pixels).shape == (2, 5)
        assert torch.equal(model(pixels), model(pixels.float() / 255))


def test_the_resnet_is_the_one_of_18_layers():
    layers = [one for one in ResNet(1000).modules() if isinstance(one, (nn.Conv2d, nn.Linear))]
    assert sum(one.weight.shape[-1] != 1 or isinstance(one, nn.Linear) for one in layers) == 18
    assert sum(p.numel() for p in ResNet(1000).parameters()) == 11_689_512


def test_patches_cut_a_picture_without_a_rest_where_they_can():
    assert [patch_side(size) for size in (32, 224, 512, 30, 31, 8)] == [4, 16, 32, 3, 4, 4]
    assert VisionTransformer(3, size=31, width=12, layers=1)(torch.zeros(1, 3, 31, 31)).shape == (1, 3)


def test_views_are_the_picture_its_corners_and_their_mirror_images():
    pixels = torch.rand(2, 3, 20, 20)
    assert views(pixels, 1, crop=0.2, mirrors=True) == [pixels]
    found = views(pixels, 10, crop=0.2, mirrors=True)
    assert len(found) == 10
    assert all(view.shape == pixels.shape for view in found)
    assert torch.equal(found[1], pixels.flip(-1))
    assert torch.equal(found[3], found[2].flip(-1))
    torch.testing.assert_close(found[2][..., 0, 0], pixels[..., 0, 0])
    torch.testing.assert_close(found[8][..., -1, -1], pixels[..., -1, -1])
    assert len(views(pixels, 10, crop=0.0, mirrors=True)) == 2


def test_answers_are_the_mean_of_the_probabilities_of_views(tmp_path):
    reader = prepared(table_of(tmp_path, 24), tta=2).reader
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 2))
    pixels = torch.rand(4, 3, 16, 16)
    mean = (model(pixels).softmax(1) + model(pixels.flip(-1)).softmax(1)) / 2
    torch.testing.assert_close(reader.forward(model, (pixels,)).softmax(1), mean)


def test_local_weights_are_where_training_begins_and_what_does_not_fit_is_said(tmp_path):
    from safetensors.torch import save_file

    plan = NetworkSpec(size=16, outputs=2, width=4, depth=1)
    torch.manual_seed(1)
    other = new_network("resnet", NetworkSpec(size=16, outputs=7, width=4, depth=1))
    save_file(other.body.state_dict(), tmp_path / "w.safetensors")
    lines = []
    found = initial_network("resnet", plan, str(tmp_path / "w.safetensors"), lines.append)
    assert torch.equal(found.body.blocks[0].first[0].weight, other.body.blocks[0].first[0].weight)
    assert found.body.head.weight.shape == (2, 32)
    assert "2 begin at random, as body.head.bias" in lines[0]
    with pytest.raises(StoreError, match="none of them fits vit"):
        initial_network("vit", plan, str(tmp_path / "w.safetensors"), lines.append)
    with pytest.raises(StoreError, match="cannot read the weights nowhere"):
        trained(table_of(tmp_path, 12), tmp_path / "run", lines, weights="nowhere")
    assert not (tmp_path / "run").exists()
    assert not any("pictures  " in line for line in lines)


def test_a_folder_of_transformers_is_where_training_begins(tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=9, **small)
    torch.manual_seed(2)
    theirs = transformers.ViTForImageClassification(config)
    theirs.save_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_text(
        '{"image_mean": [0.5, 0.5, 0.5], "image_std": [1, 1, 1]}'
    )
    data, lines = table_of(tmp_path, 24), []
    folder = trained(data, tmp_path / "run", lines, weights=str(tmp_path / "vit"), epochs=1)
    assert any("2 begin at random" in line for line in lines)
    state, reader, model = revived(folder)
    assert state["model"] == "transformers:vit"
    assert model.normalise.mean.flatten().tolist() == [0.5, 0.5, 0.5]
    first = initial_network("transformers:vit", reader.network, str(tmp_path / "vit"), lines.append)
    name = "vit.embeddings.patch_embeddings.projection.weight"
    assert torch.equal(first.body.state_dict()[name], theirs.state_dict()[name])
    with pytest.raises(StoreError, match="no model can be made of transformers:bert"):
        new_network("transformers:bert", NetworkSpec(size=16, outputs=2))


def test_models_of_timm_are_made_by_name_where_it_is_installed(monkeypatch):
    plan = NetworkSpec(size=16, outputs=3)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MachineError, match="this model needs timm: pip install timm"):
        new_network("timm:some_net", plan)
    asked = []

    def create_model(name, **settings):
        asked.append((name, settings))
        if "img_size" in settings:
            raise TypeError("unexpected keyword 'img_size'")
        return nn.Sequential(nn.Flatten(), nn.LazyLinear(settings["num_classes"]))

    stand_in = ModuleType("timm")
    stand_in.create_model, stand_in.is_model = create_model, lambda name: name == "some_net"
    stand_in.list_models = lambda: ["some_net", "other"]
    monkeypatch.setitem(sys.modules, "timm", stand_in)
    assert new_network("timm:some_net", plan)(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 3)
    assert asked[-1] == ("some_net", {"pretrained": False, "num_classes": 3})
    with pytest.raises(DataError, match="timm has no model 'some_nett'; did you mean 'some_net'"):
        new_network("timm:some_nett", plan)


# --- what a newcomer does ----------------------------------------------------------------------------


def test_the_paths_of_a_test_file_are_found_by_what_they_are(tmp_path):
    for path, colour in coloured_files(tmp_path / "all", 24):
        (tmp_path / "sorted" / colour).mkdir(parents=True, exist_ok=True)
        (tmp_path / "all" / path).rename(tmp_path / "sorted" / colour / path)
    names = sorted(f"sorted/{path.relative_to(tmp_path / 'sorted')}" for path in (tmp_path / "sorted").rglob("*.png"))
    test = write_rows(tmp_path / "test.csv", ["id", "shot"], [[at, name] for at, name in enumerate(names)])
    folder = trained(tmp_path / "sorted", tmp_path / "run", [], epochs=1, test=str(test))
    rows = rows_of(folder / "predictions.csv")
    assert [(row["id"], row["shot"]) for row in rows] == [(str(at), name) for at, name in enumerate(names)]
    assert {row["class"] for row in rows} <= {"red", "blue"}
    assert answer(folder, test, tmp_path / "answers.csv", say=lambda line: None, device="cpu").rows == 24
    assert rows_of(tmp_path / "answers.csv") == rows
    bad = write_rows(tmp_path / "bad.csv", ["a", "b"], [[name, name] for name in names])
    with pytest.raises(
        DataError, match=r"which column of .*bad.csv holds the paths\? .*call it 'path', as in training"
    ):
        answer(folder, bad, tmp_path / "more.csv", say=lambda line: None, device="cpu")


def test_a_short_file_of_paths_that_seem_to_be_numbers_is_read_as_words(tmp_path):
    data = table_of(tmp_path, 24)
    folder = trained(data, tmp_path / "run", [], epochs=1)
    (tmp_path / "1e5.png").write_bytes((tmp_path / "pictures" / "000.png").read_bytes())
    one = write_rows(tmp_path / "one.csv", ["image"], [["1e5"]])
    assert answer(folder, one, tmp_path / "answers.csv", say=lambda line: None, device="cpu").rows == 1
    assert rows_of(tmp_path / "answers.csv")[0]["image"] == "1e5"


def test_rows_whose_pictures_are_missing_are_counted_where_predictions_end(tmp_path):
    data = table_of(tmp_path, 24)
    folder = trained(data, tmp_path / "run", [], epochs=1)
    (tmp_path / "pictures" / "003.png").unlink()
    (tmp_path / "pictures" / "007.png").write_bytes(b"cut")
    words = ["predict", str(folder), "--data", str(data), "--device", "cpu", "--out"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "answers.csv")], catch_exceptions=False)
    assert done.stdout == f"22 of 24 rows answered in {tmp_path / 'answers.csv'}\n"
    assert (
        "warning   2 of 24 rows have no answer: their cells are empty, the first in row 4 below the header, "
        "where image is 'pictures/003.png'; fill them in before you hand the file in\n" in done.stderr
    )
    done = CliRunner().invoke(app, [*words, str(tmp_path / "more.csv"), "--json"], catch_exceptions=False)
    said = {"rows": 22, "rows_without_answer": 2, "file": str(tmp_path / "more.csv")}
    found = json.loads(done.stdout)
    assert found.pop("scores")["rows"] == 22
    assert found == said


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_single_picture_is_answered_by_its_name(tmp_path, ending):
    pytest.importorskip("pyarrow")
    folder = trained(table_of(tmp_path, 24), tmp_path / "run", [], epochs=1)
    one, out = tmp_path / "pictures" / "003.png", tmp_path / f"answers.{ending}"
    assert answer(folder, one, out, say=lambda line: None, device="cpu").rows == 1
    table = read_table(out)
    assert (table["path"].texts(), len(table)) == (["003.png"], 1)
    assert table["label"].texts()[0] in ("red", "blue")
    with pytest.raises(DataError, match=r"none\.png"):
        answer(folder, tmp_path / "none.png", tmp_path / "more.csv", say=lambda line: None, device="cpu")


def numbers_table(folder, count=60):
    """A CSV of pictures with a price of some thousands."""
    found = coloured_files(folder / "pictures", count)
    rows = [[f"pictures/{path}", 5000 + 10 * at + 0.5] for at, (path, _) in enumerate(found)]
    return write_rows(folder / "train.csv", ["image", "price"], rows)


def test_errors_of_epochs_are_in_the_units_of_the_target_as_those_at_the_end(tmp_path):
    data, lines = numbers_table(tmp_path), []
    folder = trained(data, tmp_path / "run", lines, target="price", epochs=3)
    report = report_of(folder)["models"]["resnet"]
    kept = [json.loads(line) for line in (folder / "models" / "resnet" / "metrics.jsonl").read_text().splitlines()]
    best = min(kept, key=lambda record: record["mse"])
    assert best["mae"] == pytest.approx(report["mae"], rel=1e-5)
    assert best["mse"] == pytest.approx(report["rmse"] ** 2, rel=1e-5)
    assert report["mae"] > 10
    assert not any("rmse" in record for record in kept)
    trained(data, tmp_path / "again", again := [], target="price", epochs=3)
    assert any("trained before" in line for line in again)


def test_smoothing_of_a_target_of_numbers_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"smoothing=0.2 is of classes, and price is a number; leave it out"):
        prepared(numbers_table(tmp_path), target="price", smoothing=0.2)


@pytest.mark.parametrize(
    ("folders", "said"),
    [
        (("train/red", "train/blue", "test"), r"are test, train, which .*; say --test .*/test --data .*/train$"),
        (("Train/red", "Train/blue", "val/red"), r"are Train, val, which .*; say --data .*/Train --valid .*/val$"),
        (("all of it/red", "all of it/blue"), r"holds a single folder, 'all of it', .*; say --data '.*/all of it'$"),
    ],
)
def test_folders_that_are_no_classes_are_told_with_those_to_name(tmp_path, folders, said):
    for name in folders:
        coloured_files(tmp_path / "in" / name, 6)
    with pytest.raises(DataError, match=said):
        prepared(tmp_path / "in")


def test_a_class_may_be_called_as_a_part_of_the_data_is(tmp_path):
    for name in ("train", "plane"):
        coloured_files(tmp_path / "in" / name, 6, seed=len(name))
    assert prepared(tmp_path / "in").reader.classes == ("plane", "train")


def test_pictures_of_other_kinds_are_told_and_not_taken_for_tables(tmp_path):
    (tmp_path / "in" / "red").mkdir(parents=True)
    with pytest.raises(DataError, match=r"has no tables and no pictures; put files of \.csv, .*, or of \.jpg, "):
        prepared(tmp_path / "in")
    (tmp_path / "in" / "red" / "1.webp").write_bytes(b"RIFF")
    with pytest.raises(DataError, match=r"has no JPEG and no PNG files, but such as red/1\.webp; save them as PNG"):
        prepared(tmp_path / "in")
    found = prepared(table_of(tmp_path, 8))
    with pytest.raises(DataError, match=r"1\.webp is no JPEG and no PNG; save it as PNG"):
        found.reader.table(tmp_path / "in" / "red" / "1.webp")


def test_a_file_without_a_header_loses_no_picture(tmp_path):
    found = coloured_files(tmp_path, 12)
    for name in ("train.csv", "bare.csv"):
        ending = "" if name == "bare.csv" else ".png"
        first, *rows = [[path.removesuffix(".png") + ending, colour] for path, colour in found]
        data = write_rows(tmp_path / name, first, rows)
        more = {"path": "column_0", "header": "no"} if name == "bare.csv" else {}
        made, lines = prepared(data, said := [], target="column_1", **more), said
        assert any(line.startswith("pictures  12 of") for line in lines)
        test = write_rows(tmp_path / f"test-{name}", first[:1], [row[:1] for row in rows])
        again = RECIPE.revive(json.loads(json.dumps(made.reader.state())), tmp_path)
        assert len(again.asked(again.table(test), lambda line: None).rows) == 12


def test_a_table_of_paths_alone_is_asked_for_its_target(tmp_path):
    rows = [[path] for path, _ in coloured_files(tmp_path, 4)]
    with pytest.raises(DataError, match="is to be predicted\\? Say --target; there are path"):
        prepared(write_rows(tmp_path / "train.csv", ["path"], rows))


def test_a_file_to_predict_that_leads_out_or_nowhere_is_told_what_a_prediction_can_do(tmp_path):
    found = prepared(table_of(tmp_path, 8))
    (tmp_path / "in").mkdir()
    out = write_rows(tmp_path / "in" / "test.csv", ["image"], [["../pictures/000.png"]])
    with pytest.raises(DataError, match=r"leads out of .*; put test\.csv into a folder that holds them all$"):
        found.reader.asked(found.reader.table(out), lambda line: None)
    gone = write_rows(tmp_path / "in" / "gone.csv", ["image"], [["a.png"], ["b.png"]])
    with pytest.raises(DataError, match=r"none of the 2 files that .* names is there, .*; put them beside gone\.csv$"):
        found.reader.asked(found.reader.table(gone), lambda line: None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test", "does not exist"),
        ("valid", "does not exist"),
        ("plan", "unknown plan"),
        ("root", "is no folder"),
        ("weights", "cannot read the weights"),
    ],
)
def test_an_option_that_no_file_can_be_called_is_refused_in_a_line(tmp_path, name, said):
    with pytest.raises(HotlapError, match=f"{said}|4,096"):
        trained(table_of(tmp_path, 8), tmp_path / "run", [], **{name: "x" * 5000})


def test_too_many_views_are_one_mistake():
    with pytest.raises(JobError, match=r"^tta=20 must be from 1 to 10$"):
        options_of(ImageOptions, None, {"tta": 20})
    with pytest.raises(JobError, match=r"a picture has 1 view$"):
        options_of(ImageOptions, None, {"tta": 4, "flip": False, "crop": 0.0})
