"""Contract of every feed: the same samples in the same order, with the same randomness."""

import itertools
import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hotlap.core.errors import DataError, PlanError
from hotlap.core.job import Job
from hotlap.core.plan import Feed
from hotlap.data.dataset import as_source, evaluation_dataset, training_dataset
from hotlap.data.feeds import open_feed
from hotlap.data.order import HostRandomness, Order

X = torch.arange(60.0).reshape(20, 3)
Y = torch.arange(20)
FEEDS = [
    Feed(kind="gather"),
    Feed(kind="loader"),
    Feed(kind="loader", workers=1),
    Feed(kind="loader", workers=2, prefetch=3),
    Feed(kind="loader", workers=2, persistent=True),
]
LOADERS = [feed for feed in FEEDS if feed.kind == "loader"]


class Augmenting(Dataset):
    """Draws from all three generators, as augmentations do."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random()])


class Sometimes(Dataset):
    """Draws for some samples only."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.tensor([index, torch.rand(()).item() if index % 7 == 6 else 0.0])


class Batched(Dataset):
    asked = 0

    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise AssertionError("samples should be asked for together")

    def __getitems__(self, indices):
        return [(X[i], Y[i]) for i in indices]


def served(source, feed, epoch=0, seed=5, batch=6):
    order = Order(len(source), batch_size=batch, shuffled=True, seed=1).epoch(epoch)
    indices = [order.pieces(w, None)[0] for w in range(len(order))]
    feeding = open_feed(source, feed, seed=seed)
    try:
        return list(feeding.pieces(indices, epoch))
    finally:
        feeding.close()


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("feed", FEEDS[1:], ids=str)
@pytest.mark.parametrize(
    "data",
    [
        X,
        (X, Y),
        {"x": X, "y": Y},
        (X.numpy(), Y.numpy()),
        TensorDataset(X, Y),
        Subset(TensorDataset(X, Y), range(3, 17)),
    ],
    ids=["tensor", "tuple", "dict", "arrays", "TensorDataset", "Subset"],
)
def test_every_feed_gives_the_same_batches_in_the_same_order(data, feed):
    source = as_source(data)
    assert same(served(source, FEEDS[0]), served(source, feed))


@pytest.mark.parametrize("feed", LOADERS[1:], ids=str)
@pytest.mark.parametrize("dataset", [Augmenting(), Sometimes()], ids=["always", "sometimes"])
def test_augmentation_is_the_same_for_any_worker_count(dataset, feed):
    source = as_source(dataset)
    assert same(served(source, LOADERS[0]), served(source, feed))


def test_augmentation_is_seeded_by_sample_and_epoch_not_by_batch():
    def by_sample(epoch, batch):
        rows = torch.cat(served(as_source(Augmenting()), LOADERS[0], epoch=epoch, batch=batch))
        return rows[rows[:, 0].argsort()]

    assert torch.equal(by_sample(0, batch=6), by_sample(0, batch=20))
    assert not torch.equal(by_sample(0, batch=6), by_sample(1, batch=6))
    assert len(by_sample(0, 6)[:, 1].unique()) == 20


def test_persistent_workers_know_the_new_epoch():
    source, feeding_plan = as_source(Augmenting()), Feed(kind="loader", workers=2, persistent=True)
    feeding = open_feed(source, feeding_plan, seed=5)
    try:
        indices = [torch.arange(10), torch.arange(10, 20)]
        first = torch.cat(list(feeding.pieces(indices, 0)))
        second = torch.cat(list(feeding.pieces(indices, 1)))
    finally:
        feeding.close()
    assert not torch.equal(first[:, 1], second[:, 1])
    alone = open_feed(source, Feed(kind="loader"), seed=5)
    assert torch.equal(second, torch.cat(list(alone.pieces(indices, 1))))


def test_a_feed_begun_anew_in_the_middle_goes_on_from_there():
    feeding = open_feed(as_source((X, Y)), Feed(kind="loader", workers=2, persistent=True), seed=5)
    try:
        indices = [torch.arange(k, k + 4) for k in range(0, 20, 4)]
        begun = feeding.pieces(indices, 0)
        next(begun)
        again = list(feeding.pieces(indices[2:], 0))
    finally:
        feeding.close()
    assert torch.equal(torch.cat([y for _, y in again]), torch.arange(8, 20))


