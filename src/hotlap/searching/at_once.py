"""How many trainings at once are fastest: found on copies of one of them, and kept or rejected as a move is."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch

from hotlap import machine
from hotlap.core.console import open_console
from hotlap.core.errors import JobError, TrainingError, shown
from hotlap.core.job import Job
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.turns import turn
from hotlap.core.units import show_bytes, show_seconds
from hotlap.data.dataset import training_dataset
from hotlap.data.order import mix, seed_host
from hotlap.engine.capture.recording import drops_in_recurrence
from hotlap.fitting.task import Found, set_up
from hotlap.machine.cuda import free_for_torch
from hotlap.machine.limits import most_workers, read_memory
from hotlap.searching.crews import Pipe, Worker, crew_for, most_at_once, set_up_s, threads_of, why_not_at_once
from hotlap.searching.processes import Process, failure
from hotlap.searching.turns import MOST_TURNS
from hotlap.tuner.stats import Comparison

LAP_S, LAP_STEPS = 0.2, 5
"""A lap takes so many seconds, or so many steps where that is longer."""
MOST_QUADS = 8
LIKELY_LAPS = 10
"""Laps of a comparison, as far as the cost is foreseen: two quads, and the first lap of each side."""
SHARE = 0.1
"""Of the seconds that trainings at once can save, what finding out may cost."""
MEMORY = 0.5
"""Of the free memory, what trainings at once may take."""

Chosen = Plan | Found | Mapping[str, Any] | str | Path | None


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """The trainings to come, as those before them suggest."""

    count: int
    each_s: float
    """Seconds that one alone takes."""
    step_s: float
    """Seconds a step of one alone."""


class Side(Protocol):
    """One side of a comparison: copies of a training that step when they are asked to."""

    def lap(self, seconds: float) -> float:
        """Seconds an update, over all copies, in a lap of so many seconds."""

    def bytes_each(self) -> int:
        """Memory of a copy that it shares with no other process."""

    def close(self) -> None:
        """End the copies."""


def checked(at_once: int | None) -> int | None:
    """A number of trainings at once, as it was asked for; JobError where it cannot be had."""
    if at_once is None:
        return None
    if isinstance(at_once, bool) or not isinstance(at_once, int) or at_once < 1:
        raise JobError([f"at_once={shown(at_once)} must be a whole number, 1 or more"])
    if at_once > (most := max(most_workers(), MOST_TURNS)):
        raise JobError([f"at_once={at_once} is too many for this machine: at most {most}"])
    return at_once


def how_many(
    job: Job,
    ahead: Ahead,
    ledger: Ledger,
    side: Callable[[int, int], Side],
    *,
    device: torch.device,
    cores: int | None = None,
    free_bytes: int | None = None,
) -> int:
    """How many trainings at once are fastest; the ledger gets a line for each number that was tried.

    `side` makes copies of the job: so many, with so many threads each.
    """
    most = min(most_at_once(device) if cores is None else cores, ahead.count)
    why = why_not_at_once(device) or _why_alone(job, device) or _why_not_worth_it(ahead, most, device)
    if why is not None:
        _write(ledger, "trainings at once", "not tried", why)
        return 1
    best = 1
    champion: Side | None = None
    began_s, saves_s = time.perf_counter(), ahead.count * ahead.each_s
    try:
        champion = side(1, torch.get_num_threads())
        count = most
        while count > 1:
            if why := _why_no_room(count, champion, device, free_bytes):
                _write(ledger, f"{count} trainings at once", "not tried", why)
                count //= 2
                continue
            rival = side(count, threads_of(count, device))
            is_faster = False
            try:
                is_faster = _is_faster(champion, rival, count, ledger, ahead, most_s=SHARE * saves_s)
            finally:
                (champion if is_faster else rival).close()
            if is_faster:
                best, champion = count, rival
            elif best > 1:
                break  # fewer still would be slower yet
            if time.perf_counter() - began_s > SHARE * saves_s:
                break
            count //= 2
    except (TrainingError, OSError) as error:
        _write(ledger, "trainings at once", "rejected", str(error))
        best = 1
    finally:
        if champion is not None:
            champion.close()
    return best


def _why_alone(job: Job, device: torch.device) -> str | None:
    if drops_in_recurrence([job.model], device):
        return "torch has one state of recurrent layers' dropout for a GPU, so these train one after the other"
    return None


def _why_not_worth_it(ahead: Ahead, most: int, device: torch.device) -> str | None:
    if most < 2:
        return "there is one core" if ahead.count > 1 else "one training is left"
    lap_s = max(LAP_S, LAP_STEPS * ahead.step_s)
    cost_s, saves_s = set_up_s(most, device) + LIKELY_LAPS * lap_s, (1 - 1 / most) * ahead.count * ahead.each_s
    if cost_s > SHARE * saves_s:
        return f"finding out takes {show_seconds(cost_s)}, and at most {show_seconds(saves_s)} can be saved"
    return None


def _why_no_room(count: int, copies: Side, device: torch.device, free_bytes: int | None) -> str | None:
    free = free_bytes
    if free is None:
        free = free_for_torch(device) if device.type == "cuda" else read_memory().free_bytes
    need = count * copies.bytes_each()
    if need > MEMORY * free:
        return f"they take about {show_bytes(need)}, and {show_bytes(free)} are free"
    return None


def _is_faster(champion: Side, rival: Side, count: int, ledger: Ledger, ahead: Ahead, *, most_s: float) -> bool:
    """Whether the rival, so many at once, makes more updates a second than the champion."""
    lap_s, began_s = max(LAP_S, LAP_STEPS * ahead.step_s), time.perf_counter()
    comparison = Comparison(most_quads=MOST_QUADS)
    for copies in (champion, rival):
        copies.lap(lap_s)
    while comparison.verdict is None:
        a1, b1, b2, a2 = (copies.lap(lap_s) for copies in (champion, rival, rival, champion))
        comparison.add(a1, b1, b2, a2)
        if time.perf_counter() - began_s > most_s:
            break
    seen, verdict = comparison.estimate, comparison.verdict or "no difference seen"
    outcome = "kept" if verdict == "accepted" else "rejected"
    figures = {"ratio": seen.ratio, "low": seen.low, "high": seen.high, "noise": seen.noise}
    why = "as many updates a second, all together" if outcome == "kept" else verdict
    _write(ledger, f"{count} trainings at once", outcome, why, figures, time.perf_counter() - began_s)
    return outcome == "kept"


def _write(
    ledger: Ledger, what: str, outcome: str, why: str, figures: dict[str, float] | None = None, cost_s: float = 0.0
) -> None:
    ledger.record(
        Entry(
            step=ledger.last_step,
            what=what,
            outcome=outcome,
            plan=Plan(),
            why=why,
            figures=figures or {},
            cost_s=cost_s,
        )
    )


class Copies:
    """Copies of a training, in processes or in turns. They step only in laps, and leave nothing behind."""

    def __init__(self, job: Job, plan: Chosen, count: int, threads: int) -> None:
        self._device = machine.choose_device(job.device)
        self._crew, self._before = crew_for(self._device), self._taken()

        def started() -> Worker:
            mine = _twin_of(job) if self._crew.shares_memory else job

            def work(pipe: Pipe) -> None:
                try:
                    _step_on_request(mine, plan, pipe)
                except (EOFError, BrokenPipeError):
                    raise
                except Exception as error:
                    pipe.send(failure(error))

            worker: Worker = self._crew.start(work, threads=threads)
            return worker

        try:
            self._copies = [started() for _ in range(count)]
        except BaseException:
            self.close()
            raise

    def lap(self, seconds: float) -> float:
        """Seconds an update, over all copies."""
        for one in self._copies:
            one.pipe.send(seconds)
        paces = dict.fromkeys(self._copies, 0.0)
        missing: set[Worker] = set(self._copies)
        while missing:
            for one in self._crew.wait():
                answer = one.receive()
                if isinstance(answer, str):
                    raise TrainingError(answer)
                paces[one] = 1 / answer
                missing.discard(one)
        return 1 / math.fsum(paces.values())

    def bytes_each(self) -> int:
        """The memory that a copy shares with no other."""
        if self._crew.shares_memory:
            return max(0, self._taken() - self._before) // len(self._copies)
        first = self._copies[0]
        assert isinstance(first, Process)
        return int(psutil.Process(first.pid).memory_full_info().uss)

    def close(self) -> None:
        """End the copies."""
        self._crew.close()

    def _taken(self) -> int:
        return torch.cuda.memory_reserved(self._device) if self._device.type == "cuda" else 0


def _twin_of(job: Job) -> Job:
    """The same job with copies of model, loss and optimizer, on the same data. Raises TrainingError."""
    try:
        own = copy.deepcopy((job.model, job.loss, job.optimizer))
    except Exception as error:  # the user's classes may refuse it
        raise TrainingError(f"the model cannot be copied: {failure(error)}") from error
    return dataclasses.replace(job, model=own[0], loss=own[1], optimizer=own[2])


def _step_on_request(job: Job, plan: Chosen, pipe: Pipe) -> None:
    """Train for ever, as many seconds at a time as the pipe asks for."""
    device, console, mine = machine.choose_device(job.device), open_console(False), turn.get()
    seed_host(mix(job.seed))
    # A schedule made for the job's own updates may refuse to go on beyond them, and takes no time to speak of.
    endless = dataclasses.replace(job, schedule=None)
    dataset = training_dataset(endless, workers=machine.workers_wanted(), on_gpu=device.type == "cuda")
    chosen = plan.plan if isinstance(plan, Found) else plan if isinstance(plan, Plan) else "off"
    rig = set_up(endless, dataset, chosen, device, console, save_every=0).rig
    windows = rig.windows()
    while True:
        lap_s = pipe.recv()
        rig.advance(next(windows))  # what other processes did meanwhile has emptied the caches
        updates, began_s = 0, time.perf_counter()
        while not updates or time.perf_counter() - began_s < lap_s:
            window = next(windows)
            rig.advance(window)
            updates += window.updates
            if mine is not None:
                mine.pass_on()
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        pipe.send((time.perf_counter() - began_s) / updates)
