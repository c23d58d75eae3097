"""Weights of a script that cease to be finite: ledger and report say between which updates, and under which plan."""

import math

import pytest
import torch
from made_up_time import make_up_time
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap.core.plan import Feed, Plan
from hotlap.script import lookout
from hotlap.script.session import Session, Settings
from hotlap.store.files import save_plan
from hotlap.store.run_folder import RunFolder


def train(steps, is_bad):
    torch.manual_seed(1)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(steps * 4, 6)
    for made, (batch, target) in enumerate(DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=4), 1):
        if (bad := is_bad(made)) is None:
            break
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(batch), target) * (math.nan if bad else 1.0)
        loss.backward()
        optimizer.step()


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lookout, "LOOK_S", 0.0)
    save_plan(Plan(feed=Feed(kind="gather")).but(optimizer="fused"), tmp_path / "plan.toml")

    def opened(plan):
        return Session(Settings(name="test", out=tmp_path / "run", plan=plan))

    return opened


def faults(tmp_path):
    return [entry for entry in RunFolder.open(tmp_path / "run").read_ledger() if entry.what == "weights not finite"]


def test_the_update_and_the_plan_are_named(session, tmp_path, capsys):
    with session(str(tmp_path / "plan.toml")):
        train(120, lambda made: made > 80)
    (fault,) = faults(tmp_path)
    assert "not finite after update 81; they were after update 80" in fault.why
    assert "optimizer plain → fused" in fault.why
    assert fault.why in " ".join(capsys.readouterr().err.split())


def test_under_the_scripts_own_plan_that_is_said(session, tmp_path, capsys):
    with session("auto"):
        train(120, lambda made: made > 80)
    assert [entry.why.rpartition("; ")[2] for entry in faults(tmp_path)] == ["in force: your own plan"]


def test_of_finite_weights_nothing_is_said(session, tmp_path, capsys):
    with session(str(tmp_path / "plan.toml")):
        train(120, lambda made: False)
    assert faults(tmp_path) == []
    assert "not finite" not in capsys.readouterr().err


def test_a_plan_on_trial_is_dropped(session, tmp_path, monkeypatch):
    tried = []

    def is_bad(made):
        """Bad from when the tuner tries the first plan that is not the script's own, until that is dropped."""
        tuning = opened._tuning
        if tuning is not None and tuning.training.plan != tuning.training.own and tuning.is_searching:
            tried.append(tuning.training.plan)
        is_dropped = tried and any(entry.what == "weights not finite" for entry in tuning.training.ledger)
        return None if is_dropped else bool(tried)

    with session("auto") as opened, monkeypatch.context() as patch:
        make_up_time(patch)
        train(6000, is_bad)
    ledger = list(RunFolder.open(tmp_path / "run").read_ledger())
    at = next(number for number, entry in enumerate(ledger) if entry.what == "weights not finite")
    assert ledger[at].plan == tried[0]
    assert ledger[at + 1].plan != tried[0]
    assert ledger[at + 1].why == "a plan on trial broke a step"
    assert not any(entry.outcome == "kept" and entry.plan == tried[0] for entry in ledger)
