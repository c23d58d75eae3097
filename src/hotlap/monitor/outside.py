"""What is wrong with a running process, as far as it shows from outside: psutil, /proc, and the driver of the GPU.

hotlap only reads. It attaches to nothing, sends no signal, and does not slow the process down. Nothing here imports
torch.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from hotlap.core.errors import UsageError
from hotlap.core.terminal import clean
from hotlap.core.units import MIB, show_bytes, show_seconds
from hotlap.machine.limits import read_memory
from hotlap.machine.problems import Severity
from hotlap.machine.variables import recorded, variable_problems
from hotlap.monitor.findings import Finding, Findings
from hotlap.monitor.hardware import GpuReader, open_gpus
from hotlap.monitor.trainings import SILENT, Training, find

LOOK_S, LOOKS = 3.0, 15
"""How long hotlap looks, and how many times in that time."""
HOUR_S = 3600.0
"""What costs are for: nobody knows how long the process still runs."""
BUSY, IDLE = 0.85, 0.05
"""Of a core, from which on a thread is at work, and below which a process does nothing."""
WAITS, STARVED = 0.3, 0.2
"""The part of the time in which a process waits for a disk, or a thread for a core, from which on that is a finding."""
GROWS_BYTES = 32 * MIB
"""Memory that has to come in one look, and in most steps of it, to count as growth."""
SWAPPED_BYTES = 64 * MIB
GPU_IDLE = 0.5
YOUNG_S = 60.0
"""A process that is younger may still be loading."""


@dataclass(frozen=True, kw_only=True)
class One:
    """A process at one moment."""

    pid: int
    state: str
    cpu_s: float
    threads: dict[int, tuple[float, float]]
    """Seconds of a core that its threads have had, and seconds that they waited for one; of a child its first alone."""
    held_bytes: int
    swapped_bytes: int
    read_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Look:
    """What was seen of a process and its children over a few seconds."""

    pid: int
    command: tuple[str, ...]
    age_s: float
    cores: int
    """That it may use."""
    seconds: float
    main: tuple[One, ...]
    children: tuple[tuple[One, ...], ...]
    """Those that were there all the time, each as `main`."""
    variables: dict[str, str]
    """Of the environment that it began with, those that hotlap knows."""
    gpus: tuple[dict[str, Any], ...] = ()
    """The GPUs of the machine, each as it was on average; `own`: whether the process is there, None if unknown."""

    @property
    def next_command(self) -> str:
        """The words that name the training for other commands of hotlap."""
        words = list(self.command)
        if words and Path(words[0]).name.startswith("python"):
            words = words[1:]
        is_hotlap = len(words) > 1 and Path(words[0]).name == "hotlap" and words[1] == "run"
        own = words[2:] if is_hotlap else words
        return "train.py" if own[:1] in ([], ["-c"]) else clean(shlex.join(own)[:300])

    @property
    def everyone(self) -> tuple[tuple[One, ...], ...]:
        """The process and its children."""
        return (self.main, *self.children)

    def cores_of(self, one: Sequence[One]) -> float:
        """The cores that a process kept busy."""
        return max(0.0, one[-1].cpu_s - one[0].cpu_s) / self.seconds

    def threads_of(self, one: Sequence[One]) -> list[tuple[float, float]]:
        """Of a core, the part that each thread had, and the part that it waited for, the busiest first."""
        first, last = one[0].threads, one[-1].threads
        both = [(now, first.get(number, now)) for number, now in last.items()]
        parts = [((now[0] - was[0]) / self.seconds, (now[1] - was[1]) / self.seconds) for now, was in both]
        return sorted(parts, key=sum, reverse=True) or [(0.0, 0.0)]

    @property
    def workers(self) -> list[tuple[One, ...]]:
        """The children that live."""
        return [one for one in self.children if one[-1].state != ZOMBIE]


ZOMBIE, STOPPED, ON_DISK = "zombie", "stopped", "disk-sleep"
"""States by their names in psutil."""


def diagnose_process(pid: int, look_s: float = LOOK_S) -> Findings:
    """What is wrong with a running process, as far as it shows from outside.

    Raises UsageError if there is no such process, or it is another user's.
    """
    look = look_at(pid, look_s)
    training = _training_of(pid)
    name = f"process {pid}{f' ({clean(Path(look.command[0]).name)})' if look.command else ''}"
    notes = [f"hotlap looked for {show_seconds(look.seconds)} from outside and touched nothing"]
    found = list(findings_of(look))
    bound = _state_line(look)
    if training is not None:
        told = training.part("bound")
        bound = f"bound by {told['by']}: {told.get('why', '')}" if isinstance(told.get("by"), str) else bound
        notes.append(f"its run is {training.folder}: `hotlap diagnose {shlex.quote(str(training.folder))}`")
        if training.status == SILENT:
            what = "the training writes nothing any more"
            found.append(Finding(name="silent", what=what, change=f"`hotlap watch {pid}` shows whether it still works"))
    return Findings(name=name, found=tuple(found), bound=bound, over="an hour like this", notes=tuple(notes))


def look_at(pid: int, look_s: float = LOOK_S, *, open_readers: Callable[[], list[GpuReader]] | None = None) -> Look:
    """Look at a process and its children for some seconds. Raises UsageError where that is not possible."""
    import psutil

    try:
        process = psutil.Process(pid)
        _refuse_strangers(process)
        children = process.children(recursive=True)
        readers = open_gpus()[0] if open_readers is None else open_readers()
        seen: dict[int, list[One]] = {}
        readings: list[list[dict[str, Any]]] = []
        began = time.monotonic()
        for number in range(LOOKS):
            if number:
                time.sleep(look_s / (LOOKS - 1))
            for one in (process, *children):
                with suppress(psutil.Error):
                    seen.setdefault(one.pid, []).append(_moment(one, is_main=one.pid == pid))
            readings.append([reader.read() for reader in readers])
        seconds = max(1e-3, time.monotonic() - began)
        main = seen.pop(pid, [])
        if not main or not process.is_running():
            raise UsageError(f"process {pid} ended while hotlap looked at it")
        with process.oneshot():
            command, age_s = tuple(map(clean, process.cmdline())), time.time() - process.create_time()
        cores, variables = psutil.cpu_count() or 1, dict[str, str]()
        with suppress(psutil.Error, AttributeError):
            cores = len(process.cpu_affinity() or ()) or cores
        with suppress(psutil.Error):
            variables = recorded(process.environ())
    except UsageError:
        raise
    except (psutil.Error, ValueError, OverflowError):
        raise UsageError(
            _strangers(pid) or f"no process has the number {pid}; `hotlap watch` lists trainings"
        ) from None
    return Look(
        pid=pid,
        command=command,
        age_s=age_s,
        cores=cores,
        seconds=seconds,
        main=tuple(main),
        children=tuple(tuple(one) for one in seen.values() if len(one) == LOOKS),
        variables=variables,
        gpus=tuple(_on_average(reader, {pid, *seen}) for reader in zip(*readings, strict=True)) if readers else (),
    )


def _refuse_strangers(process: Any) -> None:
    if os.getuid() not in (0, process.uids().effective):
        raise UsageError(_strangers(process.pid) or f"process {process.pid} runs under another user's rights")


def _strangers(pid: int) -> str:
    """What to say of a process of another user; empty where it is none. Signal 0 only asks and reaches nobody."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return f"process {pid} is another user's and shows hotlap too little: run `hotlap diagnose {pid}` as that user"
    except (OSError, OverflowError):
        pass
    return ""


