"""Restores what calls change: the state of a module and of the random generators."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from hotlap.core.object_memory import Memory, tensors_of
from hotlap.data.order import HostRandomness

_dropping: WeakSet[Any] = WeakSet()
"""Recordings of recurrent layers with dropout, while they exist."""


def drops_in_recurrence(module: nn.Module, device: torch.device) -> bool:
    """Whether cuDNN draws for the module in its own way.

    torch keeps the state of cuDNN's dropout, and creates it again after the generator was set, which waits for the GPU.
    """
    if device.type != "cuda":
        return False
    return any(isinstance(layer, nn.RNNBase) and layer.dropout > 0 for layer in module.modules())


def note_recorded(graph: Any) -> None:
    """Register a recording of a module that `drops_in_recurrence`."""
    _dropping.add(graph)


def draws_on(device: torch.device) -> bool:
    """Whether recordings forbid to set the GPU's generator back: see `Rig.draws_on`."""
    return device.type == "cuda" and bool(_dropping)


def generator_of(device: torch.device) -> torch.Generator:
    """The generator of operations on a device."""
    if device.type != "cuda":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


class GeneratorState:
    """The state of a generator when this was created."""

    __slots__ = ("_generator", "_place")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        # A GPU generator's state is two numbers, so no tensor is needed.
        on_host = generator is torch.default_generator
        self._place = generator.get_state() if on_host else (generator.initial_seed(), generator.get_offset())

    def now(self) -> GeneratorState:
        """The generator's current state."""
        return GeneratorState(self._generator)

    def put_back(self) -> None:
        """Set the generator back to this state."""
        if isinstance(self._place, Tensor):
            self._generator.set_state(self._place)
        elif self.now()._place != self._place:
            # Only if it has drawn: recurrent layers create their masks again after the seed was set.
            seed, offset = self._place
            self._generator.manual_seed(seed)
            self._generator.set_offset(offset)

    def was_set_since(self, earlier: GeneratorState) -> bool:
        """Whether the generator has another seed than before, or has drawn less."""
        if isinstance(self._place, Tensor) or isinstance(earlier._place, Tensor):
            return False
        return self._place[0] != earlier._place[0] or self._place[1] < earlier._place[1]


class ModuleState:
    """Buffers, gradients, attributes and random state of a module, as they were when this was created.

    As a context manager, it restores them at its end. It leaves the GPU's generator alone if recordings made until then
    require that (`draws_on`).
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
        self._drawn = GeneratorState(generator_of(device)) if device.type == "cuda" else None

    @property
    def unknown(self) -> list[str]:
        """What calls may change and nothing can restore, one line each."""
        return self._memory.unknown

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Restore everything, each tensor in its own memory."""
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
        # Unseen by autograd: the script may still differentiate what was computed from it before.
        buffer.data.copy_(content)
    return buffer