@pytest.mark.parametrize("feed", FEEDS, ids=str)
def test_feeding_leaves_the_trainings_randomness_alone(feed):
    source = as_source((X, Y) if feed.kind == "gather" else Augmenting())
    before = HostRandomness()
    served(source, feed)
    assert before.same_as(HostRandomness())


def test_a_dataset_that_answers_many_indices_is_asked_for_all_at_once():
    batches = served(as_source(Batched()), LOADERS[0])
    assert torch.equal(torch.cat([y for _, y in batches]).sort().values, Y)


def test_a_source_that_cannot_be_gathered_says_why():
    with pytest.raises(PlanError, match="Augmenting gives samples one by one"):
        open_feed(as_source(Augmenting()), FEEDS[0])
    with pytest.raises(DataError, match="one by one"):
        as_source(Augmenting()).gather(torch.arange(2))
    with pytest.raises(PlanError, match="collate function"):
        open_feed(as_source((X, Y), collate=lambda samples: samples), FEEDS[0])


def test_settings_that_torch_refuses_without_workers_are_never_passed():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feeding = open_feed(
            as_source((X, Y)),
            Feed(kind="loader", pinned=True),
            on_gpu=False,
            extras={"timeout": 5, "worker_init_fn": None},
        )
    loader = feeding._loader
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert (loader.pin_memory, loader.timeout) == (False, 0)


def test_read_only_and_reversed_arrays_are_taken_without_a_warning(tmp_path):
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = as_source((mapped, np.arange(20)[::-1], np.arange(20, dtype=">i4")))
    x, backwards, swapped = source.gather(torch.tensor([2, 5]))
    assert torch.equal(x, X[[2, 5]])
    assert backwards.tolist() == [17, 14]
    assert swapped.tolist() == [2, 5]


def job_with(data, **settings):
    model = torch.nn.Linear(3, 2)
    return Job(
        model=model,
        data=data,
        loss=lambda model, batch: model(batch[0]).mean(),
        optimizer=torch.optim.SGD(model.parameters()),
        epochs=1,
        **settings,
    )


def test_a_dataloader_brings_its_order_workers_and_collate():
    def collate(samples):
        return torch.stack([x for x, _ in samples])

    loader = DataLoader(
        TensorDataset(X, Y),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        persistent_workers=True,
        prefetch_factor=3,
        drop_last=True,
        collate_fn=collate,
    )
    dataset = training_dataset(job_with(loader, accumulate=2, seed=9))
    assert dataset.feed == Feed(kind="loader", workers=2, prefetch=3, persistent=True)
    assert dataset.batch_size == 4
    assert len(dataset.order.epoch(0)) == 3
    assert dataset.source.fetch([1, 2], 0, 0).shape == (2, 3)


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(TensorDataset(X), batch_size=5), list(range(20))),
        (DataLoader(TensorDataset(X), batch_sampler=[[4, 2], [9]]), [4, 2, 9]),
        (DataLoader(TensorDataset(X), sampler=[7, 3, 3], batch_size=2), [7, 3, 3]),
    ],
    ids=["sequential", "batch sampler", "sampler"],
)
def test_a_dataloaders_own_order_is_kept(loader, expected):
    epoch = training_dataset(job_with(loader)).order.epoch(0)
    assert [int(i) for w in range(len(epoch)) for p in epoch.pieces(w, None) for i in p] == expected


def test_a_weighted_sampler_draws_anew_each_epoch():
    loader = DataLoader(TensorDataset(X), batch_size=5, sampler=WeightedRandomSampler(torch.ones(20), 20))
    order = training_dataset(job_with(loader)).order
    draws = [torch.cat([order.epoch(e).pieces(w, None)[0] for w in range(4)]) for e in (0, 1)]
    assert not torch.equal(*draws)
    assert len(draws[0].unique()) < 20


def test_workers_from_the_environment_are_used_where_the_job_says_nothing_and_they_help():
    assert training_dataset(job_with(Augmenting(), batch_size=4), workers=2).feed.workers == 2
    assert training_dataset(job_with((X, Y), batch_size=4), workers=2).feed == Feed(kind="gather")


def indices_of(dataset):
    epoch = dataset.order.epoch(0)
    return [int(i) for w in range(len(epoch)) for p in epoch.pieces(w, None) for i in p]


