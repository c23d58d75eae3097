"""A step recorded once as a CUDA graph and replayed: the same kernels, launched at once."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotlap.core.torch_private import BatchNormBase, foreach_copy_
from hotlap.core.tricks import CAPTURED_UPDATE, COUNTED_NORMS, GATHERED_TOGETHER
from hotlap.data.batches import Batch, map_tensors
from hotlap.data.resident import PendingRows, narrowed, sample_bytes
from hotlap.data.sources import tensors_in
from hotlap.engine.assists.norms import NormCounts, counted_at_once
from hotlap.engine.capture.fingerprint import QuickCheck, StateCheck, fingerprint, place_of, places_in
from hotlap.engine.capture.host_constants import HostConstants
from hotlap.engine.capture.recording import (
    NotRecordedError,
    Recorder,
    Watch,
    dropout_state_to_hold,
    settle_dropout,
    unknown_leaf,
)
from hotlap.engine.objective import Scored
from hotlap.engine.optimizers import frozen_hyperparameters
from hotlap.engine.schedules import Rates
from hotlap.engine.step import EagerStep, Window

WARM_UPDATES = 3
"""Warm-up: updates that run eagerly before anything is recorded, while libraries set up workspaces and the optimizer
its state."""
MOST_GRAPHS = 16
"""Recorded shapes at a time. One more replaces the one that was not used for longest."""
MOST_CONSTANTS = 2 * MOST_GRAPHS
"""Shapes of which the constants are kept: masks take memory."""
PATIENCE = 200
"""Consecutive windows that are all new, by shape or by the model's state, before hotlap gives capturing up."""
MOST_FALSE_ALARMS = 3
"""Consecutive quick checks that found a change although nothing had changed, before hotlap stops making them."""
MOST_AHEAD = 8
"""Replays that may be launched and not yet done."""


