"""What stands in for torch's own `step` and `zero_grad` does what they do, and is taken out without a trace."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from hotlap.script.update.capture import step_without_hooks
from hotlap.script.update.updates import Shortcuts


def trained(steps=3):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.fixture
def shortcuts():
    made = []

    def put(*optimizers, answer=True):
        told = []

        def replayed(optimizer):
            told.append(optimizer)
            return answer

        made.append(Shortcuts(replayed))
        made[-1].put(optimizers)
        return made[-1], told

    trained()  # torch puts its hooks into a class when the first of its kind is made
    before = vars(torch.optim.AdamW).get("step"), vars(torch.optim.Adam).get("step"), Optimizer.zero_grad
    yield put
    for one in made:
        one.take_out()
    assert (vars(torch.optim.AdamW).get("step"), vars(torch.optim.Adam).get("step"), Optimizer.zero_grad) == before


def test_a_step_that_is_a_replay_is_not_made_again(shortcuts):
    model, optimizer = trained()
    _, told = shortcuts(optimizer)
    before = model.weight.clone()
    assert optimizer.step() is None
    assert told == [optimizer]
    assert torch.equal(model.weight, before)


def test_a_step_that_is_none_is_torchs_own(shortcuts):
    (mine, optimizer), (theirs, own) = trained(), trained()
    own.step()
    _, told = shortcuts(optimizer, answer=False)
    optimizer.step()
    assert told == [optimizer]
    assert torch.equal(mine.weight, theirs.weight)


def test_steps_with_a_closure_and_those_of_others_are_torchs_own(shortcuts):
    (model, optimizer), (other_model, other) = trained(), trained()
    _, told = shortcuts(optimizer)
    before = model.weight.clone(), other_model.weight.clone()
    assert optimizer.step(lambda: 3.0) == 3.0
    other.step()
    assert not told
    assert not torch.equal(model.weight, before[0])
    assert not torch.equal(other_model.weight, before[1])


def test_hooks_of_the_scripts_own_after_every_step_run(shortcuts):
    _, optimizer = trained()
    _, told = shortcuts(optimizer)
    seen = []
    handles = [register_optimizer_step_post_hook(lambda *_, number=number: seen.append(number)) for number in (1, 2)]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == [1, 2]
    assert not told


@pytest.mark.parametrize("set_to_none", [None, True, False])
def test_gradients_go_as_torch_has_it(shortcuts, set_to_none):
    (model, optimizer), (other_model, other) = trained(), trained()
    shortcuts(optimizer)
    for one in (optimizer, other):
        one.zero_grad() if set_to_none is None else one.zero_grad(set_to_none=set_to_none)
    for grad in (model.weight.grad, other_model.weight.grad):
        assert (grad is None) if set_to_none is not False else not grad.any()


def test_optimizers_and_schedules_made_meanwhile_work_then_and_after(shortcuts):
    model, optimizer = trained()
    put, told = shortcuts(optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    later = torch.optim.AdamW(model.parameters(), lr=0.01)
    later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    schedule.step()
    assert told == [optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.005
    put.take_out()
    before = model.weight.clone()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    before = model.weight.clone()
    later.step()
    assert not torch.equal(model.weight, before)
    assert told == [optimizer]


def test_a_step_without_hooks_is_one_still(shortcuts):
    (model, optimizer), (other_model, other) = trained(), trained()
    other.step()
    _, told = shortcuts(optimizer)
    seen = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        step_without_hooks(optimizer)
    finally:
        handle.remove()
    assert not seen
    assert not told
    assert torch.equal(model.weight, other_model.weight)


def test_an_optimizer_that_is_not_torchs_own_is_left_alone(shortcuts):
    class Mine(torch.optim.SGD):
        pass

    model = nn.Linear(2, 1)
    optimizer = Mine(model.parameters(), lr=0.1)
    own = Mine.step
    _, told = shortcuts(optimizer)
    assert Mine.step is own
    optimizer.step()
    assert not told
