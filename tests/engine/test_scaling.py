"""The scale of an fp16 loss, and updates that are left out without the host's knowing."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hotlap.engine.optimizers import Fusion
from hotlap.engine.scaling import LossScale, skipping, skips_on_device
from hotlap.store.encoding import decode, encode, to_json
from hotlap.store.files import from_json

CPU = torch.device("cpu")
BAD = st.sampled_from([math.inf, -math.inf, math.nan])

FUSED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "SGD with Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
}
WAITING = {
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "dampened SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
}


def frozen(scale):
    return [tensor.item() for tensor in scale.saved()]


def grads_of(numbers):
    return [torch.tensor(numbers), torch.tensor([[1.0, 2.0]]), torch.tensor(3.0, dtype=torch.float64)]


# --- against torch's own ---------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.none() | BAD, max_size=40),
    st.sampled_from([2.0**16, 2.0**10, 8.0, 3.0, 1000.0]),
    st.integers(1, 5),
    st.sampled_from([2.0, 1.5, 4.0]),
    st.sampled_from([0.5, 0.25]),
)
def test_between_floor_and_ceiling_it_is_torchs_grad_scaler(sequence, start, interval, growth, backoff):
    weight = nn.Parameter(torch.ones(3))
    mirror = nn.Parameter(torch.ones(3))
    mine = LossScale(
        CPU, start=start, growth=growth, backoff=backoff, interval=interval, floor=0.0, ceiling=torch.finfo().max
    )
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=start, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
    )
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    reference = torch.optim.SGD([mirror], lr=0.1, momentum=0.9)
    skipped = 0
    for number, bad in enumerate(sequence):
        values = torch.tensor([1.0, -2.0, 0.25]) * (number + 1)
        if bad is not None:
            values[number % 3] = bad
            skipped += 1
        optimizer.zero_grad()
        reference.zero_grad()
        mine.scaled((weight * values).sum()).backward()
        mine.unscale_([weight.grad])
        with skipping(optimizer, mine.found_inf):
            optimizer.step()
        mine.update()
        theirs.scale((mirror * values).sum()).backward()
        theirs.step(reference)
        theirs.update()
        assert mine.scale.item() == theirs.get_scale()
        assert frozen(mine)[1] == theirs._get_growth_tracker()
    assert mine.skips() == skipped
    torch.testing.assert_close(weight, mirror, rtol=1e-6, atol=1e-6)
    assert weight.isfinite().all()


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_scale_stays_between_floor_and_ceiling_and_moves_again_from_either(sequence, interval):
    scale = LossScale(CPU, start=8.0, interval=interval, floor=2.0, ceiling=64.0)
    expected, good = 8.0, 0
    for bad in sequence:
        scale.unscale_([torch.tensor([math.inf if bad else 1.0])])
        scale.update()
        good = 0 if bad else good + 1
        if bad:
            expected = max(expected / 2, 2.0)
        elif good == interval:
            expected, good = min(expected * 2, 64.0), 0
        assert scale.scale.item() == expected


def test_a_storm_of_bad_steps_ends_at_the_floor_is_counted_and_is_got_over():
    scale = LossScale(CPU, interval=1)
    for bad in [True] * 150 + [False] * 20:
        grad = scale.scaled(torch.tensor(math.nan if bad else 1.0)).reshape(1)
        scale.unscale_([grad])
        scale.update()
        assert scale.overflowed() is bad
        assert bad or grad.item() == 1.0
    assert scale.skips() == 150
    assert scale.scale.item() == 2.0**20


def test_torchs_own_scale_has_no_floor_and_after_a_storm_the_first_good_step_ruins_the_weights():
    """Why there is a floor: one over the scale is infinite then, and it is looked at before it is applied."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cpu")
    for bad in [True] * 146 + [False]:
        weight.grad = scaler.scale(torch.tensor([math.nan if bad else 1.0]))
        scaler.step(optimizer)
        scaler.update()
    assert not weight.isfinite()


# --- one step --------------------------------------------------------------------------------------------


def test_gradients_of_all_dtypes_are_unscaled_in_place():
    scale = LossScale(CPU, start=4.0)
    grads = [torch.full((3,), 8.0, dtype=dtype) for dtype in (torch.float32, torch.float64, torch.float16)]
    places = [g.data_ptr() for g in grads]
    scale.unscale_(grads)
    assert all(g.eq(2.0).all() for g in grads)
    assert [g.data_ptr() for g in grads] == places
    assert not scale.overflowed()
    scale.unscale_([])
    assert not scale.overflowed()


