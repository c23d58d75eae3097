"""What the code of a dataset is shown to do, without a run of it."""

import bisect
import functools
import logging
import os
import random
import time
import types
from collections import OrderedDict, UserDict, namedtuple
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset, get_worker_info, random_split

from hotlap.data.pure.proof import prove
from hotlap.data.pure.read_state import ENTRY_BYTES, LOOKED_AT

Pair = namedtuple("Pair", "x y")
X = torch.randn(20, 3)
SCALE = 2.0
COUNT = 0
chance = np.random.default_rng(0)


class Of(Dataset):
    """A dataset out of a function of itself and the index."""

    def __init__(self, make, **attributes):
        self.make = make
        vars(self).update(attributes)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.make(self, index)


# As torchvision writes them.


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)

    def __call__(self, img):
        for t in self.transforms:
            img = t(img)
        return img


class ToTensor:
    def __call__(self, pic):
        if isinstance(pic, np.ndarray) and pic.ndim not in {2, 3}:
            raise ValueError(f"pic should be 2/3 dimensional. Got {pic.ndim} dimensions.")
        return torch.from_numpy(np.array(pic, copy=True)).to(torch.float32).div(255).unsqueeze(0)


class Normalize(nn.Module):
    def __init__(self, mean, std, inplace=False):
        super().__init__()
        self.mean, self.std, self.inplace = mean, std, inplace

    def forward(self, tensor):
        if not self.inplace:
            tensor = tensor.clone()
        mean = torch.as_tensor(self.mean, dtype=tensor.dtype, device=tensor.device)
        if mean.ndim == 1:
            mean = mean.view(-1, 1, 1)
        return tensor.sub_(mean).div_(self.std)


class RandomFlip(nn.Module):
    def __init__(self, p=0.5):
        super().__init__()
        self.p = p

    def forward(self, img):
        if torch.rand(1) < self.p:
            return img.flip(-1)
        return img


class Pictures(Dataset):
    """Like MNIST."""

    def __init__(self, transform=None, target_transform=None):
        self.data = torch.randint(0, 255, (20, 8, 8), dtype=torch.uint8)
        self.targets = torch.arange(20)
        self.transform, self.target_transform = transform, target_transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        img, target = self.data[index], int(self.targets[index])
        img = Image.fromarray(img.numpy(), mode="L")
        if self.transform is not None:
            img = self.transform(img)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return img, target


class Coloured(Pictures):
    """Like CIFAR10."""

    def __init__(self, transform=None):
        super().__init__(transform)
        self.data = np.zeros((20, 8, 8, 3), dtype=np.uint8)
        self.targets = list(range(20))

    def __getitem__(self, index):
        img, target = self.data[index], self.targets[index]
        img = Image.fromarray(img)
        if self.transform is not None:
            img = self.transform(img)
        return img, target


def opened(path):
    with open(path, "rb") as f:  # noqa: PTH123
        img = Image.open(f)
        return img.convert("RGB")


class Folder(Pictures):
    """Like ImageFolder."""

    def __init__(self, transform):
        super().__init__(transform)
        self.samples, self.loader = [(f"/tmp/{n}.png", n) for n in range(20)], opened

    def __getitem__(self, index):
        path, target = self.samples[index]
        return self.transform(self.loader(path)), target


class Points(Dataset):
    def __init__(self):
        self.points, self.classes = np.random.rand(20, 2), np.arange(20)
        self.__scale, self.settings = 2.0, types.SimpleNamespace(shift=1.0)

    def __len__(self):
        return len(self.classes)

    def __getitem__(self, index):
        x, y = self.points[index]
        features = np.array([x, y, x * x], dtype=np.float32)
        features /= self.__scale
        features[0] += self.settings.shift
        return features, int(self.classes[index])


class Further(Points):
    def __getitem__(self, index):
        features, target = super().__getitem__(index)
        return torch.as_tensor(features) * SCALE, self.named(target)

    @staticmethod
    def named(target):
        return -target

    @property
    def unused(self):
        raise AssertionError


