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

plan = {"optimizer": sys.argv[2], "precision": sys.argv[3]}
whole = hotlap.fit(job(30), out=sys.argv[1] + "/whole", plan=plan, progress=False)
hotlap.fit(job(17), out=sys.argv[1] + "/left", plan=plan, save_every=17, progress=False)
resumed = hotlap.fit(job(30), resume=sys.argv[1] + "/left", progress=False)
assert "resumed at step 17" in [entry.what for entry in resumed.ledger]
assert resumed.plan == whole.plan
assert resumed.updates == whole.updates == 30
for (name, a), b in zip(whole.model.state_dict().items(), resumed.model.state_dict().values()):
    assert a.device.type == "cuda" and torch.equal(a, b), name
print("equal")
"""


def test_a_resumed_training_is_bit_equal_on_the_gpu(tmp_path):
    for optimizer, precision in (("plain", "fp32"), ("fused", "fp32"), ("fused", "bf16")):
        folder = tmp_path / f"{optimizer}-{precision}"
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(folder), optimizer, precision],
            capture_output=True,
            text=True,
            env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "equal\n"