class CapturedStep:
    """Makes updates by replaying recordings. New and rare shapes run eagerly, with the same numbers.

    A recording holds the whole update, or all but the optimizer's step, if `why_split` says why that cannot be
    recorded. `note` is called with the reason if less than the whole update is recorded. Warm-up and recording run
    inside `attention`, and inside the `overlap` of the eager step. `without` names tricks to leave out.
    """

    def __init__(
        self,
        eager: EagerStep,
        *,
        device: torch.device,
        recorder: Recorder,
        outputs: ReplayOutputs,
        why_split: str | None,
        attention: AbstractContextManager[None],
        note: Callable[[str], None],
        without: Collection[str] = (),
    ) -> None:
        self._eager, self._device, self._attention, self._note = eager, device, attention, note
        self._overlap: AbstractContextManager[None] = eager.overlap or nullcontext()
        self.split = why_split is not None or eager.waits
        if self.split and CAPTURED_UPDATE not in without:
            self._note(f"the optimizer's step stays outside the capture: {why_split or 'it waits for the device'}")
        self._modules = eager.modules
        self._graphs: dict[Hashable, StepGraph] = {}
        self._made_for: tuple[Any, ...] = ()
        self._quick_check: tuple[Any, ...] | None = None
        self._false_alarms = 0
        self._frozen: tuple[Any, ...] = ()
        self._setting_changes = 0
        self._seen: Counter[Hashable] = Counter()
        self._warm = False
        self._in_vain = 0
        self._has_noted_unfit = self._has_noted_full = False
        self._recorder, self._outputs = recorder, outputs
        self._norms = NormCounts(self._modules if COUNTED_NORMS not in without else ())
        self._copies_constants = False
        """Whether an update waited for the device: it may copy constants there."""
        self._constants: dict[Hashable, HostConstants] = {}
        """By shape, the latest watched last."""
        self._gathers_together = GATHERED_TOGETHER not in without
        self._in_flight: deque[torch.cuda.Event] = deque()
        self.warmup_steps = 0
        """Warm-up windows: those that were not replayed, for shapes that may still be recorded."""
        self.given_up: str | None = None
        """Why nothing is captured, once that is known."""

    @property
    def rates(self) -> Rates | None:
        """The learning rates on the device."""
        return self._eager.rates

    @property
    def recorded(self) -> int:
        """Number of recorded shapes."""
        return len(self._graphs)

    def __call__(self, window: Window) -> Tensor:
        """Make the window's updates. Returns the loss of the last, which the next call overwrites."""
        if self.given_up is not None:
            return self._eager(window)
        if self.split and window.updates > 1:
            for number in range(window.updates):
                loss = self(window.update(number))
            return loss
        self._check_validity()
        if not self._graphs:
            # Record the widest shape first: later recordings fit in memory that it has freed.
            window = window.widest()
        key = signature(window)
        if key is None:
            if not self._has_noted_unfit:
                self._has_noted_unfit = True
                self._note("batches that hold more than tensors and plain values run eagerly")
            return self._eager(window)
        graph = self._graphs.pop(key, None)
        if graph is not None:
            self._in_vain = 0
        else:
            self.warmup_steps += 1
            self._in_vain = 0 if key in self._seen else self._in_vain + 1
            self._seen[key] += window.updates
            warm = self._eager.warm_later if self._graphs else WARM_UPDATES
            if self._seen[key] - window.updates < warm or (self._copies_constants and key not in self._constants):
                return self._run_eagerly(window, key)
            graph = self._recorded(window, key)
            if graph is None:
                return self._eager(window)
            self._evict()
        self._graphs[key] = graph  # keep them in the order of their last use
        return self._replay(graph, window)

    def _evict(self) -> None:
        if len(self._graphs) < MOST_GRAPHS:
            return
        del self._graphs[next(iter(self._graphs))]
        if not self._has_noted_full:
            self._has_noted_full = True
            self._note(f"there are more than {MOST_GRAPHS} shapes of batches: some are recorded again and again")

    def kept(self, loss: Tensor) -> Tensor:
        """A copy of the loss that the next call does not overwrite."""
        return loss.to(self._outputs.loss_dtype, copy=True) if loss is self._outputs.loss else loss

    def forget(self) -> None:
        """Drop all recordings: the training no longer uses the memory that they read."""
        self._graphs.clear()
        self._seen.clear()
        self._constants.clear()
        if self._eager.overlap is not None:
            self._eager.overlap.forget()

    def _check_validity(self) -> None:
        """Drop recordings that were made for other layers, modes, addresses or optimizer settings."""
        eager = self._eager
        if not self._is_untouched():
            parameters = eager.parameters()
            made_for = (*fingerprint(self._modules, eager.functions), *map(id, parameters), *map(place_of, parameters))
            if not self.split:
                made_for += tuple(places_in(list(eager.optimizer.state.values())))
            if made_for != self._made_for:
                self.forget()
                self._made_for, self._false_alarms = made_for, 0
            if self._false_alarms < MOST_FALSE_ALARMS:
                self._false_alarms += 1
                self._prepare_check()
        frozen = () if self.split else frozen_hyperparameters(eager.optimizer)
        if frozen != self._frozen:
            self._setting_changes = self._setting_changes + 1 if self._frozen else 0
            self.forget()
            self._frozen = frozen
            if self._setting_changes == 3:
                self.split = True
                self._note("the optimizer's step stays outside the capture: settings other than its rate keep changing")
        else:
            self._setting_changes = 0

    def _prepare_check(self) -> None:
        """Prepare a quick check for the next replay. It takes a fraction of the time of a full one."""
        eager = self._eager
        state, parameters = None if self.split else StateCheck(eager.optimizer), eager.parameters()
        held = {id(parameter) for module in self._modules for parameter in module.parameters()}
        # Those of the optimizer alone; a quick check of the modules sees the places of the others.
        alone = [parameter for parameter in parameters if id(parameter) not in held]
        places = alone, list(map(place_of, alone))
        functions = fingerprint((), eager.functions)
        self._quick_check = (QuickCheck(self._modules), functions, parameters, places, state)

    def _is_untouched(self) -> bool:
        """Whether nothing has changed that recordings depend on. If False, they may still hold."""
        if self._quick_check is None:
            return False
        check = glance, functions, parameters, (alone, places), state = self._quick_check
        eager, self._quick_check = self._eager, None
        if (
            glance.still_holds()
            and fingerprint((), eager.functions) == functions
            and eager.parameters() is parameters
            and list(map(place_of, alone)) == places
            and (state is None or self.split or state.still_holds())
        ):
            self._quick_check, self._false_alarms = check, 0
            return True
        return False

    def _run_eagerly(self, window: Window, key: Hashable) -> Tensor:
        """Run as a capture would, on the recording stream, and watch what a replay would get wrong.

        The very first update is not watched: libraries wait for the device while they set themselves up.
        """
        settle_dropout(self._modules, self._device)
        with self._recorder.aside(), self._attention, self._overlap:
            for number in range(window.updates):
                one = window.update(number)
                if not self._warm:
                    loss = self._eager.one(one)
                    self._warm = True
                    continue
                loss = self._watched(one, key)
        if self._in_vain > PATIENCE and self.given_up is None:
            self._give_up("no shape of batch comes again while the model stays the same")
        return loss

    def _watched(self, one: Window, key: Hashable) -> Tensor:
        strangers: list[str | None] = []
        self._eager.look = lambda loss: strangers.append(unknown_leaf(loss, self._eager.parameters()))
        constants = HostConstants(self._device) if self._copies_constants else None
        self._eager.around = constants or nullcontext()
        try:
            with Watch(self._modules, self._device, self._eager.functions) as watch, self._norms.watched(key):
                made = self._eager.one(one)
        finally:
            self._eager.look, self._eager.around = None, nullcontext()
        if constants is not None:
            self._constants.pop(key, None)
            self._constants[key] = constants
            if len(self._constants) > MOST_CONSTANTS:
                del self._constants[next(iter(self._constants))]
        reason = watch.reason
        if watch.waits and not self._copies_constants and not self._eager.is_compiled:
            self._copies_constants, reason = True, None
        reason = reason or next(filter(None, strangers), None)
        if reason is not None and self.given_up is None:
            self._give_up(reason)
        return made

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.given_up = reason
        self._note(f"runs eagerly, since {reason}")

    def _recorded(self, window: Window, key: Hashable) -> StepGraph | None:
        try:
            norms = self._norms.settled(key)
            with self._attention, self._overlap:
                return StepGraph(
                    self._eager,
                    window,
                    self._outputs,
                    self._recorder,
                    norms,
                    self._constants.get(key, nullcontext()),
                    whole=not self.split,
                    gathers_together=self._gathers_together,
                )
        except NotRecordedError as error:
            self._eager.optimizer.zero_grad(set_to_none=True)
            self._give_up(f"it cannot be recorded: {error}")
            return None

    def _replay(self, graph: StepGraph, window: Window) -> Tensor:
        first = window.pieces[0]
        if isinstance(first, PendingRows):
            # (`signature` has checked that the epoch is not over)
            if first.start != self._outputs.expected:
                self._outputs.place.fill_(first.start)
            self._outputs.expected = first.start + window.samples
        # Launching a replay is so cheap that the host would run seconds ahead. A signal or a checkpoint would have to
        # wait for all of it.
        event = self._in_flight.popleft() if len(self._in_flight) == MOST_AHEAD else None
        if event is None:
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        else:
            event.synchronize()
        loss = graph.replay(window)
        event.record(torch.cuda.current_stream(self._device))
        self._in_flight.append(event)
        return loss


