"""Steps that are replays, and gradients set to None, without what torch does around them for profilers and hooks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks

from hotlap.script.patches import Patches
from hotlap.script.update.capture import why_strange
from hotlap.script.update.graphs import parameters_of


class Shortcuts:
    """Stand in for `step` and `zero_grad` of some optimizers: what torch does around them takes as long as a replay."""

    def __init__(self, replayed: Callable[[Optimizer], bool]) -> None:
        """`replayed` makes a step by a replay and tells all who have to know of it; False where it did nothing."""
        self._replayed = replayed
        self._patches = Patches()
        self._ours: dict[int, Optimizer] = {}

    def put(self, optimizers: Sequence[Optimizer]) -> None:
        """Stand in for those of these optimizers, if they are torch's own."""
        if self._ours:
            return
        self._ours = {id(one): one for one in optimizers if why_strange(one) is None}
        if self._ours:
            self._patches.put(Optimizer, "zero_grad", self._zero_grad)
        for kind in {type(one) for one in self._ours.values()}:
            self._patches.put(kind, "step", self._step)

    def take_out(self) -> None:
        """Leave torch as it was."""
        if self._ours:
            self._patches.take_out_all()
            self._ours = {}

    def _zero_grad(self, own: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(own)
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            if set_to_none is not True or id(optimizer) not in self._ours or torch.compiler.is_compiling():
                own(optimizer, set_to_none)
                return
            for parameter in parameters_of(optimizer):
                parameter.grad = None

        return zero_grad

    def _step(self, own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            alone = not args and not kwargs and len(_global_optimizer_post_hooks) <= 1
            if alone and id(optimizer) in self._ours and self._replayed(optimizer):
                return None
            return own(optimizer, *args, **kwargs)

        step.__wrapped__ = getattr(own, "__wrapped__", own)  # without torch's hooks
        return step
