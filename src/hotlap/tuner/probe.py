"""What bounds a training, and what a change of plan can give at most."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator

import torch

from hotlap.core.errors import first_line
from hotlap.core.plan import MOST_REPLAY_STEPS, Feed, Plan
from hotlap.core.terminal import logger
from hotlap.core.torch_private import cuda_sleep, tree_leaves
from hotlap.core.units import show_seconds
from hotlap.data.batches import map_tensors
from hotlap.engine.rig import Rig
from hotlap.engine.step import Window
from hotlap.machine.prediction import Work
from hotlap.monitor.bound import Diagnosis, diagnose, least_traffic
from hotlap.monitor.calibration import calibration
from hotlap.monitor.census import census
from hotlap.monitor.work import count_work
from hotlap.tuner.budget import SpentError, allowed, check_allowed, checked_between_modules
from hotlap.tuner.laps import Lap
from hotlap.tuner.stats import LEAST_GAIN

log = logger(__name__)

CALIBRATION_S = 1.0
"""What calibrating a machine takes at most; it is done once, and only where so much may well be spent."""
MARGIN = 1.25
"""A kernel may be so much faster than the ones that were calibrated."""
REPLAY_S = 2.5e-5
"""What one replay takes beside its updates, at most; about 21 µs were measured on an H200."""
IDLE = 0.5
"""Where a GPU is behind its host by less of a step than this, it waits for the host most of the time."""
HOPE = 1.25
"""How many times as fast a step must promise to become for more to be spent on trials."""
CLOCK_HZ = 2e9
"""About the clock of a GPU, in which it counts how long it waits."""
COMPILED = 2.0
"""What compiling a step that is recorded gives at most: 1.58x is the most that was measured on an H200."""
BOUND_TO_PAY = 0.05
"""Of the user's own step, what another precision has to spare in arithmetic alone to be taken for a gain."""
GLANCES, GLANCED, MOST_WARM = 3, 4, 12
"""How often so many updates are timed at a glance, of which the fastest count, and windows made before at most."""
UPDATES = 8
"""What a glance takes, in updates of the user's own, about."""
GLANCED_S = 0.02
"""Or as many as take so long, where that is fewer."""
GLANCED_AT = ("cuda",)
"""Kinds of device on which trials are so dear that a glance comes before them."""
WAITS = 0.1
"""Of a step, what the host waits for its workers from which on they are what bounds it."""
FEED_CHOICES = {field.name for field in dataclasses.fields(Feed)}


