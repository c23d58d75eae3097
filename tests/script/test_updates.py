"""Optimizers of a script whose steps are fused from outside."""

import copy

import pytest
import torch
from torch import nn

from hotlap.script.update import updates as update_trials
from hotlap.script.update.updates import Updates, memory_of


def trained(optimizer_of, *, fused_from=None, steps=8, updates=None, model=None):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = optimizer_of(model.parameters())
    updates = Updates([optimizer])
    for number in range(steps):
        if number == fused_from:
            updates.use("fused")
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        updates.before_step(optimizer)
        optimizer.step()
        updates.after_step(optimizer)
    return model, optimizer, updates


KINDS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fused_from", [0, 3])
def test_fused_steps_do_the_same_and_the_script_finds_its_own_settings(kind, fused_from):
    plain, own, _ = trained(KINDS[kind])
    fused, optimizer, _ = trained(KINDS[kind], fused_from=fused_from)
    for one, other in zip(plain.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    for group, mine in zip(own.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in mine.items() if k != "params"}
    assert repr(own) == repr(optimizer)
    for one, other in zip(own.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if value is not None:
                assert (value.device, value.dtype, value.shape) == (other[name].device, other[name].dtype, value.shape)


def test_what_an_optimizer_remembers_holds_no_copy_of_its_weights():
    weights = torch.zeros(100_000, requires_grad=True)
    assert memory_of(torch.optim.SGD([weights])).size < weights.nbytes


def test_the_gate_leaves_no_trace():
    model, optimizer, updates = trained(KINDS["adamw"])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    assert updates.supports("fused") is None
    assert updates.why_other("fused") is None
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    for one, other in zip(before[0].values(), after[0].values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(before[1]["state"].values(), after[1]["state"].values(), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert before[1]["param_groups"] == after[1]["param_groups"]
    assert all(torch.equal(one, other) for one, other in zip(before[2], after[2], strict=True))


def test_a_trial_leaves_what_a_fused_optimizer_tells_gradscaler():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    model(torch.randn(16, 4)).square().mean().backward()
    update_trials._moved(optimizer, fused=False)
    assert vars(optimizer)["_step_supports_amp_scaling"] is True
    assert optimizer.param_groups[0]["fused"] is True


def test_a_trial_before_the_first_step_leaves_no_state():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(16, 4)).square().mean().backward()
    before = copy.deepcopy(model.state_dict())
    assert Updates([optimizer]).why_other("fused") is None
    assert not optimizer.state
    torch.testing.assert_close(before, model.state_dict(), rtol=0, atol=0)


def test_a_trial_leaves_gradients_as_they_were_where_steps_change_them():
    """As torch's loop over all tensors at once does, for Nesterov's momentum."""
    _, optimizer, updates = trained(lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True))
    parameters = optimizer.param_groups[0]["params"]
    held, before = [p.grad for p in parameters], [p.grad.clone() for p in parameters]
    assert updates.why_other("fused") is None
    assert all(p.grad is grad for p, grad in zip(parameters, held, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(held, before, strict=True))
    optimizer.step()
    assert not any(torch.equal(one, other) for one, other in zip(held, before, strict=True)), "steps do change them"


def test_a_kernel_that_does_something_else_is_refused(monkeypatch):
    _, _, updates = trained(KINDS["adamw"])
    real = torch._fused_adamw_

    def off(*args, lr, **settings):
        return real(*args, lr=lr * 1.01, **settings)

    monkeypatch.setattr(torch, "_fused_adamw_", off)
    assert "differs by" in updates.why_other("fused")


def test_what_has_no_fused_kernel_says_so():
    _, _, updates = trained(lambda p: torch.optim.RMSprop(p, lr=0.01))
    assert updates.supports("fused") == "RMSprop has no fused kernel"


def test_of_several_optimizers_those_that_can_are_fused():
    torch.manual_seed(0)
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [torch.optim.RMSprop(one.parameters()), torch.optim.AdamW(two.parameters())]
    updates = Updates(optimizers)
    assert updates.supports("fused") is None
    updates.use("fused")
    for optimizer in optimizers:
        (one(torch.ones(1, 2)).sum() + two(torch.ones(1, 2)).sum()).backward()
        updates.before_step(optimizer)
        assert bool(optimizer.param_groups[0].get("fused")) is (optimizer is optimizers[1])
        optimizer.step()
        updates.after_step(optimizer)
        assert not optimizer.param_groups[0].get("fused")


@pytest.mark.parametrize("broken", [False, True])
def test_a_loss_scaled_by_the_script_is_unscaled_whatever_was_tried(monkeypatch, broken):
    """GradScaler leaves it to optimizers that say they do it, which a fused one says of itself."""
    _, optimizer, updates = trained(KINDS["adamw"])
    assert updates.supports("fused") is None
    if broken:
        monkeypatch.setattr(torch, "_fused_adamw_", lambda *args, **settings: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            updates.why_other("fused")
    else:
        assert updates.why_other("fused") is None
    assert "_step_supports_amp_scaling" not in vars(optimizer)
    assert optimizer.param_groups[0]["fused"] is None


def scaled(fused_from=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler("cpu", init_scale=1024.0)
    updates = Updates([optimizer])
    optimizer.register_step_pre_hook(lambda one, *_: updates.before_step(one))
    optimizer.register_step_post_hook(lambda one, *_: updates.after_step(one))
    for number in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(16, 4)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        if number == fused_from:
            assert updates.why_other("fused") is None
        elif fused_from is not None and number > fused_from + 1:  # a plain one comes first
            updates.use("fused" if number % 2 else "plain")
    return [p.detach() for p in model.parameters()]


def test_training_with_a_scaler_stays_the_same_through_gate_and_turns():
    for one, other in zip(scaled(), scaled(fused_from=2), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_where_processes_train_together_updates_stay_as_they_are(monkeypatch):
    """Each would choose by itself, and their weights would drift apart."""
    updates = Updates([torch.optim.Adam(nn.Linear(2, 2).parameters())])
    assert updates.supports("fused") is None
    monkeypatch.setattr(update_trials, "trains_with_others", lambda: True)
    assert "several processes train together" in updates.supports("fused")
    assert updates.supports(updates.own) is None
