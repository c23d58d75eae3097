"""A checkpoint that somebody forged, hashes and all: refused in a line or trained on, never a traceback or a hang."""

import contextlib
import copy
import hashlib
import json
import random
import shutil

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn

from hotlap import HotlapError, Job, fit
from hotlap.store.encoding import to_json

NASTY = [
    None,
    "x",
    -1,
    10**400,
    1e308,
    [],
    {},
    {"$tensor": ["x", "cpu"]},
    {"$tuple": []},
    {"$float": "nan"},
    2**62,
    True,
]


def job(epochs):
    return Job(
        model=small_mlp(),
        data=class_data(24),
        valid=class_data(8),
        patience=9,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        schedule=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        batch_size=8,
        epochs=epochs,
        device="cpu",
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged") / "run"
    fit(job(2), out=folder, save_every=2, progress=False)
    newest = max((folder / "checkpoints").iterdir())
    for other in (folder / "checkpoints").iterdir():
        if other != newest:
            shutil.rmtree(other)
    return folder


def places_in(value, at=()):
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield (*at, key)
            yield from places_in(value[key], (*at, key))


def signed(checkpoint):
    """Make every hash in the manifest right again, as a forger would."""
    file = checkpoint / "manifest.json"
    manifest = json.loads(file.read_bytes())
    manifest.pop("sha256")
    for name, entry in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    digest = hashlib.sha256(to_json(manifest)).hexdigest()
    file.write_bytes(to_json(manifest | {"sha256": digest}))


def forged(run, folder, change):
    shutil.copytree(run, folder)
    (checkpoint,) = (folder / "checkpoints").iterdir()
    state = json.loads((checkpoint / "training.json").read_bytes())
    change(state)
    (checkpoint / "training.json").write_text(json.dumps(state))
    signed(checkpoint)
    return folder


def test_a_checkpoint_signed_anew_without_a_change_is_resumed(run, tmp_path):
    resumed = fit(job(3), resume=forged(run, tmp_path / "run", lambda state: None), progress=False)
    assert resumed.updates == 9


@pytest.mark.parametrize("seed", range(8))
def test_a_forged_state_is_refused_or_trained_on(seed, run, tmp_path):
    (checkpoint,) = (run / "checkpoints").iterdir()
    places = list(places_in(json.loads((checkpoint / "training.json").read_bytes())))
    draw = random.Random(seed)
    for number in range(40):
        place, nasty = draw.choice(places), draw.choice(NASTY)

        def change(state, place=place, nasty=nasty):
            for key in place[:-1]:
                state = state[key]
            state[place[-1]] = copy.deepcopy(nasty)

        folder = forged(run, tmp_path / str(number), change)
        with contextlib.suppress(HotlapError):  # anything else fails the test
            assert fit(job(3), resume=folder, progress=False).history
        shutil.rmtree(folder)


def test_a_place_beyond_an_epoch_goes_on_with_the_next_one(run, tmp_path):
    def change(state):
        for key, value in state["$dict"]:
            if key == "place":
                value["$tuple"] = [0, 10**6, 3]

    resumed = fit(job(3), resume=forged(run, tmp_path / "run", change), progress=False)
    assert resumed.updates == 6 + 6


# --- the record of a start and an end --------------------------------------------------------------


@pytest.fixture(scope="module")
def unsaved(tmp_path_factory):
    """A run that has ended and never had a checkpoint."""
    folder = tmp_path_factory.mktemp("unsaved") / "run"
    fit(job(2), out=folder, progress=False)
    return folder


def changed_record(run, folder, place, value):
    shutil.copytree(run, folder)
    record = state = json.loads((folder / "record.json").read_text())
    for key in place[:-1]:
        state = state[key]
    state[place[-1]] = value
    (folder / "record.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("epochs", [2, 3])
def test_a_forged_record_is_refused_or_trained_on(epochs, unsaved, tmp_path):
    """With as many epochs as it had it is about its end, with more about its start."""
    places = list(places_in(json.loads((unsaved / "record.json").read_text())))
    draw = random.Random(epochs)
    for number in range(60):
        place, nasty = draw.choice(places), copy.deepcopy(draw.choice(NASTY))
        folder = changed_record(unsaved, tmp_path / str(number), place, nasty)
        with contextlib.suppress(HotlapError):  # anything else fails the test
            assert fit(job(epochs), resume=folder, progress=False).history
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    "weights",
    [{}, {"../model.safetensors": "x"}, {"/etc/passwd": "x"}, {"model.safetensors": "x", "started.json": "x"}],
    ids=str,
)
def test_a_record_that_names_other_files_is_none(unsaved, tmp_path, weights):
    folder = changed_record(unsaved, tmp_path / "run", ("ended", "weights"), weights)
    with pytest.raises(HotlapError, match="has no checkpoint to resume from"):
        fit(job(2), resume=folder, progress=False)
