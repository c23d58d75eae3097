"""The life of a rank that follows: it makes the steps and evaluations that the leading rank announces.

`python -m hotlap.ranks.follower FD PARENT`, where FD is its end of the line to the process that started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap import machine
from hotlap.core.errors import first_line
from hotlap.core.plan import Plan
from hotlap.data.background_fetch import end_with
from hotlap.data.dataset import training_dataset
from hotlap.data.order import Epoch, GivenOrder, mix, seed_all
from hotlap.engine.exchange import Exchange
from hotlap.engine.rig import Place, Rig
from hotlap.engine.snapshot import changes_of
from hotlap.engine.step import Window
from hotlap.guard.saving import import_state

BY_PLAN = ("params", "fused", "foreach", "capturable")
"""Entries of an optimizer's groups that are each rank's own."""
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Variables that keep the exchange within this machine."""
FOR_EVER_S = 30 * 24 * 3600.0
"""A rank that follows waits for the others until the leading one ends it."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a new rank has to know before it gets its job."""

    rank: int
    size: int
    backend: str
    meeting: str
    """A file, by which the ranks find each other."""
    threads: int
    path: list[str]
    has_unused: bool
    """As `Exchange` takes it."""
    switches: tuple[Any, ...]
    """The leading rank's `switches`."""


def switches() -> tuple[Any, ...]:
    """Settings of torch for the whole process that decide numbers."""
    return torch.get_default_dtype(), torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Inside, ranks that join connect over the loopback device, unless the user's variables say otherwise."""
    added = [name for name in LOOPBACK if name not in os.environ] if sys.platform == "linux" else []
    os.environ.update({name: LOOPBACK[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def join(rank: int, size: int, backend: str, meeting: str, timeout_s: float) -> None:
    """Join the other ranks; waits for all of them."""
    with on_loopback():
        store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]
        timeout, hook = timedelta(seconds=timeout_s), sys.excepthook
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        sys.excepthook = hook  # torch puts the rank before each line of an error


def meeting_place() -> Path:
    """A new folder for the file by which ranks find each other."""
    return Path(tempfile.mkdtemp(prefix="hotlap-ranks-"))


def options_of(rig: Rig) -> list[dict[str, Any]]:
    """The settings of an optimizer's groups, which schedules move."""
    return [
        {name: float(value) if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in ({k: v for k, v in group.items() if k not in BY_PLAN} for group in rig.optimizer.param_groups)
    ]


def buffers_of(rig: Rig) -> list[Tensor]:
    """The buffers of model and loss, such as the statistics of batch norms."""
    return [buffer for module in rig.modules for buffer in module.buffers()]


class Follower:
    """A rank that has its job."""

    def __init__(self, orders: Orders, job: Any, line: Connection) -> None:
        self._orders, self._line = orders, line
        device = machine.choose_device(job.device)
        self._job = job
        dataset = training_dataset(job, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
        self._order = GivenOrder()
        settings = {name: getattr(job, name) for name in ("forward", "prepare", "augment", "clip", "skip_nonfinite")}
        self._rig = rig = Rig(job.model, job.optimizer, job.loss, **settings, device=device)
        rig.attach(dataclasses.replace(dataset, order=self._order))
        self._changes = changes_of(rig.modules, rig.optimizer, rig.objective.functions)
        self._windows = rig.windows()

    def join(self) -> None:
        """Join the other ranks."""
        orders = self._orders
        join(orders.rank, orders.size, orders.backend, orders.meeting, FOR_EVER_S)
        self._rig.share(Exchange(orders.rank, orders.size, has_unused=orders.has_unused))

    def state(self, files: dict[str, bytes]) -> None:
        """Take over the state of the leading rank."""
        import_state(self._rig, files, self._changes)
        self._rig.totals.reset()
        exchange = self._rig.exchange
        assert exchange is not None, "it has joined"
        exchange.forget()

    def epoch(self, number: int, indices: Tensor, ends: list[int], accumulate: int, length: int) -> None:
        """Take in the order of an epoch."""
        self._order.give(number, Epoch(indices, ends, accumulate, length))

    def options(self, groups: list[dict[str, Any]]) -> None:
        """Take over the settings of the optimizer."""
        for group, given in zip(self._rig.optimizer.param_groups, groups, strict=True):
            for name, value in given.items():
                if isinstance(group.get(name), Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def use(self, plan: Plan) -> None:
        """Use another plan."""
        self._rig.use(plan)

    def step(self, epoch: int, window: int, step: int) -> None:
        """Make the step of a window. What it draws depends on nothing before, so that it can be made again."""
        rig, place = self._rig, self._rig.place
        if (place.epoch, place.window) != (epoch, window):
            rig.place = Place(epoch, window, place.served)
        seed_all(mix(self._job.seed, self._orders.rank, step))
        mine: Window = next(self._windows)
        rig.advance(mine)

    def totals(self) -> None:
        """Send the running loss, and begin again from zero."""
        total, counted, count = self._rig.totals.saved()
        self._rig.totals.reset()
        send(self._line, "totals", (total.cpu(), counted.cpu(), count))

    def evaluate(self, batch_size: int, buffers: list[Tensor]) -> None:
        """Send the sums of this rank's part of an evaluation."""
        job, rig = self._job, self._rig
        for mine, theirs in zip(buffers_of(rig), buffers, strict=True):
            with torch.no_grad():
                mine.copy_(theirs)
        send(self._line, "sums", rig.evaluate_part(job.valid, job.metrics, batch_size, job.collate))


def send(line: Connection, what: str, *given: Any) -> None:
    """Send a message. Not by `Connection.send`, for which torch would share the memory of tensors."""
    line.send_bytes(pickle.dumps((what, given), protocol=pickle.HIGHEST_PROTOCOL))


def receive(line: Connection) -> tuple[str, tuple[Any, ...]]:
    """The next message, from a process of this training."""
    what, given = pickle.loads(line.recv_bytes())
    return what, given


def follow(line: Connection) -> None:
    """Do what the leading rank announces, until it ends."""
    _, (orders,) = receive(line)
    sys.path[:] = orders.path
    torch.set_num_threads(orders.threads)
    dtype, precision, deterministic = orders.switches
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(deterministic)
    _, (job,) = receive(line)
    follower = Follower(orders, job, line)
    send(line, "ready")
    while True:
        what, given = receive(line)
        if what == "end":
            return
        getattr(follower, what)(*given)


def main(fd: int, parent: int) -> None:
    """Follow the process `parent` over this end of its line, and send the error that ends this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the leading rank ends all after its step
    line = Connection(fd)
    if sys.platform == "linux":
        end_with(parent)
    status = 0
    try:
        follow(line)
    except (EOFError, ConnectionError):  # the leading rank has ended
        status = 1
    except BaseException as error:
        status = 1
        with contextlib.suppress(OSError):
            send(line, "error", f"{type(error).__name__}: {first_line(error)}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)  # not by way of threads that wait for other ranks


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
