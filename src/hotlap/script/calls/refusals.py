"""Why a module's calls cannot be made in another way than the script's own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from hotlap import machine
from hotlap.engine.precision import why_not_precision

_TRANSLATED = {"ScriptModule": "is scripted", "OptimizedModule": "is compiled"}
_SPREAD = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def why_not_changed(module: nn.Module) -> str | None:
    """Why the calls of a module have to stay as they are: something else has taken charge of its code."""
    for layer in module.modules():
        if layer._compiled_call_impl is not None:
            return f"{type(layer).__name__} is compiled"
        for name, how in _TRANSLATED.items():
            if name in _kinds(layer):
                return f"{type(layer).__name__} {how}"
    return None


def why_not_in_precision(module: nn.Module, precision: str, device: torch.device, *, autocasts: bool) -> str | None:
    """Why its calls cannot be in this precision; `autocasts` where the script chooses the precision itself."""
    if autocasts and precision in ("bf16", "fp16"):
        return "the script uses autocast itself"
    dtypes = {p.dtype for p in module.parameters() if p.is_floating_point()}
    if dtypes - {torch.float32}:
        return f"the weights are {', '.join(sorted(str(dtype).removeprefix('torch.') for dtype in dtypes))}"
    if precision == "fp16":
        if machine.dtype_fact(device, "bf16").support is machine.Support.HARDWARE:
            return "bf16 is there, which needs no scale"
        if any(_hooks_of(layer, _BACKWARD_HOOKS) for layer in module.modules()):
            return "the script's own backward hooks would see scaled gradients"
        if _odd_parameter(module) is not None:
            return _odd_parameter(module)
    return why_not_precision(precision, device)


def why_not_captured(module: nn.Module, device: torch.device) -> str | None:
    """Why its calls cannot be recorded, as far as the module itself tells."""
    for name in _spread_by(module):
        return f"{name} does more than a recording sees"
    if any(p.device != device for p in module.parameters()):
        return f"not all of its weights are on {device}"
    if _odd_parameter(module) is not None:
        return _odd_parameter(module)
    hooks = (*_FORWARD_HOOKS, *_BACKWARD_HOOKS)
    for layer in module.modules():
        if _hooks_of(layer, hooks):
            return f"hooks of the script's own run with {type(layer).__name__}"
    if any(getattr(torch_module, f"_global{kind}") for kind in hooks):
        return "hooks of the script's own run with every module"
    return None


def _odd_parameter(module: nn.Module) -> str | None:
    """Why nothing can stand in for one of its parameters."""
    kinds = (type(p) for p in module.parameters())
    return next((f"it has a parameter that is a {kind.__name__}" for kind in kinds if kind is not nn.Parameter), None)


def _spread_by(module: nn.Module) -> Iterator[str]:
    """Wrappers in it that spread a model over devices or processes."""
    return (name for layer in module.modules() for name in _SPREAD if name in _kinds(layer))


def _kinds(layer: nn.Module) -> set[str]:
    """By name: to import some of these classes takes longer than all else here."""
    return {kind.__name__ for kind in type(layer).__mro__}


def _hooks_of(layer: nn.Module, kinds: tuple[str, ...]) -> bool:
    return any(getattr(layer, kind, None) for kind in kinds)
