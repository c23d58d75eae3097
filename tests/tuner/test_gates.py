"""The gate lets through whatever trains the same, and nothing that does not: honest plans, and planted faults.

A fault is planted under the proposed plan alone, at the smallest size that the gate claims to see.
"""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hotlap import Rig
from hotlap.core.plan import Plan
from hotlap.data.feeds import LoaderFeeding
from hotlap.data.order import HostRandomness
from hotlap.tuner.agreement import SAME, Gap, Outcome, noise_of, same_maths
from hotlap.tuner.gates import AMPLIFIED_UPDATES, UPDATES, Gate, chosen_windows
from hotlap.tuner.moment import without_dropout

FUSED = {"optimizer": "fused"}


@pytest.fixture(autouse=True)
def one_thread():
    """Operations this small take longer in several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- trainings -----------------------------------------------------------------------------------


class Lstm(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        self.lstm = nn.LSTM(6, 16, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Linear(6, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def mlp(dropout=0.3):
    return nn.Sequential(
        nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 32), nn.ReLU(),
        nn.Linear(32, 3),
    )  # fmt: skip


def cnn(dropout=0.3):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(16, 3),
    )  # fmt: skip


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU(), Block(16, 16), Block(16, 32, 2), Block(32, 64, 2),
        Block(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


MODELS = {"mlp": (mlp, (6,)), "cnn": (cnn, (3, 8, 8)), "lstm": (Lstm, (5, 6)), "encoder": (Encoder, (5, 6))}


def samples(shape, count=256):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, *shape, generator=generator)
    return x, (x.flatten(1) @ torch.randn(x[0].numel(), 3, generator=generator)).argmax(1)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def training(model="mlp", *, steps=5, batch=16, count=256, data=None, optimizer=adamw, epochs=1000, **settings):
    """A training that has made some steps; it goes on with `step(rig)`."""
    make, shape = MODELS[model] if isinstance(model, str) else model
    feed = {name: settings.pop(name) for name in ("accumulate", "drop_last", "order") if name in settings}
    torch.manual_seed(0)
    rig = Rig(make(), optimizer, settings.pop("loss", nn.CrossEntropyLoss()), device="cpu", **settings)
    data = data if data is not None else samples(shape, count)
    where = feed if isinstance(data, DataLoader) else {"batch_size": batch, **feed}
    rig.ahead = rig.feed(data, epochs=epochs, **where)
    for _ in range(steps):
        step(rig)
    return rig


def step(rig):
    return float(rig.step(next(rig.ahead)))


def judged(rig, **choices):
    return Gate(rig, rig.plan).check(rig.plan.but(**choices))


def is_tried(rig):
    """Whether the plan in force is the proposed one, which these tests tell by its optimizer."""
    return rig.plan.numerics.optimizer == "fused"


# --- what is let through ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "choices",
    [
        {"kind": "resident"},
        {"kind": "loader"},
        {"kind": "loader", "workers": 2},
        FUSED,
        {"kind": "resident", **FUSED},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_plans_of_the_same_maths_pass_and_it_is_said(model, choices):
    found = judged(training(model), **choices)
    assert found.ok, found
    assert found.why == "same maths"
    assert found.figures["cosine"] == pytest.approx(1, abs=1e-9)
    assert found.figures["worst_layer"] < SAME


@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize("optimizer", [adamw, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_channels_last_passes_although_every_kernel_is_another(steps, optimizer):
    rig = training("cnn", steps=steps, optimizer=optimizer)
    assert judged(rig, layout="channels_last").ok
    assert judged(rig, layout="channels_last", kind="resident", **FUSED).ok


@pytest.mark.parametrize("model", MODELS)
def test_bf16_passes_and_the_cosine_is_told(model):
    found = judged(training(model), precision="bf16")
    assert found.ok, found
    assert found.why.startswith("gradients agree to 0.99")
    assert 0.99 < found.figures["cosine"] < 1
    assert found.figures["norm_ratio"] == pytest.approx(1, abs=0.02)


def test_steps_that_were_the_same_maths_once_are_not_looked_at_again_beside_a_precision(monkeypatch):
    looked = []
    monkeypatch.setattr("hotlap.tuner.gates.same_maths", lambda *given: looked.append(1) or same_maths(*given))
    rig = training()
    gate, plan = Gate(rig, rig.plan), rig.plan.but(kind="resident", **FUSED)
    assert gate.check(plan.but(precision="bf16")).ok
    assert looked == [1]
    step(rig)  # from another moment
    assert gate.check(plan.but(precision="bf16")).ok
    assert looked == [1]
    assert gate.check(plan).ok
    assert gate.check(plan.but(kind="loader", precision="bf16")).ok
    assert looked == [1] * 3


@pytest.mark.parametrize("choices", [{}, {"kind": "resident", **FUSED}])
def test_fp16_passes_once_its_scale_has_settled(choices):
    assert judged(training(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), precision="fp16", **choices).ok


def test_an_ill_conditioned_moment_passes_since_another_batch_changes_more():
    """At its first weights a residual network's gradients in bf16 are far from those in fp32; they are not later on."""
    rig = training((resnet, (3, 8, 8)), steps=1)
    found = judged(rig, precision="bf16", layout="channels_last")
    assert found.ok, found
    assert found.figures["cosine"] < 0.999
    assert found.figures["of_a_batch"] < 0.25


