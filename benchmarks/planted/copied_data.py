"""Planted: each batch is copied three times before the model sees it. Repaired (--repaired): it is not."""

import sys

import torch
from torch import nn

REPAIRED = "--repaired" in sys.argv


def main():
    """Train."""
    x, y = torch.randn(256, 3, 224, 224), torch.randint(10, (256,))
    model = nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(3 * 28 * 28, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = list(zip(x.split(64), y.split(64), strict=True))
    for step in range(120):
        bx, by = batches[step % len(batches)]
        if not REPAIRED:
            bx = bx.clone()
            bx = torch.tensor(bx)
            bx = bx.detach().clone()
        loss = nn.functional.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
