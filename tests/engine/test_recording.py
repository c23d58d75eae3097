"""What a capture would get wrong is found by looking on, and named."""

import contextlib
import copy
import gc
import random
import signal
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hotlap.engine.capture import recording as watch_module
from hotlap.engine.capture.fingerprint import QuickCheck, StateCheck, fingerprint
from hotlap.engine.capture.recording import (
    NotRecordedError,
    Recorder,
    Watch,
    dropout_state_to_hold,
    drops_in_recurrence,
    intended_wait,
    unknown_leaf,
    why_recording_failed,
)

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


RANDOM, OF_NUMPY, OF_TORCH = random.Random(0), SimpleNamespace(rng=np.random.default_rng(0)), torch.Generator()


class DrawsFromGlobals(Quiet):
    def forward(self, x):
        return self.layer(x) * self.drawn()


class DrawsFromRandom(DrawsFromGlobals):
    def drawn(self):
        return RANDOM.random() < 0.9


class DrawsFromNumpy(DrawsFromGlobals):
    def drawn(self):
        return float(OF_NUMPY.rng.random() < 0.9)


class DrawsFromTorch(DrawsFromGlobals):
    def drawn(self):
        return torch.rand(1, generator=OF_TORCH).lt(0.9)


@pytest.mark.parametrize("kind", [DrawsFromRandom, DrawsFromNumpy, DrawsFromTorch])
def test_a_generator_that_a_module_reads_as_a_global_is_found(kind):
    """What it draws may be the same a few times, and a recording would keep it."""
    model = nn.Sequential(kind())
    with Watch([model], CPU) as watch:
        model(torch.zeros(2, 3))
    assert "the script changes its attribute" in watch.reason


def shifted_by_a_global(batch):
    return batch + (RANDOM.random() < 0.9)


def shifting_by_its_own():
    own = np.random.default_rng(0)
    return lambda batch: batch + float(own.random() < 0.9)


class Shifts:
    def __init__(self):
        self.own = torch.Generator()

    def __call__(self, batch):
        return batch + torch.rand(1, generator=self.own).lt(0.9)

    method = __call__


@pytest.mark.parametrize("function", [shifted_by_a_global, shifting_by_its_own(), Shifts(), Shifts().method])
def test_a_generator_that_a_function_of_the_users_draws_from_is_found(function):
    for draws in (False, True):
        with Watch([nn.Linear(2, 2)], CPU, [None, function, abs]) as watch:
            if draws:
                function(torch.zeros(2))
        assert (watch.reason is not None) is draws
    assert "the script changes its attribute" in watch.reason