class Probe:
    """Looks at a training once, and knows from then on what cannot pay."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._diagnosis: Diagnosis | None = None
        self._diagnosed: Plan | None = None
        self._feeding: float | None = None
        self._behind = 1.0
        self._step_s = 0.0
        self.busy_s: float | None = None
        """Seconds that the device computes for an update, where that was measured."""
        self.work: Work | None = None
        """What an update asks of any GPU, where that was counted."""

    def look(self, lap: Lap, *, may_s: float) -> None:
        """Find out what bounds it, within about so many seconds."""
        self._feeding, self._step_s = _share(lap), lap.step_s
        if self._device.type == "cuda" and lap.behind_s is not None:
            self._behind = lap.behind_s / lap.step_s

    def hope(self, step_s: float, *, feed_stays: bool) -> float:
        """How many times as fast steps of so many seconds were if the device never waited for its host.

        1 where that is not much, or unknown. Where the `feed_stays`, what it takes is still waited for.
        """
        if self.busy_s is None:
            return 1.0
        feed_s = (self._feeding or 0.0) * self._step_s if feed_stays else 0.0
        found = step_s / max(self.busy_s, feed_s)
        return found if found >= HOPE else 1.0

    def hope_of_feeding(self, lap: Lap) -> float:
        """How many times as fast a step were if its batch came at once; 1 where that is not much, or unknown."""
        found = 1 / max(1e-9, 1 - (_share(lap) or 0.0))
        return found if found >= HOPE else 1.0

    @property
    def is_busy(self) -> bool:
        """Whether the device was seen to compute for most of a step: no more is to be had by waiting less."""
        return self.busy_s is not None and HOPE * self.busy_s > self._step_s > 0

    @property
    def is_hopeful(self) -> bool:
        """Whether the device was seen to wait for what moves can spare the host."""
        return self._behind < IDLE and self.bound in ("feeding", "pageable copies", "launching")

    @property
    def bound(self) -> str:
        """What bounds the training, in the words that moves use."""
        if self._diagnosis is not None:
            # Waits keep the device from running ahead, as launching does; a captured step has neither.
            return "launching" if self._diagnosis.bound == "synchronising" else self._diagnosis.bound
        if (self._feeding or 0.0) > 0.5:
            return "feeding"
        return "launching" if self._device.type == "cpu" or self._behind < IDLE else "arithmetic"

    @property
    def diagnosed(self) -> tuple[Diagnosis, Plan] | None:
        """What was found of a step and the plan that it was made under; None where none was counted."""
        if self._diagnosis is None or self._diagnosed is None:
            return None
        return self._diagnosis, self._diagnosed

    @property
    def line(self) -> str:
        """The diagnosis for people."""
        if self._diagnosis is not None:
            return self._diagnosis.line()
        return "" if self._feeding is None else f"bringing batches takes {100 * self._feeding:.0f} % of a step"

    def glance(self, plan: Plan) -> float | None:
        """Seconds an update under a plan, roughly, from a few updates made aside; None if none were made."""
        return None

    def is_bound_to_pay(self, plan: Plan, proposed: Plan) -> bool:
        """Whether the proposed precision spares so much arithmetic that it is tried beside all else."""
        if self._diagnosis is None:
            return False
        one, other = (self._diagnosis.floor_s.get(p.numerics.precision, 0.0) for p in (plan, proposed))
        return other > 0 and one - other > BOUND_TO_PAY * self._diagnosis.step_s

    def most_gain(self, plan: Plan, proposed: Plan, lap: Lap) -> tuple[float, str]:
        """How many times faster the proposed plan can be at most than `plan`, of which `lap` is; and what says so."""
        changed = set(plan.changes(proposed))
        if changed <= {"replay_steps"}:
            fewer = 1 / plan.execution.replay_steps - 1 / proposed.execution.replay_steps
            share = REPLAY_S * fewer / lap.step_s
            most = 1 / max(1e-9, 1 - share)
            return most, f"fewer replays spare {100 * share:.1f} % of a step at most: {most:.2f}x"
        alone = self._device.type == "cpu" or plan.feed.kind == "resident"
        if alone and changed & FEED_CHOICES and changed <= FEED_CHOICES | {"replay_steps"}:
            # What is not spent on feeding stays. (From host to GPU a feed also changes what the step has to do.)
            feeding = _share(lap)
            if feeding is None:
                return float("inf"), ""
            most = 1 / max(1e-9, 1 - feeding)
            held = self._device.type != "cpu" and plan.feed.kind == "resident"
            if most >= LEAST_GAIN and held and proposed.feed.kind == "loader":
                return 1.0, "the data is on the device already, and nothing has to be fetched"
            return most, f"bringing batches takes {100 * feeding:.1f} % of a step: at most {most:.2f}x"
        floors = self._diagnosis.floor_s if self._diagnosis is not None else {}
        # What the device has no rate for it computes in fp32; where it may choose, the lowest floor counts.
        floor_s = min(
            (floors.get(name, 0.0) for name in {proposed.numerics.precision, "tf32"} & set(floors)), default=0
        )
        compiles = "compile" in changed <= {"compile", "depthwise"}
        most = COMPILED if compiles and plan.execution.mode == "captured" else float("inf")
        if floor_s <= 0:
            return most, ""
        most = min(most, MARGIN * lap.step_s / floor_s)
        return most, f"its arithmetic takes {show_seconds(floor_s)} of {show_seconds(lap.step_s)}: at most {most:.2f}x"


class CountingProbe(Probe):
    """Makes one step of a Rig aside, and counts what it asks of the device."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.device)
        self._rig = rig

    def look(self, lap: Lap, *, may_s: float) -> None:
        """Count one step and find out what bounds it, within about so many seconds."""
        super().look(lap, may_s=may_s)
        rig = self._rig
        self.busy_s = self._busy_s(lap.step_s)
        rates = calibration(rig.device, known_only=may_s < 2 * CALIBRATION_S)
        if rates is None or rig.why_no_trial() is not None:
            return
        with rig.aside():
            window = next(rig.windows(room=lambda: 1))
            pageable = _pageable_bytes(window) if rig.device.type == "cuda" else 0
            counted = census(lambda: rig.advance(window))
            least_bytes = least_traffic(rig.optimizer)
            self.work = count_work(lambda: rig.advance(window))
        self._diagnosed = rig.plan
        self._diagnosis = diagnose(
            step_s=lap.step_s,
            feed_s=lap.feed_s or 0.0,
            issue_s=lap.step_s if lap.issue_s is None else lap.issue_s,
            census=counted,
            calibration=rates,
            waits=counted.waits,
            precision=rig.plan.numerics.precision,
            least_bytes=least_bytes,
            pageable_bytes=pageable,
            busy_s=self.busy_s,
        )

    def _busy_s(self, step_s: float) -> float | None:
        """Seconds that the device computes for one update.

        It is made to wait while the host issues all of the update, which it then computes without a gap. The host
        cannot issue more than 1,024 kernels ahead: of a longer update the figure is too high, and the hope too small.
        """
        rig = self._rig
        if rig.device.type != "cuda":
            return None
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        try:
            with rig.aside():
                window = next(rig.windows(room=lambda: 1))
                pieces = [map_tensors(piece, lambda tensor: tensor.to(rig.device)) for piece in window.pieces]
                window = Window(pieces, window.sizes, window.all_count, window.updates)
                rig.wait()
                cuda_sleep(int(1.5 * step_s * CLOCK_HZ))
                began.record()
                rig.advance(window)
                ended.record()
                rig.wait()
                return float(began.elapsed_time(ended)) / 1000
        except Exception as error:  # whatever the user's code makes of a step aside
            log.info("not seen how long the device computes: %s", first_line(error))
            return None

    def glance(self, plan: Plan) -> float | None:
        """Seconds an update under a plan, roughly, from a few updates made aside; None if none were made."""
        rig = self._rig
        if rig.windows_here < _needed(plan):
            plan = plan.but(replay_steps=1)  # of a short epoch one update at a time has to do
        place, needed = rig.place, _needed(plan)
        if rig.device.type not in GLANCED_AT or rig.windows_here < needed or rig.why_no_trial() is not None:
            return None
        feed = plan.feed
        if feed == rig.plan.feed and feed.workers and (self._feeding or 0.0) > WAITS:
            return None  # what workers have ready is seen at a glance, not how fast they are
        step_s: float | None = None
        with rig.aside():
            try:
                # Any place of the epoch is as good as this.
                rig.place = place._replace(window=min(place.window, rig.windows_here - needed))
                rig.use(plan)
                step_s = _roughly(rig, self._step_s)
            except SpentError:
                log.info("nothing was seen at a glance: it took too long")
            except Exception as error:  # whatever a plan may do; whether it can be obeyed is for the gates to say
                log.info("nothing was seen at a glance: %s", first_line(error))
        if step_s is None:  # what was made for it may be what there is no room for
            rig.release_other_plans()
            rig.keep_plans()
        return step_s


