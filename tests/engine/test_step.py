"""One update: what its pieces add up to, in what order gradients are tamed, and what it leaves behind."""

import pytest
import torch
from plain import class_data, small_mlp
from torch import nn

from hotlap import Plan, Rig
from hotlap.engine.step import Window

IGNORED = 1
"""A class that losses ignore here."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def rig_for(loss=None, *, model=None, optimizer=sgd, plan=None, **settings):
    model = model or small_mlp(dtype=torch.float32)
    return Rig(model, optimizer, loss or nn.CrossEntropyLoss(), plan=plan or Plan(), device="cpu", **settings)


def moved(rig, batch):
    """The weights after an update less those before."""
    before = [p.detach().clone() for p in rig.model.parameters()]
    rig.step(batch)
    return torch.cat([(p.detach() - was).flatten() for p, was in zip(rig.model.parameters(), before, strict=True)])


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=IGNORED)])
@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("micro", [None, 3])
def test_scaled_updates_in_fp16_are_those_in_fp32_to_rounding(loss, clip, micro):
    """Unscaled before they are clipped; sums over samples divided by as many samples as they were shrunk for."""
    batch = class_data(16, dtype=torch.float32)
    expected = moved(rig_for(loss, clip=clip), batch)
    found = moved(rig_for(loss, clip=clip, plan=Plan().but(precision="fp16", micro_batch=micro)), batch)
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_sum_over_samples_has_room_in_fp16_however_many_they_are():
    """Of a loss that sums, the scaled sum over all samples is beyond fp16 where the scaled mean is not."""
    seen = []
    loss = nn.CrossEntropyLoss(ignore_index=IGNORED)
    rig = rig_for(loss, plan=Plan().but(precision="fp16", micro_batch=30))
    rig._step.look = lambda one: seen.append(one.detach().item())
    rig.step(class_data(60, dtype=torch.float32))
    assert max(seen) < 2.0, "as large as a mean is"


def test_a_count_is_exact_where_gradients_are_not():
    model = small_mlp(dtype=torch.float32).half()
    rig = rig_for(model=model)
    rig._step.parameters()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1000.0)
    rig._step._divide_gradients(torch.tensor(100_000))
    assert all(p.grad.max() == p.grad.min() == torch.tensor(0.01).half() for p in model.parameters())


@pytest.mark.parametrize("micro", [None, 3])
def test_a_loss_that_is_kept_keeps_nothing_alive(micro):
    loss = rig_for(plan=Plan().but(micro_batch=micro)).step(class_data(16, dtype=torch.float32))
    assert loss.grad_fn is None
    assert not loss.requires_grad


def test_gradients_that_were_there_before_the_first_update_are_no_part_of_it():
    model, batch = small_mlp(dtype=torch.float32), class_data(16, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    rig_for(model=model, optimizer=sgd(model[2].parameters())).step(batch)
    fresh = small_mlp(dtype=torch.float32)
    rig_for(model=fresh, optimizer=sgd(fresh[2].parameters())).step(batch)
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_targets_that_a_function_of_the_users_makes_ignored_weigh_nothing():
    """Though the data holds none that are."""

    def prepare(batch):
        x, y = batch
        return x, torch.where(torch.arange(len(y)) < 3, y, IGNORED)

    x, y = class_data(16, dtype=torch.float32)
    y = torch.where(y == IGNORED, 0, y)
    still = lambda parameters: torch.optim.SGD(parameters, lr=0.0)  # noqa: E731
    rig = rig_for(nn.CrossEntropyLoss(ignore_index=IGNORED), optimizer=still, prepare=prepare)
    for window in rig.feed((x, y), batch_size=12, epochs=1, order="as given"):
        assert window.all_count
        rig.step(window)
    places = torch.tensor([0, 1, 2, 12, 13, 14])  # three of twelve, and three of four
    with torch.no_grad():
        expected = nn.functional.cross_entropy(rig.model(x[places]), y[places]).item()
    assert rig.totals.mean() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_an_update_that_is_left_out_counts_in_no_loss_whoever_leaves_it_out(kind):
    """The plain loop is left out by the host, a fused one by the device."""
    x, y = class_data(16, dtype=torch.float32)
    rig = rig_for(plan=Plan().but(optimizer=kind), skip_nonfinite=True)
    rig.step((x, y))
    expected = rig.totals.mean()
    rig.step((torch.full_like(x, torch.inf), y))
    assert rig.totals.mean() == expected


class Piece:
    """Rows of an order, which begin at a place."""

    def __init__(self, start):
        self.start = start

    def shifted(self, by):
        return Piece(self.start + by)


def test_the_updates_of_a_window_take_the_samples_that_follow_each_other():
    window = Window([Piece(0), Piece(8)], [8, 3], all_count=True, updates=3)
    assert window.samples == 33
    second, third = window.update(1), window.update(2)
    assert [piece.start for piece in second.pieces] == [11, 19]
    assert [piece.start for piece in third.pieces] == [22, 30]
    assert (third.samples, third.updates, third.all_count) == (11, 1, True)
    alone = Window([Piece(0)], [8])
    assert alone.update(0) is alone