def _moment(process: Any, *, is_main: bool) -> One:
    with process.oneshot():
        times, state, held = process.cpu_times(), str(process.status()), int(process.memory_info().rss)
        numbers = [one.id for one in process.threads()] if is_main and state != ZOMBIE else [process.pid]
    swapped, read = 0, None
    with suppress(Exception):  # a zombie has none, and not every system counts it
        swapped = _swapped(process.pid)
        read = int(process.io_counters().read_bytes)
    return One(
        pid=process.pid,
        state=state,
        cpu_s=times.user + times.system,
        threads={number: had for number in numbers if (had := _had(process.pid, number)) is not None},
        held_bytes=held,
        swapped_bytes=swapped,
        read_bytes=read,
    )


def _had(pid: int, thread: int) -> tuple[float, float] | None:
    """Seconds that a thread computed, and that it waited for a core; None where the system does not tell."""
    try:
        computed, waited, *_ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
    except (OSError, ValueError):
        return None
    return int(computed) / 1e9, int(waited) / 1e9


def _swapped(pid: int) -> int:
    """Bytes of a process that lie in swap; psutil would read its whole map of memory for that."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmSwap:")), 0)


def _on_average(readings: Sequence[dict[str, Any]], pids: set[int]) -> dict[str, Any]:
    """The readings of a GPU as one, and whether one of these processes is on it."""
    busy = [reading["busy"] for reading in readings if reading.get("busy") is not None]
    on_it = {pid for reading in readings for pid in reading.get("other_pids", ())}
    own = bool(on_it & pids) if on_it else None  # in a container the driver may list nobody
    return {"name": readings[-1].get("name", "GPU"), "busy": fmean(busy) if busy else None, "own": own}


def _training_of(pid: int) -> Training | None:
    """The training of hotlap's that a process runs, by the runs below the folder that it works in."""
    import psutil

    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        words, home = process.cmdline(), Path(process.cwd())
        named = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--out"]
        for folder in (*(home / one for one in named), home / "runs"):
            mine = [one for one in find(folder) if one.is_open and one.state.get("pid") == pid]
            if mine:
                return mine[0]
    return None