@pytest.mark.parametrize(
    "settings",
    [
        {"clip": 0.1},
        {"accumulate": 3},
        {"schedule": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=100)},
        {"schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 1), "schedule_per": "epoch"},
        {"skip_nonfinite": True},
        {"augment": lambda batch: (batch[0] + torch.randn_like(batch[0]), batch[1])},
        {"prepare": lambda batch: (batch[0].abs_().sub_(0.5), batch[1])},
        {"loss": lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))},
    ],
    ids=lambda settings: " ".join(settings),
)
@pytest.mark.parametrize("choices", [{"kind": "resident", **FUSED}, {"precision": "bf16"}], ids=["same", "bf16"])
def test_clipping_accumulation_schedules_and_functions_on_batches_make_no_difference(settings, choices):
    found = judged(training(**settings), **choices)
    assert found.ok, found
    assert "compared" not in found.why  # bit by bit, with the same randomness


@pytest.mark.parametrize("steps", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("choices", [{"kind": "resident", **FUSED}, {"kind": "loader"}, {"precision": "bf16"}])
def test_it_can_be_asked_before_the_first_update_and_at_either_end_of_an_epoch(steps, choices):
    assert judged(training(steps=steps), **choices).ok


@pytest.mark.parametrize("count", [16, 20, 40])
@pytest.mark.parametrize("choices", [{"kind": "resident", **FUSED}, {"precision": "bf16"}])
def test_epochs_of_one_two_and_three_windows_are_enough(count, choices):
    assert judged(training(count=count, steps=2), **choices).ok


def test_parameters_that_only_the_loss_has_are_compared_too():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, output, target):
            return F.cross_entropy(output * self.scale, target)

    rig = training(loss=Scaled(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    assert judged(rig, **FUSED).ok
    rig.loss.scale.register_hook(lambda grad: grad * 1.01 if is_tried(rig) else grad)
    assert "loss.scale" in judged(rig, **FUSED).why


def test_sparse_gradients_can_be_compared():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 3)

        def forward(self, words):
            return self.head(self.table(words).mean(1))

    data = torch.randint(50, (256, 7)), torch.randint(3, (256,))
    assert judged(training((Words, ()), data=data, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), kind="resident").ok


class Nested(Dataset):
    """Batches of names, strings and tensors, out of code."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        torch.manual_seed(index)
        return {"x": torch.randn(6), "y": index % 3, "name": f"sample {index}"}


@pytest.mark.parametrize("choices", [{"workers": 2}, {"workers": 1, "persistent": True}, FUSED])
def test_batches_of_names_and_strings_can_be_compared(choices):
    rig = training(data=Nested(), steps=2, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))
    assert judged(rig, **choices).ok


def test_the_users_own_plan_passes_unseen():
    rig = training()
    assert Gate(rig, rig.plan).check(rig.plan).ok


# --- what it costs -----------------------------------------------------------------------------------


def counted(rig, monkeypatch):
    made, advance = [], rig.advance
    monkeypatch.setattr(rig, "advance", lambda window: made.append(rig.plan) or advance(window))
    return made


@pytest.mark.parametrize(
    ("model", "choices", "most"),
    [
        ((lambda: mlp(0.0), (6,)), {"kind": "resident"}, 8),
        ("mlp", {"kind": "resident"}, 12),
        ("cnn", {"layout": "channels_last", **FUSED, "kind": "resident"}, 16),
        ("mlp", {"precision": "bf16", "kind": "resident", **FUSED}, 18),
    ],
)
def test_it_takes_some_ten_updates(model, choices, most, monkeypatch):
    rig = training(model)
    made = counted(rig, monkeypatch)
    assert judged(rig, **choices).ok
    assert len(made) <= most


def test_what_the_users_own_plan_does_is_found_out_once_a_step(monkeypatch):
    rig = training()
    made, gate, own = counted(rig, monkeypatch), Gate(rig, rig.plan), rig.plan

    def own_updates(plan):
        made.clear()
        assert gate.check(plan).ok
        return made.count(own)

    assert own_updates(own.but(kind="resident")) > 0
    own_updates(own.but(**FUSED))  # how much is rounding is asked for the first time, where it differs at all
    assert own_updates(own.but(**FUSED)) == 0
    step(rig)
    assert own_updates(own.but(**FUSED)) > 0
    gate.forget()
    assert own_updates(own.but(**FUSED)) > 0


def test_few_windows_are_looked_at_spread_over_the_epoch_with_its_end():
    assert chosen_windows(10, 1000) == [10, 11, 12, 13, 341, 669, 998, 999]
    assert chosen_windows(0, 3) == [0, 1, 2]
    assert chosen_windows(0, 1) == [0]


# --- without a trace ---------------------------------------------------------------------------------


def bits(value):
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.detach().contiguous().view(-1).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(part) for part in value]
    return value.tobytes() if isinstance(value, np.ndarray) else value


def state_of(rig):
    """Everything a training consists of, bit by bit."""
    drawn, scheduler = HostRandomness(), rig.schedule.scheduler
    return bits(
        {
            "weights and buffers": rig.model.state_dict(),
            "gradients": [p.grad for p in rig.model.parameters()],
            "optimizer": rig.optimizer.state_dict(),
            "schedule": scheduler.state_dict() if scheduler else None,
            "modes": [(m.training, getattr(m, "p", None), getattr(m, "dropout", None)) for m in rig.model.modules()
                      if not isinstance(getattr(m, "dropout", None), nn.Module)],
            "randomness": (drawn.python, drawn.numpy, drawn.torch),
            "place": rig.place,
            "counters": (rig.steps, rig.samples, rig.updates, rig.skipped),
            "running loss": rig.totals.saved(),
            "plan": (rig.plan, rig.settled),
            "ledger": rig.ledger.to_lines(),
        }
    )  # fmt: skip


FEEDS = [{"kind": "gather"}, {"kind": "loader"}, {"kind": "loader", "workers": 1}, {"kind": "resident"},
         {"kind": "loader", "workers": 1, "persistent": True}]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "feed"), [*(("mlp", feed) for feed in FEEDS), ("lstm", FEEDS[0]), ("lstm", FEEDS[3])]
)
def test_it_leaves_no_trace_and_the_training_goes_on_as_if_it_had_not_been(model, feed):
    rigs = []
    for asked in (False, True):
        rig = training(
            model, steps=3, plan=Plan().but(**feed), count=100,
            schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=100),
        )  # fmt: skip
        rig.losses, gate = [], Gate(rig, rig.plan)
        for number in range(9):
            if asked and number in (0, 3, 4, 5):  # the middle, the end and the beginning of an epoch
                before = state_of(rig)
                for choices in ({"kind": "resident", "workers": 0, "persistent": False}, FUSED, {"precision": "bf16"}):
                    assert gate.check(rig.plan.but(**choices)).ok
                assert state_of(rig) == before
            rig.losses.append(step(rig))
        rigs.append(rig)
        rig.ahead.close()
        rig.close()
    assert rigs[0].losses == rigs[1].losses
    assert state_of(rigs[0]) == state_of(rigs[1])


def test_it_leaves_no_trace_where_a_plan_fails():
    rig = training("cnn")

    def fails(module, inputs):
        if is_tried(rig):
            raise RuntimeError("out of memory: tried to allocate 2 GiB\nand much more")

    rig.model[4].register_forward_pre_hook(fails)
    before = state_of(rig)
    found = judged(rig, layout="channels_last", kind="loader", **FUSED)
    assert not found.ok
    assert found.why == "out of memory: tried to allocate 2 GiB"
    assert state_of(rig) == before
    step(rig)


def test_what_modules_remember_beside_tensors_is_put_back_too():
    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.best = nn.Linear(6, 3), 0, None
            self.own, self.python = torch.Generator().manual_seed(3), random.Random(3)
            self.numpy = np.random.default_rng(3)

        def forward(self, x):
            self.calls += 1
            self.best = self.calls
            noise = torch.rand(x.shape, generator=self.own) + self.python.random() + float(self.numpy.random())
            return self.layer(x + 0.1 * noise * (1 + self.calls % 3))

    rig = training((Remembers, (6,)))

    def remembered():
        m = rig.model
        return m.calls, m.best, m.own.get_state().tolist(), m.python.getstate(), m.numpy.bit_generator.state

    before = remembered()
    found = judged(rig, kind="resident", **FUSED)
    assert (found.ok, found.why) == (True, "same maths")
    assert remembered() == before


# --- what is not even tried ----------------------------------------------------------------------------


def test_plans_that_cannot_be_obeyed_are_answered_with_the_reason():
    found = judged(training(), mode="captured")
    assert not found.ok
    assert "needs a GPU" in found.why


def test_what_changes_statistics_is_the_users_to_want():
    assert "batch norms see micro-batches" in judged(training(), micro_batch=4).why


def test_micro_batches_of_a_model_without_batch_norms_are_the_same_maths():
    assert judged(training((lambda: Encoder(0.0), (5, 6))), micro_batch=4, kind="resident", **FUSED).ok
    assert judged(training((lambda: Encoder(0.0), (5, 6))), micro_batch=4, kind="loader").ok


def test_a_training_that_is_not_finite_itself_cannot_be_compared():
    rig = training()
    with torch.no_grad():
        rig.model[0].weight.fill_(torch.nan)
    assert "not finite here" in judged(rig, **FUSED).why


# --- faults of feeds -----------------------------------------------------------------------------------


def planted(monkeypatch, change, feeding=LoaderFeeding):
    """All batches of a feed go through `change(number, batches)`, number counted from the first asked for."""
    honest = feeding.pieces
    monkeypatch.setattr(feeding, "pieces", lambda self, indices, epoch: change(honest(self, indices, epoch)))


def without_the_last(batches):
    held = list(batches)
    return iter(held[:-1])


def with_a_sample_twice(batches):
    for number, (x, y) in enumerate(batches):
        if number == 1:
            x[3], y[3] = x[2], y[2]
        yield x, y


def with_one_bit_turned(batches):
    held = [(x.clone(), y) for x, y in batches]
    held[-1][0].view(torch.int32).view(-1)[-1] ^= 1
    return iter(held)


def with_two_samples_swapped(batches):
    for x, y in batches:
        yield torch.cat((x[[1, 0]], x[2:])), torch.cat((y[[1, 0]], y[2:]))


def with_a_negative_zero(batches):
    for x, y in batches:
        yield torch.where(x == 0, -x, x), y


def in_double_precision(batches):
    for x, y in batches:
        yield x.double(), y


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_the_last, "ends before window 15"),
        (with_a_sample_twice, "1 of 16 rows of part 0 differ"),
        (with_one_bit_turned, "in window 15 of the epoch 1 of 16 rows of part 0 differ"),
        (with_two_samples_swapped, "2 of 16 rows of part 0 differ"),
        (with_a_negative_zero, "rows of part 0 differ"),
        (in_double_precision, "is torch.float64 of shape (16, 6), not torch.float32 of shape (16, 6)"),
    ],
)
def test_a_feed_that_brings_other_samples_is_caught(monkeypatch, change, words):
    x, y = samples((6,))
    x[:, 0] = 0
    rig = training(data=(x, y))
    before = state_of(rig)
    planted(monkeypatch, change)
    found = judged(rig, kind="loader")
    assert not found.ok
    assert words in found.why
    assert state_of(rig) == before


def test_a_feed_that_fails_is_an_answer(monkeypatch):
    def fails(batches):
        yield next(batches)
        raise OSError("a file is gone\nsomewhere")

    rig = training()
    planted(monkeypatch, fails)
    assert judged(rig, kind="loader").why == "a file is gone"


def test_held_samples_that_are_others_are_caught(monkeypatch):
    rig = training(data=DataLoader(torch.utils.data.TensorDataset(*samples((6,))), batch_size=16, shuffle=True))
    assert judged(rig, kind="resident").ok
    planted(monkeypatch, with_a_sample_twice)  # in the user's own: whichever errs, they differ
    assert "rows of part 0 differ" in judged(rig, kind="resident").why


def test_rows_that_are_gathered_wrongly_in_the_step_alone_are_caught(monkeypatch):
    """Looked at, they are right; a step that reads elsewhere is caught by what it computes."""
    from hotlap.data.resident import PendingRows
    from hotlap.engine.step import EagerStep

    rig = training()
    honest = EagerStep._on_device
    monkeypatch.setattr(
        EagerStep,
        "_on_device",
        lambda self, batch: honest(self, batch.shifted(16) if type(batch) is PendingRows else batch),
    )
    assert not judged(rig, kind="resident").ok


def test_batches_that_are_not_tensors_are_compared_as_far_as_they_can_be(monkeypatch):
    rig = training(data=Nested(), steps=2, loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]))

    def renamed(batches):
        for number, batch in enumerate(batches):
            yield {**batch, "name": ["another"] * 16} if number == 2 else batch

    gate = Gate(rig, rig.plan)
    assert gate.check(rig.plan.but(workers=1)).ok
    planted(monkeypatch, renamed)
    assert "part 0 holds another str" in gate.check(rig.plan.but(workers=2)).why


# --- faults of steps -----------------------------------------------------------------------------------


def scaled_loss(rig, by):
    honest = rig.objective.whole

    def whole(*arguments, **more):
        scored = honest(*arguments, **more)
        return scored._replace(loss=scored.loss * by) if is_tried(rig) else scored

    rig.objective.whole = whole


def linears(rig):
    kinds = (nn.Linear, nn.Conv2d)
    return [(n, m) for n, m in rig.model.named_modules() if isinstance(m, kinds) and "out_proj" not in n]


@pytest.mark.parametrize("model", MODELS)
def test_a_loss_that_is_larger_by_a_thousandth_is_caught(model):
    rig = training(model)
    scaled_loss(rig, 1.001)
    found = judged(rig, **FUSED)
    assert not found.ok
    assert found.figures["loss_difference"] == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_whose_gradient_is_larger_by_a_hundredth_is_caught_and_named(model):
    rig = training(model)
    name, layer = linears(rig)[0]
    layer.weight.register_hook(lambda grad: grad * 1.01 if is_tried(rig) else grad)
    found = judged(rig, **FUSED)
    assert not found.ok
    assert f"of {name}.weight" in found.why
    assert "1.01 times" in found.why or "differs by 1 %" in found.why


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_that_is_computed_in_bf16_is_caught(model):
    rig = training(model, steps=20)
    _, layer = linears(rig)[0]
    layer.register_forward_pre_hook(lambda m, inputs: (inputs[0].bfloat16().float(),) if is_tried(rig) else inputs)
    assert not judged(rig, **FUSED).ok


@pytest.mark.parametrize("model", MODELS)
def test_a_rate_that_is_larger_by_a_hundredth_is_caught(model):
    rig = training(model)
    honest = rig.optimizer.step

    def off(*arguments, **more):
        groups, by = rig.optimizer.param_groups, 1.01 if is_tried(rig) else 1.0
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] *= by
        try:
            return honest(*arguments, **more)
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    rig.optimizer.step = off
    found = judged(rig, **FUSED)
    assert not found.ok
    assert "the update of" in found.why


def after_each_update(rig, undo):
    """What the tried plan does wrong, done after its updates."""
    honest = rig.optimizer.step

    def step(*arguments, **more):
        made = honest(*arguments, **more)
        if is_tried(rig):
            with torch.no_grad():
                undo()
        return made

    rig.optimizer.step = step


def test_an_optimizer_that_forgets_from_one_update_to_the_next_is_caught():
    rig = training(optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9))
    states = rig.optimizer.state.values()
    after_each_update(rig, lambda: [state["momentum_buffer"].zero_() for state in states])
    assert "the update of" in judged(rig, **FUSED).why


def test_statistics_of_a_batch_norm_that_are_not_kept_are_caught():
    rig = training()
    norm = rig.model[1]
    was = norm.running_mean.clone()
    after_each_update(rig, lambda: norm.running_mean.copy_(was))
    found = judged(rig, **FUSED)
    assert not found.ok
    assert "the buffer 1.running_mean" in found.why


def test_batches_that_are_not_counted_are_caught():
    rig = training()
    after_each_update(rig, lambda: rig.model[1].num_batches_tracked.sub_(1))
    assert "1.num_batches_tracked" in judged(rig, **FUSED).why


def test_gradients_that_are_not_finite_are_caught():
    rig = training()
    rig.model[0].weight.register_hook(lambda grad: grad / 0 if is_tried(rig) else grad)
    assert "not finite" in judged(rig, **FUSED).why


# --- randomness ----------------------------------------------------------------------------------------


def seeded_before_each_step(rig, seed):
    honest = rig.objective.whole

    def whole(*arguments, **more):
        if is_tried(rig):
            seed()
        return honest(*arguments, **more)

    rig.objective.whole = whole


@pytest.mark.parametrize("model", MODELS)
def test_masks_that_repeat_are_caught(model):
    rig = training(model)
    seeded_before_each_step(rig, lambda: torch.manual_seed(5))
    found = judged(rig, **FUSED)
    assert not found.ok
    assert "its randomness repeats" in found.why


@pytest.mark.parametrize("model", MODELS)
def test_masks_that_repeat_are_caught_where_the_first_is_the_right_one(model):
    rig = training(model)
    state = torch.get_rng_state()
    seeded_before_each_step(rig, lambda: torch.set_rng_state(state))
    assert "its randomness repeats" in judged(rig, **FUSED).why


def test_masks_that_come_again_every_other_update_are_caught():
    rig = training()
    seeds = iter(range(1000))
    seeded_before_each_step(rig, lambda: torch.manual_seed(next(seeds) % 2))
    assert "its randomness repeats" in judged(rig, **FUSED).why


def test_masks_that_are_others_but_as_good_pass_compared_without_dropout():
    rig = training()
    seeds = iter(range(1000))
    seeded_before_each_step(rig, lambda: torch.manual_seed(next(seeds)))
    found = judged(rig, **FUSED)
    assert (found.ok, found.why) == (True, "same maths; compared without dropout")
    assert rig.model[3].p == 0.3


@pytest.mark.parametrize(("rate", "is_left_out"), [(0.1, True), (0.0, False)])
def test_comparing_without_dropout_sets_up_no_kernel_that_the_training_never_uses(rate, is_left_out):
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=rate)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with without_dropout([model]) as dropped:
        assert dropped == is_left_out
        assert torch.backends.cuda.cudnn_sdp_enabled() != is_left_out
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_fault_beside_masks_that_are_others_is_caught_too():
    rig = training()
    seeds = iter(range(1000))
    seeded_before_each_step(rig, lambda: torch.manual_seed(next(seeds)))
    rig.model[4].weight.register_hook(lambda grad: grad * 1.01 if is_tried(rig) else grad)
    assert "the gradient of 4.weight" in judged(rig, **FUSED).why


class Functional(nn.Module):
    """Drops out where nobody can switch it off."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 3)
        self.rate = 0.3

    def forward(self, x):
        return self.last(F.dropout(torch.relu(self.first(x)), self.rate))


def test_masks_that_are_others_and_cannot_be_taken_away_are_compared_on_average():
    rig = training((Functional, (6,)), batch=64)
    seeds = iter(range(1000))
    seeded_before_each_step(rig, lambda: torch.manual_seed(next(seeds)))
    found = judged(rig, **FUSED)
    assert found.ok, found
    assert "on average" in found.why
    rig.model.last.weight.register_hook(lambda grad: grad * 2 if is_tried(rig) else grad)
    assert "the mean gradient of" in judged(rig, **FUSED).why


def test_a_dropout_that_is_missing_is_caught():
    rig = training()
    rig.model[3].register_forward_pre_hook(lambda m, _: setattr(m, "training", not is_tried(rig)))
    found = judged(rig, **FUSED)
    assert not found.ok
    assert "randomness repeats" in found.why


@pytest.mark.parametrize("drop", [nn.Dropout(0.3), nn.Dropout2d(0.3)])
def test_dropout_between_convolutions_passes_in_another_layout(drop):
    """Which draw goes to which number depends on how they lie in memory."""

    def dropping():
        return nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.ReLU(), drop, nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 3)
        )

    found = judged(training((dropping, (3, 8, 8))), layout="channels_last")
    assert found.ok, found


