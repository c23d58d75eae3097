"""Whatever is done to a file that somebody else can touch: a clear error or a right result, never a traceback."""

import contextlib
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from plain import class_data, small_mlp
from torch import nn

import hotlap
from hotlap.core.errors import HotlapError, PlanError, StoreError
from hotlap.core.ledger import Ledger
from hotlap.core.plan import Plan
from hotlap.store.archives import pack, unpack
from hotlap.store.cache import Cache, key_of
from hotlap.store.checkpoints import Checkpoints
from hotlap.store.encoding import to_json
from hotlap.store.run_folder import RunFolder
from hotlap.store.weights import describe_file, load_weights

KEY = key_of("fuzz")
FUZZ = settings(deadline=None, max_examples=75, suppress_health_check=list(HealthCheck), derandomize=True)


def small_job():
    return hotlap.Job(
        model=small_mlp(),
        data=class_data(16),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        batch_size=8,
        epochs=2,
        device="cpu",
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with one good file of each kind, and their bytes."""
    folder = tmp_path_factory.mktemp("good")
    hotlap.fit(small_job(), out=folder / "run", save_every=2, progress=False)
    pack(folder / "run", folder / "run.zip")
    Cache(folder / "cache").put(
        "features",
        KEY,
        tensors={"a": torch.arange(6.0).reshape(2, 3), "b": np.ones(3)},
        values={"names": ["x", "y"], "mean": np.ones(2), 3: (1, None, 2.5)},
        facts={"what": "a test"},
    )
    return folder


@contextlib.contextmanager
def a_copy(of):
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent) / of.name
        shutil.copytree(of, copy) if of.is_dir() else shutil.copy(of, copy)
        yield copy


@st.composite
def harmed(draw, content):
    """Good bytes after a few flips, cuts, insertions and swaps; or bytes that were never good."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["flip", "cut", "insert", "swap", "digit", "drop"])):
            case "flip" if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at:]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=20))
            case "swap" if data:
                other = draw(st.integers(0, len(data) - 1))
                data[at], data[other] = data[other], data[at]
            case "digit" if data:
                data[at : at + 1] = draw(st.sampled_from([b"9" * 30, b"-1", b"null", b"[", b'"', b"NaN", b"1e999"]))
            case "drop":
                del data[at : at + draw(st.integers(1, 40))]
    return bytes(data)


def ends_well(call, known=HotlapError):
    """The result, or None after an error of hotlap's own."""
    with contextlib.suppress(known):
        return call()
    return None


# --- files read by themselves ----------------------------------------------------------------------


@FUZZ
@given(st.data())
def test_weights_that_were_harmed_are_refused_or_are_tensors(good, data):
    content = data.draw(harmed((good / "run" / "model.safetensors").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "w.safetensors"
        path.write_bytes(content)
        found = ends_well(lambda: load_weights(path), StoreError)
        assert found is None or all(isinstance(value, torch.Tensor) for value in found.values())


@FUZZ
@given(st.binary(max_size=600))
def test_what_a_file_seems_to_be_is_told_for_any_bytes(content):
    assert describe_file(content)


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", ["plan.toml", "ledger.jsonl", "metrics.jsonl", "started.json"])
def test_a_file_of_a_run_folder_that_was_harmed_is_refused_or_read(good, name, data):
    content = data.draw(harmed((good / "run" / name).read_bytes()))
    readers = {
        "plan.toml": lambda run: run.read_plan(),
        "ledger.jsonl": lambda run: run.read_ledger(),
        "metrics.jsonl": lambda run: run.read_metrics(),
        "started.json": lambda run: run.read_started(),
    }
    kinds = {"plan.toml": Plan, "ledger.jsonl": Ledger, "metrics.jsonl": list, "started.json": dict}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        found = ends_well(lambda: readers[name](RunFolder(Path(folder))), (StoreError, PlanError))
        assert found is None or isinstance(found, kinds[name])


@FUZZ
@given(st.data())
def test_an_archive_that_was_harmed_unpacks_inside_or_leaves_nothing(good, data):
    content = data.draw(harmed((good / "run.zip").read_bytes()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.zip"
        path.write_bytes(content)
        done = ends_well(lambda: unpack(path, Path(folder) / "into"), StoreError)
        left = sorted(p.name for p in Path(folder).iterdir())
        assert left == (["x.zip"] if done is None else ["into", "x.zip"])


# --- folders whose manifest knows every byte -------------------------------------------------------

CHECKPOINT = ["manifest.json", "training.json", "training.safetensors", "model.safetensors"]
ENTRY = ["manifest.json", "values.json", "values.safetensors", "tensors.safetensors"]


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", CHECKPOINT)
def test_a_checkpoint_that_was_harmed_is_never_taken_for_a_good_one(good, name, data):
    folder = max((good / "run" / "checkpoints").iterdir())
    content = data.draw(harmed((folder / name).read_bytes()))
    with a_copy(folder) as copy:
        (copy / name).write_bytes(content)
        found = ends_well(lambda: Checkpoints(copy.parent).read(copy), StoreError)
        if found is not None:  # the same said in other words: a space in the JSON
            assert found.files == Checkpoints(folder.parent).read(folder).files
            assert found.facts == Checkpoints(folder.parent).read(folder).facts


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", ENTRY)
def test_a_cache_entry_that_was_harmed_is_none_or_what_was_stored(good, name, data):
    content = data.draw(harmed((good / "cache" / "features" / KEY / name).read_bytes()))
    with a_copy(good / "cache") as copy:
        (copy / "features" / KEY / name).write_bytes(content)
        damaged = Cache(copy).verify()
        assert Cache(copy).list()
        entry = Cache(copy).get("features", KEY)
        assert (entry is None) == bool(damaged)
        if entry is None:
            assert not (copy / "features" / KEY).exists()
        else:
            assert entry.tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def sign(folder):
    manifest = json.loads((folder / "manifest.json").read_bytes())
    del manifest["sha256"]
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = hashlib.sha256(to_json(manifest)).hexdigest()
    (folder / "manifest.json").write_bytes(to_json(manifest))


@FUZZ
@given(st.data())
@pytest.mark.parametrize("name", ENTRY[1:])
def test_a_cache_entry_of_somebody_who_can_sign_is_none_or_plain_values(good, name, data):
    content = data.draw(harmed((good / "cache" / "features" / KEY / name).read_bytes()))
    with a_copy(good / "cache") as copy:
        (copy / "features" / KEY / name).write_bytes(content)
        sign(copy / "features" / KEY)
        entry = Cache(copy).get("features", KEY)
        assert entry is None or isinstance(entry.tensors, dict)
