"""What some updates did to a training, and how far two such outcomes are apart, as a whole and by layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

SAME = 2.5e-4
"""Two outcomes that differ by less, as a fraction, are the same maths: nothing is measured for them.

A recorded optimizer corrects its bias in fp32, by which the first updates of Adam differ by 1e-4. Whatever changes the
loss, or a layer's gradient or update, by a thousandth is seen in fp32, wherever the layer is not all rounding.
"""
ROOM = 4.0
"""How many times as far as a training whose weights were moved by one rounding an outcome of the same maths may be."""
GRAIN = 4.0
"""Units in the last place of a weight by which it may differ after some updates."""
LOST = 0.5
"""A layer of whose gradient rounding may change so much, as a fraction, says nothing: a bias before a batch norm."""
MOST_LOST = 0.5
"""Where rounding blurs layers that make up more of the gradient than this, nothing can be told to rounding."""

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
"""The same of a layer by itself. A layer whose gradient is scaled by 1.3, or turned round, is always seen."""
LOSS = 0.02
"""How far the loss may be off in another precision, as a fraction; or by a quarter of what another batch changes."""
BLURRED = 0.1
"""A layer of which rounding changes more than this in the user's own precision is not looked at in another."""

AVERAGED = 0.2
"""Where masks cannot be made the same: how far mean gradients over draws may differ beyond the noise of the draws."""

Parts = Mapping[str, Tensor]
"""Tensors by the name of their layer."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What some updates did: loss and gradients of the last, and how far all of them together moved everything."""

    loss: float
    gradients: Parts
    weights: Parts
    """How far each has moved."""
    buffers: Parts
    """How far each has moved, of those that hold fractions."""
    counts: Parts
    """The others, as they are."""
    skipped: int = 0
    """Updates that were left out."""


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
    def stretch(self) -> float:
        """By which fraction their lengths differ."""
        return abs(self.other / self.size - 1) if self.size else math.inf if self.other else 0.0


Gaps = Mapping[str, Gap]


def gaps_between(truth: Parts, made: Parts) -> dict[str, Gap]:
    """The gap of every layer; a tensor that is missing is one of zeros."""
    names = [*truth, *(name for name in made if name not in truth)]
    if not names:
        return {}
    mine = [_wide(truth.get(name), made.get(name)) for name in names]
    theirs = [_wide(made.get(name), truth.get(name)) for name in names]
    norms = [torch._foreach_norm(tensors) for tensors in (mine, theirs, torch._foreach_sub(theirs, mine))]
    # One wait for all of them.
    size, other, error = torch.stack([norm.double() for row in norms for norm in row]).view(3, -1).tolist()
    return {name: Gap(size[n], other[n], error[n], mine[n].numel()) for n, name in enumerate(names)}


def _wide(tensor: Tensor | None, like: Tensor | None) -> Tensor:
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


