"""Kernels of attention on a real GPU: timed without a trace, the same numbers, and recorded as they were chosen."""

import time
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from plain import parameters_of
from torch import nn

from hotlap import Plan, Rig
from hotlap.core.tricks import ATTENTION_KERNEL, ATTENTION_MASKS
from hotlap.engine.assists import attention
from hotlap.engine.assists.attention import (
    NAMES,
    Attention,
    Call,
    candidates,
    masks_of,
    own_kernel,
    timed,
    without_a_trace,
)
from hotlap.engine.capture.captured_step import CapturedStep
from hotlap.engine.capture.recording import Recorder
from hotlap.engine.precision import Switches
from hotlap.script.advice import AttentionAdvice
from hotlap.tuner.gates import Gate

DEVICE = torch.device("cuda", 0)
CAPTURED = Plan().but(mode="captured", optimizer="fused", precision="bf16")
EAGER = Plan().but(optimizer="fused", precision="bf16")
SAMPLES, HEADS, SIZE = 16, 12, 64
STEPS = 12


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    monkeypatch.setattr(attention, "_known", {})


@pytest.fixture
def another(monkeypatch):
    """Another kernel than torch's own is the fastest; gives the widths that were timed."""
    widths = []

    def made_up(call, kernels):
        widths.append(call.query.shape[-2])
        return {None: 2.0, **{kernel: 1.0 + number for number, kernel in enumerate(kernels)}}

    monkeypatch.setattr(attention, "timed", made_up)
    return widths


def call_of(width, *, masked, dropout=0.1, dtype=torch.bfloat16, grad=True):
    """As BERT-base makes it: heads are split off the last size, and a mask says which place may look at which."""
    torch.manual_seed(0)
    made = torch.randn(3, SAMPLES, width, HEADS, SIZE, device=DEVICE, dtype=dtype)
    query, key, value = (tensor.transpose(1, 2).requires_grad_(grad) for tensor in made)
    lengths = torch.randint(1, width + 1, (SAMPLES,), device=DEVICE)
    mask = (torch.arange(width, device=DEVICE) < lengths[:, None])[:, None, None].expand(-1, 1, width, -1).contiguous()
    return Call(query, key, value, mask if masked else None, dropout, False, SIZE**-0.5, False)


def numbers(call, kernel):
    answer = call.by(kernel)
    return [answer, *torch.autograd.grad(answer, call.inputs, call.value.detach())]


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "full"])
@pytest.mark.parametrize("width", [16, 64, 128, 384])
def test_kernels_are_timed_and_come_to_the_numbers_of_torchs_own(width, masked):
    call = call_of(width, masked=masked)
    own = own_kernel(call)
    with without_a_trace(DEVICE):
        kernels = candidates(call, own)
        seconds = timed(call, kernels)
    told = {f"torch's own ({NAMES.get(own, own)})" if k is None else NAMES[k]: s * 1e6 for k, s in seconds.items()}
    shown = ", ".join(f"{name} {us:.1f} µs" for name, us in told.items())
    print(f"\nwidth {width}, {'masked' if masked else 'full'}, forward and backward: {shown}")
    assert seconds.keys() == {None, *kernels}
    assert all(0 < s < 1 for s in seconds.values())
    sure = call_of(width, masked=masked, dropout=0.0)
    truth = numbers(sure, None)
    for kernel in kernels:
        for right, other in zip(truth, numbers(sure, kernel), strict=True):
            size = float(right.detach().float().abs().max())
            torch.testing.assert_close(other / size, right / size, rtol=0, atol=2e-2)


