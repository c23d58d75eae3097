"""Batches that are gathered together on the device: each is what it would be alone, in memory of its own."""

import random

import pytest
import torch

from hotlap.data.sources import Columns
from hotlap.script.feed import feeds as serving_copies
from hotlap.script.feed.feeds import DeviceGather
from hotlap.script.feed.index_batches import IndexBatch, IndexBlock

CPU = torch.device("cpu")
X = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(400)
SIZES = [8] * 11 + [3]


class Noted(Columns):
    """Columns that note how many samples they are asked for at a time."""

    def __init__(self):
        super().__init__((X, Y))
        self.asked = []

    def gather(self, indices, room=None):
        self.asked.append(len(indices))
        return super().gather(indices, room)


class Varying(Noted):
    """Columns whose batches would be as wide as the widest sample."""

    def at_width_of(self, indices):
        return self


def block_of(seed=2):
    order = torch.randperm(400, generator=torch.Generator().manual_seed(seed))[: sum(SIZES)]
    block = IndexBlock(order, SIZES)
    return [IndexBatch(None, block, number) for number in range(len(SIZES))]


def landed(copies, places):
    return [part.on_device() for part in copies.of(places, 2)]


def assert_right(found, places):
    assert torch.equal(found[0], X[places.host])
    assert torch.equal(found[1], Y[places.host])


def test_batches_are_gathered_together_and_each_has_memory_of_its_own():
    source, block = Noted(), block_of()
    copies = DeviceGather(source, CPU)
    found = [landed(copies, places) for places in block]
    assert source.asked == [8, sum(SIZES) - 8], "the first alone, to know how large batches are"
    for tensors in found:
        for tensor in tensors:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            assert tensor.storage_offset() == 0
            assert tensor.is_contiguous()
            assert not tensor._is_view()
    for places, tensors in zip(block, found, strict=True):
        assert_right(tensors, places)
        for tensor in tensors:  # must not be seen in those that follow
            tensor.resize_(2 * len(tensor), *tensor.shape[1:]).fill_(-1)


def test_as_many_are_gathered_as_the_limit_allows(monkeypatch):
    monkeypatch.setattr(serving_copies, "GATHERED_TOGETHER", 3 * 8 * (6 * 4 + 8) + 1)
    source, block = Noted(), block_of()
    copies = DeviceGather(source, CPU)
    for places in block:
        assert_right(landed(copies, places), places)
    assert source.asked == [8, 24, 24, 24, 11]


@pytest.mark.parametrize("seed", range(5))
def test_batches_are_right_in_whatever_order_a_script_sends_them_and_whichever_it_leaves_out(seed, monkeypatch):
    monkeypatch.setattr(serving_copies, "GATHERED_TOGETHER", 4 * 8 * (6 * 4 + 8))
    chance = random.Random(seed)
    copies = DeviceGather(Noted(), CPU)
    batches = [places for number in range(3) for places in block_of(number)]
    window = []
    for places in batches:
        window.append((places, copies.of(places, 2)))
        chance.shuffle(window)
        while window and chance.random() < 0.6:
            asked, parts = window.pop()
            for number in chance.sample(range(2), chance.randrange(3)):
                assert torch.equal(parts[number].on_device(), (X, Y)[number][asked.host])


def test_nothing_is_gathered_that_nobody_asks_for():
    source = Noted()
    copies = DeviceGather(source, CPU)
    kept = [copies.of(places, 2) for places in block_of()]
    assert len(kept) == len(SIZES)
    assert source.asked == []


def test_samples_that_differ_in_size_are_gathered_batch_by_batch():
    source, block = Varying(), block_of()
    copies = DeviceGather(source, CPU)
    for places in block:
        assert_right(landed(copies, places), places)
    assert source.asked == SIZES


def test_index_batches_that_were_read_alone_are_gathered_alone():
    source = Noted()
    copies = DeviceGather(source, CPU)
    for places in map(IndexBatch, ([3, 1], [399], [7, 7, 7])):
        assert_right(landed(copies, places), places)
    assert source.asked == [2, 1, 3]


def test_a_batch_is_of_the_mode_in_which_it_is_sent():
    source, block = Noted(), block_of()
    copies = DeviceGather(source, CPU)
    for number, places in enumerate(block):
        with torch.inference_mode(number in (3, 4, 9)):
            found = landed(copies, places)
        assert_right(found, places)
        assert [tensor.is_inference() for tensor in found] == [number in (3, 4, 9)] * 2
    assert source.asked[:2] == [8, sum(SIZES) - 8]
    assert source.asked[2:] == [8, 8, 8], "those of the other mode alone, while the rest stays"


def test_the_rows_of_a_selection_are_looked_up_once_for_all_that_were_read_together():
    rows = torch.randperm(400, generator=torch.Generator().manual_seed(3))
    block = block_of()
    found = [places.through(rows) for places in block]
    assert len({part.untyped_storage().data_ptr() for part in found}) == 1
    for places, part in zip(block, found, strict=True):
        assert torch.equal(part, rows[places.host])
        assert torch.equal(IndexBatch(places.index).through(rows), part)
    assert torch.equal(block[1].through(rows.flip(0)), rows.flip(0)[block[1].host])
