"""Trainings on several ranks, in a process whose forks are the other ranks: a fresh python takes three seconds."""

import copy
import json
import os
import signal
import socket
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import hotlap
from hotlap.data.background_fetch import end_with
from hotlap.data.dataset import training_dataset
from hotlap.engine.rig import Rig
from hotlap.ranks import follower, leader


class Spare:
    """A fork that waits to follow, as `subprocess.Popen` has it. Made early, before this process has threads."""

    def __init__(self):
        parent, self.returncode = os.getpid(), None
        self._line, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            end_with(parent)
            environment, (fd,), *_ = socket.recv_fds(theirs, 1 << 20, 1)
            os.environ.clear()
            os.environ.update(json.loads(environment))
            follower.main(fd, parent)
        theirs.close()

    def follow(self, fd, environment):
        socket.send_fds(self._line, [json.dumps(environment).encode()], [fd])
        return self

    def poll(self):
        return self._waited(os.WNOHANG)

    def wait(self, timeout=None):
        return self._waited(0)

    def _waited(self, options):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


def by_forks(count=6):
    """From here on the other ranks are forks, so many at most."""
    torch.set_num_threads(1)  # a fork lacks the threads of OpenMP
    spares = [Spare() for _ in range(count)]
    leader.launch = lambda fd, environment: spares.pop().follow(fd, environment)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def columns(count=61):
    made = torch.Generator().manual_seed(1)
    target = torch.randint(0, 3, (count,), generator=made)
    return torch.randn(count, 6, generator=made, dtype=torch.float64), target


def counted(model, batch):
    """A loss that counts by itself: only targets above 0 are scored."""
    each = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (each * (batch[1] > 0)).sum(), (batch[1] > 0).sum()


class Weighted(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        return (self.scale * output - nn.functional.one_hot(target, 3)).square().mean()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.02)


def job(**changes):
    settings = {
        "model": network(), "data": columns(), "valid": columns(29), "metrics": ["accuracy", "macro_f1"],
        "loss": nn.CrossEntropyLoss(), "optimizer": adamw, "batch_size": 9, "epochs": 2, "device": "cpu",
    }  # fmt: skip
    return hotlap.Job(**{**settings, **changes})


def loaded(workers, **settings):
    """A DataLoader brings its own batch size."""
    data = TensorDataset(*columns())
    loader = DataLoader(data, **{"batch_size": 9, "shuffle": True, "num_workers": workers, **settings})
    return {"data": loader, "batch_size": None}


def drawn():
    """Samples are drawn with replacement, so that some come twice in an epoch."""
    sampler = WeightedRandomSampler(torch.arange(1.0, 62.0), 61)
    return {"order": sampler}


CASES = {
    "one sample in the last batch": {"data": columns(55)},
    "accumulated, one sample in the last batch": {"data": columns(55), "accumulate": 4},
    "batches smaller than the ranks": {"batch_size": 3},
    "resident": {"plan": {"kind": "resident"}},
    "micro-batches": {"plan": {"micro_batch": 2}},
    "loader": {"given": lambda: loaded(0)},
    "workers": {"given": lambda: loaded(2)},
    "batches left out": {"given": lambda: loaded(0, drop_last=True)},
    "a sampler": {"given": drawn},
    "as given": {"order": "as given"},
    "ignoring, weighted": {"loss": nn.CrossEntropyLoss(ignore_index=2, weight=torch.tensor([0.2, 1.0, 3.0]).double())},
    "a sum": {"loss": nn.CrossEntropyLoss(reduction="sum"), "clip": 1.0},
    "a loss that counts": {"loss": counted, "accumulate": 2},
    "a loss with a weight": {"loss": Weighted(), "metrics": ()},
    "clipped, skipping": {"clip": 0.1, "skip_nonfinite": True},
}
ALSO_FOUR = ("accumulated, one sample in the last batch", "batches smaller than the ranks", "a loss that counts")


def numbers(ranks, plan=None, given=None, **changes):
    """Weights, the mean loss, the scores and the samples of a training."""
    changes = copy.deepcopy(changes) | (given() if given is not None else {})
    made = job(**changes)
    rig = Rig(made.model, made.optimizer, made.loss, clip=made.clip, skip_nonfinite=made.skip_nonfinite, device="cpu")
    rig.attach(training_dataset(made, workers=0))
    rig.use(rig.plan.but(**(plan or {})))
    lead = leader.Leader(made, ranks, rig.device) if ranks > 1 else None
    if lead is not None:
        rig.share(lead)
        rig.use(rig.plan.but(ranks=ranks))
    try:
        for window in rig.windows(epochs=made.epochs):
            rig.advance(window)
        rig.settle()
        scores = rig.evaluate(made.valid, made.metrics, batch_size=7)
        weights = [p.detach().clone() for module in rig.modules for p in module.parameters()]
        return weights, rig.totals.mean(), scores, rig.samples, rig.steps
    finally:
        rig.close()
        if lead is not None:
            lead.close()


def compare(*names):
    """For each number of ranks, the largest difference of weights, losses and scores from one process."""
    by_forks(len(names) + 3 * len(ALSO_FOUR))
    found = {}
    for name in names:
        case = CASES[name]
        one = numbers(1, **case)
        for ranks in (2, 4) if name in ALSO_FOUR else (2,):
            many = numbers(ranks, **case)
            gaps = [float((a - b).abs().max()) for a, b in zip(one[0], many[0], strict=True)]
            gaps += [abs(one[1] - many[1]), *(abs(one[2][score] - many[2][score]) for score in one[2])]
            found[f"{name}, {ranks} ranks"] = {"gap": max(gaps), "same": one[3:] == many[3:]}
    print(json.dumps(found))


def fitted(name, **settings):
    """What a training of `fit` comes to, in a folder of this name."""
    changes = {key: settings.pop(key) for key in [*settings] if key in ("epochs", "loss", "model", "data", "device")}
    place = {"resume": name} if settings.pop("resume", False) else {"out": name}
    run = hotlap.fit(job(**changes), **{"plan": "off", "progress": False, **place, **settings})
    history = [{key: value for key, value in record.items() if key != "elapsed_s"} for record in run.history]
    return run, [p.detach().clone() for p in run.model.parameters()], history


def gap(one, other):
    """The largest difference between two results of `fitted`, weights and records."""
    gaps = [float((a - b).abs().max()) for a, b in zip(one[1], other[1], strict=True)]
    for mine, theirs in zip(one[2], other[2], strict=True):
        gaps += [abs(mine[name] - theirs[name]) for name in mine]
    return max(gaps)


class Struck(nn.Module):
    """The loss of a rank that is sent a signal in one of its forward passes, once."""

    def __init__(self, number, at, mark):
        super().__init__()
        self.number, self.at, self.mark, self.calls = number, at, Path(mark), 0

    def forward(self, output, target):
        self.calls += 1
        is_other = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if is_other and self.calls == self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.number)
        return nn.functional.cross_entropy(output, target)
