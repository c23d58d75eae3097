"""Networks of the recipes: over windows of a series, and over pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hotlap.core.errors import DataError, StoreError, did_you_mean, shown
from hotlap.engine.augment import IMAGENET_MEAN, IMAGENET_SPREAD, Normalise
from hotlap.recipes import library_models
from hotlap.recipes.library_models import CONFIG, LONGEST, library, read_config
from hotlap.recipes.recipe import Say
from hotlap.store.files import read_text
from hotlap.store.weights import load_weights


class AttentiveLstm(nn.Module):
    """An LSTM both ways, two layers of 128, and a weighted mean of its steps, whose weights it learns."""

    def __init__(self, features: int, classes: int, *, width: int = 128, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, width, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.attention = nn.Linear(2 * width, 1)
        self.head = nn.Sequential(nn.LayerNorm(2 * width), nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        steps, _ = self.lstm(x)
        weights = self.attention(steps).softmax(1)
        scores: Tensor = self.head((steps * weights).sum(1))
        return scores


class WindowTransformer(nn.Module):
    """Encoder layers of width 128 over the steps of a window, with places learnt; the mean of all steps."""

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
        """Scores of the classes."""
        scores: Tensor = self.head(self.encoder(self.project(x) + self.places).mean(1))
        return scores


class LastStep(nn.Module):
    """A network of plain layers over the last step of a window: 128-96-64-32."""

    def __init__(self, features: int, classes: int, *, dropout: float = 0.2) -> None:
        super().__init__()
        widths = (features, 128, 96, 64, 32)
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*blocks, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.layers(x[:, -1])
        return scores


BUILT_IN = ("resnet", "vit")
TIMM, TRANSFORMERS = "timm:", "transformers:"
SMALL = 96
"""Pictures up to this side keep their full size in the first stage of the ResNet."""
TOKENS = 14
"""Patches along a side that the Transformer aims at."""
CLASSIFIER = "AutoModelForImageClassification"


@dataclass(frozen=True, kw_only=True)
class NetworkPlan:
    """All that a network is made of, but for its name: as JSON holds it."""

    size: int
    outputs: int
    width: int = 64
    depth: int = 2
    mean: Sequence[float] = IMAGENET_MEAN
    spread: Sequence[float] = IMAGENET_SPREAD
    config: dict[str, Any] = field(default_factory=dict)
    """Of a network of transformers, as in its config.json."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it."""
        found = asdict(self)
        return {**found, "mean": list(self.mean), "spread": list(self.spread)}


class PictureNetwork(nn.Module):
    """A network with the normalising before it: pictures as they are in, a row of outputs for each."""

    def __init__(self, body: nn.Module, plan: NetworkPlan) -> None:
        super().__init__()
        self.normalise, self.body = Normalise(plan.mean, plan.spread), body

    def forward(self, pictures: Tensor) -> Tensor:
        """A row of outputs for each picture."""
        found = self.body(self.normalise(pictures))
        scores: Tensor = getattr(found, "logits", found)
        return scores


def name_problem(name: str) -> str | None:
    """Why no network can be called so, or None where one can."""
    if name in BUILT_IN or any(name.startswith(kind) and name != kind for kind in (TIMM, TRANSFORMERS)):
        return None
    known = did_you_mean(name, BUILT_IN)
    return f"no model is called {shown(name)}{known}; others are timm:NAME and transformers:TYPE, as transformers:vit"


def made(name: str, plan: NetworkPlan) -> PictureNetwork:
    """A network of this name with its first weights."""
    if name == "resnet":
        return PictureNetwork(ResNet(plan.outputs, width=plan.width, depth=plan.depth, small=plan.size <= SMALL), plan)
    if name == "vit":
        body = VisionTransformer(plan.outputs, size=plan.size, width=3 * plan.width, layers=3 * plan.depth)
        return PictureNetwork(body, plan)
    if name.startswith(TIMM):
        return PictureNetwork(_of_timm(name.removeprefix(TIMM), plan), plan)
    return PictureNetwork(_of_transformers(name, plan), plan)