class Words(Dataset):
    def __init__(self):
        self.words, self.longest = ["ab", "c"], 8
        self.numbers = {c: i + 1 for i, c in enumerate("abc")}

    def __len__(self):
        return len(self.words)

    def encode(self, word):
        return torch.tensor([self.numbers[w] for w in word], dtype=torch.long)

    def __getitem__(self, idx):
        ix = self.encode(self.words[idx])
        x = torch.zeros(self.longest + 1, dtype=torch.long)
        x[1 : 1 + len(ix)] = ix
        return x


class Encodings(Dataset):
    def __init__(self):
        self.encodings, self.labels = {"ids": [[1, 2], [3, 4]], "mask": [[1, 1], [0, 1]]}, [0, 1]

    def __len__(self):
        return 2

    def __getitem__(self, idx):
        item = {key: torch.tensor(value[idx]) for key, value in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item


class Joined(Dataset):
    """Like ConcatDataset, with a loop."""

    def __init__(self):
        self.parts, self.ends = [Points(), Points()], [20, 40]

    def __len__(self):
        return self.ends[-1]

    def __getitem__(self, index):
        part = bisect.bisect_right(self.ends, index)
        before = 0
        for number, end in enumerate(self.ends):
            if number < part:
                before = end
        try:
            return self.parts[part][index - before]
        except IndexError as error:
            raise KeyError(f"no sample {index}") from error


PURE = {
    "number": lambda: Of(lambda d, i: i),
    "nested": lambda: Of(lambda d, i: {"x": (torch.full((2,), i), [np.arange(i % 3), 1.5]), "pair": Pair(i, "text")}),
    "seeded by the index": lambda: Of(lambda d, i: np.random.default_rng(i).random()),
    "a global": lambda: Of(lambda d, i: X[i] * SCALE),
    "the environment": lambda: Of(lambda d, i: X[i] * float(os.environ.get("SCALE", "1"))),
    "ordered": lambda: Of(lambda d, i: OrderedDict(b=X[i].half(), a=[i, float(i)])),
    "partial": lambda: Of(functools.partial(lambda k, d, i: X[i] * k, 3)),
    "reduced": lambda: Of(
        lambda d, i: functools.reduce(lambda v, f: f(v), d.all, X[i]), all=[torch.abs, Normalize(0, 1)]
    ),
    "one of two lambdas": lambda: Of((lambda d, i: X[i]) if X.ndim else (lambda d, i: chance.random())),
    "pictures": lambda: Pictures(Compose(ToTensor(), Normalize((0.1,), 0.3))),
    "pictures without a transform": Pictures,
    "pictures with layers": lambda: Pictures(nn.Sequential(nn.Identity())),
    "coloured pictures": lambda: Coloured(Compose(Compose(ToTensor()), Normalize(0.1, 0.2))),
    "points": Points,
    "super": Further,
    "words": Words,
    "encodings": Encodings,
    "joined": Joined,
    "subset of a subset": lambda: Subset(Subset(Pictures(), [1, 2, 3]), [0, 1]),
    "several": lambda: ConcatDataset([ConcatDataset([Points(), Points()]), Points()]),
    "stacked": lambda: StackDataset(Points(), Points()),
    "split": lambda: random_split(Points(), [10, 10])[0],
    "its class": lambda: Of(
        lambda d, i: nn.functional.relu(X[i], False) if type(d) is d.__class__ else random.random()
    ),
    "tensors": lambda: TensorDataset(X),
    "list": lambda: [(X[i], i) for i in range(5)],
    "array": lambda: np.zeros((3, 2)),
}


def counting(data, index):
    global COUNT
    COUNT += 1
    return index


def remembering(data, index):
    if index not in data.kept:
        data.kept[index] = torch.zeros(2)
    return data.kept[index]


def halving(data, index):
    row = data.rows[index]
    row /= 2
    return row


def shuffling(data, index):
    row = X[index].clone()
    random.shuffle(row)
    return row


class Odd:
    def __getattr__(self, name):
        return time.time()


class Odder:
    def __getattribute__(self, name):
        return 1


IMPURE = {
    "python": (lambda: Of(lambda d, i: random.random()), "draws from Python's random"),
    "numpy": (lambda: Of(lambda d, i: np.random.rand()), "draws from numpy.random"),
    "torch": (lambda: Of(lambda d, i: torch.rand(3)), "draws from torch's generator"),
    "now and then": (lambda: Of(lambda d, i: torch.rand(3) if i == 14 else X[i]), "draws from torch's generator"),
    "a dropout": (lambda: Of(lambda d, i: nn.functional.dropout(X[i])), "draws from torch's generator"),
    "a method": (lambda: Of(lambda d, i: X[i].clone().normal_()), "draws from torch's generator"),
    "shuffled": (lambda: Of(shuffling), "draws from Python's random"),
    "the system's own": (lambda: Of(lambda d, i: np.random.default_rng().random()), "system's randomness"),
    "a global generator": (lambda: Of(lambda d, i: chance.random()), "a generator of its own"),
    "a kept generator": (lambda: Of(lambda d, i: d.g.random(), g=random.Random(1)), "a generator of its own"),
    "a random transform": (lambda: Pictures(Compose(ToTensor(), RandomFlip())), "draws from torch's generator"),
    "a global counter": (lambda: Of(counting), "sets the variable COUNT outside of it"),
    "an attribute": (lambda: Of(lambda d, i: setattr(d, "count", i)), "calls builtins.setattr"),
    "a list": (lambda: Of(lambda d, i: d.seen.append(i) or i, seen=[]), "writes to a list"),
    "a cache": (lambda: Of(remembering, kept={}), r"writes to data\.kept\[index\]"),
    "a view": (lambda: Of(halving, rows=np.ones((20, 2))), "writes to row"),
    "one memory": (lambda: Of(lambda d, i: d.memory.fill_(i), memory=torch.zeros(2)), "writes to its data"),
    "in place": (lambda: Of(lambda d, i: d.n(X[i]), n=Normalize(0, 1, inplace=True)), "writes to its data"),
    "in place as asked": (lambda: Of(lambda d, i: nn.functional.relu(X[i], True)), "writes to its data"),
    "an iterator": (lambda: Of(lambda d, i: next(d.rows), rows=iter(range(9))), "takes from an iterator"),
    "the clock": (lambda: Of(lambda d, i: time.time()), r"calls time\.time"),
    "printed": (lambda: Of(lambda d, i: print(i) or i), r"calls builtins\.print"),
    "the worker": (lambda: Of(lambda d, i: X[i] + (get_worker_info() is not None)), "asks which worker"),
    "odd": (lambda: Of(lambda d, i: d.odd.now, odd=Odd()), r"calls time\.time"),
    "odder": (lambda: Of(lambda d, i: d.odd.now, odd=Odder()), "has its own attribute lookup"),
    "foreign": (lambda: Of(lambda d, i: object()), "makes an object of object"),
    "eval": (lambda: Of(eval("lambda d, i: i")), "source text is not at hand"),
    "files": (lambda: Folder(Compose(ToTensor())), "reads files"),
    "files of tensors": (lambda: Of(lambda d, i: torch.load(f"/tmp/{i}.pt")["x"] + X[i]), "reads files"),
    "files of code": (lambda: Of(lambda d, i: torch.load(f"/tmp/{i}.pt", weights_only=False)), "may bring code"),
    "objects": (lambda: Of(lambda d, i: d.rows[i], rows=np.array([object(), None])), "array of Python objects"),
}


@pytest.mark.parametrize("name", PURE)
def test_a_dataset_whose_code_only_reads_is_shown_to(name):
    data = PURE[name]()
    proof = prove(data)
    assert proof.why_not_fixed is None
    assert proof.state.why_changed(thorough=True) is None
    data[0]  # it is not only shown to


@pytest.mark.parametrize("name", IMPURE)
def test_a_dataset_whose_code_does_more_is_refused_with_the_reason(name):
    make, words = IMPURE[name]
    proof = prove(make())
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(proof.why_not_fixed)
    assert "\n" not in proof.why_not_fixed
    assert (proof.why_traces is None) == (words == "reads files"), "a file that is read leaves no trace"


def test_draws_are_no_reason_where_they_are_seeded_for_each_sample():
    for name in ("python", "numpy", "torch", "shuffled", "a random transform", "a method"):
        assert prove(IMPURE[name][0](), may_draw=True).why_traces is None, name
    assert prove(IMPURE["a global generator"][0](), may_draw=True).why_traces is not None
    assert prove(IMPURE["a cache"][0](), may_draw=True).why_traces is not None


# What libraries for texts do in their collate functions.


class Row(UserDict):
    """A dict of a class of its own, as transformers' BatchEncoding."""

    def __init__(self, data=None):
        super().__init__(data)
        self.made = self.as_tensors(lambda value: torch.tensor(value))

    def __getattr__(self, name):
        return self.data[name]

    def as_tensors(self, convert):
        for key, value in self.items():
            self[key] = convert(value)
        return len(self)


class Kept:
    every: ClassVar = []

    def __init__(self, rows=None):
        self.rows = rows


class Counted(Kept):
    def __init__(self):
        super().__init__(self.every)
        self.rows.append(1)


class Equal(Kept):
    def __eq__(self, other):
        SEEN.append(other)
        return True

    def __add__(self, other):
        SEEN.append(other)
        return self

    __hash__ = None


class Going(Kept):
    def __del__(self):
        SEEN.append(self)


class Swapped:
    def __init__(self):
        self.first, self.second, self.third = [], [], []

    def swap(self, rows):
        self.third.append(1)
        self.third = self.second
        self.second = self.first
        self.first = rows


class Watched(Kept):
    def __setattr__(self, name, value):
        print(name)


def made(data, index):
    row = Row({"x": data.rows[index], "y": [index]})
    if "x" in row:
        row["z"] = row["x"] * 2
        del row["x"]
    return {"z": row.z, "y": row["y"], "count": row.made}


def flat(rows):
    found = []
    for one in rows:
        if isinstance(one, (list, tuple)):
            found.extend(flat(one))
        else:
            found.append(one)
    return found


def flat_counting(rows):
    for one in rows:
        if isinstance(one, list):
            flat_counting(one)
        SEEN.append(1)


SEEN = []
LOG = logging.getLogger("quiet")


@functools.lru_cache
def table(size):
    return torch.arange(size)


def told(data, index):
    if not data.told and index > 3:
        words = ", ".join(["odd"])
        LOG.debug(f"index {index}: {words}")
        data.told = True
    return X[index]


def told_aloud(data, index):
    if not data.told:
        LOG.error("here")
        data.told = True
    return X[index]


def told_and_used(data, index):
    if not data.told:
        LOG.debug("here")
        data.told = True
    return X[index] * data.told


def told_and_listed(data, index):
    if not data.told:
        LOG.debug("here")
        data.told = True
    return X[index] * data.__dict__.get("told")


def told_and_changed(data, index):
    x = X[index]
    if not data.told:
        x = x * 2
        data.told = True
    return x


def told_and_written(data, index):
    rows = [X[index], X[0]]
    if not data.told:
        rows.pop()
        data.told = True
    return rows[-1]


def told_and_left(data, index):
    if not data.told:
        data.told = True
        return X[0]
    return X[index]


def restored(data, index):
    was = data.settings.get("quiet", False)
    data.settings["quiet"] = True
    try:
        return X[index] if data.settings["quiet"] else SEEN.append(index)
    finally:
        data.settings["quiet"] = was


def restored_at_times(data, index):
    was = data.settings["quiet"]
    data.settings["quiet"] = True
    found = X[index]
    data.settings["quiet"] = was
    return found


def restored_otherwise(data, index):
    was = data.settings["other"]
    data.settings["quiet"] = True
    try:
        return X[index]
    finally:
        data.settings["quiet"] = was


def restored_and_read(data, index):
    was = data.settings["quiet"]
    data.settings["quiet"] = True
    try:
        return X[index] if not data.settings["quiet"] else SEEN.append(index)
    finally:
        data.settings["quiet"] = was


def drawing(x, at_random=None):
    return random.random() if at_random else x


def passing_on(data, index):
    return (lambda **given: drawing(**given))(x=X[index])


def aliased(data, index):
    first = []
    second = first
    second.append(data.rows)
    first[0].append(index)


def held(data, index):
    kept = Kept([])
    kept.rows.append(data.rows)
    kept.rows[0].append(index)


PURE_OF_LIBRARIES = {
    "an object of its own": lambda: Of(made, rows=[[1, 2]] * 20),
    "within itself": lambda: Of(lambda d, i: flat([[i, [i]], i])),
    "a cached function": lambda: Of(lambda d, i: table(3) + i),
    "a message once": lambda: Of(told, told=False),
    "a message before": lambda: Of(told_aloud, told=True),
    "an entry restored": lambda: Of(restored, settings={"quiet": False}),
    "a text's method": lambda: Of(lambda d, i: X[i] if "ids".endswith(("s", "x")) else random.random()),
    "a name in a list": lambda: Of(lambda d, i: X[i] if "a" in d.names else random.random(), names=["a", "b"]),
    "keywords passed on": lambda: Of(
        lambda d, i: (lambda **k: (lambda a, b=None: random.random() if b else X[i])(**k))(a=1)
    ),
}

IMPURE_OF_LIBRARIES = {
    "an object that counts": (lambda: Of(lambda d, i: Counted() and i), "writes to a list"),
    "an object that is compared": (lambda: Of(lambda d, i: X[i] if Equal() == 1 else i), "compares an object of Equal"),
    "an object that is added": (lambda: Of(lambda d, i: Equal() + 1), "computes with an object of Equal"),
    "an object that goes": (lambda: Of(lambda d, i: Going() and i), "makes an object of Going"),
    "an object in a comprehension": (
        lambda: Of(lambda d, i: [kept.swap(d.rows) for kept in [Swapped()] for _ in range(3)], rows=[[]]),
        "writes to a list",
    ),
    "a flag in its object's dict": (lambda: Of(told_and_listed, told=False), "sets told"),
    "an object that is watched": (lambda: Of(lambda d, i: Watched() and i), "makes an object of Watched"),
    "an object with the data's list": (lambda: Of(held, rows=[]), "writes to a list|cannot be followed|not known"),
    "two names": (lambda: Of(aliased, rows=[]), "writes to a list"),
    "a count within itself": (lambda: Of(lambda d, i: flat_counting([[i]])), "writes to a list"),
    "a write into a cache": (lambda: Of(lambda d, i: table(3).add_(1)), "writes to its data"),
    "a message": (lambda: Of(told_aloud, told=False), "writes to a log"),
    "a flag that is used": (lambda: Of(told_and_used, told=False), "sets told"),
    "a flag with a change": (lambda: Of(told_and_changed, told=False), r"sets data\.told"),
    "a flag with a write": (lambda: Of(told_and_written, told=False), r"sets data\.told"),
    "a flag that returns": (lambda: Of(told_and_left, told=False), r"sets data\.told"),
    "an entry not yet there": (lambda: Of(restored, settings={}), "writes to data.settings"),
    "an entry not always restored": (
        lambda: Of(restored_at_times, settings={"quiet": False}),
        "writes to data.settings",
    ),
    "an entry restored to another": (lambda: Of(restored_otherwise, settings={"quiet": 0, "other": 1}), "writes to"),
    "an entry that is read": (lambda: Of(restored_and_read, settings={"quiet": False}), "writes to a list"),
}


@pytest.fixture
def as_library(monkeypatch):
    """Flags count where a library's class holds them: a script may look at its own."""
    monkeypatch.setattr("hotlap.data.pure.follower.is_library", lambda name: True)


def test_a_flag_of_the_script_s_own_class_is_a_trace():
    assert "sets data.told" in prove(Of(told, told=False)).why_traces


@pytest.mark.parametrize("name", PURE_OF_LIBRARIES)
def test_what_libraries_do_in_passing_is_no_trace(name, as_library):
    data = PURE_OF_LIBRARIES[name]()
    data[5], table(3)
    proof = prove(data)
    assert proof.why_not_fixed is None
    data[5], data[6]
    assert proof.state.why_changed(thorough=True) is None, "a proof has to outlive what it allows"


@pytest.mark.parametrize("name", IMPURE_OF_LIBRARIES)
def test_traces_that_later_samples_may_show_are_refused(name, as_library):
    make, words = IMPURE_OF_LIBRARIES[name]
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(prove(make()).why_not_fixed)


def own_collate(samples):
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])


