"""Finds the fastest plan while boosters grow: laps of two plans in turns, kept or rejected as a move is.

Boosters that were timed under the plan that wins grow on to their end, so that little of the work is lost. Threads of
XGBoost change in a booster that grows; for any other change a second set of boosters grows beside the first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hotlap.core.errors import HotlapError
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Plan
from hotlap.core.units import show_bytes, show_seconds
from hotlap.machine.limits import read_memory
from hotlap.trees import parameters
from hotlap.trees.growing import Crew, Grown, Growth, Watch
from hotlap.trees.job import TreeJob, TreePlan
from hotlap.trees.libraries import Held, answers_on_cpu, can_join
from hotlap.trees.saving import Saver
from hotlap.tuner.stats import Comparison, Estimate

LAP_S = 0.05
"""Seconds that a lap takes at least, where there are enough rounds for it."""
BUDGET = 0.05
"""Part of the training that rounds may take which are thrown away."""
MOST_QUADS, LIKELY_QUADS = 12, 4
"""Laps A B B A of a comparison at most, and how many the budget has to allow: laps are shorter where it is small."""
LEAST_LOST = 3
"""Laps that are lost at least where a rival needs boosters of its own and is slower."""
LEAST_LAPS = 12
"""Laps that a training must have left for a comparison."""
LIKE, ROWS_COMPARED = 1e-3, 10_000
"""How far answers of a GPU may be from those of the CPU, as a part of their spread, and on how many rows."""
MEMORY = 0.25
"""Part of the free memory that copies of the data may take."""


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A plan to be tried, by its name in the ledger."""

    what: str
    changes: dict[str, Any]


