"""The catalogue's examples, counted again."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.rows import Options, Row
from hotlap import Job
from hotlap.core.units import MIB
from hotlap.kit import start_size as catalogue
from hotlap.kit.bench import opened
from hotlap.recipes.networks import NetworkSpec, new_network

MOST_OFF = 0.05


class Lstm(nn.Module):
    """Two layers, both ways, over windows of 29 features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(29, width, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, windows: Tensor) -> Tensor:
        """A score for each class."""
        scores: Tensor = self.head(self.layers(windows)[0][:, -1])
        return scores


class OfTransformers(nn.Module):
    """A classifier of the transformers library, from its config."""

    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        library = importlib.import_module("transformers")
        task = "SequenceClassification" if kind == "Bert" else "ImageClassification"
        self.body = getattr(library, f"{kind}For{task}")(getattr(library, f"{kind}Config")(**settings))

    def forward(self, inputs: Tensor) -> Tensor:
        """A score for each class."""
        scores: Tensor = self.body(inputs).logits
        return scores


def _residual(*depths: int) -> nn.Module:
    return OfTransformers("ResNet", depths=list(depths))


def _attending(kind: str, width: int, blocks: int) -> nn.Module:
    sizes = {"hidden_size": width, "num_hidden_layers": blocks, "num_attention_heads": width // 64}
    # On the CPU, dropout within attention makes torch keep whole maps of it, which no GPU does.
    return OfTransformers(kind, **sizes, intermediate_size=4 * width, attention_probs_dropout_prob=0.0)


def _dense(*widths: int) -> nn.Module:
    layers = [
        [nn.Linear(before, after), nn.BatchNorm1d(after), nn.ReLU()] for before, after in itertools.pairwise(widths)
    ]
    return nn.Sequential(*itertools.chain(*layers[:-1]), layers[-1][0])


def _picture_network(name: str, width: int) -> nn.Module:
    return new_network(name, NetworkSpec(size=224, outputs=10, width=width)).body


EXAMPLES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ResNet-18 of a quarter's width": (lambda: _picture_network("resnet", 16), 4),
    "ResNet-18": (lambda: _picture_network("resnet", 64), 4),
    "ResNet-50": (lambda: _residual(3, 4, 6, 3), 4),
    "ResNet-152": (lambda: _residual(3, 8, 36, 3), 4),
    "the image recipe's ViT": (lambda: _picture_network("vit", 64), 4),
    "ViT-S/16": (lambda: _attending("ViT", 384, 12), 4),
    "ViT-B/16": (lambda: _attending("ViT", 768, 12), 4),
    "ViT-L/16": (lambda: _attending("ViT", 1024, 24), 4),
    "BERT-mini": (lambda: _attending("Bert", 256, 4), 16),
    "BERT-base": (lambda: _attending("Bert", 768, 12), 4),
    "LSTM 2×128, both ways": (lambda: Lstm(128), 16),
    "LSTM 2×512, both ways": (lambda: Lstm(512), 16),
    "MLP 100-256-128-64-3": (lambda: _dense(100, 256, 128, 64, 3), 1024),
    "MLP 560-1024-1024-1024-424": (lambda: _dense(560, 1024, 1024, 1024, 424), 1024),
}
"""How each example is made, and the smaller of two batches that are counted, the other having twice as many samples:
large enough that the peak of an update is where the activations are."""


def catalogue_rows(options: Options) -> Iterator[Row]:
    """What a sample takes, counted again."""
    for example in catalogue.EXAMPLES:
        make, few = EXAMPLES[example.name]
        if options.quick and example.parameters > 1e6:
            continue
        try:
            model = make()
        except ImportError:
            yield Row(part="catalogue", what=example.name, seen="transformers is not installed", kept=True)
            continue
        count = bytes_a_sample(model, example, few)
        told = f"{count / MIB:.4g} MiB a sample of {example.size}, {example.bytes_a_sample / MIB:.4g} in the catalogue"
        near = abs(count - example.bytes_a_sample) <= MOST_OFF * count
        parameters = sum(p.numel() for p in model.parameters())
        yield Row(part="catalogue", what=f"{example.name}, {parameters:,} parameters", seen=told, kept=near)


def bytes_a_sample(model: nn.Module, example: catalogue.Example, few: int) -> float:
    """What an update has more for each sample more, by the sizes of its tensors."""
    inputs = {
        catalogue.CONVOLUTIONS: lambda: torch.randn(2 * few, 3, example.size, example.size),
        catalogue.VISION: lambda: torch.randn(2 * few, 3, example.size, example.size),
        catalogue.TEXT: lambda: torch.randint(1000, (2 * few, example.size)),
        catalogue.RECURRENT: lambda: torch.randn(2 * few, example.size, 29),
        catalogue.DENSE: lambda: torch.randn(2 * few, example.size),
    }[example.kind]()
    job = Job(
        model=model,
        data=(inputs, torch.zeros(2 * few, dtype=torch.long)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        batch_size=few,
        epochs=1,
        device="cpu",
    )
    with opened(job) as bench:
        low, high = (bench.peak_bytes(bench.window(size))[0] for size in (few, 2 * few))
    return (high - low) / few
