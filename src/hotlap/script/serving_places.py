"""The places of samples in the data, as the index batches of a loader name them: on the host and on the device."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError, kind_of
from hotlap.script.streams import current_stream


class Places:
    """One index batch, as the sampler gave it and as places in the data."""

    __slots__ = ("_block", "_host", "_number", "index")

    def __init__(self, index: Any, block: Block | None = None, number: int = 0) -> None:
        self.index, self._block, self._number = index, block, number
        self._host: Tensor | None = None

    @property
    def host(self) -> Tensor:
        """The places as a tensor; raises DataError where the index batch is not one of whole numbers."""
        if self._block is not None:
            return self._block.host[self._number]
        if self._host is None:
            self._host = positions_of(self.index)
        return self._host

    def there(self, device: torch.device) -> Tensor:
        """The same on a device, for work that is launched from here on."""
        return sent(self.host, device) if self._block is None else self._block.there(device)[self._number]


class Block:
    """Some index batches of whole numbers that were read together, and so go to a device in one copy."""

    __slots__ = ("_flat", "_sizes", "_stream", "_there", "host")

    def __init__(self, indices: list[list[int]]) -> None:
        self._sizes = [len(index) for index in indices]
        flat = np.fromiter(chain.from_iterable(indices), np.int64, sum(self._sizes))
        self._flat = torch.from_numpy(flat)
        self.host: tuple[Tensor, ...] = torch.split(self._flat, self._sizes)
        """The places of each."""
        self._there: tuple[Tensor, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def there(self, device: torch.device) -> tuple[Tensor, ...]:
        """The places of each on a device, for work that is launched from here on."""
        here = current_stream(device) if device.type == "cuda" else None
        if not self._there:
            self._there, self._stream = torch.split(sent(self._flat, device), self._sizes), here
        elif here is not None and self._stream is not None and here != self._stream:
            here.wait_stream(self._stream)
            self._there[0].record_stream(here)  # which is of the memory of all
        return self._there


def positions_of(index: Any) -> Tensor:
    """An index batch as a tensor; raises DataError where it is not one of whole numbers."""
    found = np.array(index)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise DataError(f"{kind_of(index)} is no list of whole numbers, so no samples can be gathered by it")
    return torch.from_numpy(found.astype(np.int64, copy=False))


def sent(positions: Tensor, device: torch.device) -> Tensor:
    """A copy on a device, without a wait of the host."""
    if device.type != "cuda":
        return positions
    # From pageable memory the copy would wait for all that was launched before.
    return torch.empty_like(positions, device=device).copy_(positions.pin_memory(), non_blocking=True)
