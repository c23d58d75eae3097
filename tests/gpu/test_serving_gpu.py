"""Batches that a script sends to a real GPU: they are the loader's own, right when they are read, and nobody waits."""

import random
from collections import namedtuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from waiting import no_waiting

from hotlap.core.plan import Feed
from hotlap.data import feeds
from hotlap.data.feeds import CudaCopier, PinnedBuffers
from hotlap.data.sources import Columns, tensors_in
from hotlap.script.feed import feeds as serving_feeds
from hotlap.script.feed import holding as serving_learning
from hotlap.script.feed.checks import why_other_batch
from hotlap.script.feed.sending import KEPT, Sending
from hotlap.script.feed.serving import Serving

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
def sending(device):
    sending = Sending(device)
    sending.on_fault = lambda error: pytest.fail(repr(error))
    yield sending
    sending.remove()


def served(loader, sending):
    serving = Serving(loader, device=sending.device, original_iter=ORIGINAL, sending=sending)
    serving.on_fault = lambda error: pytest.fail(repr(error))
    return serving


def loader_of(data, **settings):
    data = DATA[data]() if isinstance(data, str) else data
    torch.manual_seed(1)
    return DataLoader(data, **{"batch_size": 8, "shuffle": True, **settings})


# --- the same batches --------------------------------------------------------------------------------


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("feed", [GATHER, RESIDENT, STREAM], ids=str)
@pytest.mark.parametrize("data", DATA)
def test_batches_and_what_the_script_sends_of_them_are_the_loaders_own(data, feed, pinned, sending, device):
    loader = loader_of(data, pin_memory=pinned)
    serving = served(loader, sending)
    assert serving.supports(feed) is None
    assert serving.why_other(feed) is None
    torch.manual_seed(2)
    wanted = list(ORIGINAL(loader))
    torch.manual_seed(2)
    serving.use(feed)
    sent = 0
    for batch, truth in zip(serving.iterate(), wanted, strict=True):
        assert why_other_batch(truth, batch) is None
        for tensor in tensors_in(batch):
            there = tensor.to(device, non_blocking=True)
            assert tensor._version == there._version == 0
            assert there.device == device
            assert there.stride() == tensor.stride()
            assert torch.equal(there.cpu(), tensor)
            sent += 1
    assert sending.answered == (0 if feed == GATHER else sent)
    serving.close()


@pytest.mark.parametrize("settings", [{}, {"pin_memory": True}, {"num_workers": 2, "pin_memory": True}], ids=str)
def test_samples_that_came_by_are_held_on_the_gpu_as_the_loader_gives_them(settings, sending, device, monkeypatch):
    monkeypatch.setattr(serving_learning, "MOST_SHARE", float("inf"))
    loader = loader_of("nested", **settings)
    serving = served(loader, sending)
    assert serving.learn() == len(loader)
    for _ in serving.iterate():
        pass
    # Workers are asked for the first batches as the epoch begins, before anyone can see for which.
    assert serving.learned.missing < (0.2 if settings.get("num_workers") else 1e-9)
    assert serving.why_other(RESIDENT) is None
    torch.manual_seed(2)
    wanted = list(ORIGINAL(loader))
    torch.manual_seed(2)
    serving.use(RESIDENT)
    for batch, truth in zip(serving.iterate(), wanted, strict=True):
        assert why_other_batch(truth, batch) is None
        for tensor in tensors_in(batch):
            assert torch.equal(tensor.to(device, non_blocking=True).cpu(), tensor)
    assert sending.answered
    serving.close()


@pytest.mark.parametrize("settings", [{}, {"pin_memory": True}, {"num_workers": 2}], ids=str)
def test_feeds_change_wherever_they_like(settings, sending, device):
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
    serving = served(loader, sending)
    feeds = [serving.own, GATHER, RESIDENT, STREAM]

    def at(number):
        if chance.random() < 0.2:
            serving.use(chance.choice(feeds))

    for (batch, there, state), (truth, true_there, true_state) in zip(
        seen(loader, lambda loader: serving.iterate(), at), wanted, strict=True
    ):
        assert why_other_batch(truth, batch) is None
        assert all(torch.equal(a, b) for a, b in zip(there, true_there, strict=True))
        assert torch.equal(state, true_state)
    assert sending.answered
    serving.close()


