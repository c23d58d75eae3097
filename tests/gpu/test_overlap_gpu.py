"""Weights cast together, and gradients on a second stream, in recorded steps: bit by bit what torch records."""

import pytest
import torch
from plain import parameters_of
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.tricks import CAST_TOGETHER, OVERLAPPED_GRADIENTS
from hotlap.engine.assists import overlap
from hotlap.engine.assists.overlap import Overlap

DEVICE = torch.device("cuda", 0)
CAPTURED = Plan().but(kind="resident", mode="captured", optimizer="fused")
PRECISIONS = ["fp32", "tf32", "bf16", "fp16"]


class Deep(nn.Module):
    def __init__(self, width=512, layers=24):
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(width, 3, bias=False)

    def forward(self, x):
        for layer, norm in zip(self.inside, self.norms, strict=True):
            x = x + self.drop(norm(layer(x)).relu())
        return self.head(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(32, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.blocks(self.inside(x.view(len(x), 16, 32))).mean(1))


class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.head = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.second(self.norm(self.first(x.view(len(x), 2, 16, 16))).relu()).mean((2, 3)))


class Shared(nn.Module):
    """One layer used again and again, and one whose bias two layers have."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 3)
        self.other.bias = self.one.bias

    def forward(self, x):
        for _ in range(3):
            x = self.one(x).tanh()
        return self.head(self.other(x))


class Penalised(nn.Module):
    """Whose weights are used elsewhere too, so that torch adds to gradients that were made beside its own."""

    def __init__(self):
        super().__init__()
        self.inside, self.head = nn.ModuleList(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 3)

    def forward(self, x):
        for layer in self.inside:
            x = layer(x).tanh()
        return self.head(x) + 1e-3 * sum(layer.weight.pow(2).sum() for layer in self.inside)


MODELS = [Deep, Encoder, Pictures, Shared, Penalised]


def made(model):
    torch.manual_seed(3)
    return model()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3)


def trained(make, plan, *, steps=40, accumulate=1, batch=64, **settings):
    """Losses, weights and last gradients, and how many were recorded."""
    generator = torch.Generator().manual_seed(5)
    data = torch.randn(1024, 512, generator=generator), torch.randint(3, (1024,), generator=generator)
    model = made(make)
    torch.manual_seed(7)
    rig = Rig(model, adamw, nn.CrossEntropyLoss(), plan=plan, device="cuda", **settings)
    windows = rig.feed(data, batch_size=batch, steps=steps, drop_last=True, accumulate=accumulate)
    losses = [rig.step(window).double().clone() for window in windows]
    recorded = sum(getattr(step, "recorded", 0) for step in rig._steps.values())
    assert recorded, rig.ledger.to_lines()
    grads = torch.cat([p.grad.flatten() for p in rig.model.parameters()])
    found = torch.stack(losses), parameters_of(rig.model).clone(), grads.clone()
    rig.close()
    return found


def assert_bit_equal(mine, theirs):
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def both(make, plan, **settings):
    theirs = trained(make, plan.but(without=[OVERLAPPED_GRADIENTS, CAST_TOGETHER]), **settings)
    return trained(make, plan, **settings), theirs


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", MODELS)
def test_a_recorded_step_gives_the_same_bits(make, precision, monkeypatch):
    if make is Pictures:
        monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    assert_bit_equal(*both(make, CAPTURED.but(precision=precision)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("settings", [{"accumulate": 3}, {"clip": 0.1}])
def test_so_it_does_with_accumulation_and_clipping(precision, settings):
    assert_bit_equal(*both(Deep, CAPTURED.but(precision=precision), **settings))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_so_it_does_with_several_steps_a_replay(precision):
    assert_bit_equal(*both(Deep, CAPTURED.but(precision=precision, replay_steps=8)))


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_so_it_does_however_little_is_kept(behind, monkeypatch):
    monkeypatch.setattr(overlap, "MOST_BEHIND", behind)
    monkeypatch.setattr(overlap, "GROUP_BYTES", 3 * 2**20)
    assert_bit_equal(*both(Deep, CAPTURED.but(precision="bf16"), steps=60))


def test_an_encoder_of_a_real_size_gives_the_same_bits():
    """Several groups of weights, and memory that is let go of and taken again all the time."""

    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True, activation="gelu")
            self.blocks, self.head = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False), nn.Linear(512, 3)
            self.inside = nn.Linear(16, 512)

        def forward(self, x):
            return self.head(self.blocks(self.inside(x.view(len(x), 32, 16)))[:, 0])

    plan = CAPTURED.but(precision="bf16", replay_steps=8)
    assert_bit_equal(*both(Large, plan, steps=160, batch=16))


def test_wide_layers_beside_short_ones_are_not_read_before_they_are_there():
    """On the second stream much more is to be done than on the first: what is not waited for would show."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.ModuleList(nn.Linear(4096, 8) for _ in range(12))
            self.wide, self.inside = nn.ModuleList(nn.Linear(8, 4096) for _ in range(12)), nn.Linear(512, 4096)
            self.head = nn.Linear(4096, 3)

        def forward(self, x):
            x = self.inside(x)
            for narrow, wide in zip(self.narrow, self.wide, strict=True):
                x = x + wide(narrow(x).relu())
            return self.head(x)

    assert_bit_equal(*both(Wide, CAPTURED.but(precision="bf16"), steps=100, batch=512))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_with_a_gradient_in_it_waits_for_all_parts_of_a_weights_gradient(precision):
    class Sloped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Sequential(nn.Linear(512, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh())
            self.head = nn.Linear(2048, 3)

        def forward(self, x):
            x = x.clone().requires_grad_()
            made = self.head(self.inside(x))
            (slope,) = torch.autograd.grad(made.float().sum(), x, create_graph=True)
            return made + 1e-2 * slope.float().square().mean()

    mine, theirs = both(Sloped, CAPTURED.but(precision=precision), batch=512)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_optimizers_step_outside_the_capture_finds_all_gradients():
    plan = CAPTURED.but(precision="bf16")

    def hooked(make, plan):
        generator = torch.Generator().manual_seed(5)
        data = torch.randn(1024, 512, generator=generator), torch.randint(3, (1024,), generator=generator)
        model = made(make)
        torch.manual_seed(7)
        seen = []

        def optimizer(parameters):
            mine = adamw(parameters)
            mine.register_step_pre_hook(lambda *_: seen.append(1))
            return mine

        rig = Rig(model, optimizer, nn.CrossEntropyLoss(), plan=plan, device="cuda")
        for window in rig.feed(data, batch_size=64, steps=30, drop_last=True):
            rig.step(window)
        assert len(seen) == 30
        assert sum(getattr(step, "recorded", 0) for step in rig._steps.values())
        rig.close()
        return (parameters_of(rig.model).clone(),)

    theirs = hooked(Deep, plan.but(without=[OVERLAPPED_GRADIENTS, CAST_TOGETHER]))
    assert_bit_equal(hooked(Deep, plan), theirs)


@pytest.mark.parametrize("trick", [OVERLAPPED_GRADIENTS, CAST_TOGETHER])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_of_both_left_out_gives_the_same_bits(precision, trick):
    plan = CAPTURED.but(precision=precision)
    assert_bit_equal(trained(Deep, plan.but(without=[trick])), trained(Deep, plan))


def test_weights_are_cast_by_a_few_kernels():
    model, mine = made(Deep).to(DEVICE), Overlap(DEVICE, torch.bfloat16)
    x = torch.randn(64, 512, device=DEVICE)

    def step():
        model.zero_grad(set_to_none=True)
        with mine:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(x).float().sum()
            mine.backward(loss)

    def kernels_of(work):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
            work()
            torch.cuda.synchronize()
        return sum(1 for event in seen.events() if event.device_type == torch.autograd.DeviceType.CUDA)

    first = kernels_of(step)
    step()
    later = kernels_of(step)
    # 49 weights are cast, and as many gradients are cast back.
    assert later < first - 80, (first, later)
