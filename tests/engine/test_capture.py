"""Which windows a captured step records and replays, with graphs that a test makes up."""

import functools
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hotlap import Rig
from hotlap.engine.capture import captured_step as capture
from hotlap.engine.capture.captured_step import MOST_CONSTANTS, PATIENCE, CapturedStep, ReplayOutputs
from hotlap.engine.step import Window

CPU = torch.device("cpu")


class Replaying(CapturedStep):
    """Counts replays, of which a CPU makes none."""

    replays = 0

    def _replay(self, graph, window):
        self.replays += 1
        return torch.zeros(())


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setattr(capture, "StepGraph", lambda *given, **named: object())
    rig = Rig(nn.Linear(6, 1), functools.partial(torch.optim.SGD, lr=0.1), nn.MSELoss(), device="cpu")
    recorder = SimpleNamespace(aside=nullcontext)
    return Replaying(
        rig._step, device=CPU, recorder=recorder, outputs=ReplayOutputs(CPU), why_split=None, attention=nullcontext(),
        note=lambda why: None,
    )  # fmt: skip


def window(size):
    return Window([(torch.randn(size, 6), torch.randn(size, 1))], [size])


def test_capturing_goes_on_where_shapes_that_never_come_again_are_among_others(step):
    for number in range(2 * (PATIENCE + 10)):
        step(window(4 if number % 2 else 10 + number))
    assert step.given_up is None
    assert step.replays > PATIENCE


def test_a_parameter_of_the_optimizer_alone_that_moves_voids_recordings(monkeypatch):
    monkeypatch.setattr(capture, "StepGraph", lambda *given, **named: object())
    temperature = nn.Parameter(torch.ones(1))
    rig = Rig(nn.Linear(6, 1), lambda p: torch.optim.SGD([*p, temperature], lr=0.1), nn.MSELoss(), device="cpu")
    step = Replaying(
        rig._step, device=CPU, recorder=SimpleNamespace(aside=nullcontext), outputs=ReplayOutputs(CPU), why_split=None,
        attention=nullcontext(), note=lambda why: None,
    )  # fmt: skip
    for _ in range(6):
        step(window(4))
    assert (step.recorded, step.replays) == (1, 3)
    kept = temperature.data
    temperature.data = torch.zeros(1)
    step(window(4))
    assert (step.recorded, step.replays) == (0, 3)
    del kept


def test_it_is_given_up_where_no_shape_ever_comes_again(step):
    for number in range(PATIENCE + 10):
        step(window(10 + number))
    assert "no shape of batch comes again" in step.given_up
    assert step.replays == 0


class Waiting(nn.Linear):
    """A layer that copies from the host where it is watched for the first time, as all do that copy."""

    def forward(self, x):
        if self.waits:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return super().forward(x)


def test_the_constants_of_a_shape_are_learned_again_where_its_recording_is_gone(monkeypatch):
    recorded = []
    monkeypatch.setattr(capture, "StepGraph", lambda *given, **named: recorded.append(given[5]) or object())
    rig = Rig(Waiting(6, 1), functools.partial(torch.optim.SGD, lr=0.1), nn.MSELoss(), device="cpu")
    step = Replaying(
        rig._step, device=CPU, recorder=SimpleNamespace(aside=nullcontext), outputs=ReplayOutputs(CPU), why_split=None,
        attention=nullcontext(), note=lambda why: None,
    )  # fmt: skip
    for waits in (False, True, False, False, False, False):
        rig.model.waits = waits
        step(window(4))
    assert len(recorded) == 1
    for _ in range(3):
        for size in range(5, 5 + MOST_CONSTANTS):  # so many that recordings go, and then their constants
            step(window(size))
        step(window(4))
        assert len(step._constants) == MOST_CONSTANTS
    assert step.given_up is None
    assert len(recorded) > MOST_CONSTANTS
    assert all(isinstance(constants, capture.HostConstants) for constants in recorded)
    step.forget()
    assert not step._constants
