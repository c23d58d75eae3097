"""Trained weights as a safetensors file that plain PyTorch loads without hotlap."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hotlap.core.errors import StoreError, shown
from hotlap.core.terminal import logger
from hotlap.store.files import write_atomically
from hotlap.store.tensors import copied_to_host, tensor_pieces

log = logger(__name__)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own model inside of data-parallel and torch.compile wrappers."""
    while True:
        # A name tells nothing: a model may well have a part called `module`.
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state as it is without wrappers: every name its own tensor, on the CPU."""
    state: dict[str, Any] = unwrapped(model).state_dict()
    left_out = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if left_out:
        log.warning("not saved, since they are no tensors: %s; load with strict=False", ", ".join(left_out))
    # Tied weights are one tensor under two names; a file of its own copies loads into either.
    return copied_to_host({name: value for name, value in state.items() if isinstance(value, Tensor)})


def save_weights(model: nn.Module, path: Path, about: dict[str, str] | None = None) -> None:
    """Write the model's state; `load_state_dict(safetensors.torch.load_file(path))` reads it back."""
    save_state(plain_state(model), path, about)


def save_state(state: Mapping[str, Tensor], path: Path, about: dict[str, str] | None = None) -> None:
    """Write a model's state that is on the CPU already, every name its own tensor."""

    # Not by the library: it puts the words about the file in another order each time.
    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(tensor_pieces(state, about))

    write_atomically(path, write)


def load_weights_into(model: nn.Module, stored: dict[str, Tensor]) -> None:
    """Copy stored weights into a model, each at its place; StoreError lists what does not fit."""
    mine = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    wrong = [f"{name} is missing in the file" for name in mine if name not in stored]
    wrong += [f"{name if len(name) <= 60 else shown(name)} is not in the model" for name in stored if name not in mine]
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
