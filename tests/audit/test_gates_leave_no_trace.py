"""Gates leave no trace: whatever a step can change is put back, or nothing is judged."""

import random
import weakref
from collections import Counter, deque

import numpy as np
import pytest
import torch
from plain import class_data, parameters_of, small_mlp
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hotlap import Rig
from hotlap.engine.optimizers import why_not_fused
from hotlap.engine.scaling import skips_on_device
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.update.capture import step_without_hooks
from hotlap.script.update.updates import _set_aside, why_fused_differs
from hotlap.tuner.gates import Gate

SEEN: list[int] = []
STEPS = 0


class Box:
    def __init__(self):
        self.count, self.list = 0, [0]


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Remembering(nn.Module):
    shared = 0

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.list, self.dict, self.set, self.deque, self.counter = [0], {"n": 0}, {0}, deque([0], maxlen=9), Counter()
        self.tensor, self.array = torch.zeros(2), np.zeros(2)
        self.rng, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.box, self.nested, self.slotted = Box(), {"boxes": [Box()]}, Slotted()
        self.last = None

    def forward(self, x):
        global STEPS
        STEPS += 1
        SEEN.append(STEPS)
        type(self).shared += 1
        self.calls += 1
        self.list.append(self.calls)
        self.dict["n"] += 1
        self.dict[self.calls] = [self.calls]
        self.set.add(self.calls)
        self.deque.append(self.calls)
        self.counter["calls"] += 1
        self.tensor += 1
        self.tensor.data.mul_(2)
        self.array += 1
        self.box.count += 1
        self.box.list.append(1)
        self.nested["boxes"][0].count += 1
        self.slotted.count += 1
        self.last = x.detach().mean()
        self.new = self.calls
        drawn = self.rng.random() + self.numpy.random() + float(torch.rand((), generator=self.torch))
        return x * (1 + 1e-3 * drawn)

    def told(self):
        generators = (self.rng.getstate(), repr(self.numpy.bit_generator.state), self.torch.get_state().tolist())
        boxes = (vars(self.box).copy(), list(self.box.list), vars(self.nested["boxes"][0]).copy(), self.slotted.count)
        plain = (self.calls, list(self.list), dict(self.dict), set(self.set), list(self.deque), dict(self.counter))
        held = (self.tensor.tolist(), self.array.tolist(), self.last, hasattr(self, "new"))
        return generators, boxes, plain, held, type(self).shared, list(SEEN), STEPS


class Counting(torch.optim.Adam):
    """Adam with counters wherever one may keep them."""

    def __init__(self, parameters, **settings):
        super().__init__(parameters, **settings)
        self.made, self.log, self.scale = 0, [], torch.ones(())
        for group in self.param_groups:
            group["turns"], group["history"] = 0, {"turns": [0]}

    def step(self, closure=None):
        self.made += 1
        self.log.append(self.made)
        self.scale.mul_(0.9)
        for group in self.param_groups:
            group["turns"] += 1
            group["history"]["turns"].append(group["turns"])
        made = super().step(closure)
        for state in self.state.values():
            state.setdefault("own", {"n": [0]})["n"][0] += 1
        return made

    def told(self):
        groups = [(group["turns"], list(group["history"]["turns"])) for group in self.param_groups]
        states = [state["own"]["n"][0] for state in self.state.values()]
        return self.made, list(self.log), float(self.scale), groups, states


def rig_for(layer, *, loss=None, optimizer=Counting):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3)).double()
    rig = Rig(model, optimizer(model.parameters(), lr=0.01), loss or nn.CrossEntropyLoss(), device="cpu")
    windows = rig.feed(class_data(80), batch_size=8, epochs=3)
    for _ in range(3):
        rig.step(next(windows))
    return rig, windows


def test_a_gate_puts_back_all_that_modules_and_optimizer_remember():
    layer = Remembering()
    rig, _ = rig_for(layer)
    before, weights = (layer.told(), rig.optimizer.told()), parameters_of(rig.model).clone()
    Gate(rig, rig.plan).check(rig.plan.but(micro_batch=4))
    assert (layer.told(), rig.optimizer.told()) == before
    assert torch.equal(parameters_of(rig.model), weights)


def test_training_goes_on_after_a_gate_as_if_there_had_been_none():
    def trained(judged):
        globals()["STEPS"], Remembering.shared = 0, 0
        SEEN.clear()
        rig, windows = rig_for(Remembering())
        if judged:
            Gate(rig, rig.plan).check(rig.plan.but(micro_batch=4))
        for window in windows:
            rig.step(window)
        return parameters_of(rig.model), rig.model[1].told(), rig.optimizer.told()

    (weights, told, made), (judged_weights, judged_told, judged_made) = trained(False), trained(True)
    assert torch.equal(weights, judged_weights)
    assert (told, made) == (judged_told, judged_made)


