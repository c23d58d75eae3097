"""Evaluation calls under a capture: replayed once they come often, and to the script its own to the bit."""

import copy
import functools
import gc
import itertools
import logging
import random
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import calling
import pytest
import torch
from calling import (
    CAPTURED,
    OWN,
    FakeGraph,
    FakeRecorder,
    OfPythonAndNumpy,
    assert_equal_states,
    batches,
    gradients,
    net,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from hotlap.core.plan import Execution, Numerics
from hotlap.engine.recording import NotRecordedError
from hotlap.machine.tf32 import Tf32
from hotlap.script import call_evaluations
from hotlap.script.call_evaluation_graphs import EvaluationGraph
from hotlap.script.call_evaluations import MOST_LOST, MOST_RECORDED, SEEN

WARM = SEEN + 1
"""Calls of a kind before the first that is a replay: all of them eager, the last but one looked at, the last recorded
and compared."""


@pytest.fixture(autouse=True)
def dropout_draws_from_the_device(monkeypatch):
    """As it does on a GPU; here the device's generator is the host's."""
    monkeypatch.setattr("hotlap.engine.watch.HostRandomness", OfPythonAndNumpy)


class Recorder(FakeRecorder):
    """Knows evaluations, too: their replays write where the recording did, and leave plain values as they were."""

    def record(self, work):
        if not isinstance(work.__self__, EvaluationGraph):
            return super().record(work)
        work()
        self.graphs.append(Replays(work, self))
        return self.graphs[-1]


class Replays(FakeGraph):
    def replay(self):
        self.replays += 1
        mine = self.work.__self__
        frozen = {name: vars(mine)[name] for name in ("_tree", "outputs", "_bases")}
        for graph in self.recorder.graphs:  # they share their memory
            for output in graph.work.__self__.outputs:
                output.untyped_storage().fill_(255)
        self.work()
        for place, made in zip(frozen["outputs"], mine.outputs, strict=True):
            place.untyped_storage().copy_(made.untyped_storage())
        vars(mine).update(frozen)


class Scripted(calling.Scripted):
    def __init__(self, module, plan=CAPTURED, **how):
        super().__init__(module, plan, make_recorder=Recorder, **how)

    def _graphs(self, kind):
        return [graph for recorder in self.recorders for graph in recorder.graphs if isinstance(graph, kind)]

    @property
    def replays(self):
        """Of evaluations."""
        return sum(graph.replays for graph in self._graphs(Replays))

    @property
    def replays_of_training(self):
        return sum(graph.replays for graph in self._graphs(FakeGraph)) - self.replays


def inputs(count, size=5, seed=3, width=6):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, width, generator=generator) for _ in range(count)]


def warmed(module=None, calls=WARM + 1, mode=torch.no_grad, **how):
    """A model in evaluation mode whose calls are replays, of five samples each."""
    model = Scripted((net() if module is None else module).eval(), **how)
    with mode():
        for x in inputs(calls):
            model(x)
    assert model.evaluations.refused == []
    assert model.evaluations.recorded == 1
    return model


def moved(model, work):
    """What some work gives, and how many replays of evaluations were made for it."""
    before = model.replays
    made = work()
    return made, model.replays - before


# --- the plain case ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_is_replayed_with_the_scripts_own_numbers(mode):
    module = net().eval()
    model, xs = Scripted(module), inputs(WARM + 6)
    with mode():
        made = [model(x) for x in xs]
        truth = [module(x) for x in xs]
    assert all(map(torch.equal, made, truth))
    assert {(out.is_inference(), out.requires_grad) for out in made} == {(mode is torch.inference_mode, False)}
    assert model.replays == 1 + 6  # one of them was compared with the script's own
    assert model.evaluations.recorded == 1
    assert model.call.firsts == 0


def test_outputs_are_in_memory_of_their_own():
    model = warmed()
    with torch.no_grad():
        made = [(out, out.clone()) for out in map(model, inputs(4))]
    assert model.replays == 1 + 1 + 4
    assert len({out.data_ptr() for out, _ in made}) == 4
    assert all(torch.equal(out, then) for out, then in made)


def test_a_short_last_batch_and_a_short_evaluation_cost_no_recording():
    model = Scripted(net().eval())
    with torch.no_grad():
        for _ in range(SEEN - 1):
            for x in (*inputs(4), *inputs(1, size=2)):
                model(x)
    assert model.evaluations.recorded == 1
    assert len(model.recorders) == 1
    short = Scripted(net().eval())
    with torch.no_grad():
        for x in inputs(WARM - 1):
            short(x)
    assert short.recorders == []


