"""hotlap makes PyTorch training fast by measuring.

Nothing here imports torch until a name is used, so that the command answers at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers, which do not run what is below
    from hotlap.core.errors import DataError as DataError
    from hotlap.core.errors import HotlapError as HotlapError
    from hotlap.core.errors import JobError as JobError
    from hotlap.core.errors import MachineError as MachineError
    from hotlap.core.errors import PlanError as PlanError
    from hotlap.core.errors import StoreError as StoreError
    from hotlap.core.errors import TrainingError as TrainingError
    from hotlap.core.job import Job as Job
    from hotlap.core.ledger import Ledger as Ledger
    from hotlap.core.plan import Execution as Execution
    from hotlap.core.plan import Feed as Feed
    from hotlap.core.plan import Memory as Memory
    from hotlap.core.plan import Numerics as Numerics
    from hotlap.core.plan import Plan as Plan
    from hotlap.data.parallel import parallel_map as parallel_map
    from hotlap.data.pictures import Pictures as Pictures
    from hotlap.data.pictures import decoded as decoded
    from hotlap.data.sequences import Sequences as Sequences
    from hotlap.data.tokenising import Tokens as Tokens
    from hotlap.data.tokenising import tokenised as tokenised
    from hotlap.data.windows import Windows as Windows
    from hotlap.engine.augment import Augment as Augment
    from hotlap.engine.augment import Normalise as Normalise
    from hotlap.engine.rig import Rig as Rig
    from hotlap.fitting.fit import fit as fit
    from hotlap.fitting.run import Run as Run
    from hotlap.kit.calls import batch as batch
    from hotlap.kit.calls import diagnose as diagnose
    from hotlap.kit.calls import gpus as gpus
    from hotlap.kit.calls import memory as memory
    from hotlap.kit.calls import workers as workers
    from hotlap.monitor.watch import watch as watch
    from hotlap.recipes.calls import load as load
    from hotlap.recipes.calls import predict as predict
    from hotlap.recipes.calls import train as train
    from hotlap.searching.many import fit_many as fit_many
    from hotlap.searching.search import Search as Search
    from hotlap.searching.search import search as search
    from hotlap.store.files import load_plan as load_plan
    from hotlap.store.files import save_plan as save_plan
    from hotlap.store.weights import load_weights as load_weights
    from hotlap.tuner.tuner import Tuner as Tuner

__version__ = "0.1.0"

_HOME = {
    "Augment": "hotlap.engine.augment",
    "DataError": "hotlap.core.errors",
    "Feed": "hotlap.core.plan",
    "HotlapError": "hotlap.core.errors",
    "Job": "hotlap.core.job",
    "JobError": "hotlap.core.errors",
    "Ledger": "hotlap.core.ledger",
    "MachineError": "hotlap.core.errors",
    "Memory": "hotlap.core.plan",
    "Execution": "hotlap.core.plan",
    "Normalise": "hotlap.engine.augment",
    "Numerics": "hotlap.core.plan",
    "Pictures": "hotlap.data.pictures",
    "Plan": "hotlap.core.plan",
    "PlanError": "hotlap.core.errors",
    "Rig": "hotlap.engine.rig",
    "Run": "hotlap.fitting.run",
    "Search": "hotlap.searching.search",
    "Sequences": "hotlap.data.sequences",
    "StoreError": "hotlap.core.errors",
    "Tokens": "hotlap.data.tokenising",
    "TrainingError": "hotlap.core.errors",
    "Tuner": "hotlap.tuner.tuner",
    "Windows": "hotlap.data.windows",
    "batch": "hotlap.kit.calls",
    "decoded": "hotlap.data.pictures",
    "diagnose": "hotlap.kit.calls",
    "fit": "hotlap.fitting.fit",
    "fit_many": "hotlap.searching.many",
    "gpus": "hotlap.kit.calls",
    "load": "hotlap.recipes.calls",
    "load_plan": "hotlap.store.files",
    "load_weights": "hotlap.store.weights",
    "memory": "hotlap.kit.calls",
    "parallel_map": "hotlap.data.parallel",
    "predict": "hotlap.recipes.calls",
    "save_plan": "hotlap.store.files",
    "search": "hotlap.searching.search",
    "tokenised": "hotlap.data.tokenising",
    "train": "hotlap.recipes.calls",
    "watch": "hotlap.monitor.watch",
    "workers": "hotlap.kit.calls",
}
"""Where each public name lives."""

__all__ = sorted(["__version__", *_HOME])


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hotlap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext hotlap`: make the training in this notebook faster from here on."""
    importlib.import_module("hotlap.script.notebook").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """`%unload_ext hotlap`: take everything back."""
    importlib.import_module("hotlap.script.notebook").unload(shell)
