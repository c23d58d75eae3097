"""The samples of a script's loader: fetched in the background or kept as they pass, and held for feeds that gather."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.errors import DataError
from hotlap.core.plan import Feed
from hotlap.core.units import MIB
from hotlap.data.background_fetch import BackgroundFetch, processes_for, shared_s
from hotlap.data.batches import Batch
from hotlap.data.resident import CPU, SENT_A_SECOND, bytes_needed, hold_on_device, packed, time_to_hold, why_not_held
from hotlap.data.sources import Columns, Selection, Source, tensors_in
from hotlap.machine.cuda import usable_bytes
from hotlap.script.feed.feeds import ColumnBatches
from hotlap.script.feed.index_batches import IndexBatch


class HeldSamples:
    """The samples of a source, held for the feeds that gather."""

    def __init__(self, source: Source, device: torch.device, own: Feed) -> None:
        """`own` is the feed of the script's loader, whose batches the others must match."""
        self._source, self._device, self._own = source, device, own
        self.column_batches: ColumnBatches | None = None
        """Makes batches on the host."""
        self.on_device: Source | None = None
        """Gathers the same samples on the GPU."""
        self.kept_samples: KeptSamples | None = None
        """Collects passing samples, so that fewer have to be fetched."""
        self._columns: Source | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[int] = []
        self._most_processes: int | None = None

    def why_not(self, feed: Feed) -> str | None:
        """Why the samples cannot be held for a feed; None if they can."""
        # Memory for kept samples is already allocated.
        if self.column_batches is None and (self.kept_samples is None or self.kept_samples.missing == 1):
            reason = why_not_held(self._source, CPU, reserve_bytes=0)
            if reason is not None:
                return reason
        if feed.kind == "resident" and self.on_device is None:
            return why_not_held(self._source, self._device, reserve_bytes=_reserve_bytes(self._device))
        return None

    def seconds(self, kind: str) -> float:
        """Estimated seconds of `hold` for a kind of feed."""
        source = self._columns or self._source
        if kind == "resident" and self.on_device is not None:
            return 0.0
        if not source.computes:
            return self._time_to_hold(source, self._device) if kind == "resident" else 0.0
        missing = self.kept_samples.missing if self.kept_samples is not None else 1.0
        fetched_s = missing * shared_s(self._alone_s, self._processes)
        return fetched_s + (bytes_needed(source) / SENT_A_SECOND if kind == "resident" else 0.0)

    def learn(self, epochs_left: float = math.inf) -> KeptSamples | None:
        """Collect samples: in the background if cores are free, else as they pass.

        None if less of the training is left than pays for either.
        """
        if self.kept_samples is None:
            in_background = self._processes > 0 and self._processes * epochs_left > MORE_THAN
            if not in_background and epochs_left <= MORE_THAN:
                return None
            self.kept_samples = KeptSamples(self._source)
            if in_background:
                self.kept_samples.fetch(self._processes, self._alone_s)
        return self.kept_samples

    @property
    def _alone_s(self) -> float:
        """Seconds that this process takes to fetch all samples."""
        return self._time_to_hold(self._source, CPU)

    @property
    def _processes(self) -> int:
        """How many processes fetch samples in the background, or may."""
        if self.kept_samples is not None and not self.kept_samples.is_fetched:
            return 0
        if self._most_processes is None:
            self._most_processes = processes_for(self._device, self._alone_s, self._own.workers)
        return self._most_processes

    def hold(self, feed: Feed) -> None:
        """Hold the samples for a feed. Raises DataError if they do not form columns."""
        # The script may be in any mode, and the samples outlive it.
        with torch.inference_mode(False), torch.no_grad():
            if self.column_batches is None:
                like = default_collate(self._source.for_probing().read([0]))
                self._columns = self._source
                if self._source.computes:
                    self._columns = self._as_columns()
                self.column_batches = ColumnBatches(self._columns, like, self._own)
            if feed.kind == "resident" and self.on_device is None:
                assert self._columns is not None
                self._tensors = _tensors_of(self._columns)
                self._versions = [tensor._version for tensor in self._tensors]
                self.on_device = packed(hold_on_device(self._columns, self._device), images_last=False)

    def _as_columns(self) -> Source:
        kept_samples = self.learn() if self._processes else self.kept_samples
        if kept_samples is not None and (kept_samples.missing < 1 or kept_samples.is_fetched):
            columns, self.kept_samples = kept_samples.columns(), None
            return columns
        return Columns(tuple(hold_on_device(self._source, CPU).tensors.values()))

    def is_same(self) -> bool:
        """Whether the samples on the GPU equal those on the host: a script may write to its own tensors."""
        return self.on_device is not None and [tensor._version for tensor in self._tensors] == self._versions

    def tidy(self, feeds: tuple[Feed, ...]) -> None:
        """Release what none of these feeds needs."""
        if not any(feed.kind == "resident" for feed in feeds):
            self.on_device, self._tensors = None, []
        if all(feed.kind == "loader" for feed in feeds):
            self._columns = self.column_batches = self.kept_samples = None

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
    """Bytes to leave free beside resident data: the most that steps took so far, and a tenth of the GPU."""
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return taken + usable_bytes(device) // 10 + 64 * MIB


# --- kept samples ------------------------------------------------------------------------
#
# On a machine with free cores, forked processes fetch all samples in the background. Otherwise hotlap keeps samples as
# they pass in the batches of the script's own loader, so that none is fetched twice.


