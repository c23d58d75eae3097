"""Trainings that take turns in one process, so that their work overlaps on a GPU.

Each has a thread and a CUDA stream to itself, and one thread computes at a time. A training queues some steps on its
stream and passes its turn on; the GPU works on the streams of all. Work on the host is never at the same time, so
captures, patches and switches of torch need no locks. What a process has once moves with the turn: the generators of
the host, and the state of the GPU's.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from signal import SIGTERM, Signals
from typing import Any, Final

import torch

from hotlap.core.errors import TrainingError
from hotlap.core.terminal import say
from hotlap.core.turns import turn
from hotlap.data.order import HostRandomness
from hotlap.engine.capture.captured_step import MOST_AHEAD
from hotlap.engine.capture.recording import another_stream
from hotlap.engine.snapshot import generator_of
from hotlap.guard.signals import StopRequest
from hotlap.machine.session_end import session_end

MOST_TURNS: Final = 16
"""Trainings at a time. torch has 32 streams of a kind, and each training needs its own of two kinds."""
TURN_S: Final = 4e-3
"""A turn ends after so many seconds,"""
AHEAD: Final = MOST_AHEAD - 2
"""or once so many of its steps are queued on the GPU. With one more, a replay would wait for the GPU."""
ALONE_S: Final = 0.05
"""The turn of a training that has no others beside it: a signal waits so long."""
POLL_S: Final = 2e-5
"""Seconds between two looks at streams that are all full."""


def why_no_turns() -> str | None:
    """Why trainings cannot take turns in this process; None if they can."""
    if torch.is_autocast_enabled() or torch.get_default_device().type != "cpu":
        return "autocast or a default device is set in this thread, which other threads lack"
    return None


class Generators:
    """The generators that trainings draw from, as they are now."""

    def __init__(self, device: torch.device, *, copies: bool = False) -> None:
        """`copies` begins a state of the GPU's generator; otherwise the one in use is remembered, with its captures."""
        self._host, self._on_gpu = HostRandomness(), generator_of(device) if device.type == "cuda" else None
        self._state: torch.Generator | None = None
        if self._on_gpu is not None:
            self._state = self._on_gpu.clone_state() if copies else self._on_gpu.graphsafe_get_state()

    def restore(self) -> None:
        """Use them again."""
        self._host.restore()
        if self._on_gpu is not None and self._state is not None:
            self._on_gpu.graphsafe_set_state(self._state)


