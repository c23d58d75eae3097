"""What modules are called with and give back: tensors in containers, however nested."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hotlap.engine.capture.fingerprint import place_of

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum)

Form = tuple[tuple[torch.dtype, bool], ...]
"""Of each tensor in some outputs: its dtype, and whether it is contiguous."""


def changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The tree with every tensor changed; containers are copied where something in them changes, and only there."""
    if isinstance(tree, Tensor):
        return change(tree)
    parts = dict(_parts(tree))
    made = {key: changed(part, change) for key, part in parts.items()}
    return tree if all(made[key] is parts[key] for key in parts) else _with_parts(tree, made)


def leaves(tree: Any) -> list[Tensor]:
    """All tensors in a tree, in its order, each once."""
    found: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        found.setdefault(id(tensor), tensor)
        return tensor

    changed(tree, note)
    return list(found.values())


def with_leaves(tree: Any, before: Sequence[Tensor], after: Sequence[Tensor]) -> Any:
    """The tree with each of its leaves (`before`) replaced by the one at the same place in `after`."""
    places = {id(old): new for old, new in zip(before, after, strict=True)}
    return changed(tree, lambda tensor: places[id(tensor)])


def looked_at(outputs: Any, came: Callable[[int, Tensor], None]) -> Any:
    """The outputs, with `came` told of every gradient that the script sends to one, and the number of that leaf.

    As views: one output may be made from another, and what comes to it from there is the module's own affair.
    """
    before = leaves(outputs)
    after = [leaf.view_as(leaf) if leaf.grad_fn is not None else leaf for leaf in before]
    for number, leaf in enumerate(after):
        if leaf.grad_fn is not None:
            leaf.register_hook(functools.partial(came, number))  # type: ignore[no-untyped-call]
    return with_leaves(outputs, before, after)


def marks(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """What tells whether tensors were written to, or moved, since."""
    return [(tensor._version, place_of(tensor)) for tensor in tensors]


def stranger_to_trees(tree: Any) -> str | None:
    """What kind of thing in a tree cannot be looked into; None where there is none."""
    if isinstance(tree, (Tensor, *_PLAIN)):
        return None
    if not _is_container(tree):
        return type(tree).__name__
    return next(filter(None, (stranger_to_trees(part) for _, part in _parts(tree))), None)


def kind_of(tree: Any) -> Hashable:
    """What tells calls apart for the dtypes that they give back: containers, and the dtypes in them."""
    if isinstance(tree, Tensor):
        return tree.dtype
    kind: type = type(tree)
    return kind if not _is_container(tree) else (kind, tuple((key, kind_of(part)) for key, part in _parts(tree)))


def form_of(outputs: Any) -> Form:
    """The form that outputs have."""
    return tuple((leaf.dtype, leaf.is_contiguous()) for leaf in leaves(outputs))


def in_form(outputs: Any, form: Form) -> Any:
    """Outputs of another precision or layout as the script would have them."""
    before = leaves(outputs)
    if len(before) != len(form):  # the module gives back another number of them than it did
        return changed(outputs, lambda leaf: leaf.float() if leaf.dtype in (torch.bfloat16, torch.float16) else leaf)
    after = [_formed(leaf, *wanted) for leaf, wanted in zip(before, form, strict=True)]
    return with_leaves(outputs, before, after)


def _formed(leaf: Tensor, dtype: torch.dtype, contiguous: bool) -> Tensor:
    if leaf.is_floating_point() and dtype.is_floating_point:
        leaf = leaf.to(dtype)
    return leaf.contiguous() if contiguous else leaf


def _is_container(tree: Any) -> bool:
    return isinstance(tree, (tuple, list, Mapping)) or (dataclasses.is_dataclass(tree) and not isinstance(tree, type))


def _parts(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        yield from tree.items()
    elif isinstance(tree, (tuple, list)):
        yield from enumerate(tree)
    elif _is_container(tree):
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                yield field.name, getattr(tree, field.name)


def _with_parts(tree: Any, parts: Mapping[Any, Any]) -> Any:
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*parts.values())
    if isinstance(tree, tuple):
        return type(tree)(list(parts.values()))
    # Copied and then changed, since nobody knows how such a thing is made: a list, a mapping, a dataclass.
    made = copy.copy(tree)
    if isinstance(tree, (list, Mapping)):
        for key, part in parts.items():
            made[key] = part
    else:
        for name, part in parts.items():
            object.__setattr__(made, name, part)
    return made
