"""Samples fetched by processes that are forked from one with a GPU at work: the same, and the GPU is left alone."""

import gc

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hotlap import Job, Plan, fit
from hotlap.core.plan import Feed
from hotlap.data import background_fetch
from hotlap.data.dataset import as_source
from hotlap.data.resident import hold_on_device
from hotlap.script.feed.device_copies import DeviceCopies
from hotlap.script.feed.loader_proxy import LoaderProxy, why_other_batch

DEVICE = torch.device("cuda", 0)
RESIDENT = Feed(kind="resident")
X = torch.arange(1000 * 12.0).reshape(1000, 3, 4)
ORIGINAL = DataLoader.__iter__


class Computed(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] * 2, index % 5


class OnTheGpu(Dataset):
    """What only the process that holds the GPU can read."""

    def __init__(self):
        self.rows = X.to(DEVICE)

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return self.rows[index].cpu()


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Processes pay whatever fetching takes; collects those that were started."""
    started, init = [], background_fetch.BackgroundFetch.__init__

    def noted(self, *args, **settings):
        started.append(self)
        init(self, *args, **settings)

    monkeypatch.setattr(background_fetch, "LEAST_S", 0.0)
    monkeypatch.setattr(background_fetch.BackgroundFetch, "__init__", noted)
    return started


def busy():
    """The GPU has work, a graph and memory of its own."""
    torch.cuda.current_stream(DEVICE).wait_stream(torch.cuda.Stream(DEVICE))
    return torch.randn(256, 256, device=DEVICE) @ torch.randn(256, 256, device=DEVICE)


def test_what_processes_fetch_is_held_on_the_gpu(at_once):
    before = busy()
    columns = hold_on_device(as_source(Computed()), DEVICE)
    assert [one.has_failed for one in at_once] == [False]
    assert at_once[0].processes > 1
    x, y = (tensor.cpu() for tensor in columns.tensors.values())
    assert torch.equal(x, X * 2)
    assert torch.equal(y, torch.arange(1000) % 5)
    assert torch.isfinite(before @ busy()).all()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_script_gets_its_own_batches_of_what_processes_fetched(workers, at_once):
    busy()
    device_copies = DeviceCopies(DEVICE)
    device_copies.on_fault = lambda error: pytest.fail(repr(error))
    loader = DataLoader(Computed(), batch_size=16, shuffle=True, num_workers=workers, pin_memory=True)
    proxy = LoaderProxy(loader, device=DEVICE, original_iter=ORIGINAL, device_copies=device_copies)
    proxy.on_fault = lambda error: pytest.fail(repr(error))
    torch.manual_seed(2)
    wanted = list(ORIGINAL(loader))
    torch.manual_seed(2)
    seen = []
    for number, batch in enumerate(proxy.iterate()):
        seen.append(batch)
        if number == 1:
            assert proxy.learn() == 1
            assert at_once[0].wait()
            assert proxy.learn() is None
            proxy.use(RESIDENT)
        on_device = [tensor.to(DEVICE, non_blocking=True).cpu() for tensor in batch]
        assert all(map(torch.equal, on_device, batch))
    assert len(seen) == len(wanted)
    assert all(why_other_batch(a, b) is None for a, b in zip(wanted, seen, strict=True))
    assert proxy.feed == RESIDENT
    assert device_copies.answered
    proxy.close()
    device_copies.remove()


def test_data_that_only_this_process_can_read_is_fetched_here(at_once):
    busy()
    columns = hold_on_device(as_source(OnTheGpu()), DEVICE)
    assert torch.equal(next(iter(columns.tensors.values())).cpu(), X)
    assert all(one.has_failed for one in at_once)
    assert torch.isfinite(busy()).all()


def test_a_training_by_held_data_learns_as_one_by_its_loader(at_once, tmp_path):
    def trained(kind):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5)).to(DEVICE)
        job = Job(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-6),
            data=Computed(),
            loss=torch.nn.CrossEntropyLoss(),
            batch_size=50,
            epochs=2,
            seed=1,
        )
        fit(job, plan=Plan().but(kind=kind), out=tmp_path / kind, progress=False)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    held, fetched = trained("resident"), trained("loader")
    assert at_once
    assert not any(one.has_failed for one in at_once)
    assert all(map(torch.equal, held, fetched))
    gc.collect()
