"""Number formats, layouts, scaled losses and recorded optimizers, as only a GPU can show them."""

import copy
import functools
import importlib
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from waiting import no_waiting

from hotlap.core.plan import Execution, Numerics
from hotlap.engine.layout import Layout
from hotlap.engine.optimizers import Fusion, recording, why_not_captured, why_not_fused
from hotlap.engine.precision import Switches, precision_context, why_not_precision
from hotlap.engine.scaling import LossScale, skipping, skips_on_device
from hotlap.engine.snapshot import Snapshot

DEVICE = torch.device("cuda:0")
MATMUL, CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn


def has_tf32():
    return torch.cuda.get_device_capability(0) >= (8, 0)


@pytest.fixture(autouse=True)
def put_back():
    """The process's switches as they were."""
    before = MATMUL.allow_tf32, CUDNN.allow_tf32, CUDNN.benchmark
    yield
    MATMUL.allow_tf32, CUDNN.allow_tf32, CUDNN.benchmark = before


# --- TF32 and autotuning --------------------------------------------------------------------------


def _error(made, truth):
    return float((made.detach().to("cpu", torch.float64) - truth).norm() / truth.norm())


def product_error():
    torch.manual_seed(0)
    left = torch.randn(512, 512, dtype=torch.float64)
    here = left.to(DEVICE, torch.float32)
    return _error(here @ here, left @ left)


def gradient_error():
    """Of a product in a backward pass, which runs in a thread of its own."""
    torch.manual_seed(0)
    left, right = (torch.randn(512, 512, dtype=torch.float64) for _ in range(2))
    weight = right.to(DEVICE, torch.float32).requires_grad_()
    (left.to(DEVICE, torch.float32) @ weight).backward(left.to(DEVICE, torch.float32))
    return _error(weight.grad, left.T @ left)


def convolution_error():
    torch.manual_seed(0)
    x, weight = torch.randn(8, 64, 16, 16, dtype=torch.float64), torch.randn(64, 64, 3, 3, dtype=torch.float64)
    here = nn.functional.conv2d(x.to(DEVICE, torch.float32), weight.to(DEVICE, torch.float32))
    return _error(here, nn.functional.conv2d(x, weight))


def rnn_error():
    torch.manual_seed(0)
    layer, x = nn.LSTM(256, 256).double(), torch.randn(8, 64, 256, dtype=torch.float64)
    truth = layer(x)[0].detach()
    return _error(copy.deepcopy(layer).to(DEVICE, torch.float32)(x.to(DEVICE, torch.float32))[0], truth)


ERRORS = [product_error, gradient_error, convolution_error, rnn_error]


def by_old_switches():
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = False


def by_new_switches():
    MATMUL.fp32_precision = CUDNN.conv.fp32_precision = CUDNN.rnn.fp32_precision = "ieee"


@pytest.mark.parametrize("user", [by_old_switches, by_new_switches])
def test_tf32_is_on_inside_in_forward_and_backward_and_off_again_afterwards(user):
    if not has_tf32():
        assert "tf32 is absent" in why_not_precision("tf32", DEVICE)
        return
    before = MATMUL.fp32_precision, CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision
    try:
        user()
        switches = Switches(Numerics(precision="tf32"), Execution(), DEVICE)
        for _ in range(2):
            assert all(error() < 1e-5 for error in ERRORS)
            with switches:
                coarse = [error() for error in ERRORS]
            assert all(1e-5 < error < 1e-2 for error in coarse), coarse
        assert all(error() < 1e-5 for error in ERRORS)
    finally:
        MATMUL.fp32_precision, CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = before


def test_in_fp32_tf32_that_the_user_has_on_stays_on():
    MATMUL.allow_tf32 = True
    with Switches(Numerics(), Execution(), DEVICE):
        assert MATMUL.allow_tf32
        assert (product_error() > 1e-5) is has_tf32()


