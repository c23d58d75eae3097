"""Calls of a script's modules under plans: to the script they look like its own, but for rounding."""

import copy
import functools
import gc
import random
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import calling
import numpy as np
import pytest
import torch
from calling import (
    CAPTURED,
    CPU,
    OWN,
    FakeRecorder,
    OfPythonAndNumpy,
    assert_equal_states,
    batches,
    giving_transformers_output,
    gradients,
    net,
    state_of,
)
from torch import nn

from hotlap.core.errors import PlanError
from hotlap.core.plan import Execution, Numerics, Plan
from hotlap.engine.capture.fingerprint import fingerprint
from hotlap.engine.capture.recording import NotRecordedError
from hotlap.script.calls import call as call_module
from hotlap.script.calls import eager, graphs
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.capture import MOST_SLOTS
from hotlap.script.calls.eager import leave_broken_passes, switch_in_backward
from hotlap.script.calls.module_state import GeneratorState
from hotlap.tuner.moment import without_dropout

BF16 = Numerics(precision="bf16"), Execution()
FP16 = Numerics(precision="fp16"), Execution()
LAST = Numerics(layout="channels_last"), Execution()


@pytest.fixture(autouse=True)
def dropout_draws_from_the_device(monkeypatch):
    """As it does on a GPU; here the device's generator is the host's."""
    monkeypatch.setattr("hotlap.engine.capture.recording.HostRandomness", OfPythonAndNumpy)


class Scripted(calling.Scripted):
    def __init__(self, module, plan=OWN, **settings):
        super().__init__(module, plan, **settings)

    @property
    def replays(self):
        return sum(g.replays for r in self.recorders for g in r.graphs if g.work.__name__ == "_make_outputs")


def train(model, module, data, *, lr=0.05, set_to_none=True, accumulate=1):
    """A plain loop; its losses."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    losses = []
    for number, (x, y) in enumerate(data):
        loss = nn.functional.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
    return losses


# --- precision --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple
    name: str = "result"


class Output(dict):
    """As transformers' ModelOutput: a mapping whose entries are attributes too."""

    def __init__(self, **entries):
        super().__init__(entries)
        self.__dict__.update(entries)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __copy__(self):
        return Output(**self)


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kind = kind

    def forward(self, x, *, scale=1.0, mask=None):
        hidden = self.first(x) * scale
        logits = self.last(hidden if mask is None else hidden * mask)
        return {
            "tuple": lambda: (logits, [hidden, {"both": (hidden, 3)}]),
            "named": lambda: Pair(logits, hidden),
            "dataclass": lambda: Result(logits, (hidden, hidden)),
            "output": lambda: Output(logits=logits, hidden=(hidden,), count=torch.tensor(2)),
        }[self.kind]()


@pytest.mark.parametrize("kind", ["tuple", "named", "dataclass", "output", "transformers"])
@pytest.mark.parametrize("plan", [BF16, CAPTURED, (BF16[0], CAPTURED[1])])
def test_outputs_come_in_the_dtypes_and_containers_of_the_scripts_own(kind, plan):
    module = giving_transformers_output(Nested, "output") if kind == "transformers" else Nested(kind)
    model, x = Scripted(module), torch.randn(4, 6)
    theirs = model(x)
    model.call.use(*plan)
    for _ in range(6):
        mine = model(x)
        first = mine[0] if isinstance(mine, tuple) else mine.logits
        first.sum().backward()
    assert model.call.given_up is None
    assert model.replays == (3 if plan[1].mode == "captured" else 0)
    loose = {"rtol": 1e-2, "atol": 3e-2} if plan[0].precision == "bf16" else {}
    assert type(mine) is type(theirs)
    if kind == "tuple":
        torch.testing.assert_close(mine, theirs, **loose)
        assert mine[1][0] is mine[1][1]["both"][0]  # as in the script's own
    elif kind == "named":
        torch.testing.assert_close(tuple(mine), tuple(theirs), **loose)
    elif kind == "dataclass":
        torch.testing.assert_close((mine.logits, mine.hidden), (theirs.logits, theirs.hidden), **loose)
        assert mine.name == "result"
    else:
        torch.testing.assert_close(dict(mine), dict(theirs), **loose)
        assert mine.logits is mine["logits"]


def test_gradients_in_bf16_are_near_those_of_fp32_and_in_the_parameters_dtype():
    mine, theirs = net(), net()
    model = Scripted(mine, BF16)
    (x, y), *_ = batches(1, size=64)
    for run, module in ((model, mine), (theirs, theirs)):
        for _ in range(2):  # the first call shows in which dtype the script's own gives back
            module.zero_grad()
            out = run(x)
            nn.functional.cross_entropy(out, y).backward()
    assert out.dtype is torch.float32
    assert model.call.warmup_steps == 1
    made, truth = (torch.cat([g.flatten() for g in gradients(m).values()]) for m in (mine, theirs))
    assert made.dtype is torch.float32
    assert not torch.equal(made, truth)
    assert torch.cosine_similarity(made, truth, dim=0) > 0.999


def test_a_module_that_gives_bf16_by_itself_still_does():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x).bfloat16()

    model = Scripted(Halved(), BF16)
    assert [model(torch.randn(4, 6)).dtype for _ in range(3)] == [torch.bfloat16] * 3


def test_keyword_arguments_reach_the_module():
    module = Nested("tuple")
    model, x, mask = Scripted(module, BF16), torch.randn(4, 6), torch.rand(4, 8)
    for _ in range(3):
        out = model(x, scale=2.0, mask=mask)[0]
    torch.testing.assert_close(out, module(x, scale=2.0, mask=mask)[0], rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("plan", [BF16, CAPTURED])
def test_evaluation_and_calls_without_gradients_are_the_scripts_own_to_the_bit(plan):
    module = net()
    model = Scripted(module, plan)
    train(model, module, batches(6))
    x = torch.randn(5, 6)
    replays = model.replays
    with torch.no_grad():
        twin = copy.deepcopy(module)
        assert torch.equal(model(x), twin(x))
        assert_equal_states(module.state_dict(), twin.state_dict())
    module.eval()
    assert torch.equal(model(x), module(x))
    assert model.replays == replays


def test_an_autocast_of_the_scripts_own_is_left_alone():
    module = net()
    model = Scripted(module)
    assert model.call.supports(*BF16) is None
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(4, 6))
    assert "autocast itself" in model.call.supports(*BF16)
    assert model.call.supports(*CAPTURED) is None


def test_an_autocast_that_comes_later_is_left_alone_too():
    module = net()
    model, x = Scripted(module, BF16), torch.randn(4, 6)
    model(x)
    assert model(x).dtype is torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype is torch.bfloat16


