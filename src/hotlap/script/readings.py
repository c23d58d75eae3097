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

from hotlap.script.patches import Patches, untraced

KEPT = 4
"""Losses that are remembered at a time: a GAN reads two of them at the end of a step."""
SEEN, MOST = 3, 6
"""Readings behind a backward pass, above those that did not come, from which on losses are copied; and what counts at
most, so that it ends soon where they are read no more."""
READS = ("item", "__float__")


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
        self._host[self._dtype].copy_(number.detach(), non_blocking=True)
        self._there.record()

    def value(self) -> Any:
        """The number, once it is here."""
        self._there.synchronize()
        return self._host[self._dtype].tolist()


class _Kept:
    """A loss whose backward pass was asked for, and where it is copied to."""

    __slots__ = ("_loss", "_version", "number", "place")

    def __init__(self, loss: Tensor, place: Place | None, number: int) -> None:
        self._loss, self._version, self.place, self.number = weakref.ref(loss), loss._version, place, number

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is this very tensor, and nobody has written to it since."""
        return self._loss() is tensor and tensor._version == self._version


class Readings:
    """Answers `.item()` and `float(…)` of such losses with what was copied; everything else is torch's own.

    A loss that is read by way of another tensor, as in `loss.detach().item()`, is read by torch. What is written to it
    through `.data` is not seen, since torch does not count it.
    """

    def __init__(self, device: torch.device, make_place: Callable[[], Place] = PageLocked) -> None:
        self._device, self._make_place = device, make_place
        self._places = list[Place]()
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
                self._patches.put(Tensor, name, untraced(self._read(getattr(Tensor, name))))

    def close(self) -> None:
        """Leave torch as it was. (Where others have patched on top, what lies beneath only passes on.)"""
        self.use(early=False)
        self._patches.take_out_all()

    def passing(self, loss: Tensor) -> None:
        """Told that a backward pass begins at a loss."""
        if not self._is_on or type(loss) is not Tensor or loss.dim() or loss.device != self._device:
            return
        self._passes += 1
        last = self._passes - KEPT
        for key in [key for key, kept in self._kept.items() if kept.number <= last or key == id(loss)]:
            del self._kept[key]  # nobody has read it, and its place is needed
            self._habit = max(0, self._habit - 1)
        self._kept[id(loss)] = _Kept(loss, self._copied(loss) if self._habit >= SEEN else None, self._passes)

    def _copied(self, loss: Tensor) -> Place | None:
        if self._device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing():
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
            kept = self._kept.get(id(tensor))
            if kept is None or not kept.is_of(tensor) or torch._C._len_torch_function_stack():
                return own(tensor)
            del self._kept[id(tensor)]
            self._habit = min(MOST, self._habit + 1)
            if kept.place is None:
                return own(tensor)
            self.answered += 1
            return kept.place.value()

        return read
