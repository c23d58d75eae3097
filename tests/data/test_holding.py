"""Holding data: the batches that a feed would give, out of columns that were brought once."""

import gc
import os
import weakref
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from hotlap.core.errors import DataError
from hotlap.core.plan import Feed
from hotlap.data import background_fetch, resident
from hotlap.data.dataset import as_source
from hotlap.data.feeds import open_feed
from hotlap.data.order import HostRandomness
from hotlap.data.pure.proof import state_of
from hotlap.data.resident import bytes_needed, hold_on_device, time_to_hold, why_not_held
from hotlap.data.sources import Columns, Source
from hotlap.data.windows import Windows

CPU = torch.device("cpu")
X = torch.arange(60.0).reshape(20, 3)
Y = torch.arange(20)
Pair = namedtuple("Pair", "x y")


class Made(Dataset):
    """A dataset out of a function of the index."""

    def __init__(self, function, length=20):
        self.function, self.length = function, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.function(index)


class Together(Made):
    def __getitem__(self, index):
        raise AssertionError("samples should be asked for together")

    def __getitems__(self, indices):
        return [self.function(index) for index in indices]


@pytest.fixture
def asked(monkeypatch):
    """The indices that were asked for: a dataset that notes them itself is not held."""
    found, read = [], Source.read

    def noted(self, indices):
        found.extend(indices)
        return read(self, indices)

    monkeypatch.setattr(Source, "read", noted)
    return found


SAMPLES = {
    "tensor": lambda i: X[i],
    "number": lambda i: i,
    "float": lambda i: i / 7,
    "truth": lambda i: i % 3 == 0,
    "numpy number": lambda i: np.float32(i),
    "array": lambda i: X[i].numpy().astype(np.uint8),
    "tuple": lambda i: (X[i].half(), i),
    "list": lambda i: [X[i], float(i)],
    "dict": lambda i: {"x": X[i].bfloat16(), "y": i},
    "ordered dict": lambda i: OrderedDict(b=X[i], a=i),
    "named tuple": lambda i: Pair(X[i], np.int32(i)),
    "nested": lambda i: ({"x": [X[i], (i, Pair(i, 2.5))]}, torch.tensor(i)),
    "nothing in it": lambda i: (torch.zeros(0), i),
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    indices=st.lists(st.integers(0, 19), min_size=1, max_size=30),
    rows=st.none() | st.lists(st.integers(-20, 19), min_size=20, max_size=20),
    chunk=st.integers(1, 50),
)
def test_what_is_held_gives_the_batches_of_the_loader(name, indices, rows, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resident, "CHUNK_SAMPLES", chunk)
        data = Made(SAMPLES[name])
        source = as_source(data if rows is None else Subset(data, rows))
        columns = hold_on_device(source, CPU)
    loader = open_feed(source, Feed(kind="loader"))
    (wanted,) = loader.pieces([torch.tensor(indices)], 0)
    assert isinstance(columns, Columns)
    assert len(columns) == 20
    assert same(columns.gather(torch.tensor(indices)), wanted)


@pytest.fixture
def in_processes(monkeypatch):
    """Two processes fetch, as beside a training on a GPU; collects those that were started."""
    started = []

    class Noted(background_fetch.BackgroundFetch):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings)
            started.append(self)

    monkeypatch.setattr(resident, "processes_for", lambda device, alone_s: 2)
    monkeypatch.setattr(resident, "BackgroundFetch", Noted)
    monkeypatch.setattr(background_fetch, "CHUNK", 3)
    return started


@pytest.mark.parametrize("name", SAMPLES)
def test_processes_fetch_the_same(name, in_processes):
    source, seen = as_source(Made(SAMPLES[name])), []
    columns = hold_on_device(source, CPU, lambda done, total: seen.append((done, total)))
    (wanted,) = open_feed(source, Feed(kind="loader")).pieces([torch.arange(20)], 0)
    assert same(columns.gather(torch.arange(20)), wanted)
    assert len(in_processes) == 1
    assert not in_processes[0].has_failed
    assert seen[-1] == (20, 20)
    assert seen == sorted(seen)


def test_what_processes_cannot_fetch_this_one_does(in_processes, monkeypatch):
    here = os.getpid()

    def only_here(self, indices):
        if os.getpid() != here:
            os._exit(1)
        return read(self, indices)

    read = Source.read
    monkeypatch.setattr(Source, "read", only_here)
    columns = hold_on_device(as_source(Made(SAMPLES["tuple"])), CPU)
    assert in_processes[0].has_failed
    assert torch.equal(columns.tensors[1], torch.arange(20))


def test_a_sample_of_another_form_is_named_where_processes_fetch_too(in_processes):
    data = Made(lambda i: torch.zeros(3 if i != 12 else 4))
    with pytest.raises(DataError, match="12"):
        hold_on_device(as_source(data), CPU)
    assert in_processes[0].has_failed


