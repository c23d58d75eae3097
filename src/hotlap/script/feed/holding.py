"""Samples of a script's dataset held as columns, on the host and on the device, so that batches are gathered."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hotlap.core.plan import Feed
from hotlap.core.units import MIB
from hotlap.data.columns import Columns, Selection
from hotlap.data.holding import HOST, SENT_A_SECOND, bytes_needed, held, time_to_hold, why_not_held
from hotlap.data.resident import packed
from hotlap.data.samples import Source
from hotlap.machine.cuda import usable_bytes
from hotlap.script.feed.feeds import Columned
from hotlap.script.feed.learning import Learned


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
            reason = why_not_held(self._source, HOST, reserve_bytes=0)
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
        device = self._device if kind == "resident" else HOST
        if self.learned is not None and source.computes:
            sent_s = bytes_needed(source) / SENT_A_SECOND if kind == "resident" else 0.0
            return self.learned.missing * self._time_to_hold(source, HOST) + sent_s
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
                like = default_collate(self._source.aside().read([0]))
                self._columns = self._source
                if self._source.computes:
                    self._columns = self._as_columns()
                self.columned = Columned(self._columns, like, self._own)
            if feed.kind == "resident" and self.there is None:
                assert self._columns is not None
                self._tensors = _tensors_of(self._columns)
                self._versions = [tensor._version for tensor in self._tensors]
                self.there = packed(held(self._columns, self._device), images_last=False)

    def _as_columns(self) -> Source:
        if self.learned is not None and self.learned.missing < 1:
            columns, self.learned = self.learned.columns(), None
            return columns
        return Columns(tuple(held(self._source, HOST).tensors.values()))

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
        if name not in source.probed:
            source.probed[name] = time_to_hold(source, device)
        return float(source.probed[name])


def _tensors_of(source: Source) -> list[Tensor]:
    """The tensors that samples are gathered from."""
    while isinstance(source, Selection):
        source = source.inner
    return list(source.tensors.values()) if isinstance(source, Columns) else []


def _reserve_bytes(device: torch.device) -> int:
    """Bytes to leave free beside resident data: what steps took at most so far, and a tenth of the GPU for all else."""
    taken = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    return taken + usable_bytes(device) // 10 + 64 * MIB