def test_hooks_are_fine_with_another_precision_and_not_with_capture():
    module, seen = net(), []
    module[0].register_forward_hook(lambda *_: seen.append(1))
    model = Scripted(module, BF16)
    train(model, module, batches(3))
    assert len(seen) == 3
    assert "Linear has hooks of the script" in model.call.supports(*CAPTURED)


def in_fp16(monkeypatch):
    absent = SimpleNamespace(support="absent", reason="")
    monkeypatch.setattr(eager.machine, "dtype_fact", lambda *_: absent)
    monkeypatch.setattr(eager, "why_not_precision", lambda *_: None)


def test_fp16_is_only_for_where_bf16_is_not(monkeypatch):
    call = ModuleCall(net(), device=CPU)
    if eager.machine.dtype_fact(CPU, "bf16").support is eager.machine.Support.HARDWARE:
        assert "supports bf16" in call.supports(*FP16)
    in_fp16(monkeypatch)
    assert call.supports(*FP16) is None


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_fp16_scales_inside_and_gives_true_gradients(monkeypatch, mode, size):
    """Also those that fp16 by itself would lose, and where the scale that is tried first makes them overflow."""
    in_fp16(monkeypatch)
    mine, theirs = net(), net()
    model = Scripted(mine, (FP16[0], Execution(mode=mode)))
    (x, _), *_ = batches(1, size=32)
    weights = torch.randn(32, 3) * size
    for run, module in ((model, mine), (theirs, theirs)):
        for _ in range(8):
            module.zero_grad()
            given = x.clone().requires_grad_()
            (run(given) * weights).sum().backward()
        made = torch.cat([given.grad.flatten(), *(g.flatten() for g in gradients(module).values())])
        if run is model:
            kept = made
    assert model.call.given_up is None
    assert bool(model.replays) == (mode == "captured")
    assert not torch.equal(kept, made)
    torch.testing.assert_close(kept, made, rtol=2e-2, atol=2e-2 * size)


def test_fp16_is_given_up_where_gradients_come_by_another_way_than_the_outputs(monkeypatch):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.penalty = nn.Linear(6, 3), None

        def forward(self, x):
            out = self.layer(x)
            self.penalty = out.pow(2).mean()
            return out

    in_fp16(monkeypatch)
    module = Keeps()
    model = Scripted(module, FP16)
    for _ in range(4):
        (model(torch.randn(4, 6)).sum() + module.penalty).backward()
    assert "'penalty'" in model.call.given_up


# --- switches in backward ---------------------------------------------------------------------------


class Told:
    """Switches that tell when they are on."""

    def __init__(self):
        self.on = 0

    def __enter__(self):
        self.on += 1

    def __exit__(self, *_):
        self.on -= 1


class Notes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None


def test_switches_are_on_from_the_outputs_of_a_call_to_the_end_of_the_pass():
    first, second, seen = Told(), Told(), []
    note = functools.partial(lambda where: seen.append((where, first.on, second.on)))
    x = Notes.apply(torch.ones(2, requires_grad=True), functools.partial(note, "inside"))
    switch_in_backward([x * 2], second)
    out = x * 2
    switch_in_backward([out], first)
    between = Notes.apply(out * 3, functools.partial(note, "after"))
    switch_in_backward([between], second)
    Notes.apply(between, functools.partial(note, "loss")).sum().backward()
    assert seen == [("loss", 0, 0), ("after", 0, 1), ("inside", 1, 1)]
    assert (first.on, second.on) == (0, 0)


def test_switches_that_a_broken_pass_left_on_go_off():
    def breaks():
        raise ValueError("on purpose")

    told = Told()
    out = Notes.apply(torch.ones(2, requires_grad=True), breaks) * 2
    switch_in_backward([out], told)
    with pytest.raises(ValueError, match="on purpose"):
        out.sum().backward()
    leave_broken_passes()
    assert told.on == 0
    assert not eager._entered


# --- layout -----------------------------------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self, *, views=False):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 4, 3), nn.Linear(4 * 36, 3)
        self.views = views

    def forward(self, x):
        features = self.second(torch.relu(self.norm(self.first(x))))
        flat = features.view(len(x), -1) if self.views else features.flatten(1)
        return self.head(flat), features


