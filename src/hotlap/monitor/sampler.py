"""Reads GPU and host beside a training, and writes down what it reads: a thread that costs at most 1 % of the time."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from hotlap.core.errors import MachineError, first_line
from hotlap.core.terminal import logger
from hotlap.monitor.beside import Beside
from hotlap.store.telemetry import SampleFile, write_live

log = logger(__name__)

EVERY_S = 1.0
"""Between two readings, where that costs little enough."""
FIRST_S = 0.25
"""Until the first: shorter trainings leave no samples."""
LIVE_S = 2.0
"""Between two states in `live.json`."""
MOST_COST = 0.005
"""Of the time, what readings may take of a core: half of what is promised, since what they hold up is not counted."""
MOST_FAILURES = 3
"""Readings that fail one after the other, after which none follows."""
GAP = 3.0
"""Times the usual time between two readings that count as a gap."""
SWITCH = "HOTLAP_SAMPLES"
"""The variable that turns sampling off."""

Read = Callable[[], dict[str, Any]]


class Sampler:
    """Takes a sample now and then while it is open, and keeps `live.json` up to date.

    `read` gives the figures of a sample, and `state` how the training stands, from the figures of the last sample. Both
    are called in the sampler's thread, and must read only what the training leaves lying about. Where they fail
    again and again, the sampling ends and nothing else. A fork pauses it, so that no child inherits anything half done.
    """

    def __init__(
        self,
        folder: Path,
        read: Read,
        state: Callable[[dict[str, Any]], dict[str, Any]],
        *,
        every_s: float | None = None,
        clock: Callable[[], float] = time.time,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._folder, self._read, self._state = folder, read, state
        self._every_s = EVERY_S if every_s is None else every_s
        self._clock, self._cpu_clock = clock, cpu_clock
        self._owner = os.getpid()
        self._file: SampleFile | None = None
        self._last: dict[str, Any] = {}
        self._last_s: float | None = None
        self._live_s, self._began_s = -math.inf, clock()
        self._took_s = 0.0
        self._thread = Beside("hotlap samples", self.tick, lambda: None if self.is_over else self.wait_s)
        self.spent_s = 0.0
        """Seconds of a core that all readings have taken."""
        self.readings = 0
        self._failures = 0
        self.is_over = False
        """Whether readings failed one after the other, so that none follows."""

    @property
    def wait_s(self) -> float:
        """Seconds until the next reading: so many that readings cost no more than they may."""
        return max(self._every_s, self._took_s / MOST_COST)

    def __enter__(self) -> Self:
        if is_wanted():
            self._thread.begin(FIRST_S)
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        """End the thread, and write how the training ended, where anything was written before."""
        self._thread.end()
        if self.readings and not self.is_over and self._owner == os.getpid():
            self._guarded(lambda: self._write_live(ended=True, why=_why_ended(error)))

    def tick(self) -> None:
        """Take one sample."""
        before_s = self._cpu_clock()
        self._guarded(self._sample)
        took_s = max(0.0, self._cpu_clock() - before_s)
        self.spent_s, self.readings = self.spent_s + took_s, self.readings + 1
        # Readings differ: an average that forgets, and the first of all, which loads what others find loaded, weighs
        # no more than any other.
        self._took_s = took_s if self.readings <= 2 else 0.8 * self._took_s + 0.2 * took_s

    def _sample(self) -> None:
        now = self._clock()
        if self._file is None:
            self._file = SampleFile(self._folder)
            self._last_s = self._file.last_s
        sample: dict[str, Any] = {"at": round(now, 3), **self._read()}
        if self._last_s is not None and not 0 <= now - self._last_s <= GAP * self.wait_s:
            sample["gap_s"] = round(max(0.0, now - self._last_s), 3)
        self._last, self._last_s = sample, now
        self._file.add(sample)
        if now - self._live_s >= 0.9 * LIVE_S:
            self._live_s = now
            self._write_live()

    def _write_live(self, *, ended: bool = False, why: str = "") -> None:
        # A training that is gone and has not ended was killed.
        now = self._clock()
        cost = self.spent_s / max(self._every_s, now - self._began_s)
        about = {"pid": self._owner, "at": round(now, 3), "ended": ended, "sampling_cost": cost}
        state = self._state(self._last)
        write_live(self._folder, {**about, **state, "stopped": state.get("stopped") or why, "sample": self._last})

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
            self._failures = 0
        except Exception as error:
            # A full disk, a folder that was removed, a state that changed while it was read: the training is not to
            # suffer from it.
            self._failures += 1
            self.is_over = self._failures >= MOST_FAILURES
            log.info("a sample failed%s: %s", " and none follows" if self.is_over else "", first_line(error))


def _why_ended(error: type[BaseException] | None) -> str:
    if error is None or issubclass(error, SystemExit):
        return ""
    return f"by an error: {error.__name__}" if issubclass(error, Exception) else "on a signal"


def is_wanted() -> bool:
    """Whether trainings are sampled: unless `HOTLAP_SAMPLES=off`. Raises MachineError for another word."""
    asked = os.environ.get(SWITCH, "").strip().lower()
    if asked not in ("", "on", "off"):
        raise MachineError(f"{SWITCH}={asked[:40]!r} is not known: use on or off")
    return asked != "off"
