"""Whether a kernel of attention drops well: each place of each head of each sample by a draw of its own.

Answers and gradients do not tell: they are right for whatever mask was drawn. Trainings do: masks of which parts come
again elsewhere in a batch make its gradients noisier than they have to be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from hotlap.engine.attention_kernels import Call

DRAWS = 60
"""Calls that are looked at: as many bits as a whole number has room for, and by far enough to tell places apart."""
RATE = 0.5
MOST_PLACES = 2**20
"""Where a call has more, it is looked at with fewer samples and heads."""
LEAST_DISTINCT = 0.999
"""As a share of all places: how many have to be dropped in calls of their own."""
SPREAD, DEVIATIONS = 1.2, 5.0
"""How much more than by chance the number of places that are dropped may vary, and that by so many deviations."""


@dataclass(frozen=True, kw_only=True)
class Masks:
    """What several calls dropped."""

    distinct: float
    """The share of places that differ from all others in when they were dropped."""
    spread: float
    """The variance of how many are dropped in a draw, a head, a sample, a row or a column: 1 where all is by chance."""
    limit: float
    """What that may be."""

    @property
    def are_good(self) -> bool:
        """Whether every place was drawn for by itself."""
        return self.distinct >= LEAST_DISTINCT and self.spread <= self.limit

    def __str__(self) -> str:
        return (
            f"{self.distinct:.0%} of places by themselves, their number {self.spread:.2g} times as uneven as by chance"
        )


@torch.no_grad()
def masks_of(call: Call, kernel: SDPBackend) -> Masks:
    """What a kernel drops in calls like this one. Raises RuntimeError where it cannot make them.

    Every place looks at all others alike, and each of these has a value that is its own, so that answers show the mask.
    """
    probe, columns = _probe(call)
    places = math.prod(probe.query.shape[:-1]) * columns
    code = torch.zeros(places, dtype=torch.int64, device=probe.query.device)
    sums: list[list[Tensor]] = []
    for _ in range(DRAWS):
        answer = probe.by(kernel)[..., :columns]
        kept = answer.float() * probe.key.shape[-2] > 0.5 / (1 - RATE)
        code = 2 * code + kept.flatten()
        sums.append([kept.sum().view(1), *(kept.sum(dim=_but(axis)) for axis in range(4))])
    worst = (-math.inf, 0.0, 0.0)
    for draws in zip(*sums, strict=True):
        counts = torch.stack(draws).double()
        size = places / counts.shape[1]
        spread = float((counts - size * (1 - RATE)).square().mean()) / (size * RATE * (1 - RATE))
        limit = SPREAD + DEVIATIONS * math.sqrt(2 / counts.numel())
        worst = max(worst, (spread - limit, spread, limit))
    return Masks(distinct=len(torch.unique(code)) / places, spread=worst[1], limit=worst[2])


def _probe(call: Call) -> tuple[Call, int]:
    """A call of the same shape on numbers that show the mask, and for how many keys they do."""
    query, key, value = call.inputs
    device, kind = query.device, query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    columns = min(key.shape[-2], value.shape[-1])
    samples, heads = (1, *query.shape[:-2])[-2:] if query.dim() > 2 else (1, 1)
    a_head = query.shape[-2] * columns
    heads = max(min(heads, 2), min(heads, MOST_PLACES // a_head))
    samples = max(1, min(samples, MOST_PLACES // (a_head * heads)))

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros(samples, heads, *like.shape[-2:], dtype=dtype, device=device)

    values = torch.eye(*value.shape[-2:], dtype=dtype, device=device).expand(samples, heads, -1, -1).contiguous()
    made = replace(call, query=zeros(query), key=zeros(key), value=values)
    return replace(made, mask=None, dropout=RATE, causal=False, scale=None, grouped=False), columns


def _but(axis: int) -> tuple[int, ...]:
    return tuple(other for other in range(4) if other != axis)
