"""As `torch.autograd.grad`, without the modules that torch loads at its first use."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from hotlap.core.torch_private import or_none, run_backward

_CHECKS = "torch.fx.experimental.symbolic_shapes"
"""What `torch.autograd.grad` compares shapes with: loading it, and sympy, takes 0.65 s."""
_run = or_none(run_backward)


def gradients(
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    coming: Sequence[Tensor] | None,
    *,
    retain_graph: bool = False,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """As `torch.autograd.grad`, None for inputs that have no part in it; without `coming`, of one number."""
    retains = retain_graph or create_graph
    fits = coming is not None and all(a.shape == b.shape for a, b in zip(outputs, coming, strict=True))
    if _run is None or coming is None or not fits or _CHECKS in sys.modules:
        return torch.autograd.grad(
            outputs, inputs, coming, retain_graph=retains, create_graph=create_graph, allow_unused=True
        )
    found: tuple[Tensor | None, ...] = _run(
        tuple(outputs), tuple(coming), retains, create_graph, tuple(inputs), True, accumulate_grad=False
    )
    return found
