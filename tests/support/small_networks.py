"""Small networks for tests on a GPU, each with the shape of its samples."""

import torch
from torch import nn


class Mlp(nn.Sequential):
    """No bias before a batch norm: its gradient is rounding alone, which Adam blows up."""

    shape = (20,)

    def __init__(self, dropout=0.0):
        torch.manual_seed(0)
        super().__init__(
            nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(dropout), nn.Linear(64, 3)
        )


class Lstm(nn.Module):
    shape = (9, 16)

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(16, 32, num_layers=2, dropout=dropout, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Cnn(nn.Module):
    shape = (3, 16, 16)

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.layers(x))
