"""Back up after an out of memory: the larger pieces again, once memory has returned or a peak has passed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hotlap.core.ledger import Ledger
from hotlap.core.plan import Memory, Plan
from hotlap.core.units import show_bytes
from hotlap.engine.rig import Rig
from hotlap.machine.memory_shortage import free_bytes, has_returned

WAIT = 32
"""Windows that go through before larger pieces are tried again; twice as many after each try that soon failed."""
LASTS = 8
"""A try was worth it if the larger pieces went through this many times as long as hotlap had waited for it."""


@dataclass(frozen=True, kw_only=True)
class Larger:
    """A plan's use of memory that did not fit."""

    memory: Memory
    compile: str
    free_bytes: int | None
    """Free memory when it ran out, after the step was undone; None for a failure in an earlier process."""
    asked_bytes: int | None = None
    fitted: bool = False
    """Whether windows went through before, with it or with more memory."""


class LargerPlans:
    """The plans that ran out of memory, each smaller than the one before, and when to try the last of them again."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._plans = _left_by(rig.ledger)
        self._waits: Counter[Memory] = Counter()
        self._windows = 0
        """Windows since the last failure or try."""
        self._due = WAIT

    def __bool__(self) -> bool:
        return bool(self._plans)

    def failed(self, plan: Plan, asked_bytes: int | None, *, fitted: bool) -> None:
        """Take in that a plan ran out of memory, once a smaller one is in force and its own memory is free."""
        memory = plan.memory
        wait = self._waits[memory]
        if wait and self._windows < LASTS * wait:
            self._waits[memory] = 2 * wait
        one = Larger(
            memory=memory,
            compile=plan.execution.compile,
            free_bytes=free_bytes(self._rig.device),
            asked_bytes=asked_bytes,
            fitted=fitted or any(larger.fitted for larger in self._plans),
        )
        self._plans.append(one)
        self._windows, self._due = 0, self._waits[memory] or WAIT

    def went_through(self) -> None:
        """Take in that a window went through."""
        self._windows += 1

    def next(self) -> tuple[Plan, str] | None:
        """The plan to go back to from the next window on, and why; None if it is not time, or memory is as short."""
        if self._windows < self._due or not self._plans:
            return None
        one = self._plans[-1]
        self._due = self._windows + WAIT
        why = _why_now(one, free_bytes(self._rig.device))
        plan = replace(self._rig.plan, memory=one.memory)
        if why is None or self._rig.supports(plan) is not None:
            return None
        compiled = plan.but(compile=one.compile)
        if not one.memory.checkpoint and self._rig.supports(compiled) is None:
            plan = compiled
        self._plans.pop()
        self._waits[one.memory] = max(WAIT, self._waits[one.memory])
        self._windows, self._due = 0, WAIT
        return plan, why


def _why_now(one: Larger, free: int) -> str | None:
    if one.free_bytes is None:
        return f"{show_bytes(free)} is free in this process"
    if has_returned(one.free_bytes, free, one.asked_bytes):
        return f"memory has returned: {show_bytes(free)} is free, {show_bytes(one.free_bytes)} was when it ran out"
    return "it fitted before memory ran out" if one.fitted else None


def _left_by(ledger: Ledger) -> list[Larger]:
    """The plans that an earlier process left for want of memory and has not gone back to."""
    found: list[Larger] = []
    before: Plan | None = None
    for entry in ledger:
        if before is not None and entry.plan.memory != before.memory:
            if entry.outcome == "fault":
                found.append(Larger(memory=before.memory, compile=before.execution.compile, free_bytes=None))
            elif found and entry.plan.memory == found[-1].memory:
                found.pop()
        before = entry.plan
    return found
