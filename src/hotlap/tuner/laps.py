"""Laps: blocks of training steps, long enough to be timed, under one plan each."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from hotlap.core.plan import Plan
from hotlap.engine.protocol import TunableTraining

LAP_S = 0.05
"""The least a lap takes."""
LEAST_WINDOWS = 4
"""And the least it has: one step tells little of the next."""
LONG_S = 0.5
"""Unless it takes so long."""
ENOUGH = 0.8
"""Of that length, what a lap may turn out to have taken; one that was shorter goes on."""
SHORT_S = 2.0
"""What an epoch takes at most for it to count as short."""
MOST_WARM = 64
"""Windows after which a plan is timed, whether it is at its pace or not: some never come to it."""
MOST_AGAIN = 8
"""Laps thrown away since the plan was not at its pace all the while; the next one counts as it is."""


@dataclass(frozen=True, kw_only=True)
class Lap:
    """One lap, and what came before it since it was asked for."""

    step_s: float
    """Seconds an update."""
    updates: int
    """Updates made since the lap was asked for, those before it began included."""
    wall_s: float
    """Seconds since it was asked for, without pauses."""
    feed_s: float | None = None
    """Seconds an update that the host waited for its batch; None if `fed` was not called."""
    issue_s: float | None = None
    """Seconds an update that the host took to issue it to the device; None if `fed` was not called."""
    behind_s: float | None = None
    """Seconds that the device was behind the host when the lap's last step had been asked for."""


