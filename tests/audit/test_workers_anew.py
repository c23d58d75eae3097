"""What workers of a script's own see of data that the script writes to, they see under hotlap too."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from hotlap.core.errors import PlanError
from hotlap.core.plan import Feed
from hotlap.script.feed.loader_proxy import LoaderProxy


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def test_workers_of_the_own_feed_are_started_anew_in_each_epoch():
    data = TensorDataset(torch.zeros(12))
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1)
    proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=DataLoader.__iter__)
    seen = []
    for epoch in range(2):
        data.tensors[0].fill_(epoch)
        batches = proxy.iterate()
        for number, (x,) in enumerate(batches):
            seen.append((epoch, x.unique().tolist()))
            proxy.use(Feed(kind="gather") if number == 0 else proxy.own)
    proxy.close()
    assert seen == [(0, [0.0])] * 6 + [(1, [1.0])] * 6


def test_data_is_not_gathered_on_where_workers_that_stay_would_not_see_what_was_written():
    data = TensorDataset(torch.zeros(12))
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1, persistent_workers=True)
    proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=DataLoader.__iter__)
    list(proxy.iterate())
    proxy.use(Feed(kind="gather"))
    list(proxy.iterate())
    data.tensors[0].fill_(1)
    seen = [x.unique().tolist() for (x,) in proxy.iterate()]
    proxy.close()
    assert seen == [[0.0]] * 6
    assert "written to" in proxy.supports(Feed(kind="gather"))


def test_other_feeds_are_refused_where_data_was_written_to_since_workers_that_stay_started():
    data = TensorDataset(torch.zeros(12))
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1, persistent_workers=True)
    proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=DataLoader.__iter__)
    list(proxy.iterate())
    data.tensors[0].fill_(1)
    with pytest.raises(PlanError, match="since they started a tensor was written to"):
        proxy.use(Feed(kind="gather"))
    assert "since they started" in proxy.why_other(Feed(kind="loader", workers=2))
    seen = [x.unique().tolist() for (x,) in proxy.iterate()]
    proxy.close()
    assert seen == [[0.0]] * 6


def test_other_feeds_are_refused_where_workers_that_stay_started_with_more_than_is_noted(monkeypatch):
    monkeypatch.setattr("hotlap.script.feed.loader_proxy.MOST_NOTED", 100)
    refused = []
    for length in (10, 11):  # of 10 bytes each, in a dataset inside another
        data = Subset(Rows(np.zeros((length, 10), np.uint8)), range(length))
        loader = DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)
        proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=DataLoader.__iter__)
        list(proxy.iterate())
        refused.append(proxy.why_other(Feed(kind="loader", workers=2)))
        proxy.close()
    assert refused == [None, "its workers are persistent, and hotlap could not note the data that they started with"]


def test_workers_that_stay_are_started_with_the_first_epoch_also_where_it_is_gathered():
    data = TensorDataset(torch.zeros(12))
    loader = DataLoader(data, batch_size=2, num_workers=1, prefetch_factor=1, persistent_workers=True)
    proxy = LoaderProxy(loader, device=torch.device("cpu"), original_iter=DataLoader.__iter__)
    proxy.use(Feed(kind="gather"))
    seen = [x.unique().tolist() for (x,) in proxy.iterate()]
    assert proxy.feed == Feed(kind="gather")
    data.tensors[0].fill_(1)
    seen += [x.unique().tolist() for (x,) in proxy.iterate()]
    proxy.close()
    assert seen == [[0.0]] * 12
