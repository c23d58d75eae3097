"""The gate that a changed plan has to pass: it still makes the same training, to rounding or in another precision.

Compared is from one moment of the training, with the same data and the same randomness:

- the samples that the plan's feed brings with the user's own, bit by bit;
- two updates of the plan's steps in the user's own precision with the user's own: loss, gradients, updates and buffers
  differ by rounding alone, and how much that is, is measured;
- in another precision, gradients of the plan's steps with the user's own, as a whole and by layer;
- as many updates as a captured plan replays at once with the same operation by operation, to rounding;
- draws of the randomness: they change gradients from update to update, and as much as they should.

What each of these sees is written beside its constants.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hotlap.core.errors import first_line
from hotlap.core.plan import Plan
from hotlap.core.torch_private import BatchNormBase
from hotlap.data.batches import Batch, to_device
from hotlap.data.resident import gathered
from hotlap.engine.rig import Place, Rig
from hotlap.engine.step import Window
from hotlap.tuner.agreement import (
    Agreement,
    alike,
    alike_on_average,
    averaged,
    least_gap,
    percent,
    same_maths,
    shown_cosine,
    trained_alike,
)
from hotlap.tuner.moment import LEAST_UPDATES, MOST_UPDATES, Moment, Reference, Stepping, TrialWindows, without_dropout

NEXT, BETWEEN, LAST = 3, 3, 2
"""Windows that are looked at: the next ones, some of the rest of the epoch, the last ones. A sample that is another in
one of them is seen, and a feed that ends early; one that errs only in windows between them is not."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Brought(Protocol):
    """Windows by their numbers."""

    def __contains__(self, number: int) -> bool:
        """Whether it is there."""

    def __getitem__(self, number: int) -> Window:
        """The window."""


