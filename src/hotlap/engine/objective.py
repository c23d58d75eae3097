"""The user's loss as numbers that add up over the pieces of a batch and the batches of an epoch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, TrainingError
from hotlap.data.batches import Batch


class Scored(NamedTuple):
    """The loss of some samples."""

    loss: Tensor
    """The tensor to differentiate."""
    factor: float | Tensor
    """`loss × factor` is a sum that adds up over pieces."""
    weight: int | Tensor
    """The divisor of that sum: samples, or what the loss counted."""
    counted: bool
    """Whether the loss itself counts its weight, which is known only afterwards."""


_WEIGHING = (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


class Objective:
    """Calls model and loss on a batch, in the form that the user gave."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., Any],
        forward: Callable[[nn.Module, Batch], tuple[Any, Any]] | None = None,
        *,
        prepare: Callable[[Batch], Batch] | None = None,
        augment: Callable[[Batch], Batch] | None = None,
    ) -> None:
        self.model = model
        self.loss = loss
        self.forward = forward
        self._prepare, self._augment = prepare, augment
        self._criterion = isinstance(loss, nn.Module)
        self._averages = getattr(type(loss), "forward", None) in _WEIGHING
        # Shallow: the copy shares weights and buffers, so it moves to the device with them.
        self._summing = copy.copy(loss) if self._averages else None
        self._looked_for: int | None = None
        self._counts = False
        # torch's losses take one tensor. What else a model may return, only its user knows.
        self._wants_tensor = type(loss).__module__.startswith("torch.nn")

    @property
    def modules(self) -> list[nn.Module]:
        """The model, and the loss where it is a module."""
        return [module for module in (self.model, self.loss) if isinstance(module, nn.Module)]

    @property
    def functions(self) -> tuple[Callable[..., Any] | None, ...]:
        """The user's functions, except for modules."""
        loss = None if self._criterion else self.loss
        return loss, self.forward, self._prepare, self._augment

    @property
    def changes_batches(self) -> bool:
        """Whether the user's functions run on batches."""
        return self._prepare is not None or self._augment is not None

    def ready(self, batch: Batch, *, training: bool) -> Batch:
        """A batch on the device, prepared for the model, and augmented in training."""
        if self._prepare is not None:
            batch = self._prepare(batch)
        if training and self._augment is not None:
            batch = self._augment(batch)
        return batch

    def has_no_target(self, batch: Batch) -> bool:
        """Whether a batch holds the model's input only."""
        return self.forward is None and (isinstance(batch, Tensor) or (isinstance(batch, tuple) and len(batch) == 1))

    def outputs(self, batch: Batch) -> tuple[Any, Any]:
        """The model's output for a batch, and the target that belongs to it."""
        if self.forward is not None:
            return self.forward(self.model, batch)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            seen = f"a tuple of {len(batch)}" if isinstance(batch, (tuple, list)) else f"a {type(batch).__name__}"
            raise DataError(
                f"a batch is {seen}, not a tuple (inputs…, target); "
                "give forward=f(model, batch) -> (output, target), or a loss f(model, batch)"
            )
        *inputs, target = batch
        output = self.model(*inputs)
        if self._wants_tensor and not isinstance(output, Tensor):
            raise TrainingError(
                f"the model returned a {type(output).__name__}, and {type(self.loss).__name__} takes a tensor; "
                "give forward=f(model, batch) -> (output, target) that picks it"
            )
        return output, target

    def whole(self, batch: Batch, samples: int, *, all_count: bool = False) -> Scored:
        """The loss of an uncut batch, differentiated exactly as in the user's own loop.

        `all_count` states that no target is ignored, so the device need not count them.
        """
        if not self._criterion:
            return self._read(self.loss(self.model, batch), samples)
        output, target = self.outputs(batch)
        value = self.loss(output, target)
        if self._weighs_targets and not (all_count and self._counts_all(target)) and _holds_classes(target):
            count = self._target_weight(target)
            return Scored(value, count, count, True)
        return self._read(value, samples)

    @property
    def _weighs_targets(self) -> bool:
        """Whether the loss averages over class weights or unignored targets, so that means of pieces do not add up.

        Checked at every call: the user may change a loss's settings during training.
        """
        return self._averages and self.loss.reduction != "sum" and "forward" not in self.loss.__dict__  # type: ignore[attr-defined]

    def _counts_all(self, target: Tensor) -> bool:
        """Whether every target counts once, if none is of the class that data was searched for."""
        loss: Any = self.loss
        return loss.weight is None and loss.ignore_index == self._looked_for and target.ndim == 1

    def piece(self, batch: Batch, samples: int) -> Scored:
        """The loss of a part of a batch: means are weighted by samples, counted losses are summed."""
        if not self._criterion:
            return self._read(self.loss(self.model, batch), samples, as_sum=True)
        return self.judge(*self.outputs(batch), samples)

    def judge(self, output: Any, target: Any, samples: int) -> Scored:
        """The loss of outputs as a sum, for a loss module: no NaN if all targets are ignored."""
        if self._weighs_targets and _holds_classes(target):
            summing: Any = self._summing
            summing.__dict__.update(self.loss.__dict__, reduction="sum")  # with the current settings
            return Scored(summing(output, target), 1.0, self._target_weight(target), True)
        return self._read(self.loss(output, target), samples, as_sum=True)

    @property
    def ignored(self) -> int | None:
        """The class that the loss ignores, if it has one. Data is searched for it."""
        # The data does not show what the user's `forward` turns it into.
        known = self._weighs_targets and self.forward is None
        self._looked_for = self.loss.ignore_index if known else None  # type: ignore[attr-defined]
        return self._looked_for

    @property
    def is_criterion(self) -> bool:
        """Whether the loss takes outputs, which metrics can then share."""
        return self._criterion

    @property
    def adds_up(self) -> bool:
        """Whether the loss is known to be the same in pieces: a loss of torch, or one that counts."""
        return self._wants_tensor or self._counts

    @property
    def may_count(self) -> bool:
        """Whether the loss may count its weight itself; the same for every batch and in every rank."""
        return not self.sums and (self._averages or not self._wants_tensor)

    @property
    def sums(self) -> bool:
        """Whether the loss of a batch is a sum over its samples, so that pieces add up."""
        return getattr(self.loss, "reduction", None) == "sum"

    def _read(self, value: Any, samples: int, *, as_sum: bool = False) -> Scored:
        if isinstance(value, Tensor) and value.ndim == 0:
            return Scored(value, 1.0 if self.sums else samples, samples, False)
        if type(value) is tuple and len(value) == 2 and isinstance(value[0], Tensor) and value[0].ndim == 0:
            total, count = value
            if not _is_count(count):
                raise TrainingError(
                    f"the loss returned a pair whose second part is {_kind(count)}, not a whole number; "
                    "a pair means (sum, count): return the loss alone, or what it counted"
                )
            self._counts = True
            return Scored(total if as_sum else total / count, 1.0 if as_sum else count, count, True)
        raise TrainingError(f"the loss returned {_kind(value)}; it must return a scalar mean, or (sum, count)")

    def _target_weight(self, target: Tensor) -> Tensor:
        assert isinstance(self.loss, (nn.CrossEntropyLoss, nn.NLLLoss))
        kept = target != self.loss.ignore_index
        if self.loss.weight is None:
            return kept.sum()
        return (self.loss.weight[target.where(kept, 0)] * kept).sum()


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {value.dtype}"
    return type(value).__name__


