"""What the recipe `temporal` can be told."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hotlap.core.errors import JobError, did_you_mean, shown
from hotlap.recipes.options import MOST, Options, option, outside

MODELS = ("lstm", "transformer", "mlp")
UNITS = {"m": 60, "h": 3600, "d": 86400}
LONGEST_S = 400 * 86400
"""A frame of more seconds is none: that is longer than a year."""
AUTO = "auto"
"""In place of frames."""
JUDGED_BARS = 2**17
"""Of all windows together that are answered at a time, unless four batches have more."""


@dataclass(frozen=True, kw_only=True)
class TemporalOptions(Options):
    """What the recipe can be told."""

    target: str = option("direction", "the name of the answers' column")
    group: str = option("", "not for bars, of which the last part is held out")
    frames: tuple[str, ...] = option(
        (AUTO,),
        "longer bars that are made of the file's own and joined to them; auto: h1 and h4 where longer",
    )
    length: int = option(20, "bars in a window", most=10_000)
    ahead: int = option(4, "bars to look ahead")
    threshold: float = option(1.0, "how far is up or down: a multiple of the volatility, or a share of the price")
    volatility: int = option(96, "bars over which the volatility is taken; 0: the threshold is a share of the price")
    models: tuple[str, ...] = option(MODELS, "which to train; the best is kept")
    batch_size: int = option(256, "samples an update")
    patience: int = option(5, "evaluations without improvement before it stops")
    warm_up: float = option(0.05, "the share of updates in which the learning rate rises")
    smoothing: float = option(0.05, "of labels")
    clip: float = option(0.5, "the largest norm of all gradients together")
    weight_decay: float = option(0.01, "of AdamW")
    balance: bool = option(True, "weigh classes by how rare they are")
    folds: int = option(0, "walk forward: as many times train on what came before, judge on what comes next", most=1000)
    onnx: bool = option(False, "write the best model as model.onnx too")

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [
            f"{name}={getattr(self, name)} must be at least 1"
            for name in ("length", "ahead")
            if getattr(self, name) < 1
        ]
        wrong += outside(self, folds=(0, MOST), warm_up=(0, 1), smoothing=(0, 1), weight_decay=(0, MOST))
        wrong += [
            f"{name}={getattr(self, name)} must be above 0"
            for name in ("threshold", "clip")
            if not 0 < getattr(self, name) <= MOST
        ]
        if self.volatility != 0 and self.volatility < 2:
            wrong.append(f"volatility={self.volatility} must be 0, or at least 2")
        if self.group:
            wrong.append(f"group={self.group} is not for bars, of which the last part is held out; leave it out")
        wrong += [
            f"no model is called {shown(name)}{did_you_mean(name, MODELS)}"
            for name in self.models
            if name not in MODELS
        ]
        if self.frames != (AUTO,):
            unknown = [name for name in self.frames if not seconds_of(name)]
            wrong += [f"frame {shown(name)} is none; write m30, h1, h4, d1" for name in unknown]
        if not self.models:
            wrong.append(f"models is empty; name some of {', '.join(MODELS)}")
        if wrong:
            raise JobError(wrong)

    @property
    def judged_at_once(self) -> int:
        """Windows that are answered at a time: they are small, and few of them at a time keep no GPU busy."""
        return self._judged_within(JUDGED_BARS, self.length)


def seconds_of(frame: str) -> int | None:
    """How long a bar of a frame is, as traders write it; None where it is none."""
    found = re.fullmatch(r"([mhd])(\d+)|(\d+)([mhd])", frame.strip().lower())
    if not found:
        return None
    unit, number = found[1] or found[4], int(found[2] or found[3])
    seconds = number * UNITS[unit]
    return seconds if 0 < seconds <= LONGEST_S else None
