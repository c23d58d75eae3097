"""The search for a batch size: doubling, then bisection between a size that trains and one that does not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from hotlap.core.errors import TrainingError

NO_GAIN = 2
"""On a device whose memory never ends, doublings without a gain before the search stops."""
GAIN = 1.03
"""The least speed-up that counts as a gain."""
NEAR = 1.5
"""Sizes within this factor count as one point of the curve."""
FINE = 1.2
"""The same factor among the nearly fastest sizes."""
CLOSE, APART = 0.95, 20
"""The largest size with the reserve uses at least this part of its memory, or exceeds it with this part more."""
KNEE = 0.95
"""The knee is the smallest batch with this part of the best speed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size, tried."""

    size: int
    why_not: str | None = None
    """Why it does not train."""
    samples_per_s: float | None = None
    """None if not timed."""
    peak_bytes: int = 0
    taken_bytes: int = 0
    """The peak of torch's allocator, which is above that of tensors."""
    rest_bytes: int = 0
    """The memory of weights, gradients and optimizer state, which no batch changes."""

    @property
    def trains(self) -> bool:
        """Whether updates of this size work."""
        return self.why_not is None


@dataclass(frozen=True, kw_only=True)
class MemoryLine:
    """Memory as a line over the batch size: bytes a sample, and a rest."""

    bytes_a_sample: float
    rest_bytes: float

    def bytes_at(self, size: int) -> float:
        """The bytes of a batch of this size."""
        return self.rest_bytes + self.bytes_a_sample * size

    def size_at(self, room_bytes: float) -> int:
        """The largest batch within these bytes; at least 1."""
        return max(1, int((room_bytes - self.rest_bytes) / self.bytes_a_sample))


