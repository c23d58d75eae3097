"""The floating-point operations of one operation: torch's own formulas, and those that torch lacks or gets wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """How many it takes with these arguments; 0 for what is bound by memory, such as sums and activations.

    A multiplication and an addition are two. Raises whatever a formula raises where it does not know the shapes.
    """
    if name in _OWN:
        return _OWN[name](*args)
    formula = flop_registry.get(getattr(func, "_overloadpacket", func))
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """As many as forward for each of the two gradients; torch's formula takes grouped ones for whole."""
    transposed, wanted = rest[4], rest[7]
    places = prod((x if transposed else grad).shape[2:])
    return 2 * x.shape[0] * places * weight.numel() * (bool(wanted[0]) + bool(wanted[1]))


def _recurrent(x: Tensor, *weights: Tensor) -> int:
    """Every matrix meets every step of every sequence once; padded batches have three dimensions, packed ones two."""
    return 2 * prod(x.shape[:-1]) * sum(weight.numel() for weight in weights if weight.dim() == 2)


_ATTENTION = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
_ATTENTION_BACKWARD = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention_backward]
_OWN: dict[str, Callable[..., int]] = {
    "convolution_backward": _convolution_backward,
    "_cudnn_rnn": lambda *args: _recurrent(args[0], *args[1]),
    # The gradient of the input is always taken, that of the weights where the mask asks for it.
    "_cudnn_rnn_backward": lambda *args: _recurrent(args[0], *args[1]) * (1 + bool(args[21][3])),
    "mkldnn_rnn_layer": lambda *args: _recurrent(*args[:3]),
    "mkldnn_rnn_layer_backward": lambda *args: 2 * _recurrent(*args[:3]),
    "_scaled_dot_product_flash_attention_for_cpu": lambda *args: int(_ATTENTION(*args[:3])),
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda *args: int(_ATTENTION_BACKWARD(*args[:4])),
}
