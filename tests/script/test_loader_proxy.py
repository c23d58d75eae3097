"""The batches of a script's loader by other feeds: to the script nothing is different."""

import gc
import itertools
import random
import weakref
from collections import OrderedDict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotlap.core.errors import PlanError
from hotlap.core.plan import Feed
from hotlap.data import background_fetch
from hotlap.data.dataset import as_source
from hotlap.data.feeds import PinnedBuffers
from hotlap.data.sources import tensors_in
from hotlap.script.feed import feeds as feeds_module
from hotlap.script.feed import held_samples
from hotlap.script.feed import index_batches as serving_indices
from hotlap.script.feed import index_batches as serving_places
from hotlap.script.feed import loader_proxy as serving_module
from hotlap.script.feed.device_copies import DeviceCopies
from hotlap.script.feed.held_samples import HeldSamples, KeptSamples
from hotlap.script.feed.index_batches import IndexBatch, IndexStream, SamplerOrder, order_of
from hotlap.script.feed.loader_proxy import LoaderProxy, why_other_batch

CPU = torch.device("cpu")
GATHER = Feed(kind="gather")
LOADER = Feed(kind="loader")
TWO = Feed(kind="loader", workers=2)
ONE = Feed(kind="loader", workers=1, prefetch=3, persistent=True)
COUNT = 23
X = torch.randn(COUNT, 3, 2, generator=torch.Generator().manual_seed(1))
Y = torch.arange(COUNT)
Pair = namedtuple("Pair", "x y")
ORIGINAL = DataLoader.__iter__


class Of(Dataset):
    """Samples made by a function of the index."""

    def __init__(self, make, count=COUNT):
        self.make, self.count = make, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Together(Of):
    """Samples that are asked for together."""

    def __getitems__(self, indices):
        return [self.make(index) for index in indices]


DATA = {
    "tensors": lambda: TensorDataset(X, Y),
    "strided": lambda: TensorDataset(X.transpose(1, 2), X[:, 0], Y.bool()),
    "subset": lambda: Subset(Subset(TensorDataset(X, Y), range(21)), [3, -1, 0, *range(5, 18)]),
    "one tensor": lambda: X,
    "array": lambda: X.numpy()[:, 0, 0],
    "list": lambda: [(X[i], i) for i in range(COUNT)],
    "tuples": lambda: Of(lambda i: (X[i], i, i / 3, i % 2 == 0)),
    "dicts": lambda: Of(lambda i: {"x": X[i], "y": i, "z": np.float32(i)}),
    "ordered": lambda: Of(lambda i: OrderedDict(b=X[i].half(), a=[i, float(i)])),
    "named": lambda: Of(lambda i: Pair({"x": X[i]}, [Pair(i, X[i].numpy()), (i,)])),
    "numbers": lambda: Together(lambda i: i),
    "turned": lambda: Of(lambda i: (X[i].permute(1, 0), i)),
    "subset of tuples": lambda: Subset(Of(lambda i: (X[i], i)), [4, 2, 2, *range(9, 20)]),
}


class DrawsAsRead(Sampler):
    """Draws for every index, as it is read."""

    def __init__(self, data):
        self.count = len(data)

    def __len__(self):
        return self.count

    def __iter__(self):
        for _ in range(self.count):
            yield int(torch.randint(self.count, ())) if random.random() < 0.5 else int(np.random.randint(self.count))


class DrawsAtOnce(DrawsAsRead):
    """Draws all of its order when it is begun."""

    def __iter__(self):
        return iter(np.random.permutation(self.count).tolist())


class Batches(DrawsAsRead):
    """Batches of one to four samples."""

    def __iter__(self):
        left = deque(torch.randperm(self.count).tolist())
        while left:
            yield [left.popleft() for _ in range(min(len(left), random.randint(1, 4)))]


def by_generator(data):
    generator = torch.Generator().manual_seed(5)
    return {"shuffle": True, "generator": generator}


def with_replacement(data):
    generator = torch.Generator().manual_seed(6)
    return {"sampler": RandomSampler(data, replacement=True, num_samples=70, generator=generator)}


ORDERS = {
    "as given": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "by a generator": by_generator,
    "with replacement": with_replacement,
    "with replacement by itself": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=70)},
    "weighted": lambda data: {"sampler": WeightedRandomSampler(range(1, len(data) + 1), 30)},
    "some of them": lambda data: {"sampler": SubsetRandomSampler(range(2, len(data)))},
    "drawn as read": lambda data: {"sampler": DrawsAsRead(data)},
    "drawn at once": lambda data: {"sampler": DrawsAtOnce(data)},
    "own batches": lambda data: {"batch_sampler": Batches(data)},
    "batches of a sampler": lambda data: {"batch_sampler": BatchSampler(DrawsAtOnce(data), 3, drop_last=True)},
}


def loader_of(data, order="shuffled", **settings):
    data = DATA[data]() if isinstance(data, str) else data
    chosen = ORDERS[order](data)
    if "batch_sampler" in chosen:
        settings = {k: v for k, v in settings.items() if k not in ("batch_size", "drop_last")}
    else:
        settings = {"batch_size": 4, **settings}
    return DataLoader(data, **chosen, **settings)


def served(loader, device=CPU):
    proxy = LoaderProxy(loader, device=device, original_iter=ORIGINAL)
    proxy.on_fault = pytest.fail
    return proxy


def states(loader):
    generators = [loader.generator, getattr(loader.sampler, "generator", None)]
    own = [g.get_state().numpy().tobytes() for g in generators if g is not None]
    numpy = np.random.get_state(legacy=False)["state"]
    numbers = numpy["key"].tobytes(), numpy["pos"]  # to print them takes longer than all else here
    return random.getstate(), numbers, torch.get_rng_state().numpy().tobytes(), own


