"""Signals for the processes that tests start, whatever `nohup` or a shell's `&` has this process ignore."""

import signal
from contextlib import contextmanager


@contextmanager
def heeded(*numbers):
    """Inside, a program that is started heeds these signals; this process itself goes on ignoring those it ignored.

    A program inherits what its parent ignores, and no handler: so a handler that does nothing takes the place of
    "ignored". A terminal that is closed then ends no test run that `nohup` protects.
    """
    ignored = [number for number in numbers if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, _nothing)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)


def _nothing(number, frame):
    pass


def reset():
    """In a forked child: signals do what they do in a Python that was started in a terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
