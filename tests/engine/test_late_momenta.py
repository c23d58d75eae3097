"""Momenta of parameters whose first gradient comes later than that of others, as under stochastic depth."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotlap
from hotlap.core.plan import Feed, Plan
from hotlap.engine.optimizers import why_not_fused
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan


class Depth(nn.Module):
    """Its second layer takes part from the 21st call on, and not in each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        h = self.one(x)
        return h + self.two(h) if self.calls > 20 and self.calls % 3 else h


X = torch.randn(96, 4, generator=torch.Generator().manual_seed(2))
Y = X.argmax(1)


def sgd(model, **settings):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, **settings)


def weights(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def trained_by_script(nesterov):
    model = Depth()
    optimizer = sgd(model, nesterov=nesterov)
    for _ in range(4):
        for x, y in DataLoader(TensorDataset(X, Y), batch_size=8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return weights(model)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_fused_step_of_a_rig_is_that_of_the_plain_loop(nesterov):
    found = []
    for kind in ("plain", "fused"):
        model = Depth()
        rig = hotlap.Rig(model, sgd(model, nesterov=nesterov), nn.CrossEntropyLoss(), device="cpu")
        batches = rig.feed((X, Y), batch_size=8, epochs=4, order="as given")
        rig.use(rig.plan.but(optimizer=kind))
        for batch in batches:
            rig.step(batch)
        rig.close()
        found.append(weights(model))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_fused_step_of_a_script_is_that_of_the_plain_loop(tmp_path, monkeypatch, nesterov):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    save_plan(Plan(feed=Feed(kind="loader")).but(optimizer="fused"), tmp_path / "plan.toml")
    own = trained_by_script(nesterov)
    with Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"))):
        made = trained_by_script(nesterov)
    torch.testing.assert_close(made, own)


def test_dampening_is_not_fused_since_a_first_gradient_is_not_dampened():
    assert "dampening" in why_not_fused(sgd(nn.Linear(2, 2), dampening=0.1))
    assert why_not_fused(sgd(nn.Linear(2, 2))) is None
