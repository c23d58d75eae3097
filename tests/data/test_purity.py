"""Whether a dataset gives the same sample for the same index, however it is asked."""

import functools
import random
import re
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hotlap.data.order import HostRandomness
from hotlap.data.purity import own_generators, spread, why_not_pure
from hotlap.data.source import as_source

Pair = namedtuple("Pair", "x y")


class Made(Dataset):
    """A dataset out of a function of itself and the index."""

    def __init__(self, function, length=50, **attributes):
        self.function, self.length = function, length
        vars(self).update(attributes)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(self, index)


class Noise:
    """A transform that keeps a generator."""

    def __init__(self, generator):
        self.generator = generator

    def __call__(self, value):
        if isinstance(self.generator, torch.Generator):
            return value + torch.rand((), generator=self.generator).item()
        return value + self.generator.random()


class Compose:
    def __init__(self, *transforms):
        self.transforms = list(transforms)


def noisy(data, index):
    return functools.reduce(lambda value, change: change(value), data.transform.transforms, float(index))


def counting(data, index):
    data.count = getattr(data, "count", 0) + 1
    return index, data.count


def into_one_memory(data, index):
    data.memory.fill_(index)
    return data.memory


def failing(data, index):
    if index > 20:
        raise KeyError("row 21")
    return index


PURE = {
    "number": lambda data, i: i,
    "nested": lambda data, i: {"x": (torch.full((2,), i), [np.arange(i % 3), 1.5]), "pair": Pair(i, "text")},
    "not a number": lambda data, i: (float("nan"), torch.tensor(float("nan"))),
    "seeded by the index": lambda data, i: np.random.default_rng(i).random(),
}
IMPURE = {
    "python": (lambda data, i: random.random(), "Made draws from Python's random"),
    "numpy": (lambda data, i: np.random.rand(), "numpy.random"),
    "torch": (lambda data, i: torch.rand(3), "torch's generator"),
    "drawn and thrown away": (lambda data, i: (random.random(), i)[1], "Made draws from Python's random"),
    "counter": (counting, "another sample at index"),
    "one memory": (into_one_memory, "another sample at index"),
    "one sample that differs by a bit": (
        lambda data, i: -0.0 if vars(data).setdefault("seen", []).append(i) or len(data.seen) > 9 else 0.0,
        "another sample at index",
    ),
    "error": (failing, "failed when it was asked for samples: KeyError: 'row 21'"),
    "foreign": (lambda data, i: object(), "cannot be compared"),
    "the system's own": (lambda data, i: random.SystemRandom().random(), "another sample at index"),
}
OWN = {
    "Random": lambda: random.Random(1),
    "numpy Generator": lambda: np.random.default_rng(1),
    "numpy RandomState": lambda: np.random.RandomState(1),
    "torch Generator": lambda: torch.Generator().manual_seed(1),
}


@pytest.mark.parametrize("name", PURE)
def test_a_dataset_that_computes_from_the_index_alone_is_pure(name):
    assert why_not_pure(as_source(Made(PURE[name]))) is None


@pytest.mark.parametrize("name", IMPURE)
def test_a_dataset_that_does_not_is_found_with_the_reason(name):
    function, reason = IMPURE[name]
    said = why_not_pure(as_source(Made(function, memory=torch.zeros(2))))
    assert said is not None
    assert re.search(reason, said), said


@pytest.mark.parametrize("name", OWN)
def test_a_generator_that_a_transform_keeps_is_found_and_put_back(name):
    generator = OWN[name]()
    data = Made(noisy, transform=Compose(lambda value: value * 2, Noise(generator)))
    assert "a generator of its own" in why_not_pure(as_source(data))
    first, fresh = Noise(generator)(0.0), Noise(OWN[name]())(0.0)
    assert first == fresh


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda g: {"a": [g]},
        lambda g: lambda value: g.random(),
        lambda g: functools.partial(print, g),
        lambda g: Noise(g).__call__,
        lambda g: Subset(Made(None, rng=g), [1]),
    ],
    ids=["dict", "closure", "partial", "method", "Subset"],
)
def test_generators_are_looked_for_wherever_a_dataset_can_keep_them(wrapped):
    generator = random.Random(1)
    assert own_generators(Made(None, transform=wrapped(generator))) == [generator]


def test_a_dataset_that_holds_itself_is_looked_at_once():
    data = Made(None)
    data.parent, data.all = data, [data] * 5
    assert own_generators(data) == []


@pytest.mark.parametrize("function", [PURE["nested"], *(function for function, _ in IMPURE.values())])
def test_looking_leaves_all_randomness_as_it_was(function):
    before = HostRandomness()
    why_not_pure(as_source(Made(function, memory=torch.zeros(2))))
    assert before.same_as(HostRandomness())


def test_the_answer_is_kept():
    asked = []
    source = as_source(Made(lambda data, i: asked.append(i) or i))
    assert why_not_pure(source) is None
    reads = len(asked)
    assert why_not_pure(source) is None
    assert len(asked) == reads


def test_what_a_fetch_has_found_out_is_not_asked_again():
    source = as_source(Made(lambda data, i: random.random()))
    source.fetch([0, 1], 0, 0)
    assert why_not_pure(source) == "Made draws from Python's random"


def test_of_a_subset_only_its_own_samples_are_asked_for():
    asked = []
    data = Made(lambda data, i: asked.append(i) or i)
    assert why_not_pure(as_source(Subset(data, [3, -1, 7]))) is None
    assert set(asked) == {3, 49, 7}


def test_tensors_are_pure_without_a_look():
    assert why_not_pure(as_source(TensorDataset(torch.zeros(3)))) is None


@pytest.mark.parametrize(
    ("length", "expected"), [(1, [0]), (3, [0, 1, 2]), (8, list(range(8))), (100, [0, 14, 28, 42, 56, 70, 84, 99])]
)
def test_samples_are_asked_for_from_the_first_to_the_last(length, expected):
    assert spread(length) == expected
