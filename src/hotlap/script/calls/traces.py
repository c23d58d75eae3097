"""Calls that leave no trace: what a module and the randomness were before is put back."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hotlap.core.object_memory import Memory, tensors_of
from hotlap.data.order import HostRandomness

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
        self._grads = [(parameter, parameter.grad) for parameter in module.parameters()]
        self._memory = Memory({"module": module}, tensors_of([module]))
        self._host = HostRandomness()
        self._device = device
        self._drawn = Drawn(generator_of(device)) if device.type == "cuda" else None

    @property
    def unknown(self) -> list[str]:
        """What calls may move and nothing can put back, a line each."""
        return self._memory.unknown

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Put everything back, each tensor into its own memory."""
        for layer, buffers in zip(self._layers, self._buffers, strict=True):
            layer._buffers.clear()
            layer._buffers.update({name: _put_back(*held) for name, held in buffers.items()})
        for parameter, grad in self._grads:
            parameter.grad = grad
        self._memory.restore()
        self._host.restore()
        if self._drawn is not None and not draws_on(self._device):
            self._drawn.put_back()


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _put_back(buffer: Tensor | None, content: Tensor | None) -> Tensor | None:
    if buffer is not None and content is not None:
        # Not seen by autograd: what was computed from it before may still be differentiated.
        buffer.data.copy_(content)
    return buffer