def test_only_evaluation_without_gradients_is_recorded():
    module = net()
    model = Scripted(module)
    xs = inputs(3 * WARM)
    with torch.no_grad():
        for x in xs:
            model(x)  # moves the statistics of the batch norm
    twin = net()
    with torch.no_grad():
        for x in xs:
            twin(x)
    assert_equal_states(module.state_dict(), twin.state_dict())
    module.eval()
    assert all(model(x).requires_grad for x in xs)
    module[1].train()
    with torch.no_grad():
        for x in xs:
            model(x)
    assert module[1].num_batches_tracked == 6 * WARM
    assert model.recorders == []


@pytest.mark.parametrize("plan", [OWN, (Numerics(precision="bf16"), Execution())])
def test_nothing_is_recorded_where_nothing_is_captured(plan):
    model = Scripted(net().eval(), plan)
    with torch.no_grad():
        for x in inputs(2 * WARM):
            model(x)
    assert model.recorders == []


def test_nothing_is_recorded_once_the_capture_is_given_up():
    model = warmed()
    model.call._way._give_up("on purpose")
    assert model.evaluations.recorded == 0
    with torch.no_grad():
        assert moved(model, lambda: [model(x) for x in inputs(2 * WARM)])[1] == 0


# --- beside training --------------------------------------------------------------------------------


def evaluated(model, module, xs):
    module.eval()
    with torch.no_grad():
        made = [model(x) for x in xs]
    module.train()
    return made


@pytest.mark.parametrize("set_to_none", [True, False])
def test_training_and_evaluation_take_turns_and_both_keep_their_recordings(set_to_none):
    def run(model, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        found = []
        for epoch in range(5):
            for x, y in batches(4, seed=epoch):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                found.append(loss.detach())
            found += evaluated(model, module, inputs(6, seed=epoch))
        return found

    mine, theirs = net(0.5), net(0.5)
    model = Scripted(mine)
    torch.manual_seed(4)
    made = run(model, mine)
    torch.manual_seed(4)
    assert all(map(torch.equal, made, run(theirs, theirs)))
    assert_equal_states(mine.state_dict(), theirs.state_dict())
    assert model.replays == 5 * 6 - WARM + 1
    assert model.call.firsts == 4  # in the first epoch, and never again
    assert model.call._way.recorded == model.evaluations.recorded == 1
    assert [len(recorder.graphs) for recorder in model.recorders] == [2, 1]


def test_an_evaluation_in_the_middle_of_a_step_leaves_its_backward_pass_alone():
    mine = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    theirs = copy.deepcopy(mine)
    model = Scripted(mine)
    for x, _ in batches(6 * WARM):
        for run, module in ((model, mine), (theirs, theirs)):
            module.zero_grad()
            module.train()
            out = run(x)
            (judged,) = evaluated(run, module, [x])
            (out * judged.softmax(1)).sum().backward()
        assert_equal_states(gradients(mine), gradients(theirs))
    assert model.replays == 6 * WARM - WARM + 1
    assert model.replays_of_training > 2 * WARM
    assert len(model.recorders) == 2


def test_a_way_that_lends_no_gradients_any_more_keeps_its_evaluations():
    model, kept = warmed(), []
    model.module.train()
    for x, _ in batches(30):
        model.module.zero_grad()
        model(x).sum().backward()
        kept.append(model.module[0].weight.grad)
    assert model.call._way._lends is False
    assert model.evaluations.recorded == 1


# --- what makes it void -----------------------------------------------------------------------------


def test_weights_that_were_changed_in_place_are_seen_by_the_next_replay():
    model = warmed()
    fresh = {name: tensor + 1 for name, tensor in net().state_dict().items()}
    with torch.no_grad():
        for change in (
            lambda: model.module[0].weight.mul_(0.5),
            lambda: model.module[1].running_mean.add_(1),
            lambda: model.module.load_state_dict(fresh),
        ):
            change()
            (x,) = inputs(1)
            made, replays = moved(model, lambda x=x: model(x))
            assert replays == 1
            assert torch.equal(made, model.module(x))
    assert model.evaluations.recorded == 1


def assigned(module):
    module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()}, assign=True)


def transposed(module):
    module[4].weight.data = torch.randn(16, 3).t()


