"""The whole state of a training as files, and back to the last bit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import StoreError
from hotlap.core.object_memory import Changes, Path
from hotlap.data.order import HostRandomness
from hotlap.engine.rig import Place, Rig
from hotlap.store.disk import Piece
from hotlap.store.encoding import decode, encode, from_json, to_json
from hotlap.store.tensors import tensor_pieces, tensors_from, why_not_stored
from hotlap.store.weights import load_weights_into, unwrapped

MODEL, TENSORS, VALUES = "model.safetensors", "training.safetensors", "training.json"
_BY_PLAN = ("fused", "foreach", "capturable")
"""Settings of an optimizer that the plan in force decides, which may be another one than the checkpoint's."""


def export_state(
    rig: Rig, loop: dict[str, Any], remembered: Sequence[tuple[Path, Any]] = ()
) -> dict[str, Iterable[Piece]]:
    """Files that hold the training: copied to host memory now, turned into bytes when they are written.

    `loop` is what the loop around the rig needs to go on; `remembered` is what `Changes` has found. Raises StoreError
    for state that is neither numbers nor tensors.
    """
    tensors: dict[str, Tensor] = {}
    rig.settle()
    weights, model = _module_state(unwrapped(rig.model))
    state = {
        "device": rig.device.type,
        "model": model,
        "loss": _module_state(rig.loss) if isinstance(rig.loss, nn.Module) else None,
        "optimizer": _optimizer_state(rig.optimizer),
        "schedule": rig.schedule.scheduler.state_dict() if rig.schedule.scheduler is not None else None,
        "randomness": _randomness(rig.device),
        "totals": rig.totals.saved(),
        "guards": rig.guards.saved(),
        "place": tuple(rig.place),
        "counters": (rig.steps, rig.updates, rig.samples),
        "remembered": [[list(path), form] for path, form in remembered],
        "loop": loop,
    }
    values = to_json(encode(state, tensors, "training"))
    return {
        MODEL: tensor_pieces(_copies(weights), {"format": "pt"}),
        TENSORS: tensor_pieces(tensors),
        VALUES: [values],
    }


def import_state(rig: Rig, files: dict[str, bytes], memory: Changes | None = None) -> dict[str, Any]:
    """Put a stored training into the rig; what the loop had stored. Raises StoreError where they do not fit.

    `memory` takes what modules, the optimizer and the user's functions remembered; an earlier hotlap stored none.
    """
    missing = [name for name in (MODEL, TENSORS, VALUES) if name not in files]
    if missing:
        raise StoreError(f"the checkpoint has no {missing[0]}")
    rig.settle()  # what the device still knows is of the training that was
    tensors = tensors_from(files[TENSORS], TENSORS)
    state = decode(from_json(files[VALUES], VALUES), tensors, rig.device)
    try:
        _import_module(unwrapped(rig.model), tensors_from(files[MODEL], MODEL), state["model"])
        if isinstance(rig.loss, nn.Module):
            _import_module(rig.loss, *state["loss"])
        _import_optimizer(rig.optimizer, state["optimizer"], moved=state["device"] != rig.device.type)
        if rig.schedule.scheduler is not None:
            rig.schedule.scheduler.load_state_dict(state["schedule"])
        # After the schedule: loading one may write its own idea of the learning rate.
        _import_groups(rig.optimizer, state["optimizer"]["groups"])
        # A schedule that moves before the next update would warn that there has been none.
        rig.optimizer._opt_called = True  # type: ignore[attr-defined]
        rig.totals.put_back(state["totals"])
        rig.place = Place(*state["place"])
        rig.steps, rig.updates, rig.samples = state["counters"]
        rig.guards.put_back(state["guards"])
        rig.conform()
        if memory is not None:
            memory.put_back(state.get("remembered", ()))
        _import_randomness(state["randomness"], rig.device)
        loop: dict[str, Any] = state["loop"]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"the checkpoint does not fit this training: {told}") from error
    return loop


