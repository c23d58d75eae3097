"""Copies on the GPU of batches that a script is about to send there: `.to` and `.cuda` return them."""

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
"""Most batches whose copies are kept: a script that keeps its batches must not fill the GPU with copies."""
_ANY_GPU = torch.device("cuda")


class Copy(Protocol):
    """A copy of a tensor on the GPU, or one in the making (see `hotlap.data.feeds.PendingCopy`)."""

    def on_device(self) -> Tensor:
        """The copy, ready for work launched from here on; called once."""

    def discard(self) -> None:
        """The copy is not needed."""


Serve = Callable[[Iterable[tuple[Tensor, Copy]]], None]
"""Takes the tensors of a batch that the script is about to get, with their copies."""


class _GivenTensor(weakref.ref[Tensor]):
    """A tensor that the script got, its state then, and its copy."""

    __slots__ = ("copy", "key", "pointer", "version")
    copy: Copy | None
    key: int
    pointer: int
    version: int


class DeviceCopies:
    """Answers the script's copies to a GPU with copies that are already there.

    It does so only for the very tensor of the batch, if nothing has written to it, and once: a second `.to` returns a
    copy of its own. It does not see writes through `.numpy()` or `.data`, since torch does not count them.
    """

    def __init__(self, device: torch.device) -> None:
        is_open = device.type == "cuda" and device.index is None
        self.device = torch.device("cuda", torch.cuda.current_device()) if is_open else device
        self._is_cuda = device.type == "cuda"
        self.answered = 0
        """Calls answered so far."""
        self.on_fault: Callable[[Exception], Any] | None = None
        """Called with a failure in here; the script gets torch's own answer."""
        self._served: dict[int, _GivenTensor] = {}
        self._batches: deque[list[_GivenTensor]] = deque()
        self._patches = Patches()
        self._home = os.getpid()
        self.installed = False

    def install(self) -> None:
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
        """Restore torch, and release all copies."""
        self._patches.take_out_all()
        self.installed = False
        self.forget()

    def serve(self, pairs: Iterable[tuple[Tensor, Copy]]) -> None:
        """Add the tensors of a batch that the script is about to get, with their copies."""
        batch = []
        for tensor, copy in pairs:
            # torch does not count writes to inference tensors.
            if not self.installed or tensor.is_inference():
                copy.discard()
                continue
            served = _GivenTensor(tensor, self._gone)
            served.key, served.version, served.pointer = id(tensor), tensor._version, tensor.data_ptr()
            served.copy = copy
            self._served[served.key] = served
            batch.append(served)
        self._batches.append(batch)
        if len(self._batches) > KEPT:
            for served in self._batches.popleft():
                self._gone(served)

    def forget(self) -> None:
        self._batches.clear()
        for served in list(self._served.values()):
            self._gone(served)

    def _answer(
        self, tensor: Tensor, parse: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        """The copy that a call asks for; None if torch has to answer."""
        try:
            asked = parse(tensor, *args, **kwargs)
        except Exception:  # torch refuses the call, or its form is unknown here
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
            return copy.data  # with a version counter of its own, as torch's answer has no writes
        except Exception as error:
            self._failed(error)
            return None

    def _is_here(self, asked: torch.device) -> bool:
        """Whether copies are on that device and usable by work launched now."""
        if asked != self.device:
            is_open = self._is_cuda and asked == _ANY_GPU
            if not is_open or torch.cuda.current_device() != self.device.index:
                return False
        # A captured graph would read the memory of this one copy in every replay.
        return not self._is_cuda or not torch.cuda.is_current_stream_capturing()

    def _gone(self, served: _GivenTensor) -> None:
        """A copy is no longer needed; its key may belong to another tensor by now."""
        if self._served.get(served.key) is served:
            del self._served[served.key]
            copy, served.copy = served.copy, None
            if copy is not None and os.getpid() == self._home:  # CUDA does not work in a forked process
                try:
                    copy.discard()
                except Exception as error:
                    self._failed(error)

    def _failed(self, error: Exception) -> None:
        if self.on_fault is not None:
            self.on_fault(error)


def _is_written_to(tensor: Tensor, served: _GivenTensor) -> bool:
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
    """The device that `tensor.to(…)` asks for, if it asks for nothing else."""
    if type(device) is torch.device and dtype is other is memory_format is None and not copy:  # the usual call
        return device
    if isinstance(device, Tensor):
        if dtype is not None:  # after another tensor, the arguments mean something else
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
    """The device that `tensor.cuda(…)` asks for, if it asks for nothing else."""
    if memory_format not in (None, torch.preserve_format):
        return None
    return _named("cuda" if device is None else device)


def _named(device: Any) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
