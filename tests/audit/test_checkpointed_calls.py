"""Modules that a script calls inside of `torch.utils.checkpoint` are called again in the backward pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls.call import Call


@pytest.mark.parametrize("numerics", [Numerics(layout="channels_last"), Numerics(precision="bf16")])
def test_a_call_that_is_made_again_for_a_backward_pass_ends_as_torch_ends_it(numerics):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    call = Call(model, device=torch.device("cpu"))
    call.use(numerics, Execution())
    x = torch.randn(2, 3, 8, 8)
    for _ in range(2):
        checkpoint(lambda x: call(model, (x,), {}), x, use_reentrant=False).float().sum().backward()
    assert call.given_up is None
    assert all(p.grad is not None for p in model.parameters())
