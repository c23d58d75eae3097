"""Planted: the gradients of every update stay in a list. Repaired (--repaired): only their norms do."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv


def main():
    """Train."""
    x, y = torch.randn(6_400, 256), torch.randint(10, (6_400,))
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    history = []
    for _ in range(4):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            if REPAIRED:
                history.append([p.grad.norm().item() for p in model.parameters()])
            else:
                history.append([p.grad.clone() for p in model.parameters()])
            optimizer.step()


main()
