"""The blocks that a model repeats (encoder layers, residual stages), and activation checkpointing of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hotlap.data.order import HOST_GENERATORS, HostGenerator

HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Containers: modules of these classes have nothing in common."""


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in a row that are built alike, in order; if there are several rows, the one with most weights.

    Two modules are alike if they have the same class and parameters of the same names, shapes and dtypes. Blocks lie in
    no other block. The list is empty if nothing with parameters is repeated.
    """
    best: list[nn.Module] = []
    most = 0
    for parent in model.modules():
        rows: dict[Hashable, list[nn.Module]] = {}
        for child in parent.children():
            rows.setdefault(_build(child), []).append(child)
        for row in rows.values():
            weight = _weight(row)
            if len(row) > 1 and weight > most:  # a row inside a block has fewer weights than the row of blocks
                best, most = row, weight
    return best


def checkpointed_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are checkpointed one by one, in order: those of one class, anywhere in the model.

    So the stages of a ResNet, whose blocks are not built alike, count as a whole. Among classes that hold at least half
    of the most weights, the one with most blocks counts. If no class holds more weights than the repeated row, that row
    counts.
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
    """The blocks that lie in no other block of the list."""
    inside = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inside]


def _weight(blocks: Sequence[nn.Module]) -> int:
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())


def _build(module: nn.Module) -> Hashable:
    return type(module), tuple((name, p.shape, p.dtype) for name, p in module.named_parameters())


# --- checkpointing -------------------------------------------------------------------------------------


_P = ParamSpec("_P")
_T = TypeVar("_T")
_Buffers = list[tuple[nn.Module, dict[str, Tensor | None]]]


def why_not_checkpointed(model: nn.Module, blocks: int, device: torch.device) -> str | None:
    """Why this number of blocks cannot be checkpointed, or None where it can."""
    asked, name, there = f"memory.checkpoint={blocks}", type(model).__name__, len(checkpointed_blocks(model))
    if not there:
        return f"{asked} needs repeated blocks, and {name} has none"
    if there < blocks:
        return f"{asked} is too large: {name} repeats {there} blocks"
    if device.type == "cuda" and any(isinstance(part, nn.RNNBase) and part.dropout > 0 for part in model.modules()):
        return f"{asked}: {name} has recurrent layers with dropout, and cuDNN cannot draw the same masks twice"
    return None


class Checkpointing:
    """The first blocks that a model repeats. Inside `with` they are checkpointed.

    Outside, the model is unchanged, since the user may inspect, copy and pickle it between steps.
    """

    def __init__(self, model: nn.Module, blocks: int) -> None:
        self._blocks = [_Block(block) for block in checkpointed_blocks(model)[:blocks]]

    def __enter__(self) -> None:
        for block in self._blocks:
            block.apply()

    def __exit__(self, *_: object) -> None:
        for block in self._blocks:
            block.undo()

    def during(self, work: Callable[_P, _T]) -> Callable[_P, _T]:
        """The work, with these blocks checkpointed while it runs."""

        @functools.wraps(work)
        def checkpointed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with self:
                return work(*args, **kwargs)

        return checkpointed


class _Block:
    """One block. Its hooks run once, outside of what is computed again."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._given: Callable[..., Any] | None = None
        """A forward that the user or a library has set on this block."""
        self._drawn_from: Sequence[HostGenerator] | None = None
        """Generators that the block draws from and torch does not restore; None before they are known."""

    def apply(self) -> None:
        """Checkpoint calls of the block."""
        inside = vars(self._block)
        self._given, inside["forward"] = inside.get("forward"), self._forward

    def undo(self) -> None:
        """Restore the block."""
        if self._given is None:
            del vars(self._block)["forward"]
        else:
            vars(self._block)["forward"] = self._given

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        block = self._block
        forward = self._given or type(block).forward.__get__(block)
        keeps_nothing = not (block.training and torch.is_grad_enabled())
        if keeps_nothing or any(_is_filled(value) for value in (*args, *kwargs.values())):
            return forward(*args, **kwargs)
        names, count = tuple(kwargs), len(args)
        then = _StartState(block, HOST_GENERATORS[:2] if self._drawn_from is None else self._drawn_from)
        is_again = False

        def run(*values: Any) -> Any:
            nonlocal is_again
            start, is_again = then.again() if is_again else nullcontext(), True
            with start:
                return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # Pass all arguments by position: torch then saves each tensor as it is now, sees the devices, and takes none
        # for a setting.
        values = [None if _is_cache(value) else value for value in (*args, *kwargs.values())]
        made = checkpoint(run, *values, use_reentrant=False, preserve_rng_state=True)
        if self._drawn_from is None:
            self._drawn_from = then.moved()
        return made


class _StartState:
    """The state that a pass through a block starts from, except for its inputs and torch's generators.

    A batch norm updates its statistics, a spectral norm its vectors. If the second pass started from their new values,
    it would update them twice or compute other numbers. So it gets copies from before the first pass.
    """

    def __init__(self, block: nn.Module, generators: Sequence[HostGenerator]) -> None:
        self._buffers: _Buffers = [
            (layer, {name: None if one is None else one.detach().clone() for name, one in layer._buffers.items()})
            for layer in block.modules()
            if layer._buffers
        ]
        self._states = [(generator, generator.state()) for generator in generators]

    def moved(self) -> list[HostGenerator]:
        """The generators that have moved since."""
        return [generator for generator, state in self._states if generator.moved(state, generator.state())]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the state is that of the first pass; afterwards the current state is restored."""
        buffers: _Buffers = [(layer, dict(layer._buffers)) for layer, _ in self._buffers]
        states = [(generator, generator.state()) for generator, _ in self._states]
        try:
            _set(self._buffers, self._states)
            yield
        finally:
            _set(buffers, states)


def _set(buffers: _Buffers, states: Sequence[tuple[HostGenerator, Any]]) -> None:
    for layer, values in buffers:
        layer._buffers.update(values)
    for generator, state in states:
        generator.restore(state)


def _is_cache(value: Any) -> bool:
    """Whether an argument is a key-value cache, as Transformers passes from block to block.

    A block writes to it, and would write twice. In a training nothing reads entries that were not there before.
    """
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _is_filled(value: Any) -> bool:
    """Whether an argument is a cache with entries to read, such as a trained prefix."""
    return _is_cache(value) and value.get_seq_length() > 0