@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_a_copy_is_given_out_once_and_not_for_what_was_written_to(feed, sending, device):
    loader = loader_of("tensors", pin_memory=True)
    serving = served(loader, sending)
    serving.use(feed)
    for x, y in serving.iterate():
        first, second = x.to(device), x.cuda(non_blocking=True)
        assert first.data_ptr() != second.data_ptr()
        first.zero_()
        assert torch.equal(second.cpu(), x)
        y += 5
        assert torch.equal(y.to(device).cpu(), y)
    assert sending.answered == len(loader)
    serving.close()


def test_data_that_is_written_to_in_the_middle_of_an_epoch_is_not_served_as_it_was(sending, device):
    data = TensorDataset(X.clone(), Y)
    loader = loader_of(data, shuffle=False)
    serving = served(loader, sending)
    serving.use(RESIDENT)
    iterator = serving.iterate()
    next(iterator)
    data.tensors[0].mul_(2)
    x, _ = next(iterator)
    assert torch.equal(x, X[8:16] * 2)
    assert torch.equal(x.to(device).cpu(), x)
    del iterator
    assert all(torch.equal(x.to(device).cpu(), x) for x, _ in serving.iterate())
    assert serving.feed == serving.own


@pytest.mark.parametrize("workers", [0, 1])
def test_inference_mode_changes_what_a_batch_is_as_it_does_for_torch(workers, sending, device):
    loader = loader_of("tensors", pin_memory=True, num_workers=workers)
    serving = served(loader, sending)
    for feed in (GATHER, RESIDENT, STREAM):
        serving.use(feed)
        with torch.inference_mode():
            truth, batch = next(ORIGINAL(loader)), next(serving.iterate())
            assert [t.is_inference() for t in batch] == [t.is_inference() for t in truth]
            there = [t.to(device) for t in batch]
        assert all(torch.equal(a.cpu(), b) for a, b in zip(there, batch, strict=True))
    serving.close()


def test_data_on_the_gpu_is_gathered_there(sending, device):
    loader = loader_of(TensorDataset(X.to(device), Y.to(device)), shuffle=False)
    serving = served(loader, sending)
    assert "already" in serving.supports(RESIDENT)
    assert "already" in serving.supports(STREAM)
    assert serving.why_other(GATHER) is None
    serving.use(GATHER)
    for batch, truth in zip(serving.iterate(), ORIGINAL(loader), strict=True):
        assert why_other_batch(truth, batch) is None


# --- streams -----------------------------------------------------------------------------------------


class Poisoned(PinnedBuffers):
    """Page-locked memory whose old content is ruined as soon as it is given out again."""

    def room(self, shape, dtype):
        return super().room(shape, dtype).fill_(-5)


@pytest.fixture
def poisoned(monkeypatch):
    monkeypatch.setattr(feeds, "PinnedBuffers", Poisoned)
    monkeypatch.setattr(serving_feeds, "PinnedBuffers", Poisoned)


@pytest.fixture
def slow_copies(monkeypatch):
    """Every copy begins a millisecond late."""
    send = CudaCopier.send

    def late(copier, batch):
        with torch.cuda.stream(copier._stream):
            torch.cuda._sleep(MILLISECOND)
        return send(copier, batch)

    monkeypatch.setattr(CudaCopier, "send", late)


