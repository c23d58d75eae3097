"""Planted: the model stays on the CPU though a GPU works. Repaired (--repaired): it is on the GPU."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv
DEVICE = "cuda" if REPAIRED and torch.cuda.is_available() else "cpu"


def main():
    """Train."""
    x, y = torch.randn(6_400, 512), torch.randint(10, (6_400,))
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=128, shuffle=True):
            loss = nn.functional.cross_entropy(model(bx.to(DEVICE)), by.to(DEVICE))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
