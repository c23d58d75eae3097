"""Planted: a log is written and synchronised to the disk in every update. Repaired (--repaired): once an epoch."""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

REPAIRED = "--repaired" in sys.argv


class Logger:
    """Keeps all losses in a file."""

    def __init__(self, path):
        self.file, self.losses = open(path, "w"), []  # noqa: PTH123, SIM115

    def note(self, loss):
        """Note a loss."""
        self.losses.append(loss)
        if not REPAIRED:
            self.write()

    def write(self):
        """Write all of them."""
        self.file.seek(0)
        self.file.write(json.dumps(self.losses, indent=1))
        self.file.flush()
        os.fsync(self.file.fileno())


def main():
    """Train."""
    x, y = torch.randn(6_400, 64), torch.randint(10, (6_400,))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    logger = Logger("log.json")
    for _ in range(3):
        for bx, by in DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True):
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.note(loss.item())
        logger.write()


main()
