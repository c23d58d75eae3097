"""Evaluation calls under a capture: replayed once they come often, and to the script its own to the bit."""

import copy

import pytest
import torch
from calling import (
    OWN,
    OfPythonAndNumpy,
    assert_equal_states,
    batches,
    gradients,
    net,
)
from evaluations import WARM, Scripted, evaluated, everything, inputs, moved, warmed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls import evaluations as call_evaluations
from hotlap.script.calls.evaluations import MOST_LOST, SEEN


@pytest.fixture(autouse=True)
def dropout_draws_from_the_device(monkeypatch):
    """As it does on a GPU; here the device's generator is the host's."""
    monkeypatch.setattr("hotlap.engine.capture.recording.HostRandomness", OfPythonAndNumpy)


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
    assert model.call.warmup_steps == 0


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
    assert model.call.warmup_steps == 4  # in the first epoch, and never again
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
    assert model.call._way._lends_buffers is False
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
    "a new layer": lambda module: module.insert(3, nn.Sigmoid().eval()),
    "a hook": lambda module: module[2].register_forward_hook(lambda _, __, out: out * 2),
    "a setting": lambda module: setattr(module[1], "eps", 0.5),
    "a buffer": lambda module: setattr(module[1], "running_var", torch.rand(16) + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_in_the_module_makes_a_recording_void(change):
    model = warmed()
    (before,) = model.recorders[0].graphs
    CHANGES[change](model.module)
    dtype = model.module[0].weight.dtype
    with torch.no_grad():
        for number, x in enumerate(inputs(2 * WARM)):
            made, replays = moved(model, lambda x=x: model(x.to(dtype)))
            assert torch.equal(made, model.module(x.to(dtype)))
            assert number >= SEEN or replays == 0
    assert before.replays == 2  # the one that was compared, and one of the script's
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
    assert "changes between evaluations" in model.evaluations.given_up
    assert len(model.recorders) == 1
    assert len(model.recorders[0].graphs) == MOST_LOST + 1


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
        patched.setattr("hotlap.engine.capture.recording.HostRandomness", OfPythonAndNumpy)
        patched.setattr(call_evaluations, "SEEN", 2)
        for run, module in ((model, mine), (theirs, theirs)):
            torch.manual_seed(7)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            made = [DEEDS[deed](run, module, optimizer, x) for deed, x in zip(deeds, inputs(len(deeds)), strict=True)]
            found.append(everything([out for out in made if not isinstance(out, nn.Module) and out is not None]))
    assert found[0] == found[1]
    assert_equal_states(mine.state_dict(), theirs.state_dict())
