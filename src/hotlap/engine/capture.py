"""A step recorded once as a CUDA graph and replayed: the same kernels, launched at once."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.data.batches import Batch, map_tensors
from hotlap.data.columns import tensors_in
from hotlap.data.resident import Rows, narrowed, sample_bytes
from hotlap.engine.objective import Scored
from hotlap.engine.optimizers import frozen_hyperparameters
from hotlap.engine.rates import Rates
from hotlap.engine.step import EagerStep, Window
from hotlap.engine.watch import Watch, fingerprint, why_recording_failed

WARM_UPDATES = 3
"""Updates that run eagerly before a shape is recorded: libraries set up their workspaces, the optimizer its state."""
MOST_GRAPHS = 16
"""Shapes that are recorded; further ones run eagerly."""
GATHERED_AT_ONCE = 64 * 2**20
"""Bytes of the batches of one replay up to which all of them are gathered by one kernel."""


class CapturedStep:
    """Makes updates by replaying what it recorded; shapes that are new or rare run eagerly, with the same numbers.

    Recorded is the whole update, or, where the optimizer cannot be (`why_split`), all but its step. `note` is told
    why nothing, or less than the whole, is recorded.
    """

    def __init__(
        self,
        eager: EagerStep,
        *,
        device: torch.device,
        why_split: str | None,
        note: Callable[[str], None],
    ) -> None:
        self._eager, self._device, self._note = eager, device, note
        self.split = why_split is not None or eager.waits
        if self.split:
            self._note(f"the optimizer's step stays outside the capture: {why_split or 'it waits for the device'}")
        self._modules = eager.modules
        self._graphs: dict[Hashable, _Graph] = {}
        self._made_for: tuple[Any, ...] = ()
        self._frozen: tuple[Any, ...] = ()
        self._restless = 0
        self._seen: Counter[Hashable] = Counter()
        self._warm = False
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        """Where in the epoch's order the next replay gathers."""
        self._expected = -1
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.loss_dtype = torch.float64
        self.given_up: str | None = None
        """Why nothing is captured, once that is known."""

    @property
    def rates(self) -> Rates | None:
        """Where the learning rates are read."""
        return self._eager.rates

    @property
    def recorded(self) -> int:
        """How many shapes are recorded."""
        return len(self._graphs)

    def __call__(self, window: Window) -> Tensor:
        """Make the window's updates; the loss of the last, which the next call overwrites."""
        if self.given_up is not None:
            return self._eager(window)
        if self.split and window.updates > 1:
            for number in range(window.updates):
                loss = self(window.update(number))
            return loss
        self._check_validity()
        key = _signature(window)
        graph = self._graphs.get(key) if key is not None else None
        if graph is None:
            self._seen[key] += window.updates
            if key is None or self._seen[key] - window.updates < WARM_UPDATES or len(self._graphs) >= MOST_GRAPHS:
                return self._run_eagerly(window)
            graph = self._recorded(window)
            if graph is None:
                return self._eager(window)
            self._graphs[key] = graph
        return self._replay(graph, window)

    def forget(self) -> None:
        """Drop all that was recorded: the memory it was made for is no longer the training's."""
        self._graphs.clear()
        self._seen.clear()

    def _check_validity(self) -> None:
        """Drop what was recorded for other layers, modes, places in memory or settings of the optimizer."""
        states = self._eager.optimizer.state.values()
        places = [t.data_ptr() for state in states for t in state.values() if isinstance(t, Tensor)]
        made_for = (*fingerprint(self._modules), *places)
        frozen = () if self.split else frozen_hyperparameters(self._eager.optimizer)
        if made_for != self._made_for:
            self.forget()
            self._made_for = made_for
        if frozen != self._frozen:
            self._restless = self._restless + 1 if self._frozen else 0
            self.forget()
            self._frozen = frozen
            if self._restless == 3:
                self.split = True
                self._note("the optimizer's step stays outside the capture: settings other than its rate keep changing")
        else:
            self._restless = 0

    def _run_eagerly(self, window: Window) -> Tensor:
        """As a capture would run it: on the stream that captures, watched, so that its first times tell what is wrong.

        The very first update is not watched: libraries wait for the device while they set themselves up.
        """
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for number in range(window.updates):
                one = window.update(number)
                if not self._warm:
                    loss = self._eager.one(one)
                    self._warm = True
                    continue
                with Watch(self._modules, self._device) as watch:
                    loss = self._eager.one(one)
                # Where the host decides whether an update is made, that wait is meant, and is not recorded.
                if watch.reason is not None and not self._eager.waits and self.given_up is None:
                    self._give_up(watch.reason)
        here.wait_stream(self._stream)
        self._expected = -1
        return loss

    def _give_up(self, reason: str) -> None:
        self.forget()
        self.given_up = reason
        self._note(f"runs eagerly, since {reason}")

    def _recorded(self, window: Window) -> _Graph | None:
        graph = _Graph(self, self._eager, window, whole=not self.split)
        reason = _why_not_recorded(lambda: graph.record(self._pool, self._stream), self._device, self._pool)
        if reason is None:
            return graph
        self._eager.optimizer.zero_grad(set_to_none=True)
        self._give_up(f"it cannot be recorded: {reason}")
        return None

    def _replay(self, graph: _Graph, window: Window) -> Tensor:
        first = window.pieces[0]
        if isinstance(first, Rows):
            if first.start != self._expected:
                self.place.fill_(first.start)
            self._expected = first.start + window.samples
        return graph.replay(window)


