"""A training is never taken for another one: each thing that decides it is changed alone, in a process of its own.

All variations: `python -m benchmarks.identity`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from hotlap import Job, Rig, fit
from hotlap.data.dataset import evaluation_dataset, training_dataset

ROOT = Path(__file__).parents[2]
MATRIX = """
import gc, sys
import torch._dynamo, unsynced
from benchmarks import identity

gc.freeze()  # or each fork would look through all of it for garbage, and copy it
sys.exit(identity.main())
"""


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """All variations by name. They are forked from a process of their own, which has no threads but its first."""
    file = tmp_path_factory.mktemp("matrix") / "rows.json"
    words = [sys.executable, "-c", MATRIX, "--json", str(file)]
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT, ROOT / "tests" / "support")))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    subprocess.run(words, cwd=ROOT, env=environment, check=False, capture_output=True, timeout=900)
    return {row["name"]: row for row in json.loads(file.read_text())}


def test_there_are_forty_variations_that_change_the_weights(rows):
    assert sum(row["matters"] for row in rows.values()) >= 40


def test_no_variation_is_handed_the_model_of_another_training(rows):
    assert [name for name, row in rows.items() if row["mistaken"]] == []


def test_the_same_training_again_is_loaded_or_says_why_not(rows):
    assert [name for name, row in rows.items() if row["again"] == "trained again"] == []
    assert sum(row["again"] == "loaded" for row in rows.values()) >= len(rows) - 5


@pytest.mark.parametrize(
    "name",
    ["frozen layer", "weights of a WeightedRandomSampler", "global read by the dataset", "forward hook",
     "class attribute read by the dataset", "lambda held by a layer", "partial held by a layer",
     "forward replaced on the instance", "environment variable read by a layer", "hook of the optimizer",
     "environment variable read by the dataset", "attribute of the optimizer", "class weights of the loss"],
)  # fmt: skip
def test_a_resume_refuses_a_change_of(name, rows):
    assert rows[name]["resume"] == "refused"


def test_a_reuse_that_cannot_be_sure_trains_and_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")

    def trained(out):
        model = small_mlp()
        rates = (1.0 for _ in range(1000))
        prepare = lambda batch: (batch[0] * next(rates), batch[1])  # noqa: E731
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        settings = {"data": class_data(), "loss": nn.CrossEntropyLoss(), "batch_size": 10, "epochs": 1}
        return fit(Job(model=model, optimizer=made, prepare=prepare, **settings), out=tmp_path / out, reuse=True)

    trained("a")
    assert "trained before" not in trained("b").stopped
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note   reuse")]
    assert len(told) == 2
    assert told[0].startswith("note   reuse: trained anew and not kept, since prepare: a builtins.generator")


def test_a_model_of_single_precision_trains_where_the_default_is_double():
    model = small_mlp(dtype=torch.float32)
    torch.set_default_dtype(torch.float64)
    try:
        Rig(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss())
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_sampler_within_a_batch_sampler_gives_the_order():
    class Backwards:
        def __iter__(self):
            return iter(range(49, -1, -1))

        def __len__(self):
            return 50

    loader = DataLoader(TensorDataset(*class_data()), batch_sampler=BatchSampler(Backwards(), 10, drop_last=False))
    model = small_mlp()
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = training_dataset(Job(model=model, data=loader, loss=nn.CrossEntropyLoss(), optimizer=made, epochs=1))
    assert dataset.order.epoch(0).indices.tolist() == list(range(49, -1, -1))
    assert evaluation_dataset(loader, batch_size=10).order.epoch(0).indices.tolist() == list(range(49, -1, -1))
