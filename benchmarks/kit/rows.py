"""What every part of the benchmark has: requirements, and how it is to be run."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Row:
    """One requirement and what was seen."""

    part: str
    what: str
    seen: str
    kept: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is to be run."""

    device: str
    quick: bool
    files: int


def wait(device: torch.device) -> None:
    """Until all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
