"""Evaluation: loss and metrics over all data, in larger batches, leaving no trace in the training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hotlap.core.errors import HotlapError
from hotlap.data.batches import to_device
from hotlap.data.course import Course
from hotlap.data.feeds import Feeding
from hotlap.engine.metrics import make_metrics
from hotlap.engine.objective import Objective, Totals
from hotlap.engine.snapshot import Modes, Randomness
from hotlap.engine.step import precision_context


def evaluate(
    objective: Objective,
    opened: Callable[[int], tuple[Course, Feeding]],
    metrics: Sequence[str] | Mapping[str, Any],
    batch_size: int,
    precision: str,
    device: torch.device,
) -> dict[str, float]:
    """Loss and metrics by name. A batch that does not fit is halved until it does."""
    modules = [m for m in (objective.model, objective.loss) if isinstance(m, torch.nn.Module)]
    modes, randomness = Modes(modules), Randomness(device)
    for module in modules:
        module.eval()
    try:
        while True:
            try:
                return _pass(objective, *opened(batch_size), metrics, precision, device)
            except torch.OutOfMemoryError:
                if batch_size == 1:
                    raise
                batch_size //= 2
                torch.cuda.empty_cache()
    finally:
        modes.restore()
        randomness.restore()


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
