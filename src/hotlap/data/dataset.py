"""What a training runs over: the source of its samples, their order, and the feed that the user asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from hotlap.core.data_checks import is_columns
from hotlap.core.errors import DataError
from hotlap.core.job import Job
from hotlap.core.plan import MOST_PREFETCH, Feed
from hotlap.data.bad_samples import BadSamples
from hotlap.data.batches import Batch
from hotlap.data.feeds import LOADER_PASSES_ON
from hotlap.data.order import BatchedOrder, Order, SampledOrder
from hotlap.data.sequences import LengthOrder, Padding, SequenceColumns, Sequences, lengths_in, with_chosen_widths
from hotlap.data.sources import Columns, Selection, Source
from hotlap.data.windows import WindowColumns, Windows

_known_rows: WeakKeyDictionary[Subset[Any], tuple[list[int], Tensor]] = WeakKeyDictionary()
"""The rows of subsets as tensors, and the lists they come from: converting a long list takes milliseconds, and each
epoch may ask again."""


def as_source(
    data: Any, collate: Callable[[list[Any]], Batch] | None = None, *, loaded: bool = False, skips_bad: bool = False
) -> Source:
    """The source for a job's data in any form, or for the dataset of a DataLoader (`loaded`).

    With `skips_bad` it leaves out samples whose code raises.
    """
    source = _source_of(data, collate, loaded=loaded, skips_bad=skips_bad)
    source.given = data
    source.reopen = functools.partial(as_source, data, collate, loaded=loaded, skips_bad=skips_bad)
    source.skips_bad = skips_bad and source.computes
    return source


def _source_of(data: Any, collate: Callable[[list[Any]], Batch] | None, *, loaded: bool, skips_bad: bool) -> Source:
    if (loaded or type(data) is TensorDataset) and _needs_gradients(data):
        return Source(data, collate)  # its batches are part of a graph
    # To a DataLoader, a tuple or dict is a plain sequence of samples.
    if is_columns(data) and not (loaded and isinstance(data, (tuple, Mapping))):
        return Columns(data, collate)
    # These exact classes only: a subclass may give other samples.
    if type(data) is TensorDataset:
        return Columns(data.tensors, collate)
    if type(data) is Windows:
        return WindowColumns(data, collate)
    if type(data) is Sequences:
        return SequenceColumns(data, collate)
    if type(data) is Subset:
        return Selection(as_source(data.dataset, collate, loaded=True, skips_bad=skips_bad), _rows_of(data))
    return Source(data, collate)


def first_samples(data: Any, count: int) -> Any:
    """The first samples of a job's data in any form but a DataLoader."""
    if not is_columns(data):
        return Subset(data, range(count))
    if isinstance(data, Mapping):
        return {name: column[:count] for name, column in data.items()}
    return tuple(column[:count] for column in data) if isinstance(data, tuple) else data[:count]


def _needs_gradients(data: Any) -> bool:
    tensors = data.tensors if type(data) is TensorDataset else (data,)
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _rows_of(subset: Subset[Any]) -> Sequence[int] | Tensor:
    indices: Any = subset.indices
    if type(indices) is not list:
        return indices  # type: ignore[no-any-return]
    known = _known_rows.get(subset)
    if known is None or known[0] != indices:
        known = _known_rows[subset] = (indices.copy(), torch.tensor(indices, dtype=torch.int64, device="cpu"))
    return known[1]


@dataclass(frozen=True, kw_only=True)
class OrderedDataset:
    """A source, its order, and the feed that the user asked for."""

    source: Source
    order: Order
    feed: Feed
    """A DataLoader's settings as they are, otherwise the simplest feed that works."""
    seed: int = 0
    batch_size: int = 1
    """The user's batch size, or the largest batch in the first window of a batch sampler."""
    extras: dict[str, Any] = field(default_factory=dict)
    """Settings of the user's DataLoader that no plan changes."""
    padding: Padding | None = None
    """The share of padding in batches, for sequences of several lengths."""
    is_sorted: bool = False
    """Whether hotlap sorted the samples by length."""
    bad: BadSamples | None = None
    """The samples that were left out; None if none may be."""

    def renewed(self) -> OrderedDataset:
        """The same with the current data. Raises DataError if its length changed."""
        if self.source.reopen is None:
            return self
        source, padding = with_chosen_widths(self.source.reopen(), self.order)
        if len(source) != len(self.source):
            raise DataError(
                f"the data has {len(source):,} samples now and had {len(self.source):,} when the feed was opened; "
                "open a new feed"
            )
        return replace(self, source=source, padding=padding)


def training_dataset(job: Job, *, workers: int | None = None, on_gpu: bool = False) -> OrderedDataset:
    """The data on which a job trains; `workers` is the environment's request, if the job has none."""
    data, bad = job.data, BadSamples(job.skip_bad_samples) if job.skip_bad_samples else None
    if isinstance(data, DataLoader):
        return replace(_loader_dataset(data, job, on_gpu=on_gpu), bad=bad)
    source = as_source(data, job.collate, skips_bad=bad is not None)
    assert job.batch_size is not None  # the job has checked it
    settings: dict[str, Any] = {
        "batch_size": job.batch_size,
        "seed": job.seed,
        "accumulate": job.accumulate,
        "drop_last": bool(job.drop_last),
    }
    if job.order is None or isinstance(job.order, str):
        order = _drawn_order(source, shuffled=job.order != "as given", by_length=job.reorder, **settings)
    else:
        order = SampledOrder(job.order, len(source), **settings)
    source, padding = with_chosen_widths(source, order)
    return OrderedDataset(
        source=source,
        order=order,
        feed=_simplest(source, workers),
        seed=job.seed,
        batch_size=job.batch_size,
        padding=padding,
        bad=bad,
    )


