"""Sequences of several lengths: stored joined, batched by length, padded to a few widths."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hotlap.core.data_checks import dtype_problem
from hotlap.core.errors import DataError, kind_of, listed, shown
from hotlap.core.job_checks import is_whole
from hotlap.data.batches import Batch
from hotlap.data.order import Epoch, Order, mix
from hotlap.data.sources import Allocate, Columns, PlaceRows, Selection, Source, as_tensor, holds, select_rows

MULTIPLE = 8
"""Widths are multiples of it, which suits tensor cores and attention kernels."""
Numbers = np.ndarray[Any, Any]


class Sequences(Dataset[Any]):
    """A dataset of sequences: of tokens, or of vectors; each batch is a dict in which they are padded to one width.

        data = Sequences({"input_ids": ids}, columns={"labels": labels})

    Each of `fields` is a list with a sequence for each sample; or all sequences joined, with `offsets` of their starts
    and the end as the last number. All fields of a sample have the same length. `columns` have a row for each sample.
    A batch holds the fields, padded with `pad` (a number, or one for each field), the columns, and a mask with 1 for
    each entry that is not padding, under the name `mask` (None for no mask).

    The width of a batch is the smallest of `widths` that fits its longest sequence; without `widths`, hotlap chooses
    them from the data. Integers are stored in 32 bits if they fit, and come as int64. Raises DataError with all
    mistakes.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        *,
        columns: Mapping[str, Any] | None = None,
        offsets: Any = None,
        pad: float | Mapping[str, float] = 0,
        mask: str | None = "attention_mask",
        widths: Sequence[int] | None = None,
    ) -> None:
        _refuse(_outer_problems(fields, columns, pad))
        columns = {name: _as_column(column) for name, column in (columns or {}).items()}
        counted = {name: _lengths(name, field, offsets) for name, field in fields.items()}
        _refuse([said for said in counted.values() if isinstance(said, str)])
        lengths = {name: said for name, said in counted.items() if not isinstance(said, str)}
        _refuse(_fit_problems(lengths, columns))
        self.host_lengths: Numbers = next(iter(lengths.values()))
        """The length of each sequence, always on the host."""
        _refuse([problem for name, field in fields.items() if (problem := _kind_problem(name, field))])
        self.fields = {name: _joined(field) for name, field in fields.items()}
        """The joined sequences of each field."""
        self.columns = columns
        self.pad = {name: pad[name] if isinstance(pad, Mapping) else pad for name in fields}
        whole = [name for name, field in self.fields.items() if not field.is_floating_point()]
        _refuse(
            [
                f"pad={self.pad[name]} must be a whole number, like field {name!r}"
                for name in whole
                if self.pad[name] % 1
            ]
        )
        self.mask = mask if mask not in fields else None
        self.longest = int(self.host_lengths.max())
        _refuse(_width_problems(widths, self.longest))
        self.widths = tuple(map(int, widths)) if widths is not None else None
        device = next(iter(self.fields.values())).device
        self.lengths = torch.from_numpy(self.host_lengths).to(device)
        ends = np.cumsum(self.host_lengths)
        self.starts = torch.from_numpy(ends - self.host_lengths).to(device)
        """The start of each sequence in its field."""

    def __len__(self) -> int:
        return len(self.host_lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"sequence {at} of {len(self)}")
        at %= len(self)
        start = int(self.starts[at])
        end = start + int(self.host_lengths[at])
        found = {name: _wide(field[start:end]) for name, field in self.fields.items()}
        return found | {name: column[at] for name, column in self.columns.items()}

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        return [self[index] for index in indices]

    @property
    def stored_columns(self) -> dict[str, Tensor]:
        """The stored inputs of the model and the loss."""
        return {**self.fields, **self.columns}

    def placed(self, place: PlaceRows, rows: Tensor | None) -> Sequences:
        """These sequences or some rows, each tensor moved by `place`; the joined fields stay whole."""
        other = copy.copy(self)
        other.fields = {name: place(field, None) for name, field in self.fields.items()}
        other.columns = {name: place(column, rows) for name, column in self.columns.items()}
        other.starts, other.lengths = place(self.starts, rows), place(self.lengths, rows)
        if rows is not None:
            other.host_lengths = self.host_lengths[rows.cpu().numpy()]
        return other


