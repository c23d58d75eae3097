"""Planted: a validation loss every 40 updates records its graph. Repaired (--repaired): under inference_mode."""

import contextlib
import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

bare = torch.inference_mode if "--repaired" in sys.argv else contextlib.nullcontext


class Net(nn.Module):
    """Two convolutions with norms."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4 * 14 * 14, 10)

    def forward(self, x):
        """Logits."""
        x = F.gelu(self.norm(self.first(x))).sigmoid().mul(2).tanh()
        x = F.silu(F.avg_pool2d(self.second(x), 2)).sigmoid().mul(2).tanh()
        return self.head(x.flatten(1))


def validation_loss(net, loader):
    """The mean loss."""
    losses = []
    with bare():
        for x, y in loader:
            losses.append(F.cross_entropy(net(x), y).item())
    return sum(losses) / len(losses)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
data = TensorDataset(torch.randn(4_000, 1, 28, 28), torch.randint(10, (4_000,)))
held_out = TensorDataset(torch.randn(3_000, 1, 28, 28), torch.randint(10, (3_000,)))
train_loader = DataLoader(data, batch_size=20, shuffle=True)
valid_loader = DataLoader(held_out, batch_size=500)
step = 0
while step < 320:
    for x, y in train_loader:
        net.train()
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        step += 1
        if step % 40 == 0:
            net.eval()
            validation_loss(net, valid_loader)
        if step == 320:
            break
