"""The plain PyTorch loop that the engine is held against, and small models and data for it."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import torch
from torch import nn

from hotlap.data.order import mix


def plain_loop(
    model, optimizer, loss, data, *, batch, epochs, seed=0, clip=None, scheduler=None, precision="fp32", shuffled=True
):
    """What a careful person writes by hand: whole batches, no micro-batches, no plan."""
    *inputs, target = data
    losses = []
    for epoch in range(epochs):
        generator = torch.Generator().manual_seed(mix(seed, epoch))
        order = torch.randperm(len(target), generator=generator) if shuffled else torch.arange(len(target))
        for chosen in order.split(batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext():
                value = loss(model(*(x[chosen] for x in inputs)), target[chosen])
            value.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            losses.append(value.item())
    return losses


def small_mlp(inputs=5, classes=3, hidden=8, dtype=torch.float64, seed=0):
    """In double precision as a rule, so that rounding is far below any mistake."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes)).to(dtype)


def class_data(samples=50, inputs=5, classes=3, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, dtype=dtype, generator=generator)
    return x, torch.randint(classes, (samples,), generator=generator)


def twins(model):
    """Two models with the same weights."""
    return model, copy.deepcopy(model)


def parameters_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


class Computed(torch.utils.data.Dataset):
    """Samples that are computed one by one, with so much effort, and the same each time."""

    def __init__(self, size=256, effort=0):
        self.x, self.y = class_data(size)
        self.effort = effort

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        for _ in range(self.effort):
            self.x[index].sum()
        return self.x[index], int(self.y[index])
