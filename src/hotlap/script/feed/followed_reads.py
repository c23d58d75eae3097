"""Pictures that OpenCV reads: decoded once for each file and flags, then copied from memory."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np

from hotlap.data.picture_memory import LEAST_PIXELS, MODES, MOST_FILE_BYTES, Known, PictureMemory, key_of

OPENCV: Final = "cv2"
COLOUR: Final = 1
"""OpenCV's flag for three channels of eight bits, which it assumes."""
_MODE_OF = {1: "L", 3: "RGB", 4: "RGBA"}
"""What the memory calls arrays of so many channels, whatever these mean."""

Own = Callable[..., Any]


def patches(memory: PictureMemory) -> list[tuple[Any, str, Callable[[Own], Own]]]:
    """Owners, names and makers of the patches of OpenCV that remember what it reads."""
    return [(sys.modules[OPENCV], "imread", functools.partial(_remembering, memory))]


def _remembering(memory: PictureMemory, own: Own) -> Own:
    @functools.wraps(own)
    def imread(*args: Any, **kwargs: Any) -> Any:
        read = None
        if memory.is_on and 1 <= len(args) <= 2 and not kwargs and isinstance(args[0], (str, os.PathLike)):
            began = time.perf_counter()
            with suppress(OSError, ValueError, TypeError):
                read = _key_of(*args)
        if read is None:
            return own(*args, **kwargs)
        key, began = read, began
        known = memory.find(key)
        if known is not None and known.at is not None:
            return _recalled(memory, known, began, lambda: own(*args))
        read_s = time.perf_counter() - began
        began = time.perf_counter()
        made = own(*args)
        made_s, began = time.perf_counter() - began, time.perf_counter()
        with suppress(Exception):  # then it is read again the next time
            _remember(memory, key, made)
        memory.count_remembered(read_s + time.perf_counter() - began, made_s)
        return made

    return imread


def _key_of(path: Any, flags: Any = COLOUR) -> bytes | None:
    """The key of what OpenCV makes of a file; None for a file that is too large."""
    data = Path(path).read_bytes() if Path(path).stat().st_size <= MOST_FILE_BYTES else None
    return None if data is None else key_of(data, OPENCV.encode(), str(int(flags)).encode())


def _remember(memory: PictureMemory, key: bytes, made: Any) -> None:
    """Keep an array of bytes; others are left to OpenCV."""
    if type(made) is not np.ndarray or made.dtype != np.uint8 or made.size < LEAST_PIXELS:
        return
    channels = made.shape[2] if made.ndim == 3 else 1
    is_grey_in_three = made.ndim == 3 and channels == 1
    if channels in _MODE_OF and made.flags.c_contiguous and not is_grey_in_three:
        memory.add(key, _MODE_OF[channels], (made.shape[1], made.shape[0]), 0, made.tobytes())


def _recalled(memory: PictureMemory, known: Known, began: float, make: Callable[[], Any]) -> Any:
    """The array from memory; the first ones are also read anew."""
    width, height = known.size
    shape = (height, width) if known.mode == "L" else (height, width, MODES[known.mode])
    picture = np.frombuffer(memory.pixels(known), np.uint8).reshape(shape).copy()
    recall_s = time.perf_counter() - began
    if not memory.is_to_be_compared():
        memory.count(recall_s)
        return picture
    began = time.perf_counter()
    anew = make()
    made_s = time.perf_counter() - began
    memory.count_compared(recall_s, made_s, is_same=np.array_equal(anew, picture))
    return anew
