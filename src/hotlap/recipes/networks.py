"""Networks over windows of a series: each gives a row of scores for a window of (length × features)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


class AttentiveLstm(nn.Module):
    """An LSTM both ways, two layers of 128, and a weighted mean of its steps, whose weights it learns."""

    def __init__(self, features: int, classes: int, *, width: int = 128, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.attention = nn.Linear(2 * width, 1)
        self.head = nn.Sequential(nn.LayerNorm(2 * width), nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        steps, _ = self.lstm(x)
        weights = self.attention(steps).softmax(1)
        scores: Tensor = self.head((steps * weights).sum(1))
        return scores


class WindowTransformer(nn.Module):
    """Encoder layers of width 128 over the steps of a window, with places learnt; the mean of all steps."""

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        length: int,
        width: int = 128,
        heads: int = 4,
        layers: int = 3,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(features, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.places, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.encoder(self.project(x) + self.places).mean(1))
        return scores


class LastStep(nn.Module):
    """A network of plain layers over the last step of a window: 128-96-64-32."""

    def __init__(self, features: int, classes: int, *, dropout: float = 0.2) -> None:
        super().__init__()
        widths = (features, 128, 96, 64, 32)
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*blocks, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.layers(x[:, -1])
        return scores
