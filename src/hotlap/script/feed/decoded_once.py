"""Pictures that PIL decodes, converts and resizes, or OpenCV reads: made once, then recalled from memory.

Many scripts decode the same files in every epoch, and resize them to the same size, before anything random happens.
`followed_pictures` follows a picture from its file through these calls, as `Origin`. The key of the result is a hash
of the file's bytes and of the calls, so a changed file is another picture. The first other use of the pixels is where
hotlap remembers the picture, or recalls it. The script gets the same bits, types and attributes. hotlap remembers
what `cv2.imread` reads by file and flags.

The patches stay in forked processes, since workers make the pictures.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np
from torch.utils.data import DataLoader

from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.units import show_bytes, show_seconds
from hotlap.data.picture_memory import LEAST_PIXELS, MODES, MOST_FILE_BYTES, Known, PictureMemory, State, key_of
from hotlap.script.patches import Make, Patches

WHAT: Final = "pictures decoded once"
"""Its name in the ledger."""
ENOUGH_EPOCHS: Final = 2
"""Epochs after which some pictures must have come again."""
WHY_NOT: Final = {
    State.DIFFERENT: "a picture from memory differed",
    State.NO_FASTER: "memory is hardly faster",
    State.TOO_MANY: "there are too many for the memory",
    State.ALWAYS_NEW: "no picture came again",
}
OPENCV: Final = "cv2"
COLOUR: Final = 1
"""OpenCV's flag for three channels of eight bits, which it assumes."""
_MODE_OF = {1: "L", 3: "RGB", 4: "RGBA"}
"""What the memory calls arrays of so many channels, whatever these mean."""


def decoded_once() -> DecodedOnce | None:
    """Follows the pictures of this process, if the script reads any and the system allows it."""
    try:
        return DecodedOnce() if any(name in sys.modules for name in LIBRARIES) else None
    except (ImportError, OSError):
        return None


class DecodedOnce:
    """Remembers the pictures of this process and of those forked from it."""

    def __init__(self) -> None:
        """Raises OSError where there is no memory for it."""
        self.memory = PictureMemory()
        self._patches = Patches(in_forks=True)
        self.is_over = False
        """Whether there is nothing more to do."""
        self._followed: set[str] = set()
        self._begun: set[Hashable] = set()
        """Kinds and sizes of the data of earlier epochs: a script may make its dataset anew for each."""
        self._epochs: WeakKeyDictionary[DataLoader[Any], tuple[int, int]] = WeakKeyDictionary()
        """Epochs of each loader since pictures are remembered, and pictures recalled before the last of them."""

    def begin_epoch(self, loader: DataLoader[Any], samples: int | None, *, has_more: bool) -> None:
        """An epoch of a loader begins; with `has_more`, it is known not to be the last of its data."""
        memory, kind = self.memory, (type(loader.dataset), samples)
        self._follow()
        counts, (epochs, before) = memory.counts, self._epochs.get(loader, (0, 0))
        if memory.state in WHY_NOT or (epochs and not counts.remember_s):  # or the script reads no pictures
            self.close()
            return
        if memory.state is State.WAITING and (kind in self._begun or has_more):
            memory.state = State.ON
        self._begun.add(kind)
        if memory.is_on and epochs >= ENOUGH_EPOCHS and counts.recalled == before:
            memory.state = State.ALWAYS_NEW
        self._epochs[loader] = epochs + memory.is_on, counts.recalled
        memory.expect(max(memory.expected, samples or 0))
        memory.refresh()

    def _follow(self) -> None:
        """Patch the libraries that the script has imported so far."""
        for library, patches in LIBRARIES.items():
            if library in sys.modules and library not in self._followed:
                self._followed.add(library)
                self._epochs.clear()  # in earlier ones its pictures were not seen
                with suppress(ImportError, AttributeError):  # a version of it that hotlap does not know
                    for owner, name, make in patches(self.memory):
                        self._patches.put(owner, name, make)

    def close(self) -> None:
        """Leave the libraries alone."""
        if self.memory.is_on:
            self.memory.state = State.WAITING
        self.is_over = True
        self._patches.take_out_all()

    def write_down(self, ledger: Ledger, plan: Plan) -> None:
        """Add what it gave to a ledger, if anything."""
        memory, counts = self.memory, self.memory.counts
        figures: dict[str, float] = {"recalled": counts.recalled}
        words = []
        if counts.compared:
            made_s, recall_s = counts.each_made_s, counts.each_recalled_s
            words = [f"{show_seconds(recall_s)} each from memory, {show_seconds(made_s)} decoded anew"]
            figures |= {"made_s": made_s, "recall_s": recall_s}
        if memory.state in WHY_NOT:
            outcome, words = "rejected", [WHY_NOT[memory.state], *words]
        elif words:
            if memory.recalled_here == counts.recalled:  # else the workers of the loader share what is saved
                figures["saved_s"] = counts.recalled * (made_s - recall_s) - counts.remember_s
            taken = f"{show_bytes(memory.bytes_taken)} of memory"
            outcome, words = "kept", [f"{counts.recalled:,} recalled: {words[0]}", taken]
        else:
            return
        why = "; ".join(words)
        ledger.record(Entry(step=ledger.last_step, what=WHAT, outcome=outcome, plan=plan, why=why, figures=figures))


