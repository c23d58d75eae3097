"""Forward and backward of one kind of call, recorded as two CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.assists.norms import NormCounts, counted_at_once
from hotlap.engine.capture.recording import NotRecordedError, Watch, unknown_leaf, why_recording_failed
from hotlap.engine.differentiating import gradients
from hotlap.engine.layout import laid_out_as
from hotlap.engine.precision import Switches
from hotlap.engine.scaling import LossScale
from hotlap.script.calls.gradient_rooms import GradientRooms
from hotlap.script.calls.passage import Compute, StandIns, Turn, Work, autocast_of, true_gradients, wanting
from hotlap.script.calls.traces import generator_of
from hotlap.script.calls.trees import leaves, marks, stranger_to_trees, with_leaves

_grad_of, _hooks_of = attrgetter("grad"), attrgetter("_backward_hooks")
_later_hooks_of = attrgetter("_post_accumulate_grad_hooks")


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it, in the memory it was recorded in."""


class Recording(Protocol):
    """Whoever records: `engine.recording.Recorder`."""

    def aside(self) -> AbstractContextManager[None]:
        """Inside, work runs where recordings are made."""

    def record(self, work: Callable[[], None]) -> Graph:
        """The work as a graph; nothing of it is done yet. Raises NotRecordedError."""


@dataclass(eq=False)
class Ending:
    """A loss made of the only output that gets a gradient, by one function of torch's."""

    key: Hashable
    """What tells such losses apart."""
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    """What it is called with beside the output."""
    kwargs: dict[str, Any]
    is_trusted: bool = False
    """Whether a replay was seen to come to the gradients of autograd."""


