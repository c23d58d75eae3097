"""Recording work as a CUDA graph, and leaving torch in order where that fails."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from weakref import WeakSet

import torch

from hotlap.engine.watch import why_recording_failed


def is_recording() -> bool:
    """Whether what runs now on this stream is recorded, and not executed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class NotRecordedError(Exception):
    """What could not be recorded, and at which line of the user's."""


class Recorder:
    """Records graphs that share their memory, on a stream that nothing else uses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _recording_stream(self._number)
        self._pool = torch.cuda.graph_pool_handle()
        self._made: WeakSet[torch.cuda.CUDAGraph] = WeakSet()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, work runs on the stream that records, in its turn with all other work."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            here.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The work as a graph; nothing of it is executed yet. Raises NotRecordedError where it cannot be one."""
        generator = torch.cuda.default_generators[self._number]
        before = generator.clone_state()
        graph = torch.cuda.CUDAGraph()
        if not self._made:
            # A pool whose graphs are all gone is gone with them.
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with self.aside(), _no_collection():
                # Other threads (a checkpoint, a loader that pins memory) may call CUDA meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # that the graph is empty, for one
                        graph.capture_end()
                    raise
                graph.capture_end()
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            # After a recording that broke, torch's generator and allocator still take it to be under way.
            generator.graphsafe_set_state(before)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._number, self._pool)
            torch.cuda.synchronize(self._device)
            raise NotRecordedError(why_recording_failed(error)) from error
        self._made.add(graph)
        return graph

    @property
    def _number(self) -> int:
        return self._device.index if self._device.index is not None else torch.cuda.current_device()


@cache
def _recording_stream(number: int) -> torch.cuda.Stream:
    # One for the process: cuBLAS keeps memory for each stream it was ever used on. What is recorded on it goes before
    # what is recorded beside it, and is waited for.
    return torch.cuda.Stream(number, priority=-1)  # type: ignore[no-untyped-call]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that holds device memory, or another graph, must not be collected while a recording is under way."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
