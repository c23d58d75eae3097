"""Windows of a long series: stored once as a series, gathered as windows."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hotlap.core.data_checks import dtype_problem
from hotlap.core.errors import DataError, kind_of, listed, shown
from hotlap.core.job_checks import is_whole
from hotlap.data.batches import Batch
from hotlap.data.sources import Allocate, Columns, PlaceRows, Source, as_tensor, holds, select_rows

Series = Tensor | np.ndarray[Any, Any]


class Windows(Dataset[Any]):
    """A dataset of windows (length × features) of one long series or of several, with an optional target.

    Sample k is `series[k * stride : k * stride + length]`. With a list of series, no window crosses from one into the
    next. With `target`, samples are (window, target). A target has a row for each row of the series (a list like the
    series): a window gets the row `ahead` rows after its last. Or it has a row for each window. Without a target,
    `ahead` of 1 or more makes that row of the series the target: a forecast.

    Memory holds the series once, not windows × length; joining several series copies them once. Samples are views.
    Raises DataError with all mistakes.
    """

    def __init__(
        self,
        series: Series | Sequence[Series],
        length: int,
        *,
        target: Series | Sequence[Series] | None = None,
        stride: int = 1,
        ahead: int = 0,
    ) -> None:
        several = list(series) if isinstance(series, (list, tuple)) else [series]
        wrong = [
            *_number_problems(length, stride, ahead),
            *_part_problems("series", several, least_dims=2),
            *([] if target is None else _part_problems("target", target, least_dims=1)),
        ]
        # Only valid parts are compared with each other.
        _refuse(wrong or _fit_problems(several, target, length, stride, ahead))
        counts = _counts(several, length, stride, ahead)
        length, stride, ahead = int(length), int(stride), int(ahead)  # also from numpy integers
        self.length, self.stride, self.ahead = length, stride, ahead
        self.series = _joined(several)
        self.per_window = target is not None and not _is_by_row(several, target)
        """Whether the target has a row for each window, not for each row of the series."""
        self.target: Tensor | None = None
        if target is not None:
            self.target = _joined(target if isinstance(target, (list, tuple)) else [target])
        elif ahead:
            self.target = self.series
        self.starts: Tensor | None = None
        """The first row of each window; None if a window begins every `stride` rows."""
        if len(several) > 1:
            offsets = np.cumsum([0, *(len(one) for one in several[:-1])])
            parts = [int(at) + stride * torch.arange(n) for at, n in zip(offsets, counts, strict=True)]
            self.starts = torch.cat(parts).to(self.series.device)
        self._count = sum(counts)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        at = operator.index(index)
        if not -self._count <= at < self._count:
            raise IndexError(f"window {at} of {self._count}")
        at %= self._count
        start = at * self.stride if self.starts is None else int(self.starts[at])
        window = self.series[start : start + self.length]
        if self.target is None:
            return window
        return window, self.target[at if self.per_window else start + self.length - 1 + self.ahead]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        return [self[index] for index in indices]

    @property
    def stored_columns(self) -> dict[str, Tensor]:
        """The stored inputs of the model and the loss."""
        if self.target is None or self.target is self.series:
            return {"series": self.series}
        return {"series": self.series, "target": self.target}

    def placed(self, place: PlaceRows, rows: Tensor | None) -> Windows:
        """These windows or some of them, each tensor moved by `place`; the series stays whole."""
        other = copy.copy(self)
        other.series = place(self.series, None)
        if self.target is not None:
            shared = self.target is self.series
            other.target = other.series if shared else place(self.target, rows if self.per_window else None)
        if rows is not None:
            starts = self.stride * torch.arange(self._count) if self.starts is None else self.starts
            other.starts, other._count = place(starts, rows), len(rows)
        elif self.starts is not None:
            other.starts = place(self.starts, None)
        return other


class WindowColumns(Columns):
    """Windows gathered as whole batches, out of a view in which windows overlap.

    On a GPU this takes one kernel for the windows and one for the targets, and one more to look up the starts if there
    are several series or a selection of windows.
    """

    packs = False

    def __init__(self, windows: Windows, collate: Callable[[list[Any]], Batch] | None = None) -> None:
        Source.__init__(self, windows, collate)
        self._windows, self._device = windows, windows.series.device
        self.on_host = self._device.type == "cpu"
        self._shape = "" if windows.target is None else "tuple"
        step = windows.stride if windows.starts is None else 1
        self._all = windows.series.unfold(0, windows.length, step).movedim(-1, 1)
        target = windows.target
        if target is not None and not windows.per_window:
            target = target[windows.length - 1 + windows.ahead :: step]
        self._targets = target

    @property
    def tensors(self) -> dict[Any, Tensor]:  # type: ignore[override]
        """Everything that decides the samples: the series and how it is cut."""
        windows = self._windows
        cut = torch.tensor([windows.length, windows.stride, windows.ahead])
        starts = {} if windows.starts is None else {"starts": windows.starts}
        return {**windows.stored_columns, **starts, "cut": cut}

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> Batch:
        return self._windows[index]

    def never_holds(self, value: int) -> bool:
        """Whether no integer target with one number a window holds `value`."""
        target = self._windows.target
        return not self.own_collate and (target is None or not holds(target, value))

    def gather(self, indices: Tensor, allocate: Allocate | None = None) -> Batch:
        """The windows at `indices` as a batch, indexed as a whole."""
        if not self.on_host:
            indices = indices.to(self._device)
        starts = self._windows.starts
        places = indices if starts is None else starts.index_select(0, indices)
        found = select_rows(self._all, places, allocate)
        if self._targets is None:
            return found
        return found, select_rows(self._targets, indices if self._windows.per_window else places, allocate)

    def sent(self, place: PlaceRows, rows: Tensor | None = None) -> Columns:
        """These windows or some of them, series and target moved by `place`."""
        return WindowColumns(self._windows.placed(place, rows))


def _joined(parts: Sequence[Any]) -> Tensor:
    tensors = [as_tensor(part) for part in parts]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _counts(several: Sequence[Any], length: int, stride: int, ahead: int) -> list[int]:
    """The number of windows in each series."""
    return [max(0, (len(one) - length - ahead) // stride + 1) for one in several]


def _is_by_row(several: Sequence[Any], target: Any) -> bool:
    """Whether a valid target has a row for each row of the series."""
    return isinstance(target, (list, tuple)) or (len(several) == 1 and len(target) == len(several[0]))


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise DataError(listed("the windows have", "mistake", wrong))


def _number_problems(length: Any, stride: Any, ahead: Any) -> list[str]:
    return [
        f"{name}={shown(value)} must be a whole number of at least {least}"
        for name, value, least in (("length", length, 1), ("stride", stride, 1), ("ahead", ahead, 0))
        if not is_whole(value) or value < least
    ]


def _part_problems(name: str, parts: Any, *, least_dims: int) -> list[str]:
    """Problems of the series or the targets alone, and of joining them."""
    parts = parts if isinstance(parts, (list, tuple)) else [parts]
    if not parts:
        return [f"{name} is an empty list; give a tensor or an array, or several"]
    found, fit = [], []
    for label, part in _labelled(name, parts):
        problem = _tensor_problem(label, part, least_dims)
        if problem:
            found.append(problem)
        else:
            fit.append((label, part))
    return found + _unlike(fit)


def _fit_problems(several: Sequence[Any], target: Any, length: int, stride: int, ahead: int) -> list[str]:
    """Problems between series, lengths and target."""
    windows = sum(_counts(several, length, stride, ahead))
    if not windows:
        longest, needed = max(len(one) for one in several), length + ahead
        return [f"there is no window: one needs {needed} rows (length + ahead), and the longest series has {longest}"]
    if target is None:
        return []
    if isinstance(target, (list, tuple)):
        if len(target) != len(several):
            return [f"target is a list of {len(target)}, and there are {len(several)} series; give one for each"]
        found = [
            f"{label} has {len(part)} rows, and its series {len(one)}; give one for each row"
            for (label, part), one in zip(_labelled("target", target), several, strict=True)
            if len(part) != len(one)
        ]
        return found + _elsewhere(several, target[0])
    rows = len(target)
    if len(several) == 1 and rows == len(several[0]):
        return _elsewhere(several, target)
    if rows != sum(_counts(several, length, stride, 0)):
        by_row = (
            "a list of them, with a row for each row" if len(several) > 1 else f"{len(several[0])}, one for each row"
        )
        by_window = "" if ahead else f", or {windows}, one for each window"
        return [f"target has {rows} rows; give {by_row} of the series{by_window}"]
    if ahead:
        return [f"ahead={ahead} needs a target with a row for each row of the series; this one has one for each window"]
    return _elsewhere(several, target)


def _labelled(name: str, parts: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(name if len(parts) == 1 else f"{name}[{k}]", part) for k, part in enumerate(parts)]


def _tensor_problem(label: str, value: Any, least_dims: int) -> str | None:
    if not isinstance(value, (Tensor, np.ndarray)):
        return f"{label} is {kind_of(value)}; give a tensor or an array"
    if value.ndim < least_dims:
        wanted = "(time, features), as x[:, None] of one feature" if least_dims > 1 else "at least one dimension"
        return f"{label} has shape {tuple(value.shape)}; give {wanted}"
    return dtype_problem(label, value)


def _unlike(labelled: Sequence[tuple[str, Any]]) -> list[str]:
    """Parts that cannot be joined with the first."""
    if not labelled:
        return []
    name, first = labelled[0]

    def rows_of(one: Any) -> str:
        where = f" on {one.device}" if isinstance(one, Tensor) and one.device.type != "cpu" else ""
        return f"rows of {str(one.dtype).removeprefix('torch.')} {tuple(one.shape[1:])}{where}"

    return [
        f"{label} has {rows_of(one)}, {name} {rows_of(first)}"
        for label, one in labelled[1:]
        if rows_of(one) != rows_of(first)
    ]


def _elsewhere(several: Sequence[Any], target: Any) -> list[str]:
    there, here = (as_tensor(part).device for part in (target, several[0]))
    return [] if there == here else [f"target is on {there} and series on {here}; give both on one"]