def test_processes_shorten_what_holding_is_expected_to_take(monkeypatch):
    source = as_source(Made(SAMPLES["tuple"]))
    monkeypatch.setattr(resident, "_sample_s", lambda source, kinds: 1.0)
    assert time_to_hold(source, CPU) == pytest.approx(20.0)
    monkeypatch.setattr(resident, "processes_for", lambda device, alone_s: 10 if alone_s == 20 else 0)
    assert time_to_hold(source, CPU) == pytest.approx(20.0 / (10 * background_fetch.PACE))


@pytest.mark.parametrize(
    "data",
    [
        X,
        (X.to(torch.uint8), Y),
        {"x": X, "y": Y},
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        Subset(Subset(TensorDataset(X, Y), range(3, 17)), [-1, 0, 5, 5]),
        Subset(TensorDataset(X.T.contiguous().T, Y), [7, 3]),
    ],
    ids=["tensor", "tuple", "dict", "arrays", "TensorDataset", "Subset of Subset", "strided"],
)
def test_tensors_are_held_as_they_are(data):
    source = as_source(data)
    columns = hold_on_device(source, CPU)
    indices = torch.tensor([0, 1, 0])[: len(source) + 1]
    assert same(columns.gather(indices), source.gather(indices))
    assert type(columns) is Columns


def test_tensors_that_are_there_are_not_copied():
    columns = hold_on_device(as_source((X, Y)), CPU)
    assert columns.tensors[0].data_ptr() == X.data_ptr()
    assert columns.holding_cost.bytes == 0


def test_a_selection_holds_its_own_rows_only():
    columns = hold_on_device(as_source(Subset(TensorDataset(X, Y), [4, 5])), CPU)
    assert (len(columns), columns.holding_cost.bytes) == (2, 2 * (3 * 4 + 8))


@pytest.mark.parametrize("data", [Made(SAMPLES["tuple"]), Together(SAMPLES["tuple"])], ids=["one by one", "together"])
def test_every_sample_is_fetched_once_in_its_order_and_all_are_counted(data, asked):
    source, told = as_source(data), []
    assert why_not_held(source, CPU, reserve_bytes=0) is None
    asked.clear()
    columns = hold_on_device(source, CPU, progress=lambda done, total: told.append((done, total)))
    assert asked == list(range(20))
    assert told == [(20, 20)]
    assert columns.holding_cost.bytes == 20 * (3 * 2 + 8)
    assert columns.holding_cost.seconds > 0


@pytest.mark.parametrize(("slow", "takes_s"), [((0,), 0.1), ((0, 1), 9.0), ((), 0.1)])
def test_one_slow_sample_says_nothing_of_what_holding_takes(slow, takes_s, monkeypatch):
    """Of 100 samples that take 1 ms each; a try in which something else runs takes 90 ms for each."""
    now, tries = [0.0], iter(range(100))

    def read(self, indices):
        now[0] += len(indices) * (0.09 if next(tries) in slow else 0.001)
        return [torch.zeros(1) for _ in indices]

    source = as_source(Made(lambda i: torch.zeros(1), 100))
    bytes_needed(source)
    monkeypatch.setattr(resident, "TIMED_S", 1.0)
    monkeypatch.setattr(Source, "read", read)
    monkeypatch.setattr(resident, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert time_to_hold(source, CPU) == pytest.approx(takes_s, rel=0.01)


def test_holding_leaves_all_randomness_as_it_was():
    before = HostRandomness()
    hold_on_device(as_source(Made(SAMPLES["nested"])), CPU)
    assert before.same_as(HostRandomness())


def test_data_that_does_not_fit_is_refused_with_what_it_needs_before_it_is_fetched(monkeypatch, asked):
    monkeypatch.setattr(resident, "read_memory", lambda: type("Memory", (), {"free_bytes": 2000}))
    data = Made(lambda i: torch.zeros(25), length=10)  # 1000 bytes, and half of 2000 may be taken
    assert why_not_held(as_source(data), CPU, reserve_bytes=0) is None
    said = why_not_held(as_source(data), CPU, reserve_bytes=24)
    assert (
        said == "the data needs 1000 B on cpu beside 24 B for the training, which has 1000 B, half of the free memory"
    )
    many = Made(lambda i: torch.zeros(25), length=10**9)
    assert "93.1 GiB" in why_not_held(as_source(many), CPU, reserve_bytes=0)
    assert len(asked) < 100
    assert why_not_held(as_source((X, Y)), CPU, reserve_bytes=10**9) is None  # it is there already


def late(value):
    return lambda i: value if i == 14 else torch.zeros(3)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda i: torch.zeros(3 + i), r"float32 \(3,\) at index 0, float32 \(5,\) at index 2"),
        (lambda i: (i, "name"), "hold str 'name', which cannot be a column"),
        (lambda i: {}, "no tensor"),
        (lambda i: i if i else 0.5, "float at index 0, int at index 2"),
        (lambda i: torch.rand(3), "draws from torch's generator"),
        (lambda i: X.clone().requires_grad_()[i], "requires gradients"),
        (lambda i: None, "Made cannot be stacked"),
        (lambda i: 2**70, "cannot be stacked: Overflow"),
    ],
    ids=["shapes", "text", "empty", "kinds", "random", "gradients", "None", "too large"],
)
def test_samples_that_make_no_columns_are_refused_with_the_reason(function, said):
    source = as_source(Made(function))
    with pytest.raises(DataError, match=said) as error:
        hold_on_device(source, CPU)
    assert why_not_held(source, CPU, reserve_bytes=0) == str(error.value)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (late(torch.zeros(4)), r"float32 \(3,\) at index 0, float32 \(4,\) at index 14"),
        (late(torch.zeros(3).half()), r"float32 \(3,\) at index 0, float16 \(3,\) at index 14"),
    ],
    ids=["shape", "dtype"],
)
def test_a_sample_that_differs_where_no_probe_looked_is_found_while_fetching(function, said):
    source, before = as_source(Made(function)), HostRandomness()
    assert why_not_held(source, CPU, reserve_bytes=0) is None
    with pytest.raises(DataError, match=said):
        hold_on_device(source, CPU)
    assert before.same_as(HostRandomness())