def images(size=4):
    return torch.randn(size, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


def stepped(model, optimizer, steps):
    for _ in range(steps):
        logits, features = model(images())
        optimizer.zero_grad()
        (logits.logsumexp(1).mean() + features.view(-1).mean()).backward()
        optimizer.step()


def test_channels_last_is_the_same_to_rounding_and_leaves_weights_as_they_lie():
    mine, theirs = Cnn(), Cnn()
    optimizers = [adam(mine), adam(theirs)]
    model = Scripted(mine)
    for _ in range(2):
        stepped(model, optimizers[0], 1)
        stepped(theirs, optimizers[1], 1)
    before, strides = state_of(mine), {name: t.stride() for name, t in mine.state_dict().items()}
    places = [p.data_ptr() for p in mine.parameters()]
    seen = []
    mine.first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.call.use(*LAST)
    assert_equal_states(mine.state_dict(), before)
    stepped(model, optimizers[0], 3)
    stepped(theirs, optimizers[1], 3)
    assert all(x.is_contiguous(memory_format=torch.channels_last) for x in seen)
    assert len(seen) == 3
    state = optimizers[0].state[mine.first.weight]["exp_avg"]
    # What a script may do with gradients: put them flat one behind the other.
    assert torch.cat([p.grad.view(-1) for p in mine.parameters()]).isfinite().all()
    assert state.is_contiguous()
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    assert all(out.is_contiguous() for out in model(images()))
    mine.eval()
    assert all(out.is_contiguous() for out in model(images()))
    after = state_of(mine)
    model.call.use(*OWN)
    assert_equal_states(mine.state_dict(), after)
    assert {name: t.stride() for name, t in mine.state_dict().items()} == strides
    assert [p.data_ptr() for p in mine.parameters()] == places


def test_a_module_that_cannot_be_laid_out_so_goes_on_as_the_script_has_it():
    mine, theirs = Cnn(views=True), Cnn(views=True)
    optimizers = [adam(mine), adam(theirs)]
    model = Scripted(mine, LAST)
    stepped(model, optimizers[0], 3)
    stepped(theirs, optimizers[1], 3)
    assert "view" in model.call.given_up
    assert model.call.supports(*LAST) == model.call.given_up
    assert mine.first.weight.is_contiguous()
    assert_equal_states(mine.state_dict(), theirs.state_dict())


def test_a_mistake_of_the_scripts_own_stays_its_own():
    model = Scripted(net(), BF16)
    model(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(4, 7))
    assert model.call.given_up is None
    assert model(torch.randn(4, 6)).dtype is torch.float32


# --- capture ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("set_to_none", "accumulate"), [(True, 1), (False, 1), (True, 3), (False, 2)])
def test_a_captured_loop_gives_what_the_plain_one_does(precision, set_to_none, accumulate):
    how = {"set_to_none": set_to_none, "accumulate": accumulate}
    mine, theirs = net(), net()
    model = Scripted(mine, (Numerics(precision=precision), Execution(mode="captured")))
    eager = Scripted(theirs, (Numerics(precision=precision), Execution()))
    losses = train(model, mine, batches(12), **how)
    assert losses == train(eager, theirs, batches(12), **how)
    assert model.replays >= 8
    assert_equal_states(mine.state_dict(), theirs.state_dict())


def test_dropout_draws_what_it_would_have_drawn_and_goes_on_drawing():
    mine, theirs = net(0.5), net(0.5)
    model = Scripted(mine, CAPTURED)
    torch.manual_seed(5)
    losses = train(model, mine, batches(12))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert losses == train(theirs, theirs, batches(12))
    assert torch.equal(drawn, torch.rand(1))
    assert model.replays >= 8


def warmed(module=None, plan=CAPTURED, calls=4):
    """A model that replays, with gradients as its last call has left them."""
    module = module or net()
    model = Scripted(module, plan)
    for x, _ in batches(calls):
        module.zero_grad()
        model(x).sum().backward()
    assert model.replays > 0
    return model


def test_kept_outputs_and_gradients_stay_what_they_were():
    model = warmed()
    kept = []
    for x, _ in batches(4, seed=2):
        model.module.zero_grad()
        out = model(x)
        out.pow(2).sum().backward()
        kept.append((out, out.clone(), model.module[0].weight.grad, model.module[0].weight.grad.clone()))
    for out, out_then, grad, grad_then in kept:
        assert torch.equal(out, out_then)
        assert torch.equal(grad, grad_then)
    assert len({grad.data_ptr() for *_, grad, _ in kept}) == 4


def test_gradients_become_the_parameters_own_without_a_copy(monkeypatch):
    """As long as the script lets go of them, each pass leaves them where the last one did."""
    model = warmed()
    places = {p.grad.data_ptr() for p in model.module.parameters()}
    monkeypatch.setattr(graphs, "foreach_mul", None)
    for x, _ in batches(4, seed=2):
        model.module.zero_grad()
        model(x).sum().backward()
        assert {p.grad.data_ptr() for p in model.module.parameters()} == places
        assert all(p.grad.stride() == p.stride() for p in model.module.parameters())


@pytest.mark.parametrize("every", [1, 3])
def test_a_script_that_holds_on_to_its_gradients_gets_copies_and_soon_no_loans(every):
    model, own = warmed(), net()
    own.load_state_dict(state_of(model.module))
    own.train()
    places = {p.grad.data_ptr() for p in model.module.parameters()}
    kept = []
    for number, (x, _) in enumerate(batches(30, seed=2)):
        model.module.zero_grad()
        own.zero_grad()
        model(x).pow(2).sum().backward()
        own(x).pow(2).sum().backward()
        assert_equal_states(gradients(model.module), gradients(own))
        if number % every == 0:
            kept.append((model.module[0].weight.grad, own[0].weight.grad))
    assert all(torch.equal(mine, theirs) for mine, theirs in kept)
    assert places.isdisjoint(p.grad.data_ptr() for p in model.module.parameters())


def test_gradients_that_are_changed_in_place_are_the_scripts_own():
    model, own = warmed(), net()
    own.load_state_dict(state_of(model.module))
    for x, _ in batches(4, seed=2):
        for module, made in ((model.module, model(x)), (own, own(x))):
            module.zero_grad()
            made.pow(2).sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            module[0].bias.grad.zero_()
        assert_equal_states(gradients(model.module), gradients(own))
        assert all(p.grad._version < 8 for p in model.module.parameters())


def test_parameters_that_are_not_used_or_frozen_keep_no_gradient():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(x) + self.frozen(x)

    model = warmed(Part())
    assert set(gradients(model.module)) == {"used.weight", "used.bias"}


def test_inputs_get_their_gradients_also_where_one_is_given_twice():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x, y=None):
            return self.layer(x) + (2 * y).sum()

    module = Adds()
    model = Scripted(module, CAPTURED)
    for _ in range(6):
        x = torch.randn(8, 6)
        source = x.clone().requires_grad_()
        given = source * 1
        model(given, y=given).sum().backward()
        truth = x.clone().requires_grad_()
        module(truth, y=truth).sum().backward()
        torch.testing.assert_close(source.grad, truth.grad)
    assert model.replays == 3


def test_batch_norms_move_once_a_call():
    mine, theirs = net(), net()
    model = Scripted(mine, CAPTURED)
    for x, _ in batches(9):
        model(x).sum().backward()
        theirs(x).sum().backward()
    assert mine[1].num_batches_tracked == 9
    assert_equal_states(mine.state_dict(), theirs.state_dict())


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x).view(-1)


def gan(critic, maker, modules, steps=8, *, waiting=2):
    """Both networks, with one backward pass for several calls of the critic; its losses."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in modules]
    generator, losses = torch.Generator().manual_seed(4), []
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        fake = maker(torch.randn(8, 4, generator=generator))
        real = [torch.randn(8, 6, generator=generator) for _ in range(waiting - 1)]
        loss = sum(critic(x).mean() for x in (fake.detach(), *real))
        loss.backward()
        optimizers[0].step()
        judged = -critic(fake).mean()
        judged.backward()
        optimizers[1].step()
        losses += [loss.item(), judged.item()]
    return losses


@pytest.mark.parametrize("waiting", [1, 2, 3, 4])
def test_several_calls_before_one_backward_pass_are_right(waiting):
    def pair():
        torch.manual_seed(2)
        return Critic(), nn.Linear(4, 6)

    mine, theirs = pair(), pair()
    models = [Scripted(module, CAPTURED) for module in mine]
    losses = gan(*models, mine, waiting=waiting)
    assert losses == gan(*theirs, theirs, waiting=waiting)
    for module, twin in zip(mine, theirs, strict=True):
        assert_equal_states(module.state_dict(), twin.state_dict())
    assert models[0].replays > 8
    assert models[1].replays > 0
    assert len(models[0].recorders) == min(waiting, MOST_SLOTS)


def test_outputs_that_are_never_differentiated_do_not_stand_in_the_way():
    model = warmed()
    x = torch.randn(8, 6)
    held = [model(x) for _ in range(4)]
    replays = model.replays
    del held
    for _ in range(3):
        model(x).sum().backward()
    assert model.replays == replays + 3


def test_a_graph_that_is_kept_by_habit_is_differentiated_twice():
    module = net()
    model = Scripted(module, CAPTURED)
    for x, _ in batches(8):
        module.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward(retain_graph=True)
    once = gradients(module)
    loss.backward()
    assert model.replays >= 4
    assert model.call.given_up is None
    for name, grad in gradients(module).items():
        torch.testing.assert_close(grad, 2 * once[name])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_outputs_differentiated_one_by_one_are_never_captured():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.first(x), self.second(x)

    module = Two()
    model = Scripted(module, CAPTURED)
    for x, _ in batches(6):
        first, second = model(x)
        first.sum().backward()
        second.sum().backward()
    assert model.replays == 0
    assert "more than once" in model.call.given_up


def penalty(model, x, *, enabled=True):
    """As of a critic whose gradients are to be of length one."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=enabled)
    return (slope.norm(dim=1) - 1).pow(2).mean()


