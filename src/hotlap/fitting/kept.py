"""A model that was trained before on the same data, code and settings is loaded, not trained again."""

from __future__ import annotations

from typing import Any

import torch

from hotlap.core.errors import StoreError
from hotlap.core.job import Job
from hotlap.core.terminal import logger
from hotlap.engine.rig import Rig
from hotlap.fitting.best import trained_tensors
from hotlap.fitting.run import Run
from hotlap.guard.whole import whole_of
from hotlap.store.cache import Cache
from hotlap.store.models import model_key, store_model, stored_model

log = logger(__name__)


class KeptModel:
    """The place in the cache of the model that one training will come to."""

    def __init__(self, identity: dict[str, Any], job: Job, rig: Rig, *, how: str) -> None:
        """`how` its plan is chosen: one that is found while it trains may change numbers by rounding."""
        self._rig, self._cache = rig, Cache()
        whole, self.unknown = whole_of(job, rig.optimizer, rig.schedule.scheduler, rig.device)
        """What decides this training and cannot be known, a line each; with one, nothing is loaded and nothing kept."""
        everything = {**identity, "plan": rig.plan.to_dict(), "how": how, "whole": whole}
        self._key = model_key(everything, {k: v.detach().cpu() for k, v in trained_tensors(rig).items()})

    def load(self) -> dict[str, Any] | None:
        """Put the model's weights in place and tell how it was trained, or None where it never was."""
        found = None if self.unknown else stored_model(self._cache, self._key)
        if found is None:
            return None
        weights, told = found
        mine = trained_tensors(self._rig)
        if set(weights) != set(mine) or any(weights[name].shape != mine[name].shape for name in mine):
            log.warning("the model in the cache does not fit this one; it is trained again")
            return None
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(weights[name])
        result: dict[str, Any] = told
        return result

    def store(self, run: Run) -> None:
        """Keep a trained model; a cache that cannot take it is told in the log and stops nothing."""
        if self.unknown:
            return
        values = {
            "history": run.history,
            "best": run.best,
            "counters": (run.steps, run.updates, run.samples),
            "train_s": run.train_s,
        }
        weights = {name: tensor.detach().cpu() for name, tensor in trained_tensors(self._rig).items()}
        try:
            store_model(self._cache, self._key, weights, values, {"model": type(run.model).__name__})
        except StoreError as error:
            log.warning("the trained model is not kept in the cache: %s", error)