def test_forward_passes_alone_and_autocast_are_timed_too():
    with torch.no_grad():
        call = call_of(64, masked=True, grad=False, dropout=0.0)
        with without_a_trace(DEVICE):
            assert None in timed(call, candidates(call, own_kernel(call)))
    wide = call_of(64, masked=True, dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert own_kernel(wide) == own_kernel(call_of(64, masked=True))
        with without_a_trace(DEVICE):
            assert None in timed(wide, candidates(wide, own_kernel(wide)))


def test_kernels_that_the_user_has_switched_off_stay_off():
    call = call_of(64, masked=False)
    before = torch.backends.cuda.mem_efficient_sdp_enabled()
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        with without_a_trace(DEVICE):
            assert "efficient" not in [NAMES[kernel] for kernel in candidates(call, own_kernel(call))]
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(before)


def test_choosing_leaves_randomness_memory_and_gradients_as_they_were():
    call = call_of(64, masked=True)
    leaves = [tensor.detach().requires_grad_() for tensor in call.inputs]
    query, key, value = (leaf * 1 for leaf in leaves)
    # The first recording of a process leaves some bytes with the generator, for good.
    attention._chosen(call_of(32, masked=True))
    torch.cuda.synchronize()
    state, allocated = torch.cuda.get_rng_state(DEVICE), torch.cuda.memory_allocated(DEVICE)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(DEVICE)
    attention._chosen(Call(query, key, value, call.mask, 0.1, False, None, False))
    torch.cuda.synchronize()
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), state)
    # Where cores are busy, autograd's own thread lets go of the last gradients after they were handed over.
    latest = time.perf_counter() + 5
    while torch.cuda.memory_allocated(DEVICE) != allocated and time.perf_counter() < latest:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated(DEVICE) == allocated
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) <= reserved
    assert all(leaf.grad is None for leaf in leaves)


def test_nothing_is_chosen_while_a_recording_is_under_way():
    query, key, value = (tensor.detach() for tensor in call_of(64, masked=False).inputs)
    answers = []
    with torch.no_grad(), Attention(lambda why, cost_s: None):
        graph = Recorder(DEVICE).record(lambda: answers.append(F.scaled_dot_product_attention(query, key, value)))
        assert not attention._known
        graph.replay()
        torch.cuda.synchronize()
        expected = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(answers[0], expected, rtol=2e-2, atol=2e-2)
    assert len(attention._known) == 1


# --- masks -----------------------------------------------------------------------------------------------

SHAPES = [(128, 4, 20, 32), (16, 12, 48, 64), (16, 12, 64, 64), (16, 12, 192, 64), (2, 8, 1024, 64)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", NAMES, ids=NAMES.values())
def test_the_kernels_that_torch_is_left_to_drop_well(kernel, shape):
    call = Call(*torch.randn(3, *shape, device=DEVICE, dtype=torch.bfloat16), None, 0.1, False, None, False)
    before = torch.cuda.get_rng_state(DEVICE)
    try:
        with without_a_trace(DEVICE):
            found = masks_of(call, kernel)
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])
    print(f"\n{NAMES[kernel]} at {shape}: {found}")
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
    if kernel is attention.POOR_MASKS:
        return  # whichever it is: it is no candidate where anything is dropped
    assert found.are_good, found


