"""Which evaluations are recorded, with recordings that a test makes up."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hotlap.engine import evaluate
from hotlap.engine.evaluate import MOST_IN_VAIN, WORTH_IT, CapturedOutputs


class Model(nn.Linear):
    """Scales what it gives by a number that is not a weight."""

    scale = 1.0

    def forward(self, x):
        return super().forward(x) * self.scale


@pytest.fixture
def recorded(monkeypatch):
    """Shapes that were recorded. A replay computes nothing, so that it shows where one was made."""
    shapes = []

    def record(work):
        work()
        shapes.append(None)
        return SimpleNamespace(replay=lambda: None)

    recorder = SimpleNamespace(aside=nullcontext, record=record)
    monkeypatch.setattr(evaluate, "Recorder", lambda device: recorder)
    return shapes


def evaluating(model):
    return CapturedOutputs(lambda batch: (model(batch[0]), batch[1]), [model], [None], torch.device("cpu"))


@torch.no_grad()
def evaluated(way, size=4, batches=WORTH_IT + 2):
    for _ in range(batches):
        way((torch.randn(size, 6), torch.randn(size, 3)))


def test_a_model_that_changes_before_its_recordings_are_replayed_is_not_recorded_for_ever(recorded):
    model = Model(6, 3).eval()
    way = evaluating(model)
    for number in range(20):
        model.scale = float(number)
        evaluated(way, batches=WORTH_IT // 2)
    assert "changes from evaluation to evaluation" in way.given_up
    assert len(recorded) == MOST_IN_VAIN
    assert not way._graphs


def test_a_model_that_changes_now_and_then_is_recorded_anew_and_nothing_stale_is_held(recorded):
    model = Model(6, 3).eval()
    way = evaluating(model)
    for number in range(20):
        model.scale = float(number)
        evaluated(way, batches=3 * WORTH_IT)
        assert len(way._graphs) == 1
    assert way.given_up is None
    assert len(recorded) == 20


def test_each_shape_has_a_recording_of_its_own(recorded):
    way = evaluating(Model(6, 3).eval())
    for _ in range(2):
        for size in (4, 5):
            evaluated(way, size)
    assert len(recorded) == len(way._graphs) == 2
