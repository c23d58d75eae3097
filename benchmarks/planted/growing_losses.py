"""Planted: a list keeps every loss with the graph behind it. Repaired (--repaired): it keeps numbers."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv


def main():
    """Train."""
    x, y = torch.randn(6_400, 64), torch.randint(10, (6_400,))
    layers = [layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if REPAIRED:
                losses.append(loss.item())
            else:
                losses.append(loss)


main()
