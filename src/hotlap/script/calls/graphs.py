"""The forward and backward pass of one kind of call, recorded as two CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.torch_private import BatchNormBase, foreach_copy_, foreach_mul
from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.engine.assists.norms import NormCounts, counted_at_once
from hotlap.engine.capture.host_constants import HostConstants
from hotlap.engine.capture.recording import (
    NotRecordedError,
    Recorder,
    Watch,
    dropout_state_to_hold,
    unknown_leaf,
    why_recording_failed,
)
from hotlap.engine.differentiating import gradients
from hotlap.engine.layout import laid_out_as
from hotlap.engine.precision import Switches
from hotlap.engine.scaling import LossScale
from hotlap.engine.snapshot import generator_of
from hotlap.script.calls.autograd_bridge import (
    BridgedCall,
    Compute,
    EagerForward,
    ParameterAliases,
    autocast_of,
    needing_grad,
    true_gradients,
)
from hotlap.script.calls.gradient_buffers import GradientBuffers
from hotlap.script.calls.trees import copied, leaves, unknown_type_in, with_leaves, write_marks
from hotlap.script.patches import calls_noted

_grad_of, _hooks_of = attrgetter("grad"), attrgetter("_backward_hooks")
_later_hooks_of = attrgetter("_post_accumulate_grad_hooks")


@dataclass(eq=False)
class LossCall:
    """A loss of the only output that gets a gradient, computed by one function of torch."""

    key: Hashable
    """Identifies such losses."""
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    """The arguments besides the output."""
    kwargs: dict[str, Any]
    is_trusted: bool = False
    """Whether a replay has produced the gradients of autograd."""


class CallGraph:
    """Calls with arguments of one shape, whose outputs get gradients in one pattern.

    It computes in the memory of its recorder, which other graphs share: between its forward and backward pass, no other
    graph of that recorder may be replayed. Create it inside `ModuleState`.
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
        recorder: Recorder,
        buffers: GradientBuffers | None = None,
        loss_call: LossCall | None = None,
        counts_norms: bool = True,
    ) -> None:
        """`used` are the outputs that get gradients; `kept`: possibly twice. Raises NotRecordedError.

        The replay leaves parameter gradients in `buffers`; without buffers it allocates new memory each time. It also
        records `loss_call` where possible.
        """
        self.work = EagerForward(compute, module, device, switches, autocast_of(device), generator_of(device))
        """How such calls run without the graph."""
        self._module, self._device, self._switches = module, device, switches
        self.used, self.kept, self._scale = tuple(used), kept, scale
        self.loss_call: LossCall | None = None
        """The loss that is recorded, with the backward pass that begins there."""
        self.wanted_loss: LossCall | None = None
        """The loss that the script was seen to differentiate, to be recorded next."""
        self._sightings = 0
        self._retains = kept or scale is not None or loss_call is not None
        self._counts = NormCounts([module] if counts_norms else ())
        self._constants: AbstractContextManager[object] = nullcontext()
        self.given = map_tensors(given, copied)
        """The arguments, in memory that every replay reads."""
        self.static = tensors_in(self.given)
        """The tensors in them."""
        self.wants = any(tensor.requires_grad for tensor in self.static)
        """Whether one of them gets a gradient."""
        self.aliases = ParameterAliases(module)
        self._leaves = [*(t for t in self.static if t.requires_grad), *self.aliases.alias_tensors]
        self._buffers, self._lent = buffers, list[Tensor]()
        self.tree: Any = None
        """The outputs in their containers, in memory that every replay overwrites."""
        self.outputs: list[Tensor] = []
        """The tensors in them."""
        self.differentiable: list[bool] = []
        """Which of these require gradients."""
        self._norms: list[tuple[BatchNormBase, int]] = []
        self._incoming: list[Tensor] = []
        self._grads: list[Tensor | None] = []
        self._found: list[Tensor] = []
        self.last_used = 0
        """The number of the call that used it last, set by the owner."""
        self._record(recorder, loss_call)
        self.pattern = [number in self.used for number in range(len(self.outputs))]
        """For each output, whether it gets a gradient."""

    def _record(self, recorder: Recorder, loss_call: LossCall | None) -> None:
        try:
            self._rehearse(recorder)
            # After the last call that may make this memory elsewhere, such as one that compiles.
            self._dropout_state = dropout_state_to_hold([self._module], self._device)
        except NotRecordedError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise NotRecordedError(why_recording_failed(error)) from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._forward = recorder.record(self._make_outputs)
        self._backward = recorder.record(self._store_gradients)
        if loss_call is not None and self._may_start_at_loss:
            self._record_loss(loss_call, recorder)
        # Without the autograd graph, which holds memory that others may use from now on.
        bare = [output.detach() for output in self.outputs]
        self.tree, self.outputs = with_leaves(self.tree, self.outputs, bare), bare

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """The outputs for these tensors in the arguments, in new memory."""
        _copy(tensors, self.static)
        self._forward.replay()
        return [output.clone() for output in self.outputs]

    def gradients(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of the parameters, and of the arguments that require them.

        Autograd sets them as the parameters' gradients where these have none yet.
        """
        incoming = [grad for grad in grads if grad is not None]
        _copy(incoming, self._incoming)
        kept = self._buffers.take() if self._buffers is not None else None
        if self._scale is None:
            self._backward.replay()
        else:
            true_gradients(self._scale, self._backward.replay, incoming)
        made = [grad.data for grad in self._lent] if kept is None else _copies(self._lent)
        if kept is not None and self._buffers is not None:
            self._buffers.put_back(kept)
        if self._found:
            made = [*_copies(self._found), *made]
        if len(made) == len(self._grads):
            return made  # type: ignore[return-value]
        fresh = iter(made)
        return [None if grad is None else next(fresh) for grad in self._grads]

    # --- from the loss on --------------------------------------------------------------------

    @property
    def _may_start_at_loss(self) -> bool:
        """Whether a backward pass may be recorded from the loss on."""
        return self._buffers is not None and self._scale is None and not self.wants and len(self.used) == 1

    def loss_seen(self, loss_call: LossCall) -> None:
        """A backward pass began at this loss; if that repeats, the loss becomes `wanted_loss`."""
        if self.loss_call is not None or not self._may_start_at_loss or self._sightings < 0:
            return
        is_same = self.wanted_loss is not None and self.wanted_loss.key == loss_call.key
        self._sightings = self._sightings + 1 if is_same else 1
        self.wanted_loss = loss_call

    def wants_loss(self, times: int) -> bool:
        """Whether the same loss was seen so many times in a row, and no attempt to record it has failed."""
        return self._sightings >= times

    def leave_loss(self) -> None:
        """Stop trying to record a loss."""
        self.loss_call = self.wanted_loss = None
        self._sightings = -1

    def can_replay_loss(self) -> bool:
        """Whether a replay may set gradients for the script: none exists yet, and no hook waits for them."""
        parameters = self.aliases.parameters
        return (
            self._buffers is not None
            and self._buffers.are_free
            and all(map(is_, map(_grad_of, parameters), repeat(None)))
            and not any(map(_hooks_of, parameters))
            and not any(map(_later_hooks_of, parameters))
        )

    def replay_loss(self, tensors: list[Tensor]) -> None:
        """Replay the backward pass of a loss computed with these other tensors; sets the parameters' gradients."""
        _copy(tensors, self._loss_inputs)
        self._loss_graph.replay()
        for parameter, buffer in self._owned:
            parameter.grad = buffer.data

    def _record_loss(self, loss_call: LossCall, recorder: Recorder) -> None:
        buffers, before = self._buffers, [grad is None for grad in self._grads]
        assert buffers is not None
        given = (loss_call.args, loss_call.kwargs)
        self._loss_inputs = [tensor.detach().clone() for tensor in tensors_in(given)]
        statics = iter(self._loss_inputs)
        args, kwargs = map_tensors(given, lambda _: next(statics))
        self._loss_of = functools.partial(_called_with, loss_call.function, args, kwargs)
        try:
            self._loss_graph = recorder.record(self._store_gradients_from_loss)
        except NotRecordedError:
            return
        pairs = zip(self.aliases.parameters, buffers.buffers, self._grads, strict=True)
        self._owned = [(parameter, buffer) for parameter, buffer, grad in pairs if grad is not None]
        if before == [grad is None for grad in self._grads]:
            self.loss_call = LossCall(loss_call.key, loss_call.function, (), {})

    def _store_gradients_from_loss(self) -> None:
        with torch.enable_grad():
            loss = self._loss_of(self.outputs[self.used[0]])
        self._store_gradients(loss)

    # --- recorded work -----------------------------------------------------------------------

    def _make_outputs(self) -> None:
        torch.clear_autocast_cache()  # its entries come from elsewhere, and those made here must not stay
        with self.aliases, self._switches, torch.enable_grad(), counted_at_once(self._norms), self._constants:
            self.tree = self.work.compute(*self.given)
        torch.clear_autocast_cache()
        self.outputs = leaves(self.tree)

    def _make_gradients(self, loss: Tensor | None = None) -> None:
        """Compute the gradients of the leaves, from those of the outputs or from a loss."""
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

    def _store_gradients(self, loss: Tensor | None = None) -> None:
        """Compute gradients, and put those of parameters into the buffers."""
        self._make_gradients(loss)
        if self._buffers is None:
            self._found = [grad for grad in self._grads if grad is not None]
            return
        arguments = len(self._grads) - len(self._buffers.buffers)
        self._found = [grad for grad in self._grads[:arguments] if grad is not None]
        pairs = zip(self._buffers.buffers, self._grads[arguments:], strict=True)
        left = [(buffer, grad) for buffer, grad in pairs if grad is not None]
        self._lent = [buffer for buffer, _ in left]
        if left:
            foreach_copy_(self._lent, [grad for _, grad in left])

    def _rehearse(self, recorder: Recorder) -> None:
        """Run once to let libraries initialise, and once more while watching; and again where constants are copied."""
        with recorder.aside():
            self._make_outputs()
            self.differentiable = [output.requires_grad for output in self.outputs]
            self._incoming = [torch.ones_like(self.outputs[number]) for number in self.used]
            self._make_gradients()
        reason, waits = self._watched(recorder)
        if waits:
            self._constants = HostConstants(self._device)
            reason, _ = self._watched(recorder)
        if all(grad is None for grad in self._grads):
            reason = reason or "nothing in it gets a gradient"
        if any(grad is not None and grad.layout is not torch.strided for grad in self._grads):
            reason = reason or "it has sparse gradients"
        if self.aliases.have_moved:
            reason = reason or "it moves its weights to other memory"
        if reason is not None:
            raise NotRecordedError(reason)
        self._norms = self._counts.settled(None)

    def _watched(self, recorder: Recorder) -> tuple[str | None, bool]:
        """Why this pass cannot be recorded, and whether it waits for the device."""
        before = write_marks(self.static)
        # Checkpointing does so in Python, which a replay leaves out: masks that must be drawn twice would differ.
        sets_state = calls_noted((torch.cuda, "set_rng_state"))
        with recorder.aside(), Watch([self._module], self._device) as watch, sets_state as was_set:
            with self._counts.watched(None):
                self._make_outputs()
            reason = self._why_unfit(before)
            self._make_gradients()
        return reason or watch.reason or ("it sets the GPU's random state itself" if was_set else None), watch.waits

    def _why_unfit(self, before: list[tuple[int, int]]) -> str | None:
        if before != write_marks(self.static):
            return "it changes its arguments in place"
        kind = unknown_type_in(self.tree)
        if kind is not None:
            return f"its outputs hold a {kind}"
        if self.differentiable != [output.requires_grad for output in self.outputs]:
            return "its outputs differ from call to call"
        used = (self.outputs[number] for number in self.used)
        return next(filter(None, (unknown_leaf(out, self._leaves, parameters_only=False) for out in used)), None)


class ReplayedCall(BridgedCall):
    """A call made by replays."""

    def __init__(self, graph: CallGraph, tensors: list[Tensor], on_recompute: Callable[[], None]) -> None:
        """`on_recompute` is called if the call has to be recomputed."""
        self.graph, self._tensors = graph, tensors
        parameters = graph.aliases.parameters
        super().__init__(graph.work, [*needing_grad(tensors), *parameters] if graph.wants else parameters, on_recompute)

    def forward(self) -> list[Tensor]:
        graph = self.graph
        made = graph.forward(self._tensors)
        # The graph's own memory holds a copy of the others.
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
        """Its gradients were made elsewhere: release everything."""
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
    """Copy tensors to their places, with one kernel for several."""
    if len(places) == 1:
        places[0].copy_(tensors[0], non_blocking=True)
    elif places:
        foreach_copy_(places, tensors, non_blocking=True)


def _copies(tensors: list[Tensor]) -> list[Tensor]:
    """Copies in new memory, with one kernel."""
    return list(foreach_mul(tensors, 1))
