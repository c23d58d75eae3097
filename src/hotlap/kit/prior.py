"""Where a search for a batch begins: what people use on such a GPU for such a model and such samples.

A rule of thumb in place of a table, which measuring corrects: samples a GiB, in fp32 with an optimizer that keeps two
values for each weight. On 16 GB that is 64 pictures of 224 × 224 for a network like ResNet-50.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from hotlap.core.units import GIB
from hotlap.data.batches import Batch
from hotlap.data.columns import tensors_in

SIDE, LENGTH = 224, 128
"""For which the figures below hold, in pixels and in tokens."""
PER_GIB = {"convolutions": 4.0, "attention over pictures": 2.0, "attention over tokens": 2.0}


@dataclass(frozen=True)
class Prior:
    """A size to begin with, and why."""

    size: int
    why: str


def prior(model: nn.Module, sample: Batch, room_bytes: int, where: str, *, own: int) -> Prior:
    """The size to begin with for a model and a batch of its samples; the user's own where nothing is known of such."""
    kind, shape, scale = kind_of_model(model, sample)
    if kind is None:
        return Prior(own, "your own")
    size = int(PER_GIB[kind] * scale * room_bytes / GIB)
    power = 1 << max(0, size.bit_length() - 1)
    return Prior(power, f"a rule of thumb for {kind} of {shape} on {where}")


def kind_of_model(model: nn.Module, sample: Batch) -> tuple[str | None, str, float]:
    """What kind of model it is, how large its samples are in words, and by which factor fewer of them fit."""
    layers = list(model.modules())
    attends = any(isinstance(layer, nn.MultiheadAttention) or "Attention" in type(layer).__name__ for layer in layers)
    convolves = sum(isinstance(layer, nn.Conv2d) for layer in layers) > 3
    tensors = tensors_in(sample)
    pictures = [one for one in tensors if one.ndim == 4 and min(one.shape[2:]) >= 16]
    if pictures and (attends or convolves):
        side = max(pictures[0].shape[1:])
        kind = "attention over pictures" if attends else "convolutions"
        return kind, f"{side} pixels", (SIDE / side) ** 2
    tokens = [one for one in tensors if _are_tokens(one)]
    if tokens and attends:
        length = tokens[0].shape[1]
        return "attention over tokens", f"{length} tokens", LENGTH / length
    return None, "", 1.0


def _are_tokens(tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] > 1