def script(loader, begin, epochs=2, stop=None, at=lambda number: None):
    """What a script sees that draws between its batches: all batches, and the generators after each of them."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    seen, number = [], 0
    for _ in range(epochs):
        iterator = begin(loader)
        seen.append((None, states(loader)))
        while True:
            at(number)
            try:
                batch = next(iterator)
            except StopIteration:
                break
            seen.append((batch, states(loader)))
            _ = random.random(), np.random.random(), torch.rand(())
            number += 1
            if stop is not None and number % stop == 0:
                break
        del iterator
        seen.append((None, states(loader)))
    return seen


def versions(batch):
    return [tensor._version for tensor in tensors_in(batch)]


def assert_same(seen, wanted, *, is_written_to=False):
    assert len(seen) == len(wanted)
    for number, ((batch, after), (truth, was)) in enumerate(zip(seen, wanted, strict=True)):
        assert why_other_batch(truth, batch) is None, number
        assert is_written_to or versions(batch) == versions(truth), number
        assert after == was, f"another generator state at {number}"


def switched_at_random(proxy, feeds, seed, often=0.4):
    chance = random.Random(seed)

    def at(number):
        if chance.random() < often:
            proxy.use(chance.choice(feeds))

    return at


def supported(proxy, *feeds):
    return [feed for feed in (proxy.own, *feeds) if proxy.supports(feed) is None]


SETTINGS = [{}, {"batch_size": 7, "drop_last": True}, {"batch_size": 1}]


# --- the same batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("data", DATA)
def test_gathered_batches_are_the_loaders_own_wherever_the_feed_changes(data, order):
    settings = SETTINGS[(list(DATA).index(data) + list(ORDERS).index(order)) % len(SETTINGS)]
    wanted = script(loader_of(data, order, **settings), ORIGINAL)
    loader = loader_of(data, order, **settings)
    proxy = served(loader)
    assert proxy.supports(GATHER) is None
    at = switched_at_random(proxy, [proxy.own, GATHER], seed=len(order))
    assert_same(script(loader, lambda loader: proxy.iterate(), at=at), wanted)


@pytest.mark.parametrize("stop", [3, 9])
@pytest.mark.parametrize("order", ORDERS)
def test_an_epoch_that_is_broken_off_leaves_the_generators_as_torch_does(order, stop):
    wanted = script(loader_of("tuples", order), ORIGINAL, epochs=4, stop=stop)
    loader = loader_of("tuples", order)
    proxy = served(loader)
    at = switched_at_random(proxy, [proxy.own, GATHER], stop)
    assert_same(script(loader, lambda loader: proxy.iterate(), epochs=4, stop=stop, at=at), wanted)


@pytest.mark.parametrize(
    ("data", "order", "settings", "stop"),
    [
        ("tensors", "shuffled", {}, None),
        ("named", "by a generator", {"batch_size": 3}, None),
        ("dicts", "with replacement by itself", {"drop_last": True, "batch_size": 5}, 7),
        ("numbers", "weighted", {"batch_size": 1}, 11),
        ("subset", "by a generator", {"batch_size": 8}, 2),
    ],
)
def test_workers_that_the_script_has_not_read_no_generator_too_early(data, order, settings, stop):
    wanted = script(loader_of(data, order, **settings), ORIGINAL, stop=stop)
    loader = loader_of(data, order, **settings)
    proxy = served(loader)
    feeds = supported(proxy, GATHER, TWO, ONE)
    assert len(feeds) == 4
    at = switched_at_random(proxy, feeds, 1, often=0.15)
    assert_same(script(loader, lambda loader: proxy.iterate(), stop=stop, at=at), wanted)
    proxy.close()


@pytest.mark.parametrize("batch_size", [4, 5])
@pytest.mark.parametrize("feed", [GATHER, TWO])
def test_a_script_that_draws_from_the_samplers_generator_gets_the_orders_it_gets_from_torch(feed, batch_size):
    def drawing(loader, begin):
        return script(loader, begin, epochs=3, at=lambda number: torch.rand((), generator=loader.generator))

    wanted = drawing(loader_of("tuples", "by a generator", batch_size=batch_size), ORIGINAL)
    loader = loader_of("tuples", "by a generator", batch_size=batch_size)
    proxy = served(loader)
    proxy.use(feed)
    assert_same(drawing(loader, lambda loader: proxy.iterate()), wanted)
    proxy.close()


@pytest.mark.parametrize("replacement", [False, True])
def test_an_order_that_is_drawn_as_it_is_read_is_not_read_early(replacement):
    """A script that draws from the generator too changes the rest of such an order."""

    def made(generator):
        data = DATA["tuples"]()
        sampler = RandomSampler(data, replacement, 3 * len(data), generator=generator)
        return served(DataLoader(data, sampler=sampler, batch_size=4))

    own = made(torch.Generator())
    assert own.supports(TWO).startswith("RandomSampler draws from the script's generator as it is read")
    assert own.supports(GATHER) is None
    assert made(None).supports(TWO) is None


@pytest.mark.parametrize(
    ("data", "order", "settings", "stop"),
    [
        ("tensors", "shuffled", {}, None),
        ("tuples", "by a generator", {"persistent_workers": True, "batch_size": 2}, None),
        ("dicts", "drawn as read", {"prefetch_factor": 1}, None),
        ("named", "drawn at once", {}, 3),
        ("list", "own batches", {"persistent_workers": True}, 4),
        ("numbers", "with replacement", {"persistent_workers": True, "prefetch_factor": 3}, 9),
    ],
)
def test_a_loader_with_workers_is_drained_and_goes_on_by_other_feeds(data, order, settings, stop):
    settings = {"num_workers": 2, **settings}
    wanted = script(loader_of(data, order, **settings), ORIGINAL, epochs=3, stop=stop)
    loader = loader_of(data, order, **settings)
    proxy = served(loader)
    feeds = supported(proxy, GATHER, LOADER, ONE)
    assert GATHER in feeds
    assert LOADER in feeds
    at = switched_at_random(proxy, feeds, 2, often=0.3)
    assert_same(script(loader, lambda loader: proxy.iterate(), epochs=3, stop=stop, at=at), wanted)
    proxy.close()


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("order", ["shuffled", "by a generator", "drawn at once", "drawn as read"])
def test_whole_epochs_without_the_workers_of_the_script_draw_as_with_them(order, persistent):
    settings = {"num_workers": 2, "persistent_workers": persistent}
    wanted = script(loader_of("tuples", order, **settings), ORIGINAL, epochs=4)
    loader = loader_of("tuples", order, **settings)
    proxy = served(loader)
    proxy.use(GATHER)
    seen, begun = [], []

    def begin(loader):
        begun.append(proxy)
        if len(begun) == 4:  # the last epoch is the script's own feed again
            proxy.use(proxy.own)
        return proxy.iterate()

    seen = script(loader, begin, epochs=4)
    assert_same(seen, wanted)
    proxy.close()


# --- some index batches at a time --------------------------------------------------------------------


IN_BLOCKS = {
    "as given": lambda data: {},
    "shuffled": lambda data: {"shuffle": True},
    "with replacement by itself": lambda data: {"sampler": RandomSampler(data, replacement=True, num_samples=70)},
    "shuffled without its last": lambda data: {"shuffle": True, "drop_last": True},
    "by a generator": by_generator,
    "by a generator without its last": lambda data: {**by_generator(data), "drop_last": True},
    "more than once by a generator": lambda data: {
        "sampler": RandomSampler(data, num_samples=70, generator=torch.Generator().manual_seed(7))
    },
    "with replacement": with_replacement,
}
KNOWN_ORDERS = ("as given", "shuffled", "by a generator", "with replacement", "with replacement by itself")


@pytest.fixture
def blocks(monkeypatch):
    """Blocks of three index batches, and how many index batches each of them has."""
    found, block = [], serving_indices.IndexBlock

    def noted(flat, sizes):
        found.extend([len(sizes)] if sizes else [])
        return block(flat, sizes)

    monkeypatch.setattr(serving_indices, "BLOCK", 3)
    monkeypatch.setattr(serving_indices, "IndexBlock", noted)
    return found


@pytest.mark.parametrize(("workers", "stop"), [(0, None), (0, 4), (2, 4)])
@pytest.mark.parametrize("order", IN_BLOCKS)
def test_index_batches_that_are_read_together_leave_no_trace(blocks, order, workers, stop):
    def loader_in(order):
        data = DATA["tuples"]()
        return DataLoader(data, **{"batch_size": 2, "num_workers": workers, **IN_BLOCKS[order](data)})

    wanted = script(loader_in(order), ORIGINAL, epochs=3, stop=stop)
    loader = loader_in(order)
    proxy = served(loader)
    proxy.use(GATHER)
    at = switched_at_random(proxy, [proxy.own, GATHER], 5)
    assert_same(script(loader, lambda loader: proxy.iterate(), epochs=3, stop=stop, at=at), wanted)
    assert max(blocks) == 3 or order == "with replacement"
    proxy.close()


@pytest.mark.parametrize("order", KNOWN_ORDERS)
def test_a_feed_that_begins_with_the_epoch_asks_no_sampler_for_its_places_one_by_one(order):
    loader = loader_of("tensors", order)
    proxy = served(loader)
    proxy.use(GATHER)
    assert isinstance(proxy.iterate()._indices._sampler, SamplerOrder)


def test_a_feed_that_begins_within_the_epoch_reads_the_rest_of_it_in_blocks(blocks):
    loader = loader_of("tensors", "shuffled", batch_size=2)
    torch.manual_seed(4)
    wanted = list(ORIGINAL(loader))
    torch.manual_seed(4)
    proxy = served(loader)
    iterator = proxy.iterate()
    seen = [next(iterator)]
    proxy.use(GATHER)
    seen += iterator
    assert_same([(batch, 0) for batch in seen], [(batch, 0) for batch in wanted])
    assert blocks == [3, 3, 3, 2]


@pytest.mark.parametrize("order", [name for name in ORDERS if name not in KNOWN_ORDERS])
def test_samplers_that_may_be_seen_to_draw_are_read_one_by_one(blocks, order):
    loader = loader_of("tensors", order)
    proxy = served(loader)
    proxy.use(GATHER)
    assert len(list(proxy.iterate()))
    assert not blocks


def test_the_places_of_a_block_go_to_the_device_in_one_copy(blocks, monkeypatch):
    sent = []

    def noted(positions, device):
        sent.append(positions)
        return positions.clone()

    monkeypatch.setattr(serving_places, "sent", noted)
    loader = loader_of("tensors", "shuffled", batch_size=2)
    column_batches, holding = columned_of(loader)
    noted_copies = Noted()
    indices = IndexStream(order_of(loader.batch_sampler, iter(loader.batch_sampler)))
    resident = feeds_module.ResidentFeed(
        column_batches,
        indices,
        on_device=holding._columns,
        device=CPU,
        serve=noted_copies.serve,
        is_same=lambda: True,
    )
    batches = list(resident)
    assert not sent, "nobody has asked for a copy"
    for batch, pairs in zip(batches, noted_copies.batches, strict=True):
        for tensor, (same, copy) in zip(tensors_in(batch), pairs, strict=True):
            assert same is tensor
            assert torch.equal(copy.on_device(), tensor)
    assert blocks == [3, 3, 3, 3]
    assert [len(positions) for positions in sent] == [6, 6, 6, 5]


@pytest.mark.parametrize("data", ["tensors", "named"])
def test_what_a_script_sends_of_blocks_is_what_it_would_send(pretended_gpu, blocks, data):
    _, device_copies = pretended_gpu
    wanted = script(loader_of(data, "shuffled", batch_size=2), ORIGINAL, epochs=3)
    loader = loader_of(data, "shuffled", batch_size=2)
    proxy = LoaderProxy(loader, device=CPU, original_iter=ORIGINAL, device_copies=device_copies)
    proxy.on_fault = pytest.fail
    at = switched_at_random(proxy, [proxy.own, GATHER, Feed(kind="resident"), Feed(kind="stream")], 6)

    def begin(loader):
        for batch in proxy.iterate():
            assert all(torch.equal(tensor.to("cpu"), tensor) for tensor in tensors_in(batch))
            yield batch

    seen, truth = script(loader, begin, epochs=3, at=at), [row for row in wanted if row[0] is not None]
    for (batch, _), (true_batch, _) in zip([row for row in seen if row[0] is not None], truth, strict=True):
        assert why_other_batch(true_batch, batch) is None
    assert device_copies.answered
    assert blocks
    proxy.close()


# --- going over --------------------------------------------------------------------------------------


def test_a_feed_without_anything_under_way_is_in_force_at_once():
    loader = loader_of("tensors")
    proxy = served(loader)
    proxy.use(GATHER)
    assert proxy.feed == GATHER
    assert not proxy.waiting
    iterator = proxy.iterate()
    next(iterator)
    proxy.use(proxy.own)
    assert proxy.feed == proxy.own
    assert not proxy.waiting
    next(iterator)
    assert (proxy.epochs, proxy.served, proxy.length) == (1, 2, 6)


def test_workers_are_drained_before_another_feed_is_in_force():
    loader = loader_of("tensors", "as given", num_workers=1, batch_size=2)
    proxy = served(loader)
    iterator = proxy.iterate()
    first = next(iterator)
    proxy.use(GATHER)
    assert proxy.waiting
    assert proxy.feed == proxy.own
    rest = [next(iterator) for _ in range(2)]
    assert proxy.waiting
    rest += list(iterator)
    assert proxy.feed == GATHER
    assert not proxy.waiting
    for number, (x, y) in enumerate([first, *rest]):
        assert torch.equal(x, X[2 * number : 2 * number + 2])
        assert torch.equal(y, Y[2 * number : 2 * number + 2])


def test_a_feed_that_is_taken_back_while_it_waits_leaves_no_gap():
    for after in range(4):
        loader = loader_of("tensors", "as given", num_workers=1, batch_size=2)
        proxy = served(loader)
        iterator = proxy.iterate()
        seen = [next(iterator)]
        proxy.use(GATHER)
        seen += [next(iterator) for _ in range(after)]
        proxy.use(proxy.own)
        seen += list(iterator)
        assert torch.equal(torch.cat([y for _, y in seen]), Y)
        assert proxy.feed == proxy.own
        assert not proxy.waiting
        proxy.close()


def processes_of(proxy):
    return [worker for like in proxy._loaders.values() for worker in getattr(like._loader._iterator, "_workers", ())]


def test_workers_stay_for_coming_back_and_end_when_the_plan_is_settled():
    loader = loader_of("tensors")
    proxy = served(loader)
    proxy.use(TWO)
    list(proxy.iterate())
    workers = processes_of(proxy)
    assert len(workers) == 2
    proxy.use(GATHER)
    list(proxy.iterate())
    assert all(worker.is_alive() for worker in workers)
    proxy.use(TWO)
    list(proxy.iterate())
    assert processes_of(proxy) == workers
    proxy.use(GATHER)
    proxy.tidy()
    assert not any(worker.is_alive() for worker in workers)
    assert len(list(proxy.iterate())) == 6


def test_closing_in_the_middle_of_an_epoch_ends_the_workers_and_loses_no_batch():
    for own in (0, 1):
        loader = loader_of("tensors", "as given", num_workers=own, batch_size=2)
        proxy = served(loader)
        proxy.use(TWO)
        iterator = proxy.iterate()
        seen = [next(iterator) for _ in range(3)]
        workers = processes_of(proxy)
        proxy.close()
        assert not any(worker.is_alive() for worker in workers)
        assert proxy.feed == proxy.own
        seen += list(iterator)
        assert torch.equal(torch.cat([y for _, y in seen]), Y)
        assert not processes_of(proxy)


def test_without_anybody_who_closes_it_no_worker_stays():
    loader = loader_of("tensors")
    proxy = served(loader)
    proxy.use(TWO)
    next(proxy.iterate())
    workers = processes_of(proxy)
    known = weakref.ref(proxy)
    proxy.on_fault = None
    del proxy, loader
    gc.collect()
    assert known() is None
    assert not any(worker.is_alive() for worker in workers)


def test_a_loader_is_not_kept_alive_by_its_serving():
    loader = loader_of("tensors")
    proxy, known = served(loader), weakref.ref(loader)
    list(proxy.iterate())
    del loader
    assert known() is None
    assert proxy.length is None


# --- what the script sees of it ----------------------------------------------------------------------


@pytest.mark.parametrize("feed", [GATHER, TWO, None])
def test_a_loop_inside_of_a_loop_over_workers_that_stay_takes_its_batches_as_torch_has_it(feed):
    def seen(loader, begin):
        found = []
        for _ in range(3):
            for number, batch in enumerate(begin(loader)):
                found.append(batch)
                if number == 1:
                    found.extend(itertools.islice(begin(loader), 4))
        return found

    settings = {"num_workers": 2, "persistent_workers": True}
    torch.manual_seed(3)
    wanted = seen(loader_of("tuples", **settings), ORIGINAL)
    torch.manual_seed(3)
    loader = loader_of("tuples", **settings)
    proxy = served(loader)
    proxy.use(proxy.own if feed is None else feed)
    made = seen(loader, lambda loader: proxy.iterate())
    proxy.close()
    assert len(made) == len(wanted)
    for one, other in zip(made, wanted, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


def test_the_iterator_looks_like_torchs_own():
    loader = loader_of("tensors", "as given")
    proxy = served(loader)
    for feed in (proxy.own, GATHER):
        proxy.use(feed)
        iterator = proxy.iterate()
        assert isinstance(iterator, _BaseDataLoaderIter)
        assert iter(iterator) is iterator
        assert len(iterator) == len(ORIGINAL(loader)) == 6
        next(iterator)
        assert iterator._num_yielded == 1
        assert iterator._dataset is loader.dataset
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = iterator.nothing_like_it
        with pytest.raises(NotImplementedError):
            iterator.__getstate__()
        assert len(list(iterator)) == 5
        with pytest.raises(StopIteration):
            next(iterator)


def test_of_two_iterators_at_a_time_the_second_is_torchs_own():
    loader = loader_of("tensors", "as given")
    proxy = served(loader)
    proxy.use(GATHER)
    first = proxy.iterate()
    next(first)
    second = proxy.iterate()
    assert type(second) is type(ORIGINAL(loader))
    pairs = list(zip(first, second, strict=False))
    assert all(torch.equal(a[1], b[1] + 4) for a, b in pairs[:-1])
    assert proxy.epochs == 1


def test_an_iterator_that_has_given_all_is_over_though_somebody_keeps_it_and_never_asks_for_more():
    loader = loader_of("tensors", "as given")
    proxy = served(loader)
    proxy.use(GATHER)
    kept = []
    for epoch in range(3):
        kept.append(proxy.iterate())
        batches = [next(kept[-1]) for _ in range(len(loader))]
        assert torch.equal(torch.cat([y for _, y in batches]), Y[: sum(len(y) for _, y in batches)])
        assert (proxy.epochs, proxy.feed) == (epoch + 1, GATHER)
    for one in kept:
        with pytest.raises(StopIteration):
            next(one)


def test_the_first_batch_of_many_iterators_is_served_each_time():
    loader = loader_of("tensors", "as given")
    proxy = served(loader)
    proxy.use(GATHER)
    for _ in range(3):
        assert torch.equal(next(proxy.iterate())[1], Y[:4])
    assert proxy.epochs == 3


def test_callbacks_tell_of_every_batch_and_every_epoch():
    loader = loader_of("tensors")
    proxy, told = served(loader), []
    proxy.on_begin = lambda: told.append("begin")
    proxy.on_batch = lambda seconds: told.append(seconds)
    proxy.on_end = lambda: told.append("end")
    list(proxy.iterate())
    next(proxy.iterate())
    assert [word for word in told if isinstance(word, str)] == ["begin", "end", "begin", "end"]
    assert len(told) == 4 + 6 + 1
    assert all(seconds > 0 for seconds in told if isinstance(seconds, float))


def test_batches_that_are_gathered_in_inference_mode_are_of_it_as_the_loaders_own_are():
    for workers in (0, 1):
        loader = loader_of("tuples", num_workers=workers)
        proxy = served(loader)
        proxy.use(GATHER)
        with torch.inference_mode():
            batch = next(proxy.iterate())
            truth = next(ORIGINAL(loader))
        assert [t.is_inference() for t in batch] == [t.is_inference() for t in truth] == [True] * 4


# --- errors ------------------------------------------------------------------------------------------


def fails_at(index, where=17):
    if index == where:
        raise KeyError(f"no sample {index}")
    return X[index], index


def raised(iterator):
    """Sample numbers, and what was raised between them."""
    seen = []
    while True:
        try:
            seen.append(next(iterator)[1].tolist())
        except StopIteration:
            return seen
        except Exception as error:
            seen.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("feed", [LOADER, TWO, ONE])
def test_what_a_dataset_raises_comes_as_torch_raises_it_and_the_rest_goes_on(feed, own):
    wanted = raised(ORIGINAL(loader_of(Of(fails_at), "as given", num_workers=own, batch_size=2)))
    loader = loader_of(Of(fails_at), "as given", num_workers=own, batch_size=2)
    proxy = served(loader)
    proxy.use(feed)
    assert raised(proxy.iterate()) == wanted
    assert len(wanted) == 12
    assert "no sample 17" in wanted[8] or "Caught KeyError in DataLoader worker process 0" in wanted[8]
    assert proxy.feed == feed
    proxy.close()


def test_a_dataset_that_fails_somewhere_cannot_be_gathered_and_goes_on_as_it_was():
    loader = loader_of(Of(fails_at), "as given")
    proxy = served(loader)
    assert proxy.supports(GATHER) is None  # a few samples do not tell
    with pytest.raises(KeyError, match="no sample 17"):
        proxy.use(GATHER)
    assert proxy.feed == proxy.own
    assert not proxy.waiting
    assert proxy.why_other(GATHER) == "the feed failed in a trial: 'no sample 17'"
    assert raised(proxy.iterate())[4] == "KeyError: 'no sample 17'"


def test_places_out_of_bounds_are_the_datasets_to_refuse():
    for sampler in ([1, 2, 3, 4, 5, 6, -1, 2], [1, 2, 3, 4, 5, 100, 2, 2]):
        faults = []
        wanted = raised(ORIGINAL(DataLoader(TensorDataset(X, Y), sampler=sampler, batch_size=2)))
        loader = DataLoader(TensorDataset(X, Y), sampler=sampler, batch_size=2)
        proxy = served(loader)
        proxy.on_fault = faults.append
        proxy.use(GATHER)
        assert raised(proxy.iterate()) == wanted
        assert len(faults) == (-1 in sampler)


class Failing(Sampler):
    def __len__(self):
        return 6

    def __iter__(self):
        yield from (0, 1, 2)
        raise ValueError("the sampler is broken")


@pytest.mark.parametrize("own", [0, 1])
def test_what_a_sampler_raises_comes_at_the_same_batch(own):
    def begin(loader, iterate):
        try:
            return raised(iterate())
        except ValueError as error:
            return str(error)

    settings = {"batch_size": 1, "num_workers": own, "prefetch_factor": 1 if own else None}
    plain = DataLoader(TensorDataset(X, Y), sampler=Failing(), **settings)
    loader = DataLoader(TensorDataset(X, Y), sampler=Failing(), **settings)
    proxy = served(loader)
    proxy.use(GATHER)
    assert begin(loader, proxy.iterate) == begin(plain, lambda: ORIGINAL(plain))


class BrokenError(Exception):
    pass


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("feed", [GATHER, TWO])
@pytest.mark.parametrize("after", [0, 4])
def test_a_feed_that_breaks_is_given_up_for_the_own_one_from_the_same_batch_on(monkeypatch, feed, own, after):
    settings = {"num_workers": own, "batch_size": 2}
    wanted = script(loader_of("tuples", "by a generator", **settings), ORIGINAL)
    loader = loader_of("tuples", "by a generator", **settings)
    proxy, faults = served(loader), []
    proxy.on_fault = faults.append
    proxy.use(ONE if feed == TWO and own == 2 else feed)
    calls = []
    for place, name in ((feeds_module.GatheredFeed, "__next__"), (feeds_module._LazyBatches, "__next__")):
        works = getattr(place, name)

        def breaks(self, works=works):
            calls.append(1)
            if len(calls) == after + 1:
                raise BrokenError
            return works(self)

        monkeypatch.setattr(place, name, breaks)
    assert_same(script(loader, lambda loader: proxy.iterate()), wanted)
    assert [type(fault) for fault in faults] == [BrokenError]
    assert proxy.feed == proxy.own
    proxy.close()


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("what", ["fed", "_look_again", "_goes_without_workers", "_made_without_workers", "_noted"])
def test_whatever_breaks_in_here_the_script_gets_its_batches(monkeypatch, what, own):
    wanted = script(loader_of("tuples", num_workers=own), ORIGINAL)
    loader = loader_of("tuples", num_workers=own)
    proxy, faults = served(loader), []
    proxy.on_fault = faults.append
    proxy.use(GATHER)

    def breaks(*args, **kwargs):
        monkeypatch.undo()
        raise BrokenError

    monkeypatch.setattr(proxy, what, breaks)
    assert_same(script(loader, lambda loader: proxy.iterate()), wanted)
    assert [type(fault) for fault in faults] == [BrokenError] * (what != "_made_without_workers" or own)
    assert proxy.feed == proxy.own or not faults
    proxy.close()


def test_a_feed_that_breaks_while_it_is_drained_loses_no_batch(monkeypatch):
    loader = loader_of("tensors", "as given", batch_size=2)
    proxy, faults = served(loader), []
    proxy.on_fault = faults.append
    proxy.use(ONE)
    iterator = proxy.iterate()
    seen = [next(iterator) for _ in range(2)]
    proxy.use(GATHER)
    assert proxy.waiting
    with monkeypatch.context() as patch:
        patch.setattr(feeds_module._LazyBatches, "__next__", lambda self: 1 / 0)
        seen.append(next(iterator))
    seen += list(iterator)
    assert torch.equal(torch.cat([y for _, y in seen]), Y)
    assert len(faults) == 1
    assert proxy.feed == proxy.own
    proxy.close()


@pytest.mark.parametrize("own", [0, 1])
def test_a_feed_that_cannot_be_left_in_peace_is_left_all_the_same(monkeypatch, own):
    wanted = script(loader_of("tuples", num_workers=own), ORIGINAL)
    loader = loader_of("tuples", num_workers=own)
    proxy, faults = served(loader), []
    proxy.on_fault = faults.append
    monkeypatch.setattr(feeds_module.GatheredFeed, "close", lambda self: 1 / 0, raising=False)
    feeds = {1: GATHER, 3: proxy.own, 8: GATHER}
    at = lambda number: proxy.use(feeds[number]) if number in feeds else None  # noqa: E731
    assert_same(script(loader, lambda loader: proxy.iterate(), at=at), wanted)
    assert {type(fault) for fault in faults} == {ZeroDivisionError}
    proxy.close()


def test_callbacks_that_fail_are_faults_of_hotlaps_own():
    loader = loader_of("tensors")
    for name in ("on_begin", "on_batch", "on_end"):
        proxy, faults = served(loader), []

        def fails(*_):
            raise BrokenError

        setattr(proxy, name, fails)
        proxy.on_fault = faults.append
        proxy.use(GATHER)
        assert len(list(proxy.iterate())) == 6
        assert {type(fault) for fault in faults} == {BrokenError}
        proxy.on_fault = fails
        assert len(list(proxy.iterate())) == 6


def test_a_session_that_closes_everything_at_a_fault_loses_no_batch(monkeypatch):
    for own in (0, 2):
        loader = loader_of("tensors", "as given", num_workers=own, batch_size=2)
        proxy = served(loader)
        proxy.on_fault = lambda error, proxy=proxy: proxy.close()
        proxy.use(GATHER)
        iterator = proxy.iterate()
        seen = [next(iterator) for _ in range(3)]
        with monkeypatch.context() as patch:
            patch.setattr(feeds_module.GatheredFeed, "__next__", lambda self: 1 / 0)
            seen.append(next(iterator))
        seen += list(iterator)
        assert torch.equal(torch.cat([y for _, y in seen]), Y)
        assert not processes_of(proxy)


# --- which feeds -------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


def random_sample(index):
    return X[index] + torch.rand(()), index


def random_collate(samples):
    return default_collate(samples), random.random()


def plain_collate(samples):
    return tuple(default_collate(samples))


@pytest.mark.parametrize(
    ("loader", "gathers", "works"),
    [
        (lambda: DataLoader(Stream(), 4), "order of its samples", "order of its samples"),
        (lambda: DataLoader(TensorDataset(X), None), "makes no batches", "makes no batches"),
        (lambda: loader_of(Of(random_sample)), "draws from torch's generator", "draws from torch's generator"),
        (lambda: loader_of("tensors", collate_fn=plain_collate), "its own collate function", None),
        (lambda: loader_of("tensors", collate_fn=random_collate), "collate function", "draws from Python's random"),
        (lambda: loader_of(Of(lambda i: X[i, : 1 + i % 2])), "cannot be stacked", None),
        (lambda: loader_of(Of(lambda i: (X[i], f"sample {i}"))), "cannot be a column", None),
        (lambda: loader_of("tensors", "drawn as read"), None, "may draw as it is read"),
        (lambda: loader_of("tensors", num_workers=1, in_order=False), "in_order=False", "in_order=False"),
        (lambda: DataLoader([], 4), "the dataset is empty", "the dataset is empty"),
        (lambda: loader_of("tensors"), None, None),
    ],
)
def test_every_feed_that_is_not_possible_says_why(loader, gathers, works):
    loader = loader()
    proxy = served(loader)
    for feed, words in ((GATHER, gathers), (TWO, works), (proxy.own, None)):
        reason = proxy.supports(feed)
        assert (reason is None) if words is None else words in reason
        if reason is not None:
            assert "\n" not in reason
            assert proxy.why_other(feed) == reason
            with pytest.raises(PlanError, match=words.split(" ")[0]):
                proxy.use(feed)
    assert proxy.feed == proxy.own
    proxy.close()


def test_feeds_for_a_gpu_need_one():
    loader = loader_of("tensors")
    for kind in ("resident", "stream"):
        assert served(loader).supports(Feed(kind=kind)) == "the script trains on the CPU"
        proxy = served(loader, torch.device("cuda"))
        assert "cannot answer" in proxy.supports(Feed(kind=kind))
    assert served(loader).supports(Feed(kind="loader", workers=2, pinned=True)) is None


def test_a_script_whose_default_device_is_another_keeps_its_feed():
    proxy = served(loader := loader_of("tensors"))
    with torch.device("meta"):
        assert "default device is meta" in proxy.supports(GATHER)
    assert proxy.supports(GATHER) is None
    assert loader is not None


def test_an_iterable_dataset_is_only_passed_on():
    loader = DataLoader(Stream(), 4)
    proxy = served(loader)
    assert_same(script(loader, lambda loader: proxy.iterate()), script(loader, ORIGINAL))
    assert (proxy.source, proxy.length, proxy.served) == (None, None, 6)
    assert proxy.holding_s() == 0.0


def test_probing_leaves_all_generators_as_they_were():
    loader = loader_of(Of(random_sample))
    proxy = served(loader)
    before = states(loader)
    proxy.supports(GATHER)
    proxy.why_other(GATHER)
    proxy.holding_s()
    assert states(loader) == before
    for data in DATA:
        loader = loader_of(data, "by a generator")
        proxy = served(loader)
        before = states(loader)
        assert proxy.why_other(GATHER) is None
        assert proxy.holding_s() >= 0.0
        proxy.use(GATHER)
        assert states(loader) == before


def test_what_holding_takes_is_nothing_once_it_is_held():
    loader = loader_of("tuples")
    proxy = served(loader)
    assert proxy.holding_s() > 0.0
    assert proxy.holding_s() == proxy.holding_s(GATHER)
    assert proxy.holding_s(TWO) == 0.0
    proxy.use(GATHER)
    assert proxy.holding_s() == 0.0
    assert served(loader_of("tensors")).holding_s() == 0.0


# --- data that changes -------------------------------------------------------------------------------


class Growing(Of):
    def __init__(self):
        super().__init__(lambda index: (X[index] + self.epoch, index))
        self.epoch = 0


def halved(dataset):
    dataset.tensors = (X / 2, Y)


def written(dataset):
    dataset.tensors[0].mul_(3)


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("feed", [GATHER, TWO])
@pytest.mark.parametrize(
    ("data", "change"),
    [
        (Growing, lambda dataset: setattr(dataset, "epoch", 1)),
        (lambda: TensorDataset(X.clone(), Y), written),
        (lambda: TensorDataset(X, Y), halved),
        (lambda: Subset(TensorDataset(X, Y), list(range(9))), lambda dataset: dataset.indices.reverse()),
    ],
    ids=["an attribute", "in place", "other tensors", "other rows"],
)
def test_data_that_changes_between_epochs_comes_by_the_own_feed_from_then_on(data, change, feed, own):
    def seen(data, iterate):
        loader = loader_of(data, "as given", num_workers=own)
        first = list(iterate(loader))
        change(loader.dataset)
        return first + list(iterate(loader))

    proxy = None

    def iterate(loader):
        nonlocal proxy
        if proxy is None:
            proxy = served(loader)
            proxy.use(feed)
        return proxy.iterate()

    wanted = seen(data(), ORIGINAL)
    for batch, truth in zip(seen(data(), iterate), wanted, strict=True):
        assert why_other_batch(truth, batch) is None
    # Batches that are gathered come out of the script's own tensors: who writes to them is seen.
    reads_in_place = feed == GATHER and change is written
    assert (proxy.feed == proxy.own) != reads_in_place
    assert (proxy.supports(feed) is None) == reads_in_place
    if not reads_in_place:
        assert proxy.supports(feed).startswith("the data changed during the run: ")
    assert not processes_of(proxy)


def test_data_that_changed_before_anything_was_prepared_is_taken_as_it_is():
    for data, change in (
        (TensorDataset(X, Y), halved),
        (Subset(Of(lambda i: (X[i], i)), list(range(9))), lambda dataset: dataset.indices.reverse()),
    ):
        loader = loader_of(data, "as given")
        proxy = served(loader)
        assert proxy.supports(GATHER) is None
        change(data)
        proxy.use(GATHER)
        for batch, truth in zip(proxy.iterate(), ORIGINAL(loader), strict=True):
            assert why_other_batch(truth, batch) is None
        assert proxy.feed == GATHER


def test_data_that_changed_is_seen_before_another_feed_is_used():
    loader = loader_of(Growing())
    proxy = served(loader)
    proxy.use(GATHER)
    iterator = proxy.iterate()
    next(iterator)
    proxy.use(proxy.own)
    loader.dataset.epoch = 1
    with pytest.raises(PlanError, match="the data changed during the run: 'epoch' has changed"):
        proxy.use(GATHER)
    assert len(list(iterator)) == 5


def test_a_script_that_changes_its_loader_is_followed():
    loader = loader_of("tensors", "as given")
    proxy = served(loader)
    proxy.use(GATHER)
    list(proxy.iterate())
    loader.collate_fn = plain_collate
    assert all(type(batch) is tuple for batch in proxy.iterate())
    assert proxy.feed == proxy.own
    assert "collate" in proxy.supports(GATHER)
    assert proxy.supports(TWO) is None


# --- the gate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", DATA)
def test_the_gate_finds_nothing_where_nothing_is_other(data):
    loader = loader_of(data, "as given")
    proxy = served(loader)
    assert proxy.why_other(GATHER) is None
    if data in ("tensors", "named"):
        assert proxy.why_other(TWO) is None
        proxy.use(TWO)
        assert proxy.why_other(TWO) is None
        assert len(list(proxy.iterate())) == 6
    proxy.close()


class ByProcess(Of):
    """Other samples in a worker."""

    def __init__(self):
        super().__init__(lambda index: (X[index] + (torch.utils.data.get_worker_info() is not None), index))


def test_a_dataset_that_gives_other_samples_in_a_worker_keeps_its_feed():
    loader = loader_of(ByProcess())
    proxy = served(loader)
    for feed in (TWO, GATHER):
        assert "asks which worker it runs in" in proxy.supports(feed)
    proxy.close()


def test_the_gate_sees_other_samples_that_a_worker_brings(monkeypatch):
    loader = loader_of("tuples")
    proxy = served(loader)
    assert proxy.supports(TWO) is None
    monkeypatch.setattr(
        Of, "__getitem__", lambda self, index: self.make((index + (get_worker_info() is not None)) % COUNT)
    )
    monkeypatch.setattr(serving_module, "why_not_pure", lambda source: None)
    assert "differ" in proxy.why_other(TWO)
    proxy.close()


def test_the_gate_sees_numbers_that_were_held_and_are_others(monkeypatch):
    loader = loader_of("tuples")
    proxy = served(loader)
    assert proxy.why_other(GATHER) is None
    gather = feeds_module.ColumnBatches.batch

    def wrong(self, positions):
        batch = gather(self, positions)
        tensors_in(batch)[0].flatten()[0] += 1
        return batch

    monkeypatch.setattr(feeds_module.ColumnBatches, "batch", wrong)
    assert "rows of part 0 differ" in proxy.why_other(GATHER)


def test_the_gate_sees_tensors_of_another_kind():
    grad = torch.ones(4, 2, requires_grad=True)
    loader = loader_of(TensorDataset(grad))
    with torch.no_grad():
        assert "requires gradients" in served(loader).why_other(GATHER)


# --- on the device -----------------------------------------------------------------------------------


class Noted:
    """Takes every copy at once."""

    def __init__(self):
        self.batches = []

    def serve(self, pairs):
        self.batches.append([(tensor, copy) for tensor, copy in pairs])


def columned_of(loader):
    proxy = served(loader)
    proxy.use(GATHER)
    return proxy._holding.column_batches, proxy._holding


@pytest.mark.parametrize("data", DATA)
def test_resident_batches_have_copies_that_are_gathered_when_they_are_asked_for(data):
    loader = loader_of(data, "as given")
    column_batches, holding = columned_of(loader)
    on_device, noted = holding._columns, Noted()
    indices = [[0, 3, 3], [1], [2, 1, 0, 4]]
    resident = feeds_module.ResidentFeed(
        column_batches,
        iter(indices),
        on_device=on_device,
        device=CPU,
        serve=noted.serve,
        is_same=lambda: len(noted.batches) < 2,
    )
    batches = list(resident)
    assert len(batches) == 3
    assert len(noted.batches) == 2, "what was written to since it was held is not served"
    for batch, pairs in zip(batches, noted.batches, strict=False):
        assert [id(t) for t in tensors_in(batch)] == [id(t) for t, _ in pairs]
        for tensor, copy in reversed(pairs):
            landed = copy.on_device()
            assert torch.equal(landed, tensor)
            assert landed.data_ptr() != tensor.data_ptr()


class PretendedCopier:
    """Copies to a device when somebody comes for them, out of memory that may have been written to by then."""

    def __init__(self):
        self.sent, self.abandoned = [], 0

    def send(self, tensor):
        flight = PretendedFlight(self, tensor)
        self.sent.append(flight)
        return flight


class PretendedFlight:
    def __init__(self, copier, tensor):
        self.copier, self.tensor, self.copied = copier, tensor, None

    def on_device(self):
        self.wait()
        return self.copied

    def wait(self):
        self.copied = self.tensor.clone() if self.copied is None else self.copied

    def discard(self):
        self.copier.abandoned += 1


@pytest.mark.parametrize("stages", [True, False])
@pytest.mark.parametrize("data", ["tensors", "named", "turned"])
def test_streamed_batches_are_sent_ahead_and_their_memory_is_used_again(data, stages):
    loader = loader_of(data, "as given")
    wanted = list(ORIGINAL(loader))
    column_batches, _ = columned_of(loader)
    copier, noted = PretendedCopier(), Noted()
    indices = [list(range(n, min(COUNT, n + 4))) for n in range(0, COUNT, 4)]
    streamed = feeds_module.StreamedFeed(
        column_batches, iter(indices), copier=copier, serve=noted.serve, pinned=False, stages=stages
    )
    for number, truth in enumerate(wanted):
        batch = next(streamed)
        count = len(tensors_in(batch))
        assert len(copier.sent) == min(len(wanted), number + 3) * count
        assert why_other_batch(truth, batch) is None
        for tensor, copy in noted.batches[-1]:
            assert torch.equal(copy.on_device(), tensor)
            assert stages == (copy.tensor.data_ptr() != tensor.data_ptr())
    with pytest.raises(StopIteration):
        next(streamed)
    assert copier.abandoned == 0
    if stages:
        assert len({flight.tensor.data_ptr() for flight in copier.sent}) == 4 * count


def test_streamed_batches_that_nobody_comes_for_are_given_up():
    loader = loader_of("tensors", "as given")
    column_batches, _ = columned_of(loader)
    copier, noted = PretendedCopier(), Noted()
    indices = iter([[0], [1], [2], [3], [4]])
    streamed = feeds_module.StreamedFeed(
        column_batches, indices, copier=copier, serve=noted.serve, pinned=False, stages=True
    )
    next(streamed)
    with torch.inference_mode():  # what was made before is none of this mode
        batch = next(streamed)
    assert torch.equal(batch[1], Y[1:2])
    assert all(tensor.is_inference() for tensor in batch)
    assert copier.abandoned == 2
    assert torch.equal(next(streamed)[1], Y[2:3])
    streamed.close()
    assert copier.abandoned == 2 + 2 * 2


@pytest.fixture
def pretended_gpu(monkeypatch):
    """The host in the place of a GPU: what is sent there is answered with copies, in memory of their own."""
    copier = PretendedCopier()
    why_not = LoaderProxy._why_not
    monkeypatch.setattr(serving_module, "CudaCopier", lambda device: copier)
    monkeypatch.setattr(feeds_module, "PinnedBuffers", lambda pinned: PinnedBuffers(pinned=False))
    monkeypatch.setattr(
        LoaderProxy,
        "_why_not",
        lambda self, feed: why_not(self, GATHER if feed.kind in ("resident", "stream") else feed),
    )
    device_copies = DeviceCopies(CPU)
    device_copies.on_fault = pytest.fail
    yield copier, device_copies
    device_copies.remove()


@pytest.mark.parametrize("stop", [None, 5])
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("data", ["tensors", "named", "subset"])
def test_what_a_script_sends_is_what_it_would_send_wherever_the_feed_changes(pretended_gpu, data, own, stop):
    copier, device_copies = pretended_gpu
    settings = {"num_workers": own, "batch_size": 2}
    wanted = script(loader_of(data, "by a generator", **settings), ORIGINAL, epochs=3, stop=stop)
    loader = loader_of(data, "by a generator", **settings)
    proxy = LoaderProxy(loader, device=CPU, original_iter=ORIGINAL, device_copies=device_copies)
    proxy.on_fault = pytest.fail
    feeds = [proxy.own, GATHER, Feed(kind="resident"), Feed(kind="stream")]
    for feed in feeds:
        assert proxy.why_other(feed) is None
    at, chance = switched_at_random(proxy, feeds, 3), random.Random(4)
    proxy.use(feeds[2])

    class Sends:
        """Sends parts of its batches, some of them twice, and writes to some before."""

        def __init__(self, iterator):
            self.iterator = iterator

        def __next__(self):
            batch = next(self.iterator)
            for tensor in tensors_in(batch):
                if chance.random() < 0.2:
                    tensor.copy_(tensor.clone())
                for _ in range(chance.randrange(3)):
                    on_device = tensor.to("cpu")
                    assert torch.equal(on_device, tensor)
            return batch

    seen = script(loader, lambda loader: Sends(proxy.iterate()), epochs=3, stop=stop, at=at)
    assert_same(seen, wanted, is_written_to=True)
    assert device_copies.answered
    assert copier.sent
    proxy.close()


def test_data_that_is_written_to_within_an_epoch_is_not_sent_as_it_was(pretended_gpu):
    _, device_copies = pretended_gpu
    data = TensorDataset(X.clone(), Y)
    loader = DataLoader(data, batch_size=2)
    proxy = LoaderProxy(loader, device=CPU, original_iter=ORIGINAL, device_copies=device_copies)
    proxy.on_fault = pytest.fail
    proxy.use(Feed(kind="resident"))
    for number, (x, y) in enumerate(proxy.iterate()):
        now = data.tensors[0][2 * number : 2 * number + 2]
        assert torch.equal(x, now)
        assert torch.equal(x.to("cpu"), now)
        assert torch.equal(y.to("cpu"), y)
        if number == 4:
            data.tensors[0].mul_(2)
    assert device_copies.answered == 2 * 5
    proxy.close()


@pytest.mark.parametrize("kind", ["resident", "stream", "gather"])
def test_an_attribute_that_flips_within_an_epoch_is_seen_in_the_next_batch(pretended_gpu, kind):
    _, device_copies = pretended_gpu
    loader = DataLoader(Growing(), batch_size=2)
    proxy = LoaderProxy(loader, device=CPU, original_iter=ORIGINAL, device_copies=device_copies)
    proxy.on_fault = pytest.fail
    told = []
    proxy.on_change = lambda feed, why: told.append((feed.kind, why))
    proxy.use(Feed(kind=kind))
    for number, (x, y) in enumerate(proxy.iterate()):
        assert torch.equal(x, X[2 * number : 2 * number + 2] + loader.dataset.epoch)
        assert torch.equal(x.to("cpu"), x)
        assert torch.equal(y, Y[2 * number : 2 * number + 2])
        if number == 4:
            loader.dataset.epoch = 1
    assert number == 11
    assert told == [(kind, "'epoch' has changed")]
    assert proxy.feed == proxy.own
    proxy.close()


def test_training_is_equal_to_the_bit():
    def trained(begin):
        torch.manual_seed(0)
        loader = loader_of("tuples")
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1))
        optimizer = torch.optim.Adam(model.parameters())
        begin = begin(loader)
        for _ in range(2):
            for number, (x, _, z, _) in enumerate(begin()):
                begin(number)
                optimizer.zero_grad()
                ((model(x)[:, 0] - z) ** 2).mean().backward()
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    class Plainly:
        def __init__(self, loader):
            self.loader = loader

        def __call__(self, number=None):
            return ORIGINAL(self.loader) if number is None else None

    class Otherwise(Plainly):
        def __init__(self, loader):
            super().__init__(loader)
            self.proxy = served(loader)

        def __call__(self, number=None):
            if number is None:
                return self.proxy.iterate()
            self.proxy.use(GATHER if number % 3 else self.proxy.own)
            return None

    for mine, theirs in zip(trained(Plainly), trained(Otherwise), strict=True):
        assert torch.equal(mine, theirs)


# --- samples that are kept as they come by -----------------------------------------------------------


@pytest.fixture
def at_any_price(monkeypatch):
    """Keeping a sample takes longer than making it, of samples as small as these."""
    monkeypatch.setattr(held_samples, "MOST_SHARE", float("inf"))


@pytest.mark.parametrize(
    ("order", "since", "workers"),
    [
        ("as given", 0, 0),
        ("shuffled", 3, 0),
        ("by a generator", 8, 0),
        ("weighted", 3, 0),
        ("drawn as read", 8, 0),
        ("own batches", 0, 0),
        ("shuffled", 3, 2),
        ("by a generator", 0, 2),
        ("drawn as read", 8, 1),
    ],
)
def test_samples_that_are_kept_as_they_come_by_make_the_loaders_own_batches(order, since, workers, at_any_price):
    settings = {"num_workers": workers}
    wanted = script(loader_of("dicts", order, **settings), ORIGINAL, epochs=4)
    loader = loader_of("dicts", order, **settings)
    proxy, begun = served(loader), []

    def begin(loader):
        begun.append(None)
        if len(begun) == 4:
            proxy.use(GATHER)
        return proxy.iterate()

    def at(number):
        if number == since:
            assert proxy.learn() > 0

    assert_same(script(loader, begin, epochs=4, at=at), wanted)
    assert proxy.feed == GATHER
    proxy.close()


def test_nothing_that_came_by_is_fetched_again(at_any_price, monkeypatch):
    loader = loader_of("tuples")
    proxy = served(loader)
    whole_s = proxy.holding_s()
    assert proxy.learn() == len(loader)
    for _ in proxy.iterate():
        pass
    assert proxy.learn() is None, "all of it is there"
    assert proxy.holding_s() == 0.0 < whole_s
    fetched = []
    monkeypatch.setattr(KeptSamples, "_fetched", lambda self, some: fetched.append(some))
    proxy.use(GATHER)
    assert fetched == []


def test_holding_takes_the_less_the_more_has_come_by(at_any_price):
    loader = loader_of("tuples", "as given", batch_size=4)
    proxy = served(loader)
    iterator = proxy.iterate()
    next(iterator)
    assert proxy.learn() == len(loader) - 1
    whole_s = proxy.holding_s()
    next(iterator)
    next(iterator)
    assert proxy.holding_s() == pytest.approx(whole_s * (1 - 8 / COUNT))
    proxy.use(GATHER)
    batches = list(iterator)
    assert [batch[1].tolist() for batch in batches] == [
        list(range(at, min(COUNT, at + 4))) for at in range(12, COUNT, 4)
    ]
    assert torch.equal(torch.cat([batch[0] for batch in batches]), X[12:])


@pytest.mark.parametrize("data", ["tensors", "subset", "one tensor"])
def test_there_is_nothing_to_learn_of_tensors_that_are_there(data):
    assert served(loader_of(data)).learn() is None


def test_nothing_is_kept_of_what_may_be_other_samples_next_time():
    for data in (Of(random_sample), Stream()):
        loader = DataLoader(data, 4)
        proxy = served(loader)
        assert proxy.learn() is None
        assert proxy.kept_samples is None


def test_what_has_come_by_is_let_go_of_when_the_data_changes(at_any_price):
    class Scaled(Dataset):
        factor = 1.0

        def __len__(self):
            return COUNT

        def __getitem__(self, index):
            return X[index] * self.factor

    data = Scaled()
    loader = DataLoader(data, 4)
    proxy = served(loader)
    assert proxy.learn()
    for _ in proxy.iterate():
        pass
    data.factor = 2.0
    assert torch.equal(torch.cat(list(proxy.iterate())), 2 * X)
    assert "the data changed" in proxy.supports(GATHER)
    assert proxy.kept_samples is None


@pytest.mark.parametrize(
    ("takes_s", "waited_s", "is_kept"),
    [(0.001, 0.0, True), (0.004, 0.0, True), (0.03, 0.0, False), (0.03, 0.001, False), (0.03, 0.05, True)],
)
def test_keeping_samples_that_delays_the_script_too_long_is_given_up(takes_s, waited_s, is_kept):
    """A batch comes every tenth of a second; work on it is no delay where the script then waits for its workers."""
    now, worked = [0.0], [0.0]
    source = as_source(DATA["tuples"](), loaded=True)

    def work_clock():
        worked[0] += takes_s / 2  # it is asked twice
        return worked[0]

    kept_samples = KeptSamples(source, clock=lambda: now[0], work_clock=work_clock)
    for _ in range(20):
        now[0] += 0.1
        kept_samples.note(IndexBatch([0, 1]), [X[:2], Y[:2]], waited_s)
    assert kept_samples.is_over != is_kept
    assert (kept_samples.missing == 1.0) != is_kept


def test_batches_of_another_shape_end_it(at_any_price):
    source = as_source(DATA["tuples"](), loaded=True)
    kept_samples = KeptSamples(source)
    kept_samples.note(IndexBatch([0, 1]), [X[:2], Y[:2]])
    assert kept_samples.missing == pytest.approx(1 - 2 / COUNT)
    kept_samples.note(None, [X[:2], Y[:2]])  # nobody knows which they are
    kept_samples.note(IndexBatch([2, 3]), [X[:2, :1], Y[:2]])
    assert kept_samples.is_over
    assert kept_samples.missing == 1.0


@pytest.mark.parametrize("index", [["a", "b"], [[0, 1], [2]], [COUNT], [-1], [{"row": 0}]])
def test_index_batches_that_are_no_places_end_it(index, at_any_price):
    kept_samples = KeptSamples(as_source(DATA["tuples"](), loaded=True))
    kept_samples.note(IndexBatch(index), [X[:1], Y[:1]])
    assert kept_samples.is_over


def test_a_sample_that_comes_by_twice_is_kept_once(at_any_price):
    kept_samples = KeptSamples(as_source(DATA["tuples"](), loaded=True))

    def note(*places):
        kept_samples.note(IndexBatch(list(places)), [X[list(places)], Y[list(places)]])
        return round(COUNT * (1 - kept_samples.missing))

    assert note(5, 3, 5, 5) == 2
    assert note(3, 5) == 2
    assert note(5, 4, 3, 0) == 4
    assert note(*range(COUNT - 1), 2) == COUNT - 1
    assert not kept_samples.is_over
    assert note(COUNT - 1, COUNT - 1) == COUNT
    assert kept_samples.is_over
    x, y = kept_samples.columns().gather(torch.arange(COUNT))
    assert torch.equal(x, X)
    assert torch.equal(y, Y)


@pytest.fixture
def free_cores(monkeypatch):
    """A training on a GPU with free cores beside it; its held samples stay on the host."""
    monkeypatch.setattr(background_fetch, "free_cores", lambda busy: 2)
    monkeypatch.setattr(background_fetch, "LEAST_S", 0.0)
    made = HeldSamples.__init__
    monkeypatch.setattr(
        HeldSamples, "__init__", lambda self, source, device, own: made(self, source, torch.device("cuda"), own)
    )


def script_with(use, *, data="dicts", **settings):
    """An epoch under the loader's feed, in which `use(proxy)` is called, and two more."""
    loader = loader_of(data, "shuffled", **settings)
    proxy = served(loader)

    def at(number):
        if number == 1:
            use(proxy)

    found = script(loader, lambda _: proxy.iterate(), epochs=3, at=at)
    return proxy, found


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", ["dicts", "tuples"])
def test_samples_that_processes_fetch_make_the_loaders_own_batches(data, workers, free_cores):
    def use(proxy):
        assert proxy.learn() == 1
        assert proxy.kept_samples._background.wait()
        assert proxy.learn() is None
        assert proxy.holding_s(GATHER) == 0
        proxy.use(GATHER)

    wanted = script(loader_of(data, "shuffled", num_workers=workers), ORIGINAL, epochs=3)
    proxy, found = script_with(use, data=data, num_workers=workers)
    assert_same(found, wanted)
    assert proxy.feed == GATHER
    proxy.close()


