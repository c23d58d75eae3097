"""What an update asks of any GPU, counted while it runs on the device at hand.

On the CPU torch chooses other operations than on a GPU. While hotlap counts there, the optimizer works on lists, and
attention leaves out its dropout, so that it runs as one operation. Only the counted updates differ by that.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotlap.machine.prediction import Work
from hotlap.machine.tf32 import tf32_in_force
from hotlap.monitor.bound import least_traffic
from hotlap.monitor.census import Counting, Operation

_NARROW = 2
"""Bytes of a number in 16 bits."""
_FORMATS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class WorkCount(Counting):
    """Counts the work of the updates made inside `with`, on the device that does most of it."""

    def __init__(self, *, sees_steps: bool = True) -> None:
        """Without `sees_steps`, the caller says when an optimizer's step begins and ends."""
        super().__init__()
        self.is_paused = False
        """Whether operations do not count, as those of an evaluation."""
        self._sees_steps = sees_steps
        self._works: dict[str, dict[str, float]] = {}
        self._flops: dict[str, dict[str, float]] = {}
        self._step: list[Operation] | None = None
        """The operations of an optimizer's step; None outside of one."""
        self._recurrent = self._fused = False
        """Whether a recurrent layer was called, and whether a kernel for such layers ran."""
        self._listed: list[dict[str, Any]] = []
        """Groups of parameters that hotlap has updated as lists."""
        self._switched = ExitStack()
        self._products, self._convolutions = tf32_in_force()

    def __enter__(self) -> Self:
        self._switched.callback(self._unlist)  # a step may have failed
        if self._sees_steps:
            self._switched.callback(register_optimizer_step_pre_hook(self.step_begins).remove)
            self._switched.callback(register_optimizer_step_post_hook(self.step_ends).remove)
        self._switched.callback(register_module_forward_pre_hook(self._called).remove)
        self._switched.callback(
            setattr, functional, "scaled_dot_product_attention", functional.scaled_dot_product_attention
        )
        functional.scaled_dot_product_attention = _without_dropout(functional.scaled_dot_product_attention)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        super().__exit__(*how)  # type: ignore[no-untyped-call]
        self._switched.close()

    def work(self, updates: int = 1) -> Work:
        """The work of one of so many counted updates, on average."""
        kind = next((kind for kind in self._works if kind != "cpu"), "cpu")
        counts = {name: count / updates for name, count in self._works.get(kind, dict.fromkeys(_COUNTS, 0.0)).items()}
        flops = {name: count / updates for name, count in self._flops.get(kind, {}).items()}
        return Work(flops=flops, unfused=self._recurrent and not self._fused, **counts)

    def add(self, seen: Operation) -> None:
        """Count an operation."""
        if self.is_paused:
            return
        if self._step is not None:
            self._step.append(seen)
        else:
            self._count_here(seen)

    def _counts(self, kind: str) -> dict[str, float]:
        return self._works.setdefault(kind, dict.fromkeys(_COUNTS, 0.0))

    def _count_here(self, seen: Operation) -> None:
        """Count an operation outside of the optimizer."""
        counts, size = self._counts(seen.kind), _NARROW if seen.dtype is None else max(_NARROW, seen.dtype.itemsize)
        self._fused |= "rnn" in seen.name
        counts["operations"] += 1
        counts["launches"] += seen.steps
        counts["bytes"] += seen.bytes
        counts["narrow_bytes"] += seen.bytes * _NARROW / size
        if seen.flops:
            flops, name = self._flops.setdefault(seen.kind, {}), self._format(seen)
            flops[name] = flops.get(name, 0.0) + seen.flops

    def _format(self, seen: Operation) -> str:
        """The number format of a product on a GPU."""
        name = "fp32" if seen.dtype is None else _FORMATS.get(seen.dtype, "fp32")
        is_tf32 = self._convolutions if "conv" in seen.name or "rnn" in seen.name else self._products
        return "tf32" if name == "fp32" and is_tf32 else name

    def _called(self, module: nn.Module, inputs: Any) -> None:
        self._recurrent |= isinstance(module, nn.RNNBase)

    def step_begins(self, optimizer: Optimizer, *_: Any) -> None:
        """Count for the optimizer from here on."""
        self._step = []
        # As torch does by default on a GPU; on the CPU it takes each tensor for itself.
        for group in optimizer.param_groups:
            on_cpu = all(parameter.device.type == "cpu" for parameter in group["params"])
            if on_cpu and "foreach" in group and group["foreach"] is None and not group.get("fused"):
                group["foreach"] = True
                self._listed.append(group)

    def step_ends(self, optimizer: Optimizer, *_: Any) -> None:
        """Count for the update again."""
        self._unlist()
        step, self._step = self._step or [], None
        if any(seen.flops for seen in step):  # a closure has made the passes, or the optimizer itself multiplies
            for seen in step:
                self._count_here(seen)
            return
        kind = next((seen.kind for seen in step if seen.kind != "cpu"), "cpu")
        counts = self._counts(kind)
        counts["operations"] += sum(seen.kind == kind for seen in step)
        counts["step_bytes"] += sum(seen.bytes for seen in step if seen.kind == kind)
        counts["least_step_bytes"] += least_traffic(optimizer)

    def _unlist(self) -> None:
        while self._listed:
            self._listed.pop()["foreach"] = None


_COUNTS = ("operations", "launches", "bytes", "narrow_bytes", "step_bytes", "least_step_bytes")


def count_work(update: Callable[[], object], updates: int = 1) -> Work:
    """Make some updates, and return the work of one on average. They have to follow one that made the optimizer's
    state."""
    with WorkCount() as count:
        for _ in range(updates):
            update()
    return count.work(updates)


def _without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention that drops nothing on the CPU, whose only kernel for it knows no dropout."""

    def without(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Tensor:
        if query.device.type == "cpu":
            rest = (*rest[:1], 0.0, *rest[2:]) if len(rest) > 1 else rest
            named = named | ({"dropout_p": 0.0} if "dropout_p" in named else {})
        return attention(query, key, value, *rest, **named)

    return without
