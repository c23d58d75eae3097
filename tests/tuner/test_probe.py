"""What is known of a training before anything is tried."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap import Rig
from hotlap.core.plan import Feed, Plan
from hotlap.machine.prediction import work_in
from hotlap.monitor.bound import BOUNDS, Diagnosis
from hotlap.monitor.calibration import Calibration
from hotlap.tuner.budget import HOPEFUL_SHARE, SHARE, Budget, Length, allowed
from hotlap.tuner.laps import Lap
from hotlap.tuner.probe import BOUND_TO_PAY, COMPILED, REPLAY_S, CountingProbe, Probe
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


@pytest.mark.parametrize(("busy_s", "is_busy"), [(None, False), (0.007, False), (0.009, True)])
def test_a_device_that_computes_for_most_of_a_step_is_busy(busy_s, is_busy):
    probe = probed("cuda", behind_s=0.001, feed_s=0.001)  # its step takes 10 ms
    probe.busy_s = busy_s
    assert probe.is_busy is is_busy


@pytest.mark.parametrize(
    ("busy_s", "feed_s", "feed_stays", "hope"),
    [
        (0.002, 0.001, False, 5.0),
        (0.002, 0.001, True, 5.0),
        (0.002, 0.008, False, 5.0),
        (0.002, 0.008, True, 1.25),  # no move brings batches faster
        (0.002, 0.009, True, 1.0),
        (0.009, 0.001, False, 1.0),
        (None, 0.001, False, 1.0),
    ],
)
def test_hope_is_what_the_device_computes_and_what_no_move_can_spare(busy_s, feed_s, feed_stays, hope):
    probe = probed("cuda", behind_s=0.001, feed_s=feed_s)
    probe.busy_s = busy_s
    assert probe.hope(0.010, feed_stays=feed_stays) == pytest.approx(hope)


@pytest.mark.parametrize(("feed_s", "hope"), [(None, 1.0), (0.001, 1.0), (0.002, 1.25), (0.0075, 4.0)])
def test_batches_that_are_waited_for_give_hope_for_what_brings_them_at_once(feed_s, hope):
    lap = Lap(step_s=0.010, updates=5, wall_s=0.05, feed_s=feed_s)
    assert Probe(torch.device("cpu")).hope_of_feeding(lap) == pytest.approx(hope)


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


# --- a glance ------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Counts its calls, and drops."""

    def __init__(self):
        super().__init__()
        self.calls, self.layers = 0, nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x):
        self.calls += 1
        return self.layers(x)


@pytest.fixture
def glances_here(monkeypatch):
    monkeypatch.setattr("hotlap.tuner.probe.GLANCED_AT", ("cpu",))


def rig_for(model=None, **loading):
    torch.manual_seed(0)
    rig = Rig(model or Counting(), lambda p: torch.optim.AdamW(p, lr=0.01), nn.CrossEntropyLoss(), device="cpu")
    draw = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(160, 4, generator=draw), torch.randint(3, (160,), generator=draw))
    data = DataLoader(data, batch_size=4, shuffle=True, **loading)
    windows = rig.feed(data, epochs=3)
    rig.keep_plans()
    return rig, windows


@pytest.mark.parametrize("begun", [6, 36, 40])
def test_a_glance_leaves_no_trace_wherever_the_epoch_stands(begun, glances_here):
    def losses(glances):
        rig, windows = rig_for()
        made = [float(rig.advance(next(windows))) for _ in range(begun)]
        if glances:
            held = rig.plan.with_feed(Feed(kind="resident")).but(optimizer="fused")
            before = rig.place, rig.plan, rig.steps
            step_s = CountingProbe(rig).glance(held)
            assert step_s is not None
            assert step_s > 0
            assert (rig.place, rig.plan, rig.steps) == before
        made += [float(rig.advance(next(windows))) for _ in range(60)]
        return made, rig.model.calls

    assert losses(glances=True) == losses(glances=False)


def test_a_look_counts_what_an_update_asks_of_any_gpu_and_leaves_no_trace(monkeypatch):
    rates = Calibration(
        matmul_flops={"fp32": 1e12}, copy_bytes=1e11, cache_bytes=1e6, pinned_bytes=None, pageable_bytes=None,
        launch_s=1e-6, sync_s=0.0,
    )  # fmt: skip
    monkeypatch.setattr("hotlap.tuner.probe.calibration", lambda device, known_only: rates)
    rig, windows = rig_for()
    rig.advance(next(windows))
    before, weights = (rig.place, rig.steps), [weight.clone() for weight in rig.model.parameters()]
    probe = CountingProbe(rig)
    probe.look(Lap(step_s=1.0, updates=5, wall_s=5.0), may_s=0.0)
    assert (rig.place, rig.steps) == before
    assert all(map(torch.equal, weights, rig.model.parameters()))
    assert probe.work is not None
    assert probe.work.total_flops > 0
    assert work_in({"step_s": 1.0, **probe.work.figures}) == probe.work