def counting_collate(samples):
    IMPURE.setdefault("called", ("", ""))
    return own_collate(samples)


def test_a_collate_function_is_followed_too():
    data = Of(lambda d, i: (X[i], i))
    assert prove(data, own_collate).why_traces is None
    assert "the collate function writes" in prove(data, counting_collate).why_traces


# --- what is watched ---------------------------------------------------------------------------------


def flip(data, **attributes):
    vars(data).update(attributes)


CHANGES = {
    "an attribute": ("points", lambda data: flip(data, points=data.points + 1)),
    "an attribute of an attribute": ("points", lambda data: setattr(data.settings, "shift", 2.0)),
    "an array": ("points", lambda data: data.points.__setitem__(3, 9.0)),
    "two labels that are swapped": ("coloured pictures", lambda data: data.targets.reverse()),
    "a tensor": ("pictures", lambda data: data.data[3].add_(1)),
    "a transform": ("pictures", lambda data: data.transform.transforms.pop()),
    "a setting of a transform": ("pictures", lambda data: setattr(data.transform.transforms[1], "mean", (0.2,))),
    "a transform that is new": ("pictures without a transform", lambda data: flip(data, transform=ToTensor())),
    "a class attribute": ("super", lambda data: None),
    "the environment": ("the environment", lambda data: None),
    "a dict": ("words", lambda data: data.numbers.update(a=7)),
    "rows": ("subset of a subset", lambda data: data.dataset.indices.reverse()),
    "a list in a list": ("encodings", lambda data: data.encodings["ids"][0].append(3)),
    "a tensor in a list": ("list", lambda data: data[3][0].add_(1)),
    "memory of an array beneath a tensor": ("tensor of an array", lambda data: data.array.__setitem__(0, 5.0)),
}


