"""What a script sends to its device and is there already: `.to` and `.cuda` answer with that."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from hotlap.script.patches import Patches, untraced

KEPT = 8
"""Batches whose copies are kept at most: a script that keeps its batches must not fill the device with copies."""
_ANY_GPU = torch.device("cuda")


class Copy(Protocol):
    """A copy of a tensor on the device, or what becomes one (see `hotlap.data.feeds.PendingCopy`)."""

    def on_device(self) -> Tensor:
        """The copy, for work that is launched from here on; asked for once."""

    def discard(self) -> None:
        """Nobody will come for it."""


class Receives(Protocol):
    """Whoever wants to know of copies on the device."""

    def serve(self, pairs: Iterable[tuple[Tensor, Copy]]) -> None:
        """Told of the tensors of a batch as it is given to the script, and of their copies."""


class _Served(weakref.ref[Tensor]):
    """A tensor that the script was given, as it was then, and its copy."""

    __slots__ = ("copy", "key", "pointer", "version")
    copy: Copy | None
    key: int
    pointer: int
    version: int


class Sending:
    """Answers what a script sends to a device with copies that are there.

    Only for the very tensor that was served, as long as nobody has written to it, and once: whoever sends it again
    gets a copy of his own. What is written through `.numpy()` or `.data` is not seen, since torch does not count it.
    """

    def __init__(self, device: torch.device) -> None:
        is_open = device.type == "cuda" and device.index is None
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_open else device
        self._is_cuda = device.type == "cuda"
        self.answered = 0
        """Tensors that were sent and answered for."""
        self.on_fault: Callable[[Exception], Any] | None = None
        """Told of what went wrong in here; the script gets torch's own answer."""
        self._served: dict[int, _Served] = {}
        self._batches: deque[list[_Served]] = deque()
        self._patches = Patches()
        self._home = os.getpid()
        self.installed = False

    def install(self) -> None:
        """Answer from here on."""
        if not self.installed:
            self.installed = True
            self._patches.put(torch.Tensor, "to", functools.partial(self._answering, _asked_by_to))
            self._patches.put(torch.Tensor, "cuda", functools.partial(self._answering, _asked_by_cuda))

    def _answering(self, parse: Callable[..., Any], own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        served = self._served

        @functools.wraps(own)
        def sent(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
            if id(tensor) in served:
                copy = self._answer(tensor, parse, args, kwargs)
                if copy is not None:
                    return copy
            return own(tensor, *args, **kwargs)

        return untraced(sent)

    def remove(self) -> None:
        """Leave torch as it was, and let go of all copies."""
        self._patches.take_out_all()
        self.installed = False
        self.forget()

    def serve(self, pairs: Iterable[tuple[Tensor, Copy]]) -> None:
        """Told of the tensors of a batch as it is given to the script, and of their copies."""
        batch = []
        for tensor, copy in pairs:
            # Of inference tensors torch does not count who writes to them.
            if not self.installed or tensor.is_inference():
                copy.discard()
                continue
            served = _Served(tensor, self._gone)
            served.key, served.version, served.pointer = id(tensor), tensor._version, tensor.data_ptr()
            served.copy = copy
            self._served[served.key] = served
            batch.append(served)
        self._batches.append(batch)
        if len(self._batches) > KEPT:
            for served in self._batches.popleft():
                self._gone(served)

    def forget(self) -> None:
        """Let go of all copies."""
        self._batches.clear()
        for served in list(self._served.values()):
            self._gone(served)

    def _answer(
        self, tensor: Tensor, parse: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The copy that a call asks for, or None where torch has to answer."""
        try:
            asked = parse(tensor, *args, **kwargs)
        except Exception:  # a call that torch refuses, or one of a kind that is not known here
            return None
        try:
            if asked is None or not self._is_here(asked):
                return None
            served = self._served.pop(id(tensor), None)
            if served is None or served.copy is None:
                return None
            known, served.copy = served.copy, None
            if served() is not tensor or tensor.requires_grad or _is_written_to(tensor, served):
                known.discard()
                return None
            copy = known.on_device()
            if copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                return None
            if copy.is_inference() and not torch.is_inference_mode_enabled():
                return None
            self.answered += 1
            return copy.data  # with a version counter of its own: torch's answer was never written to
        except Exception as error:
            self._failed(error)
            return None

    def _is_here(self, asked: torch.device) -> bool:
        """Whether copies are on that device, and may be used by work that is launched now."""
        if asked != self.device:
            is_open = self._is_cuda and asked == _ANY_GPU
            if not is_open or torch.cuda.current_device() != self.device.index:
                return False
        # What is captured reads the memory of its copy in every replay.
        return not self._is_cuda or not torch.cuda.is_current_stream_capturing()

    def _gone(self, served: _Served) -> None:
        """The copy of a tensor is no longer wanted; by now there may be another tensor with its key."""
        if self._served.get(served.key) is served:
            del self._served[served.key]
            copy, served.copy = served.copy, None
            if copy is not None and os.getpid() == self._home:  # CUDA does not live through a fork
                try:
                    copy.discard()
                except Exception as error:
                    self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self.on_fault is not None:
            self.on_fault(error)


def _is_written_to(tensor: Tensor, served: _Served) -> bool:
    return tensor._version != served.version or tensor.data_ptr() != served.pointer


def _asked_by_to(
    tensor: Tensor,
    device: Any = None,
    dtype: Any = None,
    non_blocking: bool = False,
    copy: bool = False,
    *,
    other: Any = None,
    memory_format: Any = None,
) -> torch.device | None:
    """The device that `tensor.to(…)` asks for, where it asks for nothing else."""
    if type(device) is torch.device and dtype is other is memory_format is None and not copy:  # as most ask
        return device
    if isinstance(device, Tensor):
        if dtype is not None:  # the arguments after another tensor are others
            return None
        other, device = device, None
    if other is not None:
        device, dtype = other.device, other.dtype
    if copy or dtype not in (None, tensor.dtype) or memory_format not in (None, torch.preserve_format):
        return None
    return None if device is None else _named(device)


def _asked_by_cuda(
    tensor: Tensor, device: Any = None, non_blocking: bool = False, *, memory_format: Any = None
) -> torch.device | None:
    """The device that `tensor.cuda(…)` asks for, where it asks for nothing else."""
    if memory_format not in (None, torch.preserve_format):
        return None
    return _named("cuda" if device is None else device)


def _named(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
