"""A training whose data come by worker processes, and a dataset whose samples can do harm on the way."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hotlap

SAMPLES, BATCH, EPOCHS, HARMFUL = 48, 8, 3, 20


class Numbers(Dataset):
    """Sample n holds the number n. Before sample 20, calls `harm` with whether a worker fetches it."""

    def __init__(self, harm=lambda is_worker: None):
        self.harm, self.parent = harm, os.getpid()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if index == HARMFUL:
            self.harm(os.getpid() != self.parent)
        return torch.full((3,), float(index)), index % 2


def trained(dataset, *, workers=0, seen=None, in_loss=lambda: None, **changes):
    """The Run; `seen` gets the numbers of each batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()

    def loss(model, batch):
        in_loss()
        if seen is not None:
            seen.append(sorted(int(value) for value in batch[0][:, 0]))
        return nn.functional.cross_entropy(model(batch[0].double()), batch[1])

    job = hotlap.Job(
        model=model,
        data=DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers),
        loss=loss,
        optimizer=lambda weights: torch.optim.SGD(weights, lr=1e-3),
        epochs=EPOCHS,
        device="cpu",
        **changes,
    )
    return hotlap.fit(job, plan="off", progress=False)
