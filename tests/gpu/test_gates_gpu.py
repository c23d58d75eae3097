"""The gate with real captures, precisions and feeds of a GPU: honest plans pass, planted faults are caught."""

import pytest
import torch
from torch import nn

from hotlap import Plan, Rig
from hotlap.engine.capture.captured_step import CapturedStep, StepGraph
from hotlap.tuner.gates import Gate

DEVICE = "cuda"
PRECISIONS = ["fp32", "tf32", "bf16", "fp16"]


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 32, num_layers=2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


def mlp():
    return nn.Sequential(
        nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32, 3),
    )  # fmt: skip


MODELS = {"mlp": (mlp, (6,)), "lstm": (Lstm, (7, 6)), "cnn": (cnn, (3, 16, 16)), "encoder": (Encoder, (7, 6))}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def training(model="mlp", *, steps=10, plan=None, optimizer=adamw, **settings):
    """A training that has made some steps; it goes on with `step(rig)`. An epoch has 64 windows."""
    make, shape = MODELS[model]
    torch.manual_seed(0)
    x = torch.randn(1024, *shape)
    y = (x.flatten(1) @ torch.randn(x[0].numel(), 3)).argmax(1)
    rig = Rig(make(), optimizer, nn.CrossEntropyLoss(), device=DEVICE, plan=plan, **settings)
    rig.ahead = rig.feed((x, y), batch_size=16, epochs=1000)
    for _ in range(steps):
        step(rig)
    return rig


def step(rig):
    return float(rig.step(next(rig.ahead)))


def captured(plan, replay_steps=1, **choices):
    return plan.but(kind="resident", mode="captured", replay_steps=replay_steps, optimizer="fused", **choices)


def layout_of(model):
    return {"layout": "channels_last"} if model == "cnn" else {}


# --- what is let through ---------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("replay_steps", [1, 8])
def test_captured_plans_in_every_precision_pass(model, precision, replay_steps):
    rig = training(model)
    rig.keep_plans()
    plan = captured(rig.plan, replay_steps, precision=precision, **layout_of(model))
    found = Gate(rig, rig.plan).check(plan)
    assert found.ok, found
    assert found.why.startswith("same maths" if precision == "fp32" else "gradients agree to ")
    rig.use(plan)
    assert rig.given_up is None
    # What the gate has recorded serves the training: nothing has to be recorded again.
    before = rig.warmup_steps
    step(rig)
    assert rig.warmup_steps == before


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "choices",
    [
        {"kind": "stream"},
        {"kind": "resident"},
        {"kind": "loader", "workers": 1, "pinned": True, "persistent": True},
        {"optimizer": "fused"},
        {"kind": "gather", "mode": "captured"},
        {"kind": "stream", "mode": "captured", "optimizer": "fused"},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
def test_feeds_and_recorded_plain_optimizers_are_the_same_maths(model, choices):
    rig = training(model)
    found = Gate(rig, rig.plan).check(rig.plan.but(**choices))
    assert found.ok, found
    assert found.why.startswith("same maths")


@pytest.mark.parametrize("choices", [{"layout": "channels_last"}, {"autotune": True}])
@pytest.mark.parametrize("steps", [1, 40])
@pytest.mark.parametrize("tf32", [True, False])
def test_other_kernels_of_convolutions_are_the_same_maths(choices, steps, tf32):
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        rig = training("cnn", steps=steps)
        found = Gate(rig, rig.plan).check(rig.plan.but(**choices))
    finally:
        torch.backends.cudnn.allow_tf32 = before
    assert found.ok, found


@pytest.mark.parametrize("steps", [0, 1, 63, 64])
def test_a_captured_plan_can_be_judged_at_either_end_of_an_epoch_and_before_the_first_update(steps):
    rig = training(steps=steps)
    assert Gate(rig, rig.plan).check(captured(rig.plan, 8)).ok


def test_schedules_and_clipping_pass_under_captures():
    rig = training(clip=0.1, schedule=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=1000))
    for precision in ("fp32", "fp16"):
        found = Gate(rig, rig.plan).check(captured(rig.plan, 8, precision=precision))
        assert found.ok, found


def test_what_cannot_be_captured_is_refused_with_the_reason():
    rig = training()
    rig.model[3].register_forward_hook(lambda m, _, output: output * float(output.sum() > -1e9))
    found = Gate(rig, rig.plan).check(captured(rig.plan))
    assert not found.ok
    assert "nothing is captured, since" in found.why


# --- without a trace ---------------------------------------------------------------------------------