def _pageable_bytes(window: Window) -> int:
    """What a window brings in memory of the host that is not pinned."""
    leaves = [leaf for piece in window.pieces for leaf in tree_leaves(piece) if isinstance(leaf, torch.Tensor)]
    return sum(leaf.nbytes for leaf in leaves if leaf.device.type == "cpu" and not leaf.is_pinned())


def _needed(plan: Plan) -> int:
    """Windows of an epoch that a glance at a plan takes."""
    together = plan.execution.replay_steps
    return (MOST_WARM + GLANCES * math.ceil(GLANCED / together)) * together


def _roughly(rig: Rig, own_s: float) -> float:
    """Seconds an update takes at its fastest, once what is recorded is; `own_s` is what the user's own takes."""
    windows = rig.windows(room=lambda: MOST_REPLAY_STEPS)
    with checked_between_modules():
        rig.advance(next(windows))
        rig.wait()
    # Its kernels are loaded, which is what takes long. All of that would be lost for some updates more.
    with allowed(UPDATES * own_s, at_least=True):
        return _fastest(rig, windows)


def _fastest(rig: Rig, windows: Iterator[Window]) -> float:
    """Seconds an update takes at its fastest."""
    firsts, warm = -1, 1
    while rig.warmup_steps != firsts and warm < MOST_WARM:
        firsts, warm = rig.warmup_steps, warm + 1
        check_allowed()
        rig.advance(next(windows))
    fastest = math.inf
    for _ in range(GLANCES):
        rig.wait()
        began, made = time.perf_counter(), 0
        while not made or (made < GLANCED and made * fastest < GLANCED_S):
            check_allowed()
            window = next(windows)
            rig.advance(window)
            made += window.updates
        rig.wait()
        fastest = min(fastest, (time.perf_counter() - began) / made)
    return fastest


def _share(lap: Lap) -> float | None:
    """Of a step, what the host waits for its batch."""
    return None if lap.feed_s is None else min(1.0, lap.feed_s / lap.step_s)
