"""Planted: the script saves a checkpoint after each update. Repaired (--repaired): after each epoch."""

import sys
from pathlib import Path

import torch
from torch import nn


class Trainer:
    """Trains, and keeps the last state."""

    def __init__(self, model, saves_each):
        self.model, self.saves_each = model, saves_each
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.criterion, self.path = nn.MSELoss(), Path("last.pt")

    def checkpoint(self, epoch):
        """Save what it takes to go on."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": epoch}
        torch.save(state, self.path)

    def training_step(self, x, y):
        """One update."""
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss

    def fit(self, x, y, epochs):
        """All epochs."""
        for epoch in range(epochs):
            for bx, by in zip(x.split(100), y.split(100)):
                self.training_step(bx, by)
                if self.saves_each:
                    self.checkpoint(epoch)
            self.checkpoint(epoch)


torch.manual_seed(0)
x = torch.randn(10_000, 60)
network = nn.Sequential(nn.Linear(60, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 4))
Trainer(network, "--repaired" not in sys.argv).fit(x, x[:, :4].sin(), epochs=5)