def chosen_windows(first: int, length: int) -> list[int]:
    """Which windows of an epoch to look at, from a place in it."""
    last = max(0, length - LAST)
    between = [first + NEXT + (last - first - NEXT) * n // BETWEEN for n in range(BETWEEN)]
    wanted = {*range(first, first + NEXT), *between, *range(last, length)}
    return sorted(number for number in wanted if 0 <= number < length)


def why_other_samples(truth: Brought, seen: Brought, numbers: Sequence[int], device: torch.device) -> str | None:
    """What the windows of these numbers, as a feed brings them, have other than the user's own; None where nothing."""
    for number in numbers:
        if number not in seen:
            return f"the feed ends before window {number} of the epoch"
        reason = _why_other(truth[number], seen[number], device)
        if reason is not None:
            return f"the feed brings other samples: in window {number} of the epoch {reason}"
    return None


def _why_other(truth: Window, seen: Window, device: torch.device) -> str | None:
    if truth.sizes != seen.sizes or len(truth.pieces) != len(seen.pieces):
        return f"there are {seen.sizes} samples, not {truth.sizes}"
    for mine, theirs in zip(truth.pieces, seen.pieces, strict=True):
        reason = why_unlike(to_device(gathered(mine), device), to_device(gathered(theirs), device), "the batch")
        if reason is not None:
            return reason
    return None


def why_unlike(mine: Batch, theirs: Batch, where: str) -> str | None:
    """What a batch, `where` in words, has other than the user's own (`mine`), to the bit; None where nothing."""
    if isinstance(mine, Tensor):
        return _tensors_differ(mine, theirs, where)
    if type(mine) is not type(theirs):
        return f"{where} is a {type(theirs).__name__}, not a {type(mine).__name__}"
    if isinstance(mine, Mapping):
        if list(mine) != list(theirs):
            return f"{where} has other names"
        return _first(why_unlike(mine[name], theirs[name], f"part {name!r}") for name in mine)
    if isinstance(mine, PackedSequence):
        return _first(why_unlike(a, b, where) for a, b in zip(mine, theirs, strict=True))
    if isinstance(mine, (tuple, list)):
        if len(mine) != len(theirs):
            return f"{where} has {len(theirs)} parts, not {len(mine)}"
        return _first(why_unlike(a, b, f"part {n}") for n, (a, b) in enumerate(zip(mine, theirs, strict=True)))
    return None if _is_equal(mine, theirs) else f"{where} holds another {type(mine).__name__}"


def _first(reasons: Iterable[str | None]) -> str | None:
    return next((reason for reason in reasons if reason is not None), None)


def _is_equal(mine: Any, theirs: Any) -> bool:
    if not any("__eq__" in vars(kind) for kind in type(mine).__mro__[:-1]):
        return True  # a thing of the user's own, of which each process has another
    try:
        return bool(mine == theirs)
    except Exception:  # whatever a user's class, or an array, makes of being compared
        return repr(mine) == repr(theirs)


def _tensors_differ(mine: Tensor, theirs: Any, where: str) -> str | None:
    if not isinstance(theirs, Tensor):
        return f"{where} is a {type(theirs).__name__}, not a tensor"
    if (mine.shape, mine.dtype, mine.layout) != (theirs.shape, theirs.dtype, theirs.layout):
        return f"{where} is {_kind(theirs)}, not {_kind(mine)}"
    other = _bits(mine) != _bits(theirs)
    if not other.any():
        return None
    if not other.ndim:
        return f"{where} differs"
    rows = int(other.reshape(len(other), -1).any(1).sum())
    return f"{rows} of {len(other)} rows of {where} differ"


def _bits(tensor: Tensor) -> Tensor:
    """As whole numbers: what is not a number is not equal to itself, and -0 is equal to 0."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _kind(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"


UPDATES = 16
"""What a check takes, in updates of the user's own, about."""
AMPLIFIED_UPDATES = 48
"""The same in networks with batch norms. These amplify rounding, and it is measured by how much: 26 to 57 were seen."""
SAME_MATHS = "same maths"
"""In words, what differs by rounding alone."""
DRAWS = 3
"""Updates from the same weights that have to differ: masks that come again after one or two are seen."""
REPEATED = 0.05
"""As a fraction of what another draw changes in the user's own step: what differs by less was drawn once."""
SPREAD = 3.0
"""How many times more or less than in the user's own step another draw may change: half the rate of a dropout of 0.5
is not seen, a dropout that is missing is."""
BY_CHANCE = 0.99
"""Cosine of gradients from which on a difference may be chance, so that it is looked at elsewhere in the data too."""
MORE_THAN_A_BATCH = 1.25
"""As a fraction of what another batch changes: what changes gradients by more is no precision to train in."""
NUDGES = (1, 2)
"""Seeds of the roundings that a precision is measured against."""
TRAINED = 24
"""Updates made side by side if gradients show too little."""
MANY_DRAWS = 8
"""Updates that are averaged where masks can be neither made the same nor taken away."""


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What came of a gate."""

    ok: bool
    why: str
    """In words, for the ledger: how well it agrees, or what differs, where and by how much."""
    figures: Mapping[str, float] = field(default_factory=dict)


class Judge(Protocol):
    """Judges whether a plan still makes the same training."""

    updates: int
    """About how many updates of the user's own a check takes."""

    @property
    def is_ready(self) -> bool:
        """Whether it has what it needs to compare plans with; a script has to bring that first."""

    def check(self, plan: Plan) -> Judgement:
        """Whether training goes on under the plan as it would have; it leaves no trace in the training."""

    def forget(self) -> None:
        """Let go of what was found out."""


class Gate:
    """Judges plans against the user's own. What the user's own does is found out once for each step of the training."""

    is_ready = True
    """It makes steps by itself."""

    def __init__(self, rig: Rig, baseline: Plan) -> None:
        self._rig, self._baseline = rig, baseline
        layers = (layer for module in rig.modules for layer in module.modules())
        self.updates = AMPLIFIED_UPDATES if any(isinstance(layer, BatchNormBase) for layer in layers) else UPDATES
        """About how many updates of the user's own a check takes."""
        self._moment: Moment | None = None
        self._when: tuple[int, Place] | None = None
        self._own: dict[bool, Reference] = {}
        self._same: set[Plan] = set()
        """Steps, operation by operation, that were the user's own to rounding when they were looked at."""

    def check(self, plan: Plan) -> Judgement:
        """Whether training goes on as it would have. It leaves no trace in the training, and costs some updates.

        A fault under the plan (memory that is short, a kernel that is not there) is an answer, not an error.
        """
        rig = self._rig
        if plan == self._baseline:
            return Judgement(ok=True, why="the user's own plan")
        known = rig.cautions(self._baseline)
        reason = rig.supports(plan) or next((line for line in rig.cautions(plan) if line not in known), None)
        reason = reason or rig.why_no_trial()
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
        self._own.clear()

    def _judged(self, plan: Plan) -> Judgement:
        rig, now = self._rig, (self._rig.steps, self._rig.place)
        if self._moment is None or self._when != now:
            self.forget()
            self._moment, self._when = Moment(rig, self._baseline), now
            self._own = {quiet: self._reference(self._moment) for quiet in (False, True)}
        self._moment.home = rig.plan.feed
        if plan.execution.replay_steps > MOST_UPDATES:
            plan = plan.but(replay_steps=MOST_UPDATES)
        return _Check(rig, self._moment, self._baseline, plan, self._own, self._same).judgement()

    def _reference(self, moment: Moment) -> Reference:
        return Reference(self._rig, moment, eagerly(self._baseline), moment.windows)


class _Check:
    """One plan against the user's own."""

    def __init__(
        self,
        rig: Rig,
        moment: Moment,
        baseline: Plan,
        plan: Plan,
        own: Mapping[bool, Reference],
        same: set[Plan],
    ) -> None:
        """`own` is what the user's own steps do, as they are, and (True) without dropout.

        `same` are steps that were found to be the same before, and are not looked at again beside another precision.
        """
        self._rig, self._moment, self._baseline, self._plan, self._own = rig, moment, baseline, plan, own
        self._same_before = same
        self._is_precise = plan.numerics.precision == baseline.numerics.precision
        is_fed_alike = plan.feed == baseline.feed and plan.memory == baseline.memory
        windows = moment.windows if is_fed_alike else TrialWindows(rig, plan)
        self._windows = None if plan.feed.kind == "resident" else windows
        self._trial = Stepping(rig, moment, plan, self._windows)
        self._steps = eagerly(plan)
        self._eager = {quiet: Reference(rig, moment, self._steps, self._windows) for quiet in (False, True)}
        self._figures: dict[str, float] = {}
        self._said: list[str] = []

    def judgement(self) -> Judgement:
        """What comes of it: the first part that does not hold, or how well all of them do."""
        why = self._why_not_fed() or self._why_not_scaled() or self._why_not_same() or self._why_not_precise()
        why = why or self._why_not_compiled()
        last = [self._why_not_random, self._why_not_captured]
        if why is None and not self._own[False].is_steady:
            last.reverse()  # what is recorded without dropout is of no use to the training: drawing records it anew
        why = why or last[0]() or last[1]()
        return Judgement(ok=why is None, why=why or self._words(), figures=self._figures)

    def _words(self) -> str:
        agree = SAME_MATHS if self._is_precise else f"gradients agree to {shown_cosine(self._figures['cosine'])}"
        if "trained" in self._figures:
            agree = f"losses of {self._figures['trained']:.0f} updates agree as far as rounding lets them"
        if self._figures.get("disagreeing"):
            agree += f", but for layers with {percent(self._figures['disagreeing'])} of them"
        return "; ".join(dict.fromkeys((agree, *self._said)))

    # --- the parts -----------------------------------------------------------------------------------

    def _why_not_fed(self) -> str | None:
        moment, plan, own = self._moment, self._plan, self._baseline
        steps = range(moment.first, moment.first + min(LEAST_UPDATES, moment.length))
        if plan.feed == own.feed and (plan.feed.kind != "resident" or plan.numerics.layout == own.numerics.layout):
            moment.windows.bring(steps)
            return None
        numbers = chosen_windows(moment.first, moment.length)
        moment.windows.bring({*numbers, *steps})
        seen = self._windows
        if seen is None or plan.memory != own.memory:  # cut as the user's are, to be held against them
            seen = TrialWindows(self._rig, dataclasses.replace(plan, memory=own.memory))
        seen.bring({*numbers, *steps})
        return why_other_samples(moment.windows, seen, numbers, self._rig.device)

    def _why_not_same(self) -> str | None:
        """The plan's steps in the user's own precision, operation by operation, against the user's own."""
        steps = self._steps.but(precision=self._baseline.numerics.precision)
        if not self._is_precise:  # what would be chosen or compiled for a precision that is not used is dear to know
            own = self._baseline.execution
            steps = steps.but(autotune=own.autotune, compile=own.compile)
        if steps == eagerly(self._baseline) or (steps in self._same_before and not self._is_precise):
            return None
        updates = min(LEAST_UPDATES, self._moment.length)
        trial = Stepping(self._rig, self._moment, steps, self._windows)
        why = self._compared(lambda quiet: self._same(self._own[quiet], trial, updates), self._own[False], trial)
        if why is None:
            self._same_before.add(steps)
        return why

    def _why_not_scaled(self) -> str | None:
        """A storm of updates that are left out; a few at the beginning, while the scale settles, are usual."""
        fp16 = next((p for p in (self._plan, self._baseline) if p.numerics.precision == "fp16"), None)
        return self._moment.settle_scale(eagerly(fp16)) if fp16 is not None else None

    def _why_not_precise(self) -> str | None:
        """The plan's steps, operation by operation, against the user's own in another precision."""
        if self._is_precise:
            return None
        first = self._moment.first

        def exactly(quiet: bool) -> Agreement:
            own, other = self._own[quiet], self._eager[quiet]
            rounding, batch = own.rounding(first), own.another_batch(first)
            found = alike(own.gradients(first), other.gradients(first), batch, rounding)
            if found.why is None or found.figures.get("of_a_batch", 0.0) > MORE_THAN_A_BATCH:
                return found
            # More than a network that does not amplify rounding would show: is it what this one makes of rounding?
            by, truth = other.roundoff, own.mean_gradients()
            shaken = [own.mean_gradients(nudge=by, nudge_seed=seed) for seed in NUDGES]
            mean = alike(truth, other.mean_gradients(), None, rounding, shaken=shaken)
            if mean.why is not None:
                return found
            if mean.blurred:
                return self._trained(own, other)
            self._said.append("rounding allows for no more")
            return mean

        return self._compared(exactly, self._own[False], self._eager[False], says_most=True)

    def _why_not_compiled(self) -> str | None:
        """Steps that were to be compiled, and could not be."""
        if self._steps.execution.compile == "no":
            return None
        self._rig.use(self._eager[False].plan)
        return self._rig.given_up and f"it runs uncompiled, since {self._rig.given_up}"

    def _why_not_captured(self) -> str | None:
        """The plan as it is, against its own steps made operation by operation."""
        if self._steps == self._plan:
            return None
        updates = self._moment.updates_of(self._plan)
        single = Stepping(self._rig, self._moment, self._plan.but(replay_steps=1), self._windows)
        # Kernels are the same, so that masks have to be: else they may be drawn once for all updates of a replay. Those
        # of attention are the same in here: recorded steps choose theirs.
        with self._rig.attention(self._plan):
            why = self._compared(
                lambda quiet: self._same(self._eager[quiet], self._trial, updates),
                self._eager[False],
                single,
                same=True,
            )
        self._rig.use(self._trial.plan)
        if self._rig.given_up is not None:
            return f"nothing is captured, since {self._rig.given_up}"
        return why

    def _why_not_random(self) -> str | None:
        """Masks that come again from update to update, or drop more or less than they should."""
        own, trial, plan = self._own[False], self._trial, self._plan
        if not own.is_random:
            return None
        updates = self._moment.updates_of(plan) if plan.execution.replay_steps > 1 else 1
        if plan.execution.mode == "captured":
            trial.at_pace(self._moment.first, updates)
        least, middle = least_gap(trial.draws(DRAWS, updates))
        self._figures["redrawn"] = middle
        usual = f"and in the user's own by {percent(own.apart)}"
        if least < REPEATED * own.apart:
            return f"its randomness repeats: another draw changes gradients by {percent(least)}, {usual}"
        # (After several updates draws have drifted further apart than after the user's own one.)
        if self._plan.execution.replay_steps == 1 and not own.apart / SPREAD < middle < own.apart * SPREAD:
            return f"another draw changes gradients by {percent(middle)}, {usual}"
        return None

    # --- what they share -----------------------------------------------------------------------------

    def _compared(
        self,
        exactly: Callable[[bool], Agreement],
        own: Stepping,
        other: Stepping,
        *,
        same: bool = False,
        says_most: bool = False,
    ) -> str | None:
        """Why two ways to make the same updates do not agree; their figures are kept."""
        found = self._with_masks(exactly, own, other, same)
        kept = self._figures
        self._figures = {**kept, **found.figures} if says_most else {**found.figures, **kept}
        return found.why

    def _with_masks(
        self, exactly: Callable[[bool], Agreement], own: Stepping, other: Stepping, same: bool
    ) -> Agreement:
        """With the same masks; else, unless they have to be, without dropout where that takes all randomness away.

        Where it does not, averages.
        """
        drawn = self._own[False]
        if drawn.is_steady:
            found = exactly(False)
            if found.why is None or same or not drawn.is_random:
                return found
        with without_dropout(self._rig.modules) as any_dropped:
            if any_dropped and not self._own[True].is_random:
                self._said.append("compared without dropout")
                return exactly(True)
        self._said.append("compared on average, as far as random masks let see")
        other.at_pace(self._moment.first, 1)
        return alike_on_average(averaged(own.draws(MANY_DRAWS, 1)), averaged(other.draws(MANY_DRAWS, 1)))

    def _trained(self, own: Reference, other: Reference) -> Agreement:
        """Some dozen updates side by side, where gradients tell too little to be compared.

        Losses of the plan's steps may be as far from the user's own as these are from themselves, once every weight was
        moved by a rounding of the plan's precision.
        """
        first = self._moment.first
        updates = min(TRAINED, self._moment.length - first)
        if updates < TRAINED // 2:
            return Agreement(why="rounding alone changes gradients too much here to compare them")
        truth, made = own.run(first, updates), other.run(first, updates)
        shaken = [own.run(first, updates, nudge=other.roundoff, nudge_seed=seed) for seed in NUDGES]
        return trained_alike(truth, made, shaken)

    def _same(self, own: Reference, trial: Stepping, updates: int) -> Agreement:
        for place in self._moment.places(updates):
            truth, made = own.through(place, updates), trial.at_pace(place, updates)
            found = same_maths(truth, made, self._moment.grain, functools.partial(own.noise, place, updates))
            if found.blurred:
                # The next best question at such a moment: would another batch have changed more?
                rounding, other = own.noise(place, updates).gradients, own.another_batch(place + updates - 1)
                shaken = [own.run(place, updates, nudge=own.roundoff, nudge_seed=seed) for seed in NUDGES]
                loose = alike(truth, made, other, rounding, shaken=shaken, immaterial=0.0)
                blur = f"rounding alone changes gradients by {100 * found.figures['noise']:.2g} % here, and "
                found = dataclasses.replace(loose, why=loose.why and blur + loose.why)
            if found.why is None or found.figures["cosine"] < BY_CHANCE:
                break
        return found


def eagerly(plan: Plan) -> Plan:
    """The steps of a plan, made one by one and not recorded."""
    execution = dataclasses.replace(plan.execution, mode="eager", replay_steps=1, without=())
    return dataclasses.replace(plan, execution=execution)
