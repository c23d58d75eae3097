"""Recipes on a real GPU: what each of several models leaves of its memory once the next begins; pictures learnt."""

import csv
import json

import pytest
from picture_data import digits_folder
from recipe_data import bars_file

from hotlap.recipes import image
from hotlap.recipes.options import options_of
from hotlap.recipes.temporal import RECIPE
from hotlap.recipes.training import train
from hotlap.store.run_folder import RunFolder

MODELS = ("lstm", "transformer", "mlp")
SAME = 1 << 20
"""Bytes that the allocator's own rounding may make of a difference."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("plan", ["off", "max"])
def test_memory_is_the_same_after_each_model(tmp_path, plan):
    data = bars_file(tmp_path / "bars.csv", rows=900, symbols=2)
    given = {"data": str(data), "models": ",".join(MODELS), "epochs": "2", "frames": "h1", "batch_size": "64"}
    options = options_of(RECIPE.options_type, None, {**given, "plan": plan, "device": "cuda"})
    left = []
    for run in ("warm-up", "measured"):
        folder = train(RECIPE, options, out=tmp_path / run, retrain=True, say=lambda line: None, progress=False)
        models = json.loads((folder / "report.json").read_text())["models"]
        left.append([models[name]["device_bytes_left"] for name in MODELS])
        for name in MODELS if plan == "max" else ():
            ledger = RunFolder.open(folder / "models" / name).read_ledger()
            assert "captured" in str(RunFolder.open(folder / "models" / name).read_plan())
            assert not [line for line in ledger.to_lines() if "runs eagerly" in line], ledger.to_lines()
    # Libraries keep some memory from their first use on.
    assert max(left[1]) - left[0][-1] <= SAME, left
    assert max(left[1]) - min(left[1]) <= SAME, left


def test_pictures_in_files_are_learnt_held_on_the_device_and_captured(tmp_path):
    data = digits_folder(tmp_path / "digits")
    words = {"size": "16", "width": "8", "depth": "1", "epochs": "6", "batch_size": "24", "lr": "4e-3"}
    words |= {"flip": "no", "crop": "0.1", "colour": "0"}
    words |= {"data": str(data), "test": str(data), "plan": "max", "device": "cuda"}
    options = options_of(image.RECIPE.options_type, None, words)
    folder = train(image.RECIPE, options, out=tmp_path / "run", retrain=True, say=lambda line: None, progress=False)
    run = RunFolder.open(folder / "models" / "resnet")
    assert "resident" in str(run.read_plan())
    assert "captured" in str(run.read_plan())
    assert not [line for line in run.read_ledger().to_lines() if "runs eagerly" in line]
    assert json.loads((folder / "report.json").read_text())["models"]["resnet"]["accuracy"] > 0.95
    with (folder / "predictions.csv").open(newline="") as file:
        answers = list(csv.DictReader(file))
    right = [row["class"] == row["path"].split("/")[-2] for row in answers]
    assert len(right) == 1797
    assert sum(right) > 0.95 * len(right)
