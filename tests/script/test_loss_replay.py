"""Losses of captured calls differentiated by a replay alone: the gradients of autograd, and torch's own where odd."""

import calling
import pytest
import torch
import torch.nn.functional as F
from calling import (
    CAPTURED,
    OfPythonAndNumpy,
    assert_equal_states,
    batches,
    gradients,
    net,
    state_of,
)
from torch import nn

from hotlap.script.calls import loss_replay as call_endings
from hotlap.script.calls.loss_replay import SEEN_LOSSES, LossReplay


class Scripted(calling.Scripted):
    """With endings in force."""

    def __init__(self, module, plan=CAPTURED):
        self.loss_replay = LossReplay()
        super().__init__(module, plan, loss_replay=self.loss_replay)

    @property
    def graphs(self):
        return list(self.call._way._recordings.graphs.values())


@pytest.fixture
def scripted():
    made = []

    def make(module=None, plan=CAPTURED):
        made.append(Scripted(module or net(), plan))
        made[-1].loss_replay.put()
        return made[-1]

    before = torch.Tensor.backward, [getattr(F, name) for name in call_endings.LOSSES]
    yield make
    for one in made:
        one.loss_replay.take_out()
    assert (torch.Tensor.backward, [getattr(F, name) for name in call_endings.LOSSES]) == before