FOUND = {
    KeepsItsState: "'last'",
    CountsInADict: "'stats'",
    FullQueue: "'recent'",
    RemembersTwice: "'last'",
    DrawsInPython: "DrawsInPython draws from the host's randomness (test_recording.py:",
    DrawsInNumpy: "DrawsInNumpy draws from the host's randomness (test_recording.py:",
    DrawsOnTheHost: "DrawsOnTheHost draws from the host's randomness (test_recording.py:",
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
    with watch, intended_wait():
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert watch.reason is None
    with watch:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    assert "test_recording.py" in watch.reason


def test_a_wait_in_what_hotlap_itself_does_names_no_line_of_whoever_called(monkeypatch):
    def of_hotlap():
        watch = Watch([Quiet()], CPU)
        with watch:
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return watch.reason

    code = of_hotlap.__code__.replace(co_filename=f"{watch_module._OWN[1]}/recipes/networks.py")
    monkeypatch.setattr(of_hotlap, "__code__", code)
    assert of_hotlap() == "a value is read back from the device"


def test_a_gradient_for_a_parameter_of_somebody_else_is_found():
    mine, theirs = nn.Linear(3, 3), nn.Linear(3, 1)
    loss = theirs(mine(torch.randn(4, 3))).mean()
    assert "(1, 3)" in unknown_leaf(loss, list(mine.parameters()))
    assert unknown_leaf(loss, [*mine.parameters(), *theirs.parameters()]) is None


class Config:
    def __init__(self):
        self.rate, self.rates = 0.1, np.ones(2)


def configured():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.ReLU())
    model.config, model.weights, model.mask, model.act = Config(), [1.0, 2.0], torch.ones(3), torch.relu
    model.anchors, model.rates, model.shares = [[1, 2], [3, 4]], list(range(200)), np.ones(3)
    model.warmth, model.steps = torch.tensor(0.5), torch.zeros(100)
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
    "list in a list": lambda m: m.anchors[1].__setitem__(0, 5),
    "late entry of a list": lambda m: m.rates.__setitem__(150, 0.5),
    "array": lambda m: m.shares.__setitem__(1, 0.5),
    "array in a configuration": lambda m: m.config.rates.__setitem__(1, 0.5),
    "number on the host": lambda m: m.warmth.fill_(0.1),
    "number on the host, unseen by torch": lambda m: m.warmth.data.fill_(0.1),
    "numbers on the host": lambda m: m.steps.add_(1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_fingerprint_changes_with_whatever_voids_a_capture(name):
    model = configured()
    before = fingerprint([model])
    kept = model[0].weight.data, model.mask  # so that a new place is another one
    CHANGES[name](model)
    assert fingerprint([model]) != before
    del kept


MASKS = 20
KEPT_IN = {
    "dict": dict,
    "ordered dict": OrderedDict,
    "list": lambda named: [*named.values()],
    "tuple": lambda named: (*named.values(),),
}


@pytest.mark.parametrize("change", ["another tensor", "another place"])
@pytest.mark.parametrize("kind", KEPT_IN)
def test_each_of_many_tensors_in_a_container_counts(kind, change):
    """Masks by layer, for example: a recording reads the memory of each."""
    model = nn.Linear(3, 3)
    model.masks = KEPT_IN[kind]({f"mask {number}": torch.ones(3) for number in range(MASKS)})
    last = MASKS - 1 if isinstance(model.masks, (list, tuple)) else f"mask {MASKS - 1}"
    before, glance, kept = fingerprint([model]), QuickCheck([model]), model.masks[last].data
    assert glance.still_holds()
    if change == "another place":
        model.masks[last].data = torch.zeros(3)
    elif kind == "tuple":
        model.masks = (*model.masks[:-1], torch.zeros(3))
    else:
        model.masks[last] = torch.zeros(3)
    assert not glance.still_holds()
    assert fingerprint([model]) != before
    del kept


def test_counts_and_names_in_a_container_are_left_alone():
    model = nn.Linear(3, 3)
    model.counts, model.names = OrderedDict(steps=1), {number: str(number) for number in range(MASKS)}
    before, glance = fingerprint([model]), QuickCheck([model])
    model.counts["steps"] = 2
    assert glance.still_holds()
    model.names[0] = "another"
    assert fingerprint([model]) == before


SEEN_AT_A_GLANCE = CHANGES | {
    "configuration that is another, and equal": lambda m: setattr(m, "config", Config()),
    "attribute of a configuration": lambda m: setattr(m.config, "more", 1),
    "first attribute of an object": lambda m: setattr(m.bare, "rate", 1),
    "list that is another, and equal": lambda m: setattr(m, "weights", list(m.weights)),
    "list that grew": lambda m: m.weights.append(3.0),
    "table": lambda m: m.table.update(rate=0.2),
    "tensor that is another, and equal": lambda m: setattr(m, "mask", m.mask.clone()),
    "place of a tensor": lambda m: setattr(m.mask, "data", m.mask.data.clone()),
    "new attribute": lambda m: setattr(m[1], "q", 0.5),
    "attribute that is gone": lambda m: delattr(m[1], "inplace"),
    "parameter in the same memory": lambda m: setattr(m[0], "bias", nn.Parameter(m[0].bias.detach())),
    "parameter for none": lambda m: setattr(m[0], "bias", None),
    "new parameter": lambda m: m[1].register_parameter("scale", nn.Parameter(torch.ones(1))),
    "table of parameters": lambda m: vars(m[0]).update(_parameters={"weight": m[0].weight}),
    "buffer": lambda m: setattr(m[3], "running_mean", torch.ones(3)),
    "place of a buffer": lambda m: setattr(m[3].running_mean, "data", torch.zeros(3)),
    "new buffer": lambda m: m[1].register_buffer("scale", torch.ones(1)),
    "new layer": lambda m: m.append(nn.ReLU()),
    "layer inside of a layer": lambda m: m[2].add_module("more", nn.ReLU()),
    "layer that is gone": lambda m: m.pop(2),
    "layer of another kind": lambda m: setattr(m[2], "__class__", nn.Tanh),
    "inside of a layer": lambda m: setattr(m[2], "__dict__", dict(vars(m[2]))),
    "table of hooks": lambda m: vars(m[0]).update(_forward_hooks={1: print}),
    "hook before": lambda m: m[0].register_forward_pre_hook(lambda *_: None),
    "hook of gradients": lambda m: m[0].register_full_backward_hook(lambda *_: None),
    "second hook of a parameter": lambda m: m[0].bias.register_hook(lambda g: g),
    "hook of a parameter that is gone": lambda m: m.handle.remove(),
}


def configured_in_full():
    model = configured().append(nn.BatchNorm1d(3))
    model.table, model.bare = {"rate": 0.1}, type("Bare", (), {})()
    model.handle = model[0].bias.register_hook(lambda g: g)
    return model


@pytest.mark.parametrize("name", SEEN_AT_A_GLANCE)
def test_a_glance_sees_whatever_voids_a_capture(name):
    model = configured_in_full()
    glance = QuickCheck([model])
    assert glance.still_holds()
    kept = model[0].weight.data, model.mask, model.mask.data, model[3].running_mean.data
    SEEN_AT_A_GLANCE[name](model)
    assert not glance.still_holds()
    assert QuickCheck([model]).still_holds()
    del kept


def test_a_glance_sees_one_number_in_the_place_of_another():
    model = nn.Linear(3, 1)
    model.scale = torch.ones(1)
    for name, other in (("scale", torch.ones(1)), ("bias", nn.Parameter(model.bias.detach().clone()))):
        glance = QuickCheck([model])
        setattr(model, name, other)
        assert not glance.still_holds()


def test_a_glance_does_not_trust_what_is_lazy():
    model = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    assert not QuickCheck([model]).still_holds()
    model(torch.ones(2, 4))
    assert QuickCheck([model]).still_holds()


def test_a_glance_sees_nothing_in_updates_and_evaluations():
    model = configured_in_full()
    model.nothing, model.sparse, model.shared = None, torch.eye(3).to_sparse(), model[0].weight
    model[1].weight = model[0].weight  # tied
    glance = QuickCheck([model, model[0]])
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.eval()
        model.train()
        model.load_state_dict(model.state_dict())
        assert glance.still_holds()


def stepped(**how):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    return optimizer


def first_state(optimizer):
    return next(iter(optimizer.state.values()))


IN_THE_STATE = {
    "tensor": lambda o: first_state(o).update(exp_avg=torch.ones(2, 3)),
    "place of a tensor": lambda o: setattr(first_state(o)["exp_avg"], "data", torch.ones(2, 3)),
    "more of a parameter": lambda o: first_state(o).update(more=torch.ones(1)),
    "less of a parameter": lambda o: first_state(o).pop("exp_avg"),
    "another parameter": lambda o: o.state.update({torch.ones(1): {"exp_avg": torch.ones(1)}}),
    "nothing of any": lambda o: o.state.clear(),
    "no table": lambda o: o.state.update({torch.ones(1): [torch.ones(1)]}),
    "all of it loaded": lambda o: o.load_state_dict(copy.deepcopy(o.state_dict())),
}


@pytest.mark.parametrize("name", IN_THE_STATE)
def test_a_glance_sees_whatever_changes_in_an_optimizers_state(name):
    optimizer = stepped()
    glance = StateCheck(optimizer)
    assert glance.still_holds()
    kept = [dict(part) for part in optimizer.state.values()], first_state(optimizer)["exp_avg"].data
    IN_THE_STATE[name](optimizer)
    assert not glance.still_holds()
    del kept


def test_a_glance_at_an_optimizers_state_sees_nothing_in_updates():
    optimizer = stepped()
    glance = StateCheck(optimizer)
    for _ in range(3):
        optimizer.step()
        assert glance.still_holds()


def test_a_glance_does_not_trust_a_state_that_is_nested():
    optimizer = stepped()
    first_state(optimizer)["history"] = [torch.ones(2)]
    assert not StateCheck(optimizer).still_holds()


def test_a_glance_holds_nothing_of_an_optimizers_state():
    optimizer = stepped()
    gone = weakref.ref(first_state(optimizer)["exp_avg"])
    glance = StateCheck(optimizer)
    optimizer.state.clear()
    gc.collect()
    assert gone() is None
    assert not glance.still_holds()


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


RATE, LABELS, WEIGHTS, BY_CLASS = 0.1, "loss", torch.ones(3), {"a": torch.ones(3)}


def loss_of_globals(model, batch):
    return (RATE * WEIGHTS * BY_CLASS["a"] * batch.LABELS).sum()


class LossOfGlobals:
    def __call__(self, model, batch):
        return loss_of_globals(model, batch), RATE, WEIGHTS, [BY_CLASS for _ in batch]

    def method(self, model, batch):
        return RATE, WEIGHTS, BY_CLASS


@pytest.mark.parametrize("function", [loss_of_globals, LossOfGlobals(), LossOfGlobals().method])
def test_numbers_and_tensors_that_a_function_reads_from_its_module_count(function, monkeypatch):
    before = fingerprint([], [function])
    monkeypatch.setitem(globals(), "LABELS", "another")  # the name of an attribute
    assert fingerprint([], [function]) == before
    for name, value in {"RATE": 0.2, "WEIGHTS": torch.zeros(3), "BY_CLASS": {"a": torch.zeros(3)}}.items():
        with monkeypatch.context() as patched:
            patched.setitem(globals(), name, value)
            assert fingerprint([], [function]) != before
    assert fingerprint([], [function]) == before


BY_HEAD, BY_LAYER, ANCHORS, SHARES = [0.1, 0.2], {"first": 1.0, "all": None}, [[1, 2], [3, 4]], np.ones(3)
LEAST = np.float32(0.5)
SETTINGS = SimpleNamespace(train=SimpleNamespace(shift=0.5, unread=1), unread=1)


def scaled(x):
    return x * RATE


def decorated(function):
    def wrapped(*given):
        return function(*given)

    return wrapped


class LayerOfGlobals(nn.Linear):
    @property
    def masks(self):
        return BY_CLASS["a"]

    @decorated
    def helped(self, x):
        return scaled(x) * self.masks

    def forward(self, x):
        more = torch.tensor(ANCHORS).sum() * float(SHARES[0]) * float(LEAST)
        return self.helped(super().forward(x)) * WEIGHTS * BY_HEAD[0] + SETTINGS.train.shift + BY_LAYER["first"] + more

    def unused(self):
        return LABELS


@pytest.mark.parametrize("name", ["RATE", "WEIGHTS", "BY_CLASS", "LEAST", "SHARES"])
def test_numbers_and_tensors_that_the_code_of_a_layer_reads_as_globals_count(name, monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), LayerOfGlobals(3, 3))
    before, check = fingerprint([model]), QuickCheck([model])
    assert check.still_holds()
    monkeypatch.setitem(globals(), "LABELS", "another")
    monkeypatch.setattr(SETTINGS, "unread", 2)
    monkeypatch.setattr(SETTINGS.train, "unread", 2)
    assert check.still_holds()
    assert fingerprint([model]) == before
    with monkeypatch.context() as patched:
        patched.setattr(SETTINGS.train, "shift", 1.5)
        assert not check.still_holds()
        assert fingerprint([model]) != before
    others = {"RATE": 0.2, "WEIGHTS": torch.zeros(3), "BY_CLASS": {"a": torch.zeros(3)}, "LEAST": np.float32(0.1)}
    with monkeypatch.context() as patched:
        patched.setitem(globals(), name, others.get(name, np.zeros(3)))
        assert not check.still_holds()
        assert fingerprint([model]) != before
    assert check.still_holds()
    with monkeypatch.context() as patched:
        patched.setitem(BY_CLASS, "a", torch.zeros(3))
        assert not check.still_holds()
        assert fingerprint([model]) != before
    for held, where in ((BY_HEAD, 1), (BY_LAYER, "first"), (ANCHORS[1], 0), (SHARES, 2), (WEIGHTS, 1)):
        was = float(held[where])
        held[where] = 0.25
        changed = not check.still_holds() and fingerprint([model]) != before
        held[where] = was
        assert changed
        before, check = fingerprint([model]), QuickCheck([model])  # torch counts writes to WEIGHTS
    monkeypatch.setitem(globals(), "RATE", float("0.1"))  # an equal number
    assert check.still_holds()


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
    assert told.startswith("operation not permitted (test_recording.py:")


