"""The blocks that a model repeats: encoder layers, residual stages, and whatever else stands in a row."""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn


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
            weight = sum(parameter.numel() for block in row for parameter in block.parameters())
            if len(row) > 1 and weight > most:  # a row inside a block weighs less than the row of the blocks
                best, most = row, weight
    return best


def _build(module: nn.Module) -> Hashable:
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())
