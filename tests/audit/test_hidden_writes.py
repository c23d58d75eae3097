"""Code of a dataset that writes where one does not look for it: no feed of hotlap's may ask it for a sample."""

import copy
import re
from collections import deque, namedtuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hotlap.data.pure.proof import prove
from hotlap.script.session import Session, Settings

Pair = namedtuple("Pair", "rows number")


class Count(int):
    """A number that counts how often it is multiplied."""

    made = 0

    def __mul__(self, other):
        Count.made += 1
        return int(self) * other + Count.made


class Of(Dataset):
    """A dataset out of a function of itself and the index."""

    def __init__(self, make):
        self.make = make
        self.x, self.sum = np.ones((10, 2)), np.zeros(2)
        self.t, self.weight = torch.zeros(2), torch.full((10, 2), 9.0)
        self.rows, self.turns, self.kept = [0], deque(range(5)), [{"x": np.zeros(2)} for _ in range(10)]
        self.labels, self.seeds, self.factor = [None, 1] * 5, [None] * 10, Count(3)
        self.pattern = re.compile("a")
        self.pictures, self.tokens = np.ones((10, 2, 2)), torch.zeros(10, 2, dtype=torch.int32)

    def __len__(self):
        return 10

    def __getitem__(self, index):
        return self.make(self, index)


def by_walrus(d, index):
    [(found := d.sum) for _ in range(1)]
    found += 1
    return d.x[index] + found


def of_a_copy(d, index):
    row = copy.copy(d.kept[index])
    row["x"] += 1
    return row["x"]


def of_a_turned_view(d, index):
    picture = np.rot90(d.pictures[index])
    picture += 1
    return picture


def of_whole_numbers(d, index):
    tokens = d.tokens[index].int()
    tokens += 1
    return tokens


def of_an_einsum(d, index):
    turned = torch.einsum("i->i", d.weight[index])
    turned += 1
    return turned


def of_a_missing_label(d, index):
    if d.labels[index] is None:
        d.misses = getattr(d, "misses", 0) + 1
    return d.x[index]


def of_no_match(d, index):
    if d.pattern.match("b") is None:
        d.misses = getattr(d, "misses", 0) + 1
    return d.x[index]


def fill(into, rows):
    into["rows"] = rows


def by_a_helper(d, index):
    found = {}
    fill(found, d.rows)
    found["rows"].append(1)
    return d.x[index] * len(d.rows)


def by_a_helper_twice(d, index):
    first, second = {}, {}
    fill(first, d.rows)
    fill(second, d.rows)
    second["rows"].append(1)
    return d.x[index] * len(d.rows)


def by_a_name_for_append(d, index):
    found = []
    add = found.append
    add(d.rows)
    found[0].append(1)
    return d.x[index] * len(d.rows)


def within_another(d, index):
    inner = {}
    outer = [inner]
    inner["rows"] = d.rows
    outer[0]["rows"].append(1)
    return d.x[index] * len(d.rows)


