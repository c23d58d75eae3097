"""Out of memory under a pretended T4, whose memory is a real cap, and beside another process: training, evaluation, and
a script."""

import json
import os
import subprocess
import sys

import pytest
import torch

GIB = 2**30
COMMON = """
import json, os
import torch
from torch import nn
from hotlap.machine import choose_device

if os.environ.get("CAPPED") == "t4":
    choose_device(pretend="t4")
torch.manual_seed(0)
WIDTH, BATCH, BLOCKS = 2048, 65536, 40


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        if wide and not torch.is_grad_enabled():
            x = x.repeat(1, 16).view(len(x), 16, WIDTH).mean(1)
        if steep:  # its backward pass takes 40 times what the forward pass does
            x = x.unsqueeze(1).expand(-1, 40, -1).mean(1)
        return self.head(x)


generator = torch.Generator().manual_seed(1)
x, y = torch.randn(2 * BATCH, WIDTH, generator=generator), torch.randint(3, (2 * BATCH,), generator=generator)
"""
FIT = """
from hotlap import Job, fit

evaluation = {"valid": (x, y), "metrics": ["accuracy"], "eval_batch": 2 * BATCH} if wide else {}
job = Job(
    model=Net(), data=(x, y), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    batch_size=8192 if wide else BATCH, epochs=1, **evaluation,
)
run = fit(job, plan="off", progress=False, save_every=0, out=os.environ["FOLDER"])
faults = [(entry.what, entry.why) for entry in run.ledger if entry.outcome == "fault"]
figures = [value for name, value in sorted(run.history[-1].items()) if name.endswith(("loss", "accuracy"))]
print(json.dumps([figures, faults, run.samples]))
"""
SCRIPT = """
device = torch.device("cuda")
model = Net().to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
BATCH = 26624 if steep else BATCH
for step in range(4):
    rows = slice(step % 2 * BATCH, (step % 2 + 1) * BATCH)
    loss = nn.functional.cross_entropy(model(x[rows].to(device)), y[rows].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(json.dumps([losses, [], 0]))
"""
BACK = """
import subprocess, sys
from hotlap import Job, fit
from hotlap.fitting import memory_return

HOLD = "import sys, torch; held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda'); print(1, flush=True)"
HOLD += "; sys.stdin.read()"
memory_return.WAIT = 2
rows, pid, calls = BATCH // 8, 0, 0
if os.environ.get("CAPPED"):  # by a process that leaves 3 GiB
    held = str(torch.cuda.mem_get_info()[0] - 13 * 2**28)
    other = subprocess.Popen([sys.executable, "-c", HOLD, held], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline()
    pid = other.pid


def forward(model, batch):
    global calls
    calls += 1
    if calls == 14 and pid:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return model(batch[0]), batch[1]


job = Job(
    model=Net(), data=(x, y), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    batch_size=rows, epochs=2, forward=forward,
)
run = fit(job, plan="off", progress=False, save_every=0, out=os.environ["FOLDER"])
whats = [entry.what for entry in run.ledger if "→" in entry.what]
print(json.dumps([[run.history[-1]["train_loss"]], whats, [run.samples, run.plan.memory.checkpoint]]))
"""


@pytest.fixture
def run(tmp_path):
    if torch.cuda.mem_get_info(0)[0] < 60 * GIB:
        pytest.skip("needs 60 GiB of free GPU memory")

    def run(body, *words, wide=False, steep=False, capped=""):
        (tmp_path / "train.py").write_text(f"wide, steep = {wide}, {steep}\n{COMMON}\n{body}")
        environment = {
            **os.environ,
            "FOLDER": str(tmp_path / f"run-{capped[:2]}"),
            "CAPPED": capped,
            "HOTLAP_PLAN": "auto",
        }
        command = [sys.executable, *words, "train.py"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return *json.loads(done.stdout.splitlines()[-1]), done.stderr

    return run


def test_training_out_of_memory_on_a_pretended_t4_comes_to_the_loss_of_an_uncapped_run(run):
    theirs, none, samples, _ = run(FIT)
    mine, faults, mine_samples, _ = run(FIT, capped="t4")
    assert none == []
    assert next(what for what, _ in faults).startswith("checkpoint 0 → ")
    assert all("CUDA out of memory" in why for _, why in faults)
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert mine_samples == samples


def test_an_evaluation_out_of_memory_on_a_pretended_t4_comes_to_the_same_figures(run):
    theirs, none, _, _ = run(FIT, wide=True)
    mine, faults, _, _ = run(FIT, wide=True, capped="t4")
    assert none == []
    assert any(what.startswith("evaluation batch ") for what, _ in faults)
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_script_out_of_memory_on_a_pretended_t4_goes_on_in_pieces_with_the_same_losses(run):
    theirs, _, _, _ = run(SCRIPT)
    mine, _, _, stderr = run(SCRIPT, "-m", "hotlap", "run", "--out", "run", capped="t4")
    assert "out of memory at step 0: the forward pass of Net runs in " in stderr
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_a_script_whose_backward_pass_would_not_fit_a_pretended_t4_goes_on_in_pieces_with_the_same_losses(run):
    theirs, _, _, _ = run(SCRIPT, steep=True)
    mine, _, _, stderr = run(SCRIPT, "-m", "hotlap", "run", "--out", "run", steep=True, capped="t4")
    assert "computed again in the backward pass, which would have run out of memory" in stderr
    assert mine == pytest.approx(theirs, rel=1e-3)


def test_larger_pieces_come_back_once_another_process_has_left_the_gpu(run):
    theirs, none, samples, _ = run(BACK)
    mine, whats, mine_samples, _ = run(BACK, capped="other process")
    assert none == []
    assert whats[0] == "checkpoint 0 → 1"
    assert whats[-1] == "checkpoint 1 → 0"
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert mine_samples == samples
