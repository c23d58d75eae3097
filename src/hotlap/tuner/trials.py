"""One trial: a plan is let through by the gates, timed against another, and written down with its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, get_args

import torch

from hotlap.core.errors import HotlapError
from hotlap.core.plan import Plan
from hotlap.core.units import show_bytes, show_seconds
from hotlap.engine.protocol import TunableTraining
from hotlap.machine.cuda import free_for_torch, usable_bytes
from hotlap.moves import Move
from hotlap.tuner.budget import Budget, SpentError, allowed
from hotlap.tuner.gates import SAME_MATHS, Judge
from hotlap.tuner.laps import LAP_S, Lap
from hotlap.tuner.stats import LEAST_GAIN, Comparison, Estimate, Outcome

DECIDED = get_args(Outcome)
"""Verdicts that are more than the end of what may be spent."""
SPENT = "no difference seen before all that may be spent was"
"""The verdict where a trial was stopped."""
ODD = 5
"""One lap in so many is left out at each end: others on the machine come and go."""


@dataclass(frozen=True)
class Rest:
    """Asked for instead of a lap: so many updates under the plan that was settled on."""

    updates: int


Laps = Generator[Plan | Rest, Lap, Any]
"""Gives the plan of the lap that is needed, is sent the lap."""


class TrialError(Exception):
    """Thrown into a trial whose plan broke a step."""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What came of a comparison of plan B with plan A."""

    verdict: str
    """As `Comparison.verdict` has it, or in words what ended it."""
    estimate: Estimate | None = None
    a: Lap | None = None
    """The middle one of A's laps."""
    b: Lap | None = None
    cost_s: float = 0.0

    @property
    def words(self) -> str:
        """Why it is not accepted, for people."""
        return "no gain worth having" if self.verdict == "rejected" else self.verdict

    @property
    def accepted(self) -> bool:
        """Whether B is faster by more than may be chance."""
        return self.verdict == "accepted"

    @property
    def figures(self) -> dict[str, float]:
        """For the ledger."""
        if self.estimate is None or self.b is None or self.estimate.quads < 2:
            return {}
        one = self.estimate
        return {
            "step_s": self.b.step_s,
            "ratio": one.ratio,
            "low": one.low,
            "high": one.high,
            "noise": one.noise,
            "quads": one.quads,
        }