# --- another precision ---------------------------------------------------------------------------------


def in_bf16(rig):
    return rig.plan.numerics.precision == "bf16"


@pytest.mark.parametrize("model", MODELS)
def test_a_loss_that_is_larger_by_three_hundredths_is_caught_in_bf16(model, monkeypatch):
    rig = training(model)
    monkeypatch.setitem(globals(), "is_tried", in_bf16)
    scaled_loss(rig, 1.03)
    assert not judged(rig, precision="bf16").ok


@pytest.mark.parametrize("by", [1.3, 0.0, -1.0])
@pytest.mark.parametrize("model", MODELS)
def test_a_layer_whose_gradient_is_wrong_is_caught_in_bf16_and_named(model, by):
    rig = training(model)
    name, layer = linears(rig)[-1]
    layer.weight.register_hook(lambda grad: grad * by if in_bf16(rig) else grad)
    found = judged(rig, precision="bf16")
    assert not found.ok
    assert f"{name}.weight" in found.why or "gradients agree to" in found.why


def test_a_small_layer_whose_gradient_is_wrong_is_caught_in_bf16_and_named():
    rig = training()
    rig.model[1].bias.register_hook(lambda grad: -grad if in_bf16(rig) else grad)
    assert "the gradient of 1.bias agrees to -0.9" in judged(rig, precision="bf16").why


