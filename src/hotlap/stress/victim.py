"""The training that is killed: small, with everything in it that a resume could get wrong."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hotlap.core.job import Job

SAMPLES, EPOCHS = 96, 6
BATCH, ACCUMULATE = 6, 2
WINDOWS = SAMPLES // (BATCH * ACCUMULATE)
"""Updates of an epoch."""


class Noisy(Dataset[tuple[Tensor, int]]):
    """Samples with augmentation from every generator there is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        base = torch.linspace(-1, 1, 6) * (index % 7)
        noise = torch.randn(6) + float(np.random.randn()) + random.gauss(0, 0.1)
        return base + 0.1 * noise, index % 3


class Net(nn.Module):
    """Dropout draws, a batch norm counts, and a buffer that no state_dict holds."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 3))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Classes."""
        if self.training:
            self.seen += len(x)
        out: Tensor = self.layers(x)
        return out


def victim_job(workers: int) -> Job:
    """Accumulation, clipping, a schedule per update, evaluation, early stopping with the best weights restored."""
    torch.manual_seed(11)
    model = Net()
    settings: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    data = Noisy()
    return Job(
        model=model,
        data=DataLoader(data, batch_size=BATCH, shuffle=True, **settings),
        valid=DataLoader(data, batch_size=24),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True),
        schedule=lambda o, updates: torch.optim.lr_scheduler.OneCycleLR(o, 0.02, total_steps=updates + 1),
        metrics=["accuracy", "macro_f1"],
        patience=3,
        accumulate=ACCUMULATE,
        clip=0.5,
        epochs=EPOCHS,
        seed=7,
        device="cpu",
    )


TIMES = ("elapsed_s", "train_s", "ledger")
"""What may differ between two runs of the same training."""


def fate_of(run: Path) -> tuple[str, str | None]:
    """Hashes of the result of a finished training.

    The first is of its result: weights, metrics. The second is of its state at the end, as a checkpoint has it:
    weights, optimizer, schedule, randomness, counts; None where none was made there.
    """
    result = hashlib.sha256((run / "model.safetensors").read_bytes())
    for line in (run / "metrics.jsonl").read_text().splitlines():
        result.update(json.dumps(_timeless(json.loads(line)), sort_keys=True).encode())
    last = run / "checkpoints" / f"step-{ended_at(run) or 0:09d}"
    if not last.is_dir():
        return result.hexdigest(), None
    state = hashlib.sha256()
    for name in ("model.safetensors", "training.safetensors"):
        state.update((last / name).read_bytes())
    values = _with_place_counted(_timeless(json.loads((last / "training.json").read_text())))
    state.update(json.dumps(values, sort_keys=True).encode())
    return result.hexdigest(), state.hexdigest()


def _with_place_counted(values: Any) -> Any:
    """The end of an epoch is the beginning of the next; which of them is written depends on when a signal comes."""
    stored = dict(values["$dict"])
    epoch, window, served = stored["place"]["$tuple"]
    return {**stored, "place": [epoch * WINDOWS + window, served]}


def ended_at(run: Path) -> int | None:
    """The step at which a training ended, or None where it has not."""
    file = run / "record.json"
    ended = json.loads(file.read_text())["ended"] if file.is_file() else None
    return int(ended["steps"]) if ended else None


def _timeless(value: Any) -> Any:
    """A stored value without its times, however deep they are."""
    if isinstance(value, list):
        pairs = [p for p in value if not (isinstance(p, list) and len(p) == 2 and p[0] in TIMES)]
        return [_timeless(part) for part in pairs]
    if isinstance(value, dict):
        return {name: _timeless(part) for name, part in value.items() if name not in TIMES}
    return value
