"""Layers that make something on the host in each call, and copy it to where their input is."""

import random

import numpy as np
import torch
from torch import nn


class Copying(nn.Module):
    """A small layer; `made` is what the call adds to its input, or multiplies it with."""

    shape = (5,)

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.calls = nn.Linear(5, 3), 0

    def forward(self, x):
        return self.layer(self.made(x))


class AddsAMask(Copying):
    def made(self, x):
        mask = torch.triu(torch.full((x.shape[0], 5), -0.5), diagonal=1)
        return x + mask.to(x.device)


class WeighsByNumbers(Copying):
    def made(self, x):
        return x * torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], device=x.device)


class TakesColumns(Copying):
    def made(self, x):
        return torch.cat([x[:, [0, 2, 4]], x[:, torch.tensor([1, 3])]], 1)


class WritesToItsState(Copying):
    def made(self, x):
        state = torch.zeros(1, 5).to(x.device)
        for _ in range(2):
            state += 0.5
        return x * state


class HasPositions(Copying):
    def made(self, x):
        return x + x.new_tensor([0, 1, 2, 3, 4]) + torch.arange(5).to(x)


class LikeARecurrentNet(Copying):
    def __init__(self):
        super().__init__()
        self.net = nn.LSTM(5, 5, batch_first=True)

    def made(self, x):
        first = torch.zeros(1, x.size(0), 5).to(x.device)
        return self.net(x[:, None], (first, first.clone()))[0][:, -1]


FIT = [AddsAMask, WeighsByNumbers, TakesColumns, WritesToItsState, HasPositions, LikeARecurrentNet]


class TakesWhatItHolds(Copying):
    def __init__(self):
        super().__init__()
        self.held = torch.linspace(0.0, 1.0, 5)

    def made(self, x):
        return x * self.held.to(x.device)


class TakesNumpy(Copying):
    def made(self, x):
        return x * torch.from_numpy(np.ones(5, dtype=np.float32)).to(x.device)


class Draws(Copying):
    def made(self, x):
        return x * torch.rand(5).to(x.device)


class DrawsInPython(Copying):
    def made(self, x):
        return x * torch.tensor([random.random()] * 5).to(x.device)


class Counts(Copying):
    def made(self, x):
        self.calls += 1
        return x * torch.full((5,), 1.0 / self.calls).to(x.device)


class AlsoReads(Copying):
    def made(self, x):
        return x * torch.tensor([0.5], device=x.device) * (1.0 if x.sum().item() > 0 else 2.0)


class SendsPinned(Copying):
    def made(self, x):
        return x * torch.full((5,), 0.5).pin_memory().to(x.device, non_blocking=True)


UNFIT = {
    TakesWhatItHolds: "copying.py:",
    TakesNumpy: "copying.py:",
    Draws: "randomness",
    DrawsInPython: "randomness",
    Counts: "copying.py:",
    AlsoReads: "copying.py:",
    SendsPinned: "pinned memory",
}


SHARES = [[0.5, 0.6], [0.7, 0.8]]


class TakesNumbers(Copying):
    """A layer that takes numbers from the host which a script changes in place."""

    def __init__(self):
        super().__init__()
        self.warmth, self.rates, self.table = torch.tensor(0.5), np.ones(3), [[1.0, 2.0, 3.0, 4.0, 5.0]]

    def made(self, x):
        x = x * self.warmth * float(self.rates[1]) + torch.tensor(SHARES[1], device=x.device).sum()
        return x * torch.tensor(self.table, device=x.device)

    def change(self, number):
        """Change one of them."""
        if number == 6:
            self.warmth.fill_(0.25)
        elif number == 8:
            self.rates[1] = 0.5
        elif number == 10:
            self.table[0][3] = -1.0
        elif number == 12:
            SHARES[1][0] = 2.5
