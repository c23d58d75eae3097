"""Pictures on a real GPU: augmented there within captured steps, with new luck in each replay, from disk or held."""

import numpy as np
import pytest
import torch
from plain import parameters_of
from torch import nn
from torch.utils.data import Subset, TensorDataset
from waiting import no_waiting

from hotlap import Augment, Normalise, Plan, Rig
from hotlap.engine.capture.captured_step import CapturedStep
from hotlap.store.cache import Cache, key_of

DEVICE = "cuda"
EVERYTHING = Augment(flip=True, crop=0.3, colour=0.3, mixup=0.4, cutmix=1.0, classes=4)


@pytest.fixture(autouse=True)
def _exact(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture
def data(tmp_path):
    """Pictures that stay on disk, of which some are left out."""
    numbers = np.random.default_rng(0)
    pixels = torch.from_numpy(numbers.integers(0, 256, (100, 3, 16, 16), dtype=np.uint8))
    cache, key = Cache(tmp_path / "cache"), key_of("pictures")
    cache.put("pictures", key, tensors={"pixels": pixels}, facts={})
    mapped = cache.get("pictures", key, on_disk=True).tensors["pixels"]
    return Subset(TensorDataset(mapped, torch.arange(100) % 4), [at for at in range(100) if at % 10])


def network():
    torch.manual_seed(3)
    return nn.Sequential(Normalise(), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 4))


def trained(plan, data, *, augment=EVERYTHING, lr=0.02, epochs=4):
    torch.manual_seed(7)
    rig = Rig(
        network(),
        lambda parameters: torch.optim.SGD(parameters, lr=lr),
        nn.CrossEntropyLoss(),
        augment=augment,
        plan=plan,
        device=DEVICE,
    )
    losses = [rig.step(window).clone() for window in rig.feed(data, batch_size=15, epochs=epochs)]
    recorded = sum(step.recorded for step in rig._steps.values() if isinstance(step, CapturedStep))
    weights = parameters_of(rig.model).clone()
    rig.close()
    return torch.stack(losses).double(), weights, recorded


@pytest.mark.parametrize("kind", ["resident", "gather", "stream", "loader"])
def test_augmented_pictures_are_the_same_under_every_feed_eager_or_captured(kind, data):
    theirs = trained(Plan().but(kind="gather"), data)
    eager, captured = (trained(Plan().but(kind=kind, mode=mode), data) for mode in ("eager", "captured"))
    assert captured[2] >= 1
    for mine in (eager, captured):
        torch.testing.assert_close(mine[0], theirs[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=1e-5)


def test_every_replay_draws_anew(data):
    # Without learning, losses of one batch differ by augmentation alone.
    whole = Subset(data.dataset, list(range(15)))
    losses, _, recorded = trained(Plan().but(kind="resident", mode="captured"), whole, lr=0.0, epochs=20)
    assert recorded == 1
    assert len(losses.unique()) == 20


def test_augmenting_waits_for_nothing():
    pixels = torch.randint(0, 256, (32, 3, 24, 24), dtype=torch.uint8, device=DEVICE)
    target = torch.arange(32, device=DEVICE) % 4
    EVERYTHING((pixels, target))  # libraries set themselves up
    torch.cuda.synchronize()
    with no_waiting():
        found, told = EVERYTHING((pixels, target))
    torch.testing.assert_close(told.sum(1), torch.ones(32, device=DEVICE))
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_a_large_batch_is_recorded_too(data):
    """Sorting by draws takes another way for many than for few."""
    many = TensorDataset(data.dataset.tensors[0].repeat(50, 1, 1, 1)[:, :, :8, :8].contiguous(), torch.arange(5000) % 4)

    def losses(mode):
        torch.manual_seed(7)
        net = nn.Sequential(Normalise(), nn.Flatten(), nn.Linear(192, 4))
        rig = Rig(
            net, lambda p: torch.optim.SGD(p, lr=0.01), nn.CrossEntropyLoss(), augment=EVERYTHING, device=DEVICE,
            plan=Plan().but(kind="resident", mode=mode),
        )  # fmt: skip
        found = [rig.step(window).clone() for window in rig.feed(many, batch_size=2500, epochs=5)]
        rig.close()
        return torch.stack(found)

    torch.testing.assert_close(losses("captured"), losses("eager"), rtol=1e-4, atol=1e-5)
