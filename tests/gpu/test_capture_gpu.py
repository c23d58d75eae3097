"""Captured steps on a real GPU: the numbers of eager ones, for every feed, precision, schedule and optimizer."""

import itertools
import random

import numpy as np
import pytest
import torch
from plain import class_data, parameters_of, small_mlp, twins
from torch import nn
from waiting import no_waiting

from hotlap import Job, Plan, Rig, fit
from hotlap.data.dataset import training_dataset
from hotlap.engine.assists.rewiring import without_waiting
from hotlap.engine.capture.captured_step import CapturedStep
from hotlap.engine.capture.recording import (
    _smallest_dropping,
    dropout_state_of,
    dropout_state_to_hold,
)
from hotlap.engine.snapshot import Randomness, generator_of
from hotlap.guard.saving import export_state, import_state

DEVICE = "cuda"
EAGER = Plan()
CAPTURED = Plan().but(kind="resident", mode="captured", optimizer="fused")
FEEDS = [
    {"kind": "gather"},
    {"kind": "stream"},
    {"kind": "resident"},
    {"kind": "loader", "workers": 1, "pinned": True, "persistent": True},
]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def net(dropout=0.0, dtype=torch.float32):
    """No bias before the batch norm: its gradient is rounding alone, which Adam blows up."""
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(5, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3)
    ).to(dtype)


def trained(
    plan,
    *,
    model=None,
    optimizer=adamw,
    loss=None,
    samples=90,
    batch=8,
    epochs=4,
    between=None,
    dtype=torch.float32,
    data=None,
    **settings,
):
    """Losses of all steps, the weights, and the rig; `between(rig)` is called after every step."""
    feed = {name: settings.pop(name) for name in ("accumulate",) if name in settings}
    torch.manual_seed(7)
    rig = Rig(model or net(dtype=dtype), optimizer, loss or nn.CrossEntropyLoss(), plan=plan, device=DEVICE, **settings)
    losses = []
    for window in rig.feed(data or class_data(samples, dtype=dtype), batch_size=batch, epochs=epochs, **feed):
        losses.append(rig.step(window))
        if between is not None:
            between(rig)
    rig.was_recorded = recorded(rig)
    rig.close()
    return torch.stack([loss.double() for loss in losses]), parameters_of(rig.model).clone(), rig


