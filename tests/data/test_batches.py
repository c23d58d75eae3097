from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from hotlap.core.errors import DataError
from hotlap.data.batches import count_samples, cut, map_tensors, to_device

Pair = namedtuple("Pair", "x y")
BATCHES = [
    torch.arange(10.0),
    (torch.arange(10.0), torch.arange(10)),
    [torch.arange(10.0), {"a": torch.arange(10)}],
    {"x": torch.arange(10.0), "name": "kept"},
    OrderedDict(x=torch.arange(10.0)),
    Pair(torch.arange(10.0), torch.arange(10)),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: type(b).__name__)
def test_containers_keep_their_types_and_what_is_no_tensor_stays(batch):
    changed = map_tensors(batch, lambda t: t + 1)
    assert type(changed) is type(batch)
    if isinstance(batch, dict) and "name" in batch:
        assert changed["name"] == "kept"
    assert count_samples(changed) == 10


@pytest.mark.parametrize("batch", BATCHES, ids=lambda b: type(b).__name__)
def test_a_batch_cut_into_pieces_holds_the_same_samples(batch):
    pieces, sizes = cut(batch, 4)
    assert sizes == [3, 3, 4]
    tensors = []
    for piece in pieces:
        map_tensors(piece, lambda t: tensors.append(t) or t)
    firsts = tensors[:: len(tensors) // 3]
    assert torch.equal(torch.cat(firsts).float(), torch.arange(10.0))


def test_a_small_batch_is_not_cut():
    batch = (torch.arange(4), torch.arange(4))
    pieces, sizes = cut(batch, 4)
    assert pieces[0] is batch
    assert sizes == [4]


def test_a_batch_that_is_there_already_is_not_copied():
    batch = (torch.arange(4), {"a": torch.arange(4)})
    moved = to_device(batch, torch.device("cpu"))
    assert moved[0] is batch[0]
    assert moved[1]["a"] is batch[1]["a"]


@pytest.mark.parametrize("batch", ["words", (), {"a": 1}, torch.tensor(1.0)])
def test_a_batch_without_samples_to_count_cannot_be_cut(batch):
    assert count_samples(batch) is None
    with pytest.raises(DataError, match="cannot be cut into micro-batches"):
        cut(batch, 2)


def test_samples_are_counted_by_the_first_tensor_that_has_a_first_dimension():
    assert count_samples({"scale": torch.tensor(2.0), "x": [torch.zeros(7, 2)]}) == 7
    assert count_samples(("words", np.zeros((3, 2)))) == 3


def test_lists_with_an_entry_a_sample_are_cut_and_what_has_another_length_goes_along_whole():
    batch = {"x": torch.arange(6), "names": list("abcdef"), "weights": torch.ones(3), "boxes": [[1], [2]]}
    pieces, sizes = cut(batch, 4)
    assert sizes == [3, 3]
    assert [piece["names"] for piece in pieces] == [["a", "b", "c"], ["d", "e", "f"]]
    assert all(len(piece["weights"]) == 3 and piece["boxes"] == [[1], [2]] for piece in pieces)
