"""Planted: the script reads values back from the GPU in every update. Repaired (--repaired): once an epoch."""

import sys

import torch
from torch import nn

REPAIRED = "--repaired" in sys.argv
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    """Train."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(256, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(25_600, 256, device=DEVICE), torch.randint(10, (25_600,), device=DEVICE)
    batches = list(zip(x.split(256), y.split(256), strict=True))
    for _ in range(60):
        total = torch.zeros((), device=DEVICE)
        for bx, by in batches:
            out = model(bx)
            loss = nn.functional.cross_entropy(out, by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            if not REPAIRED:
                for name, parameter in model.named_parameters():
                    if not parameter.grad.norm().item() < 1e9:
                        raise SystemExit(f"{name} diverges")
        total.item()


main()