CHANGES = {
    "another dtype": lambda module: module.double(),
    "weights put in": assigned,
    "a new weight": lambda module: setattr(module[0], "weight", nn.Parameter(torch.randn(16, 6))),
    "a layout": transposed,
    "a new layer": lambda module: module.insert(3, nn.Sigmoid()),
    "a hook": lambda module: module[2].register_forward_hook(lambda _, __, out: out * 2),
    "a setting": lambda module: setattr(module[1], "eps", 0.5),
    "a buffer": lambda module: setattr(module[1], "running_var", torch.rand(16) + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_module_makes_a_recording_void(change):
    model = warmed()
    CHANGES[change](model.module)
    dtype = model.module[0].weight.dtype
    with torch.no_grad():
        for number, x in enumerate(inputs(2 * WARM)):
            made, replays = moved(model, lambda x=x: model(x.to(dtype)))
            assert torch.equal(made, model.module(x.to(dtype)))
            assert number >= SEEN or replays == 0
    if change != "another dtype":  # there the arguments are others, too
        assert model.evaluations.recorded == (0 if change == "a hook" else 1)


def test_a_weight_of_another_dtype_at_the_same_place_is_told_apart():
    module = nn.Sequential(nn.Linear(6, 6, bias=False))
    model = warmed(module)
    room = module[0].weight.data
    with torch.no_grad():
        module[0].weight.data = room.t()  # no other object, no other place
        (x,) = inputs(1)
        made, replays = moved(model, lambda: model(x))
    assert replays == 0
    assert torch.equal(made, module(x))


def test_a_layer_that_trains_for_a_while_makes_calls_eager_and_voids_nothing():
    model, twin = warmed(), net().eval()
    (x,) = inputs(1)
    with torch.no_grad():
        for module in (model.module, twin):
            module[1].train()
        assert torch.equal(model(x), twin(x))
        assert model.evaluations.recorded == 1
        for module in (model.module, twin):
            module.eval()
        made, replays = moved(model, lambda: model(x))
    assert replays == 1
    assert torch.equal(made, twin(x))


def test_a_module_that_is_never_what_it_was_is_left_alone():
    model = Scripted(net().eval())
    with torch.no_grad():
        for _ in range(MOST_LOST + 2):
            for x in inputs(WARM + 2):
                assert torch.equal(model(x), model.module(x))
            for parameter in model.module.parameters():
                parameter.data = parameter.data.clone()
    assert "never what it was" in model.evaluations.given_up
    assert len(model.recorders) == 1
    assert len(model.recorders[0].graphs) == MOST_LOST + 1


# --- kinds of calls ---------------------------------------------------------------------------------


def test_modes_precisions_and_values_are_kinds_of_their_own():
    class Scales(nn.Linear):
        def forward(self, x, *, scale=1.0):
            return super().forward(x) * scale

    module = Scales(6, 3).eval()
    model, (x,) = Scripted(module), inputs(1)
    calls = {
        "plain": (torch.no_grad, {}),
        "inference": (torch.inference_mode, {}),
        "scaled": (torch.no_grad, {"scale": 2.0}),
        "autocast": (functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16), {}),
    }
    for _ in range(WARM + 2):
        for name, (mode, how) in calls.items():
            with torch.no_grad(), mode():
                made, truth = model(x, **how), module(x, **how)
            assert torch.equal(made, truth)
            assert made.dtype is (torch.bfloat16 if name == "autocast" else torch.float32)
            assert made.is_inference() == (name == "inference")
    assert model.evaluations.recorded == 4
    assert model.replays == 4 * 3


def test_what_asks_for_inference_mode_is_told_of_it_in_a_recording_too():
    class Tells(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (100 if torch.is_inference_mode_enabled() else 0)

    for mode in (torch.no_grad, torch.inference_mode):
        model, (x,) = warmed(Tells(6, 3), mode=mode), inputs(1)
        with mode():
            assert torch.equal(model(x), model.module(x))


def test_switches_of_the_process_are_part_of_the_kind():
    model, (x,) = warmed(), inputs(1)
    with torch.no_grad():
        for switched in (Tf32(), sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(deterministic=True)):
            with switched:
                assert moved(model, lambda: model(x))[1] == 0
            assert moved(model, lambda: model(x))[1] == 1


def test_strides_of_arguments_are_kept():
    class Tells(nn.Linear):
        def forward(self, x):
            return super().forward(x) + (100 if x.is_contiguous() else 0)

    module = Tells(6, 3).eval()
    model = Scripted(module)
    with torch.no_grad():
        for x in inputs(WARM + 2, size=6):
            for given_ in (x, x.t(), torch.cat([x, x], 1)[:, ::2], x[:1].expand(6, 6)):
                assert torch.equal(model(given_), module(given_))
    assert model.evaluations.recorded == 3
    assert model.evaluations.refused == ["an argument is expanded"]


def test_arguments_that_are_one_and_the_same_stay_so():
    class Tells(nn.Linear):
        def forward(self, x, y):
            return super().forward(x) * (2 if x is y else 3) + y.sum()

    module = Tells(6, 3).eval()
    model, others = Scripted(module), inputs(WARM + 2, seed=4)
    with torch.no_grad():
        for x, y in zip(inputs(WARM + 2), others, strict=True):
            assert torch.equal(model(x, x), module(x, x))
            assert torch.equal(model(x, y), module(x, y))
    assert model.evaluations.recorded == 2


def test_a_few_kinds_are_held_and_the_one_not_used_for_longest_goes(monkeypatch):
    model = Scripted(net().eval())
    with torch.no_grad():
        for size in range(2, MOST_RECORDED + 4):
            for x in inputs(WARM + 1, size=size):
                assert torch.equal(model(x), model.module(x))
        assert model.evaluations.recorded == MOST_RECORDED
        monkeypatch.setattr(call_evaluations, "PATIENCE", 3 * WARM)
        for x in inputs(2 * WARM, size=3):
            model(x)
        for x in inputs(WARM + 1, size=20):
            model(x)
        assert model.evaluations.recorded == MOST_RECORDED
        replays = [moved(model, lambda x=x: model(x))[1] for size in (2, 3, 20) for x in inputs(1, size=size)]
    assert replays == [0, 1, 1]


def test_shapes_that_never_come_again_end_it(monkeypatch):
    monkeypatch.setattr(call_evaluations, "PATIENCE", 10)
    model = Scripted(net().eval())
    with torch.no_grad():
        for size in range(1, 14):
            model(torch.randn(size, 6))
    assert "always something new" in model.evaluations.given_up


# --- what is given back -----------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    logits: torch.Tensor
    hidden: tuple
    name: str = "result"


class Nested(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kind = nn.Linear(6, 8), nn.Linear(8, 3), kind

    def forward(self, x):
        hidden = self.first(x)
        logits = self.last(hidden)
        return {
            "tuple": lambda: (logits, [hidden, {"both": (hidden, 3, None)}]),
            "named": lambda: Pair(logits, hidden),
            "dataclass": lambda: Result(logits, (hidden, hidden)),
            "views": lambda: (*hidden.chunk(2, 1), hidden, hidden.t(), logits[:, 1:]),
            "expanded": lambda: logits[:1].expand(4, 3),
            "empty": lambda: (logits, hidden[:0], logits[:0].clone()),
            "nan": lambda: logits / (logits - logits) * logits.sign(),
        }[self.kind]()


def transformers_output():
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(Nested):
        def forward(self, x):
            hidden = self.first(x)
            return outputs.SequenceClassifierOutput(logits=self.last(hidden), hidden_states=(hidden, hidden))

    return Model("transformers")


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, Result):
        return tensors_of([tree.logits, tree.hidden])
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else []
    return [tensor for part in parts for tensor in tensors_of(part)]


def share_memory(one, other):
    return one.numel() > 0 and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["tuple", "named", "dataclass", "views", "expanded", "empty", "nan", "transformers"])
def test_outputs_come_in_the_containers_and_lie_as_the_scripts_own(kind, mode):
    module = transformers_output() if kind == "transformers" else Nested(kind)
    model = warmed(module, mode=mode)
    (x,) = inputs(1, seed=9)
    with mode():
        (mine, replays), theirs = moved(model, lambda: model(x)), module(x)
    assert replays == 1
    assert type(mine) is type(theirs)
    pairs = list(zip(tensors_of(mine), tensors_of(theirs), strict=True))
    for made, truth in pairs:
        torch.testing.assert_close(made, truth, rtol=0, atol=0, equal_nan=True)
        assert (made.stride(), made.is_inference()) == (truth.stride(), truth.is_inference())
    for one, other in itertools.pairwise(pairs):
        mine_share, theirs_share = map(share_memory, one, other)
        assert mine_share == theirs_share
    if kind == "tuple":
        assert mine[1][0] is mine[1][1]["both"][0]
        assert mine[1][1]["both"][1:] == (3, None)
    if kind == "dataclass":
        assert mine.name == "result"
    if kind == "transformers":
        assert mine.logits is mine["logits"]


def test_outputs_are_the_scripts_to_write_to():
    model, xs = warmed(Nested("views")), inputs(2)
    with torch.no_grad():
        first = model(xs[0])
        first[0].zero_()
        assert not first[2][:, :4].any()  # they share their memory, as the script's own do
        truth = model.module(xs[1])
        assert all(map(torch.equal, model(xs[1]), truth))


def test_a_plan_of_another_layout_gives_what_it_gives_eagerly():
    module = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()).eval()
    twin = copy.deepcopy(module)
    plan = Numerics(layout="channels_last")
    made = []
    for one, mode in ((module, "captured"), (twin, "eager")):
        model = Scripted(one, (plan, Execution(mode=mode)), optimizers=[torch.optim.SGD(one.parameters(), lr=0.1)])
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            made.append([model(torch.randn(2, 3, 6, 6, generator=generator)) for _ in range(WARM + 3)])
        if mode == "captured":
            assert model.replays == 4
    assert all(map(torch.equal, *made))
    assert all(out.is_contiguous() for out in made[0])


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
    GivesArgument: "was there before the call",
    GivesPart: "was there before the call",
    GivesWeight: "more than plain tensors",
    GivesBuffer: "was there before the call",
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


