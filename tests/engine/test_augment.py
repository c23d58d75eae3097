"""Augmentation does what it says, to each sample by itself, and the same under every feed."""

import re

import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from hotlap import Job, fit
from hotlap.core.errors import JobError, TrainingError
from hotlap.core.plan import Plan
from hotlap.engine.augment import (
    Augment,
    Normalise,
    as_shares,
    coloured,
    cropped,
    flipped,
    mixed,
    one_hot,
)
from hotlap.engine.rig import Rig


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def pictures(count=64, size=8, dtype=torch.uint8):
    found = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8)
    return found if dtype is torch.uint8 else found.float() / 255


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_flip_mirrors_about_half_of_the_pictures_and_leaves_the_others(dtype):
    given = pictures(400, dtype=dtype)
    found = flipped(given)
    assert found.dtype is dtype
    is_same = (found == given).flatten(1).all(1)
    is_mirrored = (found == given.flip(-1)).flatten(1).all(1)
    assert (is_same ^ is_mirrored).all()
    assert 150 < int(is_mirrored.sum()) < 250


def test_a_crop_is_a_window_of_the_picture_with_its_own_place_and_size():
    # Each pixel holds where it is, so that a window can be read off its corners.
    side = 32
    places = (torch.arange(side) + 0.5) / side
    across = places.expand(side, side)
    given = torch.stack((across, across.T, torch.full((side, side), 0.5))).repeat(200, 1, 1, 1)
    found = cropped(given, 0.4)
    width = (found[:, 0, 0, -2] - found[:, 0, 0, 1]) / (places[-2] - places[1])
    height = (found[:, 1, -2, 0] - found[:, 1, 1, 0]) / (places[-2] - places[1])
    torch.testing.assert_close(width, height, rtol=0, atol=0.02)
    assert 0.58 < float(width.min()) < 0.65
    assert 0.95 < float(width.max()) < 1.02
    left = found[:, 0, 0, 1]
    assert len(left.unique()) > 190
    assert given.amin() - 1e-6 <= float(found[:, :2].amin())
    assert float(found[:, :2].amax()) <= given.amax() + 1e-6
    torch.testing.assert_close(found[:, 2], given[:, 2])
    torch.testing.assert_close(cropped(given, 0.0), given)


def test_colours_change_by_up_to_so_much_in_each_picture_by_itself():
    flat = torch.full((500, 3, 4, 4), 0.5)
    # Of one colour, contrast and saturation have nothing to change: brightness is left.
    found = coloured(flat, 0.2)[:, 0, 0, 0] / 0.5
    assert len(found.unique()) > 450
    assert 0.8 <= float(found.min()) < 0.82
    assert 1.18 < float(found.max()) <= 1.2 + 1e-6
    many = coloured(pictures(50, dtype=torch.float32), 0.9)
    assert 0 <= float(many.min()) <= float(many.max()) <= 1
    grey = torch.rand(20, 1, 4, 4).expand(20, 3, 4, 4)
    shades = coloured(grey, 0.5)
    torch.testing.assert_close(shades[:, 0], shades[:, 1])
    spread = coloured(pictures(300, dtype=torch.float32) * 0.2 + 0.4, 0.3)
    assert len(spread.flatten(1).std(1).unique()) > 290


def test_mixup_gives_target_and_picture_the_same_share_of_the_same_other():
    count = 300
    # Of one number each, pictures tell by themselves what they were mixed of.
    target = torch.arange(count).float()
    given = (target / count).reshape(-1, 1, 1, 1).expand(count, 3, 4, 4)
    found, told = mixed(given, target.unsqueeze(1), mixup=0.4)
    torch.testing.assert_close(found, (told / count).reshape(-1, 1, 1, 1).expand_as(found), rtol=0, atol=1e-6)
    assert not torch.equal(found, given)
    shares = one_hot(torch.arange(count) % 7, 7)
    _, told = mixed(given, shares, mixup=0.4)
    torch.testing.assert_close(told.sum(1), torch.ones(count))
    most = told.amax(1)
    assert len(most.unique()) > 100


