"""Stopping on SIGTERM or SIGINT: a flag is set, the step is finished, the training is saved, and only then it ends."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

WATCHED = (signal.SIGINT, signal.SIGTERM)
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}


class StopRequest:
    """Inside, SIGINT and SIGTERM only set `signal`; outside, they act as before. One that is ignored stays ignored.

    In a thread other than the main one nothing is changed: Python delivers signals to the main one alone.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for watched in WATCHED:
                # A shell starts a job in the background, and nohup any, with signals ignored that are not for it.
                if signal.getsignal(watched) is not signal.SIG_IGN:
                    self._before[watched] = signal.signal(watched, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watched, handler in self._before.items():
            signal.signal(watched, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first one names the exit code; a second while saving changes nothing.
        if self.signal is None:
            self.signal = signal.Signals(number)

    def comes_within(self, seconds: float) -> bool:
        """Whether a signal has come, or comes in so many seconds."""
        deadline = time.monotonic() + seconds
        while self.signal is None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.signal is not None

    def obey(self) -> None:
        """End as the signal would have ended it: KeyboardInterrupt, or exit code 143."""
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(EXIT_CODES[self.signal])
