"""The engine under any plan does what a plain loop of whole batches does, to rounding.

Models are in double precision here, so that rounding (1e-12) is far below any mistake.
"""

import math
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plain import class_data, parameters_of, plain_loop, small_mlp, twins
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Plan
from hotlap.engine.rig import Rig

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
LOSSES = {
    "mean": nn.CrossEntropyLoss(),
    "smoothed": nn.CrossEntropyLoss(label_smoothing=0.1),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1),
    "ignoring": nn.CrossEntropyLoss(ignore_index=1),
    "ignoring, weighted": nn.CrossEntropyLoss(ignore_index=2, weight=WEIGHTS),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
}


def counted(model, batch):
    """A loss that counts by itself: only targets above 0 are scored."""
    x, y = batch
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    return (each * (y > 0)).sum(), (y > 0).sum()


def counted_for_plain(output, target):
    each = nn.functional.cross_entropy(output, target, reduction="none")
    return (each * (target > 0)).sum() / (target > 0).sum()


def plans():
    return st.builds(
        lambda kind, micro, optimizer: Plan().but(kind=kind, micro_batch=micro, optimizer=optimizer),
        kind=st.sampled_from(["gather", "loader"]),
        micro=st.none() | st.integers(1, 30),
        optimizer=st.sampled_from(["plain", "fused"]),
    )


def supported(rig, plan):
    return plan if rig.supports(plan) is None else plan.but(optimizer="plain")


@settings(max_examples=60, deadline=None)
@given(
    samples=st.integers(20, 60),
    inputs=st.integers(1, 6),
    batch=st.integers(5, 25),
    accumulate=st.integers(1, 4),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    loss=st.sampled_from([*sorted(LOSSES), "counted"]),
    clip=st.none() | st.floats(0.01, 2.0),
    scheduled=st.booleans(),
    seed=st.integers(0, 1000),
    choices=st.lists(plans(), min_size=1, max_size=4),
)
def test_any_plan_switched_at_random_trains_as_the_plain_loop_does(
    samples, inputs, batch, accumulate, optimizer, loss, clip, scheduled, seed, choices
):
    data = class_data(samples, inputs, seed=seed)
    mine, theirs = twins(small_mlp(inputs, seed=seed))
    make_schedule = (lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)) if scheduled else (lambda o: None)
    their_optimizer = OPTIMIZERS[optimizer](theirs.parameters())
    expected = plain_loop(
        theirs,
        their_optimizer,
        counted_for_plain if loss == "counted" else LOSSES[loss],
        data,
        batch=batch * accumulate,
        epochs=2,
        seed=seed,
        clip=clip,
        scheduler=make_schedule(their_optimizer),
    )
    assume(all(map(math.isfinite, expected)))  # a batch whose targets are all ignored has no loss in either
    rig = Rig(
        mine,
        OPTIMIZERS[optimizer],
        counted if loss == "counted" else LOSSES[loss],
        schedule=make_schedule if scheduled else None,
        clip=clip,
        device="cpu",
    )
    draw = random.Random(seed)
    losses = []
    for window in rig.feed(data, batch_size=batch, accumulate=accumulate, epochs=2, seed=seed):
        losses.append(rig.step(window).item())
        if draw.random() < 0.5:
            rig.use(supported(rig, draw.choice(choices)))
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-7, atol=1e-9)
    assert rig.updates == len(expected)
    assert rig.samples == 2 * samples


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("kind", ["gather", "loader"])
def test_the_users_own_plan_is_bit_equal_to_the_plain_loop(name, kind):
    data = class_data(dtype=torch.float32)
    mine, theirs = twins(small_mlp(dtype=torch.float32))
    plain_loop(theirs, OPTIMIZERS[name](theirs.parameters()), nn.CrossEntropyLoss(), data, batch=8, epochs=3, clip=1.0)
    rig = Rig(mine, OPTIMIZERS[name], nn.CrossEntropyLoss(), clip=1.0, plan=Plan().but(kind=kind), device="cpu")
    for window in rig.feed(data, batch_size=8, epochs=3):
        rig.step(window)
    assert torch.equal(parameters_of(mine), parameters_of(theirs))


def test_bf16_is_bit_equal_to_a_plain_loop_under_autocast():
    data = class_data(dtype=torch.float32)
    mine, theirs = twins(small_mlp(dtype=torch.float32))
    optimizer = OPTIMIZERS["adamw"]
    plain_loop(theirs, optimizer(theirs.parameters()), nn.CrossEntropyLoss(), data, batch=8, epochs=3, precision="bf16")
    rig = Rig(mine, optimizer, nn.CrossEntropyLoss(), plan=Plan().but(precision="bf16"), device="cpu")
    for window in rig.feed(data, batch_size=8, epochs=3):
        rig.step(window)
    assert torch.equal(parameters_of(mine), parameters_of(theirs))