def test_autotuning_is_on_inside_and_as_it_was_afterwards():
    switches = Switches(Numerics(), Execution(autotune=True), DEVICE)
    for user in (False, True):
        CUDNN.benchmark = user
        with switches:
            assert CUDNN.benchmark
            assert convolution_error() < 1e-2
        assert CUDNN.benchmark is user


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_forward_passes_compute_in_the_precision(precision, dtype):
    reason = why_not_precision(precision, DEVICE)
    if reason is not None:  # an older GPU: no bf16
        assert precision == "bf16"
        assert not has_tf32()
        return
    layer = nn.Linear(4, 3, device=DEVICE)
    with precision_context(Numerics(precision=precision), DEVICE, [layer])():
        assert layer(torch.ones(2, 4, device=DEVICE)).dtype is dtype


# --- a scaled loss --------------------------------------------------------------------------------


def classifier(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(DEVICE)


def batch(number, *, bad=False):
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)
    return (x * (1e6 if bad else 1.0)).to(DEVICE), y.to(DEVICE)


SCALED = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
OVERFLOWS = (3, 4, 11)


def scaled_step(model, optimizer, scale, x, y, *, clip=None):
    optimizer.zero_grad()
    with precision_context(Numerics(precision="fp16"), DEVICE, [model])():
        loss = nn.functional.cross_entropy(model(x), y)
    scale.scaled(loss).backward()
    scale.unscale_([p.grad for p in model.parameters()])
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    with skipping(optimizer, scale.found_inf):
        optimizer.step()
    scale.update()
    return loss


def grad_scaler_step(model, optimizer, scaler, x, y, *, clip=None):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("name", SCALED)
def test_fp16_with_overflows_trains_as_with_torchs_grad_scaler(name, clip):
    """The scale begins so high that the first steps are left out, as they are in life."""
    mine, theirs = classifier(), classifier()
    optimizer, other = SCALED[name](mine.parameters()), SCALED[name](theirs.parameters())
    Fusion(optimizer).set(True)
    # Under GradScaler, fused SGD would go on from momentum that nobody has filled.
    Fusion(other).set(name != "sgd")
    scale = LossScale(DEVICE, start=2.0**24, interval=3)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24, growth_interval=3)
    skipped = 0
    for number in range(40):
        x, y = batch(number, bad=number in OVERFLOWS)
        scaled_step(mine, optimizer, scale, x, y, clip=clip)
        before = scaler.get_scale()
        grad_scaler_step(theirs, other, scaler, x, y, clip=clip)
        skipped += scaler.get_scale() < before
        assert scale.scale.item() == scaler.get_scale()
    assert scale.skips() == skipped > len(OVERFLOWS)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("name", SCALED)
def test_no_scaled_step_waits_for_the_gpu(name):
    model = classifier()
    optimizer = SCALED[name](model.parameters())
    Fusion(optimizer).set(True)
    assert skips_on_device(optimizer)
    scale, check = LossScale(DEVICE), LossScale(DEVICE, enabled=False)
    batches = [batch(n, bad=n == 2) for n in range(4)]
    scaled_step(model, optimizer, scale, *batches[0], clip=1.0)
    torch.cuda.synchronize()
    with no_waiting():
        for x, y in batches:
            scaled_step(model, optimizer, scale, x, y, clip=1.0)
            check.look_at(next(model.parameters()).grad.norm())
            check.update()
        saved = scale.saved()
        scale.reset()
        scale.put_back(saved)
    assert scale.skips() >= 1
    assert check.skips() >= 1


@pytest.mark.parametrize("name", SCALED)
def test_a_scaled_step_can_be_recorded_and_its_replays_skip_where_the_eager_ones_do(name):
    def trained(captured):
        model = classifier()
        optimizer = SCALED[name](model.parameters())
        Fusion(optimizer).set(True, captured=captured)
        scale = LossScale(DEVICE, start=2.0**24, interval=3)
        rates = [torch.zeros((), device=DEVICE)]
        x, y = batch(0)
        x, y = x.clone(), y.clone()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()

        def step():
            with recording(optimizer, rates) if captured else nullcontext():
                scaled_step(model, optimizer, scale, x, y, clip=1.0)

        for number in range(24):
            fresh = batch(number, bad=number in (*OVERFLOWS, 0))
            x.copy_(fresh[0])
            y.copy_(fresh[1])
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + number)
            rates[0].fill_(0.05 / (1 + number))
            if captured and number == 5:
                with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                    step()
            if captured and number >= 5:
                graph.replay()
            elif captured:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    step()
                torch.cuda.current_stream().wait_stream(stream)
            else:
                step()
        return [p.detach() for p in model.parameters()], scale.skips(), scale.scale.item()

    (eager, skips, end), (replayed, same_skips, same_end) = trained(False), trained(True)
    assert (skips, end) == (same_skips, same_end)
    assert skips > len(OVERFLOWS)
    for a, b in zip(eager, replayed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "momentum", "Adam", "AdamW", "Adagrad"])
