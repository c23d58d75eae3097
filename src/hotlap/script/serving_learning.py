"""Samples of a script's dataset, kept as they come by in the batches of its own loader: none is fetched twice."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.errors import DataError
from hotlap.data.batches import Batch
from hotlap.data.columns import Columns, tensors_in
from hotlap.data.samples import Source
from hotlap.script.serving_places import Places

MOST_SHARE, SLACK_S = 0.02, 0.05
"""Of the time between batches, what keeping them may take, beside so many seconds."""
CHUNK = 1024
"""Samples that are fetched at a time, of those that did not come by."""


class Learned:
    """The columns of a dataset, filled in by batches in any order."""

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
        self._is_known = torch.zeros(len(source), dtype=torch.bool, device="cpu")
        self._known = 0
        self._began, self._spent_s = clock(), 0.0
        self.is_over = False
        """Whether nothing more is kept: all is there, or keeping it is too dear or fails."""

    @property
    def missing(self) -> float:
        """Of all samples, the share that has not come by."""
        return 1 - self._known / max(1, len(self._is_known))

    def note(self, places: Places | None, batch: Batch) -> None:
        """Keep the samples of a batch of the script's own loader; `places` is None where it is not known which."""
        if self.is_over or places is None:
            return
        began = self._work_clock()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._keep(places.host, tensors_in(batch))
        except Exception:  # a batch of another shape, an index batch of another kind, or no memory
            self._give_up()
            return
        self._spent_s += self._work_clock() - began
        if self._spent_s > SLACK_S + MOST_SHARE * (self._clock() - self._began):
            self._give_up()

    def columns(self) -> Columns:
        """All samples; those that did not come by are fetched. Raises DataError where they are unlike the others."""
        absent = (~self._is_known).nonzero().flatten()
        for start in range(0, len(absent), CHUNK):
            some = absent[start : start + CHUNK]
            self._keep(some, self._fetched(some))
        return Columns(tuple(self._rooms))

    def _fetched(self, places: Tensor) -> list[Tensor]:
        return tensors_in(default_collate(self._source.aside().read(places.tolist())))

    def _keep(self, places: Tensor, tensors: list[Tensor]) -> None:
        if not self._rooms:
            total = len(self._is_known)
            self._rooms = [torch.empty((total, *t.shape[1:]), dtype=t.dtype, device="cpu") for t in tensors]
        pairs = list(zip(self._rooms, tensors, strict=False))
        alike = all(t.dtype == room.dtype and t.shape == (len(places), *room.shape[1:]) for room, t in pairs)
        if not alike or len(tensors) != len(self._rooms):
            name = type(self._source.samples).__name__
            raise DataError(f"{name} cannot be held: its samples differ in shape or kind of number")
        for room, tensor in pairs:
            room.index_copy_(0, places, tensor.detach())
        self._is_known[places] = True
        self._known = int(self._is_known.sum())
        self.is_over = self._known == len(self._is_known)

    def _give_up(self) -> None:
        self._rooms, self._known, self.is_over = [], 0, True
        self._is_known.zero_()