def test_a_gate_puts_back_what_a_loss_function_closes_over_and_what_hooks_keep():
    seen, count, kept = [], 0, []

    def loss(model, batch):
        nonlocal count
        count += 1
        seen.append(count)
        loss.calls = count
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    rig, _ = rig_for(nn.Tanh(), loss=loss)
    rig.model[1].register_forward_hook(lambda *given: kept.append(1))
    before = (list(seen), count, loss.calls, len(kept))
    Gate(rig, rig.plan).check(rig.plan.but(micro_batch=4))
    assert (list(seen), count, loss.calls, len(kept)) == before


def test_a_gate_puts_back_what_hooks_of_all_modules_keep():
    rig, _ = rig_for(nn.Tanh())
    kept, count = [], Counter()
    hooks = [
        register_module_forward_pre_hook(lambda module, _: count.update([type(module)])),
        register_module_forward_hook(lambda *given: kept.append(1)),
    ]
    try:
        Gate(rig, rig.plan).check(rig.plan.but(micro_batch=4))
        with ModuleState(rig.model, rig.device):
            rig.model(torch.randn(4, 5, dtype=next(rig.model.parameters()).dtype))
            assert kept
            assert count
    finally:
        for hook in hooks:
            hook.remove()
    assert not kept
    assert not count


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = (1.0 / n for n in range(1, 10_000))

    def forward(self, x):
        return x * next(self.rates)


def test_nothing_is_judged_where_something_could_not_be_put_back():
    rig, _ = rig_for(Drawing())
    found = Gate(rig, rig.plan).check(rig.plan.but(micro_batch=4))
    assert not found.ok
    assert found.why == "model.1.rates is a generator, whose place cannot be put back"
    assert next(rig.model[1].rates) == 1.0 / 4


def test_what_a_weak_reference_leads_to_is_held_elsewhere():
    alive, gone = Drawing(), Drawing()
    model = small_mlp()
    model.others = [weakref.proxy(alive), weakref.proxy(gone)]
    del gone
    assert ModuleState(model, torch.device("cpu")).unknown == []


def test_the_trainer_that_a_model_of_lightning_holds_is_left_alone(tmp_path):
    class Trainer:
        """Leads to files, as a progress bar does."""

        __module__ = "lightning.pytorch.trainer.trainer"

    model, trainer = small_mlp(), Trainer()
    with (tmp_path / "log").open("w") as file:
        trainer.log, trainer.losses = file, [1.0]
        model._trainer = trainer
        state = ModuleState(model, torch.device("cpu"))
        assert state.unknown == []
        with state:
            trainer.losses.append(2.0)
    assert trainer.losses == [1.0, 2.0]


@pytest.mark.parametrize("fused", [False, True])
def test_a_trial_of_a_scripts_update_puts_back_what_the_optimizer_counts(fused):
    model = small_mlp()
    optimizer = Counting(model.parameters(), lr=0.01, fused=fused)
    x, y = class_data(8)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    before, weights = optimizer.told(), parameters_of(model).clone()
    with _set_aside(optimizer):
        for _ in range(4):
            step_without_hooks(optimizer)
    assert optimizer.told() == before
    assert torch.equal(parameters_of(model), weights)


MADE = [0]


class Noisy(torch.optim.SGD):
    """Adds noise to its gradients, and counts the steps of all its kind."""

    made = 0

    def step(self, closure=None):
        MADE[0] += 1
        Noisy.made += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.randn_like(parameter), alpha=1e-3 * np.random.rand() * random.random())
        return super().step(closure)


@pytest.mark.parametrize(
    "look", [why_not_fused, why_fused_differs, skips_on_device], ids=["twins for fused", "trials", "twins that skip"]
)
def test_looks_at_an_optimizer_leave_globals_class_attributes_and_generators_alone(look):
    layer = nn.Linear(4, 2)
    optimizer = Noisy(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    before = MADE[0], Noisy.made, torch.get_rng_state(), np.random.get_state()[1:3], random.getstate()

    look(optimizer)

    after = MADE[0], Noisy.made, torch.get_rng_state(), np.random.get_state()[1:3], random.getstate()
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
    assert np.array_equal(before[3][0], after[3][0])
    assert before[3][1] == after[3][1]
    assert before[4] == after[4]
