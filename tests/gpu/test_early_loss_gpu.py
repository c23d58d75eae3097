"""Losses read early on a real GPU: torch's own numbers, without waiting for what was asked for behind them."""

import functools
import threading
from collections import deque

import pytest
import torch
from torch import nn

from hotlap.core.plan import Execution, Numerics
from hotlap.script.calls.call import ModuleCall
from hotlap.script.calls.early_loss import MOST_KEPT_COPIES, SEEN_READS, EarlyLoss
from hotlap.script.calls.loss_replay import LossReplay

DEVICE = torch.device("cuda", 0)
LONG = 2_000_000_000
"""Ticks of the device's clock: about a second."""


@pytest.fixture
def early_loss():
    made = EarlyLoss(DEVICE)
    loss_replay = LossReplay(made)
    loss_replay.put()
    made.use(early=True)
    yield made
    loss_replay.take_out()
    made.close()


def losses(count, dtype=torch.float32):
    torch.manual_seed(0)
    for _ in range(count):
        weights = torch.randn(1000, device=DEVICE, dtype=dtype, requires_grad=True)
        yield (weights * weights).mean()


def kept_samples():
    for loss in losses(SEEN_READS):
        loss.backward()
        loss.item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_number_is_torchs_own(early_loss, dtype):
    kept_samples()
    for loss in losses(50, dtype):
        own = loss.detach().clone().item()
        loss.backward()
        assert loss.item() == own
    assert early_loss.answered == 50


def test_it_is_there_before_what_was_asked_for_behind_it(early_loss):
    kept_samples()
    (loss,) = losses(1)
    own = loss.detach().clone().item()
    loss.backward()
    torch.cuda._sleep(LONG)
    end = torch.cuda.Event()
    end.record()
    assert loss.item() == own
    is_done = end.query()
    torch.cuda.synchronize()
    assert early_loss.answered == 1
    assert not is_done


