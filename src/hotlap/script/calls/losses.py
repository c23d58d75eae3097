"""Losses of captured calls: copied to the host early for `loss.item()`, and differentiated by one replay.

`loss.item()` after `loss.backward()` and `optimizer.step()` waits for both, although the loss was ready before. hotlap
copies the loss before the backward pass, so that the host reads it as soon as the forward pass is done. It then
prepares the next batch while the GPU still works. The number is the same.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.amp import GradScaler
from torch.overrides import handle_torch_function, has_torch_function_unary

from hotlap.core.torch_private import current_raw_stream, is_stream_capturing
from hotlap.engine.assists import rewiring as losses
from hotlap.engine.capture.recording import current_stream
from hotlap.script.calls.graphs import CallGraph, LossCall, ReplayedCall
from hotlap.script.patches import Patches, scripted_as, untraced
from hotlap.tuner.agreement import gaps_between, whole

MOST_KEPT_COPIES = 4
"""Most losses of a kind kept at a time: a GAN reads two of them at the end of a step."""
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


class HostNumber(Protocol):
    """Host memory for one number."""

    def take(self, number: Tensor) -> None:
        """Copy a number here, behind all work launched so far."""

    def value(self) -> Any:
        """The number; waits until it is here."""


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


class _PendingLoss:
    """A loss whose backward pass has begun, and the memory it is copied to."""

    __slots__ = ("_same", "_stream", "_version", "place", "was_read")

    def __init__(self, loss: Tensor, place: HostNumber | None, stream: object) -> None:
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
    loss: _PendingLoss
    test: Callable[[float], bool]


class EarlyLoss:
    """Answers `.item()` and the like of such losses, and of tests of them, from the copy; torch answers all else.

    Scripts that scale their loss read it as it was before. hotlap does not see writes through `.data`, since torch does
    not count them.
    """

    def __init__(self, device: torch.device, make_place: Callable[[], HostNumber] = PinnedNumber) -> None:
        self._device, self._make_place = device, make_place
        self._stream: object = None
        """The stream of all copies: two streams could overtake each other on the way to the same memory."""
        self._places = list[HostNumber]()
        self._habit = self._copied = 0
        self._kept: dict[int, _PendingLoss] = {}
        """By address, the oldest first."""
        self._scaled: tuple[weakref.ref[Tensor], Tensor] | None = None
        """A scaled loss, and the loss."""
        self._tested: dict[int, _Tested] = {}
        """By the id of the result."""
        self._patches = Patches()
        self._is_on = False
        self.answered = 0
        """Reads that did not wait for the backward pass."""

    def use(self, *, early: bool) -> None:
        """Begin to answer, or leave reads to torch."""
        self._kept.clear()
        self._tested.clear()
        self._scaled = None
        self._is_on = early
        if early and not self._patches.has("Tensor.item"):
            for name, as_read in READS.items():
                self._patches.put(Tensor, name, functools.partial(self._patched_read, as_read))
            for name, test in TESTS.items():
                for owner in (torch, Tensor):
                    self._patches.put(owner, name, functools.partial(self._patched_test, test))
            self._patches.put(GradScaler, "scale", self._patched_scale)
            self._patches.put(Tensor, "to", self._patched_to)
            self._patches.put(Tensor, "copy_", self._patched_copy)
            self._patches.put(torch.cuda.Event, "elapsed_time", _patched_elapsed_time)

    def close(self) -> None:
        """Restore torch. If other code has patched on top, ours only passes on from here."""
        self.use(early=False)
        self._patches.take_out_all()

    def backward_begins(self, loss: Tensor) -> None:
        """A backward pass begins at a loss."""
        scaled, self._scaled = self._scaled, None
        if scaled is not None and scaled[0]() is loss:
            loss = scaled[1]  # what the script reads
        if not self._is_on or type(loss) is not Tensor or loss.dim() or loss.device != self._device:
            return
        if not loss.is_floating_point() or loss.untyped_storage().nbytes() > LARGEST_KEPT:
            return
        address = loss.data_ptr()
        oldest = list(self._kept)[: max(0, len(self._kept) - MOST_KEPT_COPIES + 1)]  # their memory is needed
        self._forget({*oldest, address})
        place = self._copy_of(loss) if self._habit >= SEEN_READS else None
        self._kept[address] = _PendingLoss(loss, place, self._stream_now())

    def _forget(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            kept = self._kept.pop(address, None)  # another thread of the script may have removed it
            if kept is not None:
                kept.place = None
                if not kept.was_read:
                    self._habit = max(0, self._habit - 1)

    def _stream_now(self) -> object:
        return current_stream(self._device) if self._device.type == "cuda" else None

    def _copy_of(self, loss: Tensor) -> HostNumber | None:
        stream = self._stream_now()
        self._stream = self._stream or stream
        if stream != self._stream or (stream is not None and is_stream_capturing()):
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

    def _kept_of(self, tensor: Any) -> _PendingLoss | None:
        """The loss whose value this tensor holds."""
        if type(tensor) is not Tensor or tensor.device != self._device or tensor.layout is not torch.strided:
            return None
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # inside a transform of torch it has none
            return None
        kept = self._kept.get(address)
        return kept if kept is not None and kept.is_of(tensor, self._stream_now()) else None

    def _answer(self, tensor: Tensor) -> Any:
        """The number that this tensor holds, if it was copied; else None."""
        tested = self._tested.get(id(tensor))
        if tested is not None and (tested.result() is not tensor or tensor._version != tested.version):
            tested = None
        kept = tested.loss if tested is not None else self._kept_of(tensor)
        if kept is None:
            return None
        if not kept.was_read:
            kept.was_read = True
            self._habit = min(MOST, self._habit + 1)
        if kept.place is None:
            return None
        self.answered += 1
        number = kept.place.value()
        return number if tested is None else tested.test(number)

    def _patched_read(self, as_read: Callable[[Any], Any], own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        @functools.wraps(own)
        def read(tensor: Tensor) -> Any:
            if has_torch_function_unary(tensor):
                # Subclasses and modes recognise a call by its function, which must be torch's own.
                return handle_torch_function(own, (tensor,), tensor)
            number = self._answer(tensor) if self._is_on and not tensor.dim() else None
            return own(tensor) if number is None else as_read(number)

        return untraced(read)

    def _patched_test(self, test: Callable[[float], bool], own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The result is torch's own; if it is read, the copy of the loss answers."""

        @functools.wraps(own)
        def tested(*args: Any, **kwargs: Any) -> Tensor:
            made = own(*args, **kwargs)
            kept = self._kept_of(args[0]) if self._is_on and args else None
            if kept is not None and not made.is_inference():  # of those, torch counts no writes
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
            self._scaled = (weakref.ref(made), outputs) if is_loss and self._is_on else None
            return made

        return untraced(scale)

    def _patched_to(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Non-blocking copies to the host are done once torch has read a loss, but not with an early read."""

        @functools.wraps(own)
        def to(tensor: Tensor, /, *args: Any, **kwargs: Any) -> Tensor:
            made = own(tensor, *args, **kwargs)
            is_ahead = kwargs.get("non_blocking") or any(value is True for value in args)
            if is_ahead and made is not tensor:
                self._note_sent(tensor, made)
            return made

        return untraced(to)

    def _patched_copy(self, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same for host memory that a copy fills."""

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


def _patched_elapsed_time(own: Callable[..., float]) -> Callable[..., float]:
    """The time between two events; waits for the second one, as `loss.item()` did before."""

    @functools.wraps(own)
    def elapsed_time(self: torch.cuda.Event, end_event: torch.cuda.Event) -> float:
        end_event.synchronize()
        return own(self, end_event)

    return elapsed_time


# --- loss replay -------------------------------------------------------------------------
#
# For a small model, autograd costs the host more than everything it launches: a node for the call, one for each
# parameter, and those of the loss. Most scripts do `loss = criterion(model(x), y); loss.backward()`. Then torch
# computes the loss, and a recording computes its gradients once more, down to those of the parameters.


LOSSES = (
    "cross_entropy",
    "nll_loss",
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)
"""Functions of torch, which the layers of the same kind also call."""
SEEN_LOSSES = 3
"""Consecutive backward passes that begin at the same kind of loss, before it is recorded."""
LARGEST = 2**20
"""Most bytes of an output: autograd releases what it saved of the loss as it goes through it; a replay keeps it until
the script releases the loss."""
MOST_KEPT_LOSSES = 3
"""Consecutive passes after which the last graphs still exist because the script keeps its losses; from then on autograd
makes the gradients, and releases what those graphs hold."""
ALIKE = 1e-3
"""Greatest relative gap between replayed gradients and those of autograd; the kernels are the same."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _ReplayOutput:
    """The output of a replay, as the script got it."""

    output: weakref.ref[Tensor]
    version: int
    stream: int
    replayed: weakref.ref[ReplayedCall]


@dataclass(frozen=True)
class _ObservedLoss:
    """A loss computed from that output."""

    loss: weakref.ref[Tensor]
    given: _ReplayOutput
    output: Tensor
    """Held to see whether it is written to or has hooks."""
    loss_call: LossCall
    tensors: list[Tensor]
    """The other tensors that the loss was computed from."""
    versions: list[int]


class LossReplay:
    """Replaces torch's losses and `Tensor.backward` while calls are captured; unusual cases are torch's own."""

    def __init__(self, early_loss: EarlyLoss | None = None) -> None:
        """`early_loss` receives each loss whose backward pass begins."""
        self._patches, self._early_loss = Patches(), early_loss
        self._last_output: _ReplayOutput | None = None
        self._observed: _ObservedLoss | None = None
        self._is_in = self._replays = self._waits = False
        self._last: weakref.ref[ReplayedCall] | None = None
        self._kept = 0
        self.made = 0
        """Backward passes made by a replay alone."""
        self.on_pass: Callable[[], None] | None = None
        """Called after each of these."""

    def put(self, *, replays: bool = True, waits: bool = False) -> None:
        """Install the patches; without `replays`, they only report losses whose backward pass begins.

        With `waits`, losses that wait for the GPU without need continue to do so.
        """
        if self._is_in and (self._replays, self._waits) == (replays, waits):
            return
        self.take_out()
        self._is_in, self._replays = True, replays
        self._waits = waits
        for name in LOSSES if replays else ():
            self._patches.put(F, name, functools.partial(self._patched_loss, name))
        self._patches.put(Tensor, "backward", self._patched_backward)

    def take_out(self) -> None:
        """Restore torch."""
        if self._is_in:
            self._patches.take_out_all()
            self._is_in, self._last_output, self._observed = False, None, None

    def replay_returned(self, output: Any, replayed: ReplayedCall) -> None:
        """A replay returned this output to the script."""
        if self._is_in:
            self._observed = None
            self._last_output = None
            if type(output) is Tensor:
                self._last_output = _ReplayOutput(
                    weakref.ref(output), output._version, _stream_of(output), weakref.ref(replayed)
                )

    def _patched_loss(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        own = found if self._waits else losses.replacement_of(found)

        @functools.wraps(own)
        def loss(*args: Any, **kwargs: Any) -> Any:
            made = own(*args, **kwargs)
            given = self._last_output
            if given is not None and args and given.output() is args[0] and type(made) is Tensor:
                self._observed = _observed(name, own, made, given, args, kwargs) or self._observed
            return made

        return loss

    def _patched_backward(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if self._early_loss is not None:
                self._early_loss.backward_begins(tensor)
            observed, self._observed = self._observed, None
            if observed is not None and observed.loss() is tensor and not args and not kwargs:
                ended = self._replayed_backward(observed, tensor, functools.partial(own, tensor))
                if ended:
                    return
            own(tensor, *args, **kwargs)

        return backward

    def _replayed_backward(self, observed: _ObservedLoss, loss: Tensor, own: Callable[[], None]) -> bool:
        """Replay the backward pass of a loss if possible; returns whether it is done."""
        replayed = observed.given.replayed()
        if replayed is None or replayed.done or not _is_plain(observed, loss, observed.output):
            return False
        graph = replayed.graph
        if graph.loss_call is None or graph.loss_call.key != observed.loss_call.key:
            graph.loss_seen(observed.loss_call)
            return False
        if self._script_keeps_losses() or not graph.can_replay_loss():
            return False
        is_trusted = graph.loss_call.is_trusted
        if not self._replayed_gradients(graph, observed.tensors):
            return False
        if is_trusted:
            replayed.finish()
            self._last = weakref.ref(replayed)
            self.made += 1
            if self.on_pass is not None:
                self.on_pass()
        else:
            self._check_against_autograd(graph, graph.loss_call, own)
        return True

    def _script_keeps_losses(self) -> bool:
        """Whether the script keeps its losses: each holds its graph, and that of the call it comes from."""
        if self._kept < MOST_KEPT_LOSSES:
            self._kept = self._kept + 1 if self._last is not None and self._last() is not None else 0
        return self._kept >= MOST_KEPT_LOSSES

    def _replayed_gradients(self, graph: CallGraph, tensors: list[Tensor]) -> bool:
        """Make the gradients by a replay; after a failure, removes them, and no other replay follows."""
        try:
            graph.replay_loss(tensors)
        except Exception:
            for parameter in graph.aliases.parameters:
                parameter.grad = None
            graph.leave_loss()
            return False
        return True

    def _check_against_autograd(self, graph: CallGraph, loss_call: LossCall, own: Callable[[], None]) -> None:
        """Make the gradients by autograd after all; trust the replay from now on if they agree."""
        parameters = graph.aliases.parameters
        mine = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        own()
        if _are_alike(mine, [parameter.grad for parameter in parameters]):
            loss_call.is_trusted = True
        else:
            graph.leave_loss()


def _observed(
    name: str,
    own: Callable[..., Any],
    loss: Tensor,
    given: _ReplayOutput,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _ObservedLoss | None:
    """The facts of a loss; None if it cannot be recorded."""
    output = args[0]
    if not loss.requires_grad or loss.dim() or torch.is_autocast_enabled(output.device.type):
        return None
    if output._version != given.version or output.nbytes > LARGEST:
        return None
    tensors: list[Tensor] = []
    facts: list[Hashable] = [name]
    for key, value in (*enumerate(args[1:]), *kwargs.items()):
        if isinstance(value, Tensor):
            if type(value) is not Tensor or value.requires_grad or value.device != output.device:
                return None
            tensors.append(value)
            facts.append((key, value.shape, value.dtype, value.stride()))
        elif isinstance(value, _PLAIN):
            facts.append((key, value))
        else:
            return None
    loss_call = LossCall(tuple(facts), own, args[1:], kwargs)
    return _ObservedLoss(weakref.ref(loss), given, output, loss_call, tensors, [tensor._version for tensor in tensors])


def _is_plain(observed: _ObservedLoss, loss: Tensor, output: Tensor) -> bool:
    """Whether no hooks exist, and nothing was written to since."""
    return (
        output._version == observed.given.version
        and _stream_of(output) == observed.given.stream
        and [tensor._version for tensor in observed.tensors] == observed.versions
        and not (loss._backward_hooks or output._backward_hooks or loss.retains_grad or output.retains_grad)
        and torch.is_grad_enabled()
        and not torch.is_anomaly_enabled()
    )


def _stream_of(tensor: Tensor) -> int:
    return int(current_raw_stream(tensor.get_device())) if tensor.is_cuda else 0


def _are_alike(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether gradients agree except for rounding; a gradient that is tiny beside all of them may be noise."""
    if [one is None for one in mine] != [one is None for one in theirs]:
        return False
    pairs = [(one, other) for one, other in zip(mine, theirs, strict=True) if one is not None and other is not None]
    gaps = gaps_between(
        {str(n): other for n, (_, other) in enumerate(pairs)}, {str(n): one for n, (one, _) in enumerate(pairs)}
    )
    least = ALIKE * whole(gaps).size
    return all(gap.error <= ALIKE * (gap.size + least) for gap in gaps.values())
