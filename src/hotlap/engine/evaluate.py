"""Evaluation: loss and metrics over all data, in larger batches, leaving no trace in the training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotlap.core.errors import HotlapError
from hotlap.data.batches import to_device
from hotlap.data.course import Course, evaluation_course
from hotlap.data.feeds import Feeding, open_feed
from hotlap.engine.metrics import make_metrics
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.engine.step import precision_context


class Evaluator:
    """Evaluates one model; workers are kept only for a loader whose user asked for persistent ones."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._objective, self._device = objective, device
        self._kept: _Kept | None = None

    def __call__(
        self,
        data: Any,
        metrics: Sequence[str] | Mapping[str, Any],
        *,
        batch_size: int,
        collate: Any,
        precision: str,
    ) -> dict[str, float]:
        """Loss and metrics by name. A batch that does not fit is halved until it does."""
        objective, device = self._objective, self._device
        modules = [m for m in (objective.model, objective.loss) if isinstance(m, torch.nn.Module)]
        modes, randomness = Modes(modules), Randomness(device)
        for module in modules:
            module.eval()
        try:
            while True:
                course, feeding = self._open(data, collate, batch_size)
                try:
                    return _pass(objective, course, feeding, metrics, precision, device)
                except torch.OutOfMemoryError:
                    if batch_size == 1:
                        raise
                    batch_size //= 2
                    torch.cuda.empty_cache()
                finally:
                    if self._kept is None or self._kept.feeding is not feeding:
                        feeding.close()
        finally:
            modes.restore()
            randomness.restore()

    def close(self) -> None:
        """End workers that were kept."""
        if self._kept is not None:
            self._kept.feeding.close()
            self._kept = None

    def _open(self, data: Any, collate: Any, size: int) -> tuple[Course, Feeding]:
        kept = self._kept
        if kept is not None and kept.data is data and kept.collate is collate and kept.size == size:
            return kept.course, kept.feeding
        on_gpu = self._device.type == "cuda"
        course = evaluation_course(data, batch_size=size, collate=collate, on_gpu=on_gpu)
        feeding = open_feed(course.source, course.feed, on_gpu=on_gpu, extras=course.extras)
        if course.feed.persistent:
            self.close()
            self._kept = _Kept(data, collate, size, course, feeding)
        return course, feeding


@dataclass(frozen=True)
class _Kept:
    """An evaluation whose workers are kept; it holds its data, so that nothing else can take its place."""

    data: Any
    collate: Any
    size: int
    course: Course
    feeding: Feeding


@torch.no_grad()
def _pass(
    objective: Objective,
    course: Course,
    feeding: Feeding,
    metrics: Sequence[str] | Mapping[str, Any],
    precision: str,
    device: torch.device,
) -> dict[str, float]:
    context = precision_context(precision, device)
    totals, gathered = Totals(device), make_metrics(metrics, objective.loss)
    if "loss" in gathered:
        raise HotlapError("a metric called 'loss' hides the loss; give it another name")
    epoch = course.order.epoch(0)
    indices = [epoch.pieces(window, None, tickets=feeding.tickets)[0] for window in range(len(epoch))]
    for asked, batch in zip(indices, feeding.pieces(indices, 0), strict=True):
        batch, samples = to_device(batch, device, non_blocking=True), len(asked)
        with context():
            shared = objective.outputs(batch) if gathered or objective.is_criterion else None
            if objective.is_criterion and shared is not None:
                totals.add(objective.judge(*shared, samples))
            else:
                totals.add(objective.piece(batch, samples))
        if shared is not None:
            for metric in gathered.values():
                metric.add(*shared, samples)
    return {"loss": totals.mean(), **{name: metric.result() for name, metric in gathered.items()}}
