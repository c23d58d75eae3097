"""The time that a trial may take: gates and glances ask between their updates whether it is over, and stop.

The first update of a glance asks between modules too: loading the kernels of another precision can take longer than
all the rest of a short run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.nn.modules.module import register_module_forward_pre_hook

_until: ContextVar[float] = ContextVar("until", default=math.inf)


class SpentError(BaseException):
    """All that may be spent was. No handler on the way takes it for a fault of the plan on trial."""


@contextmanager
def allowed(seconds: float, *, at_least: bool = False) -> Iterator[None]:
    """Inside, `check_allowed` raises SpentError once so many seconds are over; with `at_least`, not before."""
    until = time.perf_counter() + seconds
    token = _until.set(max(until, _until.get()) if at_least else until)
    try:
        yield
    finally:
        _until.reset(token)


@contextmanager
def checked_between_modules() -> Iterator[None]:
    """Inside, every call of a module raises SpentError where the time is over."""
    hook = register_module_forward_pre_hook(lambda module, arguments: check_allowed())
    try:
        yield
    finally:
        hook.remove()


def check_allowed() -> None:
    """Raise SpentError where the time is over; outside of `allowed` it never is."""
    if time.perf_counter() > _until.get():
        raise SpentError
