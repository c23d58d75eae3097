"""What convolutions of one channel each cost before they are fast."""

from types import SimpleNamespace

import torch
from torch import nn

from hotlap.core.plan import Plan
from hotlap.moves import layout, precision
from hotlap.moves.depthwise import depthwise


def separable(*kernels):
    """Layers as MobileNet has them: each channel by itself, then all of them together."""
    layers = [(nn.Conv2d(8, 8, kernel, groups=8, padding=1), nn.Conv2d(8, 8, 1)) for kernel in kernels]
    return nn.Sequential(*(one for pair in layers for one in pair))


def test_each_kind_counts_once_and_others_do_not():
    assert depthwise([separable(3, 3, 5), separable(5)]) == 2
    assert depthwise([nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Linear(4, 4)]) == 0


def test_moves_that_make_cudnn_compile_kernels_say_what_that_takes():
    def setup_s(move, device, model):
        return move.setup_s(Plan(), SimpleNamespace(device=torch.device(device), modules=[model]))

    for move in (precision.MOVE, layout.MOVE):
        plain = setup_s(move, "cuda", nn.Conv2d(3, 8, 3))
        assert setup_s(move, "cuda", separable(3, 5)) > plain + 0.5
        assert setup_s(move, "cpu", separable(3, 5)) == setup_s(move, "cpu", nn.Conv2d(3, 8, 3))