MOST_SHARE, SLACK_S = 0.05, 0.05
"""Share of the time by which keeping samples may delay the script, and seconds in addition.

It lasts about one epoch out of three or more: a twentieth of that epoch is less than 2 % of the run.
"""
MORE_THAN = 2
"""Epochs that must be left for passing samples to be worth keeping; with processes, in the time of all of them."""
_Numbers = np.ndarray[Any, np.dtype[np.int64]]
CHUNK = 1024
"""Samples to fetch at a time, of those that did not pass."""


class KeptSamples:
    """The samples of a dataset, in the order in which they pass, or fetched in the background in the dataset's order.

    The first write to memory costs more than the copy itself. In dataset order, a few shuffled batches would touch all
    of it at once. numpy makes the copies: torch would split each small copy over threads, which wait for each other for
    milliseconds while workers keep the cores busy.
    """

    def __init__(
        self,
        source: Source,
        *,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`source` always gives the same samples, and its batches are plain stacks of them."""
        self._source, self._clock, self._work_clock = source, clock, work_clock
        self._kept_columns: list[Tensor] = []
        self._rows = np.full(len(source), -1, np.int64)
        """The row of each sample of the dataset; -1: it has not passed."""
        self._kept = 0
        self._began, self._delay_s, self._last_s = clock(), 0.0, 0.0
        self._is_over = False
        self._background: BackgroundFetch | None = None

    @property
    def missing(self) -> float:
        """The share of samples that are not here."""
        if self._background is not None and not self._background.has_failed:
            return self._background.missing
        return 1 - self._kept / max(1, len(self._rows))

    @property
    def is_over(self) -> bool:
        """Whether nothing more is kept: all samples are there, or keeping them costs too much or fails."""
        return self._is_over or (self._background is not None and self._background.is_done)

    @property
    def is_fetched(self) -> bool:
        """Whether processes fetch the samples in the background, or have done so."""
        return self._background is not None and (self._background.is_done or not self._background.has_failed)

    def fetch(self, processes: int, expected_s: float) -> None:
        """Have processes fetch all samples; where they fail, samples are kept as they pass."""
        source = self._source.for_probing()

        def batch(positions: Sequence[int]) -> Batch:
            return default_collate(source.read(positions))

        with suppress(Exception), torch.inference_mode(False), torch.no_grad():  # no memory, or no more processes
            like = tensors_in(batch([0]))
            self._background = BackgroundFetch(
                lambda positions: tensors_in(batch(positions)),
                like,
                len(self._source),
                processes=processes,
                expected_s=expected_s,
            )

    def note(self, index_batch: IndexBatch | None, batch: Batch, waited_s: float = 0.0) -> None:
        """Keep the samples of a batch of the script's own loader; `index_batch` is None if their indices are unknown.

        `waited_s` is how long the script waited for workers to bring the batch. Work on the batch before shortened that
        wait, so it delayed the script by less.
        """
        if self._is_over or self.is_fetched:
            return
        self._delay_s -= min(waited_s, self._last_s)
        self._last_s = 0.0
        if index_batch is None:
            return
        began = self._work_clock()
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._keep(index_batch.host.numpy(), tensors_in(batch))
        except Exception:  # another shape, an unknown kind of index batch, or no memory
            self._give_up()
            return
        self._last_s = self._work_clock() - began
        self._delay_s += self._last_s
        if self._delay_s > SLACK_S + MOST_SHARE * (self._clock() - self._began):
            self._give_up()

    def columns(self) -> Source:
        """All samples; fetches those that did not pass. Raises DataError if they differ in form from the others."""
        if self._background is not None and self._background.wait():
            return Columns(tuple(self._background.columns))
        absent = np.flatnonzero(self._rows < 0)
        for start in range(0, len(absent), CHUNK):
            some = absent[start : start + CHUNK]
            self._keep(some, self._fetched(some))
        return Selection(Columns(tuple(self._kept_columns)), torch.from_numpy(self._rows))

    def _fetched(self, positions: _Numbers) -> list[Tensor]:
        return tensors_in(default_collate(self._source.for_probing().read(positions.tolist())))

    def _keep(self, positions: _Numbers, tensors: list[Tensor]) -> None:
        total, size = len(self._rows), len(positions)
        if not self._kept_columns:
            self._kept_columns = [torch.empty((total, *t.shape[1:]), dtype=t.dtype, device="cpu") for t in tensors]
        pairs = list(zip(self._kept_columns, tensors, strict=False))
        alike = all(t.dtype == column.dtype and t.shape == (size, *column.shape[1:]) for column, t in pairs)
        if not alike or len(tensors) != len(self._kept_columns):
            name = type(self._source.samples).__name__
            raise DataError(f"{name} cannot be held: its samples differ in shape or dtype")
        if (positions < 0).any():
            raise DataError(f"an index batch has {positions.min()}; indices must not be negative")
        new = self._new(positions)
        end = self._kept + len(new)
        for column, tensor in pairs:
            rows = _as_bytes(tensor)
            _as_bytes(column)[self._kept : end] = rows if len(new) == size else rows[new]
        self._kept, self._is_over = end, end == total

    def _new(self, positions: _Numbers) -> _Numbers:
        """Which samples of a batch have not passed yet, each once; they get the next rows."""
        new = np.flatnonzero(self._rows[positions] < 0)
        for _ in range(2):
            chosen, rows = positions[new], np.arange(self._kept, self._kept + len(new))
            self._rows[chosen] = rows
            is_last = self._rows[chosen] == rows
            if is_last.all():
                break
            new = new[is_last]  # sampling with replacement may draw a sample twice in a batch
        return new

    def _give_up(self) -> None:
        self._kept_columns, self._kept, self._is_over = [], 0, True
        self._rows.fill(-1)


def _as_bytes(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The rows of a tensor as rows of bytes; no copy if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().reshape(len(tensor), -1)
