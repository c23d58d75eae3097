"""What functions and objects hold is part of a training: closures, defaults, attributes, globals they read."""

import functools
import json
import os
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain import class_data, small_mlp
from preloaded import Preloaded
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, Dataset

from hotlap import Job
from hotlap.data.dataset import training_dataset
from hotlap.guard.identity import differences, identity


def known(**changes):
    model = changes.pop("model", None) or small_mlp()
    optimizer = changes.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.01)
    base = {"data": class_data(), "loss": nn.CrossEntropyLoss(), "batch_size": 8, "epochs": 1, "device": "cpu"}
    made = Job(**{**base, "model": model, "optimizer": optimizer, **changes})
    return identity(made, training_dataset(made))


class Sc:
    def __init__(self, k):
        self.k = k

    def __call__(self, *given):
        return given[-1][0] * self.k, given[-1][1]

    def method(self, *given):
        return self(*given)


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k):
        self.k = k

    def __call__(self, *given):
        return given[-1]


class Nested:
    def __init__(self, k):
        self.parts = [Sc(k), {"me": self}]

    def __call__(self, *given):
        return given[-1]


def closure(k):
    return lambda *given: (given[-1][0] * k, given[-1][1])


def default(k):
    def changed(*given, k=k):
        return given[-1][0] * k, given[-1][1]

    return changed


def inner(k):
    def helper(x):
        return x * k

    return lambda *given: (helper(given[-1][0]), given[-1][1])


def tensor(k):
    mean = torch.full((3,), k)
    return lambda *given: (given[-1][0] - mean, given[-1][1])


def array(k):
    mean = np.full(3, k)
    return lambda *given: (given[-1][0] - mean, given[-1][1])


def teacher(k):
    other = nn.Linear(2, 2)
    nn.init.constant_(other.weight, k)
    nn.init.constant_(other.bias, 0)
    return lambda *given: other(given[-1])


def arguments(k):
    args = SimpleNamespace(k=k, resume=object())
    return lambda *given: given[-1] * args.k


KINDS = {
    "object": Sc,
    "slots": Slotted,
    "nested": Nested,
    "closure": closure,
    "default": default,
    "method": lambda k: Sc(k).method,
    "closure of a closure": inner,
    "partial of a closure": lambda k: functools.partial(closure(k)),
    "tensor": tensor,
    "array": array,
    "another model": teacher,
    "read argument": arguments,
    "code of one line": lambda k: (lambda *b: b) if k == 1.0 else (lambda *b: (b[0] * 3, b[1])),
}


@pytest.mark.parametrize("field", ["prepare", "augment", "forward", "collate", "loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_function_or_object_holds_is_part(kind, field):
    def made(k):
        return known(**{field: KINDS[kind](k)})

    assert differences(made(1.0), made(1.0)) == []
    (line,) = differences(made(1.0), made(3.0))
    other_code = "the code of <lambda>.<locals>.<lambda> differs"
    assert line == other_code if "code" in kind else line.startswith(f"{field}: what it holds differs")


class Focal(nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma

    def forward(self, output, target):
        return nn.functional.cross_entropy(output, target) * self.gamma


class Net(nn.Module):
    def __init__(self, k, act=torch.relu):
        super().__init__()
        self.inner = nn.Sequential(small_mlp())
        self.k, self.act = k, act

    def forward(self, x):
        return self.inner(x) * self.k


class Moved(Dataset):
    def __init__(self, k):
        self.rows = [(torch.zeros(5).double(), 0)] * 9
        self.transform = closure(k)

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return self.transform(self.rows[index])


def scheduled(k):
    model = small_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {"model": model, "optimizer": optimizer, "schedule": StepLR(optimizer, 2, gamma=k)}


OTHERS = {
    "schedule": lambda k: {"schedule": lambda o: StepLR(o, 2, gamma=k)},
    "schedule of a function": lambda k: {"schedule": lambda o: LambdaLR(o, lambda step: k)},
    "a made schedule": scheduled,
    "loss": lambda k: {"loss": Focal(k)},
    "model": lambda k: {"model": Net(k)},
    "layer": lambda k: {"model": nn.Sequential(Net(k))},
    "activation": lambda k: {"model": Net(1.0, torch.relu if k == 1.0 else torch.tanh)},
    "metric": lambda k: {"valid": class_data(9), "metrics": {"m": lambda o, t: o[:, 0] * k}, "better": "lower"},
    "optimizer": lambda k: {"optimizer": lambda p: torch.optim.SGD(p, lr=k)},
    "collate": lambda k: {"data": DataLoader(Moved(1.0), batch_size=3, collate_fn=closure(k)), "batch_size": None},
    "transform": lambda k: {"data": Moved(k)},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_modules_schedules_metrics_and_transforms_count_by_what_they_hold(kind):
    make = OTHERS[kind]
    assert differences(known(**make(1.0)), known(**make(1.0))) == []
    (line,) = differences(known(**make(1.0)), known(**make(3.0)))
    assert "what it holds differs" in line


K, TABLE = 1.0, torch.ones(3)


def helper(x):
    return x * K


@pytest.mark.parametrize("name", ["K", "TABLE"])
def test_globals_that_the_users_own_functions_read_are_part(name, monkeypatch):
    def direct(b):
        return b[0] * K, TABLE

    def through(b):
        return helper(b[0]), TABLE

    before = known(prepare=direct, augment=through)
    assert differences(before, known(prepare=direct, augment=through)) == []
    monkeypatch.setitem(globals(), name, 3.0)
    lines = differences(before, known(prepare=direct, augment=through))
    assert [line.split(":")[0] for line in lines] == ["augment", "prepare"]
    if name == "K":
        assert lines[1] == "prepare: what it holds differs (global K was 1.0, is 3.0)"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"prepare": Sc}, "prepare: what it holds differs (k was 1.0, is 3.0)"),
        ({"loss": Focal}, "loss: what it holds differs (gamma was 1.0, is 3.0)"),
        ({"model": Net}, "model: what it holds differs (k was 1.0, is 3.0)"),
        ({"prepare": tensor}, "prepare: what it holds differs (mean)"),
    ],
    ids=["object", "loss", "model", "tensor"],
)
def test_a_short_value_is_shown(changes, told):
    before, after = [known(**{name: make(k) for name, make in changes.items()}) for k in (1.0, 3.0)]
    assert differences(before, after) == [told]


