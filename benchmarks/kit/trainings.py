"""What is trained: a ResNet-18 and an encoder of BERT-base's size."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kit.rows import Options
from hotlap import Job
from hotlap.machine.catalogue import find_gpu
from hotlap.recipes.networks import NetworkSpec, new_network


class Encoder(nn.Module):
    """An encoder over tokens of BERT-base's size, with a classifier on its mean."""

    def __init__(self, width: int = 768, heads: int = 12, blocks: int = 12, words: int = 30_522) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, activation="gelu", batch_first=True)
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(512, width)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """A score for each class."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        scores: Tensor = self.head(self.blocks(self.words(tokens) + self.places(places)).mean(1))
        return scores


def resnet18(quick: bool) -> nn.Module:
    """torchvision's where it is installed, else the recipe's own of the same depth and width."""
    if not quick:
        try:
            model: nn.Module = importlib.import_module("torchvision.models").resnet18(num_classes=10)
        except ImportError:
            pass
        else:
            return model
    return new_network("resnet", NetworkSpec(size=32 if quick else 224, outputs=10, width=8 if quick else 64)).body


def jobs(options: Options) -> dict[str, Job]:
    """Both trainings, with random samples: neither speed nor memory depends on what is in them."""
    torch.manual_seed(0)
    quick, draws = options.quick, torch.Generator().manual_seed(1)
    side, count, length = (32, 256, 16) if quick else (224, 2048, 128)
    pictures = torch.randn(count, 3, side, side, generator=draws)
    tokens = torch.randint(1000, (count, length), generator=draws)
    encoder = Encoder(32, 2, 2, 1000) if quick else Encoder()
    common: dict[str, Any] = {
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        "batch_size": 32,
        "epochs": 1,
        "device": options.device,
    }
    classes = torch.randint(2, (count,), generator=draws)
    return {
        "ResNet-18": Job(model=resnet18(quick), data=(pictures, classes), **common),
        "BERT-base": Job(model=encoder, data=(tokens, classes), **common),
    }


@contextmanager
def as_t4(device: str) -> Iterator[None]:
    """Inside, torch may take no more of the GPU than a T4 has."""
    if device == "cpu":
        yield
        return
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, find_gpu("t4").usable_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()
