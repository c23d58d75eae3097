"""Depthwise convolutions by kernels that are ready at once, where those of cuDNN would first have to be compiled.

With channels last torch leaves them to cuDNN, which compiles kernels for each kind of layer and each size of batch when
they are first used: on an H200 half a second for each, 12.5 s for a MobileNetV3. hotlap's own are compiled in half a
second for all layers. Where they do not fit, torch's own take longer for a step and need no compiling; they want
channels first, so images are turned before and after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotlap.engine.depthwise_kernels import convolved


def depthwise_kinds(modules: Iterable[nn.Module]) -> int:
    """How many kinds of depthwise convolutions over images the modules hold."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, nn.Conv2d))
    return len(
        {
            (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.dilation)
            for layer in layers
            if layer.groups == layer.in_channels > 1
        }
    )


@contextmanager
def depthwise_directly() -> Iterator[None]:
    """Inside, `torch.nn.functional.conv2d` makes depthwise convolutions without anything of cuDNN."""
    there = vars(F)["conv2d"]

    def conv2d(
        input: Tensor,  # noqa: A002 -- torch's name
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        is_depthwise = groups > 1 and input.dim() == 4 and groups == input.shape[1]
        is_traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
        if not is_depthwise or is_traced:
            made: Tensor = there(input, weight, bias, stride, padding, dilation, groups)
            return made
        is_last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
        if is_last and input.is_cuda:
            ours = convolved(input, weight, bias, stride, padding, dilation)
            if ours is not None:
                return ours
        made = there(_first(input), _first(weight), bias, stride, padding, dilation, groups)
        return _Turned.apply(made, torch.channels_last) if is_last else made  # type: ignore[no-untyped-call]

    F.conv2d = conv2d  # type: ignore[assignment]
    try:
        yield
    finally:
        F.conv2d = there


def _first(tensor: Tensor) -> Tensor:
    """The tensor with channels first; the strides say so too where a dimension of 1 leaves that open.

    By the strides of images and weights torch chooses between cuDNN and its own kernels.
    """
    turned: Tensor = _Turned.apply(tensor, torch.contiguous_format)  # type: ignore[no-untyped-call]
    return turned.view(-1).view(tensor.shape)


class _Turned(torch.autograd.Function):
    """A tensor in a memory format, and its gradient in the format that the tensor came in."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
        is_last = tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
        ctx.before = torch.channels_last if is_last else torch.contiguous_format
        made = tensor.contiguous(memory_format=memory_format)
        # Autograd lets no view of a tensor that was made in here be changed in place, as activations do.
        return made.view_as(tensor) if made is tensor else made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.contiguous(memory_format=ctx.before), None
