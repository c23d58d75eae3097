"""What the recipe `price` trains: prices on their scale, the network around an encoder, and the blend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.recipes.price_pictures import PictureBranch
from hotlap.recipes.recipe import Numbers
from hotlap.recipes.scores import number_report
from hotlap.recipes.text import Pooled

SHARES = 20
"""The blend's shares are multiples of one of so many parts."""
BRANCH, HIDDEN = 64, 128
"""Widths of the network beside the encoder: of the numbers, and of the last layer but one."""
BEYOND = 1.0
"""An answer is at most so many deviations beyond the prices that were trained on."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Prices as models learn them: standardised, of their logarithms where that helps."""

    in_logs: bool
    mean: float
    deviation: float
    low: float
    high: float
    """Ends of the standardised prices that were trained on."""

    @classmethod
    def fit(cls, prices: Numbers, in_logs: bool) -> Scale:
        """The scale of these prices."""
        plain = np.log(prices) if in_logs else prices
        mean, deviation = float(plain.mean()), float(plain.std()) or 1.0
        low, high = ((float(end) - mean) / deviation for end in (plain.min(), plain.max()))
        return cls(in_logs=in_logs, mean=mean, deviation=deviation, low=low, high=high)

    def standardised(self, prices: Numbers) -> Numbers:
        """What a model has to answer for these prices."""
        found: Numbers = ((np.log(prices) if self.in_logs else prices) - self.mean) / self.deviation
        return found

    def prices(self, z: Any) -> Any:
        """The prices of what a model answers, an array or a tensor."""
        plain = z.clip(self.low - BEYOND, self.high + BEYOND) * self.deviation + self.mean
        if not self.in_logs:
            return plain
        return plain.exp() if isinstance(plain, Tensor) else np.exp(plain)


class Smape:
    """SMAPE in per cent of each sample, of standardised prices."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        """A value for each sample."""
        answered, price = (self._scale.prices(values.double()) for values in (output, target))
        size = (answered.abs() + price.abs()) / 2
        found: Tensor = 100 * (answered - price).abs() / size.clamp(min=1e-12)
        return found


class Blend(nn.Module):
    """What a file holds of a blend: the shares, and the network where it is a part."""

    shares: Tensor

    def __init__(self, count: int, network: nn.Module | None) -> None:
        super().__init__()
        self.register_buffer("shares", torch.zeros(count, dtype=torch.float64))
        self.network = network

    @staticmethod
    def weights_of(shares: Numbers, network: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights that a blend of these shares, and of a network with these weights, has."""
        return {"shares": torch.from_numpy(shares), **{f"network.{name}": tensor for name, tensor in network.items()}}


class PriceNetwork(Pooled):
    """The mean over a text's tokens beside a branch of numbers, and one of pictures; two layers for the price."""

    def __init__(self, encoder: nn.Module, width: int, numbers: int, dropout: float, *, sees_pictures: bool) -> None:
        super().__init__(encoder, dropout)
        self.branch = nn.Sequential(nn.Linear(numbers, BRANCH), nn.GELU(), nn.Dropout(dropout))
        self.pictures = PictureBranch(BRANCH) if sees_pictures else None
        inputs = width + BRANCH + (BRANCH + 1 if sees_pictures else 0)
        self.head = nn.Sequential(nn.Linear(inputs, HIDDEN), nn.GELU(), nn.Dropout(dropout), nn.Linear(HIDDEN, 1))

    def forward(
        self, numbers: Tensor, pixels: Tensor | None = None, has_picture: Tensor | None = None, **batch: Tensor
    ) -> Tensor:
        """A standardised price for each text."""
        seen = [self.dropout(self.embedded(**batch)), self.branch(numbers)]
        if self.pictures is not None:
            seen.append(self.pictures(pixels, has_picture))
        prices: Tensor = self.head(torch.cat(seen, 1)).squeeze(1)
        return prices


def best_shares(parts: Mapping[str, Numbers], target: Numbers, scale: Scale) -> tuple[Numbers, Numbers]:
    """The shares of one or two models whose mix has the least SMAPE, and the mix; a part alone is among those tried."""
    tried = [np.array([SHARES - at, at]) / SHARES for at in range(SHARES + 1)] if len(parts) > 1 else [np.ones(1)]
    each = [scale.standardised(prices) for prices in parts.values()]
    mixes = [scale.prices(sum(share * z for share, z in zip(shares, each, strict=True))) for shares in tried]
    best = int(np.argmin([number_report(target, mix)["smape"] for mix in mixes]))
    return tried[best], mixes[best]


def skewness(values: Numbers) -> float:
    """The third standardised moment; 0 where all are equal."""
    deviation = float(values.std())
    return float((((values - values.mean()) / deviation) ** 3).mean()) if deviation else 0.0
