"""Evaluation calls that are not replayed, faults while they are recorded, and what a recording leaves behind."""

import copy
import gc
import logging
import random
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import evaluations
import pytest
import torch
from calling import (
    CAPTURED,
    OWN,
    OfPythonAndNumpy,
    net,
)
from evaluations import WARM, Recorder, Replays, Scripted, everything, inputs, moved, warmed
from torch import nn
from torch.overrides import TorchFunctionMode

from hotlap.engine.capture.recording import NotRecordedError


@pytest.fixture(autouse=True)
def dropout_draws_from_the_device(monkeypatch):
    """As it does on a GPU; here the device's generator is the host's."""
    monkeypatch.setattr("hotlap.engine.capture.recording.HostRandomness", OfPythonAndNumpy)


# --- what is refused --------------------------------------------------------------------------------


class Unfit(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(6, 6), 0
        self.register_buffer("count", torch.zeros(()))
        self.kept = torch.zeros(5, 6)


class Counts(Unfit):
    def forward(self, x):
        self.calls += 1
        return self.layer(x)


class Adds(Unfit):
    def forward(self, x):
        self.count.add_(1)
        return self.layer(x) + self.count


class Keeps(Unfit):
    def forward(self, x):
        self.kept.copy_(x)
        return self.layer(x)


class DrawsOnHost(Unfit):
    def forward(self, x):
        return self.layer(x) * random.random()


class Draws(Unfit):
    def forward(self, x):
        return self.layer(x) + torch.rand(())


class Overwrites(Unfit):
    def forward(self, x):
        return self.layer(x.mul_(2))


class Fills(Unfit):
    def forward(self, x):
        x.fill_(1)
        return self.layer(x)


class GivesArgument(Unfit):
    def forward(self, x):
        return self.layer(x), x


class GivesPart(Unfit):
    def forward(self, x):
        return self.layer(x), x[:, :2]


class GivesWeight(Unfit):
    def forward(self, x):
        return self.layer(x), self.layer.weight


class GivesBuffer(Unfit):
    def forward(self, x):
        return self.layer(x), self.kept


class Reads(Unfit):
    def forward(self, x):
        return self.layer(x), x.mean().item()


class Branches(Unfit):
    def forward(self, x):
        return {"out": self.layer(x)} if x.mean() > 0 else {"other": self.layer(x)}


class GivesList(Unfit):
    def forward(self, x):
        return self.layer(x), []


class GivesNothing(Unfit):
    def forward(self, x):
        return float(len(x))


class GivesObject(Unfit):
    def forward(self, x):
        return self.layer(x), SimpleNamespace(hidden=x)


class Differentiates(Unfit):
    def forward(self, x):
        with torch.enable_grad():
            return self.layer(x)


class Prints(Unfit):
    def forward(self, x):
        print("called")
        return self.layer(x)


class Logs(Unfit):
    def forward(self, x):
        logging.getLogger("mine").warning("called")
        return self.layer(x)


class Elsewhere(Unfit):
    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(1, device="meta")

    def forward(self, x):
        return self.layer(x)


UNFIT = {
    Counts: "'calls'",
    Adds: "its own tensors",
    Keeps: "its own tensors",
    DrawsOnHost: "draws from the host's randomness",
    Draws: "draws random numbers",
    Overwrites: "in place",
    Fills: "in place",
    GivesArgument: "existed before the call",
    GivesPart: "existed before the call",
    GivesWeight: "more than plain tensors",
    GivesBuffer: "existed before the call",
    Reads: "values that change",
    Branches: "values that change",
    GivesList: "a container without tensors",
    GivesNothing: "no tensors",
    GivesObject: "a SimpleNamespace",
    Differentiates: "more than numbers in memory",
    Prints: "it prints",
    Logs: "it prints",
    Elsewhere: "not all of its tensors are on cpu",
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", UNFIT)
def test_what_cannot_be_replayed_is_refused_with_the_reason_and_runs_as_ever(kind, mode, capsys, caplog):
    def run(model):
        random.seed(3)
        torch.manual_seed(3)
        with mode():
            xs = [x + 0 for x in inputs(2 * WARM)]
            found = [everything(model(x)) for x in xs]
            return found, [x.tolist() for x in xs], random.random(), torch.rand(1).item()

    mine = kind().eval()
    theirs = copy.deepcopy(mine)
    model = Scripted(mine)
    made = run(model)
    said = capsys.readouterr().out, len(caplog.records)
    caplog.clear()
    assert made == run(theirs)
    assert said == (capsys.readouterr().out, len(caplog.records))
    assert mine.calls == theirs.calls
    assert [p.grad for p in mine.parameters()] == [None, None]
    assert model.call.given_up is None
    if kind is not Differentiates or mode is torch.no_grad:  # in inference mode nothing is differentiated
        assert UNFIT[kind] in " ".join(model.evaluations.refused)
        assert model.evaluations.recorded == 0


def test_an_output_that_lies_elsewhere_is_none_of_a_replays():
    """A copy to the host that nobody has waited for yet would be given back before it is there."""

    class Sends(Unfit):
        def forward(self, x):
            return self.layer(x), torch.empty(2, device="meta")

    model = Scripted(Sends().eval())
    with torch.no_grad():
        for x in inputs(2 * WARM):
            assert torch.equal(model(x)[0], model.module(x)[0])
    assert model.evaluations.refused == ["not all of its outputs are on cpu"]


@pytest.mark.parametrize("extra", [SimpleNamespace(), torch.ones(2).to_sparse(), torch.ones(2, device="meta")])
def test_arguments_that_a_replay_cannot_read_stay_with_the_script(extra):
    class Ignores(nn.Linear):
        def forward(self, x, _):
            return super().forward(x)

    model = Scripted(Ignores(6, 3).eval())
    with torch.no_grad():
        for x in inputs(2 * WARM):
            assert torch.equal(model(x, extra), model.module(x, extra))
    assert model.recorders == []
    assert model.evaluations.given_up is None


def test_a_mistake_of_the_scripts_own_stays_its_own():
    model = warmed()
    with torch.no_grad():
        for _ in range(2 * WARM):
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(torch.randn(5, 7))
        assert moved(model, lambda: model(*inputs(1)))[1] == 1
    assert model.call.given_up is None


# --- faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1 + 1e-3, -1.0, float("nan")])
def test_a_replay_that_gives_other_numbers_is_caught_and_not_tried_again(monkeypatch, factor):
    class Wrong(Replays):
        def replay(self):
            super().replay()
            for output in self.work.__self__.outputs:
                output.data.mul_(factor)

    monkeypatch.setattr(evaluations, "Replays", Wrong)
    model = Scripted(net().eval())
    with torch.no_grad():
        for x in inputs(3 * WARM):
            assert torch.equal(model(x), model.module(x))
    assert model.evaluations.refused == ["a replay gives other numbers"]
    assert model.replays == 1
    assert len(model.recorders[0].graphs) == 1


def test_rounding_is_no_fault(monkeypatch):
    class Rounds(Replays):
        def replay(self):
            super().replay()
            for output in self.work.__self__.outputs:
                output.data.mul_(1 + 1e-6)

    monkeypatch.setattr(evaluations, "Replays", Rounds)
    assert warmed().replays > 0


def test_what_is_frozen_into_a_recording_is_caught_by_the_first_replay(monkeypatch):
    """It is recorded with other arguments than it is compared with."""

    class Frozen(Replays):
        def replay(self):
            self.replays += 1

    monkeypatch.setattr(evaluations, "Replays", Frozen)
    model = Scripted(net().eval())
    with torch.no_grad():
        for x in inputs(2 * WARM):
            assert torch.equal(model(x), model.module(x))
    assert model.evaluations.refused == ["a replay gives other numbers"]


@pytest.mark.parametrize("wrapped", [True, False])
def test_memory_that_runs_out_while_recording_ends_it(monkeypatch, wrapped):
    def runs_out(self, work):
        tried.append(work)
        error = torch.OutOfMemoryError("CUDA out of memory")
        if wrapped:
            raise NotRecordedError("CUDA out of memory") from error
        raise error

    tried = []
    monkeypatch.setattr(Recorder, "record", runs_out)
    model = Scripted(net().eval())
    with torch.no_grad():
        for size in (5, 4):
            for x in inputs(2 * WARM, size=size):
                assert torch.equal(model(x), model.module(x))
    assert len(tried) == 1
    assert "out of memory" in model.evaluations.given_up
    assert model.call.given_up is None


def test_a_recording_that_fails_is_not_tried_again(monkeypatch):
    def fails(self, work):
        tried.append(work)
        raise NotRecordedError("on purpose")

    tried = []
    monkeypatch.setattr(Recorder, "record", fails)
    model = Scripted(net().eval())
    with torch.no_grad():
        for x in inputs(2 * WARM):
            assert torch.equal(model(x), model.module(x))
    assert len(tried) == 1
    assert model.evaluations.refused == ["on purpose"]


def test_a_replay_that_fails_ends_it_and_the_script_gets_its_own(monkeypatch):
    def fails(self):
        raise RuntimeError("on purpose")

    model, (x,) = warmed(), inputs(1)
    monkeypatch.setattr(Replays, "replay", fails)
    with torch.no_grad():
        assert torch.equal(model(x), model.module(x))
    assert model.evaluations.given_up == "on purpose"
    assert model.call.given_up is None


class Doubles(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        return made * 2 if func is nn.functional.linear else made


@pytest.mark.filterwarnings("ignore")
def test_what_is_traced_is_the_module_and_no_replay():
    model, (x, other) = warmed(net().requires_grad_(False)), inputs(2)
    with torch.no_grad():
        traced, replays = moved(model, lambda: torch.jit.trace(lambda x: model(x), (x,), check_trace=False))
        assert replays == 0
        assert torch.equal(traced(other), model.module(other))
        assert moved(model, lambda: model(x))[1] == 1


def test_weights_that_are_kept_for_a_while_are_read_by_no_replay():
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    module = net()
    nn.utils.parametrize.register_parametrization(module[0], "weight", Doubled())
    model = Scripted(module.eval())
    with torch.no_grad():
        with nn.utils.parametrize.cached():
            for x in inputs(2 * WARM):
                assert torch.equal(model(x), model.module(x))
        assert model.evaluations.recorded == 0
        for x in inputs(2 * WARM):
            assert torch.equal(model(x), model.module(x))
        assert model.evaluations.recorded == 1
        model.module[0].parametrizations.weight.original.mul_(3)
        made, replays = moved(model, lambda: model(x))
    assert replays == 1
    assert torch.equal(made, model.module(x))


def test_under_hooks_and_modes_of_the_scripts_own_a_call_is_eager():
    model, (x,) = warmed(), inputs(1)
    with torch.no_grad():
        with Doubles():
            made, replays = moved(model, lambda: model(x))
            assert torch.equal(made, model.module(x))
        assert replays == 0
        seen = []
        hook = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
        assert moved(model, lambda: model(x))[1] == 0
        hook.remove()
        assert len(seen) == 6
        with torch.device("cpu"):
            assert moved(model, lambda: model(x))[1] == 1
        with torch.autograd.forward_ad.dual_level():
            assert moved(model, lambda: model(x))[1] == 0
        assert moved(model, lambda: model(x))[1] == 1


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["forget", "tidy"])
def test_what_was_recorded_is_let_go_of_with_what_recorded_it(how):
    model = warmed()
    held = [weakref.ref(one) for one in (model.recorders[0], model.recorders[0].graphs[0])]
    evaluations = weakref.ref(model.evaluations)
    del model.recorders[:]
    if how == "tidy":
        model.call.use(*OWN)
    getattr(model.call, how)()
    assert (evaluations() is None) == (how == "tidy")  # at once, for it holds memory of the device
    gc.collect()  # pretended recordings hold each other
    assert [one() for one in held] == [None, None]
    model.call.use(*CAPTURED)
    with torch.no_grad():
        for x in inputs(WARM + 1):
            assert torch.equal(model(x), model.module(x))
    assert model.evaluations.recorded == len(model.recorders) == 1


def test_a_recording_leaves_no_trace():
    model = Scripted(net().eval())
    for parameter in model.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    tensors = [*model.module.parameters(), *model.module.buffers()]
    before = [(tensor._version, tensor.data_ptr(), tensor.clone()) for tensor in tensors]
    grads, names = [id(p.grad) for p in model.module.parameters()], [sorted(vars(m)) for m in model.module.modules()]
    drawn = torch.get_rng_state()
    with torch.no_grad():
        for x in inputs(WARM + 2):
            model(x)
    assert model.evaluations.recorded == 1
    assert [(tensor._version, tensor.data_ptr()) for tensor in tensors] == [one[:2] for one in before]
    assert all(torch.equal(tensor, one[2]) for tensor, one in zip(tensors, before, strict=True))
    assert [id(p.grad) for p in model.module.parameters()] == grads
    assert [sorted(vars(m)) for m in model.module.modules()] == names
    assert torch.equal(torch.get_rng_state(), drawn)


def test_what_a_module_does_in_a_rehearsal_alone_is_put_back(monkeypatch):
    class Late(Unfit):
        def forward(self, x):
            if aside:
                self.calls += 1
                self.count.add_(1)
            return self.layer(x)

    @contextmanager
    def noted(self):
        aside.append(True)
        yield
        aside.pop()

    aside = []
    monkeypatch.setattr(Recorder, "aside", noted)
    model = Scripted(Late().eval())
    with torch.no_grad():
        for x in inputs(2 * WARM):
            assert torch.equal(model(x), model.module(x))
    assert "'calls'" in model.evaluations.refused[0]
    assert (model.module.calls, model.module.count.item()) == (0, 0)