def assert_same(mine, theirs, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(mine[0], theirs[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(mine[1], theirs[1], rtol=rtol, atol=atol)


def recorded(rig):
    """How many shapes the rig's captured step holds, or held before it was closed; and why it gave up, if it did."""
    if hasattr(rig, "was_recorded"):
        return rig.was_recorded
    steps = [step for step in rig._steps.values() if isinstance(step, CapturedStep)]
    return sum(step.recorded for step in steps), next((s.given_up for s in steps if s.given_up), None)


@pytest.mark.parametrize(
    ("feed", "precision", "optimizer"),
    list(itertools.product(FEEDS, ["fp32", "tf32", "bf16", "fp16"], ["plain", "fused"])),
)
def test_a_captured_step_gives_the_numbers_of_the_eager_one(feed, precision, optimizer):
    plan = Plan().but(precision=precision, optimizer=optimizer)
    theirs = trained(plan, clip=1.0)
    mine = trained(plan.but(**feed, mode="captured"), clip=1.0)
    assert recorded(mine[2])[0] >= 2, mine[2].ledger.to_lines()  # whole batches, and the last, shorter one
    loose = {"fp32": 1e-5, "tf32": 1e-4}.get(precision, 5e-3)
    if optimizer == "plain":  # recorded, it keeps counts and rates in fp32, and multiplies in another order
        loose *= 20
    assert_same(mine, theirs, rtol=loose, atol=loose / 10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("steps", [2, 5])
def test_several_steps_a_replay_give_the_numbers_of_single_ones(precision, steps):
    theirs = trained(EAGER.but(precision=precision, optimizer="fused"))
    mine = trained(CAPTURED.but(precision=precision, replay_steps=steps))
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-5, atol=1e-6)
    assert mine[2].steps == theirs[2].steps
    assert mine[2].samples == theirs[2].samples
    assert mine[2].totals.mean() == pytest.approx(theirs[2].totals.mean(), rel=1e-5)


def test_dropout_draws_what_it_would_have_drawn_eagerly():
    theirs = trained(EAGER.but(optimizer="fused"), model=net(0.5))
    mine = trained(CAPTURED, model=net(0.5))
    assert recorded(mine[2])[0] >= 1
    assert_same(mine, theirs)


@pytest.mark.parametrize("steps", [1, 4])
def test_batch_norms_count_every_batch_also_where_one_is_used_twice_and_one_is_frozen(steps):
    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
            self.twice, self.frozen, self.unused = nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
            self.frozen.eval()

        def forward(self, x):
            return self.last(self.frozen(self.twice(self.twice(self.first(x)))))

    theirs = trained(EAGER.but(optimizer="fused"), model=Norms())[2].model
    mine = trained(CAPTURED.but(replay_steps=steps), model=Norms())[2].model
    for name, buffer in theirs.named_buffers():
        torch.testing.assert_close(mine.get_buffer(name), buffer, rtol=1e-3, atol=1e-4)
    assert mine.twice.num_batches_tracked > 0
    assert mine.unused.num_batches_tracked == 0


def losses_of_one_batch(model, shape, plan, steps):
    """With a learning rate of 0, so that only randomness makes one step's loss differ from another's."""
    torch.manual_seed(3)
    x, y = torch.randn(64, *shape), torch.randint(3, (64,))
    rig = Rig(model, lambda p: torch.optim.SGD(p, lr=0.0), nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
    found = torch.stack([rig.step((x.to(DEVICE), y.to(DEVICE))) for _ in range(steps)]).double()
    return found, rig


class Lstm(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(2)
        self.lstm = nn.LSTM(6, 32, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("kind", ["dropout", "cudnn lstm"])
def test_masks_differ_from_replay_to_replay_and_have_the_right_rate(kind):
    make, shape = (lambda: Lstm(0.5), (7, 6)) if kind == "cudnn lstm" else (lambda: net(0.5), (5,))
    captured = Plan().but(mode="captured", optimizer="fused")
    mine, rig = losses_of_one_batch(make(), shape, captured, 300)
    theirs, _ = losses_of_one_batch(make(), shape, Plan(), 300)
    assert recorded(rig)[0] == 1, rig.ledger.to_lines()
    assert len(mine.unique()) > 290
    # The spread of the mean over 300 draws is a seventeenth of that of one.
    assert abs(mine.mean() - theirs.mean()) < 5 * theirs.std() / 300**0.5
    assert 0.7 < mine.std() / theirs.std() < 1.4


class DrawingLstm(Lstm):
    """One that draws in evaluation, too."""

    def forward(self, x):
        return super().forward(x if self.training else x + torch.randn_like(x))


@pytest.mark.parametrize("make", [Lstm, DrawingLstm])
def test_an_evaluation_leaves_recorded_masks_of_recurrent_layers_where_they_are(make):
    torch.manual_seed(3)
    x, y = torch.randn(64, 7, 6), torch.randint(3, (64,))
    plan = Plan().but(mode="captured", optimizer="fused")
    rig = Rig(make(0.5), lambda p: torch.optim.SGD(p, lr=0.0), nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
    for samples in (64, 48, 32):  # of a new shape the first updates are made operation by operation
        batch = (x[:samples].to(DEVICE), y[:samples].to(DEVICE))
        assert len(torch.stack([rig.step(batch).clone() for _ in range(40)]).unique()) > 35
        rig.evaluate((x, y), batch_size=16)
    assert recorded(rig)[0] == 3, rig.ledger.to_lines()
    assert rig.given_up is None


def offset():
    return generator_of(torch.device(DEVICE)).get_offset()


def made_again():
    """Whether cuDNN makes the state of its dropout again for the next recurrent layer; then torch draws for it."""
    layer, place = nn.LSTM(6, 32, num_layers=2, dropout=0.5).to(DEVICE), offset()
    layer(torch.randn(3, 2, 6).to(DEVICE))
    return offset() != place


def test_recorded_masks_stay_where_they_are_whatever_sets_the_generator():
    torch.manual_seed(3)
    x, y = torch.randn(64, 7, 6).to(DEVICE), torch.randint(3, (64,)).to(DEVICE)
    plan = Plan().but(mode="captured", optimizer="fused")
    rig = Rig(Lstm(0.5), lambda p: torch.optim.SGD(p, lr=0.0), nn.CrossEntropyLoss(), plan=plan, device=DEVICE)

    def losses(samples=64):
        return torch.stack([rig.step((x[:samples], y[:samples])).clone() for _ in range(40)])

    assert len(losses().unique()) > 35
    for samples in (64, 48):
        torch.manual_seed(4)
        assert made_again()
        torch.cuda.empty_cache()  # what replays read would not be there any more
        taken = [torch.zeros(2**21, device=DEVICE) for _ in range(20)]
        found = losses(samples)
        assert len(found.unique()) > 35
        assert found.isfinite().all()
        assert not any(tensor.any() for tensor in taken), "a replay has written to memory of others"
    assert recorded(rig)[0] == 2, rig.ledger.to_lines()
    assert rig.given_up is None


def test_a_recording_holds_the_state_of_dropout_that_cudnn_uses():
    layer, held = nn.LSTM(6, 32, num_layers=2, dropout=0.5).to(DEVICE), []
    for seed in (4, 5):
        torch.manual_seed(seed)
        used = dropout_state_of(layer(torch.randn(3, 2, 6, device=DEVICE))[0])
        place = offset()
        _smallest_dropping.cache_clear()
        held.append(dropout_state_to_hold([layer], torch.device(DEVICE)))
        assert held[-1].data_ptr() == used.data_ptr()
        assert held[-1].nbytes > 2**20
        assert offset() == place
    assert held[0].data_ptr() != held[1].data_ptr()


def test_to_restore_the_generator_does_not_begin_the_masks_of_recurrent_layers_anew():
    torch.manual_seed(3)
    made_again()
    assert not made_again()
    randomness = Randomness(torch.device(DEVICE))
    place, drawn = offset(), torch.rand(9, device=DEVICE)
    randomness.restore()
    assert offset() == place
    assert not made_again()
    torch.testing.assert_close(torch.rand(9, device=DEVICE), drawn, rtol=0, atol=0)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": adamw,
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def change_everything(rig):
    """Hyperparameters as a user changes them in the middle of a run."""
    group = rig.optimizer.param_groups[0]
    if rig.steps == 12:
        group["lr"] *= 0.3
    if rig.steps == 24 and "weight_decay" in group:
        group["weight_decay"] = 0.05
    if rig.steps == 30 and group.get("momentum"):
        group["momentum"] = 0.5
    if rig.steps == 30 and "betas" in group:
        group["betas"] = (0.8, 0.95)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", ["plain", "fused"])
def test_hyperparameters_changed_in_the_middle_take_effect_for_every_optimizer(name, kind):
    plan = Plan().but(kind="resident", optimizer=kind)
    rig = Rig(net(), OPTIMIZERS[name], nn.CrossEntropyLoss(), device=DEVICE)
    if rig.supports(plan):
        assert "fused" in rig.supports(plan)
        return
    settings = {"optimizer": OPTIMIZERS[name], "between": change_everything, "dtype": torch.float64}
    theirs = trained(EAGER, **settings)
    mine = trained(plan.but(mode="captured"), **settings)
    assert recorded(mine[2])[0] >= 1, mine[2].ledger.to_lines()
    # Recorded steps keep rates and counts in fp32.
    assert_same(mine, theirs, rtol=1e-3, atol=1e-5)


SCHEDULES = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 40),
    "exponential": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.95),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=60),
    "warm-up, then linear": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=10),
            torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=30),
        ],
        [10],
    ),
}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_move_with_every_update_of_a_replay(name, steps):
    theirs = trained(EAGER.but(optimizer="fused"), schedule=SCHEDULES[name])
    mine = trained(CAPTURED.but(replay_steps=steps), schedule=SCHEDULES[name])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-6)
    assert mine[2].optimizer.param_groups[0]["lr"] == theirs[2].optimizer.param_groups[0]["lr"]


