"""Which lines of the user's code take the time of a thread, found by looking at its stack now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from hotlap.script.advice import PYTHON, SCRIPT, home_of

EVERY_S = 0.005
MOST_COST = 0.005
"""The part of a core that looking may take; beyond it, the sampler looks less often."""
FEEDING, TORCH, OWN = "feeding", "torch", "own"
"""What a thread does: it waits for a batch, it computes, or it runs other code."""

_TORCH = Path(torch.__file__).parent
_LOADER = str(_TORCH / "utils" / "data" / "dataloader.py")
_WRITERS = {str(_TORCH / "serialization.py"): "torch.save", str(_TORCH / "utils" / "tensorboard"): "tensorboard"}
"""Files and folders of torch that compute nothing."""


class Place(NamedTuple):
    """A line of the user, and what it does."""

    file: str
    line: int
    part: str
    caller: tuple[str, int] | None = None
    """The line of the training loop that leads there, if the loop is known."""


class LineSampler:
    """Attributes the time of one thread to the innermost lines of the user, from a thread of its own."""

    def __init__(self, thread: int, every_s: float = EVERY_S) -> None:
        """`thread` is the number of the thread to watch."""
        self._thread, self._every_s = thread, every_s
        self._end = threading.Event()
        self._looks = threading.Thread(target=self._look_on, name="hotlap-lines", daemon=True)
        self.pauses = False
        """Whether to leave out the time for now."""
        self.loop: CodeType | None = None
        """The code of the training loop."""
        self.seconds: defaultdict[Place, float] = defaultdict(float)
        self.through: dict[Place, str] = {}
        """The library through which a line takes its time; empty if it calls none."""
        self.spent_s = self.watched_s = 0.0
        """Seconds of a core that looking took, and seconds watched."""

    def start(self) -> None:
        """Begin to look."""
        self._looks.start()

    def stop(self) -> None:
        """Look no more."""
        self._end.set()
        if self._looks.is_alive():
            self._looks.join()

    def _look_on(self) -> None:
        began, last = time.thread_time(), time.perf_counter()
        wait_s = self._every_s
        while not self._end.wait(wait_s):
            frame, now = sys._current_frames().get(self._thread), time.perf_counter()
            if not self.pauses:
                self._note(frame, now - last)
                self.watched_s += now - last
            last = now
            self.spent_s = time.thread_time() - began
            wait_s = self._every_s if self.spent_s <= MOST_COST * self.watched_s else 2 * wait_s

    def _note(self, frame: FrameType | None, seconds: float) -> None:
        found = place_of(frame, self.loop)
        if found is not None:
            self.seconds[found[0]] += seconds
            self.through.setdefault(*found)


def place_of(frame: FrameType | None, loop: CodeType | None = None) -> tuple[Place, str] | None:
    """The innermost line of the user with what it does, and the library it calls; None if hotlap is at work."""
    own: tuple[str, int] | None = None
    inside, part, caller = "", OWN, None
    innermost = True
    while frame is not None:
        code = frame.f_code
        home = home_of(code.co_filename)
        if innermost and home == "hotlap":
            return None
        innermost = False
        if home == "torch":
            if code.co_filename == _LOADER:
                part = FEEDING
            elif own is None and (writer := _writer(code.co_filename)):
                inside, part = writer, OWN
            elif part == OWN and (own is None or _calls_modules(code.co_filename)):
                part = TORCH
        elif own is None and home == SCRIPT:
            own = code.co_filename, frame.f_lineno
        elif own is None and home not in (SCRIPT, "hotlap"):
            inside = home if home != PYTHON else _module_of(code.co_filename)
        if code is loop and caller is None:
            caller = code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None if own is None else (Place(*own, part, caller), inside)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user on a stack; None if a library other than torch lies inside of it."""
    while frame is not None and (home := home_of(frame.f_code.co_filename)) != SCRIPT:
        if home not in ("torch", "hotlap", PYTHON):
            return None
        frame = frame.f_back
    return frame


def users_line(frame: FrameType | None) -> tuple[str, int] | None:
    """File and line of that frame."""
    found = users_frame(frame)
    return None if found is None else (found.f_code.co_filename, found.f_lineno)


def _module_of(file: str) -> str:
    path = Path(file)
    return path.parent.name if path.stem == "__init__" else path.stem


@cache
def _writer(file: str) -> str:
    """What writes, if this file of torch does; empty for others."""
    return next((name for place, name in _WRITERS.items() if file.startswith(place)), "")


@cache
def _calls_modules(file: str) -> bool:
    """Whether this file of torch runs the user's modules: then their lines compute."""
    return file.endswith(("nn/modules/module.py", "autograd/function.py", "optim/optimizer.py"))