# --- dropout of recurrent layers ---------------------------------------------------------------------

GPU = torch.device("cuda")


def dropping(rate=0.5):
    return nn.LSTM(3, 3, num_layers=2, dropout=rate)


def dropped_by_cudnn(state):
    """The output of cuDNN's recurrent layer without its numbers, as autograd records it on every machine."""
    layer, x, h = dropping().to("meta"), torch.zeros(1, 1, 3, device="meta"), torch.zeros(2, 1, 3, device="meta")
    return torch._cudnn_rnn(x, [*layer.parameters()], 4, None, h, h, 2, 3, 0, 2, False, 0.5, True, False, [], state)[0]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_recording_of_recurrent_layers_holds_the_state_of_their_dropout(monkeypatch, mode):
    state = torch.zeros(8, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(watch_module, "_dropped_once", lambda _: dropped_by_cudnn(state))
    with mode(), torch.autograd.graph.saved_tensors_hooks(torch.empty_like, torch.empty_like):
        held = dropout_state_to_hold([dropping()], GPU)
    assert held.untyped_storage()._cdata == state.untyped_storage()._cdata
    assert dropout_state_to_hold([dropping(0.0)], GPU) is None
    assert dropout_state_to_hold([dropping()], CPU) is None


def test_what_shows_the_state_of_dropout_does_not_stay_in_memory(monkeypatch):
    outputs = []

    def dropped(_):
        output = dropped_by_cudnn(torch.zeros(8, dtype=torch.uint8, device="meta"))
        outputs.append(weakref.ref(output))
        return output

    monkeypatch.setattr(watch_module, "_dropped_once", dropped)
    assert dropout_state_to_hold([dropping()], GPU) is not None
    gc.collect()
    assert [output() for output in outputs] == [None]


def test_recurrent_layers_that_hide_the_state_of_their_dropout_are_not_recorded(monkeypatch):
    monkeypatch.setattr(watch_module, "_dropped_once", lambda _: torch.ones(1, requires_grad=True) * 2)
    with pytest.raises(NotRecordedError, match="cuDNN"):
        dropout_state_to_hold([dropping()], GPU)
    with torch.backends.cudnn.flags(enabled=False):
        assert dropout_state_to_hold([dropping()], GPU) is None  # torch's own kernels drop as other layers do


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_layers_drop_in_cudnns_way_in_training_only_and_scripted_too():
    scripted = torch.jit.script(nn.Sequential(dropping()))
    for model in (nn.Sequential(dropping()), scripted):
        assert drops_in_recurrence([model], GPU)
        assert not drops_in_recurrence([model], CPU)
        assert not drops_in_recurrence([model.eval()], GPU)
    assert not drops_in_recurrence([nn.Sequential(dropping(0.0), nn.Dropout(0.5))], GPU)


@pytest.fixture
def happened(monkeypatch):
    """What happens as a `Recorder` records, without a GPU."""
    happened = []

    class Graph:
        def capture_begin(self, **_):
            happened.append("begin")

        def capture_end(self):
            happened.append("end")

    def put_back(state):
        happened.append("put back")

    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=put_back)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("graph_pool_handle", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(watch_module, "end_allocate_to_pool", lambda *_: None)
    monkeypatch.setattr(watch_module, "_recording_stream", lambda _: None)
    monkeypatch.setattr(Recorder, "aside", lambda _: contextlib.nullcontext())
    return happened


def test_a_recording_takes_no_weights_that_autocast_has_cast_before(happened, monkeypatch):
    monkeypatch.setattr(torch, "clear_autocast_cache", lambda: happened.append("clear"))
    Recorder(torch.device("cpu", 0)).record(lambda: happened.append("work"))
    assert happened == ["clear", "begin", "work", "end", "clear"]


@pytest.mark.parametrize("error", [NotRecordedError("a constant differs"), KeyError("x"), RuntimeError("no")], ids=str)
def test_whatever_ends_a_recording_it_is_ended_in_full(error, happened):
    def fails():
        raise error

    with pytest.raises(NotRecordedError) as seen:
        Recorder(torch.device("cpu", 0)).record(fails)
    assert happened == ["begin", "end", "put back"]
    assert (seen.value is error) is isinstance(error, NotRecordedError)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="alarms need POSIX")
