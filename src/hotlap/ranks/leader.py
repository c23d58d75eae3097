"""The rank that leads: it starts the others, announces each step to them, and notices those that are lost."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.core.errors import JobError, MachineError, TrainingError, first_line, install, shown
from hotlap.core.job import Job
from hotlap.core.object_memory import Changes
from hotlap.core.plan import MOST_RANKS
from hotlap.engine.exchange import UNUSED, Exchange, IncompleteExchangeError, Share
from hotlap.engine.rig import Rig
from hotlap.engine.step import Window
from hotlap.guard.hangs import LEAST_S, hang_s
from hotlap.guard.processes import ANSWERING, is_at_work, state_of, work_so_far
from hotlap.guard.saving import export_state
from hotlap.ranks.follower import Orders, buffers_of, join, meeting_place, options_of, receive, send, switches

ENDS_S = 5.0
"""How long a rank has to end by itself, and how long the reason of an error may take to show."""
Gpus = int | Literal["all"] | None


class LostRankError(TrainingError):
    """Another rank has ended, or does not answer."""


def ranks_wanted(gpus: Gpus, device: torch.device) -> int:
    """How many ranks `gpus` asks for on this machine; raises MachineError where it has fewer GPUs."""
    if gpus is None or gpus == 1:
        return 1
    if gpus != "all" and (isinstance(gpus, bool) or not isinstance(gpus, int) or not 1 <= gpus <= MOST_RANKS):
        raise JobError([f"gpus={shown(gpus)} must be 'all' or a whole number from 1 to {MOST_RANKS}"])
    if device.type == "cpu":
        if gpus == "all":
            raise MachineError("gpus='all' needs a GPU; on the CPU, gpus=2 tries two processes")
        return gpus
    there = torch.cuda.device_count()
    if gpus == "all":
        return there
    if gpus > there:
        raise MachineError(f"gpus={gpus} asks for {gpus} GPUs, and there {'is 1' if there == 1 else f'are {there}'}")
    if device.index not in (None, 0):
        raise JobError([f"gpus={gpus} begins with the first GPU: leave device={str(device)!r} out"])
    return gpus


def launch(fd: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """A new process that follows this one. It begins afresh, since a fork could not use CUDA after this one has."""
    command = [sys.executable, "-m", "hotlap.ranks.follower", str(fd), str(os.getpid())]
    return subprocess.Popen(command, pass_fds=[fd], env=environment, stdin=subprocess.DEVNULL)


def as_bytes(job: Job) -> bytes:
    """The message that takes a job to another process, with functions and classes of a script or notebook in it.

    Those need cloudpickle. Raises JobError where the job cannot be sent.
    """
    try:
        pickler: Any = importlib.import_module("cloudpickle")
    except ImportError:
        pickler = pickle
    try:
        made: bytes = pickler.dumps(("job", (job,)))
        if pickler is pickle and b"__main__" in made:
            raise pickle.PicklingError("it has functions or classes of this script")
    except Exception as error:
        why = f"the job cannot be sent to other processes: {type(error).__name__}: {first_line(error)}"
        raise JobError([why if pickler is not pickle else f"{why}; {install('cloudpickle')} may mend that"]) from None
    return made


class _Process:
    """Another rank, and the line to it."""

    def __init__(self, rank: int, device: torch.device, threads: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if device.type == "cuda":  # its one GPU, so that weights of the first GPU come to its own
            shown_to_us = os.environ.get("CUDA_VISIBLE_DEVICES")
            names = shown_to_us.split(",") if shown_to_us else [str(n) for n in range(torch.cuda.device_count())]
            environment["CUDA_VISIBLE_DEVICES"] = names[rank]
        self.process = launch(theirs.fileno(), environment)
        theirs.close()
        self.line = Connection(ours.detach())

    @property
    def name(self) -> str:
        """Its name for users."""
        return f"rank {self.rank} (process {self.process.pid})"

    def tell(self, what: str, *given: Any) -> None:
        """Send a message; LostRankError if it has ended."""
        try:
            send(self.line, what, *given)
        except OSError:
            raise self.lost() from None

    def answer(self, patience_s: float) -> Any:
        """What it sends next; raises LostRankError if it ends, or neither works nor answers for so long."""
        before, asked = work_so_far(self.process.pid), time.monotonic()
        try:
            while not self.line.poll(patience_s):
                now = work_so_far(self.process.pid)
                if not is_at_work(before, now, patience_s):
                    raise self.silent(time.monotonic() - asked)
                before = now
            what, given = receive(self.line)
        except (OSError, EOFError):
            raise self.lost() from None
        if what == "error":
            raise TrainingError(f"{self.name}: {given[0]}")
        return given[0] if given else None

    def silent(self, seconds: float) -> LostRankError:
        """The error that it does not answer."""
        return LostRankError(f"{self.name} {state_of(self.process.pid)} and has not answered for {seconds:.0f} s")

    def lost(self) -> LostRankError:
        """The error that it has ended."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(ENDS_S)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return LostRankError(f"{self.name} {how}")
        return LostRankError(f"{self.name} has closed its line")

    def reason(self) -> Exception | None:
        """Why it is lost; None if it is there."""
        with suppress(OSError, EOFError):
            if self.line.poll():
                what, given = receive(self.line)
                # What it says of an exchange that broke has its reason elsewhere.
                if what == "error" and not is_exchange(given[0]):
                    return TrainingError(f"{self.name}: {given[0]}")
        if self.process.poll() is not None and self.process.returncode < 0:
            return self.lost()
        return None

    def end(self) -> None:
        """End it."""
        with suppress(OSError):
            send(self.line, "end")
        self.line.close()
        self.process.kill()
        self.process.wait()


