"""Data that changes while it is held on a GPU: every step has what the loop without hotlap has."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hotlap import Plan, Rig
from hotlap.core.plan import Feed
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan

DEVICE = torch.device("cuda")
COUNT, SIZE = 256, 32
X = torch.randn(COUNT, 12, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Scaled(Dataset):
    def __init__(self):
        self.x, self.y, self.scale = X.clone(), Y.clone(), 1.0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index] * self.scale, self.y[index]


def tensors():
    return TensorDataset(X.clone(), Y.clone())


def replace(data):
    data.tensors = (X / 2, 1 - Y)


CHANGES = {
    "an attribute": (Scaled, lambda data: setattr(data, "scale", -2.0)),
    "a tensor written to": (Scaled, lambda data: data.y.copy_(1 - Y)),
    "tensors written to": (tensors, lambda data: data.tensors[1].copy_(1 - Y)),
    "other tensors": (tensors, replace),
}
WHEN = (16, 29)
"""Batches before which data changes: at the beginning of the third epoch, and within the fourth."""


def train(name):
    make, change = CHANGES[name]
    torch.manual_seed(1)
    data, model, seen = make(), nn.Linear(12, 2).to(DEVICE), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, number = DataLoader(data, batch_size=SIZE, shuffle=True), 0
    for _ in range(6):
        if number in WHEN:
            change(data)
        for x, y in loader:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            seen.append((x.cpu(), y.cpu()))
            number += 1
            if number in WHEN and number % len(loader):
                change(data)
    return seen


@pytest.mark.parametrize("kind", ["resident", "stream", "gather"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_script_whose_data_changes_sends_the_same_batches(name, kind, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    wanted = train(name)
    save_plan(Plan(feed=Feed(kind=kind)), tmp_path / "plan.toml")
    with Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"))):
        seen = train(name)
    assert len(seen) == len(wanted)
    for number, (mine, theirs) in enumerate(zip(seen, wanted, strict=True)):
        assert torch.equal(mine[0], theirs[0]), number
        assert torch.equal(mine[1], theirs[1]), number


def losses(name, plan):
    make, change = CHANGES[name]
    torch.manual_seed(1)
    data, found = make(), []
    model = nn.Linear(12, 2).to(DEVICE)
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), plan=plan)
    for number, window in enumerate(rig.feed(data, batch_size=SIZE, epochs=6), 1):
        found.append(rig.step(window).detach().clone())
        if number in WHEN:
            change(data)
    return torch.stack([loss.reshape(()) for loss in found]).cpu(), model.weight.detach().cpu()


@pytest.mark.parametrize("mode", ["eager", "captured"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_rig_whose_data_changes_makes_the_same_updates(name, mode):
    wanted = losses(name, None)
    seen = losses(name, Plan().but(kind="resident", mode=mode))
    assert torch.allclose(seen[0], wanted[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(seen[1], wanted[1], rtol=1e-4, atol=1e-5)
