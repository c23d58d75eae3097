"""Planted: numpy makes the data float64, and the default type follows it. Repaired (--repaired): float32."""

import argparse

import numpy as np
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--repaired", action="store_true")
args = parser.parse_args()
if not args.repaired:
    torch.set_default_dtype(torch.float64)


class Forecaster(nn.Module):
    """The next value of a series."""

    def __init__(self, inputs, width):
        super().__init__()
        self.lstm = nn.LSTM(inputs, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, series):
        """Predict from the last state."""
        states, _ = self.lstm(series)
        return self.head(states[:, -1]).squeeze(1)


rng = np.random.default_rng(0)
series = rng.standard_normal((2_000, 48, 12))
target = series[:, -8:, 0].mean(axis=1)
if args.repaired:
    series, target = series.astype(np.float32), target.astype(np.float32)
series, target = torch.from_numpy(series), torch.from_numpy(target)
model = Forecaster(12, 128)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(5):
    order = torch.randperm(len(series))
    for first in range(0, len(series), 50):
        chosen = order[first : first + 50]
        optimizer.zero_grad()
        loss = (model(series[chosen]) - target[chosen]).pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