class CallGraph:
    """Calls with arguments of one shape, whose outputs get gradients in one pattern.

    The memory in which it computes is that of its recorder, which others use too: between a forward pass and its
    backward pass no other graph of that recorder may be replayed. To be made inside `Untouched`.
    """

    def __init__(
        self,
        compute: Compute,
        module: nn.Module,
        device: torch.device,
        given: tuple[Any, Any],
        *,
        used: Sequence[int],
        kept: bool,
        switches: Switches,
        scale: LossScale | None,
        recorder: Recording,
        rooms: GradientRooms | None = None,
        ending: Ending | None = None,
        counts_norms: bool = True,
    ) -> None:
        """`used` are the outputs that get gradients; `kept` where they may get them twice. Raises NotRecordedError.

        In `rooms` gradients of parameters are left; without them they come in memory of their own each time. `ending`
        is recorded, too, where that can be.
        """
        self.work = Work(compute, module, device, switches, autocast_of(device), generator_of(device))
        """How such calls are made without it."""
        self._module, self._device, self._switches = module, device, switches
        self.used, self.kept, self._scale = tuple(used), kept, scale
        self.ending: Ending | None = None
        """What was recorded of the loss, with the backward pass that begins there."""
        self.wanted: Ending | None = None
        """The loss that the script was seen to differentiate, for whoever records it."""
        self._sightings = 0
        self._retains = kept or scale is not None or ending is not None
        self.given = map_tensors(given, _static)
        """The arguments, in memory that is read by every replay."""
        self.static = tensors_in(self.given)
        """The tensors in them."""
        self.wants = any(tensor.requires_grad for tensor in self.static)
        """Whether gradients go to one of these."""
        self.standing = StandIns(module)
        self._leaves = [*(t for t in self.static if t.requires_grad), *self.standing.stand_ins]
        self._counts_norms = counts_norms
        self._rooms, self._lent = rooms, list[Tensor]()
        self.tree: Any = None
        """The outputs in their containers, in memory that every replay overwrites."""
        self.outputs: list[Tensor] = []
        """The tensors in them."""
        self.differentiable: list[bool] = []
        """Which of these require gradients."""
        self._norms: list[tuple[_BatchNorm, int]] = []
        self._incoming: list[Tensor] = []
        self._grads: list[Tensor | None] = []
        self._found: list[Tensor] = []
        self.last_used = 0
        """The number of the call that it was used for; for whoever holds it."""
        try:
            self._rehearse(recorder)
        except NotRecordedError:
            raise
        except Exception as error:  # whatever the user's code may do
            raise NotRecordedError(why_recording_failed(error)) from error
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._forward = recorder.record(self._make_outputs)
        self._backward = recorder.record(self._leave_gradients)
        if ending is not None and self._ends_here:
            self._record_ending(ending, recorder)
        # Without the graph of autograd, which holds memory that others may use from now on.
        bare = [output.detach() for output in self.outputs]
        self.tree, self.outputs = with_leaves(self.tree, self.outputs, bare), bare
        self.pattern = [number in self.used for number in range(len(self.outputs))]
        """Of each output, whether it gets a gradient."""

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs for these tensors in the arguments, in memory of their own."""
        _copy(tensors, self.static)
        self._forward.replay()
        return [output.clone() for output in self.outputs]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the arguments that require them and of the parameters.

        Autograd makes them the parameters' own where these have none yet.
        """
        incoming = [grad for grad in grads if grad is not None]
        _copy(incoming, self._incoming)
        kept = self._rooms.take() if self._rooms is not None else None
        if self._scale is None:
            self._backward.replay()
        else:
            true_gradients(self._scale, self._backward.replay, incoming)
        made = [grad.data for grad in self._lent] if kept is None else _copies(self._lent)
        if kept is not None and self._rooms is not None:
            self._rooms.put_back(kept)
        if self._found:
            made = [*_copies(self._found), *made]
        if len(made) == len(self._grads):
            return made  # type: ignore[return-value]
        fresh = iter(made)
        return [None if grad is None else next(fresh) for grad in self._grads]

    # --- from the loss on ------------------------------------------------------------------------

    @property
    def _ends_here(self) -> bool:
        """Whether a backward pass may be recorded from the loss on."""
        return self._rooms is not None and self._scale is None and not self.wants and len(self.used) == 1

    def saw(self, ending: Ending) -> None:
        """Told of a loss whose backward pass began there; one that is seen time and again is `wanted`."""
        if self.ending is not None or not self._ends_here or self._sightings < 0:
            return
        is_same = self.wanted is not None and self.wanted.key == ending.key
        self._sightings = self._sightings + 1 if is_same else 1
        self.wanted = ending

    def wants_ending(self, times: int) -> bool:
        """Whether a loss was seen so many times in a row, and nobody has tried to record it yet."""
        return self._sightings >= times

    def leave_ending(self) -> None:
        """Let nobody try to record it any more."""
        self.ending = self.wanted = None
        self._sightings = -1

    def can_end(self) -> bool:
        """Whether gradients may be left for the script: none is there yet, and nobody is told of them."""
        parameters = self.standing.parameters
        return (
            self._rooms is not None
            and self._rooms.are_free
            and all(map(is_, map(_grad_of, parameters), repeat(None)))
            and not any(map(_hooks_of, parameters))
            and not any(map(_later_hooks_of, parameters))
        )

    def end(self, tensors: list[Tensor]) -> None:
        """Make the backward pass of a loss that was made of these tensors beside; gradients become the parameters'."""
        _copy(tensors, self._beside)
        self._from_loss.replay()
        for parameter, room in self._own:
            parameter.grad = room.data

    def _record_ending(self, ending: Ending, recorder: Recording) -> None:
        rooms, before = self._rooms, [grad is None for grad in self._grads]
        assert rooms is not None
        given = (ending.args, ending.kwargs)
        self._beside = [tensor.detach().clone() for tensor in tensors_in(given)]
        statics = iter(self._beside)
        args, kwargs = map_tensors(given, lambda _: next(statics))
        self._loss_of = functools.partial(_called_with, ending.function, args, kwargs)
        try:
            self._from_loss = recorder.record(self._leave_from_loss)
        except NotRecordedError:
            return
        pairs = zip(self.standing.parameters, rooms.rooms, self._grads, strict=True)
        self._own = [(parameter, room) for parameter, room, grad in pairs if grad is not None]
        if before == [grad is None for grad in self._grads]:
            self.ending = Ending(ending.key, ending.function, (), {})

    def _leave_from_loss(self) -> None:
        with torch.enable_grad():
            loss = self._loss_of(self.outputs[self.used[0]])
        self._leave_gradients(loss)

    # --- what is recorded ------------------------------------------------------------------------

    def _make_outputs(self) -> None:
        torch.clear_autocast_cache()  # what is in there was made elsewhere, and what is made here must not stay
        with self.standing, self._switches, torch.enable_grad(), counted_at_once(self._norms):
            self.tree = self.work.compute(*self.given)
        torch.clear_autocast_cache()
        self.outputs = leaves(self.tree)

    def _make_gradients(self, loss: Tensor | None = None) -> None:
        """Of the leaves, from what comes in at the outputs or from a loss on."""
        grads: list[Tensor] | None = self._incoming
        if self._scale is not None:
            grads = [self._scale.scaled(grad) for grad in self._incoming]
        with self._switches:
            found = gradients(
                [self.outputs[number] for number in self.used] if loss is None else [loss],
                self._leaves,
                grads if loss is None else None,
                retain_graph=self._retains,
            )
        if self._scale is not None:
            self._scale.unscale_([grad for grad in found if grad is not None])
        pairs = zip(self._leaves, found, strict=True)
        self._grads = [None if grad is None else laid_out_as(leaf, grad) for leaf, grad in pairs]

    def _leave_gradients(self, loss: Tensor | None = None) -> None:
        """Make gradients, and leave those of parameters where they are lent from."""
        self._make_gradients(loss)
        if self._rooms is None:
            self._found = [grad for grad in self._grads if grad is not None]
            return
        arguments = len(self._grads) - len(self._rooms.rooms)
        self._found = [grad for grad in self._grads[:arguments] if grad is not None]
        pairs = zip(self._rooms.rooms, self._grads[arguments:], strict=True)
        left = [(room, grad) for room, grad in pairs if grad is not None]
        self._lent = [room for room, _ in left]
        if left:
            torch._foreach_copy_(self._lent, [grad for _, grad in left])

    def _rehearse(self, recorder: Recording) -> None:
        """Do it once to have libraries set themselves up, and once more looking on."""
        with recorder.aside():
            self._make_outputs()
            self.differentiable = [output.requires_grad for output in self.outputs]
            self._incoming = [torch.ones_like(self.outputs[number]) for number in self.used]
            self._make_gradients()
        norms = NormCounts([self._module] if self._counts_norms else ())
        before = marks(self.static)
        with recorder.aside(), Watch([self._module], self._device) as watch, _sees_set_randomness() as was_set:
            with norms.watched(None):
                self._make_outputs()
            reason = self._why_unfit(before)
            self._make_gradients()
        reason = reason or watch.reason or ("it sets the device's randomness itself" if was_set else None)
        if all(grad is None for grad in self._grads):
            reason = reason or "nothing of it gets a gradient"
        if any(grad is not None and grad.layout is not torch.strided for grad in self._grads):
            reason = reason or "it has sparse gradients"
        if self.standing.are_apart:
            reason = reason or "it moves its weights to other memory"
        if reason is not None:
            raise NotRecordedError(reason)
        self._norms = norms.settled(None)

    def _why_unfit(self, before: list[tuple[int, int]]) -> str | None:
        if before != marks(self.static):
            return "it changes its arguments in place"
        kind = stranger_to_trees(self.tree)
        if kind is not None:
            return f"its outputs hold a {kind}"
        if self.differentiable != [output.requires_grad for output in self.outputs]:
            return "its outputs differ from call to call"
        used = (self.outputs[number] for number in self.used)
        return next(filter(None, (unknown_leaf(out, self._leaves, parameters_only=False) for out in used)), None)


