"""Ranks are processes that share each batch. Each computes its part; torch's DDP adds up their gradients.

DDP sees a piece from samples to loss as one module, so a loss may call the model in any way and have weights itself.
It exchanges while the backward pass still runs. Pieces before the last one of an update exchange nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotlap.core.errors import TrainingError
from hotlap.data.batches import Batch
from hotlap.engine.objective import Objective, Scored

if TYPE_CHECKING:
    from hotlap.engine.rig import Rig
    from hotlap.engine.step import Window


UNUSED = "a parameter that requires gradients has no part in the loss"


@dataclass(frozen=True)
class Share:
    """The part of an evaluation that one of several ranks makes."""

    rank: int
    size: int
    others: Callable[[], Sequence[list[list[Tensor]]]] = tuple
    """Waits for the sums of all other ranks."""


class _Piece(nn.Module):
    """The loss of a piece; the parameters are those of model and loss."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self._held = nn.ModuleList(objective.modules)
        self._objective = objective
        self.scored: Scored | None = None
        """The last loss, with its weight."""

    def forward(self, batch: Batch, samples: int) -> Tensor:
        """The tensor to differentiate. A rank without samples has no loss, and gradients of 0."""
        if not samples:
            self.scored = None
            return torch.stack([p.sum() for p in self.parameters() if p.requires_grad]).sum() * 0
        self.scored = self._objective.piece(batch, samples)
        return self.scored.loss


class IncompleteExchangeError(TrainingError):
    """Not all gradients of a step were exchanged, since a parameter had none."""


class Exchange:
    """What one of several ranks exchanges with the others. Every rank has to make the same steps."""

    def __init__(self, rank: int, size: int, *, has_unused: bool = False) -> None:
        self.rank, self.size = rank, size
        self.has_unused = has_unused
        """Whether parameters may have no part in a loss. To look for them takes time in each step."""
        self.is_stale = True
        """Whether the other ranks lack weights, state or place of this one."""
        self._shared: tuple[Objective, DistributedDataParallel] | None = None

    def loss(self, objective: Objective, batch: Batch, samples: int) -> tuple[Tensor, Scored | None]:
        """The loss of a piece to differentiate, `size` times as large as it counts, and how it was scored."""
        shared = self._of(objective)
        loss: Tensor = shared(batch, samples)
        # DDP takes the mean over ranks.
        return loss * self.size, shared.module.scored

    def waiting(self, objective: Objective) -> AbstractContextManager[Any]:
        """Inside, gradients add up in this rank, and nothing is exchanged."""
        shared = self._of(objective)
        context: AbstractContextManager[Any] = shared.no_sync()
        return context

    def finished(self, objective: Objective) -> None:
        """Raise IncompleteExchangeError if some gradients were not exchanged."""
        try:
            self._of(objective)._check_reducer_finalized()  # type: ignore[no-untyped-call]
        except RuntimeError:
            raise IncompleteExchangeError(UNUSED) from None

    def add_up(self, value: Tensor) -> Tensor:
        """The sum of a number over all ranks."""
        dist.all_reduce(value)
        return value

    @property
    def own_share(self) -> Share:
        """The part of an evaluation that this rank makes."""
        return Share(self.rank, self.size)

    # --- what the rank that leads overrides --------------------------------------------------------

    def data_changed(self) -> None:
        """Take in that the data is no longer what the other ranks have."""

    def begin_step(self, rig: Rig, window: Window) -> None:
        """Called before the step of a window: other ranks have to make it too, if the plan shares it."""

    def evaluation(self, rig: Rig, data: Any, batch_size: int) -> Share | None:
        """This rank's share of an evaluation of `data`, with which others have begun; None if it makes it alone."""
        return None

    def take_totals(self) -> Sequence[tuple[Tensor, Tensor, int]]:
        """The running losses of other ranks, which begin again from zero."""
        return ()

    def raise_lost(self, error: BaseException) -> None:
        """Raise an error that says more where another rank is the reason of this one."""

    def forget(self) -> None:
        """Let go of the exchange of gradients: weights may be elsewhere afterwards."""
        if self._shared is not None:
            self._shared[1]._remove_autograd_hooks()  # type: ignore[no-untyped-call]
            self._shared = None

    def _of(self, objective: Objective) -> DistributedDataParallel:
        if self._shared is None or self._shared[0] is not objective:
            piece = _Piece(objective)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch 2.11 has no other name for broadcast_buffers
                made = DistributedDataParallel(piece, broadcast_buffers=False, find_unused_parameters=self.has_unused)
            self._shared = (objective, made)
        return self._shared[1]
