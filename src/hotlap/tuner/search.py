"""The search: which plans are timed against which, in which order, and what is kept.

It is written as one run through that gives a plan wherever it needs a lap under it; the training loop makes
the steps. First everything that may help is tried together, since moves hide each other: a faster step shows nothing
while batches are slow. Where the host waits for the device, what makes the device faster comes before that. What is
kept is then taken out move by move, which tells what each gives.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Generator, Sequence

import torch

from hotlap.core.plan import Plan
from hotlap.core.units import show_about, show_seconds
from hotlap.engine.protocol import TunableTraining
from hotlap.moves import LEFT_OUT, MOVES, OTHERS, Move, everything
from hotlap.tuner.budget import SHARE, Budget, Length, SpentError
from hotlap.tuner.gates import Judge
from hotlap.tuner.known import Found, KnownPlans
from hotlap.tuner.laps import LAP_S, Lap
from hotlap.tuner.probe import HOPE, Probe
from hotlap.tuner.search_state import Doubt, Glance, SearchState, at_a_glance
from hotlap.tuner.trials import Laps, Rest, Trials, Tried, middle

DEAR = 0.25
"""Of what may be spent, what holding the data may take before it is worth to keep samples: other moves cost, too."""
CHEAPER = 0.5
"""What holding the data may take, of what it took at first, for that to be tried again."""
SOON = 0.1
"""Of the updates that are left, how many may be waited for until the samples are there, in any case."""
LOOK_UPDATES = 16
"""A run that may spend less time than so many of its own updates take is left alone."""
FEEDING_S = 0.3
"""What a run has to be able to spend where its batches are slow, however long one of its updates takes."""
BOUND_BY_DEVICE = ("arithmetic", "memory traffic")
"""Where that is what bounds a training, its host waits for the device."""
ALIKE = 0.1
"""Laps of the user's own plan that differ by less are taken for its pace."""
MOST_SETTLING = 8
"""Laps after which its pace is what it is."""
RIPE, OFTEN = 200, 10
"""Updates after which a precision is judged again, in runs that have so many times as many left."""
LEAST_WAIT = 80
"""Updates after which a run that seemed too short is looked at again, at least; later, a quarter of those made."""
LEAST_REST = 20
"""Updates that are waited for at least until more may be spent."""
SHARES = 0.02
"""Of the time that is left, what may be lost to finding out what each kept move gives."""
TOTAL = 0.04
"""The same for what all of them give together."""
OF_KNOWN = 0.5
"""Of what a plan that was found before will save, if it still does, what may be spent on finding that out."""
FOUND_BEFORE = "the plan found before"
FEW_LAPS_S = 6 * LAP_S
"""What slow laps cost where a kept move is taken out, about."""