def test_a_bias_before_a_batch_norm_is_all_rounding_and_not_looked_at():
    rig = training()
    rig.model[0].bias.register_hook(lambda grad: -grad if in_bf16(rig) else grad)
    assert judged(rig, precision="bf16").ok


def test_a_storm_of_skipped_updates_is_caught_in_fp16():
    class Overflows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) * 1e6 / 1e6

    rig = training((Overflows, (6,)))
    found = judged(rig, precision="fp16")
    assert not found.ok
    assert found.why == "20 of 20 updates are left out, since gradients overflow in fp16"


def test_a_few_skipped_updates_while_the_scale_settles_are_usual():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return 20 * self.layer(x)

    rig = training((Large, (6,)), loss=nn.CrossEntropyLoss(reduction="sum"), batch=64)
    rig.use(rig.plan.but(precision="fp16"))
    rig.step(next(rig.ahead))
    assert rig.skipped == 1  # it does overflow at first
    rig.use(rig.plan.but(precision="fp32"))
    assert judged(rig, precision="fp16").ok


# --- the figures ---------------------------------------------------------------------------------------


def test_a_gap_tells_angle_factor_and_length():
    truth, made = torch.tensor([3.0, 4.0]), torch.tensor([3.3, 4.4])
    gap = Gap(float(truth.norm()), float(made.norm()), float((made - truth).norm()), 2)
    assert gap.relative == pytest.approx(0.1, rel=1e-6)
    assert gap.cosine == pytest.approx(1)
    assert gap.along == pytest.approx(0.1, rel=1e-5)
    assert gap.stretch == pytest.approx(0.1, rel=1e-5)
    turned = Gap(1.0, 1.0, 2**0.5, 2)
    assert turned.cosine == pytest.approx(0, abs=1e-9)
    assert turned.along == pytest.approx(-1)
    assert turned.stretch == 0


