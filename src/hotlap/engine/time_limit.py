"""A limit on how long a compiler or a recording may take, for work that hotlap itself has started."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TooLongError(BaseException):
    """Work takes too long. A BaseException, so that neither a compiler nor a user's code catches it."""


class Alarm:
    """Raises a TooLongError after some seconds.

    It needs the main thread, code that runs in Python or waits for a process or a lock, and no alarm of the user's.
    """

    AGAIN_S = 5.0
    """If a callback swallowed the first error, another one follows."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self, seconds: float) -> None:
        """Raise after this many seconds, unless cleared or impossible here."""
        if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
            return
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL or signal.getitimer(signal.ITIMER_REAL)[0]:
            return  # the user has an alarm
        signal.signal(signal.SIGALRM, self._raise_error)
        signal.setitimer(signal.ITIMER_REAL, seconds, self.AGAIN_S)
        self._is_set = True

    def clear(self) -> None:
        """Cancel the alarm."""
        if self._is_set and sys.platform != "win32":
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            self._is_set = False

    def _raise_error(self, number: int, frame: FrameType | None) -> None:
        raise TooLongError


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Inside, a TooLongError is raised after so many seconds, where an Alarm can."""
    alarm = Alarm()
    alarm.set(seconds)
    try:
        yield
    finally:
        alarm.clear()
