"""Calls that leave no trace: what a module and the randomness were before is put back."""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hotlap.data.randomness import HostRandomness
from hotlap.engine.fingerprint import INSIDE
from hotlap.engine.remembered import Remembered

LARGEST = 64 * 2**20
"""Bytes of a tensor among a layer's attributes up to which its content is put back; a larger one is data."""
_dropping: WeakSet[Any] = WeakSet()
"""What was recorded of recurrent layers that drop out, as long as it is there."""


def drops_in_recurrence(module: nn.Module, device: torch.device) -> bool:
    """Whether cuDNN draws for it in a way of its own.

    It keeps the state of its dropout in a memory of torch's, which is made anew, waiting for the device, once the
    generator was set.
    """
    if device.type != "cuda":
        return False
    return any(isinstance(layer, nn.RNNBase) and layer.dropout > 0 for layer in module.modules())


def note_recorded(graph: Any) -> None:
    """Know what was recorded of a module that `drops_in_recurrence`."""
    _dropping.add(graph)


def draws_on(device: torch.device) -> bool:
    """Whether the device's generator must not be set back, on behalf of what was recorded: see `Rig.draws_on`."""
    return device.type == "cuda" and bool(_dropping)


def generator_of(device: torch.device) -> torch.Generator:
    """What operations on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


class Drawn:
    """How far a generator has drawn when this was made."""

    __slots__ = ("_generator", "_place")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        # Of a device's two numbers say it all, and no tensor has to be made.
        on_host = generator is torch.default_generator
        self._place = generator.get_state() if on_host else (generator.initial_seed(), generator.get_offset())

    def now(self) -> Drawn:
        """How far it has by now."""
        return Drawn(self._generator)

    def put_back(self) -> None:
        """Set the generator back to it."""
        if isinstance(self._place, Tensor):
            self._generator.set_state(self._place)
        elif self.now()._place != self._place:
            # Not where nothing was drawn: recurrent layers begin their masks anew once the seed was set.
            seed, offset = self._place
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)

    def was_set_since(self, earlier: Drawn) -> bool:
        """Whether the generator has another seed than it had, or has drawn less."""
        if isinstance(self._place, Tensor) or isinstance(earlier._place, Tensor):
            return False
        return self._place[0] != earlier._place[0] or self._place[1] < earlier._place[1]


class Untouched:
    """Buffers, gradients, attributes and randomness of a module, as they were when this was made.

    As a context they are put back at its end; the device's randomness only where it does not have to `draws_on`, by
    what was recorded until then.
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
        self._host = HostRandomness()
        self._device = device
        self._drawn = Drawn(generator_of(device)) if device.type == "cuda" else None

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
        self._host.restore()
        if self._drawn is not None and not draws_on(self._device):
            self._drawn.put_back()


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
