"""Depthwise convolutions on a GPU: which kernels make them, and that the losses are the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hotlap import Plan, Rig
from hotlap.engine import depthwise as depthwise_kernels
from hotlap.engine.depthwise import convolved

FAST = Plan().but(kind="resident", mode="captured", optimizer="fused", precision="bf16", layout="channels_last")
TORCHS, HOTLAPS = "conv_depthwise2d", "depthwise_"
"""In the names of torch's own kernels for them, and in those of hotlap."""


def separable():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 5, padding=2, groups=16), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 1), nn.Conv2d(32, 32, 3, stride=2, padding=1, groups=32, bias=False), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def rig_under(plan):
    torch.manual_seed(2)
    rig = Rig(separable(), lambda p: torch.optim.SGD(p, lr=0.05), nn.CrossEntropyLoss(), device="cuda", plan=plan)
    return rig, rig.feed((torch.randn(96, 3, 24, 24), torch.randint(0, 4, (96,))), batch_size=20, epochs=100)


def losses(plan, steps=16):
    rig, windows = rig_under(plan)
    made = torch.stack([rig.step(next(windows)) for _ in range(steps)])
    rig.close()
    return made


@pytest.mark.parametrize("changes", [{}, {"mode": "eager"}, {"precision": "fp32"}], ids=["captured", "eager", "fp32"])
def test_losses_by_direct_kernels_are_those_of_cudnn_to_rounding(changes):
    plan = FAST.but(**changes)
    torch.testing.assert_close(losses(plan.but(depthwise="direct")), losses(plan), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", ["channels_last", "as given"])
@pytest.mark.parametrize("depthwise", ["library", "direct"])
def test_the_plan_says_whose_kernels_they_are(precision, layout, depthwise):
    rig, windows = rig_under(FAST.but(mode="eager", precision=precision, layout=layout, depthwise=depthwise))
    rig.step(next(windows))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        rig.step(next(windows))
        torch.cuda.synchronize()
    kernels = {event.key for event in seen.key_averages()}
    torchs = {kernel for kernel in kernels if TORCHS in kernel}
    hotlaps = {kernel for kernel in kernels if kernel.startswith(HOTLAPS)} - torchs
    is_ours = depthwise == "direct" and layout == "channels_last"
    assert len(hotlaps) == (3 if is_ours else 0)
    assert not (is_ours and torchs)
    assert depthwise == "library" or is_ours or {"forward" in kernel for kernel in torchs} == {True, False}
    rig.close()


SHAPES = [(3, 1, 1), (3, 2, 1), (5, 1, 2), (5, 2, 2), (7, 1, 3), (3, 1, 0), (2, 2, 0)]


@pytest.mark.parametrize(("size", "stride", "pad"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_outputs_and_gradients_of_hotlaps_kernels_are_those_of_torch(size, stride, pad, dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 24, 13, 18, device="cuda").to(memory_format=torch.channels_last)
    weight, bias = torch.randn(24, 1, size, size, device="cuda"), torch.randn(24, device="cuda")
    given = [one.to(dtype).requires_grad_() for one in (x, weight, bias)]
    exact = [one.detach().double().requires_grad_() for one in given]
    made, truth = convolved(*given, stride, pad, 1), F.conv2d(*exact, stride, pad, 1, 24)
    ways = torch.randn_like(made)
    grads, true_grads = torch.autograd.grad(made, given, ways), torch.autograd.grad(truth, exact, ways.double())
    near = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for one, other in zip((made, *grads), (truth, *true_grads), strict=True):
        assert one.dtype == dtype
        assert float((one - other).detach().abs().max() / other.detach().abs().max()) < near


def test_kernels_that_threads_have_compiled_are_at_hand():
    depthwise_kernels._kernels.cache_clear()
    depthwise_kernels._compiled.cache_clear()
    depthwise_kernels.compile_kernels([separable()], torch.device("cuda"), torch.bfloat16)
    assert depthwise_kernels._compiled.cache_info().currsize == 2
    for kind in ((5, 1), (3, 2)):
        assert depthwise_kernels._kernels(torch.device("cuda", 0), torch.bfloat16, *kind) is not None
    assert depthwise_kernels._compiled.cache_info().misses == 2


def test_sums_of_hotlaps_kernels_are_the_same_every_time():
    def gradients():
        torch.manual_seed(0)
        x = torch.randn(16, 64, 28, 28, device="cuda", dtype=torch.bfloat16).to(memory_format=torch.channels_last)
        weight = torch.randn(64, 1, 5, 5, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return torch.autograd.grad(convolved(x, weight, None, 1, 2, 1).float().square().sum(), weight)[0]

    assert torch.equal(gradients(), gradients())