def middle(laps: Sequence[Lap]) -> Lap:
    """The lap in the middle of these by its pace."""
    return sorted(laps, key=lambda lap: lap.step_s)[len(laps) // 2]


def mean_s(laps: Sequence[Lap]) -> float:
    """Seconds an update, on average."""
    return math.fsum(lap.step_s for lap in laps) / len(laps)


def _keeps_precision(moves: Sequence[Move]) -> bool:
    """Whether these moves leave the precision as it is; others have gates of their own."""
    return all(move.kind == "A" for move in moves)


class Trials:
    """The trials of one training, and what they have cost."""

    def __init__(self, rig: TunableTraining, gate: Judge, budget: Budget, baseline: Plan) -> None:
        self._rig, self._gate, self.budget, self._baseline = rig, gate, budget, baseline
        self._memory = TrialMemory(rig.device)
        self._coin = Random()  # seeded by the system: the generators of the user's are left alone
        self._laps: dict[Plan, list[Lap]] = {}
        """Of all plans that were timed."""
        self.gate_s = self.dearest_gate_s = 0.0
        """What the last gate took, and the one that took longest."""
        self._gates_s: dict[bool, float] = {}
        """What the cheapest gate took, of those for the user's own precision (True) and of the others."""
        self.lap_may_s = math.inf
        """What the lap that is asked for may cost, in seconds beyond the user's own pace."""
        self._words: dict[str, tuple[str, Mapping[str, float]]] = {}
        self._known: set[str] = set()
        """Kept moves that an earlier run has found."""
        self._kept: dict[str, dict[str, float]] = {}
        """What each kept move was kept for, by name."""
        self.refused: dict[str, str] = {}
        """Moves that are out, by name, with the reason."""
        self._slow: set[str] = set()
        """Those of them that were let through and gave nothing worth having."""
        self.rejected: dict[str, str] = {}
        """Those of them that are out whatever may be spent, with the reason."""

    @property
    def gate_updates(self) -> int:
        """About how many updates of the user's own a gate takes."""
        return self._gate.updates

    def cheapest_gate_s(self, moves: Sequence[Move]) -> float:
        """What the cheapest gate of the kind that these moves need took so far; 0 where there was none."""
        return self._gates_s.get(_keeps_precision(moves), 0.0)

    def why_not(self, plan: Plan, moves: Sequence[Move], may_s: float | None = None) -> str | None:
        """Why the plan, which these moves have made, is not the same training; None where the gates let it through.

        Raises SpentError where that takes longer than `may_s` seconds, or than may be spent.
        """
        began, kind = time.perf_counter(), _keeps_precision(moves)
        try:
            with allowed(self.budget.left_s + self.budget.overdraft_s if may_s is None else may_s):
                passed = self._gate.check(plan)
        except SpentError:
            # How much more it would have taken is not known; it is not begun again for as little.
            took_s = time.perf_counter() - began
            self._gates_s[kind] = max(self._gates_s.get(kind, 0.0), 2 * took_s)
            raise SpentError(f"its gate was stopped after {show_seconds(took_s)}, all that may be spent") from None
        finally:
            self.gate_s = time.perf_counter() - began
            self.dearest_gate_s = max(self.gate_s, self.dearest_gate_s)
            self.budget.made(0, self.gate_s)
        self._gates_s[kind] = min(self._gates_s.get(kind, math.inf), self.gate_s)
        if passed.ok:
            # Beside another precision the others were judged in the user's own.
            mixed = len({move.kind for move in moves}) > 1
            for move in moves:
                same = mixed and move.kind == "A"
                self._words[move.name] = (SAME_MATHS, {}) if same else (passed.why, passed.figures)
            return None
        return passed.why

    def compare(
        self, a: Plan, b: Plan, *, settled: Plan, may_lose_s: float | None = None
    ) -> Generator[Plan | Rest, Lap, Tried]:
        """Laps of both in turn until it is decided, or too much is spent.

        That is the budget, or `may_lose_s` seconds beyond the pace of the plan settled on, which is one of the two.
        What looks faster goes on: its laps cost nothing.
        """
        comparison, laps, quads = Comparison(), {a: list[Lap](), b: list[Lap]()}, 0
        before_s, began = self.budget.spent_s, (self.budget.wall_s, self.budget.updates)

        def looks_faster() -> bool:
            if quads:
                return comparison.estimate.ratio >= LEAST_GAIN
            own_s = self.budget.base_s if a == self._baseline else 0.0
            own_s = mean_s(laps[a] or self._laps[a]) if laps[a] or a in self._laps else own_s
            return bool(laps[b]) and own_s >= LEAST_GAIN * mean_s(laps[b])

        def is_spent() -> bool:
            if may_lose_s is None:
                return self.budget.left_s < 0 and bool(laps[b]) and not looks_faster()
            pace_s = mean_s(laps[settled])
            # One quad alone says nothing of its noise.
            return quads > 1 and self.budget.lost_s(pace_s) - (began[0] - began[1] * pace_s) > may_lose_s

        self._memory.begin()
        stopped: str | None = None
        try:
            while comparison.verdict is None and stopped is None:
                quad: dict[str, list[float]] = {"a": [], "b": []}
                # By a coin: whatever on the machine comes round every few laps must not always hit the same plan.
                for name in self._coin.choice(("abba", "baab")):
                    plan = a if name == "a" else b
                    is_free = plan == settled or (plan == b and looks_faster())
                    left_s = self.budget.left_s if may_lose_s is None else may_lose_s
                    self.lap_may_s = math.inf if is_free else max(LAP_S, left_s)  # one lap may tell that it is
                    lap = yield plan
                    self.book(plan, lap)
                    quad[name].append(lap.step_s)
                    laps[plan].append(lap)
                    self._laps.setdefault(plan, []).append(lap)
                    stopped = self._memory.why_short() if plan != settled else None
                    if stopped is None and may_lose_s is None and is_spent():
                        stopped = SPENT
                    if stopped is not None:
                        break  # what there is of the quad tells nothing
                else:
                    if self._baseline in (a, b):
                        self.budget.base_s = self.pace_s(self._baseline)
                    (a1, a2), (b1, b2) = quad["a"], quad["b"]
                    comparison.add(a1, b1, b2, a2)
                    quads += 1
                    if comparison.verdict is None and is_spent():
                        stopped = SPENT
        except TrialError as error:
            return Tried(verdict=f"a step failed: {error}", cost_s=self.budget.spent_s - before_s)
        except SpentError:
            stopped = SPENT
        finally:
            self.lap_may_s = math.inf
        return Tried(
            verdict=stopped or comparison.verdict or "no difference seen",
            estimate=comparison.estimate if quads else None,
            a=middle(laps[a]) if laps[a] else None,
            b=middle(laps[b]) if laps[b] else None,
            cost_s=self.budget.spent_s - before_s,
        )

    def pace_s(self, plan: Plan) -> float:
        """Seconds an update under a plan that was timed: the mean of all its laps but the slowest and fastest fifth."""
        laps = sorted(self._laps[plan], key=lambda lap: lap.step_s)
        cut = len(laps) // ODD
        return mean_s(laps[cut : len(laps) - cut])

    def book(self, plan: Plan, lap: Lap) -> None:
        """What a lap cost. The user's own plan costs what it takes to come to it, whatever the pace of the machine."""
        pace_s = self.budget.base_s - lap.step_s if plan == self._baseline else 0.0
        self.budget.made(lap.updates, lap.wall_s + lap.updates * pace_s)

    # --- the ledger ------------------------------------------------------------------------------

    def keep(self, move: Move, tried: Tried, *, known: bool = False, **more: float) -> None:
        """Write down that a move is kept; `known` says that an earlier run has found it."""
        (self._known.add if known else self._known.discard)(move.name)
        why, figures = self._words.get(move.name, ("", {}))
        seen = {"cosine": figures["cosine"]} if move.kind == "B" and "cosine" in figures else {}
        self._kept[move.name] = {**seen, **tried.figures, **more}
        self.write(move.name, "kept", why=why, figures=self._kept[move.name], cost_s=tried.cost_s, known=known)

    def keep_unshown(self, move: Move, share: Tried) -> None:
        """Write down that a kept move stays, with the figures it was kept for: its share alone shows no gain."""
        why, _ = self._words.get(move.name, ("", {}))
        figures = {f"share_{name}": value for name, value in share.figures.items() if name in ("ratio", "low", "high")}
        figures = self._kept[move.name] | figures
        self.write(move.name, "kept", why=why, figures=figures, cost_s=share.cost_s, known=move.name in self._known)

    def refuse(
        self,
        move: Move,
        outcome: str,
        why: str,
        tried: Tried | None = None,
        *,
        known: bool = False,
        unfit: bool = False,
        **more: float,
    ) -> None:
        """Write down that a move is out: found by an earlier run (`known`), or because it does not apply (`unfit`)."""
        self.refused[move.name] = why
        is_slow = tried is not None and tried.verdict in DECIDED
        if is_slow:
            self._slow.add(move.name)
        if outcome == "rejected" and (is_slow or tried is None):
            self.rejected[move.name] = why
        figures = {**tried.figures, **more} if tried is not None else more
        cost_s = tried.cost_s if tried is not None else 0.0
        self.write(move.name, outcome, why=why, figures=figures, cost_s=cost_s, known=known, unfit=unfit)

    def reopen(self, names: Iterable[str]) -> None:
        """Let moves be tried again."""
        for name in names:
            self.refused.pop(name, None)
            self.rejected.pop(name, None)

    def reopen_slow(self) -> None:
        """Let what gave nothing so far be tried again: something else bounds the training by now."""
        self.reopen(self._slow)
        self._slow.clear()

    def write(self, what: str, outcome: str, *, why: str = "", **fields: Any) -> None:
        """Add a line to the ledger, under the plan in force; `fields` are other fields of `Entry`."""
        self._rig.write_down(what, outcome, why, **fields)

    def settle(self, plan: Plan, why: str) -> None:
        """Put the training under a plan that stays."""
        try:
            self._rig.use(plan, why=why)
        except HotlapError as error:
            self.write("trial", "fault", why=f"{error}")


# --- Whether a plan leaves enough memory: an allocator that has to try again is out of memory soon -------


RESERVE = 0.05
"""Of the GPU's memory, what has to stay free."""


class TrialMemory:
    """Watches the device's memory while a plan is on trial; on a CPU there is nothing to see."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._retries = 0

    def begin(self) -> None:
        """From here on retries count."""
        self._retries = self._count()

    def why_short(self) -> str | None:
        """Why memory is short under the plan in force, or None where it is not."""
        if self._device is None:
            return None
        retries = self._count() - self._retries
        if retries > 0:
            return f"memory is short: the allocator had to start over {retries} times"
        free, usable = free_for_torch(self._device), usable_bytes(self._device)
        if free < RESERVE * usable:
            return f"memory is short: {show_bytes(free)} of {show_bytes(usable)} would be left"
        return None

    def _count(self) -> int:
        if self._device is None:
            return 0
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