class _Graph:
    """One recorded window shape."""

    def __init__(self, owner: CapturedStep, eager: EagerStep, window: Window, *, whole: bool) -> None:
        self._owner, self._eager, self._window, self._whole = owner, eager, window, whole
        self._graph = torch.cuda.CUDAGraph()
        self._scores: list[Scored] = []
        self._counted = 0
        # What others may look at after a replay lies outside the graph's own memory.
        self._kept = [p for p in eager.parameters() if p.grad is not None]
        self._kept_grads = [torch.empty_like(p.grad) for p in self._kept if p.grad is not None] if whole else []
        self._inner_grads: list[Tensor | None] = []
        device = owner.place.device
        if window.is_held:
            self._offsets = torch.arange(window.samples, device=device)
            rows = window.pieces[0]
            bytes_in_all = window.samples * sample_bytes(rows.columns.gather(rows.order[:1]))
            self._at_once = window.updates > 1 and bytes_in_all <= GATHERED_AT_ONCE
        else:
            self._inputs = [map_tensors(piece, lambda t: t.to(device, copy=True)) for piece in window.pieces]
            self._static = [tensor for piece in self._inputs for tensor in tensors_in(piece)]

    def record(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Record the window's updates. Nothing of it is executed yet."""
        eager, window = self._eager, self._window
        totals = eager.totals
        before = totals.host_count
        torch.cuda.synchronize(stream.device)
        eager.optimizer.zero_grad(set_to_none=True)
        # Other threads (a checkpoint, a loader that pins memory) may call CUDA meanwhile.
        with (
            _no_collection(),
            torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            with eager.switches if eager.switches else nullcontext():
                for number, pieces in enumerate(self._batches()):
                    loss, scores = eager.gradients(pieces, window.sizes, window.all_count)
                    if self._whole:
                        assert eager.rates is not None
                        with eager.rates.given(number):
                            eager.finish(scores)
                if self._kept_grads:
                    torch._foreach_copy_(self._kept_grads, [p.grad for p in self._kept if p.grad is not None])
                self._owner.loss.copy_(loss)
            if window.is_held:
                self._owner.place.add_(window.samples)
        self._scores = scores
        self._owner.loss_dtype = loss.dtype
        self._counted = totals.host_count - before
        totals.count(-self._counted)
        if self._whole:
            for parameter, grad in zip(self._kept, self._kept_grads, strict=True):
                parameter.grad = grad
        else:
            self._inner_grads = [p.grad for p in eager.parameters()]

    def replay(self, window: Window) -> Tensor:
        """Make the updates of a window of this shape."""
        eager = self._eager
        if not window.is_held:
            fresh = [tensor for piece in window.pieces for tensor in tensors_in(piece)]
            for static, tensor in zip(self._static, fresh, strict=True):
                static.copy_(tensor, non_blocking=True)
        if self._whole:
            assert eager.rates is not None
            eager.rates.write(window.updates)
            self._graph.replay()
            eager.totals.count(self._counted)
            for parameter, grad in zip(self._kept, self._kept_grads, strict=True):
                parameter.grad = grad
            return self._owner.loss
        self._graph.replay()
        for parameter, inner in zip(eager.parameters(), self._inner_grads, strict=True):
            parameter.grad = inner
        if eager.rates is not None:
            eager.rates.write(1)
        with eager.rates.given(0) if eager.rates is not None else nullcontext():
            updated = eager.finish(self._scores)
        if updated and eager.rates is None and eager.schedule.moves_per_update:
            eager.schedule.move()
        return self._owner.loss

    def _batches(self) -> Iterator[list[Batch]]:
        """The pieces of each update, as the graph reads them."""
        window = self._window
        if not window.is_held:
            yield self._inputs
            return
        rows = window.pieces[0]
        assert isinstance(rows, Rows)
        chosen = rows.order.index_select(0, self._offsets + self._owner.place)
        each = sum(window.sizes)
        at_once = rows.columns.gather(chosen) if self._at_once else None
        for number in range(window.updates):
            batch = (
                narrowed(at_once, number * each, each)
                if at_once is not None
                else rows.columns.gather(chosen.narrow(0, number * each, each))
            )
            yield _in_pieces(batch, window.sizes)


def _why_not_recorded(record: Callable[[], None], device: torch.device, pool: Any) -> str | None:
    """Record; where that fails, why, with torch in order again."""
    before = torch.cuda.default_generators[_number(device)].clone_state()
    try:
        record()
    except torch.OutOfMemoryError:
        _tidy(device, pool, before)
        raise
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        _tidy(device, pool, before)
        return why_recording_failed(error)
    return None


def _tidy(device: torch.device, pool: Any, before: torch.Generator) -> None:
    """After a recording that broke, torch's generator and allocator still take it to be under way."""
    torch.cuda.default_generators[_number(device)].graphsafe_set_state(before)
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(_number(device), pool)
    torch.cuda.synchronize(device)


def _number(device: torch.device) -> int:
    return device.index if device.index is not None else torch.cuda.current_device()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Garbage that holds device memory, or another graph, must not be collected while a capture is under way."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _in_pieces(batch: Batch, sizes: list[int]) -> list[Batch]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(batch if len(sizes) == 1 else narrowed(batch, start, size))
        start += size
    return pieces


def _signature(window: Window) -> Hashable | None:
    """What tells windows apart for a capture; None where one cannot be captured."""
    first = window.pieces[0]
    if isinstance(first, Rows):
        where = (id(first.columns), first.order.data_ptr())
        return ("rows", where, window.updates, tuple(window.sizes), window.all_count)
    parts = tuple(_shape_of(piece) for piece in window.pieces)
    return None if None in parts else ("batch", parts, tuple(window.sizes), window.all_count)


def _shape_of(batch: Batch) -> Hashable | None:
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), batch.dtype, batch.stride()) if batch.layout == torch.strided else None
    if isinstance(batch, Mapping):
        parts = tuple(_shape_of(part) for part in batch.values())
        return None if None in parts else (type(batch), tuple(batch), parts)
    if isinstance(batch, (tuple, list)):
        parts = tuple(_shape_of(part) for part in batch)
        return None if None in parts else (type(batch), parts)
    # Plain values are frozen into the capture, so they are part of what it is made for.
    return ("value", batch) if isinstance(batch, (int, float, str, bool)) else None