def test_sparse_gradients_are_unscaled_by_their_values():
    scale = LossScale(CPU, start=4.0)
    grad = torch.eye(3).to_sparse()
    scale.unscale_([grad])
    assert torch.equal(grad.to_dense(), torch.eye(3) / 4)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_bad_number_anywhere_is_found_and_forgotten_at_the_next_step(bad, place):
    scale = LossScale(CPU)
    grads = grads_of([1.0, 2.0])
    grads[place].flatten()[-1:].fill_(bad)
    scale.unscale_(grads)
    assert scale.found_inf.item() == 1.0
    scale.unscale_(grads_of([1.0, 2.0]))
    assert scale.found_inf.item() == 0.0


def test_a_loss_in_half_precision_does_not_overflow_by_being_scaled():
    loss = torch.tensor(60000.0, dtype=torch.float16)
    assert LossScale(CPU).scaled(loss).isfinite()
    assert LossScale(CPU).scaled(torch.tensor(1.0, dtype=torch.float64)).dtype is torch.float64


def test_gradients_too_small_for_fp16_survive_by_the_scale():
    layer = nn.Linear(4, 1, bias=False)
    nn.init.constant_(layer.weight, 1e-4)

    def gradient(scale):
        x = torch.ones(2, 4, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (layer(x).float() * 1e-5).sum()
        (grad,) = torch.autograd.grad(scale.scaled(loss), [x])
        scale.unscale_([grad])
        return grad

    assert gradient(LossScale(CPU, enabled=False)).eq(0).all()
    torch.testing.assert_close(gradient(LossScale(CPU)), torch.full((2, 4), 1e-9), rtol=1e-2, atol=0)


def test_without_scaling_it_only_looks_whether_all_is_finite():
    check = LossScale(CPU, enabled=False)
    loss = torch.tensor(2.0)
    assert check.scaled(loss) is loss
    for norm, bad in ((3.0, 0.0), (math.inf, 1.0), (math.nan, 1.0), (0.0, 0.0)):
        check.look_at(torch.tensor(norm, dtype=torch.float64))
        assert check.found_inf.item() == bad
        check.update()
    assert check.skips() == 2
    assert check.scale.item() == 1.0


# --- kept and put back ---------------------------------------------------------------------------------------


def shaken(scale):
    for value in (1.0, math.inf, 1.0, 1.0, math.nan):
        scale.unscale_([torch.tensor([value])])
        scale.update()
    return scale


def test_what_was_saved_is_put_back_at_the_same_addresses():
    scale = shaken(LossScale(CPU, interval=2))
    places = [t.data_ptr() for t in (scale.scale, scale.found_inf)]
    saved, numbers = scale.saved(), frozen(scale)
    shaken(scale)
    assert frozen(scale) != numbers
    scale.put_back(saved)
    assert frozen(scale) == numbers
    assert [t.data_ptr() for t in (scale.scale, scale.found_inf)] == places
    shaken(scale)
    scale.reset()
    assert frozen(scale) == frozen(LossScale(CPU))
    assert [t.data_ptr() for t in (scale.scale, scale.found_inf)] == places


def test_it_survives_being_stored():
    scale, tensors = shaken(LossScale(CPU, interval=2)), {}
    text = to_json(encode(scale.saved(), tensors, "scale"))
    other = LossScale(CPU)
    other.put_back(decode(from_json(text, "x"), tensors, CPU))
    assert frozen(other) == frozen(scale)


def test_a_step_reads_nothing_back(monkeypatch):
    scale, weight = LossScale(CPU), nn.Parameter(torch.ones(3))

    def refuse(*_):
        raise AssertionError("a value was read back")

    for name in ("item", "__float__", "__int__", "__bool__", "tolist", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    scale.scaled(weight.sum()).backward()
    scale.unscale_([weight.grad])
    scale.look_at(weight.grad.norm())
    scale.update()
    scale.saved()


# --- updates left out -----------------------------------------------------------------------------------------


def trained(make, *, fused, skip_at, steps=5, dtype=torch.float32):
    """Weights and state after steps of which some are left out; without `fused`, by not making them."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(3, 4, dtype=dtype)), nn.Parameter(torch.randn(5, dtype=dtype))]
    optimizer = make(weights)
    Fusion(optimizer).set(fused)
    litter = [torch.full((3, 4), 7.0, dtype=dtype) for _ in range(200)]
    del litter  # so that memory which nobody has filled holds something
    found = torch.zeros(())
    for number in range(steps):
        generator = torch.Generator().manual_seed(number)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, dtype=dtype, generator=generator)
            if number in skip_at:
                weight.grad.fill_(math.nan)
        found.fill_(float(number in skip_at))
        if fused:
            with skipping(optimizer, found):
                optimizer.step()
        elif number not in skip_at:
            optimizer.step()
    state = [v for w in weights for _, v in sorted(optimizer.state[w].items()) if v is not None]
    return [*(w.detach() for w in weights), *state]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("skip_at", [(), (0,), (0, 1), (2,), (1, 4)])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_step_left_out_touches_neither_weights_nor_state_nor_count(name, skip_at, dtype):
    """The first step too, which makes the state: the scale begins so high that it is left out as a rule."""
    left_out = trained(FUSED[name], fused=True, skip_at=skip_at, dtype=dtype)
    not_made = trained(FUSED[name], fused=False, skip_at=skip_at, dtype=dtype)
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-7, "atol": 1e-9}
    for mine, theirs in zip(left_out, not_made, strict=True):
        torch.testing.assert_close(mine.double(), theirs.double(), **close)


def test_fused_sgd_by_itself_goes_on_from_unfilled_memory_when_its_first_step_is_left_out():
    """Why momentum is given to it beforehand. Should torch mend this, `_give_momentum` can go."""
    weight = nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    weight.grad = torch.ones(64)
    optimizer.found_inf = torch.ones(())
    real, seen = torch.empty_like, []

    def filled(*args, **kwargs):
        made = real(*args, **kwargs).fill_(7.0)
        seen.append(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty_like", filled)
        optimizer.step()
    assert seen
    assert optimizer.state[weight]["momentum_buffer"].eq(7.0).all()


@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_skip_on_the_device_and_the_plain_loop_does_not(name):
    optimizer = FUSED[name](nn.Linear(3, 2).parameters())
    assert not skips_on_device(optimizer)
    fusion = Fusion(optimizer)
    fusion.set(True)
    assert skips_on_device(optimizer)
    fusion.set(False)
    assert not skips_on_device(optimizer)


@pytest.mark.parametrize("name", WAITING)
@pytest.mark.parametrize("already", [0, 2])
def test_optimizers_that_cannot_be_told_have_to_wait(name, already):
    """Dampened momentum also once it is there: a snapshot may take it away again."""
    layer = nn.Linear(3, 2)
    optimizer = WAITING[name](layer.parameters())
    if "fused" in optimizer.defaults:
        Fusion(optimizer).set(True)
    for _ in range(already):
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert not skips_on_device(optimizer)


def test_it_is_found_out_by_doing_it_not_by_name():
    class Deaf(torch.optim.AdamW):
        """Fused, and yet it does not listen."""

        def step(self, closure=None):
            self.found_inf = None
            return super().step(closure)

    class Stumbling(torch.optim.AdamW):
        """Skips, but does something else afterwards."""

        def step(self, closure=None):
            super().step(closure)
            self.param_groups[0]["lr"] *= 0.5

    for kind in (Deaf, Stumbling):
        assert not skips_on_device(kind(nn.Linear(3, 2).parameters(), fused=True))
    mixed = torch.optim.AdamW([{"params": nn.Linear(3, 2).parameters()}, {"params": nn.Linear(3, 2).parameters()}])
    mixed.param_groups[0]["fused"] = True
    assert not skips_on_device(mixed)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("already", [0, 2])
def test_finding_out_changes_nothing(name, already):
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    optimizer = FUSED[name](layer.parameters())
    Fusion(optimizer).set(True)
    for _ in range(already):
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()), [p.clone() for p in layer.parameters()]
    assert skips_on_device(optimizer)
    after = optimizer.state_dict()
    assert before[0]["param_groups"] == after["param_groups"]
    assert str(before[0]["state"]) == str(after["state"])
    assert all(torch.equal(a, b) for a, b in zip(before[1], layer.parameters(), strict=True))


def test_after_a_step_that_may_skip_the_plain_loop_runs_again():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    fusion = Fusion(optimizer)
    fusion.set(True)
    weight.grad = torch.ones(2)
    with skipping(optimizer, torch.ones(())):
        optimizer.step()
    fusion.set(False)
    optimizer.step()
    assert optimizer.state[weight]["step"].item() == 1
