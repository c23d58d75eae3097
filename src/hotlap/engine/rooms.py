"""Memory that tensors have left for another form, kept for the day on which their plan comes back."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor


class Rooms:
    """Where tensors lay under other plans.

    What was recorded under a plan reads its tensors where they lay. As long as `keeps`, a tensor that takes a form
    again which it had before gets the memory it had then, so that plans can be changed to and fro.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._left: dict[Hashable, Tensor] = {}

    def moved(self, who: Hashable, tensor: Tensor, room: Tensor) -> Tensor:
        """The numbers of `tensor` in a memory like `room`: in the one that `who` had in that form, or in `room`."""
        if self.keeps:
            self._left[who, _form(tensor)] = tensor
            room = self._left.pop((who, _form(room)), room)
        return room.copy_(tensor)

    def forget(self) -> None:
        """Let go of all of it."""
        self.keeps = False
        self._left.clear()


def _form(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.device, tensor.dtype, tuple(tensor.shape), strides
