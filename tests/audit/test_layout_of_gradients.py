"""A script may view its gradients flat, as LBFGS does: under channels last only images are turned, not weights."""

import os

import pytest
from preloaded import Preloaded

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


@pytest.fixture(scope="module")
def python():
    made = Preloaded("hotlap.cli", "hotlap.script.session", "torch._dynamo", environment=dict(os.environ))
    yield made
    made.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_of_a_script_can_be_viewed_flat_under_any_plan(name, tmp_path, python):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(**OPTIMIZERS[name]))
    options = ("--out", str(tmp_path / "run"), "--plan", "max")
    done = python.run("-m", "hotlap", "run", *options, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "channels_last" in (tmp_path / "run" / "ledger.jsonl").read_text()
    alone = python.run(str(script), cwd=tmp_path)
    assert done.stdout.split()[1] == alone.stdout.split()[1]
