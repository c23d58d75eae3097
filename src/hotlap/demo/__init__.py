"""A small training on data that comes with hotlap: a small network classifies handwritten digits."""

from __future__ import annotations

import math
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hotlap.core.job import Job

TEST_SHARE = 5
"""One in so many digits is kept for validation."""
BATCH = 32
EPOCHS = 200
LOOKS = 10
"""Evaluations in a whole demo."""


def load_digits() -> tuple[Tensor, Tensor]:
    """1,797 digits as images (n, 1, 8, 8) from 0 to 1, and their classes."""
    with files("hotlap.demo").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        images, labels = stored["images"], stored["labels"]
    return torch.from_numpy(images).float().div(16).unsqueeze(1), torch.from_numpy(labels).long()


class Digits(Dataset[tuple[Tensor, int]]):
    """Digits as most people write a dataset: a sample at a time, in Python."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images, self._labels = images.numpy(), labels.tolist()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self._images[index].copy()), self._labels[index]


def small_network() -> nn.Module:
    """Three linear layers with batch norms and dropout."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(256, 128),
        nn.BatchNorm1d(128),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(128, 10),
    )


def digits_job(*, epochs: int = EPOCHS, seed: int = 0, device: str = "auto") -> Job:
    """The training that `hotlap demo` runs."""
    images, labels = load_digits()
    held_out = torch.arange(len(labels)) % TEST_SHARE == 0
    training = Digits(images[~held_out], labels[~held_out])
    updates = epochs * math.ceil(len(training) / BATCH)
    torch.manual_seed(seed)
    model = small_network()
    return Job(
        model=model,
        data=training,
        valid=(images[held_out], labels[held_out]),
        loss=nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2),
        schedule=lambda optimizer, updates: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=6e-3, total_steps=updates + 1
        ),
        metrics=["accuracy", "macro_f1"],
        monitor="accuracy",
        patience=LOOKS + 1,
        eval_every=math.ceil(updates / LOOKS),
        clip=1.0,
        batch_size=BATCH,
        epochs=epochs,
        seed=seed,
        device=device,
    )
