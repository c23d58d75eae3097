"""Worker processes: how they start, and what they ask a dataset for."""

import gc
import operator
import os
import pickle
import signal
from multiprocessing.context import ForkContext

import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from hotlap.core.errors import DataError
from hotlap.core.plan import Feed
from hotlap.data.dataset import as_source
from hotlap.data.feeds import open_feed

WORKERS = [Feed(kind="loader", workers=n) for n in (1, 2)]
INDICES = list(torch.arange(20).split(6))


def fed(data, plan, **settings):
    feeding = open_feed(as_source(data), plan, seed=5, **settings)
    try:
        return list(feeding.pieces(INDICES, 0))
    finally:
        feeding.close()


class Telling(Dataset):
    """Gives what it sees of the process it is in."""

    started_with = None

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return gc.get_freeze_count(), Telling.started_with or 0, gc.isenabled()


def note_what_is_frozen(worker):
    Telling.started_with = gc.get_freeze_count()


def test_a_worker_freezes_what_it_inherits_and_then_does_what_the_user_wants():
    before = gc.get_freeze_count()
    batches = fed(Telling(), WORKERS[1], extras={"worker_init_fn": note_what_is_frozen})
    frozen, at_start, collects = (torch.cat(column) for column in zip(*batches, strict=True))
    assert (frozen > 1000).all()
    assert (at_start > 1000).all()
    assert collects.all()
    assert gc.get_freeze_count() <= before  # of what was frozen before, some may have gone
    assert Telling.started_with is None


class Inherited:
    """Stands for a CUDA graph in a reference cycle: a process that collects it after a fork dies."""

    def __init__(self):
        self.itself, self.home = self, os.getpid()

    def __del__(self):
        if os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)


class Collecting(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        gc.collect()
        return index


class Littering(ForkContext):
    """Leaves garbage right before each fork."""

    def Process(self, *args, **settings):  # noqa: N802 -- as multiprocessing has it
        Inherited()
        return ForkContext.Process(*args, **settings)


def test_a_worker_never_collects_what_it_inherited():
    """Neither when it is asked to, nor by itself between the fork and its start."""
    batches = fed(Collecting(), WORKERS[1], extras={"multiprocessing_context": Littering()})
    gc.collect()
    assert torch.equal(torch.cat(batches), torch.arange(20))
    assert gc.isenabled()


def test_a_worker_can_be_spawned_with_the_users_own_start():
    x = torch.arange(20)
    batches = fed(
        TensorDataset(x), WORKERS[0], extras={"worker_init_fn": operator.index, "multiprocessing_context": "spawn"}
    )
    assert torch.equal(torch.cat([batch[0] for batch in batches]), x)


def test_the_start_of_a_worker_can_be_pickled():
    feeding = open_feed(as_source(Telling()), WORKERS[0], extras={"worker_init_fn": operator.index})
    assert pickle.loads(pickle.dumps(feeding._loader.worker_init_fn))._then is operator.index


class Together(Dataset):
    """Answers many indices at once, and draws for each."""

    draws = True

    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("samples should be asked for together")

    def __getitems__(self, indices):
        return [(index, torch.rand(()).item() if self.draws else len(indices)) for index in indices]


class Quiet(Together):
    draws = False


@pytest.mark.parametrize("plan", [Feed(kind="loader"), *WORKERS], ids=str)
def test_a_dataset_that_answers_many_indices_is_asked_for_a_whole_batch_in_any_process(plan):
    for data in (Quiet(), Subset(Quiet(), range(20))):
        batches = fed(data, plan)
        assert [sizes.tolist() for _, sizes in batches] == [[6] * 6, [6] * 6, [6] * 6, [2] * 2]


@pytest.mark.parametrize("plan", WORKERS, ids=str)
def test_what_such_a_dataset_draws_is_seeded_by_sample(plan):
    def by_sample(plan):
        indices, drawn = (torch.cat(column) for column in zip(*fed(Together(), plan), strict=True))
        assert torch.equal(indices, torch.arange(20))
        return drawn

    assert torch.equal(by_sample(Feed(kind="loader")), by_sample(plan))
    assert len(by_sample(plan).unique()) == 20


def test_a_dataset_that_gives_fewer_samples_than_it_was_asked_for_is_an_error():
    class Short(Quiet):
        def __getitems__(self, indices):
            return super().__getitems__(indices)[1:]

    with pytest.raises(DataError, match=r"Short\.__getitems__ gave 5 samples for 6 indices"):
        fed(Short(), Feed(kind="loader"))
