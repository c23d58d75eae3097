"""Windows of a series: the samples of a plain loop over it, out of memory that holds it once."""

import pickle
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Subset

import hotlap
from hotlap.core.errors import DataError, JobError
from hotlap.data.dataset import as_source, training_dataset
from hotlap.data.resident import hold_on_device
from hotlap.data.windows import Windows

CPU = torch.device("cpu")


def by_hand(several, length, stride, ahead, targets):
    """The windows and targets of a plain loop."""
    xs, ys = [], []
    for series, target in zip(several, targets, strict=True):
        for start in range(0, len(series) - length - ahead + 1, stride):
            xs.append(series[start : start + length])
            ys.append(target[start + length - 1 + ahead])
    return torch.stack(xs), torch.stack(ys)


@st.composite
def cases(draw):
    length, stride, ahead = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(0, 3))
    rows = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3).filter(lambda r: max(r) >= length + ahead))
    features = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    numbers = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    several = [torch.randn(n, *features, generator=numbers) for n in rows]
    targets = [torch.randint(9, (n,), generator=numbers) for n in rows]
    return several, targets, length, stride, ahead


@settings(max_examples=200, deadline=None)
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_they_are_those_of_a_plain_loop_however_they_are_asked_for(case, order):
    several, targets, length, stride, ahead = case
    one = len(several) == 1 and order.random() < 0.5
    windows = Windows(
        several[0] if one else several,
        length,
        target=targets[0] if one else targets,
        stride=stride,
        ahead=ahead,
    )
    x, y = by_hand(several, length, stride, ahead, targets)
    count = len(windows)
    assert count == len(x)
    chosen = [order.randrange(count) for _ in range(6)]
    indices = torch.tensor(chosen)
    source = as_source(windows)
    rows = [order.randrange(-count, count) for _ in range(5)]
    selected = as_source(Subset(windows, rows))
    within = torch.tensor([order.randrange(5) for _ in range(7)])
    for got, where in [
        (source.gather(indices), indices),
        (source.fetch(chosen, 0, 0), indices),
        (hold_on_device(source, CPU).gather(indices), indices),
        (tuple(map(torch.stack, zip(*windows.__getitems__(chosen), strict=True))), indices),
        (selected.gather(within), torch.tensor(rows)[within]),
        (hold_on_device(selected, CPU).gather(within), torch.tensor(rows)[within]),
        (selected.fetch(within.tolist(), 0, 0), torch.tensor(rows)[within]),
    ]:
        assert type(got) is tuple
        assert torch.equal(got[0], x[where])
        assert torch.equal(got[1], y[where])


def test_without_a_target_a_sample_is_the_window():
    series = torch.arange(10.0)[:, None]
    windows = Windows(series, 4, stride=3)
    assert [w[:, 0].tolist() for w in windows] == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert as_source(windows).gather(torch.tensor([2])).shape == (1, 4, 1)


def test_ahead_without_a_target_forecasts_the_series_itself():
    series = np.arange(10.0, dtype=np.float32)[:, None]
    windows = Windows(series, 4, ahead=2)
    assert len(windows) == 5
    x, y = windows[-1]
    assert (x[:, 0].tolist(), y.tolist()) == ([4, 5, 6, 7], [9])


def test_a_target_for_each_window_goes_with_its_window_also_in_a_selection():
    series, labels = [torch.randn(9, 2), torch.randn(2, 2), torch.randn(6, 2)], torch.arange(9)
    windows = Windows(series, 4, target=labels)  # 6, none and 3 windows
    assert [int(y) for _, y in windows] == list(range(9))
    chosen = hold_on_device(as_source(Subset(windows, [8, 2])), CPU)
    assert chosen.gather(torch.tensor([0, 1, 0]))[1].tolist() == [8, 2, 8]


@pytest.mark.parametrize("workers", [0, 2])
def test_it_is_a_plain_dataset_for_torchs_dataloader(workers):
    series = torch.randn(30, 3)
    windows = Windows(series, 5, ahead=1)
    batches = list(DataLoader(windows, batch_size=7, num_workers=workers))
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack([series[k : k + 5] for k in range(25)]))
    assert torch.equal(torch.cat([y for _, y in batches]), series[5:])


