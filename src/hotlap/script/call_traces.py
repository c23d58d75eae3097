"""Calls that leave no trace: what a module and the randomness were before is put back."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.engine.fingerprint import INSIDE
from hotlap.engine.snapshot import Randomness
from hotlap.tuner.moment import Remembered


class Untouched:
    """Buffers, gradients, attributes and randomness of a module, as they were when this was made.

    As a context they are put back at its end. With `draws_on` the device's randomness is not, which recurrent layers
    that drop out and have been captured need: see `Rig.draws_on`.
    """

    def __init__(self, module: nn.Module, device: torch.device, *, draws_on: bool = False) -> None:
        self._layers = list(module.modules())
        self._buffers = [
            {name: (buffer, _content(buffer)) for name, buffer in layer._buffers.items()} for layer in self._layers
        ]
        self._attributes = [
            {name: (value, _content(value)) for name, value in _own_attributes(layer).items()} for layer in self._layers
        ]
        self._grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._remembered = Remembered([module])
        self._randomness = Randomness(device, host_only=draws_on)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back, each tensor into its own memory."""
        for layer, buffers, attributes in zip(self._layers, self._buffers, self._attributes, strict=True):
            layer._buffers.clear()
            layer._buffers.update({name: _put_back(*held) for name, held in buffers.items()})
            for name in [name for name in _own_attributes(layer) if name not in attributes]:
                del layer.__dict__[name]
            layer.__dict__.update({name: _put_back(*held) for name, held in attributes.items()})
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._remembered.restore()
        self._randomness.restore()


def _own_attributes(layer: nn.Module) -> dict[str, Any]:
    """What the layer's author keeps in it, and its mode."""
    return {name: value for name, value in layer.__dict__.items() if name not in INSIDE or name == "training"}


def _content(value: Any) -> Any:
    """A copy of what is inside of something that can be changed in place; None for all else."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, (list, dict, set, deque)) else None


def _put_back(value: Any, content: Any) -> Any:
    if isinstance(value, Tensor):
        # Not seen by autograd: what was computed from it before may still be differentiated.
        value.data.copy_(content)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(content)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    return value
