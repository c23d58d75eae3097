"""Copies of a script's batches on the device: gathered there, some batches at a time, once the first is asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.core.units import MIB
from hotlap.data.columns import Columns
from hotlap.data.samples import Source
from hotlap.script.feed.places import Block, Places
from hotlap.script.streams import current_stream

GATHERED_TOGETHER = 2 * MIB
"""Bytes of batches that are gathered together at most. A launch takes the host as long for one small batch as for
many."""


class Copies:
    """Gathers batches on the device, and with a batch those that follow it, since a script sends one after the other.

    Each has memory of its own, as if it had been gathered alone: a script may keep it, save it or write to it.
    """

    def __init__(self, source: Source, device: torch.device) -> None:
        self._source, self._device, self._is_cuda = source, device, device.type == "cuda"
        # Where samples differ in size, a batch is as wide as the widest in it.
        self._goes_ahead = isinstance(source, Columns) and type(source).fitting is Columns.fitting
        self._sample_bytes = 0
        self._block: Block | None = None
        self._ready: dict[int, list[Tensor | None]] = {}
        self._made_for: tuple[torch.cuda.Stream | None, bool] = None, False

    def of(self, places: Places, count: int) -> list[Part]:
        """The copies of the tensors of a batch, so many; nothing is gathered before the first is asked for."""
        batch = _Gatherable(self, places)
        return [Part(batch, number) for number in range(count)]

    def gathered(self, places: Places) -> tuple[list[Tensor | None], torch.cuda.Stream | None]:
        """The tensors of a batch, and the stream that gathers them: the current one."""
        stream = current_stream(self._device) if self._is_cuda else None
        block, made_for = places.block, (stream, torch.is_inference_mode_enabled())
        found = self._ready.pop(places.number, None) if block is not None and block is self._block else None
        if found is not None and made_for == self._made_for:
            return found, stream
        count = 1 if found is not None else self._how_many(places)
        if count == 1:
            return self._alone(places), stream
        self._ready, self._block, self._made_for = self._together(places, count), block, made_for
        return self._ready.pop(places.number), stream

    def _how_many(self, places: Places) -> int:
        """How many batches to gather from these places on; the first batch of all tells how large they are."""
        block = places.block
        if block is None or not self._goes_ahead or not self._sample_bytes:
            return 1
        fit = GATHERED_TOGETHER // (self._sample_bytes * block.sizes[places.number])
        return max(1, min(fit, len(block.sizes) - places.number))

    def _alone(self, places: Places) -> list[Tensor | None]:
        found = self._source.gather(places.there(self._device))
        tensors: list[Tensor | None] = list(found) if type(found) is tuple else [found]
        if not self._sample_bytes:
            self._sample_bytes = sum(t.nbytes for t in tensors if t is not None) // max(1, len(places.host))
        return tensors

    def _together(self, places: Places, count: int) -> dict[int, list[Tensor | None]]:
        first, block = places.number, places.block
        assert block is not None  # or there is nothing that follows
        found = self._source.gather(places.there(self._device, count))
        sizes = block.sizes[first : first + count]
        columns = [_apart(whole, sizes) for whole in (found if type(found) is tuple else (found,))]
        return {first + at: [column[at] for column in columns] for at in range(count)}


def _apart(whole: Tensor, sizes: list[int]) -> list[Tensor]:
    """The rows of a tensor as tensors of so many rows each, in memory of their own; on a GPU by one launch for many."""
    parts = whole.unsafe_split_with_sizes(sizes)
    own = [torch.empty_like(part) for part in parts]
    torch._foreach_copy_(own, parts)
    return own


class _Gatherable:
    """A batch that is gathered on the device when the first part of it is asked for."""

    __slots__ = ("_copies", "_places", "_stream", "_tensors")

    def __init__(self, copies: Copies, places: Places) -> None:
        self._copies, self._places = copies, places
        self._tensors: list[Tensor | None] | None = None
        self._stream: torch.cuda.Stream | None = None

    def part(self, number: int) -> Tensor:
        """One tensor of it, for work that is launched from here on; asked for once."""
        if self._tensors is None:
            self._tensors, self._stream = self._copies.gathered(self._places)
        tensor, self._tensors[number] = self._tensors[number], None
        assert tensor is not None
        if self._stream is not None:
            here = current_stream(tensor.device)
            if here != self._stream:
                here.wait_stream(self._stream)
                tensor.record_stream(here)
        return tensor


class Part:
    """One tensor of a batch that is still to be gathered."""

    __slots__ = ("_batch", "_number")

    def __init__(self, batch: _Gatherable, number: int) -> None:
        self._batch, self._number = batch, number

    def landed(self) -> Tensor:
        """The tensor on the device."""
        return self._batch.part(self._number)

    def abandoned(self) -> None:
        """Nothing was done for it."""
