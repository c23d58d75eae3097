"""Every way to feed, over random data and orders: the same batches in the same order."""

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from hotlap.core.plan import Feed
from hotlap.data.batches import map_tensors
from hotlap.data.dataset import as_source
from hotlap.data.feeds import StreamFeeding, open_feed
from hotlap.data.order import Order
from hotlap.data.resident import ResidentFeeding, hold_on_device
from hotlap.data.windows import Windows

CPU = torch.device("cpu")


class Computed(Dataset):
    """Pure, but code."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"x": torch.full((2,), index), "y": (index, index / 3)}


class AtOnce:
    """A way to a device that is the host itself."""

    def send(self, batch):
        copy = map_tensors(batch, torch.clone)
        return type(
            "PendingCopy", (), {"on_device": lambda _: copy, "wait": lambda _: None, "discard": lambda _: None}
        )()


@st.composite
def data(draw):
    count = draw(st.integers(2, 30))
    x, y = torch.randn(count, 3), torch.arange(count)
    kinds = {
        "tensor": x,
        "tuple": (x, y),
        "dict": {"x": x.to(torch.uint8), "y": y},
        "dataset": TensorDataset(x, y),
        "subset": Subset(TensorDataset(x, y), draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=20))),
        "windows": Windows(x, 2, stride=draw(st.integers(1, 3))),
        "several series": Windows([x, x + 1], 2, target=[y, y]),
        "computed": Computed(count),
        "subset of computed": Subset(Computed(count), range(1, count)),
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]


def every_feed(source, workers):
    yield open_feed(source, Feed(kind="loader"))
    yield ResidentFeeding(hold_on_device(source, CPU), CPU)
    if source.why_not_gather() is None:
        yield open_feed(source, Feed(kind="gather"))
        yield StreamFeeding(source, AtOnce(), pinned=False)
    for count in workers:
        yield open_feed(source, Feed(kind="loader", workers=count))


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def check(given, batch, seed, accumulate, micro, workers):
    source = as_source(given)
    order = Order(len(source), batch_size=batch, shuffled=True, seed=seed, accumulate=accumulate)
    reference = None
    for feeding in every_feed(source, workers):
        served = []
        for number in range(2):
            epoch = order.epoch(number)
            pieces = [piece for w in range(len(epoch)) for piece in epoch.pieces(w, micro, tickets=feeding.tickets)]
            served += feeding.pieces(pieces, number)
        feeding.close()
        reference = reference or served
        assert same(served, reference), type(feeding).__name__


@settings(max_examples=80, deadline=None)
@given(data(), st.integers(1, 9), st.integers(0, 99), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_every_feed_gives_the_same_batches_in_the_same_order(given, batch, seed, accumulate, micro):
    check(given, batch, seed, accumulate, micro, workers=())


@settings(max_examples=8, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(data(), st.integers(1, 9), st.integers(0, 99), st.integers(1, 3), st.none() | st.integers(1, 4))
def test_so_does_any_number_of_workers(given, batch, seed, accumulate, micro):
    check(given, batch, seed, accumulate, micro, workers=(1, 2))