def test_a_fused_step_left_out_touches_nothing_the_first_one_included(name, dtype):
    def make(parameters):
        if name == "momentum":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        return getattr(torch.optim, name)(parameters, lr=0.1)

    weight = nn.Parameter(torch.ones(1000, device=DEVICE, dtype=dtype))
    optimizer = make([weight])
    if why_not_fused(optimizer) is not None:  # Adagrad has a kernel on the GPU from torch 2.13 on
        assert name == "Adagrad"
        assert not skips_on_device(optimizer)
        return
    Fusion(optimizer).set(True)
    assert skips_on_device(optimizer)
    mirror = nn.Parameter(weight.detach().clone())
    plain = make([mirror])
    litter = [torch.full((1000,), 7.0, device=DEVICE, dtype=dtype) for _ in range(100)]
    del litter
    found = torch.zeros((), device=DEVICE)
    for number in range(6):
        bad = number in (0, 1, 4)
        weight.grad = torch.full_like(weight, math.nan if bad else number + 1.0)
        found.fill_(float(bad))
        with skipping(optimizer, found):
            optimizer.step()
        if not bad:
            mirror.grad = torch.full_like(mirror, number + 1.0)
            plain.step()
    torch.testing.assert_close(weight, mirror, rtol=1e-5, atol=1e-6)
    for key, value in plain.state[mirror].items():
        mine = optimizer.state[weight][key].cpu().double()
        torch.testing.assert_close(mine, value.cpu().double(), rtol=1e-5, atol=1e-6)


# --- layout ---------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """Convolutions of every shape whose strides are ambiguous."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, groups=16, padding=1),
            nn.Conv2d(16, 8, 1),
            nn.ConvTranspose2d(8, 8, 2),
            nn.Conv2d(8, 1, 3),
        )
        self.head = nn.Linear(49, 3)

    def forward(self, x):
        return self.head(self.layers(x).flatten(1))


def strides(tensor):
    return [s for s, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    # Adam makes whole steps of gradients that are nothing but rounding, so fp32 tells nothing of it.
    [("sgd", torch.float64), ("sgd", torch.float32), ("adamw", torch.float64)],
)
def test_convolutions_train_the_same_either_way_round(name, fused, dtype):
    MATMUL.allow_tf32 = CUDNN.allow_tf32 = False

    def trained(switched):
        model = Pictures().to(DEVICE, dtype)
        optimizer = SCALED[name](model.parameters())
        Fusion(optimizer).set(fused)
        layout = Layout([model], optimizer)
        turned = False
        for number in range(12):
            if switched and number in (2, 6, 9):
                turned = not turned
                layout.set("channels_last" if turned else "as given")
                assert model.layers[0].weight.is_contiguous() is not turned
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(16, 3, 8, 8, generator=generator, dtype=dtype).to(DEVICE)
            y = torch.randint(3, (16,), generator=generator).to(DEVICE)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(layout.batch(x) if turned else x), y).backward()
            optimizer.step()
            for parameter in model.parameters():
                for held in (parameter.grad, *optimizer.state[parameter].values()):
                    if isinstance(held, torch.Tensor) and held.shape == parameter.shape:
                        assert strides(held) == strides(parameter)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    close = {"rtol": 1e-8, "atol": 1e-10} if dtype is torch.float64 else {"rtol": 1e-3, "atol": 1e-4}
    torch.testing.assert_close(trained(True), trained(False), **close)


# --- recorded optimizers --------------------------------------------------------------------------

SETTINGS = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adadelta": {},
    "Adagrad": {"lr_decay": 0.1},
    "ASGD": {"t0": 2},
    "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {},
    "Muon": {},
    "Adafactor": {},
}
RECORDED = {"Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop", "Rprop"}
"""Those that can be recorded by their plain loop."""
RATES = (0.1, 0.02, 0.2, 0.05, 0.4, 0.1, 0.3, 0.01)


