"""A small training on real data that comes with hotlap: handwritten digits, told apart by a small network."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor, nn

from hotlap.core.job import Job

TEST_SHARE = 5
"""One in so many digits is kept for validation."""


def load_digits() -> tuple[Tensor, Tensor]:
    """1,797 digits as images (n, 1, 8, 8) from 0 to 1, and their classes."""
    with files("hotlap.demo").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        images, labels = stored["images"], stored["labels"]
    return torch.from_numpy(images).float().div(16).unsqueeze(1), torch.from_numpy(labels).long()


def small_network() -> nn.Module:
    """Two convolutions and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def digits_job(*, epochs: int = 15, seed: int = 0, device: str = "auto") -> Job:
    """The training that `hotlap demo` runs."""
    images, labels = load_digits()
    held_out = torch.arange(len(labels)) % TEST_SHARE == 0
    torch.manual_seed(seed)
    model = small_network()
    return Job(
        model=model,
        data=(images[~held_out], labels[~held_out]),
        valid=(images[held_out], labels[held_out]),
        loss=nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2),
        schedule=lambda optimizer, updates: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=6e-3, total_steps=updates + 1
        ),
        metrics=["accuracy", "macro_f1"],
        monitor="accuracy",
        patience=epochs,
        clip=1.0,
        batch_size=32,
        epochs=epochs,
        seed=seed,
        device=device,
    )
