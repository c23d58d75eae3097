"""Batches that a script sends to a real GPU: they are the loader's own, right when they are read, and nobody waits."""

import random
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from waiting import no_waiting

from hotlap.core.plan import Feed
from hotlap.data import feeds as data_feeds
from hotlap.data.feeds import CudaCopier, PinnedBuffers
from hotlap.data.sources import Columns, tensors_in
from hotlap.script.feed import feeds, held_samples
from hotlap.script.feed.device_copies import KEPT, DeviceCopies
from hotlap.script.feed.loader_proxy import LoaderProxy, why_other_batch

MILLISECOND = 1_700_000
"""Cycles of the clock that `torch.cuda._sleep` counts, nearly."""
ORIGINAL = DataLoader.__iter__
RESIDENT, STREAM, GATHER = Feed(kind="resident"), Feed(kind="stream"), Feed(kind="gather")
COUNT = 203
X = torch.arange(COUNT * 48, dtype=torch.float32).reshape(COUNT, 3, 4, 4)
Y = torch.arange(COUNT)
Pair = namedtuple("Pair", "x y")


class Of(Dataset):
    def __init__(self, make):
        self.make = make

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return self.make(index)


DATA = {
    "tensors": lambda: TensorDataset(X, Y),
    "bytes": lambda: TensorDataset(X.to(torch.uint8), Y),
    "strided": lambda: TensorDataset(X.permute(0, 2, 3, 1), X[:, 0, 0, 0], Y.bool()),
    "subset": lambda: Subset(TensorDataset(X, Y), range(3, 150)),
    "one tensor": lambda: X,
    "nested": lambda: Of(lambda i: {"pair": Pair(X[i], i), "list": [X[i].half(), (i / 3,)]}),
}


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def device_copies(device):
    device_copies = DeviceCopies(device)
    device_copies.on_fault = lambda error: pytest.fail(repr(error))
    yield device_copies
    device_copies.remove()


def served(loader, device_copies):
    proxy = LoaderProxy(loader, device=device_copies.device, original_iter=ORIGINAL, device_copies=device_copies)
    proxy.on_fault = lambda error: pytest.fail(repr(error))
    return proxy


def loader_of(data, **settings):
    data = DATA[data]() if isinstance(data, str) else data
    torch.manual_seed(1)
    return DataLoader(data, **{"batch_size": 8, "shuffle": True, **settings})


# --- the same batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("feed", [GATHER, RESIDENT, STREAM], ids=str)
@pytest.mark.parametrize("data", DATA)
def test_batches_and_what_the_script_sends_of_them_are_the_loaders_own(data, feed, pinned, device_copies, device):
    loader = loader_of(data, pin_memory=pinned)
    proxy = served(loader, device_copies)
    assert proxy.supports(feed) is None
    assert proxy.why_other(feed) is None
    torch.manual_seed(2)
    wanted = list(ORIGINAL(loader))
    torch.manual_seed(2)
    proxy.use(feed)
    sent = 0
    for batch, truth in zip(proxy.iterate(), wanted, strict=True):
        assert why_other_batch(truth, batch) is None
        for tensor in tensors_in(batch):
            on_device = tensor.to(device, non_blocking=True)
            assert tensor._version == on_device._version == 0
            assert on_device.device == device
            assert on_device.stride() == tensor.stride()
            assert torch.equal(on_device.cpu(), tensor)
            sent += 1
    assert device_copies.answered == (0 if feed == GATHER else sent)
    proxy.close()


@pytest.mark.parametrize("settings", [{}, {"pin_memory": True}, {"num_workers": 2, "pin_memory": True}], ids=str)
def test_samples_that_came_by_are_held_on_the_gpu_as_the_loader_gives_them(
    settings, device_copies, device, monkeypatch
):
    monkeypatch.setattr(held_samples, "MOST_SHARE", float("inf"))
    loader = loader_of("nested", **settings)
    proxy = served(loader, device_copies)
    assert proxy.learn() == len(loader)
    for _ in proxy.iterate():
        pass
    # Workers are asked for the first batches as the epoch begins, before anyone can see for which.
    assert proxy.kept_samples.missing < (0.2 if settings.get("num_workers") else 1e-9)
    assert proxy.why_other(RESIDENT) is None
    torch.manual_seed(2)
    wanted = list(ORIGINAL(loader))
    torch.manual_seed(2)
    proxy.use(RESIDENT)
    for batch, truth in zip(proxy.iterate(), wanted, strict=True):
        assert why_other_batch(truth, batch) is None
        for tensor in tensors_in(batch):
            assert torch.equal(tensor.to(device, non_blocking=True).cpu(), tensor)
    assert device_copies.answered
    proxy.close()


