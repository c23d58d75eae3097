"""A real limit of the process's memory: torch's CPU allocator fails, and `fit` answers as it does on a GPU."""

import json

import pytest

PROGRAM = """
import gc, json, resource, sys, threading
import torch
from torch import nn
from hotlap import Job, fit
from hotlap.fitting import memory_return
from hotlap.machine.memory_shortage import held_bytes

room_mib, what = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
threading.stack_size(2**20)  # or each thread of the run takes 8 MiB
WIDTH, SAMPLES = 128, 8192
epochs, calls = 12 if what == "returns" else 2, []
memory_return.WAIT = 2


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        if what == "garbage" and gc.isenabled():
            pile()
        calls.append(len(x))
        if what == "returns" and len(calls) == 20:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for block in self.blocks:
            x = block(x)
        if what == "evaluate" and not self.training:
            x = x.repeat(1, 16).view(len(x), 16, WIDTH).mean(1)  # an evaluation that needs more than training
        return self.head(x)


def pile():
    "128 MiB in a cycle, which only the garbage collector finds."
    gc.disable()
    cycle = [torch.zeros(128 * 2**18)]
    cycle.append(cycle)


def limit(mib):
    torch.zeros(2**20)
    cpu = torch.device("cpu")
    resource.setrlimit(resource.RLIMIT_DATA, (held_bytes(cpu) + mib * 2**20, resource.RLIM_INFINITY))


x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
y = torch.randint(3, (SAMPLES,), generator=torch.Generator().manual_seed(2))
valid = {"valid": (x, y), "metrics": ["accuracy"]} if what == "evaluate" else {}


def train():
    job = Job(
        model=Net(), data=(x, y), loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=4096, epochs=epochs, device="cpu", **valid,
    )
    run = fit(job, plan="off", progress=False, save_every=0)
    faults = [(entry.step, entry.what, entry.why) for entry in run.ledger if entry.outcome == "fault"]
    last = {name: value for name, value in run.history[-1].items() if name.endswith(("loss", "accuracy"))}
    plan = [run.plan.memory.checkpoint, run.plan.memory.micro_batch]
    whats = [entry.what for entry in run.ledger if "→" in entry.what]
    made = {"steps": run.steps, "samples": run.samples, "plan": plan, "whats": whats}
    return run.model, {"faults": faults, "last": last, **made}


gc.disable()
warm = Net()
nn.functional.cross_entropy(warm(x[:64]), y[:64]).backward()
torch.optim.SGD(warm.parameters(), lr=0.1).step()
gc.enable()
limit(room_mib)
small, answered = train()
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
large, undisturbed = train()
apart = max(float((a - b).abs().max()) for a, b in zip(small.parameters(), large.parameters()))
print(json.dumps([answered, undisturbed, apart]))
"""


@pytest.fixture
def trained(forks, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(room_mib, what):
        made = forks.run("program.py", room_mib, what, cwd=tmp_path, OMP_NUM_THREADS="1")
        assert made.returncode == 0, made.stderr
        return json.loads(made.stdout.splitlines()[-1])

    return run


def test_a_step_that_the_host_has_no_memory_for_is_made_again_with_less(trained):
    small, large, apart = trained(22, "train")
    assert large["faults"] == []
    assert all("DefaultCPUAllocator: can't allocate memory" in why for _, _, why in small["faults"])
    whats = [what for _, what, _ in small["faults"] if "→" in what]  # a batch may have to be fetched again as well
    assert whats[0] == "checkpoint 0 → 1"
    assert (small["steps"], small["samples"]) == (large["steps"], large["samples"]) == (4, 16384)
    assert small["last"]["train_loss"] == pytest.approx(large["last"]["train_loss"], rel=1e-6)
    assert apart < 1e-6


def test_an_evaluation_that_the_host_has_no_memory_for_uses_smaller_batches_and_gives_the_same_figures(trained):
    small, large, apart = trained(70, "evaluate")
    whats = [what for _, what, _ in small["faults"] if what.startswith("evaluation")]
    assert whats[0] == "evaluation batch 8,192 → 4,096"
    assert len(whats) == len(set(whats)), "the second evaluation begins with the smaller batches"
    # Sums over other batches are rounded otherwise: one answer of 8,192 may be another.
    assert small["last"]["accuracy"] == pytest.approx(large["last"]["accuracy"], abs=1.5 / 8192)
    assert small["last"]["valid_loss"] == pytest.approx(large["last"]["valid_loss"], rel=1e-6)
    assert apart == 0


def test_memory_that_the_garbage_collector_frees_is_enough_for_the_same_plan(trained):
    small, _, apart = trained(150, "garbage")
    (fault,) = small["faults"]
    assert fault[:2] == [0, "memory freed"]
    assert "128 MiB was garbage, and is free now" in fault[2]
    assert apart == 0


def test_larger_pieces_come_back_once_the_limit_is_lifted(trained):
    small, large, apart = trained(22, "returns")
    assert small["whats"][0] == "checkpoint 0 → 1"
    assert small["whats"][-1] == "checkpoint 1 → 0"
    assert small["plan"] == large["plan"] == [0, None]
    assert (small["steps"], small["samples"]) == (large["steps"], large["samples"])
    assert apart < 1e-4
