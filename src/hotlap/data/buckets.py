"""Batches of similar length, and the few widths that they are padded to."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotlap.data.columns import Selection
from hotlap.data.order import Epoch, Order, mix
from hotlap.data.samples import Source
from hotlap.data.sequences import Numbers, SequenceColumns, rounded

MOST_WIDTHS = 12
"""Each is a shape that has to be recorded, or compiled, by itself."""
WASTE = 0.02
"""How much more may be computed with fewer widths."""
WINDOW = 50
"""Batches out of whose samples batches of similar length are made."""
MIXED = 8
"""Batches in a row that are of all lengths together."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """How much of what goes through a model in an epoch is padding."""

    widths: tuple[int, ...]
    entries: int
    """Of the sequences themselves."""
    padded: int
    """With what the batches are padded by."""
    at_one_width: int
    """The same, were every batch as wide as the longest sequence."""

    @property
    def share(self) -> float:
        """Of all that goes through the model."""
        return 1 - self.entries / self.padded

    @property
    def share_at_one_width(self) -> float:
        """Of all that would go through the model."""
        return 1 - self.entries / self.at_one_width

    @property
    def line(self) -> str:
        """For people."""
        widths = f"{len(self.widths)} widths ({', '.join(map(str, self.widths))})"
        if len(self.widths) == 1:
            return f"all batches are {self.widths[0]} wide, {self.share:.0%} of which is padding"
        return (
            f"{widths}: {self.share:.0%} of a batch is padding, instead of {self.share_at_one_width:.0%} at one width"
        )


class LengthOrder(Order):
    """Shuffled, but so that a batch holds samples of similar length; from seed and epoch, as every order.

    Out of `WINDOW` batches of the shuffled order, which are sorted, others are cut. These are shuffled, but so that of
    each `MIXED` in a row one belongs to the shortest, one to the next longer, and so on: whatever is timed over some
    steps then takes about as long everywhere in an epoch. The last, shorter batch of an epoch is drawn from all.
    """

    def __init__(self, lengths: Numbers, *, batch_size: int, **settings: Any) -> None:
        super().__init__(len(lengths), batch_size=batch_size, shuffled=True, **settings)
        self._lengths = lengths

    def _indices(self, epoch: int) -> Tensor:
        order, size = super()._indices(epoch).numpy(), self._batch_size
        whole = len(order) - len(order) % size
        windows = np.arange(whole) // (WINDOW * size)
        # By window, then by length; samples as long as each other stay as they were drawn.
        batches = order[:whole][np.lexsort((self._lengths[order[:whole]], windows))].reshape(-1, size)
        mixed = self._mixed(batches, np.random.default_rng(mix(self._seed, epoch, 1)))
        return torch.from_numpy(np.concatenate([mixed.reshape(-1), order[whole:]]))

    def _mixed(self, batches: Numbers, chance: np.random.Generator) -> Numbers:
        """The batches in another order, short and long ones in turn."""
        count = len(batches)
        by_length = np.lexsort((chance.random(count), self._lengths[batches].max(axis=1, initial=0)))
        row = np.empty(count, dtype=np.int64)
        for part in np.array_split(by_length, MIXED):
            row[part] = chance.permutation(len(part))
        return batches[np.lexsort((chance.random(count), row))]


def lengths_in(source: Source) -> Numbers | None:
    """The length of each sample, where they are sequences."""
    if isinstance(source, Selection):
        inner = lengths_in(source.inner)
        return None if inner is None else inner[source.rows.numpy()]
    return source.sequences.host_lengths if isinstance(source, SequenceColumns) else None


def fitted(source: Source, order: Order) -> tuple[Source, Padding | None]:
    """The source whose batches have the widths that suit this order, and what is padded then; as it is without lengths.

    Widths that the user has given stay.
    """
    lengths = lengths_in(source)
    if lengths is None or source.own_collate:
        return source, None
    longest, sizes = _batches_of(order.epoch(0), lengths)
    beneath = _beneath(source)
    most = rounded(beneath.sequences.longest)
    widths = beneath.sequences.widths or found_widths(longest, sizes, most)
    bounds = np.asarray(widths)
    padded = int((bounds[bounds.searchsorted(longest)] * sizes).sum())
    entries = int(lengths[order.epoch(0).indices.numpy()[: int(sizes.sum())]].sum())
    padding = Padding(widths=widths, entries=entries, padded=padded, at_one_width=int(widths[-1] * sizes.sum()))
    found = _with_widths(source, widths)
    found.given, found.again = source.given, source.again
    return found, padding


def found_widths(longest: Numbers, sizes: Numbers, most: int) -> tuple[int, ...]:
    """The fewest widths, up to `most`, with which batches are padded little more than with as many as there may be.

    `longest` is the longest sequence of each batch, `sizes` how many it holds.
    """
    steps = np.unique([*map(rounded, np.unique(longest).tolist()), most])
    weights = np.bincount(steps.searchsorted(longest), weights=sizes, minlength=len(steps))
    before = np.concatenate([[0.0], np.cumsum(weights)])
    # costs[k][j]: the least that is computed for all batches up to step j, with k + 1 widths of which step j is one.
    costs, cuts = [steps * before[1:]], [np.full(len(steps), -1)]
    for _ in range(min(MOST_WIDTHS, len(steps)) - 1):
        last = costs[-1]
        # With step i as the width before it, step j pads all batches between them.
        table = last[:, None] + steps[None, :] * (before[1:][None, :] - before[1:][:, None])
        table[np.tril_indices(len(steps))] = np.inf
        cuts.append(table.argmin(0))
        costs.append(table.min(0))
    best = min(cost[-1] for cost in costs)
    count = next(number for number, cost in enumerate(costs) if cost[-1] <= (1 + WASTE) * best)
    widths, at = [], len(steps) - 1
    for number in range(count, -1, -1):
        widths.append(int(steps[at]))
        at = int(cuts[number][at])
    return tuple(reversed(widths))


def _batches_of(epoch: Epoch, lengths: Numbers) -> tuple[Numbers, Numbers]:
    """The longest sequence of each batch of an epoch, and how many it holds."""
    ends = epoch.ends
    starts = np.asarray([0, *ends[:-1]])
    in_order = lengths[epoch.indices.numpy()[: ends[-1]]]
    return np.maximum.reduceat(in_order, starts), np.asarray([end - start for start, end in pairwise((0, *ends))])


def _beneath(source: Source) -> SequenceColumns:
    while isinstance(source, Selection):
        source = source.inner
    assert isinstance(source, SequenceColumns)
    return source


def _with_widths(source: Source, widths: tuple[int, ...]) -> Source:
    if isinstance(source, Selection):
        return Selection(_with_widths(source.inner, widths), source.rows)
    assert isinstance(source, SequenceColumns)
    return source.with_widths(widths)
