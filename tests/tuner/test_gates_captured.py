"""How the gate judges plans that record and replay, with a step that pretends to: it needs no GPU, and can be faulty.

The real captures are judged in tests/gpu.
"""

from collections import Counter

import pytest
import torch
from torch import nn

from hotlap import Rig
from hotlap.engine import step_cache as engine
from hotlap.tuner.gates import Gate


class Pretended:
    """Runs what is new eagerly, notes what it would record, and replays it by running it."""

    fault = None

    def __init__(self, eager, *, device, recorder, outputs, why_split, attention, note, without=()):
        self._eager, self._seen, self._recorded = eager, Counter(), {}
        self.warmup_steps, self.given_up, self.rates = 0, None, eager.rates

    def __call__(self, window):
        key = (window.updates, tuple(window.sizes))
        if key not in self._recorded:
            self.warmup_steps += 1
            self._seen[key] += window.updates
            if self._seen[key] - window.updates < 3:
                return self._eager(window)
            self._recorded[key] = window
        return self.fault(window, self._recorded[key]) if self.fault else self._eager(window)

    def kept(self, loss):
        return loss

    def forget(self):
        self._recorded.clear()
        self._seen.clear()


@pytest.fixture(autouse=True)
def pretend(monkeypatch):
    """A captured plan can be obeyed here."""
    monkeypatch.setattr(engine, "CapturedStep", Pretended)
    monkeypatch.setattr(engine, "Recorder", lambda device: None)
    monkeypatch.setattr(engine, "ReplayOutputs", lambda device: None)
    monkeypatch.setattr(Rig, "supports", lambda self, plan: None)
    monkeypatch.setattr(engine.StepCache, "_why_split", lambda self, execution: "it is pretended")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def images(count=1024):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 6, 6, generator=generator)
    return x, (x.flatten(1) @ torch.randn(108, 3, generator=generator)).argmax(1)


def training(dropout=0.3, steps=5, count=1024):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(128, 3)
    )
    rig = Rig(model, lambda p: torch.optim.AdamW(p, lr=1e-3), nn.CrossEntropyLoss(), device="cpu")
    rig.ahead = rig.feed(images(count), batch_size=16, epochs=1000)
    for _ in range(steps):
        rig.step(next(rig.ahead))
    return rig


def captured(plan, replay_steps, **choices):
    return plan.but(kind="resident", mode="captured", replay_steps=replay_steps, **choices)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("replay_steps", [1, 8, 32, 100])
def test_replays_that_do_what_was_recorded_pass(replay_steps, dropout):
    rig = training(dropout)
    found = Gate(rig, rig.plan).check(captured(rig.plan, replay_steps, optimizer="fused"))
    assert found.ok, found
    assert found.why == "same maths"


@pytest.mark.parametrize("replay_steps", [1, 8])
def test_replays_in_another_precision_and_layout_pass_and_the_cosine_is_told(replay_steps):
    rig = training()
    plan = captured(rig.plan, replay_steps, precision="bf16", layout="channels_last")
    found = Gate(rig, rig.plan).check(plan)
    assert found.ok, found
    assert found.why.startswith("gradients agree to 0.99")


@pytest.mark.parametrize("count", [16, 64, 100])
def test_an_epoch_may_be_shorter_than_a_replay(count):
    rig = training(count=count, steps=2)
    assert Gate(rig, rig.plan).check(captured(rig.plan, 8)).ok


def reads_what_was_there(step):
    return lambda window, recorded: step._eager(recorded)


def repeats_its_masks(step):
    def replay(window, recorded):
        torch.manual_seed(5)
        return step._eager(window)

    return replay


def leaves_the_last_update_out(step):
    def replay(window, recorded):
        for number in range(max(1, window.updates - 1)):
            loss = step._eager(window.update(number))
        if window.updates == 1:
            for state in step._eager.optimizer.state.values():
                state["exp_avg"].zero_()
        return loss

    return replay


def draws_once_a_replay(step):
    def replay(window, recorded):
        state = torch.get_rng_state()
        for number in range(window.updates):
            torch.set_rng_state(state)
            loss = step._eager(window.update(number))
        return loss

    return replay


@pytest.mark.parametrize("replay_steps", [1, 8])
@pytest.mark.parametrize("fault", [reads_what_was_there, repeats_its_masks, leaves_the_last_update_out])
def test_replays_that_do_something_else_are_caught(fault, replay_steps, monkeypatch):
    monkeypatch.setattr(Pretended, "fault", property(fault))
    rig = training()
    found = Gate(rig, rig.plan).check(captured(rig.plan, replay_steps))
    assert not found.ok
    if fault is repeats_its_masks:
        assert "its randomness repeats" in found.why


def test_masks_that_are_drawn_once_for_all_updates_of_a_replay_are_caught(monkeypatch):
    """Without dropout such a replay is right, and from one to the next it draws anew."""
    monkeypatch.setattr(Pretended, "fault", property(draws_once_a_replay))
    rig = training(0.5)
    assert not Gate(rig, rig.plan).check(captured(rig.plan, 8)).ok


def test_a_plan_that_captures_nothing_is_refused_with_the_reason(monkeypatch):
    def gives_up(self, window):
        self.given_up = "the host draws"
        return self._eager(window)

    monkeypatch.setattr(Pretended, "__call__", gives_up)
    rig = training()
    found = Gate(rig, rig.plan).check(captured(rig.plan, 1))
    assert (found.ok, found.why) == (False, "nothing is captured, since the host draws")


def test_what_the_plan_in_force_has_recorded_is_still_there_afterwards():
    rig = training()
    own = rig.plan
    rig.use(captured(own, 4, layout="channels_last"))
    for _ in range(4):
        rig.step(next(rig.ahead))
    before, recorded = rig.warmup_steps, rig._step
    assert before
    assert Gate(rig, own).check(rig.plan).ok
    assert rig._step is recorded
    rig.step(next(rig.ahead))
    assert rig.warmup_steps == before
    assert list(rig._steps.values()) == [recorded]  # and nothing of the plans that were tried beside it
