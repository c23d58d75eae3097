"""Weights cast together and gradients made beside others: the same numbers as torch's own, whatever a model does."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hotlap.engine.assists import overlap as room
from hotlap.engine.assists.overlap import Overlap

CPU = torch.device("cpu")
PASSES = 3
"""The first only learns which weights there are."""


def layers():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16, bias=False), nn.Linear(16, 4))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again.weight = self.first.weight

    def forward(self, x):
        return self.again(F.relu(self.first(x))) + F.linear(x, self.first.weight * 0.5)


class Shared(nn.Module):
    """One layer used again and again, whose bias another has too."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.other.bias = self.one.bias

    def forward(self, x):
        for _ in range(3):
            x = self.one(x).tanh()
        return self.other(x)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True)

    def forward(self, x):
        return self.layer(x.view(4, 3, 8))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.second = nn.Conv1d(4, 4, 3, bias=False, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        made = self.first(x.view(4, 1, 3, 8)).flatten(2)
        return self.head(self.second(made).mean(-1))


class PartlyFrozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.head = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 3)

    def forward(self, x):
        with torch.no_grad():
            looked = self.head(self.frozen(x)).argmax(-1)
        return self.head(self.frozen(x)) * (1 + looked.unsqueeze(-1))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = layers(), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Penalised(nn.Module):
    """Whose loss has a gradient in it."""

    def __init__(self):
        super().__init__()
        self.inner = layers()

    def forward(self, x):
        x = x.clone().requires_grad_()
        made = self.inner(x)
        (by_x,) = torch.autograd.grad(made.float().sum(), x, create_graph=True)
        by_weights = torch.autograd.grad(made.float().sum(), list(self.inner.parameters()), retain_graph=True)
        return made.float().pow(2).mean() + by_x.pow(2).mean() + made.float().mean() * sum(g.sum() for g in by_weights)


