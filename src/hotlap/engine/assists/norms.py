"""Batch norms count their batches, each with a separate kernel. A recorded step counts for all of them at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from hotlap.core.torch_private import BatchNormBase, foreach_add_


class NormCounts:
    """The counters of a model's batch norms.

    A counter is one number, and updating it takes a kernel. In a captured step of a small network these are several of
    each hundred kernels. An eager update shows how far each counter moves; recorded updates then move all of them with
    one kernel. Only plain batch norms with a fixed momentum take part: the others read their counter.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._seen: dict[Hashable, list[tuple[BatchNormBase, Tensor]]] = {}

    @contextmanager
    def watched(self, shape: Hashable) -> Iterator[None]:
        """Inside, watch how far an update of this shape moves the counters; nothing waits."""
        layers = self._layers()
        before = [_counter(layer).clone() for layer in layers]
        yield
        self._seen[shape] = [(layer, _counter(layer) - was) for layer, was in zip(layers, before, strict=True)]

    def settled(self, shape: Hashable) -> list[tuple[BatchNormBase, int]]:
        """Layers, and how far an update of this shape moves their counters; waits for the device."""
        now = {id(layer) for layer in self._layers()}
        return [(layer, int(by)) for layer, by in self._seen.pop(shape, []) if id(layer) in now]

    def _layers(self) -> list[BatchNormBase]:
        found = [layer for module in self._modules for layer in module.modules() if isinstance(layer, BatchNormBase)]
        return [layer for layer in found if _takes_part(layer)]


@contextmanager
def counted_at_once(moves: Sequence[tuple[BatchNormBase, int]]) -> Iterator[None]:
    """Inside, these layers do not count. At the end one kernel moves all their counters."""
    if not moves:
        yield
        return
    counters = [_counter(layer) for layer, _ in moves]
    for layer, _ in moves:
        layer._buffers["num_batches_tracked"] = None
    try:
        yield
    finally:
        for (layer, _), counter in zip(moves, counters, strict=True):
            layer._buffers["num_batches_tracked"] = counter
    foreach_add_(counters, [by for _, by in moves])


def _takes_part(layer: BatchNormBase) -> bool:
    return (
        layer.training
        and layer.track_running_stats
        and layer.momentum is not None
        and isinstance(layer.num_batches_tracked, Tensor)
        and type(layer).forward is BatchNormBase.forward
    )


def _counter(layer: BatchNormBase) -> Tensor:
    counter = layer.num_batches_tracked
    assert isinstance(counter, Tensor)
    return counter