@pytest.mark.parametrize("is_scaled", [False, True])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_test_of_the_loss_is_answered_before_what_was_asked_for_behind_it(early_loss, is_scaled, value):
    """As the Trainer of transformers asks behind each backward pass."""
    scaler = torch.amp.GradScaler("cuda", enabled=is_scaled)
    for number, loss in enumerate(losses(10)):
        loss = loss + value
        own = loss.detach().clone().item()
        scaler.scale(loss).backward()
        detached = loss.detach()
        del loss
        torch.cuda._sleep(LONG // 4 if number == 9 else 1)
        end = torch.cuda.Event()
        end.record()
        is_odd = bool(torch.isnan(detached) or torch.isinf(detached))
        is_done = end.query()
        assert is_odd == (value != 0)
        assert detached.item() == own or own != own
    torch.cuda.synchronize()
    assert not is_done
    assert early_loss.answered >= 2 * (10 - SEEN_READS)


def test_losses_that_are_read_some_passes_late_keep_their_numbers(early_loss):
    """Their copies are still to come when the next losses are made, in memory that the last ones have left."""
    kept_samples()
    expected = [loss.item() for loss in losses(200)]
    torch.cuda._sleep(LONG // 4)
    found, waiting = [], deque()
    for loss in losses(200):
        loss.backward()
        waiting.append(loss)
        if len(waiting) == MOST_KEPT_COPIES:
            found.append(waiting.popleft().item())
    found += [loss.item() for loss in waiting]
    assert found == expected
    assert early_loss.answered == 200


def test_a_loss_of_another_stream_is_read_there_by_torch(early_loss):
    """Its backward pass was asked for on this one, which has not waited for it."""
    kept_samples()
    weights = torch.randn(1000, device=DEVICE, requires_grad=True)
    own = (weights * weights).mean().item()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG // 4)
        loss = (weights * weights).mean()
    loss.backward()
    with torch.cuda.stream(side):
        assert loss.item() == own
    assert early_loss.answered == 0


@pytest.mark.parametrize("is_filled", [False, True], ids=["sent", "filled"])
def test_what_is_sent_to_the_host_behind_the_backward_pass_is_there_once_the_loss_is_read(early_loss, is_filled):
    kept_samples()
    room = torch.empty(1000, dtype=torch.long, pin_memory=True)
    for number, loss in enumerate(losses(5), start=1):
        loss.backward()
        torch.cuda._sleep(LONG // 20)
        made = torch.full((1000,), number, device=DEVICE)
        sent = room.copy_(made, non_blocking=True) if is_filled else made.to("cpu", non_blocking=True)
        loss.item()
        assert sent.eq(number).all()


def test_a_time_between_events_can_be_asked_for_right_behind_a_reading(early_loss):
    kept_samples()
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    (loss,) = losses(1)
    begun.record()
    loss.backward()
    torch.cuda._sleep(LONG // 4)
    ended.record()
    loss.item()
    assert begun.elapsed_time(ended) > 50
    assert early_loss.answered == 1


def test_nothing_is_copied_while_somebody_captures(early_loss):
    kept_samples()
    weights = torch.randn(100, device=DEVICE, requires_grad=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        (weights * weights).mean().backward()
        weights.grad = None
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        loss = (weights * weights).mean()
        loss.backward()
    graph.replay()
    assert loss.item() == (weights * weights).mean().item()


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_training_reads_the_losses_of_a_plain_one(is_captured, early_loss):
    def trained(early):
        early_loss.use(early=early)
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5)).to(DEVICE)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        call = ModuleCall(module, device=DEVICE)
        if is_captured:
            call.use(Numerics(), Execution(mode="captured"))
        own, draw, seen = functools.partial(nn.Module.__call__, module), torch.Generator().manual_seed(1), []
        for _ in range(60):
            x = torch.randn(32, 20, generator=draw).to(DEVICE)
            y = torch.randint(5, (32,), generator=draw).to(DEVICE)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(call(own, (x,), {}), y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    plain, before = trained(early=False), early_loss.answered
    assert trained(early=True) == plain
    assert early_loss.answered - before >= 50


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream does not match")
def test_a_loss_in_the_memory_of_the_scripts_own_graph_is_read_as_it_is_now(early_loss):
    """Each replay writes to the same memory, which torch counts nowhere."""
    layer = nn.Linear(8, 1).to(DEVICE)

    class Lossy(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x).square().mean()

    model = torch.cuda.make_graphed_callables(Lossy(), (torch.zeros(4, 8, device=DEVICE),))
    kept_samples()
    for number in range(10):
        x = torch.full((4, 8), float(number), device=DEVICE)
        own = layer(x).square().mean().detach().clone()
        loss = model(x)
        seen = [loss.item(), float(torch.isnan(loss))]
        loss.backward()
        seen += [loss.item(), loss.detach().item()]
        torch.testing.assert_close(torch.tensor(seen), torch.tensor([own.item(), 0.0, own.item(), own.item()]))


def test_another_thread_reads_the_number_it_asks_for(early_loss):
    """While it waits, the thread that trains copies the next losses to the same place."""
    kept_samples()
    expected = [loss.item() for loss in losses(50)]
    torch.cuda._sleep(LONG // 4)
    found, threads = {}, []
    for number, loss in enumerate(losses(50)):
        loss.backward()
        read = functools.partial(lambda number, loss: found.update({number: loss.item()}), number, loss)
        threads.append(threading.Thread(target=read))
        threads[-1].start()
        del loss, read
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(50)] == expected


def test_pinned_memory_that_is_filled_anew_once_the_loss_was_read_has_been_sent_by_then(early_loss):
    room = torch.empty(1_000_000, pin_memory=True)
    for number, loss in enumerate(losses(12)):
        loss.backward()
        torch.cuda._sleep(LONG // 50)
        room.fill_(float(number))
        sent = room.to(DEVICE, non_blocking=True)
        loss.item()
        room.fill_(-1.0)
        assert sent.eq(number).all().item()


def test_a_loss_of_a_call_on_another_stream_is_read_by_torch(early_loss):
    """torch waits for that stream behind the backward pass; a copy before it would be of memory without a loss."""
    kept_samples()
    weights = torch.randn(1000, device=DEVICE, requires_grad=True)
    own, side = (weights * weights).mean().item(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        with torch.cuda.stream(side):
            early_loss.called()
            torch.cuda._sleep(LONG // 20)
            loss = (weights * weights).mean()
        loss.backward()
        torch.cuda.synchronize()
        assert loss.item() == own
    assert early_loss.answered == 0