class LapClock:
    """Times the laps of a training that its own loop drives.

    The host may be far ahead of the device, so that a lap that is long enough to the host is many times too long. How
    long steps take is therefore looked at early in the first lap under a plan, and known from then on.

    A lap lies inside an epoch: one that is cut by its end, by an evaluation or by a save is thrown away. Where the time
    between two of them is shorter than a lap, laps are whole numbers of such periods instead, and what is done between
    them is left out of the time. So they are where epochs are short and have at most `few_windows`: what a script does
    at one step of each epoch (it saves, or prints) would be in some laps and not in others.
    """

    def __init__(
        self,
        training: TunableTraining,
        *,
        period: int | None = None,
        few_windows: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._training, self._period, self._few_windows, self._clock = training, period, few_windows, clock
        self._has_short_epochs = False
        self._whole: set[Plan] = set()
        """Plans under which a lap does not fit between two ends."""
        self._paces: dict[Plan, float] = {}
        """Seconds an update under each plan, as last seen."""
        self._hosts: dict[Plan, tuple[float, float]] = {}
        """Seconds an update that the host waited for its batch and then took to ask the device for it, by plan."""
        self._laps = 0
        self._cut = 0
        self._timing = False
        self._asked = clock()
        self._feed_s = self._issue_s = 0.0
        self._fed_updates = 0
        self._fed_at: float | None = None
        self._last_end = False
        self.ask(warm=1)

    def ask(self, *, warm: int, since: float | None = None) -> None:
        """Begin a lap under the plan in force, once so many windows have been made under it and it is at its pace.

        `since`: when it was asked for, where that is not now.
        """
        self._warm, self._warmed = warm, 0
        self._cut = self._again = 0
        self._timing, self._warmup_steps = False, self._training.warmup_steps
        self._asked, self._paused_s, self._made = self._clock() if since is None else since, 0.0, 0
        if warm == 0 and self._may_begin():
            self._begin()

    def so_far(self) -> tuple[int, float]:
        """Updates since the lap was asked for, and the seconds that they took, without pauses."""
        return self._made, self._clock() - self._asked - self._paused_s

    def fed(self, seconds: float) -> None:
        """Take in how long the host waited for the next batch."""
        self._feed_s += seconds
        self._fed_at = self._clock()

    def paused(self, seconds: float) -> None:
        """Take in that so many seconds went by for something else than steps."""
        self._paused_s += seconds
        if self._timing and not self._is_whole:
            self._void(0)

    @property
    def quiet(self) -> int:
        """Windows of one update each that may pass before the next call of `stepped`, which may count all of them.

        The very first lap needs a call for every window, to learn what the host waits for.
        """
        plan = self._training.plan
        if not self._timing or not self._laps or plan not in self._paces:
            return 0
        to_end = self._training.epoch_windows - self._training.place.window
        if self._is_whole:
            return max(0, to_end - 1)
        windows = max(LEAST_WINDOWS, math.ceil(LAP_S / max(self._paces[plan], 1e-9))) - self._windows
        return max(0, min(windows, to_end) - 1)

    def stepped(self, updates: int, windows: int = 1) -> Lap | None:
        """Take in one window, or several quiet ones and the next; the lap, if this ends one."""
        self._made += updates
        end = self._last_end = self._is_end()
        if not self._timing:
            self._warmed += 1
            if self._may_begin():
                self._begin()
            self._warmup_steps = self._training.warmup_steps
            return None
        now = self._clock()
        self._updates += updates
        self._windows += windows
        if self._fed_at is not None:
            self._issue_s += now - self._fed_at
            self._fed_updates, self._fed_at = self._fed_updates + updates // windows, None
        plan = self._training.plan
        if plan not in self._paces and self._windows == LEAST_WINDOWS:
            self._training.wait()
            self._paces[plan] = self._timed(self._clock()) / self._updates
        took_s = max(self._timed(now), self._paces.get(plan, 0.0) * self._updates)
        least_s = LAP_S if self._windows >= LEAST_WINDOWS or self._is_whole else LONG_S
        if end and not self._is_whole:
            self._void(1)
            return None
        if took_s < least_s or (self._is_whole and not end):
            return None
        asked = self._clock()
        self._training.wait()
        now = self._clock()
        if self._training.warmup_steps != self._warmup_steps and self._again < MOST_AGAIN:
            self._timing = False
            self._again, self._warm, self._warmed = self._again + 1, 0, 0
            self._warmup_steps = self._training.warmup_steps
            if self._may_begin():
                self._begin()
            return None
        step_s = self._paces[plan] = self._timed(now) / self._updates
        if self._timed(now) < ENOUGH * least_s:
            return None  # the device is faster than when it was last looked at
        self._timing, self._laps = False, self._laps + 1
        if self._laps == 1:
            windows = self._training.epoch_windows
            self._has_short_epochs = windows <= self._few_windows and windows * step_s <= SHORT_S
        feed_s, issue_s = self._of_host()
        return Lap(
            step_s=step_s,
            updates=self._made,
            wall_s=now - self._asked - self._paused_s,
            feed_s=feed_s,
            issue_s=issue_s,
            behind_s=now - asked,
        )

    def _of_host(self) -> tuple[float, float] | tuple[None, None]:
        """What the host did in this lap, or in an earlier one where most of this was quiet."""
        plan, fed = self._training.plan, self._fed_updates
        if fed and (2 * fed >= self._updates or plan not in self._hosts):
            self._hosts[plan] = self._feed_s / fed, self._issue_s / fed
        return self._hosts.get(plan, (None, None))

    def _timed(self, now: float) -> float:
        """Seconds since the lap began, without pauses."""
        return now - self._began - (self._paused_s - self._paused_before)

    def _may_begin(self) -> bool:
        at_pace = self._training.warmup_steps == self._warmup_steps or self._warmed >= MOST_WARM
        if self._warmed < self._warm or not at_pace:
            return False
        # Not on the last window of an epoch, nor behind it; whole periods begin nowhere else.
        return self._last_end == self._is_whole

    @property
    def _is_whole(self) -> bool:
        """Whether laps under the plan in force are whole epochs, or periods."""
        return self._has_short_epochs or self._training.plan in self._whole

    def _begin(self) -> None:
        self._training.wait()
        self._timing, self._updates, self._windows = True, 0, 0
        self._feed_s, self._issue_s, self._fed_updates, self._fed_at = 0.0, 0.0, 0, None
        self._paused_before = self._paused_s
        self._began = self._clock()

    def _void(self, ends: int) -> None:
        self._timing, self._cut = False, self._cut + ends
        self._warm, self._warmed = 1, 0
        # Cut by two ends in a row, it does not fit between them. (What else cuts in comes now and then.)
        if self._cut >= 2:
            self._whole.add(self._training.plan)
            self._warm = 0

    def _is_end(self) -> bool:
        training = self._training
        if self._period is not None and training.steps % self._period == 0:
            return True
        return training.place.window >= training.epoch_windows
