"""Metrics that are exact over batches of any size, kept on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from hotlap.core.errors import TrainingError


class Metric(Protocol):
    """A number gathered over batches."""

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Take in a batch, without waiting for the device."""

    def result(self) -> float:
        """The number over all batches so far; waits for the device."""


class MeanOf:
    """The mean of a function of (output, target) over all samples, or over what the function counts."""

    def __init__(self, name: str, function: Callable[[Any, Any], Any], root: bool = False) -> None:
        self._name, self._function, self._root = name, function, root
        self._sum: Tensor | float = 0.0
        self._count: Tensor | float = 0.0

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Take in a batch: a value per sample, a mean, or (sum, count)."""
        said = self._function(output, target)
        if isinstance(said, (tuple, list)) and len(said) == 2:
            total, count = said
        elif isinstance(said, Tensor) and said.ndim:
            total, count = said.double().sum(), said.numel()
        elif isinstance(said, (Tensor, int, float)):
            total, count = said * samples, samples
        else:
            raise TrainingError(
                f"metric {self._name!r} returned {type(said).__name__}; "
                "it must return a value per sample, a mean, or (sum, count)"
            )
        self._sum = self._sum + (total.double() if isinstance(total, Tensor) else total)
        self._count = self._count + count

    def result(self) -> float:
        """The mean; its square root for a root mean."""
        count = float(self._count)
        mean = float(self._sum) / count if count else float("nan")
        return mean**0.5 if self._root else mean


class MacroF1:
    """The mean over classes of F1; a class that is neither a target nor predicted does not count."""

    def __init__(self) -> None:
        self._table: Tensor | None = None

    def add(self, output: Tensor, target: Tensor, samples: int) -> None:
        """Add a batch to the table of targets by predictions."""
        predicted, target, kept, classes = _decided(output, target)
        if self._table is None:
            self._table = torch.zeros(classes * classes, dtype=torch.float64, device=output.device)
        cell = target.where(kept, 0).long() * classes + predicted
        self._table.index_add_(0, cell.flatten(), kept.flatten().double())

    def result(self) -> float:
        """The mean of F1 over classes."""
        if self._table is None:
            return float("nan")
        side = round(len(self._table) ** 0.5)
        table = self._table.reshape(side, side)
        hits, seen = table.diagonal(), table.sum(0) + table.sum(1)
        f1 = 2 * hits[seen > 0] / seen[seen > 0]
        return float(f1.mean()) if len(f1) else float("nan")


def make_metrics(wanted: Sequence[str] | Mapping[str, Any]) -> dict[str, Metric]:
    """Fresh metrics for one evaluation, by name."""
    if isinstance(wanted, Mapping):
        return {name: MeanOf(name, function) for name, function in wanted.items()}
    return {name: _NAMED[name]() for name in wanted}


def _decided(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Predicted classes, target classes, which targets count (a negative one is ignored), and how many classes."""
    if output.ndim == target.ndim + 1:
        if output.shape[1] == 1 and target.shape[1:] == output.shape[2:]:
            output = output.squeeze(1)
        else:
            return output.argmax(1), target, target >= 0, output.shape[1]
    if output.shape != target.shape:
        raise TrainingError(
            f"cannot compare outputs of shape {tuple(output.shape)} with targets of shape {tuple(target.shape)}; "
            "classes belong in dimension 1 of the output"
        )
    return (output > 0).long(), (target > 0.5).long(), target >= 0, 2


def _hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    predicted, target, kept, _ = _decided(output, target)
    return ((predicted == target) & kept).sum(), kept.sum()


def _errors(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        if output.numel() != target.numel():
            raise TrainingError(
                f"cannot compare outputs of shape {tuple(output.shape)} with targets of shape {tuple(target.shape)}"
            )
        # (n, 1) against (n,) would broadcast to n × n differences.
        output = output.reshape(target.shape)
    return output.double() - target.double()


_NAMED: dict[str, Callable[[], Metric]] = {
    "accuracy": lambda: MeanOf("accuracy", _hits),
    "macro_f1": MacroF1,
    "mae": lambda: MeanOf("mae", lambda output, target: _errors(output, target).abs()),
    "rmse": lambda: MeanOf("rmse", lambda output, target: _errors(output, target).square(), root=True),
}
