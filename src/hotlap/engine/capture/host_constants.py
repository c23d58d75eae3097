"""Constants that a forward pass makes on the host and copies to the GPU each time, such as masks and first states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hotlap.core.torch_private import function_mode_count
from hotlap.engine.capture.recording import NotRecordedError, intended_wait

_VALUES = (Number, str, slice, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format)
_COPYING = (Tensor.to, Tensor.cuda, Tensor.type_as)
_MAKING = (torch.tensor, torch.as_tensor, Tensor.new_tensor)
_PLACING = (Tensor.copy_, Tensor.__getitem__, Tensor.__setitem__)
"""Copy arguments to the GPU where the tensor itself is there."""
_IN_SOME = "it makes constants on the host in some calls only"


class HostConstants(TorchFunctionMode):
    """The constants of one kind of pass, of which the GPU's copies are made once.

    Copying from the host waits for the GPU, which no recording can do. The first time inside this mode, the pass makes
    its copies, and they are kept. Each later time it gets them anew from the kept ones, on the GPU, after a look on the
    host that the constants are the same, in the same order; else NotRecordedError is raised. A constant is what torch
    makes inside the pass of plain values and other constants alone. What it draws at random counts too: tell that by
    the generators.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        is_vague = device.type == "cuda" and device.index is None
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_vague else device
        self._copies: list[tuple[Tensor, Tensor] | None] = []
        """What was copied, and its copy, in order; None for copies to other places than the GPU."""
        self._is_learned = False
        self._next = 0
        self._constants: dict[int, Tensor] = {}
        """Tensors made inside this pass, by the address of their memory."""

    def __enter__(self) -> HostConstants:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._next = 0
        self._asked, torch.overrides.has_torch_function = torch.overrides.has_torch_function, _are_special
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        torch.overrides.has_torch_function = self._asked
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        self._constants.clear()
        if self._is_learned and kind is None and self._next < len(self._copies):
            raise NotRecordedError(_IN_SOME)
        self._is_learned = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = inspect.unwrap(func)  # other parts of hotlap patch some of these
        if own in _COPYING and self._is_constant(args[0]):
            return self._copied(args[0], lambda: func(*args, **kwargs))
        if own in _MAKING:
            values = args[1:] if own is Tensor.new_tensor else args
            if all(isinstance(part, _VALUES) for part in _parts_of((values, kwargs))):
                return self._made(own, args, kwargs)
        if own in _PLACING and self._is_there(args[0]):
            args = args[0], *map(self._placed, args[1:])
        made = func(*args, **kwargs)
        self._note(list(_parts_of((args, kwargs))), list(_parts_of(made)))
        return made

    # --- copies ----------------------------------------------------------------------------------

    def _copied(self, constant: Tensor, copy: Callable[[], Tensor]) -> Tensor:
        """What `copy` makes of the constant."""
        made = self._again(constant, copy) if self._is_learned else self._learned(constant, copy)
        self._note([], [made])
        return made

    def _made(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """A tensor of numbers, by one of `_MAKING`."""
        if func is Tensor.new_tensor:
            like = {"dtype": args[0].dtype, "device": args[0].device}
            kwargs = like | {name: value for name, value in kwargs.items() if value is not None}
            func, args = torch.tensor, args[1:]
        constant = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
        return self._copied(constant, lambda: func(*args, **kwargs))

    def _placed(self, part: Any) -> Any:
        """An argument of one of `_PLACING`, on the GPU if torch would copy it there."""
        if isinstance(part, tuple):
            return tuple(map(self._placed, part))
        if isinstance(part, list) and part and all(type(one) is int for one in part):
            return self._made(torch.tensor, (part,), {"device": self._device})
        # A mask would be searched, there or here; a single number is no copy.
        if self._is_constant(part) and part.dim() and part.dtype is not torch.bool:
            return self._copied(part, lambda: part.to(self._device))
        return part

    def _learned(self, constant: Tensor, copy: Callable[[], Tensor]) -> Tensor:
        with intended_wait():
            made = copy()
        with torch.inference_mode(False), torch.no_grad():
            is_copy = self._is_there(made) and not made.requires_grad
            self._copies.append((constant.clone(), made.clone()) if is_copy else None)
        return made

    def _again(self, constant: Tensor, copy: Callable[[], Tensor]) -> Tensor:
        if self._next == len(self._copies):
            raise NotRecordedError(_IN_SOME)
        kept = self._copies[self._next]
        self._next += 1
        if kept is None:
            return copy()
        if constant.shape != kept[0].shape or constant.dtype != kept[0].dtype or not torch.equal(constant, kept[0]):
            raise NotRecordedError("a constant that it makes on the host differs from call to call")
        return kept[1].clone()

    # --- constants -------------------------------------------------------------------------------

    def _is_there(self, part: Any) -> bool:
        return isinstance(part, Tensor) and part.device == self._device

    def _is_constant(self, part: Any) -> bool:
        if not _is_on_host(part) or part.requires_grad:
            return False
        held = self._constants.get(_memory_of(part))
        # It no longer holds that memory after `resize_` or `set_`, so that another tensor may get it.
        return held is not None and _memory_of(held) == _memory_of(part)

    def _note(self, given: list[Any], made: list[Any]) -> None:
        """What is made of plain values and constants alone is constant; a constant that other code may write is not."""
        others = [part for part in given if not isinstance(part, _VALUES) and not self._is_constant(part)]
        if not others:
            self._constants.update((_memory_of(part), part) for part in made if _is_on_host(part))
        # A tensor on the GPU reaches the host's memory by waiting only.
        known = all(isinstance(part, (*_VALUES, Tensor)) for part in made)
        if not known or not all(map(self._is_there, others)):
            for part in filter(_is_on_host, given):
                self._constants.pop(_memory_of(part), None)


def _are_special(args: Iterable[Any]) -> bool:
    """What torch's layers ask before they take their fast path in evaluation, as if this mode were off."""
    kinds = set(map(type, args)) - {Tensor, nn.Parameter}
    return function_mode_count() > 1 or any(hasattr(kind, "__torch_function__") for kind in kinds)


def _is_on_host(part: Any) -> bool:
    return type(part) is Tensor and part.device.type == "cpu" and part.layout is torch.strided


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _parts_of(tree: Any) -> Iterator[Any]:
    """What is in containers, at any depth."""
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    if not isinstance(tree, (tuple, list)):
        yield tree
        return
    for part in tree:
        yield from _parts_of(part)
