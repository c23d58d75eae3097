"""The stream feed without a GPU: a pretended one runs copies and steps late, in any order that its streams allow."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset

from hotlap.core.errors import PlanError
from hotlap.core.plan import Feed
from hotlap.data.batches import map_tensors
from hotlap.data.dataset import as_source
from hotlap.data.feeds import AHEAD, BUFFER_SETS, StreamFeeding, copied_ahead, open_feed, why_not
from hotlap.data.windows import Windows

X = torch.arange(120.0).reshape(40, 3)
Y = torch.arange(40)


class PretendedGpu:
    """Two streams of work that is done later: copies, and steps that read what was copied."""

    def __init__(self, eager=False, chance=None):
        self.copies, self.steps = [], []
        self.copied, self.sent, self.waits, self.abandoned = 0, 0, 0, 0
        self.eager, self.chance = eager, chance or random.Random(0)

    def send(self, batch):
        pairs = []
        there = map_tensors(batch, lambda t: pairs.append((torch.full_like(t, -1), t)) or pairs[-1][0])
        self.copies.append(lambda: [room.copy_(tensor) for room, tensor in pairs])
        self.sent += 1
        if self.eager:
            self.copy()
        return PretendedFlight(self, there, self.sent)

    def step(self, work, needs):
        self.steps.append((work, needs))

    def copy(self):
        self.copies.pop(0)()
        self.copied += 1

    def some_time_passes(self):
        for _ in range(self.chance.randrange(4)):
            if self.copies and self.chance.random() < 0.5:
                self.copy()
            elif self.steps and self.steps[0][1] <= self.copied:
                self.steps.pop(0)[0]()

    def finish(self):
        while self.copies:
            self.copy()
        for work, _ in self.steps:
            work()


class PretendedFlight:
    def __init__(self, gpu, batch, number):
        self.gpu, self.batch, self.number = gpu, batch, number

    def on_device(self):
        return self.batch

    def wait(self):
        self.gpu.waits += self.gpu.copied < self.number
        while self.gpu.copied < self.number:
            self.gpu.copy()

    def discard(self):
        self.gpu.abandoned += 1


def feeding(source, gpu):
    return StreamFeeding(source, gpu, pinned=False)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    taken=st.integers(1, 4),
)
def test_a_step_reads_its_own_batch_however_late_copies_and_steps_are(seed, sizes, taken):
    """Also where pieces are taken several at a time, as a window of micro-batches takes them."""
    gpu = PretendedGpu(chance=random.Random(seed))
    wanted = [torch.randint(40, (size,)) for size in sizes]
    read, batches = [], feeding(as_source((X, Y)), gpu).pieces(wanted, 0)
    number = 0
    while True:
        window = [batch for _, batch in zip(range(taken), batches, strict=False)]
        if not window:
            break
        for x, y in window:
            number += 1
            gpu.step(lambda x=x, y=y: read.append((x.clone(), y.clone())), needs=number)
        gpu.some_time_passes()
    gpu.finish()
    assert len(read) == len(sizes)
    for (x, y), indices in zip(read, wanted, strict=True):
        assert torch.equal(x, X[indices])
        assert torch.equal(y, Y[indices])


def test_two_batches_are_under_way_while_one_is_trained_on():
    gpu = PretendedGpu()
    batches = feeding(as_source(X), gpu).pieces([Y[k : k + 4] for k in range(0, 40, 4)], 0)
    sent = [gpu.sent for _ in batches]
    assert sent == [1 + AHEAD + k for k in range(8)] + [10, 10]


def test_the_host_waits_only_for_page_locked_memory_that_is_still_being_copied():
    indices = [Y[k : k + 4] for k in range(0, 40, 4)]
    fast, slow = PretendedGpu(eager=True), PretendedGpu()
    list(feeding(as_source(X), fast).pieces(indices, 0))
    assert fast.waits == 0
    list(feeding(as_source(X), slow).pieces(indices, 0))
    assert slow.waits == len(indices) - BUFFER_SETS


def test_page_locked_memory_is_used_again_for_every_batch_and_the_shorter_last_one():
    seen = []

    class Noting(PretendedGpu):
        def send(self, batch):
            seen.append(batch.untyped_storage().data_ptr())
            return super().send(batch)

    fed = feeding(as_source(X), Noting(eager=True))
    for epoch in range(3):
        list(fed.pieces(torch.arange(40).split(6), epoch))
    assert len(set(seen)) == BUFFER_SETS


def test_a_larger_batch_after_smaller_ones_finds_room():
    gpu = PretendedGpu(eager=True)
    wanted = [torch.arange(n) for n in (2, 3, 2, 9, 1, 40)]
    got = list(feeding(as_source({"x": X, "y": Y}), gpu).pieces(wanted, 0))
    assert all(torch.equal(batch["x"], X[i]) for batch, i in zip(got, wanted, strict=True))


def test_batches_that_nobody_comes_for_are_given_up_in_good_order():
    gpu = PretendedGpu()
    batches = feeding(as_source(X), gpu).pieces(torch.arange(40).split(4), 0)
    next(batches)
    batches.close()
    assert gpu.abandoned == AHEAD


def test_an_error_comes_where_its_batch_would_have_come():
    def flights():
        gpu = PretendedGpu(eager=True)
        for k in range(4):
            yield gpu.send(torch.tensor(k))
        raise OSError("the disk is gone")

    got = []
    with pytest.raises(OSError, match="the disk is gone"):
        got.extend(copied_ahead(flights()))  # what came before the error is kept
    assert [int(k) for k in got] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "data",
    [
        X,
        (X, Y),
        {"x": X.half(), "y": Y.bool()},
        Subset(TensorDataset(X, Y), range(3, 17)),
        Windows(X, 4, ahead=1),
        Windows([X, X + 100], 4, target=[Y, Y]),
    ],
    ids=["tensor", "tuple", "dict", "Subset", "Windows", "several series"],
)
def test_the_stream_gives_what_gather_gives(data):
    source = as_source(data)
    indices = torch.randperm(len(source), generator=torch.Generator().manual_seed(1)).split(5)
    streamed = feeding(source, PretendedGpu(eager=True)).pieces(indices, 0)
    for mine, wanted in zip(streamed, map(source.gather, indices), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0)


def test_it_is_refused_where_there_is_no_gpu_to_copy_to():
    source, plan = as_source((X, Y)), Feed(kind="stream")
    assert "on the CPU; use kind='gather'" in why_not(source, plan, device=torch.device("cpu"))
    assert "no device was named" in why_not(source, plan)
    with pytest.raises(PlanError, match="copies batches to a GPU ahead"):
        open_feed(source, plan, device=torch.device("cpu"))


def test_it_is_refused_for_samples_that_come_one_by_one():
    assert "one by one" in why_not(as_source([1, 2, 3]), Feed(kind="stream"), device=torch.device("cuda"))
