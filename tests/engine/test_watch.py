"""What a capture would get wrong is found by looking on, and named."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from hotlap.engine.watch import Watch, fingerprint, why_recording_failed

CPU = torch.device("cpu")


class Quiet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0
        self.last = None
        self.seen = []

    def forward(self, x):
        return self.layer(x)


class DrawsInPython(Quiet):
    def forward(self, x):
        return self.layer(x) * random.random()


class DrawsInNumpy(Quiet):
    def forward(self, x):
        return self.layer(x) * float(np.random.rand())


class DrawsOnTheHost(Quiet):
    def forward(self, x):
        return self.layer(x) + torch.rand(2)


class Counts(Quiet):
    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Remembers(Quiet):
    def forward(self, x):
        self.last = self.layer(x)
        return self.last


class Lists(Quiet):
    def forward(self, x):
        self.seen.append(len(x))
        return self.layer(x)


FOUND = {
    DrawsInPython: "DrawsInPython draws from the host's randomness (test_watch.py:",
    DrawsInNumpy: "DrawsInNumpy draws from the host's randomness (test_watch.py:",
    DrawsOnTheHost: "DrawsOnTheHost draws from the host's randomness (test_watch.py:",
    Counts: "'calls'",
    Remembers: "'last'",
    Lists: "'seen'",
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_cannot_be_replayed_is_named(kind):
    model = nn.Sequential(nn.Linear(3, 3), kind())
    with Watch([model], CPU) as watch:
        model(torch.zeros(2, 3))
    assert FOUND[kind] in watch.reason


def test_the_innermost_module_that_draws_is_named():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = DrawsInPython()

        def forward(self, x):
            return self.inner(x)

    model = Outer()
    with Watch([model], CPU) as watch:
        model(torch.zeros(2, 3))
    assert watch.reason.startswith("DrawsInPython")


def test_a_draw_outside_every_module_is_seen_too():
    with Watch([Quiet()], CPU) as watch:
        random.random()
    assert "the loss, or a function on batches" in watch.reason


@pytest.mark.parametrize("model", [Quiet(), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))])
def test_a_model_without_such_habits_gives_no_reason_and_is_left_as_it_was(model):
    before, hooks = torch.get_rng_state(), len(torch.nn.modules.module._global_forward_hooks)
    with Watch([model], CPU) as watch:
        model(torch.zeros(2, 3)).sum().backward()
    assert watch.reason is None
    assert torch.equal(before, torch.get_rng_state())
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks


def test_an_error_inside_passes_through_and_leaves_no_hook_behind():
    with pytest.raises(ZeroDivisionError), Watch([Quiet()], CPU):
        raise ZeroDivisionError
    assert not torch.nn.modules.module._global_forward_hooks


CHANGES = {
    "mode": lambda m: m[1].eval(),
    "dropout rate": lambda m: setattr(m[1], "p", 0.7),
    "flag": lambda m: m[0].weight.requires_grad_(False),
    "layer": lambda m: m.__setitem__(2, nn.Tanh()),
    "place of a parameter": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fingerprint_changes_with_whatever_voids_a_capture(name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU())
    before = fingerprint([model])
    kept = model[0].weight.data  # so that a new place is another one
    CHANGES[name](model)
    assert fingerprint([model]) != before
    del kept


def test_a_fingerprint_stays_the_same_over_updates_and_evaluations():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    before = fingerprint([model])
    model(torch.randn(4, 3)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    model.train()
    assert fingerprint([model]) == before


def test_an_error_while_recording_is_told_with_the_users_line():
    def users():
        raise RuntimeError("operation not permitted\nand much more")

    try:
        users()
    except RuntimeError as error:
        told = why_recording_failed(error)
    assert told.startswith("operation not permitted (test_watch.py:")
