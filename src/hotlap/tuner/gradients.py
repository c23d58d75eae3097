"""What some updates did to a training, and how far two such outcomes are apart, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """Whether rounding alone changes so much that nothing can be told to rounding."""


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
    norms = [torch._foreach_norm(tensors) for tensors in (mine, theirs, torch._foreach_sub(theirs, mine))]
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
