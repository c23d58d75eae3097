"""The order of laps is drawn anew in every run, costs follow the pace of the machine, and a tie is no improvement."""

import random

import pytest
import torch
from plain import Computed, class_data, small_mlp
from torch import nn

from hotlap import Job, Rig, fit
from hotlap.tuner.budget import Budget, Length
from hotlap.tuner.laps import Lap
from hotlap.tuner.trials import Trials


def trials_for(base_s=0.01, updates=100_000):
    rig = Rig(small_mlp(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu")
    rig.feed(Computed(), batch_size=8, epochs=1000)
    own = rig.plan
    return (
        Trials(rig, None, Budget(base_s=base_s, length=lambda: Length(updates)), own),
        own,
        own.but(optimizer="fused"),
    )


def compared(trials, own, other, pace, laps):
    """The plans that a comparison asks for, each lap of six updates at the pace of its plan."""
    asked, asks = [], trials.compare(own, other, settled=own)
    wanted = next(asks)
    for _ in range(laps):
        asked.append(wanted)
        step_s = pace(wanted)
        try:
            wanted = asks.send(Lap(step_s=step_s, updates=6, wall_s=6 * step_s))
        except StopIteration:
            break
    return asked


def test_laps_of_a_slower_plan_stop_between_the_laps_of_a_quad_where_all_is_spent():
    trials, own, other = trials_for(updates=1_000)  # 10 s, of which 150 ms may be spent
    asked = compared(trials, own, other, lambda plan: 0.01 if plan == own else 0.06, laps=8)
    assert asked.count(other) == 1


def orders():
    """How the quads of a comparison that never ends begin: with the user's own plan, or with the other."""
    trials, own, other = trials_for()
    noise = random.Random(5)
    asked = compared(trials, own, other, lambda plan: 0.01 * noise.lognormvariate(0, 0.3), laps=64)
    quads = [asked[n : n + 4] for n in range(0, len(asked) - 3, 4)]
    assert all(quad in ([own, other, other, own], [other, own, own, other]) for quad in quads)
    return [quad[0] == own for quad in quads]


def test_a_coin_decides_which_plan_a_quad_of_laps_begins_with(monkeypatch):
    monkeypatch.setattr("hotlap.tuner.trials.Random", lambda: random.Random(1))
    assert set(orders()) == {True, False}


def test_every_run_draws_another_order_of_laps():
    assert len({tuple(orders()) for _ in range(6)}) > 1  # alike by chance once in 2 ** 75


def test_drawing_the_order_of_laps_leaves_the_users_generators_alone():
    random.seed(3)
    before = random.getstate(), torch.get_rng_state()
    trials, own, other = trials_for()
    after_model = torch.get_rng_state()
    compared(trials, own, other, lambda plan: 0.01, laps=8)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), after_model)


def test_the_budget_follows_the_pace_of_the_users_own_plan():
    """The machine has become three times slower since that was first measured."""
    trials, own, other = trials_for(base_s=0.01)
    compared(trials, own, other, lambda plan: 0.03, laps=8)
    assert trials.budget.base_s == pytest.approx(0.03)
    assert trials.budget.all_s == pytest.approx(0.015 * 0.03 * 100_000)


def test_laps_of_the_users_own_plan_cost_nothing_however_slow_the_machine_is():
    trials, own, other = trials_for(base_s=0.01)
    compared(trials, own, other, lambda plan: 0.03 if plan == own else 0.01, laps=8)
    assert trials.budget.spent_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("higher", [True, False])
def test_a_score_as_good_as_the_best_is_no_improvement(higher, tmp_path):
    """The score stays the same for ever: patience ends after the first evaluation and two more."""
    torch.manual_seed(0)
    model = small_mlp()
    job = Job(
        model=model,
        data=class_data(64),
        loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        batch_size=16,
        steps=100,
        eval_every=5,
        valid=class_data(16),
        metrics=["accuracy"],
        monitor="accuracy" if higher else "loss",
        patience=2,
        device="cpu",
    )
    run = fit(job, plan="off", out=tmp_path / "run", progress=False)
    assert run.steps == 15
    assert run.best["step"] == 5