# --- one recorded shape --------------------------------------------------------------------------------


GATHERED_AT_ONCE = 64 * 2**20
"""Bytes of the batches of one replay up to which one kernel gathers all of them."""


class ReplayOutputs:
    """What the replays of one training write for others to read, outside the memory of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        """Position in the epoch's order at which the next replay gathers."""
        self.expected = -1
        """The same position on the host, over all plans; -1 before the first replay."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """The loss of the last update."""
        self.loss_dtype = torch.float64

    def allocate(self, parameters: Sequence[Tensor]) -> None:
        """Allocate memory for the gradients of these parameters."""
        for parameter in parameters:
            held = self._grads.get(id(parameter))
            if parameter.requires_grad and (held is None or not _alike(held[1], parameter)):
                # The dict holds the parameter too, so that no other tensor can get its id.
                self._grads[id(parameter)] = (parameter, torch.empty_like(parameter, requires_grad=False))

    def grad_of(self, parameter: Tensor) -> Tensor:
        """The buffer that holds the last gradient of a parameter."""
        return self._grads[id(parameter)][1]


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, other.device)


class StepGraph:
    """The recorded updates of windows of one shape: whole, or all but the optimizer's step."""

    def __init__(
        self,
        eager: EagerStep,
        window: Window,
        outputs: ReplayOutputs,
        recorder: Recorder,
        norms: Sequence[tuple[BatchNormBase, int]],
        constants: AbstractContextManager[object],
        *,
        whole: bool,
        gathers_together: bool = True,
    ) -> None:
        self._eager, self._window, self._outputs, self._norms, self._whole = eager, window, outputs, norms, whole
        self._constants = constants
        self._scores: list[Scored] = []
        self._counted = 0
        self._parameters = list(eager.parameters())
        self._grads: list[Tensor | None] = []
        """The gradient of each parameter after a replay."""
        if whole:
            outputs.allocate(self._parameters)
        device = outputs.place.device
        if window.is_held:
            self._offsets = torch.arange(window.samples, device=device)
            rows = window.pieces[0]
            bytes_in_all = window.samples * sample_bytes(rows.columns.gather(rows.order[:1]))
            self._at_once = gathers_together and window.updates > 1 and bytes_in_all <= GATHERED_AT_ONCE
        else:
            # Detached: the user's code may have made leaves that require gradients.
            self._inputs = [map_tensors(piece, lambda t: t.detach().to(device, copy=True)) for piece in window.pieces]
            self._static = [tensor for piece in self._inputs for tensor in tensors_in(piece)]
        eager.optimizer.zero_grad(set_to_none=True)
        self._dropout_state = dropout_state_to_hold(eager.modules, device)
        torch.cuda.synchronize(device)
        before = eager.totals.host_count
        try:
            self._graph = recorder.record(self._work)
        finally:
            self._counted = eager.totals.host_count - before
            eager.totals.count(-self._counted)
        if not whole:
            self._grads = [parameter.grad for parameter in self._parameters]

    def _work(self) -> None:
        eager, window = self._eager, self._window
        overlap = eager.overlap
        leaving = overlap.leaving(self._outputs.grad_of) if overlap is not None and self._whole else nullcontext()
        with eager.switches if eager.switches else nullcontext(), leaving:
            for number, pieces in enumerate(self._batches()):
                with counted_at_once(self._norms), self._constants:
                    loss, self._scores = eager.gradients(pieces, window.sizes, window.all_count)
                if self._whole:
                    assert eager.rates is not None
                    with eager.rates.given(number):
                        eager.finish(self._scores)
            if self._whole:
                self._store_gradients()
            self._outputs.loss.copy_(loss)
        self._outputs.loss_dtype = loss.dtype
        if window.is_held:
            self._outputs.place.add_(window.samples)

    def _store_gradients(self) -> None:
        with_grad = [parameter for parameter in self._parameters if parameter.grad is not None]
        buffers = [self._outputs.grad_of(parameter) for parameter in with_grad]
        moves = [(buffer, p.grad) for buffer, p in zip(buffers, with_grad, strict=True) if p.grad is not buffer]
        if moves:
            foreach_copy_([buffer for buffer, _ in moves], [grad for _, grad in moves if grad is not None])
        places = dict(zip(map(id, with_grad), buffers, strict=True))
        self._grads = [places.get(id(parameter)) for parameter in self._parameters]

    def replay(self, window: Window) -> Tensor:
        """Replay the updates of a window of this shape."""
        eager = self._eager
        if not window.is_held:
            fresh = [tensor for piece in window.pieces for tensor in tensors_in(piece)]
            with torch.no_grad():
                for static, tensor in zip(self._static, fresh, strict=True):
                    static.copy_(tensor, non_blocking=True)
        if eager.rates is not None:
            eager.rates.write(window.updates)
        self._graph.replay()
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        if self._whole:
            eager.totals.count(self._counted)
            eager.ended(updated=True)
            return self._outputs.loss
        with eager.rates.given(0) if eager.rates is not None else nullcontext():
            updated = eager.finish(self._scores)
        eager.ended(updated)
        return self._outputs.loss

    def _batches(self) -> Iterator[list[Batch]]:
        """The pieces of each update, in the memory that the graph reads."""
        window = self._window
        if not window.is_held:
            yield self._inputs
            return
        rows = window.pieces[0]
        assert isinstance(rows, PendingRows)
        chosen = rows.order.index_select(0, self._offsets + self._outputs.place)
        each = sum(window.sizes)
        at_once = rows.columns.gather(chosen) if self._at_once else None
        for number in range(window.updates):
            batch = (
                narrowed(at_once, number * each, each)
                if at_once is not None
                else rows.columns.gather(chosen.narrow(0, number * each, each))
            )
            yield _in_pieces(batch, window.sizes)


