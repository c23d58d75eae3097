"""Samples of a script's dataset, kept as they come by in the batches of its own loader: none is fetched twice."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.errors import DataError
from hotlap.data.batches import Batch
from hotlap.data.columns import Columns, Selection, tensors_in
from hotlap.data.samples import Source
from hotlap.script.feed.places import Places

MOST_SHARE, SLACK_S = 0.05, 0.05
"""Share of the time by which keeping samples may delay the script, and seconds beside that.

It lasts about one epoch out of three or more: a twentieth of that epoch is less than 2 % of the run.
"""
_Numbers = np.ndarray[Any, np.dtype[np.int64]]
CHUNK = 1024
"""Samples that are fetched at a time, of those that did not come by."""


class Learned:
    """The samples of a dataset, one behind the other as they come by.

    Memory that is written to for the first time costs more than the copy itself. In the order of the dataset, a few
    shuffled batches would touch all of it at once. numpy copies: torch would share each small copy out among threads
    that wait for each other, milliseconds where cores are busy with workers.
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`source` gives each sample the same whenever it is asked, and its batches are plain stacks of samples."""
        self._source, self._clock, self._work_clock = source, clock, work_clock
        self._rooms: list[Tensor] = []
        self._rows = np.full(len(source), -1, np.int64)
        """Where each sample of the dataset lies; -1: it has not come by."""
        self._kept = 0
        self._began, self._delay_s, self._last_s = clock(), 0.0, 0.0
        self.is_over = False
        """Whether nothing more is kept: all is there, or keeping it is too dear or fails."""

    @property
    def missing(self) -> float:
        """Of all samples, the share that has not come by."""
        return 1 - self._kept / max(1, len(self._rows))

    def note(self, places: Places | None, batch: Batch, waited_s: float = 0.0) -> None:
        """Keep the samples of a batch of the script's own loader; `places` is None where it is not known which.

        `waited_s` is how long the script waited for workers to bring the batch. Without the work on the batch before
        it would have waited longer, so that work delayed it by less.
        """
        if self.is_over:
            return
        self._delay_s -= min(waited_s, self._last_s)
        self._last_s = 0.0
        if places is None:
            return
        began = self._work_clock()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._keep(places.host.numpy(), tensors_in(batch))
        except Exception:  # a batch of another shape, an index batch of another kind, or no memory
            self._give_up()
            return
        self._last_s = self._work_clock() - began
        self._delay_s += self._last_s
        if self._delay_s > SLACK_S + MOST_SHARE * (self._clock() - self._began):
            self._give_up()

    def columns(self) -> Selection:
        """All samples; those that did not come by are fetched. Raises DataError where they are unlike the others."""
        absent = np.flatnonzero(self._rows < 0)
        for start in range(0, len(absent), CHUNK):
            some = absent[start : start + CHUNK]
            self._keep(some, self._fetched(some))
        return Selection(Columns(tuple(self._rooms)), torch.from_numpy(self._rows))

    def _fetched(self, places: _Numbers) -> list[Tensor]:
        return tensors_in(default_collate(self._source.aside().read(places.tolist())))

    def _keep(self, places: _Numbers, tensors: list[Tensor]) -> None:
        total, size = len(self._rows), len(places)
        if not self._rooms:
            self._rooms = [torch.empty((total, *t.shape[1:]), dtype=t.dtype, device="cpu") for t in tensors]
        pairs = list(zip(self._rooms, tensors, strict=False))
        alike = all(t.dtype == room.dtype and t.shape == (size, *room.shape[1:]) for room, t in pairs)
        if not alike or len(tensors) != len(self._rooms):
            name = type(self._source.samples).__name__
            raise DataError(f"{name} cannot be held: its samples differ in shape or kind of number")
        if (places < 0).any():
            raise DataError(f"an index batch has {places.min()}; places in the data are counted from 0")
        new = self._new(places)
        end = self._kept + len(new)
        for room, tensor in pairs:
            rows = _as_bytes(tensor)
            _as_bytes(room)[self._kept : end] = rows if len(new) == size else rows[new]
        self._kept, self.is_over = end, end == total

    def _new(self, places: _Numbers) -> _Numbers:
        """Which samples of a batch have not come by, each once; their rows are the next ones."""
        new = np.flatnonzero(self._rows[places] < 0)
        for _ in range(2):
            chosen, rows = places[new], np.arange(self._kept, self._kept + len(new))
            self._rows[chosen] = rows
            is_last = self._rows[chosen] == rows
            if is_last.all():
                break
            new = new[is_last]  # a sampler that draws with replacement may give one twice in a batch
        return new

    def _give_up(self) -> None:
        self._rooms, self._kept, self.is_over = [], 0, True
        self._rows.fill(-1)


def _as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The rows of a tensor as rows of bytes; of one that is contiguous, no copy."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().reshape(len(tensor), -1)