@pytest.mark.parametrize("data", [(X, Y), Made(SAMPLES["tuple"]), Subset(TensorDataset(X), [1])])
def test_a_collate_function_of_the_users_own_is_refused(data):
    source = as_source(data, collate=lambda samples: samples)
    assert "collate function" in why_not_held(source, CPU, reserve_bytes=0)
    with pytest.raises(DataError, match="not be a stack of samples"):
        hold_on_device(source, CPU)


@pytest.mark.parametrize("data", [(X, Y), Made(SAMPLES["tuple"])], ids=["tensors", "samples"])
def test_what_was_held_is_free_as_soon_as_nobody_names_it(data):
    gc.disable()
    try:
        columns = hold_on_device(as_source(data), CPU)
        gone = weakref.ref(columns)
        del columns
        assert gone() is None
    finally:
        gc.enable()


class Opening(Made):
    """Opens its file when it is first asked."""

    def __getitem__(self, index):
        self.file = getattr(self, "file", None) or X
        return super().__getitem__(index)


@pytest.mark.parametrize("wrapped", [lambda d: d, lambda d: Subset(d, range(5))], ids=["dataset", "Subset"])
def test_a_dataset_that_opens_a_file_when_it_is_first_asked_is_not_asked(wrapped, asked):
    data = Opening(SAMPLES["tuple"])
    source = as_source(wrapped(data))
    assert "sets self.file" in why_not_held(source, CPU, reserve_bytes=0)
    with pytest.raises(DataError, match=r"sets self\.file"):
        hold_on_device(source, CPU)
    assert not hasattr(data, "file")
    assert not asked


class Curriculum(Dataset):
    """Pure as long as nobody tells it otherwise."""

    def __init__(self):
        self.epoch = 0

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((2,), float(index * (1 + self.epoch))), index % 2


def test_data_that_a_dataset_makes_otherwise_by_now_is_brought_anew():
    from torch import nn

    from hotlap import Plan, Rig

    data, seen = Curriculum(), []
    rig = Rig(
        nn.Linear(2, 2),
        lambda p: torch.optim.SGD(p, lr=0.0),
        lambda model, batch: (seen.append(batch[0].sum().item()), model(batch[0]).sum())[1],
        plan=Plan().but(kind="resident"),
    )
    for epoch in range(3):
        data.epoch = epoch
        for window in rig.feed(data, batch_size=12, epochs=1):
            rig.step(window)
    assert seen == [132.0, 264.0, 396.0]


FORMS = {
    "tensors": lambda: (torch.randn(20, 3), torch.arange(20) % 2),
    "arrays": lambda: (np.random.rand(20, 3).astype("float32"), np.arange(20) % 2),
    "windows": lambda: Windows(torch.randn(30, 3), 4, target=torch.arange(30) % 2),
    "several series": lambda: Windows(
        [torch.randn(9, 3), torch.randn(8, 3)], 4, target=[torch.zeros(9), torch.zeros(8)]
    ),
    "some windows": lambda: Subset(Windows(torch.randn(30, 3), 4, target=torch.arange(30) % 2), [1, 5, 7]),
    "some tensors": lambda: Subset(TensorDataset(torch.randn(20, 3), torch.arange(20)), [1, 5, 7]),
    "computed": lambda: Curriculum(),
}


@pytest.mark.parametrize("name", FORMS)
def test_data_that_nobody_touches_is_seen_to_be_the_same(name):
    state = state_of(as_source(FORMS[name]()))
    assert state.why_changed() is None
    assert state.why_changed(thorough=True) is None


def test_tensors_that_were_written_to_and_arrays_that_changed_are_seen():
    x, array = torch.zeros(10, 2), np.zeros((10, 2))
    for source, change in ((as_source((x,)), lambda: x[3].add_(1)), (as_source((array,)), lambda: array.fill(2))):
        state = state_of(source)
        assert state.why_changed(thorough=True) is None
        change()
        assert state.why_changed(thorough=True) is not None
        assert state.why_changed(thorough=True, live=True) is None, "what lies there is read anew"
