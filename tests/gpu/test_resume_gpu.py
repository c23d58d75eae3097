"""A training on a GPU that was left and resumed ends as the undisturbed one, under deterministic algorithms."""

import os
import subprocess
import sys

SCRIPT = """
import sys
import torch
from torch import nn
import hotlap

torch.use_deterministic_algorithms(True)

def job(steps):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 3))
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(2))
    return hotlap.Job(
        model=model, data=(x, torch.arange(96) % 3), loss=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        schedule=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 50),
        clip=1.0, batch_size=8, steps=steps, device="cuda",
    )

PLANS = {
    "plain": {},
    "fused": {"optimizer": "fused"},
    "bf16": {"optimizer": "fused", "precision": "bf16"},
    "captured": {"optimizer": "fused", "kind": "resident", "mode": "captured", "replay_steps": 3},
}
for name, plan in PLANS.items():
    folder = sys.argv[1] + "/" + name
    whole = hotlap.fit(job(30), out=folder + "/whole", plan=plan, progress=False)
    hotlap.fit(job(17), out=folder + "/left", plan=plan, save_every=17, progress=False)
    resumed = hotlap.fit(job(30), resume=folder + "/left", progress=False)
    assert "resumed at step 17" in [entry.what for entry in resumed.ledger]
    assert resumed.plan == whole.plan
    assert resumed.updates == whole.updates == 30
    for (key, a), b in zip(whole.model.state_dict().items(), resumed.model.state_dict().values()):
        assert a.device.type == "cuda" and torch.equal(a, b), (name, key)
    print(name, "equal")
"""


def test_a_resumed_training_is_bit_equal_on_the_gpu(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["plain equal", "fused equal", "bf16 equal", "captured equal"]
