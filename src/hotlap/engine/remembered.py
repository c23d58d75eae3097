"""What modules of a training remember beside their tensors."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd


class Remembered:
    """What modules remember beside tensors: plain values, such as a count of steps, and generators of their own."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        layers = [layer for module in modules for layer in module.modules()]
        self._values = [(layer, _plain(layer)) for layer in layers]
        self._generators = [
            (value, _state(value)) for layer in layers for value in layer.__dict__.values() if isinstance(value, _OWN)
        ]

    def restore(self, *, generators: bool = True) -> None:
        """Put all of it back."""
        for layer, values in self._values:
            if _plain(layer) != values:
                layer.__dict__.update(values)
        for generator, state in self._generators if generators else ():
            if isinstance(generator, torch.Generator):
                generator.set_state(state)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = state
            else:
                generator.setstate(state)


_OWN = (torch.Generator, np.random.Generator, random.Random)


def _plain(layer: nn.Module) -> dict[str, Any]:
    # How much is dropped is changed on purpose, and put back by whoever did.
    found = {name: value for name, value in layer.__dict__.items() if isinstance(value, (int, float, str, type(None)))}
    return {name: value for name, value in found.items() if name != rate_name(layer)}


def rate_name(layer: nn.Module) -> str | None:
    """The attribute by which a layer of torch knows how much it drops; None where it drops nothing."""
    if isinstance(layer, _DropoutNd):
        return "p"
    return "dropout" if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)) else None


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.getstate()