class Sometimes(nn.Module):
    """Of which every other pass uses only a part."""

    def __init__(self):
        super().__init__()
        self.often, self.seldom, self.calls = nn.Linear(8, 4), nn.Linear(8, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.often(x) + (self.seldom(x) if self.calls % 2 else 0)


class InPlace(nn.Module):
    """That changes what its layers have made, and views of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        made = self.first(x.view(4, 3, 8)).view(4, 3, 2, 4).permute(0, 2, 1, 3)
        made /= 3.0
        again = self.second(made.permute(0, 2, 1, 3).reshape(12, 8))
        again += 1.0
        return again.relu_()


MODELS = [layers, Tied, Shared, Attends, Pictures, PartlyFrozen, Checkpointed, Penalised, Sometimes, InPlace]


def gradients_of(make, dtype, overlap, pieces=1, into=None):
    """Of each of some passes, from the same weights and draws."""
    torch.manual_seed(0)
    model = make().to(CPU)
    found = []
    for number in range(PASSES):
        torch.manual_seed(number)
        model.zero_grad(set_to_none=True)
        for _ in range(pieces):
            x = torch.randn(12, 8)
            with overlap or nullcontext():
                with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
                    loss = model(x).float().pow(2).mean()
                with overlap.leaving(into) if overlap and into else nullcontext():
                    (overlap.backward if overlap else torch.autograd.backward)(loss)
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    return found


def same(one, other):
    return len(one) == len(other) and all(
        (a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", MODELS)
def test_gradients_are_torchs_own(make, dtype, pieces):
    plain = gradients_of(make, dtype, None, pieces)
    beside = gradients_of(make, dtype, Overlap(CPU, dtype), pieces)
    for one, other in zip(plain, beside, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_all_uses_of_a_weight_are_added_up_in_torchs_order(dtype):
    for one, other in zip(
        gradients_of(Shared, dtype, None), gradients_of(Shared, dtype, Overlap(CPU, dtype)), strict=True
    ):
        assert same(one, other)


def test_weights_that_the_loss_depends_on_by_a_gradient_too_are_not_made_beside_it(monkeypatch):
    overlap, forked = Overlap(CPU, None), []
    monkeypatch.setattr(overlap, "_stream", object())
    monkeypatch.setattr(overlap, "on_second_stream", lambda *read: forked.append(len(read)) or nullcontext())
    monkeypatch.setattr(overlap, "_join", lambda: None)
    linear = sum(isinstance(module, nn.Linear) for module in layers())
    gradients_of(layers, None, overlap)
    assert forked == ([2] * linear + [5]) * (PASSES - 1)
    forked.clear()
    gradients_of(Penalised, None, overlap)
    assert forked == [5] * (PASSES - 1)  # all of them at the end, and none before


@pytest.mark.parametrize("group", [1, 300, room.GROUP_BYTES])
def test_groups_of_all_sizes_do(group, monkeypatch):
    monkeypatch.setattr(room, "GROUP_BYTES", group)
    for one, other in zip(
        gradients_of(layers, None, None), gradients_of(layers, None, Overlap(CPU, None)), strict=True
    ):
        assert same(one, other)


def test_from_the_second_pass_on_weights_are_cast_at_once():
    model, casts = layers(), []
    overlap = Overlap(CPU, torch.bfloat16)
    cast = overlap.cast
    overlap.cast = lambda weights: casts.append(len(weights)) or cast(weights)
    for _ in range(PASSES):
        with overlap, torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(12, 8)).float().sum()
            overlap.backward(loss)
    assert casts == [5, 5]


def test_where_weights_are_not_cast_together_each_is_cast_by_itself():
    model, casts = layers(), []
    overlap = Overlap(CPU, torch.bfloat16, casts_together=False)
    cast = overlap.cast
    overlap.cast = lambda weights: casts.append(len(weights)) or cast(weights)
    for _ in range(PASSES):
        with overlap, torch.autocast("cpu", dtype=torch.bfloat16):
            overlap.backward(model(torch.randn(12, 8)).float().sum())
    assert casts == 2 * 5 * [1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_only_where_gradients_overlap_is_there_a_second_stream(overlaps, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(room, "_second_stream", lambda device: object())
    assert (Overlap(torch.device("cuda", 0), None, overlaps=overlaps)._stream is not None) == overlaps


def test_gradients_are_left_where_there_is_room_for_them():
    torch.manual_seed(0)
    model, overlap = layers(), Overlap(CPU, torch.bfloat16)
    rooms = {id(p): torch.empty_like(p, requires_grad=False) for p in model.parameters()}
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with overlap, torch.autocast("cpu", dtype=torch.bfloat16), overlap.leaving(lambda p: rooms[id(p)]):
            overlap.backward(model(torch.randn(12, 8)).float().sum())
    linear = [p for module in model if isinstance(module, nn.Linear) for p in module.parameters()]
    assert all(p.grad is rooms[id(p)] for p in linear)
    norm = model[2]
    assert norm.weight.grad is not None
    assert norm.weight.grad is not rooms[id(norm.weight)]


def test_a_weight_whose_gradient_somebody_hears_of_is_left_to_torch():
    model, overlap, heard = layers(), Overlap(CPU, None), []
    model[0].weight.register_hook(lambda grad: heard.append("hook"))
    model[3].weight.register_post_accumulate_grad_hook(lambda p: heard.append("after"))
    for _ in range(PASSES):
        with overlap:
            overlap.backward(model(torch.randn(12, 8)).sum())
    assert heard == ["after", "hook"] * PASSES


def test_afterwards_torch_is_as_it_was():
    before = {name: vars(F)[name] for name in ("linear", "conv1d", "conv2d", "conv3d")}
    overlap = Overlap(CPU, torch.bfloat16)
    with overlap:
        assert F.linear is not before["linear"]
    with pytest.raises(ZeroDivisionError), overlap:
        1 / 0  # noqa: B018
    assert {name: vars(F)[name] for name in before} == before


def test_a_function_of_somebody_elses_stays(monkeypatch):
    def mine(x, weight, bias=None):
        return x @ weight.t()

    monkeypatch.setattr(F, "linear", mine)
    with Overlap(CPU, None):
        assert F.linear is mine


def test_a_pass_that_breaks_leaves_nothing_to_the_next():
    model, overlap = layers(), Overlap(CPU, None)
    for _ in range(2):
        with overlap:
            overlap.backward(model(torch.randn(12, 8)).sum())
    with pytest.raises(RuntimeError), overlap:
        model[0](torch.randn(12, 8))
        model(torch.randn(12, 9))
    plain = gradients_of(layers, None, None)
    assert same(plain[-1], gradients_of(layers, None, overlap)[-1])


def test_a_weight_that_is_used_elsewhere_too_is_known():
    model, overlap = Tied(), Overlap(CPU, None)
    for _ in range(PASSES):
        model.zero_grad(set_to_none=True)
        with overlap:
            overlap.backward(model(torch.randn(12, 8)).sum())
    named = {name: overlap._alone[id(p)] for name, p in model.named_parameters()}
    assert named == {"first.weight": False, "first.bias": True, "again.bias": True}


def test_a_use_that_comes_only_while_a_step_is_recorded_ends_the_recording(monkeypatch):
    model, overlap = nn.Linear(8, 8), Overlap(CPU, None)

    def step(penalty):
        model.zero_grad(set_to_none=True)
        with overlap:
            loss = model(torch.randn(12, 8)).sum()
            overlap.backward(loss + penalty * model.weight.pow(2).sum() if penalty else loss)

    for _ in range(PASSES):
        step(0.0)
    monkeypatch.setattr(room, "is_recording", lambda: True)
    step(0.0)
    with pytest.raises(RuntimeError, match="has another use"):
        step(0.1)
