"""A number of workers from a plan, a variable or a call starts no more processes than the cores can keep busy."""

import logging

import pytest
import torch
from plain import Computed, small_mlp
from torch import nn
from torch.utils.data import DataLoader

from hotlap import Job, Plan, PlanError, fit
from hotlap.core.errors import MachineError
from hotlap.core.plan import MOST_PREFETCH, Feed
from hotlap.data import feeds, parallel
from hotlap.data.dataset import loader_feed
from hotlap.data.feeds import within_cores
from hotlap.machine import workers_wanted
from hotlap.machine.limits import most_workers, read_cpu
from hotlap.script.feed.feeds import LoaderClone


@pytest.fixture
def three(monkeypatch):
    """A machine that takes three workers."""
    feeds._say_cut.cache_clear()
    monkeypatch.setattr(feeds, "most_workers", lambda: 3)
    monkeypatch.setattr(parallel, "most_workers", lambda: 3)


@pytest.fixture
def asked(monkeypatch):
    """How many workers each loader is made with; none is started."""
    counts = []

    class Counted(DataLoader):
        def __init__(self, *args, num_workers=0, **settings):
            counts.append(num_workers)
            for name in ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"):
                settings.pop(name, None)
            super().__init__(*args, **settings)

    monkeypatch.setattr(feeds, "DataLoader", Counted)
    monkeypatch.setattr("hotlap.script.feed.feeds.DataLoader", Counted)
    return counts


def job(data):
    size = {} if isinstance(data, DataLoader) else {"batch_size": 16}
    return Job(
        model=small_mlp(), data=data, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        epochs=1, device="cpu", **size,
    )  # fmt: skip


@pytest.mark.parametrize(("cores", "most"), [(1, 8), (2, 8), (3, 12), (64, 256)])
def test_workers_are_bounded_by_the_cores_of_this_process(cores, most):
    assert most_workers(cores) == most


def test_a_plan_file_of_a_larger_machine_is_used_with_fewer_workers_and_one_line(tmp_path, three, asked, caplog):
    file = tmp_path / "plan.toml"
    file.write_text(Plan().but(kind="loader", workers=150, persistent=True).to_text())
    run = fit(job(Computed(64)), plan=file, out=tmp_path / "run", progress=False)
    assert asked == [3]
    assert run.plan.feed.workers == 150  # it is replayed in full where there are as many cores
    (line,) = [record.getMessage() for record in caplog.records]
    cores = read_cpu().cores
    assert line == f"the plan asks for 150 workers and this process has {cores} cores: hotlap starts 3 workers"


def test_the_loader_of_a_script_is_given_no_more_either(three, asked):
    LoaderClone(DataLoader(Computed(64)), Feed(kind="loader", workers=150), iter)
    assert asked == [3]


def test_as_many_as_the_users_own_loader_has_are_never_too_many(three, caplog):
    feed = Feed(kind="loader", workers=5)
    assert within_cores(feed, own=5) is feed
    assert within_cores(Feed(kind="loader", workers=9), own=5).workers == 5
    assert within_cores(Feed(kind="loader", workers=3), own=0).workers == 3


@pytest.mark.parametrize("changes", [{"workers": 10**6}, {"workers": 2, "prefetch": 10**6}, {"workers": 10**30}])
def test_numbers_that_no_machine_has_are_refused_in_one_line(changes):
    with pytest.raises(PlanError, match=r"is too large; the most is (1024|128)$"):
        Plan().but(kind="loader", **changes)


def test_a_loader_of_the_user_may_prefetch_more_than_a_plan():
    loader = DataLoader(Computed(8), num_workers=1, prefetch_factor=5000)
    assert loader_feed(loader, on_gpu=False).prefetch == MOST_PREFETCH


@pytest.mark.parametrize("name", ["HOTLAP_WORKERS", "NUM_WORKERS"])
def test_a_variable_that_asks_for_too_many_is_refused(name):
    most = most_workers()
    assert workers_wanted({name: str(most)}) == most
    with pytest.raises(MachineError, match=f"{name}=999999 is too many workers for this process; set it to {most} or"):
        workers_wanted({name: "999999"})


def test_parallel_map_starts_no_more_either(three, monkeypatch, caplog):
    started = []
    monkeypatch.setattr(
        parallel, "_mapped", lambda work, workers: started.append(workers) or list(map(work.f, work.items))
    )
    with caplog.at_level(logging.WARNING):
        assert parallel.parallel_map(abs, [-1, 2], workers=10**30) == [1, 2]
    assert started == [3]
    assert "is too many for this process: hotlap starts 3" in caplog.text
