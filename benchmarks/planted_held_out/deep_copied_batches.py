"""Planted: each batch is deep-copied for safety, twice. Repaired (--repaired): it is used as it is."""

import copy
import sys

import torch
from torch import nn

REPAIRED = "--repaired" in sys.argv


class Signals:
    """Batches of long signals."""

    def __init__(self, count, length):
        self.x, self.y = torch.randn(count, 8, length), torch.randn(count, 1)

    def __iter__(self):
        for first in range(0, len(self.x), 40):
            batch = {"x": self.x[first : first + 40], "y": self.y[first : first + 40]}
            yield batch if REPAIRED else copy.deepcopy(batch)


def update(model, optimizer, batch):
    """One update."""
    if not REPAIRED:
        batch = copy.deepcopy(batch)
    loss = (model(batch["x"]) - batch["y"]).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


model = nn.Sequential(nn.AvgPool1d(64), nn.Conv1d(8, 16, 5), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
signals = Signals(400, 16_384)
for _ in range(20):
    for batch in signals:
        update(model, optimizer, batch)
