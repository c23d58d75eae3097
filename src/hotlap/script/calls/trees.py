"""Arguments and outputs of modules: tensors in nested containers."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotlap.engine.capture.fingerprint import place_of

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)

Form = tuple[tuple[torch.dtype, bool], ...]
"""Dtype and contiguity of each tensor in some outputs."""


def map_leaves(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with every tensor changed; copies only containers in which something changes."""
    if isinstance(tree, Tensor):
        return change(tree)
    parts = dict(parts_of(tree))
    made = {key: map_leaves(part, change) for key, part in parts.items()}
    return tree if all(made[key] is parts[key] for key in parts) else _with_parts(tree, made)


def leaves(tree: Any) -> list[Tensor]:
    """All tensors in a tree, in order, each once."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    map_leaves(tree, note)
    return list(found.values())


def with_leaves(tree: Any, before: Sequence[Tensor], after: Sequence[Tensor]) -> Any:
    """The tree with each of its leaves (`before`) replaced by the one at the same position in `after`."""
    places = {id(old): new for old, new in zip(before, after, strict=True)}
    return map_leaves(tree, lambda tensor: places[id(tensor)])


def with_gradient_hooks(outputs: Any, on_gradient: Callable[[int, Tensor], None], given: Any) -> Any:
    """The outputs, with hooks that call `on_gradient` with a leaf's number and each gradient from the script.

    Gradients between outputs inside the module do not count. `given` are the arguments of the call.
    """
    before = leaves(outputs)
    shared = set(map(id, sharing_memory(before, given)))

    def hooked(number: int, leaf: Tensor) -> Tensor:
        on_leaf = functools.partial(on_gradient, number)
        if leaf.grad_fn is None:
            return leaf
        if not leaf._is_view() and id(leaf) not in shared:
            watched: Tensor = _Watched.apply(leaf, on_leaf)  # type: ignore[no-untyped-call]
            return watched
        # A write to it changes the history of all that share its memory.
        view = leaf.view_as(leaf)
        view.register_hook(on_leaf)  # type: ignore[no-untyped-call]
        return view

    return with_leaves(outputs, before, [hooked(number, leaf) for number, leaf in enumerate(before)])


def sharing_memory(outputs: Sequence[Tensor], given: Any) -> list[Tensor]:
    """The outputs whose memory is also that of another output or of an argument."""
    uses = Counter(map(memory_of, (*outputs, *leaves(given))))
    return [output for output in outputs if uses[memory_of(output)] > 1]


def memory_of(tensor: Tensor) -> int:
    """A number that tells memory apart."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata  # an empty storage has no address


class _Watched(torch.autograd.Function):
    """A tensor in its own memory, behind a node that sees its gradient.

    A view would lose its node, and the hooks on it, as soon as the script changes the tensor in place (`loss *= 2`).
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, on_gradient: Callable[[Tensor], None]) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.on_gradient = on_gradient
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is not None:
            ctx.on_gradient(grad)
        return grad, None


def copied(tensor: Tensor) -> Tensor:
    """A copy without history that requires gradients if the tensor does."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def write_marks(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Values that change when tensors are written to or moved."""
    return [(tensor._version, place_of(tensor)) for tensor in tensors]


def unknown_type_in(tree: Any) -> str | None:
    """The type of the first object in a tree that is neither tensor, plain value nor known container; else None."""
    if isinstance(tree, (Tensor, *_PLAIN)):
        return None
    if not is_container(tree):
        return type(tree).__name__
    return next(filter(None, (unknown_type_in(part) for _, part in parts_of(tree))), None)


def kind_of(tree: Any) -> Hashable:
    """Identifies calls by containers and the dtypes in them."""
    if isinstance(tree, Tensor):
        return tree.dtype
    kind: type = type(tree)
    return kind if not is_container(tree) else (kind, tuple((key, kind_of(part)) for key, part in parts_of(tree)))


def form_of(outputs: Any) -> Form:
    """The form of outputs."""
    return tuple((leaf.dtype, leaf.is_contiguous()) for leaf in leaves(outputs))


def in_form(outputs: Any, form: Form) -> Any:
    """Outputs of another precision or layout, converted to the script's form."""
    before = leaves(outputs)
    if len(before) != len(form):  # the number of outputs has changed
        return map_leaves(outputs, lambda leaf: leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf)
    after = [_formed(leaf, *wanted) for leaf, wanted in zip(before, form, strict=True)]
    return with_leaves(outputs, before, after)


def _formed(leaf: Tensor, dtype: torch.dtype, contiguous: bool) -> Tensor:
    if leaf.is_floating_point() and dtype.is_floating_point:
        leaf = leaf.to(dtype)
    return leaf.contiguous() if contiguous else leaf


def is_container(tree: Any) -> bool:
    """Whether a tree has parts: a tuple, a list, a mapping or a dataclass."""
    return isinstance(tree, (tuple, list, Mapping)) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))


def parts_of(tree: Any) -> Iterator[tuple[Any, Any]]:
    """The parts of a container with their keys; none for anything else."""
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, (tuple, list)):
        yield from enumerate(tree)
    elif is_container(tree):
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                yield field.name, getattr(tree, field.name)


def _with_parts(tree: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*parts.values())
    if isinstance(tree, tuple):
        return type(tree)(list(parts.values()))
    # Copied and then changed, since constructors are unknown: a list, a mapping, a dataclass.
    made = copy.copy(tree)
    if isinstance(tree, (list, Mapping)):
        for key, part in parts.items():
            made[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)
    return made