def state_of(rig):
    tensors = [*rig.model.state_dict().values(), *(p.grad for p in rig.model.parameters() if p.grad is not None)]
    tensors += [v for state in rig.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    tensors += rig.totals.saved()[:2]
    return (
        [tensor.detach().cpu().clone() for tensor in tensors],
        (rig.place, rig.steps, rig.samples, rig.updates, rig.plan, rig.ledger.to_lines(), rig.totals.saved()[2]),
        torch.cuda.get_rng_state(DEVICE),
        torch.get_rng_state(),
    )


def assert_same_state(mine, theirs):
    assert all(torch.equal(a, b) for a, b in zip(mine[0], theirs[0], strict=True))
    assert mine[1] == theirs[1]
    assert torch.equal(mine[2], theirs[2])
    assert torch.equal(mine[3], theirs[3])


@pytest.mark.parametrize("in_force", [{}, {"kind": "resident", "mode": "captured", "replay_steps": 4}])
def test_it_leaves_no_trace_and_what_is_captured_stays(in_force):
    rig = training("cnn", plan=Plan().but(optimizer="fused", layout="channels_last", **in_force))
    own = Plan()
    gate = Gate(rig, own)
    before = state_of(rig)
    assert gate.check(rig.plan).ok
    for choices in ({"precision": "bf16"}, {"kind": "resident", "mode": "captured", "replay_steps": 8}):
        assert gate.check(rig.plan.but(**choices)).ok
    assert_same_state(state_of(rig), before)
    firsts = rig.warmup_steps
    step(rig)
    assert rig.warmup_steps == firsts


def test_the_training_goes_on_as_if_it_had_not_been():
    losses = []
    for asked in (False, True):
        rig = training(plan=captured(Plan(), 4))
        gate, made = Gate(rig, Plan()), []
        for number in range(12):
            if asked and number % 4 == 0:
                assert gate.check(rig.plan).ok
            made.append(step(rig))
        losses.append(made)
        rig.ahead.close()
        rig.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


# --- planted faults ------------------------------------------------------------------------------------


def judged_captured(rig, replay_steps, **choices):
    return Gate(rig, rig.plan).check(captured(rig.plan, replay_steps, **choices))


def before_each_replay(monkeypatch, fault):
    honest = StepGraph.replay

    def replay(self, window):
        return honest(self, fault(self, window))

    monkeypatch.setattr(StepGraph, "replay", replay)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", ["mlp", "encoder"])
@pytest.mark.parametrize("replay_steps", [1, 8])
def test_masks_that_repeat_from_replay_to_replay_are_caught(model, replay_steps, precision, monkeypatch):
    rig = training(model)
    state = torch.cuda.get_rng_state(DEVICE)

    def reset(graph, window):
        torch.cuda.set_rng_state(state, DEVICE)
        return window

    before_each_replay(monkeypatch, reset)
    found = judged_captured(rig, replay_steps, precision=precision)
    assert not found.ok
    assert "its randomness repeats" in found.why


@pytest.mark.parametrize("replay_steps", [1, 8])
def test_a_replay_that_reads_elsewhere_in_the_epoch_is_caught(replay_steps, monkeypatch):
    rig = training()

    def rewind(graph, window):
        graph._outputs.place.fill_(0)
        return window

    before_each_replay(monkeypatch, rewind)
    assert not judged_captured(rig, replay_steps).ok


def test_a_replay_that_reads_the_batch_it_was_recorded_with_is_caught(monkeypatch):
    rig = training()
    before_each_replay(monkeypatch, lambda graph, window: graph._window)
    plan = rig.plan.but(mode="captured", optimizer="fused")
    assert plan.feed.kind == "gather"
    assert not Gate(rig, rig.plan).check(plan).ok


@pytest.mark.parametrize("replay_steps", [1, 8])
def test_a_recorded_loss_that_is_larger_by_a_thousandth_is_caught(replay_steps):
    rig = training()
    honest = rig.objective.whole

    def whole(*arguments, **more):
        scored = honest(*arguments, **more)
        return scored._replace(loss=scored.loss * 1.001) if torch.cuda.is_current_stream_capturing() else scored

    rig.objective.whole = whole
    assert not judged_captured(rig, replay_steps).ok


@pytest.mark.parametrize("model", ["mlp", "encoder"])
def test_a_layer_that_is_recorded_in_bf16_is_caught(model):
    rig = training(model)
    layer = rig.model[4] if model == "mlp" else rig.model.layer.linear1

    def rounded(module, inputs):
        return (inputs[0].bfloat16().float(),) if torch.cuda.is_current_stream_capturing() else inputs

    layer.register_forward_pre_hook(rounded)
    assert not judged_captured(rig, 1).ok


def test_a_dropout_that_is_left_out_of_the_recording_is_caught():
    rig = training()
    layer = rig.model[3]
    honest = layer.forward
    layer.forward = lambda x: x * 1.0 if torch.cuda.is_current_stream_capturing() else honest(x)
    assert not judged_captured(rig, 8).ok


def test_an_update_that_is_left_out_of_the_recording_is_caught(monkeypatch):
    rig = training()
    honest = CapturedStep._replay

    def replay(self, graph, window):
        before = [parameter.detach().clone() for parameter in rig.model.parameters()]
        loss = honest(self, graph, window)
        with torch.no_grad():
            for parameter, was in zip(rig.model.parameters(), before, strict=True):
                parameter.copy_(was)
        return loss

    monkeypatch.setattr(CapturedStep, "_replay", replay)
    assert "the update of" in judged_captured(rig, 1).why


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_a_wrong_layer_is_caught_in_another_precision(model, precision):
    rig = training(model)
    head = rig.model.head if hasattr(rig.model, "head") else rig.model[-1]
    head.weight.register_hook(lambda grad: grad * 1.3 if rig.plan.numerics.precision == precision else grad)
    assert not judged_captured(rig, 1, precision=precision, **layout_of(model)).ok


def test_memory_that_is_short_is_an_answer():
    rig = training()

    def hungry(module, inputs):
        if rig.plan.numerics.optimizer == "fused":
            torch.empty(2**50, dtype=torch.uint8, device=DEVICE)

    rig.model[0].register_forward_pre_hook(hungry)
    before = state_of(rig)
    found = Gate(rig, rig.plan).check(rig.plan.but(optimizer="fused"))
    assert not found.ok
    assert "out of memory" in found.why
    assert_same_state(state_of(rig), before)