def test_samples_that_are_wanted_before_all_are_fetched_are_waited_for(free_cores, monkeypatch):
    monkeypatch.setattr(KeptSamples, "_fetched", None)
    wanted = script(loader_of("dicts", "shuffled"), ORIGINAL, epochs=3)
    proxy, found = script_with(lambda proxy: proxy.use(GATHER))
    assert_same(found, wanted)
    assert proxy.feed == GATHER


def test_where_processes_fail_samples_are_kept_as_they_pass(free_cores, at_any_price):
    def use(proxy):
        assert proxy.learn() == 1
        proxy.kept_samples._background.close()
        assert proxy.learn() > 1
        assert proxy.kept_samples.missing == 1

    wanted = script(loader_of("dicts", "shuffled"), ORIGINAL, epochs=3)
    proxy, found = script_with(use)
    assert_same(found, wanted)
    assert proxy.kept_samples.missing == 0
    proxy.use(GATHER)


@pytest.mark.parametrize(
    ("epochs_left", "cores", "kept"), [(3, 0, "passing"), (2, 0, None), (1.5, 2, "all"), (0.9, 2, None)]
)
def test_samples_are_kept_where_enough_is_left_to_train(epochs_left, cores, kept, free_cores, monkeypatch):
    monkeypatch.setattr(background_fetch, "free_cores", lambda busy: cores)
    loader = loader_of("tuples")
    proxy = served(loader)
    assert proxy.learn(epochs_left) == {"passing": len(loader), "all": 1, None: None}[kept]
    assert (proxy.kept_samples is not None) == bool(kept)
    proxy.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_come_by_after_other_workers_were_tried(workers, at_any_price):
    loader = loader_of("tuples", batch_size=2, num_workers=workers)
    proxy = served(loader)
    assert proxy.learn()
    for number, _ in enumerate(proxy.iterate()):
        if number in (1, 4):
            proxy.use(TWO if number == 1 else proxy.own)
    assert proxy.kept_samples.missing <= 2 * workers * 2 / COUNT, "but for what was under way before"
    proxy.close()