class CapturedOutputs:
    """Outputs of a model in evaluation, by replay. They are overwritten by the next call for a batch of that shape."""

    WORTH_IT = 8
    """Batches of one shape before it is recorded: a short evaluation is over before that pays."""

    def __init__(
        self, eager: Callable[[Batch], tuple[Any, Any]], modules: Sequence[nn.Module], device: torch.device
    ) -> None:
        self._eager, self._modules, self._device = eager, modules, device
        self._seen: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Any, Any]]] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.given_up: str | None = None
        """Why nothing is captured, once that is known."""

    def __call__(self, batch: Batch) -> tuple[Any, Any]:
        """The model's output for a batch on the device, and its target."""
        shape = _shape_of(batch)
        if self.given_up is not None or shape is None:
            return self._eager(batch)
        key = (shape, fingerprint(self._modules))
        if key not in self._graphs:
            self._seen[shape] += 1
            if self._seen[shape] < self.WORTH_IT:
                return self._eager(batch)
            if len(self._graphs) >= MOST_GRAPHS:
                self._graphs.clear()
            made = self._watched(batch)
            if self.given_up is None:
                self._record(key, batch)
            return made
        graph, inputs, outputs = self._graphs[key]
        for static, tensor in zip(inputs, tensors_in(batch), strict=True):
            static.copy_(tensor, non_blocking=True)
        graph.replay()
        return outputs

    def _watched(self, batch: Batch) -> tuple[Any, Any]:
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream), Watch(self._modules, self._device) as watch:
            made = self._eager(batch)
        here.wait_stream(self._stream)
        self.given_up = watch.reason
        return made

    def _record(self, key: Hashable, batch: Batch) -> None:
        static = map_tensors(batch, lambda tensor: tensor.clone())
        graph = torch.cuda.CUDAGraph()
        made: list[tuple[Any, Any]] = []

        def record() -> None:
            with (
                _no_collection(),
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                made.append(self._eager(static))

        self.given_up = _why_not_recorded(record, self._device, self._pool)
        if self.given_up is None:
            self._graphs[key] = (graph, tensors_in(static), made[0])
