"""The places of samples in the data, as the index batches of a loader name them: on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.core.errors import DataError, kind_of
from hotlap.script.streams import current_stream


class Places:
    """One index batch, as the sampler gave it and as places in the data."""

    __slots__ = ("_host", "_index", "block", "number")

    def __init__(self, index: Any, block: Block | None = None, number: int = 0) -> None:
        self._index = index
        self.block, self.number = block, number
        """Those that it was read with, where there are any, and its number among them; `index` is then of no use."""
        self._host: Tensor | None = None

    @property
    def index(self) -> Any:
        """As the sampler gives it."""
        return self._index if self.block is None else self.block.host[self.number].tolist()

    @property
    def host(self) -> Tensor:
        """The places as a tensor; raises DataError where the index batch is not one of whole numbers."""
        if self.block is not None:
            return self.block.host[self.number]
        if self._host is None:
            self._host = positions_of(self._index)
        return self._host

    def through(self, rows: Tensor) -> Tensor:
        """The places in the data that a selection of these rows has at these places."""
        return rows.index_select(0, self.host) if self.block is None else self.block.through(rows)[self.number]

    def there(self, device: torch.device, count: int = 1) -> Tensor:
        """The same on a device, for work that is launched from here on; of some that follow each other, end to end."""
        if self.block is None:
            return sent(self.host, device)
        return self.block.there(device, self.number, self.number + count)


class Block:
    """Some index batches that were read together, and so go to a device in one copy."""

    __slots__ = ("_ends", "_flat", "_host", "_stream", "_there", "_through", "sizes")

    def __init__(self, flat: Tensor, sizes: list[int]) -> None:
        """`flat` has their places end to end, so many of each."""
        self._flat, self.sizes = flat, sizes
        self._ends = [0, *accumulate(sizes)]
        self._host: Sequence[Tensor] | None = None
        self._through: tuple[Tensor, Sequence[Tensor]] | None = None
        self._there: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None

    @property
    def host(self) -> Sequence[Tensor]:
        """The places of each."""
        if self._host is None:
            self._host = self._flat.unsafe_split_with_sizes(self.sizes)
        return self._host

    def through(self, rows: Tensor) -> Sequence[Tensor]:
        """The places of each in the data that these rows were selected from."""
        if self._through is None or self._through[0] is not rows:
            self._through = rows, rows.index_select(0, self._flat).unsafe_split_with_sizes(self.sizes)
        return self._through[1]

    def there(self, device: torch.device, start: int, end: int) -> Tensor:
        """The places of some of them on a device, end to end, for work that is launched from here on."""
        here = current_stream(device) if device.type == "cuda" else None
        if self._there is None:
            self._there, self._stream = sent(self._flat, device), here
        elif here is not None and self._stream is not None and here != self._stream:
            here.wait_stream(self._stream)
            self._there.record_stream(here)
        return self._there[self._ends[start] : self._ends[end]]


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
