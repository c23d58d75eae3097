"""Losses copied to the host before their backward pass, for `loss.item()`.

`loss.item()` after `loss.backward()` and `optimizer.step()` waits for both, although the loss was ready before. hotlap
copies the loss before the backward pass, so that the host reads it as soon as the forward pass is done. It then
prepares the next batch while the GPU still works. The number is the same.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.overrides import handle_torch_function, has_torch_function_unary

from hotlap.core.torch_private import is_stream_capturing
from hotlap.core.warning_filters import recorded
from hotlap.engine.capture.recording import current_stream, is_own_recording
from hotlap.script.calls.eager import trains_with_others
from hotlap.script.patches import Patches, scripted_as, untraced

MOST_KEPT_COPIES = 4
"""Most losses kept at a time: a GAN reads two of them at the end of a step."""
SEEN_READS, MOST = 3, 6
"""Reads after a backward pass, minus losses that were not read, from which on losses are copied; and the most that
counts, so that copying ends soon after the reads do."""
READS: dict[str, Callable[[Any], Any]] = {"item": lambda number: number, "__float__": float, "__bool__": bool}
"""Methods that read a number, with what they make of it."""
TESTS = {"isnan": math.isnan, "isinf": math.isinf, "isfinite": math.isfinite}
"""Functions of torch, and methods, that test a number: trainers look at each loss."""
LARGEST_KEPT = 2**10
"""Most bytes of the memory that a kept loss is part of."""
_copy = Tensor.copy_
"""The original, before any patch."""


class PinnedNumber:
    """Pinned host memory for one number, so that the copy makes nothing wait."""

    def __init__(self) -> None:
        self._there: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._host: dict[torch.dtype, Tensor] = {}
        self._dtype = torch.float32

    def take(self, number: Tensor) -> None:
        """Copy a number here, behind all work launched so far."""
        self._dtype = number.dtype
        if self._dtype not in self._host:
            self._host[self._dtype] = torch.empty((), dtype=self._dtype, device="cpu", pin_memory=True)
        _copy(self._host[self._dtype], number.detach(), non_blocking=True)
        self._there.record(current_stream(number.device))  # which may not be on torch's current device

    def value(self) -> Any:
        """The number; waits until it is here."""
        self._there.synchronize()
        return self._host[self._dtype].tolist()


class _KeptLoss:
    """A loss whose backward pass has begun, and the memory it is copied to."""

    __slots__ = ("_same", "_stream", "_version", "place", "was_read")

    def __init__(self, loss: Tensor, place: PinnedNumber | None, stream: object) -> None:
        # It shares memory and the count of writes, so that no other tensor gets this address.
        self._same = loss.detach()
        self._version, self._stream = loss._version, stream
        self.place, self.was_read = place, False

    def is_of(self, tensor: Tensor, stream: object) -> bool:
        """Whether the tensor at its address holds its value, unchanged since, so that the copy is that value.

        On another stream it may have been copied before it was computed.
        """
        same = self._same
        is_number = not tensor.dim() and tensor.dtype == same.dtype and not tensor.is_neg()
        return is_number and same._version == self._version and self._stream == stream


@dataclass(frozen=True)
class _Tested:
    """The result of a test of a loss."""

    result: weakref.ref[Tensor]
    version: int
    loss: _KeptLoss
    test: Callable[[float], bool]

    def is_of(self, tensor: Tensor) -> bool:
        """Whether it is this very tensor, unchanged since."""
        return self.result() is tensor and tensor._version == self.version


class EarlyLoss:
    """Answers `.item()` and the like of such losses, and of tests of them, from the copy; torch answers all else.

    Scripts that scale their loss read it as it was before. torch does not count writes through `.data`, which hotlap
    does not see, nor those of `torch.distributed` and of the script's own CUDA graphs, where torch answers.
    """

    def __init__(self, device: torch.device, make_place: Callable[[], PinnedNumber] = PinnedNumber) -> None:
        self._device, self._make_place = device, make_place
        self._stream: object = None
        """The stream of all copies: two streams could overtake each other on the way to the same memory."""
        self._made_on = set[object]()
        """The streams of the calls whose losses are differentiated next, or were last."""
        self._is_past_backward = False
        self._places = list[PinnedNumber]()
        self._habit = self._copied = 0
        self._kept: dict[int, _KeptLoss] = {}
        """By address, the oldest first."""
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        """A scaled loss, and the loss without its graph."""
        self._tested: dict[int, _Tested] = {}
        """By the id of the result."""
        self._sent = weakref.WeakValueDictionary[int, Tensor]()
        """Pinned memory that was sent to the GPU and still exists, by address."""
        self._patches = Patches()
        self._is_on = False
        self._thread = 0
        """The thread that trains. While another one waits for a number, this one may overwrite it."""
        self.answered = 0
        """Reads that did not wait for the backward pass."""

    def use(self, *, early: bool) -> None:
        """Begin to answer, or leave reads to torch."""
        self._kept.clear()
        self._tested.clear()
        self._sent.clear()
        self._scaled = None
        self._is_on, self._thread = early, threading.get_ident()
        if early and not self._patches.has("Tensor.item"):
            for name, as_read in READS.items():
                self._patches.put(Tensor, name, functools.partial(self._patched_read, as_read))
            for name, test in TESTS.items():
                for owner in (torch, Tensor):
                    self._patches.put(owner, name, functools.partial(self._patched_test, test))
            self._patches.put(GradScaler, "scale", self._patched_scale)
            for name in ("to", "cuda"):
                self._patches.put(Tensor, name, self._patched_to)
            self._patches.put(Tensor, "copy_", self._patched_copy)
            self._patches.put(torch.cuda.CUDAGraph, "replay", self._patched_replay)
            self._patches.put(torch.cuda.Event, "elapsed_time", _patched_elapsed_time)

    def close(self) -> None:
        """Restore torch. If other code has patched on top, ours only passes on from here."""
        self.use(early=False)
        self._patches.take_out_all()
        self._places.clear()

    # --- copies ------------------------------------------------------------------------------

    def called(self) -> None:
        """The script calls a model, on the current stream."""
        if self._is_on:
            if self._is_past_backward:
                self._is_past_backward = False
                self._made_on.clear()
            self._made_on.add(current_stream(self._device))

    def backward_begins(self, loss: Tensor) -> None:
        """A backward pass begins at a loss."""
        self._is_past_backward = True
        scaled, self._scaled = self._scaled, None
        if scaled is not None and scaled[0]() is loss:
            loss = scaled[1]  # what the script reads
        if not self._is_on or not self._is_number(loss) or not self._is_alone():
            return
        address = loss.data_ptr()
        for oldest in list(self._kept)[: max(0, len(self._kept) - MOST_KEPT_COPIES + 1)]:
            self._forget(oldest)  # its memory is needed
        self._forget(address)
        place = self._copy_of(loss) if self._habit >= SEEN_READS else None
        self._kept[address] = _KeptLoss(loss, place, current_stream(self._device))

    def _is_number(self, loss: Tensor) -> bool:
        is_plain = type(loss) is Tensor and not loss.dim() and loss.layout is torch.strided
        is_here = is_plain and loss.device == self._device and loss.is_floating_point()
        return is_here and loss.untyped_storage().nbytes() <= LARGEST_KEPT

    def _is_alone(self) -> bool:
        """Whether this is the thread that trains, and no other process takes part."""
        return threading.get_ident() == self._thread and not trains_with_others()

    def _copy_of(self, loss: Tensor) -> PinnedNumber | None:
        stream = current_stream(self._device)
        self._stream = self._stream or stream
        # torch waits for the streams of the loss behind the backward pass, and not before it.
        is_elsewhere = stream != self._stream or not self._made_on <= {stream}
        if is_elsewhere or (stream is not None and is_stream_capturing()):
            return None
        try:
            if not self._places:
                self._places = [self._make_place() for _ in range(MOST_KEPT_COPIES)]
            self._copied += 1
            place = self._places[self._copied % MOST_KEPT_COPIES]
            place.take(loss)
        except RuntimeError:  # such as no pinned memory
            self._is_on = False
            return None
        return place

    def _forget(self, address: int) -> None:
        kept = self._kept.pop(address, None)
        if kept is not None:
            kept.place = None
            if not kept.was_read:
                self._habit = max(0, self._habit - 1)

    def _forget_all(self) -> None:
        for address in list(self._kept):
            self._forget(address)

    # --- answers -----------------------------------------------------------------------------

    def _kept_of(self, tensor: Any) -> _KeptLoss | None:
        """The loss whose value this tensor holds."""
        if type(tensor) is not Tensor or tensor.device != self._device or tensor.layout is not torch.strided:
            return None
        try:
            kept = self._kept.get(tensor.data_ptr())
        except RuntimeError:  # inside a transform of torch it has no address
            return None
        is_here = kept is not None and self._is_alone() and kept.is_of(tensor, current_stream(self._device))
        return kept if is_here else None

    def _answer(self, tensor: Tensor) -> Any:
        """The number that this tensor holds, if it was copied; else None."""
        tested = self._tested.get(id(tensor))
        if tested is not None and not (tested.is_of(tensor) and self._is_alone()):
            tested = None
        kept = tested.loss if tested is not None else self._kept_of(tensor)
        if kept is None:
            return None
        if not kept.was_read:
            kept.was_read = True
            self._habit = min(MOST, self._habit + 1)
        place = kept.place  # another thread may take it away
        if place is None:
            return None
        self.answered += 1
        number = place.value()
        return number if tested is None else tested.test(number)

    def _patched_read(self, as_read: Callable[[Any], Any], own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        @functools.wraps(own)
        def read(tensor: Tensor) -> Any:
            if has_torch_function_unary(tensor):
                # Subclasses and modes recognise a call by its function, which must be torch's own.
                return handle_torch_function(own, (tensor,), tensor)
            number = self._answer(tensor) if self._is_on and not tensor.dim() else None
            if number is not None:
                return as_read(number)
            return _read_by_torch(own, tensor) if tensor.requires_grad else own(tensor)

        return untraced(read)

    def _patched_test(self, test: Callable[[float], bool], own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The result is torch's own; if it is read, the copy of the loss answers."""

        @functools.wraps(own)
        def tested(*args: Any, **kwargs: Any) -> Tensor:
            made = own(*args, **kwargs)
            kept = self._kept_of(args[0]) if self._is_on and args else None
            # torch counts no writes to tensors made in inference mode.
            if kept is not None and type(made) is Tensor and not made.is_inference():
                self._tested = {key: one for key, one in self._tested.items() if one.result() is not None}
                self._tested[id(made)] = _Tested(weakref.ref(made), made._version, kept, test)
            return made

        return scripted_as(own, untraced(tested))

    def _patched_scale(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """A loss that is scaled is there before the backward pass of the scaled one."""

        @functools.wraps(own)
        def scale(scaler: GradScaler, outputs: Any) -> Any:
            made = own(scaler, outputs)
            is_loss = type(outputs) is Tensor and type(made) is Tensor and made is not outputs
            self._scaled = (weakref.ref(made), outputs.detach()) if is_loss and self._is_on else None
            return made

        return untraced(scale)

    # --- what else the script expects of a read ----------------------------------------------

    def _patched_to(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Non-blocking copies are done once torch has read a loss, but not with an early read."""

        @functools.wraps(own)
        def to(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
            made = own(tensor, *args, **kwargs)
            is_ahead = kwargs.get("non_blocking") or any(value is True for value in args)
            if is_ahead and made is not tensor:
                self._note_sent(tensor, made)
            return made

        return untraced(to)

    def _patched_copy(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same for memory that a copy fills."""

        @functools.wraps(own)
        def copy_(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
            made = own(tensor, *args, **kwargs)
            if kwargs.get("non_blocking") or True in args[1:]:
                self._note_sent(args[0] if args else kwargs.get("other"), made)
            return made

        return untraced(copy_)

    def _note_sent(self, source: Any, made: Tensor) -> None:
        """Let torch read what is kept, if the script may count on it before it uses host memory of this copy."""
        if not isinstance(source, Tensor):
            return
        is_for_host = made.device.type == "cpu" and source.device == self._device
        if is_for_host or (made.device == self._device and self._is_sent_again(source)):
            self._forget_all()

    def _is_sent_again(self, source: Tensor) -> bool:
        """Whether it is pinned memory that was sent before: the script fills it anew for each step."""
        is_plain = type(source) is Tensor and source.layout is torch.strided
        if not is_plain or source.device.type != "cpu" or not source.is_pinned():
            return False
        whole = source if source._base is None else source._base
        is_known = whole.data_ptr() in self._sent
        self._sent[whole.data_ptr()] = whole
        return is_known

    def _patched_replay(self, own: Callable[[Any], None]) -> Callable[[Any], None]:
        """A graph of the script's may overwrite the losses that it made."""

        @functools.wraps(own)
        def replay(graph: torch.cuda.CUDAGraph) -> None:
            if self._kept and not is_own_recording(graph):
                self._forget_all()
            own(graph)

        return untraced(replay)


def _patched_elapsed_time(own: Callable[..., float]) -> Callable[..., float]:
    """The time between two events; waits for the second one, as `loss.item()` did before."""

    @functools.wraps(own)
    def elapsed_time(self: torch.cuda.Event, end_event: torch.cuda.Event) -> float:
        end_event.synchronize()
        return own(self, end_event)

    return elapsed_time


def _read_by_torch(own: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    """torch's own reading, whose warnings name the script's line and not the one here."""
    with recorded() as warned:
        number = own(tensor)
    for text in warned:
        warnings.warn(text, stacklevel=3)
    return number
