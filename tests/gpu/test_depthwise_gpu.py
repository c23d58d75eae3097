"""Depthwise convolutions on a GPU: which kernels make them, and that the losses are the same."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from hotlap import Plan, Rig

FAST = Plan().but(kind="resident", mode="captured", optimizer="fused", precision="bf16", layout="channels_last")
TORCHS_OWN = "conv_depthwise2d"
"""In the names of torch's own kernels for them."""


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
def test_losses_by_torchs_own_kernels_are_those_of_cudnn_to_rounding(changes):
    plan = FAST.but(**changes)
    torch.testing.assert_close(losses(plan.but(depthwise="torch")), losses(plan), rtol=0.02, atol=0.02)


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("depthwise", ["library", "torch"])
def test_the_plan_says_whose_kernels_they_are(precision, depthwise):
    rig, windows = rig_under(FAST.but(mode="eager", precision=precision, depthwise=depthwise))
    rig.step(next(windows))
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        rig.step(next(windows))
        torch.cuda.synchronize()
    kernels = [event.key for event in seen.key_averages() if TORCHS_OWN in event.key]
    assert bool(kernels) is (depthwise == "torch")
    assert depthwise == "library" or {"forward" in kernel for kernel in kernels} == {True, False}
    rig.close()
