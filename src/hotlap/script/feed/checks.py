"""Whether the batches of a script's loader may come by another feed, and whether that brings the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, MapDataPipe
from torch.utils.data._utils.pin_memory import pin_memory

from hotlap.data.batches import Batch
from hotlap.data.resident import evenly_spread
from hotlap.data.sources import Source, tensors_in
from hotlap.script.feed.sending import Copy
from hotlap.tuner.gates import why_unlike

COMPARED = 8
"""Samples in each of the batches that are compared, at most."""


def why_own_only(loader: DataLoader[Any]) -> str | None:
    """Why the batches of a loader can only come by its own feed, whatever its samples are; None where they need not."""
    if isinstance(loader.dataset, IterableDataset):
        return "an IterableDataset gives its samples in an order of its own"
    if isinstance(loader.dataset, MapDataPipe):
        return "a DataPipe is set up by torch's own iterator"
    if loader.batch_sampler is None:
        return "the loader makes no batches (batch_size=None)"
    if not getattr(loader, "in_order", True):
        return "the loader gives batches in the order in which they come (in_order=False)"
    if type(loader)._get_iterator is not DataLoader._get_iterator:
        return f"{type(loader).__name__} iterates in a way of its own"
    return None


def why_no_samples(dataset: Any) -> str | None:
    """Why a dataset has no samples by number, or none at all; None where it has. It is asked for its length."""
    try:
        return None if len(dataset) else "the dataset is empty"
    except Exception:  # of a user's class, or for want of it
        return f"{type(dataset).__name__} has no length"


# --- the gate --------------------------------------------------------------------------------------


def compared_indices(length: int, batch_size: int | None) -> list[list[int]]:
    """Index batches to compare: the first samples, some of all the data backwards, the last one, and one twice."""
    size = min(length, batch_size or COMPARED, COMPARED)
    return [list(range(size)), evenly_spread(length, COMPARED)[::-1], [length - 1], [0, length - 1, 0]]


def true_batch(source: Source, loader: DataLoader[Any], index: list[int], *, pinned: bool) -> Batch:
    """What the script's own dataset and collate function make of an index batch."""
    # Columns are not the script's own tensors but views of them, without what these have beside their numbers.
    dataset = source.for_probing() if source.computes else Source(loader.dataset)
    batch = loader.collate_fn(dataset.read(index))
    return pin_memory(batch) if pinned else batch  # type: ignore[no-untyped-call]


def why_other_batch(truth: Batch, seen: Batch) -> str | None:
    """What a batch has other than the true one, to the bit, to the type, and in how it lies; None where nothing."""
    reason = why_unlike(truth, seen, "the batch")
    if reason is not None:
        return reason
    pairs = zip(tensors_in(truth), tensors_in(seen), strict=True)
    return next((f"a tensor is {_facts(b)}, not {_facts(a)}" for a, b in pairs if _facts(a) != _facts(b)), None)


def _facts(tensor: Tensor) -> str:
    words = [type(tensor).__name__, f"on {tensor.device}", f"with strides {tensor.stride()}"]
    words += ["that needs gradients"] * tensor.requires_grad
    words += ["in page-locked memory"] * (tensor.device.type == "cpu" and tensor.is_pinned())
    return " ".join(words)


class Compared:
    """Notes the copies on the device, to be compared with what they are copies of."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Copy]] = []

    def serve(self, pairs: Iterable[tuple[Tensor, Copy]]) -> None:
        """Told of the tensors of a batch, and of their copies."""
        self._pairs += pairs

    def why_other(self) -> str | None:
        """What a copy has other than its tensor; None where nothing."""
        for tensor, copy in self._pairs:
            landed = copy.on_device()
            reason = why_unlike(tensor, landed.cpu(), "the copy on the device")
            if reason is None and landed.stride() != tensor.stride():
                reason = f"the copy on the device has strides {landed.stride()}, not {tensor.stride()}"
            if reason is not None:
                return reason
        return None
