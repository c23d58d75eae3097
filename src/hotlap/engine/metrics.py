"""Metrics that are exact over batches of any size, kept on the device until they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

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
        if isinstance(said, (np.ndarray, np.generic)):
            said = torch.as_tensor(said)
        if type(said) is tuple and len(said) == 2:
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

    def __init__(self, decide: Decide) -> None:
        self._decide = decide
        self._table: Tensor | None = None

    def add(self, output: Tensor, target: Tensor, samples: int) -> None:
        """Add a batch to the table of targets by predictions."""
        predicted, target, kept, classes = self._decide(output, target)
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


def make_metrics(wanted: Sequence[str] | Mapping[str, Any], loss: Any = None) -> dict[str, Metric]:
    """Fresh metrics for one evaluation, by name; what outputs and targets mean is read off the loss."""
    if isinstance(wanted, Mapping):
        return {name: MeanOf(name, function) for name, function in wanted.items()}
    decide = Decide(loss)

    def hits(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        predicted, target, kept, _ = decide(output, target)
        return ((predicted == target) & kept).sum(), kept.sum()

    makers: dict[str, Callable[[], Metric]] = {
        "accuracy": lambda: MeanOf("accuracy", hits),
        "macro_f1": lambda: MacroF1(decide),
        "mae": lambda: MeanOf("mae", lambda output, target: _errors(output, target).abs()),
        "rmse": lambda: MeanOf("rmse", lambda output, target: _errors(output, target).square(), root=True),
    }
    return {name: makers[name]() for name in wanted}


class Decide:
    """Which class an output stands for, and which one its target names, by what the loss takes them to be."""

    def __init__(self, loss: Any) -> None:
        self._classes = isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))
        self._yes_or_no = isinstance(loss, (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss))
        self._threshold = 0.5 if isinstance(loss, nn.BCELoss) else 0.0
        self._ignored = loss.ignore_index if self._classes else -100

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Predicted classes, target classes, which targets count, and how many classes there are."""
        if output.ndim == target.ndim + 1:
            # One logit a sample is a yes or no, unless the loss speaks of classes.
            if output.shape[1] == 1 and not self._classes and output.shape[2:] == target.shape[1:]:
                output = output.squeeze(1)
            else:
                return self._by_class(output, target)
        if output.shape != target.shape:
            raise _unlike(output, target)
        if target.is_floating_point() and output.ndim > 1 and output.shape[1] > 1:
            if self._classes:  # probabilities of classes, or one-hot
                target = target.argmax(1)
                return output.argmax(1), target, torch.ones_like(target, dtype=torch.bool), output.shape[1]
            if not self._yes_or_no:
                raise TrainingError(
                    f"targets of shape {tuple(target.shape)} can be one-hot classes or several yes-or-no answers, "
                    "and the loss does not say which; give a metric of your own: metrics={'name': f(output, target)}"
                )
        return (output > self._threshold).long(), (target > 0.5).long(), target >= 0, 2

    def _by_class(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        second, last = output.shape[2:] == target.shape[1:], output.shape[:-1] == target.shape
        if second and last and output.ndim > 2 and not self._classes:
            raise TrainingError(
                f"classes can be in dimension 1 or in the last one of outputs of shape {tuple(output.shape)}; "
                "give a metric of your own: metrics={'name': f(output, target)}"
            )
        if not second and (not last or self._classes):
            raise _unlike(output, target)
        dimension = 1 if second else output.ndim - 1
        kept = (target >= 0) & (target != self._ignored)
        return output.argmax(dimension), target, kept, output.shape[dimension]


def _unlike(output: Tensor, target: Tensor) -> TrainingError:
    return TrainingError(
        f"cannot compare outputs of shape {tuple(output.shape)} with targets of shape {tuple(target.shape)}; "
        "classes belong in dimension 1 of the output"
    )


def _errors(output: Tensor, target: Tensor) -> Tensor:
    if output.shape != target.shape:
        if output.numel() != target.numel():
            raise _unlike(output, target)
        # (n, 1) against (n,) would broadcast to n × n differences.
        output = output.reshape(target.shape)
    return output.double() - target.double()
