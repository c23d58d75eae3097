"""The tuner on a GPU: plans that take turns keep what they recorded, and what is found trains the same."""

import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hotlap import Job, Rig, fit
from hotlap.core.plan import Feed
from hotlap.core.table import rows
from hotlap.engine.rig import Place
from hotlap.tuner import budget
from hotlap.tuner.gates import Gate
from hotlap.tuner.probe import CountingProbe


def data(size=2048, shape=(16,)):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, *shape, generator=generator), torch.randint(3, (size,), generator=generator))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def mlp():
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 3))


def rig_for(model, shape=(16,), batch=32, **optimizer):
    torch.manual_seed(0)
    rig = Rig(model(), lambda p: torch.optim.AdamW(p, lr=1e-3, **optimizer), nn.CrossEntropyLoss(), device="cuda")
    windows = rig.feed(DataLoader(data(shape=shape), batch_size=batch, shuffle=True), epochs=100)
    return rig, windows


def captured(rig, **choices):
    return rig.plan.with_feed(Feed(kind="resident")).but(mode="captured", **choices)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_a_captured_plan_that_comes_back_is_not_recorded_again(optimizer):
    rig, windows = rig_for(mlp, batch=4)  # an epoch that does not end meanwhile: its last window is shorter
    own, fast = rig.plan, captured(rig, optimizer=optimizer, replay_steps=4)
    rig.keep_plans()
    for _ in range(5):
        rig.advance(next(windows))
    seen = []
    for _ in range(4):
        rig.use(fast)
        for _ in range(6):
            rig.advance(next(windows))
        seen.append(rig.warmup_steps)
        rig.use(own)
        for _ in range(3):
            rig.advance(next(windows))
    assert rig.given_up is None
    assert seen[0] == seen[-1]


def test_a_glance_at_a_plan_leaves_no_trace_and_what_it_records_stays():
    def losses(glances):
        rig, windows = rig_for(mlp)  # which drops out: what it draws afterwards is what it would have drawn
        rig.keep_plans()
        made = [float(rig.advance(next(windows))) for _ in range(5)]
        if glances:
            fast, before = captured(rig, optimizer="fused", precision="bf16"), (rig.place, rig.plan)
            step_s = CountingProbe(rig).glance(fast)
            assert step_s is not None
            assert step_s > 0
            assert (rig.place, rig.plan, rig.steps) == (*before, 5)
            with rig.aside():
                rig.use(fast)
                recorded = rig.warmup_steps
                rig.advance(next(rig.windows(room=lambda: 64)))
                assert rig.warmup_steps == recorded > 0
        return made + [float(rig.advance(next(windows))) for _ in range(10)]

    assert losses(glances=True) == losses(glances=False)


def many_small():
    return nn.Sequential(nn.Linear(16, 16), *[layer for _ in range(60) for layer in (nn.Linear(16, 16), nn.Tanh())])


def few_large():
    return nn.Sequential(nn.Linear(16, 8192), *[nn.Linear(8192, 8192) for _ in range(4)], nn.Linear(8192, 3))


@pytest.mark.parametrize(("model", "waits"), [(many_small, True), (few_large, False)])
def test_a_device_that_waits_for_its_host_is_seen_by_what_it_computes(model, waits):
    """Kernels that the host issues ahead run without a gap: what they take is what the device computes."""
    rig, windows = rig_for(model, batch=512)
    taken = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        rig.advance(next(windows))
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    before = [weight.detach().clone() for weight in rig.model.parameters()]
    step_s = sorted(taken)[10]
    busy_s = CountingProbe(rig)._busy_s(step_s)
    assert (busy_s < step_s / 1.5) == waits, (busy_s, step_s)
    assert all(torch.equal(one, other) for one, other in zip(before, rig.model.parameters(), strict=True))


def test_a_glance_at_what_breaks_breaks_nothing():
    rig, windows = rig_for(mlp)
    for _ in range(6):
        rig.advance(next(windows))

    def broken(*parts):
        raise RuntimeError("out of memory, say")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rig, "advance", broken)
        assert CountingProbe(rig).glance(captured(rig)) is None
    assert rig.plan.execution.mode == "eager"
    rig.advance(next(windows))


