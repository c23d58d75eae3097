"""Losses that do not wait give torch's own numbers."""

import functools
import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotlap.engine.assists import rewiring as losses

WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
SHAPES = {"rows": (8, 3), "one row": (3,), "places": (4, 3, 5), "pictures": (2, 3, 4, 5)}
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}


def given(shape, ignored=0):
    draw = torch.Generator().manual_seed(1)
    scores = torch.randn(shape, generator=draw)
    target = torch.randint(0, 3, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), generator=draw)
    target.view(-1)[:ignored] = -100
    return scores, target


def with_gradient(loss, scores, *rest, **how):
    scores = scores.clone().requires_grad_()
    value = loss(scores, *rest, **how)
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    return value.detach(), gradient


def operations(work):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        work()
    return {event.key for event in seen.key_averages()}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_numbers_are_torchs_own_to_the_bit(shape, smoothing):
    scores, target = given(shape)
    how = {"weight": WEIGHTS, "label_smoothing": smoothing}
    mine, theirs = (with_gradient(loss, scores, target, **how) for loss in (losses.cross_entropy, F.cross_entropy))
    assert torch.equal(mine[0], theirs[0])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", [SHAPES["rows"], SHAPES["places"]])
def test_targets_that_are_ignored_weigh_nothing(shape):
    scores, target = given(shape, ignored=3)
    how = {"weight": WEIGHTS, "label_smoothing": 0.1}
    mine, theirs = (with_gradient(loss, scores, target, **how) for loss in (losses.cross_entropy, F.cross_entropy))
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)
    scores, target = given(shape)
    counted = losses.cross_entropy(scores, target, WEIGHTS, None, 2, None, "mean", 0.1)
    torch.testing.assert_close(counted, F.cross_entropy(scores, target, WEIGHTS, ignore_index=2, label_smoothing=0.1))


def test_where_all_are_ignored_there_is_no_number_as_with_torch():
    scores, target = given((4, 3), ignored=4)
    assert losses.cross_entropy(scores, target, WEIGHTS, label_smoothing=0.1).isnan()
    assert F.cross_entropy(scores, target, WEIGHTS, label_smoothing=0.1).isnan()


@pytest.mark.parametrize("how", [{}, {"weight": WEIGHTS}, {"label_smoothing": 0.1}, {"reduction": "sum"}])
def test_whatever_does_not_wait_is_torchs_own(how, monkeypatch):
    scores, target = given((8, 3))
    seen = []
    monkeypatch.setattr(losses, "_OWN", lambda *args: seen.append(args) or torch.zeros(()))
    losses.cross_entropy(scores, target, **how)
    losses.cross_entropy(scores, scores.softmax(1), weight=WEIGHTS, label_smoothing=0.1)
    assert len(seen) == 2


def test_it_reads_nothing_back_and_torchs_own_does():
    scores, target = given((8, 3))
    how = {"weight": WEIGHTS, "label_smoothing": 0.1}
    assert operations(lambda: F.cross_entropy(scores, target, **how)) & WAITS
    assert not operations(lambda: losses.cross_entropy(scores, target, **how)) & WAITS


@pytest.mark.parametrize("called", ["layer", "function"])
def test_inside_torchs_losses_do_not_wait_by_whatever_name(called):
    scores, target = given((8, 3))
    layer = nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1)
    loss = layer if called == "layer" else lambda *both: F.cross_entropy(*both, weight=WEIGHTS, label_smoothing=0.1)
    work = losses.without_waiting(lambda: loss(scores, target))
    assert not operations(work) & WAITS
    assert torch.equal(work(), loss(scores, target))
    assert F.cross_entropy is losses._OWN


def test_torch_has_its_own_back_after_an_error():
    def failing():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        losses.without_waiting(failing)()
    assert F.cross_entropy is losses._OWN


def of_a_library(*args, **more):
    return losses._OWN(*args, **more)


def test_whoever_stands_in_for_it_already_stays(monkeypatch):
    monkeypatch.setattr(F, "cross_entropy", of_a_library)
    assert losses.without_waiting(lambda: F.cross_entropy)() is of_a_library
    assert F.cross_entropy is of_a_library


def test_so_does_one_that_came_before_hotlap(monkeypatch):
    monkeypatch.setattr(F, "cross_entropy", functools.wraps(F.cross_entropy)(of_a_library))
    found = importlib.util.spec_from_file_location("losses_made_later", losses.__file__)
    later = importlib.util.module_from_spec(found)
    found.loader.exec_module(later)
    assert later.without_waiting(lambda: F.cross_entropy)() is of_a_library
