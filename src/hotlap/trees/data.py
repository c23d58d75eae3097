"""TreeData holds features that are quantised once and shared: by folds, trials, and one fit after the other."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from hotlap.core.errors import JobError, did_you_mean, first_line, library, shown
from hotlap.trees import parameters
from hotlap.trees.files import TreeFiles
from hotlap.trees.parameters import EXTRA, NEEDS

LIBRARIES = ("xgboost", "lightgbm")
LEAST_ROWS = 2
PIECE = 2**24
"""Values that are looked at together."""
Array = np.ndarray[Any, Any]


class TreeData:
    """Features for many jobs, quantised when the first of them trains.

    Its rows keep the bins of the whole table, so that folds need no bins of their own. Several fits may use it at
    once: each that finds it in use gets a copy of the quantised rows.
    """

    def __init__(self, x: Any, *, library: str = "xgboost", params: Mapping[str, Any] | None = None) -> None:
        """`params` are those that decide the bins, such as `max_bin`. Raises JobError with all mistakes."""
        wrong: list[str] = []
        array = features(x, "x", wrong)
        if isinstance(x, TreeFiles):
            wrong.append("TreeFiles are not shared over jobs: give them to TreeJob, or a memmap to TreeData")
        if library not in LIBRARIES:
            wrong.append(f"library={shown(library)} is not known{did_you_mean(library, LIBRARIES)}")
        else:
            wrong += parameters.bin_problems(library, params or {})
        if array is not None and len(array) < LEAST_ROWS:
            wrong.append(f"x has {len(array)} rows; training needs at least {LEAST_ROWS}")
        if wrong or array is None:
            raise JobError(wrong)
        self.x: Array = array
        self.library = library
        self.params = parameters.bins_of(library, params or {})
        """The parameters that decide the bins."""
        self.whole: TreeData = self
        """The table that these rows are of."""
        self.numbers: Array | None = None
        """The numbers of the rows in the whole table; None for all of them."""
        self._begin()

    def rows(self, rows: Any) -> TreeData:
        """Some of the rows, by their numbers or a mask, in rising order; they keep the bins of the whole table."""
        numbers = np.asarray(rows)
        numbers = np.flatnonzero(numbers) if numbers.dtype == bool and numbers.shape == (len(self.x),) else numbers
        sound = numbers.ndim == 1 and numbers.dtype.kind in "iu" and len(numbers)
        if not sound or numbers[0] < 0 or numbers[-1] >= len(self.x) or (np.diff(numbers.astype(np.int64)) <= 0).any():
            raise JobError([f"rows must be numbers from 0 to {len(self.x) - 1} in rising order, or a mask of all rows"])
        part = object.__new__(TreeData)
        part.x, part.library, part.params, part.whole = self.x[numbers], self.library, self.params, self.whole
        part.numbers = numbers if self.numbers is None else self.numbers[numbers]
        part._begin()
        return part

    def _begin(self) -> None:
        self._lock, self._spare = threading.Lock(), list[Any]()
        self._quantised: Any = None
        self._is_lent = False
        """Whether the quantised table itself was lent."""

    def __len__(self) -> int:
        return len(self.x)

    def lend(self, threads: int, *, weighted: bool) -> Any:
        """The quantised rows for one booster at a time: some that were given back, or new ones by the same bins.

        Those that are `weighted` are always new, and not given back: neither library takes weights off again.
        """
        with self._lock:
            if self._spare and not weighted:
                return self._spare.pop()
        whole = self.whole.quantised(threads)
        with self._lock:
            if self.whole is self and not self._is_lent and not weighted:
                self._is_lent = True
                return whole
        if self.library == "xgboost":
            return library("xgboost", NEEDS, EXTRA).QuantileDMatrix(self.x, nthread=threads, ref=whole, **self.params)
        return whole.subset(range(len(self.x)) if self.numbers is None else self.numbers.tolist()).construct()

    def give_back(self, rows: Any) -> None:
        """Keep quantised rows for the next fit."""
        with self._lock:
            self._spare.append(rows)

    def quantised(self, threads: int) -> Any:
        """The quantised table whose bins all others take."""
        with self._lock:
            if self._quantised is None and self.library == "xgboost":
                xgb = library("xgboost", NEEDS, EXTRA)
                self._quantised = xgb.QuantileDMatrix(self.x, nthread=threads, **self.params)
            elif self._quantised is None:
                lgb = library("lightgbm", NEEDS, EXTRA)
                settings = {**self.params, "num_threads": threads, "verbosity": -1}
                table = lgb.Dataset(self.x, label=np.zeros(len(self.x), np.float32), params=settings)
                self._quantised = table.construct()
            return self._quantised


def features(value: Any, name: str, wrong: list[str]) -> Any:
    """Features as a 2-D array of floats, or TreeFiles; None, with the reason in `wrong`, for anything else."""
    if isinstance(value, (TreeData, TreeFiles)):
        return value.x if isinstance(value, TreeData) else value
    try:
        array = np.asarray(value)
        if array.dtype != np.float32:
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        wrong.append(f"{name} must be numbers: {first_line(error)}; code texts and categories as numbers")
        return None
    if array.ndim != 2 or not array.shape[1]:
        wrong.append(f"{name} has the shape {array.shape}; it must be rows × columns")
        return None
    rows = max(1, PIECE // array.shape[1])
    for start in range(0, len(array), rows):  # in pieces: an array may be a file, larger than memory
        infinite = np.isinf(array[start : start + rows])
        if infinite.any():
            row, column = np.argwhere(infinite)[0]
            place = f"the first in row {start + row}, column {column}"
            wrong.append(f"{name} has infinite values, {place}; write NaN for a missing value")
            break
    return np.ascontiguousarray(array)