def of_an_array():
    array = np.zeros((4, 2), dtype=np.float32)
    return Of(lambda d, i: d.x[i], x=torch.from_numpy(array), array=array)


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_code_reads_is_watched(name, monkeypatch):
    of, change = CHANGES[name]
    data = of_an_array() if of == "tensor of an array" else PURE[of]()
    state = prove(data).state
    assert state.why_changed(thorough=True) is None
    if name == "a class attribute":
        monkeypatch.setattr(Further, "named", staticmethod(lambda target: target))
    elif name == "the environment":
        monkeypatch.setenv("SCALE", "3")
    else:
        change(data)
    assert state.why_changed(thorough=True) is not None


def test_a_global_that_is_read_is_watched(monkeypatch):
    state = prove(PURE["a global"]()).state
    monkeypatch.setitem(globals(), "SCALE", float("2"))
    assert state.why_changed() is None, "an equal number is no change"
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert "'SCALE'" in state.why_changed()


def test_what_the_code_does_not_read_may_change():
    data = PURE["pictures"]()
    state = prove(data).state
    data.epoch, data.seen = 5, [1]
    data.transform.name = "other"
    assert state.why_changed(thorough=True) is None


def test_the_content_of_lists_and_arrays_is_looked_at_again_once_enough_looks_have_paid_for_it():
    data = Of(lambda d, i: d.labels[i], labels=list(range(2000)))
    state = prove(data).state
    data.labels.reverse()
    looks = 2000 * ENTRY_BYTES // LOOKED_AT
    assert state.why_changed() is None, "one look does not pay for all of it"
    assert any(state.why_changed() is not None for _ in range(looks))


def test_code_that_is_replaced_is_seen():
    data = Of(lambda d, i: X[i])
    state = prove(data).state
    data.make.__code__ = (lambda d, i: X[i] * 2).__code__
    assert state.why_changed() is not None
