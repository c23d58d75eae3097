"""Feeds bring batches to the training, each in its own way, all in the same order.

The stream feed gathers batches into pinned memory and copies them to the GPU while it trains on others. Copies run on
a stream of their own, two batches ahead. hotlap overwrites no memory too early:

- Pinned memory: the host writes to it again only after its copy has ended. The host waits for nothing else.
- GPU memory: it comes from the training stream, so an earlier step may still read it. The copy waits on the GPU for all
  work launched before. A batch that is kept keeps its memory.
- A discarded batch: on the GPU, the training stream waits for its copy before the memory is free.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import math
import os
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
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

log = logger(__name__)

LOADER_PASSES_ON = ("worker_init_fn", "timeout", "multiprocessing_context")
"""Settings of a user's DataLoader that hotlap keeps."""
AHEAD = 2
"""Batches in transit while the GPU trains on one."""
BUFFER_SETS = AHEAD + 2
"""Sets of pinned buffers: one more than in transit, so that the host can gather while a copy ends."""
STACKS_SIGNAL = signal.SIGRTMIN + 11 if sys.platform == "linux" else 0
"""The signal at which a worker writes its stacks, if nothing else handles it there."""
MOST_STACKS = 2**20
"""Bytes of stacks to read."""
ANSWER_S, ANSWER_LOOKS = 1.0, 20
"""How long a worker may take to begin its answer, and in how many looks hotlap waits for it."""


class PendingCopy(Protocol):
    """A copy of a batch to the device, in progress."""

    def on_device(self) -> Batch:
        """The batch on the device, for work launched from now on; call it once."""

    def wait(self) -> None:
        """Wait until the source memory may be overwritten."""

    def discard(self) -> None:
        """Give the batch up."""


class DeviceCopier(Protocol):
    """Copies batches to the device."""

    def send(self, batch: Batch) -> PendingCopy:
        """Start to copy a batch from pinned memory to the device, and return at once."""


class CudaCopier:
    """Copies batches to one GPU on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index, as tensors have it
        self._stream = _copy_stream(self._device)

    def send(self, batch: Batch) -> PendingCopy:
        """Start to copy the batch; tensors on a device stay there."""
        training = torch.cuda.current_stream(self._device)
        pairs: list[tuple[Tensor, Tensor]] = []

        def place(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cpu":
                return tensor
            there = torch.empty_like(tensor, device=self._device)
            pairs.append((there, tensor))
            return there

        there = map_tensors(batch, place)
        # Blocking: a waiting thread sleeps, since workers need the core.
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(training)
        with torch.cuda.stream(self._stream):
            for room, tensor in pairs:
                room.copy_(tensor, non_blocking=True)
            copied.record(self._stream)
        return _CudaCopy(there, [room for room, _ in pairs], copied, training)


class _CudaCopy:
    """A copy of a batch to a GPU, in progress."""

    def __init__(
        self, batch: Batch, rooms: list[Tensor], copied: torch.cuda.Event, training: torch.cuda.Stream
    ) -> None:
        self._batch, self._rooms, self._copied, self._training = batch, rooms, copied, training

    def on_device(self) -> Batch:
        """The batch; the current stream waits for the copy, the host does not."""
        here = torch.cuda.current_stream(self._training.device)
        here.wait_event(self._copied)
        if here != self._training:
            for room in self._rooms:
                room.record_stream(here)
        # The object stays for `wait`, and must not keep the memory of the batch.
        batch, self._batch, self._rooms = self._batch, None, []
        return batch

    def wait(self) -> None:
        """Wait for the end of the copy."""
        self._copied.synchronize()

    def discard(self) -> None:
        """Return the memory to the training stream, which first waits for the end of the copy."""
        self._training.wait_event(self._copied)
        self._batch, self._rooms = None, []


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    # One per process: torch hands out 32 streams in turn, so a later one might be the training stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def copied_ahead(copies: Iterator[PendingCopy]) -> Iterator[Batch]:
    """The batches of these copies; hotlap starts each copy before it yields the batch `AHEAD` places earlier.

    An error comes in place of its batch.
    """
    in_transit: deque[PendingCopy] = deque()
    failure: Exception | None = None
    try:
        while True:
            try:
                in_transit.append(next(copies))
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            if len(in_transit) > AHEAD:
                yield in_transit.popleft().on_device()
        while in_transit:
            yield in_transit.popleft().on_device()
        if failure is not None:
            raise failure
    finally:
        for copy in in_transit:
            copy.discard()


class PinnedBuffers:
    """Reusable pinned memory for one batch."""

    def __init__(self, *, pinned: bool = True) -> None:
        self._pinned = pinned
        self._tensors: list[Tensor] = []
        self._given = 0
        self._copy: PendingCopy | None = None

    def clear(self) -> None:
        """Free it for another batch; waits for the copy of the last one."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None
        self._given = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for the next tensor of the batch; smaller batches use a part of it."""
        number, self._given = self._given, self._given + 1
        numbers = math.prod(shape)
        if number == len(self._tensors):
            self._tensors.append(self._new(numbers, dtype))
        held = self._tensors[number]
        if held.dtype != dtype or len(held) < numbers:
            held = self._tensors[number] = self._new(numbers, dtype)
        return held[:numbers].view(shape)

    def sent(self, copy: PendingCopy) -> PendingCopy:
        """Note the copy that reads from this memory."""
        self._copy = copy
        return copy

    def _new(self, numbers: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numbers, dtype=dtype, pin_memory=self._pinned)


class StreamFeeding:
    """Batches gathered into pinned memory and copied to the device ahead."""

    tickets = False

    def __init__(self, source: Source, copier: DeviceCopier, *, pinned: bool = True) -> None:
        self._source, self._copier, self._pinned = source, copier, pinned
        self._buffers: deque[PinnedBuffers] = deque()
        self.close()

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices, on the device."""
        return copied_ahead(self._copies(indices))

    def _copies(self, indices: Iterable[Tensor]) -> Iterator[PendingCopy]:
        for piece in indices:
            buffers = self._buffers[0]
            self._buffers.rotate(-1)
            buffers.clear()
            yield buffers.sent(self._copier.send(self._source.gather(piece, buffers.allocate)))

    def close(self) -> None:
        """Release the pinned memory; torch reuses it only after copies out of it have ended."""
        self._buffers = deque(PinnedBuffers(pinned=self._pinned) for _ in range(BUFFER_SETS))


