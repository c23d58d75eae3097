"""Whether gradients agree that cannot be equal: of another precision, or of other draws of the randomness.

Seen in another precision: a loss that is larger by three hundredths, a layer whose gradient is scaled by 1.3, missing
or turned round. Seen in averages over draws: a layer whose gradient is doubled.
"""

from __future__ import annotations

import math
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
"""A layer of which rounding changes more than this in the user's own precision is not looked at in another."""

AVERAGED = 0.2
"""Where masks cannot be made the same: how far mean gradients over draws may differ beyond the noise of the draws."""


def alike(
    truth: Outcome, made: Outcome, other: Outcome | None, rounding: Gaps, *, immaterial: float = IMMATERIAL
) -> Agreement:
    """Whether gradients agree as far as another precision lets them.

    `other` is the truth for another batch, from the same weights; `rounding` how far rounding alone takes each layer.
    Layers that disagree may have an `immaterial` share of the whole.
    """
    gaps = gaps_between(truth.gradients, made.gradients)
    batches = gaps_between(truth.gradients, other.gradients) if other is not None else {}
    total, between = whole(gaps), whole(batches).error
    figures = {"cosine": total.cosine, "loss_difference": loss_gap(truth, made), "worst_layer": 0.0}
    wrong = plainly_wrong(truth, made, total)
    if wrong is not None:
        return Agreement(why=wrong, figures=figures)
    figures["norm_ratio"] = total.other / total.size if total.size else 1.0
    if between:
        figures["of_a_batch"] = total.error / between
    off = figures["loss_difference"]
    if off > LOSS and not (other is not None and abs(made.loss - truth.loss) <= BATCH * abs(other.loss - truth.loss)):
        return Agreement(why=f"the loss differs by {percent(off)}", figures=figures)
    if not _close(total, between, (COSINE, NORM, BATCH, BATCH_NORM)):
        return Agreement(why=f"gradients agree to {shown_cosine(total.cosine)} only{_length(total)}", figures=figures)
    worst: tuple[float, str] | None = None
    share, everything = 0.0, sum(map(_summed, gaps.values()))
    for name, gap in gaps.items():
        if name in rounding and rounding[name].relative > BLURRED:
            continue
        figures["worst_layer"] = max(figures["worst_layer"], gap.relative if gap.size else 0.0)
        bounds = (LAYER_COSINE, LAYER_NORM, LAYER_BATCH, LAYER_BATCH_NORM)
        if not _close(gap, batches[name].error if name in batches else 0.0, bounds):
            words = f"the gradient of {name} agrees to {shown_cosine(gap.cosine)} only{_length(gap)}"
            worst = min(worst or (2.0, ""), (gap.cosine, words))
            share += _summed(gap) / everything
    figures["disagreeing"] = share
    return Agreement(why=worst[1] if worst and share > immaterial else None, figures=figures)


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
