"""Decoded pictures in memory that a process shares with the processes it forks, such as the workers of a loader."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

from hotlap.core.units import GIB, MIB
from hotlap.machine.limits import read_memory

MOST_SHARE: Final = 1 / 3
"""Of the memory that is free at the beginning, the part that pictures may take."""
RESERVE: Final = GIB
"""Bytes of memory that stay free beside them."""
CHECKED: Final = 64 * MIB
"""Bytes of new pictures after which free memory is looked at again."""
SAMPLE, LEAST_SHARE = 16, 0.2
"""Pictures from whose sizes hotlap predicts how many fit, and the least share of an epoch's that pays: the others are
hashed in vain."""
COMPARED, COMPARED_HERE = 64, 8
"""Recalled pictures that are also made anew, to compare bits and times: in all processes, and in each."""
ENOUGH: Final = 16
"""Comparisons that decide whether recalling is faster."""
LEAST_GAIN: Final = 1.3
"""How many times as fast recalling must be; else nothing is recalled any more."""
LEAST_PIXELS: Final = 64 * 64
"""Smaller pictures are decoded in less time than remembering takes."""
MOST_FILE_BYTES: Final = 64 * MIB
MOST_RECORDS: Final = 1 << 20
TRIES, PAUSE_S = 10, 5e-5
"""How often a process tries to get the lock, which others hold for microseconds, and seconds between two tries."""
PROCESSES: Final = 256
"""Processes with counts of their own; later ones share those of processes that are likely to be over."""

MODES: Final = {"L": 1, "RGB": 3, "RGBA": 4, "YCbCr": 3, "CMYK": 4}
"""Bytes of a pixel by the kind of picture."""
_MODES = (*MODES,)
_NO_PIXELS = 2**64 - 1

_HEAD = struct.Struct("<BxxxxxxxQQQQQ")
"""The state, and the fields of `_Head`."""
_RECORD = struct.Struct("<16sQIIIB")
_COUNTS = struct.Struct("<QdQdddQd")
"""Of one process, in the order of the fields of `Counts`."""


_Picture = TypeVar("_Picture")


class State(IntEnum):
    """Whether pictures are remembered and recalled, and if no more, why not."""

    WAITING = 0
    ON = 1
    DIFFERENT = 2
    """A picture from memory was not the one made anew."""
    NO_FASTER = 3
    TOO_MANY = 4
    """The memory holds too small a share of the pictures."""
    ALWAYS_NEW = 5
    """Later epochs have asked for none of them."""


class Known(NamedTuple):
    """A picture that has been made before."""

    mode: str
    size: tuple[int, int]
    end: int
    """Where decoding leaves the file."""
    at: int | None
    """Where its pixels are; None if only its mode and size are known."""


class _Head(NamedTuple):
    """All counts of the memory's first bytes."""

    records: int
    pictures: int
    """Those with pixels."""
    taken: int
    """Bytes of these."""
    processes: int
    """Those that have counts."""
    expected: int


@dataclass(frozen=True)
class Counts:
    """What remembering has done so far."""

    recalled: int
    """Pictures that came from memory."""
    recall_s: float
    """Seconds that this took, with reading and hashing their files."""
    compared: int
    """Pictures that were also made anew, to compare."""
    made_s: float
    """Seconds that making these anew took."""
    compared_s: float
    """Seconds that recalling the same ones took."""
    remember_s: float
    """Seconds that hashing and copying new pictures took."""
    remembered: int
    """New pictures."""
    first_s: float
    """Seconds that making them took."""

    @property
    def each_made_s(self) -> float:
        """Seconds to make a picture: new ones may be slow to read, and the few that are compared slow by chance."""
        of_new, of_compared = self.first_s / max(1, self.remembered), self.made_s / max(1, self.compared)
        return min(of_new, of_compared) if self.remembered and self.compared else of_new or of_compared

    @property
    def each_recalled_s(self) -> float:
        """Seconds to recall a picture."""
        return self.recall_s / max(1, self.recalled)


