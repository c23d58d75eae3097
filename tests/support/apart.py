"""What processes of `parallel_map` do in its tests. They import this file only, and no torch, which takes seconds."""

import multiprocessing
import os
import signal
from math import isqrt

from hotlap.core.errors import StoreError
from hotlap.data.parallel import parallel_map


def with_its_process(number):
    return number, os.getpid()


def divided(by, number):
    return by // number


def strict(number):
    if number == 7:
        raise StoreError("row 7 of the table is missing")
    return number


def deadly(number):
    if multiprocessing.current_process().daemon:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def unsendable(number):
    return (lambda: number) if multiprocessing.current_process().daemon else number


def nested(number):
    return parallel_map(isqrt, [number, number**2], workers=2)
