"""Moves for networks whose depthwise convolutions cuDNN would have to compile first."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hotlap.core.plan import Plan
from hotlap.machine import DtypeFact, Support
from hotlap.moves import depthwise, layout, precision
from hotlap.moves.every import everything


def separable(*kernels):
    """Layers as MobileNet has them: each channel by itself, then all of them together."""
    layers = [(nn.Conv2d(8, 8, kernel, groups=8, padding=1), nn.Conv2d(8, 8, 1)) for kernel in kernels]
    return nn.Sequential(*(one for pair in layers for one in pair))


def training(model, device="cuda"):
    return SimpleNamespace(device=torch.device(device), modules=[model])


@pytest.fixture
def has_bf16(monkeypatch):
    fact = DtypeFact(support=Support.HARDWARE, reason="", kernel="ran")
    monkeypatch.setattr("hotlap.machine.dtype_fact", lambda device, name: fact)


@pytest.mark.parametrize("move", [precision.MOVE, layout.MOVE], ids=["16 bits", "channels last"])
def test_nothing_waits_for_cudnn_to_compile_them(move, has_bf16):
    found = move.propose(Plan(), training(separable(3, 5)))
    assert found.numerics.depthwise == "direct"
    assert move.setup_s(found, training(separable(3, 5))) == move.setup_s(found, training(nn.Conv2d(3, 8, 3)))


@pytest.mark.parametrize("move", [precision.MOVE, layout.MOVE], ids=["16 bits", "channels last"])
def test_other_networks_and_devices_are_left_to_torchs_choice(move, has_bf16):
    assert move.propose(Plan(), training(nn.Conv2d(3, 8, 3))).numerics.depthwise == "library"
    assert move.propose(Plan(), training(separable(3), "cpu")).numerics.depthwise == "library"


def test_cudnn_comes_later_and_says_what_compiling_takes():
    plan = Plan().but(layout="channels_last", depthwise="direct")
    found = depthwise.MOVE.propose(plan, training(separable(3, 3, 5)))
    assert found == plan.but(depthwise="library")
    assert depthwise.MOVE.setup_s(found, training(separable(3, 3, 5))) == 2 * depthwise.COMPILING_S
    assert isinstance(depthwise.MOVE.propose(Plan(), training(separable(3))), str)


def test_everything_at_once_takes_cudnn_whatever_compiling_takes(has_bf16):
    rig = training(separable(3))
    rig.supports, rig.plan = lambda plan: None, Plan()
    known = [precision.MOVE, layout.MOVE]
    assert everything(rig, Plan(), known).plan.numerics.depthwise == "direct"
    assert everything(rig, Plan(), [*known, depthwise.MOVE]).plan.numerics.depthwise == "library"