def _state_line(look: Look) -> str:
    """How the process works, in one line."""
    parts = [f"{look.cores_of(look.main):.1f} of {look.cores} cores"]
    if look.workers:
        count = len(look.workers)
        more = sum(map(look.cores_of, look.workers))
        parts.append(f"{count} {'child' if count == 1 else 'children'} with {more:.1f} more")
    parts += [
        f"{gpu['name']} works {100 * gpu['busy']:.0f} % of the time" for gpu in look.gpus if gpu["busy"] is not None
    ]
    return f"it uses {', '.join(parts)}"


# --- findings --------------------------------------------------------------------------------------------


def findings_of(look: Look) -> Iterator[Finding]:
    """What is wrong by what was seen."""
    for judge in (_halted, _dead_workers, _disk, _feeding_or_alone, _others, _gpus, _memory, _threads, _variables):
        yield from judge(look)


def _halted(look: Look) -> Iterator[Finding]:
    states, pid = {one.state for one in look.main}, look.pid
    if states == {ZOMBIE}:
        what = "the process has ended, and its parent has not taken note"
        yield Finding(name="zombie", what=what, change="end or wait for its parent process")
    elif states == {STOPPED}:
        yield Finding(name="stopped", what="the process is stopped by a signal", change=f"`kill -CONT {pid}` goes on")
    elif sum(map(look.cores_of, look.everyone)) < IDLE and ON_DISK not in states and not _is_gpu_busy(look):
        yield Finding(
            name="nothing-moves",
            what="neither the process nor its children do anything",
            evidence=(f"{sum(map(look.cores_of, look.everyone)):.2f} cores in {show_seconds(look.seconds)}",),
            change=f"`py-spy dump --pid {pid}` shows where it waits (py-spy halts it for a moment)",
        )


def _dead_workers(look: Look) -> Iterator[Finding]:
    dead = [one[-1].pid for one in look.children if one[-1].state == ZOMBIE]
    if dead and look.main[-1].state != ZOMBIE:
        yield Finding(
            name="workers-die",
            what=f"{len(dead)} of its {len(look.children)} children {'are' if len(dead) > 1 else 'is'} dead",
            evidence=(f"process {', '.join(map(str, dead[:8]))}",),
            change=f"`dmesg` names a kill for want of memory; `hotlap diagnose {look.next_command}`",
        )


def _disk(look: Look) -> Iterator[Finding]:
    waits = {one[0].pid: fmean(moment.state == ON_DISK for moment in one) for one in look.everyone}
    worst = max(waits.values())
    if worst < WAITS:
        return
    reads = [(one[-1].read_bytes or 0) - (one[0].read_bytes or 0) for one in look.everyone]
    yield Finding(
        name="disk",
        what="it waits for a disk or a driver",
        evidence=(
            f"in {100 * worst:.0f} % of the looks a process waited for a disk",
            f"{show_bytes(max(0, sum(reads)) / look.seconds)} a second read",
        ),
        cost_s=worst * HOUR_S,
        change=f"copy the data to a local disk or into memory; `hotlap workers {look.next_command}`",
    )


def _feeding_or_alone(look: Look) -> Iterator[Finding]:
    """Workers that are all at work while the process waits for them, or a process whose one thread does everything."""
    own, (had, waited) = look.cores_of(look.main), look.threads_of(look.main)[0]
    workers = [sum(look.threads_of(worker)[0]) for worker in look.workers]
    if _is_gpu_busy(look):
        return
    if workers and fmean(workers) >= BUSY and had + waited < 1 - WAITS:
        yield Finding(
            name="feeding",
            what="the process waits for its workers, and all of them are at work",
            evidence=(f"{len(workers)} workers use {sum(map(look.cores_of, look.workers)):.1f} cores, it {own:.2f}",),
            cost_s=(1 - had - waited) * HOUR_S,
            change=f"`hotlap workers {look.next_command}` finds how many pay",
        )
    elif had + waited >= BUSY and own < 1.5 * had and look.cores > 1:
        idle = [1 - gpu["busy"] for gpu in look.gpus if gpu["own"] and gpu["busy"] is not None]
        cost_s = idle[0] * HOUR_S if idle else None
        yield Finding(
            name="one-core",
            what="one thread does all the work of the process",
            evidence=(f"its busiest thread uses {had:.2f} of a core, all of them {own:.2f} of {look.cores}",),
            cost_s=cost_s,
            unpriced="" if idle else "seconds are not known from outside",
            change=f"`hotlap diagnose {look.next_command}` names the lines that take the time",
        )