def test_a_recording_that_hangs_is_ended_in_full(happened):
    lock = threading.Lock()

    def hangs():
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= watch_module.MOST_S
        signal.setitimer(signal.ITIMER_REAL, 1e-3, 2.0)  # again, in case the first comes just before the wait
        with lock, lock:
            pass

    with pytest.raises(NotRecordedError, match="recording it took longer than 2 min 0 s"):
        Recorder(torch.device("cpu", 0)).record(hangs)
    assert happened == ["begin", "end", "put back"]
    assert not lock.locked()
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


PINNED = {
    "to": lambda held: held.to("meta", non_blocking=True),
    "like another": lambda held: held.to(torch.ones(3, device="meta"), non_blocking=True),
    "copy_": lambda held: torch.empty(3, device="meta").copy_(held, non_blocking=True),
    "copy_ by name": lambda held: torch.empty(3, device="meta").copy_(other=held),
    "back": lambda held: held.copy_(FROM_THERE),
}


class FromThere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    device = torch.device("cuda")


FROM_THERE = torch.ones(3).as_subclass(FromThere)


@pytest.mark.parametrize("way", PINNED)
def test_a_recording_copies_nothing_from_pinned_memory(way, happened, monkeypatch):
    """Its replays would read that memory again, in which other things lie by then."""
    before = dict(vars(torch.Tensor))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.device.type == "cpu")
    with pytest.raises(NotRecordedError, match="pinned memory"):
        Recorder(torch.device("cpu", 0)).record(lambda: PINNED[way](torch.ones(3)))
    monkeypatch.undo()
    assert dict(vars(torch.Tensor)) == before


def test_a_recording_leaves_copies_on_one_device_and_those_of_other_threads_alone(happened, monkeypatch):
    """A loader sends pinned batches meanwhile."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor.device.type == "cpu")
    sent = []

    def work():
        sent.append(torch.ones(3).to(torch.float64))
        thread = threading.Thread(target=lambda: sent.append(torch.ones(3).to("meta")))
        thread.start()
        thread.join()

    Recorder(torch.device("cpu", 0)).record(work)
    assert [one.device.type for one in sent] == ["cpu", "meta"]
