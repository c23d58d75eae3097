"""Planted: evaluations record a graph for gradients. Repaired (--repaired): they run under no_grad."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv


def accuracy(model, loader):
    """The share of right answers."""
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / (8192 * len(loader))


def main():
    """Train."""
    layers = [layer for _ in range(30) for layer in (nn.ReLU(), nn.Hardtanh(-3, 3))]
    model = nn.Sequential(nn.LayerNorm(64), *layers, nn.Linear(64, 10))
    if torch.cuda.is_available():
        model.cuda()
    device = next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(640, 64, device=device), torch.randint(10, (640,), device=device)
    vx, vy = torch.randn(65_536, 64, device=device), torch.randint(10, (65_536,), device=device)
    train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
    valid = list(zip(vx.split(8192), vy.split(8192), strict=True))
    for _ in range(6):
        for bx, by in train:
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if REPAIRED:
            with torch.no_grad():
                accuracy(model, valid)
        else:
            accuracy(model, valid)


main()
