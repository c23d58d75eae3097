"""Compiled steps on a real GPU, alone and under capture: the numbers of plain ones, to rounding."""

import pytest
import torch
from plain import parameters_of
from torch import nn

from hotlap import Plan, Rig
from hotlap.engine import compiling
from hotlap.engine.capture.captured_step import CapturedStep

DEVICE = "cuda"
CHOICES = ("model", "blocks")
CAPTURED = Plan().but(kind="resident", mode="captured", optimizer="fused")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))

    def forward(self, x):
        y = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(x + self.norms[1](self.second(y)))


def resnet(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        *[Residual() for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(16, 10),
    )


class Transformer(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 32)
        layers = (nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True) for _ in range(3))
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(32, 10)

    def forward(self, words):
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def images(samples=96):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(samples, 3, 12, 12, generator=draw), torch.randint(10, (samples,), generator=draw)


def texts(samples=96):
    draw = torch.Generator().manual_seed(1)
    return torch.randint(50, (samples, 16), generator=draw), torch.randint(10, (samples,), generator=draw)


TRAININGS = {"resnet": (resnet, images), "transformer": (Transformer, texts)}


@pytest.fixture(autouse=True)
def exactly(monkeypatch):
    """Convolutions in fp32, so that rounding is far below any mistake."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def rig_for(model, plan, rate=0.01):
    return Rig(
        model, lambda p: torch.optim.SGD(p, lr=rate, momentum=0.9), nn.CrossEntropyLoss(), plan=plan, device=DEVICE
    )


def trained(name, plan, *, dropout=0.0, epochs=4, between=None):
    make, data = TRAININGS[name]
    torch.manual_seed(7)
    rig = rig_for(make(dropout), plan)
    losses = []
    for window in rig.feed(data(), batch_size=8, epochs=epochs):
        losses.append(rig.step(window))
        if between is not None:
            between(rig)
    return torch.stack([loss.double() for loss in losses]), parameters_of(rig.model).clone(), rig


def assert_compiled(rig):
    assert rig.given_up is None, rig.ledger.to_lines()
    assert any((entry.what, entry.outcome) == ("compile", "measured") for entry in rig.ledger)
    assert not any((entry.what, entry.outcome) == ("compile", "fault") for entry in rig.ledger)


def assert_same(mine, theirs, loose=1e-3):
    torch.testing.assert_close(mine[0], theirs[0], rtol=loose, atol=loose)
    torch.testing.assert_close(mine[1], theirs[1], rtol=loose, atol=loose)
    for (name, one), other in zip(mine[2].model.named_buffers(), theirs[2].model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=loose, atol=loose, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("what", CHOICES)
def test_compiled_steps_give_the_numbers_of_plain_ones(name, what):
    plan = Plan().but(kind="resident", optimizer="fused")
    mine = trained(name, plan.but(compile=what))
    assert_compiled(mine[2])
    assert_same(mine, trained(name, plan))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("what", CHOICES)
def test_compiled_steps_are_captured_and_give_the_numbers_of_plain_ones(name, what, precision):
    mine = trained(name, CAPTURED.but(compile=what, precision=precision))
    assert_compiled(mine[2])
    step = mine[2]._step
    assert isinstance(step, CapturedStep)
    assert step.recorded >= 1
    theirs = trained(name, Plan().but(kind="resident", optimizer="fused", precision=precision))
    assert_same(mine, theirs, loose=1e-3 if precision == "fp32" else 6e-2)


@pytest.mark.parametrize("name", TRAININGS)
def test_several_compiled_steps_a_replay_give_the_numbers_of_single_ones(name):
    mine = trained(name, CAPTURED.but(compile="blocks", replay_steps=4))
    assert_compiled(mine[2])
    theirs = trained(name, Plan().but(kind="resident", optimizer="fused"))
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=1e-3)
    for one, other in zip(mine[2].model.buffers(), theirs[2].model.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["eager", "captured"])
def test_dropout_of_compiled_steps_differs_from_step_to_step(mode):
    rig = rig_for(Transformer(0.5), Plan().but(kind="gather", mode=mode, compile="blocks"), rate=0.0)
    words, classes = (part[:8] for part in texts())
    losses = [float(rig.step((words, classes))) for _ in range(12)]
    assert_compiled(rig)
    assert len(set(losses)) == len(losses)


def test_compiled_and_plain_captures_are_both_kept_while_plans_alternate():
    plans = [CAPTURED, CAPTURED.but(compile="blocks")]
    rig = rig_for(resnet(), CAPTURED)
    rig.keep_plans()
    firsts = []
    for window in rig.feed(images(), batch_size=8, epochs=3):
        rig.use(plans[rig.steps % 2])
        before = rig.warmup_steps
        rig.step(window)
        firsts.append(rig.warmup_steps - before)
    assert_compiled(rig)
    assert any(firsts[:12])
    assert not any(firsts[12:])
    kept = [step for step in rig._steps.values() if isinstance(step, CapturedStep)]
    assert len(kept) == 2
    assert all(step.recorded >= 1 for step in kept)


def test_a_compiler_that_fails_leaves_a_capture_of_plain_steps(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(compiling, "BACKEND", broken)
    mine = trained("resnet", CAPTURED.but(compile="model"))
    assert "no such instruction" in mine[2].given_up
    assert mine[2]._step.recorded >= 1
    assert_same(mine, trained("resnet", CAPTURED))


def test_a_second_shape_is_compiled_before_it_is_recorded():
    rig = rig_for(Transformer(), Plan().but(kind="gather", mode="captured", compile="blocks", optimizer="fused"))
    plain = rig_for(Transformer(), Plan().but(optimizer="fused"))
    words, classes = texts()
    for number in range(20):
        size = 8 if number % 2 else 6
        batch = (words[:size], classes[:size])
        torch.testing.assert_close(rig.step(batch), plain.step(batch), rtol=1e-3, atol=1e-3)
    assert_compiled(rig)
    assert rig._step.recorded == 2
    assert sum(entry.outcome == "measured" and entry.what == "compile" for entry in rig.ledger) == 2


def test_widths_are_compiled_before_they_are_recorded_however_late_they_come():
    rig = rig_for(Transformer(), Plan().but(kind="gather", mode="captured", compile="blocks", optimizer="fused"))
    plain = rig_for(Transformer(), Plan().but(optimizer="fused"))
    words, classes = texts()
    # The second width comes when the first is recorded already, the others after that.
    for width in (16, 16, 16, 16, 12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 16, 12, 8, 4):
        batch = (words[:8, :width].contiguous(), classes[:8])
        torch.testing.assert_close(rig.step(batch), plain.step(batch), rtol=1e-3, atol=1e-3)
    assert_compiled(rig)
    assert rig._step.recorded == 4
    assert len(rig._step._eager._batches) == 4
    assert sum(entry.outcome == "measured" and entry.what == "compile" for entry in rig.ledger) == 2
