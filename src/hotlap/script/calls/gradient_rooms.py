"""Memory in which recorded backward passes leave gradients, lent to the script as its own until it lets go of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ALIGNED = 256
"""Bytes at whose multiples gradients begin, as they do in memory of their own."""
PATIENCE = 4
"""Passes that may find the memory still lent, and one more for each four that do not."""


class GradientRooms:
    """A room for the gradient of each of some parameters.

    Whoever holds a gradient holds its memory, so that it can be known whether a pass may write there: the script has
    let go of the last gradients where it set them to None. Where it has not, since it adds gradients up or looks at
    them later, what is lent stays as it is, and gradients come in memory of their own.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = list(parameters)
        self._forms = [_form(parameter) for parameter in parameters]
        self.rooms: list[Tensor] = [torch.empty(0)] * len(self._parameters)
        """In the order of the parameters, laid out as they are."""
        self._flats = []
        for kind in dict.fromkeys((p.device, p.dtype) for p in parameters):
            numbers = [number for number, p in enumerate(self._parameters) if (p.device, p.dtype) == kind]
            self._flats.append(self._made(numbers))
        self._held = [flat.untyped_storage() for flat in self._flats]
        self._holders = [self._count(storage) for storage in self._held]
        self._passes = self._crowded = 0

    def are_for(self, parameters: Sequence[Tensor]) -> bool:
        """Whether they are for these very parameters, as they are laid out now."""
        return (
            len(parameters) == len(self._parameters)
            and all(one is other for one, other in zip(parameters, self._parameters, strict=True))
            and self._forms == [_form(parameter) for parameter in parameters]
        )

    @property
    def pay(self) -> bool:
        """Whether the script lets go of its gradients as a rule."""
        return self._crowded <= PATIENCE + (self._passes - self._crowded) // PATIENCE

    @property
    def are_free(self) -> bool:
        """Whether nobody holds what was lent."""
        return [*map(self._count, self._held)] == self._holders

    def take(self) -> list[Tensor] | None:
        """To be called before a pass writes to the rooms: what has to be put back after it; None where nothing has."""
        self._passes += 1
        if self.are_free:
            return None
        self._crowded += 1
        return [flat.clone() for flat in self._flats]

    def put_back(self, kept: list[Tensor]) -> None:
        """Have the rooms hold what they held."""
        torch._foreach_copy_(self._flats, kept)

    def _made(self, numbers: Sequence[int]) -> Tensor:
        """Rooms for the parameters of these numbers, which are of one kind, side by side."""
        first = self._parameters[numbers[0]]
        step = ALIGNED // first.element_size()
        starts, end = [], 0
        for number in numbers:
            starts.append(end)
            end += -(-self._parameters[number].numel() // step) * step
        flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        for number, start in zip(numbers, starts, strict=True):
            like = torch.empty_like(self._parameters[number], device="meta")
            self.rooms[number] = flat.as_strided(like.shape, like.stride(), start)
        return flat

    @staticmethod
    def _count(storage: torch.UntypedStorage) -> int:
        return int(torch._C._storage_Use_Count(storage._cdata))


def _form(parameter: Tensor) -> Any:
    return parameter.shape, parameter.stride(), parameter.dtype, parameter.device
