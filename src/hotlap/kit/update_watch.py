"""`UpdateWatch` marks each operation that `LiveTensors` counts with its part of an update."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotlap.monitor.live_tensors import BEFORE, KERNELS, LIBRARIES, LiveTensors
from hotlap.script.patches import Patches

KINDS = (
    *("parameters", "gradients", "optimizer", "activations", "backward", "update", "batch"),
    *(BEFORE, KERNELS, LIBRARIES),
)
"""Purposes of memory: `backward` are gradients of activations, `update` is what the optimizer step needs, `before` is
earlier data that the update reads, `kernels` what an operation takes for itself, `libraries` cuBLAS's workspace."""


class UpdateWatch:
    """Inside `with`, marks each operation with its part of the update: batch, forward, backward or optimizer step."""

    def __init__(
        self,
        live: LiveTensors,
        parameters: Iterable[Tensor],
        modules: Iterable[nn.Module],
        *,
        sees_updates: bool = True,
    ) -> None:
        """Without `sees_updates`, the caller says when an update begins and ends."""
        self.live, self._sees_updates = live, sees_updates
        self._parameters = [p for p in parameters if p.requires_grad]
        self._names = {id(part): name for module in modules for name, part in module.named_modules()}
        self._patches = Patches()
        self._inside: list[str] = []
        self.evaluated = False
        """Whether a module ran without gradients, as in an evaluation."""
        self.outputs: dict[str, int] = {}
        """Bytes of each called module's output."""

    def __enter__(self) -> UpdateWatch:
        hooked, live = self._patches.hooked, self.live
        live.kind = "batch"
        hooked("before", register_module_forward_pre_hook(self._enters))
        hooked("after", register_module_forward_hook(self._leaves, always_call=True))
        if self._sees_updates:
            hooked("update begins", register_optimizer_step_pre_hook(self.update_begins))
            hooked("update ends", register_optimizer_step_post_hook(self.update_ends))
        self._patches.put(torch.autograd, "backward", self._backward)
        for number, parameter in enumerate(self._parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._has_gradient)  # type: ignore[no-untyped-call]
            hooked(f"gradient {number}", handle)
        live.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        self.live.__exit__(*how)  # type: ignore[no-untyped-call]
        self._patches.take_out_all()

    @property
    def account(self) -> dict[str, Any]:
        """The memory of the counted update in plain values, for a file."""
        live = self.live
        return {
            "peak_bytes": live.peak_bytes,
            "kinds": live.at_peak,
            "layers": live.layers_at_peak,
            "outputs": self.outputs,
            "course": live.course,
            "held": [],
        }

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if module.__class__.__module__.startswith("torch.optim"):
            return
        # A checkpointed block runs its parts without gradients, but not itself.
        self.evaluated = self.evaluated or not (self._inside or torch.is_grad_enabled())
        self._inside.append(self._names.get(id(module)) or type(module).__name__)
        self.live.layer = self._inside[-1]
        if self.live.kind != "backward":  # recomputation belongs to the backward pass
            self.live.kind = "activations"

    def _leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._inside:
            name = self._inside.pop()
            if isinstance(output, Tensor):
                self.outputs[name] = output.numel() * output.element_size()
        self.live.layer = self._inside[-1] if self._inside else "loss"

    def _backward(self, original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            self.live.kind = "backward"
            try:
                return original(*args, **kwargs)
            finally:
                self.live.kind, self.live.layer = "batch", ""
                self._inside.clear()

        return backward

    def _has_gradient(self, parameter: Tensor) -> None:
        self.live.know([parameter.grad], "gradients")

    def update_begins(self, *_: Any) -> None:
        """Note that the optimizer step begins."""
        self.live.kind = "update"

    def update_ends(self, *_: Any) -> None:
        """Note that the optimizer step is over."""
        self.live.kind = "batch"
