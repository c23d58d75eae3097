"""Our own writer of safetensors, against the library that reads them everywhere."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

from hotlap.core.errors import StoreError
from hotlap.store import tensors as module
from hotlap.store.tensors import NAMES, copied_to_host, tensor_pieces, tensors_from

LONGER_THAN_THE_FILE = b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}'


def content(tensors, about=None):
    return b"".join(bytes(piece) for piece in tensor_pieces(tensors, about))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def random_tensor(dtype, shape=(5, 3)):
    if dtype is torch.bool:
        return torch.rand(shape) > 0.5
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (), (0,), (2, 0, 3), (1,)], ids=str)
def test_the_library_reads_every_dtype_and_shape_bit_for_bit(tmp_path, dtype, shape):
    tensor = random_tensor(dtype, shape)
    (tmp_path / "file").write_bytes(content({"a": tensor}))
    read = load_file(tmp_path / "file")
    assert list(read) == ["a"]
    assert same(read["a"], tensor)
    assert same(tensors_from((tmp_path / "file").read_bytes(), "file")["a"], tensor)


def test_tensors_that_do_not_lie_in_a_row_are_written_by_their_values():
    base = torch.arange(24.0).reshape(2, 3, 4)
    tensors = {
        "turned": base.permute(2, 0, 1),
        "every other": base[:, ::2],
        "spread": torch.ones(1).expand(7),
        "channels last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "needs grad": torch.ones(2, requires_grad=True),
    }
    read = load(content(tensors))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    assert all(read[name].is_contiguous() for name in tensors)


def test_ten_thousand_tensors_keep_their_names_and_values():
    tensors = {f"layer.{n}.weight": torch.full((n % 3,), float(n)) for n in range(10_000)}
    read = tensors_from(content(tensors), "file")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_words_about_the_file_come_back(tmp_path):
    (tmp_path / "file").write_bytes(content({"a": torch.ones(2)}, {"format": "pt", "by": 'ü "quoted"'}))
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": 'ü "quoted"'}


def test_a_file_without_any_tensor_is_a_good_file():
    assert tensors_from(content({}), "file") == {}


def test_the_same_tensors_give_the_same_bytes():
    def one():
        torch.manual_seed(0)
        return {"b": torch.randn(3), "a": torch.ones(2, dtype=torch.int8), "c": torch.zeros(0)}

    about = {"z": "1", "a": "2", "m": "3"}
    assert content(one(), about) == content(one(), about)


def test_every_tensor_begins_where_its_elements_may_be_read_in_place():
    tensors = {"flag": torch.tensor([True]), "byte": torch.ones(3, dtype=torch.uint8), "wide": torch.ones(2).double()}
    raw = content(tensors)
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert length % 8 == 0
    for name, tensor in tensors.items():
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.ones(2, dtype=torch.complex128), "complex128"),
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.ones(2, device="meta"), "meta"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(tensor, words):
    with pytest.raises(StoreError, match=f"^inner has .*{words}"):
        content({"inner": tensor})


def test_the_name_that_the_format_keeps_for_itself_is_refused():
    with pytest.raises(StoreError, match="__metadata__"):
        content({"__metadata__": torch.ones(1)}, {"format": "pt"})


def test_a_header_that_no_reader_takes_is_refused_when_written(monkeypatch):
    monkeypatch.setattr(module, "MOST_HEADER_BYTES", 100)
    with pytest.raises(StoreError, match="4 tensors are too many"):
        content({str(n): torch.ones(1) for n in range(4)})


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "not a valid safetensors file"),
        (b"\x00" * 7, "not a valid safetensors file"),
        (b"\xff" * 64, "not a valid safetensors file"),
        (b"PK\x03\x04" + b"\0" * 60, "zip"),
        (b"\x80\x02}q\x00.", "pickle"),
        (struct.pack("<Q", 2) + b"[]", "not a valid safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "not a valid safetensors file"),
        (struct.pack("<Q", 90) + LONGER_THAN_THE_FILE.ljust(90), "not a valid safetensors file"),
    ],
)  # fmt: skip
def test_anything_else_is_told_apart_and_refused(raw, words):
    with pytest.raises(StoreError, match=f"odd.bin is .*{words}"):
        tensors_from(raw, "odd.bin")


def test_a_file_cut_at_any_place_is_refused():
    raw = content({"a": torch.arange(4.0), "b": torch.ones(2)})
    for end in range(len(raw)):
        with pytest.raises(StoreError):
            tensors_from(raw[:end], "file")


def test_read_tensors_can_be_written_to():
    read = tensors_from(content({"a": torch.arange(4.0)}), "file")["a"]
    read += 1
    assert np.array_equal(read.numpy(), [1, 2, 3, 4])


def test_copies_on_the_host_are_contiguous_and_of_their_own():
    given = {"a": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), "b": torch.arange(3)}
    copied = copied_to_host(given)
    assert list(copied) == ["a", "b"]
    assert all(same(copied[name], given[name]) and copied[name].is_contiguous() for name in given)
    given["a"].zero_()
    assert copied["a"].any()


def test_small_tensors_of_a_kind_are_brought_by_one_copy(monkeypatch):
    monkeypatch.setattr(module, "AT_ONCE_BYTES", 100)
    there = torch.device("meta")  # any that is not the host
    sizes = {"a": 10, "b": 10, "big": 25, "c": 5, "d": 4, "half": 5}
    given = {name: torch.empty(size, device=there) for name, size in sizes.items()} | {"here": torch.empty(2)}
    given["half"] = given["half"].half()
    given |= {name: torch.empty(2, dtype=torch.float8_e4m3fn, device=there) for name in ("eight", "bits")}
    together = sorted(module._copy_groups(given))
    assert together == [["a", "b", "c"], ["big"], ["bits"], ["d"], ["eight"], ["half"], ["here"]]
