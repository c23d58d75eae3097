"""A stand-in for `torch.utils.tensorboard` where tensorboard is not installed: takes every call, writes nothing."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class SummaryWriter:
    """Takes every call."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


_module = ModuleType("torch.utils.tensorboard")
_module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
sys.modules["torch.utils.tensorboard"] = _module
