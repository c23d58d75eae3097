"""How a learning rate moves in the recipes: up within the first updates, then down to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warm_up_and_cosine(share: float) -> Callable[[Optimizer, int], LambdaLR]:
    """For `Job(schedule=…)`: up in this share of the updates, then down along a cosine."""

    def made(optimizer: Optimizer, updates: int) -> LambdaLR:
        up = max(1, round(share * updates))

        def at(update: int) -> float:
            if update < up:
                return (update + 1) / up
            return 0.5 * (1 + math.cos(math.pi * min(1.0, (update - up) / max(1, updates - up))))

        return LambdaLR(optimizer, at)

    return made
