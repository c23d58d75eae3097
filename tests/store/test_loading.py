"""Loading weights: safetensors and nothing else, and a refusal that says what the file is and what to do."""

import io
import os
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import hotlap
from hotlap.core.errors import StoreError
from hotlap.store import weights
from hotlap.store.weights import build_with_weights, load_weights, load_weights_into, save_weights, unwrapped


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())


def same(one, other):
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)


def test_weights_come_back_as_they_were_from_a_file_or_a_folder(model, tmp_path):
    save_weights(model, tmp_path / "model.safetensors", {"format": "pt"})
    for path in (tmp_path / "model.safetensors", str(tmp_path / "model.safetensors"), tmp_path):
        same(hotlap.load_weights(path), model.state_dict())


def test_a_file_of_the_library_loads_and_one_of_ours_loads_in_the_library(model, tmp_path):
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    same(load_weights(tmp_path / "theirs.safetensors"), model.state_dict())
    save_weights(model, tmp_path / "ours.safetensors")
    same(load_file(tmp_path / "ours.safetensors"), model.state_dict())


def test_an_empty_model_loads(tmp_path):
    save_file({}, tmp_path / "none.safetensors")
    assert load_weights(tmp_path / "none.safetensors") == {}


def test_weights_go_into_a_model_also_into_a_wrapped_one(model, tmp_path):
    save_weights(model, tmp_path / "w.safetensors")
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())
    load_weights_into(unwrapped(nn.DataParallel(fresh)), load_weights(tmp_path / "w.safetensors"))
    same(fresh.state_dict(), model.state_dict())


class Filled(nn.Module):
    """Filled in all ways that torch has, with a buffer that no file holds."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 4), nn.Embedding(5, 2), nn.Conv1d(2, 3, 2), nn.LSTM(3, 2)])
        for name in ("xavier_uniform_", "xavier_normal_", "kaiming_normal_", "trunc_normal_", "orthogonal_"):
            self.register_parameter(name, nn.Parameter(torch.empty(4, 4)))
            getattr(nn.init, name)(self.get_parameter(name))
        self.register_buffer("noise", torch.empty(3).uniform_(), persistent=False)


def test_a_model_that_is_made_with_weights_of_a_file_draws_no_others(tmp_path):
    torch.manual_seed(1)
    model = Filled()
    save_weights(model, tmp_path / "w.safetensors")
    torch.manual_seed(1)
    before = torch.empty(3).uniform_()
    torch.manual_seed(1)
    made = build_with_weights(Filled, tmp_path / "w.safetensors")
    same(made.state_dict(), model.state_dict())
    assert all(parameter.requires_grad for parameter in made.parameters())
    # (torch draws for an orthogonal matrix elsewhere, and copies)
    assert 0 <= made.noise.min() < made.noise.max() < 1
    torch.manual_seed(1)
    with weights._SkipRandomInit():
        nn.Linear(3, 4)
        assert torch.equal(torch.empty(3).uniform_(), before)
    assert not torch.equal(nn.Linear(3, 4).weight, nn.Linear(3, 4).weight)


def test_a_model_that_does_not_fit_says_where(model, tmp_path):
    save_file({"0.weight": torch.ones(4, 3), "0.bias": torch.ones(5), "\x1b[31m": torch.ones(1)}, tmp_path / "w")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StoreError) as caught:
        load_weights_into(model, load_weights(tmp_path / "w"))
    said = str(caught.value)
    assert "1.weight is missing in the file" in said
    assert "\x1b" not in said
    same(model.state_dict(), before)
    with pytest.raises(StoreError, match=r"weight is \(4, 3\) in the file and \(2, 3\) in the model"):
        save_file({"weight": torch.ones(4, 3), "bias": torch.ones(2)}, tmp_path / "v")
        load_weights_into(nn.Linear(3, 2), load_weights(tmp_path / "v"))


def saved(thing, **settings):
    buffer = io.BytesIO()
    torch.save(thing, buffer, **settings)
    return buffer.getvalue()


def array(value):
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (saved({"w": torch.ones(2)}), "a zip, as torch.save"),
        (saved({"w": torch.ones(2)}, _use_new_zipfile_serialization=False), "a pickle, which can run code"),
        (pickle.dumps({"w": 1}, 2), "a pickle, which can run code"),
        (pickle.dumps({"w": [1, 2]}, 0), "it looks like a pickle"),
        (array(np.array([None])), "a numpy file of Python objects"),
        (array(np.ones(2)), "a numpy file"),
        (b"\x1f\x8b" + bytes(50), "a gzip file"),
        (b"\x89HDF\r\n\x1a\n" + bytes(50), "an HDF5 file"),
        (bytes(257) + b"ustar" + bytes(300), "a tar archive"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b"<html>", "a web page"),
        (b"", "it is empty"),
        (b"hello there", "it does not begin like a safetensors file"),
    ],
)
def test_what_is_no_safetensors_file_is_told_by_its_content_whatever_its_name(content, said, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StoreError) as caught:
        load_weights(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{path} is not safetensors: ")
    if "pickle" in said and "Python objects" not in said:
        assert "torch.load(path, weights_only=True), then safetensors.torch.save_file" in str(caught.value)


def test_the_way_out_that_is_named_works(model, tmp_path):
    torch.save(model.state_dict(), tmp_path / "w.pt")
    with pytest.raises(StoreError, match="weights_only=True"):
        load_weights(tmp_path / "w.pt")
    save_file(torch.load(tmp_path / "w.pt", weights_only=True), tmp_path / "w.safetensors")
    same(load_weights(tmp_path / "w.safetensors"), model.state_dict())


def test_a_file_cut_short_anywhere_is_refused(model, tmp_path):
    save_weights(model, tmp_path / "whole")
    content = (tmp_path / "whole").read_bytes()
    for length in range(0, len(content), 7):
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(StoreError):
            load_weights(tmp_path / "cut")


def test_a_folder_without_a_model_says_what_it_is(tmp_path):
    with pytest.raises(StoreError, match=r"has no model\.safetensors$"):
        load_weights(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(StoreError, match="hotlap resume"):
        load_weights(tmp_path)


@pytest.mark.parametrize("name", ["nowhere", "nowhere/x", "a\0b", "x" * 300])
def test_a_file_that_is_not_there_is_told(name, tmp_path):
    with pytest.raises(StoreError, match="cannot read the weights"):
        load_weights(tmp_path / name)


def test_a_link_is_named_as_the_reason_also_in_a_folder(model, tmp_path):
    save_weights(model, tmp_path / "real")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "real")
    for path in (tmp_path / "model.safetensors", tmp_path):
        with pytest.raises(StoreError, match="it is a link; name the file itself"):
            load_weights(path)


def test_no_handle_is_left_open_by_a_refusal(tmp_path):
    (tmp_path / "x").write_bytes(b"PK")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(5):
        with pytest.raises(StoreError):
            load_weights(tmp_path / "x")
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
