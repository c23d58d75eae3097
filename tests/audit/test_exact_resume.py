"""A resumed run ends as if it had never been interrupted, whatever its objects remember; what is lost is named."""

import random
import signal
from collections import deque

import numpy as np
import pytest
import torch
from plain import class_data, parameters_of
from torch import nn
from torch.utils.data import Dataset

from hotlap import Job, fit


class Stopping:
    """Asks for an end after some batches, as a person would with Ctrl-C."""

    def __init__(self, after):
        self.after, self.seen = after, 0

    def __call__(self, batch):
        self.seen += 1
        if self.seen == self.after:
            signal.raise_signal(signal.SIGINT)
        return batch


class Remembering(nn.Module):
    """Scales by all that it remembers, so that each bit of it counts."""

    def __init__(self):
        super().__init__()
        self.calls, self.last, self.rate = 0, None, torch.zeros(2)
        self.list, self.deque, self.dict, self.set = [], deque([0.0], maxlen=3), {"n": 0.0}, {0}
        self.rng, self.numpy, self.torch = random.Random(1), np.random.default_rng(1), torch.Generator().manual_seed(1)
        self.array, self.inner = np.zeros(2), {"boxes": [Stopping(0)]}

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.rate += 0.1
            self.array += 1
            self.list.append(self.calls % 3)
            self.deque.append(self.calls * 0.1)
            self.dict["n"] += 0.01
            self.set.add(self.calls)
            self.inner["boxes"][0].seen += 1
            self.born = self.calls
            self.last = torch.tensor(self.rng.random() + self.numpy.random())
            self.drawn = float(torch.rand((), generator=self.torch))
        parts = (self.calls, float(self.rate.sum()), float(self.array.sum()), sum(self.list), sum(self.deque))
        more = (self.dict["n"], len(self.set), self.inner["boxes"][0].seen, float(self.last), self.drawn, self.born)
        return x * (1 + 1e-3 * sum((*parts, *more)))


class Counting(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.made, self.scale = 0, [1.0]

    def step(self, closure=None):
        self.made += 1
        self.scale[0] *= 0.99
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.scale[0] / (1 + self.made % 3))
        return super().step(closure)


class Shuffling:
    """A sampler with a generator of numpy's and a count of its own."""

    def __init__(self):
        self.rng, self.epochs = np.random.default_rng(5), 0

    def __iter__(self):
        self.epochs += 1
        return iter(np.roll(self.rng.permutation(50), self.epochs).tolist())

    def __len__(self):
        return 50


def job(after=-1, *, layer=None, order=None, data=None, loss=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), layer or nn.Tanh(), nn.Linear(8, 3)).double()
    return Job(
        model=model,
        data=data or class_data(),
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=Counting(model.parameters(), 0.1),
        prepare=Stopping(after),
        order=order,
        batch_size=10,
        epochs=4,
        device="cpu",
    )


def counting_loss():
    calls, seen = 0, []

    def loss(model, batch):
        nonlocal calls
        calls += 1
        seen.append(calls)
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.01 * calls + 0.001 * len(seen))

    return loss


KINDS = {
    "attributes of modules": lambda: {"layer": Remembering()},
    "attributes of the optimizer": dict,
    "the sampler": lambda: {"order": Shuffling()},
    "closures of the loss": lambda: {"loss": counting_loss()},
}


@pytest.fixture
def interrupted():
    """Fits that a person stops; as in a shell, also where signals are ignored by whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def stopped(one, out, **how):
        with pytest.raises(KeyboardInterrupt):
            fit(one, out=out, progress=False, plan="off", **how)

    yield stopped
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("after", [3, 7, 10])
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_with_the_same_bits_whatever_remembers(kind, after, tmp_path, interrupted):
    whole = fit(job(**KINDS[kind]()), out=tmp_path / "whole", progress=False, plan="off")
    interrupted(job(after, **KINDS[kind]()), tmp_path / "run")
    run = fit(job(**KINDS[kind]()), resume=tmp_path / "run", progress=False, allow_changes=True)
    assert torch.equal(parameters_of(run.model), parameters_of(whole.model))


class Drawing(nn.Module):
    def __init__(self):
        super().__init__()
        self.rates = (1.0 / n for n in range(1, 10_000))

    def forward(self, x):
        return x * next(self.rates)


class OwnDraws(Dataset):
    def __init__(self):
        self.x, self.y = class_data()
        self.rng, self.fetched = np.random.default_rng(0), 0

    def __len__(self):
        return 50

    def __getitem__(self, index):
        self.fetched += 1
        return self.x[index] * self.rng.random(), self.y[index]


def test_what_no_checkpoint_holds_is_named_once_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOTLAP_PROGRESS", "lines")
    fit(job(layer=Drawing(), data=OwnDraws()), out=tmp_path / "run", plan="off", save_every=3)
    told = [line for line in capsys.readouterr().err.splitlines() if "no checkpoint holds" in line]
    assert "model.1.rates is a generator" in told[0]
    assert "data.rng" in told[0]
    assert "data.fetched" in "".join(told)
    assert sum("data.rng" in line for line in told) == 1


def test_a_checkpoint_of_an_earlier_hotlap_is_still_read(tmp_path, interrupted, monkeypatch):
    from hotlap.fitting import session
    from hotlap.guard import saving as state

    def earlier(rig, loop, remembered=()):
        loop.pop("order")
        return state.export_state(rig, loop)

    encode = state.encode
    monkeypatch.setattr(session, "export_state", earlier)
    monkeypatch.setattr(state, "encode", lambda told, *more: encode(_without(told), *more))
    interrupted(job(7, order=Shuffling()), tmp_path / "run")
    monkeypatch.undo()
    assert fit(job(order=Shuffling()), resume=tmp_path / "run", progress=False, allow_changes=True).updates == 20


def _without(told):
    return {name: part for name, part in told.items() if name != "remembered"}


@pytest.mark.parametrize(
    "path", [["model", "0", "forward"], ["model", "__class__"], ["nowhere", "x"], ["model", "a b"]]
)
def test_a_forged_checkpoint_can_set_no_function_and_nothing_that_is_not_there(path):
    from hotlap.engine.snapshot import changes_of

    one = job()
    one.model[0].forward = one.model[0].forward
    with pytest.raises(KeyError):
        changes_of([one.model], one.optimizer, ()).put_back([(path, 1.0)])