def test_memory_is_the_series_not_its_windows():
    series = torch.randn(100_000, 4)
    windows = Windows(series, 1000, ahead=1)  # 1.5 GB, were each window stored
    source = as_source(windows)
    assert windows.series.data_ptr() == series.data_ptr()
    assert source.gather(torch.tensor([5, 98_999]))[0].shape == (2, 1000, 4)
    there = hold_on_device(source, CPU)
    assert there.holding_cost.bytes == 0
    stored = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in there.tensors.values()}
    assert sum(stored.values()) < 2 * series.nbytes
    assert len(pickle.dumps(windows)) < 2 * series.nbytes


def test_one_that_is_built_upon_is_asked_for_its_own_samples():
    class Scaled(Windows):
        def __getitem__(self, index):
            return super().__getitem__(index) * 2

    source = as_source(Scaled(torch.ones(6, 1), 2))
    assert source.why_not_gather() is not None
    assert source.fetch([0], 0, 0).sum() == 4


def test_a_position_outside_is_an_index_error():
    windows = Windows(torch.zeros(6, 1), 2)
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"window {index} of 5"):
            windows[index]


def test_it_is_known_whether_a_target_is_ever_ignored():
    labels = torch.tensor([0, 1, -100, 1])
    assert as_source(Windows(torch.zeros(4, 1), 2)).never_holds(-100)
    assert not as_source(Windows(torch.zeros(4, 1), 2, target=labels)).never_holds(-100)
    assert as_source(Windows(torch.zeros(4, 1), 2, target=labels)).never_holds(7)


SERIES = torch.zeros(10, 2)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"series": torch.zeros(10)}, [r"series has shape \(10,\); give \(time, features\)"]),
        ({"series": [SERIES, torch.zeros(10, 3)]}, [r"series\[1\] has rows of float32 \(3,\), series\[0\] rows of"]),
        ({"series": [SERIES, SERIES.numpy()], "length": 11}, ["one needs 11 rows .* the longest series has 10"]),
        ({"series": []}, ["series is an empty list"]),
        ({"series": "a.csv"}, ["series is str 'a.csv'"]),
        ({"series": np.zeros((4, 2), dtype="U3")}, ["which torch cannot hold"]),
        ({"ahead": 8}, ["one needs 11 rows"]),
        ({"target": torch.zeros(9)}, ["target has 9 rows; give 10, one for each row .* or 8, one for each window"]),
        ({"target": torch.zeros(9), "ahead": 1}, ["give 10, one for each row of the series$"]),
        ({"target": torch.zeros(8), "ahead": 1}, ["ahead=1 needs a target with a row for each row"]),
        ({"target": [SERIES, SERIES]}, ["target is a list of 2, and there are 1 series"]),
        ({"series": [SERIES] * 2, "target": [SERIES, SERIES[1:]]}, [r"target\[1\] has 9 rows, and its series 10"]),
        ({"series": [SERIES] * 2, "target": SERIES}, ["give a list of them, with a row for each row"]),
        (
            {"series": torch.zeros(3), "length": 0, "stride": True, "ahead": -1, "target": 5},
            ["5 mistakes", "length=0", "stride=True", "ahead=-1", "series has shape", "target is int 5"],
        ),
    ],
)
def test_all_mistakes_are_told_at_once(given, said):
    with pytest.raises(DataError) as error:
        Windows(**{"series": SERIES, "length": 3, **given})
    for words in said:
        assert re.search(words, str(error.value)), str(error.value)


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x[:, -1])


def job(data, **settings):
    model = Last()
    return hotlap.Job(
        model=model,
        data=data,
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters()),
        batch_size=4,
        epochs=1,
        **settings,
    )


def test_a_job_takes_it_and_gathers_it():
    dataset = training_dataset(job(hotlap.Windows(SERIES, 3, ahead=1)))
    assert dataset.feed.kind == "gather"
    assert len(dataset.source) == 7


def test_double_precision_is_told_before_training():
    with pytest.raises(JobError, match="data\\['series'\\] is float64 while the model is float32"):
        job(hotlap.Windows(SERIES.double(), 3, ahead=1))


def test_a_training_on_windows_gives_the_numbers_of_one_on_stored_windows():
    series = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    x, y = by_hand([series], 3, 1, 1, [series])
    weights = []
    for data in (hotlap.Windows(series, 3, ahead=1), (x, y)):
        torch.manual_seed(0)
        model = Last()
        rig = hotlap.Rig(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.MSELoss(), device="cpu")
        for window in rig.feed(data, batch_size=8, epochs=2):
            rig.step(window)
        weights.append(model.layer.weight.detach())
    assert torch.equal(*weights)
