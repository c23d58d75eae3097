"""Switching an optimizer between its plain loop and torch's fused kernel, with its state as it is."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch.optim import Optimizer


def is_fused(optimizer: Optimizer) -> bool:
    """Whether every group of the optimizer uses the fused kernel."""
    return all(bool(group.get("fused")) for group in optimizer.param_groups)


def why_not_fused(optimizer: Optimizer) -> str | None:
    """Why this optimizer cannot use a fused kernel on its parameters, or None after a real step with one."""
    name = type(optimizer).__name__
    if "fused" not in optimizer.defaults:
        return f"{name} has no fused kernel"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return f"{name} with differentiable=True has no fused kernel"
    kinds = {(p.device, p.dtype): p for group in optimizer.param_groups for p in group["params"]}
    for (device, dtype), real in kinds.items():
        try:
            _fused_twin(optimizer, real).step()
        except Exception as error:  # whatever stops a step with it is the answer
            return f"{name} cannot fuse {dtype} on {device}: {str(error).splitlines()[0]}"
    return None


def _fused_twin(optimizer: Optimizer, real: torch.Tensor) -> Optimizer:
    """An optimizer of the same kind and settings for one small parameter like `real`, without hooks.

    Made as unpickling makes one: constructors of subclasses take arguments nobody here knows.
    """
    parameter = torch.nn.Parameter(torch.ones(2, device=real.device, dtype=real.dtype))
    parameter.grad = torch.ones_like(parameter)
    state: dict[Any, dict[str, Any]] = defaultdict(dict)
    # Some optimizers make their state when they are made (Adagrad in torch 2.11), so the twin gets its own.
    for name, value in optimizer.state.get(real, {}).items():
        like_parameter = isinstance(value, torch.Tensor) and value.shape == real.shape
        state[parameter][name] = torch.ones_like(parameter) if like_parameter else copy.deepcopy(value)
        if name == "step" and isinstance(value, torch.Tensor):
            state[parameter][name] = value.to(real.device, torch.float32, copy=True)
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    group = {**settings, "params": [parameter], "foreach": False, "fused": True}
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__setstate__({"defaults": dict(optimizer.defaults), "state": state, "param_groups": [group]})
    return twin


class Fusion:
    """The switch between the two, for one optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._plain_foreach = [None if g.get("fused") else g.get("foreach") for g in optimizer.param_groups]

    def set(self, fused: bool) -> None:
        """Use the fused kernel from the next step on, or the plain loop again."""
        groups = self._optimizer.param_groups
        for number, group in enumerate(groups):
            if bool(group.get("fused")) == fused:
                continue
            # torch refuses fused and foreach together; the user's choice comes back with the plain loop.
            known = number < len(self._plain_foreach)
            group["foreach"] = False if fused else self._plain_foreach[number] if known else None
            group["fused"] = fused
            self._move_step_counts(group, fused)
        # Read by GradScaler, and set by torch only at construction.
        self._optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]

    def _move_step_counts(self, group: dict[str, Any], fused: bool) -> None:
        for parameter in group["params"]:
            step = self._optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, torch.Tensor):
                # The fused kernel reads the count on the device, the plain loop on the host.
                home = parameter.device if fused or group.get("capturable") else torch.device("cpu")
                self._optimizer.state[parameter]["step"] = step.to(home, torch.float32)
