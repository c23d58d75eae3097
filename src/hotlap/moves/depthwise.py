"""Depthwise convolutions: cuDNN compiles a kernel for each kind of them when it is first used, which takes long."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.conv import _ConvNd


def depthwise(modules: Iterable[nn.Module]) -> int:
    """How many kinds of depthwise convolutions the modules hold."""
    layers = (layer for module in modules for layer in module.modules() if isinstance(layer, _ConvNd))
    return len(
        {
            (layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.dilation)
            for layer in layers
            if layer.groups == layer.in_channels > 1
        }
    )
