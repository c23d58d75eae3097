"""Hashes of data as a fingerprint and a key take them."""

import hashlib

import pytest
import torch

from hotlap.data import content_keys
from hotlap.data.content_keys import sha256_of, tensor_text
from hotlap.guard.fingerprint import describe


def test_up_to_one_piece_it_is_the_plain_sha256():
    for data in (b"", b"a", bytes(range(256))):
        assert sha256_of(memoryview(data)) == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("size", [17, 32, 33, 100])
def test_every_byte_of_every_piece_counts_and_so_does_its_place(size, monkeypatch):
    monkeypatch.setattr(content_keys, "WHOLE_BYTES", 16)
    data = bytes(range(size))
    changed = [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in range(size)]
    swapped = data[16:32] + data[:16] + data[32:]
    assert len({sha256_of(memoryview(one)) for one in (data, swapped, *changed)}) == size + 2
    assert sha256_of(memoryview(data)) == sha256_of(memoryview(bytes(range(size))))


def test_a_large_tensor_is_told_whole_by_all_of_it_and_else_by_some_of_its_rows(monkeypatch):
    monkeypatch.setattr(content_keys, "WHOLE_BYTES", 64)
    one, other = torch.zeros(100, 4), torch.zeros(100, 4)
    other[1, 2] = 1.0
    assert tensor_text(one, whole=True) != tensor_text(other, whole=True)
    assert describe(one) == describe(other)