def _is_gpu_busy(look: Look) -> bool:
    return any(gpu["busy"] is not None and gpu["busy"] >= GPU_IDLE for gpu in look.gpus if gpu["own"] is not False)


def _others(look: Look) -> Iterator[Finding]:
    """Other processes that take the cores."""
    (had, waited), taken = look.threads_of(look.main)[0], sum(map(look.cores_of, look.everyone))
    if waited >= STARVED and taken < (1 - WAITS) * look.cores:
        yield Finding(
            name="another-process",
            what="other processes take the cores that this one could use",
            evidence=(f"its busiest thread computed {100 * had:.0f} % and waited {100 * waited:.0f} % of the time",),
            cost_s=min(1.0, waited) * HOUR_S,
            change="end them, or start this one elsewhere: `top` lists them",
        )


def _gpus(look: Look) -> Iterator[Finding]:
    own = [gpu for gpu in look.gpus if gpu["own"]]
    command = look.next_command
    is_elsewhere = all(gpu["own"] is False or (gpu["busy"] or 0.0) < IDLE for gpu in look.gpus)
    if look.gpus and not own and is_elsewhere and sum(look.threads_of(look.main)[0]) >= BUSY:
        yield Finding(
            name="on-cpu",
            what="the machine has a GPU, and the process does not use it",
            evidence=tuple(gpu["name"] for gpu in look.gpus),
            unpriced="seconds are not known from outside",
            change="move model and batches to the GPU; `hotlap doctor` shows whether torch sees it",
        )
    for gpu in own:
        if gpu["busy"] is not None and gpu["busy"] < GPU_IDLE:
            yield Finding(
                name="gpu-idle",
                what="its GPU has nothing to do for most of the time",
                evidence=(f"{gpu['name']} works {100 * gpu['busy']:.0f} % of the time",),
                cost_s=(1 - gpu["busy"]) * HOUR_S,
                change=f"`hotlap diagnose {command}` names the cause, `hotlap run {command}` tries what helps",
            )


def _memory(look: Look) -> Iterator[Finding]:
    looks = min(map(len, look.everyone))
    held = [sum(each[at].held_bytes for each in look.everyone) for at in range(looks)]
    grown = held[-1] - held[0]
    rises = [after > before for before, after in pairwise(held)]
    command, memory = look.next_command, read_memory()
    if grown >= GROWS_BYTES and fmean(rises) > GPU_IDLE:
        left_s = max(0, memory.free_bytes) / (grown / look.seconds)
        young = (f"it began {show_seconds(look.age_s)} ago and may still load",) if look.age_s < YOUNG_S else ()
        yield Finding(
            name="memory-grows",
            what="its memory grows",
            evidence=(
                f"from {show_bytes(held[0])} to {show_bytes(held[-1])} in {show_seconds(look.seconds)}",
                f"at this pace none is left in {show_seconds(left_s)}",
                *young,
            ),
            change=f"look again in a while; `hotlap memory {command}` names the lines",
        )
    swapped = sum(one[-1].swapped_bytes for one in look.everyone)
    if swapped >= SWAPPED_BYTES:
        yield Finding(
            name="swap",
            what="a part of its memory lies on a disk",
            evidence=(f"{show_bytes(swapped)} in swap", f"{show_bytes(memory.free_bytes)} of memory free"),
            unpriced="seconds are not known from outside",
            change=f"fewer workers or smaller batches: `hotlap memory {command}`; end what else takes memory",
        )


def _threads(look: Look) -> Iterator[Finding]:
    threads = [*look.threads_of(look.main), *(look.threads_of(worker)[0] for worker in look.workers)]
    working = sum(had + waited >= BUSY for had, waited in threads)
    if working > 1.5 * look.cores and sum(map(look.cores_of, look.everyone)) >= (1 - WAITS) * look.cores:
        yield Finding(
            name="too-many-threads",
            what="more threads work than there are cores, and push each other aside",
            evidence=(f"{working} threads and workers at work on {look.cores} cores",),
            unpriced="seconds are not known from outside",
            change=f"OMP_NUM_THREADS={look.cores}, or fewer workers: `hotlap workers {look.next_command}`",
        )


def _variables(look: Look) -> Iterator[Finding]:
    harms = [one for one in variable_problems(look.variables, look.cores) if one.severity is not Severity.NOTE]
    single = [one for one in variable_problems(look.variables, look.cores) if one.key.endswith("num-threads")]
    for harm in dict.fromkeys([*harms, *(single if not look.gpus else [])]):
        yield Finding(
            name="variables",
            what=f"{harm.what} is set, as the process began",
            evidence=(harm.costs,),
            unpriced="seconds are not known from outside",
            change=f"{harm.do}, and start again",
        )
