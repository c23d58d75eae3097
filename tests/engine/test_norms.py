"""Batch norms that count at once have counted what each would have counted."""

import pytest
import torch
from torch import nn

from hotlap.engine.assists.norms import NormCounts, counted_at_once


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.once, self.twice, self.never = nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.frozen, self.averaging = nn.BatchNorm1d(4).eval(), nn.BatchNorm1d(4, momentum=None)

    def forward(self, x):
        return self.averaging(self.frozen(self.twice(self.twice(self.once(x)))))


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_they_count_the_same_and_their_statistics_are_the_same():
    x = torch.randn(16, 4)
    plain, model = Net(), Net()
    counts = NormCounts([model])
    with counts.watched(1):
        model(x)
    plain(x)
    moves = counts.settled(1)
    for _ in range(3):
        plain(x)
        with counted_at_once(moves):
            model(x)
    for name, buffer in buffers(plain).items():
        assert torch.equal(buffers(model)[name], buffer), name
    assert {name: int(layer.num_batches_tracked) for name, layer in model.named_children()} == {
        "once": 4,
        "twice": 8,
        "never": 0,
        "frozen": 0,
        "averaging": 4,
    }


def test_one_that_averages_over_all_batches_reads_its_counter_and_takes_no_part():
    model = Net()
    counts = NormCounts([model])
    with counts.watched(1):
        model(torch.randn(8, 4))
    assert model.averaging not in [layer for layer, _ in counts.settled(1)]


def test_shapes_that_go_through_the_model_another_number_of_times_are_told_apart():
    model = Net()
    counts = NormCounts([model])
    for shape, times in (("one piece", 1), ("three pieces", 3)):
        with counts.watched(shape):
            for _ in range(times):
                model(torch.randn(8, 4))
    assert dict(counts.settled("three pieces"))[model.twice] == 6
    assert dict(counts.settled("one piece"))[model.twice] == 2


def test_one_that_was_frozen_since_takes_no_part():
    model = Net()
    counts = NormCounts([model])
    with counts.watched(1):
        model(torch.randn(8, 4))
    model.once.eval()
    assert model.once not in [layer for layer, _ in counts.settled(1)]


def test_an_error_inside_puts_the_counters_back():
    model = Net()
    counts = NormCounts([model])
    with counts.watched(1):
        model(torch.randn(8, 4))
    with pytest.raises(RuntimeError), counted_at_once(counts.settled(1)):
        model(torch.randn(8, 5))
    assert all(layer.num_batches_tracked is not None for layer in model.children())


def test_a_model_without_batch_norms_costs_nothing():
    counts = NormCounts([nn.Linear(2, 2)])
    with counts.watched(1), counted_at_once(counts.settled(1)):
        pass
    assert counts.settled(1) == []