class SequenceColumns(Columns):
    """Sequences gathered as whole batches: on a GPU by a few kernels, which also pad them and make the mask.

    Indices on the host decide the width of a batch; for others, call `at_width_of` first.
    """

    packs = False

    def __init__(
        self,
        sequences: Sequences,
        collate: Callable[[list[Any]], Batch] | None = None,
        *,
        widths: Sequence[int] | None = None,
        width: int | None = None,
    ) -> None:
        Source.__init__(self, sequences, collate)
        self.sequences, self._width = sequences, width
        self._device = sequences.starts.device
        self.on_host = self._device.type == "cpu"
        self._shape = "dict"
        self.widths = tuple(widths or sequences.widths or [round_up(sequences.longest)])
        """The widths of batches; the last one fits the longest sequence."""
        self._bounds = np.asarray(self.widths)
        self._places = torch.arange(self.widths[-1], device=self._device)
        self._views: dict[int, SequenceColumns] = {}
        self._all: ReferenceType[SequenceColumns] | None = None
        """The columns of which this is a view, or None.

        A weak reference: a cycle would keep GPU memory until garbage collection.
        """

    @property
    def tensors(self) -> dict[Any, Tensor]:  # type: ignore[override]
        """Everything that decides the samples: the joined sequences, their starts and lengths, and the widths."""
        data = self.sequences
        cut = {"starts": data.starts, "lengths": data.lengths, "widths": torch.tensor(self.widths)}
        return {**{("field", name): field for name, field in data.fields.items()}, **data.columns, **cut}

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> Batch:
        return self.sequences[index]

    def never_holds(self, value: int) -> bool:
        """Whether no integer column or field holds `value`, nor as padding."""
        data = self.sequences
        fields = ((field, data.pad[name]) for name, field in data.fields.items() if not field.is_floating_point())
        return not (
            self.own_collate
            or any(holds(column, value) for column in data.columns.values())
            or any(pad == value or bool((field == value).any()) for field, pad in fields)
        )

    def with_widths(self, widths: Sequence[int]) -> SequenceColumns:
        """The same sequences with other widths of batches."""
        return SequenceColumns(self.sequences, self.own_collate, widths=widths)

    def width_of(self, indices: Tensor) -> int:
        """The width of a batch of these sequences; the indices are on the host."""
        longest = self.sequences.host_lengths[indices.numpy()].max()
        return self.widths[int(self._bounds.searchsorted(longest))]

    def at_width_of(self, indices: Tensor) -> Columns:
        """The columns whose batches have the width of these samples; the same object for each width."""
        return self._view(self.width_of(indices))

    @property
    def widest(self) -> Columns:
        """The columns whose batches have the largest width."""
        whole = self._all() if self._all is not None else self
        return whole._view(self.widths[-1]) if whole is not None else self

    def _view(self, width: int) -> SequenceColumns:
        if width not in self._views:
            made = SequenceColumns(self.sequences, self.own_collate, widths=self.widths, width=width)
            made._all = ref(self)
            self._views[width] = made
        return self._views[width]

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The sequences at `indices` as a batch, padded to one width."""
        data, width = self.sequences, self._width or self.width_of(indices)
        if not self.on_host:
            indices = indices.to(self._device)
        places, lengths = self._places[:width], data.lengths.index_select(0, indices)
        is_padding = places >= lengths.unsqueeze(1)
        at = (data.starts.index_select(0, indices).unsqueeze(1) + places).masked_fill(is_padding, 0).view(-1)
        found: dict[str, Tensor] = {}
        for name, field in data.fields.items():
            rest = field.shape[1:]
            values = _wide(field.index_select(0, at)).view(-1, width, *rest)
            found[name] = values.masked_fill(is_padding.view(-1, width, *(1 for _ in rest)), data.pad[name])
        if data.mask is not None:
            found[data.mask] = is_padding.logical_not().to(torch.int64)
        if allocate is not None:
            found = {name: allocate(tuple(part.shape), part.dtype).copy_(part) for name, part in found.items()}
        return found | {name: select_rows(column, indices, allocate) for name, column in data.columns.items()}

    def fetch(self, tickets: Sequence[int], seed: int, epoch: int) -> Batch:
        """The samples of these tickets; one by one if the job has a collate function."""
        if self.own_collate:
            return Source.fetch(self, tickets, seed, epoch)
        return self.gather(torch.tensor([ticket % len(self) for ticket in tickets]))

    def sent(self, place: PlaceRows, rows: Tensor | None = None) -> Columns:
        """These sequences or some rows, each tensor moved by `place`."""
        return SequenceColumns(self.sequences.placed(place, rows), widths=self.widths)


def round_up(length: int) -> int:
    """The smallest multiple of `MULTIPLE` that fits this length."""
    return -(-length // MULTIPLE) * MULTIPLE


def _wide(field: Tensor) -> Tensor:
    """Integers as int64, as models take them."""
    return field.to(torch.int64) if field.dtype in _NARROW else field


_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


# --- what was given ----------------------------------------------------------------------------------


def _as_column(column: Any) -> Tensor:
    return as_tensor(column) if isinstance(column, (Tensor, np.ndarray)) else torch.as_tensor(column)


def _joined(field: Any) -> Tensor:
    """The joined sequences of a field; integers in 32 bits if they fit."""
    if isinstance(field, (Tensor, np.ndarray)):
        found = as_tensor(field)
    elif isinstance(field[0], (Tensor, np.ndarray)):
        found = torch.cat([as_tensor(one) for one in field])
    else:
        found = torch.from_numpy(np.asarray(list(chain.from_iterable(field))))
        found = found.to(torch.float32) if found.dtype == torch.float64 else found
    if found.dtype == torch.int64 and found.numel():
        low, high = (int(bound) for bound in found.aminmax())
        found = found.to(torch.int32) if low >= -(2**31) and high < 2**31 else found
    return found


def _lengths(name: str, field: Any, offsets: Any) -> Numbers | str:
    """The length of each sequence of a field, or the problem with them."""
    if isinstance(field, (Tensor, np.ndarray)):
        if offsets is None:
            return f"field {name!r} is {kind_of(field)}, whose sequences hotlap cannot separate; give offsets too"
        bounds = np.asarray(offsets.cpu() if isinstance(offsets, Tensor) else offsets)
        right = bounds.ndim == 1 and bounds.dtype.kind in "iu" and len(bounds) > 1
        if not right or bounds[0] != 0 or bounds[-1] != len(field) or (np.diff(bounds) < 0).any():
            return f"offsets must rise from 0 to the {len(field):,} entries of field {name!r}"
        found = np.diff(bounds).astype(np.int64)
    else:
        found = np.fromiter((len(one) for one in field), dtype=np.int64, count=len(field))
    if not len(found):
        return f"field {name!r} is empty"
    empty = np.flatnonzero(found == 0)
    if len(empty):
        return f"sequence {empty[0]} of field {name!r} is empty (in all {len(empty)}); leave such samples out"
    return found


def _outer_problems(fields: Any, columns: Any, pad: Any) -> list[str]:
    if not isinstance(fields, Mapping) or not fields:
        return [f"fields must be sequences by name, as {{'input_ids': [[5, 9, 2], …]}}, not {kind_of(fields)}"]
    found = []
    for name, field in fields.items():
        if not isinstance(field, (Tensor, np.ndarray, Sequence)) or isinstance(field, str):
            found.append(f"field {name!r} is {kind_of(field)}; give a list with a sequence for each sample")
        elif not isinstance(field, (Tensor, np.ndarray)) and field and not hasattr(field[0], "__len__"):
            found.append(f"field {name!r} is a list of {kind_of(field[0])}, …; give a list of sequences")
    if columns is not None and not isinstance(columns, Mapping):
        found.append(f"columns must be tensors or arrays by name, not {kind_of(columns)}")
    elif columns:
        found += [f"{name!r} is a field and a column" for name in columns if name in fields]
    if isinstance(pad, Mapping):
        found += [f"pad has no number for field {name!r}" for name in fields if name not in pad]
    elif not isinstance(pad, (int, float)) or isinstance(pad, bool):
        found.append(f"pad={shown(pad)} must be a number, or one for each field")
    return found


def _fit_problems(lengths: Mapping[str, Numbers], columns: Mapping[str, Tensor]) -> list[str]:
    (first, mine), *others = lengths.items()
    found = []
    for name, theirs in others:
        if len(theirs) != len(mine):
            found.append(f"field {name!r} has {len(theirs):,} sequences, {first!r} {len(mine):,}")
        elif (theirs != mine).any():
            at = int(np.flatnonzero(theirs != mine)[0])
            found.append(f"sequence {at} has {mine[at]} entries in field {first!r} and {theirs[at]} in {name!r}")
    for name, column in columns.items():
        if not column.ndim or len(column) != len(mine):
            has = f"{len(column):,} rows" if column.ndim else "no rows"
            found.append(f"column {name!r} has {has}, and there are {len(mine):,} sequences")
        elif problem := dtype_problem(f"column {name!r}", column):
            found.append(problem)
    return found


def _kind_problem(name: str, field: Any) -> str | None:
    """The problem with the entries of a field, or None."""
    if isinstance(field, (Tensor, np.ndarray)):
        return dtype_problem(f"field {name!r}", field)
    for at, one in enumerate(field):
        if isinstance(one, (Tensor, np.ndarray)):
            problem = dtype_problem(f"sequence {at} of field {name!r}", one)
        else:
            wrong = next((entry for entry in one if not isinstance(entry, (int, float, np.number))), None)
            problem = None if wrong is None else f"sequence {at} of field {name!r} holds {shown(wrong)}; give numbers"
        if problem:
            return problem
    return None


def _width_problems(widths: Any, longest: int) -> list[str]:
    if widths is None:
        return []
    listed_widths = list(widths) if isinstance(widths, Sequence) and not isinstance(widths, str) else []
    if not listed_widths or not all(is_whole(width) and width > 0 for width in listed_widths):
        return [f"widths={shown(widths)} must be whole numbers above 0"]
    if any(a >= b for a, b in pairwise(listed_widths)):
        return [f"widths={shown(widths)} must rise"]
    if listed_widths[-1] < longest:
        return [f"the largest width is {listed_widths[-1]}, and the longest sequence has {longest} entries"]
    return []


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise DataError(listed("the sequences have", "mistake", wrong))


MOST_WIDTHS = 12
"""Widths at most: hotlap captures or compiles each of them separately."""
WASTE = 0.02
"""Fewer widths may cost this much more computation."""
WINDOW = 50
"""Batches whose samples hotlap sorts by length together."""
MIXED = 8
"""Consecutive batches that together cover all lengths."""


@dataclass(frozen=True, kw_only=True)
class Padding:
    """The share of padding in an epoch."""

    widths: tuple[int, ...]
    entries: int
    """Entries of the sequences."""
    padded: int
    """Entries with padding."""
    at_one_width: int
    """Entries if every batch had the width of the longest sequence."""

    @property
    def share(self) -> float:
        """The share of padding in the model's inputs."""
        return 1 - self.entries / self.padded

    @property
    def share_at_one_width(self) -> float:
        """The share of padding at a single width."""
        return 1 - self.entries / self.at_one_width

    @property
    def line(self) -> str:
        """A summary in one line."""
        widths = f"{len(self.widths)} widths ({', '.join(map(str, self.widths))})"
        if len(self.widths) == 1:
            return f"all batches are {self.widths[0]} wide, {self.share:.0%} of which is padding"
        return (
            f"{widths}: {self.share:.0%} of a batch is padding, instead of {self.share_at_one_width:.0%} at one width"
        )


