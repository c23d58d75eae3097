"""What is known of a training before anything is tried."""

import pytest
import torch

from hotlap.core.plan import Feed, Plan
from hotlap.monitor.bound import BOUNDS, Diagnosis
from hotlap.tuner.budget import HOPEFUL_SHARE, SHARE, Budget, Length
from hotlap.tuner.laps import Lap
from hotlap.tuner.probe import BOUND_TO_PAY, COMPILED, REPLAY_S, Probe
from hotlap.tuner.stats import LEAST_GAIN


def probed(kind, **lap):
    probe = Probe(torch.device(kind))
    probe.look(Lap(step_s=0.010, updates=5, wall_s=0.05, **lap), may_s=1.0)
    return probe


@pytest.mark.parametrize(
    ("lap", "bound", "is_hopeful"),
    [
        ({"behind_s": 0.001, "feed_s": 0.001}, "launching", True),
        ({"behind_s": 0.001, "feed_s": 0.007}, "feeding", True),
        ({"behind_s": 0.009, "feed_s": 0.001}, "arithmetic", False),
        ({"behind_s": 0.080, "feed_s": 0.001}, "arithmetic", False),  # the device is steps behind
        ({"behind_s": 0.009, "feed_s": 0.007}, "feeding", False),
        ({}, "arithmetic", False),  # nobody looked
    ],
)
def test_a_gpu_that_waits_for_its_host_gives_hope(lap, bound, is_hopeful):
    probe = probed("cuda", **lap)
    assert (probe.bound, probe.is_hopeful) == (bound, is_hopeful)


def test_a_cpu_gives_none():
    assert not probed("cpu", behind_s=0.0, feed_s=0.009).is_hopeful


@pytest.mark.parametrize(("step_s", "may_pay"), [(150e-6, False), (50e-6, True)])
def test_longer_replays_spare_only_the_replays_between(step_s, may_pay):
    plan = Plan().with_feed(Feed(kind="resident")).but(mode="captured", replay_steps=8)
    lap = Lap(step_s=step_s, updates=5, wall_s=0.05)
    most, why = Probe(torch.device("cuda")).most_gain(plan, plan.but(replay_steps=32), lap)
    assert (most >= LEAST_GAIN) == may_pay
    assert most == pytest.approx(1 / (1 - REPLAY_S * (1 / 8 - 1 / 32) / step_s))
    assert "fewer replays" in why


def diagnosed(**floor_s):
    """A probe of a training whose own step takes 10 ms."""
    probe = Probe(torch.device("cuda"))
    shares = dict.fromkeys(BOUNDS, 0.1)
    probe._diagnosis = Diagnosis(
        bound="launching", shares=shares, floor_s=floor_s, step_s=0.01, operations=500, waits=0
    )
    return probe


@pytest.mark.parametrize(
    ("floors", "is_bound"),
    [
        ({"fp32": 0.004, "bf16": 0.0004}, True),
        ({"fp32": 0.01 * BOUND_TO_PAY, "bf16": 0.0001}, False),
        ({"fp32": 0.004, "bf16": 0.004}, False),
        ({"fp32": 0.004}, False),  # no rate is known for it
        ({"fp32": 0.0, "bf16": 0.0}, False),
    ],
)
def test_a_precision_is_bound_to_pay_where_it_spares_much_arithmetic(floors, is_bound):
    assert diagnosed(**floors).is_bound_to_pay(Plan(), Plan().but(precision="bf16")) == is_bound
    assert not Probe(torch.device("cuda")).is_bound_to_pay(Plan(), Plan().but(precision="bf16"))


@pytest.mark.parametrize("floors", [{}, {"fp32": 0.0001, "bf16": 0.0001}])
def test_compiling_a_recorded_step_is_not_hoped_to_work_wonders(floors):
    plan, lap = Plan().but(precision="bf16"), Lap(step_s=0.005, updates=5, wall_s=0.05)
    recorded = plan.with_feed(Feed(kind="resident")).but(mode="captured")
    most, _ = diagnosed(**floors).most_gain(recorded, recorded.but(compile="blocks"), lap)
    assert most == COMPILED
    most, _ = diagnosed(**floors).most_gain(plan, plan.but(compile="blocks"), lap)
    assert most > COMPILED


def test_hope_lets_tuning_cost_more_but_not_more_than_the_user_says():
    budget = Budget(base_s=0.01, length=lambda: Length(10_000))
    assert budget.all_s == pytest.approx(100 * SHARE)
    budget.is_hopeful = True
    assert budget.all_s == pytest.approx(100 * HOPEFUL_SHARE)
    told = Budget(base_s=0.01, length=lambda: Length(10_000), most_s=0.5)
    told.is_hopeful = True
    assert told.all_s == 0.5
