"""What tuning may cost: a small share of the run, a quarter of what it has saved already, a tenth of what it will.

The share is larger where the training was seen to wait for what moves can spare it: there, a trial that fails costs
little beside what one that succeeds saves. The same holds of what was seen to be much faster at a glance. In a script
all of that together stays below what may be lost if every trial fails.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch.nn.modules.module import register_module_forward_pre_hook

SHARE = 0.015
"""Of the run, as predicted at the user's own pace."""
HOPEFUL_SHARE = 0.04
"""The same where it was measured that there is much to be had."""
OF_SAVED = 0.25
"""Of what kept moves have saved so far."""
OF_COMING = 0.1
"""Of what they will save in the rest of the run, at the least."""
OF_HOPED = 0.25
"""Of what all moves together would save, as a glance has shown, for their one trial."""
MOST_S = 60.0
"""And never more, unless the user says how much it may be."""


class Length(NamedTuple):
    """How many updates a training makes in all."""

    updates: int
    final: bool = True
    """Whether that is certain; else it is a guess, and the training may turn out longer."""
    known: bool = True
    """Whether something says so; else it is as many again as were made."""


class Budget:
    """Seconds beyond what the same updates would have taken under the user's own plan."""

    def __init__(
        self,
        *,
        base_s: float,
        length: Callable[[], Length],
        most_s: float | None = None,
        most_lost: float = math.inf,
    ) -> None:
        """`most_s` is what the user lets it cost, whatever the run takes and tuning saves.

        `most_lost` is the share of the run that may be lost if nothing comes of what is only hoped for.
        """
        self.base_s = base_s
        """Seconds an update under the user's own plan, as last measured: a machine's pace changes."""
        self._length, self._most_s, self._most_lost = length, most_s, most_lost
        self.is_hopeful = False
        """Whether it was measured that there is much to be had."""
        self.spent_s = 0.0
        self.saved_s = 0.0
        self.coming_s = 0.0
        """What the rest of the run will take less than under the user's own plan, at the least."""
        self.hoped_s = 0.0
        """What all moves together would save in the rest of the run, where a glance at them has shown much."""
        self.is_seen = False
        """Whether that was seen at a glance, and not only hoped for."""
        self.wall_s, self.updates = 0.0, 0
        """Of all laps, so far."""

    @property
    def all_s(self) -> float:
        """What may be spent in all, as things state."""
        if self._most_s is not None:
            return self._most_s
        return min(self.most_s, self._unlost_s, self._earned_s + OF_HOPED * self.hoped_s)

    @property
    def most_s(self) -> float:
        """What may be spent in all at the very most, whatever is saved."""
        return self._most_s if self._most_s is not None else MOST_S

    @property
    def _unlost_s(self) -> float:
        """What may be spent in all so that the run takes at most `most_lost` longer, whatever comes of the trials."""
        if math.isinf(self._most_lost):
            return math.inf
        return self._most_lost * self.base_s * self._length().updates + self.saved_s + OF_COMING * self.coming_s

    @property
    def _earned_s(self) -> float:
        """What may be spent whatever is hoped for: a share of the run, and of what was gained."""
        share = HOPEFUL_SHARE if self.is_hopeful else SHARE
        share_s = share * self.base_s * self._length().updates
        return share_s + OF_SAVED * self.saved_s + OF_COMING * self.coming_s

    @property
    def left_s(self) -> float:
        """What may still be spent. The cost of a glance does not reduce what its gain allows for the trial."""
        if self._most_s is not None or not self.is_seen or not self.hoped_s:
            return self.all_s - self.spent_s
        left_s = max(0.0, self._earned_s - self.spent_s) + OF_HOPED * self.hoped_s
        return min(left_s, self.most_s - self.spent_s, self._unlost_s - self.spent_s)

    @property
    def sure_s(self) -> float:
        """What may still be spent, whatever is hoped for."""
        if self._most_s is not None:
            return self.left_s
        return min(self.most_s, self._unlost_s, self._earned_s) - self.spent_s

    @property
    def overdraft_s(self) -> float:
        """How much longer than thought a gate may take before all of it is lost: what was seen would pay for it."""
        hoped_s = OF_HOPED * self.hoped_s if self.is_seen and self._most_s is None else 0.0
        return min(hoped_s, max(0.0, self._unlost_s - self.spent_s - self.left_s))

    @property
    def net_s(self) -> float:
        """Seconds that the updates so far took less than at the user's own pace, net of the cost of tuning."""
        return self.saved_s - self.spent_s

    def lost_s(self, step_s: float) -> float:
        """What all of it took beyond a pace of so many seconds an update."""
        return self.wall_s - self.updates * step_s

    def made(self, updates: int, wall_s: float) -> None:
        """Book so many updates that took so long: slower than the user's own pace costs, faster saves."""
        self.wall_s += wall_s
        self.updates += updates
        beyond = wall_s - updates * self.base_s
        if beyond > 0:
            self.spent_s += beyond
        else:
            self.saved_s -= beyond


def savings(tuned: Mapping[str, float], *, updates: int, looks_s: float) -> dict[str, float]:
    """The figures of a tuning when the run ends, `updates` after it.

    `tuned` are those of when it was over: `cost_s`, `net_s` saved by then, and seconds an update under the user's own
    plan (`own_s`) and the one found (`found_s`). `looks_s` is what looking after the plan took since. Savings count
    updates that were made, net of all costs, and only if these paces are known.
    """
    figures = {**tuned, "cost_s": tuned.get("cost_s", 0.0) + looks_s}
    if {"net_s", "own_s", "found_s"} <= tuned.keys():
        net_s = tuned["net_s"] + updates * (tuned["own_s"] - tuned["found_s"]) - looks_s
        figures |= {"net_s": net_s, "saved_s": net_s}
    return figures


_until: ContextVar[float] = ContextVar("until", default=math.inf)


class SpentError(BaseException):
    """All that may be spent was. No handler on the way takes it for a fault of the plan on trial."""


@contextmanager
def allowed(seconds: float, *, at_least: bool = False) -> Iterator[None]:
    """Inside, `check_allowed` raises SpentError once so many seconds are over; with `at_least`, not before.

    The first update of a glance checks between modules too: loading the kernels of another precision can take longer
    than all the rest of a short run.
    """
    until = time.perf_counter() + seconds
    token = _until.set(max(until, _until.get()) if at_least else until)
    try:
        yield
    finally:
        _until.reset(token)


@contextmanager
def checked_between_modules() -> Iterator[None]:
    """Inside, every call of a module raises SpentError where the time is over."""
    hook = register_module_forward_pre_hook(lambda module, arguments: check_allowed())
    try:
        yield
    finally:
        hook.remove()


def check_allowed() -> None:
    """Raise SpentError where the time is over; outside of `allowed` it never is."""
    if time.perf_counter() > _until.get():
        raise SpentError
