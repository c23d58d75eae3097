"""Calls that leave no trace: what a module and the randomness were before is put back."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hotlap.engine.fingerprint import INSIDE
from hotlap.engine.snapshot import Randomness
from hotlap.tuner.moment import Remembered

LARGEST = 64 * 2**20
"""Bytes of a tensor among a layer's attributes up to which its content is put back; a larger one is data."""
_dropping: WeakSet[nn.Module] = WeakSet()
"""Modules that have been recorded with recurrent layers that drop out."""


def note_recorded(module: nn.Module) -> None:
    """Know a module that is about to be recorded."""
    if any(isinstance(layer, nn.RNNBase) and layer.dropout > 0 for layer in module.modules()):
        _dropping.add(module)


def reads_dropout_state(module: nn.Module) -> bool:
    """Whether what was recorded of a module draws in a way of cuDNN's own."""
    return module in _dropping


def draws_on(device: torch.device) -> bool:
    """Whether the device's generator must not be set back, on behalf of what was recorded: see `Rig.draws_on`."""
    return device.type == "cuda" and bool(_dropping)


class Untouched:
    """Buffers, gradients, attributes and randomness of a module, as they were when this was made.

    As a context they are put back at its end; the device's randomness only where it does not have to `draws_on`.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._layers = list(module.modules())
        self._buffers = [
            {name: (buffer, _copied(buffer)) for name, buffer in layer._buffers.items()} for layer in self._layers
        ]
        self._attributes = [
            {name: (value, _content(value)) for name, value in _own_attributes(layer).items()} for layer in self._layers
        ]
        self._grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._remembered = Remembered([module])
        self._randomness = Randomness(device, host_only=draws_on(device))

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


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _own_attributes(layer: nn.Module) -> dict[str, Any]:
    """What the layer's author keeps in it, and its mode."""
    return {name: value for name, value in layer.__dict__.items() if name not in INSIDE or name == "training"}


def _content(value: Any) -> Any:
    """A copy of what is inside of something that can be changed in place; None for all else."""
    if isinstance(value, Tensor):
        return value.detach().clone() if value.nbytes <= LARGEST else None
    return value.copy() if isinstance(value, (list, dict, set, deque)) else None


def _put_back(value: Any, content: Any) -> Any:
    if isinstance(value, Tensor) and content is not None:
        # Not seen by autograd: what was computed from it before may still be differentiated.
        value.data.copy_(content)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(content)
    elif isinstance(value, (dict, set)):
        value.clear()
        value.update(content)
    return value
