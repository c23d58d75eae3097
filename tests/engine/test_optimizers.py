"""Kinds of step of one optimizer, and what a recorded one holds fast. Recording itself is tested in tests/gpu."""

import copy

import pytest
import torch
from torch import nn

from hotlap.engine import optimizers
from hotlap.engine.optimizers import (
    Fusion,
    frozen_hyperparameters,
    is_fused,
    recording,
    settle_counts,
    twin_of,
    why_not_captured,
    why_not_fused,
)

ALL = ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop"]
FUSED = ["SGD", "Adam", "AdamW", "Adagrad"]


def made(name, parameters=None, **settings):
    return getattr(torch.optim, name)(nn.Linear(3, 2).parameters() if parameters is None else parameters, **settings)


def stepped(optimizer, steps=2):
    for number in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, number + 1.0)
        optimizer.step()
    return optimizer


def contents(optimizer):
    weights = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    return str((weights, copy.deepcopy(optimizer.state_dict())))


# --- twins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*ALL, "Adafactor"])
@pytest.mark.parametrize("already", [0, 2])
def test_a_twin_steps_and_the_optimizer_itself_stays_as_it_is(name, already):
    optimizer = stepped(made(name), already)
    before = contents(optimizer)
    twin = twin_of(optimizer)
    start = [p.detach().clone() for group in twin.param_groups for p in group["params"]]
    stepped(twin)
    assert contents(optimizer) == before
    assert type(twin) is type(optimizer)
    assert all(
        not torch.equal(a, b)
        for a, b in zip(start, (p for group in twin.param_groups for p in group["params"]), strict=True)
    )


def test_a_twin_has_the_settings_of_every_group_and_a_parameter_of_every_kind():
    groups = [
        {"params": [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5, 6))], "betas": (0.5, 0.6)},
        {"params": [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3).double())], "weight_decay": 0.7},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.3)
    twin = twin_of(optimizer, capturable=True, unknown=1)
    assert [[(p.ndim, p.dtype) for p in group["params"]] for group in twin.param_groups] == [
        [(2, torch.float32)],
        [(1, torch.float32), (1, torch.float64)],
    ]
    for one, other in zip(twin.param_groups, optimizer.param_groups, strict=True):
        same = {k: v for k, v in other.items() if k not in ("params", "capturable")}
        assert {k: one[k] for k in same} == same
        assert one["capturable"]
        assert "unknown" not in one


def test_a_twin_shares_no_tensor_with_the_optimizer():
    optimizer = stepped(torch.optim.Adam([nn.Parameter(torch.ones(2, 2))], lr=torch.tensor(0.1), foreach=False))
    twin = twin_of(optimizer)
    assert twin.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]

    def places(one):
        state = [v for values in one.state.values() for v in values.values()]
        return {t.data_ptr() for t in (one.param_groups[0]["lr"], *one.param_groups[0]["params"], *state)}

    assert not places(twin) & places(optimizer)


def test_a_twin_runs_none_of_the_users_hooks_nor_moves_its_schedule():
    optimizer = made("AdamW", lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append("hook"))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before = schedule.state_dict()
    stepped(twin_of(optimizer))
    assert called == []
    assert schedule.state_dict() == before


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 3)])
@pytest.mark.parametrize("name", FUSED)
def test_state_of_a_single_number_is_not_taken_for_a_count(name, shape):
    optimizer = stepped(made(name, [nn.Parameter(torch.ones(shape))], lr=0.1, **_momentum(name)))
    assert why_not_fused(optimizer) is None
    twin = twin_of(optimizer)
    for parameter, state in twin.state.items():
        assert all(v.shape == (() if k == "step" else parameter.shape) for k, v in state.items())


def _momentum(name):
    return {"momentum": 0.9} if name == "SGD" else {}


# --- fused and plain -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("already", [0, 2])
def test_fused_where_torch_has_the_kernel_before_and_after_steps(name, already):
    reason = why_not_fused(stepped(made(name), already))
    assert (reason is None) is (name in FUSED)
    assert reason is None or "no fused kernel" in reason