def trained(model, module, data, criterion, *, between=None, backward=None, lr=0.05):
    """A plain loop, and the gradients of each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
    seen = []
    for number, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if between is not None:
            between(number, module, loss)
        (backward or torch.Tensor.backward)(loss)
        seen.append((loss.item(), gradients(module)))
        optimizer.step()
    return seen


def assert_same(mine, theirs):
    for (loss, grads), (other, others) in zip(mine, theirs, strict=True):
        assert loss == other
        assert_equal_states(grads, others)


def numbers(count, size=8):
    draw = torch.Generator().manual_seed(5)
    return [(torch.randn(size, 6, generator=draw), torch.randn(size, 3, generator=draw)) for _ in range(count)]


def likely(count):
    return [(x, y.sigmoid()) for x, y in numbers(count)]


WEIGHTS = torch.tensor([0.2, 1.0, 3.0])
CRITERIA = {
    "cross entropy": (nn.CrossEntropyLoss(), batches),
    "weighted and smoothed": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), batches),
    "functional": (lambda out, y: F.cross_entropy(out, y, reduction="sum"), batches),
    "mse": (nn.MSELoss(), numbers),
    "l1": (nn.L1Loss(), numbers),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), numbers),
    "huber": (nn.HuberLoss(), numbers),
    "with logits": (nn.BCEWithLogitsLoss(), likely),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_gradients_and_losses_are_those_of_the_plain_loop(scripted, name):
    criterion, data = CRITERIA[name]
    model, own = scripted(), net()
    theirs = trained(own, own, data(24), criterion)
    mine = trained(model, model.module, data(24), criterion)
    assert_same(mine, theirs)
    assert_equal_states(state_of(model.module), state_of(own))
    assert model.loss_replay.made >= 24 - SEEN_LOSSES - 8


def test_dropout_goes_on_as_in_the_plain_loop(scripted, monkeypatch):
    monkeypatch.setattr("hotlap.engine.capture.recording.HostRandomness", OfPythonAndNumpy)
    criterion = nn.CrossEntropyLoss()
    own, model = net(0.3), scripted(net(0.3))
    torch.manual_seed(3)
    theirs = trained(own, own, batches(20), criterion)
    torch.manual_seed(3)
    mine = trained(model, model.module, batches(20), criterion)
    assert_same(mine, theirs)
    assert model.loss_replay.made


def scaled(loss):
    (loss / 2).backward()


def kept(loss):
    loss.backward(retain_graph=True)


def twice(loss):
    loss.backward(retain_graph=True)
    loss.backward()


def with_a_gradient(loss):
    loss.backward(torch.tensor(0.5))


def by_autograd(loss):
    torch.autograd.backward(loss)


@pytest.mark.parametrize("backward", [scaled, kept, twice, with_a_gradient, by_autograd])
def test_whatever_else_is_differentiated_is_torchs_own(scripted, backward):
    criterion = nn.CrossEntropyLoss()
    model, own = scripted(), net()
    theirs = trained(own, own, batches(16), criterion, backward=backward)
    mine = trained(model, model.module, batches(16), criterion, backward=backward)
    assert_same(mine, theirs)
    assert not model.loss_replay.made


def on(number, what):
    def between(step, module, loss):
        if step == number:
            what(module, loss)

    return between


def hook_on_the_loss(module, loss):
    loss.register_hook(lambda grad: 2 * grad)


def hook_on_a_parameter(module, loss):
    module[0].weight.register_hook(lambda grad: 2 * grad)


def hook_after_a_parameter(module, loss):
    def half(parameter):
        parameter.grad.mul_(0.5)

    module[0].weight.register_post_accumulate_grad_hook(half)


def a_gradient_is_there(module, loss):
    module[0].bias.grad = torch.ones_like(module[0].bias)


CHANGES = [hook_on_the_loss, hook_on_a_parameter, hook_after_a_parameter, a_gradient_is_there]


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_script_does_before_the_pass_counts(scripted, change):
    criterion = nn.CrossEntropyLoss()
    model, own = scripted(), net()
    theirs = trained(own, own, batches(24), criterion, between=on(16, change))
    mine = trained(model, model.module, batches(24), criterion, between=on(16, change))
    assert_same(mine, theirs)
    assert model.loss_replay.made


def test_targets_and_outputs_that_are_written_to_fail_or_count_as_they_do_in_torch(scripted):
    """The loss was made of what was there before: torch's own pass says what it thinks of it."""
    criterion = nn.MSELoss()
    model, own = scripted(), net()
    data = numbers(20)
    told = []
    for one, module in ((own, own), (model, model.module)):
        trained(one, module, data, criterion)
        for x, y in numbers(1):
            y, out = y.clone(), one(x)
            loss = criterion(out, y)
            y.add_(1.0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                loss.backward()
            told.append(str(caught.value).split(";")[0])
    assert told[0] == told[1]


def test_a_second_pass_fails_as_in_torch(scripted):
    model = scripted()
    criterion = nn.CrossEntropyLoss()
    trained(model, model.module, batches(20), criterion)
    made = model.loss_replay.made
    (x, y), *_ = batches(1)
    model.module.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    assert model.loss_replay.made == made + 1
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_gradients_that_differ_from_autograds_are_never_used(scripted, monkeypatch):
    from hotlap.script.calls.graphs import CallGraph

    end = CallGraph.replay_loss

    def wrong(self, tensors):
        end(self, tensors)
        self.aliases.parameters[0].grad.mul_(1.01)

    monkeypatch.setattr(CallGraph, "replay_loss", wrong)
    criterion = nn.CrossEntropyLoss()
    model, own = scripted(), net()
    theirs = trained(own, own, batches(16), criterion)
    mine = trained(model, model.module, batches(16), criterion)
    assert_same(mine, theirs)
    assert not model.loss_replay.made
    assert all(graph.loss_call is None for graph in model.graphs)


def test_a_replay_that_fails_leaves_nothing_and_is_not_tried_again(scripted, monkeypatch):
    from hotlap.script.calls.graphs import CallGraph

    end, tries = CallGraph.replay_loss, []

    def breaks(self, tensors):
        tries.append(1)
        end(self, tensors)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(CallGraph, "replay_loss", breaks)
    criterion = nn.CrossEntropyLoss()
    model, own = scripted(), net()
    assert_same(trained(model, model.module, batches(16), criterion), trained(own, own, batches(16), criterion))
    assert len(tries) == 1
    assert not model.loss_replay.made


def test_another_loss_in_between_is_torchs_own(scripted):
    model, own = scripted(), net()
    first, second = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(label_smoothing=0.2)

    def turns():
        number = [0]

        def criterion(out, y):
            number[0] += 1
            return (second if number[0] % 5 == 0 else first)(out, y)

        return criterion

    theirs = trained(own, own, batches(30), turns())
    mine = trained(model, model.module, batches(30), turns())
    assert_same(mine, theirs)
    assert model.loss_replay.made


def test_a_loss_that_is_looked_at_beside_changes_nothing(scripted):
    criterion = nn.CrossEntropyLoss()

    def beside(out, y):
        loss = criterion(out, y)
        with torch.no_grad():
            F.cross_entropy(out, y, reduction="none")
        return loss

    model, own = scripted(), net()
    assert_same(trained(model, model.module, batches(20), beside), trained(own, own, batches(20), beside))
    assert model.loss_replay.made


def test_without_a_replay_there_is_nothing_to_end(scripted):
    model = scripted()
    x = torch.randn(4, 3, requires_grad=True)
    F.cross_entropy(x, torch.tensor([0, 1, 2, 0])).backward()
    assert x.grad is not None
    assert not model.loss_replay.made


def keeps_losses(kept, loss):
    kept.append(loss)


def adds_them_up(kept, loss):
    kept[:] = [kept[0] + loss] if kept else [loss * 1.0]


@pytest.mark.parametrize("keep", [keeps_losses, adds_them_up])
def test_a_script_that_keeps_its_losses_leaves_them_to_autograd(scripted, keep):
    """Which lets go of what it saved of them; a replay does not."""
    criterion, kept = nn.CrossEntropyLoss(), []
    model, own = scripted(), net()
    theirs = trained(own, own, batches(40), criterion)
    mine = trained(model, model.module, batches(40), criterion, between=lambda *step: keep(kept, step[2]))
    assert_same(mine, theirs)
    assert 0 < model.loss_replay.made <= call_endings.MOST_KEPT_LOSSES + 1


def test_a_script_that_holds_its_output_and_loss_until_the_next_ones_keeps_nothing(scripted):
    model, criterion, running = scripted(), nn.CrossEntropyLoss(), 0.0
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.05)
    for x, y in batches(24):
        optimizer.zero_grad()
        outputs = model(x)
        loss = criterion(outputs, y)
        loss.backward()
        optimizer.step()
        running += loss.item()
    assert model.loss_replay.made >= 24 - SEEN_LOSSES - 8


def test_large_outputs_are_left_to_autograd(scripted, monkeypatch):
    monkeypatch.setattr(call_endings, "LARGEST", 8 * 3 * 4 - 1)
    model = scripted()
    trained(model, model.module, batches(20), nn.CrossEntropyLoss())
    assert not model.loss_replay.made
