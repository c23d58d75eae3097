"""Networks of many kinds, to see which precision is let through for them: what people train, as libraries build it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.work import Data, Work, images, windows

CLASSES = 10


def _torchvision(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(num_classes=CLASSES, **settings)
        return model

    return made


def vit_small() -> nn.Module:
    """timm's, from first weights."""
    model: nn.Module = importlib.import_module("timm").create_model("vit_small_patch16_224", num_classes=CLASSES)
    return model


def _twice(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in (inputs, outputs):
        layers += [nn.Conv2d(width, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Three scales of 32 to 128 channels; the mean over all places gives the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _twice(3, 32), _twice(32, 64), _twice(64, 128)
        self.up_second, self.up_first = _twice(192, 64), _twice(96, 32)
        self.head = nn.Conv2d(32, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        third = self.third(F.max_pool2d(second, 2))
        second = self.up_second(torch.cat([second, F.interpolate(third, scale_factor=2)], 1))
        first = self.up_first(torch.cat([first, F.interpolate(second, scale_factor=2)], 1))
        scores: Tensor = self.head(first).mean((2, 3))
        return scores


class Recurrent(nn.Module):
    """Two recurrent layers of 256 over windows, three classes from the last step."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layers = kind(29, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.layers(x)[0][:, -1])
        return scores


def _pictured(name: str, model: Callable[[], nn.Module], side: int, batch: int = 64) -> Work:
    data: Callable[[], Data] = functools.partial(images, 4096, side)
    named = f"{name}, {side}², batch {batch}"
    return Work(name=named, model=model, data=data, batch=batch, precision="bf16", replay_steps=1, images=True)


def _recurrent(kind: type[nn.RNNBase]) -> Work:
    model = functools.partial(Recurrent, kind)
    return Work(
        name=f"{kind.__name__} 2×256, batch 64", model=model, data=windows, batch=64, precision="bf16", replay_steps=4
    )


NETWORKS: tuple[Work, ...] = (
    _pictured("ResNet-50", _torchvision("resnet50"), 128),
    _pictured("ResNet-50", _torchvision("resnet50"), 224),
    _pictured("ResNet-18", _torchvision("resnet18"), 224),
    _pictured("MobileNetV3", _torchvision("mobilenet_v3_large"), 224),
    _pictured("EfficientNet-B0", _torchvision("efficientnet_b0"), 224),
    _pictured("DenseNet-121", _torchvision("densenet121"), 128),
    _pictured("VGG-16-BN", _torchvision("vgg16_bn"), 128),
    _pictured("ConvNeXt-T", _torchvision("convnext_tiny"), 128),
    _pictured("ViT-S", vit_small, 224),
    _pictured("U-Net", UNet, 96, 16),
    _recurrent(nn.LSTM),
    _recurrent(nn.GRU),
)
