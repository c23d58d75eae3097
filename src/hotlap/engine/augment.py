"""Augmentation of pictures on the device: functions on whole batches, in which every sample draws its own luck.

All draws come from torch's generator of the device that the batch is on, within the step. So they are the same
under every feed, go on where a checkpoint left off, and advance from replay to replay where the step is captured. No
shape depends on a draw, and nothing is read back to the host.
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
"""Of red, green and blue over the pictures that most pretrained networks know, on a scale from 0 to 1."""
GREY = (0.299, 0.587, 0.114)
"""How much of red, green and blue the eye sees as brightness."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """For `Job(augment=…)`: changes a batch `(pictures, target)` at random, and gives pictures of 0 to 1.

    Pictures are uint8, or floats of 0 to 1, of (samples, channels, height, width). With `mixup` or `cutmix` targets
    become shares: of `classes` where they are whole numbers, else weighted means. Raises JobError with all mistakes.
    """

    flip: bool = False
    """Whether each picture is mirrored, left to right, half of the time."""
    crop: float = 0.0
    """Of each side at most this share is cut off; what is left is brought to the full size."""
    colour: float = 0.0
    """Brightness, contrast and saturation are each multiplied by a number up to this far from 1."""
    mixup: float = 0.0
    """Each picture is mixed with another of the batch, by a share drawn from Beta(mixup, mixup); 0: not at all."""
    cutmix: float = 0.0
    """A box of another picture is put into each; its area is drawn from Beta(cutmix, cutmix). With `mixup` too, each
    picture has one of both."""
    classes: int = 0
    """How many classes there are, where targets are whole numbers and are mixed."""

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
        """The batch, changed; the one that was given stays as it is."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise TrainingError(f"Augment takes batches (pictures, target), and this is {_outline(batch)}")
        pictures, target = batch
        if pictures.ndim != 4:
            shape = tuple(pictures.shape)
            raise TrainingError(f"Augment takes pictures of (samples, channels, height, width), and these are {shape}")
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
        if target.device.type == "cpu":  # a look at the device would wait for it; there fit has looked before
            check_classes(target, self.classes)
        return one_hot(target, self.classes)


class Normalise(nn.Module):
    """The first layer of a network of pictures: uint8, or floats of 0 to 1, to a mean of 0 and a spread of 1.

    It belongs to the network, so that whoever loads or exports it needs to know nothing of it.
    """

    mean: Tensor
    spread: Tensor

    def __init__(self, mean: Sequence[float] = IMAGENET_MEAN, spread: Sequence[float] = IMAGENET_SPREAD) -> None:
        super().__init__()
        if len(mean) != len(spread):
            raise JobError([f"Normalise has {len(mean)} means and {len(spread)} spreads: give one of each a channel"])
        if not all(spread):
            raise JobError([f"spread={shown(tuple(spread))} has a 0, by which nothing can be divided"])
        for name, values in (("mean", mean), ("spread", spread)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1))

    def forward(self, pictures: Tensor) -> Tensor:
        """The same pictures around 0."""
        if pictures.ndim < 3 or self.mean.numel() not in (1, pictures.shape[-3]):
            raise TrainingError(
                f"Normalise is for {self.mean.numel()} channels, and pictures of {tuple(pictures.shape)} came: give it "
                "a mean and a spread for each of theirs"
            )
        return normalised(as_shares(pictures), self.mean, self.spread)


# --- functions on batches --------------------------------------------------------------------------


def as_shares(pictures: Tensor) -> Tensor:
    """Pictures of 0 to 1: uint8 divided by 255, floats as they are."""
    return pictures if pictures.is_floating_point() else pictures.float().div(255)


def normalised(pictures: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Each channel less its mean, by its spread."""
    return (pictures - mean) / spread


def flipped(pictures: Tensor) -> Tensor:
    """Each picture mirrored, left to right, half of the time; of any kind of number."""
    return torch.where(_draws(pictures) < 0.5, pictures.flip(-1), pictures)


def cropped(pictures: Tensor, share: float) -> Tensor:
    """A part of each picture, of its own size and place, brought to the full size; up to `share` of a side goes."""
    count, (height, width) = len(pictures), pictures.shape[-2:]
    sides = 1 - share * torch.rand(count, 1, device=pictures.device)
    # Places are sampled from -1 to 1: the middle of a window of this side may be so far from that of the picture.
    moves = (2 * torch.rand(2, count, 1, device=pictures.device) - 1) * (1 - sides)
    across, down = (
        move + sides * ((2 * torch.arange(size, device=pictures.device) + 1) / size - 1)
        for move, size in zip(moves.unbind(), (width, height), strict=True)
    )
    shape = (count, height, width)
    grid = torch.stack((across[:, None, :].expand(shape), down[:, :, None].expand(shape)), -1)
    return F.grid_sample(pictures.float(), grid, padding_mode="border", align_corners=False).to(pictures.dtype)


def coloured(pictures: Tensor, amount: float) -> Tensor:
    """Brightness, contrast and, of three channels, saturation of each picture multiplied by numbers around 1."""
    found = pictures * _factors(pictures, amount)
    means = found.mean((1, 2, 3), keepdim=True)
    found = torch.lerp(means, found, _factors(pictures, amount))
    if pictures.shape[1] == len(GREY):
        red, green, blue = found.unbind(1)
        grey = (GREY[0] * red + GREY[1] * green + GREY[2] * blue).unsqueeze(1)
        found = torch.lerp(grey.expand_as(found), found, _factors(pictures, amount))
    return found.clamp(0, 1)


def mixed(pictures: Tensor, target: Tensor, *, mixup: float = 0.0, cutmix: float = 0.0) -> tuple[Tensor, Tensor]:
    """Each picture and its target (floats) with a share of another of the batch: all over, or in a box."""
    count = len(pictures)
    partner = torch.rand(count, device=pictures.device).argsort()
    others = pictures[partner]
    # What stays of each picture at each place: one number for all places, or none within the box.
    stays = torch.ones(count, 1, 1, 1, device=pictures.device)
    if mixup:
        stays = _betas(pictures, mixup)
    if cutmix:
        boxes = _outside_boxes(pictures, 1 - _betas(pictures, cutmix))
        stays = torch.where(_draws(pictures) < 0.5, boxes, stays.expand_as(boxes)) if mixup else boxes
    shares = stays.mean((1, 2, 3)).reshape(count, *[1] * (target.ndim - 1))
    return torch.lerp(others, pictures, stays), torch.lerp(target[partner], target, shares.to(target.dtype))


def one_hot(target: Tensor, classes: int) -> Tensor:
    """Whole numbers as shares of classes, without looking at them on the host."""
    return (target.unsqueeze(-1) == torch.arange(classes, device=target.device)).float()


def check_classes(target: Tensor, classes: int) -> None:
    """Raises TrainingError where a whole number is that of no class. It looks at them: not for use within a step."""
    if target.numel() and (most := int(target.max())) >= classes:
        raise TrainingError(f"a target of {most} came, and Augment(classes={classes}) has classes up to {classes - 1}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _draws(pictures: Tensor) -> Tensor:
    """A number of 0 to 1 for each picture."""
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
    """1 outside a box of each picture and 0 inside; boxes have these areas where they do not reach over an edge."""
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
