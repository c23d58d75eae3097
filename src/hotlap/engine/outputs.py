"""Outputs of a model in evaluation, by replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.data.batches import Batch, map_tensors
from hotlap.data.columns import tensors_in
from hotlap.engine.fingerprint import fingerprint
from hotlap.engine.graph import Unfit, shape_of
from hotlap.engine.recording import NotRecordedError, Recorder
from hotlap.engine.watch import Watch

WORTH_IT = 8
"""Batches of one shape before it is recorded: a short evaluation is over before that pays."""
MOST_GRAPHS = 16
"""Shapes that are recorded at a time."""
MOST_IN_VAIN = 3
"""States of a model in a row whose recordings were hardly replayed before it changed again."""


class CapturedOutputs:
    """Outputs and targets of batches, replayed. They are overwritten by the next call for a batch of that shape."""

    def __init__(
        self,
        eager: Callable[[Batch], tuple[Any, Any]],
        modules: Sequence[nn.Module],
        functions: Sequence[Callable[..., Any] | None],
        device: torch.device,
    ) -> None:
        self._eager, self._modules, self._functions, self._device = eager, modules, functions, device
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, Any]]] = {}
        self._made_for: Hashable = None
        self._replays = self._in_vain = 0
        self._recorder = Recorder(device)
        self.given_up: str | None = None
        """Why nothing is captured, once that is known."""

    def __call__(self, batch: Batch) -> tuple[Any, Any]:
        """The model's output for a batch on the device, and its target."""
        if self.given_up is not None:
            return self._eager(batch)
        try:
            shape = shape_of(batch)
        except Unfit:
            self.given_up = "batches hold more than tensors and plain values"
            return self._eager(batch)
        self._check_validity()
        if self._in_vain == MOST_IN_VAIN:
            self.given_up = "the model changes from evaluation to evaluation"
            return self._eager(batch)
        if shape in self._graphs:
            self._replays += 1
            graph, inputs, outputs = self._graphs[shape]
            for static, tensor in zip(inputs, tensors_in(batch), strict=True):
                static.copy_(tensor, non_blocking=True)
            graph.replay()
            return outputs
        self._seen[shape] += 1
        if self._seen[shape] < WORTH_IT:
            return self._eager(batch)
        with self._recorder.aside(), Watch(self._modules, self._device) as watch:
            made = self._eager(batch)
        self.given_up = watch.reason
        if self.given_up is None:
            self._record(shape, batch)
        return made

    def _check_validity(self) -> None:
        """Drop what was recorded for another state of the model."""
        made_for = fingerprint(self._modules, self._functions)
        if made_for == self._made_for:
            return
        if self._graphs:
            self._in_vain = self._in_vain + 1 if self._replays < WORTH_IT else 0
            self._graphs.clear()
        self._made_for, self._replays = made_for, 0

    def _record(self, shape: Hashable, batch: Batch) -> None:
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.clear()
        static = map_tensors(batch, lambda tensor: tensor.clone())
        made: list[tuple[Any, Any]] = []
        try:
            graph = self._recorder.record(lambda: made.append(self._eager(static)))
        except NotRecordedError as error:
            self.given_up = str(error)
        else:
            self._graphs[shape] = (graph, tensors_in(static), made[0])
