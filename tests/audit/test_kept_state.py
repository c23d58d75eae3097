"""Tensors that a module keeps from call to call have the dtype of its own calls, whatever precision a plan has."""

from collections import deque
from typing import NamedTuple

import torch
from torch import nn

from hotlap.core.plan import Execution, Numerics
from hotlap.engine.rig import Rig
from hotlap.script.calls.call import ModuleCall

CPU = torch.device("cpu")
BF16 = Numerics(precision="bf16"), Execution()


class Stateful(nn.Module):
    """Goes on with the state of the last call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.onward, self.state = nn.Linear(5, 8), nn.Linear(8, 8), (None,)

    def forward(self, x):
        out = self.inward(x) if self.state[0] is None else self.inward(x) + self.onward(self.state[0])
        self.state = (out.detach(),)
        return out


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Keeper(nn.Module):
    """Keeps what its layer gives in every way that people do."""

    def __init__(self):
        super().__init__()
        self.layer, self.hooked = nn.Linear(3, 3), nn.Linear(3, 3)
        self.hooked.register_forward_hook(lambda layer, _, output: setattr(layer, "seen", output.detach()))
        self.register_buffer("mean", torch.zeros(2, 3))
        self.own_half = torch.zeros(3, dtype=torch.bfloat16)
        self.history, self.by_name, self.last, self.pair = [], {"deep": [None]}, deque(maxlen=2), None

    def forward(self, x):
        out = self.hooked(self.layer(x))
        self.mean = out.detach()
        self.own_half = out.detach().bfloat16()
        self.history.append(out.detach())
        self.by_name["deep"][0] = out.detach()
        self.last.append(out.detach())
        self.pair = Pair(out.detach(), out)
        return out


def test_a_call_in_bf16_leaves_a_state_that_the_scripts_own_call_takes():
    model = Stateful()
    call, x = ModuleCall(model, device=CPU), torch.randn(4, 5)
    call.use(*BF16)
    for _ in range(3):
        call(model, (x,), {}).sum().backward()
        assert model.state[0].dtype == torch.float32
        model.eval()
        with torch.no_grad():
            assert call(model, (x,), {}).dtype == torch.float32
        model.train()
    assert call.given_up is None


def test_all_that_a_module_keeps_has_its_own_dtype_and_stays_in_its_own_containers():
    model = Keeper()
    history, by_name, last = model.history, model.by_name, model.last
    call, x = ModuleCall(model, device=CPU), torch.randn(2, 3)
    call.use(*BF16)
    for _ in range(4):
        call(model, (x,), {})
    kept = [model.hooked.seen, model.mean, *history, by_name["deep"][0], *last, *model.pair]
    assert {one.dtype for one in kept} == {torch.float32}
    assert len(history) == 4
    assert model.history is history
    assert model.by_name is by_name
    assert model.last is last
    assert type(model.pair) is Pair
    assert model.pair.second.requires_grad
    assert model.own_half.dtype == torch.bfloat16
    assert dict(model.named_buffers()).keys() == {"mean"}


def test_a_rig_may_change_its_precision_though_a_module_keeps_its_state():
    model, generator = Stateful(), torch.Generator().manual_seed(1)
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), device="cpu")
    batches = [(torch.randn(4, 5, generator=generator), torch.zeros(4, 8)) for _ in range(6)]
    for number, batch in enumerate(batches):
        rig.use(rig.plan.but(precision="bf16" if number % 2 else "fp32"))
        rig.step(batch)
        assert model.state[0].dtype == torch.float32


def test_a_model_of_16_bits_keeps_a_state_of_16_bits():
    model = Stateful().bfloat16()
    rig = Rig(model, torch.optim.SGD(model.parameters(), lr=0.01), nn.MSELoss(), device="cpu")
    rig.use(rig.plan.but(precision="bf16"))
    rig.step((torch.randn(4, 5).bfloat16(), torch.zeros(4, 8)))
    assert model.state[0].dtype == torch.bfloat16
