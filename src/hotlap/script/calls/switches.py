"""Switches of the whole process that a backward pass runs under, from where it enters a call on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from hotlap.engine.precision import Switches

_entered: dict[int, list[Switches]] = {}
"""By backward pass: what was switched on in it, in that order."""


def switch_in_backward(outputs: Iterable[Tensor], switches: Switches) -> None:
    """Have switches on from when gradients come to these outputs of a call until the backward pass is over.

    So what a script has before the module in its graph runs under them too, but not its loss.
    """
    for output in outputs:
        if output.grad_fn is not None:
            output.register_hook(partial(_enter, switches))  # type: ignore[no-untyped-call]


@contextmanager
def own_switches() -> Iterator[None]:
    """Inside, a backward pass runs under the script's own switches, as a call did that it makes once more."""
    entered = list(_entered.get(torch._C._current_graph_task_id(), ()))
    for switches in reversed(entered):
        switches.__exit__()
    try:
        yield
    finally:
        for switches in entered:
            switches.__enter__()


def leave_broken_passes() -> None:
    """Switch off what a backward pass left on that ended in an error, of which torch tells nobody."""
    if _entered and torch._C._current_graph_task_id() == -1:
        for number in reversed(list(_entered)):
            _leave(number)


def _enter(switches: Switches, _: Tensor) -> None:
    number = torch._C._current_graph_task_id()
    if number not in _entered:
        _entered[number] = []
        torch.autograd.Variable._execution_engine.queue_callback(partial(_leave, number))
    if not any(one is switches for one in _entered[number]):
        switches.__enter__()
        _entered[number].append(switches)


def _leave(number: int) -> None:
    # Each puts back what it found, so the last goes first.
    for switches in reversed(_entered.pop(number, [])):
        switches.__exit__()