@pytest.mark.parametrize("settings", [{}, {"pin_memory": True}, {"num_workers": 2}], ids=str)
def test_feeds_change_wherever_they_like(settings, device_copies, device):
    def seen(loader, iterate, at):
        torch.manual_seed(3)
        found, number = [], 0
        for _ in range(3):
            iterator = iterate(loader)
            while True:
                at(number)
                number += 1
                try:
                    batch = next(iterator)
                except StopIteration:
                    break
                found.append((batch, [tensor.to(device) for tensor in tensors_in(batch)], torch.get_rng_state()))
                torch.rand(())
        return found

    wanted = seen(loader_of("nested", **settings), ORIGINAL, lambda number: None)
    loader, chance = loader_of("nested", **settings), random.Random(1)
    proxy = served(loader, device_copies)
    feeds = [proxy.own, GATHER, RESIDENT, STREAM]

    def at(number):
        if chance.random() < 0.2:
            proxy.use(chance.choice(feeds))

    for (batch, on_device, state), (truth, true_there, true_state) in zip(
        seen(loader, lambda loader: proxy.iterate(), at), wanted, strict=True
    ):
        assert why_other_batch(truth, batch) is None
        assert all(torch.equal(a, b) for a, b in zip(on_device, true_there, strict=True))
        assert torch.equal(state, true_state)
    assert device_copies.answered
    proxy.close()


@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_a_copy_is_given_out_once_and_not_for_what_was_written_to(feed, device_copies, device):
    loader = loader_of("tensors", pin_memory=True)
    proxy = served(loader, device_copies)
    proxy.use(feed)
    for x, y in proxy.iterate():
        first, second = x.to(device), x.cuda(non_blocking=True)
        assert first.data_ptr() != second.data_ptr()
        first.zero_()
        assert torch.equal(second.cpu(), x)
        y += 5
        assert torch.equal(y.to(device).cpu(), y)
    assert device_copies.answered == len(loader)
    proxy.close()


def test_data_that_is_written_to_in_the_middle_of_an_epoch_is_not_served_as_it_was(device_copies, device):
    data = TensorDataset(X.clone(), Y)
    loader = loader_of(data, shuffle=False)
    proxy = served(loader, device_copies)
    proxy.use(RESIDENT)
    iterator = proxy.iterate()
    next(iterator)
    data.tensors[0].mul_(2)
    x, _ = next(iterator)
    assert torch.equal(x, X[8:16] * 2)
    assert torch.equal(x.to(device).cpu(), x)
    del iterator
    assert all(torch.equal(x.to(device).cpu(), x) for x, _ in proxy.iterate())
    assert proxy.feed == proxy.own


@pytest.mark.parametrize("workers", [0, 1])
def test_inference_mode_changes_what_a_batch_is_as_it_does_for_torch(workers, device_copies, device):
    loader = loader_of("tensors", pin_memory=True, num_workers=workers)
    proxy = served(loader, device_copies)
    for feed in (GATHER, RESIDENT, STREAM):
        proxy.use(feed)
        with torch.inference_mode():
            truth, batch = next(ORIGINAL(loader)), next(proxy.iterate())
            assert [t.is_inference() for t in batch] == [t.is_inference() for t in truth]
            on_device = [t.to(device) for t in batch]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(on_device, batch, strict=True))
    proxy.close()


def test_data_on_the_gpu_is_gathered_there(device_copies, device):
    loader = loader_of(TensorDataset(X.to(device), Y.to(device)), shuffle=False)
    proxy = served(loader, device_copies)
    assert "already" in proxy.supports(RESIDENT)
    assert "already" in proxy.supports(STREAM)
    assert proxy.why_other(GATHER) is None
    proxy.use(GATHER)
    for batch, truth in zip(proxy.iterate(), ORIGINAL(loader), strict=True):
        assert why_other_batch(truth, batch) is None


# --- streams -----------------------------------------------------------------------------------------


class Poisoned(PinnedBuffers):
    """Page-locked memory whose old content is ruined as soon as it is given out again."""

    def allocate(self, shape, dtype):
        return super().allocate(shape, dtype).fill_(-5)


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(data_feeds, "PinnedBuffers", Poisoned)
    monkeypatch.setattr(feeds, "PinnedBuffers", Poisoned)