def kernels_of(work):
    """The kinds of attention that ran, as torch names them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11, the first time in a process
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            work()
    names = [event.name for event in seen.events() if event.name.startswith("aten::_scaled_dot_product")]
    return {name for name in names if not name.endswith("backward")}


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_in_16_bits_attention_that_drops_is_not_left_to_cudnn(dropout):
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True).to(DEVICE)
    x = torch.randn(8, 20, 64, device=DEVICE)

    def plainly():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            layer(x).sum().backward()

    own = kernels_of(plainly)
    with Switches(EAGER.numerics, EAGER.execution, DEVICE):
        mine = kernels_of(plainly)
    print(f"\ndropout {dropout}: torch's own {own}, here {mine}")
    assert own
    assert mine
    if dropout:
        assert not any("cudnn" in name for name in mine)
    else:
        assert mine == own
    assert kernels_of(plainly) == own


@pytest.mark.parametrize("dropout", [0.1, 0.0])
def test_a_script_that_drops_by_cudnn_is_seen_by_its_graph(dropout):
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True).to(DEVICE)
    x, outputs = torch.randn(8, 20, 64, device=DEVICE), []

    def plainly():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            outputs.append(layer(x))

    by_cudnn = any("cudnn" in name for name in kernels_of(plainly))
    seen = AttentionAdvice()
    seen.see(outputs[-1])
    before = torch.cuda.get_rng_state(DEVICE)
    advice = seen.advice()
    print(f"\ndropout {dropout}, by cuDNN {by_cudnn}: {advice}")
    assert torch.equal(torch.cuda.get_rng_state(DEVICE), before)
    assert (seen._call is not None) is (by_cudnn and dropout > 0)
    if seen._call is not None:
        assert seen._call.query.shape == (8, 4, 20, 16)


@pytest.mark.parametrize("plan", [EAGER, EAGER.but(compile="blocks")], ids=["eager", "compiled"])
def test_a_training_in_16_bits_does_not_drop_by_cudnn(plan):
    rig = made(plan)
    for given in batches(4, widths=(16,)):
        rig.step(given)
    window = next(batches(1, widths=(16,)))
    found = kernels_of(lambda: rig.step(window))
    assert found or plan is not EAGER
    assert not any("cudnn" in name for name in found), found
    rig.close()


# --- in a training ---------------------------------------------------------------------------------------


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.3, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def made(plan):
    return Rig(Reader(), sgd, nn.CrossEntropyLoss(), plan=plan, device="cuda")


def batches(count=STEPS, widths=(16, 24)):
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        x = torch.randn(8, widths[number % len(widths)], 64, generator=generator)
        yield x, torch.randint(3, (8,), generator=generator)


def trained(rig, around=nullcontext()):  # noqa: B008 -- it holds nothing
    torch.manual_seed(7)
    with around:
        return torch.stack([rig.step(given).clone() for given in batches()]).float()


def lines(rig):
    return [entry for entry in rig.ledger if entry.what == "attention"]


def test_what_is_recorded_draws_and_learns_as_eager_steps_by_the_same_kernels(another):
    rig = made(CAPTURED)
    mine = trained(rig)
    eager = made(EAGER)
    theirs = trained(eager, eager.attention(CAPTURED))
    assert rig.given_up is None
    assert isinstance(rig._step, CapturedStep)
    assert rig._step.recorded == 2
    assert another == [16, 24]
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(parameters_of(rig.model), parameters_of(eager.model), rtol=5e-2, atol=5e-2)
    assert F.scaled_dot_product_attention is attention.TORCHS_OWN
    told = lines(rig)
    print(f"\n{told[-1].why}")
    assert told[-1].why.endswith("at widths 16–24")
    assert "torch's own" not in told[-1].why
    rig.close()


def test_a_training_made_so_leaves_it_to_torch(another):
    rig = made(CAPTURED.but(without=[ATTENTION_KERNEL, ATTENTION_MASKS]))
    trained(rig)
    assert rig.given_up is None
    assert rig._step.recorded == 2
    assert another == []
    assert not lines(rig)


def test_a_second_training_times_nothing(another):
    trained(made(CAPTURED))
    again = made(CAPTURED)
    trained(again)
    assert another == [16, 24]
    assert lines(again)


def test_real_times_choose_what_a_training_is_recorded_with():
    rig = made(CAPTURED)
    trained(rig)
    print("\n" + (lines(rig)[-1].why if lines(rig) else "torch's own kernels throughout"))
    assert rig.given_up is None
    assert rig._step.recorded == 2
    assert len(attention._known) == 2


def test_the_gate_lets_a_captured_plan_pass_whose_kernels_draw_other_masks_than_torchs_own(another):
    torch.manual_seed(0)
    x = torch.randn(512, 16, 64)
    y = (x.flatten(1) @ torch.randn(x[0].numel(), 3)).argmax(1)
    rig = made(EAGER)
    ahead = rig.feed((x, y), batch_size=16, epochs=100)
    for _ in range(10):
        rig.step(next(ahead))
    found = Gate(rig, EAGER).check(CAPTURED.but(kind="resident"))
    assert found.ok, found.why
    assert another
    assert lines(rig)
    rig.close()