def _in_pieces(batch: Batch, sizes: list[int]) -> list[Batch]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(batch if len(sizes) == 1 else narrowed(batch, start, size))
        start += size
    return pieces


def signature(window: Window) -> Hashable | None:
    """The key by which a capture tells windows apart; None if a window cannot be captured."""
    first, dtype = window.pieces[0], torch.get_default_dtype()
    if isinstance(first, PendingRows):
        where = (id(first.columns), first.order.data_ptr())
        return ("rows", where, window.updates, tuple(window.sizes), window.all_count, dtype)
    try:
        parts = tuple(shape_of(piece) for piece in window.pieces)
    except BatchError:
        return None
    return ("batch", parts, tuple(window.sizes), window.all_count, dtype)


class BatchError(Exception):
    """A batch holds something that a capture cannot read."""


def why_not_dense(tensor: Tensor) -> str:
    """Why a tensor of another layout than torch's usual one is not recorded."""
    kind = str(tensor.layout).removeprefix("torch.").replace("_", " ")
    return f"a tensor is {kind}: how many entries it holds may change, and a replay cannot follow"


def shape_of(batch: Batch) -> Hashable:
    """The containers, shapes, dtypes and strides by which a capture tells batches apart. Else it raises BatchError."""
    if isinstance(batch, Tensor):
        if batch.layout != torch.strided:
            raise BatchError(why_not_dense(batch))
        return (tuple(batch.shape), batch.dtype, batch.stride())
    if isinstance(batch, Mapping):
        return (type(batch), tuple(batch), tuple(shape_of(part) for part in batch.values()))
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        return (type(batch), tuple(shape_of(part) for part in batch))
    # A capture freezes plain values, so they belong to its key. 1 and True are not the same.
    if batch is None or isinstance(batch, (int, float, str, bool)):
        return ("value", type(batch), batch)
    raise BatchError
