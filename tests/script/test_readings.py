"""Losses read by way of early copies: the same numbers, and torch's own answer wherever something is odd."""

import functools

import pytest
import torch
from calling import CAPTURED, CPU, FakeRecorder, net
from torch import Tensor, nn

from hotlap.script.call_endings import Endings
from hotlap.script.calls import Call
from hotlap.script.readings import KEPT, MOST, SEEN, Readings


class Copied:
    """A place that says how often it was written to and read."""

    taken = read = 0

    def take(self, number):
        Copied.taken += 1
        self._number = number.detach().clone()

    def value(self):
        Copied.read += 1
        return self._number.tolist()


@pytest.fixture
def readings():
    before = Tensor.item, Tensor.__float__, Tensor.backward
    Copied.taken = Copied.read = 0
    made = Readings(CPU, Copied)
    endings = Endings(made)
    endings.put()
    made.use(early=True)
    yield made
    endings.take_out()
    made.close()
    assert (Tensor.item, Tensor.__float__, Tensor.backward) == before


def losses(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        weights = torch.randn(5, generator=generator, requires_grad=True)
        yield (weights * weights).sum()


def learned():
    for loss in losses(SEEN):
        loss.backward()
        loss.item()


def test_a_loss_that_is_read_behind_its_backward_pass_is_copied_before_it_from_then_on(readings):
    for number, loss in enumerate(losses(10)):
        own = loss.detach().clone().item()
        loss.backward()
        assert Copied.taken == max(0, number + 1 - SEEN)
        assert loss.item() == own
    assert readings.answered == Copied.read == 10 - SEEN


@pytest.mark.parametrize("read", [lambda loss: loss.item(), float, lambda loss: round(float(loss), 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_number_is_the_one_that_torch_gives(readings, read, dtype):
    learned()
    (loss,) = (loss.to(dtype) for loss in losses(1, seed=3))
    own = read(loss.detach().clone())
    loss.backward()
    found = read(loss)
    assert found == own
    assert type(found) is type(own)
    assert readings.answered == 1


@pytest.mark.parametrize("read", [lambda loss: loss.detach().item(), "{:.6f}".format, lambda loss: loss.tolist()])
def test_what_is_read_otherwise_is_read_by_torch(readings, read):
    learned()
    (loss,) = losses(1, seed=3)
    own = read(loss.detach().clone())
    loss.backward()
    assert read(loss) == own


def test_what_was_written_to_since_is_read_as_it_is_now(readings):
    learned()
    (loss,) = losses(1)
    own = loss.item()
    loss.backward()
    with torch.no_grad():
        loss.mul_(2)
    assert loss.item() == 2 * own
    assert readings.answered == 0


def test_a_second_reading_is_torchs_own(readings):
    learned()
    (loss,) = losses(1)
    loss.backward()
    assert loss.item() == loss.item()
    assert readings.answered == 1


def test_losses_that_are_read_later_keep_their_numbers(readings):
    """A GAN reads both of its losses at the end; what is read too late for its place is read by torch."""
    learned()
    kept = []
    for loss in losses(3 * KEPT):
        kept.append((loss, loss.detach().clone().item()))
        loss.backward()
    assert all(loss.item() == own for loss, own in kept)


@pytest.mark.parametrize("together", range(1, KEPT + 1))
def test_several_losses_of_a_step_are_all_copied(readings, together):
    every = list(losses(20 * together))
    for at in range(0, len(every), together):
        step = every[at : at + together]
        own = [loss.detach().clone().item() for loss in step]
        for loss in step:
            loss.backward()
        assert [loss.item() for loss in step] == own
    assert readings.answered >= (20 - SEEN) * together


def test_one_loss_that_is_never_read_takes_no_place_from_another(readings):
    learned()
    (unread,) = losses(1, seed=9)
    own = unread.detach().clone().item()
    unread.backward()
    for loss in losses(3 * KEPT):
        value = loss.detach().clone().item()
        loss.backward()
        assert loss.item() == value
    assert unread.item() == own


def test_where_losses_are_read_no_more_nothing_is_copied_any_more(readings):
    for loss in losses(2 * MOST):
        loss.backward()
        loss.item()
    copied = Copied.taken
    for loss in losses(100):
        loss.backward()
    assert Copied.taken - copied <= MOST - SEEN + KEPT


def test_a_loss_read_before_its_backward_pass_is_not_copied(readings):
    for loss in losses(20):
        loss.item()
        loss.backward()
    assert Copied.taken == 0


def test_other_tensors_are_torchs_own(readings):
    learned()
    (loss,) = losses(1)
    loss.backward()
    assert torch.tensor(3.5).item() == 3.5
    assert torch.tensor([2]).item() == 2
    assert float(torch.tensor(7)) == 7.0
    with pytest.raises(RuntimeError, match="cannot be converted"):
        torch.ones(2).item()
    assert readings.answered == 0


def test_a_mode_sees_every_reading(readings):
    from torch.overrides import TorchFunctionMode

    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function.__name__)
            return function(*args, **(kwargs or {}))

    learned()
    (loss,) = losses(1)
    loss.backward()
    with Mode():
        loss.item()
    assert "item" in seen


def test_a_tensor_that_takes_the_place_of_a_loss_in_memory_is_another(readings):
    learned()
    for _ in range(30):
        (loss,) = losses(1)
        loss.backward()
        del loss
        others = [torch.tensor(float(number)) for number in range(20)]
        assert [other.item() for other in others] == list(range(20))


def test_without_memory_that_is_page_locked_torch_reads(readings):
    def fails():
        raise RuntimeError("no more page-locked memory")

    readings._make_place = fails
    for loss in losses(10):
        own = loss.detach().clone().item()
        loss.backward()
        assert loss.item() == own
    assert readings.answered == 0


def test_nothing_is_copied_while_the_plan_is_another(readings):
    learned()
    readings.use(early=False)
    for loss in losses(3):
        loss.backward()
        loss.item()
    assert Copied.taken == 0
    readings.use(early=True)
    (loss,) = losses(1)
    loss.backward()
    assert loss.item() > 0
    assert readings.answered == 1


def test_a_training_of_captured_calls_reads_the_losses_of_a_plain_one(readings):
    def trained(call):
        torch.manual_seed(0)
        module = net()
        forward = call(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        generator, seen = torch.Generator().manual_seed(1), []
        for _ in range(30):
            x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(forward(x), y)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    def captured(module):
        call = Call(module, device=CPU, make_recorder=FakeRecorder)
        call.use(*CAPTURED)
        return lambda *args: call(functools.partial(nn.Module.__call__, module), args, {})

    first, answered = trained(lambda module: module), readings.answered
    assert trained(captured) == first
    assert readings.answered - answered == 30