def wrongs(feed, sending, *, pinned, step, taken_on=lambda number: None, batches=100, size=64, features=2048):
    """How many numbers a script reads wrong, counted on the device; freed memory is poisoned at once."""
    device = sending.device
    count = batches * size - 17  # the last batch is shorter
    x, y = torch.arange(count * 8, dtype=torch.int32).reshape(count, 8).repeat(1, features // 8), torch.arange(count)
    truth, wrong = x.to(device), torch.zeros((), dtype=torch.int64, device=device)
    loader = loader_of(TensorDataset(x, y), batch_size=size, pin_memory=pinned)
    serving = served(loader, sending)
    serving.use(feed)
    main = torch.cuda.current_stream()
    for number, (a, b) in enumerate(serving.iterate()):
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
    answered, sending.answered = sending.answered, 0
    assert answered == 2 * batches
    serving.close()
    return int(wrong)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("step", [0, MILLISECOND], ids=["fast steps", "slow steps"])
@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_every_step_reads_its_own_batch(feed, step, pinned, sending):
    assert wrongs(feed, sending, pinned=pinned, step=step) == 0


@pytest.mark.usefixtures("poisoned", "slow_copies")
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("step", [0, MILLISECOND // 4], ids=["fast steps", "slower steps"])
def test_every_step_reads_its_own_batch_though_copies_are_late(step, pinned, sending):
    assert wrongs(STREAM, sending, pinned=pinned, step=step) == 0


@pytest.mark.usefixtures("poisoned", "slow_copies")
@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_a_script_that_sends_on_streams_of_its_own_reads_the_right_data_too(feed, sending):
    others = [torch.cuda.Stream(), torch.cuda.Stream()]
    for taken_on in (lambda n: others[0], lambda n: others[n % 2], lambda n: others[0] if n % 3 else None):
        for other in others:
            other.wait_stream(torch.cuda.current_stream())
        assert wrongs(feed, sending, pinned=True, step=MILLISECOND // 4, taken_on=taken_on, batches=40) == 0


def test_parts_of_a_resident_batch_that_are_sent_on_two_streams_are_both_right(sending, device):
    x = torch.arange(512 * 4096, dtype=torch.int32).reshape(512, 4096)
    loader = loader_of(TensorDataset(x, x + 1), batch_size=64, shuffle=False)
    serving, other = served(loader, sending), torch.cuda.Stream()
    serving.use(RESIDENT)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for a, b in serving.iterate():
        torch.cuda._sleep(MILLISECOND)
        there = a.to(device)
        with torch.cuda.stream(other):
            also = b.to(device)
            unlike = (also != 0).sum()  # reads it on the other stream, at once
            beside = also.clone()
        torch.cuda.current_stream().wait_stream(other)
        for tensor in (unlike, beside):
            tensor.record_stream(torch.cuda.current_stream())
        wrong += (beside != there + 1).sum()
    assert int(wrong) == 0
    assert sending.answered == 16


def test_batches_that_are_gathered_together_lie_apart_and_take_few_launches(sending, device, monkeypatch):
    asked, gather = [], Columns.gather

    def noted(columns, indices, room=None):
        asked.append(len(indices)) if indices.is_cuda else None
        return gather(columns, indices, room)

    monkeypatch.setattr(Columns, "gather", noted)
    loader = loader_of("subset", batch_size=4)
    serving = served(loader, sending)
    serving.use(RESIDENT)
    kept = [(x, y, x.to(device), y.to(device)) for x, y in serving.iterate()]
    assert asked == [4, 31 * 4, 19]  # the first alone, the rest of the first 32, and those after them
    assert sending.answered == 2 * len(loader)
    for x, y, there_x, there_y in kept:
        for here, there in ((x, there_x), (y, there_y)):
            assert torch.equal(there.cpu(), here)
            assert there.stride() == here.stride()
            assert there.untyped_storage().nbytes() == here.nbytes
            there.fill_(-1)  # must not be seen in another
    serving.close()


def test_batches_that_were_gathered_on_another_stream_or_in_another_mode_are_gathered_again(sending, device):
    loader = loader_of("tensors", batch_size=4)
    serving, other = served(loader, sending), torch.cuda.Stream()
    serving.use(RESIDENT)
    for number, (x, y) in enumerate(serving.iterate()):
        is_aside, is_inference = number % 5 == 2, number % 7 == 3
        with torch.cuda.stream(other if is_aside else torch.cuda.current_stream()), torch.inference_mode(is_inference):
            there, also = x.to(device), y.to(device)
            assert torch.equal(there.cpu(), x)
            assert torch.equal(also.cpu(), y)
        assert there.is_inference() == also.is_inference() == is_inference
    assert sending.answered == 2 * len(loader)
    serving.close()


def test_a_script_with_resident_batches_waits_for_nothing(sending, device):
    loader = loader_of("tensors", batch_size=32)
    serving = served(loader, sending)
    serving.use(RESIDENT)
    for x, y in serving.iterate():  # memory that is locked for the first time makes the driver wait
        x.to(device), y.to(device)
    torch.cuda.synchronize()
    with no_waiting():
        for x, y in serving.iterate():
            x.to(device).sum() + y.to(device).sum()
    assert sending.answered == 2 * 2 * len(loader)


# --- memory ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_a_script_that_keeps_its_batches_does_not_fill_the_gpu(feed, sending, device):
    x = torch.randn(4096, 4096)
    loader = loader_of(TensorDataset(x), batch_size=64)
    serving = served(loader, sending)
    serving.use(feed)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept = list(serving.iterate())
    assert len(kept) == 64
    assert torch.cuda.memory_allocated() - before <= (KEPT + 4) * 64 * 4096 * 4
    del kept
    assert torch.cuda.memory_allocated() == before
    serving.close()


@pytest.mark.parametrize("feed", [RESIDENT, STREAM], ids=str)
def test_batches_that_come_and_go_use_the_same_memory(feed, sending, device):
    x = torch.randn(4096, 4096)
    loader = loader_of(TensorDataset(x), batch_size=64)
    serving = served(loader, sending)
    serving.use(feed)
    for (batch,) in serving.iterate():
        batch.to(device).sum()
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    for (batch,) in serving.iterate():
        batch.to(device).sum()
    assert torch.cuda.memory_reserved() == held
    serving.close()


def test_what_is_held_on_the_gpu_is_let_go_of_with_the_feed(sending, device):
    loader = loader_of(TensorDataset(torch.randn(4096, 4096)))
    serving = served(loader, sending)
    before = torch.cuda.memory_allocated()
    serving.use(RESIDENT)
    assert torch.cuda.memory_allocated() >= before + 4096 * 4096 * 4
    assert serving.holding_s(RESIDENT) == 0.0
    serving.use(GATHER)
    serving.tidy()
    assert torch.cuda.memory_allocated() == before
    assert serving.holding_s(RESIDENT) > 0.0


def test_an_epoch_that_is_broken_off_gives_up_what_is_under_way(sending, device):
    loader = loader_of(TensorDataset(torch.randn(512, 4096)))
    serving = served(loader, sending)
    serving.use(STREAM)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        (batch,) = next(serving.iterate())
        assert torch.equal(batch.to(device).cpu(), batch)
    del batch
    assert torch.cuda.memory_allocated() == before
    serving.close()


def test_data_that_does_not_fit_is_not_held(sending, device):
    loader = DataLoader(TensorDataset(torch.empty(1, 2**20).expand(2**20, 2**20)), batch_size=1)
    assert "the data needs" in served(loader, sending).supports(RESIDENT)


def test_what_is_captured_gets_no_copy_of_ours(sending, device, monkeypatch):
    loader = loader_of("tensors", pin_memory=True)
    serving = served(loader, sending)
    serving.use(RESIDENT)
    x, _ = next(serving.iterate())
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert torch.equal(x.to(device).cpu(), x)
    assert sending.answered == 0
    assert torch.equal(x.to(device).cpu(), x)
    assert sending.answered == 1