@pytest.mark.parametrize("name", FUSED)
def test_switching_back_and_forth_trains_as_the_plain_loop_does(name):
    torch.manual_seed(0)
    start = torch.randn(3, 4, dtype=torch.float64)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, plain = made(name, [mine], lr=0.1, **_momentum(name)), made(name, [theirs], lr=0.1, **_momentum(name))
    fusion = Fusion(optimizer)
    for kind in (True, False, True, True, False):
        fusion.set(kind)
        assert is_fused(optimizer) is kind
        stepped(optimizer)
        stepped(plain)
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_the_users_own_flags_come_back():
    groups = [
        {"params": nn.Linear(2, 2).parameters(), "foreach": True},
        {"params": nn.Linear(2, 2).parameters(), "capturable": True},
    ]
    optimizer = torch.optim.AdamW(groups)
    fusion = Fusion(optimizer)

    def flags():
        return [(g["fused"], g["foreach"], g["capturable"]) for g in optimizer.param_groups]

    given = flags()
    fusion.set(True, captured=True)
    assert flags() == [(True, False, False), (True, False, True)]  # torch refuses the flag on the CPU
    fusion.set(False, captured=True)
    assert [capturable for _, _, capturable in flags()] == [False, True]
    fusion.set(False)
    assert flags() == given  # a `False` that was a `None` would keep torch from choosing its fastest loop


@pytest.mark.parametrize("given", [{"fused": True}, {"fused": False}, {"foreach": False}, {}])
def test_the_plain_loop_is_the_users_own_or_else_torchs_choice(given):
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), **given)
    fusion = Fusion(optimizer)
    for kind in (True, False, True, False):
        fusion.set(kind)
    plain = {"fused": None, "foreach": None} if given.get("fused") else {"fused": None, "foreach": None, **given}
    assert {name: optimizer.param_groups[0][name] for name in plain} == plain


def test_an_optimizer_without_the_flags_is_left_alone():
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["step"] = torch.ones((), dtype=torch.int64)

    optimizer = stepped(Counting(nn.Linear(2, 2).parameters()))
    before = contents(optimizer)
    Fusion(optimizer).set(False, captured=True)
    assert [set(group) - {"params"} for group in optimizer.param_groups] == [{"lr"}]
    assert contents(optimizer) == before


def test_a_count_that_is_in_its_place_keeps_its_address():
    optimizer = stepped(made("AdamW"))
    fusion = Fusion(optimizer)
    fusion.set(True)
    places = [state["step"].data_ptr() for state in optimizer.state.values()]
    fusion.set(True)
    settle_counts(optimizer)
    assert [state["step"].data_ptr() for state in optimizer.state.values()] == places


# --- recorded ------------------------------------------------------------------------------------------------------


def test_nothing_is_recorded_on_a_cpu():
    assert why_not_captured(made("AdamW")) == "AdamW has parameters on cpu, and steps are recorded on a GPU"


@pytest.mark.parametrize("error", [False, True])
def test_while_recording_each_group_reads_its_rate_from_the_tensor_and_afterwards_has_its_own(error):
    optimizer = torch.optim.AdamW(
        [{"params": nn.Linear(2, 2).parameters(), "lr": lr} for lr in (0.1, 0.2)], capturable=False
    )
    rates = [torch.tensor(0.3), torch.tensor(0.4)]
    before = copy.deepcopy(optimizer.state_dict()["param_groups"])
    try:
        with recording(optimizer, rates):
            assert [group["lr"] for group in optimizer.param_groups] == rates
            # torch refuses the flag for parameters on a CPU.
            assert not any(group["capturable"] for group in optimizer.param_groups)
            if error:
                raise ZeroDivisionError
    except ZeroDivisionError:
        assert error
    assert optimizer.state_dict()["param_groups"] == before
    assert all(type(group["lr"]) is float for group in optimizer.param_groups)


