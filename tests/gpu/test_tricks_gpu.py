"""Tricks of `hotlap run` on a real GPU: all are in use under a captured plan, and what is left out is not."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.core.tricks import (
    EARLY_ITEM,
    GRADIENTS_IN_PLACE,
    ONE_THREAD_BACKWARD,
    REPLAYED_CLIPPING,
    REPLAYED_EVALUATION,
    REPLAYED_LOSS,
    SHORT_STEP,
)
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan

DEVICE = torch.device("cuda")
LOOKED_AT = (
    EARLY_ITEM,
    GRADIENTS_IN_PLACE,
    ONE_THREAD_BACKWARD,
    REPLAYED_CLIPPING,
    REPLAYED_EVALUATION,
    REPLAYED_LOSS,
    SHORT_STEP,
)
"""What an evaluation's feed is worth hangs on the clock: `tests/script/test_tricks.py` looks at it."""
NEEDED_BY = {GRADIENTS_IN_PLACE: [REPLAYED_LOSS]}


def train(session=None, wrap=lambda model: model):
    """The losses, and the tricks that were in use at the end."""
    torch.manual_seed(1)
    model = wrap(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 2)).to(DEVICE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(512, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader, valid = DataLoader(data, batch_size=16, shuffle=True), DataLoader(data, batch_size=32)
    criterion, losses, used = nn.CrossEntropyLoss(), [], set()
    for epoch in range(4):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(DEVICE)), labels.to(DEVICE))
            loss.backward()
            is_shared = len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
            clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            for inputs, _ in valid:
                model(inputs.to(DEVICE))
        model.train()
        if session is not None and epoch == 3:
            training = session._tuning.training
            found = {
                REPLAYED_LOSS: training.loss_replay.made,
                EARLY_ITEM: training.early_loss.answered,
                REPLAYED_CLIPPING: any(kind.recorded for kind in training.updates._clipping._kinds.values()),
                SHORT_STEP: session._shortcuts._ours,
                ONE_THREAD_BACKWARD: not torch._C._is_multithreading_enabled(),
                GRADIENTS_IN_PLACE: is_shared,
                REPLAYED_EVALUATION: training.calls[0]._way._evaluations.recorded,
            }
            used = {name for name, is_used in found.items() if is_used}
    return losses, used


@pytest.mark.parametrize("trick", [None, *LOOKED_AT])
def test_only_what_is_left_out_is_not_used(tmp_path, monkeypatch, trick):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    save_plan(Plan(feed=Feed(kind="loader")).but(mode="captured"), tmp_path / "plan.toml")
    without = [trick] if trick else []
    own, _ = train()
    settings = Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"), without=without)
    with Session(settings) as session:
        made, used = train(session)
    assert used == {*LOOKED_AT} - {*without, *NEEDED_BY.get(trick, ())}
    torch.testing.assert_close(torch.tensor(made), torch.tensor(own), rtol=1e-2, atol=1e-4)


def test_a_model_behind_data_parallel_on_one_gpu_is_captured_with_all_tricks(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    save_plan(Plan(feed=Feed(kind="loader")).but(mode="captured"), tmp_path / "plan.toml")
    wrap = functools.partial(nn.DataParallel, device_ids=[0])
    own, _ = train(wrap=wrap)
    with Session(Settings(name="test", out=tmp_path / "run", plan=str(tmp_path / "plan.toml"))) as session:
        made, used = train(session, wrap)
    assert used == {*LOOKED_AT}
    torch.testing.assert_close(torch.tensor(made), torch.tensor(own), rtol=1e-2, atol=1e-4)