def _drawn_order(source: Source, *, shuffled: bool, by_length: bool, **settings: Any) -> Order:
    """Shuffled or not; with `by_length`, batches hold samples of similar length."""
    if not by_length:
        return Order(len(source), shuffled=shuffled, **settings)
    lengths = lengths_in(source)
    if lengths is None:
        raise DataError("reorder=True needs samples of known lengths; give them as hotlap.Sequences")
    return LengthOrder(lengths, **settings)


def evaluation_dataset(
    data: Any, *, batch_size: int, collate: Any = None, on_gpu: bool = False, bad: BadSamples | None = None
) -> OrderedDataset:
    """All of `data` once, in its order; of a DataLoader, the samples of its sampler. Samples that raise are left out
    if `bad` lists them."""
    skips_bad = bad is not None
    if not isinstance(data, DataLoader):
        source = as_source(data, collate, skips_bad=skips_bad)
        order: Order = Order(len(source), batch_size=batch_size, shuffled=False)
        lengths = lengths_in(source)
        if lengths is not None:
            # The result of an evaluation does not depend on the order, and this one needs little padding.
            order = SampledOrder(np.argsort(lengths, kind="stable").tolist(), len(source), batch_size=batch_size)
        source, padding = with_chosen_widths(source, order)
        return OrderedDataset(
            source=source,
            order=order,
            feed=_simplest(source, None),
            batch_size=batch_size,
            padding=padding,
            is_sorted=lengths is not None,
            bad=bad,
        )
    source = as_source(data.dataset, own_collate(data), loaded=True, skips_bad=skips_bad)
    order = _evaluation_order(data, len(source), batch_size)
    source, padding = with_chosen_widths(source, order)
    return OrderedDataset(
        source=source,
        order=order,
        padding=padding,
        feed=loader_feed(data, on_gpu),
        batch_size=batch_size,
        extras=_extras(data),
        bad=bad,
    )


def _evaluation_order(loader: DataLoader[Any], length: int, batch_size: int) -> Order:
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        assert batches is not None  # the job has checked it
        return BatchedOrder(batches, length, seed=0, accumulate=1)
    if not batches.drop_last and _takes_all(batches.sampler, length):
        return Order(length, batch_size=batch_size, shuffled=False)
    # Samples that the loader leaves out of its batches stay out of larger ones.
    own = SampledOrder(batches.sampler, length, batch_size=batches.batch_size, drop_last=batches.drop_last).epoch(0)
    chosen = [int(index) for window in range(len(own)) for index in own.pieces(window, None)[0]]
    return SampledOrder(chosen, length, batch_size=batch_size)


def _takes_all(sampler: Any, length: int) -> bool:
    """Whether a sampler gives every sample once, in any order."""
    if type(sampler) is SequentialSampler:
        return len(sampler) == length
    return type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == length


def _simplest(source: Source, workers: int | None) -> Feed:
    if source.why_not_gather() is None:
        return Feed(kind="gather")
    return Feed(kind="loader", workers=workers or 0)


def _loader_dataset(loader: DataLoader[Any], job: Job, *, on_gpu: bool) -> OrderedDataset:
    seed, accumulate = job.seed, job.accumulate
    source = as_source(loader.dataset, own_collate(loader), loaded=True, skips_bad=job.skip_bad_samples > 0)
    batches = loader.batch_sampler
    order: Order
    if type(batches) is not BatchSampler:
        assert batches is not None  # the job has checked it
        order = BatchedOrder(batches, len(source), seed=seed, accumulate=accumulate)
        batch_size = max(len(piece) for piece in order.epoch(0).pieces(0, None))
    else:
        # From the batch sampler: the loader's own `sampler` may differ from it.
        sampler, batch_size = batches.sampler, batches.batch_size
        settings: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": batches.drop_last,
            "seed": seed,
            "accumulate": accumulate,
        }
        if _takes_all(sampler, len(source)):
            shuffled = type(sampler) is RandomSampler
            order = _drawn_order(source, shuffled=shuffled, by_length=job.reorder and shuffled, **settings)
        else:
            order = SampledOrder(sampler, len(source), **settings)
    source, padding = with_chosen_widths(source, order)
    return OrderedDataset(
        source=source,
        order=order,
        feed=loader_feed(loader, on_gpu),
        seed=seed,
        batch_size=batch_size,
        extras=_extras(loader),
        padding=padding,
    )


def own_collate(loader: DataLoader[Any]) -> Any:
    """The loader's collate function if it is the user's, else None."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


def loader_feed(loader: DataLoader[Any], on_gpu: bool) -> Feed:
    """A loader's settings as a feed; it pins memory only if there is a GPU."""
    workers = loader.num_workers
    return Feed(
        kind="loader",
        workers=workers,
        prefetch=min(loader.prefetch_factor or 1, MOST_PREFETCH) if workers else None,
        persistent=bool(workers and loader.persistent_workers),
        pinned=bool(loader.pin_memory and on_gpu),
    )


def _extras(loader: DataLoader[Any]) -> dict[str, Any]:
    chosen = {name: getattr(loader, name, None) for name in LOADER_PASSES_ON}
    return {name: value for name, value in chosen.items() if value}
