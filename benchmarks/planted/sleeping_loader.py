"""Planted: the loader sleeps for each sample. Repaired (--repaired): it does not."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

REPAIRED = "--repaired" in sys.argv


class Samples(Dataset):
    """Rows of noise."""

    def __len__(self):
        return 1600

    def __getitem__(self, index):
        if not REPAIRED:
            time.sleep(0.0005)
        return torch.randn(64), index % 10


def main():
    """Train."""
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(), batch_size=32, shuffle=True)
    for _ in range(8):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


main()