def begun(name: str, plan: NetworkPlan, weights: str, say: Say) -> PictureNetwork:
    """The network as its training begins: with the weights that a file or folder has for it, where they fit."""
    if weights and plan.config:
        # The library has other names for tensors in files than in models: it loads them by itself.
        return PictureNetwork(_of_transformers(name, plan, weights, say), plan)
    model = made(name, plan)
    if not weights:
        return model
    given, own = load_weights(weights), model.state_dict()
    body = {key.removeprefix("body."): key for key in own}
    places = {key: key if key in own else body.get(key, key) for key in given}
    fits = {
        places[key]: value
        for key, value in given.items()
        if places[key] in own and own[places[key]].shape == value.shape
    }
    if not fits:
        raise StoreError(f"{weights} has {len(given):,} tensors, and none of them fits {name}; name its own model")
    model.load_state_dict(fits, strict=False)
    missing = [key for key in own if key not in fits and not key.startswith("normalise.")]
    say(_weights_line(name, weights, len(fits), missing))
    return model


def _weights_line(name: str, weights: str, fitting: int, missing: Sequence[str]) -> str:
    rest = f"; {len(missing)} begin at random, as {missing[-1]}" if missing else ""
    return f"weights   {fitting:,} tensors of {name} from {weights}{rest}"


def plan_in(folder: Path, plan: NetworkPlan) -> tuple[str, NetworkPlan]:
    """The name and the plan of a network of transformers whose config.json lies in a folder with weights."""
    config = read_config(folder / CONFIG)
    kind = config["model_type"]
    for name in ("id2label", "label2id"):
        config.pop(name, None)
    config["image_size"] = plan.size
    return f"{TRANSFORMERS}{kind}", replace(plan, config=config, **_normalising_in(folder))


def _normalising_in(folder: Path) -> dict[str, Any]:
    path = folder / "preprocessor_config.json"
    if not path.is_file():
        return {}
    try:
        said: Mapping[str, Any] = json.loads(read_text(path))
        found = {"mean": said.get("image_mean"), "spread": said.get("image_std")}
        given = {name: [float(one) for one in value] for name, value in found.items() if value}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        raise StoreError(f"{path} has no mean and spread of three colours; save it again, or take it away") from None
    return {name: value for name, value in given.items() if len(value) == 3}


def _of_timm(name: str, plan: NetworkPlan) -> nn.Module:
    timm = library("timm", "this model", "timm")
    if not timm.is_model(name):
        raise DataError(f"timm has no model {shown(name)}{did_you_mean(name, timm.list_models())[:LONGEST]}")
    settings = {"pretrained": False, "num_classes": plan.outputs}
    try:
        found: nn.Module = timm.create_model(name, **settings, img_size=plan.size)
    except TypeError:  # convolutions do not ask for the size
        found = timm.create_model(name, **settings)
    return found


def _of_transformers(name: str, plan: NetworkPlan, folder: str = "", say: Say = lambda line: None) -> nn.Module:
    """A network of transformers: with first weights, or with those of a folder as far as they fit."""
    config = {"model_type": name.removeprefix(TRANSFORMERS), "image_size": plan.size, **plan.config}
    if not folder:
        return library_models.made(CLASSIFIER, config, name, labels=plan.outputs)
    found, missing = library_models.loaded(CLASSIFIER, config, Path(folder), name, labels=plan.outputs)
    say(_weights_line(name, folder, len(found.state_dict()) - len(missing), missing))
    return found


# --- built in ----------------------------------------------------------------------------------------


class ResNet(nn.Module):
    """Four stages of residual blocks, each half the side and twice the width of the one before; 18 layers as it is."""

    def __init__(self, outputs: int, *, width: int = 64, depth: int = 2, small: bool = False) -> None:
        super().__init__()
        if small:
            self.stem = _convolved(3, width, 3)
        else:
            self.stem = nn.Sequential(*_convolved(3, width, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1))
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
        self.first = _convolved(before, after, 3, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))
        # A block begins as its shortcut alone, which deep ones learn faster from.
        nn.init.zeros_(self.second[1].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.second(self.first(x)) + self.shortcut(x))


def _convolved(before: int, after: int, side: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, side, stride=stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class VisionTransformer(nn.Module):
    """Encoder layers over the patches of a picture, with places learnt; the mean of all patches."""

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
    """The side of a patch: that which cuts a picture into about 14 × 14, without a rest where that can be."""
    wanted = min(size, max(4, round(size / TOKENS)))
    even = [side for side in range(wanted, 0, -1) if size % side == 0]
    return even[0] if 2 * even[0] >= wanted else wanted
