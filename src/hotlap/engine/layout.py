"""How images and convolution weights lie in memory, and a pool of the buffers that tensors have left."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.data.batches import Batch, map_tensors


class BufferPool:
    """Buffers that tensors used under other plans.

    What was recorded under a plan reads its tensors at their old addresses. While `keeps` is set, a tensor that returns
    to an earlier form gets its earlier buffer, so that plans can be switched back and forth.
    """

    def __init__(self) -> None:
        self.keeps = False
        self._left: dict[Hashable, Tensor] = {}

    def moved(self, who: Hashable, tensor: Tensor, room: Tensor) -> Tensor:
        """The values of `tensor` in the buffer that `who` had in the form of `room`; in `room` itself if there is
        none."""
        if self.keeps:
            self._left[who, _form(tensor)] = tensor
            room = self._left.pop((who, _form(room)), room)
        return room.copy_(tensor)

    def forget(self) -> None:
        """Release all buffers."""
        self.keeps = False
        self._left.clear()


def _form(tensor: Tensor) -> Hashable:
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.device, tensor.dtype, tuple(tensor.shape), strides


_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_CONVOLUTIONS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def why_not_channels_last(modules: Sequence[nn.Module]) -> str | None:
    """Why channels last does not apply, or None where it does."""
    if any(isinstance(layer, _CONVOLUTIONS) for module in modules for layer in module.modules()):
        return None
    return "channels_last is for convolutions over images or volumes, and the model has none"


class Layout:
    """The layout of a training's weights, buffers, gradients and optimizer state.

    All tensors stay the same objects. Those whose layout changes get new memory.
    """

    def __init__(self, modules: Sequence[nn.Module], optimizer: Optimizer, pool: BufferPool | None = None) -> None:
        self._modules, self._optimizer = modules, optimizer
        self._pool = pool if pool is not None else BufferPool()
        # By identity. The dict holds the tensor too, so that no other tensor can get its id.
        self._given: dict[int, tuple[Tensor, tuple[int, ...]]] = {}

    @torch.no_grad()
    def set(self, layout: str) -> None:
        """Lay everything out as `channels_last`, or `as given`: the user's own layout.

        Call it too after state was loaded from elsewhere: gradients and optimizer state get the layout of their
        parameter. Fused kernels pair elements by their position in memory; on the CPU they do so without a check.
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
                    state[name] = self._pool.moved((id(parameter), name), value, _room_as(parameter, value))

    def batch(self, batch: Batch) -> Batch:
        """The batch with its images in channels last."""
        return images_last(batch)

    def _restride(self, tensor: Tensor, strides: tuple[int, ...]) -> None:
        if tensor.stride() != strides:
            room = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            tensor.data = self._pool.moved(id(tensor), tensor.data, room)

    def _images(self) -> Iterator[Tensor]:
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.ndim in _LAST and tensor.layout is torch.strided and not _is_expanded(tensor):
                    yield tensor


def images_last(batch: Batch) -> Batch:
    """The batch with its images in channels last; images that are so already are not copied."""
    return map_tensors(batch, _channels_last)


def laid_out_as(owner: Tensor, tensor: Tensor) -> Tensor:
    """The tensor in its owner's layout. It is returned as it is if it has that layout or another shape."""
    return tensor if _lies_as(owner, tensor) else _room_as(owner, tensor).copy_(tensor)


def _lies_as(owner: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor already has its owner's layout, or cannot have it."""
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
    """The strides that torch gives such a tensor.

    If a dimension is 1, several strides describe the same memory, and `contiguous` keeps the present ones. Kernels that
    read the layout off the strides mistake some of them for the other layout.
    """
    return torch.empty(tensor.shape, device="meta", memory_format=_LAST[tensor.ndim]).stride()


def _is_expanded(tensor: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
