"""Index batches that are drawn many at a time: torch's own, after torch's own draws, at torch's own moments."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler

from hotlap.script.feed.index_batches import BegunOrder, SamplerOrder, draws_as_torch, order_of

KINDS = ("sequential", "random", "random by a generator", "replaced", "replaced by a generator")


def sampler_of(kind, length, count):
    if kind == "sequential":
        return SequentialSampler(range(length))
    generator = torch.Generator().manual_seed(11) if "generator" in kind else None
    return RandomSampler(range(length), "replaced" in kind, count, generator)


def states(sampler):
    generator = getattr(sampler, "generator", None)
    own = b"" if generator is None else generator.get_state().numpy().tobytes()
    return own, torch.get_rng_state().numpy().tobytes()


def by_torch(sampler, size, drop_last):
    """Every index batch with the generators after it, and the end of all."""
    torch.manual_seed(5)
    begun, found = iter(BatchSampler(sampler, size, drop_last)), []
    while True:
        index = next(begun, None)
        found.append((index, states(sampler)))
        if index is None:
            return found


@settings(deadline=None, max_examples=150)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(1, 90),
    count=st.none() | st.integers(1, 200),
    size=st.integers(1, 40),
    drop_last=st.booleans(),
    most=st.integers(1, 5),
)
def test_what_is_read_together_is_what_torch_reads_after_the_same_draws(kind, length, count, size, drop_last, most):
    wanted = by_torch(sampler_of(kind, length, count), size, drop_last)
    sampler = sampler_of(kind, length, count)
    batch_sampler = BatchSampler(sampler, size, drop_last)
    order = order_of(batch_sampler, iter(batch_sampler))
    assert isinstance(order, SamplerOrder)
    torch.manual_seed(5)
    while wanted[0][0] is not None:
        was, draws = states(sampler), order.draws
        flat, sizes = order.read(most)
        assert draws or states(sampler)[0] == was[0]
        assert 1 <= len(sizes) <= most
        assert [part.tolist() for part in flat.split(sizes)] == [index for index, _ in wanted[: len(sizes)]]
        assert all(states(sampler) == after for _, after in wanted[: len(sizes)]), "drawn too early or too late"
        del wanted[: len(sizes)]
    flat, sizes = order.read(most)
    assert (len(flat), sizes) == (0, [])
    assert states(sampler) == wanted[0][1]


def test_what_is_read_in_order_is_not_written_down_as_a_whole():
    batch_sampler = BatchSampler(SequentialSampler(range(10**15)), 50_000, drop_last=False)
    order = order_of(batch_sampler, iter(batch_sampler))
    for start in range(0, 300_000, 100_000):
        flat, sizes = order.read(2)
        assert torch.equal(flat, torch.arange(start, start + 100_000))
        assert sizes == [50_000, 50_000]


def test_what_was_begun_is_read_on_where_nobody_sees_it():
    batch_sampler = BatchSampler(RandomSampler(range(50)), 8, drop_last=False)
    torch.manual_seed(3)
    wanted = list(batch_sampler)
    torch.manual_seed(3)
    begun = iter(batch_sampler)
    first = next(begun)
    rest = order_of(batch_sampler, begun)
    assert isinstance(rest, BegunOrder)
    seen = [first]
    while True:
        flat, sizes = rest.read(4)
        if not sizes:
            break
        seen += [part.tolist() for part in flat.split(sizes)]
    assert seen == wanted


class Shuffled(RandomSampler):
    pass


class Grouped(BatchSampler):
    pass


@pytest.mark.parametrize(
    "batch_sampler",
    [
        BatchSampler(Shuffled(range(9)), 2, drop_last=False),
        Grouped(RandomSampler(range(9)), 2, drop_last=False),
        BatchSampler(SubsetRandomSampler(range(9)), 2, drop_last=False),
        BatchSampler([3, 2, 1], 2, drop_last=False),
        [[1, 2], [3]],
    ],
    ids=["a sampler upon torch's", "batches upon torch's", "another sampler", "a list", "lists"],
)
def test_only_samplers_that_are_known_are_read_together(batch_sampler):
    assert order_of(batch_sampler, iter(batch_sampler)) is None


def test_a_generator_of_the_scripts_is_left_to_torch_once_it_has_been_begun():
    batch_sampler = BatchSampler(RandomSampler(range(9), generator=torch.Generator()), 2, drop_last=False)
    begun = iter(batch_sampler)
    next(begun)
    assert order_of(batch_sampler, begun) is None


def test_somebody_elses_iterator_is_left_alone():
    batch_sampler = BatchSampler(RandomSampler(range(9)), 2, drop_last=False)
    assert order_of(batch_sampler, iter([[1, 2]])) is None
    assert order_of(batch_sampler, ([number] for number in range(3))) is None


def test_a_torch_that_draws_otherwise_is_left_to_draw(monkeypatch):
    before = torch.get_rng_state()
    assert draws_as_torch.__wrapped__()
    draws = RandomSampler.__iter__

    def also_draws(sampler):
        torch.rand(())
        return draws(sampler)

    monkeypatch.setattr(RandomSampler, "__iter__", also_draws)
    assert not draws_as_torch.__wrapped__()
    batch_sampler = BatchSampler(RandomSampler(range(9)), 2, drop_last=False)
    assert isinstance(order_of(batch_sampler, iter(batch_sampler)), BegunOrder)
    batch_sampler.sampler.generator = torch.Generator()
    assert order_of(batch_sampler, iter(batch_sampler)) is None
    assert torch.equal(torch.get_rng_state(), before)
