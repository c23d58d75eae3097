import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

from . import config


class FraudDataset(Dataset):
    """Imbalanced binary classification, about 10% positives."""

    def __init__(self, features, labels):
        self.features = torch.from_numpy(features)
        self.labels = torch.from_numpy(labels)

    def __len__(self):
        return self.labels.size(0)

    def __getitem__(self, index):
        return self.features[index], self.labels[index]


def generate(n, seed):
    rng = np.random.RandomState(seed)
    x = rng.randn(n, config.N_FEATURES).astype(np.float32)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3] ** 2 + 0.5 * rng.randn(n)
    y = (score > np.quantile(score, 0.9)).astype(np.float32)
    return x, y


def get_loaders(batch_size, seed):
    x, y = generate(config.N_TRAIN + config.N_VALID, seed)
    train = FraudDataset(x[:config.N_TRAIN], y[:config.N_TRAIN])
    valid = FraudDataset(x[config.N_TRAIN:], y[config.N_TRAIN:])

    pos = train.labels.mean()
    weights = torch.where(train.labels == 1, 0.5 / pos, 0.5 / (1 - pos))
    sampler = WeightedRandomSampler(weights, num_samples=len(train), replacement=True)

    train_loader = DataLoader(train, batch_size=batch_size, sampler=sampler)
    valid_loader = DataLoader(valid, batch_size=4 * batch_size)
    return train_loader, valid_loader
