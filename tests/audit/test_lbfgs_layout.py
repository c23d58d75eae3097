"""LBFGS flattens gradients by `view`, which those that lie channels last do not allow."""

import torch
from torch import nn

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls import Call


def test_images_are_not_laid_out_anew_under_lbfgs():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
    optimizer = torch.optim.LBFGS(model.parameters())
    call = Call(model, device=torch.device("cpu"), optimizers=[optimizer])
    assert "LBFGS" in call.supports(Numerics(layout="channels_last"), Execution())
    call = Call(model, device=torch.device("cpu"), optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    assert call.supports(Numerics(layout="channels_last"), Execution()) is None
