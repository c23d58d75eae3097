"""Modules that a script calls inside of `torch.utils.checkpoint` are called again in the backward pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls.call import ModuleCall


@pytest.mark.parametrize("numerics", [Numerics(layout="channels_last"), Numerics(precision="bf16")])
def test_a_call_that_is_made_again_for_a_backward_pass_ends_as_torch_ends_it(numerics):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    call = ModuleCall(model, device=torch.device("cpu"))
    call.use(numerics, Execution())
    x = torch.randn(2, 3, 8, 8)
    for _ in range(2):
        checkpoint(lambda x: call(model, (x,), {}), x, use_reentrant=False).float().sum().backward()
    assert call.given_up is None
    assert all(p.grad is not None for p in model.parameters())


def test_a_call_is_made_again_under_the_switches_that_it_was_made_under(monkeypatch):
    monkeypatch.setattr("hotlap.engine.precision._is_emulated", lambda *_: True)  # bf16 goes without oneDNN then
    seen = []

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.LSTM(5, 8)

        def forward(self, x):
            computed_again = torch._C._current_graph_task_id() != -1
            seen.append((computed_again, torch._C._get_mkldnn_enabled()))
            return self.inner(x)[0]

    model, head = Recurrent(), nn.Linear(8, 1)
    calls = {one: ModuleCall(one, device=torch.device("cpu")) for one in (model, head)}
    for call in calls.values():
        call.use(Numerics(precision="bf16"), Execution())
    x = torch.randn(6, 4, 5)
    for _ in range(3):
        made = checkpoint(lambda x: calls[model](model, (x,), {}), x, use_reentrant=False)
        calls[head](head, (made,), {}).sum().backward()
    assert seen == [(False, True), (True, True)] * 3
    assert torch._C._get_mkldnn_enabled()
    assert all(call.given_up is None for call in calls.values())
    assert all(p.grad is not None for p in model.parameters())
