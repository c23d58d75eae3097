"""The tuner in somebody's own loop, its budget, and the plans it replays or knows from before."""

import functools

import pytest
import torch
from made_up_time import make_up_time
from plain import class_data, parameters_of, small_mlp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hotlap
from hotlap import Rig, Tuner
from hotlap.core.ledger import Entry, Ledger
from hotlap.core.plan import Feed
from hotlap.tuner import budget as budgets
from hotlap.tuner.budget import MOST_S, Budget, Length
from hotlap.tuner.known import Found, KnownPlans
from hotlap.tuner.stats import Comparison
from hotlap.tuner.tuner import Replay


def loader(size=128):
    return DataLoader(TensorDataset(*class_data(size)), batch_size=16, shuffle=True)


def rig_for(data=None):
    torch.manual_seed(0)
    rig = Rig(small_mlp(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu")
    return rig, (data or loader())


def test_in_a_loop_of_ones_own_it_finds_a_plan_and_leaves_the_training_the_same(monkeypatch):
    make_up_time(monkeypatch)
    monkeypatch.setattr(budgets, "SHARE", 100.0)
    monkeypatch.setattr("hotlap.tuner.laps.LAP_S", 0.005)
    monkeypatch.setattr("hotlap.tuner.trials.Comparison", functools.partial(Comparison, most_quads=4))
    rig, data = rig_for()
    windows = rig.feed(data, steps=800)
    tuner = Tuner(rig, updates=800)
    for window in windows:
        rig.step(window)
        tuner.stepped(window.updates)
    tuner.ended()
    assert tuner.done
    assert rig.plan == tuner.plan
    assert any(entry.kind == "tuned" for entry in rig.ledger)
    plain, same = rig_for()
    for window in plain.feed(same, steps=800):
        plain.step(window)
    assert rig.steps == plain.steps
    assert rig.totals.mean() == pytest.approx(plain.totals.mean(), rel=0.1, abs=0.02)


def test_a_run_that_ends_early_is_under_a_plan_that_was_settled_on(monkeypatch):
    monkeypatch.setattr(budgets, "SHARE", 100.0)
    rig, data = rig_for()
    own = None
    windows = rig.feed(data, steps=200)
    tuner = Tuner(rig, updates=10_000)
    own = tuner.plan
    for number, window in enumerate(windows):
        rig.step(window)
        tuner.stepped(window.updates)
        if rig.plan != own and number > 30:
            break
    tuner.ended()
    assert rig.plan == tuner.plan == rig.settled


def test_the_budget_grows_with_what_is_saved_and_ends_at_its_limit():
    budget = Budget(base_s=0.01, length=lambda: Length(1000))
    assert budget.left_s == pytest.approx(0.15)
    budget.made(10, 0.2)  # twice as slow as the user's own
    assert budget.spent_s == pytest.approx(0.1)
    assert budget.left_s == pytest.approx(0.05)
    budget.made(400, 2.0)  # twice as fast
    assert budget.saved_s == pytest.approx(2.0)
    assert budget.left_s == pytest.approx(0.15 + 0.5 - 0.1)
    budget.made(100_000, 1.0)
    assert budget.all_s == MOST_S
    assert budget.lost_s(0.001) == pytest.approx(0.2 + 2.0 + 1.0 - 100_410 * 0.001)


def test_a_budget_that_the_user_names_is_the_budget():
    budget = Budget(base_s=0.01, length=lambda: Length(10), most_s=5.0)
    budget.made(100_000, 1.0)
    assert budget.all_s == 5.0


def test_a_replay_puts_every_update_under_the_plan_it_had():
    rig, data = rig_for()
    windows = rig.feed(data, steps=40)
    gathered = rig.plan.with_feed(Feed(kind="gather"))
    ledger = Ledger()
    for step, plan in ((0, rig.plan), (7, gathered), (7, rig.plan.with_feed(Feed(kind="resident"))), (20, rig.plan)):
        ledger.record(Entry(step=step, what="", outcome="chosen", plan=plan))
    replay, seen = Replay(rig, ledger), []
    assert replay.room() == 7
    for window in windows:
        seen.append(rig.plan.feed.kind)
        rig.step(window)
        replay.stepped(window.updates)
    assert seen == ["loader"] * 7 + ["resident"] * 13 + ["loader"] * 20
    plain, same = rig_for()
    for window in plain.feed(same, steps=40):
        plain.step(window)
    assert torch.equal(parameters_of(rig.model), parameters_of(plain.model))


def test_a_plan_is_looked_up_under_the_plan_in_force_when_the_training_was_found(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path))
    rig, data = rig_for()
    rig.feed(data, epochs=1)
    known, found = KnownPlans(rig, batch_size=16), of_no_moves(rig)
    KnownPlans(rig, batch_size=16).remember(found)
    rig.use(rig.plan.with_feed(Feed(kind="resident")))
    assert known.found() == found


def test_a_run_that_is_too_short_to_look_plans_up_does_not_follow_its_data(monkeypatch):
    rig, data = rig_for()
    rig.feed(data, epochs=1)
    monkeypatch.setattr("hotlap.tuner.known.why_not_pure", None)
    tuner = Tuner(rig, updates=1, known=KnownPlans(rig, batch_size=16))
    tuner.stepped()
    tuner.ended()


def test_a_plan_is_known_for_the_same_training_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path))
    rig, data = rig_for()
    rig.feed(data, epochs=1)
    plan = rig.plan.with_feed(Feed(kind="resident"))
    known = KnownPlans(rig, batch_size=16)
    assert known.found() is None
    found = Found(plan=plan, moves=("data held on the device",), gain=3.5, gate_s=0.25, rejected={"TF32": "slower"})
    known.remember(found)
    assert KnownPlans(rig, batch_size=16).found() == found
    known.remember(of_no_moves(rig))
    assert KnownPlans(rig, batch_size=16).found() == of_no_moves(rig)
    assert KnownPlans(rig, batch_size=32).found() is None
    other = Rig(nn.Linear(5, 3).double(), rig_optimizer, nn.CrossEntropyLoss(), device="cpu")
    other.feed(loader(), epochs=1)
    assert KnownPlans(other, batch_size=16).found() is None
    known.forget()
    assert known.found() is None


def test_a_plan_under_which_numbers_are_not_finite_is_not_kept_for_later_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path))
    rig, data = rig_for()
    rig.feed(data, epochs=1)
    known = KnownPlans(rig, batch_size=16)
    known.remember(of_no_moves(rig))
    Tuner(rig, updates=100, known=known).distrust()
    assert known.found() is None


def of_no_moves(rig):
    return Found(plan=rig.plan, moves=(), gain=1.0, gate_s=0.0)


def rig_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_damaged_cache_of_plans_stops_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path))
    rig, data = rig_for()
    rig.feed(data, epochs=1)
    known = KnownPlans(rig, batch_size=16)
    known.remember(of_no_moves(rig))
    for file in tmp_path.rglob("*.json"):
        file.write_text("{}")
    assert known.found() is None
    monkeypatch.setenv("HOTLAP_CACHE", "/proc/nowhere")
    known.remember(of_no_moves(rig))
    known.forget()
    assert known.found() is None


def test_the_public_name_is_the_class():
    assert hotlap.Tuner is Tuner
