"""The gate that a changed plan has to pass: it still makes the same training, to rounding or in another precision.

Compared is from one moment of the training, with the same data and the same randomness:

- the samples that the plan's feed brings, bit by bit;
- in another precision, gradients of the user's own step in both, as a whole and by layer;
- loss, gradients, updates and buffers after as many updates as the plan replays at once, under the plan and as the
  user makes them in that precision: they differ by rounding alone, and how much that is, is measured;
- that randomness goes on: updates from the same weights with the same batch differ where they should.

What each of these sees is written beside its constants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hotlap.core.plan import Execution, Plan
from hotlap.engine.rig import Place, Rig
from hotlap.machine.kernels import first_line
from hotlap.tuner.feed_gate import chosen_windows, why_other_samples
from hotlap.tuner.gradients import Agreement, alike, alike_on_average, averaged, least_gap, same_maths, shown_cosine
from hotlap.tuner.moment import (
    LEAST_UPDATES,
    MOST_UPDATES,
    Moment,
    Reference,
    Stepping,
    Windows,
    without_dropout,
)

DRAWS = 3
"""Updates from the same weights that have to differ: masks that come again after one or two are seen."""
REPEATED = 0.05
"""As a fraction of what another draw changes in the user's own step: what differs by less was drawn once."""
SPREAD = 3.0
"""How many times more or less than in the user's own step another draw may change: half the rate of a dropout of 0.5
is not seen, a dropout that is missing is."""
BY_CHANCE = 0.99
"""Cosine of gradients from which on a difference may be chance, so that it is looked at elsewhere in the data too."""
MANY_DRAWS = 8
"""Updates that are averaged where masks can be neither made the same nor taken away."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of a gate."""

    ok: bool
    why: str
    """In words, for the ledger: how well it agrees, or what differs, where and by how much."""
    figures: Mapping[str, float] = field(default_factory=dict)


class Gate:
    """Judges plans against the user's own. What the user's own does is found out once for each step of the training."""

    def __init__(self, rig: Rig, baseline: Plan) -> None:
        self._rig, self._baseline = rig, baseline
        self._moment: Moment | None = None
        self._when: tuple[int, Place] | None = None
        self._references: dict[tuple[str, bool], Reference] = {}

    def check(self, plan: Plan) -> Judgement:
        """Whether training goes on as it would have. It leaves no trace in the training, and costs some updates.

        A fault under the plan (memory that is short, a kernel that is not there) is an answer, not an error.
        """
        rig = self._rig
        if plan == self._baseline:
            return Judgement(ok=True, why="the user's own plan")
        known = rig.cautions(self._baseline)
        reason = rig.supports(plan) or next((line for line in rig.cautions(plan) if line not in known), None)
        if reason is not None:
            return Judgement(ok=False, why=reason)
        with rig.aside():
            try:
                return self._judged(plan)
            except Exception as error:  # whatever a plan, or what the user's code makes of it, may do
                return Judgement(ok=False, why=first_line(error))

    def forget(self) -> None:
        """Let go of what was found out: a few times the memory of the weights."""
        self._moment, self._when = None, None
        self._references.clear()

    def _judged(self, plan: Plan) -> Judgement:
        rig, now = self._rig, (self._rig.steps, self._rig.place)
        if self._moment is None or self._when != now:
            self.forget()
            self._moment, self._when = Moment(rig, self._baseline), now
        self._moment.home = rig.plan.feed
        if plan.execution.replay_steps > MOST_UPDATES:
            plan = plan.but(replay_steps=MOST_UPDATES)
        return _Check(rig, self._moment, self._baseline, plan, self._references).judgement()


