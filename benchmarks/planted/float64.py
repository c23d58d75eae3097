"""Planted: the model and its data are float64 by accident. Repaired (--repaired): float32."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv


def main():
    """Train."""
    x, y = torch.randn(12_800, 256, dtype=torch.float64), torch.randint(10, (12_800,))
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    if REPAIRED:
        x = x.float()
    else:
        model = model.double()
    if torch.cuda.is_available():
        model, x, y = model.cuda(), x.cuda(), y.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=256, shuffle=True):
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
