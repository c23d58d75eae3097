"""Constants that a forward pass copies from the host, on a real GPU: captured where they are constant, else left."""

import random
from types import SimpleNamespace

import calling
import copying
import numpy as np
import pytest
import torch
from calling import CAPTURED
from plain import class_data, parameters_of
from torch import nn

from hotlap import Plan, Rig
from hotlap.engine.capture.captured_step import CapturedStep

DEVICE = torch.device("cuda")


def scripted(kind, plan, *, size=8, steps=12, before_step=lambda module, number: None):
    """The losses of a plain loop under a plan, its weights, and the calls."""
    module = kind().to(DEVICE)
    model = calling.Scripted(module, plan, device=DEVICE, make_recorder=None)
    optimizer, losses = torch.optim.Adam(module.parameters(), lr=0.01), []
    random.seed(5)
    for number, (x, y) in enumerate(batches(steps)):
        before_step(module, number)
        if number in (5, 9):  # another width, and another mask
            x, y = x[: size // 2], y[: size // 2]
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return SimpleNamespace(losses=torch.stack(losses), weights=parameters_of(module), call=model.call)


def batches(count):
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 5, generator=generator).to(DEVICE), torch.randint(3, (8,), generator=generator).to(DEVICE))
        for _ in range(count)
    ]


def trained(kind, plan):
    torch.manual_seed(7)
    random.seed(5)
    np.random.seed(5)
    rig = Rig(kind(), lambda p: torch.optim.Adam(p, lr=0.01), nn.CrossEntropyLoss(), plan=plan, device="cuda")
    losses = [rig.step(window) for window in rig.feed(class_data(90, dtype=torch.float32), batch_size=8, epochs=4)]
    held = sum(step.recorded for step in rig._steps.values() if isinstance(step, CapturedStep))
    reason = rig.given_up
    rig.close()
    return SimpleNamespace(
        losses=torch.stack([loss.double() for loss in losses]),
        weights=parameters_of(rig.model).clone(),
        held=held,
        reason=reason,
    )


def assert_same(mine, theirs):
    torch.testing.assert_close(mine.losses, theirs.losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine.weights, theirs.weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", copying.FIT)
def test_a_call_that_copies_constants_is_captured(kind):
    mine = scripted(kind, CAPTURED)
    assert mine.call.given_up is None
    assert mine.call._way.recorded >= 1
    assert_same(mine, scripted(kind, calling.OWN))


@pytest.mark.parametrize("kind", copying.UNFIT)
def test_a_call_that_copies_more_than_constants_runs_as_ever(kind):
    mine = scripted(kind, CAPTURED)
    assert mine.call._way.recorded == 0
    assert any(words in mine.call.given_up for words in (copying.UNFIT[kind], "'calls'"))
    if kind is not copying.Draws:  # the host's generator of torch goes on
        assert_same(mine, scripted(kind, calling.OWN))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("kind", copying.FIT)
def test_a_step_that_copies_constants_is_captured(kind, steps):
    mine = trained(kind, Plan().but(kind="resident", mode="captured", optimizer="fused", replay_steps=steps))
    assert mine.reason is None
    assert mine.held >= 1
    theirs = trained(kind, Plan().but(optimizer="fused"))
    mine.losses, theirs.losses = (one.losses[-1] for one in (mine, theirs))  # one a window
    assert_same(mine, theirs)


@pytest.mark.parametrize("kind", copying.UNFIT)
def test_a_step_that_copies_more_than_constants_runs_as_ever(kind):
    mine = trained(kind, Plan().but(kind="resident", mode="captured", optimizer="fused"))
    assert mine.held == 0
    assert any(words in mine.reason for words in (copying.UNFIT[kind], "'calls'"))
    assert_same(mine, trained(kind, Plan().but(optimizer="fused")))


@pytest.mark.parametrize("kind", copying.FIT)
def test_an_evaluation_that_copies_constants_is_replayed(kind):
    module = kind().to(DEVICE).eval()
    model = calling.Scripted(module, CAPTURED, device=DEVICE, make_recorder=None)
    with torch.no_grad():
        for x, _ in batches(12):
            torch.testing.assert_close(model(x), module(x), rtol=1e-5, atol=1e-6)
    assert model.evaluations.refused == []
    assert model.evaluations.recorded == 1


def test_numbers_of_the_host_that_a_script_changes_in_place_are_those_of_now(monkeypatch):
    def trained_with_changes(plan):
        monkeypatch.setattr(copying, "SHARES", [[0.5, 0.6], [0.7, 0.8]])
        return scripted(copying.TakesNumbers, plan, steps=20, before_step=copying.TakesNumbers.change)

    mine = trained_with_changes(CAPTURED)
    assert mine.call.given_up is None
    assert mine.call._way.recorded >= 1
    assert_same(mine, trained_with_changes(calling.OWN))