def two_groups(name):
    """An optimizer of two groups with rates of their own, on fresh weights."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 4, device=DEVICE)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.05}]
    return getattr(torch.optim, name)(groups, lr=0.1, **SETTINGS[name])


def give(optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for place, group in enumerate(optimizer.param_groups):
        group["lr"] = RATES[number] * (place + 1)
        for parameter in group["params"]:
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator).to(DEVICE))


def everything(optimizer):
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    state = [v for p in weights for _, v in sorted(optimizer.state[p].items()) if isinstance(v, torch.Tensor)]
    return [t.detach().double().cpu() for t in (*weights, *state)]


def trained_eagerly(name):
    optimizer = two_groups(name)
    for number in range(len(RATES)):
        give(optimizer, number)
        optimizer.step()
    return everything(optimizer)


def trained_by_replay(name, *, fused):
    """Two eager steps, a recording, replays with an eager step between them, and a plain one at the end."""
    optimizer = two_groups(name)
    fusion = Fusion(optimizer)
    fusion.set(fused, captured=True)
    rates = [torch.zeros((), device=DEVICE) for _ in optimizer.param_groups]
    graph = torch.cuda.CUDAGraph()
    recorded = False
    for number in range(len(RATES)):
        give(optimizer, number)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            rate.fill_(group["lr"])
        if number < 2 or number == 4:
            optimizer.step()
        elif number == len(RATES) - 1:
            fusion.set(False)
            assert not any(group.get("capturable") for group in optimizer.param_groups)
            optimizer.step()
        else:
            if not recorded:
                with recording(optimizer, rates), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    optimizer.step()
                recorded = True
            graph.replay()
        assert all(type(group["lr"]) is float for group in optimizer.param_groups)
    return everything(optimizer)


@pytest.mark.parametrize("kind", ["plain", "fused"])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_recorded_optimizer_follows_its_rates_or_says_why_it_cannot_be(name, kind):
    if not hasattr(torch.optim, name):
        assert name == "Muon"
        return
    optimizer = two_groups(name)
    if kind == "fused":
        if why_not_fused(optimizer) is not None:
            assert name not in ("SGD", "Adam", "AdamW")
            return
        Fusion(optimizer).set(True)
    before = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    reason = why_not_captured(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, _weights(optimizer), strict=True))
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if kind == "plain" and name not in RECORDED:
        assert reason is not None
        assert name in reason
        return
    assert reason is None
    for mine, theirs in zip(trained_by_replay(name, fused=kind == "fused"), trained_eagerly(name), strict=True):
        # Bias corrections are computed in fp32 there: RAdam's are off by a thousandth of an update at first.
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def _weights(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("already", [0, 3])
@pytest.mark.parametrize("name", sorted({*RECORDED, "SGD"}))
def test_it_is_found_out_before_and_after_steps_and_leaves_the_random_numbers_alone(name, already):
    """A recording that breaks would leave torch's generator unusable."""
    optimizer = two_groups(name)
    for number in range(already):
        give(optimizer, number)
        optimizer.step()
    before, state = everything(optimizer), torch.cuda.get_rng_state()
    assert (why_not_captured(optimizer) is None) is (name != "SGD")
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert torch.rand(3, device=DEVICE).isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(everything(optimizer), before, strict=True))


def test_optimizers_that_are_no_plain_step_say_so():
    weight = nn.Parameter(torch.ones(2, 2, device=DEVICE))
    for optimizer in (torch.optim.LBFGS([weight]), torch.optim.SparseAdam([weight])):
        assert type(optimizer).__name__ in why_not_captured(optimizer)

    class Counting(torch.optim.SGD):
        """Every other step goes the other way, as only the host knows."""

        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    count = self.state[parameter].get("count", 0)
                    self.state[parameter]["count"] = count + 1
                    parameter.data.sub_(parameter.grad * group["lr"] * (-1) ** count)

    assert why_not_captured(Counting([weight])) == "Counting keeps 'count' where a replay does not move it"

    class Baking(torch.optim.SGD):
        """Right where the rate is a number, and deaf to one in a tensor."""

        def step(self, closure=None):
            for group in self.param_groups:
                rate = 0.1 if isinstance(group["lr"], torch.Tensor) else group["lr"]
                for parameter in group["params"]:
                    parameter.data.sub_(parameter.grad * rate)

    assert why_not_captured(Baking([weight])) == "Baking does not follow its learning rate when it is replayed"


