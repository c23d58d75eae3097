"""Trainings without an optimizer on a real GPU: their calls are captured, their update stays the script's own."""

import gc

import numpy as np
import pytest
import torch
from by_hand_loops import WAYS, in_its_data, judged, read, reader, with_other_data
from calling import CAPTURED, Scripted
from torch import nn

from hotlap.core.plan import Feed, Plan
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan

DEVICE = torch.device("cuda")
STEPS = 28
"""Updates that `read` makes."""


@pytest.fixture(autouse=True)
def nothing_stays():
    """Captures of recurrent layers that drop out bind the device's generator as long as they are there."""
    yield
    gc.collect()


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def opened(plan=None, seen=lambda training: None, **settings):
        def chosen(training):
            seen(training)
            return str(tmp_path / "plan.toml")

        if plan is not None:
            save_plan(plan, tmp_path / "plan.toml")
            settings["plan"] = chosen
        return Session(Settings(name="test", out=tmp_path / "run", **settings))

    return opened


def on_gpu(dropout=0.0):
    return reader(dropout=dropout).to(DEVICE)


def assert_close(one, other):
    np.testing.assert_allclose(one[0], other[0], rtol=2e-4)
    for mine, theirs in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("update", WAYS, ids=lambda way: way.__name__)
def test_a_state_that_is_carried_on_keeps_its_numbers_in_captured_calls(update):
    alone, model = read(on_gpu(), update=update), on_gpu()
    call = Scripted(model, CAPTURED, device=DEVICE, make_recorder=None)
    assert_close(read(model, call=call, update=update), alone)
    assert bool(call.call._way.recorded) == (update is not with_other_data)


def test_a_state_that_is_carried_on_is_not_written_to_by_the_next_call():
    model = on_gpu()
    call = Scripted(model, CAPTURED, device=DEVICE, make_recorder=None)
    words = torch.randint(11, (5, 4), device=DEVICE)
    state, held = (torch.zeros(2, 4, 8, device=DEVICE),) * 2, []
    for _ in range(12):
        output, state = call(words, state)
        state = tuple(part.detach() for part in state)
        held.append((state, tuple(part.clone() for part in state)))
        output.mean().backward()
        in_its_data(model)
    assert call.call._way.recorded
    for mine, copies in held:
        assert all(map(torch.equal, mine, copies))


def test_a_captured_training_has_the_losses_of_its_own_loop(session, capsys):
    alone = read(on_gpu())
    with session(Plan(feed=Feed(kind="loader")).but(mode="captured")):
        assert_close(read(on_gpu()), alone)
    told = capsys.readouterr().err
    assert f"{STEPS} updates" in told
    assert "hotlap failed" not in told


def test_losses_that_are_differentiated_by_a_replay_are_counted(session, capsys):
    def loop():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5)).to(DEVICE)
        y, losses = (x.sum(1) > 0).long(), []
        for _ in range(60):
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            in_its_data(model)
            losses.append(loss.item())
        return losses, [p.detach().clone() for p in model.parameters()]

    found, alone = [], loop()
    with session(Plan(feed=Feed(kind="loader")).but(mode="captured"), seen=found.append):
        assert_close(loop(), alone)
    assert found[0].loss_replay.made > 20  # without autograd
    told = capsys.readouterr().err
    assert "60 updates" in told
    assert "hotlap failed" not in told


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("choice", [{"mode": "captured"}, {"precision": "bf16"}], ids=str)
def test_the_gate_judges_gradients_and_leaves_those_of_the_script(choice, dropout):
    found = judged(on_gpu(dropout), **choice)
    assert found.ok, found.why