def test_there_is_none_where_an_epoch_has_too_few_updates(glances_here):
    rig, _ = rig_for()
    assert rig.windows_here == 40
    assert CountingProbe(rig).glance(rig.plan.but(optimizer="fused")) is not None
    short, _ = rig_for()
    short.feed((torch.randn(20, 4), torch.zeros(20, dtype=torch.int64)), batch_size=4, epochs=3)
    assert CountingProbe(short).glance(short.plan.but(optimizer="fused")) is None


def test_of_an_epoch_too_short_for_many_updates_a_replay_one_by_one_are_seen(glances_here):
    rig, _ = rig_for()
    asked = []
    rig.use = lambda plan, use=rig.use: (asked.append(plan.execution.replay_steps), use(plan))[1]
    plan = rig.plan.with_feed(Feed(kind="resident")).but(mode="captured", replay_steps=8)
    CountingProbe(rig).glance(plan)
    assert 1 in asked
    assert 8 not in asked


class Slow(nn.Module):
    """Takes as long as its clock is moved on."""

    def __init__(self, clock, takes_s):
        super().__init__()
        self._clock, self._takes_s = clock, takes_s

    def forward(self, x):
        self._clock[0] += self._takes_s.pop(0) if self._takes_s else 0.0
        return x


@pytest.mark.parametrize(
    ("takes_s", "is_seen"),
    [
        ([0.0], True),
        ([5.0], False),
        ([0.0, 5.0], True),  # by then the kernels are there, and a few updates more show what they give
        ([0.0] + [5.0] * 20, False),  # every update takes that long
    ],
)
def test_a_glance_is_stopped_inside_of_its_first_update_and_gone_on_with_after_it(
    takes_s, is_seen, glances_here, monkeypatch
):
    clock, last = [100.0], Counting()
    monkeypatch.setattr("hotlap.tuner.budget.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    rig, _ = rig_for(model=nn.Sequential(Slow(clock, takes_s), Slow(clock, []), last))
    probe = CountingProbe(rig)
    Probe.look(probe, Lap(step_s=1.0, updates=5, wall_s=5.0), may_s=0.0)
    with allowed(1.0):
        assert (probe.glance(rig.plan.but(optimizer="fused")) is not None) == is_seen
    assert last.calls == 0, "what was made aside leaves no trace"
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_a_plan_that_breaks_is_none_and_lets_go_of_what_was_made_for_it(glances_here, monkeypatch):
    rig, windows = rig_for()
    rig.advance(next(windows))
    held = rig.plan.with_feed(Feed(kind="resident"))
    with monkeypatch.context() as patch:
        patch.setattr(rig, "advance", lambda window: 1 / 0)
        assert CountingProbe(rig).glance(held) is None
    assert rig.plan.feed.kind == "loader"
    assert not rig._cursor._resident
    rig.advance(next(windows))


def test_a_training_that_cannot_be_put_back_is_not_gone_on_with(glances_here, monkeypatch):
    rig, _ = rig_for()
    monkeypatch.setattr(rig, "restore", lambda snapshot: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        CountingProbe(rig).glance(rig.plan.but(optimizer="fused"))


@pytest.mark.parametrize(("feed_s", "looks"), [(0.006, False), (0.0001, True)])
def test_what_workers_have_ready_says_nothing_of_their_pace(feed_s, looks, glances_here):
    rig, windows = rig_for(num_workers=1)
    rig.advance(next(windows))
    probe = CountingProbe(rig)
    Probe.look(probe, Lap(step_s=0.010, updates=5, wall_s=0.05, feed_s=feed_s), may_s=0.0)
    assert (probe.glance(rig.plan.but(optimizer="fused")) is not None) == looks
    assert probe.glance(rig.plan.with_feed(Feed(kind="resident"))) is not None
    rig.close()


def test_what_was_seen_at_a_glance_pays_for_its_trial_whatever_it_took_to_see_it():
    budget = Budget(base_s=0.03, length=lambda: Length(700))
    budget.is_hopeful, budget.spent_s = True, 1.85
    assert budget.left_s < 0
    budget.hoped_s = 8.0
    assert budget.left_s == pytest.approx(0.04 * 21 + 0.25 * 8 - 1.85), "what is only hoped for pays for no more"
    budget.is_seen = True
    assert budget.left_s == pytest.approx(0.25 * 8)
    budget.spent_s = 0.5
    assert budget.left_s == pytest.approx(0.04 * 21 - 0.5 + 0.25 * 8)
    budget.spent_s = 59.0
    assert budget.left_s == pytest.approx(1.0), "and never more than all that may be spent"
    asked = Budget(base_s=0.03, length=lambda: Length(700), most_s=2.0)
    asked.is_seen, asked.hoped_s, asked.spent_s = True, 8.0, 1.5
    assert asked.left_s == pytest.approx(0.5), "unless the user says how much it may be"
