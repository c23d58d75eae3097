"""Augmentation of pictures on the device: functions of whole batches, with separate draws for each sample.

All draws come from torch's generator of the batch's device, within the step. They are therefore the same under every
feed, resume from a checkpoint, and advance from replay to replay if the step is captured. No shape depends on a draw,
and nothing is read back to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Beta

from hotlap.core.errors import JobError, TrainingError, shown

IMAGENET_MEAN, IMAGENET_SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of red, green and blue in ImageNet, on a scale from 0 to 1. Most pretrained networks use
them."""
GREY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the brightness that the eye sees."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """For `Job(augment=…)`: changes a batch `(pictures, target)` at random, and returns pictures of 0 to 1.

    Pictures are uint8, or floats of 0 to 1, of shape (samples, channels, height, width). With `mixup` or `cutmix`,
    targets become shares of `classes` if they are whole numbers, else weighted means. Raises JobError with all
    mistakes.
    """

    flip: bool = False
    """Mirror each picture, left to right, with probability one half."""
    crop: float = 0.0
    """Crop at most this share of each side, and resize the rest to the full size."""
    colour: float = 0.0
    """Multiply brightness, contrast and saturation each by a number at most this far from 1."""
    mixup: float = 0.0
    """Mix each picture with another of the batch, by a share drawn from Beta(mixup, mixup); 0: off."""
    cutmix: float = 0.0
    """Replace a box of each picture by another picture; the area is drawn from Beta(cutmix, cutmix). With `mixup` too,
    each picture gets one of both."""
    classes: int = 0
    """Number of classes; needed to mix targets that are whole numbers."""

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={shown(getattr(self, name))} must be at least 0 and below 1"
            for name in ("crop", "colour")
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) < 1
        ]
        wrong += [
            f"{name}={shown(getattr(self, name))} must be 0 or a number above it"
            for name in ("mixup", "cutmix")
            if not _is_number(getattr(self, name)) or not 0 <= getattr(self, name) < float("inf")
        ]
        if not isinstance(self.classes, int) or self.classes < 0:
            wrong.append(f"classes={shown(self.classes)} must be 0 or a whole number above it")
        if wrong:
            raise JobError(wrong)

    def __call__(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The changed batch; the argument stays as it is."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TrainingError(f"Augment takes batches (pictures, target), not {_outline(batch)}")
        pictures, target = batch
        if pictures.ndim != 4:
            shape = tuple(pictures.shape)
            raise TrainingError(f"Augment takes pictures of (samples, channels, height, width), not of shape {shape}")
        if self.flip:
            pictures = flipped(pictures)
        pictures = as_shares(pictures)
        if self.crop:
            pictures = cropped(pictures, self.crop)
        if self.colour:
            pictures = coloured(pictures, self.colour)
        if self.mixes:
            pictures, target = mixed(pictures, self._mixable(target), mixup=self.mixup, cutmix=self.cutmix)
        return pictures, target

    @property
    def mixes(self) -> bool:
        """Whether targets are mixed too."""
        return bool(self.mixup or self.cutmix)

    def _mixable(self, target: Tensor) -> Tensor:
        if target.is_floating_point():
            return target
        if not self.classes:
            raise TrainingError("mixup and cutmix of targets that are whole numbers need Augment(classes=…)")
        if target.device.type == "cpu":  # checking on the device would wait for it; there `fit` has checked before
            check_classes(target, self.classes)
        return one_hot(target, self.classes)


class Normalise(nn.Module):
    """The first layer of an image network: scales uint8, or floats of 0 to 1, to mean 0 and standard deviation 1.

    It is part of the network, so that loading or exporting the network needs no extra step.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Sequence[float] = IMAGENET_MEAN, spread: Sequence[float] = IMAGENET_SPREAD) -> None:
        super().__init__()
        if len(mean) != len(spread):
            raise JobError([f"Normalise has {len(mean)} means and {len(spread)} spreads: give one of each per channel"])
        if not all(spread):
            raise JobError([f"spread={shown(tuple(spread))} must not contain 0"])
        for name, values in (("mean", mean), ("spread", spread)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        """The normalised pictures."""
        if pictures.ndim < 3 or self.mean.numel() not in (1, pictures.shape[-3]):
            raise TrainingError(
                f"Normalise is for {self.mean.numel()} channels, and pictures of {tuple(pictures.shape)} came: give it "
                "a mean and a spread for each of theirs"
            )
        return normalised(as_shares(pictures), self.mean, self.spread)


# --- functions on batches --------------------------------------------------------------------------


def as_shares(pictures: Tensor) -> Tensor:
    """Pictures of 0 to 1: uint8 is divided by 255, floats stay."""
    return pictures if pictures.is_floating_point() else pictures.float().div(255)


def normalised(pictures: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Each channel minus its mean, divided by its spread."""
    return (pictures - mean) / spread


def flipped(pictures: Tensor) -> Tensor:
    """Each picture mirrored, left to right, with probability one half. Takes any dtype."""
    return torch.where(_draws(pictures) < 0.5, pictures.flip(-1), pictures)


def cropped(pictures: Tensor, share: float) -> Tensor:
    """A random part of each picture, resized to the full size; at most `share` of a side is cut off."""
    count, (height, width) = len(pictures), pictures.shape[-2:]
    sides = 1 - share * torch.rand(count, 1, device=pictures.device)
    # Coordinates go from -1 to 1. A window of this side may be this far from the middle.
    moves = (2 * torch.rand(2, count, 1, device=pictures.device) - 1) * (1 - sides)
    across, down = (
        move + sides * ((2 * torch.arange(size, device=pictures.device) + 1) / size - 1)
        for move, size in zip(moves.unbind(), (width, height), strict=True)
    )
    shape = (count, height, width)
    grid = torch.stack((across[:, None, :].expand(shape), down[:, :, None].expand(shape)), -1)
    return F.grid_sample(pictures.float(), grid, padding_mode="border", align_corners=False).to(pictures.dtype)


def coloured(pictures: Tensor, amount: float) -> Tensor:
    """Brightness, contrast and, for three channels, saturation of each picture multiplied by numbers around 1."""
    found = pictures * _factors(pictures, amount)
    means = found.mean((1, 2, 3), keepdim=True)
    found = torch.lerp(means, found, _factors(pictures, amount))
    if pictures.shape[1] == len(GREY):
        red, green, blue = found.unbind(1)
        grey = (GREY[0] * red + GREY[1] * green + GREY[2] * blue).unsqueeze(1)
        found = torch.lerp(grey.expand_as(found), found, _factors(pictures, amount))
    return found.clamp(0, 1)


def mixed(pictures: Tensor, target: Tensor, *, mixup: float = 0.0, cutmix: float = 0.0) -> tuple[Tensor, Tensor]:
    """Each picture and its target (floats) mixed with another of the batch: everywhere, or in a box."""
    count = len(pictures)
    partner = torch.rand(count, device=pictures.device).argsort()
    others = pictures[partner]
    # The share of each picture that stays at each place: one number for all places, or none within the box.
    stays = torch.ones(count, 1, 1, 1, device=pictures.device)
    if mixup:
        stays = _betas(pictures, mixup)
    if cutmix:
        boxes = _outside_boxes(pictures, 1 - _betas(pictures, cutmix))
        stays = torch.where(_draws(pictures) < 0.5, boxes, stays.expand_as(boxes)) if mixup else boxes
    shares = stays.mean((1, 2, 3)).reshape(count, *[1] * (target.ndim - 1))
    return torch.lerp(others, pictures, stays), torch.lerp(target[partner], target, shares.to(target.dtype))


def one_hot(target: Tensor, classes: int) -> Tensor:
    """Whole numbers as one-hot rows, without reading them on the host."""
    return (target.unsqueeze(-1) == torch.arange(classes, device=target.device)).float()


def check_classes(target: Tensor, classes: int) -> None:
    """Raise TrainingError if a target is not a class. It reads the targets, so it must not run within a step."""
    if target.numel() and (most := int(target.max())) >= classes:
        raise TrainingError(f"target {most} is out of range: Augment(classes={classes}) has classes 0 to {classes - 1}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _draws(pictures: Tensor) -> Tensor:
    """A random number of 0 to 1 for each picture."""
    return torch.rand(len(pictures), 1, 1, 1, device=pictures.device)


def _factors(pictures: Tensor, amount: float) -> Tensor:
    return 1 + amount * (2 * _draws(pictures) - 1)


def _betas(pictures: Tensor, both: float) -> Tensor:
    """A number of 0 to 1 for each picture, drawn from Beta(both, both)."""
    sides = torch.full((len(pictures), 1, 1, 1), both, device=pictures.device)
    # Without checks, which would wait for the device.
    found: Tensor = Beta(sides, sides, validate_args=False).sample()
    return found


def _outside_boxes(pictures: Tensor, areas: Tensor) -> Tensor:
    """1 outside a box of each picture and 0 inside. A box has the given area unless it crosses an edge."""
    height, width = pictures.shape[-2:]
    half = areas.sqrt() / 2
    inside = torch.ones(len(pictures), 1, 1, 1, dtype=torch.bool, device=pictures.device)
    for size, shape in ((height, (1, 1, -1, 1)), (width, (1, 1, 1, -1))):
        places = ((torch.arange(size, device=pictures.device) + 0.5) / size).reshape(shape)
        inside = inside & ((places - _draws(pictures)).abs() < half)
    return (~inside).float()


def _outline(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {len(batch)}"
    return f"a dict of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
