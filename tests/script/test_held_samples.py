"""A whole script whose samples processes fetch: it prints what it prints by itself, and leaves no process behind."""

import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotlap.data.background_fetch import BackgroundFetch
from hotlap.script.feed import held_samples
from hotlap.script.session import Session, Settings

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
ROWS = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))


class Scaled(Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return (ROWS[index] - 0.1) / 0.3, index % 3


@pytest.fixture
def fetches(monkeypatch):
    """Two processes fetch, as beside a GPU; gives those that were started."""
    started, init = [], BackgroundFetch.__init__

    def noted(self, *args, **settings):
        started.append(self)
        init(self, *args, **settings)

    monkeypatch.setattr(BackgroundFetch, "__init__", noted)
    monkeypatch.setattr(held_samples, "processes_for", lambda device, alone_s, busy=0: 2)
    return started


def train(*, workers=0, at=lambda step: None):
    """The losses of three epochs, each with an evaluation."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Scaled(), batch_size=10, shuffle=True, num_workers=workers)
    held_out = DataLoader(Scaled(), batch_size=50)
    seen = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            at(len(seen))
        with torch.no_grad():
            seen += [float((model(x).argmax(1) == y).float().mean()) for x, y in held_out]
    return seen, torch.rand(2).tolist()


def children():
    """Processes that this one has started and that still run."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        if f"PPid:\t{os.getpid()}\n" in text and "State:\tZ" not in text:
            found.append(status.parent.name)
    return found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("plan", ["max", None])
def test_a_script_trains_as_by_itself(plan, workers, fetches, tmp_path):
    alone, before = train(workers=workers), children()
    with Session(Settings(name="test", out=tmp_path / "run", plan=plan, tune_s=5.0)):
        fed = train(workers=workers)
    assert fed == alone
    assert plan is None or fetches
    assert children() == before


def test_a_script_that_is_interrupted_ends_them(fetches, tmp_path, monkeypatch):
    def stop(step):
        if fetches or step > 40:
            raise KeyboardInterrupt

    before = children()
    monkeypatch.setattr(BackgroundFetch, "wait", lambda self: False)
    with pytest.raises(KeyboardInterrupt), Session(Settings(name="test", out=tmp_path / "run", plan="max")):
        train(at=stop)
    assert fetches
    fetches.clear()
    assert children() == before