# --- libraries that read pictures --------------------------------------------------------
#
# OpenCV decodes a file once for each of its flags. Later reads copy the picture from memory.


def _of_pil(memory: PictureMemory) -> Sequence[tuple[Any, str, Make]]:
    from hotlap.script.feed import followed_pictures

    return followed_pictures.patches(memory)


def _of_opencv(memory: PictureMemory) -> Sequence[tuple[Any, str, Make]]:
    return [(sys.modules[OPENCV], "imread", functools.partial(_remembering, memory))]


def _remembering(memory: PictureMemory, own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def imread(*args: Any, **kwargs: Any) -> Any:
        key = None
        if memory.is_on and 1 <= len(args) <= 2 and not kwargs and isinstance(args[0], (str, os.PathLike)):
            began = time.perf_counter()
            with suppress(OSError, ValueError, TypeError):
                key = _key_of(*args)
        if key is None:
            return own(*args, **kwargs)
        known = memory.find(key)
        if known is not None and known.at is not None:
            return _recalled(memory, known, began, lambda: own(*args))
        read_s = time.perf_counter() - began
        began = time.perf_counter()
        picture = own(*args)
        made_s, began = time.perf_counter() - began, time.perf_counter()
        with suppress(Exception):  # then it is read again the next time
            _remember(memory, key, picture)
        memory.count_remembered(read_s + time.perf_counter() - began, made_s)
        return picture

    return imread


def _key_of(path: Any, flags: Any = COLOUR) -> bytes | None:
    """The key of what OpenCV makes of a file; None for a file that is too large."""
    data = Path(path).read_bytes() if Path(path).stat().st_size <= MOST_FILE_BYTES else None
    return None if data is None else key_of(data, OPENCV.encode(), str(int(flags)).encode())


def _remember(memory: PictureMemory, key: bytes, picture: Any) -> None:
    """Keep an array of bytes; others are left to OpenCV."""
    if type(picture) is not np.ndarray or picture.dtype != np.uint8 or picture.size < LEAST_PIXELS:
        return
    channels = picture.shape[2] if picture.ndim == 3 else 1
    is_grey_in_three = picture.ndim == 3 and channels == 1
    if channels in _MODE_OF and picture.flags.c_contiguous and not is_grey_in_three:
        memory.add(key, _MODE_OF[channels], (picture.shape[1], picture.shape[0]), 0, picture.tobytes())


def _recalled(memory: PictureMemory, known: Known, began: float, make: Callable[[], Any]) -> Any:
    """The array from memory; the first ones are also read anew."""
    width, height = known.size
    shape = (height, width) if known.mode == "L" else (height, width, MODES[known.mode])
    picture = np.frombuffer(memory.pixels(known), np.uint8).reshape(shape).copy()
    return memory.recalled(picture, time.perf_counter() - began, make, np.array_equal)


LIBRARIES: Final = {"PIL.Image": _of_pil, OPENCV: _of_opencv}
"""Modules whose import shows that a script may read pictures, with what patches them."""