def test_no_word_that_a_function_holds_is_written_down():
    told = known(prepare=Sc("a-password"), model=Net(1.0))
    assert "a-password" not in str(told)
    assert differences(told, known(prepare=Sc("another"), model=Net(1.0))) == ["prepare: what it holds differs (k)"]


def test_what_cannot_be_told_neither_breaks_nor_differs(tmp_path):
    def odd():
        class Strange:
            __slots__ = ("never_set",)

            def __getattr__(self, name):
                raise RuntimeError(name)

        file = (tmp_path / "x").open("w")
        held = [
            threading.Lock(),
            file,
            Strange(),
            object(),
            (n for n in "ab"),
            torch.Generator(),
            {object(): 1},
            np.tanh,
        ]
        held.append(held)
        return file, Sc(held)

    (one, first), (two, second) = odd(), odd()
    assert differences(known(prepare=first), known(prepare=second)) == []
    one.close()
    two.close()


def test_the_trained_model_in_a_closure_counts_by_its_shape():
    def made(seed):
        model = small_mlp(seed=seed)
        return known(model=model, forward=lambda m, b: (model(b[0]) + model[0].weight.sum(), b[1]))

    assert differences(made(1), made(2)) == []


def test_an_earlier_identity_without_what_is_held_has_no_difference():
    now = known(prepare=Sc(1.0), model=Net(1.0))
    before = {name: part for name, part in now.items() if name != "held"}
    assert differences(before, now) == []
    assert differences({**before, "held": {"model": now["held"]["model"]}}, now) == []


SCRIPT = """
import json, sys
import torch
from torch import nn
from hotlap import Job
from hotlap.data.dataset import training_dataset
from hotlap.guard.identity import identity
MEAN = ("a", "b", 1.5)
class Sc:
    def __init__(s, k): s.k, s.words, s.lock = k, {"x", "y", "z"}, object()
    def __call__(s, b): return (b[0] * s.k + FACTOR, b[1]) if "q" not in {"x", "y", "w"} else MEAN
class Net(nn.Linear):
    scale = FACTOR
    def forward(self, x): return super().forward(x) * FACTOR
model = Net(5, 3)
nn.init.ones_(model.weight)
one = Job(model=model, data=(torch.ones(9, 5), torch.zeros(9).long()), loss=nn.CrossEntropyLoss(), batch_size=3,
          optimizer=lambda p: torch.optim.SGD(p, lr=0.1), epochs=1, device="cpu", prepare=Sc(2.0),
          augment=lambda b: (b[0], b[1]))
print(json.dumps(identity(one, training_dataset(one)), sort_keys=True))
"""


@pytest.fixture(scope="module")
def told_by(tmp_path_factory):
    """Runs a text in a new process that hashes by a seed, from a file or from no file: what it prints."""
    source = str(Path(__file__).parents[2] / "src")
    modules = ("hotlap.core.job", "hotlap.data.dataset", "hotlap.guard.identity")
    pythons = {
        seed: Preloaded(*modules, environment={**os.environ, "PYTHONPATH": source, "PYTHONHASHSEED": str(seed)})
        for seed in (1, 2)
    }

    def told(text, kind="no file", seed=1):
        folder = tmp_path_factory.mktemp("told")
        (folder / "train.py").write_text(text)
        words = ("train.py",) if kind == "file" else ("-c", text)
        ran = pythons[seed].run(*words, cwd=folder)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    yield told
    for python in pythons.values():
        python.close()


@pytest.mark.parametrize("kind", ["file", "no file"])
def test_two_processes_tell_the_same(kind, told_by):
    text = SCRIPT.replace("FACTOR", "2.0")
    assert told_by(text, kind, 1) == told_by(text, kind, 2)


def test_code_that_is_in_no_file_is_known_by_what_it_does(told_by):
    before = json.loads(told_by(SCRIPT.replace("FACTOR", "2.0")))
    moved = json.loads(told_by("\n\n# a comment\n" + SCRIPT.replace("FACTOR", "2.0")))
    assert differences(before, moved) == []
    after = json.loads(told_by(SCRIPT.replace("FACTOR", "4.0")))
    lines = differences(before, after)
    assert "the code of Net differs" in lines
    assert "the code of Sc differs" in lines
    assert "model: what it holds differs (Net.scale was 2.0, is 4.0)" in lines