class Lane:
    """A thread, and on a GPU a stream, for one training at a time.

    They stay when a training has ended, and the next one takes them: cuBLAS keeps memory for each thread and stream.
    Recordings of several trainings must not share that memory, since each overwrites it.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = another_stream(device, priority=-1) if device.type == "cuda" else None
        self._tasks: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="hotlap training", daemon=True).start()

    def run(self, task: Callable[[], None]) -> None:
        """Run a task in the thread, once those before it have ended."""
        self._tasks.put(task)

    def _run(self) -> None:
        while True:
            self._tasks.get()()


_idle: dict[torch.device, list[Lane]] = {}
"""Lanes of this process that no training uses."""
os.register_at_fork(after_in_child=_idle.clear)  # a fork lacks their threads


class InTurns:
    """A training in a lane, and the pipe to it."""

    def __init__(self, work: Callable[[Any], None], turns: Turns, *, alone: bool) -> None:
        self.is_alone = alone
        self.stop: Signals | None = None
        self.is_waiting = True
        self.has_begun = self.has_ended = False
        self.generators = Generators(turns.device, copies=True)
        self._turns, self._go = turns, threading.Semaphore(0)
        self._sent, self._given = deque[Any](), deque[Any]()
        self._is_closed = self._reads = False
        self._ahead: deque[torch.cuda.Event] = deque()
        self._most, self._began_s = 0, 0.0
        self.pipe = End(self._give, self.receive, self._close)
        idle = _idle.setdefault(turns.device, [])
        self.lane = idle.pop() if idle else Lane(turns.device)
        self._stream = self.lane.stream
        self._start = None if self._stream is None else torch.cuda.current_stream(turns.device)
        self.lane.run(partial(contextvars.copy_context().run, self._live, work))

    # --- for the thread that gives turns ---------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Whether it has sent something or ended."""
        return bool(self._sent) or self.has_ended

    def is_ready(self) -> bool:
        """Whether it can go on without waiting: half of what it has queued is done, or all that it waits for."""
        if self.has_ended or (self._reads and not self._given and not self._is_closed):
            return False
        return self._queued() <= self._most

    def go_on(self) -> None:
        """Give it a turn, and wait for its end."""
        self.has_begun, self.is_waiting = True, False
        self._go.release()
        self._turns.back.acquire()
        self.is_waiting = True

    def receive(self) -> Any:
        """What it sends next. Raises TrainingError where it has ended instead."""
        if self._sent:
            return self._sent.popleft()
        raise TrainingError("its thread ended before its training did")

    def _give(self, value: Any) -> None:
        if self.has_ended:
            raise BrokenPipeError
        self._given.append(value)

    def _close(self) -> None:
        self._is_closed = True

    # --- in its own thread -----------------------------------------------------------------------------

    def pass_on(self, *, until_done: bool = False) -> None:
        """Let others compute if this training has had its turn, or until what it has queued is done."""
        if self.is_alone:
            return
        has_others = len(self._turns.running) > 1
        if self._stream is not None and has_others:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._ahead.append(event)
        self._most = 0 if until_done else AHEAD // 2
        is_over = time.perf_counter() - self._began_s > (TURN_S if has_others else ALONE_S)
        if is_over or self._queued() >= (1 if until_done else AHEAD):
            self._yield()

    def _queued(self) -> int:
        """Steps that the GPU has not done."""
        while self._ahead and self._ahead[0].query():  # type: ignore[no-untyped-call]
            self._ahead.popleft()
        return len(self._ahead)

    def _yield(self) -> None:
        self._turns.back.release()
        self._go.acquire()
        self._began_s = time.perf_counter()

    def _read(self) -> Any:
        """What was given to it next; EOFError where nothing will be."""
        self._reads = True
        while not self._given:
            if self._is_closed:
                raise EOFError
            self._yield()
        self._reads = False
        return self._given.popleft()

    def _live(self, work: Callable[[Any], None]) -> None:
        self._go.acquire()
        self._began_s = time.perf_counter()
        turn.set(self)
        try:
            if self._is_closed:
                raise EOFError
            with self._on_stream():
                work(End(self._sent.append, self._read, lambda: None))
        except (KeyboardInterrupt, SystemExit, EOFError, BrokenPipeError):
            pass  # it was stopped, or let go of
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            self._ahead.clear()
            self.has_ended = True
            self._turns.back.release()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Inside, work runs on its stream: after what was queued when it was started, and all done at the end."""
        if self._stream is None or self._start is None:
            yield
            return
        self._stream.wait_stream(self._start)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()


class End:
    """One end of the pipe between a training and what started it."""

    def __init__(self, send: Callable[[Any], None], recv: Callable[[], Any], close: Callable[[], None]) -> None:
        self.send, self.recv, self.close = send, recv, close


class Turns:
    """Trainings in threads of this process, for which `wait` gives turns."""

    shares_memory: Final = True
    """Whether what a training makes can be handed over as it is."""

    def __init__(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.device, self.back = device, threading.Semaphore(0)
        self.running: list[InTurns] = []
        self._holder: InTurns | None = None
        """Whose generators are in use; None for those of the caller."""
        self._next = 0
        self._session_end = session_end()
        self._lead_s = 0.0 if self._session_end is None else self._session_end.margin_s

    def start(self, work: Callable[[Any], None], *, threads: int, alone: bool = False) -> InTurns:
        """Call `work` with the other end of a pipe, in turns. One that is to be `alone` has a single turn."""
        training = InTurns(work, self, alone=alone)
        self.running.append(training)
        return training

    def wait(self) -> list[InTurns]:
        """Trainings that have sent something or ended; a signal to stop ends all and then this process."""
        with StopRequest(self._session_end, lead_s=self._lead_s) as stop, self._own_generators():
            while stop.signal is None:
                if news := [one for one in self.running if one.has_news]:
                    return news
                self._give_turn()
        if stop.reason != (stop.signal and stop.signal.name):
            say(f"stopped by {stop.reason}")
        self.close(stop.signal or SIGTERM)
        stop.obey()
        return []

    def forget(self, training: InTurns) -> None:
        """Let go of a training that ends by itself."""
        with self._own_generators():
            while not training.has_ended:
                self._give_turn()
        self.running.remove(training)
        _idle[self.device].append(training.lane)

    def close(self, signal: Signals = SIGTERM) -> None:
        """End all trainings, each after its step and a checkpoint."""
        for training in self.running:
            training.stop = signal
            training.pipe.close()
        for training in list(self.running):
            self.forget(training)

    def _give_turn(self) -> None:
        """Let the next training compute that is ready."""
        training = self._whose_turn()
        if training is None:
            time.sleep(POLL_S)
            return
        if training is not self._holder:
            self._set_aside()
            training.generators.restore()
            self._holder = training
        training.go_on()

    def _whose_turn(self) -> InTurns | None:
        """The next one that is ready. One that is alone goes on to its end once it has begun."""
        alone = next((one for one in self.running if one.is_alone and one.has_begun and not one.has_ended), None)
        if alone is not None:
            return alone if alone.is_ready() else None
        for _ in self.running:
            self._next += 1
            training = self.running[self._next % len(self.running)]
            if training.is_ready():
                return training
        return None

    @contextlib.contextmanager
    def _own_generators(self) -> Iterator[None]:
        """Inside, generators move with the turns; afterwards the caller's are in use."""
        mine = Generators(self.device)
        try:
            yield
        finally:
            self._set_aside()
            mine.restore()

    def _set_aside(self) -> None:
        """Keep the generators of the training that had the last turn, as it left them."""
        if self._holder is not None:
            self._holder.generators, self._holder = Generators(self.device), None
