"""What may be spent bounds a trial before it begins, and stops it when it is spent."""

import dataclasses
import time

import pytest
import torch
from clocked import HELD_S, OWN_S, Clocked
from plain import Computed, small_mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap import Rig
from hotlap.core.table import rows
from hotlap.data.sources import Source
from hotlap.moves import FUSED, RESIDENT
from hotlap.script.session import Session, Settings
from hotlap.script.tuning import ScriptGate
from hotlap.tuner.budget import SpentError, allowed, check_allowed
from hotlap.tuner.gates import Gate, Judgement
from hotlap.tuner.moment import TrialWindows
from hotlap.tuner.probe import CountingProbe


def spent_s(training):
    return training.tuner._search.budget.spent_s


def why(training):
    return {row.what: (row.outcome, row.why) for row in rows(training.rig.ledger)}


def slow_gate(training, takes_s, parts=100):
    """One that asks between its parts whether it may go on, as all do."""

    def check(plan):
        training.gate.asked.append(plan)
        for _ in range(parts):
            check_allowed()
            training.now += takes_s / parts
        return Judgement(ok=True, why="same maths")

    training.gate.check = check


def test_a_gate_is_stopped_once_all_that_may_be_spent_is(monkeypatch):
    training = Clocked(monkeypatch, updates=10_000)  # 100 s, of which 1.5 s may be spent
    slow_gate(training, 50.0)
    training.train(2000)
    assert training.tuner.done
    assert spent_s(training) == pytest.approx(1.5, abs=0.6)
    assert len(training.gate.asked) == 1
    assert training.rig.plan == training.tuner._search.baseline
    outcome, reason = why(training)["data held on the device"]
    assert outcome == "not tried"
    assert reason == "its gate was stopped after 2 s, all that may be spent"


def test_a_gate_whose_like_took_more_than_is_left_is_not_begun(monkeypatch):
    """Two moves are refused together, and there is no money left to judge each alone."""
    training = Clocked(monkeypatch, updates=10_000)

    def check(plan):
        training.gate.asked.append(plan)
        training.now += 1.0
        return Judgement(ok=False, why="gradients differ")

    training.gate.check = check
    training.train(2000)
    assert training.tuner.done
    assert len(training.gate.asked) == 1
    assert {outcome for outcome, _ in why(training).values()} >= {"not tried"}
    assert spent_s(training) < 1.5


def test_a_lap_is_stopped_once_all_that_may_be_spent_is(monkeypatch):
    """Each update under the plan on trial takes a second: it is never at its pace."""
    training = Clocked(
        monkeypatch,
        updates=10_000,
        pace=lambda plan: 1.0 if plan.feed.kind == "resident" else OWN_S,
        moves=(RESIDENT,),
    )
    training.train(400)
    assert training.tuner.done
    assert spent_s(training) < 1.5 + 1.0
    assert why(training)["data held on the device"] == (
        "rejected",
        "no difference seen before all that may be spent was",
    )


def test_laps_of_what_is_already_faster_go_on(monkeypatch):
    training = Clocked(monkeypatch, updates=1_400, moves=(RESIDENT,), gate_s=0.5)  # 210 ms may be spent
    training.train(1_400)
    assert training.tuner.done
    assert why(training)["data held on the device"][0] == "kept"


def test_what_a_broken_trial_took_is_a_cost_too(monkeypatch):
    training = Clocked(monkeypatch, updates=100_000, moves=(RESIDENT,))
    while training.rig.plan == training.tuner._search.baseline:
        training.train(1)
    training.now += 0.7
    assert training.tuner.failed(RuntimeError("out of memory"))
    assert spent_s(training) == pytest.approx(0.7, abs=0.1)


def test_the_share_of_a_move_that_takes_long_to_set_up_again_is_not_measured(monkeypatch):
    dear = dataclasses.replace(RESIDENT, setup_s=lambda plan, rig: 1.2)
    training = Clocked(
        monkeypatch,
        updates=30_000,  # 300 s, of which 4.5 s may be spent
        moves=(FUSED, dear),
        pace=lambda plan: HELD_S if plan.feed.kind == "resident" else OWN_S,
        gate_s=3.5,
    )
    monkeypatch.setattr("hotlap.tuner.budget.OF_SAVED", 0.0)
    monkeypatch.setattr("hotlap.tuner.budget.OF_COMING", 0.0)
    training.train(3000)
    assert training.rig.plan.feed.kind == "resident"
    assert not any("without_s" in entry.figures for entry in training.rig.ledger if entry.what == dear.name)


# --- the gates and glances that there are --------------------------------------------------------


def rig_for():
    torch.manual_seed(0)
    rig = Rig(small_mlp(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu")
    next(rig.feed(Computed(), batch_size=8, epochs=1000))
    return rig


def test_the_gate_of_a_rig_asks_whether_it_may_go_on_and_leaves_no_trace():
    rig = rig_for()
    before, plan = rig.snapshot(), rig.plan
    weights = [p.detach().clone() for p in rig.model.parameters()]
    with allowed(0.0), pytest.raises(SpentError):
        time.sleep(0.001)
        Gate(rig, plan).check(plan.but(optimizer="fused"))
    assert rig.plan == plan
    assert before is not None
    assert all(torch.equal(a, b) for a, b in zip(weights, rig.model.parameters(), strict=True))
    assert Gate(rig, plan).check(plan.but(optimizer="fused")).ok


def test_time_that_may_be_spent_is_over_inside_only():
    with pytest.raises(SpentError), allowed(-1.0):
        check_allowed()
    check_allowed()
    with allowed(1000.0):
        check_allowed()


def test_bringing_windows_to_be_compared_stops_where_all_is_spent(monkeypatch):
    """Counted where batches are fetched: a dataset that counts by itself would leave a trace, and is not looked at."""
    rig = rig_for()
    brought, real = [], Source.fetch
    monkeypatch.setattr(Source, "fetch", lambda source, *args: brought.append(args) or real(source, *args))
    with pytest.raises(SpentError), allowed(-1.0):
        TrialWindows(rig, rig.plan).bring(range(20))
    assert 1 <= len(brought) <= 2
    check_allowed()
    brought.clear()
    TrialWindows(rig, rig.plan).bring(range(20))
    assert len(brought) == 20


def test_a_glance_stops_where_all_is_spent_and_tells_nothing(monkeypatch):
    monkeypatch.setattr("hotlap.tuner.probe.GLANCED_AT", ("cpu",))
    rig = rig_for()
    rig.keep_plans()
    plan, steps = rig.plan, rig.steps
    with allowed(-1.0):
        assert CountingProbe(rig).glance(plan.but(optimizer="fused")) is None
    assert (rig.plan, rig.steps) == (plan, steps)
    assert CountingProbe(rig).glance(plan.but(optimizer="fused")) is not None


def test_the_gate_of_a_script_stops_where_all_is_spent_and_leaves_no_trace(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8)
    session = Session(Settings(name="test", out=tmp_path / "run"))
    with session:
        for _ in range(2):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().sum().backward()
                optimizer.step()
        training = session._tuning.training
        weights = [p.detach().clone() for p in model.parameters()]
        for changes in ({"precision": "bf16"}, {"kind": "gather"}):
            with pytest.raises(SpentError), allowed(-1.0):
                ScriptGate(training).check(training.plan.but(**changes))
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
        assert ScriptGate(training).check(training.plan.but(kind="gather")).ok
    assert "fault" not in {entry.outcome for entry in training.ledger}
