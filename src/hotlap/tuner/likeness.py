"""Whether gradients agree that cannot be equal: of another precision, or of other draws of the randomness.

Seen in another precision: a loss that is larger by three hundredths, a layer whose gradient is scaled by 1.3, missing
or turned round. Seen in averages over draws: a layer whose gradient is doubled.

Deep networks amplify rounding. At the first weights of a ResNet-50, bf16 gradients have a cosine of 0.2 with fp32, and
even TF32, torch's default for convolutions, reaches 0.8 only; such networks train in bf16 without loss of quality. So
the yardstick is measured: every weight is moved by a rounding of the other precision, and the step is made again in the
user's own. In 12 networks at 4 moments each (H200, torch 2.11), bf16 changed gradients 0.8 to 1.05 times as much as
that did. A fault changes more, or makes gradients longer or shorter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hotlap.tuner.gradients import (
    Agreement,
    Gap,
    Gaps,
    Outcome,
    Parts,
    gaps_between,
    loss_gap,
    mean_of,
    percent,
    shown_cosine,
    whole,
)
from hotlap.tuner.rounding import plainly_wrong

COSINE = 0.999
NORM = 0.02
"""In another precision gradients have this cosine with the user's own at least, and a length within 2 %, …"""
BATCH = 0.25
BATCH_NORM = 0.1
"""… or their error is at most a quarter of what another batch changes, and their length is within 10 %."""
LAYER_COSINE = 0.99
LAYER_NORM = 0.1
LAYER_BATCH = 0.5
LAYER_BATCH_NORM = 0.25
"""The same of a layer by itself."""
LOSS = 0.01
"""How far the loss may be off in another precision, as a fraction; or by a quarter of what another batch changes."""
IMMATERIAL = 1e-3
"""Layers that disagree are let through where all of them together have so little of what an update does to the loss, to
first order: of the gradient, summed up by size. Attention that has nothing to tell yet has gradients next to zero, of
which narrow numbers leave noise."""
BLURRED = 0.1
"""A layer of which rounding changes more than this in the user's own precision is not looked at in another, unless
rounding changes all of the gradient by about as much."""
EXPLAINED = 1.15
LAYER_EXPLAINED = 1.5
"""How many times as much as roundings of the other precision's size gradients may change, as a whole and in a layer."""
STRETCHED = 2.0
"""The same for the length of a gradient, where that is more than the bounds above."""
BY_LUCK = 3.0
FREE = 256
"""Standard deviations by which the length of a layer's gradient may be off by chance, and how many of its numbers count
as independent: a gradient is a sum over the samples of a batch, however many numbers it has."""
LOSS_EXPLAINED = 3.0
"""The same for the loss: a single number may change little by luck."""
UNTELLING = 1.1
"""Where roundings of the other precision's size change gradients by more than this fraction, these tell too little: a
layer whose gradient is turned round would look the same."""

AVERAGED = 0.2
"""Where masks cannot be made the same: how far mean gradients over draws may differ beyond the noise of the draws."""


def alike(
    truth: Outcome,
    made: Outcome,
    other: Outcome | None,
    rounding: Gaps,
    *,
    shaken: Sequence[Outcome] = (),
    immaterial: float = IMMATERIAL,
) -> Agreement:
    """Whether gradients agree as far as another precision lets them.

    `other` is the truth for another batch, from the same weights; `rounding` how far rounding alone takes each layer in
    the user's own precision. `shaken` are outcomes in the user's own precision after every weight was moved by a
    rounding of the other precision. Layers that disagree may have an `immaterial` share of the whole.
    """
    gaps = gaps_between(truth.gradients, made.gradients)
    batches = gaps_between(truth.gradients, other.gradients) if other is not None else {}
    room = _Room(truth, shaken)
    total, between = whole(gaps), whole(batches).error
    figures = {"cosine": total.cosine, "loss_difference": loss_gap(truth, made), "worst_layer": 0.0}
    wrong = plainly_wrong(truth, made, total)
    if wrong is not None:
        return Agreement(why=wrong, figures=figures)
    figures["norm_ratio"] = total.other / total.size if total.size else 1.0
    if between:
        figures["of_a_batch"] = total.error / between
    if shaken:
        figures["of_rounding"] = total.error / room.error if room.error else math.inf
    off = abs(made.loss - truth.loss)
    usual = BATCH * abs(other.loss - truth.loss) if other is not None else 0.0
    if off > max(LOSS * abs(truth.loss), usual, LOSS_EXPLAINED * room.loss):
        return Agreement(why=f"the loss differs by {percent(loss_gap(truth, made))}", figures=figures)
    if not (_close(total, between, (COSINE, NORM, BATCH, BATCH_NORM)) or room.explains(total)):
        return Agreement(why=f"gradients agree to {shown_cosine(total.cosine)} only{_length(total)}", figures=figures)
    worst: tuple[float, str] | None = None
    share, everything = 0.0, sum(map(_summed, gaps.values()))
    blurred = max(BLURRED, 2 * whole(rounding).relative)
    for name, gap in gaps.items():
        if name in rounding and rounding[name].relative > blurred:
            continue
        figures["worst_layer"] = max(figures["worst_layer"], gap.relative if gap.size else 0.0)
        bounds = (LAYER_COSINE, LAYER_NORM, LAYER_BATCH, LAYER_BATCH_NORM)
        if not (_close(gap, batches[name].error if name in batches else 0.0, bounds) or room.explains_layer(name, gap)):
            words = f"the gradient of {name} agrees to {shown_cosine(gap.cosine)} only{_length(gap)}"
            worst = min(worst or (2.0, ""), (gap.cosine, words))
            share += _summed(gap) / everything
    figures["disagreeing"] = share
    why = worst[1] if worst and share > immaterial else None
    return Agreement(why=why, figures=figures, blurred=room.error > UNTELLING * total.size)