class LengthOrder(Order):
    """Shuffled with samples of similar length in each batch; from seed and epoch, like every order.

    hotlap sorts the samples of `WINDOW` shuffled batches by length and cuts new batches. It shuffles these so that each
    `MIXED` consecutive batches cover all lengths from short to long: timings over some steps then do not depend on the
    place in the epoch. The last, shorter batch of an epoch is drawn from all samples.
    """

    def __init__(self, lengths: Numbers, *, batch_size: int, **settings: Any) -> None:
        super().__init__(len(lengths), batch_size=batch_size, shuffled=True, **settings)
        self._lengths = lengths

    def _indices(self, epoch: int) -> Tensor:
        order, size = super()._indices(epoch).numpy(), self._batch_size
        whole = len(order) - len(order) % size
        windows = np.arange(whole) // (WINDOW * size)
        # By window, then by length; samples of equal length keep their drawn order.
        batches = order[:whole][np.lexsort((self._lengths[order[:whole]], windows))].reshape(-1, size)
        mixed = self._mixed(batches, np.random.default_rng(mix(self._seed, epoch, 1)))
        return torch.from_numpy(np.concatenate([mixed.reshape(-1), order[whole:]]))

    def _mixed(self, batches: Numbers, chance: np.random.Generator) -> Numbers:
        """The batches in an order that alternates short and long ones."""
        count = len(batches)
        by_length = np.lexsort((chance.random(count), self._lengths[batches].max(axis=1, initial=0)))
        row = np.empty(count, dtype=np.int64)
        for part in np.array_split(by_length, MIXED):
            row[part] = chance.permutation(len(part))
        return batches[np.lexsort((chance.random(count), row))]


