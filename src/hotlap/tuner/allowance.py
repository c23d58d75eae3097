"""The time that a trial may take: gates and glances ask between their updates whether it is over, and stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_until: ContextVar[float] = ContextVar("until", default=math.inf)


class SpentError(BaseException):
    """All that may be spent was. No handler on the way takes it for a fault of the plan on trial."""


@contextmanager
def allowed(seconds: float) -> Iterator[None]:
    """Inside, `check_allowed` raises SpentError once so many seconds are over."""
    token = _until.set(time.perf_counter() + seconds)
    try:
        yield
    finally:
        _until.reset(token)


def check_allowed() -> None:
    """Raise SpentError where the time is over; outside of `allowed` it never is."""
    if time.perf_counter() > _until.get():
        raise SpentError