WRITES = {
    "a ufunc's third argument": lambda d, i: d.x[i] + np.add(d.sum, 1, d.sum),
    "out as a tuple": lambda d, i: d.x[i] + np.add(d.sum, 1, out=(d.sum,)),
    "out among other names": lambda d, i: d.x[i] + np.add(d.sum, 1, **{"out": d.sum}),
    "out among other arguments": lambda d, i: d.x[i] + np.add(*(d.sum, 1, d.sum)),
    "clip's fourth argument": lambda d, i: d.x[i] + np.clip(d.sum + 1, 0, 99, d.sum),
    "a method's argument": lambda d, i: d.x[i] + (d.x + d.sum).sum(0, None, d.sum),
    "a method's out": lambda d, i: d.x[i] + (d.x + d.sum).sum(0, out=d.sum),
    "nan_to_num without a copy": lambda d, i: np.nan_to_num(d.x, copy=False)[i],
    "a median that may sort": lambda d, i: np.median(d.x, 0, overwrite_input=True),
    "an embedding that is renormed": lambda d, i: F.embedding(torch.tensor([i]), d.weight, max_norm=1.0)[0],
    "a queue that turns": lambda d, i: d.x[i] * (d.turns.rotate(1) or d.turns[0]),
    "a key that appends": lambda d, i: d.x[i] * (max([i], key=d.rows.append) + len(d.rows)),
    "a number of its own kind": lambda d, i: d.factor * d.rows[0],
    "a seed of None": lambda d, i: d.x[i] * np.random.default_rng(d.seeds[i]).random(),
    "what setdefault gives": lambda d, i: d.x[i] * len({}.setdefault("a", d.rows).append(1) or d.rows),
    "a field of a named tuple": lambda d, i: d.x[i] * len(Pair(d.rows, 1).rows.append(1) or d.rows),
    **{
        f.__name__.replace("_", " "): f
        for f in (by_walrus, of_a_copy, of_a_turned_view, of_whole_numbers, of_an_einsum, of_a_missing_label)
    },
    **{
        f.__name__.replace("_", " "): f
        for f in (of_no_match, by_a_helper, by_a_helper_twice, by_a_name_for_append, within_another)
    },
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_code_that_writes_or_draws_where_one_does_not_look_for_it_ends_the_proof(write):
    assert prove(Of(write)).why_traces is not None


DRAWS = {
    "a generator's out": lambda d, i: d.x[i] + np.random.default_rng(i).random(out=d.sum),
    "a generator's third argument": lambda d, i: (
        d.x[i] + np.random.default_rng(i).standard_normal(2, np.float64, d.sum)
    ),
    "torch's out": lambda d, i: d.x[i] + torch.randn(2, out=d.t).numpy(),
    "a dropout in place": lambda d, i: F.dropout(d.weight[i], 0.5, True, True),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_draws_into_what_outlives_the_call_end_the_proof_though_draws_are_seeded(draw):
    assert "writes" in str(why := prove(Of(draw), may_draw=True).why_traces) or "its data" in str(why)
    assert prove(Of(lambda d, i: d.x[i] + torch.randn(2).numpy()), may_draw=True).why_traces is None


def test_batches_that_the_dataset_object_itself_knows_to_make_are_followed_too():
    dataset = Of(lambda d, i: d.x[i])
    dataset.__getitems__ = lambda indices: [dataset.rows.append(1) or dataset.x[i] for i in indices]

    assert prove(dataset).why_traces is not None


READS = {
    "a sum": lambda d, i: np.add(d.x[i], d.x[0]) + (d.x + 1).sum(0),
    "a sum into its own": lambda d, i: np.add(d.x[i], 1, np.zeros(2)),
    "a helper that fills": lambda d, i: [fill(found := {}, d.x[i]), found["rows"] * 2][1],
    "a copy of a row": lambda d, i: copy.copy(d.kept[i])["x"] + 1,
    "the larger one": lambda d, i: d.x[i] * max(d.rows, key=lambda row: -row),
    "a label that may be missing": lambda d, i: (d.x[i], 0 if d.labels[i] is None else 1),
    "a field of a named tuple": lambda d, i: Pair(d.x[i], 1).rows,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_code_that_only_reads_is_still_shown_to(read):
    assert prove(Of(read)).why_not_fixed is None


def test_a_queue_that_turns_gives_a_script_the_samples_that_it_has_by_itself():
    def run():
        torch.manual_seed(0)
        dataset = Of(WRITES["a queue that turns"])
        model = torch.nn.Linear(2, 1).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        loader = DataLoader(dataset, 5)
        for _ in range(20):
            for x in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
        return model.weight.detach(), list(dataset.turns)

    weight, turns = run()
    with Session(Settings(name="train", plan="max")):
        other, there = run()

    assert turns == there
    torch.testing.assert_close(weight, other)