def is_exchange(text: str) -> bool:
    """Whether an error says that an exchange with other ranks failed."""
    return any(word in text for word in ("gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset"))


class Leader(Exchange):
    """The rank of the process that trains. Other ranks get state and orders from it, and make its steps with it."""

    def __init__(self, job: Job, size: int, device: torch.device) -> None:
        super().__init__(0, size)
        self._job, self._device = job, device
        self._all_threads = torch.get_num_threads()
        self._threads = max(1, self._all_threads // size)
        self._patience_s = hang_s()
        self.changes: Changes | None = None
        """What modules, the optimizer and functions remember since the start."""
        self._others: list[_Process] = []
        self._meeting: Path | None = None
        self._has_joined = self._has_totals = False
        self._told: dict[str, Any] = {}
        """What the others know already."""
        if dist.is_initialized():
            raise MachineError("this process belongs to a torch.distributed group already: train with gpus=1 in each")
        self._start()

    # --- orders ------------------------------------------------------------------------------------

    def begin_step(self, rig: Rig, window: Window) -> None:
        """Have the others make the step of this window too, if the plan shares it."""
        if rig.plan.execution.ranks == 1:
            self._compute_with(self._all_threads)
            self.is_stale = True
            return
        self._compute_with(self._threads)
        if not self._has_joined:
            self._join()
        if self.is_stale:
            self._send_state(rig)
        place = rig.place
        if self._told.get("epoch") != place.epoch:
            epoch = rig.order_of(place.epoch)
            self._tell("epoch", place.epoch, epoch.indices, [*epoch.ends], epoch.accumulate, epoch.length)
            self._told["epoch"] = place.epoch
        self._update("use", rig.plan)
        self._update("options", options_of(rig))
        self._tell("step", place.epoch, place.window - 1, rig.steps)
        self._has_totals = True

    def evaluation(self, rig: Rig, data: Any, batch_size: int) -> Share | None:
        """This rank's share of an evaluation of the job's validation data."""
        if rig.plan.execution.ranks == 1 or not self._has_joined or data is not self._job.valid:
            return None
        if self.is_stale:
            self._send_state(rig)
        self._update("use", rig.plan)
        self._tell("evaluate", batch_size, [buffer.cpu() for buffer in buffers_of(rig)])
        return Share(self.rank, self.size, self._answers)

    def take_totals(self) -> Sequence[tuple[Tensor, Tensor, int]]:
        """The running losses of the other ranks."""
        if not self._has_totals:
            return ()
        self._has_totals = False
        self._tell("totals")
        return self._answers()

    def data_changed(self) -> None:
        """Let the others get the data anew."""
        self._let_go()

    def _update(self, what: str, value: Any) -> None:
        if self._told.get(what) != value:
            self._tell(what, value)
            self._told[what] = value

    def _tell(self, what: str, *given: Any) -> None:
        try:
            for other in self._others:
                other.tell(what, *given)
        except LostRankError:
            self._let_go()
            raise

    def _answers(self) -> list[Any]:
        try:
            return [other.answer(self._patience_s or 30 * LEAST_S) for other in self._others]
        except TrainingError:
            self._let_go()
            raise

    def _send_state(self, rig: Rig) -> None:
        """Send weights, state and place, as a checkpoint holds them."""
        remembered = [] if self.changes is None else self.changes.found()[0]
        files = export_state(rig, {}, remembered)
        self._tell("state", {name: b"".join(bytes(piece) for piece in pieces) for name, pieces in files.items()})
        self.forget()
        self._told.clear()
        self.is_stale = self._has_totals = False

    # --- processes ---------------------------------------------------------------------------------

    def _start(self) -> None:
        self._others = [_Process(rank, self._device, self._threads) for rank in range(1, self.size)]

    def _join(self) -> None:
        """Send each rank its job, and join them."""
        if not self._others:
            self._start()
        shipped = as_bytes(
            dataclasses.replace(self._job, schedule=None, schedule_per="update", device=self._device.type)
        )
        backend = "nccl" if self._device.type == "cuda" and dist.is_nccl_available() else "gloo"
        self._meeting = meeting_place()
        meeting = str(self._meeting / "meeting")
        for other in self._others:
            orders = Orders(
                rank=other.rank,
                size=self.size,
                backend=backend,
                meeting=meeting,
                threads=self._threads,
                path=list(sys.path),
                has_unused=self.has_unused,
                switches=switches(),
            )
            other.tell("orders", orders)
            other.line.send_bytes(shipped)
        self._answers()
        self._tell("join")
        join(self.rank, self.size, backend, meeting, self._patience_s or 30 * LEAST_S)
        self._has_joined, self.is_stale = True, True

    def raise_lost(self, error: BaseException) -> None:
        """Name the rank that is the reason of an error in a shared step. Whatever it was, the group is of no use."""
        if not self._has_joined or self.is_stale:
            return
        by_exchange, until = is_exchange(str(error)), time.monotonic() + ENDS_S
        found: Exception | None = error if isinstance(error, IncompleteExchangeError) else None
        while found is None:
            found = next(filter(None, (other.reason() for other in self._others)), None)
            if not by_exchange or time.monotonic() > until:
                break
            time.sleep(0.01)
        if found is None and by_exchange:
            stopped = [one for one in self._others if state_of(one.process.pid) not in ANSWERING]
            found = (stopped or self._others)[0].silent(self._patience_s or 30 * LEAST_S)
        self._let_go()
        if IncompleteExchangeError.__name__ in (type(found).__name__, *str(found).split(": ")) and not self.has_unused:
            self.has_unused = True
            raise LostRankError(f"{UNUSED}; from here on the ranks look for such parameters in each step") from None
        if found is not None and found is not error:
            raise found from None

    def _let_go(self) -> None:
        """End the other ranks; the next shared step starts new ones."""
        for other in self._others:
            other.end()
        self._others = []
        self.forget()
        if dist.is_initialized() and self._has_joined:
            dist.destroy_process_group()
        self._has_joined = self._has_totals = False
        self.is_stale = True
        if self._meeting is not None:
            shutil.rmtree(self._meeting, ignore_errors=True)

    def close(self) -> None:
        """End the other ranks, and compute alone as before."""
        self._let_go()
        self._compute_with(self._all_threads)

    def _compute_with(self, threads: int) -> None:
        if self._device.type == "cpu" and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