def outcomes(**changes):
    """The user's own outcome, one that differs as told, and how far rounding takes the user's own."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(10_000, generator=generator)
    own = {"loss": 1.0, "gradients": {"layer": gradient}, "weights": {"layer": 0.1 * gradient}}
    noise = torch.randn(10_000, generator=generator)
    moved = gradient + 0.02 * noise
    shaken = Outcome(loss=1.0, gradients={"layer": moved}, weights={"layer": 0.1 * moved})
    return Outcome(**own), Outcome(**{**own, **changes}), noise_of(Outcome(**own), shaken, 2.0**-18)


def why_not_same(truth, made, noise):
    return same_maths(truth, made, {}, lambda: noise).why


def test_what_goes_all_ways_is_rounding_and_what_goes_one_way_is_a_factor():
    truth, _, noise = outcomes()
    gradient = truth.gradients["layer"]
    scattered = torch.randn(10_000, generator=torch.Generator().manual_seed(2))
    assert why_not_same(truth, outcomes(gradients={"layer": gradient + 0.01 * scattered})[1], noise) is None
    assert "1.01 times what it is" in why_not_same(truth, outcomes(gradients={"layer": gradient * 1.01})[1], noise)


def test_a_loss_is_told_finer_than_a_gradient():
    assert "the loss differs by 0.01 %" in why_not_same(*outcomes(loss=1.0001))
    assert why_not_same(*outcomes(loss=1.00001)) is None


def test_a_layer_that_is_all_rounding_says_nothing_and_where_all_are_it_is_said():
    truth, _, noise = outcomes()
    blurred = noise_of(truth, outcomes(gradients={"layer": -truth.gradients["layer"]})[1], 2.0**-18)
    found = same_maths(truth, outcomes(gradients={"layer": 2 * truth.gradients["layer"]})[1], {}, lambda: blurred)
    assert found.blurred
    assert not same_maths(truth, outcomes(loss=1.0001)[1], {}, lambda: noise).blurred


def test_honest_kernels_of_another_layout_pass_at_many_moments():
    """Rounding puts an activation across zero now and then, by which gradients jump; that is no fault."""
    words = Counter()
    for seed in range(12):
        torch.manual_seed(seed)
        rig = training("cnn", steps=seed % 5, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2))
        words[judged(rig, layout="channels_last", **FUSED).ok] += 1
    assert words == {True: 12}


@pytest.mark.parametrize(("layer", "is_dear"), [(nn.BatchNorm1d(4), True), (nn.LayerNorm(4), False)])
def test_a_gate_is_expected_to_take_longer_where_the_network_amplifies_rounding(layer, is_dear):
    rig = Rig(nn.Sequential(nn.Linear(4, 4), layer), lambda p: torch.optim.SGD(p, lr=0.1), nn.MSELoss(), device="cpu")
    assert Gate(rig, rig.plan).updates == (AMPLIFIED_UPDATES if is_dear else UPDATES)
