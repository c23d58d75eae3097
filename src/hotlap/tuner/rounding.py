"""Whether two outcomes are the same maths: they differ by rounding alone, of which it was measured how much it is.

Seen in fp32: a loss that is larger by a thousandth, a learning rate that is larger by a hundredth, what an optimizer or
a batch norm does not keep; and, but for layers that are blurred by rounding, a gradient that is larger by a hundredth,
and a layer that computes in bf16. Where products are rounded more, as in TF32, faults have to be larger by as much.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from hotlap.tuner.gradients import Agreement, Gap, Gaps, Outcome, gaps_between, loss_gap, percent, whole

SAME = 2.5e-4
"""A layer whose gradient and update differ by less, as a fraction, is the same: nothing is measured for it.

A recorded optimizer corrects its bias in fp32, by which the first updates of Adam differ by 1e-4.
"""
SAME_LOSS = 2e-5
"""The same of a loss, which is a mean over many numbers and does not jump where an activation crosses zero."""
ROOM = 4.0
"""How many times as far as a training whose weights were moved by one rounding an outcome of the same maths may be."""
SAME_BUFFER = 0.1
"""A buffer that has moved by so much more or less, as a fraction, is the same. Statistics of a batch norm follow the
bias before it, which Adam moves by the sign of a rounding; what is not kept, or kept twice, is seen."""
CUT_OFF = 8.0
"""How many roundings a gradient may be longer or shorter by: kernels of some libraries cut products of TF32 off instead
of rounding them, which makes all of it a little smaller."""
GRAIN = 4.0
"""Units in the last place of a weight by which it may differ after some updates."""
LOST = 0.5
"""A layer of whose gradient rounding may change so much, as a fraction, says nothing: a bias before a batch norm."""
MOST_LOST = 0.5
"""Where rounding blurs layers that make up more of the gradient than this, nothing can be told to rounding."""

_PARTS = {"gradients": "the gradient of {}", "weights": "the update of {}", "buffers": "the change of the buffer {}"}


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far rounding alone takes an outcome from itself."""

    roundoff: float
    """By which fraction of themselves weights were moved to see it."""
    loss: float
    gradients: Gaps
    weights: Gaps
    buffers: Gaps


def noise_of(truth: Outcome, nudged: Outcome, roundoff: float) -> Noise:
    """What a nudge of every weight by this fraction has changed."""
    parts = {part: gaps_between(getattr(truth, part), getattr(nudged, part)) for part in _PARTS}
    return Noise(roundoff=roundoff, loss=loss_gap(truth, nudged), **parts)


def same_maths(truth: Outcome, made: Outcome, grain: Mapping[str, float], noise: Callable[[], Noise]) -> Agreement:
    """Whether two outcomes differ by rounding alone; `noise` is asked for only where they are not next to equal.

    `grain` is how finely each weight and buffer is written.
    """
    gaps = {part: gaps_between(getattr(truth, part), getattr(made, part)) for part in _PARTS}
    total, off = whole(gaps["gradients"]), loss_gap(truth, made)
    figures = {"cosine": total.cosine, "loss_difference": off, "worst_layer": 0.0}
    wrong = plainly_wrong(truth, made, total) or _miscounted(truth, made)
    if wrong is not None:
        return Agreement(why=wrong, figures=figures)
    near = all(gap.error <= _least(part, name, gap, grain) for part in _PARTS for name, gap in gaps[part].items())
    if near and off <= SAME_LOSS:
        figures["worst_layer"] = max((gap.relative for gap in gaps["gradients"].values() if gap.size), default=0.0)
        return Agreement(why=None, figures=figures)
    measured = noise()
    figures["noise"] = whole(measured.gradients).relative
    judged = [_judged(part, gaps[part], getattr(measured, part), grain, measured.roundoff) for part in _PARTS]
    figures["worst_layer"] = max((gap.relative for gap in judged[0].layers.values()), default=0.0)
    room = max(SAME_LOSS, measured.roundoff, ROOM * measured.loss)
    found = [(off / room, f"the loss differs by {percent(off)}, where rounding allows for {percent(room)}")]
    found += [finding for part in judged for finding in part.findings]
    by, words = max(found)
    blurred = judged[0].lost > MOST_LOST * total.size**2
    return Agreement(why=words if by > 1 else None, figures=figures, blurred=blurred)


