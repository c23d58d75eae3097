"""Data held on the device: the same batches, in whatever form they are kept."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.core.errors import TrainingError
from hotlap.data.order import Order
from hotlap.data.resident import Packed, PendingRows, ResidentFeeding, gathered, narrowed, sample_bytes
from hotlap.data.sources import Columns, StackedColumns

CPU = torch.device("cpu")
COLUMNS = {
    "rows": lambda: (torch.randn(20, 16), torch.randint(3, (20,))),
    "odd rows": lambda: (torch.randn(20, 5), torch.randint(3, (20, 1), dtype=torch.int32)),
    "images": lambda: (torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8), torch.randint(3, (20,))),
    "odd images": lambda: (torch.randint(256, (20, 3, 5, 7), dtype=torch.uint8), torch.randn(20)),
    "volumes": lambda: (torch.randn(20, 2, 3, 4, 5), torch.randn(20, dtype=torch.float64)),
    "halves, and not contiguous": lambda: (torch.randn(64, 20).half().t(), torch.randn(20, 32).bfloat16()),
    "halves, and not at the beginning": lambda: (
        torch.randn(21, 32).half().view(-1)[2:-30].view(20, 32),
        torch.randn(20),
    ),
    "a dict": lambda: {"x": torch.randn(20, 16), "ids": torch.randint(99, (20, 8))},
}


def parts(batch):
    return list(batch.values()) if isinstance(batch, dict) else list(batch)


@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("name", COLUMNS)
def test_packed_columns_give_the_same_batches(name, images_last):
    columns = Columns(COLUMNS[name]())
    chosen = torch.tensor([3, 3, 19, 0, 7])
    expected, found = columns.gather(chosen), Packed(columns, images_last=images_last).gather(chosen)
    assert type(found) is type(expected)
    for mine, theirs in zip(parts(found), parts(expected), strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_packed_images_come_with_their_channels_last_without_a_copy():
    columns = Columns((torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8), torch.zeros(20)))
    images, _ = Packed(columns, images_last=True).gather(torch.arange(4))
    assert images.is_contiguous(memory_format=torch.channels_last)


def test_nested_columns_are_packed_too():
    whole = {"a": [torch.randn(6, 16), torch.randn(6)], "b": torch.randint(9, (6, 3, 4, 4), dtype=torch.uint8)}
    chosen = torch.tensor([5, 1])
    found = Packed(StackedColumns(whole), images_last=True).gather(chosen)
    assert torch.equal(found["a"][0], whole["a"][0][chosen])
    assert torch.equal(found["a"][1], whole["a"][1][chosen])
    assert torch.equal(found["b"], whole["b"][chosen])


@given(st.integers(1, 60), st.integers(1, 9), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_windows_name_the_rows_that_the_order_asks_for(samples, batch, epoch):
    columns = Columns((torch.arange(samples),))
    order = Order(samples, batch_size=batch, shuffled=True).epoch(epoch)
    feeding = ResidentFeeding(columns, CPU)
    feeding.begin(order.indices)
    for window in range(len(order)):
        start, end = order.bounds(window, None)
        (found,) = feeding.rows(start, end - start).gathered()
        assert torch.equal(found, order.pieces(window, None)[0])


def test_the_next_epoch_is_written_into_the_same_memory_so_that_captures_stay():
    feeding = ResidentFeeding(Columns((torch.arange(10),)), CPU)
    order = Order(10, batch_size=4, shuffled=True)
    feeding.begin(order.epoch(0).indices)
    early = feeding.rows(0, 4)
    place = early.order.data_ptr()
    feeding.begin(order.epoch(1).indices)
    rows = feeding.rows(2, 3)
    assert rows.order.data_ptr() == place
    assert torch.equal(rows.gathered()[0], order.epoch(1).indices[2:5])
    assert torch.equal(rows.shifted(3).gathered()[0], order.epoch(1).indices[5:8])
    with pytest.raises(TrainingError, match="after its epoch"):
        early.gathered()


def test_a_batch_that_is_no_rows_is_passed_on():
    batch = (torch.zeros(2),)
    assert gathered(batch) is batch
    feeding = ResidentFeeding(Columns(batch), CPU)
    feeding.begin(torch.arange(2))
    rows = feeding.rows(0, 1)
    assert isinstance(rows, PendingRows)
    assert isinstance(gathered(rows), tuple)


def test_a_batch_is_narrowed_and_measured():
    batch = {"x": torch.arange(12.0).reshape(6, 2), "y": torch.arange(6)}
    part = narrowed(batch, 2, 3)
    assert part["y"].tolist() == [2, 3, 4]
    assert part["x"].data_ptr() == batch["x"][2:].data_ptr()
    assert sample_bytes(batch) == 16


def test_windows_are_alike_where_their_pieces_have_the_same_sizes():
    epoch = Order(50, batch_size=8, shuffled=False, accumulate=1).epoch(0)
    assert epoch.are_alike(0, 6, None)
    assert not epoch.are_alike(0, 7, None)  # the last one is shorter
    assert not epoch.are_alike(4, 4, None)  # there are not as many
    assert epoch.are_alike(1, 3, 3)


def test_an_order_drawn_ahead_is_the_one_drawn_in_time():
    ahead, in_time = (Order(30_000, batch_size=7, shuffled=True, seed=3) for _ in range(2))
    ahead.epoch(0)
    ahead.draw_ahead(1)
    ahead.draw_ahead(1)
    assert torch.equal(ahead.epoch(1).indices, in_time.epoch(1).indices)
    ahead.draw_ahead(2)
    assert torch.equal(ahead.epoch(5).indices, in_time.epoch(5).indices)