class Feeding(Protocol):
    """An open feed."""

    tickets: bool
    """Whether it takes tickets, which distinguish repeated samples, or plain indices."""

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches for these indices, in this order."""

    def close(self) -> None:
        """Release processes and memory."""


class GatherFeeding:
    """Whole batches indexed out of tensors in the training process."""

    tickets = False

    def __init__(self, source: Source) -> None:
        self._source = source

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices."""
        return map(self._source.gather, indices)

    def close(self) -> None:
        """Nothing to release."""


class LoaderFeeding:
    """Samples fetched one by one and collated by torch's DataLoader, in this process or in workers.

    With a copier, batches come from pinned memory and are on the device.
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
        self._batches: Any = None
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
            # A separate generator: the loader draws a seed at each start, which must not move the training's.
            generator=torch.Generator().manual_seed(seed),
            **settings,
        )

    def pieces(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """The batches at these indices."""
        self._requests.ask(indices, epoch)
        with self._start.without_collector():
            batches = self._batches = iter(self._loader)
        return batches if self._copier is None else copied_ahead(map(self._copier.send, batches))

    def close(self) -> None:
        """End the workers, also persistent ones, and those of batches that an error or a `break` has left."""
        if hasattr(self._batches, "_shutdown_workers"):
            self._batches._shutdown_workers()
        self._batches = self._loader._iterator = None


class _Requests:
    """The next requests to the loader; persistent workers keep the loader, so this object changes instead."""

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
    """The start of a worker process.

    A forked worker inherits CUDA graphs and tensors in reference cycles. Collecting them would call CUDA, which does
    not survive a fork: so a worker never collects objects from before the fork.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then
        self._collects = True
        self._stacks: int | None = None
        """The file in memory to which forked workers write their stacks."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stacks": None}

    @contextmanager
    def without_collector(self) -> Iterator[None]:
        """Start workers inside: garbage collection is off, here and in the workers until `__call__`."""
        self._collects = gc.isenabled()
        if self._stacks is None and sys.platform == "linux":
            with suppress(OSError):
                self._stacks = os.memfd_create("stacks")
                weakref.finalize(self, os.close, self._stacks)
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
        if self._stacks is not None and signal.getsignal(STACKS_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(STACKS_SIGNAL, file=self._stacks)
            os.write(self._stacks, _answers(os.getpid()))
        if self._then is not None:
            self._then(worker)

    def stacks_of(self, pid: int) -> str:
        """The stacks of a worker that has not ended, as Python's faulthandler writes them; empty if it cannot answer.

        A blocked Python answers too: no code of Python runs for it.
        """
        if self._stacks is None or _answers(pid) not in os.pread(self._stacks, MOST_STACKS, 0):
            return ""
        before = size = os.fstat(self._stacks).st_size
        with suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
        for _ in range(ANSWER_LOOKS):  # it has written all when nothing more comes
            last = size
            time.sleep(ANSWER_S / ANSWER_LOOKS)
            size = os.fstat(self._stacks).st_size
            if last == size > before:
                break
        return os.pread(self._stacks, MOST_STACKS, before).decode(errors="replace")


def _answers(pid: int) -> bytes:
    return b"worker %d\n" % pid


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
    """A feed with no more workers than this machine can keep busy, for plans from other machines.

    `own` is the number of workers in the user's feed, which is always allowed. The log reports a change; batches are
    the same.
    """
    most = max(most_workers(), own) if feed.workers > own else feed.workers
    if feed.workers <= most:
        return feed
    _say_cut(feed.workers, most)
    return replace(feed, workers=most)


@functools.cache
def _say_cut(asked: int, most: int) -> None:
    """Log it once per process: a plan may be used many times."""
    log.warning(
        "the plan asks for %d workers and this process has %d cores: hotlap starts %d workers",
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
    """Open the feed that the plan names.

    With `device`, hotlap copies batches of `stream` and pinned batches of `loader` there ahead. With `on_gpu` alone,
    the training is on a GPU and batches stay on the host.
    """
    reason = why_not(source, plan, device=device)
    if reason:
        raise PlanError(reason)
    if plan.kind == "gather":
        return GatherFeeding(source)
    copier = CudaCopier(device) if device is not None and device.type == "cuda" else None
    if plan.kind == "stream":
        assert copier is not None  # `why_not` checked it
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
    """Why this feed cannot bring this source to this device; None if it can."""
    if plan.kind not in ("gather", "stream"):
        return None
    if plan.kind == "stream" and (device is None or device.type != "cuda"):
        where = "no device was named" if device is None else f"this training is on the {device.type.upper()}"
        return f"feed.kind='stream' copies batches to a GPU ahead, and {where}; use kind='gather'"
    reason = source.why_not_gather()
    if reason is None and plan.kind == "stream" and not source.on_host:
        return "feed.kind='stream' copies batches to a GPU ahead, and the data is there already; use kind='gather'"
    return reason