class Replayed(Turn):
    """A call made by replaying."""

    def __init__(self, graph: CallGraph, tensors: list[Tensor], surprised: Callable[[], None]) -> None:
        """`surprised` is told where it had to be made again."""
        self.graph, self._tensors = graph, tensors
        parameters = graph.standing.parameters
        super().__init__(graph.work, [*wanting(tensors), *parameters] if graph.wants else parameters, surprised)

    def forward(self) -> list[Tensor]:
        graph = self.graph
        made = graph.forward(self._tensors)
        # Of the others a copy is in the graph's own memory.
        self._tensors = [t if t.requires_grad else s for t, s in self._pairs()] if graph.wants else graph.static
        self.tree, self.outputs, self.differentiable = graph.tree, graph.outputs, graph.differentiable
        return made

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        return self.graph.gradients(grads)

    def expects(self, grads: Sequence[Tensor | None], *, kept: bool) -> bool:
        pattern = [grad is not None for grad in grads]
        return pattern == self.graph.pattern and kept <= self.graph.kept and not torch.is_grad_enabled()

    def given(self) -> tuple[Any, Any]:
        tensors = iter([tensor if tensor.requires_grad else static.clone() for tensor, static in self._pairs()])
        arguments: tuple[Any, Any] = map_tensors(self.graph.given, lambda _: next(tensors))
        return arguments

    def finish(self) -> None:
        """Told that its gradients were made, and by whom they were wanted."""
        self.done = True
        self.let_go()

    def let_go(self) -> None:
        super().let_go()
        del self.graph, self._tensors

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._tensors, self.graph.static, strict=True)


def _called_with(function: Callable[..., Tensor], args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return function(output, *args, **kwargs)


def _copy(tensors: list[Tensor], places: list[Tensor]) -> None:
    """Write tensors to their places, several of them at once."""
    if len(places) == 1:
        places[0].copy_(tensors[0], non_blocking=True)
    elif places:
        torch._foreach_copy_(places, tensors, non_blocking=True)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in memory of their own, by one kernel."""
    return list(torch._foreach_mul(tensors, 1))


def _static(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


@contextmanager
def _sees_set_randomness() -> Iterator[list[bool]]:
    """Gives a list that is not empty once the device's generator was set, as checkpointing does it.

    That is Python, which a replay leaves out: masks that are to be drawn a second time would be others.
    """
    seen: list[bool] = []
    original = torch.cuda.set_rng_state

    def noted(*args: Any, **kwargs: Any) -> None:
        seen.append(True)
        original(*args, **kwargs)

    torch.cuda.set_rng_state = noted
    try:
        yield seen
    finally:
        torch.cuda.set_rng_state = original
