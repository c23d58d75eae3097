"""Feeds bring batches to the training, each in its own way, all in the same order."""

from __future__ import annotations

import functools
import gc
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hotlap.core.errors import PlanError
from hotlap.core.plan import Feed
from hotlap.core.terminal import logger
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.sources import Source
from hotlap.machine.limits import most_workers, read_cpu

AHEAD = 2
"""Batches under way while one is trained on."""
BUFFER_SETS = AHEAD + 2
"""Page-locked memories: one more than is under way at once, so that the host can gather while a copy ends."""


class PendingCopy(Protocol):
    """A batch on its way to the device."""

    def on_device(self) -> Batch:
        """The batch on the device, for work that is launched from here on; asked for once."""

    def wait(self) -> None:
        """Wait until the memory that it is copied from may be written anew."""

    def discard(self) -> None:
        """Nobody will come for the batch."""


class DeviceCopier(Protocol):
    """A way to the device."""

    def send(self, batch: Batch) -> PendingCopy:
        """Begin to copy a batch in page-locked memory to the device, and come back at once."""


class CudaCopier:
    """Copies on a stream of their own to one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # as tensors name it: with its number
        self._stream = _copy_stream(self._device)

    def send(self, batch: Batch) -> PendingCopy:
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
        return _CudaCopy(there, [room for room, _ in pairs], copied, training)


class _CudaCopy:
    """A batch that is being copied to a GPU."""

    def __init__(
        self, batch: Batch, rooms: list[Tensor], copied: torch.cuda.Event, training: torch.cuda.Stream
    ) -> None:
        self._batch, self._rooms, self._copied, self._training = batch, rooms, copied, training

    def on_device(self) -> Batch:
        """The batch; the current stream waits for its copy, the host does not."""
        here = torch.cuda.current_stream(self._training.device)
        here.wait_event(self._copied)
        if here != self._training:
            for room in self._rooms:
                room.record_stream(here)
        # The copy is kept for its end of copy, and must not keep the memory of the batch.
        batch, self._batch, self._rooms = self._batch, None, []
        return batch

    def wait(self) -> None:
        """Wait for the end of the copy."""
        self._copied.synchronize()

    def discard(self) -> None:
        """Its memory goes back to the training stream, which must not use it before the copy has ended."""
        self._training.wait_event(self._copied)
        self._batch, self._rooms = None, []


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # One for the process: torch gives out 32 in turn, and a later one might be the stream somebody trains on.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copied_ahead(copies: Iterator[PendingCopy]) -> Iterator[Batch]:
    """The batches of these copies, each sent before the batch that comes `AHEAD` places earlier is given out.

    An error comes where its batch would have come.
    """
    under_way: deque[PendingCopy] = deque()
    failure: Exception | None = None
    try:
        while True:
            try:
                under_way.append(next(copies))
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            if len(under_way) > AHEAD:
                yield under_way.popleft().on_device()
        while under_way:
            yield under_way.popleft().on_device()
        if failure is not None:
            raise failure
    finally:
        for copy in under_way:
            copy.discard()


class PinnedBuffers:
    """Page-locked memory for one batch, used again and again."""

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._tensors: list[Tensor] = []
        self._given = 0
        self._flight: PendingCopy | None = None

    def clear(self) -> None:
        """Make it free for another batch, once the last one has left."""
        if self._flight is not None:
            self._flight.wait()
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

    def sent(self, copy: PendingCopy) -> PendingCopy:
        """Note that the batch has been sent."""
        self._flight = copy
        return copy

    def _new(self, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numbers, dtype=dtype, pin_memory=self._pinned)


class StreamFeeding:
    """Batches gathered into page-locked memory and copied to the device ahead."""

    tickets = False

    def __init__(self, source: Source, copier: DeviceCopier, *, pinned: bool = True) -> None:
        self._source, self._copier, self._pinned = source, copier, pinned
        self._stages: deque[PinnedBuffers] = deque()
        self.close()

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices, on the device."""
        return copied_ahead(self._copies(indices))

    def _copies(self, indices: Iterable[Tensor]) -> Iterator[PendingCopy]:
        for piece in indices:
            stage = self._stages[0]
            self._stages.rotate(-1)
            stage.clear()
            yield stage.sent(self._copier.send(self._source.gather(piece, stage.room)))

    def close(self) -> None:
        """Let go of the page-locked memory; torch keeps it from others until copies out of it have ended."""
        self._stages = deque(PinnedBuffers(pinned=self._pinned) for _ in range(BUFFER_SETS))


log = logger(__name__)

LOADER_PASSES_ON = ("worker_init_fn", "timeout", "multiprocessing_context")
"""Settings of a user's DataLoader that are kept as they are."""


class Feeding(Protocol):
    """A feed at work."""

    tickets: bool
    """Whether it asks for tickets, which tell a repeated sample apart, or for plain indices."""

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices, one for each, in this order."""

    def close(self) -> None:
        """Let go of processes and memory."""


class GatherFeeding:
    """Whole batches indexed out of tensors in the training process."""

    tickets = False

    def __init__(self, source: Source) -> None:
        self._source = source

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices."""
        return map(self._source.gather, indices)

    def close(self) -> None:
        """There is nothing to let go of."""


