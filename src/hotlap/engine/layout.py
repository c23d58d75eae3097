"""How images and the weights of their convolutions lie in memory, and the buffers that tensors have left."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.data.batches import Batch, map_tensors


class BufferPool:
    """Where tensors lay under other plans.

    What was recorded under a plan reads its tensors where they lay. As long as `keeps`, a tensor that takes a form
    again which it had before gets the memory it had then, so that plans can be changed to and fro.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._left: dict[Hashable, Tensor] = {}

    def moved(self, who: Hashable, tensor: Tensor, room: Tensor) -> Tensor:
        """The numbers of `tensor` in a memory like `room`: in the one that `who` had in that form, or in `room`."""
        if self.keeps:
            self._left[who, _form(tensor)] = tensor
            room = self._left.pop((who, _form(room)), room)
        return room.copy_(tensor)

    def forget(self) -> None:
        """Let go of all of it."""
        self.keeps = False
        self._left.clear()


def _form(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.device, tensor.dtype, tuple(tensor.shape), strides


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def why_not_channels_last(modules: Sequence[nn.Module]) -> str | None:
    """Why nothing can be laid out that way, or None where something can."""
    if any(isinstance(layer, _CONVOLUTIONS) for module in modules for layer in module.modules()):
        return None
    return "channels_last is for convolutions over images or volumes, and the model has none"


class Layout:
    """The layout of a training's weights, buffers, gradients and optimizer state.

    All tensors stay the same objects; where their layout changes, they get memory of their own.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer, rooms: BufferPool | None = None) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._rooms = rooms if rooms is not None else BufferPool()
        # By identity, with the tensor itself: as long as it is held here, no other can have its number.
        self._given: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    @torch.no_grad()
    def set(self, layout: str) -> None:
        """Lay everything out as `channels_last`, or `as given`: the way the user had it.

        Also to be called after state was put in from elsewhere: gradients and optimizer state get the layout of
        their parameter. Fused kernels pair numbers by their place in memory, on the CPU without looking.
        """
        for tensor in self._images():
            if layout == "channels_last":
                self._given.setdefault(id(tensor), (tensor, tensor.stride()))
                self._restride(tensor, _last_strides(tensor))
            elif id(tensor) in self._given:
                self._restride(tensor, self._given[id(tensor)][1])
        if layout != "channels_last":
            self._given.clear()
        parameters = {id(p): p for module in self._modules for p in module.parameters()}
        parameters |= {id(p): p for group in self._optimizer.param_groups for p in group["params"]}
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad = laid_out_as(parameter, parameter.grad)
            state = self._optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and not _lies_as(parameter, value):
                    state[name] = self._rooms.moved((id(parameter), name), value, _room_as(parameter, value))

    def batch(self, batch: Batch) -> Batch:
        """The batch with its images that way round."""
        return images_last(batch)

    def _restride(self, tensor: Tensor, strides: tuple[int, ...]) -> None:
        if tensor.stride() != strides:
            room = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            tensor.data = self._rooms.moved(id(tensor), tensor.data, room)

    def _images(self) -> Iterator[Tensor]:
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.ndim in _LAST and tensor.layout is torch.strided and not _is_expanded(tensor):
                    yield tensor


def images_last(batch: Batch) -> Batch:
    """The batch with its images channels last; no copy of those that are already."""
    return map_tensors(batch, _channels_last)


def laid_out_as(owner: Tensor, tensor: Tensor) -> Tensor:
    """A tensor of its owner's shape in the owner's layout; itself where it has that, or another shape."""
    return tensor if _lies_as(owner, tensor) else _room_as(owner, tensor).copy_(tensor)


def _lies_as(owner: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor has its owner's layout already, or cannot have it."""
    if owner.layout is not torch.strided or tensor.layout is not torch.strided:
        return True
    return tensor.shape != owner.shape or tensor.stride() == owner.stride()


def _room_as(owner: Tensor, tensor: Tensor) -> Tensor:
    return torch.empty_like(owner, dtype=tensor.dtype, device=tensor.device, requires_grad=False)


def _channels_last(tensor: Tensor) -> Tensor:
    if tensor.ndim in _LAST and (tensor.is_floating_point() or tensor.dtype is torch.uint8):
        return tensor.contiguous(memory_format=_LAST[tensor.ndim])
    return tensor


def _last_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides torch itself gives such a tensor.

    Where a dimension is 1, several describe the same memory, and `contiguous` leaves those that are there; kernels
    that look at strides to tell the layout take some of them for the other one.
    """
    return torch.empty(tensor.shape, device="meta", memory_format=_LAST[tensor.ndim]).stride()


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