def test_as_many_rates_as_groups_are_needed_and_a_mistake_changes_nothing():
    optimizer = made("AdamW", lr=0.1)
    with pytest.raises(ValueError, match="longer"), recording(optimizer, [torch.tensor(1.0)] * 2):
        pass
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_follows_a_rate_that_changes_in_the_tensor(name):
    torch.manual_seed(0)
    start = torch.randn(3, 4)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    optimizer, plain = made(name, [mine], lr=9.0), made(name, [theirs], lr=9.0)
    Fusion(optimizer).set(True)
    rate = torch.zeros(())
    for lr in (0.1, 0.4, 0.2):
        rate.fill_(lr)
        plain.param_groups[0]["lr"] = lr
        with recording(optimizer, [rate]):
            stepped(optimizer, 1)
        stepped(plain, 1)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_what_a_recorded_step_holds_fast_is_everything_but_the_rate():
    optimizer = torch.optim.AdamW([{"params": nn.Linear(2, 2).parameters()}, {"params": nn.Linear(2, 2).parameters()}])
    first = frozen_hyperparameters(optimizer)
    assert {first: 1}[frozen_hyperparameters(optimizer)] == 1
    optimizer.param_groups[1]["lr"] = 7.0
    assert frozen_hyperparameters(optimizer) == first
    seen = {first}
    for name, value in {"betas": (0.1, 0.2), "eps": 1e-3, "weight_decay": 0.5, "amsgrad": True, "fused": True}.items():
        before = optimizer.param_groups[1][name]
        optimizer.param_groups[1][name] = value
        seen.add(frozen_hyperparameters(optimizer))
        optimizer.param_groups[1][name] = before
    assert len(seen) == 6
    assert frozen_hyperparameters(optimizer) == first
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert frozen_hyperparameters(optimizer) not in seen


def test_tensors_and_odd_things_among_the_settings_are_held_by_their_address_and_words():
    decay, unhashable = torch.tensor(0.1), {"a": [1, {2}]}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0].update(decay=decay, odd=unhashable, names=["x", "y"])
    first = frozen_hyperparameters(optimizer)
    hash(first)
    decay.fill_(0.5)
    assert frozen_hyperparameters(optimizer) == first
    optimizer.param_groups[0]["decay"] = decay.clone()
    assert frozen_hyperparameters(optimizer) != first
    optimizer.param_groups[0].update(decay=decay, odd={"a": [1, {3}]})
    assert frozen_hyperparameters(optimizer) != first


def test_reading_a_value_back_from_the_device_is_noticed():
    """By a tensor without numbers, since there is no GPU here; its own error says something else."""
    with optimizers._NoWaiting():
        assert torch.ones(()).item() == 1.0
        assert torch.ones(2).to(torch.float64).sum() == 2
        with pytest.raises(RuntimeError, match="reads a value back"):
            torch.ones((), device="meta").item()


@pytest.mark.parametrize("what", ["gradients", "count", "nothing"])
def test_a_replay_that_does_not_do_what_the_plain_loop_does_is_found_out(what):
    recorded, plain = (twin_of(made("AdamW")) for _ in range(2))
    for number in range(3):
        for twin in (recorded, plain):
            optimizers._set_rate_and_gradients(twin, 0 if what == "gradients" and twin is recorded else number, None)
            twin.step()
    if what == "count":
        next(iter(recorded.state.values()))["step"].sub_(1)
    told = optimizers._difference(recorded, plain)
    expected = {"gradients": "AdamW keeps 'exp_avg'", "count": "AdamW keeps 'step' where a replay does not move it"}
    assert told is None if what == "nothing" else told.startswith(expected[what])
    plain_sgd = [twin_of(made("SGD", lr=1.0)) for _ in range(2)]
    for twin, lr in zip(plain_sgd, (0.1, 0.2), strict=True):
        twin.param_groups[0]["lr"] = lr
        twin.step()
    assert optimizers._difference(*plain_sgd) == "SGD does not follow its learning rate when it is replayed"
