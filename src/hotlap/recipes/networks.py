"""The networks of the recipes: for windows of bars, and for pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, StoreError, did_you_mean, library, shown
from hotlap.engine.augment import IMAGENET_MEAN, IMAGENET_SPREAD, Normalise
from hotlap.recipes import library_models
from hotlap.recipes.library_models import CONFIG, LONGEST, read_config
from hotlap.recipes.recipe import Say
from hotlap.store.files import read_text
from hotlap.store.weights import load_weights


class AttentiveLstm(nn.Module):
    """A bidirectional LSTM of two layers of 128, with attention pooling over its steps."""

    def __init__(self, features: int, classes: int, *, width: int = 128, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.attention = nn.Linear(2 * width, 1)
        self.head = nn.Sequential(nn.LayerNorm(2 * width), nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each window."""
        steps, _ = self.lstm(x)
        weights = self.attention(steps).softmax(1)
        scores: Tensor = self.head((steps * weights).sum(1))
        return scores


class WindowTransformer(nn.Module):
    """A Transformer encoder of width 128 over the steps of a window: learned positions, mean pooling."""

    def __init__(
        self,
        features: int,
        classes: int,
        *,
        length: int,
        width: int = 128,
        heads: int = 4,
        layers: int = 3,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.project = nn.Linear(features, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        nn.init.normal_(self.places, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=dropout, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each window."""
        scores: Tensor = self.head(self.encoder(self.project(x) + self.places).mean(1))
        return scores


class LastStep(nn.Module):
    """An MLP of layers of 128, 96, 64 and 32 over the last step of a window."""

    def __init__(self, features: int, classes: int, *, dropout: float = 0.2) -> None:
        super().__init__()
        widths = (features, 128, 96, 64, 32)
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*blocks, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """The logits of each window."""
        scores: Tensor = self.layers(x[:, -1])
        return scores


BUILT_IN = ("resnet", "vit")
TIMM, TRANSFORMERS = "timm:", "transformers:"
SMALL_SIDE = 96
"""Pictures up to this side keep their full size in the stem of the ResNet."""
PATCHES_A_SIDE = 14
"""Patches along a side of a picture that the vision Transformer aims at."""
CLASSIFIER = "AutoModelForImageClassification"


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """What a network is built from, besides its name."""

    size: int
    outputs: int
    width: int = 64
    depth: int = 2
    mean: Sequence[float] = IMAGENET_MEAN
    spread: Sequence[float] = IMAGENET_SPREAD
    config: dict[str, Any] = field(default_factory=dict)
    """The config.json of a network of transformers."""

    def to_dict(self) -> dict[str, Any]:
        """The spec as JSON holds it."""
        return {**asdict(self), "mean": list(self.mean), "spread": list(self.spread)}


class PictureNetwork(nn.Module):
    """A network that normalises its input: pictures of uint8 in, a row of outputs for each."""

    def __init__(self, body: nn.Module, spec: NetworkSpec) -> None:
        super().__init__()
        self.normalise, self.body = Normalise(spec.mean, spec.spread), body

    def forward(self, pictures: Tensor) -> Tensor:
        """A row of outputs for each picture."""
        found = self.body(self.normalise(pictures))
        scores: Tensor = getattr(found, "logits", found)
        return scores


def name_problem(name: str) -> str | None:
    """What is wrong with the name of a network; None where it may exist."""
    if name in BUILT_IN or any(name.startswith(prefix) and name != prefix for prefix in (TIMM, TRANSFORMERS)):
        return None
    known = did_you_mean(name, BUILT_IN)
    return f"no model is called {shown(name)}{known}; others are timm:NAME and transformers:TYPE, as transformers:vit"


def new_network(name: str, spec: NetworkSpec) -> PictureNetwork:
    """A network of this name with random weights."""
    if name == "resnet":
        body: nn.Module = ResNet(spec.outputs, width=spec.width, depth=spec.depth, small=spec.size <= SMALL_SIDE)
    elif name == "vit":
        body = VisionTransformer(spec.outputs, size=spec.size, width=3 * spec.width, layers=3 * spec.depth)
    elif name.startswith(TIMM):
        body = _timm_network(name.removeprefix(TIMM), spec)
    else:
        body = _transformers_network(name, spec)
    return PictureNetwork(body, spec)


def initial_network(name: str, spec: NetworkSpec, weights: str, say: Say) -> PictureNetwork:
    """The network as its training begins: with those weights of a file or folder that fit, the others random."""
    if weights and spec.config:
        # In files of transformers, tensors have other names than in models. The library renames them.
        return PictureNetwork(_transformers_network(name, spec, weights, say), spec)
    model = new_network(name, spec)
    if not weights:
        return model
    given, own = load_weights(weights), model.state_dict()
    # A file may hold the whole PictureNetwork, or its body alone.
    without_body = {key.removeprefix("body."): key for key in own}
    renamed = [(key if key in own else without_body.get(key, key), value) for key, value in given.items()]
    fits = {key: value for key, value in renamed if key in own and own[key].shape == value.shape}
    if not fits:
        raise StoreError(f"{weights} has {len(given):,} tensors, and none of them fits {name}; name its own model")
    model.load_state_dict(fits, strict=False)
    missing = [key for key in own if key not in fits and not key.startswith("normalise.")]
    say(_weights_line(name, weights, len(fits), missing))
    return model


def _weights_line(name: str, weights: str, fitting: int, missing: Sequence[str]) -> str:
    rest = f"; {len(missing)} begin at random, as {missing[-1]}" if missing else ""
    return f"weights   {fitting:,} tensors of {name} from {weights}{rest}"


def spec_in_folder(folder: Path, spec: NetworkSpec) -> tuple[str, NetworkSpec]:
    """The name and the spec of the network of transformers whose config.json is in a folder of weights."""
    config = read_config(folder / CONFIG)
    model_type = config["model_type"]
    for name in ("id2label", "label2id"):
        config.pop(name, None)
    config["image_size"] = spec.size
    return f"{TRANSFORMERS}{model_type}", replace(spec, config=config, **_normalising_in(folder))


def _normalising_in(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return {}
    try:
        settings: Mapping[str, Any] = json.loads(read_text(path))
        found = {"mean": settings.get("image_mean"), "spread": settings.get("image_std")}
        given = {name: [float(one) for one in value] for name, value in found.items() if value}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise StoreError(f"{path} has no mean and spread of three colours; save it again, or take it away") from None
    return {name: value for name, value in given.items() if len(value) == 3}


def _timm_network(name: str, spec: NetworkSpec) -> nn.Module:
    timm = library("timm", "this model", "timm")
    if not timm.is_model(name):
        raise DataError(f"timm has no model {shown(name)}{did_you_mean(name, timm.list_models())[:LONGEST]}")
    settings = {"pretrained": False, "num_classes": spec.outputs}
    try:
        found: nn.Module = timm.create_model(name, **settings, img_size=spec.size)
    except TypeError:  # convolutional networks take no size
        found = timm.create_model(name, **settings)
    return found


def _transformers_network(name: str, spec: NetworkSpec, folder: str = "", say: Say = lambda line: None) -> nn.Module:
    """A network of transformers: with random weights, or with those of a folder that fit."""
    config = {"model_type": name.removeprefix(TRANSFORMERS), "image_size": spec.size, **spec.config}
    if not folder:
        return library_models.new_model(CLASSIFIER, config, name, labels=spec.outputs)
    found, missing = library_models.pretrained_model(CLASSIFIER, config, Path(folder), name, labels=spec.outputs)
    say(_weights_line(name, folder, len(found.state_dict()) - len(missing), missing))
    return found


# --- built-in networks ------------------------------------------------------------------------------


class ResNet(nn.Module):
    """A ResNet of four stages, each of half the side and twice the width of the one before; by default 18 layers."""

    def __init__(self, outputs: int, *, width: int = 64, depth: int = 2, small: bool = False) -> None:
        super().__init__()
        if small:
            self.stem = _conv_norm_relu(3, width, 3)
        else:
            self.stem = nn.Sequential(*_conv_norm_relu(3, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
        blocks: list[nn.Module] = []
        before = width
        for stage in range(4):
            after = width << stage
            for number in range(depth):
                blocks.append(_Block(before, after, stride=2 if stage and not number else 1))
                before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """A row of outputs for each picture."""
        outputs: Tensor = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        return outputs


class _Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = _conv_norm_relu(before, after, 3, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))
        # A block begins as the identity, from which deep networks learn faster.
        nn.init.zeros_(self.second[1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def _conv_norm_relu(before: int, after: int, side: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, side, stride=stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class VisionTransformer(nn.Module):
    """A Transformer encoder over the patches of a picture: learned positions, mean pooling."""

    def __init__(self, outputs: int, *, size: int, width: int = 192, layers: int = 6, heads: int = 3) -> None:
        super().__init__()
        side = patch_side(size)
        self.patches = nn.Conv2d(3, width, side, stride=side)
        self.places = nn.Parameter(torch.zeros(1, (size // side) ** 2, width))
        nn.init.normal_(self.places, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """A row of outputs for each picture."""
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        outputs: Tensor = self.head(self.encoder(tokens).mean(1))
        return outputs


def patch_side(size: int) -> int:
    """The side of patches that cut a picture into about 14 × 14, without a remainder where possible."""
    wanted = min(size, max(4, round(size / PATCHES_A_SIDE)))
    even = [side for side in range(wanted, 0, -1) if size % side == 0]
    return even[0] if 2 * even[0] >= wanted else wanted
