"""Tensors of a cache entry that stay on disk: the same numbers, checked, and never written back."""

import os
import time

import pytest
import torch

from hotlap.core.errors import StoreError
from hotlap.store.cache import LEFT_OVER_S, Cache, key_of, mapped
from hotlap.store.tensors import NAMES


def test_they_are_the_tensors_that_were_stored_whatever_their_kind(tmp_path):
    cache, key = Cache(tmp_path / "cache"), key_of("x")
    tensors = {str(dtype): torch.arange(24).reshape(2, 3, 4).to(dtype) for dtype in NAMES}
    tensors |= {"one": torch.tensor(3.5), "none": torch.zeros(0, 4), "odd": torch.arange(7, dtype=torch.uint8)}
    cache.put("pictures", key, tensors=tensors, values={"words": ["a"], "inner": torch.ones(2)}, facts={})
    plain, there = cache.get("pictures", key), cache.get("pictures", key, on_disk=True)
    assert set(there.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert there.tensors[name].dtype is tensor.dtype
        assert (
            there.tensors[name].view(-1).tolist() == plain.tensors[name].view(-1).tolist() == tensor.view(-1).tolist()
        )
        assert there.tensors[name].shape == tensor.shape
    assert there.values["words"] == ["a"]
    assert torch.equal(there.values["inner"], torch.ones(2))


def test_arrays_come_back_as_arrays_and_live_on_when_the_entry_is_gone(tmp_path):
    cache, key = Cache(tmp_path / "cache"), key_of("x")
    cache.put("pictures", key, tensors={"a": torch.arange(9).numpy()}, facts={})
    found = cache.get("pictures", key, on_disk=True).tensors["a"]
    cache.drop("pictures", key)
    assert found.tolist() == list(range(9))


def test_a_byte_that_differs_makes_it_none(tmp_path, caplog):
    cache, key = Cache(tmp_path / "cache"), key_of("x")
    cache.put("pictures", key, tensors={"a": torch.arange(9)}, facts={})
    (file,) = (tmp_path / "cache").glob("pictures/*/tensors.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert cache.get("pictures", key, on_disk=True) is None
    assert "removed the damaged cache entry" in caplog.text


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 40, (9).to_bytes(8, "little") + b'{"a": 1} ' + bytes(8)])
def test_what_is_no_safetensors_file_is_said(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(StoreError, match=r"a\.safetensors"):
        mapped(tmp_path / "a.safetensors")


def test_a_scratch_folder_is_gone_afterwards_and_after_a_crash_with_the_next_prune(tmp_path):
    cache, key = Cache(tmp_path / "cache"), key_of("x")
    with cache.scratch("pictures", key) as folder:
        (folder / "pixels").write_bytes(b"123")
        assert cache.list() == []
    assert not folder.exists()
    with pytest.raises(ZeroDivisionError), cache.scratch("pictures", key) as folder:
        raise ZeroDivisionError
    assert not folder.exists()
    folder.mkdir()  # as a process that died leaves it
    long_ago = time.time() - 2 * LEFT_OVER_S
    os.utime(folder, (long_ago, long_ago))
    cache.prune()
    assert not folder.exists()
