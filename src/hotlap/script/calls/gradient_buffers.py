"""Buffers for the gradients that replays make, lent to the script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotlap.core.torch_private import foreach_copy_, storage_use_count

ALIGNED = 256
"""Bytes; gradients begin at multiples of this, as they do in memory of their own."""
PATIENCE = 4
"""Passes that may find the buffers still in use, plus one for each four that do not."""


class GradientBuffers:
    """A buffer for the gradient of each parameter, lent to the script until it releases the gradient.

    A gradient in use holds its memory, so a use count shows whether a pass may write there. A script releases its
    gradients by setting them to None. If it accumulates gradients or reads them later, the buffers stay unchanged, and
    gradients come in new memory.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._forms = [_form(parameter) for parameter in parameters]
        self.buffers: list[Tensor] = [torch.empty(0)] * len(self._parameters)
        """In the order of the parameters, with their layout."""
        self._flats = []
        for kind in dict.fromkeys((p.device, p.dtype) for p in parameters):
            numbers = [number for number, p in enumerate(self._parameters) if (p.device, p.dtype) == kind]
            self._flats.append(self._made(numbers))
        self._held = [flat.untyped_storage() for flat in self._flats]
        self._holders = [self._count(storage) for storage in self._held]
        self._passes = self._crowded = 0

    def are_for(self, parameters: Sequence[Tensor]) -> bool:
        """Whether they belong to these very parameters in their current layout."""
        return (
            len(parameters) == len(self._parameters)
            and all(one is other for one, other in zip(parameters, self._parameters, strict=True))
            and self._forms == [_form(parameter) for parameter in parameters]
        )

    @property
    def pay_off(self) -> bool:
        """Whether the script usually releases its gradients."""
        return self._crowded <= PATIENCE + (self._passes - self._crowded) // PATIENCE

    @property
    def are_free(self) -> bool:
        """Whether nothing holds a lent gradient."""
        return [*map(self._count, self._held)] == self._holders

    def take(self) -> list[Tensor] | None:
        """Before a pass writes to the buffers: returns what to put back after it, or None."""
        self._passes += 1
        if self.are_free:
            return None
        self._crowded += 1
        return [flat.clone() for flat in self._flats]

    def put_back(self, kept: list[Tensor]) -> None:
        foreach_copy_(self._flats, kept)

    def _made(self, numbers: Sequence[int]) -> Tensor:
        """One allocation for the buffers of these parameters, which share device and dtype."""
        first = self._parameters[numbers[0]]
        step = ALIGNED // first.element_size()
        starts, end = [], 0
        for number in numbers:
            starts.append(end)
            end += -(-self._parameters[number].numel() // step) * step
        flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        for number, start in zip(numbers, starts, strict=True):
            like = torch.empty_like(self._parameters[number], device="meta")
            self.buffers[number] = flat.as_strided(like.shape, like.stride(), start)
        return flat

    @staticmethod
    def _count(storage: torch.UntypedStorage) -> int:
        return int(storage_use_count(storage._cdata))


def _form(parameter: Tensor) -> Any:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device