def test_the_plain_loop_is_as_fast_as_it_was_after_the_fused_kernel(monkeypatch):
    """Where torch may choose, it updates all parameters at once on a GPU."""
    weights = [nn.Parameter(torch.ones(4, device=DEVICE)) for _ in range(3)]
    optimizer = torch.optim.AdamW(weights)
    fusion, made = Fusion(optimizer), []
    loops = importlib.import_module("torch.optim.adam")  # torch hides the module behind its function
    for name in ("_single_tensor_adam", "_multi_tensor_adam"):
        noted = functools.partial(_noted, made, name, getattr(loops, name))
        monkeypatch.setattr(loops, name, noted)
    for kind in (False, True, False):
        fusion.set(kind)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert made == ["_multi_tensor_adam"] * 2


def _noted(made, name, loop, *parts, **named):
    made.append(name)
    return loop(*parts, **named)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "RMSprop", "ASGD"])
def test_step_counts_are_on_the_device_while_captured_and_where_torch_has_them_for_the_plain_loop(name):
    optimizer = two_groups(name)
    fusion = Fusion(optimizer)

    def places():
        found = {v.device.type for s in optimizer.state.values() for k, v in s.items() if k in ("step", "mu_product")}
        assert len(found) == 1
        return found.pop()

    give(optimizer, 0)
    optimizer.step()
    fusion.set(False, captured=True)
    assert places() == "cuda"
    addresses = [state["step"].data_ptr() for state in optimizer.state.values()]
    give(optimizer, 1)
    with no_waiting():
        optimizer.step()
    fusion.set(False, captured=True)
    assert [state["step"].data_ptr() for state in optimizer.state.values()] == addresses
    fusion.set(False)
    assert places() == ("cuda" if name == "ASGD" else "cpu")
    give(optimizer, 2)
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


def test_a_count_of_an_optimizer_that_knows_no_such_flags_stays_where_it_is():
    class Counting(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

    weight = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = Counting([weight])
    optimizer.state[weight]["step"] = torch.zeros((), device=DEVICE)
    for captured in (True, False):
        Fusion(optimizer).set(False, captured=captured)
        assert optimizer.state[weight]["step"].is_cuda
        assert set(optimizer.param_groups[0]) == {"params", "lr"}


def test_a_step_that_nobody_announced_as_captured_is_recorded_all_the_same():
    optimizer = two_groups("AdamW")
    rates = [torch.full((), 0.1, device=DEVICE) for _ in optimizer.param_groups]
    give(optimizer, 0)
    optimizer.step()
    with recording(optimizer, rates):
        optimizer.step()
    addresses = [state["step"].data_ptr() for state in optimizer.state.values()]
    assert all(state["step"].is_cuda for state in optimizer.state.values())
    with recording(optimizer, rates):
        optimizer.step()
    assert [state["step"].data_ptr() for state in optimizer.state.values()] == addresses
    assert not any(group["capturable"] for group in optimizer.param_groups)


@pytest.mark.parametrize("taken", ["eager", "captured"])
def test_a_snapshot_is_restored_in_the_other_kind_of_step_and_counts_keep_their_place(taken):
    optimizer = two_groups("AdamW")
    module = nn.ParameterList(_weights(optimizer))
    fusion = Fusion(optimizer)
    fusion.set(False, captured=taken == "captured")
    give(optimizer, 0)
    optimizer.step()
    before = everything(optimizer)
    snapshot = Snapshot([module], optimizer, None, DEVICE)
    fusion.set(False, captured=taken == "eager")
    optimizer.step()
    places = [state["step"].data_ptr() for state in optimizer.state.values()]
    snapshot.restore()
    fusion.set(False, captured=taken == "eager")
    assert [state["step"].data_ptr() for state in optimizer.state.values()] == places
    assert all(torch.equal(a, b) for a, b in zip(everything(optimizer), before, strict=True))
    optimizer.step()