def loss_gap(truth: Outcome, made: Outcome) -> float:
    """How far the losses are apart, as a fraction."""
    off = abs(made.loss - truth.loss)
    return off / abs(truth.loss) if truth.loss else math.inf if off else 0.0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Whether two outcomes agree."""

    why: str | None
    """What differs and by how much, or None where they agree."""
    figures: Mapping[str, float] = field(default_factory=dict)
    blurred: bool = False
    """Whether rounding alone changes so much that nothing can be told to rounding."""


# --- the same maths --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Noise:
    """How far rounding alone takes an outcome from itself."""

    loss: float
    gradients: Gaps
    weights: Gaps
    buffers: Gaps
    roundoff: float
    """By which fraction of themselves weights were moved to see it; losses may differ as much in any case."""


def same_maths(truth: Outcome, made: Outcome, grain: Mapping[str, float], noise: Callable[[], Noise]) -> Agreement:
    """Whether two outcomes differ by rounding alone; `noise` is asked for only where they are not next to equal.

    `grain` is how finely each weight and buffer is written.
    """
    gaps = {part: gaps_between(getattr(truth, part), getattr(made, part)) for part in _PARTS}
    gradients = whole(gaps["gradients"])
    figures = {"cosine": gradients.cosine, "loss_difference": loss_gap(truth, made), "worst_layer": 0.0}
    wrong = _plainly_wrong(truth, made, gradients)
    if wrong is not None:
        return Agreement(why=wrong, figures=figures)
    if figures["loss_difference"] <= SAME and all(
        gap.error <= _least(part, name, gap, grain) for part in _PARTS for name, gap in gaps[part].items()
    ):
        figures["worst_layer"] = max((gap.relative for gap in gaps["gradients"].values() if gap.size), default=0.0)
        return Agreement(why=None, figures=figures)
    return _beside(gaps, noise(), grain, figures)


_PARTS = {"gradients": "the gradient of {}", "weights": "the update of {}", "buffers": "the buffer {}"}


def _plainly_wrong(truth: Outcome, made: Outcome, gradients: Gap) -> str | None:
    if not (math.isfinite(truth.loss) and math.isfinite(gradients.size)):
        return "the training's own loss and gradients are not finite here, so that nothing can be compared"
    if made.skipped != truth.skipped:
        return f"{made.skipped} updates were left out, where the user's own plan left out {truth.skipped}"
    if not (math.isfinite(made.loss) and math.isfinite(gradients.other)):
        return "its loss or gradients are not finite"
    for name, count in truth.counts.items():
        if not torch.equal(count, made.counts[name]):
            return f"the buffer {name} is not what it is under the user's own plan"
    return None


def _least(part: str, name: str, gap: Gap, grain: Mapping[str, float]) -> float:
    """What a layer may be off in any case."""
    return max(SAME * gap.size, 0.0 if part == "gradients" else GRAIN * grain.get(name, 0.0))


def _beside(gaps: Mapping[str, Gaps], noise: Noise, grain: Mapping[str, float], figures: dict[str, float]) -> Agreement:
    """Whether every gap is one that rounding makes."""
    lost, worst, worst_by = 0.0, "", 1.0
    loss_room = max(SAME, noise.roundoff, ROOM * noise.loss)
    if figures["loss_difference"] > loss_room:
        worst_by = figures["loss_difference"] / loss_room
        seen, allowed = _percent(figures["loss_difference"]), _percent(loss_room)
        worst = f"the loss differs by {seen}, where rounding allows for {allowed}"
    for part, words in _PARTS.items():
        mine: Gaps = getattr(noise, part)
        total, shaken = whole(gaps[part]), whole(mine)
        for name, gap in gaps[part].items():
            # A layer of few numbers may have had luck: it is granted what the others have.
            share = shaken.error * math.sqrt(gap.count / max(1, total.count))
            rounding = max(mine[name].error if name in mine else 0.0, shaken.relative * gap.size, share)
            room = max(_least(part, name, gap, grain), ROOM * rounding)
            if room > LOST * gap.size and gap.size:
                lost += gap.size**2 if part == "gradients" else 0.0
                continue
            if part == "gradients":
                figures["worst_layer"] = max(figures["worst_layer"], gap.relative)
            if gap.error > room and gap.error / max(room, 1e-300) > worst_by:
                worst_by = gap.error / max(room, 1e-300)
                allowed = _percent(room / gap.size if gap.size else 0.0)
                worst = f"{words.format(name)} differs by {_percent(gap.relative)}, where rounding allows for {allowed}"
    size = whole(gaps["gradients"]).size
    figures["noise"] = whole(noise.gradients).relative
    blurred = lost > MOST_LOST * size**2
    return Agreement(why=worst or None, figures=figures, blurred=blurred)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2g} %" if math.isfinite(fraction) else "more than all of it"


# --- another precision -----------------------------------------------------------------------------


def alike(truth: Outcome, made: Outcome, other: Outcome | None, rounding: Gaps | None) -> Agreement:
    """Whether gradients agree as far as another precision lets them.

    `other` is the truth for another batch, from the same weights; `rounding` how far rounding alone takes each layer.
    """
    gaps = gaps_between(truth.gradients, made.gradients)
    batches = gaps_between(truth.gradients, other.gradients) if other is not None else {}
    total, between = whole(gaps), whole(batches).error if batches else 0.0
    figures = {"cosine": total.cosine, "loss_difference": loss_gap(truth, made), "norm_ratio": 1.0, "worst_layer": 0.0}
    wrong = _plainly_wrong(truth, made, total)
    if wrong is not None:
        return Agreement(why=wrong, figures=figures)
    figures["norm_ratio"] = total.other / total.size if total.size else 1.0
    if between:
        figures["of_a_batch"] = total.error / between
    off = figures["loss_difference"]
    if off > LOSS and not (other is not None and abs(made.loss - truth.loss) <= BATCH * abs(other.loss - truth.loss)):
        return Agreement(why=f"the loss differs by {_percent(off)}", figures=figures)
    if not _close(total, between, (COSINE, NORM, BATCH, BATCH_NORM)):
        return Agreement(why=f"gradients agree to {shown_cosine(total.cosine)} only{_length(total)}", figures=figures)
    worst: tuple[float, str] | None = None
    for name, gap in gaps.items():
        if rounding is not None and name in rounding and rounding[name].relative > BLURRED:
            continue
        figures["worst_layer"] = max(figures["worst_layer"], gap.relative if gap.size else 0.0)
        bounds = (LAYER_COSINE, LAYER_NORM, LAYER_BATCH, LAYER_BATCH_NORM)
        if not _close(gap, batches[name].error if name in batches else 0.0, bounds):
            words = f"the gradient of {name} agrees to {shown_cosine(gap.cosine)} only{_length(gap)}"
            worst = min(worst or (2.0, ""), (gap.cosine, words))
    return Agreement(why=worst[1] if worst else None, figures=figures)


def _close(gap: Gap, between: float, bounds: tuple[float, float, float, float]) -> bool:
    cosine, norm, batch, batch_norm = bounds
    if not gap.error:
        return True
    if gap.cosine >= cosine and gap.stretch <= norm:
        return True
    return gap.error <= batch * between and gap.stretch <= batch_norm


def _length(gap: Gap) -> str:
    return f", and is {gap.other / gap.size:.3g} times as long" if gap.size and gap.stretch > NORM else ""


def shown_cosine(cosine: float) -> str:
    """Rounded down: what is not equal is not shown as 1."""
    return f"{math.floor(cosine * 10_000) / 10_000:.4f}"


# --- averages over draws -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Draws:
    """The mean gradient over several draws of the randomness."""

    mean: Parts
    noise: Mapping[str, float]
    """The square of how far each layer of it is off by chance, about."""


def averaged(draws: Sequence[Outcome]) -> Draws:
    """Over draws from the same weights and the same batch."""
    names = list(dict.fromkeys(name for draw in draws for name in draw.gradients))
    mean: dict[str, Tensor] = {}
    for name in names:
        parts = [draw.gradients[name] for draw in draws if name in draw.gradients]
        mean[name] = torch.stack([_wide(part, None) for part in parts]).sum(0) / len(draws)
    spread = dict.fromkeys(names, 0.0)
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
            why = f"the mean gradient of {name} differs by {_percent(gap.relative)}, beyond the noise of the masks"
            return Agreement(why=why, figures=figures)
    return Agreement(why=None, figures=figures)


def least_gap(outcomes: Iterable[Outcome]) -> tuple[float, float]:
    """How far apart the two most alike of these are, and the middle pair, as fractions of their gradients."""
    several = list(outcomes)
    found = sorted(
        whole(gaps_between(one.gradients, other.gradients)).relative
        for n, one in enumerate(several)
        for other in several[:n]
    )
    return found[0], found[len(found) // 2]