def test_the_shares_of_mixup_are_drawn_from_its_beta():
    count = 20_000
    given, target = torch.zeros(count, 1, 1, 1), torch.zeros(count, 1)
    given[: count // 2], target[: count // 2] = 1, 1
    for both in (0.2, 1.0):
        _, told = mixed(given, target, mixup=both)
        # A half meets one of its own kind: of the others the share is that which was drawn.
        drawn = told[(told > 0) & (told < 1)]
        wanted = torch.distributions.Beta(both, both).variance
        assert abs(float(drawn.var()) / float(wanted) - 1) < 0.12, both


def test_cutmix_puts_a_box_of_another_picture_in_and_its_area_into_the_target():
    count, side = 200, 16
    number = torch.arange(count).float()
    given = number.reshape(-1, 1, 1, 1).expand(count, 3, side, side)
    found, told = mixed(given, one_hot(torch.arange(count), count), cutmix=1.0)
    is_own = found[:, 0] == number.reshape(-1, 1, 1)
    share = is_own.flatten(1).float().mean(1)
    torch.testing.assert_close(told[torch.arange(count), torch.arange(count)], share)
    boxed = 0
    for own in is_own:
        rows, columns = (~own).any(1), (~own).any(0)
        assert (~own == rows[:, None] & columns[None]).all()  # what is not its own is one box
        assert int(rows.diff().sum()) <= 2
        boxed += bool(rows.any())
    assert boxed > 150
    assert len(share.unique()) > 50


def test_with_both_each_picture_has_one_of_them():
    count = 400
    number = torch.arange(count).float()
    given = number.reshape(-1, 1, 1, 1).expand(count, 3, 8, 8)
    found, _ = mixed(given, number.unsqueeze(1), mixup=1.0, cutmix=1.0)
    is_flat = (found == found[:, :, :1, :1]).flatten(1).all(1)
    assert 120 < int(is_flat.sum()) < 320


def test_normalising_gives_these_numbers():
    layer = Normalise((0.5, 0.25, 0.0), (0.5, 0.25, 2.0))
    given = torch.tensor([0, 51, 255], dtype=torch.uint8).reshape(1, 3, 1, 1)
    torch.testing.assert_close(layer(given).flatten(), torch.tensor([-1.0, (0.2 - 0.25) / 0.25, 0.5]))
    assert torch.equal(layer(as_shares(given)), layer(given))
    assert set(layer.state_dict()) == {"mean", "spread"}
    many = pictures(500)
    mean, spread = as_shares(many).mean((0, 2, 3)), as_shares(many).std((0, 2, 3))
    done = Normalise(mean.tolist(), spread.tolist())(many)
    torch.testing.assert_close(done.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(done.std((0, 2, 3)), torch.ones(3), rtol=1e-5, atol=0)


def test_an_augment_does_all_it_is_told_and_leaves_the_batch_it_was_given():
    given, target = pictures(32), torch.arange(32) % 4
    before = given.clone()
    change = Augment(flip=True, crop=0.2, colour=0.2, mixup=0.4, cutmix=1.0, classes=4)
    found, told = change((given, target))
    assert torch.equal(given, before)
    assert (found.shape, found.dtype, told.shape) == (given.shape, torch.float32, (32, 4))
    torch.testing.assert_close(told.sum(1), torch.ones(32))
    again, _ = change((given, target))
    assert not torch.equal(found, again)
    plain, same = Augment()((given, target))
    assert torch.equal(plain, as_shares(given))
    assert same is target


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"crop": 1.0}, "crop=1.0 must be at least 0 and below 1"),
        ({"colour": -0.1}, "colour=-0.1"),
        ({"mixup": float("nan")}, "mixup=nan"),
    ],
)
def test_an_augment_that_makes_no_sense_is_refused(made, said):
    with pytest.raises(JobError, match=said):
        Augment(**made)


