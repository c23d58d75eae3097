"""Planted: a sample kills the worker that loads it. Repaired (--repaired): it does not."""

import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

REPAIRED = "--repaired" in sys.argv


class Samples(Dataset):
    """Rows of noise."""

    def __len__(self):
        return 3200

    def __getitem__(self, index):
        if index == 1900 and not REPAIRED and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(64), index % 10


def main():
    """Train."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for bx, by in DataLoader(Samples(), batch_size=32, num_workers=1):
        loss = nn.functional.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
