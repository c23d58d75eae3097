"""One recorded window shape: what its graph reads, and what a replay leaves behind."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.rnn import PackedSequence

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
    """What the replays of one training leave behind for others to read, outside the memory of their graphs."""

    def __init__(self, device: torch.device) -> None:
        self._grads: dict[int, tuple[Tensor, Tensor]] = {}
        self.place = torch.zeros(1, dtype=torch.int64, device=device)
        """Where in the epoch's order the next replay gathers."""
        self.expected = -1
        """The same as the host knows it, whichever plan's replay was the last; -1 before the first."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        """The last update's."""
        self.loss_dtype = torch.float64

    def make_room(self, parameters: Sequence[Tensor]) -> None:
        """Have memory for the gradients of these parameters."""
        for parameter in parameters:
            held = self._grads.get(id(parameter))
            if parameter.requires_grad and (held is None or not _alike(held[1], parameter)):
                # With the parameter itself: as long as it is held here, no other can have its number.
                self._grads[id(parameter)] = (parameter, torch.empty_like(parameter, requires_grad=False))

    def grad_of(self, parameter: Tensor) -> Tensor:
        """Where the last gradient of a parameter is left."""
        return self._grads[id(parameter)][1]


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.stride(), one.dtype, one.device) == (other.shape, other.stride(), other.dtype, other.device)


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
        self._parameters = list(eager.parameters())
        self._grads: list[Tensor | None] = []
        """What is each parameter's gradient after a replay."""
        if whole:
            left.make_room(self._parameters)
        device = left.place.device
        if window.is_held:
            self._offsets = torch.arange(window.samples, device=device)
            rows = window.pieces[0]
            bytes_in_all = window.samples * sample_bytes(rows.columns.gather(rows.order[:1]))
            self._at_once = window.updates > 1 and bytes_in_all <= GATHERED_AT_ONCE
        else:
            # Without what the user's code may have made of them: a leaf that requires gradients, for one.
            self._inputs = [map_tensors(piece, lambda t: t.detach().to(device, copy=True)) for piece in window.pieces]
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
            self._grads = [parameter.grad for parameter in self._parameters]

    def _work(self) -> None:
        eager, window = self._eager, self._window
        overlap = eager.overlap
        leaving = overlap.leaving(self._left.grad_of) if overlap is not None and self._whole else nullcontext()
        with eager.switches if eager.switches else nullcontext(), leaving:
            for number, pieces in enumerate(self._batches()):
                with counted_at_once(self._norms):
                    loss, self._scores = eager.gradients(pieces, window.sizes, window.all_count)
                if self._whole:
                    assert eager.rates is not None
                    with eager.rates.given(number):
                        eager.finish(self._scores)
            if self._whole:
                self._leave_gradients()
            self._left.loss.copy_(loss)
        self._left.loss_dtype = loss.dtype
        if window.is_held:
            self._left.place.add_(window.samples)

    def _leave_gradients(self) -> None:
        with_grad = [parameter for parameter in self._parameters if parameter.grad is not None]
        rooms = [self._left.grad_of(parameter) for parameter in with_grad]
        moves = [(room, p.grad) for room, p in zip(rooms, with_grad, strict=True) if p.grad is not room]
        if moves:
            torch._foreach_copy_([room for room, _ in moves], [grad for _, grad in moves if grad is not None])
        places = dict(zip(map(id, with_grad), rooms, strict=True))
        self._grads = [places.get(id(parameter)) for parameter in self._parameters]

    def replay(self, window: Window) -> Tensor:
        """Make the updates of a window of this shape."""
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
            return self._left.loss
        with eager.rates.given(0) if eager.rates is not None else nullcontext():
            updated = eager.finish(self._scores)
        eager.ended(updated)
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
    try:
        parts = tuple(shape_of(piece) for piece in window.pieces)
    except Unfit:
        return None
    return ("batch", parts, tuple(window.sizes), window.all_count)


class Unfit(Exception):  # noqa: N818 -- it is caught where it is raised
    """A batch holds what a capture cannot read."""


def shape_of(batch: Batch) -> Hashable:
    """What tells batches apart for a capture: containers, shapes, kinds, strides. Raises Unfit where there is more."""
    if isinstance(batch, Tensor):
        if batch.layout != torch.strided:
            raise Unfit
        return (tuple(batch.shape), batch.dtype, batch.stride())
    if isinstance(batch, Mapping):
        return (type(batch), tuple(batch), tuple(shape_of(part) for part in batch.values()))
    if isinstance(batch, (tuple, list)) and not isinstance(batch, PackedSequence):
        return (type(batch), tuple(shape_of(part) for part in batch))
    # Plain values are frozen into the capture, so they are part of what it is made for; 1 and True are not the same.
    if batch is None or isinstance(batch, (int, float, str, bool)):
        return ("value", type(batch), batch)
    raise Unfit