def line_through(fitting: Sequence[Trial]) -> MemoryLine | None:
    """The line through the smallest and the largest measured batch; with only one, through the rest.

    None if larger batches take no more memory.
    """
    if not fitting:
        return None
    low, high = fitting[0], fitting[-1]
    if low.size == high.size:
        size, low_bytes = 0, low.rest_bytes
    else:
        size, low_bytes = low.size, low.taken_bytes
    slope = (high.taken_bytes - low_bytes) / (high.size - size)
    return MemoryLine(bytes_a_sample=slope, rest_bytes=low_bytes - slope * size) if slope > 0 else None


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The result of a search."""

    trials: tuple[Trial, ...]
    """All trials, by size."""
    ended: str
    """Why the search tried nothing larger."""
    found_largest: bool
    """Whether the next larger size has failed."""

    @property
    def largest(self) -> Trial | None:
        """The largest that trains."""
        return max((trial for trial in self.trials if trial.trains), key=lambda one: one.size, default=None)

    @property
    def line(self) -> MemoryLine | None:
        """Measured memory over size; None if it does not grow, or with a single measured size."""
        measured = [trial for trial in self.trials if trial.trains]
        return line_through(measured) if len(measured) > 1 else None

    def within(self, most_bytes: float) -> list[Trial]:
        """Timed ones that take no more."""
        return timed_within(self.trials, most_bytes)


def timed_within(trials: Iterable[Trial], most_bytes: float) -> list[Trial]:
    """Timed ones that take no more."""
    return [trial for trial in trials if trial.samples_per_s is not None and trial.taken_bytes <= most_bytes]


def fastest(trials: list[Trial]) -> Trial | None:
    """The one with the most samples a second."""
    return max(trials, key=lambda one: one.samples_per_s or 0.0, default=None)


def knee(trials: list[Trial]) -> Trial | None:
    """The smallest that is nearly as fast as the fastest."""
    best = fastest(trials)
    near = [trial for trial in trials if best and (trial.samples_per_s or 0.0) >= KNEE * (best.samples_per_s or 0.0)]
    return min(near, key=lambda one: one.size, default=None)


class TooShortError(TrainingError):
    """A training ends before hotlap can time it."""


Try = Callable[[int, bool], Trial]
"""Tries a size, and times it if asked and if it trains. Raises TooShortError if the training ends too early."""


@dataclass(kw_only=True)
class SizeSearch:
    """A search for the largest size that trains, which times others on the way."""

    attempt: Try
    start: int
    least: int = 1
    most: int
    room_bytes: float
    """Memory that a size may take."""
    by_speed: bool
    """No size raises an error, so the search ends without a gain, or at `room_bytes`."""
    enough: Callable[[], str | None] = lambda: None
    """Why to stop, or None."""
    finer: int | None = None
    """The search finds the largest to this part of itself; None: to the sample."""
    found: dict[int, Trial] = field(default_factory=dict)

    def run(self) -> Searched:
        """Run the search."""
        try:
            ended, is_proven = self._up_and_down()
        except TooShortError as error:
            if not self.fitting:
                raise
            ended, is_proven = str(error), False
        if self.fitting:
            with suppress(TooShortError):
                self._keep_reserve()
                self._time_smaller()
                self._keep_reserve()  # the first that keeps it may be among smaller ones
                if not self.by_speed and self.finer is None:
                    self._time_between()
        trials = tuple(self.found[size] for size in sorted(self.found))
        return Searched(trials=trials, ended=ended, found_largest=is_proven)

    @property
    def fitting(self) -> list[Trial]:
        """Those that train, the smallest first."""
        return sorted((one for one in self.found.values() if one.trains), key=lambda one: one.size)

    @property
    def _best(self) -> float:
        return max(one.samples_per_s or 0.0 for one in self.found.values())

    @property
    def _within(self) -> list[Trial]:
        """Timed sizes within the memory, the smallest first."""
        return timed_within(self.fitting, self.room_bytes)

    def tried(self, size: int, *, timed: bool = True) -> Trial:
        """The trial of a size, made now if there is none yet."""
        if size not in self.found or (timed and self._could_be_timed(size)):
            self.found[size] = self.attempt(size, timed)
        return self.found[size]

    def _could_be_timed(self, size: int) -> bool:
        known = self.found.get(size)
        return known is None or (known.trains and known.samples_per_s is None)

    def _up_and_down(self) -> tuple[str, bool]:
        """Why the search ended, and whether a larger size has failed."""
        size, failed = max(self.least, min(self.start, self.most)), 0
        while not self.tried(size).trains:
            failed = size
            if size <= self.least:
                return f"not even {size} sample{'s'[: size > 1]} at once: {self.found[size].why_not}", True
            size = max(self.least, size // 2)
        if not failed:
            size, failed, ended = self._up(size)
            if ended is not None:
                return ended, False
        while True:
            while failed - size > max(1, size // self.finer if self.finer else 1):
                if (why := self.enough()) is not None:
                    return why, False
                middle = (size + failed) // 2
                if self.tried(middle, timed=False).trains:
                    size = middle
                else:
                    failed = middle
            if self.tried(size).trains:
                return f"{failed:,} does not train: {self.found[failed].why_not}", True
            # It trained at first and failed when timed.
            size, failed = max(one.size for one in self.fitting if one.size < size), size

    def _up(self, size: int) -> tuple[int, int, str | None]:
        """Double until a size fails: the last that trains, the first that fails, or why the search ended before."""
        without_gain = 0
        while True:
            if (why := self.enough()) is not None:
                return size, 0, why
            if size >= self.most:
                return size, 0, f"{self.most:,} is the limit, by --most or by the number of samples"
            larger = min(self._larger(size), self.most)
            if self.by_speed and _predicted(self.fitting, larger) > self.room_bytes:
                return size, 0, "more would take more memory than is free"
            best = self._best
            one = self.tried(larger)
            if not one.trains:
                return size, larger, None
            size, without_gain = larger, 0 if (one.samples_per_s or 0.0) > GAIN * best else without_gain + 1
            if self.by_speed and without_gain >= NO_GAIN:
                return size, 0, "larger ones are no faster"

    def _larger(self, size: int) -> int:
        """The size to try after one that trains: twice as large, or more if the first measurement shows room.

        Where memory ends, the first size is a guess, and its bytes a sample show how far off.
        """
        line = None if self.by_speed or len(self.fitting) > 1 else line_through(self.fitting)
        larger = 2 * size
        while line is not None and line.bytes_at(2 * larger) <= self.room_bytes and larger < self.most:
            larger *= 2
        return larger

    def _time_smaller(self) -> None:
        """Time the skipped sizes, then smaller ones until they are clearly slower and one is within the memory."""
        smallest, size, slower = self.fitting[0].size, self.fitting[-1].size // 2, 0
        while size >= self.least and (slower < NO_GAIN or not self._within) and self.enough() is None:
            near = [one for one in self.fitting if one.samples_per_s and size / NEAR <= one.size <= size * NEAR]
            speed = (near[0] if near else self.tried(size)).samples_per_s or 0.0
            slower = slower + 1 if size < smallest and speed < KNEE * self._best else 0
            size //= 2

    def _time_between(self) -> None:
        """Time sizes between the nearly fastest: speed may jump from one to the next."""
        while (size := self._untimed_between()) is not None and self.enough() is None:
            self.tried(size)

    def _untimed_between(self) -> int | None:
        timed = self._within
        best = max((one.samples_per_s or 0.0 for one in timed), default=0.0)
        for low, high in itertools.pairwise(timed):
            is_near = max(low.samples_per_s or 0.0, high.samples_per_s or 0.0) >= KNEE * best
            size = _between(low.size, high.size) if is_near and high.size > FINE * low.size else None
            if size is not None and self._could_be_timed(size):
                return size
        return None

    def _keep_reserve(self) -> None:
        """Time the largest size within the memory, or one near it."""
        inside = [one for one in self.fitting if one.taken_bytes <= self.room_bytes]
        beyond = [one for one in self.fitting if one.taken_bytes > self.room_bytes]
        if not inside or not beyond:
            return
        low, high = self.tried(inside[-1].size), beyond[0]
        slope = (high.taken_bytes - low.taken_bytes) / (high.size - low.size)
        size = low.size + int((self.room_bytes - low.taken_bytes) / slope) if slope > 0 else low.size
        while (
            high.size - low.size > max(1, high.size // (self.finer or APART))
            and low.taken_bytes < CLOSE * self.room_bytes
            and self.enough() is None
        ):
            one = self.tried(size if low.size < size < high.size else (low.size + high.size) // 2)
            low, high = (one, high) if one.trains and one.taken_bytes <= self.room_bytes else (low, one)
            size = low.size


def _between(low: int, high: int) -> int | None:
    """Of the sizes well between two others, the one with the most factors of two; None without one."""
    apart = math.sqrt(FINE)
    sizes = range(math.ceil(low * apart), int(high / apart) + 1)
    return max(sizes, key=lambda size: size & -size, default=None)


def _predicted(fitting: list[Trial], size: int) -> float:
    """The expected bytes of a size, on the line through the two largest tried."""
    line = line_through(fitting[-2:])
    return fitting[-1].taken_bytes if line is None else line.bytes_at(size)
