"""Replays training calls of a module, with the same numbers as eager calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.torch_private import current_graph_task_id, keeps_graph
from hotlap.core.tricks import COUNTED_NORMS, GRADIENTS_IN_PLACE, REPLAYED_EVALUATION, REWIRED_LAYERS
from hotlap.data.sources import tensors_in
from hotlap.engine.assists.rewiring import rewire
from hotlap.engine.capture.captured_step import (
    MOST_GRAPHS,
    PATIENCE,
    WARM_UPDATES,
    BatchError,
    shape_of,
    why_not_dense,
)
from hotlap.engine.capture.fingerprint import QuickCheck, fingerprint
from hotlap.engine.capture.recording import NotRecordedError, Recorder, Watch, current_stream, settle_dropout
from hotlap.script.calls.autograd_bridge import ParameterAliases, autocast_dtype, bridged_outputs
from hotlap.script.calls.eager import EagerCall, Original, why_not_captured
from hotlap.script.calls.evaluations import Evaluations
from hotlap.script.calls.gradient_buffers import GradientBuffers
from hotlap.script.calls.graphs import CallGraph, LossCall, ReplayedCall
from hotlap.script.calls.loss_replay import SEEN_LOSSES, LossReplay
from hotlap.script.calls.module_state import ModuleState
from hotlap.script.calls.trees import leaves, sharing_memory, with_gradient_hooks, write_marks

MOST_SLOTS = 2
"""Replayed calls that may wait for their backward pass at the same time, such as a GAN's on real and generated data."""
MOST_CHANGES = 3
"""Consecutive eager calls in which a module may change its memory. A module that keeps masks of the last length changes
when another length comes, and again when the first one comes back."""
MOST_RECOMPUTES = 3
"""Most replays that had to be recomputed because the script used their outputs in a new way."""


class MemorySlots:
    """Memory to record and replay in. Each slot holds one call until it is differentiated."""

    def __init__(self, make_recorder: Callable[[], Recorder]) -> None:
        self.make_recorder = make_recorder
        """Creates another recorder, with memory separate from the slots."""
        self._recorders: list[Recorder] = []
        self._waiting: list[weakref.ref[ReplayedCall] | None] = []
        self.stream: torch.cuda.Stream | None = None
        """The stream of all replays: another one could overwrite what this one has still to read."""

    def free(self) -> int | None:
        """The number of a slot where no call waits for its backward pass; None if there is none."""
        for number, replayed in enumerate(self._waiting):
            waiting = replayed() if replayed is not None else None
            if waiting is None or waiting.done:
                return number
        return len(self._waiting) if len(self._waiting) < MOST_SLOTS else None

    def recorder(self, slot: int) -> Recorder:
        if slot == len(self._recorders):
            self._recorders.append(self.make_recorder())
            self._waiting.append(None)
        return self._recorders[slot]

    def take(self, slot: int, replayed: ReplayedCall) -> None:
        self._waiting[slot] = weakref.ref(replayed)


@dataclass
class Recordings:
    """Recordings of a module's calls, and observations of them, for one state of the module."""

    made_for: tuple[Any, ...] = ()
    """Its fingerprint in that state."""
    glance: QuickCheck | None = None
    """Checks quickly whether it is still in that state."""
    graphs: dict[tuple[int, Hashable], CallGraph] = field(default_factory=dict)
    """By slot and kind of call."""
    output_use: dict[Hashable, OutputUse] = field(default_factory=dict)
    """By kind of call."""

    def still_hold(self) -> bool:
        """Whether a quick look finds the module still in that state."""
        return self.glance is not None and self.glance.still_holds()

    def are_of(self, module: nn.Module) -> bool:
        """Whether they are valid for a module that was modified; if so, `still_hold` is True from now on."""
        made_for = fingerprint([module])
        if made_for != self.made_for or not all(graph.aliases.are_in_place for graph in self.graphs.values()):
            return False
        self.glance = QuickCheck([module])
        return True