def _module_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors that a state_dict holds, and all else that a module remembers."""
    persistent: dict[str, Any] = module.state_dict()
    weights = {name: value for name, value in persistent.items() if isinstance(value, Tensor)}
    return weights, {
        "buffers": {name: b for name, b in module.named_buffers() if name not in persistent},
        "extra": {name: value for name, value in persistent.items() if name not in weights},
        "modes": [layer.training for layer in module.modules()],
        "flags": [p.requires_grad for p in module.parameters()],
    }


def _copies(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights as they are now, on the CPU; tied ones under each of their names."""
    for name, value in weights.items():
        why = why_not_stored(value)
        if why:  # told here, where the training can hear it, not by the thread that writes
            raise StoreError(f"{name} has {why}")
    kept = torch.contiguous_format
    return {name: value.detach().to("cpu", copy=True, memory_format=kept) for name, value in weights.items()}


def _import_module(module: nn.Module, weights: dict[str, Tensor], rest: dict[str, Any]) -> None:
    load_weights_into(module, weights)
    for name, value in rest["buffers"].items():
        _put_buffer(module, name, value)
    if rest["extra"]:
        module.load_state_dict(rest["extra"], strict=False)
    for layer, training in zip(module.modules(), rest["modes"], strict=True):
        layer.training = training
    for parameter, flag in zip(module.parameters(), rest["flags"], strict=True):
        parameter.requires_grad_(flag)


def _put_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    """Set a buffer that no state_dict holds, also one that came to be, or changed its shape, in training."""
    owner_name, _, leaf = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if leaf not in owner._buffers:
        raise KeyError(f"the model has no buffer {name}")
    now = owner._buffers[leaf]
    if now is not None and now.shape == value.shape and now.dtype == value.dtype:
        with torch.no_grad():
            now.copy_(value)
    else:
        owner._buffers[leaf] = value


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    number = {id(p): n for n, p in enumerate(_parameters(optimizer))}
    strange = [key for key in optimizer.state if id(key) not in number]
    if strange:
        raise StoreError(f"{type(optimizer).__name__} keeps state under {strange[0]!r:.40}, which cannot be stored")
    return {
        "kind": type(optimizer).__name__,
        "state": {number[id(p)]: values for p, values in optimizer.state.items()},
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
    }


def _import_optimizer(optimizer: Optimizer, stored: dict[str, Any], *, moved: bool) -> None:
    """Put the state back; `moved` from a CPU to a GPU, or the other way."""
    if stored["kind"] != type(optimizer).__name__:
        raise StoreError(f"the checkpoint is of {stored['kind']}, the optimizer is {type(optimizer).__name__}")
    pairs = zip(optimizer.param_groups, stored["groups"], strict=True)
    owners = [(p, group, bool(was.get("fused"))) for group, was in pairs for p in group["params"]]
    optimizer.state.clear()
    # Not by load_state_dict: that casts every state to its parameter's dtype.
    for n, values in stored["state"].items():
        parameter, group, was_fused = owners[n]
        for name, value in values.items():
            if name == "step" and isinstance(value, Tensor) and (moved or bool(group.get("fused")) != was_fused):
                # The fused kernel reads the count on the device, the plain loop on the host.
                values[name] = value.to(parameter.device if group.get("fused") or group.get("capturable") else "cpu")
            elif moved and isinstance(value, Tensor):
                values[name] = value.to(parameter.device)
        optimizer.state[parameter] = values


def _import_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for name in [name for name in group if name not in stored and name not in ("params", *_BY_PLAN)]:
            del group[name]
        group.update({name: value for name, value in stored.items() if name not in _BY_PLAN})


def _randomness(device: torch.device) -> dict[str, Any]:
    host = HostRandomness()
    version, words, gauss = host.python
    return {
        # 625 numbers as one array: as JSON they would take longer than all the rest.
        "python": (version, np.array(words, dtype=np.int64), gauss),
        "numpy": host.numpy,
        "torch": host.torch,
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _import_randomness(stored: dict[str, Any], device: torch.device) -> None:
    host = HostRandomness()
    version, words, gauss = stored["python"]
    host.python = (version, tuple(words.tolist()), gauss)
    host.numpy, host.torch = stored["numpy"], stored["torch"]
    host.restore()
    if stored["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(stored["cuda"], device)
