"""Restores what calls change: the state of a module and of the random generators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hotlap.core.object_memory import ObjectMemory, tensors_of
from hotlap.data.order import HostRandomness
from hotlap.engine.snapshot import generator_of, twin_of


class GeneratorState:
    """The state of a generator when this was created."""

    __slots__ = ("_generator", "_place")

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        # A GPU generator's state is two numbers, so no tensor is needed.
        on_host = generator is torch.default_generator
        self._place = generator.get_state() if on_host else (generator.initial_seed(), generator.get_offset())

    def put_back(self) -> None:
        """Set the generator back to this state."""
        if isinstance(self._place, Tensor):
            self._generator.set_state(self._place)
        else:
            (seed, offset), twin = self._place, twin_of(self._generator)
            twin.manual_seed(seed)
            twin.set_offset(offset)


class ModuleState:
    """Buffers, gradients, attributes and random state of a module, as they were when this was created.

    As a context manager, it restores them at its end.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._layers = list(module.modules())
        self._buffers = [
            {name: (buffer, _copied(buffer)) for name, buffer in layer._buffers.items()} for layer in self._layers
        ]
        self._grads = [(parameter, parameter.grad) for parameter in module.parameters() if parameter.is_leaf]
        self._memory = ObjectMemory({"module": module}, tensors_of([module]))
        self._host = HostRandomness()
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
        if self._drawn is not None:
            self._drawn.put_back()


def _copied(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _put_back(buffer: Tensor | None, content: Tensor | None) -> Tensor | None:
    if buffer is not None and content is not None:
        # Unseen by autograd: the script may still differentiate what was computed from it before.
        buffer.data.copy_(content)
    return buffer