def _holds_classes(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


class PendingMean:
    """A mean of everything added so far, to be read later. Reading waits only for work that was queued before."""

    def __init__(self, sums: Tensor, counted: int) -> None:
        """`sums` are the sum and the device's count; `counted` is the host's count."""
        self._sums, self._counted, self._since_s = sums, counted, time.perf_counter()
        self._done: torch.cuda.Event | None = None
        if sums.is_cuda:
            self._sums = torch.empty(2, dtype=sums.dtype, device="cpu", pin_memory=True)
            self._sums.copy_(sums, non_blocking=True)
            self._done, self._stream = _event(), torch.cuda.current_stream(sums.device)
            self._done.record(self._stream)

    def mean(self) -> float:
        """The mean; NaN if nothing was added."""
        if self._done is not None:
            self._done.synchronize()
        total, count = self._sums.tolist()
        return total / (self._counted + count) if self._counted + count else float("nan")

    def numbers(self) -> tuple[Tensor, Tensor, int]:
        """The values behind it, in the form that `Totals.put_back` takes."""
        if self._done is not None:
            self._done.synchronize()
        return self._sums[0], self._sums[1], self._counted

    def ago_s(self) -> float:
        """Seconds since the device reached this point. Waits for all queued work."""
        if self._done is None:
            return time.perf_counter() - self._since_s
        now = _event()
        now.record(self._stream)
        now.synchronize()
        return float(self._done.elapsed_time(now)) / 1e3


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


class Totals:
    """Running loss over many batches, kept on the device. Adding never waits; reading does."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=device)
        self._device_count = torch.zeros((), dtype=torch.float64, device=device)
        self._count = 0
        self.resets = 0
        """How often it started again from zero."""

    def add_numbers(self, numbers: tuple[Tensor, Tensor, int]) -> None:
        """Add what another rank has in the form of `saved`."""
        self._sum.add_(numbers[0].to(self._sum.device))
        self._device_count.add_(numbers[1].to(self._sum.device))
        self._count += numbers[2]

    def add(self, scored: Scored, skipped: Tensor | None = None) -> None:
        """Add a loss, unless `skipped` (a flag on the device) shows that its update was skipped."""
        value = scored.loss.detach()
        if skipped is not None:
            made = skipped == 0
            # Not by a product: a skipped loss is usually NaN or infinite.
            self._sum.add_((value * scored.factor).masked_fill(~made, 0.0))
            if isinstance(scored.weight, Tensor):
                self._device_count.add_(scored.weight * made)
            else:
                self._device_count.add_(made, alpha=scored.weight)
            return
        if isinstance(scored.factor, Tensor):
            self._sum.add_(value * scored.factor)
        else:
            self._sum.add_(value, alpha=scored.factor)
        if isinstance(scored.weight, Tensor):
            self._device_count.add_(scored.weight)
        else:
            self._count += scored.weight

    @property
    def host_count(self) -> int:
        """The host's count. A replayed capture adds to it with `count`."""
        return self._count

    def count(self, weight: int) -> None:
        """Count what a replay added on the device."""
        self._count += weight

    def mean(self) -> float:
        """The mean over everything added; NaN if there is nothing. Waits for the device."""
        count = self._count + float(self._device_count)
        return float(self._sum) / count if count else float("nan")

    def take(self) -> PendingMean:
        """Return the mean so far, unread, and start again."""
        taken = self.peek()
        self.reset()
        return taken

    def peek(self) -> PendingMean:
        """Return the mean so far, unread."""
        return PendingMean(torch.stack((self._sum, self._device_count)), self._count)

    def reset(self) -> None:
        """Start again from zero."""
        self._sum.zero_()
        self._device_count.zero_()
        self._count = 0
        self.resets += 1

    def saved(self) -> tuple[Tensor, Tensor, int]:
        """A copy of the values."""
        return self._sum.clone(), self._device_count.clone(), self._count

    def put_back(self, saved: tuple[Tensor, Tensor, int]) -> None:
        """Restore the values from a copy."""
        self._sum.copy_(saved[0])
        self._device_count.copy_(saved[1])
        self._count = saved[2]
