"""The whole state of a training as files, and back to the last bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotlap.core.errors import StoreError
from hotlap.data.order import HostRandomness
from hotlap.engine.rig import Place, Rig
from hotlap.store.disk import Piece
from hotlap.store.encoding import decode, encode, from_json, to_json
from hotlap.store.tensors import tensor_pieces, tensors_from
from hotlap.store.weights import plain_state, unwrapped

MODEL, TENSORS, VALUES = "model.safetensors", "training.safetensors", "training.json"


def export_state(rig: Rig, loop: dict[str, Any]) -> dict[str, Iterable[Piece]]:
    """Files that hold the training: copied to host memory now, turned into bytes when they are written.

    `loop` is what the loop around the rig needs to go on. Raises StoreError for state that is neither
    numbers nor tensors.
    """
    tensors: dict[str, Tensor] = {}
    model = unwrapped(rig.model)
    persistent = model.state_dict()
    state = {
        "buffers": {name: b for name, b in model.named_buffers() if name not in persistent},
        "extra": {name: value for name, value in persistent.items() if not isinstance(value, Tensor)},
        "loss": dict(rig.loss.state_dict()) if isinstance(rig.loss, nn.Module) else None,
        "modes": [layer.training for layer in model.modules()],
        "flags": [p.requires_grad for p in model.parameters()],
        "optimizer": _optimizer_state(rig.optimizer),
        "schedule": rig.schedule.scheduler.state_dict() if rig.schedule.scheduler is not None else None,
        "randomness": _randomness(rig.device),
        "totals": rig.totals.saved(),
        "place": (rig.place.epoch, rig.place.window),
        "counters": (rig.steps, rig.updates, rig.samples),
        "loop": loop,
    }
    values = to_json(encode(state, tensors, "training"))
    weights = plain_state(rig.model)
    return {
        MODEL: tensor_pieces(weights, {"format": "pt"}),
        TENSORS: tensor_pieces(tensors),
        VALUES: [values],
    }


def import_state(rig: Rig, files: dict[str, bytes]) -> dict[str, Any]:
    """Put a stored training into the rig; what the loop had stored. Raises StoreError where they do not fit."""
    missing = [name for name in (MODEL, TENSORS, VALUES) if name not in files]
    if missing:
        raise StoreError(f"the checkpoint has no {missing[0]}")
    tensors = tensors_from(files[TENSORS], TENSORS)
    state = decode(from_json(files[VALUES], VALUES), tensors, rig.device)
    model = unwrapped(rig.model)
    load_weights_into(model, tensors_from(files[MODEL], MODEL))
    try:
        _import_model(model, state)
        if isinstance(rig.loss, nn.Module):
            rig.loss.load_state_dict(state["loss"])
        _import_optimizer(rig.optimizer, state["optimizer"])
        if rig.schedule.scheduler is not None:
            rig.schedule.scheduler.load_state_dict(state["schedule"])
        # After the schedule: loading one may write its own idea of the learning rate.
        _import_groups(rig.optimizer, state["optimizer"]["groups"])
        rig.totals.put_back(state["totals"])
        rig.place = Place(*state["place"])
        rig.steps, rig.updates, rig.samples = state["counters"]
        _import_randomness(state["randomness"], rig.device)
        loop: dict[str, Any] = state["loop"]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise StoreError(f"the checkpoint does not fit this training: {str(error).splitlines()[0]}") from error
    return loop


def load_weights_into(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Copy stored weights into a model, each at its place; StoreError lists what does not fit."""
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    wrong = [f"{name} is missing in the file" for name in mine if name not in stored]
    wrong += [f"{name} is not in the model" for name in stored if name not in mine]
    wrong += [
        f"{name} is {tuple(stored[name].shape)} in the file and {tuple(value.shape)} in the model"
        for name, value in mine.items()
        if name in stored and stored[name].shape != value.shape
    ]
    if wrong:
        more = f"; and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        raise StoreError(f"the weights do not fit the model: {'; '.join(wrong[:4])}{more}")
    with torch.no_grad():
        for name, value in mine.items():
            value.copy_(stored[name])


def _import_model(model: nn.Module, state: dict[str, Any]) -> None:
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        for name, value in state["buffers"].items():
            if name in buffers:
                buffers[name].copy_(value)
    if state["extra"]:
        model.load_state_dict(state["extra"], strict=False)
    for layer, training in zip(model.modules(), state["modes"], strict=True):
        layer.training = training
    for parameter, flag in zip(model.parameters(), state["flags"], strict=True):
        parameter.requires_grad_(flag)


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


def _import_optimizer(optimizer: Optimizer, stored: dict[str, Any]) -> None:
    if stored["kind"] != type(optimizer).__name__:
        raise StoreError(f"the checkpoint is of {stored['kind']}, the optimizer is {type(optimizer).__name__}")
    parameters = _parameters(optimizer)
    optimizer.state.clear()
    # Not by load_state_dict: that casts every state to its parameter's dtype.
    for n, values in stored["state"].items():
        optimizer.state[parameters[n]] = values


def _import_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        for name in [name for name in group if name not in stored and name != "params"]:
            del group[name]
        group.update(stored)


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
