"""One recorded window shape: what its graph reads, and what a replay leaves behind."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from hotlap.data.batches import Batch, map_tensors
from hotlap.data.columns import tensors_in
from hotlap.data.resident import Rows, narrowed, sample_bytes
from hotlap.engine.norms import counted_at_once
from hotlap.engine.objective import Scored
from hotlap.engine.recording import Recorder
from hotlap.engine.step import EagerStep, Window

GATHERED_AT_ONCE = 64 * 2**20
"""Bytes of the batches of one replay up to which all of them are gathered by one kernel."""


class Left:
    """What replays leave behind for others to read, outside the memory of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        """Where in the epoch's order the next replay gathers."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """The last update's."""
        self.loss_dtype = torch.float64


class StepGraph:
    """The updates of windows of one shape, recorded: whole, or all but the optimizer's step."""

    def __init__(
        self,
        eager: EagerStep,
        window: Window,
        left: Left,
        recorder: Recorder,
        norms: Sequence[tuple[_BatchNorm, int]],
        *,
        whole: bool,
    ) -> None:
        self._eager, self._window, self._left, self._norms, self._whole = eager, window, left, norms, whole
        self._scores: list[Scored] = []
        self._counted = 0
        # What others may look at after a replay lies outside the graph's own memory.
        self._kept = [p for p in eager.parameters() if p.grad is not None]
        self._kept_grads = [torch.empty_like(p.grad) for p in self._kept if p.grad is not None] if whole else []
        self._inner_grads: list[Tensor | None] = []
        device = left.place.device
        if window.is_held:
            self._offsets = torch.arange(window.samples, device=device)
            rows = window.pieces[0]
            bytes_in_all = window.samples * sample_bytes(rows.columns.gather(rows.order[:1]))
            self._at_once = window.updates > 1 and bytes_in_all <= GATHERED_AT_ONCE
        else:
            self._inputs = [map_tensors(piece, lambda t: t.to(device, copy=True)) for piece in window.pieces]
            self._static = [tensor for piece in self._inputs for tensor in tensors_in(piece)]
        eager.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(device)
        before = eager.totals.host_count
        try:
            self._graph = recorder.record(self._work)
        finally:
            self._counted = eager.totals.host_count - before
            eager.totals.count(-self._counted)
        if not whole:
            self._inner_grads = [p.grad for p in eager.parameters()]

    def _work(self) -> None:
        eager, window = self._eager, self._window
        with eager.switches if eager.switches else nullcontext():
            for number, pieces in enumerate(self._batches()):
                with counted_at_once(self._norms):
                    loss, self._scores = eager.gradients(pieces, window.sizes, window.all_count)
                if self._whole:
                    assert eager.rates is not None
                    with eager.rates.given(number):
                        eager.finish(self._scores)
            if self._kept_grads:
                torch._foreach_copy_(self._kept_grads, [p.grad for p in self._kept if p.grad is not None])
            self._left.loss.copy_(loss)
        self._left.loss_dtype = loss.dtype
        if window.is_held:
            self._left.place.add_(window.samples)

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
            return self._left.loss
        self._graph.replay()
        for parameter, inner in zip(eager.parameters(), self._inner_grads, strict=True):
            parameter.grad = inner
        if eager.rates is not None:
            eager.rates.write(1)
        with eager.rates.given(0) if eager.rates is not None else nullcontext():
            updated = eager.finish(self._scores)
        if updated and eager.rates is None and eager.schedule.moves_per_update:
            eager.schedule.move()
        return self._left.loss

    def _batches(self) -> Iterator[list[Batch]]:
        """The pieces of each update, as the graph reads them."""
        window = self._window
        if not window.is_held:
            yield self._inputs
            return
        rows = window.pieces[0]
        assert isinstance(rows, Rows)
        chosen = rows.order.index_select(0, self._offsets + self._left.place)
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
    """What tells windows apart for a capture; None where one cannot be captured."""
    first = window.pieces[0]
    if isinstance(first, Rows):
        where = (id(first.columns), first.order.data_ptr())
        return ("rows", where, window.updates, tuple(window.sizes), window.all_count)
    parts = tuple(shape_of(piece) for piece in window.pieces)
    return None if None in parts else ("batch", parts, tuple(window.sizes), window.all_count)


def shape_of(batch: Batch) -> Hashable | None:
    """What tells batches apart for a capture: containers, shapes, numbers, strides; None where it cannot be one."""
    if isinstance(batch, Tensor):
        return (tuple(batch.shape), batch.dtype, batch.stride()) if batch.layout == torch.strided else None
    if isinstance(batch, Mapping):
        parts = tuple(shape_of(part) for part in batch.values())
        return None if None in parts else (type(batch), tuple(batch), parts)
    if isinstance(batch, (tuple, list)):
        parts = tuple(shape_of(part) for part in batch)
        return None if None in parts else (type(batch), parts)
    # Plain values are frozen into the capture, so they are part of what it is made for.
    return ("value", batch) if isinstance(batch, (int, float, str, bool)) else None