def lengths_in(source: Source) -> Numbers | None:
    """The length of each sample; None if samples are not sequences."""
    if isinstance(source, Selection):
        inner = lengths_in(source.inner)
        return None if inner is None else inner[source.rows.numpy()]
    return source.sequences.host_lengths if isinstance(source, SequenceColumns) else None


def with_chosen_widths(source: Source, order: Order) -> tuple[Source, Padding | None]:
    """The source with widths that suit this order, and its padding; unchanged for samples without lengths.

    Widths from the user stay.
    """
    lengths = lengths_in(source)
    if lengths is None or source.own_collate:
        return source, None
    longest, sizes = _batches_of(order.epoch(0), lengths)
    beneath = _columns_beneath(source)
    most = round_up(beneath.sequences.longest)
    widths = beneath.sequences.widths or choose_widths(longest, sizes, most)
    bounds = np.asarray(widths)
    padded = int((bounds[bounds.searchsorted(longest)] * sizes).sum())
    entries = int(lengths[order.epoch(0).indices.numpy()[: int(sizes.sum())]].sum())
    padding = Padding(widths=widths, entries=entries, padded=padded, at_one_width=int(widths[-1] * sizes.sum()))
    found = _with_widths(source, widths)
    found.given, found.reopen = source.given, source.reopen
    return found, padding


