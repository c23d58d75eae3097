"""A script may view its gradients flat, as LBFGS does: under channels last only images are turned, not weights.

Gradients that `backward()` has not made can lie in memory in another order than their weights.
"""

import pytest
import torch
from torch import nn

from hotlap.engine.optimizers import LayoutCheck
from hotlap.script.update.updates import Updates

SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
x, y = torch.randn(64, 3, 8, 8), torch.randint(2, (64,))
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(144, 2))
optimizer = {optimizer}
def closure():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    return loss
for step in range(20):
    {step}
    flat = torch.cat([p.grad.view(-1) for p in model.parameters()])
print(f"{{float(flat.norm()):.3f}}", nn.utils.parameters_to_vector(model.parameters()).numel())
"""
OPTIMIZERS = {
    "sgd": {"optimizer": "torch.optim.SGD(model.parameters(), lr=0.05)", "step": "closure(); optimizer.step()"},
    "lbfgs": {"optimizer": "torch.optim.LBFGS(model.parameters(), max_iter=2)", "step": "optimizer.step(closure)"},
}


BY_GRAD = """loss = nn.functional.cross_entropy(model(x), y)
    for p, grad in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
        p.grad = grad
    optimizer.step()"""


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_of_a_script_can_be_viewed_flat_under_any_plan(name, tmp_path, forks):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**OPTIMIZERS[name]))
    options = ("--out", str(tmp_path / "run"), "--plan", "max")
    done = forks.run("-m", "hotlap", "run", *options, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "channels_last" in (tmp_path / "run" / "ledger.jsonl").read_text()
    alone = forks.run(str(script), cwd=tmp_path)
    assert done.stdout.split()[1] == alone.stdout.split()[1]


FUSED = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}
LIES = {
    "channels last": lambda grad: grad.contiguous(memory_format=torch.channels_last),
    "expanded": lambda grad: grad[:1].expand_as(grad),
    "as the weight": lambda grad: grad.clone(),
}


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("kind", FUSED)
def test_fused_steps_take_gradients_however_they_lie(kind, lies):
    def trained(fused_from, turned_until):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 3, 3, 3))
        optimizer = FUSED[kind]([weight])
        updates = Updates([optimizer])
        for number in range(6):
            if number == fused_from:
                updates.use("fused")
            grad = torch.randn(4, 3, 3, 3)
            weight.grad = LIES[lies](grad) if number < turned_until else grad
            updates.before_step(optimizer)
            optimizer.step()
            updates.after_step(optimizer)
        return weight.detach()

    for turned_until in (6, 2):  # the state that a plain step has left may lie as its gradient did
        plain, fused = (trained(fused_from, turned_until) for fused_from in (None, 2))
        torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


def test_strides_of_dimensions_of_one_do_not_keep_a_step_from_being_fused():
    weight = nn.Parameter(torch.randn(4, 3, 1, 1))
    weight.grad = (
        torch.randn(4, 3, 1, 1).contiguous(memory_format=torch.channels_last).as_strided((4, 3, 1, 1), (3, 1, 3, 3))
    )
    assert weight.grad.stride() != weight.stride()
    assert LayoutCheck(torch.optim.Adam([weight])).matches_weights()


def test_gradients_by_autograd_grad_update_the_same_under_every_choice_at_once(tmp_path, forks):
    script = tmp_path / "train.py"
    text = SCRIPT.format(optimizer="torch.optim.Adam(model.parameters())", step=BY_GRAD)
    script.write_text(text.replace("p.grad.view", "p.grad.reshape"))
    alone = forks.run(str(script), cwd=tmp_path)
    done = forks.run("-m", "hotlap", "run", "--out", "run", "--plan", "max", str(script), cwd=tmp_path)
    assert done.returncode == alone.returncode == 0, done.stderr
    ledger = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert "channels_last" in ledger
    assert '"optimizer": "fused"' in ledger
    assert done.stdout == alone.stdout


def test_state_that_is_loaded_and_weights_that_are_turned_are_looked_at_again():
    weight = nn.Parameter(torch.randn(4, 3, 3, 3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.randn(4, 3, 3, 3)
    optimizer.step()
    check = LayoutCheck(optimizer)
    assert check.matches_weights()
    saved = optimizer.state_dict()
    kept = saved["state"][0]
    saved["state"][0] = kept | {"exp_avg": kept["exp_avg"].contiguous(memory_format=torch.channels_last)}
    optimizer.load_state_dict(saved)
    assert not check.matches_weights()
    optimizer.load_state_dict({**saved, "state": {0: kept}})
    assert check.matches_weights()
    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    weight.grad = weight.grad.contiguous(memory_format=torch.channels_last)
    assert not check.matches_weights()
