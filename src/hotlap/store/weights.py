"""Trained weights as a safetensors file that plain PyTorch loads without hotlap."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from hotlap.store.files import write_atomically
from hotlap.store.tensors import tensor_pieces

log = logging.getLogger(__name__)


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
    return {
        name: value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def save_weights(model: nn.Module, path: Path, about: dict[str, str] | None = None) -> None:
    """Write the model's state; `load_state_dict(safetensors.torch.load_file(path))` reads it back."""
    # Not by the library: it puts the words about the file in another order each time.
    state = plain_state(model)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.writelines(tensor_pieces(state, about))

    write_atomically(path, write)
