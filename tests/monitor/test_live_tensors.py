"""Tensors are counted as they come and go, by what they are for, to the byte."""

import torch
from torch import nn

from hotlap.monitor.live_tensors import LiveTensors

CPU = torch.device("cpu")


def test_the_peak_is_that_of_all_that_lived_at_once():
    a = torch.zeros(1000)
    counted = LiveTensors(CPU)
    counted.know([a], "parameters")
    with counted:
        b = a + 1
        c = b + 1
        del b
        d = c[:10] + 1
    assert counted.peak_bytes == 12_000
    assert counted.bytes == 4000 + 4000 + 40
    assert counted.kinds["parameters"] == 4000
    del c, d
    assert counted.bytes == 4000


def test_what_an_operation_takes_for_itself_is_part_of_the_peak_and_not_of_what_lasts(monkeypatch):
    """The allocator's account is made up: an operation had 700 bytes more than was left when it ended."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    a = torch.zeros(10)
    counted = LiveTensors(torch.device("cuda"))
    with counted:
        a + 1
    assert (counted.peak_bytes, counted.at_peak["kernels"]) == (700, 700)
    assert [size for _, size in counted.course] == [700, 0]


def test_views_and_writes_in_place_take_nothing():
    a = torch.zeros(100)
    counted = LiveTensors(CPU)
    counted.know([a, a[:50], a.view(10, 10)], "batch")
    with counted:
        a.add_(1)
        b = a.t() if a.ndim > 1 else a.view(10, 10)
        b.mul_(2)
    assert counted.bytes == counted.peak_bytes == 400


def test_backward_is_seen_and_gradients_can_be_named_afterwards():
    layer, x = nn.Linear(30, 20), torch.randn(8, 30)
    counted = LiveTensors(CPU)
    counted.know(layer.parameters(), "parameters")
    with counted:
        counted.kind = "activations"
        layer(x).square().sum().backward()
        counted.know((p.grad for p in layer.parameters()), "gradients")
    assert counted.kinds["parameters"] == counted.kinds["gradients"] == (30 * 20 + 20) * 4
    assert counted.kinds["activations"] == 0


def test_the_line_that_made_a_tensor_is_the_users_own():
    counted = LiveTensors(CPU, lines=True)
    with counted:
        kept = nn.functional.gelu(torch.ones(7))  # this line
    line = next(piece.line for piece in counted.pieces.values())
    assert "test_live_tensors.py" in line
    assert line.endswith("test_the_line_that_made_a_tensor_is_the_users_own")
    del kept
