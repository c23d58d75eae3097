"""Stopping on SIGTERM or SIGINT: hotlap sets a flag, finishes the step, saves the training, and then ends it."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

WATCHED = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StopRequest:
    """Inside `with`, SIGINT and SIGTERM only set `signal`; afterwards they act as before. Ignored signals stay ignored.

    Outside of the main thread nothing changes, since Python delivers signals to the main thread only.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for watched in WATCHED:
                # Shells (for background jobs) and nohup start a process with such signals ignored.
                if signal.getsignal(watched) is not signal.SIG_IGN:
                    self._before[watched] = signal.signal(watched, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watched, handler in self._before.items():
            signal.signal(watched, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first signal decides the exit code; a second one during the save changes nothing.
        if self.signal is None:
            self.signal = signal.Signals(number)

    def comes_within(self, seconds: float) -> bool:
        """Whether a signal has come or comes within `seconds`."""
        deadline = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signal is not None

    def obey(self) -> None:
        """End the process as the signal would have: KeyboardInterrupt, or exit code 143."""
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(EXIT_CODES[self.signal])
