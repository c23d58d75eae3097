"""Planted: each image is augmented by slow numpy code when it is loaded. Repaired (--repaired): ahead of the training."""

import sys

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

REPAIRED = "--repaired" in sys.argv


def augmented(image, seed):
    """Noise, blur and contrast, one after the other."""
    rng = np.random.default_rng(seed)
    image = image + 0.05 * rng.standard_normal(image.shape)
    for axis in (1, 2, 1, 2):
        image = (np.roll(image, 1, axis) + image + np.roll(image, -1, axis)) / 3
    low, high = np.percentile(image, [1, 99])
    return torch.from_numpy(np.clip((image - low) / (high - low), 0, 1).astype(np.float32))


class Images(Dataset):
    """Grey noise in two classes."""

    def __init__(self, count):
        self.images = np.random.default_rng(1).random((count, 1, 40, 40))
        self.ready = [augmented(one, n) for n, one in enumerate(self.images)] if REPAIRED else None

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.ready[index] if REPAIRED else augmented(self.images[index], index)
        return {"image": image, "label": index % 2}


def train():
    """Three epochs."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Images(2_400), batch_size=24, shuffle=True, drop_last=True)
    for _ in range(3):
        for batch in loader:
            loss = criterion(model(batch["image"]), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    train()