def test_bf16_gradients_point_where_fp32_gradients_do():
    data = class_data(200, dtype=torch.float32)
    grads = {}
    for precision in ("fp32", "bf16"):
        model = small_mlp(dtype=torch.float32)
        rig = Rig(model, OPTIMIZERS["sgd"], nn.CrossEntropyLoss(), plan=Plan().but(precision=precision), device="cpu")
        rig.step(data)
        grads[precision] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert all(g.dtype == torch.float32 for g in grads.values())
    assert not torch.equal(grads["fp32"], grads["bf16"])
    assert torch.cosine_similarity(grads["fp32"], grads["bf16"], dim=0) > 0.999


class WithDropout(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 16), nn.Dropout(0.5), nn.BatchNorm1d(16), nn.Linear(16, 3))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    "other",
    [
        Plan().but(kind="loader"),
        Plan().but(kind="loader", workers=1),
        Plan().but(kind="loader", workers=2, prefetch=1, persistent=True),
    ],
    ids=str,
)
def test_feeds_and_workers_change_no_bit_of_a_model_with_randomness(other):
    data = class_data(dtype=torch.float32)

    def trained(plan):
        model = WithDropout()
        rig = Rig(model, OPTIMIZERS["adam"], nn.CrossEntropyLoss(), plan=plan, device="cpu")
        torch.manual_seed(3)
        for window in rig.feed(data, batch_size=8, epochs=2):
            rig.step(window)
        rig.close()
        return torch.cat([parameters_of(model), *(b.flatten().float() for b in model.buffers())])

    assert torch.equal(trained(Plan()), trained(other))


def test_switching_to_workers_and_back_in_the_middle_of_an_epoch_changes_no_bit():
    data = class_data(dtype=torch.float32)
    mine, theirs = twins(small_mlp(dtype=torch.float32))
    plain_loop(theirs, OPTIMIZERS["adam"](theirs.parameters()), nn.CrossEntropyLoss(), data, batch=4, epochs=2)
    rig = Rig(mine, OPTIMIZERS["adam"], nn.CrossEntropyLoss(), device="cpu")
    switches = {
        3: Plan().but(kind="loader", workers=2, persistent=True),
        8: Plan(),
        15: Plan().but(kind="loader", workers=1),
    }
    for window in rig.feed(data, batch_size=4, epochs=2):
        rig.step(window)
        if rig.steps in switches:
            rig.use(switches[rig.steps])
    rig.close()
    assert torch.equal(parameters_of(mine), parameters_of(theirs))


def test_a_users_dataloader_with_accumulation_trains_as_whole_batches_do():
    data = class_data(50)
    mine, theirs = twins(small_mlp())
    plain_loop(
        theirs, OPTIMIZERS["sgd"](theirs.parameters()), LOSSES["weighted"], data, batch=24, epochs=2, shuffled=False
    )
    rig = Rig(mine, OPTIMIZERS["sgd"], LOSSES["weighted"], device="cpu")
    for window in rig.feed(DataLoader(TensorDataset(*data), batch_size=8), accumulate=3, epochs=2):
        rig.step(window)
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-9, atol=1e-11)


def test_a_batch_of_the_users_own_is_cut_as_the_plan_says():
    data = class_data(37)
    mine, theirs = twins(small_mlp())
    for model, plan in ((mine, Plan().but(micro_batch=5)), (theirs, Plan())):
        rig = Rig(model, OPTIMIZERS["sgd"], LOSSES["weighted"], plan=plan, device="cpu")
        for _ in range(3):
            rig.step(data)
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-9, atol=1e-11)


def test_a_piece_whose_targets_are_all_ignored_does_no_harm():
    x, _ = class_data(12)
    y = torch.tensor([-100] * 6 + [0, 1, 2, 0, 1, 2])
    mine, theirs = twins(small_mlp())
    plain_loop(theirs, OPTIMIZERS["sgd"](theirs.parameters()), nn.CrossEntropyLoss(), (x, y), batch=12, epochs=2)
    rig = Rig(mine, OPTIMIZERS["sgd"], nn.CrossEntropyLoss(), plan=Plan().but(micro_batch=6), device="cpu")
    for window in rig.feed((x, y), batch_size=12, epochs=2, order="as given"):
        rig.step(window)
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-9, atol=1e-11)


def test_probability_targets_are_weighted_by_samples():
    x, _ = class_data(20)
    y = torch.softmax(torch.randn(20, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), 1)
    mine, theirs = twins(small_mlp())
    plain_loop(theirs, OPTIMIZERS["sgd"](theirs.parameters()), LOSSES["weighted"], (x, y), batch=20, epochs=2)
    rig = Rig(mine, OPTIMIZERS["sgd"], LOSSES["weighted"], plan=Plan().but(micro_batch=7), device="cpu")
    for window in rig.feed((x, y), batch_size=20, epochs=2):
        rig.step(window)
    torch.testing.assert_close(parameters_of(mine), parameters_of(theirs), rtol=1e-9, atol=1e-11)
