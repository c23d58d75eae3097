"""hotlap makes PyTorch training fast by measuring.

Nothing here imports torch until a name is used, so that the command answers at once.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "DataError": "hotlap.core.errors",
    "Feed": "hotlap.core.plan",
    "HotlapError": "hotlap.core.errors",
    "Job": "hotlap.core.job",
    "JobError": "hotlap.core.errors",
    "Ledger": "hotlap.core.ledger",
    "MachineError": "hotlap.core.errors",
    "Memory": "hotlap.core.plan",
    "Execution": "hotlap.core.plan",
    "Numerics": "hotlap.core.plan",
    "Plan": "hotlap.core.plan",
    "PlanError": "hotlap.core.errors",
    "Rig": "hotlap.engine.rig",
    "Run": "hotlap.fitting.run",
    "StoreError": "hotlap.core.errors",
    "TrainingError": "hotlap.core.errors",
    "fit": "hotlap.fitting.loop",
    "load_plan": "hotlap.store.plans",
    "load_weights": "hotlap.store.loading",
    "save_plan": "hotlap.store.plans",
}
"""Where each public name lives."""

__all__ = sorted(["__version__", *_HOME])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hotlap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
