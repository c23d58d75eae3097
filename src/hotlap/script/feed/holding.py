"""Samples of a script's dataset held as columns, on the host and on the device, so that batches are gathered."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.errors import DataError
from hotlap.core.plan import Feed
from hotlap.core.units import MIB
from hotlap.data.batches import Batch
from hotlap.data.resident import CPU, SENT_A_SECOND, bytes_needed, hold_on_device, packed, time_to_hold, why_not_held
from hotlap.data.sources import Columns, Selection, Source, tensors_in
from hotlap.machine.cuda import usable_bytes
from hotlap.script.feed.feeds import Columned
from hotlap.script.feed.indices import Places


class Holding:
    """What of a source is held, for the feeds that gather."""

    def __init__(self, source: Source, device: torch.device, own: Feed) -> None:
        """`own` is the feed of the script's loader, whose batches others have to be like."""
        self._source, self._device, self._own = source, device, own
        self.columned: Columned | None = None
        """Makes batches on the host."""
        self.there: Source | None = None
        """Gathers the same samples on the device."""
        self.learned: Learned | None = None
        """Keeps samples as they come by, so that fewer have to be fetched."""
        self._columns: Source | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []

    def why_not(self, feed: Feed) -> str | None:
        """Why the samples cannot be held as a feed needs them, or None where they can."""
        if self.columned is None and (self.learned is None or self.learned.missing == 1):  # else it has its memory
            reason = why_not_held(self._source, CPU, reserve_bytes=0)
            if reason is not None:
                return reason
        if feed.kind == "resident" and self.there is None:
            return why_not_held(self._source, self._device, reserve_bytes=_reserve_bytes(self._device))
        return None

    def seconds(self, kind: str) -> float:
        """About how long `hold` takes for a kind of feed."""
        source = self._columns or self._source
        if kind == "resident" and self.there is not None:
            return 0.0
        device = self._device if kind == "resident" else CPU
        if self.learned is not None and source.computes:
            sent_s = bytes_needed(source) / SENT_A_SECOND if kind == "resident" else 0.0
            return self.learned.missing * self._time_to_hold(source, CPU) + sent_s
        return self._time_to_hold(source, device) if source.computes or kind == "resident" else 0.0

    def learn(self) -> Learned:
        """Keep samples as they come by, from now on or already."""
        if self.learned is None:
            self.learned = Learned(self._source)
        return self.learned

    def hold(self, feed: Feed) -> None:
        """Hold the samples as a feed needs them. Raises DataError where they turn out to be no columns."""
        # The script may be in any mode, and what is held outlives it.
        with torch.inference_mode(False), torch.no_grad():
            if self.columned is None:
                like = default_collate(self._source.for_probing().read([0]))
                self._columns = self._source
                if self._source.computes:
                    self._columns = self._as_columns()
                self.columned = Columned(self._columns, like, self._own)
            if feed.kind == "resident" and self.there is None:
                assert self._columns is not None
                self._tensors = _tensors_of(self._columns)
                self._versions = [tensor._version for tensor in self._tensors]
                self.there = packed(hold_on_device(self._columns, self._device), images_last=False)

    def _as_columns(self) -> Source:
        if self.learned is not None and self.learned.missing < 1:
            columns, self.learned = self.learned.columns(), None
            return columns
        return Columns(tuple(hold_on_device(self._source, CPU).tensors.values()))

    def is_same(self) -> bool:
        """Whether what is held on the device is what the host has: a script may write to its own tensors."""
        return self.there is not None and [tensor._version for tensor in self._tensors] == self._versions

    def tidy(self, feeds: tuple[Feed, ...]) -> None:
        """Let go of what none of these feeds needs."""
        if not any(feed.kind == "resident" for feed in feeds):
            self.there, self._tensors = None, []
        if all(feed.kind == "loader" for feed in feeds):
            self._columns = self.columned = self.learned = None

    def _time_to_hold(self, source: Source, device: torch.device) -> float:
        name = f"time to hold on {device}"
        if name not in source.findings:
            source.findings[name] = time_to_hold(source, device)
        return float(source.findings[name])


def _tensors_of(source: Source) -> list[Tensor]:
    """The tensors that samples are gathered from."""
    while isinstance(source, Selection):
        source = source.inner
    return list(source.tensors.values()) if isinstance(source, Columns) else []


def _reserve_bytes(device: torch.device) -> int:
    """Bytes to leave free beside resident data: what steps took at most so far, and a tenth of the GPU for all else."""
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return taken + usable_bytes(device) // 10 + 64 * MIB


# --- samples that are kept as they come by ---------------------------------------------------------------
#
# Samples of a script's dataset, kept as they come by in the batches of its own loader: none is fetched twice.


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
        return tensors_in(default_collate(self._source.for_probing().read(places.tolist())))

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