def test_what_is_kept_is_gone_when_nothing_comes_of_it(at_any_price):
    proxy = served(loader := loader_of("tuples"))
    assert proxy.learn() == len(loader)
    assert proxy.kept_samples is not None
    proxy.tidy()
    assert proxy.kept_samples is None


@pytest.mark.parametrize(
    "samples",
    [
        torch.arange(40).reshape(10, 4).to(torch.bfloat16),
        torch.arange(10) % 3 == 0,
        torch.randn(10, 3, dtype=torch.complex64).conj(),
        torch.randn(10, 2, 6)[:, :, ::2],
        torch.zeros(10, 0),
        torch.randn(10, 3, requires_grad=True),
    ],
    ids=["bf16", "bool", "conjugate", "strided", "empty", "with gradients"],
)
def test_samples_of_any_kind_are_kept_to_the_bit(samples):
    kept_samples = KeptSamples(as_source(TensorDataset(samples.detach())))
    for some in ([7, 2, 5], [1, 0, 2, 2, 9]):
        kept_samples._keep(torch.tensor(some).numpy(), [samples[some]])
    assert kept_samples.missing == pytest.approx(0.4)
    kept = kept_samples.columns()
    assert torch.equal(next(iter(kept.inner.tensors.values()))[kept.rows], samples)
