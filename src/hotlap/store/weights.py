"""Trained weights as a safetensors file that plain PyTorch loads without hotlap."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from hotlap.store.files import write_atomically

WRAPPERS = ("_orig_mod.", "module.")
"""Prefixes that torch.compile and data-parallel wrappers put before every name."""


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's state as it is without wrappers: every name its own tensor, on the CPU."""
    state = {}
    for name, value in model.state_dict().items():
        for wrapper in WRAPPERS:
            name = name.removeprefix(wrapper)
        # Tied weights are one tensor under two names; a file of its own copies loads into either.
        if isinstance(value, Tensor):
            state[name] = value.detach().cpu().contiguous().clone()
    return state


def save_weights(model: nn.Module, path: Path, about: dict[str, str] | None = None) -> None:
    """Write the model's state; `load_state_dict(safetensors.torch.load_file(path))` reads it back."""
    from safetensors.torch import save_file

    write_atomically(path, lambda temporary: save_file(plain_state(model), temporary, metadata=about))
