import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

from hotlap.core.errors import DataError
from hotlap.data.order import (
    BatchedOrder,
    HostRandomness,
    Order,
    SampledOrder,
    even_cuts,
    host_seeded,
    mix,
)


def flat(epoch, micro=None):
    return [int(i) for w in range(len(epoch)) for piece in epoch.pieces(w, micro) for i in piece]


@given(
    n=st.integers(1, 60), batch=st.integers(1, 20), accumulate=st.integers(1, 5), micro=st.none() | st.integers(1, 30)
)
def test_every_sample_is_seen_once_an_epoch_however_it_is_cut(n, batch, accumulate, micro):
    order = Order(n, batch_size=batch, accumulate=accumulate, shuffled=True, seed=3)
    assert sorted(flat(order.epoch(2), micro)) == list(range(n))


@given(n=st.integers(1, 60), batch=st.integers(1, 20), accumulate=st.integers(1, 5), micro=st.integers(1, 30))
def test_cutting_into_micro_batches_changes_neither_order_nor_windows(n, batch, accumulate, micro):
    epoch = Order(n, batch_size=batch, accumulate=accumulate, shuffled=True).epoch(0)
    for window in range(len(epoch)):
        whole = torch.cat(epoch.pieces(window, None))
        cut = epoch.pieces(window, micro)
        assert torch.equal(whole, torch.cat(cut))
        assert all(0 < len(piece) <= micro for piece in cut)
    assert len(epoch) == -(-n // (batch * accumulate))


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    def order(seed, epoch, **settings):
        return flat(Order(40, batch_size=7, shuffled=True, seed=seed, **settings).epoch(epoch))

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)
    assert order(1, 0) == order(1, 0, accumulate=3)
    torch.manual_seed(99)
    np.random.seed(99)
    assert order(1, 0) == order(1, 0)


def test_making_an_order_leaves_the_global_generators_alone():
    before = HostRandomness()
    Order(40, batch_size=7, shuffled=True).epoch(0)
    flat(SampledOrder(RandomSampler(range(10)), 10, batch_size=3, seed=1).epoch(0))
    assert before.same_as(HostRandomness())


def test_the_last_shorter_batch_is_left_out_only_when_asked():
    kept = Order(10, batch_size=4, shuffled=False).epoch(0)
    dropped = Order(10, batch_size=4, shuffled=False, drop_last=True).epoch(0)
    assert [len(p) for w in range(len(kept)) for p in kept.pieces(w, None)] == [4, 4, 2]
    assert [len(p) for w in range(len(dropped)) for p in dropped.pieces(w, None)] == [4, 4]


def test_an_epoch_without_any_batch_is_an_error_that_says_why():
    with pytest.raises(DataError, match="3 samples, batch size 4"):
        Order(3, batch_size=4, shuffled=False, drop_last=True).epoch(0)


def test_a_users_sampler_gives_another_draw_each_epoch_and_the_same_draw_again():
    sampler = WeightedRandomSampler([1.0, 2.0, 3.0, 4.0], num_samples=12)
    order = SampledOrder(sampler, 4, batch_size=5, seed=7)
    first, second = flat(order.epoch(0)), flat(order.epoch(1))
    assert len(first) == 12
    assert first != second
    assert flat(order.epoch(0)) == first


def test_a_sampler_with_a_generator_of_its_own_is_seeded_per_epoch_too():
    sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(5))
    order = SampledOrder(sampler, 20, batch_size=5, seed=7)
    first = flat(order.epoch(0))
    flat(order.epoch(1))
    assert flat(order.epoch(0)) == first


def test_a_sampler_that_counts_epochs_is_told_the_epoch():
    class Counting:
        epoch = None

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([self.epoch] * 3)

        def __len__(self):
            return 3

    assert flat(SampledOrder(Counting(), 10, batch_size=2).epoch(4)) == [4, 4, 4]


def test_batches_of_a_users_batch_sampler_keep_their_sizes():
    sampler = [[3, 1], [], [2], [0, 4, 5]]
    epoch = BatchedOrder(sampler, 6, seed=0, accumulate=2).epoch(0)
    assert [[p.tolist() for p in epoch.pieces(w, None)] for w in range(len(epoch))] == [[[3, 1], [2]], [[0, 4, 5]]]


def test_a_batch_sampler_over_a_random_sampler_is_seeded_through():
    sampler = BatchSampler(RandomSampler(range(20), generator=torch.Generator()), 6, drop_last=False)
    order = BatchedOrder(sampler, 20, seed=1, accumulate=1)
    assert flat(order.epoch(3)) == flat(order.epoch(3))
    assert flat(order.epoch(3)) != flat(order.epoch(4))


@pytest.mark.parametrize(
    "make", [lambda: SampledOrder([], 4, batch_size=2), lambda: BatchedOrder([[]], 4, seed=0, accumulate=1)]
)
def test_a_sampler_that_gives_nothing_is_an_error(make):
    with pytest.raises(DataError, match="gave no"):
        make().epoch(0)


@given(st.integers(1, 500), st.integers(1, 100))
def test_even_cuts_are_few_and_even(total, largest):
    sizes = np.diff(even_cuts(total, largest))
    assert sizes.sum() == total
    assert sizes.max() <= largest
    assert sizes.max() - sizes.min() <= 1
    assert len(sizes) == -(-total // largest)


def test_seeds_are_mixed_so_that_neighbours_do_not_collide():
    seeds = {mix(seed, epoch, index) for seed in range(10) for epoch in range(10) for index in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeding_inside_leaves_the_generators_outside_as_they_were():
    before = HostRandomness()
    with host_seeded(5):
        torch.rand(3)
        np.random.rand(3)
        np.random.randn()
    assert before.same_as(HostRandomness())
    torch.rand(1)
    assert not before.same_as(HostRandomness())