def test_layouts_that_take_turns_keep_their_captures():
    rig, windows = rig_for(cnn, shape=(3, 8, 8))
    one = captured(rig, optimizer="fused")
    other = one.but(layout="channels_last")
    rig.keep_plans()
    seen = []
    for _ in range(3):
        for plan in (one, other):
            rig.use(plan)
            for _ in range(6):
                rig.advance(next(windows))
            seen.append(rig.warmup_steps)
    assert seen[:2] == seen[-2:]
    rig.release_other_plans()
    for _ in range(6):
        rig.advance(next(windows))
    assert rig.given_up is None


def test_two_captured_plans_at_the_same_place_gather_the_same_samples():
    """The place in the data is shared by all captures: a replay must not trust what it left there itself."""
    rig, windows = rig_for(mlp, fused=True)
    one, other = captured(rig, replay_steps=4), captured(rig, replay_steps=2)
    rig.keep_plans()
    for plan in (one, other, one, other):
        rig.use(plan)
        for _ in range(6):
            rig.advance(next(windows))
    for layer in rig.model:
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    start = rig.snapshot()
    where = Place(rig.place.epoch, 8, rig.place.served)
    made = []
    for turn, plan in enumerate((one, one, one, other, other, other, one, other, one)):
        rig.use(plan)
        rig.restore(start)
        rig.place = where
        for window in rig.windows(steps=where.served + 8):
            loss = rig.advance(window)
        made.append((turn, float(loss)))
    torch.testing.assert_close(torch.tensor([loss for _, loss in made]), torch.full((9,), made[0][1]))


def test_recurrent_layers_with_dropout_pass_the_gate_captured_and_stay_so():
    rig, windows = rig_for(Recurrent, shape=(12, 8))
    for _ in range(10):
        rig.advance(next(windows))
    rig.keep_plans()
    plan = captured(rig, optimizer="fused", replay_steps=8)
    gate = Gate(rig, rig.plan)
    judged = gate.check(plan)
    assert judged.ok, judged.why
    rig.use(plan)
    for _ in range(8):
        rig.advance(next(windows))
    assert rig.given_up is None
    before = rig.warmup_steps
    with rig.aside():
        for _ in range(2):
            rig.advance(next(rig.windows()))
    for _ in range(4):
        rig.advance(next(windows))
    assert rig.given_up is None
    assert rig.warmup_steps - before <= 4


@pytest.mark.parametrize(("model", "shape"), [(mlp, (16,)), (Recurrent, (12, 8)), (cnn, (3, 8, 8))])
def test_fit_finds_a_fast_plan_and_trains_as_before(model, shape, tmp_path, monkeypatch):
    monkeypatch.setattr(budget, "SHARE", 100.0)
    monkeypatch.setattr(budget, "HOPEFUL_SHARE", 100.0)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))

    def job():
        torch.manual_seed(0)
        made = model()
        return Job(
            model=made,
            data=DataLoader(data(shape=shape), batch_size=32, shuffle=True),
            loss=nn.CrossEntropyLoss(),
            optimizer=torch.optim.AdamW(made.parameters(), lr=1e-4),
            steps=4000,
            device="cuda",
        )

    tuned = fit(job(), plan="auto", out=tmp_path / "auto", progress=False)
    own = fit(job(), plan="off", out=tmp_path / "off", progress=False)
    assert tuned.plan.feed.kind == "resident", tuned.summary()
    assert tuned.plan.execution.mode == "captured", tuned.summary()
    assert tuned.steps == own.steps
    assert tuned.samples == own.samples
    assert tuned.history[-1]["train_loss"] == pytest.approx(own.history[-1]["train_loss"], rel=0.1)
    assert {row.outcome for row in rows(tuned.ledger)} >= {"kept"}
    assert not [entry for entry in tuned.ledger if entry.outcome == "fault"]
