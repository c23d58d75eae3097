"""Planted: batches are too small for the device. Repaired (--repaired): they are eight times as large."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    """Train."""
    x, y = torch.randn(4_000, 256, device=DEVICE), torch.randint(10, (4_000,), device=DEVICE)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.Adam(model.to(DEVICE).parameters())
    for _ in range(2):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=32 if REPAIRED else 4, shuffle=True):
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