def test_evaluation_sees_all_samples_once_in_their_own_order_though_the_loader_shuffles():
    loader = DataLoader(TensorDataset(X, Y), batch_size=3, shuffle=True)
    assert indices_of(evaluation_dataset(loader, batch_size=8)) == list(range(20))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (DataLoader(TensorDataset(X, Y), sampler=SubsetRandomSampler([3, 7, 9]), batch_size=2), {3, 7, 9}),
        (DataLoader(TensorDataset(X, Y), batch_sampler=[[1, 2], [5]]), {1, 2, 5}),
        (DataLoader(TensorDataset(X, Y), batch_size=6, drop_last=True), set(range(18))),
        (DataLoader(TensorDataset(X, Y), sampler=[4, -1], batch_size=2), {4, 19}),
    ],
    ids=["sampler", "batch sampler", "drop_last", "from the end"],
)
def test_evaluation_sees_just_the_samples_that_the_loader_gives(loader, expected):
    assert set(indices_of(evaluation_dataset(loader, batch_size=8))) == expected


def test_a_sample_drawn_twice_in_an_epoch_is_augmented_anew_each_time():
    loader = DataLoader(Augmenting(), sampler=[4, 4, 4, 9], batch_size=2)
    dataset = training_dataset(job_with(loader))
    epoch = dataset.order.epoch(0)
    tickets = [p for w in range(len(epoch)) for p in epoch.pieces(w, None, tickets=True)]
    assert [int(t) for piece in tickets for t in piece] == [4, 24, 44, 9]
    rows = torch.cat([dataset.source.fetch(piece.tolist(), 0, 0) for piece in tickets])
    assert rows[:, 0].tolist() == [4, 4, 4, 9]
    assert len(rows[:3, 1].unique()) == 3


def test_a_sampler_is_drawn_once_an_epoch():
    class Counting:
        passes = 0

        def __iter__(self):
            self.passes += 1
            return iter([self.passes] * 4)

        def __len__(self):
            return 4

    dataset = training_dataset(job_with(DataLoader(TensorDataset(X, Y), sampler=Counting(), batch_size=2)))
    assert [indices_of(dataset) for _ in range(3)] == [[1] * 4] * 3


def test_a_sampler_without_an_end_is_used_for_as_long_as_it_says_it_is():
    class Endless:
        def __iter__(self):
            return itertools.repeat(5)

        def __len__(self):
            return 6

    assert (
        indices_of(training_dataset(job_with(DataLoader(TensorDataset(X, Y), sampler=Endless(), batch_size=2))))
        == [5] * 6
    )


def test_a_samplers_own_generator_is_left_as_it_was():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    loader = DataLoader(
        TensorDataset(X, Y), sampler=RandomSampler(Y, replacement=True, generator=generator), batch_size=2
    )
    indices_of(training_dataset(job_with(loader)))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("order", [[[1, 2]], [20], [-21], ["a"]])
def test_an_order_that_leads_nowhere_is_an_error(order):
    with pytest.raises(DataError, match="the sampler gave"):
        training_dataset(job_with((X, Y), batch_size=2, order=order)).order.epoch(0)


def test_a_tuple_in_a_dataloader_is_samples_as_torch_takes_it():
    samples = tuple(torch.full((3,), float(i)) for i in range(5))
    dataset = training_dataset(job_with(DataLoader(samples, batch_size=2)))
    assert len(dataset.source) == 5
    assert dataset.source.fetch([1, 2], 0, 0).tolist() == [[1.0] * 3, [2.0] * 3]


def test_a_subset_may_count_from_the_end():
    source = as_source(Subset(TensorDataset(X, Y), [-1, 0]))
    assert source.gather(torch.tensor([0, 1]))[1].tolist() == [19, 0]
    assert source.fetch([0, 1], 0, 0)[1].tolist() == [19, 0]


def test_a_dataset_that_draws_nothing_is_read_once():
    class Read(Dataset):
        reads = 0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            Read.reads += 1
            return torch.tensor(index)

    source = as_source(Read())
    for _ in range(3):
        source.fetch([0, 1], 0, 0)
    assert Read.reads == 6


def test_the_rows_of_a_subset_are_those_that_its_list_has_now():
    subset = Subset(TensorDataset(X, Y), [3, -1, 5])
    assert as_source(subset).rows.tolist() == [3, len(X) - 1, 5]
    assert as_source(subset).rows.tolist() == [3, len(X) - 1, 5]
    subset.indices[1] = 4
    assert as_source(subset).rows.tolist() == [3, 4, 5]
    subset.indices = [7]
    assert as_source(subset).rows.tolist() == [7]
    rows = as_source(subset).rows
    rows[0] = 0
    assert as_source(subset).rows.tolist() == [7]