def test_batches_that_it_cannot_augment_are_said():
    with pytest.raises(TrainingError, match=r"Augment\(classes=…\)"):
        Augment(mixup=0.2)((pictures(4), torch.arange(4)))
    with pytest.raises(TrainingError, match=r"takes batches \(pictures, target\), not a dict of x"):
        Augment(flip=True)({"x": pictures(4)})


def small_network():
    torch.manual_seed(3)
    return nn.Sequential(Normalise(), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4))


def trained(plan, **settings):
    data = (pictures(48), torch.arange(48) % 4)
    torch.manual_seed(11)
    rig = Rig(
        small_network(),
        lambda p: torch.optim.SGD(p, lr=0.05),
        nn.CrossEntropyLoss(),
        augment=Augment(flip=True, crop=0.3, colour=0.3, mixup=0.4, cutmix=1.0, classes=4),
        plan=Plan().but(**plan),
        device="cpu",
    )
    losses = [rig.step(batch).clone() for batch in rig.feed(data, batch_size=10, epochs=2, seed=5, **settings)]
    weights = [p.detach().clone() for p in rig.model.parameters()]
    rig.close()
    return torch.stack(losses), weights


@pytest.mark.parametrize("feed", [{"kind": "loader"}, {"kind": "loader", "workers": 1}, {"kind": "resident"}])
def test_every_feed_trains_on_the_same_augmented_pictures(feed):
    torch.manual_seed(0)
    losses, weights = trained({"kind": "gather"})
    torch.manual_seed(0)
    mine, others = trained(feed)
    assert torch.equal(mine, losses)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


def test_a_sample_is_augmented_otherwise_in_each_epoch():
    seen = []
    change = Augment(flip=True, crop=0.3)

    def look(batch):
        seen.append(change(batch))
        return seen[-1]

    rig = Rig(small_network(), lambda p: torch.optim.SGD(p, lr=0.0), nn.CrossEntropyLoss(), augment=look, device="cpu")
    for batch in rig.feed((pictures(8), torch.arange(8) % 4), batch_size=8, epochs=2, order="as given"):
        rig.step(batch)
    rig.close()
    (first, _), (second, _) = seen
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Augment(crop="a"), "crop='a' must be at least 0 and below 1"),
        (lambda: Augment(mixup=None), "mixup=None must be 0 or a number above it"),
        (lambda: Augment(classes=2.5), "classes=2.5 must be 0 or a whole number"),
        (lambda: Normalise((0.5,), (0.0,)), "must not contain 0"),
        (lambda: Normalise((0.5, 0.5), (0.5,)), "2 means and 1 spreads"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(made, said):
    with pytest.raises(JobError, match=re.escape(said)):
        made()


def test_pictures_of_other_channels_or_without_samples_are_refused():
    with pytest.raises(TrainingError, match="for 3 channels, and pictures of"):
        Normalise()(torch.rand(2, 1, 4, 4))
    assert Normalise((0.5,), (0.5,))(torch.rand(2, 3, 4, 4)).shape == (2, 3, 4, 4)
    with pytest.raises(TrainingError, match=re.escape("not of shape (3, 8, 8)")):
        Augment(flip=True)((torch.rand(3, 8, 8), torch.tensor([0])))


def test_a_target_of_no_class_is_told_and_never_lost():
    pictures, target = torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 1])
    said = re.escape("target 2 is out of range: Augment(classes=2) has classes 0 to 1")
    with pytest.raises(TrainingError, match=said):
        Augment(mixup=0.2, classes=2)((pictures, target))
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    common = {"loss": nn.CrossEntropyLoss(), "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "batch_size": 2}
    augment = Augment(mixup=0.2, classes=2)
    for data in ((pictures, target), Subset(TensorDataset(pictures, target), [2, 3])):
        job = Job(model=model, data=data, epochs=1, device="cpu", augment=augment, **common)
        with pytest.raises(TrainingError, match=said):
            fit(job, plan="off", progress=False)
    fine = Subset(TensorDataset(pictures, target), [0, 1, 3])
    fit(Job(model=model, data=fine, epochs=1, device="cpu", augment=augment, **common), plan="off", progress=False)