def rivals(job: TreeJob, *, cores: int) -> list[Rival]:
    """The changes to try on the CPU, each against the fastest plan so far."""
    threads = [1 << power for power in range(cores.bit_length()) if 1 << power < cores]
    if job.targets == 1:
        return [Rival(what=_threads(count), changes={"threads": count}) for count in reversed(threads)]
    found = []
    for count in threads:
        at_once = min(cores // count, job.targets)
        if at_once > 1:
            words = f"{at_once} boosters at once with {_threads(count)} each"
            found.append(Rival(what=words, changes={"threads": count, "at_once": at_once}))
    return found


GPU = Rival(what="GPU", changes={"device": "cuda"})
JOINT = Rival(what="one booster for all targets", changes={"joint": True, "at_once": 1})


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


class Choice:
    """The plan so far, the boosters that grow under it, and what is done."""

    def __init__(self, job: TreeJob, data: Held, plan: TreePlan, ledger: Ledger, watch: Watch, saver: Saver) -> None:
        self.job, self.plan, self.slots, self._saver = job, plan, [data], saver
        self.growths: list[Growth] = []
        every = [range(job.targets)] if plan.joint else [range(n, n + 1) for n in range(job.targets)]
        self.grown = [booster for booster in saver.left.grown if booster.targets in every]
        self.left = [targets for targets in every if targets not in [booster.targets for booster in self.grown]]
        """Targets that no booster has begun."""
        self.ran: dict[str, str] = saver.left.ran
        """The parameters that the library reports."""
        self.is_found = False
        """Whether all plans have been tried."""
        self._ledger, self._watch = ledger, watch
        self.step_s = math.nan
        """Seconds a round × target under the plan."""
        self._cost_s = 0.0
        self._kept: list[Estimate] = []
        self._no_room = ""
        """Why there are no copies of the data for more boosters at once."""

    def find(self, cores: int, *, gpu: bool) -> None:
        """Try each rival in turn; `gpu`: whether a GPU may be tried."""
        self._begin(1)
        self._time_baseline()
        if gpu:
            self._try(GPU)
        if parameters.threads_decide(self.job.library, self.job.params):
            self._write("threads", "not tried", "with use_quantized_grad they change the trees")
        elif self.plan.device == "cpu":
            todo = rivals(self.job, cores=cores)
            self._make_room(max((rival.changes.get("at_once", 1) for rival in todo), default=1))
            for rival in todo:
                if self._try(rival) == "slower" and self.job.targets == 1:
                    break  # fewer threads still would be slower yet
        if can_join(self.job):
            self._try(JOINT)
        self._write_total()

    def fix(self) -> None:
        """Begin under the plan as it is."""
        self.plan = replace(self.plan, at_once=min(self.plan.at_once, len(self.left)))
        self.slots += [self.slots[0].copy() for _ in range(self.plan.at_once - 1)]
        self._begin(self.plan.at_once)
        Crew(replace(self.plan, at_once=1)).lap(self.growths[:1], 1, self._watch)
        self.ran = self.growths[0].booster.ran()

    def finish(self) -> list[Grown]:
        """Grow all boosters to their end; they in the order of their targets."""
        crew = Crew(self.plan)
        try:
            crew.finish(self.job, self.slots, self.growths, self.left, self._watch, self._keep)
        finally:
            crew.close()
            for slot in self.slots:
                slot.release()
            # The run's live view and this choice refer to each other: its data would stay until Python collects.
            self.slots.clear()
            self.growths.clear()
        return sorted((booster for booster in self.grown if booster.content), key=lambda booster: booster.targets.start)

    def _keep(self, booster: Grown) -> None:
        """Take in a booster that is done, and save it."""
        self.grown.append(booster)
        self._saver.keep(booster, self.ran)

    # --- boosters --------------------------------------------------------------------------------------

    def _begin(self, count: int) -> None:
        """Begin boosters for the next targets, as many as there are slots for."""
        now, self.left = self.left[:count], self.left[count:]
        self.growths = [
            Growth(slot, self.job, targets, self.plan) for slot, targets in zip(self.slots, now, strict=False)
        ]

    def _renew(self) -> bool:
        """Grow these boosters to their end and begin the next; False where none is left."""
        crew = Crew(self.plan)
        later = len(self.left)
        crew.finish(self.job, self.slots, self.growths, (), self._watch, self._keep, later=later)
        crew.close()
        self._begin(len(self.slots))
        return bool(self.growths) and not self._watch.is_over

    def _time_baseline(self) -> None:
        """A first round, which sets up, and one that is timed."""
        crew = Crew(self.plan)
        crew.lap(self.growths, 1, self._watch)
        self.ran = self.growths[0].booster.ran()
        self.step_s = crew.lap(self.growths, 1, self._watch)
        crew.close()
        figures = {} if math.isnan(self.step_s) else {"step_s": self.step_s}
        self._write("baseline", "chosen", "", figures, kind="baseline")

    def _make_room(self, count: int) -> None:
        """Copy the data so that boosters can grow at once, if the copies pay and there is memory for them."""
        count = min(count, len(self.growths) + len(self.left))
        each = 4 * self.job.x.size + 16 * len(self.job.x)
        start, budget_s = time.perf_counter(), BUDGET * self._left_s()
        while len(self.slots) < count and not self._watch.is_over:
            spent_s = time.perf_counter() - start
            if each > MEMORY * read_memory().free_bytes:
                self._no_room = f"a copy of the data takes about {show_bytes(each)}, and memory is short"
                break
            if spent_s > budget_s:
                self._no_room = f"copies of the data take more than {BUDGET:.0%} of {show_seconds(self._left_s())}"
                break
            self.slots.append(self.slots[0].copy())
        self._cost_s += time.perf_counter() - start
        more = len(self.slots) - len(self.growths)
        for slot, targets in zip(self.slots[len(self.growths) :], self.left[:more], strict=False):
            self.growths.append(Growth(slot, self.job, targets, self.plan))
        self.left = self.left[more:]

    def _left_s(self) -> float:
        """Seconds that the rest takes at the pace of the plan, up to a deadline."""
        rounds = sum(self.job.rounds - growth.rounds for growth in self.growths) + len(self.left) * self.job.rounds
        pace_s = rounds * self.step_s if math.isfinite(self.step_s) else 0.0
        return max(0.0, min(pace_s, self._watch.until_s - time.perf_counter()))

    # --- one rival -------------------------------------------------------------------------------------

    def _try(self, rival: Rival) -> str:
        """Compare a rival with the plan; the verdict."""
        if self._watch.is_over:
            return "not tried"
        lap_s, left_s = self.step_s * len(self.growths), self._left_s()
        affordable = BUDGET * left_s / lap_s / (2 * LIKELY_QUADS) if lap_s > 0 else 1
        rounds = max(1, min(math.ceil(LAP_S / lap_s), int(affordable))) if lap_s > 0 else 1
        if why := self._why_not(rival, rounds * self.step_s, left_s):
            self._write(rival.what, "not tried", why)
            return "not tried"
        contest = None
        try:
            contest = Contest(self, replace(self.plan, **rival.changes), self._watch, rounds)
            contest.run(self._renew, self._left_s)
            self._cost_s += contest.lost_s
            return self._settle(rival, contest)
        except HotlapError as error:
            if rival is not GPU:
                raise
            self._write(rival.what, "rejected", str(error))
            return "rejected"
        finally:
            if contest is not None:
                contest.close()

    def _why_not(self, rival: Rival, rounds_s: float, left_s: float) -> str:
        """Why a rival is not tried, where the rounds of a lap take so many seconds a target; empty where it is."""
        lap_s = rounds_s * len(self.growths)
        if rival.changes.get("at_once", 1) > len(self.slots):
            return self._no_room
        if left_s < LEAST_LAPS * lap_s:
            return f"only {show_seconds(left_s)} of training are left"
        lost_s = LEAST_LOST * (rounds_s * self.job.targets if rival is JOINT else lap_s)
        if (self.job.library != "xgboost" or rival in (JOINT, GPU)) and lost_s > BUDGET * left_s:
            return f"it costs {show_seconds(lost_s)} or more, of {show_seconds(left_s)} that are left"
        return ""

    def _settle(self, rival: Rival, contest: Contest) -> str:
        """Write down what a comparison came to; go on with the faster plan."""
        try:
            seen = contest.comparison.estimate
        except ValueError:
            self._write(rival.what, "undecided", "the training ended before its laps had shown a difference")
            return "undecided"
        verdict, outcome = contest.comparison.verdict or "undecided", "rejected"
        if verdict == "undecided":
            outcome, why = ("rejected", "slower") if seen.ratio < 1 else ("undecided", "no difference seen")
            why = f"{why} before all that may be spent was"
        elif verdict != "accepted":
            why = verdict
        elif rival is GPU and (differ := contest.differ()) > LIKE:
            why = f"other trees than on the CPU: answers differ by {differ:.1%} of their spread"
        elif contest.needs_s() > self._left_s():
            why = f"takes {show_seconds(contest.needs_s())} for the rest, and the plan {show_seconds(self._left_s())}"
        else:
            outcome, why = "kept", "same trees"
        figures = {"ratio": seen.ratio, "low": seen.low, "high": seen.high, "noise": seen.noise}
        figures["step_s"], cost_s = contest.step_s(1), contest.lost_s
        if outcome == "kept":
            self.plan, self.step_s = contest.plan, contest.step_s(1)
            self._kept.append(seen)
            self.growths = contest.take_over()
            self.ran = self.growths[0].booster.ran()
        self._write(rival.what, outcome, why, figures, cost_s)
        return verdict

    def _write_total(self) -> None:
        figures = {"cost_s": self._cost_s, "ratio": math.prod(seen.ratio for seen in self._kept)}
        if len(self._kept) == 1:
            figures |= {"low": self._kept[0].low, "high": self._kept[0].high}
        if math.isfinite(self.step_s):
            figures["step_s"] = self.step_s
        self._write("tuned", "chosen", "", figures, kind="tuned")
        self.is_found = not self._watch.is_over

    def _write(
        self, what: str, outcome: str, why: str, figures: dict[str, float] | None = None, cost_s: float = 0.0,
        kind: str = "",
    ) -> None:  # fmt: skip
        self._ledger.record(
            Entry(
                step=max(self._ledger.last_step, self._watch.rounds),
                what=what,
                outcome=outcome,
                plan=Plan(),
                why=why,
                figures=figures or {},
                cost_s=max(0.0, cost_s),
                kind=kind,
            )
        )


class Contest:
    """Two plans in turns, A B B A, on the boosters that grow."""

    def __init__(self, choice: Choice, plan: TreePlan, watch: Watch, rounds: int) -> None:
        self._choice, self._watch, self._rounds = choice, watch, rounds
        self.plan, self._plans = plan, (choice.plan, plan)
        self._crews = Crew(choice.plan), Crew(plan)
        moved = plan.device != choice.plan.device or plan.joint != choice.plan.joint
        self._slots = [choice.slots[0].copy()] if moved else choice.slots
        self._apart = moved or not all(growth.booster.use(plan) for growth in choice.growths)
        """Whether B grows boosters of its own."""
        self._b = self._fresh() if self._apart else choice.growths
        self._won = False
        self._laps: tuple[list[float], list[float]] = ([], [])
        self.comparison = Comparison(most_quads=MOST_QUADS)

    @property
    def lost_s(self) -> float:
        """Seconds of rounds that are thrown away, or that took longer than the other plan's."""
        a, b = (
            self._rounds * math.fsum(laps) * sum(len(growth.targets) for growth in growths)
            for laps, growths in zip(self._laps, (self._choice.growths, self._b), strict=True)
        )
        if not self._apart:
            return abs(a - b)
        return a if self.comparison.verdict == "accepted" else b

    def step_s(self, number: int) -> float:
        """Seconds a round × target of A (0) or B (1)."""
        laps = self._laps[number]
        return sorted(laps)[len(laps) // 2] if laps else math.nan

    def run(self, renew: Callable[[], bool], left_s: Callable[[], float]) -> None:
        """Take quads until there is a verdict, the budget is spent, or no booster is left."""
        self._lap(1)  # sets up
        while self.comparison.verdict is None and not self._watch.is_over:
            quad = [self._lap(number) for number in (0, 1, 1, 0)]
            if any(map(math.isnan, quad)):
                if not renew():
                    return
                self._b = self._fresh() if self._apart else self._choice.growths
                self._lap(1)
                continue
            for number, seconds in zip((0, 1, 1, 0), quad, strict=True):
                self._laps[number].append(seconds)
            self.comparison.add(*quad)
            self._choice.step_s = self.step_s(0)
            # As of any tuning: what seems to be there to save may cost a quarter of it.
            seen = max(0.0, 1 - 1 / self.comparison.estimate.ratio)
            if self.lost_s > (BUDGET + seen / 4) * left_s():
                return

    def needs_s(self) -> float:
        """Seconds that B takes for all that is left; where it grows other targets than A, those too."""
        begun = sum((self._choice.job.rounds - growth.rounds) * len(growth.targets) for growth in self._b)
        return self.step_s(1) * (begun + self._choice.job.rounds * len(self._left()))

    def differ(self) -> float:
        """How far apart the answers of A and B are after as many rounds, as a part of their spread."""
        a, b = self._choice.growths[0], self._b[0]
        rounds, x = min(a.rounds, b.rounds), self._choice.job.x[:ROWS_COMPARED]
        ours, theirs = (answers_on_cpu(growth.booster.dump(rounds), x) for growth in (a, b))
        return float(np.sqrt(np.mean((ours - theirs) ** 2)) / max(ours.std(), np.finfo(np.float32).tiny))

    def take_over(self) -> list[Growth]:
        """The boosters to go on with, as B has won."""
        self._won, self._choice.left, self._choice.slots = True, self._left(), self._slots
        if self.plan.joint:
            self._choice.grown.clear()
        for growth in self._b:
            growth.booster.use(self.plan)
        return self._b

    def close(self) -> None:
        """Let the threads go."""
        if not self._apart and not self._won:
            for growth in self._choice.growths:
                growth.booster.use(self._plans[0])
        for crew in self._crews:
            crew.close()

    def _left(self) -> list[range]:
        """The targets that no booster has begun under B."""
        begun = {target for growth in self._b for target in growth.targets}
        mine = [growth.targets for growth in self._choice.growths] + self._choice.left
        return [targets for targets in mine if not begun & set(targets)]

    def _fresh(self) -> list[Growth]:
        plan, choice = self._plans[1], self._choice
        if plan.joint:
            return [Growth(self._slots[0], choice.job, range(choice.job.targets), plan)]
        pairs = zip(self._slots, choice.growths, strict=False)
        return [Growth(slot, choice.job, growth.targets, plan) for slot, growth in pairs]

    def _lap(self, number: int) -> float:
        growths = self._b if number else self._choice.growths
        if not self._apart:
            for growth in growths:
                growth.booster.use(self._plans[number])
        return self._crews[number].lap(growths, self._rounds, self._watch)