@pytest.fixture
def slow_copies(monkeypatch):
    """Every copy begins a millisecond late."""
    send = CudaCopier.send

    def late(copier, batch):
        with torch.cuda.stream(copier._stream):
            torch.cuda._sleep(MILLISECOND)
        return send(copier, batch)

    monkeypatch.setattr(CudaCopier, "send", late)


def wrongs(feed, device_copies, *, pinned, step, taken_on=lambda number: None, batches=100, size=64, features=2048):
    """How many numbers a script reads wrong, counted on the device; freed memory is poisoned at once."""
    device = device_copies.device
    count = batches * size - 17  # the last batch is shorter
    x, y = torch.arange(count * 8, dtype=torch.int32).reshape(count, 8).repeat(1, features // 8), torch.arange(count)
    truth, wrong = x.to(device), torch.zeros((), dtype=torch.int64, device=device)
    loader = loader_of(TensorDataset(x, y), batch_size=size, pin_memory=pinned)
    proxy = served(loader, device_copies)
    proxy.use(feed)
    main = torch.cuda.current_stream()
    for number, (a, b) in enumerate(proxy.iterate()):
        other = taken_on(number)
        with torch.cuda.stream(other or main):
            # As prefetchers have it: sent on another stream, used on the script's own once that has come so far.
            a, b = a.to(device, non_blocking=True), b.to(device, non_blocking=True)
            if other is not None:
                here = (a != truth.index_select(0, b)).sum()
                here.record_stream(main)
        if other is not None:
            main.wait_stream(other)
            wrong += here
        for part in (a, b):
            part.record_stream(main)
        if step:
            torch.cuda._sleep(step)
        wrong += (a != truth.index_select(0, b)).sum()
        del a, b
        for _ in range(2):
            torch.full((size, features), -7, dtype=torch.int32, device=device)
    answered, device_copies.answered = device_copies.answered, 0
    assert answered == 2 * batches
    proxy.close()
    return int(wrong)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("step", [0, MILLISECOND], ids=["fast steps", "slow steps"])
@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_every_step_reads_its_own_batch(feed, step, pinned, device_copies):
    assert wrongs(feed, device_copies, pinned=pinned, step=step) == 0


@pytest.mark.usefixtures("poisoned", "slow_copies")
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("step", [0, MILLISECOND // 4], ids=["fast steps", "slower steps"])
def test_every_step_reads_its_own_batch_though_copies_are_late(step, pinned, device_copies):
    assert wrongs(STREAM, device_copies, pinned=pinned, step=step) == 0


@pytest.mark.usefixtures("poisoned", "slow_copies")
@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_a_script_that_sends_on_streams_of_its_own_reads_the_right_data_too(feed, device_copies):
    others = [torch.cuda.Stream(), torch.cuda.Stream()]
    for taken_on in (lambda n: others[0], lambda n: others[n % 2], lambda n: others[0] if n % 3 else None):
        for other in others:
            other.wait_stream(torch.cuda.current_stream())
        assert wrongs(feed, device_copies, pinned=True, step=MILLISECOND // 4, taken_on=taken_on, batches=40) == 0


def test_parts_of_a_resident_batch_that_are_sent_on_two_streams_are_both_right(device_copies, device):
    x = torch.arange(512 * 4096, dtype=torch.int32).reshape(512, 4096)
    loader = loader_of(TensorDataset(x, x + 1), batch_size=64, shuffle=False)
    proxy, other = served(loader, device_copies), torch.cuda.Stream()
    proxy.use(RESIDENT)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for a, b in proxy.iterate():
        torch.cuda._sleep(MILLISECOND)
        on_device = a.to(device)
        with torch.cuda.stream(other):
            also = b.to(device)
            unlike = (also != 0).sum()  # reads it on the other stream, at once
            beside = also.clone()
        torch.cuda.current_stream().wait_stream(other)
        for tensor in (unlike, beside):
            tensor.record_stream(torch.cuda.current_stream())
        wrong += (beside != on_device + 1).sum()
    assert int(wrong) == 0
    assert device_copies.answered == 16


def test_batches_that_are_gathered_together_lie_apart_and_take_few_launches(device_copies, device, monkeypatch):
    asked, gather = [], Columns.gather

    def noted(columns, indices, room=None):
        asked.append(len(indices)) if indices.is_cuda else None
        return gather(columns, indices, room)

    monkeypatch.setattr(Columns, "gather", noted)
    loader = loader_of("subset", batch_size=4)
    proxy = served(loader, device_copies)
    proxy.use(RESIDENT)
    kept = [(x, y, x.to(device), y.to(device)) for x, y in proxy.iterate()]
    assert asked == [4, 31 * 4, 19]  # the first alone, the rest of the first 32, and those after them
    assert device_copies.answered == 2 * len(loader)
    for x, y, there_x, there_y in kept:
        for here, on_device in ((x, there_x), (y, there_y)):
            assert torch.equal(on_device.cpu(), here)
            assert on_device.stride() == here.stride()
            assert on_device.untyped_storage().nbytes() == here.nbytes
            on_device.fill_(-1)  # must not be seen in another
    proxy.close()


def test_batches_that_were_gathered_on_another_stream_or_in_another_mode_are_gathered_again(device_copies, device):
    loader = loader_of("tensors", batch_size=4)
    proxy, other = served(loader, device_copies), torch.cuda.Stream()
    proxy.use(RESIDENT)
    for number, (x, y) in enumerate(proxy.iterate()):
        is_aside, is_inference = number % 5 == 2, number % 7 == 3
        with torch.cuda.stream(other if is_aside else torch.cuda.current_stream()), torch.inference_mode(is_inference):
            on_device, also = x.to(device), y.to(device)
            assert torch.equal(on_device.cpu(), x)
            assert torch.equal(also.cpu(), y)
        assert on_device.is_inference() == also.is_inference() == is_inference
    assert device_copies.answered == 2 * len(loader)
    proxy.close()


def test_a_script_with_resident_batches_waits_for_nothing(device_copies, device):
    loader = loader_of("tensors", batch_size=32)
    proxy = served(loader, device_copies)
    proxy.use(RESIDENT)
    for x, y in proxy.iterate():  # memory that is locked for the first time makes the driver wait
        x.to(device), y.to(device)
    torch.cuda.synchronize()
    with no_waiting():
        for x, y in proxy.iterate():
            x.to(device).sum() + y.to(device).sum()
    assert device_copies.answered == 2 * 2 * len(loader)


# --- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_a_script_that_keeps_its_batches_does_not_fill_the_gpu(feed, device_copies, device):
    x = torch.randn(4096, 4096)
    loader = loader_of(TensorDataset(x), batch_size=64)
    proxy = served(loader, device_copies)
    proxy.use(feed)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = list(proxy.iterate())
    assert len(kept) == 64
    assert torch.cuda.memory_allocated() - before <= (KEPT + 4) * 64 * 4096 * 4
    del kept
    assert torch.cuda.memory_allocated() == before
    proxy.close()


@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_batches_that_come_and_go_use_the_same_memory(feed, device_copies, device):
    x = torch.randn(4096, 4096)
    loader = loader_of(TensorDataset(x), batch_size=64)
    proxy = served(loader, device_copies)
    proxy.use(feed)
    for (batch,) in proxy.iterate():
        batch.to(device).sum()
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    for (batch,) in proxy.iterate():
        batch.to(device).sum()
    assert torch.cuda.memory_reserved() == held
    proxy.close()


def test_what_is_held_on_the_gpu_is_let_go_of_with_the_feed(device_copies, device):
    loader = loader_of(TensorDataset(torch.randn(4096, 4096)))
    proxy = served(loader, device_copies)
    before = torch.cuda.memory_allocated()
    proxy.use(RESIDENT)
    assert torch.cuda.memory_allocated() >= before + 4096 * 4096 * 4
    assert proxy.holding_s(RESIDENT) == 0.0
    proxy.use(GATHER)
    proxy.tidy()
    assert torch.cuda.memory_allocated() == before
    assert proxy.holding_s(RESIDENT) > 0.0


def test_an_epoch_that_is_broken_off_gives_up_what_is_under_way(device_copies, device):
    loader = loader_of(TensorDataset(torch.randn(512, 4096)))
    proxy = served(loader, device_copies)
    proxy.use(STREAM)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        (batch,) = next(proxy.iterate())
        assert torch.equal(batch.to(device).cpu(), batch)
    del batch
    assert torch.cuda.memory_allocated() == before
    proxy.close()


def test_data_that_does_not_fit_is_not_held(device_copies, device):
    loader = DataLoader(TensorDataset(torch.empty(1, 2**20).expand(2**20, 2**20)), batch_size=1)
    assert "the data needs" in served(loader, device_copies).supports(RESIDENT)


def test_what_is_captured_gets_no_copy_of_ours(device_copies, device, monkeypatch):
    loader = loader_of("tensors", pin_memory=True)
    proxy = served(loader, device_copies)
    proxy.use(RESIDENT)
    x, _ = next(proxy.iterate())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(x.to(device).cpu(), x)
    assert device_copies.answered == 0
    assert torch.equal(x.to(device).cpu(), x)
    assert device_copies.answered == 1
