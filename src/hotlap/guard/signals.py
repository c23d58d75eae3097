"""Stopping on a signal or before the session ends: hotlap finishes the step, saves the training, and then ends it."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from signal import Signals
from types import FrameType, TracebackType
from typing import Any, Self

from hotlap.core.turns import turn
from hotlap.machine.session_end import SessionEnd

WATCHED = (signal.SIGINT, signal.SIGTERM)
WARNINGS = tuple(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name))
"""What schedulers send before they end a job, as `sbatch --signal` asks for. Watched where it would end the process."""
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, **dict.fromkeys(WARNINGS, 143)}


class StopRequest:
    """Inside `with`, signals to stop only set `signal`; afterwards they act as before. Ignored signals stay ignored.

    Outside of the main thread that changes nothing, since Python delivers signals to the main thread only. A training
    that takes turns with others stops with them. Shortly before the `end` of the session `signal` becomes SIGTERM by
    itself.
    """

    def __init__(self, end: SessionEnd | None = None, *, lead_s: float = 0.0) -> None:
        self.end = end
        self.lead_s = lead_s
        """Seconds that what follows a stop takes."""
        self.reason = ""
        """What asked for the stop, in words."""
        self._signal: Signals | None = None
        self._before: dict[Signals, Any] = {}
        self._turn = turn.get()

    @property
    def signal(self) -> Signals | None:
        """The signal to stop by; None while nothing has asked for that."""
        self.comes_before(0.0)
        return self._signal

    def comes_before(self, seconds: float) -> bool:
        """Whether to stop rather than begin what takes so many seconds: a stop is asked for, or the session ends."""
        end = self.end
        if self._signal is None and self._turn is not None and self._turn.stop is not None:
            self._signal, self.reason = self._turn.stop, self._turn.stop.name
        if self._signal is None and end is not None and end.left_s - end.margin_s <= seconds + self.lead_s:
            self._signal, self.reason = signal.SIGTERM, f"the end of the session: it {end.line}"
        return self._signal is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for watched in WATCHED:
                # Shells (for background jobs) and nohup start a process with such signals ignored.
                if signal.getsignal(watched) is not signal.SIG_IGN:
                    self._before[watched] = signal.signal(watched, self._note)
            for watched in WARNINGS:
                if signal.getsignal(watched) is signal.SIG_DFL and not _is_caught(watched):
                    self._before[watched] = signal.signal(watched, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for watched, handler in self._before.items():
            signal.signal(watched, handler if handler is not None else signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # The first signal decides the exit code; a second one during the save changes nothing.
        if self._signal is None:
            self._signal = signal.Signals(number)
            self.reason = self._signal.name

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


def _is_caught(number: int) -> bool:
    """Whether code in C handles a signal, such as `faulthandler.register`: Python does not know of that."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
        caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return False
    return bool(caught >> (number - 1) & 1)
