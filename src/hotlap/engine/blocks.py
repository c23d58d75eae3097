"""The blocks that a model repeats: encoder layers, residual stages, and whatever else stands in a row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import nn

HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules of these classes have nothing in common."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that stand in a row and are built alike, in their order: of several such rows the heaviest.

    Alike are two of the same class with parameters of the same names, shapes and kinds. Blocks lie in no other block.
    None where nothing with parameters is repeated.
    """
    best: list[nn.Module] = []
    most = 0
    for parent in model.modules():
        rows: dict[Hashable, list[nn.Module]] = {}
        for child in parent.children():
            rows.setdefault(_build(child), []).append(child)
        for row in rows.values():
            weight = _weight(row)
            if len(row) > 1 and weight > most:  # a row inside a block weighs less than the row of the blocks
                best, most = row, weight
    return best


def checkpointed_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are checkpointed one by one, in their order: those of one class, wherever they stand.

    So the stages of a ResNet, whose blocks are not built alike, count as a whole. Of classes that hold nearly all of
    the weights the one with the most blocks; where no class holds more than the row that is repeated, that.
    """
    row, classes = repeated_blocks(model), dict[type[nn.Module], list[nn.Module]]()
    for part in model.modules():
        if not isinstance(part, HOLDERS) and next(part.children(), None) is not None:
            classes.setdefault(type(part), []).append(part)
    groups = [group for group in map(_outermost, classes.values()) if len(group) > 1]
    most = max(map(_weight, groups), default=0)
    if most <= _weight(row):
        return row
    return max((group for group in groups if 2 * _weight(group) > most), key=lambda group: (len(group), _weight(group)))


def _outermost(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Those that lie in none of the others."""
    inside = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inside]


def _weight(blocks: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _build(module: nn.Module) -> Hashable:
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