def test_gradients_that_are_differentiated_themselves_are_never_captured():
    mine, theirs = Critic(), Critic()
    model = Scripted(mine, CAPTURED)
    for x, _ in batches(6):
        for run in (model, theirs):
            penalty(run, x).backward()
    assert model.replays == 0
    assert "differentiated themselves" in model.call.given_up
    for name, grad in gradients(theirs).items():
        torch.testing.assert_close(gradients(mine)[name], grad)


@pytest.mark.parametrize("surprise", ["create_graph", "retain_graph", "other outputs"])
def test_what_the_script_does_for_the_first_time_after_a_recording_is_right(surprise):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.trunk, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
            self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 2)

        def forward(self, x):
            hidden = self.drop(self.norm(torch.tanh(self.trunk(x))))
            return self.first(hidden), self.second(hidden)

    def steps(run, module):
        torch.manual_seed(6)
        for number, (x, _) in enumerate(batches(8)):
            x.requires_grad_()
            module.zero_grad()
            first, second = run(x)
            if number < 6 or number == 7:
                first.pow(2).sum().backward()
            elif surprise == "create_graph":
                (slope,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
                slope.norm().backward()
            elif surprise == "retain_graph":
                first.pow(2).sum().backward(retain_graph=True)
                second.pow(2).sum().backward()
            else:
                second.pow(2).sum().backward()
        return torch.rand(1)

    mine, theirs = Heads(), Heads()
    model = Scripted(mine, CAPTURED)
    drawn = steps(model, mine)
    assert torch.equal(drawn, steps(theirs, theirs))
    assert model.replays == 4
    assert_equal_states(mine.state_dict(), theirs.state_dict())
    torch.testing.assert_close(gradients(mine), gradients(theirs))


def test_surprise_after_surprise_ends_the_capture():
    mine, theirs = Lstm(), Lstm()
    model, x = Scripted(mine, CAPTURED), torch.randn(4, 5, 6)
    for number in range(30):
        for run in (model, theirs):
            out, (hidden, _) = run(x)
            (hidden if number % 6 == 5 else out).sum().backward()
        torch.testing.assert_close(gradients(mine), gradients(theirs))
    assert 0 < model.replays < 20
    assert "keeps changing how it uses the outputs" in model.call.given_up


def test_shapes_values_flags_and_modes_are_recorded_apart():
    class Repeats(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.drop = nn.Linear(6, 3), nn.Dropout(0.0)

        def forward(self, x, times=1, named=None):
            out = self.drop(self.layer(x)) * times
            return out if named is None else out + named["bias"]

    module = Repeats()
    model, x, bias = Scripted(module, CAPTURED), torch.randn(8, 6), torch.randn(3)
    kinds = [
        ((x,), {}),
        ((x[:4],), {}),
        ((x,), {"times": 2}),
        ((x,), {"times": 2.0}),
        ((x, 1), {}),
        ((x,), {"named": {"bias": bias}}),
        ((torch.randn(6, 8).t(),), {}),
        ((x.clone().requires_grad_(),), {}),
    ]
    for _ in range(5):
        for args, kwargs in kinds:
            out = model(*args, **kwargs)
            torch.testing.assert_close(out, module(*args, **kwargs))
            out.sum().backward()
    assert model.replays == 2 * len(kinds)
    assert model.call.warmup_steps == 4 * len(kinds)


def test_more_shapes_than_there_is_place_for_run_eagerly(monkeypatch):
    monkeypatch.setattr("hotlap.script.calls.capture.MOST_GRAPHS", 3)
    monkeypatch.setattr("hotlap.script.calls.capture.PATIENCE", 10)
    module = nn.Linear(6, 3)
    model = Scripted(module, CAPTURED)

    def called(sizes, times):
        for _ in range(times):
            for size in sizes:
                model(torch.randn(size, 6)).sum().backward()

    called([1, 2, 3, 4, 5], 5)
    way = model.call._way
    assert way.recorded == 3
    assert model.replays == 3 * 2
    firsts = model.call.warmup_steps
    called([4, 5], 2)
    assert model.call.warmup_steps == firsts  # nothing more is to come of them
    called([4], 12)  # the others were not used for long
    assert model.replays > 3 * 2


def test_arguments_that_never_come_again_end_no_capture_while_others_do():
    model = Scripted(nn.Linear(6, 3), CAPTURED)
    for number in range(420):
        model(torch.randn(4 if number % 2 else 10 + number, 6)).sum().backward()
    assert model.call.given_up is None
    assert model.replays > 200


def test_arguments_that_are_always_new_end_the_capture():
    module = Nested("tuple")
    model = Scripted(module, CAPTURED)
    for number in range(210):
        model(torch.randn(2, 6), scale=float(number))[0].sum().backward()
    assert "keep changing" in model.call.given_up


@pytest.mark.parametrize(
    "meddle",
    [
        lambda m: m[1].eval(),
        lambda m: m[0].weight.requires_grad_(False),
        lambda m: setattr(m[3], "p", 0.7),
        lambda m: m.__setitem__(2, nn.ReLU()),
        lambda m: setattr(m[4], "weight", nn.Parameter(m[4].weight.detach() * 2)),
        lambda m: setattr(m[4], "weight", nn.Parameter(m[4].weight.detach())),
        lambda m: setattr(m[4].weight, "data", m[4].weight.data.clone() + 1),
        lambda m: m.load_state_dict({name: tensor + 1 for name, tensor in m.state_dict().items()}),
        lambda m: m[0].register_forward_hook(lambda *a: a[2] * 2),
        lambda m: m[4].register_full_backward_pre_hook(lambda _, grads: (grads[0] * 2,)),
        lambda m: m[0].weight.register_hook(lambda grad: grad * 2),
        lambda m: setattr(m[1], "running_mean", torch.ones(16)),
        lambda m: setattr(m[1].running_mean, "data", torch.ones(16)),
        lambda m: setattr(m[1], "momentum", 0.5),
        lambda m: m.append(nn.Tanh()),
        lambda m: m[4].__dict__.update(_parameters={"weight": m[4].weight, "bias": None}),
    ],
)
def test_what_changes_in_the_module_takes_effect(meddle):
    mine, theirs = net(0.2), net(0.2)
    model = Scripted(mine, CAPTURED)
    for run, module in ((model, mine), (theirs, theirs)):
        torch.manual_seed(8)
        for number, (x, _) in enumerate(batches(12)):
            if number == 6:
                meddle(module)
            module.zero_grad()
            out = run(x)
            out.sum().backward()
    torch.testing.assert_close(gradients(mine), gradients(theirs))
    assert_equal_states(mine.state_dict(), theirs.state_dict())
    assert model.replays >= 2


def test_a_replay_is_spared_the_fingerprint_of_a_module_that_nobody_touched(monkeypatch):
    module, asked = net(), []
    module.sizes = [6, 16]
    model = warmed(module)

    def noted(modules):
        asked.append(modules)
        return fingerprint(modules)

    monkeypatch.setattr("hotlap.script.calls.capture.fingerprint", noted)
    for x, _ in batches(3):
        model(x).sum().backward()
        module.eval()
        model(x)
        module.train()
    assert not asked
    module.sizes = [6, 16]  # another, and equal
    replays = model.replays
    for x, _ in batches(2):
        model(x).sum().backward()
    assert len(asked) == 1
    assert model.replays == replays + 2


class CallCounter(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("plan", [BF16, CAPTURED], ids=["bf16", "captured"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_of_the_scripts_that_fails_changes_the_module_once(plan, by_name):
    module = CallCounter(6, 3)
    model = Scripted(module, plan)
    for number in range(6):
        before = module.calls
        with pytest.raises(RuntimeError):
            model(x=torch.randn(5, 2)) if by_name else model(torch.randn(5, 2))
        assert module.calls == before + 1
        if plan is not CAPTURED:  # what counts its calls is not recorded
            (model(x=torch.randn(5, 6)) if by_name else model(torch.randn(5, 6))).sum().backward()
            assert module.calls == before + 2, number
        else:
            (model(x=torch.randn(5, 6)) if by_name else model(torch.randn(5, 6))).sum().backward()


class Seeded:
    """A generator as a GPU's is: a seed, and how far it has drawn."""

    def __init__(self):
        self.seed, self.offset, self.twin = 7, 100, None

    def graphsafe_get_state(self):
        self.twin = Seeded()
        return self.twin

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def set_offset(self, offset):
        self.offset = offset


def test_a_place_in_the_randomness_of_a_device_is_two_numbers_set_by_a_twin():
    generator = Seeded()
    drawn = GeneratorState(generator)
    generator.seed, generator.offset = 3, 8
    drawn.put_back()
    assert (generator.twin.seed, generator.twin.offset) == (7, 100)
    assert (generator.seed, generator.offset) == (3, 8)


def test_nothing_recorded_outlives_its_plan_though_the_script_keeps_outputs():
    class Recorded:
        def replay(self): ...

    class OfNoWork(FakeRecorder):
        def record(self, work):
            work()
            return Recorded()

    module = Nested("tuple")
    call = ModuleCall(module, device=CPU, make_recorder=OfNoWork)
    call.use(*CAPTURED)
    own = functools.partial(nn.Module.__call__, module)
    kept = []
    for _ in range(6):
        kept.append(call(own, (torch.randn(4, 6),), {}))
        kept[-1][0].sum().backward()
    graphs = [weakref.ref(graph) for graph in call._way._recordings.graphs.values()]
    assert [len(graph().outputs) for graph in graphs] == [2]  # also where one of them is given back twice
    gc.disable()
    try:
        call.use(*OWN)
        call.forget()
        assert [graph() for graph in graphs] == [None]
    finally:
        gc.enable()


def test_hooks_on_parameters_run_as_ever():
    def grow(parameter):
        parameter.grad.mul_(5)

    def hooked(module):
        module[0].weight.register_hook(lambda grad: grad * 3)
        module[4].bias.register_post_accumulate_grad_hook(grow)
        return module

    mine, theirs = hooked(net()), hooked(net())
    model = Scripted(mine, CAPTURED)
    assert train(model, mine, batches(8)) == train(theirs, theirs, batches(8))
    assert model.replays >= 4
    assert_equal_states(mine.state_dict(), theirs.state_dict())


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x, state=None):
        out, state = self.lstm(x, state)
        return self.head(out[:, -1]), state


def test_a_recurrent_module_carries_its_state_and_trains_its_own_weights():
    def run(model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        state, losses = None, []
        for x, y in [(torch.randn(4, 5, 6, generator=g), torch.tensor([0, 1, 2, 0])) for g in [rng] * 10]:
            out, state = model(x, state)
            state = tuple(part.detach() for part in state)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    mine, theirs = Lstm(), Lstm()
    model = Scripted(mine, CAPTURED)
    rng = torch.Generator().manual_seed(1)
    losses = run(model, mine)
    rng = torch.Generator().manual_seed(1)
    assert losses == run(theirs, theirs)
    assert model.replays == 6
    assert mine.lstm._flat_weights[0] is mine.lstm.weight_ih_l0


class Unfit(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls, self.other = nn.Linear(6, 3), 0, [nn.Linear(6, 3)]
        self.free = torch.ones(3, requires_grad=True)


class Counts(Unfit):
    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Draws(Unfit):
    def forward(self, x):
        return self.layer(x) * random.random()


class Overwrites(Unfit):
    def forward(self, x):
        return self.layer(x.mul_(2))


class Empties(Unfit):
    def forward(self, x):
        return self.layer(x)


class Hides(Unfit):
    def forward(self, x):
        return self.other[0](x) + self.layer(x)


class Loose(Unfit):
    def forward(self, x):
        return self.layer(x) + self.free


class Objects(Unfit):
    def forward(self, x):
        return self.layer(x), SimpleNamespace(hidden=x)


class Changes(Unfit):
    def __init__(self):
        super().__init__()
        self.wide = nn.Embedding(4, 3, sparse=True)

    def forward(self, x):
        return self.layer(x) + self.wide(torch.zeros(8, dtype=torch.long))


UNFIT = {
    Counts: "'calls'",
    Draws: "draws from the host's randomness",
    Overwrites: "changes its arguments in place",
    Hides: "a gradient goes to a parameter of shape (3,",
    Loose: "a gradient goes to a tensor of shape (3,)",
    Objects: "its outputs hold a SimpleNamespace",
    Changes: "sparse gradients",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_captured_is_given_up_with_the_reason_and_runs_as_ever(kind):
    def run(model, module):
        random.seed(3)
        total = []
        for x, _ in batches(8):
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            total.append(x.sum().item())
        found = gradients(module) | {"other": module.other[0].weight.grad, "free": module.free.grad}
        return {name: g.to_dense() for name, g in found.items() if g is not None}, total, random.random()

    torch.manual_seed(0)
    mine = kind()
    theirs = copy.deepcopy(mine)
    model = Scripted(mine, CAPTURED)
    made, truth = run(model, mine), run(theirs, theirs)
    torch.testing.assert_close(made[0], truth[0])
    assert made[1:] == truth[1:]
    assert mine.calls == theirs.calls
    assert model.replays == 0
    assert UNFIT[kind] in model.call.given_up


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((torch.randn(4, 6), SimpleNamespace()), "more than tensors and plain values"),
        ((torch.randn(4, 6), torch.ones(2, device="meta")), "lies on meta"),
        (
            (torch.randn(4, 6), torch.ones(2).to_sparse()),
            "a tensor is sparse coo: how many entries it holds may change",
        ),
        ((torch.randn(4, 6), torch.nn.utils.rnn.pack_sequence([torch.ones(2)])), "more than tensors and plain"),
    ],
)
def test_arguments_that_a_replay_cannot_read_end_the_capture(args, reason):
    class Ignores(nn.Linear):
        def forward(self, x, _):
            return super().forward(x)

    model = Scripted(Ignores(6, 3), CAPTURED)
    model(*args).sum().backward()
    assert reason in model.call.given_up


def test_a_recording_that_fails_leaves_everything_as_it_was(monkeypatch):
    def refuses(self, work):
        work()
        raise NotRecordedError("on purpose")

    mine, theirs = net(0.5), net(0.5)
    monkeypatch.setattr(FakeRecorder, "record", refuses)
    model = Scripted(mine, CAPTURED)
    torch.manual_seed(2)
    losses = train(model, mine, batches(8))
    torch.manual_seed(2)
    assert losses == train(theirs, theirs, batches(8))
    assert model.call.given_up == "it cannot be recorded: on purpose"
    assert_equal_states(mine.state_dict(), theirs.state_dict())


def test_a_capture_in_the_scripts_own_autocast_gives_its_dtypes():
    mine, theirs = net(), net()
    model = Scripted(mine, CAPTURED)
    for x, y in batches(8):
        outs = []
        for run in (model, theirs):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = run(x)
                loss = nn.functional.cross_entropy(out, y)
            loss.backward()
            outs.append(out)
        assert outs[0].dtype is outs[1].dtype is torch.bfloat16
    assert model.replays == 5
    for name, grad in gradients(theirs).items():
        torch.testing.assert_close(gradients(mine)[name], grad)


def test_plans_can_be_changed_to_and_fro_and_captures_stay():
    mine, theirs = net(), net()
    model = Scripted(mine)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.05) for module in (mine, theirs)]
    plans = [CAPTURED] * 5 + [OWN, CAPTURED, OWN, CAPTURED]
    for plan, (x, y) in zip(plans, batches(len(plans)), strict=True):
        model.call.use(*plan)
        firsts = model.call.warmup_steps
        for run, optimizer in zip((model, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(run(x), y).backward()
            optimizer.step()
    assert model.call.warmup_steps == firsts == 4
    assert model.replays == 4
    assert_equal_states(mine.state_dict(), theirs.state_dict())
    model.call.forget()
    assert model.call._way.recorded == 0


# --- what is supported ------------------------------------------------------------------------------


def test_a_capture_needs_a_gpu():
    assert "needs a GPU" in ModuleCall(net(), device=CPU).supports(*CAPTURED)


def test_where_processes_train_together_calls_stay_as_they_are(monkeypatch):
    """Each would try plans by itself: one could wait in a forward pass that the others do not make."""
    call = ModuleCall(net(), device=CPU, make_recorder=FakeRecorder)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    for plan in (BF16, CAPTURED):
        assert "several processes train together" in call.supports(*plan)
    assert call.supports(*OWN) is None
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert call.supports(*CAPTURED) is None


def with_a_buffer_elsewhere():
    """A number on the host, which the GPU's kernels take as it is when they are recorded."""
    module = net()
    module.register_buffer("momentum", torch.zeros((), device="meta"))
    return module


@pytest.mark.parametrize(
    ("make", "plan", "reason"),
    [
        (lambda: nn.DataParallel(net()), CAPTURED, "DataParallel"),
        (lambda: torch.jit.trace(nn.Linear(6, 3), torch.randn(2, 6)), BF16, "is scripted"),
        (lambda: torch.compile(net(), backend="eager"), BF16, "is compiled"),
        (lambda: nn.Sequential(torch.compile(net(), backend="eager")), CAPTURED, "is compiled"),
        (lambda: net().double(), BF16, "the weights are float64"),
        (lambda: net(), (Numerics(precision="tf32"), Execution()), "tf32"),
        (lambda: net(), LAST, "channels_last is for convolutions"),
        (lambda: net(), (Numerics(), Execution(mode="captured", replay_steps=4)), "one by one"),
        (lambda: net().to("meta"), CAPTURED, "not all of its weights and buffers are on cpu"),
        (lambda: with_a_buffer_elsewhere(), CAPTURED, "not all of its weights and buffers are on cpu"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_what_cannot_be_done_is_refused_in_one_line(make, plan, reason):
    call = ModuleCall(make(), device=CPU, make_recorder=FakeRecorder)
    assert reason in call.supports(*plan)
    assert "\n" not in call.supports(*plan)
    assert call.supports(*OWN) is None
    with pytest.raises(PlanError):
        call.use(*plan)


@pytest.mark.parametrize("plan", [BF16, CAPTURED])
@pytest.mark.parametrize("writes", [False, True])
def test_where_a_script_was_seen_to_write_to_shared_memory_calls_stay_as_they_are(plan, writes):
    """In another precision each output is a copy."""
    model = Scripted(OfOneMemory("output"))
    for x, _ in batches(3):
        first, second, _ = model(x)
        if writes:
            first.mul_(3)
        second.sum().backward()
        del first, second
    reason = model.call.supports(*plan)
    assert reason is None or "in place that share memory" in reason
    assert (reason is not None) is writes


def test_on_another_stream_than_the_first_replay_a_call_is_eager(monkeypatch):
    """Its arguments would overwrite those that the other stream has still to read."""
    here, told = ["one"], []
    monkeypatch.setattr("hotlap.script.calls.capture.current_stream", lambda _: here[0])
    loss_replay = SimpleNamespace(called=lambda: told.append(here[0]), replay_returned=lambda *_: None)
    model, replays = Scripted(net(), CAPTURED, loss_replay=loss_replay), []
    for here[0], (x, _) in zip([*["one"] * 5, "other", "one"], batches(7), strict=True):
        model(x).sum().backward()
        replays.append(model.replays)
    assert replays[-1] == replays[-2] + 1 == replays[-3] + 1
    assert told == [*["one"] * 5, "other", "one"]


class OfOneMemory(nn.Module):
    """Its first output is in the memory of another tensor, the last one in its own."""

    def __init__(self, shared_with):
        super().__init__()
        self.scale, self.shared_with, self.kept = nn.Parameter(torch.ones(6)), shared_with, None

    def forward(self, x):
        made = x + self.scale
        if self.shared_with == "attribute":
            self.kept, made = made, made[:, :4]
        first = x if self.shared_with == "argument" else made
        return first, first[:, 0] if self.shared_with == "output" else x.sum(1), x + 2 * self.scale


@pytest.mark.parametrize("uses_other", [False, True])
@pytest.mark.parametrize("shared_with", ["output", "argument", "attribute"])
def test_a_write_to_an_output_takes_along_what_shares_its_memory(shared_with, uses_other):
    def trained(module, call):
        found = []
        for x, _ in batches(8):
            module.zero_grad()
            x = x.clone().requires_grad_()
            given = x * 1.0
            first, second, other = call(given)
            first.mul_(3)
            loss = second.pow(2).sum() + given.pow(3).sum() + (other.sum() if uses_other else 0.0)
            if module.kept is not None:
                loss = loss + module.kept.pow(2).sum()
            loss.backward()
            found.append((loss.detach(), x.grad, *gradients(module).values()))
        return found

    plain, module = OfOneMemory(shared_with), OfOneMemory(shared_with)
    model = Scripted(module, CAPTURED)
    torch.testing.assert_close(trained(module, model), trained(plain, plain))
    assert model.replays == 0
    if uses_other and shared_with != "attribute":
        assert "in place that share memory" in model.call.given_up


def test_under_another_default_dtype_a_call_is_recorded_anew():
    """What the call makes has that dtype."""

    class Shifted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.full((3,), 0.5)

    model, theirs = warmed(Shifted(6, 3)), Shifted(6, 3)
    x, before, replays = torch.randn(8, 6), torch.get_default_dtype(), model.replays
    try:
        torch.set_default_dtype(torch.float64)
        assert model(x).dtype == theirs(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert model(x).dtype == torch.float32
    assert model.replays == replays + 1


def test_under_a_transform_of_torchs_a_call_is_the_scripts_own():
    module = nn.Linear(6, 3)
    model = warmed(module)
    replays, x = model.replays, torch.randn(8, 6)
    made = torch.func.vmap(torch.func.grad(lambda one: model(one).sum()))(x)
    torch.testing.assert_close(made, module.weight.sum(0).expand(8, 6))
    assert model.replays == replays


def test_with_weights_that_are_kept_for_a_while_a_call_is_the_scripts_own():
    model = warmed(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    replays, x = model.replays, torch.randn(8, 6)
    model(x).sum().backward()
    assert model.replays == replays + 1
    with nn.utils.parametrize.cached():
        model(x).sum().backward()
    assert model.replays == replays + 1


def test_where_every_call_of_a_module_comes_by_it_is_asked_once(monkeypatch):
    """As a session has it, which puts a function in the place of `nn.Module.__call__`."""
    mine, theirs = net(0.5), net(0.5)
    call = ModuleCall(mine, device=CPU, make_recorder=FakeRecorder)
    own = nn.Module.__call__

    def called(module, *args, **kwargs):
        if module is mine:
            return call(functools.partial(own, module), args, kwargs)
        return own(module, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "__call__", called)
    for run in (mine, theirs):
        torch.manual_seed(7)
        for number, (x, _) in enumerate(batches(9)):
            if run is mine and number == 3:
                call.remember_next()
            out = run(x)
            out.sum().backward(retain_graph=number == 7)
            if run is mine and number == 3:
                args, kwargs = call.last_inputs
                for plan in (OWN, CAPTURED):
                    call.trial(args, kwargs, call.last_output_grads, *plan)
                call.use(*CAPTURED)
    assert call._way.recorded == 0  # after the surprise it is looked at anew
    assert call.warmup_steps == 1
    torch.testing.assert_close(gradients(mine), gradients(theirs))
    assert_equal_states(mine.state_dict(), theirs.state_dict())


def test_a_module_whose_forward_pass_changes_its_weights_is_left_alone():
    class Averages(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.teacher.weight.lerp_(self.student.weight, 0.01)
            return self.student(x), self.teacher(x)

    model = Scripted(Averages())
    assert model.call.supports(*BF16) is None
    model(torch.randn(4, 6))
    assert "changes its weights" in model.call.supports(*BF16)
    assert model.call.supports(*OWN) is None


# --- trials -----------------------------------------------------------------------------------------


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.calls, self.seen, self.last = 0, [], torch.zeros(3)
        self.table, self.random, self.nothing = {}, random.Random(4), None

    def forward(self, x):
        self.calls += 1
        self.seen.append(len(x))
        self.table["last"] = self.calls
        self.last.add_(1)
        self.nothing = x
        self.new = self.random.random() + np.random.rand() + random.random()
        return self.head(self.drop(self.norm(self.conv(x))).mean((2, 3))), x.mean()


def everything_of(module, optimizer):
    return {
        "weights": state_of(module),
        "strides": [p.stride() for p in module.parameters()],
        "grads": [(id(p.grad), p.grad.clone()) for p in module.parameters()],
        "state": [{n: v.clone() for n, v in s.items()} for s in optimizer.state.values()],
        "randomness": (torch.get_rng_state(), random.getstate(), repr(np.random.get_state()), module.random.getstate()),
        "attributes": (module.calls, list(module.seen), module.last.clone(), dict(module.table), module.nothing),
        "names": sorted(module.__dict__),
    }


@pytest.mark.parametrize(
    "plan", [OWN, BF16, LAST, (Numerics(precision="bf16", layout="channels_last"), Execution()), CAPTURED]
)
def test_a_trial_leaves_no_trace(plan):
    module = Remembers()
    optimizer = adam(module)
    model = Scripted(module)
    x = images().requires_grad_()
    model.call.remember_next()
    model(x)[0].sum().backward()
    optimizer.step()
    module.nothing = None
    before = everything_of(module, optimizer)
    args, kwargs = model.call.last_inputs
    trial = functools.partial(model.call.trial, args, kwargs, model.call.last_output_grads, *plan)
    if plan is CAPTURED:
        with pytest.raises(NotRecordedError, match="draws from the host's randomness"):
            trial()
    else:
        torch.testing.assert_close(trial(), trial(), rtol=0, atol=0)
    after = everything_of(module, optimizer)
    assert after.pop("randomness")[1:] == before.pop("randomness")[1:]
    assert after.pop("names") == before.pop("names")
    assert after["attributes"][4] is before["attributes"][4] is None
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(id(p.grad) == was for p, (was, _) in zip(module.parameters(), before["grads"], strict=True))


def test_a_trial_of_the_own_plan_gives_the_gradients_that_training_gave():
    module = net()
    model, (x, y) = Scripted(module), batches(1)[0]
    model.call.remember_next()
    torch.manual_seed(1)
    out = model(x)
    nn.functional.cross_entropy(out, y).backward()
    args, kwargs = model.call.last_inputs
    outputs, found = model.call.trial(args, kwargs, model.call.last_output_grads, *OWN)
    torch.testing.assert_close(outputs, [out.detach()])
    torch.testing.assert_close(found, gradients(module))


class WithItsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, x, y):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


@pytest.mark.parametrize("plan", [OWN, CAPTURED])
def test_gradients_are_seen_where_the_script_changes_the_loss_in_place(plan):
    """As the Trainer of transformers does."""
    module, theirs = WithItsLoss(), WithItsLoss()
    model = Scripted(module, plan)
    for number, (x, y) in enumerate(batches(8)):
        if number == 7:
            model.call.remember_next()
        for one in (model, theirs):
            loss = one(x, y)["loss"]
            loss *= 2
            loss.backward()
    assert_equal_states(gradients(module), gradients(theirs))
    assert model.call.given_up is None
    given, unused = model.call.last_output_grads
    assert (given, unused) == (2.0, None)


@pytest.mark.parametrize("plan", [BF16, CAPTURED, (BF16[0], CAPTURED[1])])
def test_trials_of_two_plans_can_be_held_against_each_other(plan):
    module = net(0.5)
    model, (x, y) = Scripted(module), batches(1, size=64)[0]
    model.call.remember_next()
    nn.functional.cross_entropy(model(x), y).backward()
    args, kwargs = model.call.last_inputs
    grads = model.call.last_output_grads
    truth, made = (model.call.trial(args, kwargs, grads, *one) for one in (OWN, plan))
    assert made[0][0].dtype is torch.float32
    loose = {"rtol": 3e-2, "atol": 3e-2} if plan[0].precision == "bf16" else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(made, truth, **loose)
    assert torch.equal(made[0][0], truth[0][0]) == (plan is CAPTURED)
    if plan[1].mode == "captured":
        assert model.replays == 1
        replays = model.replays  # what was recorded for the trial is at hand for the training
        model.call.use(*plan)
        model(x).sum().backward()
        assert model.replays == replays + 1


def test_what_was_recorded_is_there_again_after_trials_without_dropout():
    """As the gates make them; what was recorded for a module that has been changed for good is not kept."""
    module = net(0.5)
    model, (x, y) = Scripted(module), batches(1)[0]
    model.call.remember_next()
    nn.functional.cross_entropy(model(x), y).backward()
    trial = functools.partial(model.call.trial, *model.call.last_inputs, model.call.last_output_grads)
    model.call.use(*CAPTURED)
    for number in range(3):
        trial(*CAPTURED)
        with without_dropout([module]):
            torch.testing.assert_close(trial(*CAPTURED), trial(*OWN))
        replays = model.replays
        model(x).sum().backward()
        assert model.replays == replays + 1
        assert model.call._way._earlier is None
        assert sum(len(recorder.graphs) for recorder in model.recorders) == 2 * (2 + number)
    assert model.call.warmup_steps == 0
    module[3].p = 0.1
    model(x).sum().backward()
    assert model.call._way.recorded == 0


def test_inputs_and_gradients_are_kept_once_and_only_when_asked_for():
    module = Nested("tuple")
    model, x = Scripted(module), torch.randn(4, 6)
    model(x)[0].sum().backward()
    assert model.call.last_inputs is None
    model.call.remember_next()
    with torch.no_grad():
        model(x)
    assert model.call.last_inputs is None
    out = model(x, scale=2.0)
    (out[0].sum() * 3).backward()
    (args, kwargs), grads = model.call.last_inputs, model.call.last_output_grads
    assert args[0] is not x
    assert torch.equal(args[0], x)
    assert kwargs == {"scale": 2.0}
    assert torch.equal(grads[0], torch.full((4, 3), 3.0))
    assert grads[1] is None  # nothing came to the hidden one directly
    model(x + 1)
    assert torch.equal(model.call.last_inputs[0][0], x)
    model.call.forget()
    assert model.call.last_inputs is None
    assert model.call.last_output_grads == []


def test_a_trial_is_made_in_the_autocast_of_the_call_that_was_remembered():
    module = net()
    model, (x, _) = Scripted(module), batches(1)[0]
    model.call.remember_next()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    out.float().sum().backward()
    args, kwargs = model.call.last_inputs
    for plan in (OWN, CAPTURED):
        outputs, found = model.call.trial(args, kwargs, model.call.last_output_grads, *plan)
        assert outputs[0].dtype is torch.bfloat16
        torch.testing.assert_close(found, gradients(module))


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_an_evaluation_outside_of_the_scripts_own_autocast_keeps_its_precision(first):
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 16, 2))
    model, x = Scripted(module, LAST), torch.randn(5, 3, 6, 6)

    def trained():
        module.train()
        with torch.autocast("cpu", torch.bfloat16):
            assert model(x).dtype is torch.bfloat16

    def evaluated():
        module.eval()
        with torch.no_grad():
            torch.testing.assert_close(model(x), module(x))  # dtypes, too

    for step in (trained, evaluated, trained) if first == "training" else (evaluated, trained, evaluated):
        step()


@pytest.mark.parametrize(
    "choices",
    [
        {"precision": "bf16"}, {"layout": "channels_last"}, {"depthwise": "direct"}, {"mode": "captured"},
        {"autotune": True}, {"without": ["early-item"]}, {"optimizer": "fused"}, {"compile": "model"},
    ],
    ids=lambda choices: next(iter(choices)),
)  # fmt: skip
def test_calls_are_made_anew_for_every_choice_but_those_of_others(choices):
    plan, own = Plan().but(**choices), Plan()
    is_new = call_module._key(plan.numerics, plan.execution) != call_module._key(own.numerics, own.execution)
    assert is_new == (next(iter(choices)) not in ("optimizer", "compile"))


class LightningLike(nn.Module):
    """As Lightning's own: it has methods that need its trainer."""

    __module__ = "lightning.pytorch.core.module"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def log(self, name, value): ...

    @property
    def current_epoch(self):
        return 0


class Logs(LightningLike):
    def forward(self, x):
        return self.noted(self.layer(x))

    def noted(self, y):
        self.log("mean", y.mean())
        return y


class Anneals(LightningLike):
    def forward(self, x):
        return self.layer(x) / (1 + self.current_epoch)


class TakesLogarithms(LightningLike):
    def forward(self, x):
        return self.layer(x).exp().log()

    def training_step(self, batch):
        self.log("loss", self(batch).sum())


def test_a_forward_pass_that_asks_its_trainer_of_lightning_stays_as_it_is():
    for module, name in ((Logs(), "log"), (Anneals(), "current_epoch")):
        reason = ModuleCall(module, device=CPU).supports(*BF16)
        assert reason == f"{type(module).__name__} uses self.{name} in its forward pass, which leads to its trainer"
    assert ModuleCall(TakesLogarithms(), device=CPU).supports(*BF16) is None