def everything(out):
    """All tensors and values in what a module of these gives."""
    if isinstance(out, SimpleNamespace):
        return everything(out.hidden)
    if isinstance(out, dict):
        return [list(out), *everything(list(out.values()))]
    if isinstance(out, (tuple, list)):
        return [part for one in out for part in everything(one)]
    return [out.tolist() if isinstance(out, torch.Tensor) else out]


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

    monkeypatch.setitem(globals(), "Replays", Wrong)
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

    monkeypatch.setitem(globals(), "Replays", Rounds)
    assert warmed().replays > 0


def test_what_is_frozen_into_a_recording_is_caught_by_the_first_replay(monkeypatch):
    """It is recorded with other arguments than it is compared with."""

    class Frozen(Replays):
        def replay(self):
            self.replays += 1

    monkeypatch.setitem(globals(), "Replays", Frozen)
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


# --- whatever a script does -------------------------------------------------------------------------

DEEDS = {
    "evaluate": lambda run, module, optimizer, x: evaluated(run, module, [x, x + 1, x - 1]),
    "evaluate a short batch": lambda run, module, optimizer, x: evaluated(run, module, [x[:2]]),
    "infer": lambda run, module, optimizer, x: inferred(run, module, x),
    "train": lambda run, module, optimizer, x: trained(run, module, optimizer, x),
    "scale a weight": lambda run, module, optimizer, x: module[0].weight.data.mul_(0.9),
    "move a weight": lambda run, module, optimizer, x: setattr(module[0].weight, "data", module[0].weight.data.clone()),
    "freeze": lambda run, module, optimizer, x: module[4].requires_grad_(not module[4].weight.requires_grad),
    "another rate": lambda run, module, optimizer, x: setattr(module[3], "p", 0.7 - module[3].p),
}


def inferred(run, module, x):
    module.eval()
    with torch.inference_mode():
        made = run(x)
    module.train()
    return made


def trained(run, module, optimizer, x):
    loss = run(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@settings(max_examples=12, deadline=None)
@given(st.lists(st.sampled_from([*DEEDS, "evaluate", "evaluate", "train"]), min_size=10, max_size=40))
def test_whatever_a_script_does_in_turn_its_numbers_are_its_own(deeds):
    mine, theirs = net(0.2), net(0.2)
    model, found = Scripted(mine), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("hotlap.engine.watch.HostRandomness", OfPythonAndNumpy)
        patched.setattr(call_evaluations, "SEEN", 2)
        for run, module in ((model, mine), (theirs, theirs)):
            torch.manual_seed(7)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            made = [DEEDS[deed](run, module, optimizer, x) for deed, x in zip(deeds, inputs(len(deeds)), strict=True)]
            found.append(everything([out for out in made if not isinstance(out, nn.Module) and out is not None]))
    assert found[0] == found[1]
    assert_equal_states(mine.state_dict(), theirs.state_dict())