def plainly_wrong(truth: Outcome, made: Outcome, gradients: Gap) -> str | None:
    """What is wrong without a measure: numbers that are not finite, updates that were left out."""
    if not (math.isfinite(truth.loss) and math.isfinite(gradients.size)):
        return "the training's own loss and gradients are not finite here, so that nothing can be compared"
    if made.skipped != truth.skipped:
        return f"{made.skipped} updates were left out, where the user's own plan left out {truth.skipped}"
    if not (math.isfinite(made.loss) and math.isfinite(gradients.other)):
        return "its loss or gradients are not finite"
    return None


def _miscounted(truth: Outcome, made: Outcome) -> str | None:
    for name, count in truth.counts.items():
        if not torch.equal(count, made.counts[name]):
            return f"the buffer {name} is not what it is under the user's own plan"
    return None


def _least(part: str, name: str, gap: Gap, grain: Mapping[str, float]) -> float:
    """What a layer may be off in any case."""
    if part == "gradients":
        return SAME * gap.size
    return max((SAME_BUFFER if part == "buffers" else SAME) * gap.size, GRAIN * grain.get(name, 0.0))


@dataclass(frozen=True)
class _Judged:
    """What was found in gradients, updates or buffers."""

    findings: list[tuple[float, str]]
    """How many times more a layer is off than it may be, and the words for it."""
    layers: Gaps
    """Those that say something."""
    lost: float
    """The square of what the others make up."""


def _judged(part: str, gaps: Gaps, shaken: Gaps, grain: Mapping[str, float], roundoff: float) -> _Judged:
    usual = _usual(shaken)
    layers: dict[str, Gap] = {}
    findings, lost = [], 0.0
    for name, gap in gaps.items():
        seen = shaken.get(name)
        # A layer of few numbers may have had luck: it is granted what the others have.
        rounding = max(seen.error if seen else 0.0, usual[0] * gap.size, usual[1] * math.sqrt(gap.count))
        least = _least(part, name, gap, grain)
        room = max(least, ROOM * rounding)
        if gap.size and room > LOST * gap.size:
            lost += gap.size**2
            continue
        layers[name] = gap
        findings.append(
            (gap.error / room if room else float(gap.error > 0) * math.inf, _differs(part, name, gap, room))
        )
        if part != "buffers" and gap.size:
            # Rounding goes all ways, a wrong factor goes one.
            along = max(abs(seen.along) if seen else 0.0, 2 * rounding / gap.size / math.sqrt(gap.count))
            room = max(least / gap.size, ROOM * along, CUT_OFF * roundoff)
            findings.append((abs(gap.along) / room, _stretched(part, name, gap, room)))
    return _Judged(findings, layers, lost)


def _usual(shaken: Gaps) -> tuple[float, float]:
    """The noise of a layer in the middle of all: as a fraction, and for one number."""
    relative = [gap.relative for gap in shaken.values() if gap.size]
    each = [gap.error / math.sqrt(gap.count) for gap in shaken.values() if gap.count]
    return statistics.median(relative) if relative else 0.0, statistics.median(each) if each else 0.0


def _differs(part: str, name: str, gap: Gap, room: float) -> str:
    allowed = percent(room / gap.size) if gap.size else "nothing"
    return f"{_PARTS[part].format(name)} differs by {percent(gap.relative)}, where rounding allows for {allowed}"


def _stretched(part: str, name: str, gap: Gap, room: float) -> str:
    times = f"{1 + gap.along:.5g} times what it is"
    return f"{_PARTS[part].format(name)} is {times}, where rounding allows for {percent(room)}"