def test_schedules_by_epoch_and_by_plateau_act_between_replays():
    by_epoch = {"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), "schedule_per": "epoch"}
    assert_same(trained(CAPTURED, **by_epoch), trained(EAGER.but(optimizer="fused"), **by_epoch))

    def watch(rig):
        if rig.steps % 10 == 0:
            rig.schedule.evaluated(1.0)

    plateau = {"schedule": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0), "between": watch}
    assert_same(trained(CAPTURED, **plateau), trained(EAGER.but(optimizer="fused"), **plateau))


def counted(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


@pytest.mark.parametrize("loss", [None, counted])
def test_accumulation_in_micro_batches_is_captured_too(loss):
    settings = {"model": nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)), "loss": loss, "clip": 0.5}
    mine_model, theirs_model = twins(settings.pop("model").double())
    settings |= {"accumulate": 3, "dtype": torch.float64}
    theirs = trained(EAGER, model=theirs_model, **settings)
    mine = trained(CAPTURED.but(micro_batch=5), model=mine_model, **settings)
    assert recorded(mine[2])[0] >= 1, mine[2].ledger.to_lines()
    assert_same(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_accumulation_in_micro_batches_and_fp16_is_that_of_whole_batches(mode):
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    mine_model, theirs_model = twins(model)
    theirs = trained(EAGER.but(precision="fp16", optimizer="fused"), model=theirs_model, batch=24, clip=0.5)
    plan = Plan().but(kind="resident", precision="fp16", optimizer="fused", micro_batch=5, mode=mode)
    mine = trained(plan, model=mine_model, batch=8, accumulate=3, clip=0.5)
    assert mine[2].steps == theirs[2].steps
    assert mine[2].skipped == theirs[2].skipped
    assert_same(mine, theirs, rtol=2e-2, atol=2e-3)


def resident_weights(weights):
    """A loss that is a function of the user's own, with weights on the device."""
    there = weights.to(DEVICE)

    def loss(model, batch):
        x, y = batch
        return nn.functional.cross_entropy(model(x), y, weight=there, label_smoothing=0.1)

    return loss


@pytest.mark.parametrize("given", ["layer", "layer that ignores", "function"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_of_classes_and_smoothed_labels_are_captured_where_torchs_own_loss_waits(given, precision):
    weights = torch.tensor([0.2, 1.0, 3.0])
    layers = {
        "layer": nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1),
        "layer that ignores": nn.CrossEntropyLoss(weight=weights, label_smoothing=0.1, ignore_index=1),
    }
    loss = layers.get(given, resident_weights(weights))
    # In 16 bits what differs by rounding in 32 may be rounded the other way, so that only the same loss gives the same.
    eager = trained if precision == "fp32" else without_waiting(trained)
    theirs = eager(EAGER.but(optimizer="fused", precision=precision), loss=loss)
    mine = trained(CAPTURED.but(precision=precision), loss=loss)
    assert recorded(mine[2])[0] >= 2, recorded(mine[2])
    assert recorded(mine[2])[1] is None
    assert_same(mine, theirs)


def test_a_change_of_mode_layer_flag_or_rate_makes_a_capture_void():
    def meddle(rig):
        model = rig.model
        if rig.steps == 12:
            model[1].eval()
        if rig.steps == 18:
            model[0].weight.requires_grad_(False)
        if rig.steps == 24:
            model[3].p = 0.7
        if rig.steps == 30:
            model[2] = nn.Tanh()
        if rig.steps == 36:
            model[1].train()
            model[0].weight.requires_grad_(True)

    theirs = trained(EAGER.but(optimizer="fused"), model=net(0.2), between=meddle)
    mine = trained(CAPTURED, model=net(0.2), between=meddle)
    assert_same(mine, theirs)


def test_kept_losses_and_gradients_are_those_of_their_step():
    grads = {}

    def keep(name):
        def note(rig):
            grads.setdefault(name, []).append([p.grad.clone() for p in rig.model.parameters()])

        return note

    theirs = trained(EAGER.but(optimizer="fused"), between=keep("eager"))
    mine = trained(CAPTURED, between=keep("captured"))
    assert_same(mine, theirs)
    for one, other in zip(grads["captured"], grads["eager"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x)


class ReadsAValue(Reads):
    def forward(self, x):
        if x.mean().item() > 0:
            x = x * 2
        return self.layer(x)


class DrawsInPython(Reads):
    def forward(self, x):
        return self.layer(x * random.uniform(0.5, 1.5))


class DrawsInNumpy(Reads):
    def forward(self, x):
        return self.layer(x * float(np.random.rand()))


class Counts(Reads):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x * (1.0 if self.calls > 10 else 0.5))


class Remembers(Reads):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        y = self.layer(x)
        out = y if self.last is None else y + 0.1 * self.last
        self.last = y.detach().mean()
        return out


class Selects(Reads):
    def forward(self, x):
        kept = x[:, 0] > -100
        return self.layer(x[kept])


UNFIT = {
    ReadsAValue: "test_capture_gpu.py:",
    DrawsInPython: "DrawsInPython draws from the host's randomness",
    DrawsInNumpy: "DrawsInNumpy draws from the host's randomness",
    Counts: "'calls'",
    Remembers: "'last'",
    Selects: "test_capture_gpu.py:",
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_model_that_cannot_be_captured_runs_eagerly_and_the_ledger_says_why(kind):
    def run(plan):
        random.seed(5)
        np.random.seed(5)
        return trained(plan, model=kind())

    theirs, mine = run(EAGER.but(optimizer="fused")), run(CAPTURED)
    held, reason = recorded(mine[2])
    assert held == 0
    assert UNFIT[kind] in reason
    assert any(UNFIT[kind] in entry.why for entry in mine[2].ledger)
    assert_same(mine, theirs)


class BreaksWhenRecorded(Reads):
    def forward(self, x):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return nn.functional.dropout(self.layer(x), 0.5)


def test_a_recording_that_fails_leaves_the_training_as_it_was():
    theirs = trained(EAGER.but(optimizer="fused"), model=BreaksWhenRecorded())
    mine = trained(CAPTURED, model=BreaksWhenRecorded())
    assert "cannot be recorded" in recorded(mine[2])[1]
    assert_same(mine, theirs)
    torch.cuda.get_rng_state()
    assert torch.rand(2, device=DEVICE).sum() >= 0


SCALE = 1.0


class ReadsGlobal(nn.Linear):
    def forward(self, x):
        return super().forward(x) * SCALE


def test_a_number_that_a_layer_reads_as_a_global_takes_effect_when_it_changes(monkeypatch):
    found = []
    for plan in (EAGER, CAPTURED.but(kind="gather")):
        torch.manual_seed(3)
        x, y = torch.randn(32, 5, device=DEVICE), torch.randint(3, (32,), device=DEVICE)
        monkeypatch.setitem(globals(), "SCALE", 1.0)
        rig = Rig(ReadsGlobal(5, 3), adamw, nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
        losses = []
        for number in range(16):
            if number == 8:
                monkeypatch.setitem(globals(), "SCALE", 0.25)
            losses.append(rig.step((x, y)).clone())
        found.append(torch.stack(losses).double())
        assert rig.given_up is None
    assert recorded(rig)[0] == 1
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_a_step_recorded_within_the_users_autocast_reads_the_weights_of_now():
    torch.manual_seed(3)
    x, y = torch.randn(32, 5, device=DEVICE), torch.randint(3, (32,), device=DEVICE)
    plan = Plan().but(mode="captured", optimizer="fused")
    rig = Rig(net(), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        for _ in range(8):
            rig.step((x, y))
        assert recorded(rig)[0] == 1, rig.ledger.to_lines()
        torch.clear_autocast_cache()
        torch.cuda.empty_cache()
        taken = [torch.full((2**20,), float("nan"), device=DEVICE) for _ in range(20)]
        losses = torch.stack([rig.step((x, y)).clone() for _ in range(40)])
    assert losses.isfinite().all()
    assert losses[-1] < losses[0]
    del taken


class Blows(nn.Module):
    """Gradients that are not finite wherever a sample's first number is large."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) * torch.where(x[:, :1] > 1.8, float("inf"), 1.0)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_skipped_updates_move_neither_weights_nor_schedule(precision, optimizer):
    settings = {"skip_nonfinite": True, "schedule": SCHEDULES["exponential"]}
    theirs = trained(EAGER.but(precision=precision), model=Blows(), **settings)
    mine = trained(CAPTURED.but(precision=precision, optimizer=optimizer), model=Blows(), **settings)
    assert theirs[2].skipped > 0
    assert mine[2].skipped == theirs[2].skipped
    mine[2].settle()
    assert mine[2].optimizer.param_groups[0]["lr"] == pytest.approx(theirs[2].optimizer.param_groups[0]["lr"])
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-5)
    assert mine[2].totals.mean() == pytest.approx(theirs[2].totals.mean(), rel=1e-3)


class Own(torch.optim.Optimizer):
    """An optimizer that nobody knows, with its state in Python."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p -= group["lr"] / state["n"] ** 0.5 * p.grad


def test_an_unknown_optimizer_keeps_working_and_the_rest_is_captured():
    mine = trained(CAPTURED.but(optimizer="plain"), optimizer=Own)
    assert recorded(mine[2])[0] >= 1
    assert any("outside the capture" in entry.why for entry in mine[2].ledger)
    assert_same(mine, trained(EAGER, optimizer=Own))


def test_plans_switched_in_the_middle_of_an_epoch_change_nothing_beyond_rounding():
    plans = [
        CAPTURED,
        CAPTURED.but(replay_steps=3),
        Plan().but(kind="stream", mode="captured"),
        Plan().but(kind="loader", workers=1, pinned=True, persistent=True, mode="captured"),
        EAGER,
        CAPTURED.but(micro_batch=3),
        Plan().but(optimizer="fused"),
        CAPTURED,
    ]

    def switch(rig):
        rig.use(plans[rig.steps // 6 % len(plans)])

    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    mine_model, theirs_model = twins(model)
    data = class_data(200)
    theirs = trained(EAGER, model=theirs_model, data=data, batch=4, epochs=3)
    mine = trained(EAGER, model=mine_model, data=data, batch=4, epochs=3, between=switch)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-6)  # recorded steps have rates in fp32
    assert mine[2].steps == theirs[2].steps


@pytest.mark.parametrize("feed", FEEDS)
def test_every_feed_brings_the_same_samples_in_the_same_order(feed):
    def seen(plan):
        rig = Rig(nn.Linear(1, 2), adamw, nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
        found = []
        data = (torch.arange(53.0)[:, None], torch.zeros(53, dtype=torch.int64))
        for window in rig.feed(data, batch_size=8, epochs=3):
            for number in range(window.updates):
                for piece in window.update(number).pieces:
                    batch = piece.gathered() if hasattr(piece, "gathered") else piece
                    found += batch[0].flatten().tolist()
        rig.close()
        return found

    assert seen(Plan().but(**feed)) == seen(EAGER)


def test_a_captured_step_never_waits():
    rig = Rig(
        net(0.1), adamw, nn.CrossEntropyLoss(), plan=CAPTURED, schedule=SCHEDULES["cosine"], clip=1.0, device=DEVICE
    )
    windows = iter(rig.feed(class_data(400, dtype=torch.float32), batch_size=8, epochs=1))
    for _ in range(10):
        rig.step(next(windows))
    with no_waiting():
        for _ in range(20):
            rig.step(next(windows))
    assert recorded(rig)[0] == 1


def test_a_snapshot_is_put_back_without_a_trace_under_captures():
    def run(detour):
        def between(rig):
            if detour and rig.steps == 20:
                snapshot, window = rig.snapshot(), class_data(8, dtype=torch.float32, seed=4)
                for _ in range(6):
                    rig.step(window)
                rig.use(EAGER)
                rig.step(window)
                rig.evaluate(class_data(50, dtype=torch.float32))
                rig.use(CAPTURED)
                rig.restore(snapshot)

        return trained(CAPTURED, model=net(0.3), between=between)

    assert_same(run(True), run(False))


def test_evaluation_is_captured_and_gives_the_same_scores():
    valid = class_data(700, dtype=torch.float32, seed=9)
    rig = trained(CAPTURED)[2]
    rig.use(EAGER)
    plain = rig.evaluate(valid, ["accuracy", "macro_f1"])
    rig.use(CAPTURED)
    weights, state = parameters_of(rig.model).clone(), torch.cuda.get_rng_state()
    for _ in range(3):
        assert rig.evaluate(valid, ["accuracy", "macro_f1"]) == pytest.approx(plain, rel=1e-5)
    assert rig._evaluator._captured[False][1]._graphs
    outputs = rig.predict(valid)
    rig.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(outputs, rig.model(valid[0].to(DEVICE)).cpu(), rtol=1e-4, atol=1e-5)
    rig.model.train()
    assert torch.equal(weights, parameters_of(rig.model))
    assert torch.equal(state, torch.cuda.get_rng_state())


def job(**settings):
    torch.manual_seed(0)
    return Job(
        model=net(0.2),
        data=class_data(203, dtype=torch.float32),
        valid=class_data(64, dtype=torch.float32, seed=3),
        loss=nn.CrossEntropyLoss(),
        optimizer=adamw,
        schedule=lambda o, updates: torch.optim.lr_scheduler.CosineAnnealingLR(o, updates),
        batch_size=8,
        **settings,
    )


def test_fit_looks_between_replays_where_it_has_to(tmp_path):
    """Evaluations and checkpoints at the same steps, and the same scores, as without replays of several steps."""
    plan = Plan().but(kind="resident", optimizer="fused")
    theirs = fit(job(steps=70, eval_every=14), plan=plan, out=tmp_path / "eager", progress=False, save_every=10)
    fast = plan.but(mode="captured", replay_steps=4)
    mine = fit(job(steps=70, eval_every=14), plan=fast, out=tmp_path / "fast", progress=False, save_every=10)
    assert [r["step"] for r in mine.history] == [r["step"] for r in theirs.history]
    for one, other in zip(mine.history, theirs.history, strict=True):
        assert one["valid_loss"] == pytest.approx(other["valid_loss"], rel=1e-4)
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert one["lr"] == other["lr"]


def test_workers_started_after_a_capture_live():
    rig = trained(CAPTURED)[2]
    assert recorded(rig)[0] >= 1
    rig.use(Plan().but(kind="loader", workers=2))
    for _ in range(2):
        for window in rig.feed(class_data(64, dtype=torch.float32), batch_size=8, epochs=1):
            rig.step(window)
    rig.close()


def test_images_are_prepared_and_augmented_on_the_device_under_every_plan(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # which kernel autotuning picks changes its rounding

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3)
            )

        def forward(self, x):
            return self.layers(x)

    def prepare(batch):
        return batch[0].float().div(255).sub(0.5), batch[1]

    def augment(batch):
        flips = torch.rand(len(batch[0]), 1, 1, 1, device=batch[0].device) < 0.5
        return torch.where(flips, batch[0].flip(3), batch[0]), batch[1]

    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (80, 3, 8, 8), dtype=torch.uint8, generator=generator)
    data = (images, torch.randint(3, (80,), generator=generator))
    settings = {"prepare": prepare, "augment": augment, "data": data}
    theirs = trained(EAGER, model=Conv(), **settings)
    for plan in (CAPTURED, CAPTURED.but(layout="channels_last", autotune=True), Plan().but(layout="channels_last")):
        mine = trained(plan, model=Conv(), **settings)
        torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=1e-4)


def test_the_small_network_of_the_other_tests_is_captured_in_double_precision():
    theirs = trained(EAGER.but(optimizer="fused"), model=small_mlp(), dtype=torch.float64)
    mine = trained(CAPTURED, model=small_mlp(), dtype=torch.float64)
    assert_same(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("plan", [CAPTURED, CAPTURED.but(replay_steps=4), CAPTURED.but(precision="fp16")])
def test_a_training_goes_on_from_its_stored_state_to_the_last_bit(plan):
    """Also though a new process makes its first steps eagerly, where the old one had recorded them long before."""

    def begun():
        torch.manual_seed(3)
        rig = Rig(net(0.3), adamw, nn.CrossEntropyLoss(), plan=plan, schedule=SCHEDULES["cosine"], device=DEVICE)
        return rig, class_data(400, dtype=torch.float32)

    def run(rig, data, steps):
        work = Job(model=rig.model, data=data, loss=rig.loss, optimizer=rig.optimizer, batch_size=8, epochs=9)
        rig.attach(training_dataset(work))
        return rig.windows(steps=steps)

    rig, data = begun()
    stored = None
    for window in run(rig, data, 100):
        rig.step(window)
        if rig.steps == 40:
            stored = {
                name: b"".join(bytes(piece) for piece in pieces) for name, pieces in export_state(rig, {}).items()
            }
    assert recorded(rig)[0] >= 1
    other, data = begun()
    windows = run(other, data, 100)
    import_state(other, stored)
    for window in windows:
        other.step(window)
    assert other.steps == rig.steps == 100
    assert torch.equal(parameters_of(other.model), parameters_of(rig.model))
    for mine, theirs in zip(other.optimizer.state.values(), rig.optimizer.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
def test_a_draw_on_the_host_is_found_also_where_updates_may_be_left_out(optimizer):
    rig = trained(CAPTURED.but(optimizer=optimizer), model=DrawsInPython(), skip_nonfinite=True)[2]
    assert "draws from the host's randomness" in recorded(rig)[1]


def test_a_loss_through_somebody_elses_network_is_not_captured():
    torch.manual_seed(0)
    judge = nn.Linear(3, 1).to(DEVICE)
    mine = trained(CAPTURED, loss=lambda model, batch: judge(model(batch[0])).mean())
    assert "neither the model's nor the optimizer's" in recorded(mine[2])[1]


def test_hooks_of_an_optimizer_run_with_every_step():
    calls = []

    def make(parameters):
        optimizer = adamw(parameters)
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        return optimizer

    mine = trained(CAPTURED, optimizer=make)
    assert recorded(mine[2])[0] >= 1
    assert len(calls) == mine[2].steps


@pytest.mark.parametrize("feed", FEEDS)
def test_inputs_may_be_differentiated_by_the_loss(feed):
    def smooth(model, batch):
        x = batch[0].requires_grad_(True)
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return nn.functional.cross_entropy(output, batch[1]) + slope.square().mean()

    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    mine_model, theirs_model = twins(model)
    theirs = trained(EAGER.but(optimizer="fused"), model=theirs_model, loss=smooth)
    mine = trained(CAPTURED.but(**feed), model=mine_model, loss=smooth)
    assert recorded(mine[2])[0] >= 1, mine[2].ledger.to_lines()
    assert_same(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "own"])
def test_parameters_that_join_in_the_middle_are_trained(name):
    def unfreeze(rig):
        if rig.steps == 20:
            extra = list(rig.model[0].parameters())
            for p in extra:
                p.requires_grad_(True)
            rig.optimizer.add_param_group({"params": extra, "lr": 0.002})

    def frozen():
        model = net()
        for p in model[0].parameters():
            p.requires_grad_(False)
        return model

    def make(parameters):
        kept = [p for p in parameters if p.requires_grad]
        return adamw(kept) if name == "adamw" else Own(kept)

    kind = "fused" if name == "adamw" else "plain"
    settings = {"optimizer": make, "between": unfreeze}
    theirs = trained(EAGER.but(optimizer=kind), model=frozen(), **settings)
    mine = trained(CAPTURED.but(optimizer=kind), model=frozen(), **settings)
    assert recorded(mine[2])[0] >= 1
    assert_same(mine, theirs, rtol=1e-4, atol=1e-5)


def test_captures_are_kept_over_feeds_of_one_epoch_each_and_over_changes_of_plan():
    rig = Rig(net(), adamw, nn.CrossEntropyLoss(), plan=CAPTURED, device=DEVICE)
    data = class_data(90, dtype=torch.float32)
    made = []
    for number in range(12):
        for window in rig.feed(data, batch_size=8, epochs=1):
            rig.step(window)
        made.append({id(g) for s in rig._steps.values() if isinstance(s, CapturedStep) for g in s._graphs.values()})
        if number in (6, 8):
            rig.use(Plan().but(optimizer="fused"))
        if number in (7, 9):
            rig.use(CAPTURED)
    assert len(made[5]) == 2
    assert made[-1] == made[5]


def test_more_shapes_than_are_kept_are_recorded_in_turn_and_stay_right():
    def run(plan):
        torch.manual_seed(7)
        rig = Rig(small_mlp(dtype=torch.float32), adamw, nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
        x, y = (t.to(DEVICE) for t in class_data(60, dtype=torch.float32))
        losses = [rig.step((x[:size], y[:size])) for size in list(range(10, 30)) * 6]
        return torch.stack(losses).double(), parameters_of(rig.model).clone(), rig

    mine = run(Plan().but(mode="captured", optimizer="fused"))
    assert any("more than 16 shapes" in entry.why for entry in mine[2].ledger)
    assert_same(mine, run(Plan().but(optimizer="fused")))


def test_shapes_that_use_other_layers_are_captured_each_and_leave_their_own_gradients():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.small, self.large = nn.Linear(5, 3), nn.Linear(5, 3)

        def forward(self, x):
            return self.small(x) if len(x) < 10 else self.large(x)

    def run(plan):
        rig = Rig(Heads(), adamw, nn.CrossEntropyLoss(), plan=plan, device=DEVICE)
        x, y = (t.to(DEVICE) for t in class_data(20, dtype=torch.float32))
        losses, grads = [], []
        for number in range(40):
            size = 8 if number % 2 else 16
            losses.append(rig.step((x[:size], y[:size])))
            grads.append([None if p.grad is None else p.grad.clone() for p in rig.model.parameters()])
            if number % 3 == 0:
                rig.optimizer.zero_grad()  # left over from the user's own loop
        return (torch.stack(losses).double(), parameters_of(rig.model).clone(), rig), grads

    mine, my_grads = run(Plan().but(mode="captured", optimizer="fused"))
    theirs, their_grads = run(Plan().but(optimizer="fused"))
    assert recorded(mine[2])[0] == 2
    assert_same(mine, theirs)
    for one, other in zip(my_grads, their_grads, strict=True):
        assert [g is None for g in one] == [g is None for g in other]
        for a, b in zip(one, other, strict=True):
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_batches_with_names_that_never_come_again_run_eagerly_and_it_is_said():
    rig = Rig(
        small_mlp(dtype=torch.float32), adamw, nn.CrossEntropyLoss(), device=DEVICE,
        forward=lambda model, batch: (model(batch["x"]), batch["y"]), plan=Plan().but(mode="captured"),
    )  # fmt: skip
    x, y = class_data(8, dtype=torch.float32)
    for number in range(205):
        rig.step({"x": x, "y": y, "name": f"sample {number}"})
    assert "no shape of batch comes again" in recorded(rig)[1]


def test_memory_is_free_once_a_rig_is_closed():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    rig = Rig(net(), adamw, nn.CrossEntropyLoss(), plan=CAPTURED, device=DEVICE)
    data = (torch.randn(100_000, 5), torch.randint(3, (100_000,)))
    for window in rig.feed(data, batch_size=1000, steps=30):
        rig.step(window)
    del window
    assert torch.cuda.memory_allocated() - before > 2_000_000
    rig.close()
    assert torch.cuda.memory_allocated() - before < 1_000_000


def test_everything_on_means_held_captured_and_fused_on_a_gpu(tmp_path):
    run = fit(job(epochs=4), plan="max", out=tmp_path / "run", progress=False)
    assert run.plan.feed.kind == "resident"
    assert run.plan.execution.mode == "captured"
    assert run.plan.numerics.optimizer == "fused"
    assert run.history[-1]["train_loss"] < run.history[0]["train_loss"]


def test_the_losses_of_epochs_are_those_that_waiting_would_have_read(tmp_path):
    """Without validation data nobody waits at the end of an epoch; the record is finished a window later."""

    def losses(plan):
        torch.manual_seed(0)
        model = net()
        work = Job(
            model=model, data=class_data(203, dtype=torch.float32), loss=nn.CrossEntropyLoss(), optimizer=adamw,
            batch_size=8, epochs=5,
        )  # fmt: skip
        return [
            record["train_loss"] for record in fit(work, plan=plan, out=tmp_path / str(plan), progress=False).history
        ]

    captured = losses(CAPTURED.but(replay_steps=4))
    assert captured == pytest.approx(losses(Plan().but(optimizer="fused")), rel=1e-4)
    assert len(captured) == 5