class _Check:
    """One plan against the user's own."""

    def __init__(
        self, rig: Rig, moment: Moment, baseline: Plan, plan: Plan, references: dict[tuple[str, bool], Reference]
    ) -> None:
        self._rig, self._moment, self._baseline, self._plan = rig, moment, baseline, plan
        self._references = references
        self._own, self._new = baseline.numerics.precision, plan.numerics.precision
        is_own = plan.feed == baseline.feed and plan.memory == baseline.memory
        windows = moment.windows if is_own else Windows(rig, plan)
        self._windows = None if plan.feed.kind == "resident" else windows
        self._trial = Stepping(rig, moment, plan, self._windows)
        self._figures: dict[str, float] = {}
        self._said: list[str] = []

    def judgement(self) -> Judgement:
        """What comes of it: the first part that does not hold, or how well all of them do."""
        why = self._why_not_fed() or self._why_not_scaled() or self._why_not_precise()
        why = why or self._why_not_same() or self._why_not_captured() or self._why_not_random()
        return Judgement(ok=why is None, why=why or self._words(), figures=self._figures)

    def _words(self) -> str:
        agree = (
            f"gradients agree to {shown_cosine(self._figures['cosine'])}" if self._new != self._own else "same maths"
        )
        return "; ".join(dict.fromkeys((agree, *self._said)))

    # --- the parts -----------------------------------------------------------------------------------

    def _why_not_fed(self) -> str | None:
        moment, plan, own = self._moment, self._plan, self._baseline
        steps = range(moment.first, moment.first + min(2, moment.length))
        if plan.feed == own.feed and (plan.feed.kind != "resident" or plan.numerics.layout == own.numerics.layout):
            moment.windows.bring(steps)
            return None
        numbers = chosen_windows(moment.first, moment.length)
        moment.windows.bring({*numbers, *steps})
        seen = self._windows
        if seen is None or plan.memory != own.memory:  # cut as the user's are, to be held against them
            seen = Windows(self._rig, dataclasses.replace(plan, memory=own.memory))
        seen.bring({*numbers, *steps})
        return why_other_samples(moment.windows, seen, numbers, self._rig.device)

    def _why_not_scaled(self) -> str | None:
        """A storm of updates that are left out; a few at the beginning, while the scale settles, are usual."""
        return self._moment.settle_scale(self._in(self._new)) if self._new == "fp16" else None

    def _why_not_precise(self) -> str | None:
        """The user's own step in the new precision, against that in the own one."""
        if self._new == self._own:
            return None
        first = self._moment.first

        def exactly(quiet: bool) -> Agreement:
            own, new = self._reference(self._own, quiet), self._reference(self._new, quiet)
            rounding = own.noise(first, 1).gradients
            return alike(own.through(first, 1), new.through(first, 1), own.another_batch(first), rounding)

        return self._compared(exactly, self._reference(self._own), self._reference(self._new))

    def _why_not_same(self) -> str | None:
        """The plan's step, made operation by operation, against the user's own in the same precision."""
        eager, own = self._eagerly(), self._in(self._new)
        if eager == own:
            return None
        updates = min(LEAST_UPDATES, self._moment.length)
        trial = Stepping(self._rig, self._moment, eager, self._windows)
        return self._compared(
            lambda quiet: self._same(self._reference(self._new, quiet), trial, updates),
            self._reference(self._new),
            trial,
        )

    def _why_not_captured(self) -> str | None:
        """The plan as it is, against its own step made operation by operation."""
        eager = self._eagerly()
        if eager == self._plan:
            return None
        updates = self._moment.updates_of(self._plan)
        own = {quiet: Reference(self._rig, self._moment, eager, self._windows) for quiet in (False, True)}
        single = Stepping(self._rig, self._moment, self._plan.but(replay_steps=1), self._windows)
        why = self._compared(lambda quiet: self._same(own[quiet], self._trial, updates), own[False], single)
        self._rig.use(self._trial.plan)
        if self._rig.given_up is not None:
            self._said.append(f"nothing is captured, since {self._rig.given_up}")
        return why

    def _why_not_random(self) -> str | None:
        own = self._reference(self._own)
        if not own.is_random:
            return None
        together = self._plan.execution.replay_steps
        least, middle = least_gap(self._trial.draws(DRAWS, self._moment.updates_of(self._plan) if together > 1 else 1))
        self._figures["redrawn"] = middle
        seen, usual = f"{100 * least:.2g} %", f"{100 * own.apart:.2g} %"
        if least < REPEATED * own.apart:
            return f"its randomness repeats: another draw changes gradients by {seen}, and in the user's own by {usual}"
        if not own.apart / SPREAD < middle < own.apart * SPREAD:
            return f"another draw changes gradients by {100 * middle:.2g} %, and in the user's own by {usual}"
        return None

    # --- what they share -----------------------------------------------------------------------------

    def _compared(self, exactly: Callable[[bool], Agreement], own: Stepping, other: Stepping) -> str | None:
        """With the same masks; else without dropout, where that takes all randomness away; else averages."""
        found = self._with_masks(exactly, own, other)
        self._figures = {**found.figures, **self._figures}
        return found.why

    def _with_masks(self, exactly: Callable[[bool], Agreement], own: Stepping, other: Stepping) -> Agreement:
        drawn = self._reference(self._own)
        if drawn.is_steady:
            found = exactly(False)
            if found.why is None or not drawn.is_random:
                return found
        with without_dropout(self._rig.modules) as any_dropped:
            if any_dropped and not self._reference(self._own, quiet=True).is_random:
                self._said.append("compared without dropout")
                return exactly(True)
        self._said.append("compared on average, as far as random masks let see")
        other.at_pace(self._moment.first, 1)
        return alike_on_average(averaged(own.draws(MANY_DRAWS, 1)), averaged(other.draws(MANY_DRAWS, 1)))

    def _same(self, own: Reference, trial: Stepping, updates: int) -> Agreement:
        for place in self._moment.places(updates):
            truth, made = own.through(place, updates), trial.at_pace(place, updates)
            found = same_maths(truth, made, self._moment.grain, functools.partial(own.noise, place, updates))
            if found.blurred:
                # The next best question at such a moment: would another batch have changed more?
                rounding = own.noise(place, updates).gradients
                loose = alike(truth, made, own.another_batch(place + updates - 1), rounding)
                blur = f"rounding alone changes gradients by {100 * found.figures['noise']:.2g} % here, and "
                found = dataclasses.replace(loose, why=loose.why and blur + loose.why)
            if found.why is None or found.figures["cosine"] < BY_CHANCE:
                break
        return found

    def _reference(self, precision: str, quiet: bool = False) -> Reference:
        key = precision, quiet
        if key not in self._references:
            self._references[key] = Reference(self._rig, self._moment, self._in(precision), self._moment.windows)
        return self._references[key]

    def _in(self, precision: str) -> Plan:
        """The user's own steps in this precision, made operation by operation."""
        execution = Execution(autotune=self._baseline.execution.autotune)
        return dataclasses.replace(self._baseline, execution=execution).but(precision=precision)

    def _eagerly(self) -> Plan:
        """The plan's own steps, made operation by operation."""
        return dataclasses.replace(self._plan, execution=Execution(autotune=self._plan.execution.autotune))