class PictureMemory:
    """Pictures by keys of 16 bytes. What one process adds, all see; none waits for another, however that one ends."""

    def __init__(self, most_bytes: int | None = None) -> None:
        """Takes memory only as it fills. Raises OSError where the system gives none."""
        free = read_memory().free_bytes
        self.most_bytes = int(min(free * MOST_SHARE, free - RESERVE)) if most_bytes is None else most_bytes
        if self.most_bytes <= 0:
            raise OSError("too little memory is free")
        self._counts_at = _HEAD.size
        self._records_at = self._counts_at + PROCESSES * _COUNTS.size
        self._pixels_at = self._records_at + MOST_RECORDS * _RECORD.size
        self._map = mmap.mmap(-1, self._pixels_at + self.most_bytes)
        # Locks on a file end with the process that holds them.
        self._lock_file = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._lock_file.close)
        self._in_process = threading.Lock()
        _memories.add(self)
        self._known: dict[bytes, Known] = {}
        self._read = self._checked = 0
        self._slot: int | None = None
        self._compared_here = 0

    def leave_parent(self) -> None:
        """After a fork: threads of the parent, which may hold the lock, are not here."""
        self._in_process, self._slot = threading.Lock(), None

    @property
    def state(self) -> State:
        """Whether pictures are remembered and recalled, in all processes."""
        return State(self._map[0])

    @state.setter
    def state(self, state: State) -> None:
        self._map[0:1] = bytes((state,))

    @property
    def is_on(self) -> bool:
        """Whether pictures are remembered and recalled."""
        return self._map[0] == State.ON

    @property
    def pictures(self) -> int:
        """Pictures whose pixels are here."""
        return self._head.pictures

    @property
    def expected(self) -> int:
        """Pictures in an epoch, as far as known."""
        return self._head.expected

    def expect(self, pictures: int) -> None:
        """Set how many pictures an epoch has; 0: unknown."""
        with _Alone(self) as alone:
            if alone.holds:
                self._write_head(expected=pictures)

    @property
    def bytes_taken(self) -> int:
        """Bytes of all pixels."""
        return self._head.taken

    @property
    def _head(self) -> _Head:
        return _Head(*_HEAD.unpack_from(self._map)[1:])

    def find(self, key: bytes) -> Known | None:
        """The picture of this key, if any process has added it."""
        found = self._known.get(key)
        if found is None or found.at is None:
            self.refresh()
            found = self._known.get(key)
        return found

    def refresh(self) -> None:
        """Learn what other processes have added; those forked from here then know it too."""
        if self._read == self._head.records:
            return
        with _Alone(self) as alone:
            count = self._head.records if alone.holds else self._read
            for number in range(self._read, count):
                key, at, width, height, end, mode = _RECORD.unpack_from(self._map, self._record_at(number))
                known = Known(_MODES[mode], (width, height), end, None if at == _NO_PIXELS else at)
                if key not in self._known or known.at is not None:
                    self._known[key] = known
            self._read = count

    def _record_at(self, number: int) -> int:
        return self._records_at + number * _RECORD.size

    def pixels(self, known: Known) -> memoryview:
        """The pixels of a picture, row by row; do not write to them."""
        assert known.at is not None
        start = self._pixels_at + known.at
        return memoryview(self._map)[start : start + _bytes_of(known.mode, known.size)]

    def add(self, key: bytes, mode: str, size: tuple[int, int], end: int, pixels: bytes | None) -> bool:
        """Add a picture, or only its mode and size; False if there is no room, or if another process adds one now."""
        at = self._take(len(pixels)) if pixels is not None else _NO_PIXELS
        if at is None:
            return False
        if pixels is not None:
            start = self._pixels_at + at
            self._map[start : start + len(pixels)] = pixels
        with _Alone(self) as alone:
            count = self._head.records
            if not alone.holds or count == MOST_RECORDS:
                return False
            record = (key, at, *size, end, _MODES.index(mode))
            _RECORD.pack_into(self._map, self._record_at(count), *record)
            self._write_head(records=count + 1, pictures=self.pictures + (pixels is not None))
        return True

    def _take(self, size: int) -> int | None:
        """Where there is room for so many bytes of pixels; None if there is none."""
        head = self._head
        taken = head.taken
        if head.pictures >= SAMPLE and self.most_bytes * head.pictures < LEAST_SHARE * head.expected * taken:
            self.state = State.TOO_MANY
            return None
        if taken + size > self.most_bytes:
            return None
        if taken - self._checked > CHECKED:
            if read_memory().free_bytes < RESERVE:
                return None
            self._checked = taken
        with _Alone(self) as alone:
            taken = self.bytes_taken
            if not alone.holds or taken + size > self.most_bytes:
                return None
            self._write_head(taken=taken + size)
        return taken

    def _write_head(self, **new: int) -> None:
        struct.pack_into("<QQQQQ", self._map, 8, *self._head._replace(**new))

    # --- counts ------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """The counts of all processes together."""
        rows = [self._counts_of(slot) for slot in range(min(PROCESSES, self._head.processes))]
        return Counts(*map(sum, zip(*rows, strict=True))) if rows else Counts(0, 0.0, 0, 0.0, 0.0, 0.0, 0, 0.0)

    @property
    def recalled_here(self) -> int:
        """Pictures that came from memory in this process."""
        return 0 if self._slot is None else int(self._counts_of(self._slot)[0])

    def recalled(
        self, picture: _Picture, took_s: float, make: Callable[[], _Picture], same: Callable[[_Picture, _Picture], bool]
    ) -> _Picture:
        """The picture that came from memory in so many seconds; the first ones are also made anew, and compared."""
        if not self._is_to_be_compared():
            self.count(took_s)
            return picture
        began = time.perf_counter()
        anew = make()
        self.count_compared(took_s, time.perf_counter() - began, is_same=same(anew, picture))
        return anew

    def _is_to_be_compared(self) -> bool:
        if self._compared_here >= COMPARED_HERE or self.counts.compared >= COMPARED:
            return False
        self._compared_here += 1
        return True

    def count(self, recall_s: float) -> None:
        """Count a picture that came from memory."""
        self._add_counts(1, recall_s, 0, 0.0, 0.0, 0.0, 0, 0.0)

    def count_compared(self, recall_s: float, made_s: float, *, is_same: bool) -> None:
        """Count a picture that came from memory and was made anew. Ends all recalling if that is wrong or no faster."""
        self._add_counts(1, recall_s, 1, made_s, recall_s, 0.0, 0, 0.0)
        counts = self.counts
        if not is_same:
            self.state = State.DIFFERENT
        elif self.is_on and counts.compared >= ENOUGH and counts.made_s < LEAST_GAIN * counts.compared_s:
            self.state = State.NO_FASTER

    def count_remembered(self, seconds: float, made_s: float) -> None:
        """Count a new picture: the seconds that remembering it took, and those that making it took."""
        self._add_counts(0, 0.0, 0, 0.0, 0.0, seconds, 1, made_s)

    def _add_counts(self, *new: float) -> None:
        if self._slot is None:
            with _Alone(self) as alone:
                processes = self._head.processes
                if not alone.holds:
                    return
                self._write_head(processes=processes + 1)
            self._slot = processes % PROCESSES
        sums = (had + more for had, more in zip(self._counts_of(self._slot), new, strict=True))
        _COUNTS.pack_into(self._map, self._counts_at + self._slot * _COUNTS.size, *sums)

    def _counts_of(self, slot: int) -> tuple[Any, ...]:
        return _COUNTS.unpack_from(self._map, self._counts_at + slot * _COUNTS.size)


_memories: weakref.WeakSet[PictureMemory] = weakref.WeakSet()


def _leave_parent() -> None:
    for memory in _memories:
        memory.leave_parent()


os.register_at_fork(after_in_child=_leave_parent)


class _Alone:
    """Tries to keep other processes and threads out; `holds` says whether that worked within a millisecond or so."""

    def __init__(self, memory: PictureMemory) -> None:
        self._memory, self.holds = memory, False

    def __enter__(self) -> _Alone:
        for _ in range(TRIES):
            self.holds = self._try()
            if self.holds:
                break
            time.sleep(PAUSE_S)
        return self

    def _try(self) -> bool:
        if not self._memory._in_process.acquire(blocking=False):
            return False
        try:
            fcntl.lockf(self._memory._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._memory._in_process.release()
            return False
        return True

    def __exit__(self, *_: object) -> None:
        if self.holds:
            fcntl.lockf(self._memory._lock_file, fcntl.LOCK_UN)
            self._memory._in_process.release()


def _bytes_of(mode: str, size: tuple[int, int]) -> int:
    return MODES[mode] * size[0] * size[1]


def key_of(*parts: bytes) -> bytes:
    """The key of a picture, from all that it is made of."""
    made = hashlib.blake2b(digest_size=16)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()
