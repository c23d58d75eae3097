"""The stream feed: batches gathered into page-locked memory, and copied to the GPU while it trains on others.

A copy runs on a stream of its own, two batches ahead. Three memories could be written too early, and are not:

- The page-locked memory: it is written anew once its copy has ended. That is the only wait of the host.
- The memory on the GPU: it is taken from the stream that trains, so it may be what an earlier step still reads;
  the copy waits on the GPU for all that was launched before it was taken. Who keeps a batch keeps its memory.
- Of a batch that nobody came for: the training stream waits, on the GPU, for its copy before the memory is free.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from hotlap.data.batches import Batch, map_tensors
from hotlap.data.samples import Source

AHEAD = 2
"""Batches under way while one is trained on."""
STAGES = AHEAD + 2
"""Page-locked memories: one more than is under way at once, so that the host can gather while a copy ends."""


class Flight(Protocol):
    """A batch on its way to the device."""

    def landed(self) -> Batch:
        """The batch on the device, for work that is launched from here on; asked for once."""

    def left(self) -> None:
        """Wait until the memory that it is copied from may be written anew."""

    def abandoned(self) -> None:
        """Nobody will come for the batch."""


class Lane(Protocol):
    """A way to the device."""

    def send(self, batch: Batch) -> Flight:
        """Begin to copy a batch in page-locked memory to the device, and come back at once."""


class CudaLane:
    """Copies on a stream of their own to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # as tensors name it: with its number
        self._stream = _copy_stream(self._device)

    def send(self, batch: Batch) -> Flight:
        """Begin to copy the batch; what is on a device already stays there."""
        training = torch.cuda.current_stream(self._device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def place(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                return tensor
            there = torch.empty_like(tensor, device=self._device)
            pairs.append((there, tensor))
            return there

        there = map_tensors(batch, place)
        # Who waits for it sleeps: workers need the core.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for room, tensor in pairs:
                room.copy_(tensor, non_blocking=True)
            copied.record(self._stream)
        return _CudaFlight(there, [room for room, _ in pairs], copied, training)


class _CudaFlight:
    """A batch that is being copied to a GPU."""

    def __init__(
        self, batch: Batch, rooms: list[Tensor], copied: torch.cuda.Event, training: torch.cuda.Stream
    ) -> None:
        self._batch, self._rooms, self._copied, self._training = batch, rooms, copied, training

    def landed(self) -> Batch:
        """The batch; the current stream waits for its copy, the host does not."""
        here = torch.cuda.current_stream(self._training.device)
        here.wait_event(self._copied)
        if here != self._training:
            for room in self._rooms:
                room.record_stream(here)
        # The flight is kept for its end of copy, and must not keep the memory of the batch.
        batch, self._batch, self._rooms = self._batch, None, []
        return batch

    def left(self) -> None:
        """Wait for the end of the copy."""
        self._copied.synchronize()

    def abandoned(self) -> None:
        """Its memory goes back to the training stream, which must not use it before the copy has ended."""
        self._training.wait_event(self._copied)
        self._batch, self._rooms = None, []


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # One for the process: torch gives out 32 in turn, and a later one might be the stream somebody trains on.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def ahead(flights: Iterator[Flight]) -> Iterator[Batch]:
    """The batches of these flights, each sent before the batch that comes `AHEAD` places earlier is given out.

    An error comes where its batch would have come.
    """
    under_way: deque[Flight] = deque()
    failure: Exception | None = None
    try:
        while True:
            try:
                under_way.append(next(flights))
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            if len(under_way) > AHEAD:
                yield under_way.popleft().landed()
        while under_way:
            yield under_way.popleft().landed()
        if failure is not None:
            raise failure
    finally:
        for flight in under_way:
            flight.abandoned()


class Stage:
    """Page-locked memory for one batch, used again and again."""

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._tensors: list[Tensor] = []
        self._given = 0
        self._flight: Flight | None = None

    def clear(self) -> None:
        """Make it free for another batch, once the last one has left."""
        if self._flight is not None:
            self._flight.left()
            self._flight = None
        self._given = 0

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for the next tensor of the batch; smaller batches use a part of what is there."""
        number, self._given = self._given, self._given + 1
        numbers = math.prod(shape)
        if number == len(self._tensors):
            self._tensors.append(self._new(numbers, dtype))
        held = self._tensors[number]
        if held.dtype != dtype or len(held) < numbers:
            held = self._tensors[number] = self._new(numbers, dtype)
        return held[:numbers].view(shape)

    def sent(self, flight: Flight) -> Flight:
        """Note that the batch has been sent."""
        self._flight = flight
        return flight

    def _new(self, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numbers, dtype=dtype, pin_memory=self._pinned)


class StreamFeeding:
    """Batches gathered into page-locked memory and copied to the device ahead."""

    tickets = False

    def __init__(self, source: Source, lane: Lane, *, pinned: bool = True) -> None:
        self._source, self._lane, self._pinned = source, lane, pinned
        self._stages: deque[Stage] = deque()
        self.close()

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices, on the device."""
        return ahead(self._flights(indices))

    def _flights(self, indices: Iterable[Tensor]) -> Iterator[Flight]:
        for piece in indices:
            stage = self._stages[0]
            self._stages.rotate(-1)
            stage.clear()
            yield stage.sent(self._lane.send(self._source.gather(piece, stage.room)))

    def close(self) -> None:
        """Let go of the page-locked memory; torch keeps it from others until copies out of it have ended."""
        self._stages = deque(Stage(pinned=self._pinned) for _ in range(STAGES))
