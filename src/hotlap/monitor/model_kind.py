"""The kind of a model, by its layers and a batch of its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor, nn

from hotlap.data.batches import Batch
from hotlap.data.sources import tensors_in

CONVOLUTIONS: Final = "convolutions"
VISION: Final = "attention over pictures"
TEXT: Final = "attention over tokens"
RECURRENT: Final = "recurrent layers"
DENSE: Final = "dense layers"
UNITS: Final = {CONVOLUTIONS: "pixels", VISION: "pixels", TEXT: "tokens", RECURRENT: "steps", DENSE: "numbers"}
LEAST_SIDE, LEAST_CONVOLUTIONS = 16, 4
"""Least pixels of a picture's side, and least convolutions of a network for pictures."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """The kind of a model, and the size of its samples."""

    name: str
    size: int
    """Pixels of a side, tokens or steps of a sequence, numbers of a row."""
    parameters: int

    @property
    def sample(self) -> str:
        """The size of a sample in words."""
        return f"{self.size:,} {UNITS[self.name]}"


def kind_of_model(model: nn.Module, sample: Batch) -> Kind:
    """The kind of a model, by its layers and a batch of its samples."""
    layers = list(model.modules())
    parameters = sum(p.numel() for p in model.parameters())
    attends = any(isinstance(layer, nn.MultiheadAttention) or "Attention" in type(layer).__name__ for layer in layers)
    convolves = sum(isinstance(layer, nn.Conv2d) for layer in layers) >= LEAST_CONVOLUTIONS
    tensors = tensors_in(sample)

    def kind(name: str, size: int) -> Kind:
        return Kind(name=name, size=size, parameters=parameters)

    pictures = [tensor for tensor in tensors if tensor.ndim == 4 and min(tensor.shape[2:]) >= LEAST_SIDE]
    if pictures and (attends or convolves):
        return kind(VISION if attends else CONVOLUTIONS, max(pictures[0].shape[1:]))
    sequences = [tensor for tensor in tensors if _is_sequence(tensor)]
    if sequences and attends:
        return kind(TEXT, sequences[0].shape[1])
    if sequences and any(isinstance(layer, nn.RNNBase) for layer in layers):
        return kind(RECURRENT, sequences[0].shape[1])
    return kind(DENSE, max((tensor[0].numel() for tensor in tensors if tensor.ndim and len(tensor)), default=1))


def _is_sequence(tensor: Tensor) -> bool:
    """Whether each sample holds rows of numbers or of tokens."""
    return tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1)
