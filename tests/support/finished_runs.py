"""Small real runs of each kind, for the tests of reports."""

import numpy as np
import torch
from recipe_data import TINY, bars_file, texts_file
from torch import nn

import hotlap
from hotlap import trees


def small_job(seed=0, epochs=8, **more):
    """A training that takes less than a second."""
    torch.manual_seed(0)
    x = torch.randn(400, 8)
    y = (x[:, :2].sum(1) > 0).long()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    settings = {"batch_size": 20, "epochs": epochs, "metrics": ["accuracy"], "loss": nn.CrossEntropyLoss()} | more
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.pop("lr", 1e-2))
    return hotlap.Job(model=model, data=(x[:320], y[:320]), valid=(x[320:], y[320:]), optimizer=optimizer, **settings)


def fitted(folder, **more):
    """A run of `fit`."""
    return hotlap.fit(small_job(**more), plan="off", out=folder, progress=False)


def grown(folder):
    """A run of trees."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(400, 6))
    y = x[:, :2].sum(1)[:, None] + 0.3 * draw.normal(size=(400, 2))
    job = trees.TreeJob(x[:300], y[:300], valid=(x[300:], y[300:]), rounds=12)
    return trees.fit(job, plan="off", out=folder, progress=False)


def searched(folder):
    """A search."""
    return hotlap.search(
        {"lr": (1e-4, 1e-1, "log"), "name of a value": ["a", "b"]},
        lambda values: small_job(epochs=2, lr=values["lr"]),
        trials=5,
        plan="off",
        out=folder,
        progress=False,
    )


def classified(folder, data):
    """A run of the recipe `temporal`."""
    return hotlap.train(
        "temporal", bars_file(data), models=["mlp"], epochs=2, folds=2, plan="off", out=folder, progress=False
    )


def read_texts(folder, data, **more):
    """A run of the recipe `text`."""
    config = data.with_name("tiny.json")
    config.write_text(__import__("json").dumps(TINY))
    return hotlap.train(
        "text", texts_file(data), weights="scratch", config=str(config), epochs=1, plan="off", out=folder,
        progress=False, **more,
    )  # fmt: skip


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(640, 8)
y = (x.sum(1) > 0).long()
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=32)
model, loss = nn.Linear(8, 2), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for a, b in loader:
        optimizer.zero_grad()
        loss(model(a), b).backward()
        optimizer.step()
"""


LEDGER = [
    {"step": 0, "what": "start", "outcome": "chosen"},
    {"step": 40, "what": "baseline", "outcome": "chosen", "figures": {"step_s": 0.04}, "why": "bound by launching"},
    {
        "step": 80,
        "what": "fused optimizer",
        "outcome": "kept",
        "why": "same maths",
        "figures": {"step_s": 0.02, "ratio": 2.0, "low": 1.9, "high": 2.1, "noise": 0.02},
        "cost_s": 0.5,
    },
    {
        "step": 90,
        "what": "16-bit precision",
        "outcome": "rejected",
        "why": "slower",
        "figures": {"step_s": 0.03, "ratio": 0.67, "low": 0.6, "high": 0.7},
    },
    {"step": 90, "what": "workers that fetch ahead", "outcome": "not tried", "why": "too dear"},
    {"step": 90, "what": "whole step captured", "outcome": "not tried", "why": "needs a GPU", "unfit": True},
    {
        "step": 90,
        "what": "tuned",
        "outcome": "chosen",
        "figures": {"step_s": 0.02, "ratio": 2.0, "low": 1.9, "high": 2.1, "cost_s": 0.001, "saved_s": 4.0},
    },
]
"""A tuning that kept one move, rejected one, and did not try two."""


def tuned(folder, entries=LEDGER, **more):
    """A real run of `fit` with the ledger of a tuning: what a tuner finds depends on the clock."""
    run = fitted(folder, **more)
    plan, ledger = hotlap.Plan(), hotlap.Ledger()
    from hotlap.core.ledger import Entry

    for entry in entries:
        ledger.record(Entry(plan=plan, **entry))
    run.files.write_ledger(ledger)
    return run
