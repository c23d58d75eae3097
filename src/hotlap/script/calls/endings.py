"""Losses made of a captured call's output right away, and differentiated by one replay without torch's autograd.

For a small model autograd takes the host longer than all that it launches: a node for the call, one for each
parameter, and those of the loss. Where a script does what most do, `loss = criterion(model(x), y); loss.backward()`,
the loss is torch's own, and what is recorded makes its gradients once more, on to those of the parameters.
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

from hotlap.engine.assists import rewiring as losses
from hotlap.script.calls.graphs import CallGraph, Ending, Replayed
from hotlap.script.calls.readings import Readings
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
"""Functions of torch that layers of the same kind call, too."""
SEEN = 3
"""Backward passes in a row that begin at the same kind of loss, before that is recorded."""
LARGEST = 2**20
"""Bytes of an output up to which it is done: autograd lets go of what it has saved of the loss as it goes through it, a
replay leaves it until the script lets go of the loss itself."""
KEPT = 3
"""Passes in a row after which the graphs of the last ones are still there, since the script keeps its losses: from then
on autograd makes them, and lets go of what they hold."""
ALIKE = 1e-3
"""How far gradients may be from those of autograd when it is tried, as a fraction: kernels are the same."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class _Given:
    """The output of a replay that the script got."""

    output: weakref.ref[Tensor]
    version: int
    stream: int
    turn: weakref.ref[Replayed]


@dataclass(frozen=True)
class _Noted:
    """A loss that was made of it."""

    loss: weakref.ref[Tensor]
    given: _Given
    output: Tensor
    """Held, so that it can be seen whether somebody has written to it or looks on."""
    ending: Ending
    tensors: list[Tensor]
    """What it was made of beside."""
    versions: list[int]


class Endings:
    """Stands in for torch's losses and `Tensor.backward` while calls are captured: what is odd is torch's own."""

    def __init__(self, readings: Readings | None = None) -> None:
        """`readings` is told of each loss whose backward pass begins."""
        self._patches, self._readings = Patches(), readings
        self._given: _Given | None = None
        self._noted: _Noted | None = None
        self._is_in = self._replays = self._waits = False
        self._last: weakref.ref[Replayed] | None = None
        self._kept = 0
        self.made = 0
        """Backward passes that were made by a replay alone."""
        self.on_pass: Callable[[], None] | None = None
        """Told of each of these."""

    def put(self, *, replays: bool = True, waits: bool = False) -> None:
        """Stand in for them; without `replays`, only to tell of each loss whose backward pass begins.

        With `waits`, losses that wait for the device without need go on doing so.
        """
        if self._is_in and (self._replays, self._waits) == (replays, waits):
            return
        self.take_out()
        self._waits = waits
        self._is_in, self._replays = True, replays
        for name in LOSSES if replays else ():
            self._patches.put(F, name, functools.partial(self._loss, name))
        self._patches.put(Tensor, "backward", self._backward)

    def take_out(self) -> None:
        """Leave torch as it was."""
        if self._is_in:
            self._patches.take_out_all()
            self._is_in, self._given, self._noted = False, None, None

    def gave(self, output: Any, turn: Replayed) -> None:
        """Told of what a replay gave to the script."""
        if self._is_in:
            self._noted = None
            self._given = None
            if type(output) is Tensor:
                self._given = _Given(weakref.ref(output), output._version, _stream_of(output), weakref.ref(turn))

    def _loss(self, name: str, found: Callable[..., Any]) -> Callable[..., Any]:
        own = found if self._waits else losses.replacement_of(found)

        @functools.wraps(own)
        def loss(*args: Any, **kwargs: Any) -> Any:
            made = own(*args, **kwargs)
            given = self._given
            if given is not None and args and given.output() is args[0] and type(made) is Tensor:
                self._noted = _noted(name, own, made, given, args, kwargs) or self._noted
            return made

        return loss

    def _backward(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if self._readings is not None:
                self._readings.passing(tensor)
            noted, self._noted = self._noted, None
            if noted is not None and noted.loss() is tensor and not args and not kwargs:
                ended = self._ended(noted, tensor, functools.partial(own, tensor))
                if ended:
                    return
            own(tensor, *args, **kwargs)

        return backward

    def _ended(self, noted: _Noted, loss: Tensor, own: Callable[[], None]) -> bool:
        """Whether the backward pass of a loss is done."""
        turn = noted.given.turn()
        if turn is None or turn.done or not _is_plain(noted, loss, noted.output):
            return False
        graph = turn.graph
        if graph.ending is None or graph.ending.key != noted.ending.key:
            graph.saw(noted.ending)
            return False
        if self._are_kept() or not graph.can_end():
            return False
        is_trusted = graph.ending.is_trusted
        if not self._made(graph, noted.tensors):
            return False
        if is_trusted:
            turn.finish()
            self._last = weakref.ref(turn)
            self.made += 1
            if self.on_pass is not None:
                self.on_pass()
        else:
            self._compared(graph, graph.ending, own)
        return True

    def _are_kept(self) -> bool:
        """Whether the script holds on to its losses: each holds its graph, and that the call it was made of."""
        if self._kept < KEPT:
            self._kept = self._kept + 1 if self._last is not None and self._last() is not None else 0
        return self._kept >= KEPT

    def _made(self, graph: CallGraph, tensors: list[Tensor]) -> bool:
        """Whether a replay has made the gradients; nothing is left of one that failed, and there will be no other."""
        try:
            graph.end(tensors)
        except Exception:
            for parameter in graph.standing.parameters:
                parameter.grad = None
            graph.leave_ending()
            return False
        return True

    def _compared(self, graph: CallGraph, ending: Ending, own: Callable[[], None]) -> None:
        """Make the gradients by autograd after all; trust the replay from now on if it came to the same."""
        parameters = graph.standing.parameters
        mine = [None if parameter.grad is None else parameter.grad.clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        own()
        if _are_alike(mine, [parameter.grad for parameter in parameters]):
            ending.is_trusted = True
        else:
            graph.leave_ending()


def _noted(
    name: str, own: Callable[..., Any], loss: Tensor, given: _Given, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Noted | None:
    """What is known of a loss; None where it cannot be recorded."""
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
    ending = Ending(tuple(facts), own, args[1:], kwargs)
    return _Noted(weakref.ref(loss), given, output, ending, tensors, [tensor._version for tensor in tensors])


def _is_plain(noted: _Noted, loss: Tensor, output: Tensor) -> bool:
    """Whether nobody looks on, and nothing was written to since."""
    return (
        output._version == noted.given.version
        and _stream_of(output) == noted.given.stream
        and [tensor._version for tensor in noted.tensors] == noted.versions
        and not (loss._backward_hooks or output._backward_hooks or loss.retains_grad or output.retains_grad)
        and torch.is_grad_enabled()
        and not torch.is_anomaly_enabled()
    )


def _stream_of(tensor: Tensor) -> int:
    return int(torch._C._cuda_getCurrentRawStream(tensor.get_device())) if tensor.is_cuda else 0


def _are_alike(mine: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> bool:
    """Whether gradients are the same to rounding; what is next to nothing beside all of them may be noise."""
    if [one is None for one in mine] != [one is None for one in theirs]:
        return False
    pairs = [(one, other) for one, other in zip(mine, theirs, strict=True) if one is not None and other is not None]
    gaps = gaps_between(
        {str(n): other for n, (_, other) in enumerate(pairs)}, {str(n): one for n, (one, _) in enumerate(pairs)}
    )
    least = ALIKE * whole(gaps).size
    return all(gap.error <= ALIKE * (gap.size + least) for gap in gaps.values())
