"""How far two outcomes of the same updates are apart: the same maths to rounding, or alike in another precision.

Same maths in fp32 catches a loss that is larger by a thousandth, a learning rate that is larger by a hundredth, and
what an optimizer or a batch norm does not keep. But for layers that are blurred by rounding, it also catches a gradient
that is larger by a hundredth and a layer that computes in bf16. Where products are rounded more, as in TF32, faults
have to be larger by as much.

Likeness in another precision catches a loss that is larger by three hundredths, and a layer whose gradient is scaled by
1.3, missing or turned round. In averages over draws of the randomness, it catches a layer whose gradient is doubled.

Deep networks amplify rounding. At the first weights of a ResNet-50, bf16 gradients have a cosine of 0.2 with fp32, and
even TF32, torch's default for convolutions, reaches 0.8 only; such networks train in bf16 without loss of quality. So
hotlap measures the yardstick: it moves every weight by a rounding of the other precision, and makes the step again in
the user's own. In 12 networks at 4 moments each (H200, torch 2.11), bf16 changed gradients 0.8 to 1.05 times as much as
that did. A fault changes more, or makes gradients longer or shorter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotlap.core.torch_private import foreach_norm, foreach_sub
from hotlap.core.units import MIB

Parts = Mapping[str, Tensor]
"""Tensors by the name of their layer."""
LITTLE = 4 * MIB
"""Bytes up to which tensors are compared on the host. A GPU has to load each kernel before it uses it for the first
time, and for what only a comparison needs that takes longer: 4 to 51 ms each were seen on an H200."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What some updates did: loss and gradients of the last, and how far all of them together moved everything."""

    loss: float
    gradients: Parts
    weights: Parts = field(default_factory=dict)
    """How far each has moved."""
    buffers: Parts = field(default_factory=dict)
    """How far each has moved, of those that hold fractions."""
    counts: Parts = field(default_factory=dict)
    """The others, as they are."""
    skipped: int = 0
    """Updates that were left out."""
    losses: tuple[float, ...] = ()
    """Of all updates, in their order."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether two outcomes agree."""

    why: str | None
    """What differs and by how much, or None where they agree."""
    figures: Mapping[str, float] = field(default_factory=dict)
    blurred: bool = False
    """Whether rounding alone changes so much that a comparison to rounding shows nothing."""


@dataclass(frozen=True)
class Gap:
    """How far a vector is from another, which is taken for the truth."""

    size: float
    other: float
    error: float
    count: int

    @property
    def relative(self) -> float:
        """The error as a fraction of the truth."""
        return self.error / self.size if self.size else math.inf if self.error else 0.0

    @property
    def cosine(self) -> float:
        """Of the angle between the two."""
        both = self.size * self.other
        # Out of the error, which is exact where the two are next to the same.
        return (self.size**2 + self.other**2 - self.error**2) / (2 * both) if both else float(self.size == self.other)

    @property
    def along(self) -> float:
        """The error in the direction of the truth, as a fraction: what a wrong factor makes."""
        return (self.other**2 - self.size**2 - self.error**2) / (2 * self.size**2) if self.size else 0.0

    @property
    def stretch(self) -> float:
        """By which fraction their lengths differ."""
        return abs(self.other / self.size - 1) if self.size else math.inf if self.other else 0.0


Gaps = Mapping[str, Gap]


def gaps_between(truth: Parts, made: Parts) -> dict[str, Gap]:
    """The gap of every layer; a tensor that is missing is one of zeros."""
    names = [*truth, *(name for name in made if name not in truth)]
    if not names:
        return {}
    truth, made = brought_near(truth, made)
    pairs = {name: (_wide(truth.get(name), made.get(name)), _wide(made.get(name), truth.get(name))) for name in names}
    gaps: dict[str, Gap] = {}
    for device in {mine.device for mine, _ in pairs.values()}:
        gaps |= _gaps_on({name: pair for name, pair in pairs.items() if pair[0].device == device})
    return {name: gaps[name] for name in names}


def _gaps_on(pairs: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Gap]:
    mine, theirs = [pair[0] for pair in pairs.values()], [pair[1] for pair in pairs.values()]
    norms = [foreach_norm(tensors) for tensors in (mine, theirs, foreach_sub(theirs, mine))]
    # One wait for all of them.
    size, other, error = torch.stack([norm.double() for row in norms for norm in row]).view(3, -1).tolist()
    return {name: Gap(size[n], other[n], error[n], mine[n].numel()) for n, name in enumerate(pairs)}


def brought_near(*several: Parts) -> tuple[Parts, ...]:
    """The tensors themselves, or, where all of them together are little, copies on the host."""
    is_little = sum(tensor.nbytes for parts in several for tensor in parts.values()) <= LITTLE
    return tuple({name: t.detach().cpu() if is_little else t.detach() for name, t in p.items()} for p in several)


def _wide(tensor: Tensor | None, like: Tensor | None = None) -> Tensor:
    if tensor is None:
        assert like is not None
        tensor = torch.zeros_like(like)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()


def whole(gaps: Gaps) -> Gap:
    """All layers as one vector."""
    layers = gaps.values()
    size, other, error = (math.hypot(*(getattr(gap, part) for gap in layers)) for part in ("size", "other", "error"))
    return Gap(size, other, error, sum(gap.count for gap in layers))


def mean_of(several: Iterable[Parts]) -> dict[str, Tensor]:
    """The mean of vectors; a tensor that is missing is one of zeros."""
    return dict(mean_outcome(Outcome(loss=0.0, gradients=parts) for parts in several).gradients)


def mean_outcome(several: Iterable[Outcome]) -> Outcome:
    """The mean loss and gradients; a tensor that is missing is one of zeros."""
    found: dict[str, Tensor] = {}
    losses: list[float] = []
    skipped = 0
    for one in several:
        losses.append(one.loss)
        skipped += one.skipped
        for name, tensor in one.gradients.items():
            found[name] = found[name] + _wide(tensor) if name in found else _wide(tensor)
    gradients = {name: tensor / len(losses) for name, tensor in found.items()}
    return Outcome(loss=math.fsum(losses) / len(losses), gradients=gradients, skipped=skipped)


def loss_gap(truth: Outcome, made: Outcome) -> float:
    """How far the losses are apart, as a fraction."""
    off = abs(made.loss - truth.loss)
    return off / abs(truth.loss) if truth.loss else math.inf if off else 0.0


def percent(fraction: float) -> str:
    """A fraction in words."""
    return f"{100 * fraction:.2g} %" if math.isfinite(fraction) else "more than all of it"


def shown_cosine(cosine: float) -> str:
    """Rounded down: what is not equal is not shown as 1."""
    return f"{math.floor(cosine * 10_000) / 10_000:.4f}"


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
"""Where rounding blurs layers that make up more of the gradient than this, a comparison to rounding shows nothing."""

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