class _Room:
    """How far roundings of the other precision take an outcome in the user's own precision; nothing if unmeasured."""

    def __init__(self, truth: Outcome, shaken: Sequence[Outcome]) -> None:
        self._layers = [gaps_between(truth.gradients, one.gradients) for one in shaken]
        self._wholes = [whole(gaps) for gaps in self._layers]
        self.error = max((gap.error for gap in self._wholes), default=0.0)
        self.loss = max((abs(one.loss - truth.loss) for one in shaken), default=0.0)
        relative = [gap.relative for gaps in self._layers for gap in gaps.values() if gap.size]
        self._usual = statistics.median(relative) if relative else 0.0

    def explains(self, total: Gap) -> bool:
        """Whether they explain how far all gradients together are off."""
        stretch = max((gap.stretch for gap in self._wholes), default=0.0)
        return total.error <= EXPLAINED * self.error and total.stretch <= max(BATCH_NORM, STRETCHED * stretch)

    def explains_layer(self, name: str, gap: Gap) -> bool:
        """The same of one layer. One of few numbers may have had luck: it is granted what the others have."""
        seen = [gaps[name] for gaps in self._layers if name in gaps]
        error = max((self._usual * gap.size, *(one.error for one in seen)))
        stretch = STRETCHED * max((one.stretch for one in seen), default=0.0)
        if gap.size:
            stretch = max(stretch, BY_LUCK * error / gap.size / math.sqrt(min(gap.count, FREE)))
        return gap.error <= LAYER_EXPLAINED * error and gap.stretch <= max(LAYER_NORM, stretch)


def trained_alike(truth: Outcome, made: Outcome, shaken: Sequence[Outcome]) -> Agreement:
    """Whether the losses of several updates agree as far as roundings of the other precision let them."""

    def apart(one: Outcome) -> float:
        return math.fsum(abs(a - b) for a, b in zip(one.losses, truth.losses, strict=True)) / len(truth.losses)

    level = math.fsum(map(abs, truth.losses)) / len(truth.losses)
    off, room = apart(made), max(LOSS * level, LOSS_EXPLAINED * max(map(apart, shaken)))
    total = whole(gaps_between(truth.gradients, made.gradients))
    figures = {"cosine": total.cosine, "loss_difference": off / level if level else 0.0, "trained": len(truth.losses)}
    wrong = plainly_wrong(truth, made, total)
    if wrong is None and not off <= room:
        allowed = f"where rounding allows for {percent(room / level)}"
        wrong = f"over {len(truth.losses)} updates the loss differs by {percent(off / level)}, {allowed}"
    return Agreement(why=wrong, figures=figures)


def _summed(gap: Gap) -> float:
    """About the sum of a gradient's sizes, or of what it is taken for, where that is larger."""
    return max(gap.size, gap.other) * math.sqrt(gap.count)


def _close(gap: Gap, between: float, bounds: tuple[float, float, float, float]) -> bool:
    cosine, norm, batch, batch_norm = bounds
    if not gap.error or (gap.cosine >= cosine and gap.stretch <= norm):
        return True
    return gap.error <= batch * between and gap.stretch <= batch_norm


def _length(gap: Gap) -> str:
    return f", and is {gap.other / gap.size:.3g} times as long" if gap.size and gap.stretch > NORM else ""


# --- draws -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """The mean gradient over several draws of the randomness."""

    mean: Parts
    noise: Mapping[str, float]
    """The square of how far each layer of it is off by chance, about."""


def averaged(draws: Sequence[Outcome]) -> Draws:
    """Over draws from the same weights and the same batch."""
    mean = mean_of(draw.gradients for draw in draws)
    spread = dict.fromkeys(mean, 0.0)
    for draw in draws:
        for name, gap in gaps_between(mean, draw.gradients).items():
            spread[name] += gap.error**2
    return Draws(mean, {name: total / (len(draws) - 1) / len(draws) for name, total in spread.items()})


def alike_on_average(truth: Draws, made: Draws) -> Agreement:
    """Whether mean gradients agree as far as the noise of their draws lets see."""
    gaps = gaps_between(truth.mean, made.mean)
    noise = {name: truth.noise.get(name, 0.0) + made.noise.get(name, 0.0) for name in gaps}
    total, chance = whole(gaps), sum(noise.values())
    figures = {"cosine": total.cosine, "mask_noise": math.sqrt(chance) / total.size if total.size else 0.0}
    if not math.isfinite(total.other):
        return Agreement(why="its gradients are not finite", figures=figures)
    for name, gap, allowed in [("all layers", total, chance), *((n, g, noise[n]) for n, g in gaps.items())]:
        # Twice what chance makes: over few numbers it makes more now and then.
        beyond = math.sqrt(max(0.0, gap.error**2 - 2 * allowed))
        # By layer only where there is more to see than chance.
        if beyond > AVERAGED * gap.size and (gap is total or gap.size**2 > 4 * allowed):
            why = f"the mean gradient of {name} differs by {percent(gap.relative)}, beyond the noise of the masks"
            return Agreement(why=why, figures=figures)
    return Agreement(why=None, figures=figures)


def least_gap(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """How far apart the two most alike of these are, and the middle pair, as fractions of their gradients."""
    found = sorted(
        whole(gaps_between(one.gradients, other.gradients)).relative
        for number, one in enumerate(outcomes)
        for other in outcomes[:number]
    )
    return found[0], found[len(found) // 2]
