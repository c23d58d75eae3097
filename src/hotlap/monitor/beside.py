"""A thread beside a training that works now and then. It stops before each fork and starts again after it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable

FORK_S = 0.2
"""How long a fork waits for work in hand."""
END_S = 2.0
"""How long the end waits for it."""


class Beside:
    """Calls `work` in a daemon thread, each time after `wait_s()` seconds; None ends the thread.

    No forked child inherits work half done.
    """

    def __init__(self, name: str, work: Callable[[], object], wait_s: Callable[[], float | None]) -> None:
        self._name, self._work, self._wait_s = name, work, wait_s
        self._thread: threading.Thread | None = None
        self._end, self._due_s = threading.Event(), 0.0

    def begin(self, first_s: float) -> None:
        """Start the thread; it works for the first time after so many seconds."""
        self._begin(first_s)
        _open.add(self)

    def end(self) -> None:
        """End the thread; one that hangs in a driver or on a disk is left behind, and ends by itself."""
        _open.discard(self)
        self._pause(END_S)

    def _begin(self, first_s: float) -> None:
        self._due_s = time.monotonic() + first_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(first_s, self._end), name=self._name, daemon=True)
        self._thread.start()

    def _run(self, wait_s: float | None, end: threading.Event) -> None:
        while wait_s is not None and not end.wait(wait_s):
            self._work()
            wait_s = self._wait_s()
            self._due_s = time.monotonic() + (wait_s or 0.0)

    def _pause(self, timeout_s: float) -> None:
        thread, self._thread = self._thread, None
        self._end.set()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _go_on(self) -> None:
        if self._wait_s() is not None:
            # Where forks come often, the next work is due all the same.
            self._begin(max(0.0, self._due_s - time.monotonic()))


_open: weakref.WeakSet[Beside] = weakref.WeakSet()


def _before_fork() -> None:
    for one in list(_open):
        one._pause(FORK_S)


def _after_fork() -> None:
    for one in list(_open):
        one._go_on()


def _in_child() -> None:
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
