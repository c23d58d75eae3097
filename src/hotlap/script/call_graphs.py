"""Forward and backward of one kind of call, recorded as two CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from hotlap.data.batches import map_tensors
from hotlap.data.columns import tensors_in
from hotlap.engine.layout import laid_out_as
from hotlap.engine.norms import NormCounts, counted_at_once
from hotlap.engine.precision import Switches
from hotlap.engine.recording import NotRecordedError
from hotlap.engine.scaling import LossScale
from hotlap.engine.watch import Watch, stranger_in, why_recording_failed
from hotlap.script.call_passage import Compute, StandIns, Turn, Work, autocast_of, true_gradients, wanting
from hotlap.script.call_traces import generator_of
from hotlap.script.call_trees import leaves, marks, stranger_to_trees, with_leaves
from hotlap.script.gradient_rooms import GradientRooms

_MULTIPLIED = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32))
"""What stays itself to the bit if it is multiplied by one."""


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
    ) -> None:
        """`used` are the outputs that get gradients; `kept` where they may get them twice. Raises NotRecordedError.

        In `rooms` gradients of parameters are left; without them they come in memory of their own each time.
        """
        self.work = Work(compute, module, device, switches, autocast_of(device), generator_of(device))
        """How such calls are made without it."""
        self._module, self._device, self._switches = module, device, switches
        self.used, self.kept, self._scale = tuple(used), kept, scale
        self._retains = kept or scale is not None
        self.given = map_tensors(given, _static)
        """The arguments, in memory that is read by every replay."""
        self.static = tensors_in(self.given)
        """The tensors in them."""
        self.wants = any(tensor.requires_grad for tensor in self.static)
        """Whether gradients go to one of these."""
        self.standing = StandIns(module)
        self._leaves = [*(t for t in self.static if t.requires_grad), *self.standing.stand_ins]
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
        # Without the graph of autograd, which holds memory that others may use from now on.
        bare = [output.detach() for output in self.outputs]
        self.tree, self.outputs = with_leaves(self.tree, self.outputs, bare), bare
        self.pattern = [number in self.used for number in range(len(self.outputs))]
        """Of each output, whether it gets a gradient."""

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs for these tensors in the arguments, in memory of their own."""
        _copy(tensors, self.static)
        self._forward.replay()
        return _copies(self.outputs)

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

    def _make_outputs(self) -> None:
        torch.clear_autocast_cache()  # what is in there was made elsewhere, and what is made here must not stay
        with self.standing, self._switches, torch.enable_grad(), counted_at_once(self._norms):
            self.tree = self.work.compute(*self.given)
        torch.clear_autocast_cache()
        self.outputs = leaves(self.tree)

    def _make_gradients(self) -> None:
        grads = self._incoming if self._scale is None else [self._scale.scaled(grad) for grad in self._incoming]
        with self._switches:
            found = torch.autograd.grad(
                [self.outputs[number] for number in self.used],
                self._leaves,
                grads,
                allow_unused=True,
                retain_graph=self._retains,
            )
        if self._scale is not None:
            self._scale.unscale_([grad for grad in found if grad is not None])
        pairs = zip(self._leaves, found, strict=True)
        self._grads = [None if grad is None else laid_out_as(leaf, grad) for leaf, grad in pairs]

    def _leave_gradients(self) -> None:
        """Make gradients, and leave those of parameters where they are lent from."""
        self._make_gradients()
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
        norms = NormCounts([self._module])
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
        return next(filter(None, (stranger_in(out, self._leaves, parameters_only=False) for out in used)), None)


class Replayed(Turn):
    """A call made by replaying."""

    def __init__(self, graph: CallGraph, tensors: list[Tensor], surprised: Callable[[], None]) -> None:
        """`surprised` is told where it had to be made again."""
        self._graph, self._tensors = graph, tensors
        parameters = graph.standing.parameters
        super().__init__(graph.work, [*wanting(tensors), *parameters] if graph.wants else parameters, surprised)

    def forward(self) -> list[Tensor]:
        graph = self._graph
        made = graph.forward(self._tensors)
        # Of the others a copy is in the graph's own memory.
        self._tensors = [t if t.requires_grad else s for t, s in self._pairs()] if graph.wants else graph.static
        self.tree, self.outputs, self.differentiable = graph.tree, graph.outputs, graph.differentiable
        return made

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        return self._graph.gradients(grads)

    def expects(self, grads: Sequence[Tensor | None], *, kept: bool) -> bool:
        pattern = [grad is not None for grad in grads]
        return pattern == self._graph.pattern and kept <= self._graph.kept and not torch.is_grad_enabled()

    def given(self) -> tuple[Any, Any]:
        tensors = iter([tensor if tensor.requires_grad else static.clone() for tensor, static in self._pairs()])
        arguments: tuple[Any, Any] = map_tensors(self._graph.given, lambda _: next(tensors))
        return arguments

    def let_go(self) -> None:
        super().let_go()
        del self._graph, self._tensors

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._tensors, self._graph.static, strict=True)


def _copy(tensors: list[Tensor], places: list[Tensor]) -> None:
    """Write tensors to their places, several of them at once."""
    if places:
        torch._foreach_copy_(places, tensors, non_blocking=True)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in memory of their own. By a kernel, which takes the host half as long to launch as a copy."""
    if not all(tensor.dtype in _MULTIPLIED for tensor in tensors):
        return [tensor.clone() for tensor in tensors]
    return list(torch._foreach_mul(tensors, 1)) if len(tensors) > 1 else [tensor.mul(1) for tensor in tensors]


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
