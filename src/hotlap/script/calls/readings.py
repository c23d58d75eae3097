"""Losses that a script reads at every step, copied to the host before their backward pass is asked for.

`loss.item()` behind `loss.backward()` and `optimizer.step()` waits for both of them, though the loss was there before.
Copied in time, it is read as soon as the forward pass has come to it, and the host goes on to the next batch while the
device is still at work. The number is the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from hotlap.script.patches import Patches, untraced
from hotlap.script.streams import current_stream

KEPT = 4
"""Losses that are remembered at a time: a GAN reads two of them at the end of a step."""
SEEN, MOST = 3, 6
"""Readings behind a backward pass, above those that did not come, from which on losses are copied; and what counts at
most, so that it ends soon where they are read no more."""
READS = ("item", "__float__")
_copy = Tensor.copy_
"""As it is before anybody patches it."""


class Place(Protocol):
    """Memory of the host for one number."""

    def take(self, number: Tensor) -> None:
        """Have it copied here by the device, behind all that it was asked for so far."""

    def value(self) -> Any:
        """The number, once it is here."""


class PageLocked:
    """Such memory, page-locked, so that nobody waits for the copy."""

    def __init__(self) -> None:
        self._there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host: dict[torch.dtype, Tensor] = {}
        self._dtype = torch.float32

    def take(self, number: Tensor) -> None:
        """Have it copied here by the device, behind all that it was asked for so far."""
        self._dtype = number.dtype
        if self._dtype not in self._host:
            self._host[self._dtype] = torch.empty((), dtype=self._dtype, device="cpu", pin_memory=True)
        _copy(self._host[self._dtype], number.detach(), non_blocking=True)
        self._there.record(current_stream(number.device))  # which need not be that of torch's current device

    def value(self) -> Any:
        """The number, once it is here."""
        self._there.synchronize()
        return self._host[self._dtype].tolist()


class _Kept:
    """A loss whose backward pass was asked for, and where it is copied to."""

    __slots__ = ("_loss", "_stream", "_version", "number", "place", "was_read")

    def __init__(self, loss: Tensor, place: Place | None, number: int, stream: object) -> None:
        self._loss, self._version, self._stream = weakref.ref(loss), loss._version, stream
        self.place, self.number, self.was_read = place, number, False

    def is_of(self, tensor: Tensor, stream: object) -> bool:
        """Whether it is this very tensor, nobody has written to it since, and what is read is what was copied.

        On another stream it may have been copied before it was made.
        """
        return self._loss() is tensor and tensor._version == self._version and self._stream == stream


class Readings:
    """Answers `.item()` and `float(…)` of such losses with what was copied; everything else is torch's own.

    A loss that is read by way of another tensor, as in `loss.detach().item()`, is read by torch. What is written to it
    through `.data` is not seen, since torch does not count it.
    """

    def __init__(self, device: torch.device, make_place: Callable[[], Place] = PageLocked) -> None:
        self._device, self._make_place = device, make_place
        self._places = list[Place]()
        self._stream: object = None
        """Of all copies: those of two streams could overtake each other on their way to one place."""
        self._kept: dict[int, _Kept] = {}
        self._passes = self._habit = 0
        self._patches = Patches()
        self._is_on = False
        self.answered = 0
        """Readings that did not wait for the backward pass."""

    def use(self, *, early: bool) -> None:
        """Answer them from here on, or leave it to torch."""
        self._kept.clear()
        self._is_on = early
        if early and not self._patches.has("Tensor.item"):
            for name in READS:
                self._patches.put(Tensor, name, self._read)
            self._patches.put(Tensor, "to", self._sends)
            self._patches.put(Tensor, "copy_", self._fills)
            self._patches.put(torch.cuda.Event, "elapsed_time", _waiting)

    def close(self) -> None:
        """Leave torch as it was. (Where others have patched on top, what lies beneath only passes on.)"""
        self.use(early=False)
        self._patches.take_out_all()

    def passing(self, loss: Tensor) -> None:
        """Told that a backward pass begins at a loss."""
        if not self._is_on or type(loss) is not Tensor or loss.dim() or loss.device != self._device:
            return
        if not loss.is_floating_point():
            return
        self._passes += 1
        last = self._passes - KEPT  # whose place is needed
        self._forget([key for key, kept in list(self._kept.items()) if kept.number <= last or key == id(loss)])
        place = self._copied(loss) if self._habit >= SEEN else None
        self._kept[id(loss)] = _Kept(loss, place, self._passes, self._stream_now())

    def _forget(self, keys: list[int]) -> None:
        for key in keys:
            kept = self._kept.pop(key, None)  # another thread of the script's may have been there
            if kept is not None and not kept.was_read:
                self._habit = max(0, self._habit - 1)

    def _stream_now(self) -> object:
        return current_stream(self._device) if self._device.type == "cuda" else None

    def _copied(self, loss: Tensor) -> Place | None:
        stream = self._stream_now()
        self._stream = self._stream or stream
        if stream != self._stream or (stream is not None and torch._C._cuda_isCurrentStreamCapturing()):
            return None
        try:
            if not self._places:
                self._places = [self._make_place() for _ in range(KEPT)]
            place = self._places[self._passes % KEPT]
            place.take(loss)
        except RuntimeError:  # for want of page-locked memory, for one
            self._is_on = False
            return None
        return place

    def _read(self, own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        @functools.wraps(own)
        def read(tensor: Tensor) -> Any:
            if has_torch_function_unary(tensor):
                # Subclasses and modes know a call by the function they are given: that has to be torch's own.
                return handle_torch_function(own, (tensor,), tensor)
            kept = self._kept.get(id(tensor))
            if kept is None or not kept.is_of(tensor, self._stream_now()):
                return own(tensor)
            if not kept.was_read:
                kept.was_read = True
                self._habit = min(MOST, self._habit + 1)
            if kept.place is None:
                return own(tensor)
            self.answered += 1
            return kept.place.value()

        return untraced(read)

    def _sends(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """What is sent to the host without waiting is there once torch has read a loss, and not before."""

        @functools.wraps(own)
        def to(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
            made = own(tensor, *args, **kwargs)
            is_ahead = kwargs.get("non_blocking") or any(value is True for value in args)
            if is_ahead and made is not tensor:
                self._note_sent(tensor, made)
            return made

        return untraced(to)

    def _fills(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """So is what memory of the host is filled with."""

        @functools.wraps(own)
        def copy_(tensor: Tensor, /, src: Tensor, non_blocking: bool = False) -> Tensor:
            made = own(tensor, src, non_blocking)
            if non_blocking:
                self._note_sent(src, made)
            return made

        return untraced(copy_)

    def _note_sent(self, source: Any, made: Tensor) -> None:
        if made.device.type == "cpu" and isinstance(source, Tensor) and source.device == self._device:
            self._forget(list(self._kept))


def _waiting(own: Callable[..., float]) -> Callable[..., float]:
    """The time between two events, the second of which may be still to come: `loss.item()` used to wait for it."""

    @functools.wraps(own)
    def elapsed_time(self: torch.cuda.Event, end_event: torch.cuda.Event) -> float:
        end_event.synchronize()
        return own(self, end_event)

    return elapsed_time
