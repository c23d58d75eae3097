"""What a training remembers beside its weights, its buffers and its optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from hotlap.core.object_memory import Changes, Left, Memory, tensors_of

_BY_PLAN = ("_step_supports_amp_scaling", "_opt_called", "found_inf", "grad_scale")
"""Attributes of an optimizer that follow the plan in force."""


class Remembered(Memory):
    """Attributes of modules and of an optimizer, and all that the user's functions can reach, however deep.

    Parameters, buffers and the optimizer's state are kept by others; so is how much is dropped, which is changed on
    purpose and put back by those who did.
    """

    def __init__(
        self, modules: Sequence[nn.Module], optimizer: Optimizer | None = None, functions: Iterable[Any] = ()
    ) -> None:
        roots, own = _roots(modules, optimizer, functions), _kept_by_others(modules, optimizer)
        super().__init__(roots, own, _left(modules, optimizer, rates=True))


def changes_of(modules: Sequence[nn.Module], optimizer: Optimizer, functions: Iterable[Any]) -> Changes:
    """The same for checkpoints: what changes from here on."""
    left = _left(modules, optimizer, rates=False)
    return Changes(_roots(modules, optimizer, functions), lambda: _kept_by_others(modules, optimizer), left)


def _roots(modules: Sequence[nn.Module], optimizer: Optimizer | None, functions: Iterable[Any]) -> dict[str, Any]:
    found: dict[str, Any] = dict(zip(("model", "loss"), modules, strict=False))
    names = ("loss", "forward", "prepare", "augment")
    found |= {name: one for name, one in zip(names, functions, strict=False) if one is not None}
    return found | ({} if optimizer is None else {"optimizer": optimizer})


def _kept_by_others(modules: Sequence[nn.Module], optimizer: Optimizer | None) -> Iterator[Tensor]:
    yield from tensors_of(modules)
    for group in optimizer.param_groups if optimizer is not None else ():
        yield from group["params"]


def _left(modules: Sequence[nn.Module], optimizer: Optimizer | None, *, rates: bool) -> Left:
    layers = [layer for module in modules for layer in module.modules()] if rates else []
    by_layer = {id(vars(layer)): name for layer in layers if (name := rate_name(layer)) is not None}
    inside = None if optimizer is None else vars(optimizer)

    def is_left(holder: Any, key: Any) -> bool:
        return (holder is inside and key in _BY_PLAN) or by_layer.get(id(holder), _BY_PLAN) == key

    return is_left


def rate_name(layer: nn.Module) -> str | None:
    """The attribute by which a layer of torch knows how much it drops; None where it drops nothing."""
    if isinstance(layer, _DropoutNd):
        return "p"
    return "dropout" if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) else None
