"""A precision is refused for what it does wrong, not for what a network makes of any rounding."""

import pytest
import torch
from torch import nn

from hotlap import Rig
from hotlap.tuner.agreement import UNTELLING, Outcome, alike, trained_alike
from hotlap.tuner.gates import TRAINED, Gate
from hotlap.tuner.tuner import STORM_STEPS, Canary

FEATURES = 6


@pytest.fixture(autouse=True)
def one_thread():
    """Operations this small take longer in several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def deep(layers, width=32):
    """Batch norms in a row, without ways around them: each layer amplifies the rounding of those before it."""
    first = [nn.Linear(FEATURES, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()]
    others = [(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(*first, *(module for other in others for module in other), nn.Linear(width, 3))


def training(model, *, steps=10, count=1280):
    """A training that has made some steps."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, FEATURES, generator=generator)
    y = (x @ torch.randn(FEATURES, 3, generator=generator)).argmax(1)
    torch.manual_seed(0)
    rig = Rig(model(), lambda p: torch.optim.AdamW(p, lr=1e-3), nn.CrossEntropyLoss(), device="cpu")
    rig.ahead = rig.feed((x, y), batch_size=64, epochs=1000)
    for _ in range(steps):
        rig.step(next(rig.ahead))
    return rig


def judged(rig, precision="bf16"):
    return Gate(rig, rig.plan).check(rig.plan.but(precision=precision))


def linear(rig, number):
    return [module for module in rig.model.modules() if isinstance(module, nn.Linear)][number]


@pytest.mark.parametrize("steps", [3, 40])
def test_bf16_passes_in_a_deep_network_whose_gradients_any_rounding_turns(steps):
    found = judged(training(lambda: deep(14), steps=steps))
    assert found.ok, found
    assert found.figures["cosine"] < 0.95
    assert "rounding allows for no more" in found.why


@pytest.mark.parametrize("by", [1.3, 0.0, -1.0])
@pytest.mark.parametrize("steps", [3, 40])
def test_a_wrong_layer_of_such_a_network_is_caught_all_the_same(steps, by):
    rig = training(lambda: deep(14), steps=steps)
    linear(rig, 7).weight.register_hook(
        lambda grad: grad * by if rig.plan.numerics.precision == "bf16" else grad,
    )
    assert not judged(rig).ok


def test_the_same_maths_in_other_kernels_pass_in_such_a_network():
    rig = training(lambda: deep(18), steps=3)
    found = Gate(rig, rig.plan).check(rig.plan.but(optimizer="fused"))
    assert found.ok, found


def test_where_rounding_turns_gradients_wholly_losses_of_updates_side_by_side_decide(monkeypatch):
    monkeypatch.setattr("hotlap.tuner.agreement.UNTELLING", 0.1)
    found = judged(training(lambda: deep(14), count=2048))
    assert found.ok, found
    assert found.why == f"losses of {TRAINED} updates agree as far as rounding lets them"
    assert "too much here" in judged(training(lambda: deep(14), count=256, steps=3)).why  # an epoch too short for that


# --- faults that a precision has, and rounding has not ---------------------------------------------------


class Biased(nn.Linear):
    """In 16 bits it gives too much, always in one direction."""

    def forward(self, x):
        made = super().forward(x)
        return made if made.dtype == torch.float32 else made + 0.2 * made.abs()


class Shifted(nn.Linear):
    """Its epsilon vanishes beside numbers of 16 bits."""

    def forward(self, x):
        made = super().forward(x)
        size = made.abs() + 1
        return made + ((size + 1e-3) - size) / 1e-3


class Summed(nn.Linear):
    """A sum of 100,000 terms, a hundred at a time: in bf16 it stands still half way."""

    def forward(self, x):
        made = super().forward(x)
        hundred, total = torch.full((), 100.0, dtype=made.dtype), torch.zeros((), dtype=made.dtype)
        for _ in range(1000):
            total = total + hundred
        return made * (total / 1e5)


class Growing(nn.Linear):
    """After some hundred updates its numbers are too large for fp16."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        factor = torch.where(self.calls > 500, 1e6, 1.0)
        return super().forward(x) * factor / factor


def around(middle):
    return lambda: nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), middle(32, 32), nn.ReLU(), nn.Linear(32, 3))


@pytest.mark.parametrize("layer", [Biased, Shifted, Summed])
def test_a_layer_that_is_wrong_in_bf16_is_caught(layer):
    assert judged(training(around(nn.Linear))).ok
    assert not judged(training(around(layer))).ok


def test_an_fp16_that_overflows_after_500_updates_is_left_at_once_by_the_canary():
    rig = training(around(Growing))
    own, tuned = rig.plan, rig.plan.but(precision="fp16")
    gate = Gate(rig, own)
    assert gate.check(tuned).ok  # nothing is wrong yet
    rig.use(tuned)
    canary = Canary(rig, gate, plan=tuned, baseline=own, takes_s=3600.0)  # the next look by the clock is far away
    good = canary.good
    while canary.drifted is None and rig.steps < 500 + 3 * STORM_STEPS:
        rig.step(next(rig.ahead))
        canary.stepped()
    assert canary.drifted == good
    assert canary.plan == rig.plan == own


# --- the yardstick ---------------------------------------------------------------------------------------


def outcomes(*, noise, error, loss=1.0):
    """The truth, an outcome that is off by `error`, and two that are shaken by `noise`, as fractions."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4096, generator=generator)

    def off(by, loss=1.0):
        return Outcome(loss=loss, gradients={"layer": base + by * torch.randn(4096, generator=generator)})

    return off(0.0), off(error, loss), [off(noise), off(noise)]


@pytest.mark.parametrize(("noise", "error", "agrees"), [(0.8, 0.7, True), (0.3, 0.7, False), (0.0, 0.7, False)])
def test_gradients_may_differ_by_as_much_as_roundings_of_that_size_change(noise, error, agrees):
    truth, made, shaken = outcomes(noise=noise, error=error)
    assert (alike(truth, made, None, {}, shaken=shaken).why is None) == agrees
    assert alike(truth, made, None, {}).why is not None


def test_where_roundings_change_nearly_everything_it_says_that_this_tells_little():
    truth, made, shaken = outcomes(noise=1.2 * UNTELLING, error=1.0)
    found = alike(truth, made, None, {}, shaken=shaken)
    assert found.blurred
    truth, made, shaken = outcomes(noise=0.8 * UNTELLING, error=0.8)
    assert not alike(truth, made, None, {}, shaken=shaken).blurred


def test_a_loss_may_differ_by_what_roundings_change_and_no_more():
    truth, made, shaken = outcomes(noise=0.8, error=0.7, loss=1.05)
    assert alike(truth, made, None, {}, shaken=shaken).why == "the loss differs by 5 %"


@pytest.mark.parametrize(("off", "agrees"), [(0.02, True), (0.2, False), (float("nan"), False)])
def test_losses_side_by_side_differ_by_what_roundings_change_and_no_more(off, agrees):
    def course(by):
        losses = tuple(1.0 + by * (-1) ** number for number in range(TRAINED))
        return Outcome(loss=losses[-1], losses=losses, gradients={"layer": torch.ones(3)})

    found = trained_alike(course(0.0), course(off), [course(0.02), course(0.01)])
    assert (found.why is None) == agrees