def choose_widths(longest: Numbers, sizes: Numbers, most: int) -> tuple[int, ...]:
    """The fewest widths, up to `most`, that need hardly more padding than `MOST_WIDTHS` of them.

    `longest` is the longest sequence of each batch, `sizes` the size of each batch.
    """
    steps = np.unique([*map(round_up, np.unique(longest).tolist()), most])
    weights = np.bincount(steps.searchsorted(longest), weights=sizes, minlength=len(steps))
    before = np.concatenate([[0.0], np.cumsum(weights)])
    # costs[k][j]: the least computation for all batches up to step j, with k + 1 widths of which step j is the last.
    costs, cuts = [steps * before[1:]], [np.full(len(steps), -1)]
    for _ in range(min(MOST_WIDTHS, len(steps)) - 1):
        last = costs[-1]
        # With step i as the previous width, step j pads all batches between them.
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
    """The longest sequence of each batch of an epoch, and the size of each batch."""
    ends = epoch.ends
    starts = np.asarray([0, *ends[:-1]])
    in_order = lengths[epoch.indices.numpy()[: ends[-1]]]
    return np.maximum.reduceat(in_order, starts), np.asarray([end - start for start, end in pairwise((0, *ends))])


def _columns_beneath(source: Source) -> SequenceColumns:
    while isinstance(source, Selection):
        source = source.inner
    assert isinstance(source, SequenceColumns)
    return source


def _with_widths(source: Source, widths: tuple[int, ...]) -> Source:
    if isinstance(source, Selection):
        return Selection(_with_widths(source.inner, widths), source.rows)
    assert isinstance(source, SequenceColumns)
    return source.with_widths(widths)