class LoaderFeeding:
    """Samples fetched one by one and collated, here or in worker processes, by torch's DataLoader.

    With a copier, which takes page-locked memory, batches come by it and are on the device.
    """

    tickets = True

    def __init__(
        self,
        source: Source,
        plan: Feed,
        *,
        seed: int,
        on_gpu: bool,
        extras: dict[str, Any],
        copier: DeviceCopier | None = None,
    ) -> None:
        self._requests, self._copier = _Requests(), copier
        self._start = WorkerStart(extras.get("worker_init_fn"))
        settings: dict[str, Any] = dict(extras)
        if plan.workers:
            settings["worker_init_fn"] = self._start
            settings["num_workers"] = plan.workers
            settings["persistent_workers"] = plan.persistent
            if plan.prefetch is not None:
                settings["prefetch_factor"] = plan.prefetch
        else:
            # torch refuses these without workers.
            settings.pop("timeout", None)
            settings.pop("multiprocessing_context", None)
        if plan.pinned and on_gpu:
            settings["pin_memory"] = True
        self._loader: DataLoader[Any] = DataLoader(
            _Fetches(source, seed),
            batch_sampler=self._requests,
            collate_fn=_unchanged,
            # A generator of its own: the loader draws a seed at each start, and must not move the training's.
            generator=torch.Generator().manual_seed(seed),
            **settings,
        )

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices."""
        self._requests.ask(indices, epoch)
        with self._start.without_collector():
            batches = iter(self._loader)
        return batches if self._copier is None else copied_ahead(map(self._copier.send, batches))

    def close(self) -> None:
        """End the workers, also persistent ones."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
            self._loader._iterator = None


class _Requests:
    """What the loader is asked for next; persistent workers keep the loader, so the list has to change."""

    def __init__(self) -> None:
        self._indices: Iterable[Tensor] = ()
        self._epoch = 0

    def ask(self, indices: Iterable[Tensor], epoch: int) -> None:
        self._indices, self._epoch = indices, epoch

    def __iter__(self) -> Iterator[list[int]]:
        # The epoch travels with each request: a persistent worker holds an old copy of everything else.
        for piece in self._indices:
            yield [self._epoch, *piece.tolist()]


class WorkerStart:
    """What a worker does first.

    A forked worker inherits CUDA graphs and tensors in reference cycles. Collecting one of them would call CUDA,
    which does not live through a fork: what is there at the fork is never collected in the worker.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self._collects = True

    @contextmanager
    def without_collector(self) -> Iterator[None]:
        """Start workers inside: the collector rests, here and in them, until they have come as far as `__call__`."""
        self._collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if self._collects:
                gc.enable()

    def __call__(self, worker: int) -> None:
        gc.freeze()
        if self._collects:
            gc.enable()
        if self._then is not None:
            self._then(worker)


class _Fetches(Dataset[Any]):
    """Answers a request (epoch, then indices) with a whole batch."""

    def __init__(self, source: Source, seed: int) -> None:
        self._source = source
        self._seed = seed

    def __getitems__(self, request: Sequence[int]) -> Batch:
        epoch, *indices = request
        return self._source.fetch(indices, self._seed, epoch)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([0, index])


def _unchanged(batch: Batch) -> Batch:
    return batch


def within_cores(feed: Feed, own: int) -> Feed:
    """A feed with no more workers than this machine can keep busy, though its plan be of another machine.

    `own` is how many the user's own feed has, which are never too many. The log says what is cut; batches are the same.
    """
    most = max(most_workers(), own) if feed.workers > own else feed.workers
    if feed.workers <= most:
        return feed
    _say_cut(feed.workers, most)
    return replace(feed, workers=most)


@functools.cache
def _say_cut(asked: int, most: int) -> None:
    """Once in a process: a plan may be used again and again."""
    log.warning(
        "the plan asks for %d workers and this process has %d cores: %d workers are started",
        asked,
        read_cpu().cores,
        most,
    )


def open_feed(
    source: Source,
    plan: Feed,
    *,
    seed: int = 0,
    on_gpu: bool = False,
    device: torch.device | None = None,
    extras: dict[str, Any] | None = None,
) -> Feeding:
    """Start the feed that the plan names.

    With the device to train on, `stream` and page-locked batches of a `loader` are copied there ahead; `on_gpu`
    alone says that it is a GPU, and the batches are left on the host.
    """
    reason = why_not(source, plan, device=device)
    if reason:
        raise PlanError(reason)
    if plan.kind == "gather":
        return GatherFeeding(source)
    copier = CudaCopier(device) if device is not None and device.type == "cuda" else None
    if plan.kind == "stream":
        assert copier is not None  # why_not has seen to it
        return StreamFeeding(source, copier)
    return LoaderFeeding(
        source,
        plan,
        seed=seed,
        on_gpu=on_gpu or copier is not None,
        extras=extras or {},
        copier=copier if plan.pinned else None,
    )


def why_not(source: Source, plan: Feed, *, device: torch.device | None = None) -> str | None:
    """Why this source cannot be fed as planned to this device, or None where it can."""
    if plan.kind not in ("gather", "stream"):
        return None
    if plan.kind == "stream" and (device is None or device.type != "cuda"):
        where = "no device was named" if device is None else f"this training is on the {device.type.upper()}"
        return f"feed.kind='stream' copies batches to a GPU ahead, and {where}; use kind='gather'"
    reason = source.why_not_gather()
    if reason is None and plan.kind == "stream" and not source.on_host:
        return "feed.kind='stream' copies batches to a GPU ahead, and the data is there already; use kind='gather'"
    return reason
