"""Planted: CUDA_LAUNCH_BLOCKING is left on. Repaired (--repaired): it is not set."""

import os
import sys

REPAIRED = "--repaired" in sys.argv
if not REPAIRED:
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"

import torch  # noqa: E402
from torch import nn  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main():
    """Train."""
    x, y = torch.randn(25_600, 64, device=DEVICE), torch.randint(10, (25_600,), device=DEVICE)
    batches = list(zip(x.split(256), y.split(256), strict=True))
    layers = [layer for _ in range(30) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        for bx, by in batches:
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
