"""What the fast-path benchmark trains: models, data and sizes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.overhead import mlp

HELD_OUT = 512
"""Samples kept apart, to judge trained weights on."""
MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
"""Of the pixels 0 … 255 of photographs, by channel, as everybody normalises them."""
COLOURS = 32
"""How far the grey of an image may move by its own colour, the same over all of it."""


class Data(NamedTuple):
    """Samples to train on and samples to judge by, in host memory."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model, its data and batch, and the choices under which a skilled person would train it on a GPU."""

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    """Samples to train on and to judge by; here a `Data`."""
    batch: int
    lr: float = 1e-3
    precision: str
    """`bf16` or `tf32`."""
    replay_steps: int
    """Updates in one replay of a captured step."""
    plan_steps: int | None = None
    """Updates in a replay of hotlap's plan, where that is another number."""
    lap_s: float = 0.0
    """Laps are at least so long: launching a replay of many steps takes a millisecond, and a lap shows its first."""
    images: bool = False
    """Whether samples are uint8 images, normalised before the model sees them."""
    small: bool = False
    """Whether a CPU trains it in seconds."""
    compiles: str = "no"
    """What the column `compiled` has compiled: the `model`, its `blocks`, or `no` where there is no such column."""

    @property
    def layout(self) -> str:
        """How tensors of this work are best laid out."""
        return "channels_last" if self.images else "as given"

    def build(self) -> nn.Module:
        """The model with the same first weights every time."""
        torch.manual_seed(0)
        return self.model()

    def optimizer(self, model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
        """AdamW at this work's learning rate."""
        return torch.optim.AdamW(model.parameters(), lr=self.lr, **settings)

    @property
    def loss(self) -> Callable[..., Any]:
        """As a Rig or a Job takes it."""
        return nn.CrossEntropyLoss()

    def fed(self, column: str = "hotlap") -> tuple[Any, dict[str, Any]]:
        """The training samples as a column's Rig takes them, and what else its feed is told."""
        data = self.data()
        return (data.x, data.y), {}

    def brought(self, *, drop_last: bool) -> dict[str, Any]:
        """The training samples as somebody brings them to a Job who has not thought about speed."""
        data = self.data()
        return {"data": DataLoader(TensorDataset(data.x, data.y), self.batch, shuffle=True, drop_last=drop_last)}

    def first_batch(self, device: torch.device) -> Any:
        """As the model takes it in fp32."""
        data = self.data()
        return self._inputs(data.x[: self.batch], device), data.y[: self.batch].to(device)

    def held_batches(self, device: torch.device) -> Iterator[tuple[Any, int]]:
        """The samples kept apart, and how many they are."""
        data = self.data()
        yield (self._inputs(data.held_x, device), data.held_y.to(device)), len(data.held_y)

    def judge(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss of such a batch."""
        return F.cross_entropy(model(batch[0]), batch[1])

    def _inputs(self, x: Tensor, device: torch.device) -> Tensor:
        return Normalise(device).images(x.to(device)) if self.images else x.to(device)


def called(works: Iterable[Work], *parts: str) -> list[Work]:
    """The works in whose name a word, or several, begin with one of these parts; all where there is none."""
    return [work for work in works if not parts or any(f" {part}".lower() in f" {work.name}".lower() for part in parts)]


class Normalise:
    """Images of a batch from uint8 to numbers of mean 0 and spread 1, in one kernel; other samples as they are."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
        self._scale, self._shift = (1 / std).to(device, dtype), (-mean / std).to(device, dtype)

    def images(self, x: Tensor) -> Tensor:
        """The images alone, in the layout they came in."""
        return torch.addcmul(self._shift, x, self._scale)

    def __call__(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """A batch of images and targets."""
        return self.images(batch[0]), batch[1]


class Lstm(nn.Module):
    """Two layers of 128 over windows, three classes from the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(29, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.lstm(x)[0][:, -1])
        return scores


class Transformer(nn.Module):
    """Four encoder layers of width 128 with 4 heads over windows, three classes from the mean of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(29, 128)
        layer = nn.TransformerEncoderLayer(128, 4, dim_feedforward=512, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        scores: Tensor = self.head(self.encoder(self.project(x)).mean(1))
        return scores


def resnet18() -> nn.Module:
    """torchvision's, from first weights, ten classes."""
    model: nn.Module = importlib.import_module("torchvision.models").resnet18(num_classes=10)
    return model


def channels_last(model: nn.Module) -> nn.Module:
    """The model with its convolutions that way round."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def _split(x: Tensor, y: Tensor) -> Data:
    kept = len(x) - HELD_OUT
    return Data(x[:kept], y[:kept], x[kept:], y[kept:])


@functools.cache
def windows(samples: int = 76_792) -> Data:
    """Random windows of 20 × 29; a fixed linear teacher names the class of a window's mean."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples + HELD_OUT, 20, 29, generator=generator)
    return _split(x, (x.mean(1) @ torch.randn(29, 3, generator=generator)).argmax(1))


@functools.cache
def rows(samples: int = 100_000) -> Data:
    """Random rows of 100; a fixed linear teacher names their class."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(samples + HELD_OUT, 100, generator=generator)
    return _split(x, (x @ torch.randn(100, 3, generator=generator)).argmax(1))


@functools.cache
def images(samples: int = 4096, side: int = 224) -> Data:
    """Random uint8 images, each of a colour of its own; a fixed linear teacher names the class of the colour."""
    generator = torch.Generator().manual_seed(3)
    count = samples + HELD_OUT
    colour = torch.randint(2 * COLOURS, (count, 3, 1, 1), dtype=torch.uint8, generator=generator)
    # Noise for 64 images, used again and again: as much of it as there are pixels would take a minute to draw.
    noise = torch.randint(256 - 2 * COLOURS, (64, 3, side, side), dtype=torch.uint8, generator=generator)
    x = torch.empty(count, 3, side, side, dtype=torch.uint8)
    for start in range(0, count, len(noise)):
        some = colour[start : start + len(noise)]
        torch.add(noise[: len(some)], some, out=x[start : start + len(noise)])
    teacher = nn.functional.normalize(torch.randn(3, 10, generator=generator), dim=0)
    return _split(x, ((colour.flatten(1).float() - COLOURS) @ teacher).argmax(1))


WORKS: tuple[Work, ...] = (
    Work(
        name="LSTM 2×128, batch 128", model=Lstm, data=windows, batch=128, precision="bf16", replay_steps=8, small=True
    ),
    Work(
        name="Transformer d128, batch 128",
        model=Transformer,
        data=windows,
        batch=128,
        lr=3e-4,
        precision="bf16",
        replay_steps=4,
        compiles="model",
    ),
    Work(name="MLP, batch 256", model=mlp, data=rows, batch=256, precision="tf32", replay_steps=32, small=True),
    Work(
        name="ResNet-18, batch 32",
        model=resnet18,
        data=images,
        batch=32,
        precision="bf16",
        replay_steps=2,
        plan_steps=8,
        images=True,
    ),
    Work(
        name="ResNet-18, batch 256",
        model=resnet18,
        data=images,
        batch=256,
        precision="bf16",
        replay_steps=1,
        plan_steps=4,
        lap_s=1.0,
        images=True,
        compiles="model",
    ),
)
