"""What a capture would get wrong is found by looking on, and named."""

import random
import warnings
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn

from hotlap.engine.fingerprint import fingerprint
from hotlap.engine.watch import Watch, meant, stranger_in, why_recording_failed

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


class KeepsItsState(Quiet):
    def forward(self, x):
        y = self.layer(x)
        self.last = (y.detach(), y.detach())
        return y


class CountsInADict(Quiet):
    def __init__(self):
        super().__init__()
        self.stats = {"calls": 0}

    def forward(self, x):
        self.stats["calls"] += 1
        return self.layer(x)


class FullQueue(Quiet):
    def __init__(self):
        super().__init__()
        self.recent = deque([1.0, 2.0], maxlen=2)

    def forward(self, x):
        self.recent.append(float(len(self.recent)))
        return self.layer(x)


class OwnGenerator(Quiet):
    def __init__(self, generator, draw):
        super().__init__()
        self.noise, self._draw = generator, draw

    def forward(self, x):
        return self.layer(x) * float(self._draw(self.noise))


class RemembersTwice(Quiet):
    """The second tensor may well take the place of the first one in memory."""

    def forward(self, x):
        for _ in range(2):
            self.last = self.layer(x).detach().mean()
        return self.layer(x)


GENERATORS = {
    "random": lambda: OwnGenerator(random.Random(0), lambda g: g.random()),
    "numpy": lambda: OwnGenerator(np.random.default_rng(0), lambda g: g.random()),
    "torch": lambda: OwnGenerator(torch.Generator(), lambda g: torch.rand(1, generator=g)),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_that_a_module_keeps_for_itself_is_found(name):
    model = nn.Sequential(GENERATORS[name]())
    with Watch([model], CPU) as watch:
        model(torch.zeros(2, 3))
    assert "'noise'" in watch.reason


FOUND = {
    KeepsItsState: "'last'",
    CountsInADict: "'stats'",
    FullQueue: "'recent'",
    RemembersTwice: "'last'",
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


def test_a_wait_that_is_meant_is_no_reason():
    watch = Watch([Quiet()], CPU)
    with watch, meant():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert watch.reason is None
    with watch:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert "test_watch.py" in watch.reason


def test_a_gradient_for_a_parameter_of_somebody_else_is_found():
    mine, theirs = nn.Linear(3, 3), nn.Linear(3, 1)
    loss = theirs(mine(torch.randn(4, 3))).mean()
    assert "(1, 3)" in stranger_in(loss, list(mine.parameters()))
    assert stranger_in(loss, [*mine.parameters(), *theirs.parameters()]) is None


class Config:
    def __init__(self):
        self.rate = 0.1


def configured():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU())
    model.config, model.weights, model.mask, model.act = Config(), [1.0, 2.0], torch.ones(3), torch.relu
    return model


CHANGES = {
    "configuration": lambda m: setattr(m.config, "rate", 0.2),
    "list": lambda m: m.weights.__setitem__(0, 3.0),
    "tensor": lambda m: setattr(m, "mask", torch.zeros(3)),
    "function": lambda m: setattr(m, "act", torch.tanh),
    "hook of a parameter": lambda m: m[0].weight.register_hook(lambda g: g),
    "mode": lambda m: m[1].eval(),
    "dropout rate": lambda m: setattr(m[1], "p", 0.7),
    "flag": lambda m: m[0].weight.requires_grad_(False),
    "layer": lambda m: m.__setitem__(2, nn.Tanh()),
    "place of a parameter": lambda m: setattr(m[0].weight, "data", m[0].weight.data.clone()),
    "hook": lambda m: m[0].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fingerprint_changes_with_whatever_voids_a_capture(name):
    model = configured()
    before = fingerprint([model])
    kept = model[0].weight.data, model.mask  # so that a new place is another one
    CHANGES[name](model)
    assert fingerprint([model]) != before
    del kept


def test_what_a_function_of_the_users_own_holds_is_part_of_it():
    beta = 0.1

    def loss(model, batch):
        return beta

    class Annealed:
        def __init__(self):
            self.beta = 0.1

        def __call__(self, model, batch):
            return self.beta

    other = Annealed()
    before = fingerprint([], [loss, other, None])
    beta = 0.2
    changed = fingerprint([], [loss, other, None])
    assert changed != before
    other.beta = 0.2
    assert fingerprint([], [loss, other, None]) != changed


def test_tensors_without_a_place_in_memory_are_told_apart_by_themselves():
    model = nn.LazyLinear(3)
    model.register_buffer("adjacency", torch.eye(3).to_sparse())
    assert fingerprint([model]) == fingerprint([model])


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