class Search:
    """Finds the plan for one training."""

    def __init__(
        self,
        rig: TunableTraining,
        *,
        length: Callable[[], Length],
        gate: Judge,
        probe: Probe,
        most_s: float | None = None,
        most_lost: float = math.inf,
        known: KnownPlans | None = None,
    ) -> None:
        self._rig, self._length, self._most_s, self._most_lost = rig, length, most_s, most_lost
        self._now = SearchState(rig, moves=(*MOVES, *OTHERS), length=length, probe=probe)
        self.gate, self.probe, self.known = gate, probe, known
        self._postponed: dict[Move, float] = {}
        self._unpaid: dict[str, float] = {}
        """Names of moves that a longer run could pay for, and what trying each takes."""
        self._bundled: set[tuple[Plan, frozenset[str]]] = set()
        """Names of moves that were tried together, each with the plan that they were to change."""
        self._doubted: list[Move] = []
        """Moves that a gate has held back for what may pass."""
        self.budget: Budget | None = None
        self._on_trial: Sequence[Move] = ()
        """Moves of which laps are under way."""
        self._in_all_seen: tuple[Plan, Tried] | None = None
        """A plan that was timed against the user's own, and what came of it."""
        self._looked = self._told = False
        self.is_waiting = False
        """Whether nothing is tried so far since the run seems to be short: it may turn out longer."""
        self._glance = Glance()
        self._possible: Sequence[Move] = ()
        """Moves that the training can obey, as far as one look tells."""
        self._first_holding_s = 0.0
        self._is_known_open = False
        """Whether a plan is known that this run was too short to look at."""

    @property
    def plan(self) -> Plan:
        """The plan that has been settled on."""
        return self._now.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self._now.plan = plan

    @property
    def baseline(self) -> Plan:
        """The user's own."""
        return self._now.baseline

    def run(self) -> Laps:
        """Give the plans to be timed, until nothing more is worth a trial."""
        lap = yield from self._pace_of_user()
        budget = self.budget = Budget(
            base_s=lap.step_s, length=self._length, most_s=self._most_s, most_lost=self._most_lost
        )
        trials = self._trials = Trials(self._rig, self.gate, budget, self.baseline)
        self._now.begin(trials, lap)
        budget.is_hopeful = self._rig.device.type == "cuda"  # until it has been looked at
        needed_s = LOOK_UPDATES * lap.step_s
        if self.probe.hope_of_feeding(lap) > 1:  # bringing batches another way takes few updates to try
            needed_s = min(needed_s, FEEDING_S)
        if not (yield from self._until_it_pays(needed_s)):
            self._write_too_short(self._length().updates)
            return
        self._looked, lap = True, self._now.lap
        self._look(lap)
        work = {} if self.probe.work is None else self.probe.work.figures
        trials.write("baseline", "chosen", kind="baseline", why=self.probe.line, figures={"step_s": lap.step_s, **work})
        self._rig.keep_plans()
        try:
            yield from self._as_found_before()
            before = self.plan
            yield from self._until_learned()
            if self.plan == self.baseline and not self._is_known_open:
                seen = self._hope()
                budget.hoped_s = self._saved_s(max(seen, HOPE) if self._is_wide_arithmetic() else seen)
                self._glance = at_a_glance(self._rig, self._now, self.probe, self._at_first())
                if self._glance.was_taken:
                    seen, self._now.seen = self._glance.gain, self._glance.moves
                    budget.is_seen = bool(self._glance.moves)
                    budget.is_hopeful = self.probe.is_hopeful or budget.is_seen
                    budget.hoped_s = self._saved_s(seen)
            yield from self._for_the_device()
            yield from self._at_once()
            if self._glance.was_taken or self.plan != self.baseline:
                budget.hoped_s = 0.0  # hope is for one trial
            yield from self._one_after_the_other()
            yield from self._once_learned()
            while self.plan == self.baseline and self._unpaid:
                if not (yield from self._until_it_pays(min(self._unpaid.values()))):
                    break
                self._trials.reopen(self._unpaid)
                self._unpaid.clear()
                yield from self._one_after_the_other()
            if self.plan != before:
                yield from self._shares()
            yield from self._in_all()
        finally:
            trials.settle(self.plan, "what was found")
            self._rig.release_other_plans()

    def _hope(self) -> float:
        """How many times as fast a step may become, as far as was measured; 1 where that is not much."""
        feed_stays = not any(move.feeds for move in self._possible)
        return self.probe.hope(self._now.lap.step_s, feed_stays=feed_stays)

    def _saved_s(self, gain: float) -> float:
        """What the rest of the run takes less where a step is so many times as fast."""
        return self._now.left_s * (1 - 1 / gain)

    # --- stages ----------------------------------------------------------------------------------

    def _look(self, lap: Lap) -> None:
        """Find out what bounds the training and which moves it can obey; both are known from then on."""
        budget, began = self._trials.budget, time.perf_counter()
        self._possible = everything(self._rig, self.plan, (*MOVES, *OTHERS)).made
        self.probe.look(lap, may_s=budget.left_s)
        budget.is_hopeful = self.probe.is_hopeful or self._hope() > 1 or self._is_wide_arithmetic()
        self._first_holding_s = self._holding_s()
        if self._is_holding_dear(DEAR):
            self._learns_until()
        budget.made(0, time.perf_counter() - began)

    def _is_wide_arithmetic(self) -> bool:
        """Whether a GPU is busy in fp32 for which it has units of 16 bits; a glance at those is worth more."""
        is_bound = self.probe.bound in BOUND_BY_DEVICE or self.probe.is_busy
        if self._rig.device.type != "cuda" or not is_bound:
            return False
        weights = (weight for module in self._rig.modules for weight in module.parameters())
        in_fp32 = any(weight.dtype == torch.float32 for weight in weights)
        return in_fp32 and self._narrowed() is not None

    def _narrowed(self) -> Plan | None:
        """The plan in the precision that a glance is about; None where there is none."""
        proposed = [move.proposed(self.plan, self._rig) for move in MOVES if move.at_a_glance == "needed"]
        return next((plan for plan in proposed if not isinstance(plan, str)), None)

    def _pace_of_user(self) -> Laps:
        """Laps of the user's own plan, until three are alike; the middle one."""
        laps: list[Lap] = []
        while len(laps) < MOST_SETTLING:
            lap = yield self.baseline
            laps.append(lap)
            last = sorted(one.step_s for one in laps[-3:])
            if len(laps) > 3 and last[-1] <= (1 + ALIKE) * last[0]:
                break
        return middle(laps[-3:])

    def _until_it_pays(self, needed_s: float) -> Generator[Plan | Rest, Lap, bool]:
        """Wait until so much may be spent, since the run turns out longer; False where it cannot."""
        budget = self._trials.budget
        while budget.left_s < needed_s:
            if self._length().final or self._most_s is not None:
                return False
            self.is_waiting = True
            yield Rest(max(LEAST_WAIT, self._rig.steps // 4))
        if self.is_waiting:  # the pace of the user's own plan was taken long ago
            self.is_waiting = False
            self._now.lap = yield from self._pace_of_user()
            budget.base_s = self._now.lap.step_s
        return True

    def _one_after_the_other(self) -> Laps:
        """All moves: first those that hide each other, together, then each by itself."""
        yield from self._together([move for move in MOVES if move.kind == "A" and not move.is_paired])
        self._trials.budget.hoped_s = 0.0
        yield from self._together(_paired())
        yield from self._one_by_one()

    def _learns_until(self) -> int | None:
        """Updates until more of the data has come by and was kept; None where that is of no use to the rest."""
        return self._rig.keep_samples(self._now.updates_left / max(1, self._rig.epoch_updates))

    def _is_holding_dear(self, share: float = 1.0) -> bool:
        """Whether having all samples at hand takes longer than such a share of what may be spent."""
        return any(self._now.setup_s(move) > share * self._trials.budget.left_s for move in self._held())

    def _held(self) -> list[Move]:
        """The moves that hold the data, of those that this training can obey."""
        return [move for move in self._possible if move.feeds == "held"]

    def _holding_s(self) -> float:
        """Seconds until all samples are at hand."""
        return max(map(self._now.setup_s, self._held()), default=0.0)

    def _until_learned(self) -> Laps:
        """Where bringing batches may bound the training, nothing else is tried before the samples are there.

        Where workers bring them, that is not seen: they may be as slow as the step, and hide what makes it faster.
        """
        is_bound = self.probe.bound == "feeding"
        while self._is_holding_dear(DEAR):
            updates = self._learns_until()
            if updates is None:
                return
            is_soon = (is_bound or bool(self.plan.feed.workers)) and updates < SOON * self._now.updates_left
            if not is_soon and not (is_bound and self._is_holding_dear()):
                return
            yield Rest(max(LEAST_REST, updates))

    def _once_learned(self) -> Laps:
        """Once more what holding the data was too dear for, when the samples are there."""
        is_there = False
        while not is_there and any(move.name in self._unpaid for move in self._held()):
            updates = self._learns_until()
            is_there = updates is None
            if updates is not None:
                yield Rest(max(LEAST_REST, updates))
            elif self._holding_s() >= CHEAPER * self._first_holding_s:
                return
            self._trials.reopen(self._unpaid)
            self._trials.reopen_slow()  # what gave nothing beside a slow feed
            self._unpaid.clear()
            self._trials.budget.hoped_s = self._saved_s(max(self._hope(), self.probe.hope_of_feeding(self._now.lap)))
            yield from self._one_after_the_other()

    def _as_found_before(self) -> Laps:
        """The plan that an earlier run of the same training found, after a quick look whether it still holds.

        What is left then is only what that run could not pay for.
        """
        found = self.known.found() if self.known is not None else None
        if found is None or found.plan == self.baseline:
            return
        moves = [move for move in (*MOVES, *OTHERS) if move.name in found.moves]
        if self._now.with_moves(moves) != found.plan or self._rig.supports(found.plan) is not None:
            return
        may_s = min(self._trials.budget.most_s, OF_KNOWN * self._now.left_s * (1 - 1 / max(1.0, found.gain)))
        if found.gate_s > may_s:
            why = f"trying takes {show_seconds(found.gate_s)}, and {show_seconds(may_s)} may be spent"
            self._trials.write(FOUND_BEFORE, "not tried", why=why, figures={"needs_s": found.gate_s})
            self._is_known_open = True
            return
        try:
            why_not = self._trials.why_not(found.plan, moves, may_s=may_s)
        except SpentError as error:
            self._trials.write(FOUND_BEFORE, "not tried", why=str(error))
            self._is_known_open = True
            return
        if why_not is not None:
            self._trials.write(FOUND_BEFORE, "rejected", why=why_not)
            return
        tried = yield from self._laps_of(moves, found.plan, may_lose_s=may_s)
        if not tried.accepted:
            self._trials.write(FOUND_BEFORE, "rejected", why=tried.words, figures=tried.figures, cost_s=tried.cost_s)
            return
        self._settle(found.plan, moves, tried, known=True)
        for move in (*MOVES, *OTHERS):
            if move not in moves and move.name in found.rejected:
                self._trials.refuse(move, "rejected", found.rejected[move.name], known=True)

    def _for_the_device(self) -> Laps:
        """Where the device bounds the training, first what makes that faster, as far as it may be paid for by now."""
        bound = self.probe.bound
        if bound not in BOUND_BY_DEVICE or self._glance.moves:
            return
        yield from self._together(_paired())
        for move in MOVES:
            is_open = move not in self._now.kept and move.name not in self._trials.refused
            if bound in move.helps and is_open and self._doubt(move) is None:
                yield from self._try(move)

    def _at_once(self) -> Laps:
        """Another precision beside all moves that hide each other, where it is bound to pay.

        Each by itself would take a gate of its own, and record what is not used for long.
        """
        proposed = self._narrowed()
        if proposed is None:
            return
        if self._glance.moves or self.probe.is_bound_to_pay(self.plan, proposed):
            yield from self._together(self._at_first(), all_or_none=True)

    def _at_first(self) -> list[Move]:
        """What may be tried at once before anything is known."""
        return [move for move in MOVES if move.kind == "A" or move.is_paired]

    def _together(self, moves: Sequence[Move], *, all_or_none: bool = False) -> Laps:
        """Moves that hide each other, all at once, if they can pay and a gate lets them through."""
        made: list[Move] = []
        setup_s = 0.0
        possible = [
            move for move in everything(self._rig, self.plan, moves).made if move.name not in self._trials.refused
        ]

        def order(move: Move) -> tuple[bool, bool, float]:
            # What was made for a glance is there already.
            is_there, helps = move in self._glance.moves, self.probe.bound in move.helps
            return not is_there, not helps, self._now.setup_s(move)

        for move in sorted(possible, key=order):
            # Those that are not are looked at by themselves.
            if self._doubt(move, beside_s=setup_s) is None:
                setup_s += self._now.setup_s(move, beside=made)
                made.append(move)
        if len(made) == 1:
            yield from self._try(made[0])
            return
        names = self.plan, frozenset(move.name for move in made)
        if not made or names in self._bundled:
            return
        if all_or_none and not any(move.at_a_glance == "needed" for move in made):
            return
        self._bundled.add(names)
        made = self._let_through(made, all_or_none=all_or_none)
        if not made:
            return
        plan = self._now.with_moves(made)
        tried = yield from self._laps_of(made, plan)
        if tried.accepted:
            self._settle(plan, made, tried)
        elif len(made) == 1:
            self._trials.refuse(made[0], "rejected", tried.words, tried)
        else:
            what = ", ".join(move.name for move in made)
            self._trials.write(what, "rejected", why=tried.words, figures=tried.figures, cost_s=tried.cost_s)

    def _one_by_one(self) -> Laps:
        """The moves that are left, each by itself, first those that help against what bounds the training.

        Those that cost more than may be spent wait until enough has been saved.
        """
        moves = [move for move in (*MOVES, *OTHERS) if move not in self._now.kept]
        # What is recorded is not bound by its host any more, and what helps against that comes last.
        is_recorded = self.plan.execution.mode == "captured"
        bounds = set(BOUND_BY_DEVICE) if is_recorded else {self.probe.bound}
        for move in sorted(moves, key=lambda move: (move.comes_last, bounds.isdisjoint(move.helps))):
            if move.name not in self._trials.refused:
                yield from self._try(move)
        while self._postponed:
            move = min(self._postponed, key=lambda one: self._postponed[one])
            updates = self._now.updates_until(self._postponed.pop(move))
            if updates is not None:
                yield Rest(max(LEAST_REST, updates))
            yield from self._try(move)  # which may put it off again: less may have been saved than was thought
        for move in self._doubted:
            if self._now.updates_left > RIPE * OFTEN:
                yield Rest(RIPE)
                yield from self._try(move, last=True)

    def _shares(self) -> Laps:
        """Take each kept move out once; one without which the plan is shown to be no slower goes."""
        lost_s = 0.0
        for move in [move for move in (*MOVES, *OTHERS) if move in self._now.kept]:
            without = self._now.with_moves([], but=move)
            if without == self.plan or self._rig.supports(without) is not None:
                continue
            slower_s = FEW_LAPS_S * (1 - self._now.lap.step_s / self._trials.budget.base_s)
            setup_s = move.setup_s(self.plan, self._rig) + self._now.recording_s(without)
            if lost_s + setup_s + slower_s > SHARES * self._now.left_s or setup_s > self._trials.budget.left_s:
                continue
            began_s = self._trials.budget.lost_s(self._now.lap.step_s)
            may_s = SHARES * self._now.left_s - lost_s
            tried = yield from self._trials.compare(without, self.plan, settled=self.plan, may_lose_s=may_s)
            lost_s += self._trials.budget.lost_s(self._now.lap.step_s) - began_s
            if tried.estimate is None:
                continue
            if tried.accepted:
                self._trials.keep(move, tried, without_s=_step_s(tried.a))
            elif tried.estimate.high <= 1 and self._is_let_through(without):
                self._now.kept.remove(move)
                self._trials.refuse(move, "rejected", "no faster beside the others", tried, without_s=_step_s(tried.a))
                self.plan, self._now.lap = without, tried.a or self._now.lap
            else:
                self._trials.keep_unshown(move, tried)

    def _in_all(self) -> Laps:
        """The plan that was found against the user's own; in the end it must have been worth it."""
        trials, budget = self._trials, self._trials.budget
        tried = Tried(verdict="nothing helped")
        if self.plan != self.baseline:
            if self._in_all_seen is not None and self._in_all_seen[0] == self.plan:
                tried = self._in_all_seen[1]
            else:
                may_s = TOTAL * self._now.left_s
                tried = yield from trials.compare(self.baseline, self.plan, settled=self.plan, may_lose_s=may_s)
            if tried.estimate is not None and tried.estimate.high < 1:
                self._drop_all("in the end slower than the user's own plan", tried)
        if self.known is not None:
            self._remember(self.known, tried)
        why = "" if self._now.kept else "nothing helped"
        self._settle_in(tried)
        trials.settle(self.plan, "what was found")
        figures = {**tried.figures, "cost_s": budget.spent_s}
        if self._now.kept and tried.estimate is not None:
            # What the rest of the run saves is counted when it ends: see `savings`.
            own_s, found_s = trials.pace_s(self.baseline), trials.pace_s(self.plan)
            figures |= {"net_s": budget.net_s, "own_s": own_s, "found_s": found_s}
        if tried.a is not None or self._glance.moves:
            why_slow = "; ".join(filter(None, (self.probe.line, self._glance.line)))
            step_s = tried.a.step_s if tried.a is not None else budget.base_s
            trials.write("baseline", "chosen", kind="baseline", why=why_slow, figures={"step_s": step_s})
        trials.write("tuned", "chosen", kind="tuned", why=why, figures=figures)
        self._told = True

    def _drop_all(self, why: str, tried: Tried) -> None:
        """Go back to the user's own plan."""
        for move in self._now.kept:
            self._trials.refuse(move, "rejected", why, tried)
        self.plan, self._now.kept = self.baseline, []

    def _remember(self, known: KnownPlans, tried: Tried) -> None:
        """Keep what was found for later runs, or let go of what does not hold any more."""
        if self._is_known_open:
            return
        if self.plan == self.baseline:
            known.forget()
        elif tried.estimate is not None:
            moves = tuple(move.name for move in self._now.kept)
            # One that a gate held back at first may have been let through later.
            rejected = {name: why for name, why in self._trials.rejected.items() if name not in moves}
            gain, gate_s = tried.estimate.ratio, self._trials.dearest_gate_s
            known.remember(Found(plan=self.plan, moves=moves, gain=gain, gate_s=gate_s, rejected=rejected))

    def _write_too_short(self, updates: int) -> None:
        """Nothing was tried in a run of so many updates."""
        assert self.budget is not None
        run_s = updates * self.budget.base_s
        may_s = self._most_s if self._most_s is not None else SHARE * run_s
        why = (
            f"{show_seconds(run_s)} in {updates:,} update{'s' if updates > 1 else ''} is too short for "
            f"{'tuning to pay' if self._most_s is None else 'trials'}: trials may take {show_seconds(may_s)}"
        )
        self._looked = self._told = True
        self._trials.write("baseline", "chosen", kind="baseline", figures={"step_s": self.budget.base_s})
        self._trials.write("all moves", "not tried", why=why)

    def cut_short(self) -> None:
        """Write down what is known, since the training ends before the search."""
        if self.budget is not None and not self._looked:
            self._write_too_short(self._rig.steps)
            return
        if self.budget is None or self._told:
            return
        for move in self._on_trial:
            self._trials.refuse(move, "undecided", "the run ended before its laps had shown a difference")
        if self._now.kept:
            figures = {"cost_s": self.budget.spent_s, "saved_s": self.budget.net_s}
            self._trials.write(
                "tuned", "chosen", kind="tuned", why="the run ended before all was tried", figures=figures
            )
        elif self.is_waiting:
            self._trials.write(
                "tuned", "chosen", kind="tuned", why="nothing helped", figures={"cost_s": self.budget.spent_s}
            )

    def _settle_in(self, tried: Tried) -> None:
        """Take the last laps for the pace of the rest of the run."""
        if self.plan == self.baseline:
            self._now.lap = dataclasses.replace(self._now.lap, step_s=self._trials.budget.base_s)
        elif tried.b is not None:
            self._now.lap = tried.b

    # --- one move --------------------------------------------------------------------------------

    def _doubt(self, move: Move, beside_s: float = 0.0) -> Doubt | None:
        """Why a move is not tried; None where it is. Data that comes by is not fetched for what is only hoped for."""
        doubt = self._now.why_not_worth(move, beside_s)
        if doubt is None and move.feeds == "held":
            cost_s = self._now.setup_s(move)
            if cost_s > self._trials.budget.sure_s - beside_s and self._learns_until() is not None:
                return Doubt(f"estimated to take {show_about(cost_s)} to try, less once its samples came by", cost_s)
        return doubt

    def _try(self, move: Move, *, last: bool = False) -> Laps:
        proposed = move.proposed(self.plan, self._rig)
        reason = proposed if isinstance(proposed, str) else self._rig.supports(proposed)
        if isinstance(proposed, str) or reason:
            if not move.is_rare:
                self._trials.refuse(move, "not tried", str(reason), unfit=reason != LEFT_OUT)
            return
        doubt = self._doubt(move)
        if doubt is not None:
            gets_cheaper = move.feeds == "held" and doubt.is_dear and self._learns_until() is not None
            may_wait = not last and not gets_cheaper
            if may_wait and doubt.cost_s is not None and self._now.updates_until(doubt.cost_s) is not None:
                self._postponed[move] = doubt.cost_s
            elif doubt.cost_s is not None:
                self._leave_unpaid(move, doubt.why, doubt.cost_s)
            else:
                self._trials.refuse(move, "not tried", doubt.why)
                if gets_cheaper:
                    self._unpaid[move.name] = self._now.setup_s(move)
        elif not self._let_through([move]):
            if move.kind == "B" and not last:
                self._doubted.append(move)  # gradients are at their worst at first weights
        else:
            tried = yield from self._laps_of([move], proposed)
            if tried.accepted:
                self._settle(proposed, [move], tried)
            else:
                self._trials.refuse(move, "rejected", tried.words, tried)

    def _laps_of(
        self, moves: Sequence[Move], plan: Plan, may_lose_s: float | None = None
    ) -> Generator[Plan | Rest, Lap, Tried]:
        """Compare the plan that these moves have made with the one settled on."""
        self._on_trial = moves
        tried = yield from self._trials.compare(self.plan, plan, settled=self.plan, may_lose_s=may_lose_s)
        self._on_trial = ()
        return tried

    def _let_through(self, moves: Sequence[Move], *, all_or_none: bool = False) -> list[Move]:
        """The moves that leave the training the same; the others are refused. Where it is to be all of them or none,
        each is looked at again."""
        try:
            why = self._why_not_let_through(self._now.with_moves(moves), moves)
        except SpentError as error:
            for move in moves:
                self._leave_unpaid(move, str(error))
            return []
        if why is None:
            return list(moves)
        if all_or_none:
            self._trials.write(", ".join(move.name for move in moves), "rejected", why=why)
            return []
        if len(moves) == 1:
            self._trials.refuse(moves[0], "rejected", why)
            return []
        passed: list[Move] = []
        for move in moves:  # one of them it was
            passed += self._let_through_beside(move, passed)
        return passed

    def _let_through_beside(self, move: Move, passed: Sequence[Move]) -> list[Move]:
        try:
            why = self._why_not_let_through(self._now.with_moves([*passed, move]), [move])
        except SpentError as error:
            self._leave_unpaid(move, str(error))
            return []
        if why is not None:
            self._trials.refuse(move, "rejected", why)
        return [] if why is not None else [move]

    def _is_let_through(self, plan: Plan) -> bool:
        """Whether a plan without one of the kept moves is let through; not where that may not be paid for."""
        try:
            return self._why_not_let_through(plan, []) is None
        except SpentError:
            return False

    def _why_not_let_through(self, plan: Plan, moves: Sequence[Move]) -> str | None:
        """As `Trials.why_not`; a gate that takes more than may be spent is not begun."""
        takes_s, may_s = self._now.gate_s(moves), self._trials.budget.left_s
        if takes_s > may_s:
            may = show_seconds(max(0.0, may_s))
            raise SpentError(f"its gate is estimated to take {show_about(takes_s)}, and {may} may be spent")
        return self._trials.why_not(plan, moves)

    def _leave_unpaid(self, move: Move, why: str, cost_s: float | None = None) -> None:
        """Leave a move whose trial could not be paid for, until the run turns out longer."""
        if cost_s is None:
            cost_s = self._now.setup_s(move) + self._now.gate_s([move])
        self._trials.refuse(move, "not tried", why, needs_s=cost_s)
        self._unpaid[move.name] = cost_s

    def _settle(self, plan: Plan, moves: Sequence[Move], tried: Tried, *, known: bool = False) -> None:
        if self.plan == self.baseline:
            self._in_all_seen = plan, tried
        if plan.execution.mode != self.plan.execution.mode:
            self._trials.reopen_slow()
        self.plan, self._now.lap = plan, tried.b or self._now.lap
        if tried.estimate is not None:
            self._trials.budget.coming_s += self._now.left_s * (tried.estimate.low - 1)
        self._now.kept += moves
        earlier = [move for move in self._now.kept if move not in moves]
        for move in [move for move in earlier if self._now.with_moves([], but=move) == plan]:
            self._now.kept.remove(move)
            self._trials.refuse(move, "rejected", f"{moves[0].name} is faster")
        more = {"together": float(len(moves))} if len(moves) > 1 else {}
        for move in moves:
            self._trials.keep(move, tried, known=known, **more)

    @property
    def lap_may_s(self) -> float:
        """What the lap that was asked for last may cost, in seconds beyond the user's own pace."""
        return self._trials.lap_may_s if self.budget is not None else math.inf

    @property
    def gate_s(self) -> float:
        """What the last gate took; 0 where there was none."""
        return self._trials.gate_s if self.budget is not None else 0.0


def _paired() -> list[Move]:
    """Moves that are tried together, since each alone may be slower."""
    return [move for move in MOVES if move.is_paired]


def _step_s(lap: Lap | None) -> float:
    return lap.step_s if lap is not None else float("nan")
