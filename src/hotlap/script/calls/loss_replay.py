"""The backward pass of a loss by one replay.

For a small model, autograd costs the host more than everything it launches: a node for the call, one for each
parameter, and those of the loss. Most scripts do `loss = criterion(model(x), y); loss.backward()`. Then torch
computes the loss, and a recording computes its gradients once more, down to those of the parameters.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotlap.core.torch_private import current_raw_stream
from hotlap.engine.assists import rewiring as losses
from hotlap.script.calls.early_loss import EarlyLoss
from hotlap.script.calls.graphs import CallGraph, LossCall, ReplayedCall
from hotlap.script.patches import Patches
from hotlap.tuner.agreement import gaps_between, whole

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

    def called(self) -> None:
        """The script calls a model."""
        if self._is_in and self._early_loss is not None:
            self._early_loss.called()

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
