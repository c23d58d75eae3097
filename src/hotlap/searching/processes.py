"""Trainings in forked processes, as many at once as asked for, each on cores of its own.

A fork lacks the threads of its parent. OpenMP counts on those that it started in the thread that computes, and waits
for them for ever. So a thread that never computes makes the forks.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Final, NoReturn

import torch

from hotlap.core.errors import TrainingError, first_line
from hotlap.core.terminal import say
from hotlap.data.background_fetch import end_with
from hotlap.guard.signals import EXIT_CODES, StopRequest
from hotlap.machine.session_end import VARIABLE, session_end

LOOK_S: Final = 0.2
"""Seconds between two looks for a signal."""
STOP_S: Final = 60.0
"""Seconds that a process has to save its training before it is killed."""


def why_not_forked(device: torch.device) -> str | None:
    """Why trainings on a device cannot run in forked processes; None where they can."""
    if device.type != "cpu":
        return f"trainings on {device.type} run one after the other"
    if sys.platform != "linux":
        return "only Linux forks a process that computes"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return "this process has used the GPU, so its forks cannot compute"
    if multiprocessing.current_process().daemon:
        return "this process is a worker itself"
    return None


class Process:
    """A forked process and the pipe to it."""

    def __init__(self, pid: int, pipe: Connection) -> None:
        self.pid, self.pipe = pid, pipe
        self._status: int | None = None

    def receive(self) -> Any:
        """What the process sends next. Raises TrainingError where it has ended instead."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self.join()
            raise TrainingError(f"its process {_ended_words(self._status or 0)}") from None

    def join(self) -> None:
        """Wait for the end of the process."""
        while not self.has_ended():
            time.sleep(0.002)

    def has_ended(self) -> bool:
        """Whether the process has ended; does not wait."""
        if self._status is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # other code waits for all children of this process
                pid, status = self.pid, 0
            if pid:
                self._status = status
        return self._status is not None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _ended_words(status: int) -> str:
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"was killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")
    return f"ended with exit code {os.WEXITSTATUS(status)}"


class Processes:
    """Forked processes of this one; they end with it."""

    shares_memory: Final = False

    def __init__(self) -> None:
        self.running: list[Process] = []
        self._session_end = session_end()
        # What the processes take to end a step and to save.
        self._lead_s = 0.0 if self._session_end is None else self._session_end.margin_s
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # The system kills the forks when the thread that made them ends.
        self._thread = threading.Thread(target=self._make_forks, name="hotlap forks", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[Connection], None], *, threads: int, alone: bool = False) -> Process:
        """Call `work` with the other end of a pipe, in a new process that computes with so many threads.

        Each is alone in its process. Raises OSError where there is no memory or no process.
        """
        ours, theirs = Pipe()
        answers: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
        parent = os.getpid()
        others = [one.pipe for one in self.running]

        def fork() -> None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                    pid = os.fork()
            except OSError as error:
                answers.put(error)
                return
            if pid == 0:
                for pipe in (ours, *others):
                    pipe.close()
                _work(work, theirs, threads, parent)
            answers.put(pid)

        collects = gc.isenabled()
        gc.disable()  # a fork must not release what other threads hold
        try:
            self._tasks.put(fork)
            pid = answers.get()
        finally:
            if collects:
                gc.enable()
        theirs.close()
        if isinstance(pid, OSError):
            ours.close()
            raise pid
        process = Process(pid, ours)
        self.running.append(process)
        return process

    def wait(self) -> list[Process]:
        """Processes that have sent something or ended; a signal to stop ends all and then this process."""
        pipes = {process.pipe: process for process in self.running}
        with StopRequest(self._session_end, lead_s=self._lead_s) as stop:
            ready: list[Any] = []
            while not ready and stop.signal is None:
                ready = wait(list(pipes), timeout=LOOK_S)
        if stop.signal is not None:
            if stop.reason != stop.signal.name:
                say(f"stopped by {stop.reason}")
            self.close()
            stop.obey()
        return [process for pipe, process in pipes.items() if pipe in ready]

    def forget(self, process: Process) -> None:
        """Let go of a process that ends by itself."""
        self.running.remove(process)
        process.join()
        process.pipe.close()

    def end(self, process: Process, *, patience_s: float = STOP_S) -> None:
        """End a process; it may save its training first."""
        until_s = time.monotonic() + patience_s
        process.send_signal(signal.SIGTERM)
        while not process.has_ended() and time.monotonic() < until_s:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        self.forget(process)

    def close(self) -> None:
        """End all processes."""
        for process in self.running:
            process.send_signal(signal.SIGTERM)
            process.pipe.close()  # one that waits for an answer would wait forever, and not save
        for process in list(self.running):
            self.end(process)
        self._tasks.put(None)
        self._thread.join()

    def _make_forks(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


def _work(work: Callable[[Connection], None], pipe: Connection, threads: int, parent: int) -> NoReturn:
    """The life of a fork."""
    status = 1
    os.environ[VARIABLE] = "off"  # the parent sees to the end of the session, for all at once
    try:
        end_with(parent)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(threads)
        work(pipe)
        status = 0
    except KeyboardInterrupt:
        status = EXIT_CODES[signal.SIGINT]
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except (BrokenPipeError, EOFError):
        pass  # the parent has let go of this process
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def failure(error: Exception) -> str:
    """An error in one line, as it is sent from one process to another."""
    return f"{type(error).__name__}: {first_line(error)}"