class CapturedCall:
    """Makes calls by replays; new, rare or unusual calls are made eagerly."""

    def __init__(
        self,
        eager: EagerCall,
        module: nn.Module,
        device: torch.device,
        slots: MemorySlots,
        loss_replay: LossReplay | None = None,
        *,
        without: Collection[str] = (),
    ) -> None:
        """`loss_replay` receives the outputs of replays; `without` names tricks to leave out."""
        self._eager, self._module, self._device, self._slots = eager, module, device, slots
        self._loss_replay = loss_replay
        self._key = functools.partial(_key_of, device)
        self._rewiring = rewire(module) if REWIRED_LAYERS not in without else None
        self._counts_norms = COUNTED_NORMS not in without
        self._evaluations = Evaluations(eager, module, device, self._key, slots.make_recorder)
        self._recordings = Recordings()
        self._earlier: Recordings | None = None
        self._buffers: GradientBuffers | None = None
        self._lends_buffers = GRADIENTS_IN_PLACE not in without
        self._replays_evaluations = REPLAYED_EVALUATION not in without
        self._calls = 0
        self._is_warm = False
        self._new_in_a_row = 0
        self._recomputes = 0
        self._changes = 0
        self._warmup_steps = 0
        self._given_up: str | None = None

    @property
    def warmup_steps(self) -> int:
        """Calls that replayed no earlier recording, although one may still exist for such calls."""
        return self._warmup_steps + self._eager.warmup_steps

    @property
    def given_up(self) -> str | None:
        """Why nothing is captured, or not in the plan's precision; None if that works."""
        return self._given_up or self._eager.given_up

    @property
    def recorded(self) -> int:
        return len(self._recordings.graphs)

    def __call__(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Make a call that will be differentiated."""
        if self._loss_replay is not None:
            self._loss_replay.called()
        stream = current_stream(self._device)
        if self.given_up is not None or self._slots.stream not in (None, stream):
            return self._eager(original, args, kwargs)
        self._calls += 1
        try:
            key, tensors = self._key(args, kwargs)
        except BatchError as error:
            self._give_up(_reason(error))
            return self._eager(original, args, kwargs)
        self._check_validity()
        if self._buffers is not None and not self._buffers.pay_off:
            self._lends_buffers, self._buffers = False, None
            self._drop()
        slot = self._slots.free()
        if slot is None:
            return self._eager(original, args, kwargs)
        graph = self._recordings.graphs.get((slot, key))
        if graph is not None:
            self._new_in_a_row = 0
        else:
            output_use = self._output_use_of(key)
            if not output_use.are_known:
                self._warmup_steps += 1
                return self._watched_call(original, args, kwargs, output_use)
            graph = self._record_if_possible(slot, key, original, args, kwargs, output_use)
            if graph is None:
                return self._eager(original, args, kwargs)
        if graph.wants_loss(SEEN_LOSSES):
            graph = self._with_loss(graph, slot, key, original, args, kwargs)
        graph.last_used, self._slots.stream = self._calls, stream
        replayed = ReplayedCall(graph, tensors, functools.partial(self._recomputed_call, slot, key))
        self._slots.take(slot, replayed)
        outputs = bridged_outputs(replayed)
        if self._loss_replay is not None:
            self._loss_replay.replay_returned(outputs, replayed)
        return outputs

    def in_own_precision(self, original: Original, args: Any, kwargs: Any) -> Any:
        """Like `EagerCall.in_own_precision`, but frequent evaluations without gradients are replayed."""
        trains = torch.is_grad_enabled() or self._module.training
        if trains or self.given_up is not None or not self._replays_evaluations:
            return self._eager.in_own_precision(original, args, kwargs)
        return self._evaluations(original, args, kwargs)

    def prepare(self, original: Original, args: Any, kwargs: Any, used: Sequence[int]) -> None:
        """Record such a call; the outputs with numbers `used` get gradients. Raises NotRecordedError."""
        self._eager.prepare(original, args, kwargs, used)
        if self.given_up is not None:
            raise NotRecordedError(self.given_up)
        self._check_validity(for_trial=True)
        try:
            key, _ = self._key(args, kwargs)
        except BatchError as error:
            raise NotRecordedError(_reason(error)) from None
        slot = self._slots.free()
        if slot is None:
            raise NotRecordedError("calls of the script wait for their backward pass")
        graph = self._recordings.graphs.get((slot, key))
        if graph is None or graph.used != tuple(used):
            self._record(slot, key, original, args, kwargs, used=used, kept=False)

    def forget(self) -> None:
        """Drop all recordings."""
        self._drop()
        self._evaluations.forget()

    def _drop(self) -> None:
        """Drop the recordings of training calls."""
        self._recordings, self._earlier = Recordings(self._recordings.made_for, self._recordings.glance), None

    def _give_up(self, reason: str) -> None:
        self.forget()
        self._given_up = reason

    def _check_validity(self, *, for_trial: bool = False) -> None:
        """Drop recordings made for other layers, modes, addresses or settings.

        A trial changes a module only for a while, for example to turn dropout off. Recordings from before stay until
        the module changes again.
        """
        if not self._recordings.still_hold():
            before, self._earlier = self._earlier, None
            if before is not None and before.still_hold():
                self._recordings = before
            elif not self._recordings.are_of(self._module):
                self._earlier = self._recordings if for_trial else None
                self._recordings = Recordings(fingerprint([self._module]), QuickCheck([self._module]))

    def _output_use_of(self, key: Hashable) -> OutputUse:
        self._new_in_a_row = 0 if key in self._recordings.output_use else self._new_in_a_row + 1
        if self._new_in_a_row > PATIENCE:
            self._give_up("the shapes of arguments keep changing")
        return self._recordings.output_use.setdefault(key, OutputUse())

    def _record_if_possible(
        self, slot: int, key: Hashable, original: Original, args: Any, kwargs: Any, output_use: OutputUse
    ) -> CallGraph | None:
        if output_use.refused is not None:
            if not self._recordings.graphs:
                self._give_up(output_use.refused)
            return None
        if not self._may_record_more():
            return None
        self._warmup_steps += 1
        try:
            return self._record(slot, key, original, args, kwargs, used=output_use.used, kept=output_use.kept)
        except NotRecordedError as error:
            self._give_up(f"it cannot be recorded: {error}")
            return None

    def _may_record_more(self) -> bool:
        """Whether one more may be recorded, if need be in place of one that has not been used for long."""
        if len(self._recordings.graphs) < MOST_GRAPHS:
            return True
        oldest = min(self._recordings.graphs, key=lambda key: self._recordings.graphs[key].last_used)
        if self._calls - self._recordings.graphs[oldest].last_used <= PATIENCE:
            return False
        del self._recordings.graphs[oldest]
        return True

    def _watched_call(self, original: Original, args: Any, kwargs: Any, output_use: OutputUse) -> Any:
        """Make a call eagerly and watch it, except the first one, in which libraries wait for the GPU to initialise."""
        original = self._rewired(original)
        if not self._is_warm:
            outputs = self._eager(original, args, kwargs)
            self._is_warm = True
        else:
            given = (args, kwargs)
            before = shape_of(given), write_marks(tensors_in(given))
            settle_dropout([self._module], self._device)
            with Watch([self._module], self._device) as watch:
                outputs = self._eager(original, args, kwargs)
            same = before == (shape_of(given), write_marks(tensors_in(given)))
            self._changes = self._changes + 1 if watch.changed else 0
            reason = watch.reason if self._changes in (0, MOST_CHANGES) else None
            if watch.waits and not self._changes:
                reason = None  # a recording tells whether it waits for more than constants
            reason = reason or (None if same else "it changes its arguments in place")
            if reason is not None and self._given_up is None:
                self._give_up(reason)
        return output_use.watch(outputs, (args, kwargs))

    def _with_loss(
        self, graph: CallGraph, slot: int, key: Hashable, original: Original, args: Any, kwargs: Any
    ) -> CallGraph:
        """The graph recorded again together with the script's loss of its output; the same graph if that fails."""
        self._warmup_steps += 1
        try:
            made = self._record(
                slot, key, original, args, kwargs, used=graph.used, kept=graph.kept, loss_call=graph.wanted_loss
            )
        except NotRecordedError:
            made = self._recordings.graphs[slot, key] = graph
        if made.loss_call is None:
            made.leave_loss()
        return made

    def _record(
        self,
        slot: int,
        key: Hashable,
        original: Original,
        args: Any,
        kwargs: Any,
        *,
        used: Sequence[int],
        kept: bool,
        loss_call: LossCall | None = None,
    ) -> CallGraph:
        reason = why_not_captured(self._module, self._device)
        if reason is not None:
            raise NotRecordedError(reason)
        recorder, original = self._slots.recorder(slot), self._rewired(original)
        with ModuleState(self._module, self._device):
            graph = CallGraph(
                functools.partial(self._eager.computed, original),
                self._module,
                self._device,
                (args, kwargs),
                used=used,
                kept=kept,
                switches=self._eager.switches,
                scale=self._eager.scale,
                recorder=recorder,
                buffers=self._current_buffers(),
                loss_call=loss_call,
                counts_norms=self._counts_norms,
            )
            if fingerprint([self._module]) != self._recordings.made_for:
                raise NotRecordedError("the call changes the state of the module")
        self._recordings.graphs[slot, key] = graph
        graph.last_used = self._calls
        return graph

    def _current_buffers(self) -> GradientBuffers | None:
        """The buffers for gradients; None if the script holds on to its gradients."""
        parameters = ParameterAliases(self._module).parameters
        if self._lends_buffers and (self._buffers is None or not self._buffers.are_for(parameters)):
            self._buffers = GradientBuffers(parameters)
        return self._buffers

    def _rewired(self, original: Original) -> Original:
        return original if self._rewiring is None else self._rewiring.during(original)

    def _recomputed_call(self, slot: int, key: Hashable) -> None:
        """A call had to be recomputed; watch anew how the script uses such calls."""
        self._recordings.graphs.pop((slot, key), None)
        self._recordings.output_use.pop(key, None)
        self._recomputes += 1
        if self._recomputes > MOST_RECOMPUTES:
            self._give_up("the script keeps changing how it uses the outputs")


def _key_of(device: torch.device, args: Any, kwargs: Any) -> tuple[Hashable, list[Tensor]]:
    """A key of this kind of call, and the tensors in it. Raises BatchError if it cannot be recorded."""
    values = [*args, *kwargs.values()] if kwargs else args
    tensors = [value for value in values if isinstance(value, Tensor)]
    shape: Hashable = tuple(kwargs)
    if len(tensors) != len(values):
        tensors, shape = tensors_in((args, kwargs)), shape_of((args, kwargs))
    facts = []
    for tensor in tensors:
        if tensor.device != device:
            # The host may read it unseen, such as lengths.
            raise BatchError(f"an argument lies on {tensor.device}")
        if type(tensor) not in (Tensor, nn.Parameter):
            raise BatchError(f"an argument is a {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise BatchError(why_not_dense(tensor))
        facts.append((tensor.shape, tensor.dtype, tensor.stride(), tensor.requires_grad))
    return (shape, tuple(facts), autocast_dtype(device), torch.get_default_dtype()), tensors


def _reason(error: BatchError) -> str:
    return str(error) or "its arguments are more than tensors and plain values"


# --- how a script uses outputs -----------------------------------------------------------


MOST_UNUSED = 16
"""Calls to watch without any of them being differentiated."""


class OutputUse:
    """How the script uses the outputs of one kind of call, observed in eager calls."""

    def __init__(self) -> None:
        self._calls = 0
        self.differentiated = 0
        """Calls whose outputs got gradients."""
        self.used: tuple[int, ...] = ()
        """The outputs that got gradients in the last one."""
        self.kept = False
        """Whether a backward pass retained its graph."""
        self.refused: str | None = None
        """Why it must not be recorded."""

    @property
    def are_known(self) -> bool:
        """Whether enough calls were observed."""
        return self.differentiated >= WARM_UPDATES or self._calls > MOST_UNUSED

    def watch(self, outputs: Any, given: Any) -> Any:
        """The outputs of a call with these arguments, with hooks that observe their gradients."""
        self._calls += 1
        if self._calls > MOST_UNUSED and not self.differentiated:
            self.refused = "its outputs are not differentiated"
        passes: dict[int, set[int]] = {}

        def on_gradient(number: int, _: Tensor) -> None:
            this = current_graph_task_id()
            if not passes:
                self.differentiated += 1
            passes.setdefault(this, set()).add(number)
            self.used = tuple(sorted(passes[this]))
            self.kept |= keeps_graph()
            if len(passes) > 1:
                self.refused = "its outputs are differentiated more than once"
            if torch.is_grad_enabled():
                self.refused = "its gradients are differentiated themselves"
            if any((one := ref()) is not None and one._version != version for ref, version in shared):
                self.refused = "the script changes outputs in place that share memory"

        made = with_gradient_hooks(outputs, on_gradient, given)
        # Held weakly, since the hooks hold it.
        shared = [(weakref.ref(one), one._version) for one in sharing_memory(leaves(made), given)]
        return made
