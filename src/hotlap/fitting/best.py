"""Early stopping: which evaluation was the best so far, its weights, and when to stop waiting for a better one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hotlap.core.job import Job
from hotlap.engine.rig import Rig
from hotlap.fitting.forged import counts, records
from hotlap.store.tensors import copied_to_host


class Best:
    """The best evaluation of a training; without `patience` nothing is kept and nothing stops."""

    def __init__(self, job: Job, rig: Rig) -> None:
        self._patience, self._rig = job.patience, rig
        self._name = "valid_loss" if job.monitor == "loss" else job.monitor
        self._higher = job.higher_is_better
        self.record: dict[str, Any] | None = None
        self._weights: dict[str, Tensor] = {}
        self._since = 0

    def judge(self, record: dict[str, Any]) -> None:
        """Take in an evaluation; the weights of a better one are kept."""
        if self._patience is None:
            return
        if self.record is None or self._beats(record[self._name], self.record[self._name]):
            self.record, self._since = record, 0
            self._weights = copied_to_host(trained_tensors(self._rig))
        else:
            self._since += 1

    def is_long_ago(self) -> bool:
        """Whether patience is at its end."""
        return self._patience is not None and self._since >= self._patience

    def restore_weights(self) -> None:
        """Give the model the weights of the best evaluation, where there is one."""
        with torch.no_grad():
            for name, tensor in trained_tensors(self._rig).items():
                kept = self._weights.get(name)  # a buffer may be younger than the best weights
                if kept is not None and kept.shape == tensor.shape:
                    tensor.copy_(kept)

    def export(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"record": self.record, "weights": self._weights, "since": self._since}

    def put_back(self, stored: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept; raises ValueError where that is something else."""
        record, weights, since = stored["record"], stored["weights"], stored["since"]
        counts(since)
        if record is not None:
            records(record)
        if not isinstance(weights, dict) or not all(isinstance(kept, Tensor) for kept in weights.values()):
            raise ValueError("the best weights are no tensors")
        self.record, self._weights, self._since = record, weights, since

    def _beats(self, new: float, old: float) -> bool:
        if math.isnan(old):
            return not math.isnan(new)
        return new > old if self._higher else new < old


def trained_tensors(rig: Rig) -> dict[str, Tensor]:
    """Every weight and buffer that training may change, the loss's own included."""
    return {
        f"{number}.{name}": tensor
        for number, module in enumerate(rig.modules)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
    }
