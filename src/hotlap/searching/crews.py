"""What trains several at once: forked processes on the CPU, threads that take turns on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hotlap.machine.limits import most_workers, read_cpu
from hotlap.searching.processes import Processes, why_not_forked
from hotlap.searching.turns import MOST_TURNS, Turns, why_no_turns

SET_UP_S, TURN_SET_UP_S = 1.0, 0.25
"""Seconds that processes take to begin all together; and a training that begins in its turn."""


class Pipe(Protocol):
    """One end of a pipe. Where the other end is gone, BrokenPipeError or EOFError is raised."""

    def send(self, obj: Any, /) -> None:
        """Send a value to the other end."""

    def recv(self) -> Any:
        """What the other end sends next; waits for it."""


class Worker(Protocol):
    """One training of several."""

    @property
    def pipe(self) -> Pipe:
        """This side's end of the pipe to it."""

    def receive(self) -> Any:
        """What it has sent. Raises TrainingError where it has ended instead."""


class Crew(Protocol):
    """Trainings that go on at the same time."""

    @property
    def shares_memory(self) -> bool:
        """Whether they run in this process, so that what they make can be handed over as it is."""

    def start(self, work: Callable[[Any], None], *, threads: int, alone: bool = False) -> Any:
        """Call `work` with the other end of a pipe; its Worker. OSError where there is no memory for one more."""

    def wait(self) -> Sequence[Any]:
        """Workers that have sent something or ended; a signal to stop ends all and then this process."""

    def forget(self, worker: Any, /) -> None:
        """Let go of a worker that ends by itself."""

    def close(self) -> None:
        """End all; each saves its training first."""


def takes_turns(device: torch.device) -> bool:
    """Whether trainings on a device take turns in this process, rather than have processes of their own."""
    return device.type == "cuda"


def crew_for(device: torch.device) -> Crew:
    """A new crew for trainings on a device."""
    return Turns(device) if takes_turns(device) else Processes()


def why_not_at_once(device: torch.device, count: int = 1) -> str | None:
    """Why so many trainings on a device cannot go on at the same time; None if they can."""
    if not takes_turns(device):
        is_many = count > most_workers()
        return f"at most {most_workers()} train at once on this machine" if is_many else why_not_forked(device)
    if count > MOST_TURNS:
        return f"at most {MOST_TURNS} train at once on a GPU"
    return why_no_turns()


def most_at_once(device: torch.device) -> int:
    """The largest number worth trying."""
    return MOST_TURNS if takes_turns(device) else read_cpu().cores


def threads_of(at_once: int, device: torch.device) -> int:
    """Threads for each of so many trainings."""
    return torch.get_num_threads() if takes_turns(device) else max(1, torch.get_num_threads() // at_once)


def set_up_s(count: int, device: torch.device) -> float:
    """Seconds until so many copies of a training have made their first steps, about."""
    return SET_UP_S + count * TURN_SET_UP_S if takes_turns(device) else SET_UP_S
