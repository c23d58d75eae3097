"""All samples of a dataset, fetched in the background by forked processes into memory that they share with this one."""

from __future__ import annotations

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NoReturn

import torch
from torch import Tensor

from hotlap.core.warning_filters import filtered
from hotlap.machine.limits import read_cpu

Fetch = Callable[[Sequence[int]], list[Tensor]]
"""The tensors of a batch of samples at these indices."""

CHUNK: Final = 64
"""Samples that a process fetches at a time."""
LEAST_PROCESSES, MOST_PROCESSES = 2, 16
SPARE_CORES: Final = 1
"""Cores that are left to the training."""
NICE: Final = 10
"""How far the processes stand back behind the training, where both want a core."""
LEAST_S: Final = 0.3
"""Seconds of fetching that are worth processes of their own."""
PACE: Final = 0.7
"""How many times as fast as the training's own process each of them is, about: they leave the cores to the training."""
PATIENCE: Final = 10
"""How many times longer than expected fetching may take before it is given up."""
LEAST_PATIENCE_S: Final = 10.0
PAUSE_S: Final = 0.002
"""Seconds between two looks at processes that are waited for."""

_PR_SET_PDEATHSIG: Final = 1
"""Of Linux: the signal that a process gets when its parent ends."""


def free_cores(busy: int) -> int:
    """How many processes may fetch in the background beside `busy` others of this training; 0 where it does not pay.

    One alone is no faster than the training's own process, which keeps samples as they pass.
    """
    if sys.platform != "linux" or multiprocessing.get_start_method(allow_none=True) not in (None, "fork"):
        return 0
    beside = os.environ.get("LOCAL_WORLD_SIZE", "")  # processes that torchrun has started on this machine
    cores = read_cpu().cores // max(1, int(beside) if beside.isdecimal() else 1)
    found = min(MOST_PROCESSES, cores - SPARE_CORES - busy)
    return found if found >= LEAST_PROCESSES else 0


def processes_for(device: torch.device, alone_s: float, busy: int = 0) -> int:
    """How many processes may fetch what takes the training's own process so many seconds.

    None where the training computes on the cores itself, or `busy` other processes of it do.
    """
    return free_cores(busy) if device.type == "cuda" and alone_s >= LEAST_S else 0


def shared_s(alone_s: float, processes: int) -> float:
    """About how many seconds so many processes take; with none, the training's own process fetches."""
    return alone_s / max(1.0, PACE * processes)


class BackgroundFetch:
    """Fetches all samples, in processes of low priority, while this process goes on.

    Of each sample there is one row in each of `columns`. Rows may be read once `is_done`. A process that fails, or that
    takes far longer than expected, ends all of them; they end with this process, too.
    """

    def __init__(self, fetch: Fetch, like: Sequence[Tensor], total: int, *, processes: int, expected_s: float) -> None:
        """Forks at once. `like` is a batch on the host in the form that `fetch` returns. `expected_s` is how long
        this process alone would take. Raises OSError if there is no memory or no process."""
        self.processes = max(1, min(processes, -(-total // CHUNK)))
        self.has_failed = False
        self._total, self._chunks = total, -(-total // CHUNK)
        self._ends = time.monotonic() + LEAST_PATIENCE_S + PATIENCE * expected_s
        self.columns = [_shared(total, tensor) for tensor in like]
        self._fetched = mmap.mmap(-1, self._chunks)
        """For each chunk, whether it has been fetched."""
        self._pid: int | None = None
        pid = self._pid = self._forked(fetch)
        self._finalizer = weakref.finalize(self, _end, pid, os.getpid())

    @property
    def missing(self) -> float:
        """The share of samples that have not been fetched yet."""
        return 1 - self._fetched[:].count(1) / self._chunks

    @property
    def is_done(self) -> bool:
        """Whether all samples are there; looks at the processes, and waits for none."""
        if self._pid is not None and not self.has_failed:
            self._look()
        return self._pid is None and not self.has_failed

    def wait(self, progress: Callable[[int, int], None] | None = None) -> bool:
        """Wait for all samples, and call `progress` with those fetched and all; False if the processes failed."""
        while not self.is_done and not self.has_failed:
            if progress is not None:
                progress(int(self._total * (1 - self.missing)), self._total)
            time.sleep(PAUSE_S)
        return self.is_done

    def close(self) -> None:
        """End the processes."""
        self.has_failed = self.has_failed or self._pid is not None
        self._finalizer()
        self._pid = None

    def _look(self) -> None:
        assert self._pid is not None
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # the script waits for all of its children
            pid, status = self._pid, 0 if self.missing == 0 else 1
        if pid:
            self._finalizer.detach()
            self._pid, self.has_failed = None, status != 0
        elif time.monotonic() > self._ends:
            self.close()

    # --- in other processes ----------------------------------------------------------------------

    def _forked(self, fetch: Fetch) -> int:
        """Fork a leader, which forks the other processes: a single fork holds up the training."""
        parent, collects = os.getpid(), gc.isenabled()
        gc.disable()  # a forked process must not release what belongs to CUDA
        try:
            with filtered(category=DeprecationWarning):  # of forks beside threads
                pid = os.fork()
            if pid == 0:
                self._lead(fetch, parent)
            return pid
        finally:
            if collects:
                gc.enable()

    def _lead(self, fetch: Fetch, parent: int) -> NoReturn:
        status = 1
        try:
            end_with(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for given in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
                signal.signal(given, signal.SIG_DFL)
            os.nice(NICE)
            torch.set_num_threads(1)  # the threads of the parent are not here
            leader, others = os.getpid(), list[int]()
            for number in range(1, self.processes):
                pid = os.fork()
                if pid == 0:
                    end_with(leader)
                    self._work(fetch, number)
                    os._exit(0)
                others.append(pid)
            self._work(fetch, 0)
            status = int(any(os.waitpid(pid, 0)[1] for pid in others))
        finally:
            os._exit(status)

    def _work(self, fetch: Fetch, number: int) -> None:
        """Fetch the chunks that fall to one process: every n-th of n processes."""
        with torch.no_grad():
            for chunk in range(number, self._chunks, self.processes):
                start, end = chunk * CHUNK, min(self._total, (chunk + 1) * CHUNK)
                rows = fetch(range(start, end))
                for column, tensor in zip(self.columns, rows, strict=True):
                    if tensor.dtype != column.dtype or tensor.shape != column[start:end].shape:
                        os._exit(1)
                    column[start:end].copy_(tensor)
                self._fetched[chunk] = 1


def _shared(total: int, like: Tensor) -> Tensor:
    """Uninitialised memory for so many rows, which forked processes share. Takes memory as it fills."""
    shape = (total, *like.shape[1:])
    size = like[:1].numel() * like.element_size() * total
    if not size:
        return torch.empty(shape, dtype=like.dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, size), dtype=like.dtype).view(shape)


def end_with(parent: int) -> None:
    """End this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # which has ended already
        os._exit(1)


def _end(pid: int, parent: int) -> None:
    if os.getpid() == parent:  # not a fork of it, which ends earlier
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
