"""A model's passes done in another way, timed in turn: in float32, without gradients, on the GPU."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.data.batches import map_tensors
from hotlap.data.sources import tensors_in
from hotlap.kit.in_float32 import narrowed
from hotlap.kit.observed import Pair

ROUNDS = 8
MOST_S = 4.0
"""Seconds after which no new round begins."""


def in_turn(now: Callable[[], object], then: Callable[[], object], wait: Callable[[], object] | None = None) -> Pair:
    """Time both in turn, after a first round that does not count. `wait` waits for the GPU that does the work.

    Work on the CPU is timed without the time in which this thread waits for a core, which other processes decide.
    """
    times: list[tuple[float, float]] = []
    begun = time.perf_counter()
    while len(times) <= ROUNDS and (len(times) < 2 or time.perf_counter() - begun < MOST_S):
        times.append((_timed(now, wait), _timed(then, wait)))
    counted = times[1:]
    return Pair(now_s=median(one for one, _ in counted), then_s=median(one for _, one in counted))


def _timed(work: Callable[[], object], wait: Callable[[], object] | None) -> float:
    if wait is None:
        began = time.thread_time()
        work()
        return time.thread_time() - began
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def in_float32(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pair:
    """Forward and backward pass in float64 as they are, and in float32."""
    narrow = copy.deepcopy(model).float()
    return in_turn(
        lambda: _passes(model, args, kwargs),
        lambda: _passes(narrow, _changed(args, narrowed), _changed(kwargs, narrowed)),
        _waiter(model),
    )


def on_gpu(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pair:
    """Forward and backward pass on the CPU as they are, and on the GPU with the transfer of the batch."""
    there = copy.deepcopy(model).cuda()

    def moved(tensor: Tensor) -> Tensor:
        return tensor.cuda()

    return in_turn(
        lambda: _passes(model, args, kwargs),
        lambda: _passes(there, _changed(args, moved), _changed(kwargs, moved)),
        torch.cuda.synchronize,
    )


def without_gradients(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pair:
    """A call as it is, and without gradients."""

    def bare() -> object:
        with torch.no_grad():
            return model(*args, **kwargs)

    with torch.enable_grad():
        return in_turn(lambda: model(*args, **kwargs), bare, _waiter(model))


def _passes(model: nn.Module, args: Any, kwargs: Any) -> None:
    with torch.enable_grad():
        outputs = model(*args, **kwargs)
        found = tensors_in(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)
        total = sum(one.sum() for one in found if one.requires_grad)
        if isinstance(total, Tensor):
            torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _changed(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return map_tensors(dict(inputs) if isinstance(inputs, Mapping) else tuple(inputs), change)


def _waiter(model: nn.Module) -> Callable[[], object] | None:
    return torch.cuda.synchronize if any(p.is_cuda for p in model.parameters()) else None
