"""Losses of captured calls on a real GPU: one replay leaves the gradients that autograd comes to."""

import functools

import pytest
import torch
from torch import nn

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.loss_replay import LossReplay

DEVICE = torch.device("cuda")
STEPS = 40


def mlp():
    first = (nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3))
    return nn.Sequential(*first, nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 5))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(20, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.lstm(x.unflatten(0, (-1, 4)))[0].flatten(0, 1))


def batches(classes):
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(32, 20, generator=draw)
        y = torch.randint(5, (32,), generator=draw) if classes else torch.randn(32, 5, generator=draw)
        yield x.to(DEVICE), y.to(DEVICE)


def trained(make, criterion, *, precision="fp32", ends=True, classes=True):
    """Losses, the last gradients and weights of a plain loop whose model is captured."""
    torch.manual_seed(0)
    module = make().to(DEVICE)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-3)
    loss_replay = LossReplay()
    call = ModuleCall(module, device=DEVICE, loss_replay=loss_replay)
    call.use(Numerics(precision=precision), Execution(mode="captured"))
    own = functools.partial(nn.Module.__call__, module)
    losses = []
    if ends:
        loss_replay.put()
    try:
        torch.manual_seed(3)
        for x, y in batches(classes):
            optimizer.zero_grad()
            loss = criterion(call(own, (x,), {}), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    finally:
        loss_replay.take_out()
    assert call.given_up is None
    grads = torch.cat([p.grad.flatten() for p in module.parameters()])
    return torch.stack(losses), grads, torch.cat([p.detach().flatten() for p in module.parameters()]), loss_replay.made


WEIGHTS = torch.rand(5).to(DEVICE) if torch.cuda.is_available() else None
CRITERIA = [
    (nn.CrossEntropyLoss(), True),
    (nn.CrossEntropyLoss(weight=WEIGHTS), True),
    (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), True),
    (nn.MSELoss(), False),
    (nn.BCEWithLogitsLoss(), False),
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("criterion", "classes"), CRITERIA)
@pytest.mark.parametrize("make", [mlp, Recurrent])
def test_the_training_is_the_one_that_autograd_makes(make, criterion, classes, precision):
    mine = trained(make, criterion, precision=precision, classes=classes)
    theirs = trained(make, criterion, precision=precision, classes=classes, ends=False)
    assert mine[3] > STEPS - 15
    assert not theirs[3]
    for one, other in zip(mine[:3], theirs[:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
