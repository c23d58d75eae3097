"""A float64 training in float32 for some updates, while its script runs on."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.data.batches import map_tensors
from hotlap.kit.observed import Pair
from hotlap.script.patches import Patches

BLOCK, LEAST_BLOCKS, MOST_BLOCKS = 4, 2, 12
"""Updates of a block, beside a first that does not count; least and most blocks of each kind."""


class InFloat32:
    """Blocks of updates in float64 and in float32, in turn, so that other work on the machine slows both alike.

    The models compute in float32 and give the script float64: its own code goes on as it is. Sums, but for rounding,
    stay as they are; the process has to end after this.
    """

    def __init__(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        self._models, self._optimizer = models, optimizer
        self._patches = Patches()
        self._blocks: tuple[list[float], list[float]] = ([], [])
        """Median seconds of an update, of each block in float64 and in float32."""
        self._block: list[float] = []
        self.is_on = False

    @staticmethod
    def applies(models: Sequence[nn.Module]) -> bool:
        """Whether these models compute in float64 alone."""
        kinds = {p.dtype for one in models for p in one.parameters() if p.is_floating_point()}
        return kinds == {torch.float64}

    @property
    def is_done(self) -> bool:
        """Whether there are as many blocks as it takes at most."""
        return len(self._blocks[1]) >= MOST_BLOCKS

    def update_took(self, seconds: float) -> None:
        """Note an update; after a block, go over to the other precision."""
        self._block.append(seconds)
        if len(self._block) > BLOCK:
            self._blocks[self.is_on].append(median(self._block[1:]))
            self._block.clear()
            self.leave() if self.is_on else self._enter()

    def pair(self) -> Pair | None:
        """Seconds of an update in both; None after too few blocks."""
        wide, narrow = self._blocks
        return Pair(now_s=median(wide), then_s=median(narrow)) if len(narrow) >= LEAST_BLOCKS else None

    def leave(self) -> None:
        """Go back to float64, if it is not there."""
        if self.is_on:
            self.is_on = False
            self._patches.take_out_all()
            self._cast(torch.float64)

    def _enter(self) -> None:
        self.is_on = True
        self._cast(torch.float32)
        for number, model in enumerate(self._models):
            before = model.register_forward_pre_hook(_narrow_inputs, with_kwargs=True, prepend=True)
            self._patches.hooked(f"in {number}", before)
            self._patches.hooked(f"out {number}", model.register_forward_hook(_wide_outputs, prepend=True))

    def _cast(self, kind: torch.dtype) -> None:
        for model in self._models:
            for p in model.parameters():
                p.grad = None  # it has the other type
            model.to(kind)  # the same parameters, with other data
        other = {torch.float64, torch.float32} - {kind}
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.ndim and value.dtype in other:
                    state[name] = value.to(kind)


def _narrow_inputs(model: nn.Module, args: Any, kwargs: Any) -> Any:
    return map_tensors(args, narrowed), map_tensors(kwargs, narrowed)


def _wide_outputs(model: nn.Module, args: Any, outputs: Any) -> Any:
    return map_tensors(outputs, lambda one: one.double() if one.dtype == torch.float32 else one)


def narrowed(tensor: Tensor) -> Tensor:
    """A tensor of float64 in float32; others as they are."""
    return tensor.float() if tensor.dtype == torch.float64 else tensor
